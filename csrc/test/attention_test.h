// What the core's own test is made of: 16-bit types, the definition in double, and a call's arrays.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "linbias/attention.h"

namespace linbias::testing {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline std::atomic<int> failures{0}, checks{0};

inline void check(bool holds, const std::string& name, const char* what) {
  ++checks;
  if (holds || ++failures > 30) return;
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
    const bool subnormal = std::abs(x) < 0x1p-14;
    const auto size =
        static_cast<unsigned>(subnormal ? std::abs(x) * 0x1p24 : (exponent + 14) * 1024 + (2 * fraction - 1) * 1024);
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

// How keys stand: counted, or at given positions.
enum class Standing { counted, gaps, equal, resets, bursts, unix_times };
inline const char* const kStandings[] = {"", " gaps", " equal stamps", " resets", " bursts", " unix times"};

struct Case {
  std::int64_t B, H, G, T, S, D, E;
  bool causal = true;
  bool ranges = false;                    // each key/value head another
  std::vector<std::int64_t> starts = {};  // of each batch row; none: S - T
  double dropout = 0;
  int threads = 2;
  bool wild = false;  // ranges and starts far outside the keys, which the core has to clamp
  Standing standing = Standing::counted;
  bool between = false;      // queries stand between their own key and the next, rather than at their own
  std::int64_t window = -1;  // queries see so many keys before their own and half as many after it; or -1,
  bool scattered = false;    // or keys anywhere, some none, others more than there are
  bool own = false;          // queries stand at keys of their own, each head's at others, some beyond all keys
};

inline constexpr std::uint32_t kSeed = 1234567;

// Forward and backward by the definition, in double.
struct Truth {
  std::vector<double> out, lse, dq, dk, dv, dleft, dright, dx, dxq;
};

struct Inputs {
  std::vector<double> q, k, v, left, right, dout, dlse, x, xq;  // x, xq: positions [B, H, S] and [B, H, T], if any
  std::vector<std::int64_t> key_range, query_start, query_range, own_key;
};

inline std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ x >> 16;
}

inline std::uint32_t drawn(std::int64_t bh, std::int64_t t, std::int64_t s) {
  const std::uint32_t row = mix(mix(mix(kSeed) ^ static_cast<std::uint32_t>(bh)) ^ static_cast<std::uint32_t>(t));
  return mix(row ^ mix(static_cast<std::uint32_t>(s)));
}

// What a weight is multiplied with: 0, or 1 / (1 - dropout).
inline double kept(const Case& c, std::int64_t bh, std::int64_t t, std::int64_t s) {
  const auto threshold = static_cast<std::uint32_t>(c.dropout * 4294967296.0 + 0.5);
  return drawn(bh, t, s) >= threshold ? 1 / (1 - c.dropout) : 0;
}

struct Range {
  std::int64_t first, end;
};

inline Range range_of(const Case& c, const Inputs& x, std::int64_t b, std::int64_t g) {
  if (!c.ranges) return {0, c.S};
  const std::int64_t* given = x.key_range.data() + (b * c.G + g) * 2;
  const std::int64_t first = std::clamp<std::int64_t>(given[0], 0, c.S);
  return {first, std::clamp<std::int64_t>(given[1], first, c.S)};
}

inline std::int64_t start_of(const Case& c, const Inputs& x, std::int64_t b) {
  return c.starts.empty() ? c.S - c.T : std::clamp(x.query_start[b], -kLargestStart, kLargestStart);
}

// The key at which query t of a head stands.
inline std::int64_t order_of(const Case& c, const Inputs& x, std::int64_t b, std::int64_t h, std::int64_t t) {
  return c.own ? x.own_key[(b * c.H + h) * c.T + t] : start_of(c, x, b) + t;
}

// The keys that a query sees, of those of its head.
inline Range range_of_query(const Inputs& x, std::int64_t row, Range head, std::int64_t S) {
  if (x.query_range.empty()) return head;
  const std::int64_t* given = x.query_range.data() + row * 2;
  return {std::max(head.first, std::clamp<std::int64_t>(given[0], 0, S)),
          std::min(head.end, std::clamp<std::int64_t>(given[1], 0, S))};
}

// distance(row, s) is how far key s lies from a row of queries, [B * H * T].
template <typename Distance>
Truth define(const Case& c, const Inputs& x, const Distance& distance) {
  const auto zeros = [](const std::vector<double>& like) { return std::vector<double>(like.size()); };
  Truth t{zeros(x.dout), zeros(x.dlse), zeros(x.q), zeros(x.k), zeros(x.v),
          zeros(x.left), zeros(x.left), zeros(x.x), zeros(x.xq)};
  const double scale = 1 / std::sqrt(static_cast<double>(c.D));
  std::vector<double> weight(c.S), reach(c.S), pull(c.S), dweight(c.S), share(c.S);
  for (std::int64_t b = 0; b < c.B; ++b) {
    for (std::int64_t h = 0; h < c.H; ++h) {
      const std::int64_t g = h / (c.H / c.G), bh = b * c.H + h, key_row = (b * c.G + g) * c.S;
      for (std::int64_t i = 0; i < c.T; ++i) {
        const auto [first, end] = range_of_query(x, b * c.T + i, range_of(c, x, b, g), c.S);
        const std::int64_t row = bh * c.T + i, position = order_of(c, x, b, h, i);
        double high = -kInf, sum = 0;
        for (std::int64_t s = first; s < end; ++s) {
          double product = 0;
          for (std::int64_t d = 0; d < c.D; ++d) product += x.q[row * c.D + d] * x.k[(key_row + s) * c.D + d];
          const bool back = position >= s;  // sides go by order
          reach[s] = distance(row, s);
          double slope = back ? x.left[bh] : c.causal ? kInf : x.right[bh];
          if (position == s && std::isinf(slope)) slope = 0;  // its own key is never hidden
          pull[s] = std::isinf(slope) ? 0 : back ? slope : -slope;
          weight[s] = product * scale - (std::isinf(slope) ? slope : slope * reach[s]);
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
          (position >= s ? t.dleft : t.dright)[bh] -= dscore * reach[s];
          if (x.x.empty()) continue;
          t.dx[bh * c.S + s] += pull[s] * dscore;
          t.dxq[row] -= pull[s] * dscore;
        }
      }
    }
  }
  return t;
}

inline Truth define(const Case& c, const Inputs& x) {
  return define(c, x, [&](std::int64_t row, std::int64_t s) {
    if (!x.x.empty()) return std::abs(x.xq[row] - x.x[row / c.T * c.S + s]);
    return std::abs(double(order_of(c, x, row / c.T / c.H, row / c.T % c.H, row % c.T) - s));
  });
}

// Where keys and queries stand; keys that are hidden stand nowhere.
inline void give_positions(const Case& c, std::mt19937& random, Inputs& x) {
  std::exponential_distribution<double> gap;
  for (std::int64_t bh = 0; bh < c.B * c.H; ++bh) {
    const std::int64_t b = bh / c.H;
    const auto [first, end] = range_of(c, x, b, bh % c.H / (c.H / c.G));
    double at = c.standing == Standing::unix_times ? 1.7e9 : -3;
    for (std::int64_t s = 0; s < c.S; ++s) {
      if (c.standing == Standing::resets) at += s % 90 == 70 ? (s % 4 ? 40 : 1e4) : 0.02;
      else if (c.standing == Standing::bursts) at += gap(random) * (random() % 5 ? 0.01 : 5);
      else if (c.standing == Standing::unix_times) at += gap(random) / 64;
      else at += gap(random);
      x.x.push_back(s < first || s >= end ? kNan : c.standing == Standing::equal ? 4 * std::floor(at / 4) : at);
    }
    const double* stands = x.x.data() + bh * c.S;
    for (std::int64_t t = 0; t < c.T; ++t) {
      const std::int64_t p = order_of(c, x, b, bh % c.H, t), own = std::clamp(p, first, std::max(first, end - 1));
      double xq = first < end ? stands[own] : 0;
      if (c.between && first < end) {
        if (p < first) xq -= 0.5;
        else xq += own + 1 < end ? (stands[own + 1] - stands[own]) / 2 : 0.5;
      }
      x.xq.push_back(xq);
    }
  }
}

// Random inputs; a narrow type holds theirs exactly.
inline Inputs draw(const Case& c, bool narrow) {
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
  for (std::int64_t row = 0; row < c.B * c.T && (c.window >= 0 || c.scattered); ++row) {
    const std::int64_t p = start_of(c, x, row / c.T) + row % c.T;
    const std::int64_t at = static_cast<std::int64_t>(random() % static_cast<unsigned>(S + 9)) - 4;
    const std::int64_t length = row % 7 == 3 ? 0 : static_cast<std::int64_t>(random() % static_cast<unsigned>(S + 1));
    const std::int64_t first = c.scattered ? at : p - c.window;
    const std::int64_t end = c.scattered ? at + length : p + c.window / 2 + 1;
    x.query_range.insert(x.query_range.end(), {row % 31 == 30 ? kLow : first, row % 29 == 28 ? kHigh : end});
  }
  for (std::int64_t bh = 0; c.own && bh < c.B * c.H; ++bh) {
    for (std::int64_t t = 0; t < c.T; ++t)
      x.own_key.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(S + 140)) - 70);
    std::sort(x.own_key.end() - c.T, x.own_key.end());
  }
  if (c.standing != Standing::counted) give_positions(c, random, x);
  return x;
}

// ---- what the core makes of it

template <typename In>
struct Arrays {
  using W = typename Type<In>::Wide;
  std::vector<In> q, k, v;
  std::vector<W> left, right, dout, dlse, bound, out, row_max, log_sum, dq, dk, dv, dleft, dright, dx, dxq;
  std::vector<double> x, xq;
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
    call.query_range = x.query_range.empty() ? nullptr : x.query_range.data();
    call.own_key = c.own ? x.own_key.data() : nullptr;
    call.scale = 1 / std::sqrt(static_cast<double>(c.D));
    call.dropout = c.dropout;
    call.tolerance = sizeof(W) == 4 ? 1e-7 : 1e-16;
    call.seed = kSeed;
    call.num_threads = c.threads;
    call.precise = true;
    results = {out.data(), row_max.data(), log_sum.data(), visited.data(), tiles};
    gradients = {dout.data(), dlse.data(), results, dq.data(), dk.data(), dv.data(), dleft.data(), dright.data()};
    if (c.standing == Standing::counted) return;
    this->x = x.x, xq = x.xq;
    dx.assign(this->x.size(), nan), dxq.assign(xq.size(), nan);
    call.positions = {this->x.data(), c.H * c.S, c.S};
    call.query_positions = {xq.data(), c.H * c.T, c.T};
    gradients.dpositions = dx.data(), gradients.dquery_positions = dxq.data();
  }

  void run() {
    forward(call, results);
    backward(call, gradients);
  }
};

inline std::string describe(const Case& c, const char* type) {
  char name[300];
  std::snprintf(name, sizeof name, "%s %s B%d H%d G%d T%d S%d D%d E%d %s%s%s%s%s%s%s threads %d", target(), type,
                int(c.B), int(c.H), int(c.G), int(c.T), int(c.S), int(c.D), int(c.E), c.causal ? "causal" : "two sides",
                c.ranges ? " ranges" : "", c.starts.empty() ? "" : " starts", c.dropout > 0 ? " dropout" : "",
                kStandings[int(c.standing)], c.between ? " between" : "", c.own ? " own keys" : "", c.threads);
  return name;
}

// NaN if one of them is, whichever comes first.
inline double larger_or_nan(double a, double b) { return a > b || std::isnan(a) ? a : b; }

template <typename W>
void compare(const char* what, const std::string& name, const std::vector<W>& actual, const std::vector<double>& truth,
             double allowed) {
  double worst = 0, size = 1;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (std::isfinite(truth[i])) size = std::max(size, std::abs(truth[i]));
    const bool same = double(actual[i]) == truth[i];
    worst = larger_or_nan(worst, same ? 0 : std::abs(double(actual[i]) - truth[i]));
  }
  check(worst <= allowed * size, name, what);
  if (!(worst <= allowed * size)) std::printf("  error %.3g, allowed %.3g\n", worst, allowed * size);
}

// ---- the targets

// Those that run here, or the ones that were named on the command line.
inline std::vector<std::string> chosen_targets;

template <typename Run>
void on_every_target(Run run) {
  for (const std::string& name : chosen_targets) {
    force_target(name.c_str());
    run();
  }
  force_target(nullptr);
}

void test_what_is_left_out();       // certificate_test.cpp
void test_tasks_are_shared_out();   // parallel_test.cpp
void test_points();                 // points_test.cpp
void test_precision_by_distance();  // precision_test.cpp
void test_sequences();              // sequences_test.cpp

}  // namespace linbias::testing
