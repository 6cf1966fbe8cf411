(* Attention over points of a line, a plane or space (csrc/kernel/points-inl.h, torch.points). The bias is
   - m times the distance, straight or along the axes. A tile of queries visits blocks of keys by the least
   distance g_b of the boxes around their points; tokens that stand nowhere are at distance 0 of all. Proved:
   what the unvisited blocks hold at most. By Certificate.dropped_mass it may then be left out. *)
From Coq Require Import Reals Lra Lia List.
From linbias Require Import Sums Certificate.
Open Scope R_scope.

Section Points.
Variables (axes : nat) (manhattan : bool).
Definition size (x : vec) : R := if manhattan then sum (seq 0 axes) (fun i => Rabs (x i)) else norm axes x.
Record box := { low : vec; high : vec }.
Definition inside (x : vec) (b : box) : Prop := forall i, (i < axes)%nat -> low b i <= x i <= high b i.
Definition apart (b c : box) : vec := fun i => Rmax 0 (Rmax (low c i - high b i) (low b i - high c i)).

(* None: a token that stands nowhere, a box that is everywhere. *)
Definition distance (x y : option vec) := match x, y with Some x, Some y => size (minus x y) | _, _ => 0 end.
Definition gap (b c : option box) := match b, c with Some b, Some c => size (apart b c) | _, _ => 0 end.
Definition stands_in (x : option vec) (b : option box) : Prop :=
  match b, x with None, _ => True | Some b, Some x => inside x b | Some _, None => False end.

(* No two points of two boxes are nearer to each other than the boxes. *)
Theorem gap_is_least b c x y : stands_in x b -> stands_in y c -> gap b c <= distance x y.
Proof.
  assert (forall x, 0 <= size x) as P by (intros; unfold size; destruct manhattan;
    [apply sum_nonneg; intros; apply Rabs_pos | apply norm_nonneg]).
  destruct b as [b|], c as [c|], x as [x|], y as [y|]; cbn; intros X Y; try easy; try apply P; try lra.
  assert (forall i, In i (seq 0 axes) -> Rabs (apart b c i) <= Rabs (minus x y i)) as H.
  { intros i I. apply in_seq in I. specialize (X i ltac:(lia)). specialize (Y i ltac:(lia)).
    unfold apart, minus, Rmax, Rabs. repeat destruct (Rle_dec _ _); repeat destruct (Rcase_abs _); lra. }
  unfold size. destruct manhattan; [now apply sum_le|].
  apply sqrt_le_1_alt, sum_le. intros i I. now apply Rsqr_le_abs_1, H.
Qed.

Context {Key Block : Type}.
Variables (D : nat) (k : Key -> vec) (c q : vec) (a m : R) (keys : Block -> list Key).
Variables (place : Key -> option vec) (around : Block -> option box) (row : option vec) (tile : option box).
Hypothesis slope : 0 <= m.
Hypothesis in_boxes : stands_in row tile /\ forall b s, In s (keys b) -> stands_in (place s) (around b).
Let g b := gap tile (around b).
Definition z (s : Key) : R := a * dot D q (k s) - m * distance row (place s).

Lemma score_in_block b s : In s (keys b) -> z s <= a * dot D q c + a * dot D q (minus (k s) c) - m * g b.
Proof.
  intros I. pose proof (gap_is_least _ _ _ _ (proj1 in_boxes) (proj2 in_boxes b s I)) as G.
  apply (Rmult_le_compat_l m _ _ slope) in G. unfold z, g. rewrite (dot_minus D q (k s) c). lra.
Qed.

(* For any bound `weighs` on the sum over a block of exp (a q.(k_s - c)), such as Spread.block_of_keys. *)
Theorem unvisited_blocks unvisited (weighs : Block -> R) :
  (forall b, In b unvisited -> sum (keys b) (fun s => exp (a * dot D q (minus (k s) c))) <= weighs b) ->
  sum (flat_map keys unvisited) (fun s => exp (z s))
  <= exp (a * dot D q c) * sum unvisited (fun b => weighs b * exp (- m * g b)).
Proof.
  intros H. rewrite sum_flat_map, <- sum_scale. apply sum_le. intros b I.
  rewrite (Rmult_comm (weighs b)), <- Rmult_assoc, <- exp_plus.
  eapply Rle_trans; [|apply Rmult_le_compat_l, H, I; left; apply exp_pos]. rewrite <- sum_scale.
  apply sum_le. intros s J. rewrite <- exp_plus. apply exp_le. pose proof (score_in_block b s J). lra.
Qed.

Variables (radius : Block -> R) (most : R).
Hypothesis blocks : forall b, INR (length (keys b)) <= most /\
  forall s, In s (keys b) -> norm D (minus (k s) c) <= radius b.

Theorem score_by_radius b s : In s (keys b) -> z s <= a * dot D q c + Rabs a * norm D q * radius b - m * g b.
Proof.
  intros I. destruct (blocks b) as [_ R]. pose proof (key_bound D a q (k s) c) as B.
  rewrite (dot_minus D q (k s) c) in B. pose proof (score_in_block b s I).
  pose proof (Rmult_le_compat_l _ _ _ (Rmult_le_pos _ _ (Rabs_pos a) (norm_nonneg D q)) (R s I)). lra.
Qed.

(* The code's bound. Certificate.N is the log of the sum over unvisited blocks of exp (|a||q| r_b - m g_b); by
   Certificate.N_chord the chord between the lengths of two queries serves too. *)
Theorem unvisited_by_radius unvisited : unvisited <> nil ->
  sum (flat_map keys unvisited) (fun s => exp (z s))
  <= most * exp (a * dot D q c + N unvisited radius (fun b => - g b) m 0 (Rabs a * norm D q)).
Proof.
  intros U. rewrite exp_plus, N_exp, <- !sum_scale, sum_flat_map by auto. apply sum_le. intros b I.
  apply Rle_trans with (sum (keys b) (fun _ => exp (a * dot D q c + Rabs a * norm D q * radius b - m * g b))).
  - apply sum_le. intros s J. now apply exp_le, score_by_radius.
  - rewrite sum_const, <- exp_plus.
    apply Rmult_le_compat; [apply pos_INR | left; apply exp_pos | apply blocks | apply exp_le; lra].
Qed.

End Points.
