// The backward pass of one tile in products of pairs. It differs from BackwardWork in what enters a product:
//
// - weights and gradients of scores: rounded to bfloat16 where the inputs are bfloat16, else as sums of three terms;
// - dout: as the sum of as many terms as it needs, which is one where it was bfloat16.
//
// For bfloat16 the logarithm of a row's sum is part of the pivot, so that weights need no division. Gradients of scores
// are summed in float32.
#pragma once

#include "kernel/backward-inl.h"
#include "kernel/bfloat16/precision-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

template <typename In>
struct Bfloat16BackwardWork {
  using Wide = float;
  using Input = In;
  using PackedHeads = Bfloat16Packed<In>;
  using Packer = Bfloat16PackTask<In>;
  using WorkScratch = Bfloat16Scratch;
  using Negligible = TermsOfGroups;
  static constexpr bool kScaledQueries = false;
  static constexpr int kTerms = kTermsOf<In>;
  static constexpr bool kFine = kTerms > 1;
  using Biased = Bfloat16Biased<kFine>;
  // Weights, and gradients of scores, as rows: [keys, kPaddedQueries] of bfloat16, or for float32 [kinds, groups, keys,
  // 16] words, each a pair of terms.
  static constexpr int64_t kColumns = kFine ? 2 * kLanes16 : kPaddedQueries;
  static constexpr int64_t kKindStep = kGroups * kKeys * kLanes16;  // words
  const Call& call;
  const Backward& results;
  const PackedHeads& packed;
  const Tile<float>& tile;
  int64_t slot;
  WorkScratch& scratch;
  float *dk, *dv;      // of the head, to add to
  double* dpositions;  // likewise, or null
  int dout_terms = 0;
  MatrixUnit unit{};
  Precision<kTerms> precision{scratch};

  // What was taken of a block: how many keys each group of queries sees, and in how many terms.
  struct Taken {
    int64_t shown[kGroups] = {};
    int terms[kGroups] = {};
  };

  bool has_keys(int64_t i) const { return scratch.pivot[i] != kInfinity<float>; }

  void begin() {
    load_query_terms<In>(tile, packed, scratch);
    // Gradients of slopes, and of positions, weigh errors by distance: they ask for all terms.
    const bool by_distance = results.dleft || dpositions;
    precision.begin(call, packed.measures && !by_distance ? largest_score() : kInfinity<float>);
    pack_over_queries(scratch.rows_of(packed.deep_D, kTerms), packed.padded_D, scratch.q_pairs);
    load_output_gradient();
    __builtin_memset(scratch.acc, 0, sizeof(float) * static_cast<size_t>(kRows * packed.padded_D));
    for (int64_t group = round_up(tile.rows, kLanes16) / kLanes16; !kFine && group < kPaddedQueries / kLanes16;
         ++group) {
      clear(group, 0);
    }
  }

  // The most that a score can be before its bias.
  float largest_score() const {
    float longest = 0;
    for (int64_t i = 0; i < tile.rows; ++i) {
      longest = larger_or_nan(longest, length_of_query<In>(tile, packed, scratch, i));
    }
    return longest * (tile.head->center_norm + tile.head->largest);
  }

  // Load dout in the forms that products want, and find its number of terms, the delta of each query and its pivot. For
  // float32 dout and delta are divided by the row's sum, so that weights need not be.
  void load_output_gradient() {
    scratch.clear_gradients();
    for (int64_t i = 0; i < kRows; ++i) {
      scratch.row_sum[i] = 1;
      scratch.row_max[i] = scratch.pivot[i] = kInfinity<float>;  // 2^(score - inf) = 0: no weight in a row without keys
      scratch.log_sum_bits[i] = 0;
    }
    const int64_t E = call.E, deep_E = packed.deep_E;
    Words beyond[kMostTerms] = {};  // whether a term is not 0 somewhere
    for (int64_t i = 0; i < (kFine ? kRows : kPaddedQueries); ++i) {
      const bool seen = i < tile.rows && find_pivot(i);
      const int64_t at = tile.index(i);
      const float* given = static_cast<const float*>(results.dout) + at * E;
      const float* out = static_cast<const float*>(results.saved.out) + at * E;
      const float per_sum = seen ? 1 / scratch.row_sum[i] : 1;
      Floats delta{};
      for (int64_t e = 0; e < deep_E; e += 32) {
        Floats x[2] = {}, y[2] = {};
        const size_t bytes = sizeof(float) * static_cast<size_t>(seen ? smaller_of(larger_of(E - e, 0), 32) : 0);
        if (bytes == sizeof x) {
          __builtin_memcpy(x, given + e, sizeof x);
          __builtin_memcpy(y, out + e, sizeof y);
        } else if (bytes > 0) {
          __builtin_memcpy(x, given + e, bytes);
          __builtin_memcpy(y, out + e, bytes);
        }
        delta += x[0] * y[0] + x[1] * y[1];
        uint16_t* to = scratch.rows + i * deep_E + e;
        const auto put = [&](int term, Words first, Words second) __attribute__((always_inline)) {
          beyond[term] |= (first | second) & 0x7fff0000u;
          store_upper_halves(first, second, to + term * kPaddedQueries * deep_E);
        };
        split(x[0] * per_sum, x[1] * per_sum, put);
      }
      if (seen) scratch.delta[i] = (sum<float>(delta) - lse_gradient<float>(results, at)) * per_sum;
    }
    dout_terms = kMostTerms;
    while (!kFine && dout_terms > 1 && in_all_lanes((Lanes)(beyond[dout_terms - 1] == 0u))) --dout_terms;
    const Terms<uint16_t> dout = scratch.rows_of(deep_E, dout_terms);
    pack_column_pairs(dout, tile.rows, columns_of(scratch.dout_columns, deep_E, dout_terms));
    pack_over_queries(dout, packed.padded_E, scratch.dout_pairs);
  }

  // Rows of queries, or of their dout, as the second factor of a product that sums over queries.
  static void pack_over_queries(Terms<uint16_t> rows, int64_t columns, uint32_t* to) {
    if constexpr (kFine) {
      pack_kinds(rows, kRows, columns, {to, columns, kOtherPairKinds, kRows * columns});
    } else {
      pack_pairs(rows, kPaddedQueries, columns, {to, columns, rows.count, kPaddedQueries / 2 * columns});
    }
  }

  // The pivot of a row, and for float32 its sum, as forward left them. Returns whether it has seen a key.
  bool find_pivot(int64_t i) {
    const float row_max = static_cast<const float*>(results.saved.row_max)[tile.index(i)];
    const float log_sum = static_cast<const float*>(results.saved.log_sum)[tile.index(i)];
    if (log_sum == -kInfinity<float>) return false;
    scratch.row_max[i] = scratch.pivot[i] = row_max;
    if constexpr (kFine) {
      scratch.row_sum[i] = natural_exp(log_sum);
    } else {
      scratch.log_sum_bits[i] = log_sum * Biased::kUnit;
      scratch.pivot[i] =
          static_cast<float>((static_cast<double>(row_max) + static_cast<double>(log_sum)) / kLn2<double>);
    }
    return true;
  }

  // Clear the weights of a group and their gradients from key `from` on.
  void clear(int64_t group, int64_t from) {
    const HalfWords zeros{};
    for (int64_t at = from * kColumns + group * kLanes16; at < kKeys * kColumns; at += kColumns) {
      __builtin_memcpy(scratch.weight_rows + at, &zeros, sizeof zeros);
      __builtin_memcpy(scratch.dscore_rows + at, &zeros, sizeof zeros);
    }
  }

  static uint32_t* words_of(uint16_t* rows) { return reinterpret_cast<uint32_t*>(rows); }

  // Add what a block gives, unless for a group of queries those beyond were negligible and it is, too.
  void visit(int64_t block, TermsOfGroups& expected) {
    Biased biased(tile, block);
    Taken taken;
    if (biased.positioned) __builtin_memset(scratch.pulls, 0, sizeof(float) * kGroupScores);
    precision.for_groups(biased, packed.groups_at_once(), expected,
                         [&](int64_t first, int64_t end, int terms, int* left) __attribute__((always_inline)) {
                           visit_groups(biased, first, end, terms, expected, taken, left);
                         });
    int64_t most_shown = 0;
    for (const int64_t shown : taken.shown) most_shown = larger_of(most_shown, shown);
    if (most_shown == 0) return;
    if (dpositions) add_pulls(dpositions + block * kKeys, smaller_of(most_shown, biased.num_keys));
    add_over_queries(most_shown, taken, packed.padded_E, dout_terms, scratch.weight_rows, scratch.dout_pairs,
                     dv + block * kKeys * packed.padded_E);
    add_over_queries(most_shown, taken, packed.padded_D, 1, scratch.dscore_rows, scratch.q_pairs,
                     dk + block * kKeys * packed.padded_D);
  }

  LINBIAS_INLINE void visit_groups(Biased& biased, int64_t from, int64_t to, int terms, TermsOfGroups& expected,
                                   Taken& taken, int* left) {
    if constexpr (!kFine) terms = kTerms;  // which the compiler then knows
    const Terms<uint16_t> keys = packed.keys_at(slot, biased.block), values = packed.values_at(slot, biased.block),
                          keys_transposed = packed.keys_transposed_at(slot, biased.block);
    const Terms<uint32_t> q = columns_of(scratch.q_columns, packed.deep_D, kTerms),
                          dout = columns_of(scratch.dout_columns, packed.deep_E, kFine ? terms : dout_terms),
                          dscores = {scratch.pairs, kLanes16, terms, kPairsStep};
    const float allowance = static_cast<float>(call.tolerance * (1 - kTailShare));
    const Floats nearer = Precision<kTerms>::kMargin / biased.fall();
    QueryGroups groups(biased, from, to);
    groups.multiply(unit, keys.first(terms), q.first(terms), scratch.score);
    for (int64_t group = groups.first; group < groups.end; ++group) {
      if (groups.shown[group] == 0 || expected.of[group] != TermsOfGroups::kNegligible) continue;
      biased.turn_to(group);
      const float* scores = scratch.score + (group - from) * kGroupScores;
      if (is_group_negligible(biased, group, allowance * precision.certainty(terms), scores, scratch)) {
        groups.shown[group] = 0;
      }
    }
    groups.multiply(unit, values.first(terms), dout, scratch.dweight);
    for (int64_t group = groups.first; group < groups.end; ++group) {
      if (groups.shown[group] == 0) continue;
      biased.turn_to(group);
      Floats added;
      if (score_gradients({biased, group, group - from, groups.shown[group], terms}, added)) {
        expected.of[group] = precision.terms_for(group, added * nearer);
      } else {
        left[group] = kTerms;
        groups.shown[group] = 0;
      }
    }
    groups.add(unit, packed.padded_D, keys_transposed.first(terms), dscores, scratch.acc);
    for (int64_t group = groups.first; group < groups.end; ++group) {
      if constexpr (!kFine) clear(group, groups.shown[group]);
      taken.shown[group] = groups.shown[group];
      taken.terms[group] = terms;
    }
  }

  // to[keys, size] += rows[keys, queries] times pairs[queries, size], which pack_over_queries made.
  void add_over_queries(int64_t keys, [[maybe_unused]] const Taken& taken, int64_t size, int terms, uint16_t* rows,
                        uint32_t* pairs, float* to) {
#if defined(LINBIAS_AMX)
    if constexpr (kFine) {
      add_groups(unit, keys, size, round_up(tile.rows, kLanes16) / kLanes16, taken.shown, taken.terms,
                 {rows, kColumns, 2 * kKindStep, kKeys * kColumns}, {pairs, size, kRows * size, kLanes16 * size}, to);
      return;
    }
#endif
    for (int term = 0; term < terms; ++term) {
      add_product(unit, keys, size, round_up(tile.rows, kDeep), rows, kColumns,
                  pairs + term * kPaddedQueries / 2 * size, to);
    }
  }

  // A group of queries, its place among those multiplied together, and how many keys of the block it sees.
  struct Weighing {
    const Biased& biased;
    int64_t group, place, shown;
    int terms;
  };

  // Find the gradients of the scores of a group; `added` are the sums of its weights. Returns false, with nothing
  // changed, where these are too large for so few terms.
  LINBIAS_INLINE bool score_gradients(const Weighing& of, Floats& added) {
    const Biased& biased = of.biased;
    const Floats pivot = load(scratch.pivot + of.group * kLanes16), base = biased.far_base(pivot);
    float* scores = scratch.score + of.place * kGroupScores;
    const auto keep = [](int64_t, Floats x) __attribute__((always_inline)) { return x; };
    const bool fits_bits = biased.fits_bits(pivot);
    for (int64_t s = 0; s < of.shown && !fits_bits; ++s) {
      const Floats score = biased.near_score(load(scores + s * kLanes16), s);
      store<float>(scores + s * kLanes16, Biased::large_score(score, load(scratch.row_max + of.group * kLanes16)) -
                                              load(scratch.log_sum_bits + of.group * kLanes16));
    }
    if (fits_bits && biased.far && !biased.masked && !(call.dropout > 0)) {
      const auto score = [&](int64_t s) __attribute__((always_inline)) {
        return biased.far_score(load(scores + s * kLanes16), s, base);
      };
      if (dpositions || (biased.positioned && results.dleft)) return gradients_of<true, true>(of, score, keep, added);
      if (results.dleft) return gradients_of<true, false>(of, score, keep, added);
      return gradients_of<false, false>(of, score, keep, added);
    }
    const auto score = [&](int64_t s) __attribute__((always_inline)) {
      const Floats product = load(scores + s * kLanes16);
      if (!fits_bits) return product;
      if (!biased.far) return biased.near_score(product, s) - pivot;
      const Floats score = biased.far_score(product, s, base);
      return biased.masked ? biased.unless_masked(score, s) : score;
    };
    if (call.dropout > 0) {
      const Bfloat16Dropout dropout(tile, biased.block);
      const auto drop = [&](int64_t s, Floats x)
                            __attribute__((always_inline)) { return dropout.apply(of.group, s, x); };
      return biased.positioned ? gradients_of<true, true>(of, score, drop, added)
                               : gradients_of<true, false>(of, score, drop, added);
    }
    return biased.positioned ? gradients_of<true, true>(of, score, keep, added)
                             : gradients_of<true, false>(of, score, keep, added);
  }

  // Turn the products of a group into weights and gradients of scores, in the forms that products want, and sum what
  // slopes and positions need, if they need it. drop(key, x) is x for the queries that keep the key under dropout.
  template <bool kSlopes, bool kPositions, typename Score, typename Drop>
  LINBIAS_INLINE bool gradients_of(const Weighing& of, const Score& score, const Drop& drop, Floats& added) {
    const Biased& biased = of.biased;
    const Floats delta = load(scratch.delta + of.group * kLanes16);
    const float* dweights = scratch.dweight + of.place * kGroupScores;
    Floats weights{}, total{}, slope[2] = {}, weighted[2] = {}, pulls{};
    const bool one_side = biased.far || biased.hidden[kRight];
    for (int64_t s = 0; s < of.shown; s += 2) {
      Floats weight[2], dscore[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        weight[i] = Biased::weight(score(s + i));
        weights += weight[i];
        const Floats dweight = drop(s + i, load(dweights + (s + i) * kLanes16));
        dscore[i] = weight[i] * (dweight - delta);
        total += dscore[i];
        if constexpr (kSlopes) {
          const Floats distance = biased.template distances<kPositions>(s + i);
          if (one_side) {
            slope[kLeft] += dscore[i] * distance;
            weighted[kLeft] += weight[i] * distance;
          } else {
            const Floats left = distance > 0.0f ? distance : Floats{}, right = left - distance;
            slope[kLeft] += dscore[i] * left;
            weighted[kLeft] += weight[i] * left;
            slope[kRight] += dscore[i] * right;
            weighted[kRight] += weight[i] * right;
          }
        }
        if constexpr (kPositions) {
          const Floats pull = dscore[i] * biased.pull(s + i);
          add_to(scratch.pulls + (s + i) * kLanes16, pull);
          pulls += pull;
        }
        weight[i] = drop(s + i, weight[i]);
      }
      store_weights(weight, dscore, of, s);
    }
    added = weights;
    if (of.terms < kTerms) {
      if (!precision.admits(of.group, of.terms, weights)) return false;
      precision.note(of.group, of.terms, weights);
    }
    const int64_t at = of.group * kLanes16;
    add_to(scratch.dscore_sum + at, total);
    if constexpr (!kSlopes) return true;
    // In a block to the right all distances are negative.
    const bool to_the_right = biased.far && biased.block > tile.near_last;
    const int nearer = to_the_right ? kRight : kLeft;
    if constexpr (kPositions) add_to(scratch.pull_sum + at, pulls);
    add_to(scratch.slope_sum[nearer] + at, to_the_right ? -slope[kLeft] : slope[kLeft]);
    add_to(scratch.distance_sum[nearer] + at, to_the_right ? -weighted[kLeft] : weighted[kLeft]);
    if (one_side) return true;
    add_to(scratch.slope_sum[kRight] + at, slope[kRight]);
    add_to(scratch.distance_sum[kRight] + at, weighted[kRight]);
    return true;
  }

  // Store the weights of two keys and the gradients of their scores as rows, and the gradients also as pairs.
  LINBIAS_INLINE void store_weights(const Floats (&weight)[2], const Floats (&dscore)[2], const Weighing& of,
                                    int64_t s) {
    uint32_t* pairs = scratch.pairs + of.place * kGroupPairs + s / 2 * kLanes16;
    if constexpr (kFine) {
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (of.group * kKeys + s + i) * kLanes16;
        store_kinds(of.terms, weight[i], words_of(scratch.weight_rows) + at, kKindStep);
        store_kinds(of.terms, dscore[i], words_of(scratch.dscore_rows) + at, kKindStep);
      }
      if (of.terms == 1) store_pairs<1>(dscore[0], dscore[1], pairs, kPairsStep);
      else if (of.terms == 2) store_pairs<2>(dscore[0], dscore[1], pairs, kPairsStep);
      else store_pairs<kTerms>(dscore[0], dscore[1], pairs, kPairsStep);
    } else {
      const int64_t at = s * kColumns + of.group * kLanes16;
      uint16_t *weights = scratch.weight_rows + at, *dscores = scratch.dscore_rows + at;
      round_to_pairs<true>(weight[0], weight[1], weights, weights + kColumns);
      store_words(pairs, round_to_pairs<true>(dscore[0], dscore[1], dscores, dscores + kColumns));
    }
  }

  // Add what all queries ask of the positions of a block's keys.
  void add_pulls(double* to, int64_t count) const {
    float sums[kKeys];
    for (int64_t s = 0; s < kKeys; s += kLanes16) {
      Floats pulls[kLanes16];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes16; ++i) pulls[i] = load(scratch.pulls + (s + i) * kLanes16);
      store<float>(sums + s, sum_of_each(pulls));
    }
    for (int64_t s = 0; s < count; ++s) to[s] += static_cast<double>(sums[s]);
  }

  LINBIAS_INLINE static void add_to(float* sums, Floats x) { store<float>(sums, load(sums) + x); }

  void finish() const {
    for (int64_t group = 0; group * kLanes16 < tile.rows; ++group) {
      const Floats scale = broadcast(static_cast<float>(call.scale));
      store_transposed(scratch.acc + group * kLanes16 * packed.padded_D, packed.padded_D, scale,
                       smaller_of(tile.rows - group * kLanes16, kLanes16), call.D,
                       static_cast<float*>(results.dq) + tile.index(group * kLanes16) * call.D,
                       query_step(call) * call.D);
    }
  }
};

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
