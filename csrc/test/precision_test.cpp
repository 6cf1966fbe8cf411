// In how many terms the matrix unit computes blocks of float32. kValue is as far from a bfloat16 as a number can be:
// where only far keys have it as their value, or far queries as their dout, and all others 0, one term loses 2^-8 of
// the result, and two lose next to nothing.
#include "attention_test.h"

namespace linbias::testing {
namespace {

constexpr double kOneTerm = 0x1p-8, kValue = 1 + 0.99 * kOneTerm;
const Case kCase = {1, 3, 3, 192, 1024, 32, 32};

// Random queries and keys, the queries `size` times as long; or, where `shared` is given, all entries are that.
Inputs scene(double size, double shared) {
  Inputs x = draw(kCase, false);
  x.left = {0.06, 0.1, 0.3};
  for (auto* array : {&x.q, &x.k}) {
    const double by = array == &x.q ? size : 1;
    for (double& entry : *array) {
      entry = static_cast<float>(shared > 0 ? shared : entry * by);
    }
  }
  return x;
}

// One query of each tile is much longer.
Inputs one_is_long(Inputs x) {
  for (std::size_t i = 0; i < x.q.size(); ++i) x.q[i] *= std::int64_t(i) / kCase.D % kTileRows == 0 ? 20 : 1;
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

// All scores that are seen are -score. Keys that no query sees are there to balance the others, so that their center is
// 0; or they are alike, too.
const Case kAlike = {.B = 1, .H = 1, .G = 1, .T = 192, .S = 2048, .D = 32, .E = 32, .starts = {832}};
Inputs alike(double score, double slope, bool balanced = true) {
  Inputs x = draw(kAlike, false);
  std::fill(x.q.begin(), x.q.end(), 0), std::fill(x.k.begin(), x.k.end(), 0);
  const double entry = std::sqrt(score * std::sqrt(double(kAlike.D)));
  for (std::int64_t t = 0; t < kAlike.T; ++t) x.q[t * kAlike.D] = entry;
  for (std::int64_t s = 0; s < kAlike.S; ++s) x.k[s * kAlike.D] = balanced && s >= kAlike.S / 2 ? entry : -entry;
  x.left = {slope};
  return x;
}

// Of each tile: its first near block, and how many further ones it read to the left, and up to which in all terms.
struct Blocks {
  std::int64_t near, read, in_full;
};
std::vector<Blocks> blocks_of(const Inputs& x, double dropout = 0) {
  Arrays<float> a(kAlike, x);
  a.call.dropout = dropout;
  std::vector<std::int32_t> counts(4 * a.tiles, -1);
  a.results.visited = counts.data(), a.results.visited_tiles = 2 * a.tiles;
  forward(a.call, a.results);
  std::vector<Blocks> found;
  for (std::int64_t tile = 0; tile < a.tiles; ++tile) {
    const std::int64_t near = (kAlike.starts[0] + tile * kTileRows) / kBlockKeys;
    found.push_back({near, counts[2 * tile], counts[2 * (a.tiles + tile)]});
  }
  return found;
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
  bool in_one_term = false, coarse_gradients = false;
  for (const double score : {9.0, 9.5, 10.0, 10.5, 11.0}) {
    Inputs x = scene(1, std::sqrt(score / std::sqrt(double(kCase.D))));
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
    // How much more or less one term leaves of dv, for the last query, where its dout is other than 1. It comes divided
    // by the row's sum, so that it may be rounded either way.
    const auto dv_of_dout = [&](double dout) {
      for (std::size_t i = 0; i < x.dout.size(); ++i) {
        x.dout[i] = std::int64_t(i) / kCase.E % kCase.T == kCase.T - 1 ? static_cast<float>(dout) : 0;
      }
      Arrays<float> a(kCase, x);
      a.gradients.dleft = a.gradients.dright = nullptr;
      a.run();
      return a.dv;
    };
    const std::vector<float> of_value = dv_of_dout(kValue), of_one = dv_of_dout(1);
    const std::vector<double> weights = define(kCase, x).dv;
    for (std::int64_t h = 0; h < kCase.H; ++h) {
      double held = 0;
      for (std::int64_t i = h * kCase.S * kCase.E; i < ((h + 1) * kCase.S - kCase.T) * kCase.E; i += kCase.E) {
        held += weights[i] - (double(of_value[i]) - double(of_one[i])) / (kValue - 1);
      }
      coarse_gradients |= std::abs(held) > 0.5 * 0x1p-14;
      check(std::abs(held) <= 2 * 0x1p-14, target(), "many blocks of gradients in one term hold no more");
    }
  }
  check(in_one_term && coarse_gradients, target(), "some rows have most of what is far in one term");
}

void test_low_tolerances_and_large_scores_ask_for_more_terms() {
  const Inputs random = far_values(scene(1, 0));
  check(!of_rows(random, 0).in_one_term(), target(), "a tolerance of 0 asks for all terms");
  check(!of_rows(random, 0x1p-25).in_one_term(), target(), "a tolerance below rounding asks for all terms");
  check(!of_rows(far_values(scene(20, 0)), 0x1p-24).in_one_term(), target(), "scores of hundreds ask for two terms");
  check(!of_rows(one_is_long(random), 0x1p-24).in_one_term(), target(), "so do those of one query in a tile");
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

void test_blocks_that_hold_little_take_few_terms_before_and_beyond_a_raised_maximum() {
  constexpr std::int64_t kRaising = 5;  // the block of a key whose score raises the pivots, where there is one
  for (const double score : {28.0, 56.0}) {
    Inputs x = alike(score, score / 800);
    for (const bool raised : {false, true}) {
      // What blocks of few terms hold by then, about as much as they may, shrinks with the pivots.
      if (raised) x.k[(kRaising * kBlockKeys + 9) * kAlike.D] *= -1;
      std::int64_t least = 0, most = 3;
      for (const Blocks& blocks : blocks_of(x)) {
        if (raised) least = blocks.near - kRaising, most = least + 1;
        check(blocks.read >= most + 3, target(), "blocks beyond those that weigh much are read");
        check(blocks.in_full <= most, target(), "blocks that hold little take few terms");
        check(blocks.in_full >= least, target(), "a block that raises the maximum is computed in full");
      }
    }
  }
  for (const Blocks& blocks : blocks_of(alike(1e4, 0.07, false))) {
    check(blocks.in_full == blocks.read, target(), "large scores that all keys share ask for all terms");
  }
  for (const Blocks& blocks : blocks_of(alike(28, 0.035), 0.1)) {
    check(blocks.in_full == blocks.read, target(), "dropout asks for all terms");
  }
}

// A block of keys that weigh alike, and as far from bfloat16 as they can be: one term takes their weights for 1.16
// times smaller. It is the only one to have values. A key across the queries keeps the certificate from holding.
void test_coarse_blocks_that_are_left_out_hold_no_more_than_their_share() {
  constexpr std::int64_t kBlock = 4, kLong = 28, kRow = 96;  // kLong entries are not 0; kRow begins a tile
  constexpr double kShare = 0.25 * 0x1p-14;                  // of the tolerance
  Case c = kCase;
  c.H = c.G = 24, c.standing = Standing::equal;
  Inputs x = draw(c, false);
  const auto is_of_block = [&](std::size_t row) { return std::int64_t(row) % c.S / kBlockKeys == kBlock; };
  for (std::size_t i = 0; i < x.q.size(); ++i) x.q[i] = std::int64_t(i) % c.D < kLong ? 2 * kValue : 0;
  for (std::size_t i = 0; i < x.k.size(); ++i) {
    x.k[i] = is_of_block(i / c.D) && std::int64_t(i) % c.D < kLong ? 2 * kValue : 0;
    x.v[i] = is_of_block(i / c.D);
  }
  for (std::size_t i = 0; i < x.dout.size(); ++i) x.dout[i] = std::int64_t(i) / c.E % c.T == kRow;
  std::fill(x.dlse.begin(), x.dlse.end(), 0), std::fill(x.xq.begin(), x.xq.end(), 1);
  for (std::size_t i = 0; i < x.x.size(); ++i) x.x[i] = std::int64_t(i) % c.S >= c.S / 2;
  for (std::int64_t h = 0; h < c.H; ++h) {
    x.k[h * c.S * c.D + c.D - 1] = 14.4;
    x.left[h] = 28.8 + 0.025 * double(h);
  }
  const Truth truth = define(c, x);
  Arrays<float> a(c, x);
  a.call.tolerance = 4 * kShare;
  a.gradients.dleft = a.gradients.dright = a.gradients.dpositions = a.gradients.dquery_positions = nullptr;
  a.run();
  int left_out[2] = {}, taken = 0;
  const auto hold = [&](bool gradients, float found, double weight) {
    ++(found == 0 ? left_out[gradients] : taken);
    check(found > 0 || weight <= kShare, target(), "coarse blocks that are left out hold little");
  };
  for (std::size_t i = 0; i < truth.out.size(); ++i) hold(false, a.out[i], truth.out[i]);
  for (std::size_t i = 0; i < truth.dv.size(); ++i) {
    if (is_of_block(i / c.E)) hold(true, a.dv[i], truth.dv[i] * kBlockKeys);
  }
  check(left_out[0] > 0 && left_out[1] > 0 && taken > 0, target(), "there are blocks of both kinds");
}

// dv of keys far from the last queries, the only ones whose dout is not 0, but for one that may be long.
void test_far_gradients_take_one_term_unless_slopes_or_positions_ask_for_theirs() {
  Inputs x = scene(1, 0);
  for (std::size_t i = 0; i < x.dout.size(); ++i) {
    x.dout[i] = std::int64_t(i) / kCase.E % kCase.T <= kCase.T - kTileRows ? 0 : static_cast<float>(kValue);
  }
  std::fill(x.dlse.begin(), x.dlse.end(), 0);
  std::fill(x.v.begin(), x.v.end(), 0);
  for (std::int64_t s = 0; s < kCase.H * kCase.S; ++s) x.x.push_back(double(s % kCase.S));
  for (std::int64_t t = 0; t < kCase.H * kCase.T; ++t) x.xq.push_back(double(kCase.S - kCase.T + t % kCase.T));
  const auto in_one_term = [&](const Inputs& given, double tolerance, bool slopes, bool positions) {
    std::vector<double> truth = define(kCase, given).dv;
    for (std::size_t i = 0; i < truth.size(); ++i) {
      if (std::int64_t(i) / kCase.E % kCase.S >= kCase.S - kCase.T) truth[i] = 0;
    }
    Case c = kCase;
    c.standing = Standing::gaps;
    Arrays<float> a(c, given);
    a.call.tolerance = tolerance;
    if (!slopes) a.gradients.dleft = a.gradients.dright = nullptr;
    if (!positions) a.gradients.dpositions = a.gradients.dquery_positions = nullptr;
    a.run();
    return Lost(a.dv, truth, 0x1p-4, 1.25).in_one_term();
  };
  check(in_one_term(x, 0x1p-24, false, false), target(), "far gradients take one term");
  check(!in_one_term(x, 0, false, false), target(), "a tolerance of 0 asks for all terms of gradients");
  check(!in_one_term(x, 0x1p-24, true, false), target(), "gradients of slopes ask for all terms");
  check(!in_one_term(x, 0x1p-24, false, true), target(), "gradients of positions ask for all terms");
  check(!in_one_term(one_is_long(x), 0x1p-24, false, false), target(), "a long query asks for two terms of gradients");
}

}  // namespace

void test_precision_by_distance() {
  on_every_target([] {
    if (!std::strstr(target(), "amx")) return;
    test_far_blocks_take_one_term_and_hold_no_more_than_its_share();
    test_blocks_of_one_term_share_what_they_may_hold();
    test_low_tolerances_and_large_scores_ask_for_more_terms();
    test_counts_reach_to_the_outermost_block_computed_in_full();
    test_blocks_that_hold_little_take_few_terms_before_and_beyond_a_raised_maximum();
    test_coarse_blocks_that_are_left_out_hold_no_more_than_their_share();
    test_far_gradients_take_one_term_unless_slopes_or_positions_ask_for_theirs();
  });
}

}  // namespace linbias::testing
