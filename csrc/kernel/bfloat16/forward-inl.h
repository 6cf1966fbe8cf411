// The forward pass of one tile in products of pairs. It differs from ForwardWork in its pivots: what is subtracted from
// a query's scores is their maximum in the near blocks, or in the first block where there are none, and it changes only
// where the weights of a block would sum to more than kHeadroom. bfloat16 has the exponents of float32, so that larger
// weights lose nothing, and a block takes one pass from products to pairs of weights.
#pragma once

#include "kernel/bfloat16/precision-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr float kHeadroom = 0x1p40f;  // of the weights of a block, together

template <typename In>
struct Bfloat16ForwardWork {
  using Wide = float;
  using PackedHeads = Bfloat16Packed<In>;
  using Packer = Bfloat16PackTask<In>;
  using WorkScratch = Bfloat16Scratch;
  using Negligible = TermsOfGroups;
  static constexpr int kTerms = kTermsOf<In>;
  static constexpr bool kFine = kTerms > 1;
  using Biased = Bfloat16Biased<kFine>;
  const Call& call;
  const Forward& results;
  const PackedHeads& packed;
  const Tile<float>& tile;
  int64_t slot;
  WorkScratch& scratch;
  float slack;
  MatrixUnit unit{};
  Precision<kTerms> precision{scratch};

  void begin() {
    load_query_terms<In>(tile, packed, scratch);
    for (int64_t i = 0; i < kRows; ++i) {
      scratch.pivot[i] = scratch.row_max[i] = -kInfinity<float>;
      scratch.row_sum[i] = scratch.left_out[i] = 0;
    }
    precision.begin(call, packed.certify ? measure_queries() : kInfinity<float>);
    __builtin_memset(scratch.acc, 0, sizeof(float) * static_cast<size_t>(kRows * packed.padded_E));
  }

  // Find what the certificate needs of the queries. Returns the most that a score can be before its bias.
  float measure_queries() {
    const Head<float>& head = *tile.head;
    const Terms<uint16_t> rows = scratch.rows_of(packed.deep_D, kTerms);
    float longest = 0;
    for (int64_t i = 0; i < tile.rows; ++i) {
      Floats aligned{};
      for (int64_t d = 0; d < packed.padded_D; d += kLanes16) {
        aligned += sum_of_terms<kTerms>(rows.data + i * rows.row + d, rows.step) * load(head.center + d);
      }
      note_query<float>(head, scratch, i, length_of_query<In>(tile, packed, scratch, i),
                        static_cast<float>(sum<float>(aligned) * call.scale), slack);
      longest = larger_or_nan(longest, scratch.norm[i]);
    }
    return longest * (head.center_norm + head.largest);
  }

  // Add a block to the sums of all queries, unless for a group of them the block before was negligible and this one is,
  // too. Returns whether any of them needed all terms.
  bool visit(int64_t block, TermsOfGroups& expected) {
    Biased biased(tile, block);
    bool in_full = false;
    precision.for_groups(biased, packed.groups_at_once(), expected,
                         [&](int64_t first, int64_t end, int terms, int* left) __attribute__((always_inline)) {
                           visit_groups(biased, first, end, terms, expected, left);
                           in_full |= terms == kTerms;
                         });
    return in_full;
  }

  LINBIAS_INLINE void visit_groups(Biased& biased, int64_t from, int64_t to, int terms, TermsOfGroups& expected,
                                   int* left) {
    if constexpr (!kFine) terms = kTerms;  // which the compiler then knows
    const Terms<uint16_t> keys = packed.keys_at(slot, biased.block),
                          values = packed.values_transposed_at(slot, biased.block);
    const Terms<uint32_t> q = columns_of(scratch.q_columns, packed.deep_D, kTerms),
                          weights = {scratch.pairs, kLanes16, weight_terms(terms), kPairsStep};
    const float allowance = static_cast<float>(call.tolerance * (1 - kTailShare));
    const Floats fall = biased.fall(), beyond = Precision<kTerms>::kMargin * fall / (1.0f - fall);
    QueryGroups groups(biased, from, to);
    groups.multiply(unit, keys.first(terms), q.first(terms), scratch.score);
    for (int64_t group = groups.first; group < groups.end; ++group) {
      if (groups.shown[group] == 0) continue;
      biased.turn_to(group);
      float* scores = scratch.score + (group - from) * kGroupScores;
      if (expected.of[group] == TermsOfGroups::kNegligible &&
          is_group_negligible(biased, group, allowance * precision.certainty(terms), scores, scratch)) {
        groups.shown[group] = 0;
        continue;
      }
      Floats added;
      if (!add_weights(biased, group, terms, scores, scratch.pairs + (group - from) * kGroupPairs, added)) {
        left[group] = kTerms;
        groups.shown[group] = 0;
        continue;
      }
      const bool small = in_all_lanes((Lanes)(added * 16.0f <= allowance * load(scratch.row_sum + group * kLanes16)));
      expected.of[group] = small ? TermsOfGroups::kNegligible : precision.terms_for(group, added * beyond);
    }
    groups.add(unit, packed.padded_E, values.first(terms), weights, scratch.acc);
  }

  int weight_terms(int terms) const { return kFine ? terms : call.precise ? 2 : 1; }

  // Turn the products of a group into weights in pairs, and add them up; `added` are their sums. Returns false, with
  // nothing changed, where these are too large for so few terms.
  LINBIAS_INLINE bool add_weights(const Biased& biased, int64_t group, int terms, float* scores, uint32_t* pairs,
                                  Floats& added) {
    float* pivots = scratch.pivot + group * kLanes16;
    float* sums = scratch.row_sum + group * kLanes16;
    if (biased.far && biased.fits_bits(load(pivots)) && in_all_lanes((Lanes)(load(pivots) > -kInfinity<float>))) {
      const Floats base = biased.far_base(load(pivots));
      const auto score = [&](int64_t s) __attribute__((always_inline)) {
        return biased.far_score(load(scores + s * kLanes16), s, base);
      };
      const auto masked = [&](int64_t s) __attribute__((always_inline)) { return biased.unless_masked(score(s), s); };
      added = biased.masked ? round_weights(biased, group, terms, biased.end_shown, masked, pairs)
                            : round_weights(biased, group, terms, kKeys, score, pairs);
      const bool few = terms < kTerms;
      if (few ? precision.admits(group, terms, added) : in_all_lanes((Lanes)(added < kHeadroom))) {
        if (few) precision.note(group, terms, added);
        store<float>(sums, load(sums) + added);
        return true;
      }
    }
    if (terms < kTerms) return false;
    move_pivots(biased, group, scores);
    Floats pivot = load(pivots);
    pivot = pivot == -kInfinity<float> ? Floats{} : pivot;  // of a query that has seen no key: its weights are 0
    if (!biased.fits_bits(pivot)) {
      const Floats maxima = load(scratch.row_max + group * kLanes16),
                   high = maxima == -kInfinity<float> ? pivot : maxima;
      for (int64_t s = 0; s < biased.end_shown; ++s) {
        store<float>(scores + s * kLanes16, Biased::large_score(load(scores + s * kLanes16), high));
      }
      pivot = Floats{};
    }
    const auto score = [&](int64_t s) __attribute__((always_inline)) { return load(scores + s * kLanes16) - pivot; };
    added = round_weights(biased, group, terms, biased.end_shown, score, pairs);
    store<float>(sums, load(sums) + added);
    return true;
  }

  // Bias the products of a group in place, raise its pivots to the maxima, and scale what was summed before to them.
  LINBIAS_INLINE void move_pivots(const Biased& biased, int64_t group, float* scores) {
    Floats high = broadcast(-kInfinity<float>);
    const auto bias = [&](int64_t s, Floats x) __attribute__((always_inline)) {
      store<float>(scores + s * kLanes16, x);
      high = larger<float>(x, high);
    };
    if (biased.positioned) {
      for (int64_t s = 0; s < biased.end_shown; ++s)
        bias(s, biased.template near_score_of<true>(load(scores + s * kLanes16), s));
    } else {
      for (int64_t s = 0; s < biased.end_shown; ++s)
        bias(s, biased.template near_score_of<false>(load(scores + s * kLanes16), s));
    }
    float *maxima = scratch.row_max + group * kLanes16, *pivots = scratch.pivot + group * kLanes16;
    const Floats before = load(maxima), row_max = kFine ? high : high * kLn2<float>;
    const Lanes raised = (Lanes)(row_max > before);
    if (in_all_lanes(~raised)) return;
    const Floats shrink = raised ? Biased::weight((before - row_max) * Biased::kUnit) : broadcast(1.0f);
    store<float>(maxima, raised ? row_max : before);
    store<float>(pivots, raised ? row_max * Biased::kUnit : load(pivots));
    float *sums = scratch.row_sum + group * kLanes16, *left_out = scratch.left_out + group * kLanes16;
    store<float>(sums, load(sums) * shrink);
    store<float>(left_out, load(left_out) * shrink);
    precision.shrink(group, shrink);
    float* acc = scratch.acc + group * kLanes16 * packed.padded_E;
    for (int64_t e = 0; e < packed.padded_E; ++e) store<float>(acc + e * kLanes16, load(acc + e * kLanes16) * shrink);
  }

  // Store the weights of scores in pairs of keys and in terms, and return the sums from before rounding. A bfloat16 is
  // one term where it does not matter what rounding loses, and two elsewhere.
  template <typename Score>
  LINBIAS_INLINE Floats round_weights(const Biased& biased, int64_t group, int terms, int64_t shown, const Score& score,
                                      uint32_t* pairs) const {
    if (call.dropout > 0) {
      const Bfloat16Dropout dropout(tile, biased.block);
      const auto drop = [&](int64_t s, Floats x) __attribute__((always_inline)) { return dropout.apply(group, s, x); };
      return store_weights<kFine ? kTerms : 2>(shown, score, drop, pairs);
    }
    const auto keep = [](int64_t, Floats x) __attribute__((always_inline)) { return x; };
    if (kFine && terms == kTerms) return store_weights<kTerms>(shown, score, keep, pairs);
    if (weight_terms(terms) == 1) return store_weights<1>(shown, score, keep, pairs);
    return store_weights<2>(shown, score, keep, pairs);
  }

  template <int kWeightTerms, typename Score, typename Drop>
  LINBIAS_INLINE Floats store_weights(int64_t shown, const Score& score, const Drop& drop, uint32_t* pairs) const {
    Floats total[2] = {};
#pragma GCC unroll 2
    for (int64_t s = 0; s < shown; s += 2) {
      const Floats even = Biased::weight(score(s)), odd = Biased::weight(score(s + 1));
      total[0] += even;
      total[1] += odd;
      store_pairs<kWeightTerms>(drop(s, even), drop(s + 1, odd), pairs + s / 2 * kLanes16, kPairsStep);
    }
    return total[0] + total[1];
  }

  void finish() {
    for (int64_t group = 0; group * kLanes16 < tile.rows; ++group) {
      const int64_t rows = smaller_of(tile.rows - group * kLanes16, kLanes16), first = group * kLanes16;
      const int64_t at = tile.index(first) * call.E, step = query_step(call) * call.E;
      const float* row_sum = scratch.row_sum + group * kLanes16;
      const Floats sums = load(row_sum), share = 1.0f / (sums == 0.0f ? broadcast(1.0f) : sums);
      const float* acc = scratch.acc + group * kLanes16 * packed.padded_E;
      if (results.narrow) {
        store_transposed(acc, packed.padded_E, share, rows, call.E, static_cast<uint16_t*>(results.out) + at, step);
      } else {
        store_transposed(acc, packed.padded_E, share, rows, call.E, static_cast<float*>(results.out) + at, step);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const float row_max = scratch.row_max[group * kLanes16 + i];
        static_cast<float*>(results.row_max)[tile.index(first + i)] = row_max;
        // row_max is the pivot in bits, converted and rounded; what that lost is added to log_sum.
        const double bits = static_cast<double>(scratch.pivot[group * kLanes16 + i]);
        const bool in_bits = !kFine && bits < Biased::kLarge && bits > -Biased::kLarge;
        const float lost = in_bits ? static_cast<float>(bits * kLn2<double> - static_cast<double>(row_max)) : 0.0f;
        static_cast<float*>(results.log_sum)[tile.index(first + i)] = __builtin_logf(row_sum[i]) + lost;
      }
    }
  }
};

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
