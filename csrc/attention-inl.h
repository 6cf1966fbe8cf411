// The kernel body, compiled once per CPU target (target_*.cpp) in a namespace of its own.
//
// Computes DESIGN section 1 for [B, heads, length, size] arrays; the certificate is derived in docs/math.md.
//
// Order: keys and values are packed once per key/value head (wide, keys transposed in blocks of 64); then one task
// per (batch, head, tile of 48 query rows) visits key blocks from the nearest outwards, left and right in turn, with
// an online softmax, until the certificate lets it stop. Backward visits the same blocks; a task is a head, or a piece
// of one where heads are few, and adds to gradients of keys and values of its own, summed in a fixed order afterwards.
// Results do not depend on the number of threads.
//
// Keys that stand at given positions (places-inl.h) go the same ways: a block's distances are read from one row of
// numbers instead of being counted, and the tables of the certificate from sums over the keys instead of a series.
//
// Products: one register block of 6 rows x 4 vectors (2 where registers are few) serves all of them.
// Memory above inputs and results: wide packed keys and values, and per thread a few tiles; in backward also one
// gradient of keys and values per task. No term in T x S.
// bfloat16: where the CPU multiplies pairs of them (LINBIAS_ACROSS), these inputs take a way of their own,
// across-inl.h: on a matrix unit (LINBIAS_AMX), together with most calls of float32, or on vectors. Weights of
// bfloat16, summed in float32, are rounded to one, or, for a result that will be differentiated (call.precise), to the
// sum of two: backward takes differences from `out`, and one would cost the gradients of slopes two digits.
// Only C functions and templates of this file are used: an inline function of the standard library, compiled here
// with the target's flags, could be linked into code that runs everywhere.

#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>  // madvise
#endif

#include <utility>  // integer_sequence

#if defined(__AVX512DQ__)  // all targets of 512 bits but the emulated one
#include <immintrin.h>
#endif

#include "boxes.h"
#include "linbias/attention.h"
#include "linbias/points.h"
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
// The larger of the two; NaN if one of them is.
template <typename W>
LINBIAS_INLINE W larger_or_nan(W a, W b) {
  return a == a && !(b <= a) ? b : a;
}
LINBIAS_INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
LINBIAS_INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
LINBIAS_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
LINBIAS_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return larger_of(low, smaller_of(x, high)); }

// Memory that is freed at the end of its block, 64-byte aligned; much of it in huge pages, where Linux has them.
template <typename X>
struct Buffer {
  X* data = nullptr;
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data); }
  // Returns whether there was memory for so many elements.
  bool allocate(int64_t a, int64_t b = 1, int64_t c = 1) {
    constexpr int64_t kHugePage = 2 << 20;
    int64_t count, bytes;
    if (__builtin_mul_overflow(a, b, &count) || __builtin_mul_overflow(count, c, &count) ||
        __builtin_mul_overflow(count, static_cast<int64_t>(sizeof(X)), &bytes) || bytes > INT64_MAX - kHugePage) {
      return false;
    }
    const int64_t unit = bytes >= 2 * kHugePage ? kHugePage : 64;
    data = static_cast<X*>(
        aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(round_up(larger_of(bytes, 1), unit))));
#if defined(MADV_HUGEPAGE)
    if (data != nullptr && unit == kHugePage) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
    return data != nullptr;
  }
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

#include "products-inl.h"
#include "head-inl.h"
#include "places-inl.h"
#include "bounds-inl.h"
#include "packing-inl.h"
#include "tile-inl.h"
#include "certificate-inl.h"
#include "forward-inl.h"
#include "decode-inl.h"
#include "backward-inl.h"
#include "points-inl.h"
#if defined(LINBIAS_ACROSS)
#include "narrow-inl.h"
#include "terms-inl.h"
#if defined(LINBIAS_AMX)
#include "matrix-inl.h"
#else
#include "pairs-inl.h"
#endif
#include "across-inl.h"
#include "forward-across-inl.h"
#include "backward-across-inl.h"
#endif

// Whether these inputs can be multiplied in pairs: float32 in three terms each, which pays on a matrix unit only.
template <typename In>
constexpr bool kAcross = false;
#if defined(LINBIAS_ACROSS)
template <>
constexpr bool kAcross<Bfloat16> = true;
#endif
#if defined(LINBIAS_AMX)
template <>
constexpr bool kAcross<float> = true;
#endif

// Whether a call is computed in pairs. A matrix unit makes six products for one of float32, of numbers that have to be
// split first: that pays where heads fill the depth of its products and there are several blocks to visit (measured:
// even at 160 tokens, a tenth faster at 192). With the model of the unit every call is, so that tests of it can be
// small.
template <typename In>
[[maybe_unused]] bool is_across(const Call& call) {
#if defined(LINBIAS_AMX_EMULATED)
  return true;
#endif
  constexpr int64_t kFewest = 192, kNarrowest = 32;
  return sizeof(In) == 2 || (smaller_of(call.T, call.S) >= kFewest && smaller_of(call.D, call.E) >= kNarrowest);
}

template <typename W, typename In>
Status forward_as(const Call& call, const Forward& results) {
  const bool small = call.T <= kFewQueries && call.D <= kLargestSize && call.E <= kLargestSize;
  if (small && !call.precise && !(call.dropout > 0)) return decode_as<W, In>(call, results);
#if defined(LINBIAS_ACROSS)
  if constexpr (kAcross<In>) {
    if (is_across<In>(call)) return forward_with<ForwardAcross<In>>(call, results);
  }
#endif
  return forward_with<ForwardWork<W, In>>(call, results);
}

template <typename W, typename In>
Status forward_as(const Call& call, const NewTokens& tokens, const Forward& results) {
  append_as<W, In>(call, tokens);
  return forward_as<W, In>(call, results);
}

template <typename W, typename In>
Status backward_as(const Call& call, const Backward& results) {
#if defined(LINBIAS_ACROSS)
  if constexpr (kAcross<In>) {
    if (is_across<In>(call)) return backward_with<BackwardAcross<In>>(call, results);
  }
#endif
  return backward_with<BackwardWork<W, In>>(call, results);
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

Status forward(const Call& call, const NewTokens& tokens, const Forward& results) {
  switch (call.dtype) {
    case DType::float32: return forward_as<float, float>(call, tokens, results);
    case DType::float64: return forward_as<double, double>(call, tokens, results);
    case DType::float16: return forward_as<float, Float16>(call, tokens, results);
    case DType::bfloat16: return forward_as<float, Bfloat16>(call, tokens, results);
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

Status forward(const Call& call, const Points& points, const Forward& results) {
  switch (call.dtype) {
    case DType::float32: return forward_points<float, float>(call, points, results);
    case DType::float64: return forward_points<double, double>(call, points, results);
    case DType::float16: return forward_points<float, Float16>(call, points, results);
    case DType::bfloat16: return forward_points<float, Bfloat16>(call, points, results);
  }
  return Status::ok;
}

Status backward(const Call& call, const Points& points, const Backward& results) {
  switch (call.dtype) {
    case DType::float32: return backward_points<float, float>(call, points, results);
    case DType::float64: return backward_points<double, double>(call, points, results);
    case DType::float16: return backward_points<float, Float16>(call, points, results);
    case DType::bfloat16: return backward_points<float, Bfloat16>(call, points, results);
  }
  return Status::ok;
}

}  // namespace linbias::LINBIAS_TARGET
