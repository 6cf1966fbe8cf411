// The forward pass of one tile in products of pairs. It differs from ForwardWork in its pivots: what is subtracted from
// a query's scores is their maximum in the near blocks, or in the first block where there are none, and it changes only
// where the weights of a block would sum to more than kHeadroom. bfloat16 has the exponents of float32, so that larger
// weights lose nothing, and a block takes one pass from products to pairs of weights.
#pragma once

#include "kernel/bfloat16/tile-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr float kHeadroom = 0x1p40f;  // of the weights of a block, together

template <typename In>
struct Bfloat16ForwardWork {
  using Wide = float;
  using PackedHeads = Bfloat16Packed<In>;
  using Packer = Bfloat16PackTask<In>;
  using WorkScratch = Bfloat16Scratch;
  using Negligible = OfGroups;
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

  void begin() {
    load_query_terms<In>(tile, packed, scratch);
    for (int64_t i = 0; i < kRows; ++i) {
      scratch.pivot[i] = scratch.row_max[i] = -kInfinity<float>;
      scratch.row_sum[i] = scratch.left_out[i] = 0;
    }
    if (packed.certify) measure_queries();
    __builtin_memset(scratch.acc, 0, sizeof(float) * static_cast<size_t>(kRows * packed.padded_E));
  }

  // What the certificate needs of the queries.
  void measure_queries() {
    const Head<float>& head = *tile.head;
    const float scale = static_cast<float>(call.scale), size = scale < 0 ? -scale : scale;
    const Terms<uint16_t> rows = scratch.rows_of(packed.deep_D, kTerms);
    const In* q = row_of<In>(call.q, tile.b, tile.h, tile.start);
    for (int64_t i = 0; i < tile.rows; ++i) {
      Floats squares{}, aligned{};
      for (int64_t d = 0; d < packed.padded_D; d += kLanes16) {
        const Floats x = sum_of_terms<kTerms>(rows.data + i * rows.row + d, rows.step);
        squares += x * x;
        aligned += x * load(head.center + d);
      }
      const float length = length_from(sum<float>(squares), q + i * call.q.row, call.D) * size;
      note_query<float>(head, scratch, i, length, sum<float>(aligned) * scale, slack);
    }
  }

  // Add a block to the sums of all queries, unless for a group of them the block before was negligible and this one is,
  // too.
  void visit(int64_t block, OfGroups& negligible) {
    const Terms<uint16_t> keys = packed.keys_at(slot, block), values = packed.values_transposed_at(slot, block);
    const int weight_terms = kFine ? kTerms : call.precise ? 2 : 1;
    const Terms<uint32_t> q = columns_of(scratch.q_columns, packed.deep_D, kTerms),
                          weights = {scratch.pairs, kLanes16, weight_terms, kPairsStep};
    Biased biased(tile, block);
    const float allowance = static_cast<float>(call.tolerance * (1 - kTailShare));
    const int64_t at_once = packed.groups_at_once();
    for (int64_t first = 0; first * kLanes16 < tile.rows; first += at_once) {
      QueryGroups groups(biased, first, first + at_once);
      groups.multiply(unit, keys, q, scratch.score);
      for (int64_t group = groups.first; group < groups.end; ++group) {
        if (groups.shown[group] == 0) continue;
        biased.turn_to(group);
        float* scores = scratch.score + (group - first) * kGroupScores;
        if (negligible.of[group] && biased.finite && biased.far && !biased.masked &&
            biased.fits_bits(load(scratch.pivot + group * kLanes16)) &&
            is_group_negligible(biased, group, allowance, scores, scratch)) {
          groups.shown[group] = 0;
          continue;
        }
        const Floats added = add_weights(biased, group, scores, scratch.pairs + (group - first) * kGroupPairs);
        const Lanes small = (Lanes)(added * 16.0f <= allowance * load(scratch.row_sum + group * kLanes16));
        negligible.of[group] = in_all_lanes(small);
      }
      groups.add(unit, packed.padded_E, values, weights, scratch.acc);
    }
  }

  // Turn the products of a group into weights in pairs, and add them up. Returns their sums.
  LINBIAS_INLINE Floats add_weights(const Biased& biased, int64_t group, float* scores, uint32_t* pairs) {
    float* pivots = scratch.pivot + group * kLanes16;
    float* sums = scratch.row_sum + group * kLanes16;
    const bool plain = (kFine || !call.precise) && !(call.dropout > 0);
    if (biased.far && biased.fits_bits(load(pivots)) && in_all_lanes((Lanes)(load(pivots) > -kInfinity<float>))) {
      const Floats base = biased.far_base(load(pivots));
      const auto score = [&](int64_t s) __attribute__((always_inline)) {
        return biased.far_score(load(scores + s * kLanes16), s, base);
      };
      const auto masked = [&](int64_t s) __attribute__((always_inline)) { return biased.unless_masked(score(s), s); };
      const auto add = [&](int64_t shown, const auto& of) {
        return plain ? round_weights<true>(biased, group, shown, of, pairs)
                     : round_weights<false>(biased, group, shown, of, pairs);
      };
      const Floats added = biased.masked ? add(biased.end_shown, masked) : add(kKeys, score);
      if (in_all_lanes((Lanes)(added < kHeadroom))) {
        store<float>(sums, load(sums) + added);
        return added;
      }
    }
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
    const Floats added = plain ? round_weights<true>(biased, group, biased.end_shown, score, pairs)
                               : round_weights<false>(biased, group, biased.end_shown, score, pairs);
    store<float>(sums, load(sums) + added);
    return added;
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
    float* acc = scratch.acc + group * kLanes16 * packed.padded_E;
    for (int64_t e = 0; e < packed.padded_E; ++e) store<float>(acc + e * kLanes16, load(acc + e * kLanes16) * shrink);
  }

  // Store 2^score in pairs of keys and in terms, and return the sums from before rounding. A bfloat16 is one term where
  // it does not matter what rounding loses (kPlain), and two elsewhere.
  template <bool kPlain, typename Score>
  LINBIAS_INLINE Floats round_weights(const Biased& biased, int64_t group, int64_t shown, const Score& score,
                                      uint32_t* pairs) const {
    constexpr int kWeightTerms = kFine ? kTerms : kPlain ? 1 : 2;
    Floats total[2] = {};
    if constexpr (kPlain) {
#pragma GCC unroll 2
      for (int64_t s = 0; s < shown; s += 2) {
        const Floats even = Biased::weight(score(s)), odd = Biased::weight(score(s + 1));
        total[0] += even;
        total[1] += odd;
        store_pairs<kWeightTerms>(even, odd, pairs + s / 2 * kLanes16, kPairsStep);
      }
      return total[0] + total[1];
    }
    const Bfloat16Dropout dropout(tile, biased.block);
    for (int64_t s = 0; s < shown; s += 2) {
      Floats even = Biased::weight(score(s)), odd = Biased::weight(score(s + 1));
      total[0] += even;
      total[1] += odd;
      if (call.dropout > 0) {
        even = dropout.apply(group, s, even);
        odd = dropout.apply(group, s + 1, odd);
      }
      store_pairs<kWeightTerms>(even, odd, pairs + s / 2 * kLanes16, kPairsStep);
    }
    return total[0] + total[1];
  }

  void finish() {
    for (int64_t group = 0; group * kLanes16 < tile.rows; ++group) {
      const int64_t rows = smaller_of(tile.rows - group * kLanes16, kLanes16), at = tile.index(group * kLanes16);
      const float* row_sum = scratch.row_sum + group * kLanes16;
      const Floats sums = load(row_sum), share = 1.0f / (sums == 0.0f ? broadcast(1.0f) : sums);
      const float* acc = scratch.acc + group * kLanes16 * packed.padded_E;
      if (results.narrow) {
        store_transposed(acc, packed.padded_E, share, rows, call.E, static_cast<uint16_t*>(results.out) + at * call.E);
      } else {
        store_transposed(acc, packed.padded_E, share, rows, call.E, static_cast<float*>(results.out) + at * call.E);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const float row_max = scratch.row_max[group * kLanes16 + i];
        static_cast<float*>(results.row_max)[at + i] = row_max;
        // row_max is the pivot in bits, converted and rounded; what that lost is added to log_sum.
        const double bits = static_cast<double>(scratch.pivot[group * kLanes16 + i]);
        const bool in_bits = !kFine && bits < Biased::kLarge && bits > -Biased::kLarge;
        const float lost = in_bits ? static_cast<float>(bits * kLn2<double> - static_cast<double>(row_max)) : 0.0f;
        static_cast<float*>(results.log_sum)[at + i] = __builtin_logf(row_sum[i]) + lost;
      }
    }
  }
};

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
