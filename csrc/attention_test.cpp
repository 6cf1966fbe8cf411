// The core against a double loop, without Python: every target that runs here, every type, sizes around the vector
// width, ranges and starts of every kind, few queries and many, one and many threads. `make core-test` builds and runs
// it in seconds, `make sanitize` under sanitizers.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "linbias/attention.h"

using namespace linbias;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
std::atomic<int> failures{0}, checks{0};

void check(bool holds, const std::string& name, const char* what) {
  ++checks;
  if (holds) return;
  ++failures;
  std::printf("FAILED %s: %s\n", name.c_str(), what);
}

// ---- 16-bit types, for numbers that they hold exactly

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

template <typename In>
In narrow(double x) {
  if constexpr (std::is_same_v<In, Brain>) {
    const float as_float = static_cast<float>(x);
    std::uint32_t bits;
    std::memcpy(&bits, &as_float, sizeof bits);
    return {static_cast<std::uint16_t>(bits >> 16)};
  } else if constexpr (std::is_same_v<In, Half>) {
    if (std::isnan(x)) return {0x7e00};
    int exponent;
    const double fraction = std::frexp(std::abs(x), &exponent);  // in [1/2, 1)
    const unsigned size = x == 0 ? 0 : static_cast<unsigned>((exponent + 14) * 1024 + (2 * fraction - 1) * 1024);
    return {static_cast<std::uint16_t>(size | (x < 0 ? 0x8000 : 0))};
  } else {
    return static_cast<In>(x);
  }
}

template <typename In>
struct Type;
template <>
struct Type<float> {
  using Wide = float;
  static constexpr DType dtype = DType::float32;
  static constexpr const char* name = "float32";
};
template <>
struct Type<double> {
  using Wide = double;
  static constexpr DType dtype = DType::float64;
  static constexpr const char* name = "float64";
};
template <>
struct Type<Half> {
  using Wide = float;
  static constexpr DType dtype = DType::float16;
  static constexpr const char* name = "float16";
};
template <>
struct Type<Brain> {
  using Wide = float;
  static constexpr DType dtype = DType::bfloat16;
  static constexpr const char* name = "bfloat16";
};

// ---- what is computed

struct Case {
  std::int64_t B, H, G, T, S, D, E;
  bool causal = true;
  bool ranges = false;                    // each key/value head another
  std::vector<std::int64_t> starts = {};  // of each batch row; none: S - T
  double dropout = 0;
  int threads = 2;
  bool wild = false;  // ranges and starts far outside the keys, which the core has to clamp
};

constexpr std::uint32_t kSeed = 1234567;

// Forward and backward by the definition, in double.
struct Truth {
  std::vector<double> out, lse, dq, dk, dv, dleft, dright;
};

struct Inputs {
  std::vector<double> q, k, v, left, right, dout, dlse;
  std::vector<std::int64_t> key_range, query_start;
};

std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ x >> 16;
}

// What a weight is multiplied with: 0, or 1 / (1 - dropout).
double kept(const Case& c, std::int64_t bh, std::int64_t t, std::int64_t s) {
  const std::uint32_t row = mix(mix(mix(kSeed) ^ static_cast<std::uint32_t>(bh)) ^ static_cast<std::uint32_t>(t));
  const std::uint32_t drawn = mix(row ^ mix(static_cast<std::uint32_t>(s)));
  return drawn >= static_cast<std::uint32_t>(c.dropout * 4294967296.0 + 0.5) ? 1 / (1 - c.dropout) : 0;
}

struct Range {
  std::int64_t first, end;
};

Range range_of(const Case& c, const Inputs& x, std::int64_t b, std::int64_t g) {
  if (!c.ranges) return {0, c.S};
  const std::int64_t* given = x.key_range.data() + (b * c.G + g) * 2;
  const std::int64_t first = std::clamp<std::int64_t>(given[0], 0, c.S);
  return {first, std::clamp<std::int64_t>(given[1], first, c.S)};
}

std::int64_t start_of(const Case& c, const Inputs& x, std::int64_t b) {
  return c.starts.empty() ? c.S - c.T : std::clamp(x.query_start[b], -kLargestStart, kLargestStart);
}

Truth define(const Case& c, const Inputs& x) {
  Truth t{std::vector<double>(x.dout.size()), std::vector<double>(x.dlse.size()), std::vector<double>(x.q.size()),
          std::vector<double>(x.k.size()),    std::vector<double>(x.v.size()),    std::vector<double>(x.left.size()),
          std::vector<double>(x.left.size())};
  const double scale = 1 / std::sqrt(static_cast<double>(c.D));
  std::vector<double> weight(c.S), reach(c.S), dweight(c.S), share(c.S);
  for (std::int64_t b = 0; b < c.B; ++b) {
    for (std::int64_t h = 0; h < c.H; ++h) {
      const std::int64_t g = h / (c.H / c.G), bh = b * c.H + h, key_row = (b * c.G + g) * c.S;
      const auto [first, end] = range_of(c, x, b, g);
      for (std::int64_t i = 0; i < c.T; ++i) {
        const std::int64_t row = bh * c.T + i, position = start_of(c, x, b) + i;
        double high = -kInf, sum = 0;
        for (std::int64_t s = first; s < end; ++s) {
          double product = 0;
          for (std::int64_t d = 0; d < c.D; ++d) product += x.q[row * c.D + d] * x.k[(key_row + s) * c.D + d];
          reach[s] = static_cast<double>(position - s);
          const double slope = reach[s] > 0 ? x.left[bh] : c.causal ? kInf : x.right[bh];
          weight[s] = product * scale - (reach[s] == 0 ? 0 : slope * std::abs(reach[s]));
          high = std::max(high, weight[s]);
        }
        for (std::int64_t s = first; s < end; ++s) {
          weight[s] = high == -kInf ? 0 : std::exp(weight[s] - high);
          sum += weight[s];
        }
        t.lse[row] = high + std::log(sum);
        if (sum == 0) continue;
        double center = -x.dlse[row];
        for (std::int64_t s = first; s < end; ++s) {
          weight[s] /= sum;
          share[s] = c.dropout > 0 ? kept(c, bh, i, s) : 1;
          dweight[s] = 0;
          for (std::int64_t e = 0; e < c.E; ++e) {
            const double value = x.v[(key_row + s) * c.E + e], given = x.dout[row * c.E + e];
            t.out[row * c.E + e] += weight[s] * share[s] * value;
            dweight[s] += given * value * share[s];
            t.dv[(key_row + s) * c.E + e] += weight[s] * share[s] * given;
          }
          center += weight[s] * dweight[s];
        }
        for (std::int64_t s = first; s < end; ++s) {
          const double dscore = weight[s] * (dweight[s] - center);
          for (std::int64_t d = 0; d < c.D; ++d) {
            t.dq[row * c.D + d] += scale * dscore * x.k[(key_row + s) * c.D + d];
            t.dk[(key_row + s) * c.D + d] += scale * dscore * x.q[row * c.D + d];
          }
          (reach[s] > 0 ? t.dleft : t.dright)[bh] -= dscore * std::abs(reach[s]);
        }
      }
    }
  }
  return t;
}

// Random inputs; a narrow type holds theirs exactly.
Inputs draw(const Case& c, bool narrow) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  const auto some = [&](std::int64_t count, bool rounded) {
    std::vector<double> x(static_cast<std::size_t>(count));
    for (double& value : x) {
      value = normal(random);
      if (rounded) value = std::clamp(std::round(value * 16) / 16, -7.0, 7.0);
    }
    return x;
  };
  Inputs x;
  x.q = some(c.B * c.H * c.T * c.D, narrow);
  x.k = some(c.B * c.G * c.S * c.D, narrow);
  x.v = some(c.B * c.G * c.S * c.E, narrow);
  x.dout = some(c.B * c.H * c.T * c.E, false);
  x.dlse = some(c.B * c.H * c.T, false);
  const double slopes[] = {0.5, 0.0, 0.03, kInf, 1e-8, 30.0};
  for (std::int64_t i = 0; i < c.B * c.H; ++i) {
    x.left.push_back(slopes[i % 6]);
    x.right.push_back(slopes[(i + 2) % 6]);
  }
  const std::int64_t S = c.S, tame[][2] = {{0, S},           {S / 3, S},     {S / 5, S - S / 4},
                                           {0, (S + 1) / 2}, {S / 2, S / 2}, {S - S / 7, S}};
  constexpr std::int64_t kLow = std::numeric_limits<std::int64_t>::min(),
                         kHigh = std::numeric_limits<std::int64_t>::max();
  const std::int64_t wild[][2] = {{-5, S + 9},   {kLow, kHigh},   {S - 2, 3},
                                  {kHigh, kLow}, {S + 4, S + 70}, {S / 2, kHigh}};
  for (std::int64_t i = 0; i < c.B * c.G; ++i) {
    const std::int64_t* chosen = c.wild ? wild[i % 6] : tame[i % 6];
    x.key_range.insert(x.key_range.end(), chosen, chosen + 2);
  }
  x.query_start = c.starts;
  return x;
}

// ---- what the core makes of it

template <typename In>
struct Arrays {
  using W = typename Type<In>::Wide;
  std::vector<In> q, k, v;
  std::vector<W> left, right, dout, dlse, bound, out, row_max, log_sum, dq, dk, dv, dleft, dright;
  std::vector<std::int32_t> visited;
  std::int64_t tiles;
  Call call;
  Forward results;
  Backward gradients;

  Arrays(const Case& c, const Inputs& x) {
    const auto as_wide = [](const std::vector<double>& from) { return std::vector<W>(from.begin(), from.end()); };
    const auto as_narrow = [](const std::vector<double>& from) {
      std::vector<In> to;
      for (const double value : from) to.push_back(narrow<In>(value));
      return to;
    };
    q = as_narrow(x.q), k = as_narrow(x.k), v = as_narrow(x.v);
    left = as_wide(x.left), right = as_wide(x.right), dout = as_wide(x.dout), dlse = as_wide(x.dlse);
    // What no query may see must not be read as a number.
    for (std::int64_t head = 0; head < c.B * c.G; ++head) {
      const auto [first, end] = range_of(c, x, head / c.G, head % c.G);
      double largest = 0;
      for (std::int64_t s = 0; s < c.S; ++s) {
        double square = 0;
        for (std::int64_t d = 0; d < c.D; ++d) square += std::pow(x.k[(head * c.S + s) * c.D + d], 2);
        largest = std::max(largest, std::sqrt(square));
        if (s >= first && s < end) continue;
        std::fill_n(k.begin() + (head * c.S + s) * c.D, c.D, narrow<In>(kNan));
        std::fill_n(v.begin() + (head * c.S + s) * c.E, c.E, narrow<In>(kNan));
      }
      bound.push_back(static_cast<W>(largest * 1.001));
    }
    const W nan = static_cast<W>(kNan);
    tiles = (c.T + kTileRows - 1) / kTileRows;
    out.assign(dout.size(), nan), row_max.assign(dlse.size(), nan), log_sum.assign(dlse.size(), nan);
    visited.assign(c.B * c.H * tiles * 2, -1);
    dq.assign(q.size(), nan), dk.assign(k.size(), nan), dv.assign(v.size(), nan);
    dleft.assign(left.size(), nan), dright.assign(left.size(), nan);

    call.dtype = Type<In>::dtype;
    call.B = c.B, call.H = c.H, call.G = c.G, call.T = c.T, call.S = c.S, call.D = c.D, call.E = c.E;
    call.q = {q.data(), c.H * c.T * c.D, c.T * c.D, c.D};
    call.k = {k.data(), c.G * c.S * c.D, c.S * c.D, c.D};
    call.v = {v.data(), c.G * c.S * c.E, c.S * c.E, c.E};
    call.left = left.data();
    call.right = c.causal ? nullptr : right.data();
    call.key_range = c.ranges ? x.key_range.data() : nullptr;
    call.query_start = c.starts.empty() ? nullptr : x.query_start.data();
    call.scale = 1 / std::sqrt(static_cast<double>(c.D));
    call.dropout = c.dropout;
    call.tolerance = sizeof(W) == 4 ? 1e-7 : 1e-16;
    call.seed = kSeed;
    call.num_threads = c.threads;
    call.precise = true;
    results = {out.data(), row_max.data(), log_sum.data(), visited.data(), tiles};
    gradients = {dout.data(), dlse.data(), results, dq.data(), dk.data(), dv.data(), dleft.data(), dright.data()};
  }
};

std::string describe(const Case& c, const char* type) {
  char name[300];
  std::snprintf(name, sizeof name, "%s %s B%d H%d G%d T%d S%d D%d E%d %s%s%s%s threads %d", target(), type, int(c.B),
                int(c.H), int(c.G), int(c.T), int(c.S), int(c.D), int(c.E), c.causal ? "causal" : "two sides",
                c.ranges ? " ranges" : "", c.starts.empty() ? "" : " starts", c.dropout > 0 ? " dropout" : "",
                c.threads);
  return name;
}

template <typename W>
void compare(const char* what, const std::string& name, const std::vector<W>& actual, const std::vector<double>& truth,
             double allowed) {
  double worst = 0, size = 1;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (std::isfinite(truth[i])) size = std::max(size, std::abs(truth[i]));
    const bool same = double(actual[i]) == truth[i];
    const double error = same ? 0 : std::abs(double(actual[i]) - truth[i]);
    worst = error <= worst ? worst : error;  // NaN counts
  }
  check(worst <= allowed * size, name, what);
  if (!(worst <= allowed * size)) std::printf("  error %.3g, allowed %.3g\n", worst, allowed * size);
}

// The bits of the bfloat16 nearest to x.
std::uint16_t nearest_brain(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename In>
void compare_forward(const std::string& name, const Arrays<In>& a, const Truth& truth, double step,
                     double step_of_out) {
  compare("out", name, a.out, truth.out, step_of_out);
  auto lse = a.row_max;
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] += a.log_sum[i];
  compare("lse", name, lse, truth.lse, step);
}

// Where bfloat16 is multiplied in pairs, forward rounds weights to two of them, 2^-16, or to one, 2^-8. On a matrix
// unit backward rounds weights and gradients of scores to one.
template <typename In>
constexpr double kStep = std::is_same_v<In, double> ? 1e-13 : 1e-5;
template <typename In>
double gradient_step() {
  if (!std::is_same_v<In, Brain>) return kStep<In>;
  return std::strstr(target(), "amx") ? 0x1p-8 : 0x1p-15;
}

// Forward and backward; and forward of a result that will not be differentiated, which may take other ways.
template <typename In>
void run(const Case& c, const Inputs& x, const Truth& truth) {
  constexpr bool brain = std::is_same_v<In, Brain>;
  const double step = kStep<In>, of_two = brain ? 0x1p-15 : step, of_one = brain ? 0x1p-7 : step;
  const double of_gradients = gradient_step<In>();
  const std::string name = describe(c, Type<In>::name);

  Arrays<In> a(c, x);
  forward(a.call, a.results);
  backward(a.call, a.gradients);
  compare_forward(name, a, truth, step, of_two);
  compare("dq", name, a.dq, truth.dq, of_gradients);
  compare("dk", name, a.dk, truth.dk, of_gradients);
  compare("dv", name, a.dv, truth.dv, of_gradients);

  Arrays<In> again(c, x);
  again.call.num_threads = c.threads % 3 + 1;
  forward(again.call, again.results);
  backward(again.call, again.gradients);
  const bool same = again.out == a.out && again.row_max == a.row_max && again.log_sum == a.log_sum &&
                    again.visited == a.visited && again.dq == a.dq && again.dk == a.dk && again.dv == a.dv &&
                    again.dleft == a.dleft && again.dright == a.dright;
  check(same, name, "the same bits with another number of threads");

  for (std::size_t i = 0; i < a.left.size(); ++i) {  // a hidden side has no gradient
    if (std::isinf(x.left[i])) a.dleft[i] = static_cast<typename Arrays<In>::W>(truth.dleft[i]);
    if (c.causal || std::isinf(x.right[i])) a.dright[i] = static_cast<typename Arrays<In>::W>(truth.dright[i]);
  }
  compare("dleft", name, a.dleft, truth.dleft, of_two);
  compare("dright", name, a.dright, truth.dright, of_two);

  for (const bool bounded : {false, true}) {
    Arrays<In> once(c, x);
    once.call.precise = false;
    once.call.key_bound = bounded ? once.bound.data() : nullptr;
    forward(once.call, once.results);
    compare_forward(name + (bounded ? " once, bounded" : " once"), once, truth, step, of_one);
    if constexpr (brain) {
      std::vector<std::uint16_t> out(once.out.size(), 0x7fc0);
      once.results.out = out.data();
      once.results.narrow = true;
      forward(once.call, once.results);
      const bool rounded = std::equal(out.begin(), out.end(), once.out.begin(),
                                      [](std::uint16_t bits, float wide) { return bits == nearest_brain(wide); });
      check(rounded, name, "narrow out is out, rounded");
    }
  }
}

std::vector<std::string> target_names() {
  std::vector<std::string> names(1);
  for (const char* c = targets(); *c; ++c) {
    if (*c == ',') names.emplace_back();
    else names.back() += *c;
  }
  return names;
}

template <typename Run>
void on_every_target(Run run) {
  for (const std::string& name : target_names()) {
    force_target(name.c_str());
    run();
  }
  force_target(nullptr);
}

template <typename In>
void run_on_every_target(const Case& c) {
  const Inputs x = draw(c, sizeof(In) == 2);
  const Truth truth = define(c, x);
  on_every_target([&] { run<In>(c, x, truth); });
}

void test_the_definition() {
  const Case cases[] = {
      {1, 1, 1, 1, 1, 1, 1},
      {2, 3, 1, 7, 11, 5, 3},
      {1, 2, 2, 15, 16, 16, 17},
      {1, 2, 1, 49, 65, 31, 33, false, false, {}, 0, 3},
      {2, 6, 2, 48, 64, 64, 64, false},
      {1, 6, 6, 300, 700, 24, 40, false, false, {}, 0, 5},
      {1, 6, 1, 130, 40, 9, 2, true},
      {1, 6, 1, 130, 40, 9, 2, false},
      {1, 2, 1, 0, 5, 4, 4},
      {1, 2, 1, 5, 0, 4, 4},
      {0, 2, 1, 5, 7, 4, 4},
      // ranges, each head another, with and without queries that stand elsewhere
      {3, 2, 2, 97, 131, 8, 65, false, true, {}, 0, 4},
      {2, 6, 3, 203, 517, 13, 5, true, true},
      {2, 6, 3, 61, 307, 13, 5, false, true, {100, -20}},
      {2, 6, 3, 53, 157, 6, 7, true, true, {157, 210}},
      // before all keys, beyond them, across either end; more queries than keys
      {2, 6, 2, 59, 131, 7, 9, false, false, {-59, -90}},
      {2, 6, 2, 59, 131, 7, 9, true, false, {-59, -20}},
      {2, 6, 2, 59, 131, 7, 9, false, false, {131, 170}},
      {2, 6, 2, 59, 131, 7, 9, true, false, {131, 100}},
      {2, 6, 2, 59, 128, 7, 9, false, false, {128, 190}},  // the last block is whole
      {2, 3, 3, 150, 70, 5, 3, false, false, {-33, 21}},
      // dropout
      {2, 6, 3, 61, 107, 13, 5, false, true, {20, 90}, 0.3},
      {1, 2, 1, 130, 130, 16, 16, true, false, {}, 0.5},
      // few queries and a long cache
      {2, 6, 2, 1, 1500, 64, 32},
      {2, 6, 2, 3, 2100, 13, 70, false},
      {2, 6, 3, 4, 1500, 16, 16, false, true, {700, 1600}},
      {2, 6, 3, 2, 400, 8, 24, true, true, {-1, 433}},
  };
  for (const Case& c : cases) {
    run_on_every_target<float>(c);
    run_on_every_target<double>(c);
    run_on_every_target<Half>(c);
    run_on_every_target<Brain>(c);
  }
}

// Ranges, starts, counts and numbers of threads that make no sense: the sanitizers watch, and what makes sense is
// right.
template <typename In>
void test_what_a_caller_may_not_break() {
  constexpr std::int64_t kLow = std::numeric_limits<std::int64_t>::min(),
                         kHigh = std::numeric_limits<std::int64_t>::max();
  Case wild{2, 6, 3, 53, 157, 6, 7, false, true, {}, 0, 2, true};
  run_on_every_target<In>(wild);
  wild.T = 2;
  run_on_every_target<In>(wild);
  for (const std::int64_t T : {2, 53}) {
    for (const bool causal : {true, false}) {
      for (const bool ranges : {true, false}) {
        const Case far{2, 6, 3, T, 157, 6, 7, causal, ranges, {kLow, kHigh}};
        const Inputs x = draw(far, sizeof(In) == 2);
        on_every_target([&] {
          Arrays<In> a(far, x);
          for (const bool precise : {true, false}) {
            a.call.precise = precise;
            forward(a.call, a.results);
            const auto sane = [](float y) { return std::abs(y) < 10; };  // a mean of values
            check(std::all_of(a.out.begin(), a.out.end(), sane), describe(far, Type<In>::name), "out of a far start");
          }
          backward(a.call, a.gradients);
        });
      }
    }
  }

  const Case c{2, 6, 3, 113, 300, 5, 7, false, true, {20, 400}};
  const Inputs x = draw(c, sizeof(In) == 2);
  const Truth truth = define(c, x);
  on_every_target([&] {
    for (const std::int32_t count :
         {std::numeric_limits<std::int32_t>::min(), -1, 1000, std::numeric_limits<std::int32_t>::max()}) {
      Arrays<In> a(c, x);
      forward(a.call, a.results);
      std::fill(a.visited.begin(), a.visited.end(), count);
      backward(a.call, a.gradients);
      if (count < 0) continue;
      const std::string name = describe(c, Type<In>::name) + " visited counts too large";
      compare("dq", name, a.dq, truth.dq, gradient_step<In>());
      compare("dk", name, a.dk, truth.dk, gradient_step<In>());
      compare("dv", name, a.dv, truth.dv, gradient_step<In>());
    }
    Arrays<In> one(c, x);
    forward(one.call, one.results);
    for (const int threads : {std::numeric_limits<int>::min(), 0, 7, std::numeric_limits<int>::max()}) {
      Arrays<In> a(c, x);
      a.call.num_threads = threads;
      forward(a.call, a.results);
      check(a.out == one.out, describe(c, Type<In>::name), "out for any number of threads");
    }
  });
}

// The keys that `visited` says a tile read, by the words of attention.h.
template <typename In>
Range read_keys(const Case& c, const Inputs& x, const Arrays<In>& a, std::int64_t b, std::int64_t h,
                std::int64_t tile) {
  const auto [first, end] = range_of(c, x, b, h / (c.H / c.G));
  const std::int64_t n = (end - first + kBlockKeys - 1) / kBlockKeys,
                     rows = std::min(kTileRows, c.T - tile * kTileRows);
  const double p = static_cast<double>(start_of(c, x, b) + tile * kTileRows - first);
  const auto near_first = std::clamp<std::int64_t>(std::floor(p / kBlockKeys), 0, n);
  const auto near_end = std::clamp<std::int64_t>(std::ceil((p + static_cast<double>(rows)) / kBlockKeys), 0, n);
  const std::int32_t* visited = a.visited.data() + ((b * c.H + h) * a.tiles + tile) * 2;
  check(visited[0] >= 0 && visited[0] <= near_first && visited[1] >= 0 && near_end + visited[1] <= n,
        describe(c, Type<In>::name), "visited blocks exist");
  return {first + (near_first - visited[0]) * kBlockKeys, std::min(end, first + (near_end + visited[1]) * kBlockKeys)};
}

template <typename In>
void test_visited_says_which_keys_were_read() {
  const Case cases[] = {
      {1, 2, 2, 101, 900, 8, 8, false, false, {300}},
      {2, 2, 1, 60, 700, 8, 8, true, true, {400, 720}},
      {1, 2, 2, 40, 500, 8, 8, false, false, {-100}},
  };
  for (const Case& c : cases) {
    Inputs x = draw(c, sizeof(In) == 2);
    std::fill(x.left.begin(), x.left.end(), 0.3);
    std::fill(x.right.begin(), x.right.end(), 0.2);
    on_every_target([&] {
      const std::string name = describe(c, Type<In>::name);
      Arrays<In> a(c, x);
      forward(a.call, a.results);
      std::int64_t left_out = 0;
      for (std::int64_t task = 0; task < c.B * c.H * a.tiles; ++task) {
        const std::int64_t tile = task % a.tiles, h = task / a.tiles % c.H, b = task / a.tiles / c.H;
        const auto [from, to] = read_keys(c, x, a, b, h, tile);
        Arrays<In> other(c, x);
        const auto [first, end] = range_of(c, x, b, h / (c.H / c.G));
        for (std::int64_t s = first; s < end; ++s) {
          if (s >= from && s < to) continue;
          ++left_out;
          std::fill_n(other.v.begin() + ((b * c.G + h / (c.H / c.G)) * c.S + s) * c.E, c.E, narrow<In>(1e9));
        }
        forward(other.call, other.results);
        const std::int64_t at = ((b * c.H + h) * c.T + tile * kTileRows) * c.E;
        const std::int64_t count = std::min(kTileRows, c.T - tile * kTileRows) * c.E;
        check(std::equal(a.out.begin() + at, a.out.begin() + at + count, other.out.begin() + at), name,
              "no other key is read");
      }
      check(left_out > 0, name, "far keys are left out");

      a.call.tolerance = 0;
      forward(a.call, a.results);
      for (std::int64_t task = 0; task < c.B * c.H * a.tiles; ++task) {
        const std::int64_t tile = task % a.tiles, h = task / a.tiles % c.H, b = task / a.tiles / c.H;
        const auto [from, to] = read_keys(c, x, a, b, h, tile);
        const auto [first, end] = range_of(c, x, b, h / (c.H / c.G));
        const std::int64_t stop = start_of(c, x, b) + std::min(c.T, (tile + 1) * kTileRows);
        const bool all = from <= first && (c.causal ? to >= std::min(end, stop) : to == end);
        check(all, name, "tolerance 0 reads every key");
      }
    });
  }
}

void test_several_threads_may_call_at_once() {
  const Case c{1, 2, 1, 97, 131, 8, 9, false};
  const Inputs x = draw(c, false);
  const Truth truth = define(c, x);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back([&] { run<float>(c, x, truth); });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
  test_the_definition();
  test_what_a_caller_may_not_break<float>();
  test_what_a_caller_may_not_break<Brain>();
  test_visited_says_which_keys_were_read<float>();
  test_visited_says_which_keys_were_read<Brain>();
  test_several_threads_may_call_at_once();
  std::printf("%d checks on %s, %d failed\n", checks.load(), targets(), failures.load());
  return failures ? 1 : 0;
}
