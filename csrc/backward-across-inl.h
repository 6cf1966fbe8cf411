// Part of attention-inl.h, included within its namespace, for targets that multiply pairs of bfloat16 (LINBIAS_ACROSS).
//
// The backward pass of one tile in products of pairs, over the blocks that forward visited: as BackwardTask, with these
// differences. For bfloat16 weights are divided by their sum within their exponents, and rounded to bfloat16 where they
// enter a product, as are gradients of scores; for float32 both go in as sums of three. dout goes in as the sum of as
// many as hold it: one for a gradient of bfloat16, and three for any. Sums of gradients of scores are float32
// throughout.

template <typename In>
struct BackwardAcross {
  static constexpr int kParts = kPartsOf<In>;
  static constexpr bool kFine = kParts > 1;
  using Biased = BiasedAcross<kFine>;
  // Weights, and gradients of scores, lie in rows[keys, queries]: of bfloat16 for the tile, of float32 for each group,
  // in pairs of parts, [kinds, groups, keys, 16] words.
  static constexpr int64_t kColumns = kFine ? 2 * kSide : kQueriesAcross;
  static constexpr int64_t kKindStep = kGroups * kKeys * kSide;  // words
  const Call& call;
  const Backward& results;
  const AcrossPacked& packed;
  const PackAcross<In>& pack;
  AcrossScratch* scratches;
  int64_t num_tiles, num_parts, tiles_per_part;
  float *dk, *dv;   // [B, H, parts, rows, wide_D or wide_E], or by head [threads, rows, ...]
  double* dslopes;  // [B, H, parts, 2]
  Blocks* blocks;   // those in which dk and dv hold anything: [B, H, parts] or [threads]

  // The gradients of keys and values that a task or worker adds to.
  float* keys_gradient(int64_t index) const { return dk + index * packed.rows * packed.wide_D; }
  float* values_gradient(int64_t index) const { return dv + index * packed.rows * packed.wide_E; }
  void clear_gradients(int64_t index, Blocks of) const {
    blocks[index] = of;
    clear_blocks(keys_gradient(index), packed.wide_D, of);
    clear_blocks(values_gradient(index), packed.wide_E, of);
  }

  static void run(void* context, int64_t task, int worker) {
    const BackwardAcross& self = *static_cast<const BackwardAcross*>(context);
    const Call& call = self.call;
    const int64_t index = call.B * call.H * self.num_parts - 1 - task;  // in the order of BackwardTask
    const int64_t part = index % self.num_parts, b = index / self.num_parts / call.H,
                  h = index / self.num_parts % call.H;
    const int64_t from = part * self.tiles_per_part, to = smaller_of(from + self.tiles_per_part, self.num_tiles);
    self.clear_gradients(index, visited_blocks(call, self.packed, self.results.saved, b, h, from, to));
    double* dslopes = self.dslopes + 2 * index;
    dslopes[kLeft] = dslopes[kRight] = 0;
    const int64_t slot = b * call.G + h / (call.H / call.G);
    for (int64_t t = from; t < to; ++t) {
      self.tile(b, h, t, slot, self.scratches[worker], self.keys_gradient(index), self.values_gradient(index), dslopes);
    }
  }

  // A key/value head and all that read it.
  static void run_head(void* context, int64_t task, int worker) {
    const BackwardAcross& self = *static_cast<const BackwardAcross*>(context);
    const Call& call = self.call;
    const int64_t index = call.B * call.G - 1 - task, b = index / call.G, group = call.H / call.G;
    pack_head(self.pack, index, worker, worker);
    self.clear_gradients(worker, {0, self.packed.num_blocks});
    for (int64_t h = index % call.G * group; h < (index % call.G + 1) * group; ++h) {
      double* dslopes = self.dslopes + 2 * (b * call.H + h);
      dslopes[kLeft] = dslopes[kRight] = 0;
      for (int64_t t = 0; t < self.num_tiles; ++t) {
        self.tile(b, h, t, worker, self.scratches[worker], self.keys_gradient(worker), self.values_gradient(worker),
                  dslopes);
      }
    }
    self.collect_rows(index, 0, call.S, worker, 1);
  }

  void tile(int64_t b, int64_t h, int64_t t, int64_t slot, AcrossScratch& scratch, float* dk_of, float* dv_of,
            double* dslopes_of) const {
    const Tile<float> tile(call, packed, b, h, t);
    MatrixUnit unit;
    load_queries_across<In>(tile, packed, scratch);
    lay_depth(scratch.rows_of(packed.padded_D, kParts), packed.wide_D, scratch.q_pairs);
    const int dout_parts = load_output_gradient(tile, scratch);
    __builtin_memset(scratch.acc, 0, sizeof(float) * static_cast<size_t>(kRows * packed.wide_D));
    for (int64_t group = round_up(tile.rows, kSide) / kSide; !kFine && group < kQueriesAcross / kSide; ++group) {
      clear(scratch, group, 0);
    }
    const Blocks visited = visited_blocks(tile, results.saved);
    // From either end inwards, as the outer blocks may turn out to be negligible.
    bool negligible[2][kGroups];
    for (int64_t group = 0; group < kGroups; ++group) negligible[kLeft][group] = negligible[kRight][group] = true;
    for (int64_t block = visited.first; block <= tile.near_last; ++block) {
      visit(unit, tile, slot, block, dout_parts, negligible[kLeft], scratch, dk_of, dv_of);
    }
    for (int64_t block = visited.end - 1; block > tile.near_last; --block) {
      visit(unit, tile, slot, block, dout_parts, negligible[kRight], scratch, dk_of, dv_of);
    }
    add_slope_gradients(tile, scratch, dslopes_of);
    store_query_gradients(tile, scratch);
  }

  // The gradient of the output in the forms that products want, and what is known of each query. Returns in how many
  // parts. For float32 dout and delta are divided by the row's sum, so that weights need not be.
  int load_output_gradient(const Tile<float>& tile, AcrossScratch& scratch) const {
    Scratch<float>& of = scratch.of;
    for (int64_t i = 0; i < kRows; ++i) {
      of.delta[i] = of.dscore_sum[i] = of.left_out[i] = 0;
      of.slope_sum[kLeft][i] = of.slope_sum[kRight][i] = of.reach_sum[kLeft][i] = of.reach_sum[kRight][i] = 0;
      of.row_sum[i] = 1;
      scratch.pivot[i] = kInfinity<float>;  // 2^(score - inf) = 0: no weight in a row without keys
    }
    const int64_t at = tile.index(0), E = call.E, deep_E = packed.padded_E;
    const float* given = static_cast<const float*>(results.dout) + at * E;
    const float* out = static_cast<const float*>(results.saved.out) + at * E;
    Words beyond[kMostParts] = {};  // whether some part is not 0
    for (int64_t i = 0; i < (kFine ? kRows : kQueriesAcross); ++i) {
      const bool seen = i < tile.rows && find_pivot(tile, i, scratch);
      const float per_sum = seen ? 1 / of.row_sum[i] : 1;
      Floats delta{};
      for (int64_t e = 0; e < deep_E; e += 32) {
        Floats x[2] = {}, y[2] = {};
        const size_t bytes = sizeof(float) * static_cast<size_t>(seen ? smaller_of(larger_of(E - e, 0), 32) : 0);
        if (bytes == sizeof x) {
          __builtin_memcpy(x, given + i * E + e, sizeof x);
          __builtin_memcpy(y, out + i * E + e, sizeof y);
        } else if (bytes > 0) {
          __builtin_memcpy(x, given + i * E + e, bytes);
          __builtin_memcpy(y, out + i * E + e, bytes);
        }
        delta += x[0] * y[0] + x[1] * y[1];
        uint16_t* to = scratch.rows + i * deep_E + e;
        const auto put = [&](int part, Words first, Words second) __attribute__((always_inline)) {
          beyond[part] |= (first | second) & 0x7fff0000u;
          store_upper_halves(first, second, to + part * kQueriesAcross * deep_E);
        };
        split(x[0] * per_sum, x[1] * per_sum, put);
      }
      if (seen) of.delta[i] = (sum<float>(delta) - lse_gradient<float>(results, at + i)) * per_sum;
    }
    int parts = kMostParts;
    while (!kFine && parts > 1 && in_all_lanes((Lanes)(beyond[parts - 1] == 0u))) --parts;
    const Parts<uint16_t> dout = scratch.rows_of(deep_E, parts);
    lay_across(dout, tile.rows, across_of(scratch.dout_across, deep_E, parts));
    lay_depth(dout, packed.wide_E, scratch.dout_pairs);
    return parts;
  }

  // Rows of queries as the second factor of products with their depth.
  static void lay_depth(Parts<uint16_t> rows, int64_t columns, uint32_t* to) {
    if constexpr (kFine) {
      lay_pairs_of_parts(rows, kRows, columns, {to, columns, kOtherPairKinds, kRows * columns});
    } else {
      lay_in_pairs(rows, kQueriesAcross, columns, {to, columns, rows.count, kQueriesAcross / 2 * columns});
    }
  }

  // The pivot of a row, and for float32 its sum, as forward left them. Returns whether it has seen a key.
  bool find_pivot(const Tile<float>& tile, int64_t i, AcrossScratch& scratch) const {
    const float row_max = static_cast<const float*>(results.saved.row_max)[tile.index(i)];
    const float log_sum = static_cast<const float*>(results.saved.log_sum)[tile.index(i)];
    if (log_sum == -kInfinity<float>) return false;
    scratch.pivot[i] = row_max * Biased::kUnit;
    if constexpr (kFine) scratch.of.row_sum[i] = natural_exp(log_sum);
    else scratch.pivot[i] += log_sum * Biased::kUnit;
    return true;
  }

  // Zeros for the weights of a group and their gradients, from some key on.
  static void clear(AcrossScratch& scratch, int64_t group, int64_t from) {
    const HalfWords zeros{};
    for (int64_t at = from * kColumns + group * kSide; at < kKeys * kColumns; at += kColumns) {
      __builtin_memcpy(scratch.weight_rows + at, &zeros, sizeof zeros);
      __builtin_memcpy(scratch.dscore_rows + at, &zeros, sizeof zeros);
    }
  }

  static uint32_t* words_of(uint16_t* rows) { return reinterpret_cast<uint32_t*>(rows); }

  // Add what a block gives, unless for a group of queries those beyond were negligible and it is, too.
  void visit(MatrixUnit& unit, const Tile<float>& tile, int64_t slot, int64_t block, int dout_parts,
             bool (&negligible)[kGroups], AcrossScratch& scratch, float* dk_of, float* dv_of) const {
    const Head<float>& head = *tile.head;
    const Parts<uint16_t> keys = packed.keys_at(slot, block), values = packed.values_at(slot, block),
                          keys_transposed = packed.keys_transposed_at(slot, block);
    const Parts<uint32_t> q = across_of(scratch.q_across, packed.padded_D, kParts),
                          dout = across_of(scratch.dout_across, packed.padded_E, dout_parts),
                          dscores = {scratch.pairs, kSide, kParts, kPairsStep};
    const bool finite = head.radius[block] == head.radius[block];
    const float allowance = static_cast<float>(call.tolerance * (1 - kTailShare));
    Biased biased(tile, block, static_cast<float>(call.scale));
    float *dk_at = dk_of + block * kKeys * packed.wide_D, *dv_at = dv_of + block * kKeys * packed.wide_E;
    int64_t most_shown = 0, all_shown[kGroups] = {};
    const int64_t at_once = packed.groups_at_once();
    for (int64_t first = 0; first * kSide < tile.rows; first += at_once) {
      GroupsAcross groups(tile, biased, block, first, first + at_once, finite);
      groups.multiply(unit, keys, q, scratch.score);
      for (int64_t group = groups.first; group < groups.end; ++group) {
        int64_t& shown = groups.shown[group];
        if (shown > 0 && negligible[group]) {
          biased.turn_to(tile, block, group, finite);
          negligible[group] = finite && biased.far &&
                              is_negligible_across(biased, group, tile.rows, allowance,
                                                   scratch.score + (group - first) * kGroupScores, scratch);
          if (negligible[group]) shown = 0;
        }
        if constexpr (!kFine) clear(scratch, group, shown);
        most_shown = larger_of(most_shown, shown);
        all_shown[group] = shown;
      }
      groups.multiply(unit, values, dout, scratch.dweight);
      for (int64_t group = groups.first; group < groups.end; ++group) {
        if (groups.shown[group] == 0) continue;
        biased.turn_to(tile, block, group, finite);
        score_gradients(tile, biased, block, group, group - first, groups.shown[group], scratch);
      }
      groups.add(unit, packed.wide_D, keys_transposed, dscores, scratch.acc);
    }
    if (most_shown == 0) return;
    add_over_queries(unit, tile.rows, most_shown, all_shown, packed.wide_E, dout_parts, scratch.weight_rows,
                     scratch.dout_pairs, dv_at);
    add_over_queries(unit, tile.rows, most_shown, all_shown, packed.wide_D, 1, scratch.dscore_rows, scratch.q_pairs,
                     dk_at);
  }

  // to[keys, size] += rows[keys, queries] times what lay_depth laid.
  static void add_over_queries(MatrixUnit& unit, int64_t queries, int64_t keys,
                               [[maybe_unused]] const int64_t (&shown)[kGroups], int64_t size, int parts,
                               uint16_t* rows, uint32_t* pairs, float* to) {
#if defined(LINBIAS_AMX)
    if constexpr (kFine) {
      add_groups(unit, keys, size, round_up(queries, kSide) / kSide, shown, {rows, kColumns, kPairKinds, 2 * kKindStep},
                 kKeys * kColumns, {pairs, size, kOtherPairKinds, kRows * size}, kSide * size, to);
      return;
    }
#endif
    for (int part = 0; part < parts; ++part) {
      add_product(unit, keys, size, round_up(queries, kDeep), rows, kColumns, pairs + part * kQueriesAcross / 2 * size,
                  to);
    }
  }

  LINBIAS_INLINE void score_gradients(const Tile<float>& tile, const Biased& biased, int64_t block, int64_t group,
                                      int64_t slot, int64_t shown, AcrossScratch& scratch) const {
    const Floats pivot = load(scratch.pivot + group * kSide), base = biased.far_base(pivot);
    const float* scores = scratch.score + slot * kGroupScores;
    const int64_t num_keys = tile.head->num_keys - block * kKeys;
    const Weighing weighing{tile, biased, block, group, slot, shown};
    const auto keep = [](int64_t, Floats x) __attribute__((always_inline)) { return x; };
    if (biased.far && !(call.dropout > 0)) {
      const auto score = [&](int64_t s) __attribute__((always_inline)) {
        return biased.far_score(load(scores + s * kSide), s, base);
      };
      if (results.dleft) gradients_of<true>(weighing, score, keep, scratch);
      else gradients_of<false>(weighing, score, keep, scratch);
      return;
    }
    const auto score = [&](int64_t s) __attribute__((always_inline)) {
      const Floats product = load(scores + s * kSide);
      return biased.far ? biased.far_score(product, s, base) : biased.near_score(product, s, num_keys) - pivot;
    };
    if (call.dropout > 0) {
      const DropoutAcross dropout(tile);
      const auto drop = [&](int64_t s, Floats x)
                            __attribute__((always_inline)) { return dropout.apply(tile, group, block * kKeys + s, x); };
      gradients_of<true>(weighing, score, drop, scratch);
    } else {
      gradients_of<true>(weighing, score, keep, scratch);
    }
  }

  // A group of queries and a block of keys, of which it is shown the first; `slot` counts groups handled together.
  struct Weighing {
    const Tile<float>& tile;
    const Biased& biased;
    int64_t block, group, slot, shown;
  };

  // Turn the products of a group into weights and gradients of scores, in the forms that products want, and sum what
  // the slopes need, if they need it. drop(key, x) is x for the queries that keep the key under dropout.
  template <bool kSlopes, typename Score, typename Drop>
  LINBIAS_INLINE void gradients_of(const Weighing& of, const Score& score, const Drop& drop,
                                   AcrossScratch& scratch) const {
    const Biased& biased = of.biased;
    const Floats delta = load(scratch.of.delta + of.group * kSide);
    const float* dweights = scratch.dweight + of.slot * kGroupScores;
    Floats total{}, slope[2] = {}, reach[2] = {};
    const bool one_side = biased.far || biased.hidden[kRight];
    for (int64_t s = 0; s < of.shown; s += 2) {
      Floats weight[2], dscore[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        weight[i] = Biased::weight(score(s + i));
        const Floats dweight = drop(s + i, load(dweights + (s + i) * kSide));
        dscore[i] = weight[i] * (dweight - delta);
        if constexpr (kSlopes) {
          const Floats distance = biased.reach(s + i);
          total += dscore[i];
          if (one_side) {
            slope[kLeft] += dscore[i] * distance;
            reach[kLeft] += weight[i] * distance;
          } else {
            const Floats left = distance > 0.0f ? distance : Floats{}, right = left - distance;
            slope[kLeft] += dscore[i] * left;
            reach[kLeft] += weight[i] * left;
            slope[kRight] += dscore[i] * right;
            reach[kRight] += weight[i] * right;
          }
        }
        weight[i] = drop(s + i, weight[i]);
      }
      store_weights(weight, dscore, of, s, scratch);
    }
    if constexpr (!kSlopes) return;
    // In a block to the right all distances are negative.
    const bool to_the_right = biased.far && of.block > of.tile.near_last;
    const int nearer = to_the_right ? kRight : kLeft;
    Scratch<float>& sums = scratch.of;
    const int64_t at = of.group * kSide;
    add_to(sums.dscore_sum + at, total);
    add_to(sums.slope_sum[nearer] + at, to_the_right ? -slope[kLeft] : slope[kLeft]);
    add_to(sums.reach_sum[nearer] + at, to_the_right ? -reach[kLeft] : reach[kLeft]);
    if (one_side) return;
    add_to(sums.slope_sum[kRight] + at, slope[kRight]);
    add_to(sums.reach_sum[kRight] + at, reach[kRight]);
  }

  // The weights of two keys and the gradients of their scores, as rows, and of these as pairs, too.
  LINBIAS_INLINE static void store_weights(const Floats (&weight)[2], const Floats (&dscore)[2], const Weighing& of,
                                           int64_t s, AcrossScratch& scratch) {
    uint32_t* pairs = scratch.pairs + of.slot * kGroupPairs + s / 2 * kSide;
    if constexpr (kFine) {
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (of.group * kKeys + s + i) * kSide;
        store_pairs_of_parts(weight[i], words_of(scratch.weight_rows) + at, kKindStep);
        store_pairs_of_parts(dscore[i], words_of(scratch.dscore_rows) + at, kKindStep);
      }
      store_pairs<kParts>(dscore[0], dscore[1], pairs, kPairsStep);
    } else {
      const int64_t at = s * kColumns + of.group * kSide;
      uint16_t *weights = scratch.weight_rows + at, *dscores = scratch.dscore_rows + at;
      round_to_pairs<true>(weight[0], weight[1], weights, weights + kColumns);
      store_words(pairs, round_to_pairs<true>(dscore[0], dscore[1], dscores, dscores + kColumns));
    }
  }

  LINBIAS_INLINE static void add_to(float* sums, Floats x) { store<float>(sums, load(sums) + x); }

  // As BackwardTask's.
  void add_slope_gradients(const Tile<float>& tile, const AcrossScratch& scratch, double* dslopes_of) const {
    const Scratch<float>& of = scratch.of;
    for (int64_t i = 0; i < tile.rows; ++i) {
      if (scratch.pivot[i] == kInfinity<float>) continue;
      const float error = (of.dscore_sum[i] - lse_gradient<float>(results, tile.index(i))) / of.row_sum[i];
      for (int side = kLeft; side <= kRight; ++side) {
        if (tile.hidden[side]) continue;
        dslopes_of[side] -= static_cast<double>(of.slope_sum[side][i] - error * of.reach_sum[side][i]);
      }
    }
  }

  void store_query_gradients(const Tile<float>& tile, const AcrossScratch& scratch) const {
    for (int64_t group = 0; group * kSide < tile.rows; ++group) {
      const Floats scale = broadcast(static_cast<float>(call.scale));
      store_transposed(scratch.acc + group * kSide * packed.wide_D, packed.wide_D, scale,
                       smaller_of(tile.rows - group * kSide, kSide), call.D,
                       static_cast<float*>(results.dq) + tile.index(group * kSide) * call.D);
    }
  }

  // Add up what the query heads of a group, and the parts of each, found for one block of a key/value head.
  static void collect(void* context, int64_t task, int) {
    const BackwardAcross& self = *static_cast<const BackwardAcross*>(context);
    const Call& call = self.call;
    const int64_t block = task % self.packed.num_blocks, index = task / self.packed.num_blocks, group = call.H / call.G;
    const int64_t first = (index / call.G * call.H + index % call.G * group) * self.num_parts;
    self.collect_rows(index, block * kKeys, (block + 1) * kKeys, first, group * self.num_parts);
  }

  void collect_rows(int64_t index, int64_t from, int64_t to, int64_t first, int64_t count) const {
    const Head<float>& head = packed.heads.data[index];
    const int64_t rows = packed.rows, at = index * call.S + head.first;
    const SeenKeys<float> seen(call, index);
    for (int64_t s = larger_of(from, seen.first - head.first); s < smaller_of(to, seen.end - head.first); ++s) {
      const auto add_up = [&](const float* gradients, int64_t wide, int64_t size, float factor, float* to_row) {
        for (int64_t x = 0; x < size; x += kSide) {
          Floats total{};
          for (int64_t source = first; source < first + count; ++source) {
            if (blocks[source].holds(s / kKeys)) total += load(gradients + (source * rows + s) * wide + x);
          }
          total *= factor;
          if (x + kSide <= size) store<float>(to_row + x, total);
          else __builtin_memcpy(to_row + x, &total, sizeof(float) * static_cast<size_t>(size - x));
        }
      };
      add_up(dk, packed.wide_D, call.D, static_cast<float>(call.scale),
             static_cast<float*>(results.dk) + (at + s) * call.D);
      add_up(dv, packed.wide_E, call.E, 1.0f, static_cast<float*>(results.dv) + (at + s) * call.E);
    }
  }
};

// Calls whose inputs are multiplied in pairs.
template <typename In>
Status backward_across(const Call& call, const Backward& results) {
  constexpr int64_t kEnoughTasks = 16;  // as in backward_as
  const int64_t num_tiles = round_up(call.T, kRows) / kRows, num_heads = call.B * call.H;
  for (int64_t head = 0; results.dleft && head < num_heads; ++head) {
    static_cast<float*>(results.dleft)[head] = static_cast<float*>(results.dright)[head] = 0;
  }
  clear_unseen_gradients<float>(call, results);
  if (num_heads == 0 || num_tiles == 0) return Status::ok;
  AcrossPacked packed(call, kPartsOf<In>, true);
  AcrossScratches scratches;
  Buffer<float> dk, dv;
  Buffer<double> dslopes;
  Buffer<Blocks> blocks;
  packed.by_head = packed.is_head_small() && call.B * call.G >= kEnoughTasks;
  int64_t num_parts = packed.by_head ? 1 : smaller_of(round_up(kEnoughTasks, num_heads) / num_heads, num_tiles);
  const int64_t tiles_per_part = round_up(num_tiles, num_parts) / num_parts;
  num_parts = round_up(num_tiles, tiles_per_part) / tiles_per_part;
  const int64_t sums = packed.by_head ? smaller_of(call.num_threads, call.B * call.G) : num_heads * num_parts;
  if (!packed.allocate(call) || !scratches.allocate(call, packed) || !dk.allocate(sums, packed.rows, packed.wide_D) ||
      !dv.allocate(sums, packed.rows, packed.wide_E) || !dslopes.allocate(num_heads * num_parts, 2) ||
      !blocks.allocate(sums)) {
    return Status::out_of_memory;
  }
  PackAcross<In> pack(call, packed);
  BackwardAcross<In> task{call,      results,        packed,  pack,    scratches.each.data, num_tiles,
                          num_parts, tiles_per_part, dk.data, dv.data, dslopes.data,        blocks.data};
  if (packed.by_head) {
    parallel(call, call.B * call.G, BackwardAcross<In>::run_head, &task);
  } else {
    pack_all(pack);
    parallel(call, num_heads * num_parts, BackwardAcross<In>::run, &task);
    parallel(call, call.B * call.G * packed.num_blocks, BackwardAcross<In>::collect, &task);
  }
  for (int64_t head = 0; results.dleft && head < num_heads; ++head) {
    double totals[2] = {0, 0};
    for (int64_t part = 0; part < num_parts; ++part) {
      totals[kLeft] += dslopes.data[(head * num_parts + part) * 2 + kLeft];
      totals[kRight] += dslopes.data[(head * num_parts + part) * 2 + kRight];
    }
    static_cast<float*>(results.dleft)[head] = static_cast<float>(totals[kLeft]);
    static_cast<float*>(results.dright)[head] = static_cast<float>(totals[kRight]);
  }
  return Status::ok;
}
