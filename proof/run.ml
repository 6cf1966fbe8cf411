(* Run the program extracted from the proof. Input is numbers: how many tiles, and of each

     D S E    the sizes of a head         keys   of a block       rows   of the tile
     given    1: keys have positions      order  of row 0         tolerance
     left right    the slopes, below 0 for a hidden side
     k [S, D]     v [S, E]     x [S]     q [rows, D], times the scale     places [rows]
     ranges [rows, 2]    the keys that each row may see

   Output is a line for each: how many keys were read, the first, one past the last; lse and out of each row. *)
open Proved

let int () = Scanf.scanf " %d" Fun.id
let number () = Scanf.scanf " %s" float_of_string
let many read n = Array.init n (fun _ -> read ())
let matrix read m n = Array.init m (fun _ -> many read n)

(* What a function gives for 0 .. n - 1, kept. *)
let keep n f = let kept = Array.init n f in fun i -> if i < n then kept.(i) else f i

let entry x = if Float.is_finite x then Some x else None
let of_float x = if x = neg_infinity then MinusInfinity else match entry x with Some x -> Real x | None -> NaN
let to_float = function MinusInfinity -> neg_infinity | Real x -> x | NaN -> nan

(* As near_to_far.py has it: of the entries divided by the largest, times that. *)
let length_of d y =
  let largest = Array.fold_left (fun most i -> max most (abs_float (y i))) 0. (Array.init d Fun.id) in
  if largest = 0. then Some 0. else entry (norm d (fun i -> y i /. largest) *. largest)

let tile () =
  let d = int () in let num = int () in let e = int () in let size = int () in let count = int () in
  let given = int () = 1 in let first = int () in let tolerance = number () in
  let slope_of () = let slope = number () in if slope < 0. then None else Some slope in
  let left = slope_of () in let right = slope_of () in
  let k = matrix number num d in let v = matrix number num e in let x = many number num in
  let q = matrix number count d in let places = many number count in
  let ranges = matrix int count 2 in
  let raw row s = (* q.k as floating point has it *)
    let total = ref 0. in
    Array.iteri (fun i y -> total := !total +. q.(row.order - first).(i) *. y) k.(s);
    of_float !total in
  let h = {
    key_size = d; value_size = e; num;
    k = (fun s i -> entry k.(s).(i)); v = (fun s i -> entry v.(s).(i)); x = (fun s -> x.(s));
    slope = (function Left -> left | Right -> right); odd = raw; length_of = length_of d } in
  let rows = List.init count (fun t -> {
    vector = (fun i -> entry q.(t).(i)); order = first + t; place = places.(t);
    sees = (fun s -> ranges.(t).(0) <= s && s < ranges.(t).(1)) }) in
  let log_sum sd = lazy (keep num ((if given then log_sum_given else log_sum_counted) h sd)) in
  let log_left = log_sum Left and log_right = log_sum Right in
  let log_sum = function Left -> Lazy.force log_left | Right -> Lazy.force log_right in
  let c = keep d (center h) in
  let distance s = if finite e (h.v s) then h.length_of (minus (reals (h.k s)) c) else None in
  let all_finite = List.for_all (fun s -> finite d (h.k s)) (List.init num Fun.id) in
  let final, visited =
    tile_with c (keep num distance) all_finite h log_sum size first (first + count - 1) rows tolerance in
  let visited = List.sort compare (visited (List.hd rows)) in  (* as of every row *)
  let ends = match visited with [] -> (0, 0) | s :: _ -> (s, 1 + List.fold_left max s visited) in
  Printf.printf "%d %d %d" (List.length visited) (fst ends) (snd ends);
  List.iter (fun row ->
    let r = final row in
    Printf.printf " %.17g" (to_float (lse r));
    for i = 0 to e - 1 do
      Printf.printf " %.17g" (match out r i with Some x -> x | None -> nan) done) rows;
  print_newline ()

let () = for _ = 1 to int () do tile () done
