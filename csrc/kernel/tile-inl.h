// One tile: where it stands, its biased scores, its dropout, and what a worker needs for it.
#pragma once

#include <type_traits>  // remove_reference_t

#include "kernel/packing-inl.h"
#include "kernel/positions-inl.h"
#include "kernel/products-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// What a worker knows of each row of a tile.
template <typename W>
struct Rows {
  W row_max[kRows], row_sum[kRows], norm[kRows], base[kRows], delta[kRows], dscore_sum[kRows];
  W slope_sum[2][kRows], distance_sum[2][kRows];  // of dscore * |distance| and weight * |distance|, on each side
  W pull_sum[kRows];                              // of what dscore asks of the query's position
  W left_out[kRows];     // at most this much is missing from row_sum, from blocks whose scores were seen
  int16_t entry[kRows];  // the row's norm lies between this entry of a tail table and the next,
  W fraction[kRows];     // so far from this one to the next
  int64_t open_row;      // the row that last kept the tile from stopping

  void clear_gradients() {
    for (int64_t i = 0; i < kRows; ++i) {
      delta[i] = dscore_sum[i] = left_out[i] = pull_sum[i] = 0;
      slope_sum[kLeft][i] = slope_sum[kRight][i] = distance_sum[kLeft][i] = distance_sum[kRight][i] = 0;
    }
  }
};

// What a worker needs for one tile; rows beyond the tile's are zeros.
template <typename W>
struct Scratch : Rows<W> {
  W *q, *score, *acc, *dout, *dweight, *dropped;

  // The buffers and their sizes: take(buffer, count) for each.
  template <typename Take>
  void each_buffer(const Packed<W>& packed, const Take& take) {
    const int64_t of_values = kRows * larger_of(packed.padded_D, packed.padded_E);  // acc holds out, or dq
    take(q, kRows * packed.padded_D);
    take(acc, of_values);
    take(dout, of_values);
    take(score, kRows * kKeys);
    take(dweight, kRows * kKeys);
    take(dropped, kRows * kKeys);
  }
};

// A scratch for each worker.
template <typename S>
struct Scratches {
  Buffer<S> each;
  Buffer<char> memory;

  template <typename AnyPacked>
  bool allocate(const Call& call, const AnyPacked& packed) {
    if (!each.allocate(call.num_threads)) return false;
    int64_t bytes = 0;  // of a worker, each buffer on a cache line of its own
    const auto size_of = [](auto* buffer, int64_t count) {
      return round_up(count * static_cast<int64_t>(sizeof *buffer), 64);
    };
    each.data[0].each_buffer(packed, [&](auto*& buffer, int64_t count) { bytes += size_of(buffer, count); });
    if (!memory.allocate(call.num_threads, bytes)) return false;
    char* next = memory.data;
    for (int worker = 0; worker < call.num_threads; ++worker) {
      each.data[worker].each_buffer(packed, [&](auto*& buffer, int64_t count) {
        buffer = reinterpret_cast<std::remove_reference_t<decltype(buffer)>>(next);
        next += size_of(buffer, count);
      });
    }
    return true;
  }
};

// One tile of one query head: its rows, the head it reads, and its slopes.
template <typename W>
struct Tile {
  const Call* call;
  const Head<W>* head;
  int64_t b, h, start, rows, padded_rows;
  int64_t orders[kRows];  // row i stands at key orders[i] of the head
  W slope[2];
  bool hidden[2];  // whether a side shows nothing
  // The blocks among which the tile stands; none, that is near_last < near_first, where it stands beside them all.
  int64_t near_first, near_last;
  const double* positions;  // where the head's keys stand, and the rows; null: they are counted
  double query_positions[kRows];
  bool limited;                                          // whether rows have ranges of keys of their own:
  int64_t row_first[kRows], row_end[kRows];              // those of each row, counted from the head's first key,
  int64_t first_seen, end_seen, first_whole, end_whole;  // those that some row sees, and that every row does

  Tile(const Call& c, const Packed<W>& packed, int64_t batch, int64_t query_head, int64_t tile)
      : call(&c), b(batch), h(query_head), start(tile * kRows) {
    head = &packed.heads.data[b * c.G + h / (c.H / c.G)];
    rows = smaller_of(kRows, c.T - start);
    padded_rows = round_up(rows, kBlockRows);
    for (int64_t i = 0; i < kRows; ++i) orders[i] = order_of(c, b, h, start + smaller_of(i, rows - 1)) - head->first;
    find_slopes(c, b, h, slope, hidden);
    near_first = smaller_of(larger_of(orders[0], 0) / kKeys, head->num_blocks);
    near_last = smaller_of(round_up(larger_of(orders[rows - 1] + 1, 0), kKeys) / kKeys, head->num_blocks) - 1;
    positions = positions_of(c.positions, b, h, head->first);
    const double* queries = positions_of(c.query_positions, b, h, start);
    for (int64_t i = 0; positions && i < kRows; ++i) query_positions[i] = queries[smaller_of(i, rows - 1)];
    limited = c.query_range != nullptr;
    first_seen = first_whole = 0;
    end_seen = end_whole = head->num_keys;
    if (limited) find_ranges();
  }

  void find_ranges() {
    first_seen = head->num_keys;
    end_seen = 0;
    for (int64_t i = 0; i < kRows; ++i) {
      const QueryRange range(*call, b, start + smaller_of(i, rows - 1), head->first, head->num_keys);
      row_first[i] = range.first;
      row_end[i] = range.end;
      first_whole = larger_of(first_whole, range.first);
      end_whole = smaller_of(end_whole, range.end);
      if (range.is_empty()) continue;
      first_seen = smaller_of(first_seen, range.first);
      end_seen = larger_of(end_seen, range.end);
    }
  }

  // Of the keys that row i sees, if it sees any, the one that it stands at or nearest to.
  int64_t key_nearest_to(int64_t i) const {
    return limited ? clamp(orders[i], row_first[i], row_end[i] - 1) : clamp(orders[i], 0, head->num_keys - 1);
  }

  // Whether row i has a key of its own from `key` outwards.
  bool row_sees_beyond(int64_t i, Side side, int64_t key) const {
    return row_first[i] < row_end[i] && (side == kLeft ? row_first[i] <= key : row_end[i] > key);
  }

  // Whether some row has a key of a block in its range.
  bool is_seen(int64_t block) const {
    if (!limited) return true;
    const int64_t from = block * kKeys, to = from + kKeys;
    for (int64_t i = 0; i < rows; ++i) {
      if (smaller_of(row_end[i], to) > larger_of(row_first[i], from)) return true;
    }
    return false;
  }
  // Whether a block, or one beyond it on this side, may have such a key.
  bool is_seen_from(int64_t block, Side side) const {
    return side == kLeft ? block >= 0 && (block + 1) * kKeys > first_seen : block * kKeys < end_seen;
  }

  // Whether a block lies wholly to one side of every row, with no padding in it.
  bool is_far(int64_t block) const {
    return (block < near_first || block > near_last) && (block + 1) * kKeys <= head->num_keys;
  }
  // Whether some row's own range hides keys of a block.
  bool is_masked(int64_t block) const {
    return limited && !(block * kKeys >= first_whole && (block + 1) * kKeys <= end_whole);
  }

  // How many keys of a block some row may see, from its first on.
  int64_t shown(int64_t block) const {
    const int64_t end = hidden[kRight] ? smaller_of(head->num_keys, orders[rows - 1] + 1) : head->num_keys;
    return clamp(end - block * kKeys, 0, kKeys);
  }

  int64_t index(int64_t i) const { return query_at(*call, b, h, start + i); }
};

// The biased scores of one row of a block: score - slope * distance, -inf where hidden, which goes by order.
template <typename W>
struct Biased {
  static constexpr int kLanes = Simd<W>::kLanes, kVectors = kKeys / kLanes;
  Vector<W> ramp;
  bool far, masked, positioned;
  W one_slope, end;
  const Tile<W>& tile;
  int64_t first_key;
  double positions[kKeys], nearest;  // positioned: where keys stand, and of a far block the nearest,
  W offsets[kKeys];                  // and how far beyond that one they do

  LINBIAS_INLINE Biased(const Tile<W>& t, int64_t block) : tile(t), first_key(block * kKeys) {
    for (int i = 0; i < kLanes; ++i) ramp[i] = static_cast<W>(i);
    far = t.is_far(block);
    masked = t.is_masked(block);
    one_slope = block > t.near_last ? -t.slope[kRight] : t.slope[kLeft];
    end = static_cast<W>(t.head->num_keys - first_key);
    positioned = t.positions != nullptr;
    if (positioned && far) {
      nearest = t.positions[nearest_key(block > t.near_last ? kRight : kLeft, block, t.head->num_keys)];
      find_offsets(t.positions + first_key, nearest, offsets);
    } else if (positioned) {
      load_positions(t.positions + first_key, t.head->num_keys - first_key, positions);
    }
  }

  // How many keys row i stands beyond those of vector j: integers, exact.
  LINBIAS_INLINE Vector<W> order(int64_t i, int j) const {
    return static_cast<W>(tile.orders[i] - first_key - j * kLanes) - ramp;
  }

  LINBIAS_INLINE Vector<W> distances(int64_t i, int j) const {
    if (!positioned) return order(i, j);
    if (far) return static_cast<W>(tile.query_positions[i] - nearest) - load(offsets + j * kLanes);
    return distances_from<W>(tile.query_positions[i], positions + j * kLanes);
  }

  // The gradients of these scores by the positions of their keys.
  LINBIAS_INLINE Vector<W> pull(int64_t i, int j) const {
    if (far) return broadcast(one_slope);
    return order(i, j) >= W{0} ? broadcast(tile.slope[kLeft]) : broadcast(-tile.slope[kRight]);
  }

  LINBIAS_INLINE void row(int64_t i, const W* score, Vector<W> (&x)[kVectors]) const {
    const Vector<W> lowest = broadcast(-kInfinity<W>);
    if (far) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) x[j] = load(score + j * kLanes) - one_slope * distances(i, j);
    } else {
      for (int j = 0; j < kVectors; ++j) {
        const Vector<W> back = order(i, j), distance = positioned ? distances(i, j) : back;
        Vector<W> y = load(score + j * kLanes);
        y -= distance > W{0} ? tile.slope[kLeft] * distance : -tile.slope[kRight] * distance;
        if (tile.hidden[kLeft]) y = back > W{0} ? lowest : y;
        if (tile.hidden[kRight]) y = back < W{0} ? lowest : y;
        x[j] = ramp + static_cast<W>(j * kLanes) >= end ? lowest : y;
      }
    }
    if (!masked) return;
    const W first = static_cast<W>(clamp(tile.row_first[i] - first_key, 0, kKeys));
    const W last = static_cast<W>(clamp(tile.row_end[i] - first_key, 0, kKeys));
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> key = ramp + static_cast<W>(j * kLanes);
      x[j] = key < first ? lowest : x[j];
      x[j] = key >= last ? lowest : x[j];
    }
  }
};

// The rule of linbias/torch/dropout.py: which weights stay.
struct Dropout {
  uint32_t rows[kRows], threshold;

  // Of one number, or of a vector of them.
  template <typename X>
  static LINBIAS_INLINE X mix(X x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
  }

  template <typename W>
  explicit Dropout(const Tile<W>& tile) {
    const Call& call = *tile.call;
    threshold = static_cast<uint32_t>(call.dropout * 4294967296.0 + 0.5);
    const uint32_t head = mix(mix(call.seed) ^ static_cast<uint32_t>(tile.b * call.H + tile.h));
    for (int64_t i = 0; i < kRows; ++i)
      rows[i] = mix(head ^ (call.first_query + static_cast<uint32_t>(tile.start + i)));
  }

  // to <- from / (1 - dropout) where it stays, 0 elsewhere.
  template <typename W>
  void apply(const Tile<W>& tile, int64_t block, const W* from, W* to) const {
    const W share = static_cast<W>(1.0 / (1.0 - tile.call->dropout));
    uint32_t columns[kKeys];
    for (int64_t j = 0; j < kKeys; ++j) {
      columns[j] = mix(tile.call->first_key + static_cast<uint32_t>(tile.head->first + block * kKeys + j));
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
  pack_rows<W>(row_of<In>(call.q, tile.b, tile.h, tile.start), call.q.row, tile.rows, call.D,
               static_cast<W>(call.scale), tile.padded_rows, padded_D, q);
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
