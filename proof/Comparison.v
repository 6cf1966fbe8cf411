(* Section 4 of docs/math.md, last part: what rounding does to the comparison by which a side is left, with
   the sum L e^M as computed. The tolerance holds up to a factor e^off with a small number `off` that neither
   the scores nor M enter: the added term of the bound, and the factor 1 - slack on m d, cover all that grows
   with them. *)
From Coq Require Import Reals Lra Lia List.
From Flocq Require Import Core.
From linbias Require Import Sums Certificate Rounding.
Import ListNotations.
Open Scope R_scope.

(* Exponents that are too small by a factor r. *)
Lemma shorter_exponents {A} (l : list A) (a : A -> R) r :
  0 <= r <= 1 -> 1 <= sum l (fun s => exp (a s)) ->
  sum l (fun s => exp (r * a s)) <= exp ((1 - r) * ln (INR (length l))) * sum l (fun s => exp (a s)).
Proof.
  intros Hr H. set (S := sum l (fun s => exp (a s))) in *. set (n := INR (length l)).
  assert (0 < n) as Pn by (apply lt_0_INR; destruct l; cbn in *; [unfold S in H; cbn in H; lra | lia]).
  pose proof (ln_le' 1 S ltac:(lra) H) as LS. rewrite ln_1 in LS. set (t := ln S - ln n).
  apply Rle_trans with (sum l (fun s => exp (r * t) * ((1 - r) + r * exp (- t) * exp (a s)))).
  - apply sum_le. intros s _. replace (r * a s) with (r * t + r * (a s - t)) by ring. rewrite exp_plus.
    apply Rmult_le_compat_l; [left; apply exp_pos|]. rewrite Rmult_assoc, <- exp_plus.
    pose proof (exp_convex r 0 (a s - t) Hr) as C. rewrite Rmult_0_r, Rplus_0_l, exp_0, Rmult_1_r in C.
    replace (- t + a s) with (a s - t) by ring. exact C.
  - rewrite sum_scale, sum_plus, sum_const, sum_scale. fold S n. assert (exp (- t) * S = n) as E.
    { rewrite <- (exp_ln S) at 1 by lra. rewrite <- exp_plus.
      replace (- t + ln S) with (ln n) by (unfold t; ring). now apply exp_ln. }
    replace (n * (1 - r) + r * exp (- t) * S) with (n * (1 - r) + r * (exp (- t) * S)) by ring. rewrite E.
    replace (n * (1 - r) + r * n) with n by ring. rewrite <- (exp_ln n Pn) at 1. rewrite <- (exp_ln S) by lra.
    rewrite <- !exp_plus. apply exp_le. unfold t. times (1 - r) LS. lra.
Qed.

Section Comparison.
Variables (F : format) (Key : Type).
Notation u := (u F).
Notation eta := (eta F).

Variables (z z' : Key -> R) (e_exp : R).  (* exact and computed scores; the relative error of exp *)
Hypothesis e_exp_pos : 0 <= e_exp.

(* A sum of exp (z_s - M) as the online softmax has it, in any order: of at most h additions in a chain, and b
   changes of M that rescale what was summed before. The difference is rounded once, and exp may round its
   argument twice. What underflow adds, at most a few n b eta for n keys, counts to e_log below. *)
Inductive summed : nat -> nat -> list Key -> R -> R -> Prop :=
  | weight h b s M c : z' s <= M -> 0 <= c <= (1 + e_exp) * exp ((1 - 3 * u) * (z' s - M)) ->
      summed h b [s] M c
  | added h b l l' M c c' x : summed h b l M c -> summed h b l' M c' -> 0 <= x <= (1 + u) * (c + c') ->
      summed (S h) b (l ++ l') M x
  | rescaled h b l M M' c f x : summed h b l M c -> M <= M' ->
      0 <= f <= (1 + e_exp) * exp ((1 - 3 * u) * (M - M')) -> 0 <= x <= (1 + u) * (c * f) ->
      summed h (S b) l M' x.

Definition off_sum (h b : nat) : R := (INR h + INR b) * u + (INR b + 1) * e_exp.

(* The computed sum is too large by at most a factor exp off_sum, and exponents are off by 3 u. *)
Theorem sum_of_weights h b l M L : summed h b l M L ->
  (forall s, In s l -> z' s <= M) /\
  0 <= L <= exp (off_sum h b) * sum l (fun s => exp ((1 - 3 * u) * (z' s - M))).
Proof.
  pose proof (u_range F) as U. pose proof (exp_ineq1_le u) as Exu. pose proof (exp_ineq1_le e_exp) as Exe.
  induction 1 as [h b s M c Le C|h b l l' M c c' x H IH H' IH' C|h b l M M' c f x H IH Le Cf C].
  - split; [intros s' [<-|[]]; auto|]. split; [lra|]. eapply Rle_trans; [apply C|]. cbn. rewrite Rplus_0_r.
    apply Rmult_le_compat_r; [left; apply exp_pos|]. eapply Rle_trans; [exact Exe|]. apply exp_le.
    unfold off_sum. pose proof (pos_INR h). pose proof (pos_INR b). nonneg ((INR h + INR b) * u).
    nonneg (INR b * e_exp). lra.
  - destruct IH as (A & P & Q). destruct IH' as (A' & P' & Q'). rewrite sum_app.
    split; [intros s I; apply in_app_or in I; destruct I; auto|]. split; [lra|].
    replace (off_sum (S h) b) with (u + off_sum h b) by (unfold off_sum; rewrite S_INR; ring).
    rewrite exp_plus, Rmult_assoc. eapply Rle_trans; [apply C|]. apply Rmult_le_compat; lra.
  - destruct IH as (A & P & Q). split; [intros s I; specialize (A s I); lra|]. split; [lra|].
    replace (off_sum h (S b)) with (u + (off_sum h b + e_exp)) by (unfold off_sum; rewrite S_INR; ring).
    rewrite !exp_plus, Rmult_assoc. eapply Rle_trans; [apply C|].
    apply Rmult_le_compat; try (lra || apply Rmult_le_pos; lra).
    rewrite (sum_ext l _ (fun s => exp ((1 - 3 * u) * (M - M')) * exp ((1 - 3 * u) * (z' s - M)))), sum_scale
      by (intros; rewrite <- exp_plus; f_equal; ring).
    set (W := sum l _) in *. set (E := exp ((1 - 3 * u) * (M - M'))) in *. assert (0 < E) by apply exp_pos.
    times E Exe.
    replace (exp (off_sum h b) * exp e_exp * (E * W)) with (exp (off_sum h b) * W * (exp e_exp * E)) by ring.
    apply Rmult_le_compat; lra.
Qed.

(* What is compared, L e^M, is at most the exact sum over the keys kept but for a small factor, where computed
   scores are too large by at most a and a few u of their size. M is one of them. *)
Theorem sum_from_below h b l M L a N :
  summed h b l M L -> INR (length l) <= N -> (exists s, In s l /\ z' s = M) ->
  (forall s, In s l -> z' s <= z s + a + 31 / 10 * u * Rabs (z' s)) ->
  L * exp M <= exp (off_sum h b + 7 * u * ln N + a + 31 / 10 * u * Rabs M) * sum l (fun s => exp (z s)).
Proof.
  intros C HN (top & It & Et) Sc. destruct (sum_of_weights _ _ _ _ _ C) as (Le & _ & Q).
  pose proof (u_range F) as U. set (n := INR (length l)) in *.
  assert (1 <= n) as N1 by (apply (le_INR 1); destruct l; [destruct It | cbn; lia]).
  set (w := 1 + 31 / 10 * u). set (r := (1 - 3 * u) * / w). set (S := sum l (fun s => exp (w * (z' s - M)))).
  assert (r * w = 1 - 3 * u) as Rw by (unfold r, w; field; lra). assert (1 - 61 / 10 * u <= r <= 1) as Hr.
  { assert (0 < w) as Pw by (unfold w; lra).
    split; apply Rmult_le_reg_r with w; auto; rewrite Rw; unfold w; nra. }
  assert (1 <= S) as S1.
  { unfold S. destruct (in_split _ _ It) as (l1 & l2 & ->). rewrite sum_app. cbn.
    rewrite Et, Rminus_diag_eq, Rmult_0_r, exp_0 by reflexivity.
    assert (forall l, 0 <= sum l (fun s => exp (w * (z' s - M)))) as P
      by (intros; apply sum_nonneg; intros; left; apply exp_pos).
    pose proof (P l1). pose proof (P l2). lra. }
  pose proof (shorter_exponents l (fun s => w * (z' s - M)) r ltac:(lra) S1) as Sh. fold S n in Sh.
  rewrite (sum_ext l _ (fun s => exp ((1 - 3 * u) * (z' s - M)))) in Sh
    by (intros; rewrite <- Rw; f_equal; ring).
  pose proof (ln_le' 1 n ltac:(lra) N1) as Ln. rewrite ln_1 in Ln.
  pose proof (ln_le' n N ltac:(lra) HN) as LN. set (c := 7 * u * ln N).
  assert (exp ((1 - r) * ln n) <= exp c) as Er by (apply exp_le, Rmult_le_compat; lra).
  set (t := a + 31 / 10 * u * Rabs M - M). assert (S <= exp t * sum l (fun s => exp (z s))) as SZ.
  { rewrite <- sum_scale. apply sum_le. intros s I. rewrite <- exp_plus. apply exp_le. specialize (Sc s I).
    specialize (Le s I). assert (Rabs (z' s) <= Rabs M + (M - z' s)) as B
      by (unfold Rabs; repeat destruct Rcase_abs; lra).
    times u B. unfold w, t. lra. }
  apply Rle_trans with (exp (off_sum h b) * (exp c * S) * exp M).
  - apply Rmult_le_compat_r; [left; apply exp_pos|]. eapply Rle_trans; [exact Q|].
    apply Rmult_le_compat_l; [left; apply exp_pos|].
    eapply Rle_trans; [exact Sh | apply Rmult_le_compat_r; lra].
  - replace (off_sum h b + c + a + 31 / 10 * u * Rabs M) with (M + (off_sum h b + (c + t)))
      by (unfold t; ring).
    rewrite (Rmult_comm _ (exp M)), !exp_plus, !Rmult_assoc.
    do 3 (apply Rmult_le_compat_l; [left; apply exp_pos|]). exact SZ.
Qed.

(* A computed score p' - m d of a key: how far it is off, and how large it is at most. *)
Lemma score_error p p' bias bias' x' e :
  Rabs (p' - p) <= e -> 0 <= bias -> 0 <= bias' -> Rabs (bias' - bias) <= 2 * u * bias + eta ->
  Rabs (x' - (p' - bias')) <= u * Rabs (p' - bias') + eta ->
  x' <= p - bias + e + 21 / 10 * u * (Rabs p + e) + 31 / 10 * u * Rabs x' + 4 * eta /\
  x' <= 1001 / 1000 * (Rabs p + e) + eta.
Proof.
  intros P Pb B0 B X. pose proof (u_range F) as U. pose proof (eta_range F) as Eta.
  set (x := p' - bias') in *. pose proof (Rabs_off p' p) as P'. pose proof (Rabs_off x x') as X'.
  rewrite Rabs_minus_sym in X'. pose proof (Rle_abs p') as A1. pose proof (Rle_abs x) as A2.
  pose proof (Rle_abs (- x)) as A3. rewrite Rabs_Ropp in A3.
  assert (forall y, 0 <= y -> 0 <= u * y <= / 1000 * y) as Us
    by (intros; split; [apply Rmult_le_pos | apply Rmult_le_compat_r]; lra).
  apply Rabs_le_inv in B. assert (Rabs p' <= Rabs p + e) as P2 by lra.
  assert (Rabs x <= Rabs x' + (u * Rabs x + eta)) as X2 by lra. destruct (Us _ (Rabs_pos x)).
  destruct (Us _ (Rabs_pos p')). destruct (Us _ (Rabs_pos x')). destruct (Us _ (proj1 Eta)).
  destruct (Us _ Pb) as [Ub0 Ub1]. destruct (Us _ Ub0) as [_ Ub2]. destruct (Us _ H). times u P2. times u X2.
  assert ((1 - 2 * u) * bias <= Rabs p' + Rabs x + eta) as B2 by (unfold x in *; lra). times u B2.
  pose proof (Rabs_pos p'). apply Rabs_le_inv in P, X. split; [unfold x in *; lra|].
  assert (x <= Rabs p') as X3 by (unfold x; lra). times u X3.
  destruct (Rle_lt_dec 0 x) as [S|S];
    [rewrite (Rabs_right x) in * by lra | rewrite (Rabs_left x) in * by lra]; lra.
Qed.

(* tail <= log share + (M + log L), its sums bracketed in any way: as written for PyTorch, or as in the
   compiled core, where far counts the keys and log share stands on the other side. *)
Definition compared (base far step count share M log_L : R) : Prop :=
  exists tail allowed, tail <= allowed /\
    (computed F 3 [(base, 1); (far, 1); (- step, 1); (count, 1)] tail /\
     computed F 2 [(share, 1); (M, 1); (log_L, 1)] allowed \/
     count = 0 /\ computed F 3 [(base, 1); (far, 1); (- step, 1); (- share, 1)] tail /\
     computed F 2 [(M, 1); (log_L, 1)] allowed).

Lemma compared_exactly base far step count share M log_L : compared base far step count share M log_L ->
  base + far - step + count - (share + (M + log_L))
  <= 301 / 100 * u * (Rabs base + Rabs far + Rabs step + Rabs count + Rabs share)
     + 201 / 100 * u * (Rabs share + (Rabs M + Rabs log_L)) + 14 * eta.
Proof.
  intros (tail & allowed & Le & C). pose proof (u_range F) as U. pose proof (eta_range F) as Eta.
  assert (growth F 3 <= 301 / 100 * u /\ growth F 2 <= 201 / 100 * u) as (G3 & G2)
    by (unfold growth; cbn; split; nra).
  assert (forall n l x g, computed F n l x -> growth F n <= g -> g <= 1 -> let e := g * magnitude l
            + 2 * (INR (length l) * eta) in - e <= x - exact l <= e) as E.
  { intros n l x g C' G G1. apply Rabs_le_inv.
    eapply Rle_trans; [apply (sum_of_products F 0 ltac:(cbn; lra) _ _ _ C')|].
    pose proof (Rle_trans _ _ _ (Rabs_pos _) (exact_magnitude l)). pose proof (pos_INR (length l)).
    nonneg (INR (length l) * eta). assert (growth F n <= 1) as G2' by lra. times (INR (length l) * eta) G2'.
    times (magnitude l) G. lra. }
  assert (forall y, 0 <= u * Rabs y) as Pu by (intros; apply Rmult_le_pos; [lra | apply Rabs_pos]).
  pose proof (Pu count). pose proof (Pu share).
  destruct C as [[L R]|(-> & L & R)]; apply E with (2 := G3) in L; try lra; apply E with (2 := G2) in R;
    try lra; unfold exact, magnitude in L, R; cbn in L, R; rewrite ?Rmult_1_r, ?Rabs_Ropp in L;
    rewrite ?Rmult_1_r in R; lra.
Qed.

(* How many nats the comparison is off. *)
Definition off (h b : nat) (e_log e_count N tolerance v : R) : R :=
  off_sum h b + e_log + e_count + u * (23 * ln N + 7 * Rabs (ln tolerance) + 16) + 8 * v.

(* Section 3 with all roundings: what is dropped is at most tolerance e^off of what is kept. X is that of
   `base_with_slack`. h and b count the additions and rescalings of L, of at most N keys; e_exp is the
   relative error of exp, e_log and e_count are the absolute ones of log L and of the log of the number of
   keys, and v stands for underflow. The spare part of the bound, R = 2 D + 72/5 - n (`base_with_slack`),
   exceeds what the scores need, E = n' + 12/5 (`score_error` with `product_error`), by what the comparison
   needs, for chains n, n' <= D + 1. *)
Theorem stop_with_rounding (kept dropped : list Key) h b M L N
    (base far rest step bias count share log_L e_log e_count tolerance X E R v : R) :
  summed h b kept M L -> INR (length kept) <= N ->
  (exists s, In s kept /\ z' s = M) ->
  (forall s, In s kept -> z' s <= z s + (E * (u * X) + v) + 31 / 10 * u * Rabs (z' s) /\
                          z' s <= 101 / 100 * X + v) ->
  sum dropped (fun s => exp (z s)) <= exp (base + rest - R * (u * X) - bias + v) ->
  rest <= far + count + u * X + e_count + v ->
  Rabs base + Rabs far + Rabs count <= 102 / 100 * X + ln N + 1 + v ->
  0 <= bias -> 0 <= step <= (1 - 12 * u) * bias + v ->
  0 < L -> log_L <= ln L + e_log -> Rabs log_L <= ln N + 1 ->
  0 < tolerance <= 1 -> Rabs (share - ln tolerance) <= u * Rabs (ln tolerance) + v -> 14 * eta <= v ->
  0 <= X -> E + 19 / 2 <= R -> compared base far step count share M log_L ->
  sum dropped (fun s => exp (z s))
  <= tolerance * exp (off h b e_log e_count N tolerance v) * sum kept (fun s => exp (z s)).
Proof.
  intros HS HN (top & It & Et) Sc Dr Rest Mag Pb St PL Lo La Pt Sh Pv PX Er C. apply compared_exactly in C.
  pose proof (u_range F) as U. pose proof (eta_range F) as Eta.
  pose proof (sum_from_below h b kept M L _ N HS HN (ex_intro _ top (conj It Et))
                (fun s I => proj1 (Sc s I))) as K.
  assert (1 <= INR (length kept)) as N1 by (apply (le_INR 1); destruct kept; [destruct It | cbn; lia]).
  pose proof (ln_le' 1 N ltac:(lra) ltac:(lra)) as LN.
  pose proof (ln_le' tolerance 1 ltac:(lra) ltac:(lra)) as Lt. rewrite ln_1 in LN, Lt.
  set (t := Rabs (ln tolerance)) in *.
  assert (ln tolerance = - t) as Tt by (unfold t; rewrite Rabs_left1; lra).
  assert (0 <= t) as T0 by apply Rabs_pos. rewrite Tt in Sh. apply Rabs_le_inv in Sh. set (l := ln N) in *.
  rewrite (Rabs_right step) in C by lra. assert (Rabs share <= 1001 / 1000 * t + v) as Ash.
  { times t (proj2 U). apply Rabs_le. lra. }
  assert (forall y, 0 <= y -> 0 <= u * y <= / 1000 * y) as Us
    by (intros; split; [apply Rmult_le_pos | apply Rmult_le_compat_r]; lra).
  pose proof (Rle_abs (- base)) as A1. pose proof (Rle_abs (- far)) as A2.
  pose proof (Rle_abs (- count)) as A3. pose proof (Rle_abs log_L) as A4. rewrite Rabs_Ropp in A1, A2, A3.
  pose proof (Rabs_pos base). pose proof (Rabs_pos far). pose proof (Rabs_pos count). destruct (Us X PX).
  destruct (Us l LN). destruct (Us t T0). destruct (Us v ltac:(lra)). destruct (Us bias Pb) as [b0 b1].
  destruct (Us (Rabs M) (Rabs_pos M)). destruct (Us _ b0). times u Mag. times u Ash. times u La.
  times u (proj2 St).
  assert (Rabs M <= 104 / 100 * X + 21 / 10 * l + 21 / 10 + 5 * v + 102 / 100 * bias + / 100 * t) as AM.
  { destruct (Rle_lt_dec 0 M) as [P|P].
    - rewrite (Rabs_right M) by lra. destruct (Sc top It) as [_ Z]. rewrite Et in Z. lra.
    - rewrite (Rabs_left M) in * by lra. lra. }
  times u AM. set (o := off_sum h b + 7 * u * l + (E * (u * X) + v) + 31 / 10 * u * Rabs M) in *.
  set (g := off h b e_log e_count N tolerance v). eapply Rle_trans; [exact Dr|].
  apply Rle_trans with (exp (ln tolerance + g - o) * (L * exp M)).
  - rewrite <- (exp_ln L) at 1 by lra. rewrite <- !exp_plus. apply exp_le. unfold g, o, off. fold l t.
    times (u * X) Er. lra.
  - eapply Rle_trans; [apply Rmult_le_compat_l; [left; apply exp_pos | exact K]|].
    rewrite <- Rmult_assoc, <- exp_plus. replace (ln tolerance + g - o + o) with (ln tolerance + g) by ring.
    rewrite exp_plus, exp_ln; lra.
Qed.

End Comparison.
