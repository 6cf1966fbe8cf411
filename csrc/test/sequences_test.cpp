// Sequences of lengths of their own in one call: each is as it is alone by the definition, whether its keys lie end to
// end or in pages; and of pages that no query reaches nothing is read.
#include "attention_test.h"

namespace linbias::testing {
namespace {

struct Length {
  std::int64_t T, S;
};

// Sequences by the definition, and as one call: rows before heads, end to end.
template <typename In>
struct Several {
  using W = typename Type<In>::Wide;
  std::vector<Case> cases;
  std::vector<Inputs> inputs;
  std::vector<Truth> truths;
  std::vector<In> q, k, v;
  std::vector<W> left, right, dout, dlse, out, row_max, log_sum, dq, dk, dv, dleft, dright, norms, bounds;
  std::vector<std::int64_t> query_offsets = {0}, key_offsets = {0}, key_range, query_start, query_range, own_key;
  std::vector<std::int32_t> visited, table, key_counts;
  Call call;
  Sequences sequences;
  Forward results;
  Backward gradients;

  Several(const Case& like, const std::vector<Length>& lengths) {
    std::vector<double> rows[5];  // of q, k, v, dout, dlse
    for (const Length length : lengths) {
      Case c = like;
      c.T = length.T, c.S = length.S;
      Inputs x = draw(c, sizeof(In) == 2);
      for (std::vector<double>* slopes : {&x.left, &x.right})  // each has others
        std::rotate(slopes->begin(), slopes->begin() + std::int64_t(cases.size()) % c.H, slopes->end());
      cases.push_back(c);
      truths.push_back(define(c, x));
      append_rows(x.q, c.H, c.T, c.D, rows[0]);
      append_rows(x.k, c.G, c.S, c.D, rows[1]);
      append_rows(x.v, c.G, c.S, c.E, rows[2]);
      append_rows(x.dout, c.H, c.T, c.E, rows[3]);
      append_rows(x.dlse, c.H, c.T, 1, rows[4]);
      for (std::int64_t i = 0; i < c.H; ++i) {
        left.push_back(static_cast<W>(x.left[i]));
        right.push_back(static_cast<W>(x.right[i]));
      }
      for (std::int64_t g = 0; g < c.G; ++g) {
        double bound = 0;
        for (std::int64_t s = 0; s < c.S; ++s) bound = std::max(bound, norm_of(x, g * c.S + s, c.D));
        bounds.push_back(static_cast<W>(bound));
      }
      key_range.insert(key_range.end(), x.key_range.begin(), x.key_range.end());
      query_start.push_back(start_of(c, x, 0));
      query_range.insert(query_range.end(), x.query_range.begin(), x.query_range.end());
      if (c.own) append_rows(x.own_key, c.H, c.T, 1, own_key);
      query_offsets.push_back(query_offsets.back() + c.T);
      key_offsets.push_back(key_offsets.back() + c.S);
      key_counts.push_back(static_cast<std::int32_t>(c.S));
      inputs.push_back(std::move(x));
    }
    for (const double x : rows[0]) q.push_back(narrow<In>(x));
    for (const double x : rows[1]) k.push_back(narrow<In>(x));
    for (const double x : rows[2]) v.push_back(narrow<In>(x));
    dout.assign(rows[3].begin(), rows[3].end()), dlse.assign(rows[4].begin(), rows[4].end());
    const W nan = static_cast<W>(kNan);
    const std::int64_t T = query_offsets.back(), S = key_offsets.back(), count = std::int64_t(lengths.size());
    const std::int64_t tiles = 2 * (T / kTileRows + count);
    out.assign(dout.size(), nan), row_max.assign(dlse.size(), nan), log_sum.assign(dlse.size(), nan);
    dq.assign(q.size(), nan), dk.assign(k.size(), nan), dv.assign(v.size(), nan);
    dleft.assign(left.size(), nan), dright.assign(left.size(), nan);
    visited.assign(like.H * tiles * 2, -1);

    call.dtype = Type<In>::dtype;
    call.B = 1, call.H = like.H, call.G = like.G, call.T = T, call.S = S, call.D = like.D, call.E = like.E;
    call.q = {q.data(), 0, like.D, like.H * like.D};
    call.k = {k.data(), 0, like.D, like.G * like.D};
    call.v = {v.data(), 0, like.E, like.G * like.E};
    call.left = left.data();
    call.right = like.causal ? nullptr : right.data();
    call.key_range = like.ranges ? key_range.data() : nullptr;
    call.query_start = like.starts.empty() ? nullptr : query_start.data();
    call.query_range = query_range.empty() ? nullptr : query_range.data();
    call.own_key = like.own ? own_key.data() : nullptr;
    call.scale = 1 / std::sqrt(static_cast<double>(like.D));
    call.tolerance = sizeof(W) == 4 ? 1e-7 : 1e-16;
    call.num_threads = like.threads;
    call.precise = true;
    sequences.count = count;
    sequences.query_offsets = query_offsets.data(), sequences.key_offsets = key_offsets.data();
    results = {out.data(), row_max.data(), log_sum.data(), visited.data(), tiles};
    gradients = {dout.data(), dlse.data(), results, dq.data(), dk.data(), dv.data(), dleft.data(), dright.data()};
  }

  static double norm_of(const Inputs& x, std::int64_t row, std::int64_t D) {
    double square = 0;
    for (std::int64_t d = 0; d < D; ++d) square += std::pow(x.k[row * D + d], 2);
    return std::sqrt(square) * 1.001;
  }

  // [heads, count, size] to the rows [count, heads, size].
  template <typename X>
  static void append_rows(const std::vector<X>& from, std::int64_t heads, std::int64_t count, std::int64_t size,
                          std::vector<X>& to) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const auto at = from.begin() + (h * count + i) * size;
        to.insert(to.end(), at, at + size);
      }
    }
  }

  // Rows of sequence i of a result, [heads, count, size] as the definition has them.
  static std::vector<W> alone(const std::vector<W>& from, std::int64_t first, std::int64_t heads, std::int64_t count,
                              std::int64_t size) {
    std::vector<W> to;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < count; ++i) {
        const auto at = from.begin() + ((first + i) * heads + h) * size;
        to.insert(to.end(), at, at + size);
      }
    }
    return to;
  }

  std::string name(std::size_t i, const char* what) const { return describe(cases[i], Type<In>::name) + what; }

  void compare_forward(const char* what, double step, double step_of_out) const {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      auto lse = alone(row_max, query_offsets[i], c.H, c.T, 1);
      const auto log_of_sum = alone(log_sum, query_offsets[i], c.H, c.T, 1);
      for (std::size_t j = 0; j < lse.size(); ++j) lse[j] += log_of_sum[j];
      compare("out", name(i, what), alone(out, query_offsets[i], c.H, c.T, c.E), truths[i].out, step_of_out);
      compare("lse", name(i, what), lse, truths[i].lse, step);
    }
  }

  void compare_backward(double step, double step_of_slopes) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      const Truth& truth = truths[i];
      compare("dq", name(i, " packed"), alone(dq, query_offsets[i], c.H, c.T, c.D), truth.dq, step);
      compare("dk", name(i, " packed"), alone(dk, key_offsets[i], c.G, c.S, c.D), truth.dk, step);
      compare("dv", name(i, " packed"), alone(dv, key_offsets[i], c.G, c.S, c.E), truth.dv, step);
      std::vector<W> of_left, of_right;
      for (std::int64_t h = 0; h < c.H; ++h) {  // a hidden side has no gradient
        const std::size_t at = i * std::size_t(c.H) + std::size_t(h);
        of_left.push_back(std::isinf(left[at]) ? static_cast<W>(truth.dleft[h]) : dleft[at]);
        const bool hidden = c.causal || std::isinf(right[at]);
        of_right.push_back(hidden ? static_cast<W>(truth.dright[h]) : dright[at]);
      }
      compare("dleft", name(i, " packed"), of_left, truth.dleft, step_of_slopes);
      compare("dright", name(i, " packed"), of_right, truth.dright, step_of_slopes);
    }
  }

  // Move the keys to pages in no order, with NaN where no key is: between pages, and behind the last of a sequence.
  void to_pages(std::int64_t page_keys) {
    std::int64_t row = 1, used = 0;
    for (const Case& c : cases) {
      const std::int64_t pages = (c.S + page_keys - 1) / page_keys;
      row = std::max(row, pages), used += pages;
    }
    const std::int64_t num_pages = 2 * used + 1;
    std::vector<std::int32_t> free(num_pages);
    for (std::int64_t i = 0; i < num_pages; ++i) free[i] = static_cast<std::int32_t>(i);
    std::mt19937 random(3);
    std::shuffle(free.begin(), free.end(), random);
    const std::int64_t G = call.G, D = call.D, E = call.E;
    std::vector<In> keys(num_pages * page_keys * G * D, narrow<In>(kNan)),
        values(num_pages * page_keys * G * E, narrow<In>(kNan));
    table.assign(cases.size() * row, 1 << 30);  // clamped where a kernel should look
    norms.assign(num_pages * G, static_cast<W>(kNan));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      for (std::int64_t s = 0; s < cases[i].S; ++s) {
        std::int32_t& page = table[i * row + s / page_keys];
        if (s % page_keys == 0) page = free.back(), free.pop_back();
        for (std::int64_t g = 0; g < G; ++g) {
          const std::int64_t from = (key_offsets[i] + s) * G + g, to = (page * page_keys + s % page_keys) * G + g;
          std::copy_n(k.begin() + from * D, D, keys.begin() + to * D);
          std::copy_n(v.begin() + from * E, E, values.begin() + to * E);
          const W own = static_cast<W>(norm_of(inputs[i], g * cases[i].S + s, D));
          W& norm = norms[page * G + g];
          norm = s % page_keys == 0 ? own : std::max(norm, own);
        }
      }
    }
    k = std::move(keys), v = std::move(values);
    call.k = {k.data(), page_keys * G * D, D, G * D};
    call.v = {v.data(), page_keys * G * E, E, G * E};
    call.pages = table.data(), call.pages_row = row, call.page_keys = page_keys, call.num_pages = num_pages;
    sequences.key_offsets = nullptr, sequences.key_counts = key_counts.data();
    results.visited = visited.data();
  }

  // Overwrite all keys and values of sequence i before key `end`, in pages.
  void poison(std::size_t i, std::int64_t end) {
    for (std::int64_t s = 0; s < end; ++s) {
      const std::int64_t row = table[i * call.pages_row + s / call.page_keys] * call.page_keys + s % call.page_keys;
      std::fill_n(k.begin() + row * call.G * call.D, call.G * call.D, narrow<In>(kNan));
      std::fill_n(v.begin() + row * call.G * call.E, call.G * call.E, narrow<In>(kNan));
    }
  }
};

template <typename In>
void run(const Case& like, const std::vector<Length>& lengths) {
  constexpr bool brain = std::is_same_v<In, Brain>;
  const double step = sizeof(typename Type<In>::Wide) == 8 ? 1e-13 : 1e-5;
  const double of_two = brain ? 0x1p-15 : step, of_one = brain ? 0x1p-7 : step;
  const bool in_pairs = std::strstr(target(), "amx") || std::strstr(target(), "bf16");
  Several<In> several(like, lengths);
  for (const bool bounded : {false, true}) {
    several.call.key_bound = bounded ? several.bounds.data() : nullptr;
    forward(several.call, several.sequences, several.results);
    several.call.key_bound = nullptr;
    backward(several.call, several.sequences, several.gradients);
    several.compare_forward(bounded ? " bounded" : " packed", step, of_two);
    several.compare_backward(!brain ? step : in_pairs ? 0x1p-8 : 0x1p-15, of_two);
  }
  for (const std::int64_t page_keys : {1, 16, 100, 128}) {
    Several<In> paged = several;  // whose addresses are the old ones, but for those of pages
    paged.to_pages(page_keys);
    paged.results = {paged.out.data(), paged.row_max.data(), paged.log_sum.data(), paged.visited.data(),
                     several.results.visited_tiles};
    for (const bool precise : {true, false}) {
      for (const bool bounded : {true, false}) {
        paged.call.precise = precise;
        paged.sequences.page_norms = bounded ? paged.norms.data() : nullptr;
        forward(paged.call, paged.sequences, paged.results);
        paged.compare_forward(" in pages", step, precise ? of_two : of_one);
      }
    }
  }
}

// Steep heads reach few keys of a long cache: what lies beyond is not read, whether one token is new or many.
template <typename In>
void test_what_is_out_of_reach_is_not_read() {
  Case c{1, 2, 1, 0, 0, 16, 8};
  on_every_target([&] {
    Several<In> several(c, {{1, 3000}, {5, 3000}, {60, 3000}, {3, 2000}});
    for (std::size_t i = 0; i < several.left.size(); ++i) several.left[i] = i % 2 ? 2 : 1;
    for (std::size_t i = 0; i < several.cases.size(); ++i) {
      std::fill(several.inputs[i].left.begin(), several.inputs[i].left.end(), 1);
      several.inputs[i].left[1] = 2;
      several.truths[i] = define(several.cases[i], several.inputs[i]);
    }
    several.to_pages(16);
    for (std::size_t i = 0; i < several.cases.size(); ++i) several.poison(i, several.cases[i].S - 500);
    several.call.precise = false;
    several.sequences.page_norms = several.norms.data();
    forward(several.call, several.sequences, several.results);
    several.compare_forward(" far pages poisoned", 1e-5, std::is_same_v<In, Brain> ? 0x1p-7 : 1e-5);
  });
}

// Keys turn against the query up to some distance, and beyond it they point its way: what a bound on keys alone allows.
// What is left out for it holds at most the tolerance, and with the far keys far enough it is left out.
void test_keys_that_only_a_bound_knows_of() {
  constexpr std::int64_t T = 8, S = 4096, D = 4;
  constexpr double kSlope = 0.05, kProduct = 20, kTolerance = 1e-2;
  std::vector<double> q(T * D), k(S * D), v(S), out(T), row_max(T), log_sum(T);
  std::vector<std::int32_t> visited(2);
  const double slope = kSlope, bound = 1;
  for (std::int64_t t = 0; t < T; ++t) q[t * D] = kProduct;
  Call call;
  call.dtype = DType::float64;
  call.B = call.H = call.G = call.E = 1, call.T = T, call.S = S, call.D = D;
  call.q = {q.data(), T * D, T * D, D}, call.k = {k.data(), S * D, S * D, D}, call.v = {v.data(), S, S, 1};
  call.left = &slope;
  call.key_bound = &bound;
  call.tolerance = kTolerance;
  on_every_target([&] {
    double most = 0;
    for (std::int64_t near = 400; near < 1400; near += 8) {
      for (std::int64_t s = 0; s < S; ++s) k[s * D] = s < S - near ? 1 : -1;
      const Forward results = {out.data(), row_max.data(), log_sum.data(), visited.data(), 1};
      forward(call, results);
      for (std::int64_t t = 0; t < T; ++t) {
        double sum = 0;
        for (std::int64_t s = 0; s <= S - T + t; ++s)
          sum += std::exp(kProduct * k[s * D] - kSlope * double(S - T + t - s) - kProduct);
        const double loss = 1 - std::exp(row_max[t] + log_sum[t] - kProduct) / sum;
        check(loss <= kTolerance, target(), "what is out of reach holds at most the tolerance");
        most = std::max(most, loss);
      }
    }
    check(most > 1e-6, target(), "something is out of reach");
  });
}

// One page of long keys far behind short ones, along the last query alone: a bound of all pages and all queries finds
// it.
void test_the_longest_key_and_query_count() {
  constexpr std::int64_t S = 3000, D = 4, kPage = 16, kPages = (S + kPage - 1) / kPage, kFar = 150;
  std::vector<double> k(kPages * kPage * D), v(kPages * kPage), norms(kPages), out(8), row_max(8), log_sum(8);
  std::vector<std::int32_t> table(kPages), visited(4), lengths = {S};
  for (std::int64_t page = 0; page < kPages; ++page) table[page] = static_cast<std::int32_t>(page);
  for (std::int64_t s = kFar * kPage; s < (kFar + 1) * kPage; ++s) k[s * D] = 1;
  norms[kFar] = 1.001;
  const double slope = 0.05;
  for (const std::int64_t T : {1, 8}) {
    std::vector<double> q(T * D);
    q[(T - 1) * D] = 40;
    const std::vector<std::int64_t> offsets = {0, T};
    Call call;
    call.dtype = DType::float64;
    call.B = call.H = call.G = call.E = 1, call.T = T, call.S = S, call.D = D;
    call.q = {q.data(), 0, D, D}, call.k = {k.data(), kPage * D, D, D}, call.v = {v.data(), kPage, 1, 1};
    call.left = &slope, call.tolerance = 1e-9;
    call.pages = table.data(), call.pages_row = call.num_pages = kPages, call.page_keys = kPage;
    Sequences sequences{1, offsets.data(), nullptr, lengths.data(), norms.data()};
    on_every_target([&] {
      forward(call, sequences, {out.data(), row_max.data(), log_sum.data(), visited.data(), 2});
      double sum = 0;
      for (std::int64_t s = 0; s < S; ++s) sum += std::exp(40 * k[s * D] - slope * double(S - 1 - s));
      const double lse = row_max[T - 1] + log_sum[T - 1];
      check(std::abs(lse - std::log(sum)) < 1e-6, target(), "long keys far away are found");
    });
  }
}

// What `visited` tells of a call whose range of keys was narrowed is all that was read.
void test_visited_in_a_narrower_range() {
  constexpr std::int64_t T = 8, S = 1000, D = 4;
  std::vector<double> q(T * D, 0.5), k(S * D, 0.5), v(S), out(T), row_max(T), log_sum(T);
  std::vector<std::int32_t> visited(2);
  const double slope = 0.5, bound = 1;
  Call call;
  call.dtype = DType::float64;
  call.B = call.H = call.G = call.E = 1, call.T = T, call.S = S, call.D = D;
  call.q = {q.data(), T * D, T * D, D}, call.k = {k.data(), S * D, S * D, D}, call.v = {v.data(), S, S, 1};
  call.left = &slope, call.key_bound = &bound, call.tolerance = 1e-9;
  on_every_target([&] {
    std::fill(k.begin(), k.end(), 0.5);
    const Forward results = {out.data(), row_max.data(), log_sum.data(), visited.data(), 1};
    forward(call, results);
    const std::int64_t first = ((S - T) / kBlockKeys - visited[0]) * kBlockKeys;
    check(first > S / 2, target(), "the range is narrower");
    std::fill(k.begin(), k.begin() + first * D, kNan);
    forward(call, results);
    check(!std::isnan(row_max[0] + log_sum[0] + out[0]), target(), "nothing before what visited tells is read");
  });
}

// New tokens go to the rows that their slots say, in any order, and nowhere for slots of no page; norms begin again
// with a page.
void test_writing_to_pages() {
  constexpr std::int64_t T = 5, G = 2, D = 3, E = 2, kPage = 4, kPages = 3;
  const std::vector<std::int64_t> slots = {5, kPage * kPages, -1, 4, 9};
  std::vector<double> k(T * G * D, 2), v(T * G * E, 3), norms(kPages * G, 7);
  v[E] = kNan;  // of head 1 of token 0
  Call call;
  call.dtype = DType::float64;
  call.B = 1, call.H = call.G = G, call.T = T, call.D = D, call.E = E, call.page_keys = kPage, call.num_pages = kPages;
  on_every_target([&] {
    std::vector<double> keys(kPages * kPage * G * D, -1), values(kPages * kPage * G * E, -1), bound = norms;
    call.k = {keys.data(), kPage * G * D, D, G * D}, call.v = {values.data(), kPage * G * E, E, G * E};
    write(call, {{k.data(), 0, D, G * D}, {v.data(), 0, E, G * E}, bound.data()}, slots.data());
    for (std::int64_t row = 0; row < kPages * kPage; ++row) {
      const bool written = row == 4 || row == 5 || row == 9;
      check(keys[row * G * D] == (written ? 2 : -1), target(), "keys where slots say");
      check(values[row * G * E] == (written ? 3 : -1), target(), "values where slots say");
    }
    const double length = std::sqrt(12);
    check(bound[0] == 7 && bound[4] == 7, target(), "norms of pages without a longer key stay");
    check(bound[2] >= length && bound[2] < length * 1.001, target(), "norms begin again with a page");
    check(std::isnan(bound[3]), target(), "no norm beside a value that is not finite");
  });
}

}  // namespace

void test_sequences() {
  const std::vector<Length> some = {{0, 0}, {5, 5}, {1, 130}, {0, 9}, {7, 0}, {3, 200}, {70, 300}, {49, 49}};
  std::vector<Case> cases = {
      {1, 4, 2, 0, 0, 13, 5},
      {1, 6, 3, 0, 0, 16, 33, false},
      {1, 6, 6, 0, 0, 40, 40, false, true, {}, 0, 5},
      {1, 4, 1, 0, 0, 32, 32, true, false, {40}, 0, 1},
  };
  Case windowed{1, 4, 2, 0, 0, 32, 20, false}, scattered{1, 2, 2, 0, 0, 8, 8, false}, own{1, 4, 2, 0, 0, 16, 16, false};
  windowed.window = 20, scattered.scattered = true, own.own = true;
  cases.insert(cases.end(), {windowed, scattered, own});
  on_every_target([&] {
    for (const Case& c : cases) {
      run<float>(c, some);
      run<double>(c, some);
      run<Brain>(c, some);
    }
    run<Half>(cases[0], some);
    run<float>(cases[0], {{400, 900}, {1, 20}, {2, 700}});  // one that is most of the work
    run<Brain>(cases[0], {});
  });
  test_what_is_out_of_reach_is_not_read<float>();
  test_what_is_out_of_reach_is_not_read<double>();
  test_what_is_out_of_reach_is_not_read<Brain>();
  test_keys_that_only_a_bound_knows_of();
  test_the_longest_key_and_query_count();
  test_visited_in_a_narrower_range();
  test_writing_to_pages();
}

}  // namespace linbias::testing
