// Few queries against a long cache: nothing is packed, keys and values are read where they lie, and memory is asked for
// them before they are needed: between two tokens a model reads all its weights, so that no cache holds them any more.
// Each query row first visits its nearest blocks, one by one. What the certificate then still asks for is cut into
// slices of fixed length, which threads share out (few heads may have long windows) and whose sums are merged in order.
// The certificate needs a bound on the norms of the keys that are not read: the caller's (call.key_bound), or else all
// keys and values are read once to find one, which costs what it takes to read them.
#pragma once

#include "kernel/bounds-inl.h"
#include "kernel/head-inl.h"
#include "kernel/positions-inl.h"
#include "parallel.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr int64_t kFewQueries = 4, kNearBlocks = 4, kSliceBlocks = 16;

// What a type's bits look like: those of |x| grow with |x|, and reach kInfinity where x is not finite.
template <typename In>
struct Format;
template <typename B, B infinity>
struct FormatOf {
  using Bits = B;
  typedef B Vector __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  static constexpr Bits kInfinity = infinity, kSize = static_cast<B>(~B{0}) >> 1;
  static constexpr int kLanes = LINBIAS_VECTOR_BYTES / sizeof(B);
};
template <>
struct Format<float> : FormatOf<uint32_t, 0x7f800000> {};
template <>
struct Format<double> : FormatOf<uint64_t, 0x7ff0000000000000> {};
template <>
struct Format<Float16> : FormatOf<uint16_t, 0x7c00> {};
template <>
struct Format<Bfloat16> : FormatOf<uint16_t, 0x7f80> {};

template <typename In>
LINBIAS_INLINE typename Format<In>::Bits size_bits(In x) {
  typename Format<In>::Bits bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits & Format<In>::kSize;
}

template <typename V, typename In>
LINBIAS_INLINE V larger_size(V most, const In* from) {
  V bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  bits &= Format<In>::kSize;
  return bits > most ? bits : most;
}

// total + the squares of Format<In>::kLanes numbers, in any lanes.
template <typename V, typename In>
LINBIAS_INLINE V add_squares(V total, const In* from) {
  constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(total[0]));
  for (int i = 0; i < Format<In>::kLanes; i += kLanes) {
    const V x = load_wide(from + i);
    total += x * x;
  }
  return total;
}

#if defined(__AVX512BF16__)
LINBIAS_INLINE Vector<float> add_squares(Vector<float> total, const Bfloat16* from) {
  __m512bh x;
  __builtin_memcpy(&x, from, sizeof x);
  return (Vector<float>)_mm512_dpbf16_ps((__m512)total, x, x);
}
#endif

template <typename W, typename In>
struct DecodeTask {
  const Call& call;
  const Forward& results;
  W* reach[2];  // [B * G, blocks] each, without key_bound: the largest |k| of a block and all beyond it
  int64_t num_blocks;
  W slack;
  W* sums;  // [rows + slices, 2 + E]: row_max, row_sum and the unnormalised output of each row, then of each slice
  int64_t* begin;   // [rows, 2]: the first block beyond the near ones on each side
  int64_t* end;     // [rows, 2]: the first block outwards that the certificate leaves out
  int64_t* slices;  // [rows * 2 + 1]: where the slices of a row and side begin
  const PageRoom<In>& room;
  static constexpr int kLanes = Simd<W>::kLanes;
  static constexpr int64_t kBlocksAtOnce = 16;

  struct Row {
    int64_t b, h, first, num_keys, order, head;  // order: from key `first`; head: of the keys, b * G + g
    int64_t first_seen;                          // the row sees the keys [first_seen, num_keys)
    RowsOf<In> keys, values;
    In *key_room, *value_room;  // of the worker
    alignas(64) W q[kLargestSize];
    alignas(64) W acc[kLargestSize];
    alignas(64) W score[kKeys];
    W norm, row_max, row_sum, slope[2];
    bool hidden[2];
    const double* positions;  // of the keys, and where the row stands; null: they are counted
    double query_position;
  };

  int64_t num_rows() const { return call.B * call.H * call.T; }

  void find_keys(int64_t b, int64_t g, int worker, Row& row) const {
    const KeyRange range(call, b, g);
    row.first = range.first;
    row.num_keys = range.count;
    row.first_seen = 0;
    row.head = b * call.G + g;
    row.keys = {&call, &call.k, b, g};
    row.values = {&call, &call.v, b, g};
    row.key_room = room.of_keys(worker);
    row.value_room = room.of_values(worker);
  }

  // The largest |k| of some blocks of one head, NaN where something is not finite.
  static void measure(void* context, int64_t task, int worker) {
    const DecodeTask& self = *static_cast<const DecodeTask*>(context);
    const int64_t tasks = round_up(self.num_blocks, kBlocksAtOnce) / kBlocksAtOnce;
    Row row;
    self.find_keys(task / tasks / self.call.G, task / tasks % self.call.G, worker, row);
    const int64_t from = task % tasks * kBlocksAtOnce;
    for (int64_t block = from; block < smaller_of(from + kBlocksAtOnce, self.num_blocks); ++block) {
      self.reach[kLeft][row.head * self.num_blocks + block] =
          self.is_seen(row, task / tasks / self.call.G, block * kKeys) ? self.largest_norm(row, block * kKeys) : W{0};
    }
  }

  // Whether some query may see a key of the block that begins at `from`.
  bool is_seen(const Row& row, int64_t b, int64_t from) const {
    bool seen = false;
    for (int64_t t = 0; t < call.T; ++t)
      seen |= QueryRange(call, b, t, row.first, row.num_keys).meets(from, from + kKeys);
    return seen;
  }

  // Keys and values a cache line each in turn: twice as fast as some rows of one and then of the other.
  W largest_norm(const Row& row, int64_t from) const {
    constexpr int64_t kStep = Format<In>::kLanes;
    typename Format<In>::Vector most{};  // of the values' sizes
    typename Format<In>::Bits last = 0;
    W largest_square = 0;
    const int64_t count = larger_of(int64_t{0}, smaller_of(kKeys, row.num_keys - from));
    for (int64_t s = row.first + from; s < row.first + from + count; ++s) {
      const In *key = row.keys.at(s), *value = row.values.at(s);
      Vector<W> squares{};
      W square = 0;
      int64_t d = 0, e = 0;
      for (; smaller_of(call.D, call.E) - d >= kStep; d = e += kStep) {
        squares = add_squares(squares, key + d);
        most = larger_size(most, value + e);
      }
      for (; d + kStep <= call.D; d += kStep) squares = add_squares(squares, key + d);
      for (; e + kStep <= call.E; e += kStep) most = larger_size(most, value + e);
      for (; d < call.D; ++d) square += static_cast<W>(widen(key[d])) * static_cast<W>(widen(key[d]));
      for (; e < call.E; ++e) last = size_bits(value[e]) > last ? size_bits(value[e]) : last;
      largest_square = larger_or_nan(largest_square, square + sum<W>(squares));
    }
    W longest = square_root(largest_square);
    if (!is_ordinary(largest_square)) {
      longest = 0;
      for (int64_t s = row.first + from; s < row.first + from + count; ++s)
        longest = larger_or_nan(longest, length_of<W>(row.keys.at(s), call.D, 1));
    }
    for (int64_t j = 0; j < kStep; ++j) last = most[j] > last ? most[j] : last;
    return last < Format<In>::kInfinity ? longest * (1 + slack) : static_cast<W>(__builtin_nan(""));
  }

  void accumulate(int64_t head) const {
    W *left = reach[kLeft] + head * num_blocks, *right = reach[kRight] + head * num_blocks;
    for (int64_t j = num_blocks - 1; j >= 0; --j) {
      right[j] = j + 1 < num_blocks ? larger_or_nan(right[j + 1], left[j]) : left[j];
    }
    for (int64_t j = 1; j < num_blocks; ++j) left[j] = larger_or_nan(left[j - 1], left[j]);
  }

  // Begin with query row `index` of [B, H, T], with nothing visited yet.
  void begin_row(int64_t index, int worker, Row& row) const {
    const int64_t t = index % call.T;
    row.b = index / call.T / call.H;
    row.h = index / call.T % call.H;
    find_keys(row.b, row.h / (call.H / call.G), worker, row);
    row.order = order_of(call, row.b, row.h, t) - row.first;
    const QueryRange range(call, row.b, t, row.first, row.num_keys);
    row.first_seen = range.is_empty() ? 0 : range.first;
    row.num_keys = range.is_empty() ? 0 : range.end;
    row.positions = positions_of(call.positions, row.b, row.h, row.first);
    if (row.positions) row.query_position = *positions_of(call.query_positions, row.b, row.h, t);
    load_query(t, row);
  }

  // Visit the nearest blocks of a row, and find out how far it has to read.
  static void run_near(void* context, int64_t index, int worker) {
    const DecodeTask& self = *static_cast<const DecodeTask*>(context);
    Row row;
    self.begin_row(index, worker, row);
    const int64_t first = row.first_seen / kKeys, blocks = round_up(row.num_keys, kKeys) / kKeys;
    int64_t next[2] = {row.order >= row.first_seen ? smaller_of(row.order / kKeys, blocks - 1) : first - 1, 0};
    next[kRight] = next[kLeft] + 1;
    if (next[kLeft] >= first) {
      self.prefetch_keys(row, next[kLeft]);
      self.visit(next[kLeft], row, next[kLeft] - 1);
      --next[kLeft];
    }
    bool open[2] = {!row.hidden[kLeft] && next[kLeft] >= first, !row.hidden[kRight] && next[kRight] < blocks};
    for (int64_t turn = 0; turn < 2 * kNearBlocks && (open[kLeft] || open[kRight]); ++turn) {
      const Side side = static_cast<Side>(turn % 2);
      if (!open[side]) continue;
      open[side] = !self.is_covered(row, side, next[side]);
      if (!open[side]) continue;
      const int64_t block = next[side];
      next[side] += side == kLeft ? -1 : 1;
      self.visit(block, row, next[side]);
      open[side] = next[side] >= first && next[side] < blocks;
    }
    for (int side = kLeft; side <= kRight; ++side) {
      self.begin[index * 2 + side] = self.end[index * 2 + side] = next[side];
      if (open[side]) self.end[index * 2 + side] = self.find_end(row, static_cast<Side>(side), next[side], blocks);
    }
    self.store_sums(row, index);
  }

  // The first block from `next` outwards that is covered, with all beyond it, or one past the last. Bisection finds a
  // covered one even where rounding makes the bound wobble.
  int64_t find_end(const Row& row, Side side, int64_t next, int64_t blocks) const {
    const int64_t outwards = side == kLeft ? -1 : 1;
    const int64_t first = row.first_seen / kKeys;
    int64_t open = 0, covered = side == kLeft ? next + 1 - first : blocks - next;  // counted from next
    while (covered - open > 1) {
      const int64_t middle = open + (covered - open) / 2;
      (is_covered(row, side, next + outwards * middle) ? covered : open) = middle;
    }
    return next + outwards * covered;
  }

  static void run_slice(void* context, int64_t slice, int worker) {
    const DecodeTask& self = *static_cast<const DecodeTask*>(context);
    int64_t at = 0, above = self.num_rows() * 2;  // slices[at] <= slice < slices[above]
    while (above - at > 1) {
      const int64_t middle = at + (above - at) / 2;
      (self.slices[middle] <= slice ? at : above) = middle;
    }
    Row row;
    self.begin_row(at / 2, worker, row);
    const int64_t outwards = at % 2 == kLeft ? -1 : 1, count = outwards * (self.end[at] - self.begin[at]);
    const int64_t from = (slice - self.slices[at]) * kSliceBlocks;
    const int64_t to = smaller_of(from + kSliceBlocks, count);
    const int64_t first = self.begin[at] + (outwards > 0 ? from : 1 - to);
    self.prefetch_keys(row, first);
    for (int64_t i = 0; i < to - from; ++i)
      self.visit(first + i, row, first + i + 1);  // as they lie: memory is quickest at that
    self.store_sums(row, self.num_rows() + slice);
  }

  void store_sums(const Row& row, int64_t index) const {
    W* to = sums + index * (2 + call.E);
    to[0] = row.row_max;
    to[1] = row.row_sum;
    for (int64_t e = 0; e < call.E; ++e) to[2 + e] = row.acc[e];
  }

  // Merge what the slices of a row found into its near sums, nearest first.
  static void finish(void* context, int64_t index, int) {
    const DecodeTask& self = *static_cast<const DecodeTask*>(context);
    const int64_t E = self.call.E;
    W* row = self.sums + index * (2 + E);
    for (int64_t slice = self.slices[index * 2]; slice < self.slices[index * 2 + 2]; ++slice) {
      const W* other = self.sums + (self.num_rows() + slice) * (2 + E);
      const W high = other[0] > row[0] ? other[0] : row[0], pivot = high == -kInfinity<W> ? W{0} : high;
      const W keep = exponential<W>(broadcast(row[0] - pivot))[0], add = exponential<W>(broadcast(other[0] - pivot))[0];
      row[0] = high;
      for (int64_t i = 1; i < 2 + E; ++i) row[i] = row[i] * keep + other[i] * add;
    }
    const int64_t T = self.call.T, H = self.call.H;
    const int64_t at = query_at(self.call, index / T / H, index / T % H, index % T);
    store_output<W>(self.results, at * E, E, row + 2, 1 / (row[1] == 0 ? W{1} : row[1]));
    if (self.results.row_max) static_cast<W*>(self.results.row_max)[at] = row[0];
    if (self.results.log_sum)
      static_cast<W*>(self.results.log_sum)[at] = static_cast<W>(__builtin_log(static_cast<double>(row[1])));
  }

  void load_query(int64_t t, Row& row) const {
    const In* from = row_of<In>(call.q, row.b, row.h, t);
    W squares = 0;
    for (int64_t d = 0; d < call.D; ++d) {
      row.q[d] = static_cast<W>(widen(from[d])) * static_cast<W>(call.scale);
      squares += row.q[d] * row.q[d];
    }
    for (int64_t e = 0; e < call.E; ++e) row.acc[e] = 0;
    row.norm = length_from(squares, row.q, call.D) * (1 + slack);
    row.row_max = -kInfinity<W>;
    row.row_sum = 0;
    find_slopes(call, row.b, row.h, row.slope, row.hidden);
  }

  // Products of the query with one vector of keys; those after `last` are as the last.
  LINBIAS_INLINE void products(const Row& row, const In* key, int64_t step, int64_t last, W* to) const {
    const auto at = [&](int64_t i, int64_t d) { return key + smaller_of(i, last) * step + d; };
    Vector<W> totals[kLanes] = {};
    int64_t d = 0;
    for (; d + kLanes <= call.D; d += kLanes) {
      const Vector<W> q = load(row.q + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) totals[i] += q * load_wide(at(i, d));
    }
    store<W>(to, sum_of_each(totals));
    for (; d < call.D; ++d) {
      for (int i = 0; i < kLanes; ++i) to[i] += row.q[d] * static_cast<W>(widen(*at(i, d)));
    }
  }

  // How many keys a block has, which need not exist.
  static int64_t count_keys(const Row& row, int64_t block) {
    return block < 0 ? 0 : larger_of(int64_t{0}, smaller_of(kKeys, row.num_keys - block * kKeys));
  }

  // Ask memory for rows of keys or values. The empty instruction is an effect that GCC sees: functions that only ask
  // memory it takes for functions without one, and leaves out.
  static LINBIAS_INLINE void prefetch(const In* from, int64_t count, int64_t stride, int64_t size) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; ++i) {
      const char* row = reinterpret_cast<const char*>(from + i * stride);
      for (int64_t at = 0; at < size * static_cast<int64_t>(sizeof(In)); at += 64) __builtin_prefetch(row + at);
    }
    __asm__ volatile("");
  }

  void prefetch_keys(const Row& row, int64_t block) const {
    const int64_t count = count_keys(row, block), from = row.first + block * kKeys;
    if (count > 0) prefetch(row.keys.at(from), row.keys.in_a_row(from, count), call.k.row, call.D);
  }

  // Add a block to the sums of a row. While its keys are read memory is asked for its values, and after them for the
  // keys of the block that is likely to follow: both blocks whole would crowd each other out of the first cache.
  void visit(int64_t block, Row& row, int64_t following) const {
    const int64_t from = block * kKeys, count = count_keys(row, block);
    int64_t key_step, value_step, i = 0;
    const In* key = row.keys.block(row.first + from, count, call.D, row.key_room, key_step);
    const In* value = row.values.block(row.first + from, count, call.E, row.value_room, value_step);
    for (; i + kLanes <= count; i += kLanes) {
      prefetch(value + i * value_step, kLanes, value_step, call.E);
      products(row, key + i * key_step, key_step, kLanes - 1, row.score + i);
    }
    if (i < count) {
      prefetch(value + i * value_step, count - i, value_step, call.E);
      products(row, key + i * key_step, key_step, count - i - 1, row.score + i);
    }
    prefetch_keys(row, following);
    const W high = add_biases(row, from, count);
    if (high > row.row_max) {
      const W shrink = exponential<W>(broadcast(row.row_max - high))[0];
      row.row_max = high;
      row.row_sum *= shrink;
      for (int64_t e = 0; e < call.E; ++e) row.acc[e] *= shrink;
    }
    const W pivot = row.row_max == -kInfinity<W> ? W{0} : row.row_max;
    Vector<W> total{};
    for (i = 0; i < kKeys; i += kLanes) {
      const Vector<W> weight = exponential<W>(load(row.score + i) - pivot);
      total += weight;
      store<W>(row.score + i, weight);
    }
    row.row_sum += sum<W>(total);
    add_values(row, value, value_step, count);
  }

  // Add the biases to the scores of the keys from `from` on, and return the highest; a key that the row does not see
  // has -infinity.
  LINBIAS_INLINE W add_biases(Row& row, int64_t from, int64_t count) const {
    const int64_t order = row.order - from;
    int64_t first = larger_of(int64_t{0}, row.first_seen - from), end = count;
    if (row.hidden[kLeft]) first = larger_of(first, order);
    if (row.hidden[kRight]) end = smaller_of(end, order + 1);
    alignas(64) W far[kKeys];
    for (int64_t i = 0; row.positions && i < kKeys; ++i)
      far[i] = i < count ? static_cast<W>(__builtin_fabs(row.query_position - row.positions[from + i])) : W{0};
    Vector<W> ramp, highest = broadcast(-kInfinity<W>);
    for (int lane = 0; lane < kLanes; ++lane) ramp[lane] = static_cast<W>(lane);
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const Vector<W> key = ramp + static_cast<W>(i), ahead = key - static_cast<W>(order);
      const Vector<W> slope = ahead > 0 ? broadcast(row.slope[kRight]) : broadcast(row.slope[kLeft]);
      const Vector<W> reach = row.positions ? load(far + i) : larger<W>(ahead, -ahead);
      const Vector<W> score = load(row.score + i) - slope * reach;
      const Vector<W> shown =
          key >= static_cast<W>(first) && key < static_cast<W>(end) ? score : broadcast(-kInfinity<W>);
      store<W>(row.score + i, shown);
      highest = larger<W>(shown, highest);  // NaN is passed over
    }
    return largest<W>(highest)[0];
  }

  LINBIAS_INLINE void add_values(Row& row, const In* value, int64_t step, int64_t count) const {
    int64_t e = 0;
    for (; e + 4 * kLanes <= call.E; e += 4 * kLanes) add_columns<4>(row, value, step, count, e);
    for (; e + 2 * kLanes <= call.E; e += 2 * kLanes) add_columns<2>(row, value, step, count, e);
    for (; e + kLanes <= call.E; e += kLanes) add_columns<1>(row, value, step, count, e);
    for (; e < call.E; ++e) {
      W total = 0;
      for (int64_t i = 0; i < count; ++i) total += static_cast<W>(widen(value[i * step + e])) * row.score[i];
      row.acc[e] += total;
    }
  }

  // Some vectors of the values' columns, from e on: as many sums at a time as hide the time that adding takes.
  template <int kVectors>
  LINBIAS_INLINE void add_columns(Row& row, const In* value, int64_t step, int64_t count, int64_t e) const {
    constexpr int kKeysAtOnce = 8 / kVectors;
    Vector<W> totals[kKeysAtOnce][kVectors] = {};
    const auto add = [&](int at, int64_t i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) totals[at][j] += load_wide(value + i * step + e + j * kLanes) * row.score[i];
    };
    int64_t i = 0;
    for (; i + kKeysAtOnce <= count; i += kKeysAtOnce) {
#pragma GCC unroll 4
      for (int at = 0; at < kKeysAtOnce; ++at) add(at, i + at);
    }
    for (; i < count; ++i) add(0, i);
#pragma GCC unroll 4
    for (int at = 0; at < kKeysAtOnce; ++at) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        W* to = row.acc + e + j * kLanes;
        store<W>(to, load(to) + totals[at][j]);
      }
    }
  }

  // Log of at least the sum of e^(-m |x - x'|) over key x' and all beyond it: of each group of 1, 1, 2, 4, 8 ... keys
  // outwards the nearest stands for all. A scan over the keys would be exact, and cost as much as a short window.
  static double log_sum_outwards(const Row& row, Side side, int64_t key, W m) {
    const int64_t count = side == kLeft ? key + 1 : row.num_keys - key, outwards = side == kLeft ? -1 : 1;
    double total = 0;
    for (int64_t from = 0, size = 1; from < count; from += size, size = from) {
      const double distance = __builtin_fabs(row.positions[key + outwards * from] - row.positions[key]);
      total += static_cast<double>(smaller_of(size, count - from)) * __builtin_exp(-static_cast<double>(m) * distance);
    }
    return __builtin_log(total);
  }

  bool is_covered(const Row& row, Side side, int64_t nearest) const {
    const W m = row.slope[side];
    if (!(m > 0)) return false;
    int64_t key = side == kLeft ? nearest * kKeys + kKeys - 1 : nearest * kKeys;
    if (row.positions) key = nearest_key(side, nearest, row.num_keys);
    const double num_unvisited = static_cast<double>(side == kLeft ? key + 1 : row.num_keys - key);
    const double whole = -__builtin_log(-__builtin_expm1(-static_cast<double>(m))),
                 count = __builtin_log(num_unvisited);
    const double share = __builtin_log(call.right ? call.tolerance / 2 : call.tolerance) - kSumRounding;
    const W bound = call.key_bound ? static_cast<const W*>(call.key_bound)[row.head] * (1 + slack)
                                   : reach[side][row.head * num_blocks + nearest];
    const W distance = row.positions ? static_cast<W>(__builtin_fabs(row.query_position - row.positions[key]))
                                     : static_cast<W>(side == kLeft ? row.order - key : key - row.order);
    const W highest = row.norm * bound * (1 + slack) - m * (1 - slack) * distance;
    const W seen = row.row_max + log_from_below(row.row_sum);
    if (row.positions && !(highest - static_cast<W>(share) <= seen)) return false;  // for one key alone
    double together;
    if (!row.positions) together = whole < count ? whole : count;
    else together = log_sum_outwards(row, side, key, m * (1 - slack));
    return highest + static_cast<W>(together - share) <= seen;
  }
};

template <typename W, typename In>
Status decode_as(const Call& call, const Forward& results) {
  const int64_t num_blocks = round_up(call.S, kKeys) / kKeys, num_heads = call.B * call.G;
  const int64_t num_rows = call.B * call.H * call.T;
  Buffer<W> reach, sums;
  Buffer<int64_t> ends;
  if (!call.key_bound && !reach.allocate(2, num_heads, num_blocks)) return Status::out_of_memory;
  const int64_t most_slices = 2 * (num_blocks / kSliceBlocks + 1);  // of a row
  PageRoom<In> room(call);
  if (!ends.allocate(num_rows + 1, 6) || !sums.allocate(num_rows, 1 + most_slices, 2 + call.E) || !room.allocate(call))
    return Status::out_of_memory;
  DecodeTask<W, In> task{call,
                         results,
                         {reach.data, reach.data + num_heads * num_blocks},
                         num_blocks,
                         slack_of<W>(call.D),
                         sums.data,
                         ends.data,
                         ends.data + num_rows * 2,
                         ends.data + num_rows * 4,
                         room};
  if (!call.key_bound && num_blocks == 1) {
    for (int64_t i = 0; i < 2 * num_heads; ++i) reach.data[i] = kInfinity<W>;  // to find it is to read it
  } else if (!call.key_bound) {
    const int64_t tasks = round_up(num_blocks, task.kBlocksAtOnce) / task.kBlocksAtOnce;
    parallel(call, num_heads * tasks, DecodeTask<W, In>::measure, &task);
    for (int64_t head = 0; head < num_heads; ++head) task.accumulate(head);
  }
  parallel(call, num_rows, DecodeTask<W, In>::run_near, &task);
  task.slices[0] = 0;
  for (int64_t i = 0; i < num_rows * 2; ++i) {
    const int64_t count = i % 2 == kLeft ? task.begin[i] - task.end[i] : task.end[i] - task.begin[i];
    task.slices[i + 1] = task.slices[i] + round_up(count, kSliceBlocks) / kSliceBlocks;
  }
  parallel(call, task.slices[num_rows * 2], DecodeTask<W, In>::run_slice, &task);
  for (int64_t row = 0; row < num_rows; ++row) DecodeTask<W, In>::finish(&task, row, 0);
  return Status::ok;
}

// Write token t of a batch row to row `to` of keys and values, and raise a bound on the norms of keys that may be null;
// it is NaN where a key or value is not finite.
template <typename W, typename In>
void write_token(const Call& call, const NewTokens& tokens, int64_t b, int64_t g, int64_t t, int64_t to_b, int64_t to,
                 W* bound) {
  const In *key = row_of<In>(tokens.k, b, g, t), *value = row_of<In>(tokens.v, b, g, t);
  const auto copy = [](const In* from, const In* there, int64_t size) {
    __builtin_memcpy(const_cast<In*>(there), from, static_cast<size_t>(size) * sizeof(In));
  };
  copy(key, row_of<In>(call.k, to_b, g, to), call.D);
  copy(value, row_of<In>(call.v, to_b, g, to), call.E);
  if (!bound) return;
  Vector<W> squares{};
  W square = 0, nothing = 0;
  int64_t d = 0;
  for (; d + Format<In>::kLanes <= call.D; d += Format<In>::kLanes) squares = add_squares(squares, key + d);
  for (; d < call.D; ++d) square += static_cast<W>(widen(key[d])) * static_cast<W>(widen(key[d]));
  for (int64_t e = 0; e < call.E; ++e) nothing += static_cast<W>(widen(value[e])) * 0;
  const W length = length_from(square + sum<W>(squares), key, call.D) * (1 + slack_of<W>(call.D));
  *bound = larger_or_nan(*bound, length + nothing);
}

// Write new tokens to the last rows of the keys and values of a call, and raise the bound on the norms of its keys.
// They are few: on the calling thread.
template <typename W, typename In>
void append_as(const Call& call, const NewTokens& tokens) {
  for (int64_t head = 0; head < call.B * call.G; ++head) {
    for (int64_t t = 0; t < call.T; ++t)
      write_token<W, In>(call, tokens, head / call.G, head % call.G, t, head / call.G, call.S - call.T + t,
                         static_cast<W*>(tokens.key_bound) + head);
  }
}

// Write new tokens to the rows of pages that `slots` says. On the calling thread, too, which waits for memory.
template <typename W, typename In>
void write_as(const Call& call, const NewTokens& tokens, const int64_t* slots) {
  W* norms = static_cast<W*>(tokens.key_bound);
  const int64_t num_slots = call.num_pages * call.page_keys;
  const auto is_slot = [&](int64_t slot) { return slot >= 0 && slot < num_slots; };
  for (int64_t t = 0; norms && t < call.T; ++t) {
    if (!is_slot(slots[t]) || slots[t] % call.page_keys != 0) continue;
    for (int64_t g = 0; g < call.G; ++g) norms[slots[t] / call.page_keys * call.G + g] = 0;
  }
  for (int64_t t = 0; t < call.T; ++t) {
    if (!is_slot(slots[t])) continue;
    const int64_t page = slots[t] / call.page_keys, row = slots[t] % call.page_keys;
    for (int64_t g = 0; g < call.G; ++g)
      write_token<W, In>(call, tokens, 0, g, t, page, row, norms ? norms + page * call.G + g : nullptr);
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
