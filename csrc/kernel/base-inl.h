// What every part of the kernel builds on: the target that it is compiled for, sizes, numbers and memory.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>  // madvise
#endif

#include "linbias/attention.h"

// A target_*.cpp names its target, and says what that has, before it includes the kernel. Where none did, as in an
// editor that opens a part alone, it is the one that has every part and compiles for any CPU.
#if !defined(LINBIAS_TARGET)
#define LINBIAS_TARGET avx512_amx_emulated
#define LINBIAS_VECTOR_BYTES 64
#define LINBIAS_BFLOAT16
#define LINBIAS_AMX
#define LINBIAS_AMX_EMULATED
#endif

#define LINBIAS_INLINE inline __attribute__((always_inline))

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr int64_t kRows = kTileRows, kKeys = kBlockKeys;
constexpr int64_t kLargestSize = 256;  // of keys and values whose rows are computed on the stack
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

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
