// The core against a double loop, without Python: every type, sizes around the vector width, ranges and starts of every
// kind, few queries and many, one and many threads. certificate_test.cpp adds what the core may leave out,
// parallel_test.cpp how tasks are shared out, points_test.cpp attention over points, precision_test.cpp in how many
// terms blocks are computed, sequences_test.cpp sequences of lengths of their own, in pages too.
//
//     attention_test             on every target that runs here
//     attention_test avx2 ...    on these
//
// `make core-test` builds and runs it, `make sanitize` under sanitizers.
#include "attention_test.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

using namespace linbias;
using namespace linbias::testing;

namespace {

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

// Where bfloat16 is multiplied in pairs, forward rounds weights to two of them, 2^-16, or to one, 2^-8, and backward
// rounds weights and gradients of scores to one.
template <typename In>
constexpr double kStep = std::is_same_v<In, double> ? 1e-13 : 1e-5;
template <typename In>
double gradient_step() {
  if (!std::is_same_v<In, Brain>) return kStep<In>;
  return std::strstr(target(), "amx") || std::strstr(target(), "bf16") ? 0x1p-8 : 0x1p-15;
}

// Threads of a caller's own, now more than a call asks for, now fewer.
void team_of_two(void (*work)(void*), void* data, unsigned, unsigned) {
  std::thread other(work, data);
  work(data);
  other.join();
}

// Forward and backward; and forward of a result that will not be differentiated, which may take other ways.
template <typename In>
void run(const Case& c, const Inputs& x, const Truth& truth) {
  constexpr bool brain = std::is_same_v<In, Brain>;
  const double step = kStep<In>, of_two = brain ? 0x1p-15 : step, of_one = brain ? 0x1p-7 : step;
  const double of_gradients = gradient_step<In>();
  const std::string name = describe(c, Type<In>::name);

  Arrays<In> a(c, x);
  a.run();
  compare_forward(name, a, truth, step, of_two);
  compare("dq", name, a.dq, truth.dq, of_gradients);
  compare("dk", name, a.dk, truth.dk, of_gradients);
  compare("dv", name, a.dv, truth.dv, of_gradients);
  compare("dpositions", name, a.dx, truth.dx, of_two);
  compare("dquery_positions", name, a.dxq, truth.dxq, of_two);

  Arrays<In> again(c, x);
  again.call.num_threads = c.threads % 3 + 1;
  again.call.team = team_of_two;
  again.run();
  const bool same = again.out == a.out && again.row_max == a.row_max && again.log_sum == a.log_sum &&
                    again.visited == a.visited && again.dq == a.dq && again.dk == a.dk && again.dv == a.dv &&
                    again.dleft == a.dleft && again.dright == a.dright && again.dx == a.dx && again.dxq == a.dxq;
  check(same, name, "the same bits with other threads");

  Arrays<In> lean(c, x);  // nobody asks how slopes and positions matter: other blocks may take fewer terms
  lean.gradients.dleft = lean.gradients.dright = nullptr;
  lean.gradients.dpositions = lean.gradients.dquery_positions = nullptr;
  lean.run();
  compare("dq alone", name, lean.dq, truth.dq, of_gradients);
  compare("dk alone", name, lean.dk, truth.dk, of_gradients);
  compare("dv alone", name, lean.dv, truth.dv, of_gradients);

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

// Two types that hold the same numbers.
template <typename In, typename Other>
void run_on_every_target(const Case& c) {
  const Inputs x = draw(c, sizeof(In) == 2);
  const Truth truth = define(c, x);
  on_every_target([&] {
    run<In>(c, x, truth);
    run<Other>(c, x, truth);
  });
}

void test_the_definition() {
  const Case cases[] = {
      {1, 1, 1, 1, 1, 1, 1},
      {2, 3, 1, 7, 11, 5, 3},
      {1, 2, 2, 15, 16, 16, 17},
      {1, 2, 1, 49, 65, 31, 33, false, false, {}, 0, 3},
      {2, 6, 2, 48, 64, 64, 64, false},
      {1, 6, 6, 300, 700, 24, 40, false, false, {}, 0, 5},
      // Calls of float32 that a matrix unit takes on, too: with a certificate, dropout and few heads; without one,
      // many.
      {1, 6, 6, 300, 700, 40, 33, false, false, {}, 0, 5},
      {1, 4, 2, 200, 330, 32, 65, true, true, {}, 0.3, 3},
      {1, 17, 17, 193, 192, 32, 32, true, false, {}, 0, 2},
      // Heads enough to be packed one by one: without a certificate and with one, sizes of whole vectors and others.
      {3, 12, 6, 52, 70, 16, 16, true, false, {}, 0, 2},
      {3, 6, 6, 49, 67, 31, 33, false, true, {}, 0, 2},
      {2, 9, 9, 50, 330, 16, 5, true, true, {}, 0, 2},
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
      // and one of a single block: among the keys, before and behind them
      {2, 6, 2, 1, 64, 64, 32},
      {2, 6, 2, 2, 41, 13, 70, false, false, {-30, 45}},
      // few queries that are not decoded: dropout, heads and values of more than 256 entries
      {1, 2, 2, 3, 130, 16, 16, false, false, {}, 0.4},
      {1, 2, 1, 2, 70, 300, 20},
      {1, 2, 1, 2, 70, 20, 300},
  };
  for (const Case& c : cases) {
    run_on_every_target<float, double>(c);
    run_on_every_target<Half, Brain>(c);
  }
}

// Queries that have ranges of keys of their own: near theirs, and anywhere.
void test_the_definition_in_ranges_of_queries() {
  for (const std::int64_t window : {-1, 9, 100}) {
    Case cases[] = {
        {2, 6, 3, 61, 107, 13, 5, false, false},
        {1, 6, 6, 300, 700, 64, 40, true, false, {}, 0, 5},
        {2, 6, 2, 260, 700, 40, 33, false, false, {200, 440}},
        {2, 6, 3, 203, 517, 33, 37, false, true, {100, 350}},
        {2, 12, 6, 52, 330, 16, 16, false, true, {400, -20}},
        {1, 4, 2, 200, 330, 32, 65, true, false, {}, 0.3, 3},
        {2, 6, 2, 3, 2100, 13, 70, false, false, {1000, 2097}},
        {2, 6, 2, 1, 1500, 64, 32},
        {2, 6, 3, 2, 400, 8, 24, true, true, {200, 433}},
        {1, 2, 1, 0, 5, 4, 4},
        {1, 2, 1, 5, 0, 4, 4},
    };
    for (Case& c : cases) {
      c.window = window;
      c.scattered = window < 0;
      run_on_every_target<float, double>(c);
      run_on_every_target<Half, Brain>(c);
      c.standing = Standing::bursts;
      if (window == 9) run_on_every_target<float, double>(c);
    }
  }
}

// Keys that stand at given positions, through every way of the core.
void test_the_definition_at_given_positions() {
  for (const Standing standing :
       {Standing::gaps, Standing::equal, Standing::resets, Standing::bursts, Standing::unix_times}) {
    Case cases[] = {
        {2, 6, 3, 61, 107, 13, 5, false, false},
        {1, 6, 6, 300, 700, 24, 40, true, false, {}, 0, 5},
        {1, 6, 2, 260, 700, 40, 33, false, false, {200}},
        {2, 6, 3, 203, 517, 33, 37, false, true, {100, 350}},
        {2, 12, 6, 52, 330, 16, 16, false, true, {400, -20}},  // beyond the keys, and before
        {1, 4, 2, 200, 330, 32, 65, true, false, {}, 0.3, 3},
        {2, 6, 2, 3, 2100, 13, 70, false, false, {1000, 2097}},
        {2, 6, 3, 2, 400, 8, 24, true, true, {200, 433}},
        {1, 2, 1, 0, 5, 4, 4},
        {1, 2, 1, 5, 0, 4, 4},
    };
    for (Case& c : cases) {
      c.standing = standing;
      c.between = standing == Standing::equal || standing == Standing::bursts;
      run_on_every_target<float, double>(c);
      run_on_every_target<Half, Brain>(c);
    }
  }
}

// Queries that stand at keys of their own, apart from each other, several at one, and before and behind all keys.
void test_the_definition_at_own_keys() {
  for (const Standing standing : {Standing::counted, Standing::gaps, Standing::bursts}) {
    Case cases[] = {
        {2, 6, 3, 61, 107, 13, 5, false, false},
        {1, 6, 6, 300, 700, 40, 33, false, true, {}, 0, 5},
        {1, 6, 2, 60, 1500, 40, 33, true},
        {2, 6, 3, 203, 60, 33, 37, false, true},
        {2, 12, 6, 52, 330, 16, 16},
        {1, 4, 2, 60, 330, 32, 65, false, false, {}, 0.3, 3},
        {2, 6, 2, 3, 2100, 13, 70, false},
        {1, 2, 1, 0, 5, 4, 4},
        {1, 2, 1, 5, 0, 4, 4},
    };
    for (Case& c : cases) {
      c.own = true;
      c.standing = standing;
      c.between = standing == Standing::bursts;
      run_on_every_target<float, double>(c);
      run_on_every_target<Half, Brain>(c);
    }
  }
}

// The weight of a query's own key whose number is the threshold stays.
void test_dropout_at_its_threshold() {
  Case c{1, 1, 1, 200, 200, 32, 32};
  std::int64_t at = 100;
  while (drawn(0, at, at) >> 28 != 5) ++at;  // about a third is dropped
  c.dropout = drawn(0, at, at) / 4294967296.0;
  run_on_every_target<float, double>(c);
  run_on_every_target<Half, Brain>(c);
}

// Ranges, starts, counts and numbers of threads that make no sense: the sanitizers watch, and what makes sense is
// right.
template <typename In, typename Other>
void test_what_a_caller_may_not_break() {
  constexpr std::int64_t kLow = std::numeric_limits<std::int64_t>::min(),
                         kHigh = std::numeric_limits<std::int64_t>::max();
  Case wild{2, 6, 3, 53, 157, 6, 7, false, true, {}, 0, 2, true};
  run_on_every_target<In, Other>(wild);
  wild.T = 2;
  run_on_every_target<In, Other>(wild);
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

// Keys and distances that float32 cannot count: the last 3,001 of 2^24 + 2,001 keys, seen from near and from afar. The
// others are hidden, or too far, and have no memory.
template <typename In>
void test_positions_beyond_float32() {
  constexpr std::int64_t kHidden = (std::int64_t{1} << 24) - 1000;
  const std::int64_t near = 2901, afar = -kHidden, furthest = -kLargestStart;
  for (const std::int64_t start : {near, afar, furthest}) {
    for (const std::int64_t T : {3, 53}) {
      const Case c{1, 2, 2, T, 3001, 4, 1, start == near, false, {start}};
      Inputs x = draw(c, sizeof(In) == 2);
      x.left = start == near ? std::vector<double>{0.3, 0.05} : std::vector<double>{kInf, kInf};
      x.right = start == furthest ? std::vector<double>{1e-8, 0} : std::vector<double>{1e-6, 1e-7};
      const Truth truth = define(c, x);
      on_every_target([&] {
        for (const bool precise : {true, false}) {
          Arrays<In> a(c, x);
          const auto moved = [](const void* data, std::int64_t elements) {  // as if kHidden rows came before
            return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) - elements * sizeof(In));
          };
          const std::int64_t ranges[] = {kHidden, kHidden + c.S, kHidden, kHidden + c.S}, moved_start = kHidden + start;
          a.call.S = kHidden + c.S;
          a.call.k.data = moved(a.k.data(), kHidden * c.D);
          a.call.v.data = moved(a.v.data(), kHidden * c.E);
          a.call.key_range = ranges;
          a.call.query_start = &moved_start;
          a.call.precise = precise;
          if (start == near && T == 3 && !precise) {  // not hidden, but left unread
            a.call.key_range = nullptr;
            a.call.key_bound = a.bound.data();
          }
          forward(a.call, a.results);
          compare_forward(describe(c, Type<In>::name) + " beyond 2^24", a, truth, kStep<In>,
                          std::is_same_v<In, Brain> ? precise ? 0x1p-15 : 0x1p-7 : kStep<In>);
        }
      });
    }
  }
}

// Queries that stand further off than positions are counted stand where counting ends.
template <typename In>
void test_starts_beyond_counting() {
  for (const std::int64_t start : {INT64_MAX, INT64_MIN}) {
    const Case c{1, 2, 2, 3, 70, 8, 8, false, false, {start}};
    Inputs x = draw(c, sizeof(In) == 2);
    x.left = x.right = {1e-8, 0};
    const Truth truth = define(c, x);
    on_every_target([&] {
      Arrays<In> a(c, x);
      a.call.precise = true;
      forward(a.call, a.results);
      compare_forward(describe(c, Type<In>::name) + " beyond counting", a, truth, kStep<In>,
                      std::is_same_v<In, Brain> ? 0x1p-15 : kStep<In>);
    });
  }
}

// Scores so large that float32 tells only some of them apart: the weights of a row still add up to 1, in backward too.
// Queries that stand far off, slopes up to the largest, large products.
template <typename In>
void test_large_scores() {
  struct Large {
    std::int64_t start;
    double slope, product;
  };
  const Large larges[] = {{901'000'000, 2.5, 1}, {-998'000'123, 0.84, 1}, {1 << 30, 5, 1},   {300, 1e9, 1},
                          {300, 1e34, 1},        {300, 3e35, 1},          {20'000, 0.83, 1}, {100, 0.1, 0x1p25},
                          {100, 1, 0x1p50},      {90, 3e36, 0x1p50}};
  constexpr bool kBrain = std::is_same_v<In, Brain>;
  for (const std::int64_t T : {3, 53}) {
    for (const Large& large : larges) {
      const Case c{1, 1, 1, T, 200, 16, 8, false, false, {large.start}};
      Inputs x = draw(c, true);
      x.left = x.right = {large.slope};
      for (double& value : x.q) value *= large.product;
      for (std::vector<double>* ones : {&x.v, &x.dout}) std::fill(ones->begin(), ones->end(), 1);
      const Truth truth = define(c, x);
      on_every_target([&] {
        for (const bool precise : {true, false}) {
          Arrays<In> a(c, x);
          a.call.precise = precise;
          forward(a.call, a.results);
          const std::string name = describe(c, Type<In>::name) + " slope " + std::to_string(large.slope);
          bool ones = true, same_lse = true;
          for (const auto out : a.out) ones = ones && std::abs(out - 1) < (kBrain ? 0x1p-7 : 1e-5);
          for (std::size_t i = 0; i < truth.lse.size(); ++i) {
            const double lse = double(a.row_max[i]) + double(a.log_sum[i]);
            same_lse = same_lse && std::abs(lse - truth.lse[i]) <= kStep<In> * (1 + std::abs(truth.lse[i]));
          }
          check(ones, name, "large scores: out");
          check(same_lse, name, "large scores: lse");
          if (!precise) continue;  // such results are not differentiated
          backward(a.call, a.gradients);
          double weights = 0;
          for (const auto gradient : a.dv) weights += gradient;
          check(std::abs(weights / double(a.out.size()) - 1) < (kBrain ? 0x1p-7 : 1e-5), name, "large scores: dv");
          const auto finite = [](auto y) { return std::isfinite(y); };
          check(std::all_of(a.dk.begin(), a.dk.end(), finite), name, "large scores: dk");
        }
      });
    }
  }
}

// A scale so small that products would overflow before it.
template <typename In>
void test_small_scales() {
  for (const std::int64_t T : {3, 53}) {
    const Case c{1, 1, 1, T, 200, 16, 8, false, false, {150}};
    Inputs x = draw(c, true);
    x.left = x.right = {0.05};
    const Truth truth = define(c, x);
    for (double& value : x.q) value *= 0x1p84;
    for (double& value : x.k) value *= 0x1p44;
    on_every_target([&] {
      Arrays<In> a(c, x);
      a.call.scale *= 0x1p-128;
      a.run();
      const std::string name = describe(c, Type<In>::name) + " small scale";
      compare_forward(name, a, truth, kStep<In>, kStep<In>);
      for (auto& gradient : a.dq) gradient *= static_cast<typename Arrays<In>::W>(0x1p84);
      for (auto& gradient : a.dk) gradient *= static_cast<typename Arrays<In>::W>(0x1p44);
      compare("dq", name, a.dq, truth.dq, gradient_step<In>());
      compare("dk", name, a.dk, truth.dk, gradient_step<In>());
    });
  }
}

// Values far from 0: what backward takes differences from is then much larger than they are, and its rounding must not
// add up over the distances.
void test_slope_gradients_of_large_values() {
  const Case c{1, 2, 2, 200, 700, 8, 8, false, false, {300}};
  Inputs x = draw(c, true);
  x.left = x.right = {0.03, 0.01};
  for (double& value : x.v) value += 1000;
  const Truth truth = define(c, x);
  on_every_target([&] {
    Arrays<float> a(c, x);
    a.run();
    const std::string name = describe(c, "float32") + " large values";
    compare("dleft", name, a.dleft, truth.dleft, 1e-4);
    compare("dright", name, a.dright, truth.dright, 1e-4);
  });
}

// Keys of a head alike, and large, but for a far one so long that no bound holds, across the queries: blocks are left
// out once their scores are known. Of gradients the one of lse alone is left: of queries, and of their positions where
// all keys stand on one side.
template <typename In>
void test_what_keys_share_leaves_no_gradient() {
  constexpr double kGiven = 0x1p-10;  // the gradient of lse
  const Case cases[] = {{1, 1, 1, 150, 2000, 8, 8},
                        {1, 1, 1, 150, 2000, 8, 8, false, false, {1000}},
                        {1, 4, 2, 150, 2000, 8, 8, true, true, {1250}},
                        {1, 1, 1, 150, 2000, 8, 8, false, true, {-900}, 0.2},
                        {.B = 1, .H = 1, .G = 1, .T = 150, .S = 2000, .D = 8, .E = 8, .standing = Standing::gaps},
                        {.B = 1, .H = 1, .G = 1, .T = 150, .S = 2000, .D = 8, .E = 8, .scattered = true},
                        {.B = 1, .H = 1, .G = 1, .T = 150, .S = 2000, .D = 8, .E = 8, .window = 9}};
  for (const Case& c : cases) {
    Inputs x = draw(c, true);
    std::fill(x.left.begin(), x.left.end(), 1.0 / 64), x.right = x.left;
    std::fill(x.q.begin(), x.q.end(), 0);
    for (std::int64_t row = 0; row < c.H * c.T; ++row) x.q[row * c.D] = 1;
    for (std::int64_t g = 0; g < c.G; ++g) {
      const auto key = [&](std::int64_t s) { return x.k.begin() + (g * c.S + s) * c.D; };
      std::fill(key(0), key(c.S), 8192 * (g + 1));
      const Range range = range_of(c, x, 0, g);
      key(c.causal ? range.first : range.end - 1)[1] = 1e6;
    }
    std::fill(x.dlse.begin(), x.dlse.end(), kGiven);
    if (c.window >= 0) {  // no row sees the key that it stands at, nor others that are longer
      for (std::size_t i = 0; i < x.query_range.size(); ++i) x.query_range[i] = i % 2 ? 1500 : 100;
      std::fill(x.k.begin() + 1500 * c.D, x.k.end(), 0x1p20);
    }
    on_every_target([&] {
      Arrays<In> a(c, x);
      a.call.tolerance = 0.02;
      a.run();
      double of_queries = 0, of_positions = 0;
      for (std::size_t i = 0; i < a.dq.size(); ++i) {
        const std::size_t row = i / c.D, g = row / c.T / (c.H / c.G);
        const double given = std::isinf(a.log_sum[row]) ? 0 : kGiven;
        of_queries = larger_or_nan(of_queries, std::abs(a.dq[i] - a.call.scale * given * double(8192 * (g + 1))));
        if (!a.dxq.empty()) of_positions = larger_or_nan(of_positions, std::abs(a.dxq[row] + given * x.left[0]));
      }
      check(of_queries < 0.2, describe(c, Type<In>::name), "dq of keys alike");
      if (c.causal) check(of_positions < 2e-7, describe(c, Type<In>::name), "dxq of keys that pull alike");
    });
  }
}

// One key and one query: the output is the value, also where it is one of the smallest numbers.
void test_numbers_of_float16() {
  const Case c{1, 1, 1, 1, 1, 1, 253};
  const Inputs x = draw(c, true);
  on_every_target([&] {
    Arrays<Half> a(c, x);
    for (int i = 0; i < c.E; ++i) a.v[i] = {static_cast<std::uint16_t>(i * 125)};  // up to 0x7b0f
    forward(a.call, a.results);
    bool same = true;
    for (int bits = 0, i = 0; i < c.E; bits = ++i * 125) {
      const int exponent = bits >> 10, fraction = bits & 1023;
      same = same && a.out[i] == (exponent ? std::ldexp(1024.0 + fraction, exponent - 25) : std::ldexp(fraction, -24));
    }
    check(same, describe(c, "float16"), "out is the value");
  });
}

// Queries that see one key each: the output is the value, also where it is one of the largest float32 numbers, or as
// small as its last digit allows a matrix unit, which splits it and knows no subnormal numbers.
void test_numbers_of_float32() {
  Case c{1, 1, 1, 200, 200, 32, 40, false};
  Inputs x = draw(c, false);
  x.left = x.right = {kInf};
  std::mt19937 random(3);
  for (std::size_t i = 0; i < x.v.size(); ++i) {
    const int exponent = static_cast<int>(i % 231) - 103;  // up to 127
    x.v[i] = std::ldexp((i % 2 ? -1.0 : 1.0) * (0x800000 + static_cast<int>(random() >> 9)), exponent - 23);
  }
  x.v[5] = std::numeric_limits<float>::max();
  on_every_target([&] {
    Arrays<float> a(c, x);
    forward(a.call, a.results);
    check(a.out == a.v, describe(c, "float32"), "out is the value");
  });
}

// Queries that see one key each, and entries of 1 among zeros: each product is then one number, and must keep its
// digits, which a matrix unit multiplies in three parts.
void test_products_keep_every_digit() {
  const Case c{1, 1, 1, 200, 200, 32, 32, false};
  for (const bool in_queries : {true, false}) {
    Inputs x = draw(c, false);
    x.left = x.right = {kInf};
    std::mt19937 random(5);
    std::vector<double>&fine = in_queries ? x.q : x.k, &ones = in_queries ? x.k : x.q;
    for (std::vector<double>* numbers : {&fine, &x.dout, &x.dlse}) {
      for (double& y : *numbers)
        y = (random() % 2 ? -1 : 1) * std::ldexp(0x800000 + static_cast<int>(random() >> 9), -23);
    }
    for (std::int64_t t = 0; t < c.T; ++t) {
      for (std::int64_t d = 0; d < c.D; ++d) ones[t * c.D + d] = d == t % c.D;
      if (t % 2) x.dlse[t] = 0.5;
    }
    on_every_target([&] {
      Arrays<float> a(c, x);
      a.call.scale = 1;
      a.run();
      const std::string name = describe(c, "float32") + (in_queries ? " digits in q" : " digits in k");
      check(a.dv == a.dout, name, "dv is dout");
      std::fill(a.dout.begin(), a.dout.end(), 0);  // the gradient of a score is now that of lse
      backward(a.call, a.gradients);
      const std::vector<float>&of_ones = in_queries ? a.dq : a.dk, &of_fine = in_queries ? a.dk : a.dq;
      bool same_lse = true, same_ones = true, same_fine = true;
      for (std::int64_t t = 0; t < c.T; ++t) {
        const std::int64_t one = t * c.D + t % c.D;
        same_lse = same_lse && a.row_max[t] == fine[one] && a.log_sum[t] == 0;
        for (std::int64_t at = t * c.D; at < (t + 1) * c.D; ++at) {
          same_ones = same_ones && of_ones[at] == (at == one ? x.dlse[t] : 0);
          same_fine = same_fine && (t % 2 == 0 || of_fine[at] == 0.5 * fine[at]);
        }
      }
      check(same_lse, name, "lse is the entry that meets a 1");
      check(same_ones, name, "the gradient of the side of ones is that of lse");
      check(same_fine, name, "the gradient of the other side is half of the ones");

      if (!in_queries) return;
      Arrays<Brain> b(c, x);
      forward(b.call, b.results);
      backward(b.call, b.gradients);
      check(b.dv == b.dout, describe(c, "bfloat16"), "dv is dout");
    });
  }
}

// Weights of float32 have all their digits in products, too: with values of 1 they add up to 1.
void test_weights_keep_every_digit() {
  const Case c{1, 1, 1, 200, 200, 32, 32, false};
  Inputs x = draw(c, false);
  x.left = x.right = {0.7};
  for (double& y : x.q) y /= 4;
  for (std::vector<double>* ones : {&x.v, &x.dout}) std::fill(ones->begin(), ones->end(), 1);
  const Truth truth = define(c, x);
  on_every_target([&] {
    Arrays<float> a(c, x);
    a.run();
    compare("out", describe(c, "float32") + " values of 1", a.out, truth.out, 6e-7);
    compare("dv", describe(c, "float32") + " values of 1", a.dv, truth.dv, 6e-7);
  });
}

// A value that is not finite shows in every row that sees it, however little it weighs; few rows are decoded.
template <typename In>
void test_values_that_are_not_finite_show() {
  for (const std::int64_t T : {2, 60}) {
    const Case c{1, 1, 1, T, 700, 19, 19, false, false, {300}};
    const Inputs x = draw(c, sizeof(In) == 2);
    on_every_target([&] {
      for (int place = 0; place < 4; ++place) {
        const std::int64_t key = place < 2 ? 7 : 690, entry = place % 2 ? 18 : 1;
        Arrays<In> a(c, x);
        a.left[0] = a.right[0] = 0.5f;
        a.v[key * c.E + entry] = narrow<In>(kNan);
        for (const bool precise : {true, false}) {
          a.call.precise = precise;
          forward(a.call, a.results);
          bool shows = true;
          for (std::int64_t t = 0; t < T; ++t) shows = shows && std::isnan(a.out[t * c.E + entry]);
          check(shows, describe(c, Type<In>::name), "a value that is NaN shows");
        }
      }
    });
  }
}

// NaN anywhere in what a head is given shows in the gradients of its slopes, and in no other head's; keys and values
// that no query sees have no gradient, whatever the others hold.
template <typename In>
void test_nan_shows() {
  using W = typename Type<In>::Wide;
  Case c{1, 2, 2, 60, 300, 5, 7, false, false, {40}};
  const Inputs x = draw(c, sizeof(In) == 2);
  const char* const places[] = {"q", "k", "v", "dout", "dlse"};
  on_every_target([&] {
    for (int place = 0; place < 10; ++place) {
      c.causal = place >= 5;
      Arrays<In> a(c, x);
      for (int h = 0; h < 2; ++h) a.left[h] = W(0.1), a.right[h] = W(0.2);
      const std::string name = describe(c, Type<In>::name) + " NaN in " + places[place % 5];
      const In nan = narrow<In>(kNan);
      if (place % 5 == 0) a.q[30 * c.D + 1] = nan;  // of head 0, as all of these
      if (place % 5 == 1) a.k[60 * c.D + 1] = nan;
      if (place % 5 == 2) a.v[60 * c.E + 1] = nan;
      if (place % 5 == 3) a.dout[30 * c.E + 1] = W(kNan);
      if (place % 5 == 4) a.dlse[30] = W(kNan);
      a.run();
      check(std::isnan(a.dleft[0]) && std::isfinite(a.dleft[1]), name, "dleft");
      check(c.causal ? a.dright[0] == 0 : std::isnan(a.dright[0]), name, "dright");
      check(std::isfinite(a.dright[1]), name, "dright of the other head");
      if (!c.causal) continue;
      const auto is_zero = [](W y) { return y == 0; };  // keys from 100 on are seen by nobody
      check(std::all_of(a.dk.begin() + 100 * c.D, a.dk.begin() + 300 * c.D, is_zero), name, "dk of unseen keys");
      check(std::all_of(a.dv.begin() + 100 * c.E, a.dv.begin() + 300 * c.E, is_zero), name, "dv of unseen keys");
    }
  });
}

// Without a gradient of lse it counts as zeros, and those of slopes need not be asked for.
template <typename In>
void test_gradients_may_be_missing() {
  Case c{1, 2, 1, 100, 130, 8, 9, false};
  Inputs x = draw(c, sizeof(In) == 2);
  std::fill(x.dlse.begin(), x.dlse.end(), 0);
  on_every_target([&] {
    Arrays<In> a(c, x), b(c, x);
    b.gradients.dlse = b.gradients.dleft = b.gradients.dright = nullptr;
    a.run(), b.run();
    check(a.dq == b.dq && a.dk == b.dk && a.dv == b.dv, describe(c, Type<In>::name), "without dlse and dslopes");
  });
}

// Rows with gaps between them, which hold nothing; few of them are decoded, too.
template <typename In>
void test_rows_may_lie_apart() {
  for (const Case& c : {Case{1, 4, 2, 100, 330, 16, 16, false}, Case{1, 4, 2, 3, 330, 19, 19, false}}) {
    const Inputs x = draw(c, sizeof(In) == 2);
    on_every_target([&] {
      Arrays<In> a(c, x), b(c, x);
      for (const auto& [array, rows] : {std::pair{&b.call.q, &b.q}, {&b.call.k, &b.k}, {&b.call.v, &b.v}}) {
        constexpr std::int64_t kGap = 8;
        std::vector<In> apart(rows->size() / c.D * (c.D + kGap), narrow<In>(kNan));
        for (std::size_t i = 0; i < rows->size(); ++i) apart[i + i / c.D * kGap] = (*rows)[i];
        *rows = apart;
        const std::int64_t heads = array->batch / array->head;
        array->row = c.D + kGap;
        array->head = array->head / c.D * array->row;
        array->batch = heads * array->head;
        array->data = rows->data();
      }
      a.run(), b.run();
      const std::string name = describe(c, Type<In>::name);
      check(a.out == b.out && a.dq == b.dq && a.dk == b.dk && a.dv == b.dv, name, "rows apart");
      for (Arrays<In>* arrays : {&a, &b}) {
        arrays->call.precise = false;
        forward(arrays->call, arrays->results);
      }
      check(a.out == b.out, name, "rows apart, once");
    });
  }
}

// Slopes that take every score to -inf are as good as no key: nothing is NaN.
template <typename In>
void test_rows_whose_scores_are_all_infinite() {
  using W = typename Type<In>::Wide;
  for (const std::int64_t T : {3, 60}) {
    const Case c{1, 1, 1, T, 900, 8, 8, false, false, {-500}};
    const Inputs x = draw(c, sizeof(In) == 2);
    on_every_target([&] {
      Arrays<In> a(c, x);
      a.right[0] = std::numeric_limits<W>::max();
      a.call.tolerance = 0;  // every key is read
      a.call.precise = false;
      forward(a.call, a.results);
      const auto is_zero = [](W y) { return y == 0; };
      const auto is_lowest = [](W y) { return y == -std::numeric_limits<W>::infinity(); };
      const std::string name = describe(c, Type<In>::name) + " scores of -inf";
      check(std::all_of(a.out.begin(), a.out.end(), is_zero), name, "out");
      check(std::all_of(a.log_sum.begin(), a.log_sum.end(), is_lowest), name, "lse");
    });
  }
}

// New tokens are written to the last rows of keys and values, and raise the bound; then it is the call that follows.
template <typename In>
void test_new_tokens_go_into_the_cache() {
  using W = typename Type<In>::Wide;
  const auto same_bits = [](const std::vector<In>& a, const std::vector<In>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(In)) == 0;
  };
  for (const Case& c : {Case{1, 4, 2, 1, 70, 16, 64}, Case{2, 4, 4, 3, 131, 37, 5}, Case{1, 2, 1, 4, 4, 64, 32}}) {
    Inputs x = draw(c, sizeof(In) == 2);
    for (std::int64_t head = 1; head <= c.B * c.G; ++head) x.k[head * c.S * c.D - 1] = 7;  // the last is the longest
    const std::string name = describe(c, Type<In>::name);
    on_every_target([&] {
      Arrays<In> whole(c, x), grown(c, x);
      std::vector<In> k, v;
      const auto take_last_rows = [&](std::vector<In>& from, std::vector<In>& to, std::int64_t size) {
        for (std::int64_t head = 0; head < c.B * c.G; ++head) {
          const auto last = from.begin() + ((head + 1) * c.S - c.T) * size;
          to.insert(to.end(), last, last + c.T * size);
          std::fill_n(last, c.T * size, narrow<In>(kNan));
        }
      };
      take_last_rows(grown.k, k, c.D);
      take_last_rows(grown.v, v, c.E);
      std::vector<double> all(grown.bound.size(), 0);  // the largest norms, of earlier keys and of all
      for (std::int64_t head = 0; head < c.B * c.G; ++head) {
        double earlier = 0;
        for (std::int64_t s = 0; s < c.S; ++s) {
          double square = 0;
          for (std::int64_t d = 0; d < c.D; ++d) square += std::pow(x.k[(head * c.S + s) * c.D + d], 2);
          all[head] = std::max(all[head], std::sqrt(square));
          if (s < c.S - c.T) earlier = all[head];
        }
        grown.bound[head] = static_cast<W>(earlier * 1.0001);
      }
      whole.call.precise = grown.call.precise = false;
      grown.call.key_bound = grown.bound.data();
      grown.results.row_max = grown.results.log_sum = grown.results.visited = nullptr;
      const NewTokens tokens{
          {k.data(), c.G * c.T * c.D, c.T * c.D, c.D}, {v.data(), c.G * c.T * c.E, c.T * c.E, c.E}, grown.bound.data()};
      forward(grown.call, tokens, grown.results);
      for (std::int64_t head = 0; head < c.B * c.G; ++head) {
        const double raised = static_cast<double>(grown.bound[head]);
        check(raised >= all[head] && raised <= all[head] * 1.001, name, "a bound of all keys");
      }
      check(same_bits(grown.k, whole.k) && same_bits(grown.v, whole.v), name, "keys and values of all tokens");
      whole.call.key_bound = grown.bound.data();
      forward(whole.call, whole.results);
      check(grown.out == whole.out, name, "new tokens attend to all");

      k[0] = narrow<In>(kNan);  // of head 0
      forward(grown.call, tokens, grown.results);
      const bool others = std::all_of(grown.bound.begin() + 1, grown.bound.end(), [](W y) { return std::isfinite(y); });
      check(std::isnan(grown.bound[0]) && others, name, "no bound of a key that is not finite");
    });
  }
}

void test_several_threads_may_call_at_once_and_be_interrupted() {
  const Case c{1, 2, 1, 97, 131, 8, 9, false};
  const Inputs x = draw(c, true);
  const Truth truth = define(c, x);
  // As a signal would, at a key pressed in a notebook.
  signal(SIGUSR1, [](int) {});
  std::atomic<bool> done{false};
  std::thread interrupting([&] {
    while (!done) {
      kill(getpid(), SIGUSR1);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  });
  on_every_target([&] {
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) {
      callers.emplace_back([&] {
        run<float>(c, x, truth);
        run<Brain>(c, x, truth);
      });
    }
    for (std::thread& caller : callers) caller.join();
  });
  done = true;
  interrupting.join();
}

}  // namespace

int main(int count, char** names) {
  const std::string here = std::string(",") + targets() + ",";
  for (int i = 1; i < count; ++i) {
    chosen_targets.emplace_back(names[i]);
    if (here.find("," + chosen_targets.back() + ",") != std::string::npos) continue;
    std::printf("attention_test: target must be one of %s, got %s\n", targets(), names[i]);
    return 2;
  }
  for (std::size_t at = 1; count == 1 && at < here.size(); at = here.find(',', at) + 1) {
    chosen_targets.push_back(here.substr(at, here.find(',', at) - at));
  }
  for (void (*test)() : {
           test_tasks_are_shared_out,
           test_the_definition,
           test_the_definition_at_given_positions,
           test_the_definition_at_own_keys,
           test_the_definition_in_ranges_of_queries,
           test_dropout_at_its_threshold,
           test_what_a_caller_may_not_break<float, double>,
           test_what_a_caller_may_not_break<Brain, Half>,
           test_visited_says_which_keys_were_read<float>,
           test_visited_says_which_keys_were_read<Brain>,
           test_positions_beyond_float32<float>,
           test_positions_beyond_float32<double>,
           test_positions_beyond_float32<Brain>,
           test_starts_beyond_counting<float>,
           test_starts_beyond_counting<double>,
           test_starts_beyond_counting<Brain>,
           test_large_scores<float>,
           test_large_scores<Brain>,
           test_small_scales<float>,
           test_small_scales<Brain>,
           test_slope_gradients_of_large_values,
           test_numbers_of_float16,
           test_numbers_of_float32,
           test_products_keep_every_digit,
           test_weights_keep_every_digit,
           test_values_that_are_not_finite_show<float>,
           test_values_that_are_not_finite_show<double>,
           test_values_that_are_not_finite_show<Half>,
           test_values_that_are_not_finite_show<Brain>,
           test_what_keys_share_leaves_no_gradient<float>,
           test_what_keys_share_leaves_no_gradient<double>,
           test_nan_shows<float>,
           test_nan_shows<double>,
           test_nan_shows<Brain>,
           test_gradients_may_be_missing<float>,
           test_gradients_may_be_missing<Brain>,
           test_rows_may_lie_apart<float>,
           test_rows_may_lie_apart<double>,
           test_rows_may_lie_apart<Brain>,
           test_rows_whose_scores_are_all_infinite<float>,
           test_rows_whose_scores_are_all_infinite<double>,
           test_rows_whose_scores_are_all_infinite<Brain>,
           test_new_tokens_go_into_the_cache<float>,
           test_new_tokens_go_into_the_cache<double>,
           test_new_tokens_go_into_the_cache<Half>,
           test_new_tokens_go_into_the_cache<Brain>,
           test_points,
           test_precision_by_distance,
           test_sequences,
           test_several_threads_may_call_at_once_and_be_interrupted,
           test_what_is_left_out,
       }) {
    test();
    if (failures) break;  // the first reason is the clearest
  }
  std::printf("%d checks on %d of the targets %s, %d failed\n", checks.load(), int(chosen_targets.size()), targets(),
              failures.load());
  return failures || chosen_targets.empty() ? 1 : 0;
}
