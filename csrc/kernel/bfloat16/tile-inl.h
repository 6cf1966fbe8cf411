// What forward and backward share where products are of bfloat16, or of float32 in terms. Scores are computed
// with keys down the rows and 16 queries across the lanes, K Q^T: maxima, sums and gradients of a query are then sums
// of whole vectors, and the weights leave the registers in the form in which the next product wants them. Scores are
// biased and scaled in float32; those of bfloat16 are in bits (log2).
#pragma once

#include "kernel/bfloat16/packing-inl.h"
#include "kernel/certificate-inl.h"
#include "kernel/tile-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr int64_t kGroups = kRows / kLanes16;  // of 16 queries each, in a tile
template <typename W>
constexpr W kLn2 = static_cast<W>(0.6931471805599453);

// Rows of queries, and for bfloat16 columns of weights; those beyond kRows are zeros.
constexpr int64_t kPaddedQueries = (kRows + kDeep - 1) / kDeep * kDeep;

constexpr int64_t kGroupScores = kKeys * kLanes16;                                     // of a group
constexpr int64_t kGroupPairs = kGroupScores / 2, kPairsStep = kGroups * kGroupPairs;  // of a group, and of a tile

// What a worker needs for one tile. `pivot` is what to subtract from a score in its unit, which for bfloat16 is the
// bit: row_max, and in backward the logarithm of the row's sum, `log_sum_bits`, on top of it.
struct Bfloat16Scratch : Rows<float> {
  float pivot[kRows], log_sum_bits[kRows];
  float coarse[kMostTerms][kRows];     // what row_sum has from blocks of one term, and of two
  uint16_t* rows;                      // [terms, kPaddedQueries, larger of deep_D, deep_E]: queries, or gradients
  uint32_t *q_columns, *dout_columns;  // [terms, kGroups, deep_D or deep_E / 2, 16]
  uint32_t *q_pairs, *dout_pairs;  // the second factor of sums over queries: Bfloat16BackwardWork::pack_over_queries
  float* acc;                      // [kGroups, padded_E or padded_D, 16]
  float *score, *dweight;          // [groups at once, kKeys, 16]
  uint32_t* pairs;                 // [terms, groups at once, kKeys / 2, 16]: weights, or gradients of scores
  uint16_t *weight_rows, *dscore_rows;  // of all groups: Bfloat16BackwardWork::kColumns
  float* pulls;                         // [kKeys, 16]: what gradients of scores ask of the positions of keys

  // The buffers and their sizes: take(buffer, count) for each.
  template <typename In, typename Take>
  void each_buffer(const Bfloat16Packed<In>& packed, const Take& take) {
    constexpr int64_t kWeights = kKeys * 2 * kPairKinds * kRows;  // at most
    take(rows, kMostTerms * kPaddedQueries * larger_of(packed.deep_D, packed.deep_E));
    take(q_columns, kMostTerms * kRows * packed.deep_D / 2);
    take(dout_columns, kMostTerms * kRows * packed.deep_E / 2);
    take(q_pairs, kMostTerms * kRows * packed.padded_D);
    take(dout_pairs, kMostTerms * kRows * packed.padded_E);
    take(acc, kRows * larger_of(packed.padded_D, packed.padded_E));
    take(score, kGroups * kGroupScores);
    take(dweight, kGroups * kGroupScores);
    take(pairs, kMostTerms * kPairsStep);
    take(weight_rows, kWeights);
    take(dscore_rows, kWeights);
    take(pulls, kGroupScores);
  }

  Terms<uint16_t> rows_of(int64_t deep, int terms) const { return {rows, deep, terms, kPaddedQueries * deep}; }
};

// Queries, or gradients, in columns: those of a group begin at `group * kLanes16 * deep / 2`.
inline Terms<uint32_t> columns_of(uint32_t* data, int64_t deep, int terms) {
  return {data, kLanes16, terms, kRows * deep / 2};
}

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

// x as it is once it has been rounded: compilers may not fuse what made it with what comes.
LINBIAS_INLINE Floats as_rounded(Floats x) {
  asm("" : "+m"(x));
  return x;
}

// Queries are multiplied by this power of two before their products with keys, and these by the rest of the scale:
// where the scale is small, products may overflow of which the scores do not.
inline float scale_of_queries(const Call& call) {
  constexpr double kSmall = 0x1p-16, kSmallest = 0x1p-64;
  const double size = call.scale < 0 ? -call.scale : call.scale;
  if (!(size > 0 && size < kSmall)) return 1;
  return static_cast<float>(__builtin_exp2(__builtin_floor(__builtin_log2(size > kSmallest ? size : kSmallest))));
}

// The biased scores of 16 queries and a block, one key at a time; -inf where the key is hidden. Those of bfloat16 are
// in bits. Those of float32 (kFine) are not, so that slopes and scores keep all their digits; their bias is rounded
// once, before the pivot is subtracted, so that forward and backward, whose pivots differ, round alike.
//
// Bits suit where the pivots, and in far blocks the bias, are below kLarge. Beyond, what a change of units rounds away
// of a pivot would multiply weights, at last by 0 or infinity: there `large_score` takes the row's maximum from scores
// that are rounded once more, like it, to its unit.
template <bool kFine>
struct Bfloat16Biased {
  const Tile<float>& tile;
  const int64_t block, num_keys;                                      // of the head from this block on
  const bool far, masked, finite, positioned;                         // positioned: keys stand at given positions
  static constexpr float kUnit = kFine ? 1.0f : Simd<float>::kLog2e;  // of scores
  static constexpr float kSteepest = 3e38f;                           // finite, so that it is 0 times a distance of 0
  static constexpr float kLarge = 0x1p14f;
  Floats relative{};                     // positions of the queries, counted from the block's first key
  Floats beyond{};                       // far: the same, or how far they stand beyond the nearest key
  Floats away{};                         // far: the bias of the key that is nearest
  float scale, slope[2], outwards = 0;   // far: the slope, negative to the right
  float further[kKeys];                  // far: the bias of a key on top of that
  float offsets[kKeys];                  // far: where the keys are, counted as `beyond` is
  double positions[kKeys], nearest = 0;  // positioned: those of the keys, and, far, of the nearest
  Simd<float>::Doubles query_positions{};
  bool hidden[2];
  Floats first{}, last{};  // masked: the keys of the block that each query sees of itself
  int64_t end_shown;       // keys from here on are hidden from the group; a multiple of 32

  Bfloat16Biased(const Tile<float>& of, int64_t at)
      : tile(of),
        block(at),
        num_keys(of.head->num_keys - at * kKeys),
        far(of.is_far(at)),
        masked(of.is_masked(at)),
        finite(of.head->radius[at] == of.head->radius[at]),
        positioned(of.positions != nullptr),
        scale(static_cast<float>(of.call->scale / scale_of_queries(*of.call) * kUnit)) {
    for (int side = kLeft; side <= kRight; ++side) {
      hidden[side] = tile.hidden[side];
      const float steep = tile.slope[side] * kUnit;
      slope[side] = steep < kSteepest ? steep : kSteepest;
    }
    if (positioned && !far) load_positions(tile.positions + block * kKeys, num_keys, positions);
    if (!far) return;
    const bool to_the_left = block <= tile.near_last;
    if (positioned) {
      nearest = tile.positions[nearest_key(to_the_left ? kLeft : kRight, block, tile.head->num_keys)];
      find_offsets(tile.positions + block * kKeys, nearest, offsets);
    } else {
      __builtin_memcpy(offsets, kNumbers.of, sizeof offsets);  // at hand as part of this, which a pointer is not
    }
    outwards = to_the_left ? slope[kLeft] : -slope[kRight];
    for (int64_t s = 0; s < kKeys && !kFine; ++s) {
      further[s] = to_the_left ? -slope[kLeft] * (offsets[kKeys - 1] - offsets[s]) : -slope[kRight] * offsets[s];
    }
  }

  // Turn to another 16 queries of the tile. Where the block is not finite even hidden keys are computed, so that NaN
  // reaches the result.
  LINBIAS_INLINE void turn_to(int64_t group) {
    const int64_t* orders = tile.orders + group * kLanes16;
    const int64_t from = orders[0] - block * kKeys;
    constexpr int64_t kCounted = int64_t{1} << 30;  // as 32-bit integers
    if (!tile.call->own_key && from > -kCounted && from < kCounted) {
      relative = __builtin_convertvector(
          Lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<int32_t>(from), Floats);
    } else {
      for (int lane = 0; lane < kLanes16; ++lane) relative[lane] = static_cast<float>(orders[lane] - block * kKeys);
    }
    end_shown = kKeys;
    if (positioned) __builtin_memcpy(&query_positions, tile.query_positions + group * kLanes16, sizeof query_positions);
    if (masked) end_shown = round_up(find_limits(group), kDeep);
    if (far) {
      const bool to_the_left = block <= tile.near_last;
      beyond = positioned ? __builtin_convertvector(query_positions - nearest, Floats) : relative;
      away = to_the_left ? -slope[kLeft] * (beyond - offsets[kKeys - 1]) : slope[kRight] * beyond;
      return;
    }
    if (!finite) return;
    const int64_t own = orders[smaller_of(tile.rows - group * kLanes16, kLanes16) - 1] - block * kKeys;
    end_shown = smaller_of(end_shown, round_up(num_keys, kDeep));
    if (hidden[kRight]) end_shown = smaller_of(end_shown, round_up(larger_of(own + 1, 0), kDeep));
    end_shown = larger_of(end_shown, 0);
  }

  // Find the keys of the block that each query of a group sees of itself; returns the end of those that any does.
  int64_t find_limits(int64_t group) {
    int64_t limit = 0;
    for (int lane = 0; lane < kLanes16; ++lane) {
      const int64_t row = group * kLanes16 + lane, from = clamp(tile.row_first[row] - block * kKeys, 0, kKeys),
                    to = clamp(tile.row_end[row] - block * kKeys, 0, kKeys);
      first[lane] = static_cast<float>(from);
      last[lane] = static_cast<float>(to);
      if (from < to) limit = larger_of(limit, to);
    }
    return limit;
  }

  // How many keys the queries stand beyond key s.
  LINBIAS_INLINE Floats order(int64_t s) const { return relative - kNumbers.of[s]; }
  LINBIAS_INLINE Floats far_distances(int64_t s) const { return beyond - offsets[s]; }
  // kPositioned is `positioned`, known where a loop over keys begins.
  template <bool kPositioned>
  LINBIAS_INLINE Floats distances(int64_t s) const {
    if constexpr (!kPositioned) return order(s);
    return far ? far_distances(s) : __builtin_convertvector(query_positions - positions[s], Floats);
  }

  // The gradients of scores by the position of key s.
  LINBIAS_INLINE Floats pull(int64_t s) const {
    const Floats left = broadcast(tile.slope[kLeft]), right = broadcast(-tile.slope[kRight]);
    if (far) return block <= tile.near_last ? left : right;
    return order(s) >= 0.0f ? left : right;
  }

  // Whether bits suit queries with these pivots, which are infinite where no key has been seen.
  LINBIAS_INLINE bool fits_bits(Floats pivot) const {
    if constexpr (kFine) return true;
    const auto is_small = [](Floats x) { return (Lanes)(x < kLarge) & (Lanes)(x > -kLarge); };
    const Lanes unseen = (Lanes)(pivot - pivot != 0.0f) & (Lanes)(pivot == pivot);
    return in_all_lanes((is_small(pivot) | unseen) & is_small(far ? away : Floats{}));
  }

  // Whether every query sees all keys of the block, on one side, and these are finite.
  bool is_whole() const { return far && finite && !masked; }
  // What a key of a far block weighs beside one a block nearer, were their scores alike.
  LINBIAS_INLINE Floats fall() const {
    if (!far) return broadcast(1.0f);
    const float distance = offsets[kKeys - 1] - offsets[0];
    return weight(broadcast(outwards < 0 ? outwards * distance : -outwards * distance));
  }

  // The pivot is subtracted from every score of a query. In a far block it goes into `base`, far_base(pivot), first.
  LINBIAS_INLINE Floats far_base(Floats pivot) const { return kFine ? pivot : away - pivot; }
  LINBIAS_INLINE Floats far_score(Floats product, int64_t s, Floats base) const {
    if constexpr (kFine) return less_product(product * scale, broadcast(outwards), far_distances(s)) - base;
    else return product * scale + (base + further[s]);
  }

  // -inf for queries whose own ranges hide key s.
  LINBIAS_INLINE Floats unless_masked(Floats score, int64_t s) const {
    const Lanes hidden = (Lanes)(kNumbers.of[s] < first) | (Lanes)(kNumbers.of[s] >= last);
    return hidden ? broadcast(-kInfinity<float>) : score;
  }

  static LINBIAS_INLINE Floats weight(Floats score) {
    return power_of_two<kFine>(kFine ? score * Simd<float>::kLog2e : score);
  }

  LINBIAS_INLINE Floats near_score(Floats product, int64_t s) const {
    return positioned ? near_score_of<true>(product, s) : near_score_of<false>(product, s);
  }
  template <bool kPositioned>
  LINBIAS_INLINE Floats near_score_of(Floats product, int64_t s) const {
    const Floats lowest = broadcast(-kInfinity<float>), distance = distances<kPositioned>(s), back = order(s);
    Floats y = product * scale;
    if (hidden[kRight] && !hidden[kLeft]) {  // causal
      y = back < 0.0f ? lowest : less_product(y, broadcast(slope[kLeft]), distance);
    } else {
      y = less_product(y, distance > 0.0f ? broadcast(slope[kLeft]) : broadcast(-slope[kRight]), distance);
      if (hidden[kLeft]) y = back > 0.0f ? lowest : y;
      if (hidden[kRight]) y = back < 0.0f ? lowest : y;
    }
    if (masked) y = unless_masked(y, s);
    return s < num_keys ? y : lowest;
  }

  // A near_score less the row's maximum, in bits.
  static LINBIAS_INLINE Floats large_score(Floats score, Floats row_max) {
    return (as_rounded(score * kLn2<float>) - row_max) * Simd<float>::kLog2e;
  }
};

// The same rule for 16 queries and one key of a block at a time.
struct Bfloat16Dropout : Dropout {
  float share;
  int64_t first_key;

  Bfloat16Dropout(const Tile<float>& tile, int64_t block)
      : Dropout(tile),
        share(static_cast<float>(1.0 / (1.0 - tile.call->dropout))),
        first_key(tile.call->first_key + tile.head->first + block * kKeys) {}

  LINBIAS_INLINE Floats apply(int64_t group, int64_t s, Floats x) const {
    const Words hash = mix(load_words(rows + group * kLanes16) ^ mix(static_cast<uint32_t>(first_key + s)));
    return (Lanes)(hash >= threshold) ? x * share : Floats{};
  }
};

// Load the queries of a tile in terms, both in rows and in columns.
template <typename In>
void load_query_terms(const Tile<float>& tile, const Bfloat16Packed<In>& packed, Bfloat16Scratch& scratch) {
  const Call& call = *tile.call;
  const In* q = row_of<In>(call.q, tile.b, tile.h, tile.start);
  const Terms<uint16_t> rows = scratch.rows_of(packed.deep_D, kTermsOf<In>);
  pack_terms(q, call.q.row, tile.rows, call.D, kTermsOf<In> > 1 ? kRows : kPaddedQueries, rows);
  const Terms<uint32_t> columns = columns_of(scratch.q_columns, packed.deep_D, kTermsOf<In>);
  pack_column_pairs(rows, tile.rows, columns);
  const float factor = scale_of_queries(call);
  if (factor == 1) return;
  for (int64_t i = 0; i < columns.count * columns.step; i += kLanes16) {
    const Words pairs = load_words(columns.data + i);
    store_words(columns.data + i, round_to_pairs<false>(even_of_pairs(pairs) * factor, odd_of_pairs(pairs) * factor));
  }
}

// The length of a query times |scale|.
template <typename In>
float length_of_query(const Tile<float>& tile, const Bfloat16Packed<In>& packed, const Bfloat16Scratch& scratch,
                      int64_t i) {
  const Call& call = *tile.call;
  const Terms<uint16_t> rows = scratch.rows_of(packed.deep_D, kTermsOf<In>);
  Floats squares{};
  for (int64_t d = 0; d < packed.padded_D; d += kLanes16) {
    const Floats x = sum_of_terms<kTermsOf<In>>(rows.data + i * rows.row + d, rows.step);
    squares += x * x;
  }
  const float length = length_from(sum<float>(squares), row_of<In>(call.q, tile.b, tile.h, tile.start + i), call.D);
  return static_cast<float>(length * (call.scale < 0 ? -call.scale : call.scale));
}

// The groups [first, end) of a tile's queries, which are multiplied with a block together. Each sees the first `shown`
// keys of the block, a multiple of 32.
struct QueryGroups {
  int64_t first, end, shown[kGroups] = {};

  template <typename Biased>
  QueryGroups(Biased& biased, int64_t from, int64_t to)
      : first(from), end(smaller_of(to, round_up(biased.tile.rows, kLanes16) / kLanes16)) {
    for (int64_t group = first; group < end; ++group) {
      const bool whole = biased.far && !biased.masked;
      if (!whole) biased.turn_to(group);
      shown[group] = whole ? kKeys : biased.end_shown;
    }
  }

  // Run make(group, count, shown): once for all groups if they see equally many keys, else for each.
  template <typename Make>
  LINBIAS_INLINE void for_alike(const Make& make) const {
    bool alike = true;
    for (int64_t group = first; group < end; ++group) alike = alike && shown[group] == shown[first];
    const int64_t count = alike ? end - first : 1;
    for (int64_t group = first; group < end; group += count) {
      if (shown[group] > 0) make(group, count, shown[group]);
    }
  }

  // Multiply the keys, or values, of a block with the queries, or dout, of each group: to[groups, kKeys, 16].
  LINBIAS_INLINE void multiply(MatrixUnit& unit, Terms<uint16_t> rows, Terms<uint32_t> columns, float* to) const {
    const int64_t column = kLanes16 * rows.row / 2;
    for_alike([&](int64_t group, int64_t count, int64_t keys) __attribute__((always_inline)) {
      multiply_columns(unit, count, keys, rows.row, rows, columns.at(group * column), column,
                       to + (group - first) * kGroupScores, kGroupScores, false);
    });
  }

  // Add to acc[kGroups, size, 16] the products of transposed rows[size, kKeys] and the pairs of each group.
  LINBIAS_INLINE void add(MatrixUnit& unit, int64_t size, Terms<uint16_t> transposed, Terms<uint32_t> pairs,
                          float* acc) const {
    for_alike([&](int64_t group, int64_t count, int64_t keys) __attribute__((always_inline)) {
      multiply_columns(unit, count, size, keys, transposed, pairs.at((group - first) * kGroupPairs), kGroupPairs,
                       acc + group * size * kLanes16, size * kLanes16, true);
    });
  }
};

// As is_negligible: would the block with these products add next to nothing to any query of a group?
template <typename Biased>
bool is_group_negligible(const Biased& biased, int64_t group, float allowance, const float* scores,
                         Bfloat16Scratch& scratch) {
  const int64_t from = group * kLanes16;
  if (!biased.is_whole() || !biased.fits_bits(load(scratch.pivot + from))) return false;
  const Floats base = biased.far_base(load(scratch.pivot + from));
  Floats high = broadcast(-kInfinity<float>), total;
#pragma GCC unroll 4
  for (int64_t s = 0; s < kKeys; ++s)
    high = larger<float>(biased.far_score(load(scores + s * kLanes16), s, base), high);
  if (!in_all_lanes(
          ~matters_to<float>(scratch, from, biased.tile.rows, high, Biased::weight(high), allowance, total))) {
    return false;
  }
  store<float>(scratch.left_out + from, total);
  return true;
}

// to[rows, size] <- from[wide, 16], transposed, each of the 16 columns times its factor; as float, or rounded to
// bfloat16, rows `step` numbers apart.
template <typename To>
LINBIAS_INLINE void store_transposed(const float* from, int64_t wide, Floats factor, int64_t rows, int64_t size, To* to,
                                     int64_t step) {
  for (int64_t e = 0; e < wide; e += kLanes16) {
    Words x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = (Words)(load(from + (e + i) * kLanes16) * factor);
    transpose(x);
    for (int64_t i = 0; i < rows; i += 2) {
      To two[2][kLanes16];
      if constexpr (sizeof(To) == 4) {
        store_words(two[0], x[i]);
        store_words(two[1], x[i + 1]);
      } else {
        round_to_pairs<true>((Floats)x[i], (Floats)x[i + 1], two[0], two[1]);
      }
      for (int64_t row = i; row < smaller_of(rows, i + 2); ++row) {
        if (e + kLanes16 <= size) __builtin_memcpy(to + row * step + e, two[row - i], sizeof two[0]);
        else __builtin_memcpy(to + row * step + e, two[row - i], sizeof(To) * static_cast<size_t>(size - e));
      }
    }
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
