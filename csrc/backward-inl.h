// Part of attention-inl.h, included within its namespace.
//
// The backward pass of one tile, over the blocks that forward visited, and the sums over tasks.

template <typename W>
LINBIAS_INLINE W lse_gradient(const Backward& results, int64_t at) {
  return results.dlse ? static_cast<const W*>(results.dlse)[at] : W{0};
}

// Blocks [first, end) of a head.
struct Blocks {
  int64_t first, end;
  bool holds(int64_t block) const { return first <= block && block < end; }
};

// Those that forward visited for a tile.
template <typename W>
Blocks visited_blocks(const Tile<W>& tile, const Forward& saved) {
  const int64_t at = (tile.b * tile.call->H + tile.h) * saved.visited_tiles + tile.start / kRows;
  const int32_t* counts = saved.visited + at * 2;
  const int64_t first = tile.near_first, last = tile.near_last;
  return {tile.hidden[kLeft] ? first : clamp(first - counts[kLeft], 0, first),
          (tile.hidden[kRight] ? last : clamp(last + counts[kRight], last, tile.head->num_blocks - 1)) + 1};
}

// All that some tiles of a head visited, and what lies between.
template <typename W>
Blocks visited_blocks(const Call& call, const Packed<W>& packed, const Forward& saved, int64_t b, int64_t h,
                      int64_t from, int64_t to) {
  Blocks all = {packed.num_blocks, 0};
  for (int64_t t = from; t < to; ++t) {
    const Blocks blocks = visited_blocks(Tile<W>(call, packed, b, h, t), saved);
    if (blocks.first >= blocks.end) continue;
    all = {smaller_of(all.first, blocks.first), larger_of(all.end, blocks.end)};
  }
  return all;
}

// Zeros for the rows of some blocks.
template <typename W>
void clear_blocks(W* rows, int64_t size, Blocks blocks) {
  const int64_t count = larger_of(blocks.end - blocks.first, 0) * kKeys * size;
  __builtin_memset(rows + blocks.first * kKeys * size, 0, sizeof(W) * static_cast<size_t>(count));
}

template <typename W, typename In>
struct BackwardTask {
  const Call& call;
  const Backward& results;
  const Packed<W>& packed;
  const PackTask<W, In>& pack;
  Scratch<W>* scratches;
  int64_t num_tiles, num_parts, tiles_per_part;
  W *dk, *dv;       // [B, H, parts, rows, D or E padded], or by head [threads, rows, ...]
  double* dslopes;  // [B, H, parts, 2]
  Blocks* blocks;   // those in which dk and dv hold anything: [B, H, parts] or [threads]

  // The gradients of keys and values that a task or worker adds to.
  W* keys_gradient(int64_t index) const { return dk + index * packed.rows * packed.padded_D; }
  W* values_gradient(int64_t index) const { return dv + index * packed.rows * packed.padded_E; }
  void clear_gradients(int64_t index, Blocks of) const {
    blocks[index] = of;
    clear_blocks(keys_gradient(index), packed.padded_D, of);
    clear_blocks(values_gradient(index), packed.padded_E, of);
  }

  static void run(void* context, int64_t task, int worker) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const Call& call = self.call;
    const int64_t index = call.B * call.H * self.num_parts - 1 - task;  // the flattest heads first
    const int64_t part = index % self.num_parts, b = index / self.num_parts / call.H,
                  h = index / self.num_parts % call.H;
    const int64_t from = part * self.tiles_per_part, to = smaller_of(from + self.tiles_per_part, self.num_tiles);
    self.clear_gradients(index, visited_blocks(call, self.packed, self.results.saved, b, h, from, to));
    double* dslopes = self.dslopes + 2 * index;
    dslopes[kLeft] = dslopes[kRight] = 0;
    for (int64_t t = from; t < to; ++t) {
      self.tile(b, h, t, self.scratches[worker], self.keys_gradient(index), self.values_gradient(index), dslopes);
    }
  }

  // A key/value head and all that read it.
  static void run_head(void* context, int64_t task, int worker) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const Call& call = self.call;
    const int64_t index = call.B * call.G - 1 - task, b = index / call.G, group = call.H / call.G;
    pack_head(self.pack, index, worker, worker);
    self.clear_gradients(worker, {0, self.packed.num_blocks});
    for (int64_t h = index % call.G * group; h < (index % call.G + 1) * group; ++h) {
      double* dslopes = self.dslopes + 2 * (b * call.H + h);
      dslopes[kLeft] = dslopes[kRight] = 0;
      for (int64_t t = 0; t < self.num_tiles; ++t) {
        self.tile(b, h, t, self.scratches[worker], self.keys_gradient(worker), self.values_gradient(worker), dslopes);
      }
    }
    self.collect_rows(index, 0, call.S, worker, 1);
  }

  void tile(int64_t b, int64_t h, int64_t t, Scratch<W>& scratch, W* dk_of, W* dv_of, double* dslopes_of) const {
    const Tile<W> tile(call, packed, b, h, t);
    load_queries<W, In>(tile, packed.padded_D, scratch.q);
    load_output_gradient(tile, scratch);
    W* dq = scratch.acc;
    for (int64_t i = 0; i < tile.padded_rows * packed.padded_D; ++i) dq[i] = 0;
    const Blocks visited = visited_blocks(tile, results.saved);
    // From either end inwards, as the outer blocks may turn out to be negligible.
    bool negligible = true;
    for (int64_t block = visited.first; block <= tile.near_last; ++block) {
      negligible = visit(tile, block, negligible, scratch, dq, dk_of, dv_of);
    }
    negligible = true;
    for (int64_t block = visited.end - 1; block > tile.near_last; --block) {
      negligible = visit(tile, block, negligible, scratch, dq, dk_of, dv_of);
    }
    add_slope_gradients(tile, scratch, dslopes_of);
    const W scale = static_cast<W>(call.scale);
    for (int64_t i = 0; i < tile.rows; ++i) {
      W* to = static_cast<W*>(results.dq) + tile.index(i) * call.D;
      for (int64_t d = 0; d < call.D; ++d) to[d] = dq[i * packed.padded_D + d] * scale;
    }
  }

  // dout and delta divided by the row's sum, so that unnormalised weights serve for normalised ones.
  void load_output_gradient(const Tile<W>& tile, Scratch<W>& scratch) const {
    constexpr int kLanes = Simd<W>::kLanes;
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      W* dout = scratch.dout + i * packed.padded_E;
      scratch.delta[i] = scratch.dscore_sum[i] = scratch.row_sum[i] = scratch.left_out[i] = 0;
      scratch.slope_sum[kLeft][i] = scratch.slope_sum[kRight][i] = 0;
      scratch.reach_sum[kLeft][i] = scratch.reach_sum[kRight][i] = 0;
      scratch.row_max[i] = kInfinity<W>;  // exp(score - inf) = 0: no weight in a row without keys
      const int64_t at = tile.index(i);
      const W log_sum = i < tile.rows ? static_cast<const W*>(results.saved.log_sum)[at] : -kInfinity<W>;
      if (log_sum == -kInfinity<W>) {
        for (int64_t e = 0; e < packed.padded_E; ++e) dout[e] = 0;
        continue;
      }
      scratch.row_max[i] = static_cast<const W*>(results.saved.row_max)[at];
      scratch.row_sum[i] = natural_exp(log_sum);
      const W per_sum = 1 / scratch.row_sum[i];
      const W* given = static_cast<const W*>(results.dout) + at * call.E;
      const W* out = static_cast<const W*>(results.saved.out) + at * call.E;
      Vector<W> products{};
      int64_t e = 0;
      for (; e + kLanes <= call.E; e += kLanes) {
        const Vector<W> x = load(given + e);
        products += x * load(out + e);
        store<W>(dout + e, x * per_sum);
      }
      W delta = sum<W>(products);
      for (; e < call.E; ++e) {
        delta += given[e] * out[e];
        dout[e] = given[e] * per_sum;
      }
      for (; e < packed.padded_E; ++e) dout[e] = 0;
      scratch.delta[i] = (delta - lse_gradient<W>(results, at)) * per_sum;
    }
  }

  // Add what a block gives, unless those beyond were negligible and it is, too. Returns whether it was.
  bool visit(const Tile<W>& tile, int64_t block, bool previous_negligible, Scratch<W>& scratch, W* dq, W* dk_of,
             W* dv_of) const {
    constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
    const Head<W>& head = *tile.head;
    const int64_t rows = tile.padded_rows, D = packed.padded_D, E = packed.padded_E;
    // Keys that no row sees have no part in anything.
    const int64_t shown = tile.shown(block), columns = round_up(shown, kLanes), even = round_up(shown, 2);
    multiply<W>(rows, columns, call.D, scratch.q, D, 1, head.keys_across + block * call.D * kKeys, kKeys, scratch.score,
                kKeys, false);
    const Biased<W> biased(tile, block);
    const bool may_be_left_out =
        previous_negligible && packed.skips && biased.far && head.radius[block] == head.radius[block];
    if (may_be_left_out && is_negligible(biased, static_cast<W>(call.tolerance * (1 - kTailShare)), scratch))
      return true;
    multiply<W>(rows, columns, call.E, scratch.dout, E, 1, head.values_across + block * call.E * kKeys, kKeys,
                scratch.dweight, kKeys, false);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = columns; j < kKeys; ++j) scratch.dweight[i * kKeys + j] = 0;
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
    multiply<W>(even, E, tile.rows, dropped, 1, kKeys, scratch.dout, E, dv_of + block * kKeys * E, E, true);
    for (int64_t i = 0; i < rows; ++i) score_gradients(biased, scratch, i);
    multiply<W>(rows, D, shown, scratch.dweight, kKeys, 1, head.keys + block * kKeys * head.key_row, head.key_row, dq,
                D, true);
    multiply<W>(even, D, tile.rows, scratch.dweight, 1, kKeys, scratch.q, D, dk_of + block * kKeys * D, D, true);
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
      const W error = (scratch.dscore_sum[i] - lse_gradient<W>(results, tile.index(i))) / scratch.row_sum[i];
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
    const int64_t block = task % self.packed.num_blocks, index = task / self.packed.num_blocks, group = call.H / call.G;
    const int64_t first = (index / call.G * call.H + index % call.G * group) * self.num_parts;
    self.collect_rows(index, block * kKeys, (block + 1) * kKeys, first, group * self.num_parts);
  }

  void collect_rows(int64_t index, int64_t from, int64_t to, int64_t first, int64_t count) const {
    const Head<W>& head = packed.heads.data[index];
    const SeenKeys<W> seen(call, index);
    const int64_t D = packed.padded_D, E = packed.padded_E, at = index * call.S + head.first;
    for (int64_t s = larger_of(from, seen.first - head.first); s < smaller_of(to, seen.end - head.first); ++s) {
      W* dk_to = static_cast<W*>(results.dk) + (at + s) * call.D;
      W* dv_to = static_cast<W*>(results.dv) + (at + s) * call.E;
      for (int64_t d = 0; d < call.D; ++d) dk_to[d] = 0;
      for (int64_t e = 0; e < call.E; ++e) dv_to[e] = 0;
      for (int64_t source = first; source < first + count; ++source) {
        if (!blocks[source].holds(s / kKeys)) continue;
        add_to(dk_to, keys_gradient(source) + s * D, call.D);
        add_to(dv_to, values_gradient(source) + s * E, call.E);
      }
    }
  }

  static void add_to(W* sums, const W* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) sums[i] += x[i];
  }
};

template <typename W, typename In>
Status backward_as(const Call& call, const Backward& results) {
  // Enough tasks to share out, whatever the number of threads: the sums must not depend on it.
  constexpr int64_t kEnoughTasks = 16;
  const int64_t num_tiles = round_up(call.T, kRows) / kRows, num_heads = call.B * call.H;
  for (int64_t head = 0; results.dleft && head < num_heads; ++head) {
    static_cast<W*>(results.dleft)[head] = static_cast<W*>(results.dright)[head] = 0;
  }
  clear_unseen_gradients<W>(call, results);
  if (num_heads == 0 || num_tiles == 0) return Status::ok;
  Packed<W> packed(call, true);
  packed.in_place = packed.template can_lie<In>(call.k, call.D);
  packed.by_head =
      packed.is_small(2 * sizeof(W) * (packed.padded_D + packed.padded_E)) && call.B * call.G >= kEnoughTasks;
  int64_t num_parts = packed.by_head ? 1 : smaller_of(round_up(kEnoughTasks, num_heads) / num_heads, num_tiles);
  const int64_t tiles_per_part = round_up(num_tiles, num_parts) / num_parts;
  num_parts = round_up(num_tiles, tiles_per_part) / tiles_per_part;

  const int64_t sums = packed.by_head ? smaller_of(call.num_threads, call.B * call.G) : num_heads * num_parts;
  Buffer<Scratch<W>> scratches;
  Buffer<W> memory, dk, dv;
  Buffer<double> dslopes;
  Buffer<Blocks> blocks;
  if (!packed.allocate(call) || !allocate_scratch(call, packed, scratches, memory) ||
      !dk.allocate(sums, packed.rows, packed.padded_D) || !dv.allocate(sums, packed.rows, packed.padded_E) ||
      !dslopes.allocate(num_heads * num_parts, 2) || !blocks.allocate(sums)) {
    return Status::out_of_memory;
  }
  PackTask<W, In> pack{call, packed};
  BackwardTask<W, In> task{call,      results,        packed,  pack,    scratches.data, num_tiles,
                           num_parts, tiles_per_part, dk.data, dv.data, dslopes.data,   blocks.data};
  if (packed.by_head) {
    parallel(call, call.B * call.G, BackwardTask<W, In>::run_head, &task);
  } else {
    pack_all(pack);
    parallel(call, num_heads * num_parts, BackwardTask<W, In>::run, &task);
    parallel(call, call.B * call.G * packed.num_blocks, BackwardTask<W, In>::collect, &task);
  }
  for (int64_t head = 0; results.dleft && head < num_heads; ++head) {
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
