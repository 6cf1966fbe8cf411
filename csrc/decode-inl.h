// Part of attention-inl.h, included within its namespace.
//
// Few queries against a long cache: nothing is packed, keys and values are read where they lie, near ones first, a
// task being one query row. The certificate needs a bound on the norms of the keys that are not read: the caller's
// (call.key_bound), or else all keys and values are looked at once, which is what a dense decode costs anyway.
constexpr int64_t kFewQueries = 4, kLargestSize = 256;

template <typename W, typename In>
struct DecodeTask {
  const Call& call;
  const Forward& results;
  W* reach[2];  // [B * G, blocks] each, without key_bound: the largest |k| of a block and all beyond it
  int64_t num_blocks;
  W slack;
  static constexpr int kLanes = Simd<W>::kLanes;

  struct Row {
    int64_t b, h, first, num_keys, position, head;  // head: of the keys, b * G + g
    const In *keys, *values;                        // of key `first`
    alignas(64) W q[kLargestSize];
    alignas(64) W acc[kLargestSize];
    alignas(64) W score[kKeys];
    W norm, row_max, row_sum, slope[2];
    bool hidden[2];
  };

  void place(int64_t b, int64_t g, Row& row) const {
    row.first = call.key_range ? call.key_range[2 * b] : 0;
    row.num_keys = (call.key_range ? call.key_range[2 * b + 1] : call.S) - row.first;
    row.head = b * call.G + g;
    row.keys = static_cast<const In*>(call.k.data) + b * call.k.batch + g * call.k.head + row.first * call.k.row;
    row.values = static_cast<const In*>(call.v.data) + b * call.v.batch + g * call.v.head + row.first * call.v.row;
  }

  // The largest |k| of a block of one head, NaN if something in it is not finite.
  static void measure(void* context, int64_t task, int) {
    const DecodeTask& self = *static_cast<const DecodeTask*>(context);
    const Call& call = self.call;
    Row row;
    const int64_t head = task / self.num_blocks, block = task % self.num_blocks;
    self.place(head / call.G, head % call.G, row);
    W found = 0;
    for (int64_t s = block * kKeys; s < smaller_of((block + 1) * kKeys, row.num_keys); ++s) {
      const In *key = row.keys + s * call.k.row, *value = row.values + s * call.v.row;
      W squares = 0, not_finite = 0;
      Vector<W> many{}, odd{};
      int64_t d = 0, e = 0;
      for (; d + kLanes <= call.D; d += kLanes) {
        const Vector<W> x = load_wide(key + d);
        many += x * x;
      }
      for (; d < call.D; ++d) squares += static_cast<W>(widen(key[d])) * static_cast<W>(widen(key[d]));
      for (; e + kLanes <= call.E; e += kLanes) odd += load_wide(value + e) * W{0};
      for (; e < call.E; ++e) not_finite += static_cast<W>(widen(value[e])) * W{0};
      squares += sum<W>(many) + sum<W>(odd) + not_finite;
      found = found == found && !(squares <= found) ? squares : found;
    }
    self.reach[kLeft][task] = square_root(found) * (1 + self.slack);
  }

  void accumulate(int64_t head) const {
    const auto further = [](W beyond, W here) { return beyond == beyond && !(here <= beyond) ? here : beyond; };
    W *left = reach[kLeft] + head * num_blocks, *right = reach[kRight] + head * num_blocks;
    for (int64_t j = num_blocks - 1; j >= 0; --j) {
      right[j] = j + 1 < num_blocks ? further(right[j + 1], left[j]) : left[j];
    }
    for (int64_t j = 1; j < num_blocks; ++j) left[j] = further(left[j - 1], left[j]);
  }

  static void run(void* context, int64_t task, int) {
    const DecodeTask& self = *static_cast<const DecodeTask*>(context);
    const Call& call = self.call;
    const int64_t t = task % call.T;
    Row row;
    row.b = task / call.T / call.H;
    row.h = call.H - 1 - task / call.T % call.H;  // the flattest heads first
    self.place(row.b, row.h / (call.H / call.G), row);
    row.position = t + row.num_keys - call.T;
    self.load_query(t, row);
    const int64_t blocks = round_up(row.num_keys, kKeys) / kKeys;
    int64_t next[2] = {row.position >= 0 ? row.position / kKeys : -1, 0};
    next[kRight] = next[kLeft] + 1;
    if (next[kLeft] >= 0) self.visit(next[kLeft]--, row);
    bool open[2] = {!row.hidden[kLeft] && next[kLeft] >= 0, !row.hidden[kRight] && next[kRight] < blocks};
    while (open[kLeft] || open[kRight]) {
      for (int turn = kLeft; turn <= kRight; ++turn) {
        const Side side = static_cast<Side>(turn);
        if (!open[side]) continue;
        if (self.is_covered(row, side, next[side])) {
          open[side] = false;
          continue;
        }
        self.visit(next[side], row);
        next[side] += side == kLeft ? -1 : 1;
        open[side] = next[side] >= 0 && next[side] < blocks;
      }
    }
    const int64_t at = (row.b * call.H + row.h) * call.T + t;
    W* out = static_cast<W*>(self.results.out) + at * call.E;
    for (int64_t e = 0; e < call.E; ++e) out[e] = row.acc[e] / (row.row_sum == 0 ? W{1} : row.row_sum);
    static_cast<W*>(self.results.row_max)[at] = row.row_max;
    static_cast<W*>(self.results.log_sum)[at] = static_cast<W>(__builtin_log(static_cast<double>(row.row_sum)));
  }

  void load_query(int64_t t, Row& row) const {
    const In* from = static_cast<const In*>(call.q.data) + row.b * call.q.batch + row.h * call.q.head + t * call.q.row;
    W squares = 0;
    for (int64_t d = 0; d < call.D; ++d) {
      row.q[d] = static_cast<W>(widen(from[d])) * static_cast<W>(call.scale);
      squares += row.q[d] * row.q[d];
    }
    for (int64_t e = 0; e < call.E; ++e) row.acc[e] = 0;
    row.norm = square_root(squares) * (1 + slack);
    row.row_max = -kInfinity<W>;
    row.row_sum = 0;
    const int64_t index = row.b * call.H + row.h;
    const W left = static_cast<const W*>(call.left)[index];
    const W right = call.right ? static_cast<const W*>(call.right)[index] : kInfinity<W>;
    row.hidden[kLeft] = is_infinite(left);
    row.hidden[kRight] = is_infinite(right);
    row.slope[kLeft] = row.hidden[kLeft] ? W{0} : left;
    row.slope[kRight] = row.hidden[kRight] ? W{0} : right;
  }

  // Products of the query with 4 keys at once.
  LINBIAS_INLINE void products(const Row& row, const In* key, W* to) const {
    Vector<W> sums[4] = {};
    int64_t d = 0;
    for (; d + kLanes <= call.D; d += kLanes) {
      const Vector<W> q = load(row.q + d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i] += q * load_wide(key + i * call.k.row + d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      W rest = 0;
      for (int64_t r = d; r < call.D; ++r) rest += row.q[r] * static_cast<W>(widen(key[i * call.k.row + r]));
      to[i] = sum<W>(sums[i]) + rest;
    }
  }

  void visit(int64_t block, Row& row) const {
    const int64_t from = block * kKeys, count = smaller_of(kKeys, row.num_keys - from);
    const In* key = row.keys + from * call.k.row;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) products(row, key + i * call.k.row, row.score + i);
    for (; i < count; ++i) {
      W total = 0;
      for (int64_t d = 0; d < call.D; ++d) total += row.q[d] * static_cast<W>(widen(key[i * call.k.row + d]));
      row.score[i] = total;
    }
    W high = -kInfinity<W>;
    for (i = 0; i < kKeys; ++i) {
      const int64_t distance = row.position - from - i;
      const Side side = distance > 0 ? kLeft : kRight;
      const bool hidden = i >= count || (distance != 0 && row.hidden[side]);
      const W reach = static_cast<W>(distance > 0 ? distance : -distance);
      row.score[i] = hidden ? -kInfinity<W> : row.score[i] - row.slope[side] * reach;
      high = row.score[i] > high ? row.score[i] : high;
    }
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
    add_values(row, row.values + from * call.v.row, count);
  }

  LINBIAS_INLINE void add_values(Row& row, const In* value, int64_t count) const {
    constexpr int kVectors = 4;
    int64_t e = 0;
    for (; e + kVectors * kLanes <= call.E; e += kVectors * kLanes) {
      Vector<W> sums[kVectors] = {};
      for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sums[j] += load_wide(value + i * call.v.row + e + j * kLanes) * row.score[i];
      }
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) store<W>(row.acc + e + j * kLanes, load(row.acc + e + j * kLanes) + sums[j]);
    }
    for (; e < call.E; ++e) {
      W total = 0;
      for (int64_t i = 0; i < count; ++i) total += static_cast<W>(widen(value[i * call.v.row + e])) * row.score[i];
      row.acc[e] += total;
    }
  }

  bool is_covered(const Row& row, Side side, int64_t nearest) const {
    const W m = row.slope[side];
    if (!(m > 0)) return false;
    const int64_t key = side == kLeft ? nearest * kKeys + kKeys - 1 : nearest * kKeys;
    const double num_unvisited = static_cast<double>(side == kLeft ? key + 1 : row.num_keys - key);
    const double whole = -__builtin_log(-__builtin_expm1(-static_cast<double>(m))), count = __builtin_log(num_unvisited);
    const double share = __builtin_log(call.right ? call.tolerance / 2 : call.tolerance);
    const W bound = call.key_bound ? static_cast<const W*>(call.key_bound)[row.head] * (1 + slack)
                                   : reach[side][row.head * num_blocks + nearest];
    const W distance = static_cast<W>(side == kLeft ? row.position - key : key - row.position);
    const W tail = row.norm * bound * (1 + slack) - m * (1 - slack) * distance +
                   static_cast<W>((whole < count ? whole : count) - share);
    return tail <= row.row_max + log_from_below(row.row_sum);
  }
};

template <typename W, typename In>
Status decode_as(const Call& call, const Forward& results) {
  const int64_t num_blocks = round_up(call.S, kKeys) / kKeys, num_heads = call.B * call.G;
  Buffer<W> reach;
  if (!call.key_bound && !reach.allocate(2, num_heads, num_blocks)) return Status::out_of_memory;
  DecodeTask<W, In> task{call, results, {reach.data, reach.data + num_heads * num_blocks}, num_blocks,
                         slack_of<W>(call.D)};
  if (!call.key_bound) {
    parallel(num_heads * num_blocks, call.num_threads, DecodeTask<W, In>::measure, &task);
    for (int64_t head = 0; head < num_heads; ++head) task.accumulate(head);
  }
  parallel(call.B * call.H * call.T, call.num_threads, DecodeTask<W, In>::run, &task);
  return Status::ok;
}
