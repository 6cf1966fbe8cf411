// The kernel body, compiled once per CPU target (target_*.cpp) in a namespace of its own.
//
// Computes DESIGN section 1 for [B, heads, length, size] arrays; the certificate is derived in docs/math.md.
//
// Order: keys and values are packed once per key/value head (wide, keys transposed in blocks of 64); then one task
// per (batch, head, tile of 48 query rows) visits key blocks from the nearest outwards, left and right in turn, with
// an online softmax, until the certificate lets it stop. Backward visits the same blocks; a task is a head, or a part
// of one where heads are few, and adds to gradients of keys and values of its own, summed in a fixed order afterwards.
// Results do not depend on the number of threads.
//
// Products: one register block of 6 rows x 4 vectors (2 where registers are few) serves all of them.
// Memory above inputs and results: wide packed keys and values, and per thread a few tiles; in backward also one
// gradient of keys and values per task. No term in T x S.
// bfloat16: where the CPU multiplies pairs of bfloat16 (LINBIAS_BF16), forward does so. The weights, float32 like all
// sums, are rounded to one bfloat16, or, for a result that will be differentiated (call.precise), to the sum of two:
// backward takes differences from `out`, and one would cost the gradients of slopes two digits.
// Only C functions and templates of this file are used: an inline function of the standard library, compiled here
// with the target's flags, could be linked into code that runs everywhere.

#include <stdint.h>
#include <stdlib.h>
#if defined(LINBIAS_BF16)
#include <immintrin.h>
#endif

#include "linbias/attention.h"
#include "parallel.h"

namespace linbias::LINBIAS_TARGET {
namespace {

#include "simd-inl.h"

constexpr int64_t kRows = kTileRows, kKeys = kBlockKeys;
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = LINBIAS_VECTOR_BYTES == 64 ? 4 : 2;  // 24 of 32 registers, or 12 of 16
enum Side { kLeft, kRight };

template <typename W>
constexpr W kInfinity = static_cast<W>(__builtin_inf());

LINBIAS_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
LINBIAS_INLINE double square_root(double x) { return __builtin_sqrt(x); }
LINBIAS_INLINE bool is_infinite(double x) { return x == __builtin_inf(); }
LINBIAS_INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
LINBIAS_INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
LINBIAS_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Memory that is freed at the end of its block, 64-byte aligned.
template <typename X>
struct Buffer {
  X* data = nullptr;
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data); }
  // Returns whether there was memory for so many elements.
  bool allocate(int64_t a, int64_t b = 1, int64_t c = 1) {
    int64_t count, bytes;
    if (__builtin_mul_overflow(a, b, &count) || __builtin_mul_overflow(count, c, &count) ||
        __builtin_mul_overflow(count, static_cast<int64_t>(sizeof(X)), &bytes) || bytes > INT64_MAX - 64) {
      return false;
    }
    data = static_cast<X*>(aligned_alloc(64, static_cast<size_t>(round_up(larger_of(bytes, 1), 64))));
    return data != nullptr;
  }
};

// ---------------------------------------------------------------------------------------------- matrix products

// c[MR, NV vectors] (+)= a[MR, depth] b[depth, NV vectors]; a may lie transposed.
template <typename W, int MR, int NV>
LINBIAS_INLINE void register_block(int64_t depth, const W* a, int64_t a_row, int64_t a_column, const W* b,
                                   int64_t b_row, W* c, int64_t c_row, bool add) {
  constexpr int kLanes = Simd<W>::kLanes;
  Vector<W> sums[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) sums[i][j] = Vector<W>{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<W> columns[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) columns[j] = load(b + k * b_row + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const Vector<W> row = broadcast(a[i * a_row + k * a_column]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] += row * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      // Added last: short sums of sums round less than one long sum.
      W* to = c + i * c_row + j * kLanes;
      store<W>(to, add ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

template <typename W, int NV>
void column_strip(int64_t rows, int64_t depth, const W* a, int64_t a_row, int64_t a_column, const W* b,
                  int64_t b_row, W* c, int64_t c_row, bool add) {
  int64_t i = 0;
  for (; i + kBlockRows <= rows; i += kBlockRows) {
    register_block<W, kBlockRows, NV>(depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, add);
  }
  for (; i + 2 <= rows; i += 2) {  // kKeys rows leave 4
    register_block<W, 2, NV>(depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, add);
  }
}

template <typename W>
void multiply_short(int64_t rows, int64_t columns, int64_t depth, const W* a, int64_t a_row, int64_t a_column, const W* b,
              int64_t b_row, W* c, int64_t c_row, bool add) {
  constexpr int kLanes = Simd<W>::kLanes;
  for (int64_t j = 0; j < columns; j += kBlockVectors * kLanes) {
    const int64_t vectors = (columns - j) / kLanes;
    if (vectors >= kBlockVectors) {
      column_strip<W, kBlockVectors>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    } else if (vectors == 3) {
      column_strip<W, 3>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    } else if (vectors == 2) {
      column_strip<W, 2>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    } else {
      column_strip<W, 1>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    }
  }
}

// c[rows, columns] (+)= a[rows, depth] b[depth, columns]; rows even, columns a multiple of the lanes. Products are
// summed 64 at a time: sums of short sums lose fewer digits than one long sum.
constexpr int64_t kDepth = 64;

template <typename W>
void multiply(int64_t rows, int64_t columns, int64_t depth, const W* a, int64_t a_row, int64_t a_column, const W* b,
              int64_t b_row, W* c, int64_t c_row, bool add) {
  for (int64_t k = 0; k < depth; k += kDepth) {
    multiply_short<W>(rows, columns, smaller_of(kDepth, depth - k), a + k * a_column, a_row, a_column, b + k * b_row,
                      b_row, c, c_row, add || k > 0);
  }
}

// Whether the products of these inputs are made of pairs.
template <typename In>
constexpr bool kPairs = false;

#if defined(LINBIAS_BF16)
template <>
constexpr bool kPairs<Bfloat16> = true;

// c[MR, NV vectors] (+)= a[MR, depth] b[depth, NV vectors], a word of a and b being two bfloat16 side by side.
template <int MR, int NV>
LINBIAS_INLINE void register_block_of_pairs(int64_t depth, const uint32_t* a, int64_t a_row, const uint32_t* b,
                                            int64_t b_row, float* c, int64_t c_row, bool add) {
  __m512 sums[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512bh columns[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(b + k * b_row + j * 16);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const __m512bh row = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i * a_row + k]));
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      float* to = c + i * c_row + j * 16;
      _mm512_storeu_ps(to, add ? _mm512_loadu_ps(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// rows a multiple of kBlockRows, columns of 16.
void multiply_pairs(int64_t rows, int64_t columns, int64_t depth, const uint32_t* a, int64_t a_row, const uint32_t* b,
                    int64_t b_row, float* c, int64_t c_row, bool add) {
  for (int64_t j = 0; j < columns; j += 64) {
    const int64_t vectors = (columns - j) / 16;
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      const uint32_t* a_i = a + i * a_row;
      float* c_i = c + i * c_row + j;
      if (vectors >= 4) {
        register_block_of_pairs<kBlockRows, 4>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      } else if (vectors == 3) {
        register_block_of_pairs<kBlockRows, 3>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      } else if (vectors == 2) {
        register_block_of_pairs<kBlockRows, 2>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      } else {
        register_block_of_pairs<kBlockRows, 1>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      }
    }
  }
}

// high <- from, rounded to bfloat16; from <- what that lost.
void split_weights(int64_t count, float* from, uint32_t* high) {
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 x = _mm512_loadu_ps(from + i);
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i / 2), rounded);
    const __m512i widened = _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    _mm512_storeu_ps(from + i, _mm512_sub_ps(x, _mm512_castsi512_ps(widened)));
  }
}
#else  // named in branches that are never taken
[[maybe_unused]] void multiply_pairs(int64_t, int64_t, int64_t, const uint32_t*, int64_t, const uint32_t*, int64_t, float*,
                                     int64_t, bool) {}
[[maybe_unused]] void split_weights(int64_t, float*, uint32_t*) {}
#endif

// ------------------------------------------------------------------------------------------------------- packing

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

// --------------------------------------------------------------------------------------------------------- tiles

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

// -------------------------------------------------------------------------------------------------------- decode

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

template <typename W, typename In>
Status forward_as(const Call& call, const Forward& results) {
  const bool small = call.T <= kFewQueries && call.D <= kLargestSize && call.E <= kLargestSize;
  if (small && call.S > kKeys && !call.precise && !(call.dropout > 0)) return decode_as<W, In>(call, results);
  Packed<W> packed;
  Buffer<Scratch<W>> scratches;
  Buffer<W> memory;
  if (!packed.allocate(call, false, kPairs<In>) || !allocate_scratch(call, packed, scratches, memory)) return Status::out_of_memory;
  PackTask<W, In, kPairs<In>>{call, packed}.run();
  const int64_t num_tiles = round_up(call.T, kRows) / kRows;
  ForwardTask<W, In> task{call, results, packed, scratches.data, num_tiles, slack_of<W>(call.D)};
  parallel(call.B * call.H * num_tiles, call.num_threads, ForwardTask<W, In>::run, &task);
  return Status::ok;
}

// ------------------------------------------------------------------------------------------------------ backward

template <typename W, typename In>
struct BackwardTask {
  const Call& call;
  const Backward& results;
  const Packed<W>& packed;
  Scratch<W>* scratches;
  int64_t num_tiles, num_parts, tiles_per_part;
  W *dk, *dv;        // [B, H, parts, S padded, D or E padded]
  double* dslopes;   // [B, H, parts, 2]

  static void run(void* context, int64_t task, int worker) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const Call& call = self.call;
    const int64_t index = call.B * call.H * self.num_parts - 1 - task;  // the flattest heads first
    const int64_t part = index % self.num_parts, head = index / self.num_parts;
    const int64_t rows = self.packed.num_blocks * kKeys;
    W* dk = self.dk + index * rows * self.packed.padded_D;
    W* dv = self.dv + index * rows * self.packed.padded_E;
    __builtin_memset(dk, 0, sizeof(W) * static_cast<size_t>(rows * self.packed.padded_D));
    __builtin_memset(dv, 0, sizeof(W) * static_cast<size_t>(rows * self.packed.padded_E));
    double* dslopes = self.dslopes + 2 * index;
    dslopes[kLeft] = dslopes[kRight] = 0;
    const int64_t from = part * self.tiles_per_part;
    for (int64_t t = from; t < smaller_of(from + self.tiles_per_part, self.num_tiles); ++t) {
      self.tile(head / call.H, head % call.H, t, self.scratches[worker], dk, dv, dslopes);
    }
  }

  void tile(int64_t b, int64_t h, int64_t t, Scratch<W>& scratch, W* dk, W* dv, double* dslopes) const {
    const Tile<W> tile(call, packed, b, h, t);
    load_queries<W, In>(tile, packed.padded_D, scratch.q);
    load_output_gradient(tile, scratch);
    W* dq = scratch.acc;
    for (int64_t i = 0; i < tile.padded_rows * packed.padded_D; ++i) dq[i] = 0;
    const int32_t* visited = results.saved.visited + ((b * call.H + h) * results.saved.visited_tiles + t) * 2;
    for (int64_t block = tile.near_first - visited[kLeft]; block <= tile.near_last + visited[kRight]; ++block) {
      visit(tile, block, scratch, dq, dk, dv, dslopes);
    }
    const W scale = static_cast<W>(call.scale);
    for (int64_t i = 0; i < tile.rows; ++i) {
      W* to = static_cast<W*>(results.dq) + tile.index(i) * call.D;
      for (int64_t d = 0; d < call.D; ++d) to[d] = dq[i * packed.padded_D + d] * scale;
    }
  }

  // dout and delta divided by the row's sum, so that unnormalised weights serve for normalised ones.
  void load_output_gradient(const Tile<W>& tile, Scratch<W>& scratch) const {
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      W* dout = scratch.dout + i * packed.padded_E;
      for (int64_t e = 0; e < packed.padded_E; ++e) dout[e] = 0;
      scratch.delta[i] = 0;
      scratch.row_max[i] = kInfinity<W>;  // exp(score - inf) = 0: no weight in a row without keys
      if (i >= tile.rows) continue;
      const int64_t at = tile.index(i);
      const W log_sum = static_cast<const W*>(results.saved.log_sum)[at];
      if (log_sum == -kInfinity<W>) continue;
      scratch.row_max[i] = static_cast<const W*>(results.saved.row_max)[at];
      const W per_sum = static_cast<W>(__builtin_exp(-static_cast<double>(log_sum)));
      const W* given = static_cast<const W*>(results.dout) + at * call.E;
      const W* out = static_cast<const W*>(results.saved.out) + at * call.E;
      W delta = 0;
      for (int64_t e = 0; e < call.E; ++e) {
        delta += given[e] * out[e];
        dout[e] = given[e] * per_sum;
      }
      scratch.delta[i] = (delta - static_cast<const W*>(results.dlse)[at]) * per_sum;
    }
  }

  void visit(const Tile<W>& tile, int64_t block, Scratch<W>& scratch, W* dq, W* dk, W* dv, double* dslopes) const {
    const Head<W>& head = *tile.head;
    const int64_t rows = tile.padded_rows, D = packed.padded_D, E = packed.padded_E;
    multiply<W>(rows, kKeys, call.D, scratch.q, D, 1, head.keys_across + block * call.D * kKeys, kKeys,
                scratch.score, kKeys, false);
    multiply<W>(rows, kKeys, call.E, scratch.dout, E, 1, head.values_across + block * call.E * kKeys, kKeys,
                scratch.dweight, kKeys, false);
    constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
    const Biased<W> biased(tile, block, W{1});
    for (int64_t i = 0; i < rows; ++i) {
      Vector<W> x[kVectors];
      W* row = scratch.score + i * kKeys;
      biased.row(i, row, x);
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) store<W>(row + j * kLanes, exponential<W>(x[j] - scratch.row_max[i]));
    }
    const W* dropped = scratch.score;
    if (call.dropout > 0) {
      const Dropout dropout(tile);
      dropout.apply(tile, block, scratch.score, scratch.dropped);
      dropout.apply(tile, block, scratch.dweight, scratch.dweight);
      dropped = scratch.dropped;
    }
    multiply<W>(kKeys, E, rows, dropped, 1, kKeys, scratch.dout, E, dv + block * kKeys * E, E, true);
    W* dscore = scratch.dweight;
    for (int64_t i = 0; i < rows; ++i) {
      Vector<W> left{}, right{};
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        W* at = dscore + i * kKeys + j * kLanes;
        const Vector<W> found = load(scratch.score + i * kKeys + j * kLanes) * (load(at) - scratch.delta[i]);
        store<W>(at, found);
        const Vector<W> distance = biased.reach(i, j), moment = found * distance;
        left += distance > W{0} ? moment : Vector<W>{};
        right += distance < W{0} ? moment : Vector<W>{};
      }
      // dslope = -sum dscore * |distance|, on each side.
      dslopes[kLeft] -= static_cast<double>(sum<W>(left));
      dslopes[kRight] += static_cast<double>(sum<W>(right));
    }
    multiply<W>(rows, D, kKeys, dscore, kKeys, 1, head.keys + block * kKeys * D, D, dq, D, true);
    multiply<W>(kKeys, D, rows, dscore, 1, kKeys, scratch.q, D, dk + block * kKeys * D, D, true);
  }

  // Add up what the query heads of a group, and the parts of each, found for one block of a key/value head.
  static void collect(void* context, int64_t task, int) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const Call& call = self.call;
    const int64_t block = task % self.packed.num_blocks, index = task / self.packed.num_blocks;
    const Head<W>& head = self.packed.heads.data[index];
    const int64_t group = call.H / call.G, rows = self.packed.num_blocks * kKeys;
    const int64_t sources = (index / call.G * call.H + index % call.G * group) * self.num_parts;
    for (int64_t s = block * kKeys; s < smaller_of((block + 1) * kKeys, head.num_keys); ++s) {
      const int64_t to = index * call.S + head.first + s;
      add_rows(self.dk, sources, group * self.num_parts, rows, s, self.packed.padded_D, call.D,
               static_cast<W*>(self.results.dk) + to * call.D);
      add_rows(self.dv, sources, group * self.num_parts, rows, s, self.packed.padded_E, call.E,
               static_cast<W*>(self.results.dv) + to * call.E);
    }
  }

  static void add_rows(const W* from, int64_t first, int64_t count, int64_t rows, int64_t s, int64_t padded,
                       int64_t size, W* to) {
    for (int64_t source = first; source < first + count; ++source) {
      const W* row = from + (source * rows + s) * padded;
      for (int64_t x = 0; x < size; ++x) to[x] += row[x];
    }
  }
};

template <typename W, typename In>
Status backward_as(const Call& call, const Backward& results) {
  // Enough tasks to share out, whatever the number of threads: the sums must not depend on it.
  constexpr int64_t kEnoughTasks = 16;
  const int64_t num_tiles = round_up(call.T, kRows) / kRows, num_heads = call.B * call.H;
  for (int64_t head = 0; head < num_heads; ++head) {
    static_cast<W*>(results.dleft)[head] = static_cast<W*>(results.dright)[head] = 0;
  }
  if (num_heads == 0 || num_tiles == 0) return Status::ok;
  int64_t num_parts = smaller_of(round_up(kEnoughTasks, num_heads) / num_heads, num_tiles);
  const int64_t tiles_per_part = round_up(num_tiles, num_parts) / num_parts;
  num_parts = round_up(num_tiles, tiles_per_part) / tiles_per_part;

  Packed<W> packed;
  Buffer<Scratch<W>> scratches;
  Buffer<W> memory, dk, dv;
  Buffer<double> dslopes;
  if (!packed.allocate(call, true, false) || !allocate_scratch(call, packed, scratches, memory)) {
    return Status::out_of_memory;
  }
  const int64_t rows = packed.num_blocks * kKeys;
  if (!dk.allocate(num_heads * num_parts, rows, packed.padded_D) ||
      !dv.allocate(num_heads * num_parts, rows, packed.padded_E) || !dslopes.allocate(num_heads * num_parts, 2)) {
    return Status::out_of_memory;
  }
  PackTask<W, In, false>{call, packed}.run();
  BackwardTask<W, In> task{call,      results,   packed,         scratches.data, num_tiles,
                           num_parts, tiles_per_part, dk.data, dv.data,        dslopes.data};
  parallel(num_heads * num_parts, call.num_threads, BackwardTask<W, In>::run, &task);
  parallel(call.B * call.G * packed.num_blocks, call.num_threads, BackwardTask<W, In>::collect, &task);
  for (int64_t head = 0; head < num_heads; ++head) {
    double totals[2] = {0, 0};
    for (int64_t part = 0; part < num_parts; ++part) {
      totals[kLeft] += dslopes.data[(head * num_parts + part) * 2 + kLeft];
      totals[kRight] += dslopes.data[(head * num_parts + part) * 2 + kRight];
    }
    static_cast<W*>(results.dleft)[head] = static_cast<W>(totals[kLeft]);
    static_cast<W*>(results.dright)[head] = static_cast<W>(totals[kRight]);
  }
  return Status::ok;
}

}  // namespace

Status forward(const Call& call, const Forward& results) {
  switch (call.dtype) {
    case DType::float32: return forward_as<float, float>(call, results);
    case DType::float64: return forward_as<double, double>(call, results);
    case DType::float16: return forward_as<float, Float16>(call, results);
    case DType::bfloat16: return forward_as<float, Bfloat16>(call, results);
  }
  return Status::ok;
}

Status backward(const Call& call, const Backward& results) {
  switch (call.dtype) {
    case DType::float32: return backward_as<float, float>(call, results);
    case DType::float64: return backward_as<double, double>(call, results);
    case DType::float16: return backward_as<float, Float16>(call, results);
    case DType::bfloat16: return backward_as<float, Bfloat16>(call, results);
  }
  return Status::ok;
}

}  // namespace linbias::LINBIAS_TARGET
