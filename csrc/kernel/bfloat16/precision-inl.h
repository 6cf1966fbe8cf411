// In how many terms a block of float32 keys is computed. An error of e in the scores of blocks that hold a share w of a
// row costs e w, so that what a block weighs says how exactly it must be known. In one or two terms a score is off by
// at most kScoreError |scale| |q| |k|. Blocks of so few terms may hold, together, that share of every row at which this
// costs no more than eight roundings of a score, 8 u |scale| |q| |k| (docs/math.md, section 11). What a block weighs is
// known once it has been computed; where that was in too few terms, it is computed again.
#pragma once

#include "kernel/bfloat16/tile-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// By the number of terms: the error, and the score up to which it stays below kLargestError, or so small that a row's
// sum keeps its margin (kSumRounding).
constexpr float kScoreError[kMostTerms] = {0, 0x1p-7f, 0x1p-15f}, kLargestScore[kMostTerms] = {0, 0x1p5f, 0x1p12f};
constexpr float kLargestError = 0.25f;

// The number of terms that each group of queries is expected to need of the next block: none, where it will be
// negligible.
struct TermsOfGroups {
  static constexpr int kNegligible = 0, kUnknown = -1;
  int of[kGroups];

  explicit TermsOfGroups(bool negligible) {
    for (int& terms : of) terms = negligible ? kNegligible : kUnknown;
  }
};

template <int kTerms>
struct Precision {
  static constexpr float kMargin = 2;  // for sums that are guessed
  Bfloat16Scratch& scratch;
  float share[kMostTerms] = {};  // of a row's sum, which blocks of so many terms may hold; 0 where there are none

  // Scores are at most `largest_score` before their bias.
  void begin(const Call& call, float largest_score) {
    if constexpr (kTerms > 1) __builtin_memset(scratch.coarse, 0, sizeof scratch.coarse);
    for (int terms = 1; terms < kTerms; ++terms) {
      const bool few = may_take_fewer_terms(call) && largest_score <= kLargestScore[terms];
      share[terms] = few ? 8 * kUnitRoundoff<float> / kScoreError[terms] : 0;
    }
  }

  // May another block of so many terms be added, or several, that sum up to this?
  bool admits(int64_t group, int terms, Floats sums) const {
    const Floats coarse = load(scratch.coarse[terms] + group * kLanes16),
                 all = load(scratch.row_sum + group * kLanes16);
    return share[terms] > 0 && in_all_lanes((Lanes)(coarse + sums <= share[terms] * all));
  }
  void note(int64_t group, int terms, Floats sums) {
    float* coarse = scratch.coarse[terms] + group * kLanes16;
    store<float>(coarse, load(coarse) + sums);
  }
  // The pivots have been raised: what was summed shrinks.
  void shrink(int64_t group, Floats factor) {
    for (int terms = 1; terms < kTerms; ++terms) {
      float* coarse = scratch.coarse[terms] + group * kLanes16;
      store<float>(coarse, load(coarse) * factor);
    }
  }

  // What weights of so many terms are at least, as a share of what they are computed to be.
  static float certainty(int terms) { return terms < kTerms ? 1 - kLargestError : 1; }

  // The fewest terms for blocks that sum up to this.
  int terms_for(int64_t group, Floats sums) const {
    for (int terms = 1; terms < kTerms; ++terms) {
      if (admits(group, terms, sums)) return terms;
    }
    return kTerms;
  }

  // Run visit(first, end, terms, left) for all groups of queries; several at once where they need equally many terms.
  // Where so few terms would cost a group too much, visit leaves it as it was and sets left[group] to all of them.
  template <typename Biased, typename Visit>
  LINBIAS_INLINE void for_groups(Biased& biased, int64_t at_once, const TermsOfGroups& expected,
                                 const Visit& visit) const {
    const int64_t num_groups = round_up(biased.tile.rows, kLanes16) / kLanes16;
    int left[kGroups];
    for (int64_t group = 0; group < num_groups; ++group) {
      left[group] = expected.of[group];
      if (kTerms == 1 || !biased.is_whole()) left[group] = kTerms;
      else if (left[group] == TermsOfGroups::kNegligible) left[group] = terms_for(group, Floats{});
      else if (left[group] == TermsOfGroups::kUnknown) left[group] = terms_by_distance(biased, group);
    }
    for (int64_t first = 0; first < num_groups;) {
      const int terms = left[first];
      const int64_t last = smaller_of(num_groups, first + (terms < kTerms ? kGroups : at_once));
      int64_t end = first;
      for (; end < last && left[end] == terms; ++end) left[end] = 0;
      if (terms > 0) visit(first, end, terms, left);
      while (first < end && left[first] == 0) ++first;
    }
  }

  // As if all scores were alike: then e^-(slope distance) of a row's sum lies from the nearest key of a block outwards.
  template <typename Biased>
  int terms_by_distance(Biased& biased, int64_t group) const {
    biased.turn_to(group);
    return terms_for(group, kMargin * load(scratch.row_sum + group * kLanes16) * Biased::weight(biased.away));
  }
};

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
