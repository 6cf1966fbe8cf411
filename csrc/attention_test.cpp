// The core against a double loop, without Python: every target, sizes around its vector width, one and many threads.
// Built with sanitizers by `make sanitize`.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "linbias/attention.h"

using namespace linbias;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
std::atomic<int> failures{0}, checks{0};

struct Case {
  std::int64_t B, H, G, T, S, D, E;
  bool causal, ranges;
  double tolerance;
  int threads;
};

template <typename W>
struct Arrays {
  std::vector<W> q, k, v, left, right, out, row_max, log_sum, dout, dlse, dq, dk, dv, dleft, dright;
  std::vector<std::int64_t> key_range;
  std::vector<std::int32_t> visited;
};

template <typename W>
std::vector<W> normal(std::mt19937& random, std::int64_t count) {
  std::normal_distribution<double> draw;
  std::vector<W> x(static_cast<std::size_t>(count));
  for (W& value : x) value = static_cast<W>(draw(random));
  return x;
}

// Forward and backward by the definition, in double.
struct Truth {
  std::vector<double> out, lse, dq, dk, dv, dleft, dright;
};

template <typename W>
Truth define(const Case& c, const Arrays<W>& a) {
  Truth t{std::vector<double>(a.out.size()),   std::vector<double>(a.row_max.size()), std::vector<double>(a.q.size()),
          std::vector<double>(a.k.size()),     std::vector<double>(a.v.size()),       std::vector<double>(a.left.size()),
          std::vector<double>(a.left.size())};
  const double scale = 1 / std::sqrt(static_cast<double>(c.D));
  for (std::int64_t b = 0; b < c.B; ++b) {
    const std::int64_t first = c.ranges ? a.key_range[2 * b] : 0, end = c.ranges ? a.key_range[2 * b + 1] : c.S;
    for (std::int64_t h = 0; h < c.H; ++h) {
      const std::int64_t g = h / (c.H / c.G), bh = b * c.H + h;
      for (std::int64_t i = 0; i < c.T; ++i) {
        const std::int64_t row = bh * c.T + i, position = i + end - c.T;
        std::vector<double> weight(c.S, 0.0), reach(c.S, 0.0);
        double high = -kInf;
        for (std::int64_t s = first; s < end; ++s) {
          double x = 0;
          for (std::int64_t d = 0; d < c.D; ++d) x += double(a.q[row * c.D + d]) * a.k[((b * c.G + g) * c.S + s) * c.D + d];
          reach[s] = static_cast<double>(position - s);
          const double slope = reach[s] > 0 ? a.left[bh] : c.causal ? kInf : double(a.right[bh]);
          weight[s] = x * scale - (reach[s] == 0 ? 0 : slope * std::abs(reach[s]));
          high = std::max(high, weight[s]);
        }
        double sum = 0;
        for (std::int64_t s = first; s < end; ++s) {
          weight[s] = high == -kInf ? 0 : std::exp(weight[s] - high);
          sum += weight[s];
        }
        t.lse[row] = high + std::log(sum);
        if (sum == 0) continue;
        double center = -double(a.dlse[row]);
        std::vector<double> dweight(c.S, 0.0);
        for (std::int64_t s = first; s < end; ++s) {
          weight[s] /= sum;
          for (std::int64_t e = 0; e < c.E; ++e) {
            const double value = a.v[((b * c.G + g) * c.S + s) * c.E + e], given = a.dout[row * c.E + e];
            t.out[row * c.E + e] += weight[s] * value;
            dweight[s] += given * value;
            t.dv[((b * c.G + g) * c.S + s) * c.E + e] += weight[s] * given;
          }
          center += weight[s] * dweight[s];
        }
        for (std::int64_t s = first; s < end; ++s) {
          const double dscore = weight[s] * (dweight[s] - center);
          for (std::int64_t d = 0; d < c.D; ++d) {
            const std::int64_t key = ((b * c.G + g) * c.S + s) * c.D + d;
            t.dq[row * c.D + d] += scale * dscore * a.k[key];
            t.dk[key] += scale * dscore * a.q[row * c.D + d];
          }
          (reach[s] > 0 ? t.dleft : t.dright)[bh] -= dscore * std::abs(reach[s]);
        }
      }
    }
  }
  return t;
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
  ++checks;
  if (!(worst <= allowed * size)) {
    ++failures;
    std::printf("FAILED %s %s: error %.3g\n", name.c_str(), what, worst);
  }
}

template <typename W>
void run(const Case& c, DType dtype, const char* type) {
  std::mt19937 random(7);
  Arrays<W> a;
  a.q = normal<W>(random, c.B * c.H * c.T * c.D);
  a.k = normal<W>(random, c.B * c.G * c.S * c.D);
  a.v = normal<W>(random, c.B * c.G * c.S * c.E);
  a.dout = normal<W>(random, c.B * c.H * c.T * c.E);
  a.dlse = normal<W>(random, c.B * c.H * c.T);
  const double slopes[] = {0.5, 0.0, 0.03, kInf, 1e-8, 30.0};
  for (std::int64_t i = 0; i < c.B * c.H; ++i) {
    a.left.push_back(static_cast<W>(slopes[i % 6]));
    a.right.push_back(static_cast<W>(slopes[(i + 2) % 6]));
  }
  for (std::int64_t b = 0; b < c.B; ++b) {
    a.key_range.push_back(b % 2 ? c.S / 3 : 0);
    a.key_range.push_back(c.S - b % 3);
  }
  const W nan = std::numeric_limits<W>::quiet_NaN();
  a.out.assign(a.dout.size(), nan);
  a.row_max.assign(a.dlse.size(), nan);
  a.log_sum.assign(a.dlse.size(), nan);
  const std::int64_t tiles = (c.T + kTileRows - 1) / kTileRows;
  a.visited.assign(c.B * c.H * tiles * 2, -1);
  a.dq.assign(a.q.size(), nan);
  a.dk.assign(a.k.size(), 0);
  a.dv.assign(a.v.size(), 0);
  a.dleft.assign(a.left.size(), nan);
  a.dright.assign(a.left.size(), nan);
  const Call call{dtype, c.B, c.H, c.G, c.T, c.S, c.D, c.E,
                  {a.q.data(), c.H * c.T * c.D, c.T * c.D, c.D},
                  {a.k.data(), c.G * c.S * c.D, c.S * c.D, c.D},
                  {a.v.data(), c.G * c.S * c.E, c.S * c.E, c.E},
                  a.left.data(), c.causal ? nullptr : a.right.data(), c.ranges ? a.key_range.data() : nullptr, nullptr,
                  1 / std::sqrt(static_cast<double>(c.D)), 0.0, c.tolerance, 0, c.threads, true};
  const Forward results{a.out.data(), a.row_max.data(), a.log_sum.data(), a.visited.data(), tiles};
  forward(call, results);
  const Backward gradients{a.dout.data(), a.dlse.data(), results,           a.dq.data(),
                           a.dk.data(),   a.dv.data(),   a.dleft.data(), a.dright.data()};
  backward(call, gradients);

  char name[200];
  std::snprintf(name, sizeof name, "%s %s B%d H%d G%d T%d S%d D%d E%d %s%s threads %d", target(), type, int(c.B), int(c.H),
                int(c.G), int(c.T), int(c.S), int(c.D), int(c.E), c.causal ? "causal" : "two sides",
                c.ranges ? " ranges" : "", c.threads);
  const Truth truth = define(c, a);
  const double step = sizeof(W) == 4 ? 1e-5 : 1e-13;
  compare("out", name, a.out, truth.out, step);
  std::vector<W> lse(a.row_max);
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] += a.log_sum[i];
  compare("lse", name, lse, truth.lse, step);
  compare("dq", name, a.dq, truth.dq, step);
  compare("dk", name, a.dk, truth.dk, step);
  compare("dv", name, a.dv, truth.dv, step);
  for (std::size_t i = 0; i < a.left.size(); ++i) {
    if (std::isinf(double(a.left[i]))) a.dleft[i] = W(truth.dleft[i]);
    if (c.causal || std::isinf(double(a.right[i]))) a.dright[i] = W(truth.dright[i]);
  }
  compare("dleft", name, a.dleft, truth.dleft, step);
  compare("dright", name, a.dright, truth.dright, step);
}

void run_all() {
  const Case cases[] = {
      {1, 1, 1, 1, 1, 1, 1, true, false, 1e-7, 1},      {2, 3, 1, 7, 11, 5, 3, true, false, 1e-7, 1},
      {1, 2, 2, 15, 16, 16, 17, true, false, 1e-7, 2},  {1, 2, 1, 49, 65, 31, 33, false, false, 1e-7, 3},
      {2, 6, 2, 48, 64, 64, 64, false, false, 1e-7, 2}, {3, 2, 2, 97, 131, 8, 65, false, true, 1e-7, 4},
      {2, 6, 3, 203, 517, 13, 5, true, true, 1e-7, 2},  {1, 6, 6, 300, 700, 24, 40, false, false, 1e-7, 5},
      {1, 6, 1, 130, 40, 9, 2, true, false, 1e-7, 2},   {1, 6, 1, 130, 40, 9, 2, false, false, 1e-7, 2},
      {1, 2, 1, 0, 5, 4, 4, true, false, 1e-7, 2},      {1, 2, 1, 5, 0, 4, 4, true, false, 1e-7, 2},
  };
  for (const Case& c : cases) {
    run<float>(c, DType::float32, "float32");
    run<double>({c.B, c.H, c.G, c.T, c.S, c.D, c.E, c.causal, c.ranges, 1e-16, c.threads}, DType::float64, "float64");
  }
}

}  // namespace

int main() {
  std::string names = targets();
  for (std::size_t from = 0; from <= names.size();) {
    const std::size_t comma = std::min(names.find(',', from), names.size());
    force_target(names.substr(from, comma - from).c_str());
    run_all();
    from = comma + 1;
  }
  force_target(nullptr);
  std::vector<std::thread> callers;  // several threads call at once
  for (int i = 0; i < 3; ++i) callers.emplace_back([] { run<float>({1, 2, 1, 97, 131, 8, 9, false, false, 1e-7, 2}, DType::float32, "at once"); });
  for (std::thread& caller : callers) caller.join();
  std::printf("%d checks on %s, %d failed\n", checks.load(), names.c_str(), failures.load());
  return failures ? 1 : 0;
}
