// The arrays of a call: which keys a key/value head shows, what reads it, and its keys and values packed in blocks.
#pragma once

#include "kernel/simd-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// The keys of one key/value head that queries may see, whatever the caller asks for: first >= 0, first + count <= S.
struct KeyRange {
  int64_t first, count;

  KeyRange(const Call& call, int64_t b, int64_t g) : first(0), count(call.S) {
    if (!call.key_range) return;
    const int64_t* given = call.key_range + (b * call.G + g) * 2;
    first = clamp(given[0], 0, call.S);
    count = clamp(given[1], first, call.S) - first;
  }
};

// The keys of a head that query t of batch row b may see of itself, counted from the head's first key.
struct QueryRange {
  int64_t first, end;

  QueryRange(const Call& call, int64_t b, int64_t t, int64_t first_key, int64_t num_keys) : first(0), end(num_keys) {
    if (!call.query_range) return;
    const int64_t* given = call.query_range + (b * call.T + t) * 2;
    first = clamp(clamp(given[0], 0, call.S) - first_key, 0, num_keys);
    end = clamp(clamp(given[1], 0, call.S) - first_key, first, num_keys);
  }

  bool is_empty() const { return first == end; }
  // Whether some of the keys [from, to) are among them.
  bool meets(int64_t from, int64_t to) const { return first < to && from < end && first < end; }
};

// How many keys the head shows that shows the most.
inline int64_t most_keys(const Call& call) {
  if (!call.key_range) return call.S;
  int64_t most = 0;
  for (int64_t head = 0; head < call.B * call.G; ++head) {
    most = larger_of(most, KeyRange(call, head / call.G, head % call.G).count);
  }
  return most;
}

// The length of the longest range of a query.
inline int64_t most_seen(const Call& call) {
  int64_t most = 0;
  for (int64_t row = 0; row < call.B * call.T; ++row) {
    const QueryRange range(call, row / call.T, row % call.T, 0, call.S);
    most = larger_of(most, range.end - range.first);
  }
  return most;
}

// Where query t of a query head, and key s of head `index` of [B, heads], stand among the rows of results, and how far
// apart two queries are.
inline int64_t query_at(const Call& call, int64_t b, int64_t h, int64_t t) {
  return call.by_row ? (b * call.T + t) * call.H + h : (b * call.H + h) * call.T + t;
}
inline int64_t query_step(const Call& call) { return call.by_row ? call.H : 1; }
inline int64_t key_at(const Call& call, int64_t heads, int64_t index, int64_t s) {
  return call.by_row ? (index / heads * call.S + s) * heads + index % heads : index * call.S + s;
}

// The key at which query t of a head stands, which may be none that there is.
inline int64_t order_of(const Call& call, int64_t b, int64_t h, int64_t t) {
  if (call.own_key) return clamp(call.own_key[query_at(call, b, h, t)], -kLargestStart, kLargestStart);
  return (call.query_start ? clamp(call.query_start[b], -kLargestStart, kLargestStart) : call.S - call.T) + t;
}

// The query heads of batch row b, from `first` up to `end`, that read key/value head `index` of [B, G].
struct Readers {
  int64_t b, first, end;

  Readers(const Call& call, int64_t index) : b(index / call.G) {
    const int64_t count = call.H / call.G;
    first = index % call.G * count;
    end = first + count;
  }
};

template <typename In>
const In* row_of(const Array& array, int64_t b, int64_t head, int64_t row) {
  return static_cast<const In*>(array.data) + b * array.batch + head * array.head + row * array.row;
}

// Keys or values of one head of a batch row, one row after the other or in pages.
template <typename In>
struct RowsOf {
  const Call* call;
  const Array* array;
  int64_t b, head;

  const In* at(int64_t row) const {
    if (!call->pages) return row_of<In>(*array, b, head, row);
    const int64_t page = call->pages[b * call->pages_row + row / call->page_keys];
    return row_of<In>(*array, clamp(page, 0, call->num_pages - 1), head, row % call->page_keys);
  }
  // How many rows from `row` on lie `array->row` apart, of the `count` that are asked for.
  int64_t in_a_row(int64_t row, int64_t count) const {
    return call->pages ? smaller_of(count, call->page_keys - row % call->page_keys) : count;
  }
  // `count` rows from `row` on, `step` apart: where they lie, or copied to room[count, size] out of several pages.
  const In* block(int64_t row, int64_t count, int64_t size, In* room, int64_t& step) const {
    step = array->row;
    if (in_a_row(row, count) == count) return at(row);
    step = size;
    for (int64_t i = 0; i < count; ++i)
      __builtin_memcpy(room + i * size, at(row + i), sizeof(In) * static_cast<size_t>(size));
    return room;
  }
};

// Room for a block of keys or values, and each worker has one for both, where pages may cut blocks apart.
template <typename In>
struct PageRoom {
  Buffer<In> rooms;  // [workers, 2, kKeys, size]
  int64_t size;

  explicit PageRoom(const Call& call) : size(call.pages ? kKeys * larger_of(call.D, call.E) : 0) {}
  bool allocate(const Call& call) { return !size || rooms.allocate(call.num_threads, 2, size); }
  In* of_keys(int worker) const { return rooms.data + worker * 2 * size; }
  In* of_values(int worker) const { return of_keys(worker) + size; }
};

// factor * from[size] to the output, from its entry `at` on.
template <typename W>
LINBIAS_INLINE void store_output(const Forward& results, int64_t at, int64_t size, const W* from, W factor) {
  if (results.narrow) {
    Bfloat16* out = static_cast<Bfloat16*>(results.out) + at;
    for (int64_t e = 0; e < size; ++e) out[e] = round_to_bfloat16(static_cast<float>(from[e] * factor));
  } else {
    W* out = static_cast<W*>(results.out) + at;
    for (int64_t e = 0; e < size; ++e) out[e] = from[e] * factor;
  }
}

// The slope of a query head on one side; infinite where it sees nothing there.
template <typename W>
W slope_of(const Call& call, int side, int64_t b, int64_t h) {
  const void* slopes = side == kLeft ? call.left : call.right;
  return slopes ? static_cast<const W*>(slopes)[b * call.H + h] : kInfinity<W>;
}

// The slopes of a query head, 0 on a side that is hidden.
template <typename W>
void find_slopes(const Call& call, int64_t b, int64_t h, W (&slope)[2], bool (&hidden)[2]) {
  for (int side = kLeft; side <= kRight; ++side) {
    slope[side] = slope_of<W>(call, side, b, h);
    hidden[side] = is_infinite(slope[side]);
    if (hidden[side]) slope[side] = 0;
  }
}

// The keys of key/value head `index` of [B, G] that any query may see.
template <typename W>
struct SeenKeys {
  int64_t first, end;

  SeenKeys(const Call& call, int64_t index) {
    const Readers readers(call, index);
    const KeyRange range(call, readers.b, index % call.G);
    const int64_t beyond = range.first + range.count;
    first = beyond;
    end = range.first;
    for (int64_t h = readers.first; h < readers.end && call.T > 0; ++h) {
      const bool shows_left = !is_infinite(slope_of<W>(call, kLeft, readers.b, h)),
                 shows_right = !is_infinite(slope_of<W>(call, kRight, readers.b, h));
      first = smaller_of(first, shows_left ? range.first : larger_of(order_of(call, readers.b, h, 0), range.first));
      end = larger_of(end, shows_right ? beyond : smaller_of(order_of(call, readers.b, h, call.T - 1) + 1, beyond));
    }
    end = larger_of(end, first);
  }
};

// Zero the gradients of the keys and values that no query sees.
template <typename W>
void clear_unseen_gradients(const Call& call, const Backward& results) {
  for (int64_t head = 0; head < call.B * call.G; ++head) {
    const SeenKeys<W> seen(call, head);
    const auto clear = [&](void* gradient, int64_t size, int64_t from, int64_t to) {
      for (int64_t s = from; s < to; ++s) {
        W* row = static_cast<W*>(gradient) + key_at(call, call.G, head, s) * size;
        __builtin_memset(row, 0, sizeof(W) * static_cast<size_t>(size));
      }
    };
    clear(results.dk, call.D, 0, seen.first);
    clear(results.dk, call.D, seen.end, call.S);
    clear(results.dv, call.E, 0, seen.first);
    clear(results.dv, call.E, seen.end, call.S);
  }
}

// The keys and values of one key/value head, wide, padded with zeros to whole blocks and vectors; `keys` and `values`
// may be the caller's own, which nothing pads.
template <typename W>
struct Head {
  int64_t first, num_keys, num_blocks;  // key `first` is key 0 of the head, and begins block 0
  W* key_columns;                       // [blocks, D, kKeys]
  W* value_columns;                     // [blocks, E, kKeys], backward only
  const W *keys, *values;               // [num_keys, key_row or value_row]; keys for backward, values for forward
  int64_t key_row, value_row;
  W* center;               // [D], the mean of some keys
  W* radius;               // [blocks], the largest |k - center|; NaN if anything in the block is not finite
  W* spread;               // [blocks], at least the fourth root of the mean (u.(k - center))^4, for any unit vector u
  W center_norm, largest;  // largest: of all radii
};

// Up to kKeys rows of inputs, from_row apart, to columns: to[size, kKeys], zeros where rows are missing.
template <typename W, typename In>
void pack_columns(const In* from, int64_t from_row, int64_t count, int64_t size, W* to) {
  constexpr int kLanes = Simd<W>::kLanes;
  for (int64_t i = 0; i < kKeys; i += kLanes) {
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) {
      Vector<W> square[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j)
        square[j] = i + j < count ? load_wide(from + (i + j) * from_row + d) : Vector<W>{};
      transpose(square);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store<W>(to + (d + j) * kKeys + i, square[j]);
    }
    for (; d < size; ++d) {
      for (int64_t j = i; j < i + kLanes; ++j) {
        to[d * kKeys + j] = j < count ? static_cast<W>(widen(from[j * from_row + d])) : W{0};
      }
    }
  }
}

// `count` rows of inputs times a factor, to rows: to[rows, padded], zeros behind each and where rows are missing.
template <typename W, typename In>
void pack_rows(const In* from, int64_t from_row, int64_t count, int64_t size, W factor, int64_t rows, int64_t padded,
               W* to) {
  constexpr int kLanes = Simd<W>::kLanes;
  for (int64_t i = 0; i < rows; ++i, from += from_row, to += padded) {
    int64_t d = 0;
    if (i < count) {
      for (; d + kLanes <= size; d += kLanes) store<W>(to + d, load_wide(from + d) * factor);
      for (; d < size; ++d) to[d] = static_cast<W>(widen(from[d])) * factor;
    }
    for (; d < padded; ++d) to[d] = 0;
  }
}

// 0, or NaN if any of these numbers is not finite; count is a multiple of 16.
template <typename W>
W zero_or_nan(const W* x, int64_t count) {
  W zeros[16] = {}, total = 0;
  for (int64_t j = 0; j < count; j += 16) {
    for (int lane = 0; lane < 16; ++lane) zeros[lane] += x[j + lane] * W{0};
  }
  for (const W zero : zeros) total += zero;
  return total;
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
