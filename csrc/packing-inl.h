// Part of attention-inl.h, included within its namespace.
//
// All keys and values of a call, packed once for all tiles, with what the certificate needs of them.

template <typename W>
struct Packed {
  Buffer<Head<W>> heads;
  Buffer<W> keys_across, values, keys, values_across, center, radius, spread, tails, room;
  Buffer<uint32_t> key_pairs, value_pairs;
  int64_t padded_D, padded_E, num_blocks;

  bool allocate(const Call& call, bool backward, bool pairs) {
    const int64_t num_heads = call.B * call.G;
    num_blocks = round_up(call.S, kKeys) / kKeys;
    padded_D = round_up(call.D, Simd<W>::kLanes);
    padded_E = round_up(call.E, Simd<W>::kLanes);
    const int64_t rows = num_blocks * kKeys;
    return heads.allocate(num_heads) && center.allocate(num_heads, call.D) && radius.allocate(num_heads, num_blocks) &&
           (backward ||
            (spread.allocate(num_heads, num_blocks) && tails.allocate(call.B * call.H * 2, num_blocks, kEntries) &&
             room.allocate(call.num_threads, call.D + kKeys, kKeys))) &&
           (pairs ? key_pairs.allocate(num_heads, rows, round_up(call.D, 2) / 2) &&
                        value_pairs.allocate(num_heads, rows / 2, padded_E)
                  : keys_across.allocate(num_heads, rows, call.D) && values.allocate(num_heads, rows, padded_E)) &&
           (!backward || (keys.allocate(num_heads, rows, padded_D) && values_across.allocate(num_heads, rows, call.E)));
  }

  // The table of tails of query head `row` of [B, H] on one side.
  W* tails_of(int64_t row, int64_t side) const { return tails.data + (row * 2 + side) * num_blocks * kEntries; }
};

template <bool kFirst, typename A, typename B>
struct Choose {
  using Type = A;
};
template <typename A, typename B>
struct Choose<false, A, B> {
  using Type = B;
};

template <typename W, typename In, bool kInPairs>
struct PackTask {
  const Call& call;
  Packed<W>& packed;
  bool certify;  // whether tails are wanted; or else, of the radii, only which are NaN
  static constexpr int64_t kBlocksAtOnce = 16;
  using Packing = typename Choose<kInPairs, In, W>::Type;  // what key_entries reads: pairs, or wide numbers

  // Say which keys one key/value head has, and where its packed arrays lie.
  void set_up_head(int64_t index) {
    const KeyRange range(call, index / call.G, index % call.G);
    Head<W>& head = packed.heads.data[index];
    const int64_t rows = packed.num_blocks * kKeys;
    head.first = range.first;
    head.num_keys = range.count;
    head.num_blocks = round_up(head.num_keys, kKeys) / kKeys;
    if constexpr (kInPairs) {
      head.key_pairs = packed.key_pairs.data + index * rows * (round_up(call.D, 2) / 2);
      head.value_pairs = packed.value_pairs.data + index * (rows / 2) * packed.padded_E;
    } else {
      head.keys_across = packed.keys_across.data + index * rows * call.D;
      head.values = packed.values.data + index * rows * packed.padded_E;
    }
    head.keys = packed.keys.data ? packed.keys.data + index * rows * packed.padded_D : nullptr;
    head.values_across = packed.values_across.data ? packed.values_across.data + index * rows * call.E : nullptr;
    head.center = packed.center.data + index * call.D;
    head.radius = packed.radius.data + index * packed.num_blocks;
    head.spread = certify ? packed.spread.data + index * packed.num_blocks : nullptr;
  }

  const In* keys_of(int64_t index) const {
    return static_cast<const In*>(call.k.data) + index / call.G * call.k.batch + index % call.G * call.k.head +
           packed.heads.data[index].first * call.k.row;
  }
  const In* values_of(int64_t index) const {
    return static_cast<const In*>(call.v.data) + index / call.G * call.v.batch + index % call.G * call.v.head +
           packed.heads.data[index].first * call.v.row;
  }

  // The mean of about kSampled keys: any center makes a valid bound, and this one costs next to nothing.
  static void find_center(void* context, int64_t index, int) {
    PackTask& self = *static_cast<PackTask*>(context);
    constexpr int64_t kSampled = 512;
    Head<W>& head = self.packed.heads.data[index];
    const int64_t every = round_up(larger_of(head.num_keys, 1), kSampled) / kSampled;
    const In* keys = self.keys_of(index);
    for (int64_t d = 0; d < self.call.D; ++d) head.center[d] = 0;
    W count = 0, squares = 0;
    for (int64_t s = 0; s < head.num_keys; s += every, ++count) {
      for (int64_t d = 0; d < self.call.D; ++d) head.center[d] += static_cast<W>(widen(keys[s * self.call.k.row + d]));
    }
    for (int64_t d = 0; d < self.call.D; ++d) {
      head.center[d] /= count > 0 ? count : W{1};
      squares += head.center[d] * head.center[d];
    }
    head.center_norm = length_from(squares, head.center, self.call.D);
  }

  // Pack some blocks, and measure them while they are near.
  static void pack(void* context, int64_t task, int worker) {
    PackTask& self = *static_cast<PackTask*>(context);
    const Call& call = self.call;
    const Packed<W>& packed = self.packed;
    const int64_t parts = round_up(packed.num_blocks, kBlocksAtOnce) / kBlocksAtOnce;
    const int64_t index = task / parts, from = task % parts * kBlocksAtOnce;
    const Head<W>& head = packed.heads.data[index];
    const bool measure_spread = self.certify && self.has_a_long_window(index);
    for (int64_t block = from; block < smaller_of(from + kBlocksAtOnce, head.num_blocks); ++block) {
      if constexpr (kInPairs) {
        pack_block_pairs<W, In>(call, head, self.keys_of(index), self.values_of(index), block, packed.padded_E);
      } else {
        pack_block<W, In>(call, head, self.keys_of(index), self.values_of(index), block, packed.padded_D,
                          packed.padded_E);
      }
      if (self.certify) {
        measure_block<W, Packing>(call, head, block, packed.padded_E, measure_spread, slack_of<W>(call.D),
                                  packed.room.data + worker * (call.D + kKeys) * kKeys);
      } else if constexpr (!kInPairs) {
        head.radius[block] = zero_or_nan(head.keys_across + block * call.D * kKeys, call.D * kKeys) +
                             zero_or_nan(head.values + block * kKeys * packed.padded_E, kKeys * packed.padded_E);
      }
    }
  }

  // Does a query head of this key/value head have a window of several blocks, and an end of it to find?
  bool has_a_long_window(int64_t index) const {
    const int64_t group = call.H / call.G;
    for (int64_t h = index % call.G * group; h < (index % call.G + 1) * group; ++h) {
      const void* sides[2] = {call.left, call.right};
      for (const void* side : sides) {
        if (!side) continue;
        const W m = static_cast<const W*>(side)[index / call.G * call.H + h];
        // The spread saves about 3 nats of some 25, and no window is shorter than 10.
        if (m * kKeys < 3 && m * static_cast<W>(packed.heads.data[index].num_keys) > 10) return true;
      }
    }
    return false;
  }

  static void find_largest(Head<W>& head) {
    head.largest = 0;
    for (int64_t block = 0; block < head.num_blocks; ++block) {
      head.largest = larger_or_nan(head.largest, head.radius[block]);
    }
  }

  static void bound_tails(void* context, int64_t task, int) {
    PackTask& self = *static_cast<PackTask*>(context);
    const Call& call = self.call;
    const int64_t row = task / 2, group = call.H / call.G;  // of [B, H]
    const void* slopes = task % 2 == kLeft ? call.left : call.right;
    const W m = slopes ? static_cast<const W*>(slopes)[row] : kInfinity<W>;
    if (!(m > 0) || is_infinite(m)) return;
    const Head<W>& head = self.packed.heads.data[row / call.H * call.G + row % call.H / group];
    fill_tails(head, static_cast<Side>(task % 2), static_cast<double>(m), slack_of<W>(call.D),
               self.packed.tails_of(row, task % 2));
  }

  void run() {
    const int64_t num_heads = call.B * call.G;
    const int64_t parts = round_up(packed.num_blocks, kBlocksAtOnce) / kBlocksAtOnce;
    for (int64_t index = 0; index < num_heads; ++index) set_up_head(index);
    if (certify) parallel(num_heads, call.num_threads, find_center, this);
    parallel(num_heads * parts, call.num_threads, pack, this);
    if (!certify) return;
    for (int64_t index = 0; index < num_heads; ++index) find_largest(packed.heads.data[index]);
    parallel(call.B * call.H * 2, call.num_threads, bound_tails, this);
  }
};
