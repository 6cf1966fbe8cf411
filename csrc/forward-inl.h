// Part of attention-inl.h, included within its namespace.
//
// One tile: its biased scores, its dropout, its certificate, and its forward pass.

// What a worker needs for one tile; rows beyond the tile's are zeros.
template <typename W>
struct Scratch {
  W *q, *score, *acc, *dout, *dweight, *dropped;
  uint32_t *q_pairs, *weight_pairs;
  W row_max[kRows], row_sum[kRows], norm[kRows], base[kRows], delta[kRows];
};

// One tile of one query head: its rows, the head it reads, and its slopes.
template <typename W>
struct Tile {
  const Call* call;
  const Head<W>* head;
  int64_t b, h, start, rows, padded_rows, position;  // row i stands at position + i
  W slope[2];
  bool hidden[2];  // whether a side shows nothing
  int64_t near_first, near_last;  // blocks; none if near_last < near_first

  Tile(const Call& c, const Packed<W>& packed, int64_t batch, int64_t query_head, int64_t tile)
      : call(&c), b(batch), h(query_head), start(tile * kRows) {
    head = &packed.heads.data[b * c.G + h / (c.H / c.G)];
    rows = smaller_of(kRows, c.T - start);
    padded_rows = round_up(rows, kBlockRows);
    position = start + head->num_keys - c.T;
    const W left = static_cast<const W*>(c.left)[b * c.H + h];
    const W right = c.right ? static_cast<const W*>(c.right)[b * c.H + h] : kInfinity<W>;
    hidden[kLeft] = is_infinite(left);
    hidden[kRight] = is_infinite(right);
    slope[kLeft] = hidden[kLeft] ? W{0} : left;
    slope[kRight] = hidden[kRight] ? W{0} : right;
    const int64_t stop = larger_of(position + rows, 0);
    near_first = larger_of(position, 0) / kKeys;
    near_last = stop ? (stop - 1) / kKeys : -1;
    if (stop == 0) near_first = 0;
  }

  // Whether a block lies wholly to one side of every row, with no padding in it.
  bool is_far(int64_t block) const {
    return (block < near_first || block > near_last) && (block + 1) * kKeys <= head->num_keys;
  }

  int64_t index(int64_t i) const { return (b * call->H + h) * call->T + start + i; }
};

// The biased scores of one row of a block: score - slope * distance, -inf where hidden.
template <typename W>
struct Biased {
  static constexpr int kLanes = Simd<W>::kLanes, kVectors = kKeys / kLanes;
  Vector<W> ramp;
  bool far;
  W one_slope, end, scale;
  const Tile<W>& tile;
  int64_t first_key;

  LINBIAS_INLINE Biased(const Tile<W>& t, int64_t block, W factor) : scale(factor), tile(t), first_key(block * kKeys) {
    for (int i = 0; i < kLanes; ++i) ramp[i] = static_cast<W>(i);
    far = t.is_far(block);
    one_slope = block > t.near_last ? -t.slope[kRight] : t.slope[kLeft];
    end = static_cast<W>(t.head->num_keys - first_key);
  }

  // Distances of row i to the keys of vector j: integers, exact.
  LINBIAS_INLINE Vector<W> reach(int64_t i, int j) const {
    return static_cast<W>(tile.position + i - first_key - j * kLanes) - ramp;
  }

  LINBIAS_INLINE void row(int64_t i, const W* score, Vector<W> (&x)[kVectors]) const {
    if (far) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) x[j] = load(score + j * kLanes) * scale - one_slope * reach(i, j);
      return;
    }
    const Vector<W> lowest = broadcast(-kInfinity<W>);
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> distance = reach(i, j);
      Vector<W> y = load(score + j * kLanes) * scale;
      y -= distance > W{0} ? tile.slope[kLeft] * distance : -tile.slope[kRight] * distance;
      if (tile.hidden[kLeft]) y = distance > W{0} ? lowest : y;
      if (tile.hidden[kRight]) y = distance < W{0} ? lowest : y;
      x[j] = ramp + static_cast<W>(j * kLanes) >= end ? lowest : y;
    }
  }
};

// The rule of linbias/torch/dropout.py: which weights stay.
struct Dropout {
  uint32_t rows[kRows], threshold;

  static uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x *= 0x846ca68b;
    return x ^ x >> 16;
  }

  template <typename W>
  explicit Dropout(const Tile<W>& tile) {
    const Call& call = *tile.call;
    threshold = static_cast<uint32_t>(call.dropout * 4294967296.0 + 0.5);
    const uint32_t head = mix(mix(call.seed) ^ static_cast<uint32_t>(tile.b * call.H + tile.h));
    for (int64_t i = 0; i < kRows; ++i) rows[i] = mix(head ^ static_cast<uint32_t>(tile.start + i));
  }

  // to <- from / (1 - dropout) where it stays, 0 elsewhere.
  template <typename W>
  void apply(const Tile<W>& tile, int64_t block, const W* from, W* to) const {
    const W share = static_cast<W>(1.0 / (1.0 - tile.call->dropout));
    uint32_t columns[kKeys];
    for (int64_t j = 0; j < kKeys; ++j) {
      columns[j] = mix(static_cast<uint32_t>(tile.head->first + block * kKeys + j));
    }
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      for (int64_t j = 0; j < kKeys; ++j) {
        to[i * kKeys + j] = mix(rows[i] ^ columns[j]) >= threshold ? from[i * kKeys + j] * share : W{0};
      }
    }
  }
};

template <typename W, typename In>
void load_queries(const Tile<W>& tile, int64_t padded_D, W* q) {
  const Call& call = *tile.call;
  const W scale = static_cast<W>(call.scale);
  for (int64_t i = 0; i < tile.padded_rows; ++i) {
    const In* from = static_cast<const In*>(call.q.data) + tile.b * call.q.batch + tile.h * call.q.head +
                     (tile.start + i) * call.q.row;
    for (int64_t d = 0; d < padded_D; ++d) {
      q[i * padded_D + d] = i < tile.rows && d < call.D ? static_cast<W>(widen(from[d])) * scale : W{0};
    }
  }
}

// The queries as they come, in pairs; the scale is for later.
template <typename W, typename In>
void load_query_pairs(const Tile<W>& tile, uint32_t* q) {
  const Call& call = *tile.call;
  const int64_t pairs = round_up(call.D, 2) / 2;
  for (int64_t i = 0; i < tile.padded_rows; ++i) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(static_cast<const In*>(call.q.data) +
                                                             tile.b * call.q.batch + tile.h * call.q.head +
                                                             (tile.start + i) * call.q.row);
    for (int64_t d = 0; d < call.D; d += 2) {
      const uint32_t low = i < tile.rows ? from[d] : 0, high = i < tile.rows && d + 1 < call.D ? from[d + 1] : 0;
      q[i * pairs + d / 2] = low | high << 16;
    }
  }
}

// May this tile leave out every key from block `nearest` outwards? Comparisons with NaN say no.
template <typename W>
bool is_covered(const Tile<W>& tile, const Scratch<W>& scratch, Side side, int64_t nearest, W slack) {
  const Head<W>& head = *tile.head;
  const W m = tile.slope[side];
  if (!(m > 0)) return false;
  const double key = side == kLeft ? nearest * kKeys + kKeys - 1 : nearest * kKeys;
  const double num_unvisited = side == kLeft ? key + 1 : static_cast<double>(head.num_keys) - key;
  const double whole = -__builtin_log(-__builtin_expm1(-static_cast<double>(m)));
  const double count = __builtin_log(num_unvisited);
  const Call& call = *tile.call;
  const double share = __builtin_log(call.right ? call.tolerance / 2 : call.tolerance);
  const W offset = static_cast<W>((whole < count ? whole : count) - share);
  const W reach = head.reach[side][nearest], step = m * (1 - slack);
  const W distance = static_cast<W>(side == kLeft ? tile.position - key : key - tile.position);
  const W away = side == kLeft ? W{1} : W{-1};
  int still_open = 0;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const W tail = scratch.base[i] + scratch.norm[i] * reach - step * (distance + away * static_cast<W>(i)) + offset;
    still_open |= !(tail <= scratch.row_max[i] + log_from_below(scratch.row_sum[i]));
  }
  return !still_open;
}

template <typename W, typename In>
struct ForwardTask {
  const Call& call;
  const Forward& results;
  const Packed<W>& packed;
  Scratch<W>* scratches;
  int64_t num_tiles;
  W slack;

  static void run(void* context, int64_t task, int worker) {
    const ForwardTask& self = *static_cast<const ForwardTask*>(context);
    // The last tiles of a causal call and the flattest heads have most to do: they come first.
    const int64_t t = self.num_tiles - 1 - task / (self.call.B * self.call.H);
    const int64_t head = self.call.B * self.call.H - 1 - task % (self.call.B * self.call.H);
    self.tile(head / self.call.H, head % self.call.H, t, self.scratches[worker]);
  }

  void tile(int64_t b, int64_t h, int64_t t, Scratch<W>& scratch) const {
    const Tile<W> tile(call, packed, b, h, t);
    const Head<W>& head = *tile.head;
    load_queries<W, In>(tile, packed.padded_D, scratch.q);
    if constexpr (kPairs<In>) load_query_pairs<W, In>(tile, scratch.q_pairs);
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      W squares = 0, aligned = 0;
      for (int64_t d = 0; d < call.D; ++d) {
        const W x = scratch.q[i * packed.padded_D + d];
        squares += x * x;
        aligned += x * head.center[d];
      }
      scratch.norm[i] = square_root(squares) * (1 + slack) * (1 + slack);
      scratch.base[i] = aligned + slack * scratch.norm[i] * (head.center_norm + head.largest);
      scratch.row_max[i] = -kInfinity<W>;
      scratch.row_sum[i] = 0;
    }
    for (int64_t i = 0; i < tile.padded_rows * packed.padded_E; ++i) scratch.acc[i] = 0;

    for (int64_t block = tile.near_last; block >= tile.near_first; --block) visit(tile, block, scratch);
    int64_t next[2] = {tile.near_first - 1, tile.near_last + 1};
    int32_t* visited = results.visited + ((b * call.H + h) * results.visited_tiles + t) * 2;
    visited[kLeft] = visited[kRight] = 0;
    bool open[2] = {!tile.hidden[kLeft] && next[kLeft] >= 0, !tile.hidden[kRight] && next[kRight] < head.num_blocks};
    while (open[kLeft] || open[kRight]) {
      for (int turn = kLeft; turn <= kRight; ++turn) {
        const Side side = static_cast<Side>(turn);
        if (!open[side]) continue;
        if (is_covered(tile, scratch, side, next[side], slack)) {
          open[side] = false;
          continue;
        }
        visit(tile, next[side], scratch);
        ++visited[side];
        next[side] += side == kLeft ? -1 : 1;
        open[side] = next[side] >= 0 && next[side] < head.num_blocks;
      }
    }
    finish(tile, scratch);
  }

  void visit(const Tile<W>& tile, int64_t block, Scratch<W>& scratch) const {
    const Head<W>& head = *tile.head;
    const int64_t pairs = round_up(call.D, 2) / 2;
    if constexpr (kPairs<In>) {
      multiply_pairs(tile.padded_rows, kKeys, pairs, scratch.q_pairs, pairs, head.key_pairs + block * pairs * kKeys,
                     kKeys, scratch.score, kKeys, false);
    } else {
      multiply<W>(tile.padded_rows, kKeys, call.D, scratch.q, packed.padded_D, 1,
                  head.keys_across + block * call.D * kKeys, kKeys, scratch.score, kKeys, false);
    }
    const Biased<W> biased(tile, block, kPairs<In> ? static_cast<W>(call.scale) : W{1});
    for (int64_t i = 0; i < tile.padded_rows; ++i) online_softmax(biased, scratch, i);
    W* weight = scratch.score;
    if (call.dropout > 0) {
      weight = scratch.dropped;
      Dropout(tile).apply(tile, block, scratch.score, weight);
    }
    if constexpr (kPairs<In>) {
      const uint32_t* values = head.value_pairs + block * (kKeys / 2) * packed.padded_E;
      for (int part = 0; part < (call.precise ? 2 : 1); ++part) {
        split_weights(tile.padded_rows * kKeys, weight, scratch.weight_pairs);
        multiply_pairs(tile.padded_rows, packed.padded_E, kKeys / 2, scratch.weight_pairs, kKeys / 2, values,
                       packed.padded_E, scratch.acc, packed.padded_E, true);
      }
    } else {
      multiply<W>(tile.padded_rows, packed.padded_E, kKeys, weight, kKeys, 1,
                  head.values + block * kKeys * packed.padded_E, packed.padded_E, scratch.acc, packed.padded_E, true);
    }
  }

  // Turn the products of row i into weights, and what was summed before to the new maximum.
  LINBIAS_INLINE void online_softmax(const Biased<W>& biased, Scratch<W>& scratch, int64_t i) const {
    constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
    Vector<W> x[kVectors];
    W* row = scratch.score + i * kKeys;
    biased.row(i, row, x);
    Vector<W> high = x[0];
#pragma GCC unroll 16
    for (int j = 1; j < kVectors; ++j) high = larger<W>(high, x[j]);
    const W found = largest<W>(high)[0];
    if (found > scratch.row_max[i]) {
      const W shrink = exponential<W>(broadcast(scratch.row_max[i] - found))[0];
      scratch.row_max[i] = found;
      scratch.row_sum[i] *= shrink;
      W* acc = scratch.acc + i * packed.padded_E;
      for (int64_t e = 0; e < packed.padded_E; e += kLanes) store<W>(acc + e, load(acc + e) * shrink);
    }
    // A row that has seen no key has no maximum, and any finite pivot makes its weights 0.
    const W pivot = scratch.row_max[i] == -kInfinity<W> ? W{0} : scratch.row_max[i];
    Vector<W> total{};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> weight = exponential<W>(x[j] - pivot);
      total += weight;
      store<W>(row + j * kLanes, weight);
    }
    scratch.row_sum[i] += sum<W>(total);
  }

  void finish(const Tile<W>& tile, const Scratch<W>& scratch) const {
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t at = tile.index(i);
      const W row_sum = scratch.row_sum[i], divisor = row_sum == 0 ? W{1} : row_sum;
      W* out = static_cast<W*>(results.out) + at * call.E;
      for (int64_t e = 0; e < call.E; ++e) out[e] = scratch.acc[i * packed.padded_E + e] / divisor;
      static_cast<W*>(results.row_max)[at] = scratch.row_max[i];
      static_cast<W*>(results.log_sum)[at] = static_cast<W>(__builtin_log(static_cast<double>(row_sum)));
    }
  }
};

template <typename W>
bool allocate_scratch(const Call& call, const Packed<W>& packed, Buffer<Scratch<W>>& scratches, Buffer<W>& memory) {
  const int64_t of_queries = kRows * packed.padded_D, of_scores = kRows * kKeys;
  const int64_t of_values = kRows * larger_of(packed.padded_D, packed.padded_E);  // acc holds out, or dq
  // Two 16-bit numbers fill a word of W at most.
  const int64_t each = round_up(2 * of_queries + 2 * of_values + 4 * of_scores, 64);
  if (!scratches.allocate(call.num_threads) || !memory.allocate(call.num_threads, each)) return false;
  for (int worker = 0; worker < call.num_threads; ++worker) {
    Scratch<W>& scratch = scratches.data[worker];
    scratch.q = memory.data + worker * each;
    scratch.acc = scratch.q + of_queries;
    scratch.dout = scratch.acc + of_values;
    scratch.score = scratch.dout + of_values;
    scratch.dweight = scratch.score + of_scores;
    scratch.dropped = scratch.dweight + of_scores;
    scratch.weight_pairs = reinterpret_cast<uint32_t*>(scratch.dropped + of_scores);
    scratch.q_pairs = reinterpret_cast<uint32_t*>(scratch.dropped + 2 * of_scores);
  }
  return true;
}

template <typename W>
constexpr W slack_of(int64_t D) {
  return static_cast<W>(D + 8) * (sizeof(W) == 4 ? static_cast<W>(0x1p-23) : static_cast<W>(0x1p-52));
}
