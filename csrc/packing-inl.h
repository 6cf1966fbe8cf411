// Part of attention-inl.h, included within its namespace.
//
// The keys and values of a call, packed once for all tiles, and how far each block's keys reach.

// The keys and values of one key/value head, wide, padded with zeros to whole blocks and vectors.
template <typename W>
struct Head {
  int64_t first, num_keys, num_blocks;
  W* keys_across;    // [blocks, D, kKeys]
  W* values;         // [blocks * kKeys, E padded]
  W* keys;           // [blocks * kKeys, D padded], backward only
  W* values_across;  // [blocks, E, kKeys], backward only
  uint32_t* key_pairs;    // [blocks, D / 2 rounded up, kKeys]: entries 2d and 2d + 1 of a key, instead of
  uint32_t* value_pairs;  // [blocks, kKeys / 2, E padded]: entries of keys 2s and 2s + 1  (keys_across and values)
  W* center;         // [D], the mean key
  W* reach[2];       // [blocks] each: the largest |k - center| of this block and all beyond it on that side
  W center_norm, largest;
};

template <typename W, typename In>
void pack_block(const Call& call, const Head<W>& head, const In* k, const In* v, int64_t block, int64_t padded_D,
                int64_t padded_E) {
  const int64_t D = call.D, E = call.E;
  for (int64_t i = 0; i < kKeys; ++i) {
    const int64_t s = block * kKeys + i;
    const bool real = s < head.num_keys;
    const In* key = k + (head.first + s) * call.k.row;
    const In* value = v + (head.first + s) * call.v.row;
    W* across = head.keys_across + block * D * kKeys + i;
    for (int64_t d = 0; d < D; ++d) across[d * kKeys] = real ? static_cast<W>(widen(key[d])) : W{0};
    W* row = head.values + s * padded_E;
    for (int64_t e = 0; e < padded_E; ++e) row[e] = real && e < E ? static_cast<W>(widen(value[e])) : W{0};
    if (head.keys) {
      W* along = head.keys + s * padded_D;
      for (int64_t d = 0; d < padded_D; ++d) along[d] = real && d < D ? static_cast<W>(widen(key[d])) : W{0};
      W* value_across = head.values_across + block * E * kKeys + i;
      for (int64_t e = 0; e < E; ++e) value_across[e * kKeys] = row[e];
    }
  }
}

// The same in pairs of 16-bit numbers.
template <typename W, typename In>
void pack_block_pairs(const Call& call, const Head<W>& head, const In* k, const In* v, int64_t block,
                      int64_t padded_E) {
  const int64_t D = call.D, E = call.E, pairs = round_up(D, 2) / 2;
  uint32_t* keys = head.key_pairs + block * pairs * kKeys;
  uint16_t* values = reinterpret_cast<uint16_t*>(head.value_pairs + block * (kKeys / 2) * padded_E);
  for (int64_t i = 0; i < kKeys; ++i) {
    const int64_t s = block * kKeys + i;
    const bool real = s < head.num_keys;
    const uint16_t* key = reinterpret_cast<const uint16_t*>(k + (head.first + s) * call.k.row);
    const uint16_t* value = reinterpret_cast<const uint16_t*>(v + (head.first + s) * call.v.row);
    for (int64_t d = 0; d < D; d += 2) {
      const uint32_t low = real ? key[d] : 0, high = real && d + 1 < D ? key[d + 1] : 0;
      keys[d / 2 * kKeys + i] = low | high << 16;
    }
    uint16_t* row = values + i / 2 * padded_E * 2 + i % 2;
    for (int64_t e = 0; e < padded_E; ++e) row[2 * e] = real && e < E ? value[e] : 0;
  }
}

// Entry d of all keys of a block, as [kKeys]; `room` serves where they lie in pairs.
template <typename W, typename In>
const W* key_entries(const Call& call, const Head<W>& head, int64_t block, int64_t d, W* room) {
  if constexpr (!kPairs<In>) return head.keys_across + (block * call.D + d) * kKeys;
  const uint32_t* pairs = head.key_pairs + (block * (round_up(call.D, 2) / 2) + d / 2) * kKeys;
  const int shift = d % 2 ? 0 : 16;
  for (int64_t i = 0; i < kKeys; ++i) {
    const uint32_t bits = pairs[i] << shift & 0xffff0000;
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    room[i] = static_cast<W>(x);
  }
  return room;
}

// 0, or NaN if a value of the block is not finite.
template <typename W, typename In>
W finite_or_nan(const Head<W>& head, int64_t block, int64_t padded_E) {
  W found[16] = {};
  if constexpr (kPairs<In>) {
    const uint32_t* values = head.value_pairs + block * (kKeys / 2) * padded_E;
    for (int64_t j = 0; j < kKeys / 2 * padded_E; j += 16) {
      for (int lane = 0; lane < 16; ++lane) {
        const uint32_t x = values[j + lane];
        const bool bad = (x & 0x7f80) == 0x7f80 || (x & 0x7f800000) == 0x7f800000;
        found[lane] = bad ? static_cast<W>(__builtin_nan("")) : found[lane];
      }
    }
  } else {
    const W* values = head.values + block * kKeys * padded_E;
    for (int64_t j = 0; j < kKeys * padded_E; j += 16) {
      for (int lane = 0; lane < 16; ++lane) found[lane] += values[j + lane] * W{0};
    }
  }
  W total = 0;
  for (const W x : found) total += x;
  return total;
}

// The largest |k - center| of a block; NaN if anything in it, keys or values, is not finite.
template <typename W, typename In>
W block_radius(const Call& call, const Head<W>& head, int64_t block, int64_t padded_E) {
  W squares[kKeys] = {}, room[kKeys];
  for (int64_t d = 0; d < call.D; ++d) {
    const W* entries = key_entries<W, In>(call, head, block, d, room);
    for (int64_t i = 0; i < kKeys; ++i) {
      const W difference = entries[i] - head.center[d];
      squares[i] += difference * difference;
    }
  }
  const int64_t real = smaller_of(kKeys, head.num_keys - block * kKeys);
  W found = 0;
  for (int64_t i = 0; i < real; ++i) found = found == found && !(squares[i] <= found) ? squares[i] : found;
  found += finite_or_nan<W, In>(head, block, padded_E);
  return square_root(found);
}

template <typename W>
struct Packed {
  Buffer<Head<W>> heads;
  Buffer<W> keys_across, values, keys, values_across, center, reach;
  Buffer<uint32_t> key_pairs, value_pairs;
  int64_t padded_D, padded_E, num_blocks;

  bool allocate(const Call& call, bool backward, bool pairs) {
    const int64_t num_heads = call.B * call.G;
    num_blocks = round_up(call.S, kKeys) / kKeys;
    padded_D = round_up(call.D, Simd<W>::kLanes);
    padded_E = round_up(call.E, Simd<W>::kLanes);
    const int64_t rows = num_blocks * kKeys;
    return heads.allocate(num_heads) && center.allocate(num_heads, call.D) &&
           reach.allocate(num_heads, 2, num_blocks) &&
           (pairs ? key_pairs.allocate(num_heads, rows, round_up(call.D, 2) / 2) &&
                        value_pairs.allocate(num_heads, rows / 2, padded_E)
                  : keys_across.allocate(num_heads, rows, call.D) && values.allocate(num_heads, rows, padded_E)) &&
           (!backward || (keys.allocate(num_heads, rows, padded_D) && values_across.allocate(num_heads, rows, call.E)));
  }
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
  static constexpr int64_t kBlocksAtOnce = 16;
  using Packing = typename Choose<kInPairs, In, W>::Type;  // what key_entries reads: pairs, or wide numbers

  // One key/value head: where it lies, its mean key, and afterwards how far its keys reach.
  void place(int64_t index) {
    const int64_t b = index / call.G;
    Head<W>& head = packed.heads.data[index];
    const int64_t rows = packed.num_blocks * kKeys;
    head.first = call.key_range ? call.key_range[2 * b] : 0;
    head.num_keys = (call.key_range ? call.key_range[2 * b + 1] : call.S) - head.first;
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
    head.reach[kLeft] = packed.reach.data + index * 2 * packed.num_blocks;
    head.reach[kRight] = head.reach[kLeft] + packed.num_blocks;
  }

  static void pack(void* context, int64_t task, int) {
    PackTask& self = *static_cast<PackTask*>(context);
    const int64_t parts = round_up(self.packed.num_blocks, kBlocksAtOnce) / kBlocksAtOnce;
    const int64_t index = task / parts, from = task % parts * kBlocksAtOnce;
    const Call& call = self.call;
    const Head<W>& head = self.packed.heads.data[index];
    const int64_t b = index / call.G, g = index % call.G;
    const In* k = static_cast<const In*>(call.k.data) + b * call.k.batch + g * call.k.head;
    const In* v = static_cast<const In*>(call.v.data) + b * call.v.batch + g * call.v.head;
    for (int64_t block = from; block < smaller_of(from + kBlocksAtOnce, head.num_blocks); ++block) {
      if constexpr (kInPairs) {
        pack_block_pairs<W, In>(call, head, k, v, block, self.packed.padded_E);
      } else {
        pack_block<W, In>(call, head, k, v, block, self.packed.padded_D, self.packed.padded_E);
      }
    }
  }

  static void center(void* context, int64_t index, int) {
    PackTask& self = *static_cast<PackTask*>(context);
    Head<W>& head = self.packed.heads.data[index];
    const int64_t D = self.call.D;
    W squares = 0;
    for (int64_t d = 0; d < D; ++d) {
      Vector<W> total{};
      for (int64_t block = 0; block < head.num_blocks; ++block) {
        W room[kKeys];
        const W* entries = key_entries<W, Packing>(self.call, head, block, d, room);
        for (int64_t i = 0; i < kKeys; i += Simd<W>::kLanes) total += load(entries + i);
      }
      head.center[d] = sum<W>(total) / static_cast<W>(larger_of(head.num_keys, 1));
      squares += head.center[d] * head.center[d];
    }
    head.center_norm = square_root(squares);
  }

  static void measure(void* context, int64_t task, int) {
    PackTask& self = *static_cast<PackTask*>(context);
    const int64_t parts = round_up(self.packed.num_blocks, kBlocksAtOnce) / kBlocksAtOnce;
    const Head<W>& head = self.packed.heads.data[task / parts];
    const int64_t from = task % parts * kBlocksAtOnce;
    for (int64_t block = from; block < smaller_of(from + kBlocksAtOnce, head.num_blocks); ++block) {
      head.reach[kLeft][block] = block_radius<W, Packing>(self.call, head, block, self.packed.padded_E);
    }
  }

  // Running maxima, from either end; NaN stays NaN.
  static void accumulate(Head<W>& head) {
    W *left = head.reach[kLeft], *right = head.reach[kRight];
    const auto further = [](W beyond, W here) { return beyond == beyond && !(here <= beyond) ? here : beyond; };
    for (int64_t j = head.num_blocks - 1; j >= 0; --j) {
      right[j] = j + 1 < head.num_blocks ? further(right[j + 1], left[j]) : left[j];
    }
    for (int64_t j = 1; j < head.num_blocks; ++j) left[j] = further(left[j - 1], left[j]);
    head.largest = head.num_blocks ? right[0] : 0;
  }

  void run() {
    const int64_t num_heads = call.B * call.G;
    const int64_t parts = round_up(packed.num_blocks, kBlocksAtOnce) / kBlocksAtOnce;
    for (int64_t index = 0; index < num_heads; ++index) place(index);
    parallel(num_heads * parts, call.num_threads, pack, this);
    parallel(num_heads, call.num_threads, center, this);
    parallel(num_heads * parts, call.num_threads, measure, this);
    for (int64_t index = 0; index < num_heads; ++index) accumulate(packed.heads.data[index]);
  }
};
