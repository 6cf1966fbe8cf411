(* Run the program extracted from the proof. Input is numbers: how many tiles, and of each

     D S E   the sizes of a head          keys   of a block       rows   of the tile
     given   1: keys have positions       order  of row 0         tolerance
     left right   the slopes, below 0 for a hidden side
     k [S, D]     v [S, E]     x [S]     q [rows, D], times the scale     places [rows]

   Output is a line for each: how many keys were read, the first, one past the last; lse and out of each row. *)
open Proved

let int () = Scanf.scanf " %d" Fun.id
let number () = Scanf.scanf " %f" Fun.id
let numbers n = Array.init n (fun _ -> number ())
let matrix m n = Array.init m (fun _ -> numbers n)

(* What a function gives for 0 .. n - 1, kept. *)
let keep n f = let kept = Array.init n f in fun i -> if i < n then kept.(i) else f i

let tile () =
  let d = int () in let num = int () in let e = int () in let size = int () in let count = int () in
  let given = int () = 1 in let first = int () in let tolerance = number () in
  let slope_of () = let slope = number () in if slope < 0. then None else Some slope in
  let left = slope_of () in let right = slope_of () in
  let slope = function Left -> left | Right -> right in
  let k = matrix num d in let v = matrix num e in let x = numbers num in
  let q = matrix count d in let places = numbers count in
  let k s i = k.(s).(i) and v s i = v.(s).(i) and x s = x.(s) in
  let row t = { vector = (fun i -> q.(t).(i)); order = first + t; place = places.(t) } in
  let rows = List.init count row in
  let log_sum = if given then log_sum_given num x slope else log_sum_counted num slope in
  let kept_log_sum sd = keep num (log_sum sd) in
  let log_left = lazy (kept_log_sum Left) and log_right = lazy (kept_log_sum Right) in
  let log_sum = function Left -> Lazy.force log_left | Right -> Lazy.force log_right in
  let c = keep d (center num k) in
  let distance = keep num (fun s -> norm d (minus (k s) c)) in
  let final, visited =
    tile_with c distance d num k v x slope log_sum size first (first + count - 1) rows tolerance in
  let visited = List.sort compare visited in
  let ends = match visited with [] -> (0, 0) | s :: _ -> (s, 1 + List.fold_left max s visited) in
  Printf.printf "%d %d %d" (List.length visited) (fst ends) (snd ends);
  List.iter (fun row ->
    let r = final row in
    Printf.printf " %.17g" (match lse r with Some l -> l | None -> neg_infinity);
    for i = 0 to e - 1 do Printf.printf " %.17g" (out r i) done) rows;
  print_newline ()

let () = for _ = 1 to int () do tile () done
