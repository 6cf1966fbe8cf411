// Attention over points against a double loop: every type, one to three axes, both metrics, tokens that stand nowhere,
// many points at one place and far ones; what may be left out, and what never is.
#include "linbias/points.h"

#include <numeric>

#include "attention_test.h"

namespace linbias::testing {
namespace {

struct PointCase {
  Case sizes;  // S = T; not causal
  std::int64_t axes, clouds = 1, global_tokens = 0;
  bool manhattan = false, far = false;  // far: the last point lies far out
};

// Points and the order in which they are taken, that of the first axis; some at one place.
struct Places {
  std::vector<double> at, of_tokens;  // along the order, and [clouds, N, axes]
  std::vector<std::int64_t> order;
  Points points;

  explicit Places(const PointCase& c) {
    const std::int64_t N = c.sizes.T, axes = c.axes, nowhere = c.global_tokens;
    std::mt19937 random(5);
    std::uniform_real_distribution<double> uniform(0, 30);
    of_tokens.resize(c.clouds * N * axes);
    for (double& x : of_tokens) x = uniform(random);
    for (std::int64_t cloud = 0; cloud < c.clouds; ++cloud) {
      double* places = of_tokens.data() + cloud * N * axes;
      for (std::int64_t i = N / 2; i < N * 3 / 4; ++i) std::copy_n(places, axes, places + i * axes);
      if (c.far) places[(N - 1) * axes] = 0x1p90;
      std::vector<std::int64_t> tokens(N);
      std::iota(tokens.begin(), tokens.end(), 0);
      std::sort(tokens.begin() + nowhere, tokens.end(),
                [&](std::int64_t a, std::int64_t b) { return places[a * axes] < places[b * axes]; });
      order.insert(order.end(), tokens.begin(), tokens.end());
      for (std::int64_t i = nowhere; i < N; ++i) {
        at.insert(at.end(), places + tokens[i] * axes, places + (tokens[i] + 1) * axes);
      }
    }
    points = {at.data(), order.data(), c.clouds, axes, nowhere, c.manhattan};
  }

  double distance(const PointCase& c, std::int64_t b, std::int64_t i, std::int64_t j) const {
    if (std::min(i, j) < c.global_tokens) return 0;
    const double* places = of_tokens.data() + (c.clouds > 1 ? b : 0) * c.sizes.T * c.axes;
    double total = 0;
    for (std::int64_t axis = 0; axis < c.axes; ++axis) {
      const double apart = std::abs(places[i * c.axes + axis] - places[j * c.axes + axis]);
      total = c.manhattan ? total + apart : std::hypot(total, apart);
    }
    return total;
  }
};

Truth define(const PointCase& c, Inputs x, const Places& places) {
  const std::int64_t H = c.sizes.H, N = c.sizes.T;
  x.right = x.left;
  Truth t =
      define(c.sizes, x, [&](std::int64_t row, std::int64_t s) { return places.distance(c, row / N / H, row % N, s); });
  for (std::size_t i = 0; i < t.dleft.size(); ++i) t.dleft[i] += t.dright[i];
  return t;
}

template <typename In>
void run(const PointCase& c, const Inputs& x, const Places& places, const Truth& truth) {
  const double step = std::is_same_v<In, double> ? 1e-13 : 1e-5;
  const std::string name = describe(c.sizes, Type<In>::name) + " points of " + std::to_string(c.axes) + " axes";
  Arrays<In> a(c.sizes, x), again(c.sizes, x);
  again.call.num_threads = c.sizes.threads % 3 + 1;
  for (Arrays<In>* arrays : {&a, &again}) {
    forward(arrays->call, places.points, arrays->results);
    backward(arrays->call, places.points, arrays->gradients);
  }
  auto lse = a.row_max;
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] += a.log_sum[i];
  compare("out", name, a.out, truth.out, step);
  compare("lse", name, lse, truth.lse, step);
  compare("dq", name, a.dq, truth.dq, step);
  compare("dk", name, a.dk, truth.dk, step);
  compare("dv", name, a.dv, truth.dv, step);
  compare("dslopes", name, a.dleft, truth.dleft, 10 * step);
  check(a.out == again.out && a.dq == again.dq && a.dk == again.dk && a.dv == again.dv && a.dleft == again.dleft, name,
        "the same bits with other threads");
}

void test_the_definition_of_points() {
  const auto sizes = [](std::int64_t B, std::int64_t H, std::int64_t G, std::int64_t N, std::int64_t D,
                        std::int64_t E) { return Case{B, H, G, N, N, D, E, false}; };
  for (const PointCase& c : {
           PointCase{sizes(1, 1, 1, 1, 1, 1), 1},
           PointCase{sizes(1, 6, 6, 300, 24, 40), 2},
           PointCase{sizes(2, 6, 2, 131, 5, 7), 2, 2, 1, false, true},
           PointCase{sizes(3, 4, 1, 97, 17, 9), 1, 1, 0, true},
           PointCase{sizes(2, 3, 3, 190, 16, 33), 3, 1, 70},
           PointCase{sizes(1, 2, 2, 129, 64, 64), 3, 1, 0, true, true},
           PointCase{sizes(1, 2, 1, 60, 4, 4), 2, 1, 60},
           PointCase{sizes(1, 3, 3, 227, 64, 32), 2, 1, 1},
           PointCase{sizes(1, 4, 2, 200, 33, 70), 2, 1, 0, true, true},
           PointCase{sizes(2, 12, 6, 140, 8, 8), 2},  // several heads at once in backward
       }) {
    Inputs exact = draw(c.sizes, false), narrow = draw(c.sizes, true);
    const double slopes[] = {0.5, 0.0, 2.0, 0.03, 1e-8, 30.0};
    for (std::size_t i = 0; i < exact.left.size(); ++i) exact.left[i] = narrow.left[i] = slopes[i % 6];
    const Places places(c);
    const Truth truth = define(c, exact, places), of_narrow = define(c, narrow, places);
    on_every_target([&] {
      run<float>(c, exact, places, truth);
      run<double>(c, exact, places, truth);
      run<Half>(c, narrow, places, of_narrow);
      run<Brain>(c, narrow, places, of_narrow);
    });
  }
}

// Points so far apart that scores are -inf: rows of a tile whose own block is not the first that it visits.
template <typename In>
void test_points_beyond_reach(double slope) {
  const PointCase c{{1, 1, 1, 100, 100, 8, 8, false}, 1};
  Inputs x = draw(c.sizes, false);
  x.left = {slope};
  Places places(c);
  for (std::int64_t i = 0; i < c.sizes.T; ++i) {
    places.at[i] = places.of_tokens[places.order[i]] = i < kBlockKeys ? 0 : 1e30;
  }
  const Truth truth = define(c, x, places);
  on_every_target([&] { run<In>(c, x, places, truth); });
}

// As test_slope_gradients_of_large_values of attention_test.cpp.
void test_slope_gradients_over_points_of_large_values() {
  const PointCase c{{1, 2, 2, 300, 300, 8, 8, false}, 2};
  Inputs x = draw(c.sizes, true);
  x.left = {0.03, 0.3};
  for (double& value : x.v) value += 1000;
  const Places places(c);
  const Truth truth = define(c, x, places);
  on_every_target([&] {
    Arrays<float> a(c.sizes, x);
    forward(a.call, places.points, a.results);
    backward(a.call, places.points, a.gradients);
    compare("dslopes", describe(c.sizes, "float32") + " points of large values", a.dleft, truth.dleft, 1e-4);
  });
}

// Whole blocks of keys at one place each, on a line in the plane.
Places in_blocks(const PointCase& c) {
  Places places(c);
  for (std::int64_t i = 0; i < c.sizes.T; ++i) {
    places.at[2 * i] = 4.0 * static_cast<double>(i / kBlockKeys);
    places.at[2 * i + 1] = 3.0 * static_cast<double>(i / kBlockKeys);
  }
  return places;
}

// The largest share of a row's probability that is left out.
template <typename In>
double share_left_out(Arrays<In>& whole, Arrays<In>& some, const Points& points, double tolerance) {
  whole.call.tolerance = 0;
  some.call.tolerance = tolerance;
  forward(whole.call, points, whole.results);
  forward(some.call, points, some.results);
  double most = 0;
  for (std::size_t i = 0; i < some.row_max.size(); ++i) {
    const double all = double(whole.row_max[i]) + double(whole.log_sum[i]);
    most = larger_or_nan(most, 1 - std::exp(double(some.row_max[i]) + double(some.log_sum[i]) - all));
  }
  return most;
}

template <typename In>
void test_what_points_leave_out() {
  constexpr std::int64_t kSide = 30, kN = kSide * kBlockKeys, kD = 32;
  constexpr double kTolerance = 1e-3;
  const PointCase c{{1, 3, 1, kN, kN, kD, kD, false}, 2};
  const Places places = in_blocks(c);
  // Keys all alike: the bound is as large as what it bounds.
  Inputs alike = draw(c.sizes, false);
  std::fill(alike.k.begin(), alike.k.end(), 0.5);
  alike.left = {0.15, 0.2, 0.1};
  // Keys at the far end that outweigh their distance, for every other query.
  Inputs long_queries = alike;
  for (std::size_t i = 0; i < alike.q.size(); ++i) {
    long_queries.q[i] = i % kD ? 0 : i / kD % 2 ? 128 : 0.5;
  }
  for (std::int64_t i = 0; i < kN; ++i) {
    for (std::int64_t d = 0; d < kD; ++d) {
      long_queries.k[places.order[i] * kD + d] = d == 0 && i >= kN - kBlockKeys ? 1 : 0;
    }
  }
  on_every_target([&] {
    const std::string name = describe(c.sizes, Type<In>::name);
    Arrays<In> whole(c.sizes, alike), some(c.sizes, alike);
    const double most = share_left_out(whole, some, places.points, kTolerance);
    check(most <= kTolerance * 1.001, name, "no row over points loses more than the tolerance");
    check(most > kTolerance / 4, name, "the certificate of points leaves out most of what it may");
    const bool every = std::all_of(whole.visited.begin(), whole.visited.begin() + c.sizes.H * whole.tiles,
                                   [&](std::int32_t count) { return count == kSide; });
    check(every, name, "tolerance 0 reads every block of points");
    Arrays<In> all_of_long(c.sizes, long_queries), some_of_long(c.sizes, long_queries);
    const double most_of_long = share_left_out(all_of_long, some_of_long, places.points, kTolerance);
    check(most_of_long <= kTolerance * 1.001, name, "long queries over points lose no more than the tolerance");
    // A key, or its value, that is not finite is never left out, however far.
    for (std::vector<In> Arrays<In>::* what : {&Arrays<In>::k, &Arrays<In>::v}) {
      Arrays<In> spoilt(c.sizes, alike);
      spoilt.call.tolerance = kTolerance;
      (spoilt.*what)[places.order[kN - 1] * kD + 3] = narrow<In>(kNan);
      forward(spoilt.call, places.points, spoilt.results);
      bool shows = true;
      for (std::size_t row = 0; row < spoilt.row_max.size(); ++row)
        shows = shows && std::isnan(spoilt.out[row * kD + 3]);
      check(shows, name, "what is not finite shows over points");
    }
    // Nor is a point that is no number.
    Places nowhere = places;
    nowhere.points.at = nowhere.at.data();
    nowhere.at.back() = kNan;
    Arrays<In> spoilt(c.sizes, alike);
    spoilt.call.tolerance = kTolerance;
    forward(spoilt.call, nowhere.points, spoilt.results);
    check(std::all_of(spoilt.out.begin(), spoilt.out.end(), [](auto y) { return std::isnan(y); }), name,
          "a point that is NaN shows");
  });
}

// Numbers that a caller may get wrong: nothing outside of the arrays is touched.
void test_points_that_a_caller_gets_wrong() {
  const PointCase c{{1, 2, 1, 100, 100, 8, 8, false}, 3};
  const Inputs x = draw(c.sizes, false);
  Places places(c);
  for (std::size_t i = 0; i < places.order.size(); i += 3) places.order[i] = i % 2 ? -7 : 1000;
  for (std::size_t i = 0; i < places.at.size(); i += 5) places.at[i] = i % 2 ? kNan : kInf;
  places.points.axes = 9;
  on_every_target([&] {
    Arrays<float> a(c.sizes, x);
    std::fill(a.left.begin(), a.left.end(), 0.5f);
    for (const std::int64_t nowhere : {0, 101}) {
      places.points.global_tokens = nowhere;
      forward(a.call, places.points, a.results);
      std::fill(a.visited.begin(), a.visited.end(), 1 << 30);
      backward(a.call, places.points, a.gradients);
    }
  });
}

}  // namespace

void test_points() {
  test_the_definition_of_points();
  test_points_beyond_reach<float>(1e10);
  test_points_beyond_reach<double>(1e300);
  test_slope_gradients_over_points_of_large_values();
  test_what_points_leave_out<float>();
  test_what_points_leave_out<double>();
  test_what_points_leave_out<Brain>();
  test_points_that_a_caller_gets_wrong();
}

}  // namespace linbias::testing
