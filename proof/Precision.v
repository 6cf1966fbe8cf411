(* Section 11 of docs/math.md: blocks of bounded share, computed in fewer bfloat16 terms. z are a row's exact
   scores and z' those that its softmax is of, or the other way round, and E is at least |z' - z|. *)
From Coq Require Import Reals Lra Lia List.
From Flocq Require Import Core.
From linbias Require Import Sums Certificate Backward.
Import ListNotations.
Open Scope R_scope.

Section Softmax.
Context {Key : Type}.
Variable keys : list Key.
Hypothesis some_key : keys <> [].

Definition Z (z : Key -> R) : R := sum keys (fun s => exp (z s)).
Definition average (z v : Key -> R) : R := sum keys (fun s => exp (z s) * v s) / Z z.
Definition factor (z E : Key -> R) : R := average z (fun s => exp (E s)).

Lemma Z_pos z : 0 < Z z.
Proof.
  destruct keys as [|s l] eqn:K; [easy|]. apply Rlt_le_trans with (exp (z s)); [apply exp_pos|].
  apply (sum_member _ (fun s => exp (z s))); unfold Z; rewrite ?K; [now left | intros; left; apply exp_pos].
Qed.

Lemma average_of z h a f b g c : (forall s, h s = a * f s + b * g s + c) ->
  average z h = a * average z f + b * average z g + c.
Proof.
  intros H. pose proof (Z_pos z). unfold average. rewrite (sum_ext _ _ (fun s => a * (exp (z s) * f s)
    + (b * (exp (z s) * g s) + c * exp (z s)))) by (intros; rewrite H; ring).
  rewrite !sum_plus, !sum_scale. fold (Z z). field. lra.
Qed.

Lemma average_le z f g : (forall s, In s keys -> f s <= g s) -> average z f <= average z g.
Proof.
  intros H. apply Rmult_le_compat_r; [left; apply Rinv_0_lt_compat, Z_pos|]. apply sum_le. intros s I.
  apply Rmult_le_compat_l; [left; apply exp_pos | auto].
Qed.

Lemma average_const z c : average z (fun _ => c) = c.
Proof. rewrite (average_of z _ 0 (fun _ => 0) 0 (fun _ => 0) c); intros; ring. Qed.

Section Close.
Variables z z' E : Key -> R.
Hypothesis close : forall s, In s keys -> Rabs (z' s - z s) <= E s.

Let x (s : Key) : R := exp (E s).
Let r (s : Key) : R := exp (z' s - z s).
Local Notation X := (factor z E).
Let ratio := average z r.

Lemma ratio_is : ratio = Z z' / Z z /\ forall f, average z (fun s => r s * f s) = ratio * average z' f.
Proof.
  assert (forall s, exp (z s) * r s = exp (z' s)) as M
    by (intros s; unfold r; rewrite <- exp_plus; f_equal; ring). assert (ratio = Z z' / Z z) as R by (unfold ratio, average; f_equal; apply sum_ext; intros; apply M).
  split; [exact R|]. intros f. pose proof (Z_pos z). pose proof (Z_pos z'). rewrite R. unfold average.
  rewrite (sum_ext _ _ (fun s => exp (z' s) * f s)) by (intros; rewrite <- M; ring). field. lra.
Qed.

Lemma of_key s : In s keys -> 0 < r s <= x s /\ 1 <= x s /\ 0 <= X * X * r s - 2 * X + x s.
Proof.
  intros I. specialize (close s I). pose proof (Rabs_pos (z' s - z s)). apply Rabs_le_inv in close.
  assert (1 <= r s * x s) as A by (unfold r, x; rewrite <- exp_plus, <- exp_0; apply exp_le; lra).
  assert (0 < r s) by apply exp_pos. pose proof (Rle_0_sqr (X * r s - 1)) as Sq. unfold Rsqr in Sq.
  repeat split; [auto | apply exp_le; lra | unfold x; rewrite <- exp_0; apply exp_le; lra|].
  apply Rmult_le_reg_l with (r s); nra.
Qed.

Lemma ranges : 1 <= X /\ ratio <= X /\ 1 <= X * ratio.
Proof.
  assert (1 <= X) as X1 by (rewrite <- (average_const z 1); apply average_le; intros; now apply of_key).
  repeat split; [auto | apply average_le; intros; now apply of_key |]. apply Rmult_le_reg_l with X; [lra|].
  assert (0 <= average z (fun s => X * X * r s + 1 * x s + - 2 * X)) as P.
  { rewrite <- (average_const z 0). apply average_le. intros s I. destruct (of_key s I). lra. }
  rewrite (average_of z _ (X * X) r 1 x (- 2 * X)) in P by (intros; ring).
  change (average z x) with X in P. fold ratio in P. lra.
Qed.

Theorem lse_of_close_scores : Rabs (ln (Z z') - ln (Z z)) <= ln X.
Proof.
  destruct ranges as (X1 & U & L), ratio_is as (R & _). pose proof (Z_pos z). pose proof (Z_pos z').
  assert (0 < ratio) as R0 by (rewrite R; now apply Rdiv_lt_0_compat).
  replace (ln (Z z') - ln (Z z)) with (ln ratio)
    by (rewrite R; unfold Rdiv; rewrite ln_mult, ln_Rinv by auto using Rinv_0_lt_compat; ring).
  apply ln_le' in L, U; try lra. rewrite ln_mult, ln_1 in L by lra. apply Rabs_le. lra.
Qed.

Theorem output_of_close_scores v low high : (forall s, In s keys -> low <= v s <= high) ->
  Rabs (average z' v - average z v) <= (X - 1) * (high - low).
Proof.
  intros V. set (o := average z v). set (h := high - low). destruct ranges as (X1 & _ & L).
  assert (low <= o <= high) as O by (rewrite <- (average_const z low), <- (average_const z high);
    split; apply average_le; intros; now apply V).
  assert (forall a, a = 1 \/ a = -1 -> a * (average z' v - o) <= (X - 1) * h) as B.
  { intros a Ha. assert (average z (fun s => a * X * (r s * (v s - o)) + - (a * X) * v s + a * X * o)
      <= average z (fun s => h * (X * (X - 1)) * r s + h * x s + h * - X)) as A.
    { apply average_le. intros s I. destruct (of_key s I) as (R & x1 & Q). specialize (V s I).
      assert (a * (r s - 1) * (v s - o) <= h * Rabs (r s - 1)) as B
        by (unfold h, Rabs; destruct (Rcase_abs _), Ha; subst a; nra).
      assert (X * Rabs (r s - 1) <= X * (X - 1) * r s + x s - X) as C.
      { pose proof (Rmult_le_pos _ _ (Rle_0_sqr (X - 1)) (Rlt_le _ _ (proj1 R))) as Sq. unfold Rsqr in Sq.
        unfold Rabs. destruct (Rcase_abs _); lra. }
      apply (Rmult_le_compat_l X) in B; [|lra]. apply (Rmult_le_compat_l h) in C; unfold h in *; lra. }
    rewrite !(average_of z _ _ _ _ _ _ (fun s => eq_refl)), (proj2 ratio_is),
      (average_of z' _ 1 v 0 v (- o)) in A by (intros; ring).
    fold o ratio in A. change (average z x) with X in A. apply Rmult_le_reg_l with (X * ratio); lra. }
  pose proof (B 1 ltac:(auto)). pose proof (B (-1) ltac:(auto)). apply Rabs_le. lra.
Qed.
End Close.

(* e^x - 1 <= 8/7 x up to 1/4. So where scores are off by c_s B <= 1/4 in terms, and by `rounding` else: *)
Theorem factor_of_terms z c B rounding : (forall s, In s keys -> 0 <= c s * B <= / 4) ->
  factor z (fun s => rounding + c s * B) <= exp rounding * (1 + 8 / 7 * B * average z c).
Proof.
  intros H. assert (exp (/ 4) <= 9 / 7) as Q.
  { assert (0 <= 127 / 128 <= exp (- / 128)) as P by (pose proof (exp_ineq1_le (- / 128)); lra).
    apply pow_incr with (n := 32%nat) in P. rewrite <- (Rpower_pow 32 (exp _)) in P by apply exp_pos.
    unfold Rpower in P. rewrite ln_exp in P. pose proof (exp_pos (/ 4)).
    assert (exp (INR 32 * - / 128) * exp (/ 4) = 1) by (rewrite <- exp_plus, <- exp_0; f_equal; cbn; lra).
    assert (7 / 9 <= (127 / 128) ^ 32) by (cbn; lra). nra. }
  set (b := exp rounding * (8 / 7 * B)).
  apply Rle_trans with (average z (fun s => b * c s + 0 * c s + exp rounding)).
  2: rewrite (average_of z _ b c 0 c (exp rounding)) by (intros; ring); unfold b; lra.
  apply average_le. intros s I. specialize (H s I). rewrite exp_plus. pose proof (exp_pos rounding) as P.
  pose proof (exp_convex (4 * (c s * B)) 0 (/ 4) ltac:(lra)) as C. rewrite exp_0 in C.
  replace ((1 - _) * 0 + _) with (c s * B) in C by field. apply (Rmult_le_compat_l _ _ _ (Rlt_le _ _ P)) in C.
  apply (Rmult_le_compat_l (exp rounding * (4 * (c s * B)))) in Q; [unfold b; lra | nra].
Qed.

(* Products of weights and values that are off by at most c_s of the largest *)
Theorem values_in_terms z v p c largest : (forall s, In s keys -> Rabs (p s - v s) <= largest * c s) ->
  Rabs (average z p - average z v) <= largest * average z c.
Proof.
  intros H. assert (forall a, average z (fun s => a * c s + 1 * v s + 0) = a * average z c + average z v) as S
    by (intros; rewrite (average_of z _ a c 1 v 0); intros; ring).
  apply Rabs_le. pose proof (S largest). pose proof (S (- largest)).
  assert (forall s, In s keys -> - largest * c s + 1 * v s + 0 <= p s <= largest * c s + 1 * v s + 0) as B
    by (intros s I; specialize (H s I); apply Rabs_le_inv in H; lra).
  pose proof (average_le z _ _ (fun s I => proj1 (B s I))).
  pose proof (average_le z _ _ (fun s I => proj2 (B s I))). lra.
Qed.
End Softmax.

(* A row's sum L e^M, and what blocks in t terms hold of it, C e^M: compared when one more of them comes. *)
Inductive checked (share : R) : R -> R -> Prop :=
  | nothing : checked share 0 0
  | others L C a : checked share L C -> 0 <= a -> checked share (L + a) C
  | coarse L C a : checked share L C -> 0 <= a -> C + a <= share * L -> checked share (L + a) (C + a)
  | moved L C f : checked share L C -> 0 < f -> checked share (f * L) (f * C).

Theorem share_of_sum_so_far share L C : 0 <= share -> checked share L C -> C <= share * L.
Proof. induction 2; nra. Qed.

(* Together with what is left out, whose scores nobody computes: its z' are exact. *)
Theorem coarse_and_left_out {Key} keys read (z z' E v : Key -> R) low high tolerance :
  let kept := filter read keys in let left_out := filter (fun s => negb (read s)) keys in
  kept <> [] -> 0 <= tolerance < 1 -> (forall s, In s keys -> Rabs (z' s - z s) <= E s) ->
  sum left_out (fun s => exp (z' s)) <= tolerance * Z kept z' ->
  low <= high -> (forall s, In s keys -> low <= v s <= high) ->
  Rabs (average kept z' v - average keys z v) <= (tolerance + (factor keys z' E - 1)) * (high - low) /\
  ln (1 - tolerance) - ln (factor keys z' E) <= ln (Z kept z') - ln (Z keys z) <= ln (factor keys z' E).
Proof.
  intros kept left_out K T C D LH V. assert (keys <> []) as K' by (intros ->; now apply K).
  assert (forall s, In s keys -> Rabs (z s - z' s) <= E s) as C' by (intros; rewrite Rabs_minus_sym; auto).
  destruct (stopping kept left_out (fun s => exp (z' s)) v (fun s => Rlt_le _ _ (exp_pos (z' s)))
              (Z_pos kept K z') tolerance T D) as (L & O).
  unfold kept, left_out in L, O. rewrite <- !sum_split in O. rewrite <- sum_split in L.
  specialize (O low high LH ltac:(intros s I; apply V; apply in_app_or in I; destruct I as [I|I];
    now apply filter_In in I)).
  pose proof (lse_of_close_scores keys K' z' z E C') as L'.
  pose proof (output_of_close_scores keys K' z' z E C' v low high V) as O'. rewrite Rabs_minus_sym in O'.
  fold kept left_out (Z kept z') (Z keys z') in L, O. fold (average kept z' v) (average keys z' v) in O.
  apply Rabs_le_inv in L', O, O'. split; [apply Rabs_le|]; lra.
Qed.
