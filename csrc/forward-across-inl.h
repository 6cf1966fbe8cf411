// Part of attention-inl.h, included within its namespace, for targets that multiply pairs of bfloat16 (LINBIAS_ACROSS).
//
// The forward pass of one tile in products of pairs: as ForwardTask, with these differences. The pivot taken off a
// query's scores is their maximum in the near blocks, or in the first block where there are none, and moves on only
// where the weights of a block would pass kHeadroom: bfloat16 has the exponents of float32, so that until then no
// weight needs to know a better one. A block then takes one pass from products to pairs of weights.

constexpr float kHeadroom = 0x1p40f;  // of the weights of a block, together

template <typename In>
struct ForwardAcross {
  static constexpr int kParts = kPartsOf<In>;
  static constexpr bool kFine = kParts > 1;
  using Biased = BiasedAcross<kFine>;
  const Call& call;
  const Forward& results;
  const AcrossPacked& packed;
  const PackAcross<In>& pack;
  AcrossScratch* scratches;
  int64_t num_tiles;
  float slack;

  static void run(void* context, int64_t task, int worker) {
    const ForwardAcross& self = *static_cast<const ForwardAcross*>(context);
    const int64_t head = self.call.B * self.call.H - 1 - task / self.num_tiles;  // in the order of ForwardTask
    const int64_t t = self.num_tiles - 1 - task % self.num_tiles, b = head / self.call.H, h = head % self.call.H;
    self.tile(b, h, t, b * self.call.G + h / (self.call.H / self.call.G), self.scratches[worker]);
  }

  // A key/value head and all that read it.
  static void run_head(void* context, int64_t task, int worker) {
    const ForwardAcross& self = *static_cast<const ForwardAcross*>(context);
    const int64_t index = self.call.B * self.call.G - 1 - task, group = self.call.H / self.call.G;
    pack_head(self.pack, index, worker, worker);
    for (int64_t h = index % self.call.G * group; h < (index % self.call.G + 1) * group; ++h) {
      for (int64_t t = self.num_tiles - 1; t >= 0; --t) {
        self.tile(index / self.call.G, h, t, worker, self.scratches[worker]);
      }
    }
  }

  void tile(int64_t b, int64_t h, int64_t t, int64_t slot, AcrossScratch& scratch) const {
    const Tile<float> tile(call, packed, b, h, t);
    const Head<float>& head = *tile.head;
    MatrixUnit unit;
    load_queries_across<In>(tile, packed, scratch);
    for (int64_t i = 0; i < kRows; ++i) {
      scratch.pivot[i] = scratch.of.row_max[i] = -kInfinity<float>;
      scratch.of.row_sum[i] = scratch.of.left_out[i] = 0;
    }
    if (packed.certify) measure_queries(tile, scratch);
    __builtin_memset(scratch.acc, 0, sizeof(float) * static_cast<size_t>(kRows * packed.wide_E));

    bool negligible[2][kGroups] = {};
    bool unused[kGroups] = {};
    for (int64_t block = tile.near_last; block >= tile.near_first; --block) {
      visit(unit, tile, slot, block, unused, scratch);
    }
    int64_t next[2] = {tile.near_first - 1, tile.near_last + 1};
    int32_t* visited = results.visited + ((b * call.H + h) * results.visited_tiles + t) * 2;
    visited[kLeft] = visited[kRight] = 0;
    bool open[2] = {!tile.hidden[kLeft] && next[kLeft] >= 0, !tile.hidden[kRight] && next[kRight] < head.num_blocks};
    while (open[kLeft] || open[kRight]) {
      for (int turn = kLeft; turn <= kRight; ++turn) {
        const Side side = static_cast<Side>(turn);
        if (!open[side]) continue;
        if (packed.certify &&
            is_covered(tile, scratch.of, side, next[side], packed.tails_at(call, slot, h, side), slack)) {
          open[side] = false;
          continue;
        }
        visit(unit, tile, slot, next[side], negligible[side], scratch);
        ++visited[side];
        next[side] += side == kLeft ? -1 : 1;
        open[side] = next[side] >= 0 && next[side] < head.num_blocks;
      }
    }
    finish(tile, scratch);
  }

  // What the certificate needs of the queries.
  void measure_queries(const Tile<float>& tile, AcrossScratch& scratch) const {
    const Head<float>& head = *tile.head;
    const float scale = static_cast<float>(call.scale), size = scale < 0 ? -scale : scale;
    const Parts<uint16_t> rows = scratch.rows_of(packed.padded_D, kParts);
    const In* q =
        static_cast<const In*>(call.q.data) + tile.b * call.q.batch + tile.h * call.q.head + tile.start * call.q.row;
    for (int64_t i = 0; i < tile.rows; ++i) {
      Floats squares{}, aligned{};
      for (int64_t d = 0; d < packed.padded_D; d += 16) {
        const Floats x = sum_of_parts<kParts>(rows.data + i * rows.row + d, rows.step);
        squares += x * x;
        aligned += x * load(head.center + d);
      }
      const float norm =
          length_from(sum<float>(squares), q + i * call.q.row, call.D) * size * (1 + slack) * (1 + slack);
      scratch.of.norm[i] = norm;
      scratch.of.base[i] = sum<float>(aligned) * scale + slack * (norm * (head.center_norm + head.largest));
      find_entry(head, scratch.of, i);
    }
    scratch.of.open_row = 0;
  }

  // Add a block to the sums of all queries. negligible says, for each group of them, whether the block before was:
  // then this one is left out if it is negligible, too.
  void visit(MatrixUnit& unit, const Tile<float>& tile, int64_t slot, int64_t block, bool (&negligible)[kGroups],
             AcrossScratch& scratch) const {
    const Head<float>& head = *tile.head;
    const int64_t num_keys = head.num_keys - block * kKeys;
    const Parts<uint16_t> keys = packed.keys_at(slot, block), values = packed.values_transposed_at(slot, block);
    const int weight_parts = kFine ? kParts : call.precise ? 2 : 1;
    const Parts<uint32_t> q = across_of(scratch.q_across, packed.padded_D, kParts),
                          weights = {scratch.pairs, kSide, weight_parts, kPairsStep};
    Biased biased(tile, block, static_cast<float>(call.scale));
    const float allowance = static_cast<float>(call.tolerance * (1 - kTailShare));
    const bool finite = head.radius[block] == head.radius[block];
    const int64_t at_once = packed.groups_at_once();
    for (int64_t first = 0; first * kSide < tile.rows; first += at_once) {
      GroupsAcross groups(tile, biased, block, first, first + at_once, finite);
      groups.multiply(unit, keys, q, scratch.score);
      for (int64_t group = groups.first; group < groups.end; ++group) {
        if (groups.shown[group] == 0) continue;
        biased.turn_to(tile, block, group, finite);
        float* scores = scratch.score + (group - first) * kGroupScores;
        if (negligible[group] && finite && biased.far &&
            is_negligible_across(biased, group, tile.rows, allowance, scores, scratch)) {
          groups.shown[group] = 0;
          continue;
        }
        const Floats added = add_weights(tile, biased, block, group, num_keys, scores,
                                         scratch.pairs + (group - first) * kGroupPairs, scratch);
        const Lanes small = (Lanes)(added * 16.0f <= allowance * load(scratch.of.row_sum + group * kSide));
        negligible[group] = in_all_lanes(small);
      }
      groups.add(unit, packed.wide_E, values, weights, scratch.acc);
    }
  }

  // Turn the products of a group into weights in pairs, and add them up. Returns their sums.
  LINBIAS_INLINE Floats add_weights(const Tile<float>& tile, const Biased& biased, int64_t block, int64_t group,
                                    int64_t num_keys, float* scores, uint32_t* pairs, AcrossScratch& scratch) const {
    float* pivots = scratch.pivot + group * kSide;
    float* sums = scratch.of.row_sum + group * kSide;
    const bool plain = (kFine || !call.precise) && !(call.dropout > 0);
    if (biased.far && in_all_lanes((Lanes)(load(pivots) > -kInfinity<float>))) {
      const Floats base = biased.far_base(load(pivots));
      const auto score = [&](int64_t s) __attribute__((always_inline)) {
        return biased.far_score(load(scores + s * kSide), s, base);
      };
      const Floats added = plain ? round_weights<true>(tile, block, group, kKeys, score, pairs)
                                 : round_weights<false>(tile, block, group, kKeys, score, pairs);
      if (in_all_lanes((Lanes)(added < kHeadroom))) {
        store<float>(sums, load(sums) + added);
        return added;
      }
    }
    move_pivots(biased, group, num_keys, scores, scratch);
    Floats pivot = load(pivots);
    pivot = pivot == -kInfinity<float> ? Floats{} : pivot;  // of a query that has seen no key: its weights are 0
    const auto score = [&](int64_t s) __attribute__((always_inline)) { return load(scores + s * kSide) - pivot; };
    const Floats added = plain ? round_weights<true>(tile, block, group, biased.end_shown, score, pairs)
                               : round_weights<false>(tile, block, group, biased.end_shown, score, pairs);
    store<float>(sums, load(sums) + added);
    return added;
  }

  // Bias the products of a group in place, and raise its pivots to their maxima, with what was summed before.
  LINBIAS_INLINE void move_pivots(const Biased& biased, int64_t group, int64_t num_keys, float* scores,
                                  AcrossScratch& scratch) const {
    Floats high = broadcast(-kInfinity<float>);
    const Floats base = biased.far_base(Floats{});
    for (int64_t s = 0; s < biased.end_shown; ++s) {
      const Floats product = load(scores + s * kSide);
      const Floats x = biased.far ? biased.far_score(product, s, base) : biased.near_score(product, s, num_keys);
      store<float>(scores + s * kSide, x);
      high = larger<float>(x, high);
    }
    const Floats before = load(scratch.pivot + group * kSide);
    // As backward will find the pivot from row_max.
    const Floats row_max = kFine ? high : high * kLn2Across, found = row_max * Biased::kUnit;
    const Lanes raised = (Lanes)(found > before);
    if (in_all_lanes(~raised)) return;
    const Floats pivot = raised ? found : before, shrink = raised ? Biased::weight(before - pivot) : broadcast(1.0f);
    store<float>(scratch.pivot + group * kSide, pivot);
    float* maxima = scratch.of.row_max + group * kSide;
    store<float>(maxima, raised ? row_max : load(maxima));
    float *sums = scratch.of.row_sum + group * kSide, *left_out = scratch.of.left_out + group * kSide;
    store<float>(sums, load(sums) * shrink);
    store<float>(left_out, load(left_out) * shrink);
    float* acc = scratch.acc + group * kSide * packed.wide_E;
    for (int64_t e = 0; e < packed.wide_E; ++e) store<float>(acc + e * kSide, load(acc + e * kSide) * shrink);
  }

  // 2^score in pairs of keys and in parts; the sum of what it was. Where it does not matter what rounding loses
  // (kPlain), a bfloat16 is one part.
  template <bool kPlain, typename Score>
  LINBIAS_INLINE Floats round_weights(const Tile<float>& tile, int64_t block, int64_t group, int64_t shown,
                                      const Score& score, uint32_t* pairs) const {
    constexpr int kWeightParts = kFine ? kParts : kPlain ? 1 : 2;
    Floats total[2] = {};
    if constexpr (kPlain) {
#pragma GCC unroll 2
      for (int64_t s = 0; s < shown; s += 2) {
        const Floats even = Biased::weight(score(s)), odd = Biased::weight(score(s + 1));
        total[0] += even;
        total[1] += odd;
        store_pairs<kWeightParts>(even, odd, pairs + s / 2 * kSide, kPairsStep);
      }
      return total[0] + total[1];
    }
    const DropoutAcross dropout(tile);
    for (int64_t s = 0; s < shown; s += 2) {
      Floats even = Biased::weight(score(s)), odd = Biased::weight(score(s + 1));
      total[0] += even;
      total[1] += odd;
      if (call.dropout > 0) {
        even = dropout.apply(tile, group, block * kKeys + s, even);
        odd = dropout.apply(tile, group, block * kKeys + s + 1, odd);
      }
      store_pairs<kWeightParts>(even, odd, pairs + s / 2 * kSide, kPairsStep);
    }
    return total[0] + total[1];
  }

  void finish(const Tile<float>& tile, AcrossScratch& scratch) const {
    for (int64_t group = 0; group * kSide < tile.rows; ++group) {
      const int64_t rows = smaller_of(tile.rows - group * kSide, kSide), at = tile.index(group * kSide);
      const float* row_sum = scratch.of.row_sum + group * kSide;
      const Floats sums = load(row_sum), share = 1.0f / (sums == 0.0f ? broadcast(1.0f) : sums);
      const float* acc = scratch.acc + group * kSide * packed.wide_E;
      if (results.narrow) {
        store_transposed(acc, packed.wide_E, share, rows, call.E, static_cast<uint16_t*>(results.out) + at * call.E);
      } else {
        store_transposed(acc, packed.wide_E, share, rows, call.E, static_cast<float*>(results.out) + at * call.E);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const float row_max = scratch.of.row_max[group * kSide + i];
        static_cast<float*>(results.row_max)[at + i] = row_max;
        // What a pivot in bits lost by rounding on its way to row_max goes to log_sum.
        const double bits = static_cast<double>(scratch.pivot[group * kSide + i]);
        const bool in_bits = !kFine && row_max - row_max == 0;
        const float lost =
            in_bits ? static_cast<float>(bits * 0.6931471805599453 - static_cast<double>(row_max)) : 0.0f;
        static_cast<float*>(results.log_sum)[at + i] = __builtin_logf(row_sum[i]) + lost;
      }
    }
  }
};

// Calls whose inputs are multiplied in pairs.
template <typename In>
Status forward_across(const Call& call, const Forward& results) {
  constexpr int64_t kEnoughHeads = 4;  // for each thread: they differ in length
  AcrossPacked packed(call, kPartsOf<In>, false);
  AcrossScratches scratches;
  packed.by_head = packed.is_head_small() && call.B * call.G >= kEnoughHeads * call.num_threads;
  if (!packed.allocate(call) || !scratches.allocate(call, packed)) return Status::out_of_memory;
  PackAcross<In> pack(call, packed);
  const int64_t num_tiles = round_up(call.T, kRows) / kRows;
  ForwardAcross<In> task{call, results, packed, pack, scratches.each.data, num_tiles, slack_of<float>(call.D)};
  if (packed.by_head) {
    parallel(call, call.B * call.G, ForwardAcross<In>::run_head, &task);
  } else {
    pack_all(pack);
    parallel(call, call.B * call.H * num_tiles, ForwardAcross<In>::run, &task);
  }
  return Status::ok;
}
