// Part of attention-inl.h, included within its namespace, for targets that multiply pairs of bfloat16 (LINBIAS_ACROSS).
//
// bfloat16 on the matrix unit, forward and backward: what both need of a call. Scores are computed with keys down the
// rows and 16 queries across the lanes, K Q^T: maxima, sums and gradients of a query are then sums of whole vectors,
// and the weights leave the registers in the form in which the next product wants them. Scores are in bits (log2),
// biased and scaled in float32.

constexpr int64_t kGroups = kRows / kSide;  // of 16 queries each, in a tile
constexpr float kLog2eAcross = 1.44269504f, kLn2Across = 0.693147181f;

// Keys and values as the unit wants them; padded_D and padded_E are multiples of its depth.
struct AcrossPacked : Packed<float> {
  Buffer<uint16_t> key_rows;           // [slots, rows, padded_D]
  Buffer<uint16_t> values_transposed;  // [slots, blocks, wide_E, kKeys], forward only
  Buffer<uint16_t> value_rows;         // [slots, rows, padded_E], backward only
  Buffer<uint16_t> keys_transposed;    // [slots, blocks, wide_D, kKeys], backward only
  Buffer<uint16_t> rows_room;          // [threads, kKeys, padded_E], forward only
  Buffer<uint32_t> keys_room;          // [threads, kKeys, padded_D / 2], with a certificate
  int64_t wide_D, wide_E;

  AcrossPacked(const Call& call, bool for_backward)
      : Packed<float>(call, for_backward), wide_D(round_up(call.D, kSide)), wide_E(round_up(call.E, kSide)) {
    padded_D = round_up(call.D, 32);
    padded_E = round_up(call.E, 32);
  }

  bool allocate(const Call& call) {
    const int64_t slots = num_slots(call);
    return heads.allocate(call.B * call.G) && radius.allocate(slots, num_blocks) &&
           key_rows.allocate(slots, rows, padded_D) &&
           (backward ? value_rows.allocate(slots, rows, padded_E) && keys_transposed.allocate(slots, rows, wide_D)
                     : values_transposed.allocate(slots, rows, wide_E) &&
                           rows_room.allocate(call.num_threads, kKeys, padded_E)) &&
           (!certify || (center.allocate(slots, padded_D) && spread.allocate(slots, num_blocks) &&
                         allocate_tails(call, slots) && keys_room.allocate(call.num_threads, kKeys, padded_D / 2)));
  }

  uint16_t* keys_at(int64_t slot, int64_t block) const {
    return key_rows.data + (slot * rows + block * kKeys) * padded_D;
  }
  uint16_t* values_at(int64_t slot, int64_t block) const {
    return value_rows.data + (slot * rows + block * kKeys) * padded_E;
  }
  uint16_t* keys_transposed_at(int64_t slot, int64_t block) const {
    return keys_transposed.data + (slot * rows + block * kKeys) * wide_D;
  }
  uint16_t* values_transposed_at(int64_t slot, int64_t block) const {
    return values_transposed.data + (slot * rows + block * kKeys) * wide_E;
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
struct PackAcross : PackTask<float, Bfloat16> {
  AcrossPacked& across;

  PackAcross(const Call& for_call, AcrossPacked& to) : PackTask<float, Bfloat16>{for_call, to}, across(to) {}

  void pack(int64_t index, int64_t slot, int64_t from, int64_t to, int worker) const {
    const Head<float>& head = packed.heads.data[index];
    const uint16_t* k = reinterpret_cast<const uint16_t*>(keys_of(index));
    const uint16_t* v = reinterpret_cast<const uint16_t*>(values_of(index));
    const int64_t D = packed.padded_D, E = packed.padded_E;
    const bool measure_spread = packed.certify && has_a_long_window(index);
    MatrixUnit unit;
    for (int64_t block = from; block < smaller_of(to, head.num_blocks); ++block) {
      const int64_t count = head.num_keys - block * kKeys;
      uint16_t* keys = across.keys_at(slot, block);
      uint16_t* values = across.backward ? across.values_at(slot, block) : across.rows_room.data + worker * kKeys * E;
      copy_rows(k + block * kKeys * call.k.row, call.k.row, count, call.D, kKeys, D, keys);
      copy_rows(v + block * kKeys * call.v.row, call.v.row, count, call.E, kKeys, E, values);
      if (across.backward) lay_transposed(keys, D, across.wide_D, across.keys_transposed_at(slot, block));
      else lay_transposed(values, E, across.wide_E, across.values_transposed_at(slot, block));
      head.radius[block] = zero_or_nan_across(keys, kKeys * D) + zero_or_nan_across(values, kKeys * E);
      if (packed.certify)
        measure(unit, head, block, keys, measure_spread, across.keys_room.data + worker * kKeys * D / 2);
    }
  }

  // What measure_block does, with the Gram matrix of the keys themselves, which the unit makes of exact products, and
  // the center taken off afterwards; the last term is for the rounding of that.
  void measure(MatrixUnit& unit, const Head<float>& head, int64_t block, const uint16_t* keys, bool measure_spread,
               uint32_t* room) const {
    const int64_t count = smaller_of(kKeys, head.num_keys - block * kKeys), deep_D = packed.padded_D;
    const float slack = slack_of<float>(call.D);
    float along[kKeys], found = 0;  // along: k.c
    for (int64_t s = 0; s < count; ++s) {
      Floats squares{}, products{};
      for (int64_t d = 0; d < deep_D; d += 16) {
        HalfWords half;
        __builtin_memcpy(&half, keys + s * deep_D + d, sizeof half);
        const Floats key = even_of_pairs(__builtin_convertvector(half, Words)), center = load(head.center + d);
        squares += (key - center) * (key - center);
        products += key * center;
      }
      found = larger_or_nan(found, sum<float>(squares));
      along[s] = sum<float>(products);
    }
    const bool ordinary = is_ordinary(found);
    const float radius = ordinary ? square_root(found) : longest_from_center(head, keys, count);
    head.radius[block] += radius;
    head.spread[block] = head.radius[block];
    if (!measure_spread || !ordinary) return;
    const float center_square = head.center_norm * head.center_norm;
    Floats largest_row{};
    for (int64_t t = 0; t < count; t += kSide) {
      float gram[kKeys * kSide];
      lay_across(keys + t * deep_D, deep_D, room);
      multiply_columns(unit, 1, kKeys, deep_D, keys, deep_D, room, gram, false);
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
  float longest_from_center(const Head<float>& head, const uint16_t* keys, int64_t count) const {
    float longest = 0, difference[kLargestSize];
    if (call.D > kLargestSize) return __builtin_nanf("");
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t d = 0; d < call.D; ++d)
        difference[d] = widen(Bfloat16{keys[s * packed.padded_D + d]}) - head.center[d];
      longest = larger_or_nan(longest, length_of<float>(difference, call.D, 1));
    }
    return longest;
  }
};

constexpr int kOutputParts = 3;  // bfloat16 that add up to any float32: the gradient of the output

// What a worker needs for one tile. What there is of each query is in `of`, but for its pivot: row_max in bits.
struct AcrossScratch {
  Scratch<float> of;
  float pivot[kRows];
  uint16_t* rows;                       // [64, larger of padded_D, padded_E]: queries, or gradients, as they come
  uint32_t* q_across;                   // [kGroups, padded_D / 2, 16]
  uint32_t* dout_across[kOutputParts];  // [kGroups, padded_E / 2, 16]
  uint32_t* q_pairs;                    // [32, wide_D]
  uint32_t* dout_pairs[kOutputParts];   // [32, wide_E]
  float *scores, *dweights;             // [kGroupsAtOnce, kKeys, 16]
  float* acc;                           // [kGroups, wide_E or wide_D, 16]
  uint32_t* all_pairs[2];               // [kGroupsAtOnce, kKeys / 2, 16]: weights, or gradients of scores
  uint16_t* weight_rows;                // [kKeys, 64]
  uint16_t* dscore_rows[2];             // [kKeys, 64]
  float *score, *dweight;               // of the group that is at hand
  uint32_t* pairs[2];

  void turn_to(int64_t i) {
    score = scores + i * kKeys * kSide;
    dweight = dweights + i * kKeys * kSide;
    for (int part = 0; part < 2; ++part) pairs[part] = all_pairs[part] + i * kKeys / 2 * kSide;
  }
};

struct AcrossScratches {
  Buffer<AcrossScratch> each;
  Buffer<uint32_t> memory;

  bool allocate(const Call& call, const AcrossPacked& packed) {
    const int64_t deep = larger_of(packed.padded_D, packed.padded_E), wide = larger_of(packed.wide_D, packed.wide_E);
    const int64_t words = 64 * deep / 2 + kRows * packed.padded_D / 2 + 32 * packed.wide_D +
                          kOutputParts * (kRows * packed.padded_E / 2 + 32 * packed.wide_E) + kRows * wide +
                          3 * kKeys * 32 + kGroupsAtOnce * 3 * kKeys * 16;
    if (!each.allocate(call.num_threads) || !memory.allocate(call.num_threads, words)) return false;
    for (int worker = 0; worker < call.num_threads; ++worker) {
      AcrossScratch& scratch = each.data[worker];
      uint32_t* next = memory.data + worker * words;
      const auto take = [&next](int64_t count) { return (next += count) - count; };
      const auto take_floats = [&take](int64_t count) { return reinterpret_cast<float*>(take(count)); };
      const auto take_halves = [&take](int64_t count) { return reinterpret_cast<uint16_t*>(take(count / 2)); };
      scratch.rows = take_halves(64 * deep);
      scratch.q_across = take(kRows * packed.padded_D / 2);
      scratch.q_pairs = take(32 * packed.wide_D);
      for (int part = 0; part < kOutputParts; ++part) {
        scratch.dout_across[part] = take(kRows * packed.padded_E / 2);
        scratch.dout_pairs[part] = take(32 * packed.wide_E);
      }
      for (int part = 0; part < 2; ++part) {
        scratch.all_pairs[part] = take(kGroupsAtOnce * kKeys / 2 * 16);
        scratch.dscore_rows[part] = take_halves(kKeys * 64);
      }
      scratch.weight_rows = take_halves(kKeys * 64);
      scratch.scores = take_floats(kGroupsAtOnce * kKeys * 16);
      scratch.dweights = take_floats(kGroupsAtOnce * kKeys * 16);
      scratch.acc = take_floats(kRows * wide);
    }
    return true;
  }
};

// The scores of 16 queries and a block in bits, biased, of one key at a time; -inf where hidden.
struct BiasedAcross {
  static constexpr float kSteepest = 1e30f;  // finite in bits, too, so that it is 0 times a distance of 0
  Floats relative{};                         // positions of the queries, counted from the block's first key
  Floats away{};                             // far: the bias of the key that is nearest
  float scale, slope[2];
  float further[kKeys];  // far: the bias of a key on top of that
  bool far, hidden[2];
  int64_t end_shown;  // keys from here on are hidden from the group; a multiple of 32

  BiasedAcross(const Tile<float>& tile, int64_t block, float factor) {
    scale = factor * kLog2eAcross;
    far = tile.is_far(block);
    for (int side = kLeft; side <= kRight; ++side) {
      hidden[side] = tile.hidden[side];
      const float bits = tile.slope[side] * kLog2eAcross;
      slope[side] = bits < kSteepest ? bits : kSteepest;
    }
    if (!far) return;
    const bool to_the_left = block <= tile.near_last;
    for (int64_t s = 0; s < kKeys; ++s) {
      further[s] =
          to_the_left ? -slope[kLeft] * static_cast<float>(kKeys - 1 - s) : -slope[kRight] * static_cast<float>(s);
    }
  }

  // To 16 queries of the tile. Hidden keys take part all the same where they are not finite, and show.
  void turn_to(const Tile<float>& tile, int64_t block, int64_t group, bool finite) {
    const int64_t from = tile.position + group * kSide - block * kKeys;
    for (int lane = 0; lane < kSide; ++lane) relative[lane] = static_cast<float>(from + lane);
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

  LINBIAS_INLINE Floats reach(int64_t s) const { return relative - static_cast<float>(s); }

  // pivot is what is taken off every score of a query; in a far block it may be part of `base`, far_base(pivot).
  LINBIAS_INLINE Floats far_base(Floats pivot) const { return away - pivot; }
  LINBIAS_INLINE Floats far_score(Floats product, int64_t s, Floats base) const {
    return product * scale + (base + further[s]);
  }

  LINBIAS_INLINE Floats near_score(Floats product, int64_t s, int64_t num_keys) const {
    const Floats lowest = broadcast(-kInfinity<float>), distance = reach(s);
    Floats y = product * scale;
    if (hidden[kRight] && !hidden[kLeft]) {  // causal
      y = distance < 0.0f ? lowest : y - slope[kLeft] * distance;
    } else {
      y -= distance > 0.0f ? slope[kLeft] * distance : -slope[kRight] * distance;
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

inline void load_queries_across(const Tile<float>& tile, const AcrossPacked& packed, AcrossScratch& scratch) {
  const Call& call = *tile.call;
  const uint16_t* q = static_cast<const uint16_t*>(call.q.data) + tile.b * call.q.batch + tile.h * call.q.head +
                      tile.start * call.q.row;
  copy_rows(q, call.q.row, tile.rows, call.D, round_up(tile.rows, kDeep), packed.padded_D, scratch.rows);
  for (int64_t group = 0; group * kSide < tile.rows; ++group) {
    lay_across(scratch.rows + group * kSide * packed.padded_D, packed.padded_D,
               scratch.q_across + group * kSide * packed.padded_D / 2);
  }
}

// Would the block whose products are in scratch.score add next to nothing to any query of a group? If so, add it to
// what is left out.
inline bool is_negligible_across(const BiasedAcross& biased, int64_t group, int64_t rows, float allowance,
                                 AcrossScratch& scratch) {
  float* left_out = scratch.of.left_out + group * kSide;
  const Floats base = biased.far_base(load(scratch.pivot + group * kSide));
  Floats high = broadcast(-kInfinity<float>);
#pragma GCC unroll 4
  for (int64_t s = 0; s < kKeys; ++s)
    high = larger<float>(biased.far_score(load(scratch.score + s * kSide), s, base), high);
  const Floats total = load(left_out) + power_of_two(high) * static_cast<float>(kKeys);
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
