// In how many terms the matrix unit computes blocks of float32. kValue is as far from a bfloat16 as a number can be:
// where only far keys have it as their value, or far queries as their dout, and all others 0, one term loses 2^-8 of
// the result, and two lose next to nothing.
#include "attention_test.h"

namespace linbias::testing {
namespace {

constexpr double kOneTerm = 0x1p-8, kValue = 1 + 0.99 * kOneTerm;
const Case kCase = {1, 3, 3, 192, 1024, 32, 32};

// Random queries and keys, the queries `size` times as long; or, where `shared` is given, all alike and so long.
Inputs scene(double size, double shared) {
  Inputs x = draw(kCase, false);
  x.left = {0.06, 0.1, 0.3};
  for (auto* array : {&x.q, &x.k}) {
    const double by = array == &x.q ? size : 1;
    for (double& entry : *array) {
      entry = static_cast<float>(shared > 0 ? shared / std::sqrt(double(kCase.D)) : entry * by);
    }
  }
  return x;
}

// Values of keys whose bias is at least 6 nats for every query: before it they may hold e^6 times a near key.
Inputs far_values(Inputs x) {
  for (std::size_t i = 0; i < x.v.size(); ++i) {
    const std::int64_t h = std::int64_t(i) / kCase.E / kCase.S, s = std::int64_t(i) / kCase.E % kCase.S;
    x.v[i] = x.left[h] * double(kCase.S - kCase.T - s) > 6 ? static_cast<float>(kValue) : 0;
  }
  return x;
}

// What some results are too small by.
struct Lost {
  double most = 0;
  int by_one_term = 0;  // how many by about what one term loses, of those that the tolerance cannot hide

  template <typename W>
  Lost(const std::vector<W>& found, const std::vector<double>& truth, double from, double to) {
    for (std::size_t i = 0; i < truth.size(); ++i) {
      const double missing = truth[i] - double(found[i]), share = std::abs(missing) / truth[i] / kOneTerm;
      most = std::max(most, missing);
      by_one_term += truth[i] > 1e-6 && share > from && share < to;
    }
  }
  bool in_one_term() const { return by_one_term >= 5; }
};

Lost of_rows(const Inputs& x, double tolerance) {
  Arrays<float> a(kCase, x);
  a.call.tolerance = tolerance;
  forward(a.call, a.results);
  return Lost(a.out, define(kCase, x).out, 0.75, 1.25);
}

void test_far_blocks_take_one_term_and_hold_no_more_than_its_share() {
  const Lost lost = of_rows(far_values(scene(1, 0)), 0x1p-24);
  check(lost.in_one_term(), target(), "far blocks take one term");
  check(lost.most <= 0x1p-14 * kOneTerm, target(), "blocks of one term hold at most 2^-14 of a row");
}

// Far keys whose scores rise by what their distance costs: more blocks hold about the share that all may hold together
// than a slope lets expect. Queries and keys are bfloat16, so that scores lose nothing; weights lose a little.
void test_blocks_of_one_term_share_what_they_may_hold() {
  const auto to_one_term = [](double from) {
    int exponent = 0;
    const double fraction = std::frexp(from, &exponent);
    return std::ldexp(std::round(0x1p8 * fraction), exponent - 8);
  };
  bool in_one_term = false;
  for (const double score : {9.0, 9.5, 10.0, 10.5, 11.0}) {
    Inputs x = scene(1, std::sqrt(score * std::sqrt(double(kCase.D))));
    x.left = {0.005, 0.01, 0.02};
    for (double& entry : x.q) entry = to_one_term(entry);
    for (std::size_t i = 0; i < x.k.size(); ++i) {
      const std::int64_t row = std::int64_t(i) / kCase.D, steps = kCase.S - kCase.T - row % kCase.S;
      const double share = steps > 0 ? x.left[row / kCase.S] * double(steps) / score : 1;
      x.k[i] = to_one_term(x.k[i] * share);
      x.v[i] = steps > 0 ? static_cast<float>(kValue) : 0;
    }
    const Lost lost = of_rows(x, 0x1p-24);
    in_one_term |= lost.in_one_term();
    check(lost.most <= 1.25 * 0x1p-14 * kOneTerm, target(), "many blocks of one term hold at most 2^-14 of a row");
  }
  check(in_one_term, target(), "some rows have most of what is far in one term");
}

void test_low_tolerances_and_large_scores_ask_for_more_terms() {
  const Inputs random = far_values(scene(1, 0));
  check(!of_rows(random, 0).in_one_term(), target(), "a tolerance of 0 asks for all terms");
  check(!of_rows(random, 0x1p-25).in_one_term(), target(), "a tolerance below rounding asks for all terms");
  check(!of_rows(far_values(scene(20, 0)), 0x1p-24).in_one_term(), target(), "scores of hundreds ask for two terms");
  for (const double shared : {15.0, 400.0}) {
    const Inputs alike = far_values(scene(1, shared));
    check(!of_rows(alike, 0x1p-24).in_one_term(), target(), "large scores that all keys share ask for more terms");
  }
  // Of hundreds of millions a product in two terms would say nothing.
  const Inputs huge = scene(1e7, 0);
  Arrays<float> a(kCase, huge), precise(kCase, huge);
  precise.call.tolerance = 0x1p-25;
  forward(a.call, a.results);
  forward(precise.call, precise.results);
  check(a.out == precise.out, target(), "scores of 1e8 are computed in all terms");
}

// Values only in one block after the other, and such that two terms lose 2^-17 of them: where some 16 rows of a tile
// lose less of their result, the block was computed in full.
void test_counts_reach_to_the_outermost_block_computed_in_full() {
  constexpr std::int64_t kRows = 16;
  Inputs x = scene(1, 0);
  const std::int64_t tiles = kCase.T / kTileRows, head_rows = kCase.T * kCase.E;
  std::vector<std::int32_t> counts(kCase.H * 2 * tiles * 2, -1);
  int coarse = 0, in_full = 0;
  for (std::int64_t block = 0; block < (kCase.S - kCase.T) / kBlockKeys; ++block) {
    for (std::size_t i = 0; i < x.v.size(); ++i) {
      x.v[i] = std::int64_t(i) / kCase.E % kCase.S / kBlockKeys == block ? 1 + 0x1p-9 + 0x1.fap-18 : 0;
    }
    Arrays<float> a(kCase, x), whole(kCase, x);
    a.results.visited = counts.data(), a.results.visited_tiles = 2 * tiles;
    whole.call.tolerance = 0;
    forward(a.call, a.results);
    forward(whole.call, whole.results);
    for (std::int64_t h = 0; h < kCase.H; ++h) {
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int32_t *read = counts.data() + (h * 2 * tiles + tile) * 2, *precise = read + tiles * 2;
        const std::int64_t steps = (kCase.S - kCase.T + tile * kTileRows) / kBlockKeys - block;
        if (steps < 1 || steps > read[0]) continue;
        bool some = false;
        for (std::int64_t from = tile * kTileRows; from < (tile + 1) * kTileRows; from += kRows) {
          bool all = true;
          for (std::int64_t i = h * head_rows + from * kCase.E; i < h * head_rows + (from + kRows) * kCase.E; ++i) {
            all &= std::abs(a.out[i] - whole.out[i]) < 0x1p-19f * whole.out[i];
          }
          some |= all;
        }
        check(steps <= precise[0] || !some, target(), "no block beyond the counts is computed in full");
        check(steps != precise[0] || some, target(), "the outermost block of the counts is");
        check(precise[0] <= read[0] && precise[1] == 0, target(), "blocks computed in full are read");
        ++(some ? in_full : coarse);
      }
    }
  }
  check(in_full > 0 && coarse > 0, target(), "there are blocks of both kinds");
}

// dv of keys far from the last queries, the only ones whose dout is not 0.
void test_far_gradients_take_one_term_unless_slopes_ask_for_theirs() {
  Inputs x = scene(1, 0);
  for (std::size_t i = 0; i < x.dout.size(); ++i) {
    x.dout[i] = std::int64_t(i) / kCase.E % kCase.T < kCase.T - 48 ? 0 : static_cast<float>(kValue);
  }
  std::fill(x.dlse.begin(), x.dlse.end(), 0);
  std::fill(x.v.begin(), x.v.end(), 0);
  std::vector<double> truth = define(kCase, x).dv;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (std::int64_t(i) / kCase.E % kCase.S >= kCase.S - kCase.T) truth[i] = 0;
  }
  const auto in_one_term = [&](double tolerance, bool slopes) {
    Arrays<float> a(kCase, x);
    a.call.tolerance = tolerance;
    if (!slopes) a.gradients.dleft = a.gradients.dright = nullptr;
    forward(a.call, a.results);
    backward(a.call, a.gradients);
    return Lost(a.dv, truth, 0x1p-4, 1.25).in_one_term();
  };
  check(in_one_term(0x1p-24, false), target(), "far gradients take one term");
  check(!in_one_term(0, false), target(), "a tolerance of 0 asks for all terms of gradients");
  check(!in_one_term(0x1p-24, true), target(), "gradients of slopes ask for all terms");
}

}  // namespace

void test_precision_by_distance() {
  on_every_target([] {
    if (!std::strstr(target(), "amx")) return;
    test_far_blocks_take_one_term_and_hold_no_more_than_its_share();
    test_blocks_of_one_term_share_what_they_may_hold();
    test_low_tolerances_and_large_scores_ask_for_more_terms();
    test_counts_reach_to_the_outermost_block_computed_in_full();
    test_far_gradients_take_one_term_unless_slopes_ask_for_theirs();
  });
}

}  // namespace linbias::testing
