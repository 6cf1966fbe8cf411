(* The program of Keys.v in OCaml, with floating-point numbers for real ones: proof/run.ml runs it beside
   src/linbias/near_to_far.py and the kernels. *)
From Coq Require Import Reals List ZArith Extraction ExtrOcamlBasic ExtrOcamlNatInt ExtrOcamlZInt.
From linbias Require Import Sums Certificate Algorithm NearToFar Keys Instances.
Open Scope R_scope.

(* `tile`, where the center of the keys and their distances from it are computed once and handed over. *)
Definition tile_with (c : vec) (distance : nat -> R) D num k v x slope log_sum size first_order last_order rows tolerance :=
  let tail (row : query) sd (b : block) :=
    let j := nearest sd b in
    dot D (vector row) c + norm D (vector row) * fold_right (fun s r => Rmax (distance s) r) 0 (from_here num sd j)
    - steepness slope sd * Rabs (place row - x j) + log_sum sd j in
  attend rows (score_of D k x slope) v keys_of tail (is_steep slope) (is_visible slope) tolerance
    (seq (low num first_order) (high num last_order - low num first_order))
    (outwards num size num (low num first_order) (high num last_order)).

Lemma tile_with_is_tile D num k :
  let c := center num k in tile_with c (fun s => norm D (minus (k s) c)) D num k = tile D num k.
Proof. reflexivity. Qed.

Extract Constant RbaseSymbolsImpl.R => "float".
Extract Constant RbaseSymbolsImpl.R0 => "0.".
Extract Constant RbaseSymbolsImpl.R1 => "1.".
Extract Constant RbaseSymbolsImpl.Rplus => "(+.)".
Extract Constant RbaseSymbolsImpl.Rmult => "( *.)".
Extract Constant RbaseSymbolsImpl.Ropp => "(~-.)".
Extract Constant RinvImpl.Rinv => "(fun x -> 1. /. x)".
Extract Constant Rminus => "(-.)".
Extract Constant Rdiv => "(/.)".
Extract Constant IZR => "float_of_int".
Extract Constant INR => "float_of_int".
Extract Constant exp => "Stdlib.exp".
Extract Constant ln => "Stdlib.log".
Extract Constant sqrt => "Stdlib.sqrt".
Extract Constant Rabs => "Stdlib.abs_float".
Extract Constant Rmax => "(fun (x : float) y -> if x < y then y else x)".
Extract Constant Rmin => "(fun (x : float) y -> if x < y then x else y)".
Extract Constant Rle_dec => "(fun (x : float) y -> x <= y)".
Extract Constant Rlt_dec => "(fun (x : float) y -> x < y)".
Extract Constant Req_EM_T => "(fun (x : float) y -> x = y)".
Extract Constant Z.of_nat => "Fun.id".  (* both are int, and to count up takes long *)
(* What the definition of the reals brings along, and no program runs. *)
Extract Constant RbaseSymbolsImpl.Rabst => "(fun _ -> assert false)".
Extract Constant RbaseSymbolsImpl.Rrepr => "(fun _ -> assert false)".
Extract Constant ClassicalDedekindReals.sig_forall_dec => "(fun _ -> assert false)".
Extraction "proved.ml" tile_with center norm minus out lse log_sum_counted log_sum_given.
