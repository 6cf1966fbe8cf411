// Part of attention-inl.h, included within its namespace.
//
// The forward pass of one tile: near to far, with an online softmax, until the certificate holds.

template <typename W, typename In>
struct ForwardTask {
  const Call& call;
  const Forward& results;
  const Packed<W>& packed;
  const PackTask<W, In>& pack;
  Scratch<W>* scratches;
  int64_t num_tiles;
  W slack;

  static void run(void* context, int64_t task, int worker) {
    const ForwardTask& self = *static_cast<const ForwardTask*>(context);
    // The flattest heads and the last tiles of a causal call have most to do: they come first. Neighbouring tiles read
    // much the same keys, so they follow each other.
    const int64_t head = self.call.B * self.call.H - 1 - task / self.num_tiles;
    const int64_t t = self.num_tiles - 1 - task % self.num_tiles, b = head / self.call.H, h = head % self.call.H;
    self.tile(b, h, t, b * self.call.G + h / (self.call.H / self.call.G), self.scratches[worker]);
  }

  // A key/value head and all that read it.
  static void run_head(void* context, int64_t task, int worker) {
    const ForwardTask& self = *static_cast<const ForwardTask*>(context);
    const int64_t index = self.call.B * self.call.G - 1 - task, group = self.call.H / self.call.G;
    pack_head(self.pack, index, worker, worker);
    for (int64_t h = index % self.call.G * group; h < (index % self.call.G + 1) * group; ++h) {
      for (int64_t t = self.num_tiles - 1; t >= 0; --t) {
        self.tile(index / self.call.G, h, t, worker, self.scratches[worker]);
      }
    }
  }

  void tile(int64_t b, int64_t h, int64_t t, int64_t slot, Scratch<W>& scratch) const {
    const Tile<W> tile(call, packed, b, h, t);
    const Head<W>& head = *tile.head;
    load_queries<W, In>(tile, packed.padded_D, scratch.q);
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      scratch.row_max[i] = -kInfinity<W>;
      scratch.row_sum[i] = scratch.left_out[i] = 0;
    }
    if (packed.certify) measure_queries(tile, scratch);
    for (int64_t i = 0; i < tile.padded_rows * packed.padded_E; ++i) scratch.acc[i] = 0;

    for (int64_t block = tile.near_last; block >= tile.near_first; --block) visit(tile, block, false, scratch);
    int64_t next[2] = {tile.near_first - 1, tile.near_last + 1};
    int32_t* visited = results.visited + ((b * call.H + h) * results.visited_tiles + t) * 2;
    visited[kLeft] = visited[kRight] = 0;
    bool open[2] = {!tile.hidden[kLeft] && next[kLeft] >= 0, !tile.hidden[kRight] && next[kRight] < head.num_blocks};
    bool negligible[2] = {false, false};  // whether the block visited last on a side was
    while (open[kLeft] || open[kRight]) {
      for (int turn = kLeft; turn <= kRight; ++turn) {
        const Side side = static_cast<Side>(turn);
        if (!open[side]) continue;
        if (packed.certify &&
            is_covered(tile, scratch, side, next[side], packed.tails_at(call, slot, h, side), slack)) {
          open[side] = false;
          continue;
        }
        const bool may_be_left_out =
            negligible[side] && packed.skips && head.radius[next[side]] == head.radius[next[side]];
        negligible[side] = visit(tile, next[side], may_be_left_out, scratch);
        ++visited[side];
        next[side] += side == kLeft ? -1 : 1;
        open[side] = next[side] >= 0 && next[side] < head.num_blocks;
      }
    }
    finish(tile, scratch);
  }

  // What the certificate needs of the queries.
  void measure_queries(const Tile<W>& tile, Scratch<W>& scratch) const {
    constexpr int kLanes = Simd<W>::kLanes;
    const Head<W>& head = *tile.head;
    for (int64_t i = 0; i < tile.rows; ++i) {
      Vector<W> squares{}, aligned{};
      for (int64_t d = 0; d < packed.padded_D; d += kLanes) {
        const Vector<W> x = load(scratch.q + i * packed.padded_D + d);
        squares += x * x;
        aligned += x * load(head.center + d);
      }
      const W* query = scratch.q + i * packed.padded_D;
      scratch.norm[i] = length_from(sum<W>(squares), query, call.D) * (1 + slack) * (1 + slack);
      scratch.base[i] = sum<W>(aligned) + slack * (scratch.norm[i] * (head.center_norm + head.largest));
      find_entry(head, scratch, i);
    }
    scratch.open_row = 0;
  }

  // Add a block to the sums of all rows, unless the block before it was negligible and its own scores are, too. Returns
  // whether it was: little is left to add beyond it.
  bool visit(const Tile<W>& tile, int64_t block, bool previous_negligible, Scratch<W>& scratch) const {
    const Head<W>& head = *tile.head;
    // What lies in `score` beyond is hidden from every row.
    const int64_t shown = tile.shown(block), columns = round_up(shown, Simd<W>::kLanes);
    multiply<W>(tile.padded_rows, columns, call.D, scratch.q, packed.padded_D, 1,
                head.keys_across + block * call.D * kKeys, kKeys, scratch.score, kKeys, false);
    const Biased<W> biased(tile, block);
    const W allowance = static_cast<W>(call.tolerance * (1 - kTailShare));
    if (previous_negligible && is_negligible(biased, allowance, scratch)) return true;
    int matters = 0;
    for (int64_t i = 0; i < tile.rows; ++i) {
      const W added = online_softmax(biased, scratch, i);
      matters |= !(added * 16 <= allowance * scratch.row_sum[i]);
    }
    W* weight = scratch.score;
    if (call.dropout > 0) {
      weight = scratch.dropped;
      Dropout(tile).apply(tile, block, scratch.score, weight);
    }
    multiply<W>(tile.padded_rows, packed.padded_E, shown, weight, kKeys, 1,
                head.values + block * kKeys * head.value_row, head.value_row, scratch.acc, packed.padded_E, true);
    return !matters;
  }

  // Turn the products of row i into weights, and what was summed before to the new maximum. Returns their sum.
  LINBIAS_INLINE W online_softmax(const Biased<W>& biased, Scratch<W>& scratch, int64_t i) const {
    constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
    Vector<W> x[kVectors];
    W* row = scratch.score + i * kKeys;
    biased.row(i, row, x);
    Vector<W> high = x[0];
#pragma GCC unroll 16
    for (int j = 1; j < kVectors; ++j) high = larger<W>(high, x[j]);
    const W found = largest<W>(high)[0];
    if (found > scratch.row_max[i]) {
      const W shrink = exponential<W>(broadcast(scratch.row_max[i] - found))[0];
      scratch.row_max[i] = found;
      scratch.row_sum[i] *= shrink;
      scratch.left_out[i] *= shrink;
      W* acc = scratch.acc + i * packed.padded_E;
      for (int64_t e = 0; e < packed.padded_E; e += kLanes) store<W>(acc + e, load(acc + e) * shrink);
    }
    // A row that has seen no key has no maximum, and any finite pivot makes its weights 0.
    const W pivot = scratch.row_max[i] == -kInfinity<W> ? W{0} : scratch.row_max[i];
    Vector<W> total{};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> weight = exponential<W>(x[j] - pivot);
      total += weight;
      store<W>(row + j * kLanes, weight);
    }
    const W added = sum<W>(total);
    scratch.row_sum[i] += added;
    return added;
  }

  void finish(const Tile<W>& tile, const Scratch<W>& scratch) const {
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t at = tile.index(i);
      const W row_sum = scratch.row_sum[i], share = 1 / (row_sum == 0 ? W{1} : row_sum);
      store_output<W>(results, at * call.E, call.E, scratch.acc + i * packed.padded_E, share);
      static_cast<W*>(results.row_max)[at] = scratch.row_max[i];
      static_cast<W*>(results.log_sum)[at] = natural_log(row_sum);
    }
  }
};
