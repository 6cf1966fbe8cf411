(* The program of Keys.v in OCaml, with floating-point numbers for real ones: proof/run.ml runs it beside
   src/linbias/near_to_far.py and the kernels. *)
From Coq Require Import Reals List Bool ZArith Extraction ExtrOcamlBasic ExtrOcamlNatInt ExtrOcamlZInt.
From linbias Require Import Sums Certificate Algorithm NearToFar Keys Instances.
Import ListNotations.
Open Scope R_scope.

(* `tile`, where what it asks of all keys again and again is handed over: their center, the distance of each from it,
   and whether all are finite. *)
Definition tile_with c distance all_finite h log_sum size first_order last_order rows tolerance :=
  let largest l := fold_right (fun s r =>
    match distance s, r with Some a, Some r => Some (Rmax a r) | _, _ => None end) (Some 0) l in
  let most (row : query) sd j :=
    let known := finite (key_size h) (vector row) && all_finite in
    match known, length_of h (reals (vector row)), largest (from_here h sd j) with
    | true, Some q, Some r => Real (dot (key_size h) (reals (vector row)) c + q * r)
    | _, _, _ => NaN
    end in
  let tail row sd b :=
    let j := nearest sd b in
    match slope h sd with
    | Some m =>
        if Rlt_dec 0 m then less (less (most row sd j) (m * Rabs (place row - x h j))) (- log_sum sd j) else NaN
    | None => NaN
    end in
  attend rows (score_of h) (v h) keys_of tail (share_of 1 tolerance (is_visible h Left && is_visible h Right))
    (fun _ _ => false) 0 0
    (seq (low h first_order) (high h last_order - low h first_order))
    (outwards h size (2 * num h) Left (low h first_order) (high h last_order)) (is_visible h).

Lemma tile_with_is_tile h :
  let c := center h in
  tile_with c (fun s => if finite (value_size h) (v h s) then length_of h (minus (reals (k h s)) c) else None)
    (forallb (fun s => finite (key_size h) (k h s)) (seq 0 (num h))) h = tile h.
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
Extraction "proved.ml" tile_with center norm minus reals finite out lse log_sum_counted log_sum_given.
