// Part of attention-inl.h, included within its namespace, for targets that multiply pairs of bfloat16 (LINBIAS_ACROSS).
//
// Products of bfloat16, and of float32 in parts, forward and backward: what both need of a call. Scores are computed
// with keys down the rows and 16 queries across the lanes, K Q^T: maxima, sums and gradients of a query are then sums
// of whole vectors, and the weights leave the registers in the form in which the next product wants them. Scores are
// biased and scaled in float32; those of bfloat16 are in bits (log2).

constexpr int64_t kGroups = kRows / kSide;  // of 16 queries each, in a tile
constexpr float kLog2eAcross = 1.44269504f, kLn2Across = 0.693147181f;

// Keys and values as products want them, in parts; padded_D and padded_E are multiples of 32, the deepest product.
struct AcrossPacked : Packed<float> {
  Buffer<uint16_t> key_rows;           // [slots, blocks, parts, kKeys, padded_D]
  Buffer<uint16_t> values_transposed;  // [slots, blocks, parts, wide_E, kKeys], forward only
  Buffer<uint16_t> value_rows;         // [slots, blocks, parts, kKeys, padded_E], backward only
  Buffer<uint16_t> keys_transposed;    // [slots, blocks, parts, wide_D, kKeys], backward only
  Buffer<uint16_t> rows_room;          // [threads, kKeys, padded_E], forward only
  Buffer<uint32_t> keys_room;          // [threads, parts, padded_D / 2, 16], with a certificate
  int parts;
  int64_t wide_D, wide_E;

  AcrossPacked(const Call& call, int num_parts, bool for_backward)
      : Packed<float>(call, for_backward),
        parts(num_parts),
        wide_D(round_up(call.D, kSide)),
        wide_E(round_up(call.E, kSide)) {
    padded_D = round_up(call.D, 32);
    padded_E = round_up(call.E, 32);
  }

  int64_t groups_at_once() const { return columns_at_once(2 * parts * kKeys * larger_of(padded_D, padded_E)); }

  // Heads of float32 leave the second cache at a sixth of this, but fresh memory for all of them would cost more.
  bool is_head_small() const { return is_small((parts > 1 ? 1 : 2) * (padded_D + padded_E)); }

  bool allocate(const Call& call) {
    const int64_t slots = num_slots(call);
    return heads.allocate(call.B * call.G) && radius.allocate(slots, num_blocks) &&
           key_rows.allocate(slots, rows, parts * padded_D) &&
           (backward ? value_rows.allocate(slots, rows, parts * padded_E) &&
                           keys_transposed.allocate(slots, rows, parts * wide_D)
                     : values_transposed.allocate(slots, rows, parts * wide_E) &&
                           rows_room.allocate(call.num_threads, kKeys, padded_E)) &&
           (!certify ||
            (center.allocate(slots, padded_D) && spread.allocate(slots, num_blocks) && allocate_tails(call, slots) &&
             keys_room.allocate(call.num_threads, parts * kSide, padded_D / 2)));
  }

  Parts<uint16_t> in_block(const Buffer<uint16_t>& of, int64_t slot, int64_t block, int64_t size, int64_t row) const {
    return {of.data + (slot * num_blocks + block) * parts * size, row, parts, size};
  }
  Parts<uint16_t> keys_at(int64_t slot, int64_t block) const {
    return in_block(key_rows, slot, block, kKeys * padded_D, padded_D);
  }
  Parts<uint16_t> values_at(int64_t slot, int64_t block) const {
    return in_block(value_rows, slot, block, kKeys * padded_E, padded_E);
  }
  Parts<uint16_t> keys_transposed_at(int64_t slot, int64_t block) const {
    return in_block(keys_transposed, slot, block, kKeys * wide_D, kKeys);
  }
  Parts<uint16_t> values_transposed_at(int64_t slot, int64_t block) const {
    return in_block(values_transposed, slot, block, kKeys * wide_E, kKeys);
  }
};

// 0, or NaN if any of these bfloat16 is not finite; count is a multiple of 16.
inline float zero_or_nan_across(const uint16_t* x, int64_t count) {
  Words found{};
  for (int64_t i = 0; i < count; i += 32) {
    const Words two = load_words(x + i);
    const Words low = two << 16 & 0x7fffffffu, high = two & 0x7fff0000u;
    found |= (Words)(low >= 0x7f800000u) | (Words)(high >= 0x7f800000u);
  }
  return in_all_lanes((Lanes)(found == 0u)) ? 0.0f : __builtin_nanf("");
}

// Pack keys and values, and measure them for the certificate.
template <typename In>
struct PackAcross : PackTask<float, In> {
  using PackTask<float, In>::call, PackTask<float, In>::packed;
  static constexpr int kParts = kPartsOf<In>;
  AcrossPacked& across;

  PackAcross(const Call& for_call, AcrossPacked& to) : PackTask<float, In>{for_call, to}, across(to) {}

  void pack(int64_t index, int64_t slot, int64_t from, int64_t to, int worker) const {
    const Head<float>& head = packed.heads.data[index];
    const bool measure_spread = packed.certify && this->has_a_long_window(index);
    MatrixUnit unit;
    for (int64_t block = from; block < smaller_of(to, head.num_blocks); ++block) {
      const In* k = this->keys_of(index) + block * kKeys * call.k.row;
      const In* v = this->values_of(index) + block * kKeys * call.v.row;
      const int64_t count = head.num_keys - block * kKeys;
      const Parts<uint16_t> keys = across.keys_at(slot, block);
      Parts<uint16_t> values;  // in which what is not finite shows in the first part
      copy_parts(k, call.k.row, count, call.D, kKeys, keys);
      if (across.backward) {
        values = across.values_at(slot, block);
        copy_parts(v, call.v.row, count, call.E, kKeys, values);
        lay_transposed(keys, across.wide_D, across.keys_transposed_at(slot, block));
      } else {
        values = across.values_transposed_at(slot, block);
        const Parts<uint16_t> room = {across.rows_room.data + worker * kKeys * packed.padded_E, packed.padded_E};
        copy_transposed(v, call.v.row, count, call.E, across.wide_E, room, values);
      }
      head.radius[block] = zero_or_nan_across(keys.data, keys.step) + zero_or_nan_across(values.data, values.step);
      if (packed.certify) {
        measure(unit, head, block, k, keys, measure_spread,
                across.keys_room.data + worker * kParts * kSide * packed.padded_D / 2);
      }
    }
  }

  // What measure_block does, with the Gram matrix of the keys themselves, which the unit makes of products that are
  // exact but for the parts left out, and the center taken off afterwards; the last term is for the rounding of that.
  void measure(MatrixUnit& unit, const Head<float>& head, int64_t block, const In* given, Parts<uint16_t> keys,
               bool measure_spread, uint32_t* room) const {
    const int64_t count = smaller_of(kKeys, head.num_keys - block * kKeys), deep_D = packed.padded_D;
    const float slack = slack_of<float>(call.D);
    float along[kKeys], found = 0;  // along: k.c
    for (int64_t s = 0; s < count; ++s) {
      Floats squares{}, products{};
      for (int64_t d = 0; d < deep_D; d += 16) {
        const Floats key = sum_of_parts<kParts>(keys.data + s * deep_D + d, keys.step), center = load(head.center + d);
        squares += (key - center) * (key - center);
        products += key * center;
      }
      found = larger_or_nan(found, sum<float>(squares));
      along[s] = sum<float>(products);
    }
    const bool ordinary = is_ordinary(found);
    const float radius = ordinary ? square_root(found) : longest_from_center(head, given, count);
    head.radius[block] += radius;
    head.spread[block] = head.radius[block];
    if (!measure_spread || !ordinary) return;
    const float center_square = head.center_norm * head.center_norm;
    const Parts<uint32_t> columns = {room, kSide, kParts, kSide * deep_D / 2};
    Floats largest_row{};
    for (int64_t t = 0; t < count; t += kSide) {
      float gram[kKeys * kSide];
      lay_across(keys.at(t * deep_D), kSide, columns);
      multiply_columns(unit, 1, kKeys, deep_D, keys, columns, 0, gram, 0, false);
      Floats total{}, off;
      for (int lane = 0; lane < kSide; ++lane) off[lane] = t + lane < count ? center_square - along[t + lane] : 0.0f;
      for (int64_t s = 0; s < count; ++s) {
        const Floats entry = load(gram + s * kSide) + off - along[s];
        total += entry * entry;
      }
      for (int lane = 0; lane < kSide; ++lane) total[lane] = t + lane < count ? total[lane] : 0.0f;
      largest_row = total <= largest_row ? largest_row : total;
    }
    const float reach = radius + 2 * head.center_norm;
    const float square =
        square_root(largest<float>(largest_row)[0] / static_cast<float>(count)) * (1 + slack) + slack * reach * reach;
    head.spread[block] = square_root(square);
  }

  // The largest |k - center| of some keys whose squares vanish or overflow.
  float longest_from_center(const Head<float>& head, const In* keys, int64_t count) const {
    float longest = 0, difference[kLargestSize];
    if (call.D > kLargestSize) return __builtin_nanf("");
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t d = 0; d < call.D; ++d) difference[d] = widen(keys[s * call.k.row + d]) - head.center[d];
      longest = larger_or_nan(longest, length_of<float>(difference, call.D, 1));
    }
    return longest;
  }
};

// Rows of queries, and for bfloat16 columns of weights; those beyond kRows are zeros.
constexpr int64_t kQueriesAcross = (kRows + kDeep - 1) / kDeep * kDeep;

// What a worker needs for one tile. What there is of each query is in `of`, but for its pivot: row_max in the unit of
// scores.
struct AcrossScratch {
  Scratch<float> of;
  float pivot[kRows];
  uint16_t* rows;                       // [parts, kQueriesAcross, larger of padded_D, padded_E]: queries, or gradients
  uint32_t *q_across, *dout_across;     // [parts, kGroups, padded_D or padded_E / 2, 16]
  uint32_t *q_pairs, *dout_pairs;       // the second factor of products over queries: BackwardAcross::lay_depth
  float* acc;                           // [kGroups, wide_E or wide_D, 16]
  float *score, *dweight;               // [groups at once, kKeys, 16]
  uint32_t* pairs;                      // [parts, groups at once, kKeys / 2, 16]: weights, or gradients of scores
  uint16_t *weight_rows, *dscore_rows;  // of all groups: BackwardAcross::kColumns

  Parts<uint16_t> rows_of(int64_t padded, int parts) const { return {rows, padded, parts, kQueriesAcross * padded}; }
};

// Queries, or gradients, across: those of a group begin at `group * kSide * padded / 2`.
inline Parts<uint32_t> across_of(uint32_t* data, int64_t padded, int parts) {
  return {data, kSide, parts, kRows * padded / 2};
}

constexpr int64_t kGroupScores = kKeys * kSide;                                        // of a group
constexpr int64_t kGroupPairs = kGroupScores / 2, kPairsStep = kGroups * kGroupPairs;  // of a group, and of a tile
constexpr int64_t kWeightColumns = 2 * kPairKinds * kRows;                             // at most, of weight_rows

struct AcrossScratches {
  Buffer<AcrossScratch> each;
  Buffer<uint32_t> memory;

  bool allocate(const Call& call, const AcrossPacked& packed) {
    constexpr int64_t kParts = kMostParts, kHalf = kRows / 2, kHalfAcross = kQueriesAcross / 2;
    const int64_t deep = larger_of(packed.padded_D, packed.padded_E), wide = larger_of(packed.wide_D, packed.wide_E);
    const int64_t words = kParts * (kHalfAcross * deep + kHalf * (packed.padded_D + packed.padded_E) +
                                    kRows * (packed.wide_D + packed.wide_E) + kPairsStep) +
                          kRows * wide + 2 * (kGroups * kGroupScores + kKeys * kWeightColumns / 2);
    if (!each.allocate(call.num_threads) || !memory.allocate(call.num_threads, words)) return false;
    for (int worker = 0; worker < call.num_threads; ++worker) {
      AcrossScratch& scratch = each.data[worker];
      uint32_t* next = memory.data + worker * words;
      const auto take = [&next](int64_t count) { return (next += count) - count; };
      const auto take_floats = [&take](int64_t count) { return reinterpret_cast<float*>(take(count)); };
      const auto take_halves = [&take](int64_t count) { return reinterpret_cast<uint16_t*>(take(count / 2)); };
      scratch.rows = take_halves(kParts * kQueriesAcross * deep);
      scratch.q_across = take(kParts * kHalf * packed.padded_D);
      scratch.dout_across = take(kParts * kHalf * packed.padded_E);
      scratch.q_pairs = take(kParts * kRows * packed.wide_D);
      scratch.dout_pairs = take(kParts * kRows * packed.wide_E);
      scratch.acc = take_floats(kRows * wide);
      scratch.score = take_floats(kGroups * kGroupScores);
      scratch.dweight = take_floats(kGroups * kGroupScores);
      scratch.pairs = take(kParts * kPairsStep);
      scratch.weight_rows = take_halves(kKeys * kWeightColumns);
      scratch.dscore_rows = take_halves(kKeys * kWeightColumns);
    }
    return true;
  }
};

// 0, 1, 2 ... as float, to be read as an operand.
constexpr struct Numbers {
  float of[kKeys] = {};
  constexpr Numbers() {
    for (int64_t s = 0; s < kKeys; ++s) of[s] = static_cast<float>(s);
  }
} kNumbers;

// x - a b, rounded once where the target can; said here because compilers may fuse forward and backward differently.
LINBIAS_INLINE Floats less_product(Floats x, Floats a, Floats b) {
#if defined(__AVX512DQ__)
  return (Floats)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)x);
#else
  return x - a * b;
#endif
}

// The scores of 16 queries and a block, biased, of one key at a time; -inf where hidden. They are in bits, but for
// float32 (kFine), where slopes and scores keep all their digits. There a bias is rounded once, and before the pivot
// comes off: forward and backward, whose pivots differ, round alike.
template <bool kFine>
struct BiasedAcross {
  static constexpr float kUnit = kFine ? 1.0f : kLog2eAcross;  // of scores
  static constexpr float kSteepest = 1e30f;  // finite in bits, too, so that it is 0 times a distance of 0
  Floats relative{};                         // positions of the queries, counted from the block's first key
  Floats away{};                             // far: the bias of the key that is nearest
  float scale, slope[2], outwards = 0;       // far: the slope, negative to the right
  float further[kKeys];                      // far: the bias of a key on top of that
  bool far, hidden[2];
  int64_t end_shown;  // keys from here on are hidden from the group; a multiple of 32

  BiasedAcross(const Tile<float>& tile, int64_t block, float factor) {
    scale = factor * kUnit;
    far = tile.is_far(block);
    for (int side = kLeft; side <= kRight; ++side) {
      hidden[side] = tile.hidden[side];
      const float steep = tile.slope[side] * kUnit;
      slope[side] = steep < kSteepest ? steep : kSteepest;
    }
    if (!far) return;
    const bool to_the_left = block <= tile.near_last;
    outwards = to_the_left ? slope[kLeft] : -slope[kRight];
    for (int64_t s = 0; s < kKeys && !kFine; ++s) {
      further[s] =
          to_the_left ? -slope[kLeft] * static_cast<float>(kKeys - 1 - s) : -slope[kRight] * static_cast<float>(s);
    }
  }

  // To 16 queries of the tile. Hidden keys take part all the same where they are not finite, and show.
  LINBIAS_INLINE void turn_to(const Tile<float>& tile, int64_t block, int64_t group, bool finite) {
    const int64_t from = tile.position + group * kSide - block * kKeys;
    constexpr int64_t kCounted = int64_t{1} << 30;  // as 32-bit integers
    if (from > -kCounted && from < kCounted) {
      relative = __builtin_convertvector(
          Lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<int32_t>(from), Floats);
    } else {
      for (int lane = 0; lane < kSide; ++lane) relative[lane] = static_cast<float>(from + lane);
    }
    end_shown = kKeys;
    if (far) {
      const bool to_the_left = block <= tile.near_last;
      away = to_the_left ? -slope[kLeft] * (relative - static_cast<float>(kKeys - 1)) : slope[kRight] * relative;
      return;
    }
    if (!finite) return;
    const int64_t last = from + smaller_of(tile.rows - group * kSide, kSide) - 1;
    end_shown = smaller_of(kKeys, round_up(tile.head->num_keys - block * kKeys, kDeep));
    if (hidden[kRight]) end_shown = smaller_of(end_shown, round_up(larger_of(last + 1, 0), kDeep));
    end_shown = larger_of(end_shown, 0);
  }

  LINBIAS_INLINE Floats reach(int64_t s) const { return relative - kNumbers.of[s]; }

  // pivot is what is taken off every score of a query; in a far block it may be part of `base`, far_base(pivot).
  LINBIAS_INLINE Floats far_base(Floats pivot) const { return kFine ? pivot : away - pivot; }
  LINBIAS_INLINE Floats far_score(Floats product, int64_t s, Floats base) const {
    if constexpr (kFine) return less_product(product * scale, broadcast(outwards), reach(s)) - base;
    else return product * scale + (base + further[s]);
  }

  static LINBIAS_INLINE Floats weight(Floats score) {
    return power_of_two<kFine>(kFine ? score * kLog2eAcross : score);
  }

  LINBIAS_INLINE Floats near_score(Floats product, int64_t s, int64_t num_keys) const {
    const Floats lowest = broadcast(-kInfinity<float>), distance = reach(s);
    Floats y = product * scale;
    if (hidden[kRight] && !hidden[kLeft]) {  // causal
      y = distance < 0.0f ? lowest : less_product(y, broadcast(slope[kLeft]), distance);
    } else {
      y = less_product(y, distance > 0.0f ? broadcast(slope[kLeft]) : broadcast(-slope[kRight]), distance);
      if (hidden[kLeft]) y = distance > 0.0f ? lowest : y;
      if (hidden[kRight]) y = distance < 0.0f ? lowest : y;
    }
    return s < num_keys ? y : lowest;
  }
};

// Which of 16 queries keep a key, under dropout: the rule of Dropout.
struct DropoutAcross {
  Dropout rule;
  float share;

  explicit DropoutAcross(const Tile<float>& tile)
      : rule(tile), share(static_cast<float>(1.0 / (1.0 - tile.call->dropout))) {}

  LINBIAS_INLINE Floats apply(const Tile<float>& tile, int64_t group, int64_t key, Floats x) const {
    Words hash = load_words(rule.rows + group * kSide) ^ Dropout::mix(static_cast<uint32_t>(tile.head->first + key));
    hash ^= hash >> 16;
    hash *= 0x7feb352du;
    hash ^= hash >> 15;
    hash *= 0x846ca68bu;
    hash ^= hash >> 16;
    return (Lanes)(hash >= rule.threshold) ? x * share : Floats{};
  }
};

// The queries of a tile in rows and across, in parts.
template <typename In>
void load_queries_across(const Tile<float>& tile, const AcrossPacked& packed, AcrossScratch& scratch) {
  const Call& call = *tile.call;
  const In* q =
      static_cast<const In*>(call.q.data) + tile.b * call.q.batch + tile.h * call.q.head + tile.start * call.q.row;
  const Parts<uint16_t> rows = scratch.rows_of(packed.padded_D, kPartsOf<In>);
  copy_parts(q, call.q.row, tile.rows, call.D, kPartsOf<In> > 1 ? kRows : kQueriesAcross, rows);
  lay_across(rows, tile.rows, across_of(scratch.q_across, packed.padded_D, kPartsOf<In>));
}

// Groups of queries that meet a block together, [first, end) of a tile's, and which of its keys each takes part in: the
// first `shown`, a multiple of 32.
struct GroupsAcross {
  int64_t first, end, shown[kGroups] = {};

  template <typename Biased>
  GroupsAcross(const Tile<float>& tile, Biased& biased, int64_t block, int64_t from, int64_t to, bool finite)
      : first(from), end(smaller_of(to, round_up(tile.rows, kSide) / kSide)) {
    for (int64_t group = first; group < end; ++group) {
      if (!biased.far) biased.turn_to(tile, block, group, finite);
      shown[group] = biased.far ? kKeys : biased.end_shown;
    }
  }

  // Run make(group, count, shown) for all groups at once if they are shown as many keys, else for each.
  template <typename Make>
  LINBIAS_INLINE void for_alike(const Make& make) const {
    bool alike = true;
    for (int64_t group = first; group < end; ++group) alike = alike && shown[group] == shown[first];
    const int64_t count = alike ? end - first : 1;
    for (int64_t group = first; group < end; group += count) {
      if (shown[group] > 0) make(group, count, shown[group]);
    }
  }

  // The products of a block's keys, or values, and what lies across of each group: to[groups, kKeys, 16].
  LINBIAS_INLINE void multiply(MatrixUnit& unit, Parts<uint16_t> rows, Parts<uint32_t> across, float* to) const {
    const int64_t column = kSide * rows.row / 2;
    for_alike([&](int64_t group, int64_t count, int64_t keys) __attribute__((always_inline)) {
      multiply_columns(unit, count, keys, rows.row, rows, across.at(group * column), column,
                       to + (group - first) * kGroupScores, kGroupScores, false);
    });
  }

  // Add to acc[kGroups, size, 16] the products of transposed rows[size, kKeys] and the pairs of each group.
  LINBIAS_INLINE void add(MatrixUnit& unit, int64_t size, Parts<uint16_t> transposed, Parts<uint32_t> pairs,
                          float* acc) const {
    for_alike([&](int64_t group, int64_t count, int64_t keys) __attribute__((always_inline)) {
      multiply_columns(unit, count, size, keys, transposed, pairs.at((group - first) * kGroupPairs), kGroupPairs,
                       acc + group * size * kSide, size * kSide, true);
    });
  }
};

// Would the block with these products add next to nothing to any query of a group? If so, add it
// to what is left out.
template <typename Biased>
bool is_negligible_across(const Biased& biased, int64_t group, int64_t rows, float allowance, const float* scores,
                          AcrossScratch& scratch) {
  float* left_out = scratch.of.left_out + group * kSide;
  const Floats base = biased.far_base(load(scratch.pivot + group * kSide));
  Floats high = broadcast(-kInfinity<float>);
#pragma GCC unroll 4
  for (int64_t s = 0; s < kKeys; ++s) high = larger<float>(biased.far_score(load(scores + s * kSide), s, base), high);
  const Floats total = load(left_out) + Biased::weight(high) * static_cast<float>(kKeys);
  Lanes small = (Lanes)(high <= 0.0f) & (Lanes)(total <= allowance * load(scratch.of.row_sum + group * kSide));
  for (int lane = 0; lane < kSide; ++lane) small[lane] |= group * kSide + lane < rows ? 0 : -1;
  if (!in_all_lanes(small)) return false;
  store<float>(left_out, total);
  return true;
}

// to[rows, size] <- from[wide, 16], transposed, each of the 16 columns times its factor; as float, or rounded to
// bfloat16.
template <typename To>
LINBIAS_INLINE void store_transposed(const float* from, int64_t wide, Floats factor, int64_t rows, int64_t size,
                                     To* to) {
  for (int64_t e = 0; e < wide; e += kSide) {
    Words x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = (Words)(load(from + (e + i) * kSide) * factor);
    transpose(x);
    for (int64_t i = 0; i < rows; i += 2) {
      To two[2][kSide];
      if constexpr (sizeof(To) == 4) {
        store_words(two[0], x[i]);
        store_words(two[1], x[i + 1]);
      } else {
        round_to_pairs<true>((Floats)x[i], (Floats)x[i + 1], two[0], two[1]);
      }
      for (int64_t row = i; row < smaller_of(rows, i + 2); ++row) {
        if (e + kSide <= size) __builtin_memcpy(to + row * size + e, two[row - i], sizeof two[0]);
        else __builtin_memcpy(to + row * size + e, two[row - i], sizeof(To) * static_cast<size_t>(size - e));
      }
    }
  }
}
