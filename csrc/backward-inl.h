// Part of attention-inl.h, included within its namespace.
//
// The backward pass of one tile, over the blocks that forward visited, and the sums over tasks.

template <typename W, typename In>
struct BackwardTask {
  const Call& call;
  const Backward& results;
  const Packed<W>& packed;
  Scratch<W>* scratches;
  int64_t num_tiles, num_parts, tiles_per_part;
  W *dk, *dv;       // [B, H, parts, S padded, D or E padded]
  double* dslopes;  // [B, H, parts, 2]

  static void run(void* context, int64_t task, int worker) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const Call& call = self.call;
    const int64_t index = call.B * call.H * self.num_parts - 1 - task;  // the flattest heads first
    const int64_t part = index % self.num_parts, head = index / self.num_parts;
    const int64_t rows = self.packed.num_blocks * kKeys;
    W* dk = self.dk + index * rows * self.packed.padded_D;
    W* dv = self.dv + index * rows * self.packed.padded_E;
    __builtin_memset(dk, 0, sizeof(W) * static_cast<size_t>(rows * self.packed.padded_D));
    __builtin_memset(dv, 0, sizeof(W) * static_cast<size_t>(rows * self.packed.padded_E));
    double* dslopes = self.dslopes + 2 * index;
    dslopes[kLeft] = dslopes[kRight] = 0;
    const int64_t from = part * self.tiles_per_part;
    for (int64_t t = from; t < smaller_of(from + self.tiles_per_part, self.num_tiles); ++t) {
      self.tile(head / call.H, head % call.H, t, self.scratches[worker], dk, dv, dslopes);
    }
  }

  void tile(int64_t b, int64_t h, int64_t t, Scratch<W>& scratch, W* dk, W* dv, double* dslopes) const {
    const Tile<W> tile(call, packed, b, h, t);
    load_queries<W, In>(tile, packed.padded_D, scratch.q);
    load_output_gradient(tile, scratch);
    W* dq = scratch.acc;
    for (int64_t i = 0; i < tile.padded_rows * packed.padded_D; ++i) dq[i] = 0;
    const int32_t* counts = results.saved.visited + ((b * call.H + h) * results.saved.visited_tiles + t) * 2;
    const int64_t outermost_left =
        tile.hidden[kLeft] ? tile.near_first : clamp(tile.near_first - counts[kLeft], 0, tile.near_first);
    const int64_t outermost_right =
        tile.hidden[kRight] ? tile.near_last
                            : clamp(tile.near_last + counts[kRight], tile.near_last, tile.head->num_blocks - 1);
    // From either end inwards, as the outer blocks may turn out to be negligible.
    bool negligible = true;
    for (int64_t block = outermost_left; block <= tile.near_last; ++block) {
      negligible = visit(tile, block, negligible, scratch, dq, dk, dv);
    }
    negligible = true;
    for (int64_t block = outermost_right; block > tile.near_last; --block) {
      negligible = visit(tile, block, negligible, scratch, dq, dk, dv);
    }
    add_slope_gradients(tile, scratch, dslopes);
    const W scale = static_cast<W>(call.scale);
    for (int64_t i = 0; i < tile.rows; ++i) {
      W* to = static_cast<W*>(results.dq) + tile.index(i) * call.D;
      for (int64_t d = 0; d < call.D; ++d) to[d] = dq[i * packed.padded_D + d] * scale;
    }
  }

  // dout and delta divided by the row's sum, so that unnormalised weights serve for normalised ones.
  void load_output_gradient(const Tile<W>& tile, Scratch<W>& scratch) const {
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      W* dout = scratch.dout + i * packed.padded_E;
      for (int64_t e = 0; e < packed.padded_E; ++e) dout[e] = 0;
      scratch.delta[i] = scratch.dscore_sum[i] = scratch.row_sum[i] = scratch.left_out[i] = 0;
      scratch.slope_sum[kLeft][i] = scratch.slope_sum[kRight][i] = 0;
      scratch.reach_sum[kLeft][i] = scratch.reach_sum[kRight][i] = 0;
      scratch.row_max[i] = kInfinity<W>;  // exp(score - inf) = 0: no weight in a row without keys
      if (i >= tile.rows) continue;
      const int64_t at = tile.index(i);
      const W log_sum = static_cast<const W*>(results.saved.log_sum)[at];
      if (log_sum == -kInfinity<W>) continue;
      scratch.row_max[i] = static_cast<const W*>(results.saved.row_max)[at];
      scratch.row_sum[i] = static_cast<W>(__builtin_exp(static_cast<double>(log_sum)));
      const W per_sum = 1 / scratch.row_sum[i];
      const W* given = static_cast<const W*>(results.dout) + at * call.E;
      const W* out = static_cast<const W*>(results.saved.out) + at * call.E;
      W delta = 0;
      for (int64_t e = 0; e < call.E; ++e) {
        delta += given[e] * out[e];
        dout[e] = given[e] * per_sum;
      }
      scratch.delta[i] = (delta - static_cast<const W*>(results.dlse)[at]) * per_sum;
    }
  }

  // Add what a block gives, unless those beyond were negligible and it is, too. Returns whether it was.
  bool visit(const Tile<W>& tile, int64_t block, bool previous_negligible, Scratch<W>& scratch, W* dq, W* dk,
             W* dv) const {
    const Head<W>& head = *tile.head;
    const int64_t rows = tile.padded_rows, D = packed.padded_D, E = packed.padded_E;
    multiply<W>(rows, kKeys, call.D, scratch.q, D, 1, head.keys_across + block * call.D * kKeys, kKeys, scratch.score,
                kKeys, false);
    constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
    const Biased<W> biased(tile, block, W{1});
    const bool finite = head.radius[block] == head.radius[block];
    const W allowance = static_cast<W>(call.tolerance * (1 - kTailShare));
    if (previous_negligible && biased.far && finite && is_negligible(biased, allowance, scratch)) return true;
    multiply<W>(rows, kKeys, call.E, scratch.dout, E, 1, head.values_across + block * call.E * kKeys, kKeys,
                scratch.dweight, kKeys, false);
    for (int64_t i = 0; i < rows; ++i) {
      Vector<W> x[kVectors];
      W* row = scratch.score + i * kKeys;
      biased.row(i, row, x);
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) store<W>(row + j * kLanes, exponential<W>(x[j] - scratch.row_max[i]));
    }
    const W* dropped = scratch.score;
    if (call.dropout > 0) {
      const Dropout dropout(tile);
      dropout.apply(tile, block, scratch.score, scratch.dropped);
      dropout.apply(tile, block, scratch.dweight, scratch.dweight);
      dropped = scratch.dropped;
    }
    multiply<W>(kKeys, E, rows, dropped, 1, kKeys, scratch.dout, E, dv + block * kKeys * E, E, true);
    for (int64_t i = 0; i < rows; ++i) score_gradients(biased, scratch, i);
    multiply<W>(rows, D, kKeys, scratch.dweight, kKeys, 1, head.keys + block * kKeys * D, D, dq, D, true);
    multiply<W>(kKeys, D, rows, scratch.dweight, 1, kKeys, scratch.q, D, dk + block * kKeys * D, D, true);
    return false;
  }

  // Turn the gradients of the weights of row i into those of its scores, and sum what the slopes need.
  LINBIAS_INLINE void score_gradients(const Biased<W>& biased, Scratch<W>& scratch, int64_t i) const {
    constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
    Vector<W> total{}, slope[2] = {}, reach[2] = {};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      W* at = scratch.dweight + i * kKeys + j * kLanes;
      const Vector<W> weight = load(scratch.score + i * kKeys + j * kLanes);
      const Vector<W> dscore = weight * (load(at) - scratch.delta[i]), distance = biased.reach(i, j);
      store<W>(at, dscore);
      total += dscore;
      const Vector<W> left = distance > W{0} ? distance : Vector<W>{}, right = left - distance;
      slope[kLeft] += dscore * left;
      reach[kLeft] += weight * left;
      slope[kRight] += dscore * right;
      reach[kRight] += weight * right;
    }
    scratch.dscore_sum[i] += sum<W>(total);
    for (int side = kLeft; side <= kRight; ++side) {
      if (biased.tile.hidden[side]) continue;
      scratch.slope_sum[side][i] += sum<W>(slope[side]);
      scratch.reach_sum[side][i] += sum<W>(reach[side]);
    }
  }

  // dslope = -sum dscore |distance|, a sum of large terms that cancel: what makes sum dscore differ from dlse is
  // rounding error, mostly that of delta, and every dscore carries its weight's share of it.
  void add_slope_gradients(const Tile<W>& tile, const Scratch<W>& scratch, double* dslopes) const {
    for (int64_t i = 0; i < tile.rows; ++i) {
      if (scratch.row_sum[i] == 0) continue;  // no keys; NaN goes on
      const W error = (scratch.dscore_sum[i] - static_cast<const W*>(results.dlse)[tile.index(i)]) / scratch.row_sum[i];
      for (int side = kLeft; side <= kRight; ++side) {
        if (tile.hidden[side]) continue;
        dslopes[side] -= static_cast<double>(scratch.slope_sum[side][i] - error * scratch.reach_sum[side][i]);
      }
    }
  }

  // Add up what the query heads of a group, and the parts of each, found for one block of a key/value head.
  static void collect(void* context, int64_t task, int) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const Call& call = self.call;
    const int64_t block = task % self.packed.num_blocks, index = task / self.packed.num_blocks;
    const Head<W>& head = self.packed.heads.data[index];
    const int64_t group = call.H / call.G, rows = self.packed.num_blocks * kKeys;
    const int64_t sources = (index / call.G * call.H + index % call.G * group) * self.num_parts;
    const SeenKeys seen = seen_keys(call, head, index);
    for (int64_t s = larger_of(block * kKeys, seen.first); s < smaller_of((block + 1) * kKeys, seen.end); ++s) {
      const int64_t to = index * call.S + head.first + s;
      add_rows(self.dk, sources, group * self.num_parts, rows, s, self.packed.padded_D, call.D,
               static_cast<W*>(self.results.dk) + to * call.D);
      add_rows(self.dv, sources, group * self.num_parts, rows, s, self.packed.padded_E, call.E,
               static_cast<W*>(self.results.dv) + to * call.E);
    }
  }

  static void add_rows(const W* from, int64_t first, int64_t count, int64_t rows, int64_t s, int64_t padded,
                       int64_t size, W* to) {
    for (int64_t source = first; source < first + count; ++source) {
      const W* row = from + (source * rows + s) * padded;
      for (int64_t x = 0; x < size; ++x) to[x] += row[x];
    }
  }
};

template <typename W, typename In>
Status backward_as(const Call& call, const Backward& results) {
  // Enough tasks to share out, whatever the number of threads: the sums must not depend on it.
  constexpr int64_t kEnoughTasks = 16;
  const int64_t num_tiles = round_up(call.T, kRows) / kRows, num_heads = call.B * call.H;
  for (int64_t head = 0; head < num_heads; ++head) {
    static_cast<W*>(results.dleft)[head] = static_cast<W*>(results.dright)[head] = 0;
  }
  if (num_heads == 0 || num_tiles == 0) return Status::ok;
  int64_t num_parts = smaller_of(round_up(kEnoughTasks, num_heads) / num_heads, num_tiles);
  const int64_t tiles_per_part = round_up(num_tiles, num_parts) / num_parts;
  num_parts = round_up(num_tiles, tiles_per_part) / tiles_per_part;

  Packed<W> packed;
  Buffer<Scratch<W>> scratches;
  Buffer<W> memory, dk, dv;
  Buffer<double> dslopes;
  if (!packed.allocate(call, true, false) || !allocate_scratch(call, packed, scratches, memory)) {
    return Status::out_of_memory;
  }
  const int64_t rows = packed.num_blocks * kKeys;
  if (!dk.allocate(num_heads * num_parts, rows, packed.padded_D) ||
      !dv.allocate(num_heads * num_parts, rows, packed.padded_E) || !dslopes.allocate(num_heads * num_parts, 2)) {
    return Status::out_of_memory;
  }
  PackTask<W, In, false>{call, packed, false}.run();
  BackwardTask<W, In> task{call,      results,        packed,  scratches.data, num_tiles,
                           num_parts, tiles_per_part, dk.data, dv.data,        dslopes.data};
  parallel(num_heads * num_parts, call.num_threads, BackwardTask<W, In>::run, &task);
  parallel(call.B * call.G * packed.num_blocks, call.num_threads, BackwardTask<W, In>::collect, &task);
  for (int64_t head = 0; head < num_heads; ++head) {
    double totals[2] = {0, 0};
    for (int64_t part = 0; part < num_parts; ++part) {
      totals[kLeft] += dslopes.data[(head * num_parts + part) * 2 + kLeft];
      totals[kRight] += dslopes.data[(head * num_parts + part) * 2 + kRight];
    }
    static_cast<W*>(results.dleft)[head] = static_cast<W>(totals[kLeft]);
    static_cast<W*>(results.dright)[head] = static_cast<W>(totals[kRight]);
  }
  return Status::ok;
}
