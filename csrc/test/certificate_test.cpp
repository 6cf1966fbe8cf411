// What the core may leave out: no row may lose more than `tolerance` of its probability. Keys that bring the
// certificate to its limits (all alike, so that its bound is exact, one far key that outweighs its distance, keys that
// no bound covers), in every type, at every size of queries and keys whose products stay the same, through tiles and
// through decoding; and what backward leaves out.
#include "attention_test.h"

namespace linbias::testing {
namespace {

// One head of queries and keys, without scale: score = q.k - slope * distance.
struct Scene {
  std::string name;
  std::int64_t T, S, D, start;  // query t stands at start + t
  double left, right, tolerance;
  std::vector<double> q, k;
  std::vector<double> x = {}, xq = {};  // where keys and queries stand; none: counted
  bool alike = false;                   // many weights are the same number, and rounded alike
  bool two_sides() const { return !std::isinf(right); }
};

Scene blank(const std::string& name, std::int64_t T, std::int64_t S, std::int64_t D, double left, double tolerance) {
  return {name, T, S, D, S - T, left, kInf, tolerance, std::vector<double>(T * D), std::vector<double>(S * D)};
}

Scene both_sides(Scene scene, double right) {
  scene.name += ", two sides";
  scene.right = right;
  scene.start = scene.S / 2;
  return scene;
}

// All keys alike, and along the queries: the bound of what lies beyond is exact.
Scene equal_keys(std::int64_t T, std::int64_t S, double slope, double score) {
  Scene scene = blank("equal keys, score " + std::to_string(int(score)), T, S, 8, slope, 0.02);
  for (std::int64_t t = 0; t < T; ++t) scene.q[t * 8 + 2] = score;
  for (std::int64_t s = 0; s < S; ++s) scene.k[s * 8 + 2] = 1;
  return scene;
}

// All scores 0, and a far key across the queries, so long that no bound holds: blocks are left out, if at all, once
// their scores are known.
Scene unbounded(std::int64_t T, std::int64_t S, double slope, double length) {
  Scene scene = blank("no bound", T, S, 8, slope, 0.02);
  for (std::int64_t t = 0; t < T; ++t) scene.q[t * 8] = 1;
  scene.k[1] = scene.k[(S - 1) * 8 + 1] = length;
  return scene;
}

// As `unbounded`, but for query 0, which sees the keys beside it alone and to which no block that is left out matters:
// other rows lose what they lose.
Scene bound_by_others(std::int64_t T, std::int64_t S, double slope, double length) {
  Scene scene = unbounded(T, S, slope, length);
  scene.name += " but for row 0";
  scene.q[3] = 50;
  for (std::int64_t s = 0; s < scene.start - kBlockKeys; ++s) scene.k[s * 8 + 3] = -1;
  return scene;
}

// Scores 0 of queries that stand far beyond all keys, so that what rounding takes from their distances, times the
// slope, is more than the tolerance.
Scene far_off(std::int64_t T, std::int64_t S, double slope, std::int64_t distance) {
  Scene scene = blank("far off, " + std::to_string(S) + " keys", T, S, 8, slope, 0.02);
  scene.start = S + distance;
  return scene;
}

// Scores 0 but for `count` keys at `distance` from query `row` and beyond, of this score, along this query alone; at a
// slope that lets them hold `share` of what the others hold.
Scene spike(std::int64_t T, std::int64_t row, double score, std::int64_t distance, int count, double share) {
  double slope = score / double(distance);
  for (int i = 0; i < 50; ++i) slope = (score - std::log(share / -std::expm1(-slope) / count)) / double(distance);
  // Key 255 ends its block, so that the bound counts its distance in full; mirrored, it begins one.
  const std::int64_t key = 255, start = key + distance - row, S = (start + T + 63) / 64 * 64;
  Scene scene = blank("spike of score " + std::to_string(int(score)), T, S, 8, slope, 0.002);
  scene.start = start;
  scene.name += ", " + std::to_string(count) + " keys, row " + std::to_string(row);
  scene.q[row * 8 + 5] = score / 2;
  for (std::int64_t s = 0; s < count; ++s) scene.k[(key - s) * 8 + 5] = 2;
  return scene;
}

// One long key in each block, the one nearest to the queries: the bound of a block by how its keys spread is exact.
Scene one_in_a_block(std::int64_t T, std::int64_t S, double slope) {
  Scene scene = blank("one key in a block", T, S, 8, slope, 0.02);
  for (std::int64_t t = 0; t < T; ++t) scene.q[t * 8 + 2] = 16;
  for (std::int64_t s = kBlockKeys - 1; s < S; s += kBlockKeys) scene.k[s * 8 + 2] = 1;
  return scene;
}

// Keys alike along the queries, but for 0 where the center is sampled, and in each block a longer one across them: the
// spread is that of most keys, and the bound of a block by how they spread is about exact.
Scene leaning(std::int64_t T, std::int64_t S, double slope) {
  Scene scene = blank("leaning keys", T, S, 8, slope, 0.02);
  const std::int64_t every = (S + 511) / 512;
  for (std::int64_t t = 0; t < T; ++t) scene.q[t * 8 + 2] = 1.5;
  for (std::int64_t s = 0; s < S; ++s) {
    if (s % every == 0) continue;
    const bool across = s % kBlockKeys == 1;
    scene.k[s * 8 + (across ? 1 : 2)] = across ? 2.75 : 1;
  }
  return scene;
}

// As `unbounded`, and beyond keys that weigh nothing forty, each in a block of its own, whose weights, or their sum,
// overflow until one of them is the new maximum.
Scene overflow(std::int64_t T, double excess) {
  Scene scene = unbounded(T, 6000, 1.0 / 64, 100);
  scene.name = "a weight of e^" + std::to_string(int(excess));
  const double entry = std::sqrt(excess + 3000 / 64.0);
  for (std::int64_t t = 0; t < T; ++t) scene.q[t * 8 + 5] = entry;
  for (std::int64_t i = 0; i < 40; ++i) {
    const std::int64_t distance = 3000 + kBlockKeys * i;
    scene.k[(scene.start - distance) * 8 + 5] = (excess + double(distance) / 64) / entry;
  }
  return scene;
}

// Keys around a center far from 0, all on the queries' side of it.
Scene off_center(std::int64_t T, std::int64_t S, double slope, int seed) {
  Scene scene = blank("off-center keys", T, S, 16, slope, 0.02);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  for (double& x : scene.q) x = 3 + normal(random);
  for (double& x : scene.k) x = 2 + normal(random) / 4;
  return scene;
}

// Keys on the other side of 0 than the queries, but for a far block: the center lies away from it.
Scene opposed(std::int64_t T, double query, double far_key) {
  Scene scene = blank("opposed keys", T, 3000, 8, 1.0 / 128, 0.02);
  for (std::int64_t t = 0; t < T; ++t) scene.q[t * 8 + 2] = query;
  for (std::int64_t s = 0; s < 3000; ++s) scene.k[s * 8 + 2] = s / kBlockKeys == 22 ? far_key : 1;
  return scene;
}

// Scores so large that their own rounding matters: the bound has to allow for it.
// If `balanced`, half of the keys have the other sign, so that the center is near 0, and the first block is 0.
Scene large_scores(std::int64_t T, std::int64_t S, double slope, double size, bool aligned, int seed,
                   bool balanced = false) {
  Scene scene = blank("large scores", T, S, 48, slope, 0.02);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> key(48);
  for (double& x : key) x = size * normal(random);
  for (std::int64_t i = 0; i < T * 48; ++i) scene.q[i] = aligned ? key[i % 48] : size * normal(random) + key[i % 48];
  for (std::int64_t i = 0; i < S * 48; ++i) scene.k[i] = key[i % 48];
  if (!balanced) return scene;
  const std::int64_t every = (S + 511) / 512;  // one in so many is sampled for the center
  for (std::int64_t i = 0; i < S * 48; ++i) {
    if (i < kBlockKeys * 48) scene.k[i] = 0;
    else if (i / 48 / every % 2) scene.k[i] *= -1;
  }
  return scene;
}

// The same seen from the other end.
Scene mirrored(Scene scene) {
  scene.name += ", mirrored";
  std::swap(scene.left, scene.right);
  scene.start = scene.S - scene.start - scene.T;
  for (std::vector<double>* positions : {&scene.x, &scene.xq}) {
    std::reverse(positions->begin(), positions->end());
    for (double& position : *positions) position = -position;
  }
  for (auto& [x, rows] : {std::pair{&scene.q, scene.T}, std::pair{&scene.k, scene.S}}) {
    for (std::int64_t i = 0; i < rows / 2; ++i) {
      std::swap_ranges(x->begin() + i * scene.D, x->begin() + (i + 1) * scene.D, x->begin() + (rows - 1 - i) * scene.D);
    }
  }
  return scene;
}

// The same with keys and queries at positions `unit` apart, with a slope that makes up for it.
Scene positioned(Scene scene, double unit) {
  scene.name += ", positioned";
  scene.left /= unit, scene.right /= unit;
  for (std::int64_t s = 0; s < scene.S; ++s) scene.x.push_back(1.7e9 + unit * double(s));
  for (std::int64_t t = 0; t < scene.T; ++t) scene.xq.push_back(1.7e9 + unit * double(scene.start + t));
  return scene;
}

// The same, but with the keys of a block where its nearest key to the left stands, and the first of them a block away.
Scene bunched(Scene scene) {
  scene = positioned(std::move(scene), 1);
  scene.name += ", bunched";
  const auto position = [](std::int64_t s) {
    return 1.7e9 + double(kBlockKeys * (s / kBlockKeys + (s % kBlockKeys != 0)));
  };
  for (std::int64_t s = 0; s < scene.S; ++s) scene.x[s] = position(s);
  for (std::int64_t t = 0; t < scene.T; ++t) scene.xq[t] = position(scene.start + t);
  return scene;
}

// All keys alike, at positions as uneven as gates and events leave them: the bound by one scan over the keys is exact,
// but for what a block's end is beyond its keys.
Scene uneven_keys(std::int64_t T, std::int64_t S, const std::string& kind) {
  Scene scene = equal_keys(T, S, 1, 3);
  scene.name = kind;
  std::mt19937 random(11);
  std::exponential_distribution<double> gap;
  for (std::int64_t s = 0; s < S; ++s) {
    const double last = scene.x.empty() ? 0 : scene.x.back();
    if (kind == "bursts") scene.x.push_back(last + (random() % 100 ? 0.0004 : 0.2) * gap(random));
    else if (kind == "stairs") scene.x.push_back(double(s / 700) * 0.5), scene.alike = true;
    else if (kind == "resets") scene.x.push_back(last + (s % 1900 == 1000 ? 3.5 : 0.001));
    else scene.x.push_back(-200 / (1 + double(s) / 64));  // ever closer
  }
  scene.xq.assign(scene.x.begin() + scene.start, scene.x.begin() + scene.start + T);
  return scene;
}

// ---- one call

template <typename In>
double widened(In x) {
  if constexpr (std::is_same_v<In, Brain>) {
    const std::uint32_t bits = std::uint32_t{x.bits} << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
  } else if constexpr (std::is_same_v<In, Half>) {
    const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return x.bits & 0x8000 ? -size : size;
  } else {
    return x;
  }
}

enum class Way { tiles, precise, decode, decode_bounded };
const char* const kWays[] = {"tiles", "precise tiles", "decode", "decode with a bound"};

// A scene in one type; queries and keys times powers of two that cancel.
template <typename In>
struct SceneCall {
  using W = typename Type<In>::Wide;
  std::vector<In> q, k, v;
  std::vector<W> left, right, bound, out, row_max, log_sum;
  std::vector<std::int32_t> visited;
  Call call;
  Forward results;

  SceneCall(const Scene& scene, Way way, int q_exponent = 0, int k_exponent = 0) {
    const double of_q = std::ldexp(1, q_exponent), of_k = std::ldexp(1, k_exponent);
    for (const double x : scene.q) q.push_back(narrow<In>(x * of_q));
    for (const double x : scene.k) k.push_back(narrow<In>(x * of_k));
    for (std::int64_t s = 0; s < scene.S; ++s) v.push_back(narrow<In>(s % 128 < 64 ? 1.0 : -1.0));
    double longest = 0;
    for (std::int64_t s = 0; s < scene.S && way == Way::decode_bounded; ++s) {
      double square = 0;
      for (std::int64_t d = 0; d < scene.D; ++d) square += std::pow(widened(k[s * scene.D + d]) / of_k, 2);
      longest = std::max(longest, std::sqrt(square));
    }
    left.push_back(W(scene.left)), right.push_back(W(scene.right));
    bound.push_back(W(longest * (1 + 1e-6) * of_k));
    starts.push_back(scene.start);
    out.resize(scene.T), row_max.resize(scene.T), log_sum.resize(scene.T);
    const std::int64_t tiles = (scene.T + kTileRows - 1) / kTileRows;
    visited.resize(tiles * 2);
    call.dtype = Type<In>::dtype;
    call.B = call.H = call.G = call.E = 1;
    call.T = scene.T, call.S = scene.S, call.D = scene.D;
    call.q = {q.data(), 0, 0, scene.D}, call.k = {k.data(), 0, 0, scene.D}, call.v = {v.data(), 0, 0, 1};
    call.left = left.data(), call.right = scene.two_sides() ? right.data() : nullptr;
    call.query_start = starts.data();
    call.key_bound = way == Way::decode_bounded ? bound.data() : nullptr;
    call.scale = std::ldexp(1.0, -q_exponent - k_exponent);
    call.precise = way == Way::precise;
    call.num_threads = 2;
    x = scene.x, xq = scene.xq;
    call.positions = {x.data(), 0, 0}, call.query_positions = {xq.data(), 0, 0};
    results = {out.data(), row_max.data(), log_sum.data(), visited.data(), tiles};
  }

 private:
  std::vector<std::int64_t> starts;
  std::vector<double> x, xq;
};

// What the rows of a scene may lose, beside `tolerance`, to rounding.
template <typename In>
constexpr double kRounding = std::is_same_v<In, double> ? 1e-10 : 3e-5;

// By the definition, from the numbers that the types hold.
template <typename In>
std::vector<double> true_lse(const Scene& scene) {
  std::vector<double> q, k, lse, score(scene.S);
  for (const double x : scene.q) q.push_back(widened(narrow<In>(x)));
  for (const double x : scene.k) k.push_back(widened(narrow<In>(x)));
  const double left = double(typename Type<In>::Wide(scene.left)), right = double(typename Type<In>::Wide(scene.right));
  for (std::int64_t t = 0; t < scene.T; ++t) {
    double high = -kInf, sum = 0;
    for (std::int64_t s = 0; s < scene.S; ++s) {
      double product = 0;
      for (std::int64_t d = 0; d < scene.D; ++d) product += q[t * scene.D + d] * k[s * scene.D + d];
      const double order = double(scene.start + t - s), reach = scene.x.empty() ? order : scene.xq[t] - scene.x[s];
      const double slope = order > 0 ? left : right;
      score[s] = product - (order == 0 ? 0 : std::isinf(slope) ? kInf : slope * std::abs(reach));
      high = std::max(high, score[s]);
    }
    for (std::int64_t s = 0; s < scene.S; ++s) sum += std::exp(score[s] - high);
    lse.push_back(high + std::log(sum));
  }
  return lse;
}

// Forward with the scene's tolerance against forward that reads every key: the share of probability that is lost.
template <typename In>
void check_loss(const Scene& scene, Way way, int q_exponent, int k_exponent, const std::vector<double>* truth) {
  const std::string name = std::string(target()) + " " + Type<In>::name + " " + scene.name + ", T " +
                           std::to_string(scene.T) + ", " + kWays[int(way)] + ", q 2^" + std::to_string(q_exponent) +
                           ", k 2^" + std::to_string(k_exponent);
  SceneCall<In> c(scene, way, q_exponent, k_exponent);
  forward(c.call, c.results);
  const auto out = c.out, row_max = c.row_max, log_sum = c.log_sum;  // of all keys
  c.call.tolerance = scene.tolerance;
  forward(c.call, c.results);
  double most = -kInf, gained = -kInf, moved = 0, wrong = 0;
  for (std::int64_t t = 0; t < scene.T; ++t) {
    const double loss =
        -std::expm1(double(c.row_max[t]) - double(row_max[t]) + double(c.log_sum[t]) - double(log_sum[t]));
    most = larger_or_nan(most, loss), gained = larger_or_nan(gained, -loss);
    moved = larger_or_nan(moved, std::abs(double(c.out[t]) - double(out[t])));
    if (!truth) continue;
    const double lse = double(row_max[t]) + double(log_sum[t]);
    wrong = larger_or_nan(wrong, std::abs(lse - (*truth)[t]) / (1 + std::abs((*truth)[t])));
  }
  const double allowed = scene.tolerance + kRounding<In>;
  check(most <= allowed, name, "no row loses more than the tolerance");
  check(gained <= kRounding<In>, name, "no row gains");
  check(moved <= 2 * scene.tolerance + (std::is_same_v<In, Brain> ? 0x1p-7 : kRounding<In>), name, "out moves no more");
  check(wrong <= kRounding<In>, name, "lse of all keys");
  if (getenv("VERBOSE")) printf("%.3f of the tolerance: %s\n", most / scene.tolerance, name.c_str());
}

// A value that is not finite shows, however little it weighs, and in the gradient of its key, too.
template <typename In>
void check_nan_is_read(Scene scene, Way way) {
  SceneCall<In> c(scene, way);
  c.call.tolerance = scene.tolerance;
  c.v[5] = narrow<In>(kNan);
  forward(c.call, c.results);
  const auto is_nan = [](auto x) { return std::isnan(x); };
  check(std::all_of(c.out.begin(), c.out.end(), is_nan),
        std::string(target()) + " " + Type<In>::name + " " + scene.name, "NaN in a far value shows");
  if (way != Way::precise) return;
  using W = typename SceneCall<In>::W;
  std::vector<W> dout(scene.T, 1), dq(c.q.size()), dk(c.k.size()), dv(c.v.size()), dslopes(2);
  backward(c.call, {dout.data(), nullptr, c.results, dq.data(), dk.data(), dv.data(), &dslopes[0], &dslopes[1]});
  check(std::all_of(dk.begin() + 5 * scene.D, dk.begin() + 6 * scene.D, is_nan),
        std::string(target()) + " " + Type<In>::name + " " + scene.name, "NaN in a far value shows in dk");
}

// Backward of the same, for a gradient of the output of 1: the gradients of the values add up to the weights that it
// kept of those that forward did. It may leave out a quarter of the tolerance, or what forward left out.
template <typename In>
void check_backward_loss(const Scene& scene) {
  SceneCall<In> c(scene, Way::precise);
  using W = typename SceneCall<In>::W;
  c.call.tolerance = scene.tolerance;
  forward(c.call, c.results);
  std::vector<W> dout(scene.T, 1), dlse(scene.T, 0), dq(c.q.size()), dk(c.k.size()), dv(c.v.size()), dslopes(2);
  backward(c.call, {dout.data(), dlse.data(), c.results, dq.data(), dk.data(), dv.data(), &dslopes[0], &dslopes[1]});
  double kept = 0, largest = 0;
  for (const W x : dv) kept += double(x) / double(scene.T);
  for (const W x : c.row_max) largest = std::max(largest, std::abs(double(x)));
  // On the matrix unit backward rounds weights, and takes lse off scores at once; where bfloat16 is multiplied in
  // pairs, forward rounds scores in another order.
  const double rounding = std::is_same_v<In, Brain> ? (scene.alike ? 0x1p-8 : 4e-4) + largest * 0x1p-22 : kRounding<In>;
  const std::string name = std::string(target()) + " " + Type<In>::name + " " + scene.name + ", backward";
  check(std::abs(1 - kept) <= scene.tolerance / 4 + rounding, name, "a quarter of the tolerance is left out at most");
  if (getenv("VERBOSE")) printf("%.3f of the tolerance: %s\n", (1 - kept) / scene.tolerance, name.c_str());
}

// ---- all of it

template <typename In>
std::vector<std::pair<int, int>> exponents() {
  if (std::is_same_v<In, Half>) return {{4, -4}, {-4, 4}};
  if (std::is_same_v<In, double>) return {{270, -270}, {540, -540}, {-540, 540}, {0, -540}, {-400, -400}, {400, 400}};
  return {{40, -40}, {64, -64}, {100, -100}, {-64, 64}, {-100, 100}, {0, -70}, {-70, 0}, {-50, -50}, {50, 50}};
}

template <typename In>
void check_scene(const Scene& scene, bool at_all_sizes) {
  const std::vector<double> truth = true_lse<In>(scene);
  on_every_target([&] {
    for (const Way way : {Way::tiles, Way::precise, Way::decode, Way::decode_bounded}) {
      const bool few = scene.T <= 4, decodes = way == Way::decode || way == Way::decode_bounded;
      if (way == Way::precise ? !few && !std::is_same_v<In, Brain> : decodes != few) continue;
      check_loss<In>(scene, way, 0, 0, &truth);
      if (!at_all_sizes || way == Way::decode_bounded) continue;
      for (const auto& [of_q, of_k] : exponents<In>()) check_loss<In>(scene, way, of_q, of_k, nullptr);
    }
    check_backward_loss<In>(scene);
  });
}

template <typename In>
void check_scenes() {
  constexpr bool wide = sizeof(typename Type<In>::Wide) == 8;
  for (const std::int64_t T : {1, 3, 60}) {
    check_scene<In>(equal_keys(T, 12345, 1.0 / 1024, 5), T == 1);
    check_scene<In>(both_sides(equal_keys(T, 9000, 1.0 / 512, 3), 1.0 / 512), false);
    check_scene<In>(unbounded(T, 16384, 1.0 / 1024, 100), false);
    check_scene<In>(both_sides(unbounded(T, 9000, 1.0 / 512, 100), 1.0 / 512), false);
    if (T == 60) check_scene<In>(bound_by_others(T, 9000, 1.0 / 512, 100), false);
    for (std::int64_t i = 0; i < 8; ++i)
      check_scene<In>(far_off(T, 3000 + 7 * i, 1.0 / 32, 800'000'000 + 9 * i), false);
    check_scene<In>(one_in_a_block(T, 6000, 1.0 / 256), false);
    check_scene<In>(leaning(T, 16384, 1.0 / 1024), false);
    check_scene<In>(opposed(T, -5, -1), T == 1);
    check_scene<In>(opposed(T, -40, 0), T == 1);
    check_scene<In>(overflow(T, wide ? 712 : 92), false);
    check_scene<In>(overflow(T, wide ? 708 : 87), false);
    if (T == 1) check_scene<In>(equal_keys(T, 70000, 1.0 / 16384, 5), false);
    on_every_target([&] {
      check_nan_is_read<In>(equal_keys(T, 12345, 1.0 / 1024, 5), T > 4 ? Way::tiles : Way::precise);
      check_nan_is_read<In>(equal_keys(T, 12345, 1.0 / 1024, 5), T > 4 ? Way::precise : Way::decode);
      check_nan_is_read<In>(unbounded(T, 16384, 1.0 / 1024, 100), T > 4 ? Way::tiles : Way::precise);
    });
    check_scene<In>(off_center(T, 2500, 1.0 / 128, 1), T == 60);
    const std::int64_t row = T / 2;
    for (const double score : {12.0, 17.0, 24.0, 34.0, 68.0, 192.0, 480.0, 640.0}) {
      check_scene<In>(spike(T, row, score, 150 + std::int64_t(4 * score), 1, 0.0023), T == 1 && score == 24);
    }
    for (const int count : {5, 20, 64}) {
      check_scene<In>(spike(T, row, 40, 1500, count, 0.0023), T == 1);
      check_scene<In>(mirrored(spike(T, row, 40, 1500, count, 0.0023)), false);
      check_scene<In>(spike(T, row, 16, 800, count, 0.0023), false);
    }
  }
  for (const std::int64_t T : {1, 60}) {
    check_scene<In>(positioned(equal_keys(T, 12345, 1.0 / 1024, 5), 4), T == 1);
    check_scene<In>(positioned(both_sides(equal_keys(T, 9000, 1.0 / 512, 3), 1.0 / 512), 0x1p-6), false);
    for (std::int64_t i = 0; i < 8; ++i)
      check_scene<In>(positioned(far_off(T, 3000 + 7 * i, 1.0 / 32, 800'000'000 + 9 * i), 0.25), false);
    for (std::int64_t i = 0; i < 8; ++i)
      check_scene<In>(bunched(equal_keys(T, 5000 + 9 * i, 5.0 / kBlockKeys, 5)), false);
    check_scene<In>(positioned(one_in_a_block(T, 6000, 1.0 / 256), 2), false);
    check_scene<In>(positioned(leaning(T, 16384, 1.0 / 1024), 2), false);
    check_scene<In>(positioned(mirrored(spike(T, T / 2, 40, 1500, 20, 0.0023)), 8), false);
    for (const char* kind : {"bursts", "stairs", "resets", "ever closer"}) {
      check_scene<In>(uneven_keys(T, 12345, kind), false);
      check_scene<In>(mirrored(uneven_keys(T, 12345, kind)), false);
    }
    on_every_target([&] {
      const Scene scene = positioned(equal_keys(T, 12345, 1.0 / 1024, 5), 4);
      check_nan_is_read<In>(scene, T > 4 ? Way::precise : Way::decode);
    });
  }
  for (int seed = 0; seed < 4; ++seed) {
    for (const bool aligned : {true, false}) {
      check_scene<In>(large_scores(1, 6000, 1.0 / 150, wide ? 1e7 : 500, aligned, seed), seed == 0);
      if (aligned) check_scene<In>(large_scores(1, 6000, 1.0 / 150, wide ? 1e7 : 500, true, seed, true), false);
    }
  }
}

// Forward with a tolerance against forward that reads every key.
template <typename In>
void check_heads(Arrays<In>& all, Arrays<In>& some, const std::string& name, const char* what) {
  all.call.tolerance = 0, some.call.tolerance = 0.02;
  forward(all.call, all.results);
  forward(some.call, some.results);
  double most = -kInf;
  for (std::size_t i = 0; i < all.row_max.size(); ++i) {
    const double lse = double(all.row_max[i]) + double(all.log_sum[i]);
    most = larger_or_nan(most, -std::expm1(double(some.row_max[i]) + double(some.log_sum[i]) - lse));
  }
  check(most <= 0.02 + kRounding<In>, name, what);
}

// Query heads that read the same keys, of all scores 0, each flat on one side and steep on the other: every head and
// side has a bound of its own.
template <typename In>
void check_heads_that_share_keys() {
  const Case c{1, 2, 1, 60, 12000, 8, 1, false, false, {6000}};
  Inputs x = draw(c, sizeof(In) == 2);
  std::fill(x.q.begin(), x.q.end(), 0);
  x.left = {1.0 / 1024, 4}, x.right = {4, 1.0 / 1024};
  on_every_target([&] {
    Arrays<In> all(c, x), some(c, x);
    check_heads(all, some, describe(c, Type<In>::name), "heads that share keys lose no more than they may");
  });
}

// A key head of zeros beside one with far keys that outweigh their distance, by an entry beyond whole vectors: each has
// a bound of its own. So have two batch rows, where the query of the first sees none of the far keys.
template <typename In>
void check_heads_of_other_lengths(bool in_batch) {
  Case c{1, 2, 2, 1, 3000, 13, 1};
  if (in_batch) c.B = 2, c.H = c.G = 1;
  Inputs x = draw(c, sizeof(In) == 2);
  if (in_batch) x.query_range = {c.S - 100, c.S, 0, c.S};
  std::fill(x.q.begin(), x.q.end(), 0), std::fill(x.k.begin(), x.k.end(), 0);
  for (const std::int64_t h : {0, 1}) x.q[h * c.D + c.D - 1] = 8;
  for (std::int64_t s = c.S; s < c.S + 64; ++s) x.k[s * c.D + c.D - 1] = 8;
  x.left = {1.0 / 256, 1.0 / 256};
  on_every_target([&] {
    for (const bool bounded : {false, true}) {
      Arrays<In> all(c, x), some(c, x);
      for (Arrays<In>* arrays : {&all, &some}) {
        arrays->call.precise = false;
        arrays->call.key_bound = bounded ? arrays->bound.data() : nullptr;
      }
      check_heads(all, some, describe(c, Type<In>::name) + (bounded ? " bounded" : ""),
                  "heads of other lengths lose no more than they may");
    }
  });
}

// Few queries read no further than they must, but for some blocks: with all keys alike, and a bound on them, values
// beyond that are NaN do not show.
template <typename In>
void check_far_keys_are_not_read(const Scene& scene) {
  on_every_target([&] {
    SceneCall<In> c(scene, Way::decode_bounded);
    const double tolerance = scene.two_sides() ? scene.tolerance / 2 : scene.tolerance, slope = 1.0 / 128;
    const double near = -std::expm1(-slope * 4 * kBlockKeys);  // of the keys to one side, those that are read at once
    const auto reach = static_cast<std::int64_t>(-std::log(tolerance * near) / slope) + 4 * kBlockKeys;
    std::int64_t num_unread = 0;
    for (std::int64_t s = 0; s < scene.S; ++s) {
      if (s >= scene.start - reach && s < scene.start + scene.T + reach) continue;
      c.v[s] = narrow<In>(kNan);
      ++num_unread;
    }
    c.call.tolerance = scene.tolerance;
    forward(c.call, c.results);
    const std::string name = std::string(target()) + " " + Type<In>::name + " " + scene.name;
    check(num_unread > scene.S / 4, name, "there are far keys");
    check(std::all_of(c.out.begin(), c.out.end(), [](auto x) { return std::isfinite(x); }), name,
          "few queries do not read far keys");
  });
}

// Keys that stand at their positions are read as far as where they are counted: also where the last of them is alone in
// its block, and near enough to be read if it were more than one.
template <typename In>
void check_positioned_keys_are_read_as_counted() {
  Scene scene = both_sides(equal_keys(60, 3009, 1.0 / 8, 0), 1.0 / 8);
  scene.start = 2837;
  scene.tolerance = 1e-6;
  on_every_target([&] {
    SceneCall<In> counted(scene, Way::precise), at_positions(positioned(scene, 1), Way::precise);
    for (SceneCall<In>* c : {&counted, &at_positions}) {
      c->call.tolerance = scene.tolerance;
      forward(c->call, c->results);
    }
    const std::string name = std::string(target()) + " " + Type<In>::name + " positioned as counted";
    check(counted.visited[1] == 1, name, "the last key is not read");
    check(at_positions.visited == counted.visited, name, "the same blocks are read");
  });
}

// A row that sees no key loses none: it does not keep its tile reading.
template <typename In>
void check_rows_without_keys_let_their_tile_stop() {
  Case c{1, 1, 1, 48, 3000, 8, 8};
  c.window = 0;
  Inputs x = draw(c, true);
  x.left = {1};
  for (std::int64_t row = 0; row < c.T; ++row) x.query_range[row * 2] = 5, x.query_range[row * 2 + 1] = row ? 5 : c.S;
  on_every_target([&] {
    Arrays<In> a(c, x);
    forward(a.call, a.results);
    check(a.visited[0] < 8, describe(c, Type<In>::name), "rows without keys let their tile stop");
  });
}

}  // namespace

void test_what_is_left_out() {
  check_rows_without_keys_let_their_tile_stop<float>();
  check_rows_without_keys_let_their_tile_stop<Brain>();
  check_heads_that_share_keys<float>();
  check_heads_that_share_keys<Brain>();
  for (const bool in_batch : {false, true}) {
    check_heads_of_other_lengths<float>(in_batch);
    check_heads_of_other_lengths<double>(in_batch);
    check_heads_of_other_lengths<Brain>(in_batch);
  }
  for (const std::int64_t T : {1, 3}) {
    for (const Scene& scene : {equal_keys(T, 3000, 1.0 / 128, 3), mirrored(equal_keys(T, 3000, 1.0 / 128, 3)),
                               both_sides(equal_keys(T, 6000, 1.0 / 128, 3), 1.0 / 128)}) {
      check_far_keys_are_not_read<float>(scene);
      check_far_keys_are_not_read<Half>(positioned(scene, 1));
      check_far_keys_are_not_read<double>(scene);
      check_far_keys_are_not_read<Brain>(positioned(scene, 1));
    }
  }
  check_positioned_keys_are_read_as_counted<float>();
  check_positioned_keys_are_read_as_counted<double>();
  check_positioned_keys_are_read_as_counted<Half>();
  check_positioned_keys_are_read_as_counted<Brain>();
  check_scenes<float>();
  check_scenes<double>();
  check_scenes<Half>();
  check_scenes<Brain>();
}

}  // namespace linbias::testing
