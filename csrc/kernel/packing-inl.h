// Keys and values as the products want them, with what the certificate needs of them. All heads are packed before any
// tile; or, where heads are small and there are enough to share out (by_head), each worker packs the head that it works
// on, which then stays in its cache. A slot holds one packed head: there is one for each head, or for each worker.
#pragma once

#include "kernel/bounds-inl.h"
#include "kernel/head-inl.h"
#include "kernel/positions-inl.h"
#include "parallel.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// How the keys and values of a call are packed.
struct Packing {
  // Up to here packed heads stay in a core's second cache; a certificate that can leave out this little is not worth
  // asking for. Nor is the spread of blocks worth it where no query sees more than kManyKeys keys by its own range.
  static constexpr int64_t kBytesByHead = 1 << 20, kFewBlocks = 4, kManyKeys = 1024;

  int64_t num_blocks, rows;  // of the head that shows the most keys
  bool backward;
  bool skips;      // whether blocks may be left out
  bool certify;    // whether a certificate says which: forward asks, backward takes what forward found
  bool measures;   // whether it is known how long keys and queries are: `certify`, or what else needs it
  bool by_spread;  // whether queries see so many keys that the spread of blocks can save some of them
  bool by_head = false;

  Packing(const Call& call, bool for_backward)
      : num_blocks(round_up(most_keys(call), kKeys) / kKeys),
        rows(num_blocks * kKeys),
        backward(for_backward),
        skips(num_blocks > kFewBlocks),
        certify(skips && !backward),
        measures(certify),
        by_spread(certify && (!call.query_range || most_seen(call) > kManyKeys)) {}

  // Whether heads whose keys and values take so many bytes stay in a worker's cache.
  bool is_small(int64_t bytes_per_key) const { return rows <= kBytesByHead / larger_of(bytes_per_key, 1); }

  // The slot of what a query head reads.
  int64_t slot_of(const Call& call, int64_t b, int64_t h, int worker) const {
    return by_head ? worker : b * call.G + h / (call.H / call.G);
  }

  int64_t num_slots(const Call& call) const {
    return by_head ? smaller_of(call.num_threads, call.B * call.G) : call.B * call.G;
  }
};

template <typename W>
struct Packed : Packing {
  Buffer<Head<W>> heads;
  Buffer<W> key_columns, values, keys, value_columns, center, radius, spread, tails, room;
  int64_t padded_D, padded_E;
  bool in_place;  // keys in backward, or values in forward, are read where they lie

  Packed(const Call& call, bool for_backward)
      : Packing(call, for_backward),
        padded_D(round_up(call.D, Simd<W>::kLanes)),
        padded_E(round_up(call.E, Simd<W>::kLanes)),
        in_place(false) {}

  int64_t bytes_per_key() const { return (backward ? 2 : 1) * static_cast<int64_t>(sizeof(W)) * (padded_D + padded_E); }

  bool allocate(const Call& call) {
    const int64_t slots = num_slots(call);
    return heads.allocate(call.B * call.G) && radius.allocate(slots, num_blocks) &&
           (!certify || (center.allocate(slots, padded_D) && spread.allocate(slots, num_blocks) &&
                         allocate_tails(call, slots) && room.allocate(call.num_threads, call.D + kKeys, kKeys))) &&
           key_columns.allocate(slots, rows, call.D) &&
           (backward ? value_columns.allocate(slots, rows, call.E) && (in_place || keys.allocate(slots, rows, padded_D))
                     : in_place || values.allocate(slots, rows, padded_E));
  }

  bool allocate_tails(const Call& call, int64_t slots) {
    return tails.allocate(slots, call.H / call.G * 2, num_blocks * kEntries);
  }

  // The table of tails of a query head that reads the head in a slot, on one side.
  W* tails_at(const Call& call, int64_t slot, int64_t h, int64_t side) const {
    return tails.data + ((slot * (call.H / call.G) + h % (call.H / call.G)) * 2 + side) * num_blocks * kEntries;
  }
};

// The mean of about kSampled keys, to center[padded_D]: any center makes a valid bound, and this one costs next to
// nothing. Returns its length.
template <typename W, typename At>
W center_of(const At& key_at, int64_t num_keys, int64_t D, int64_t padded_D, W* center) {
  constexpr int64_t kSampled = 512;
  const int64_t every = round_up(larger_of(num_keys, 1), kSampled) / kSampled;
  for (int64_t d = 0; d < padded_D; ++d) center[d] = 0;
  W count = 0, squares = 0;
  for (int64_t s = 0; s < num_keys; s += every, ++count) {
    const auto* key = key_at(s);
    for (int64_t d = 0; d < D; ++d) center[d] += static_cast<W>(widen(key[d]));
  }
  for (int64_t d = 0; d < D; ++d) {
    center[d] /= count > 0 ? count : W{1};
    squares += center[d] * center[d];
  }
  return length_from(squares, center, D);
}

template <typename W, typename In>
struct PackTask {
  const Call& call;
  Packed<W>& packed;
  PageRoom<In> room;
  static constexpr int64_t kBlocksAtOnce = 16;

  PackTask(const Call& for_call, Packed<W>& to) : call(for_call), packed(to), room(for_call) {
    packed.in_place =
        packed.backward ? can_lie(call.k, call.D) : !packed.certify && !call.pages && can_lie(call.v, call.E);
  }

  // Whether rows of inputs can serve as they are: whole vectors, with few gaps between them.
  static bool can_lie(const Array& array, int64_t size) {
    return sizeof(In) == sizeof(W) && size % Simd<W>::kLanes == 0 && array.row >= size && array.row <= 2 * size;
  }

  // Say which keys one key/value head has, and where its packed arrays lie.
  void set_up_head(int64_t index, int64_t slot) const {
    const KeyRange range(call, index / call.G, index % call.G);
    Head<W>& head = packed.heads.data[index];
    head.first = range.first;
    head.num_keys = range.count;
    head.num_blocks = round_up(head.num_keys, kKeys) / kKeys;
    head.radius = packed.radius.data + slot * packed.num_blocks;
    head.center_norm = head.largest = 0;
    if (packed.measures) {
      head.center = packed.center.data + slot * packed.padded_D;
      head.spread = packed.spread.data + slot * packed.num_blocks;
    }
    head.key_columns = packed.key_columns.data + slot * packed.rows * call.D;
    head.key_row = packed.in_place ? call.k.row : packed.padded_D;
    head.value_row = packed.in_place ? call.v.row : packed.padded_E;
    if (packed.backward) {
      head.value_columns = packed.value_columns.data + slot * packed.rows * call.E;
      head.keys = packed.in_place ? reinterpret_cast<const W*>(keys_of(index).at(head.first)) : packed_keys(slot);
    } else {
      head.values = packed.in_place ? reinterpret_cast<const W*>(values_of(index).at(head.first)) : packed_values(slot);
    }
  }

  W* packed_keys(int64_t slot) const { return packed.keys.data + slot * packed.rows * packed.padded_D; }
  W* packed_values(int64_t slot) const { return packed.values.data + slot * packed.rows * packed.padded_E; }

  RowsOf<In> keys_of(int64_t index) const { return {&call, &call.k, index / call.G, index % call.G}; }
  RowsOf<In> values_of(int64_t index) const { return {&call, &call.v, index / call.G, index % call.G}; }

  void find_center(int64_t index) const {
    Head<W>& head = packed.heads.data[index];
    const auto key_at = [&, keys = keys_of(index)](int64_t s) { return keys.at(head.first + s); };
    head.center_norm = center_of(key_at, head.num_keys, call.D, packed.padded_D, head.center);
  }

  // Pack some blocks, and measure each while it is in the cache.
  void pack(int64_t index, int64_t slot, int64_t from, int64_t to, int worker) const {
    const Head<W>& head = packed.heads.data[index];
    const bool measure_spread = packed.by_spread && has_a_long_window(index);
    for (int64_t block = from; block < smaller_of(to, head.num_blocks); ++block) {
      pack_block(index, slot, block, worker);
      if (packed.certify) {
        measure_block<W>(call, head, block, packed.padded_E, measure_spread, slack_of<W>(call.D),
                         packed.room.data + worker * (call.D + kKeys) * kKeys);
      } else if (packed.skips) {
        head.radius[block] = zero_or_nan(head.key_columns + block * call.D * kKeys, call.D * kKeys) +
                             zero_or_nan(head.value_columns + block * call.E * kKeys, call.E * kKeys);
      }
    }
  }

  // The rows of a block of one head.
  struct Block {
    int64_t count, key_row, value_row;
    const In *k, *v;

    Block(const PackTask& task, int64_t index, int64_t block, int worker) {
      const Head<W>& head = task.packed.heads.data[index];
      const int64_t from = head.first + block * kKeys;
      count = smaller_of(kKeys, head.num_keys - block * kKeys);
      k = task.keys_of(index).block(from, count, task.call.D, task.room.of_keys(worker), key_row);
      v = task.values_of(index).block(from, count, task.call.E, task.room.of_values(worker), value_row);
    }
  };

  void pack_block(int64_t index, int64_t slot, int64_t block, int worker) const {
    const Head<W>& head = packed.heads.data[index];
    const Block from(*this, index, block, worker);
    const int64_t D = call.D, E = call.E;
    pack_columns<W>(from.k, from.key_row, from.count, D, head.key_columns + block * D * kKeys);
    if (packed.backward) pack_columns<W>(from.v, from.value_row, from.count, E, head.value_columns + block * E * kKeys);
    if (packed.in_place) return;
    if (packed.backward) {
      pack_rows<W>(from.k, from.key_row, from.count, D, W{1}, kKeys, packed.padded_D,
                   packed_keys(slot) + block * kKeys * packed.padded_D);
    } else {
      pack_rows<W>(from.v, from.value_row, from.count, E, W{1}, kKeys, packed.padded_E,
                   packed_values(slot) + block * kKeys * packed.padded_E);
    }
  }

  // Does a query head of this key/value head have a window of several blocks, and an end of it to find?
  bool has_a_long_window(int64_t index) const {
    const Readers readers(call, index);
    const Head<W>& head = packed.heads.data[index];
    const W count = static_cast<W>(head.num_keys);
    for (int64_t h = readers.first; h < readers.end; ++h) {
      const double* positions = positions_of(call.positions, readers.b, h, head.first);
      const W length = positions && count > 0 ? static_cast<W>(positions[head.num_keys - 1] - positions[0]) : count;
      for (int side = kLeft; side <= kRight; ++side) {
        const W m = slope_of<W>(call, side, readers.b, h);
        // The spread saves about 3 nats of some 25, and no window is shorter than 10.
        if (m * kKeys * (length / count) < 3 && m * length > 10) return true;
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

  void bound_tails(int64_t index, int64_t slot) const {
    const Readers readers(call, index);
    for (int64_t h = readers.first; h < readers.end; ++h) {
      for (int side = kLeft; side <= kRight; ++side) {
        const W m = slope_of<W>(call, side, readers.b, h);
        if (!(m > 0) || is_infinite(m)) continue;
        const Head<W>& head = packed.heads.data[index];
        fill_tails(head, static_cast<Side>(side), m, positions_of(call.positions, readers.b, h, head.first),
                   slack_of<W>(call.D), packed.tails_at(call, slot, h, side));
      }
    }
  }
};

// Pack one head into a slot.
template <typename Pack>
void pack_head(const Pack& pack, int64_t index, int64_t slot, int worker) {
  pack.set_up_head(index, slot);
  if (pack.packed.measures) pack.find_center(index);
  pack.pack(index, slot, 0, pack.packed.num_blocks, worker);
  if (pack.packed.measures) pack.find_largest(pack.packed.heads.data[index]);
  if (pack.packed.certify) pack.bound_tails(index, slot);
}

// Pack all heads, each into its own slot, a step at a time.
template <typename Pack>
void pack_all(Pack& pack) {
  const Call& call = pack.call;
  const int64_t num_heads = call.B * call.G;
  const int64_t steps = round_up(pack.packed.num_blocks, Pack::kBlocksAtOnce) / Pack::kBlocksAtOnce;
  for (int64_t index = 0; index < num_heads; ++index) pack.set_up_head(index, index);
  const Task center = [](void* context, int64_t index, int) { static_cast<Pack*>(context)->find_center(index); };
  if (pack.packed.measures) parallel(call, num_heads, center, &pack);
  const Task blocks = [](void* context, int64_t task, int worker) {
    const Pack& self = *static_cast<Pack*>(context);
    const int64_t count = round_up(self.packed.num_blocks, Pack::kBlocksAtOnce) / Pack::kBlocksAtOnce;
    const int64_t index = task / count, from = task % count * Pack::kBlocksAtOnce;
    self.pack(index, index, from, from + Pack::kBlocksAtOnce, worker);
  };
  parallel(call, num_heads * steps, blocks, &pack);
  for (int64_t index = 0; pack.packed.measures && index < num_heads; ++index) {
    pack.find_largest(pack.packed.heads.data[index]);
  }
  if (!pack.packed.certify) return;
  const Task bound = [](void* context, int64_t index, int) { static_cast<Pack*>(context)->bound_tails(index, index); };
  parallel(call, num_heads, bound, &pack);
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
