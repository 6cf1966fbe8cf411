(* A sequence in shards on several processes (docs/guides/many-machines.md, torch.context_parallel), and
   parts of the keys merged (linbias.torch.merge). Each process tells a ball that its keys lie in; a head
   fetches the keys of others within a halo. Proved: a halo that the certificate calls enough is enough, parts
   merged by lse are the whole, and a merge loses no larger share than its parts. *)
From Coq Require Import Reals Lra Lia List.
From linbias Require Import Sums Certificate Weights Points.
Open Scope R_scope.

(* A ball around c' lies in a ball around c whose radius is larger by the distance of c and c'. *)
Theorem ball_of_balls D k c c' r : norm D (minus k c') <= r -> norm D (minus k c) <= norm D (minus c' c) + r.
Proof.
  set (x := minus c' c). set (y := minus k c'). set (z := minus k c). intros R.
  assert (forall u, dot D z u <= norm D z * norm D u) as C
    by (intros; eapply Rle_trans; [apply Rle_abs | apply Cauchy_Schwarz]).
  pose proof (sqrt_sqrt _ (dot_self D z)) as S. fold (norm D z) in S. specialize (C x) as Cx. specialize (C y).
  replace (dot D z z) with (dot D z x + dot D z y) in S by (unfold x, y, z, minus; by_entries).
  pose proof (norm_nonneg D x). pose proof (norm_nonneg D y).
  destruct (norm_nonneg D z) as [P| <-]; [apply Rmult_le_reg_l with (norm D z)|]; nra.
Qed.

(* The keys that a row does not fetch on one side lie in a ball, at distances of d or more. They weigh at most
   as `count` of the nearest: their number (at given positions, keys_within) or, where they are counted, the
   geometric sum. A row lies `inwards` keys from the edge of its shard. The code takes the least halo that
   serves; its lse is at most the row's. *)
Theorem halo_is_enough {Key} D k q c a r m share lse d count (far : Key -> R) unfetched :
  0 < m -> 0 < share -> 0 < count ->
  (forall s, In s unfetched -> norm D (minus (k s) c) <= r /\ d <= far s) ->
  INR (length unfetched) <= count \/
  (1 / (1 - exp (- m)) <= count /\ exists inwards halo distance, d = INR (inwards + 1 + halo) /\
   NoDup (map distance unfetched) /\ forall s, In s unfetched -> far s = INR (distance s)) ->
  (a * dot D q c + Rabs a * norm D q * r + ln count - lse - ln share) / m <= d ->
  sum unfetched (fun s => exp (a * dot D q (k s) - m * far s)) <= share * exp lse.
Proof.
  intros M S P Far Count H. set (A := a * dot D q c + Rabs a * norm D q * r) in *.
  assert (forall s, In s unfetched -> a * dot D q (k s) - m * far s <= A - m * far s) as B.
  { intros s I. unfold A. pose proof (key_bound D a q (k s) c). destruct (Far s I) as [R _].
    pose proof (Rmult_le_compat_l _ _ _ (Rmult_le_pos _ _ (Rabs_pos a) (norm_nonneg D q)) R). lra. }
  apply Rle_trans with (exp (A - m * d) * count).
  - destruct Count as [C|(C & i & h & distance & -> & N & F)];
      (eapply Rle_trans; [|apply Rmult_le_compat_l, C; left; apply exp_pos]).
    + rewrite Rmult_comm, <- sum_const. apply sum_le. intros s I. apply exp_le. specialize (B s I).
      destruct (Far s I). nra.
    + apply (tail_bound unfetched _ distance); auto; [lra | |]; intros s I; [apply INR_le|];
        rewrite <- (F s I); [apply Far, I | auto].
  - apply (Rmult_le_compat_r m) in H; [|lra]. unfold Rdiv in H. rewrite Rmult_assoc, Rinv_l in H by lra.
    rewrite <- (exp_ln count P), <- (exp_ln share), <- !exp_plus by auto. apply exp_le. lra.
Qed.

(* Half of the tolerance is for keys not fetched, half for those not read: together eps <= tolerance. *)
Theorem shares_lose_little {Key} (e : Key -> R) kept unread unfetched lse tolerance :
  (forall s, 0 <= e s) -> 0 <= tolerance -> exp lse <= sum kept e + sum unread e ->
  sum unfetched e <= tolerance / 2 * exp lse -> sum unread e <= tolerance / 2 * sum kept e ->
  let dropped := unread ++ unfetched in sum dropped e <= tolerance * (sum kept e + sum dropped e).
Proof.
  intros P T L A B dropped. unfold dropped. rewrite sum_app.
  pose proof (sum_nonneg unread e ltac:(auto)). pose proof (sum_nonneg unfetched e ltac:(auto)). nra.
Qed.

(* Where each part loses at most `tolerance` of what it has itself, so does what they are merged to. *)
Theorem merged_loses_as_little {Key Part} (e : Key -> R) parts (kept dropped : Part -> list Key) tolerance :
  (forall i, In i parts -> sum (dropped i) e <= tolerance * (sum (kept i) e + sum (dropped i) e)) ->
  let lost := flat_map dropped parts in sum lost e <= tolerance * (sum (flat_map kept parts) e + sum lost e).
Proof. intros H. cbv zeta. rewrite !sum_flat_map, <- sum_plus, <- sum_scale. now apply sum_le. Qed.

(* Merged by lse = log sum exp (lse_i) and out = sum exp (lse_i - lse) out_i, with any pivot, parts are the
   softmax over all keys. lse_i is None, minus infinity, where the row saw no key of part i. *)
Definition weight (x : option R) pivot : R := match x with Some x => exp (x - pivot) | None => 0 end.
Theorem merged_is_whole {Key Part} (e v : Key -> R) (keys : Part -> list Key) parts lse out pivot :
  (forall i, weight (lse i) 0 = sum (keys i) e /\
             out i * sum (keys i) e = sum (keys i) (fun s => e s * v s)) ->
  let all := flat_map keys parts in let total := sum parts (fun i => weight (lse i) pivot) in
  total = exp (- pivot) * sum all e /\
  (0 < sum all e -> pivot + ln total = ln (sum all e) /\
     sum parts (fun i => weight (lse i) pivot / total * out i) = sum all (fun s => e s * v s) / sum all e).
Proof.
  intros H all total. pose proof (exp_pos (- pivot)).
  assert (forall i, weight (lse i) pivot = exp (- pivot) * sum (keys i) e) as W.
  { intros i. rewrite <- (proj1 (H i)). destruct (lse i); cbn; [rewrite <- exp_plus; f_equal|]; ring. }
  assert (total = exp (- pivot) * sum all e) as T.
  { unfold total, all. rewrite sum_flat_map, <- sum_scale. now apply sum_ext. }
  split; auto. intros P. split; [rewrite T, ln_mult, ln_exp by auto; ring|].
  rewrite (sum_ext _ _ (fun i => / sum all e * sum (keys i) (fun s => e s * v s))).
  - rewrite sum_scale. unfold all at 2. rewrite sum_flat_map. field. lra.
  - intros i _. rewrite W, T, <- (proj2 (H i)). field. lra.
Qed.
