// The few vector operations that the kernel needs, on the compiler's own vector types: LINBIAS_VECTOR_BYTES says how
// wide a register is.
//
// exp: x = n ln 2 + r, |r| <= ln 2 / 2; a polynomial for e^r (the coefficients of Cephes in float, Taylor's to r^13 in
// double), n into the exponent; 0 below the smallest normal number, NaN stays NaN. Rounding to n adds and subtracts a
// large number, which -ffast-math would remove: do not compile with it.
#pragma once

#include <utility>  // integer_sequence

#if defined(__AVX2__)  // all targets of x86-64 but the baseline and the emulated one
#include <immintrin.h>
#endif

#include "kernel/base-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

template <typename W>
struct Simd;

template <>
struct Simd<float> {
  static constexpr int kLanes = LINBIAS_VECTOR_BYTES / 4;
  typedef float Vector __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef int32_t Integers __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef double Doubles __attribute__((vector_size(2 * LINBIAS_VECTOR_BYTES)));
  static constexpr float kLowest = -87.3f, kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f,
                         kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr int kMantissaBits = 23, kExponentBias = 127, kCoefficients = 8;
  static constexpr float kPolynomial[kCoefficients] = {1.9875691500e-4f,
                                                       1.3981999507e-3f,
                                                       8.3334519073e-3f,
                                                       4.1665795894e-2f,
                                                       1.6666665459e-1f,
                                                       5.0000001201e-1f,
                                                       1.0f,
                                                       1.0f};
};

template <>
struct Simd<double> {
  static constexpr int kLanes = LINBIAS_VECTOR_BYTES / 8;
  typedef double Vector __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef int64_t Integers __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef Vector Doubles;
  static constexpr double kLowest = -708.0, kLog2e = 1.4426950408889634, kLn2High = 0.693147180369123816490,
                          kLn2Low = 1.90821492927058770002e-10, kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52, kExponentBias = 1023, kCoefficients = 14;
  static constexpr double kPolynomial[kCoefficients] = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
      1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
};

template <typename W>
using Vector = typename Simd<W>::Vector;
template <typename W>
constexpr std::make_integer_sequence<int, Simd<W>::kLanes> kEveryLane{};

template <typename W>
LINBIAS_INLINE Vector<W> load(const W* from) {
  Vector<W> x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

template <typename W>
LINBIAS_INLINE void store(W* to, Vector<W> x) {
  __builtin_memcpy(to, &x, sizeof x);
}

template <typename W>
LINBIAS_INLINE Vector<W> broadcast(W x) {
  return x - Vector<W>{};
}

template <typename W>
LINBIAS_INLINE Vector<W> larger(Vector<W> a, Vector<W> b) {
  return a > b ? a : b;
}

// x with its halves, quarters, ... exchanged: adding all of them up leaves the same sum in every lane.
template <int kStep, typename V, int... kLane>
LINBIAS_INLINE V exchange(V x, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, x, (kLane ^ kStep)...);
}

template <typename W, int kStep = Simd<W>::kLanes / 2>
LINBIAS_INLINE Vector<W> largest(Vector<W> x) {
  x = larger<W>(x, exchange<kStep>(x, kEveryLane<W>));
  if constexpr (kStep > 1) x = largest<W, kStep / 2>(x);
  return x;
}

template <typename W, int kStep = Simd<W>::kLanes / 2>
LINBIAS_INLINE Vector<W> sum_in_all_lanes(Vector<W> x) {
  x = x + exchange<kStep>(x, kEveryLane<W>);
  if constexpr (kStep > 1) x = sum_in_all_lanes<W, kStep / 2>(x);
  return x;
}

template <typename W>
LINBIAS_INLINE W sum(Vector<W> x) {
  return sum_in_all_lanes<W>(x)[0];
}

// Exchange rows and columns of a square of numbers, one vector a row: its halves, quarters, ... in turn.
template <int kStep, typename V, int kLanes, int... kLane>
LINBIAS_INLINE void exchange_rows(V (&x)[kLanes], std::integer_sequence<int, kLane...>) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const V a = x[i], b = x[i + kStep];
    x[i] = __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane - kStep : kLane)...);
    x[i + kStep] = __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane : kLane + kStep)...);
  }
}

template <int kStep, typename V, int kLanes>
LINBIAS_INLINE void transpose_from(V (&x)[kLanes]) {
  exchange_rows<kStep>(x, std::make_integer_sequence<int, kLanes>());
  if constexpr (kStep > 1) transpose_from<kStep / 2>(x);
}

template <typename V, int kLanes>
LINBIAS_INLINE void transpose(V (&x)[kLanes]) {
  static_assert(sizeof(V) == kLanes * sizeof(x[0][0]));
  transpose_from<kLanes / 2>(x);
}

// The sum of each of some vectors, in the lane of its number: halves, quarters, ... of two vectors become one in turn.
template <int kStep, typename V, int kLanes, int... kLane>
LINBIAS_INLINE void add_halves(V (&x)[kLanes], std::integer_sequence<int, kLane...> every_lane) {
#pragma GCC unroll 16
  for (int i = 0; i < kStep; ++i) {
    const V a = x[i], b = x[i + kStep];
    x[i] = __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane - kStep : kLane)...) +
           __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane : kLane + kStep)...);
  }
  if constexpr (kStep > 1) add_halves<kStep / 2>(x, every_lane);
}

template <typename V, int kLanes>
LINBIAS_INLINE V sum_of_each(V (&x)[kLanes]) {
  static_assert(sizeof(V) == kLanes * sizeof(x[0][0]));
  add_halves<kLanes / 2>(x, std::make_integer_sequence<int, kLanes>());
  return x[0];
}

#if defined(__AVX512DQ__)
// The same for float in fewer instructions: x in bits less the integer below it, a polynomial of degree 6 for the rest
// (minimax, exact at 0 and 1, to 7e-8), and the scaling. The rounding of x in bits matters only to weights that do not.
LINBIAS_INLINE Vector<float> exponential_in_bits(Vector<float> x) {
  const __m512 bits = (__m512)(x * Simd<float>::kLog2e);
  const Vector<float> r = (Vector<float>)_mm512_reduce_ps(bits, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vector<float> y = r * 2.17150053e-4f + 1.24408817e-3f;
  y = y * r + 9.67806391e-3f;
  y = y * r + 5.54841533e-2f;
  y = y * r + 0.240229517f;
  y = y * r + 0.693147004f;
  y = y * r + 1.0f;
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(Simd<float>::kLowest), _CMP_NLT_UQ);
  return (Vector<float>)_mm512_maskz_scalef_ps(normal, (__m512)y, bits);
}
#endif

template <typename W>
LINBIAS_INLINE Vector<W> exponential(Vector<W> x) {
#if defined(__AVX512DQ__)
  if constexpr (sizeof(W) == 4) return exponential_in_bits(x);
#endif
  using V = Vector<W>;
  using Integers = typename Simd<W>::Integers;
  const V rounded = x * Simd<W>::kLog2e + Simd<W>::kRound;
  const V n = rounded - Simd<W>::kRound;
  const V r = (x - n * Simd<W>::kLn2High) - n * Simd<W>::kLn2Low;
  V y = broadcast<W>(Simd<W>::kPolynomial[0]);
  for (int i = 1; i < Simd<W>::kCoefficients; ++i) y = y * r + Simd<W>::kPolynomial[i];
  // The last bits of `rounded` hold n: add the exponent's bias and move it into place.
  const Integers exponent = ((Integers)rounded + Simd<W>::kExponentBias) << Simd<W>::kMantissaBits;
  const V power = (V)exponent;
  return x < Simd<W>::kLowest ? V{} : y * power;
}

// At most log(x) but for rounding, and no more than 0.06 below it: 2^e f has log2 of at least e + f - 1. For normal
// x > 0.
LINBIAS_INLINE float log_from_below(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return static_cast<float>(bits - 0x3f800000) * (0.69314718f * 0x1p-23f);
}
LINBIAS_INLINE double log_from_below(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return static_cast<double>(bits - 0x3ff0000000000000) * (0.6931471805599453 * 0x1p-52);
}

LINBIAS_INLINE float natural_log(float x) { return __builtin_logf(x); }
LINBIAS_INLINE double natural_log(double x) { return __builtin_log(x); }
LINBIAS_INLINE float natural_exp(float x) { return __builtin_expf(x); }
LINBIAS_INLINE double natural_exp(double x) { return __builtin_exp(x); }

// 16-bit inputs, to float.
LINBIAS_INLINE float widen(float x) { return x; }
LINBIAS_INLINE double widen(double x) { return x; }
struct Bfloat16 {
  uint16_t bits;
};
LINBIAS_INLINE float widen(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}
LINBIAS_INLINE Bfloat16 round_to_bfloat16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? nearest : 0x7fc0)};
}
struct Float16 {
  uint16_t bits;
};
LINBIAS_INLINE float widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = x.bits & 0x7fff;
  uint32_t bits;
  if (rest >= 0x7c00) {
    bits = 0x7f800000 | (rest & 0x3ff) << 13;  // infinity, NaN
  } else {
    // Exponent and mantissa in a float's place are the value times 2^-112, subnormal numbers included.
    const uint32_t scaled = rest << 13;
    float y;
    __builtin_memcpy(&y, &scaled, sizeof y);
    y *= 0x1p112f;
    __builtin_memcpy(&bits, &y, sizeof bits);
  }
  bits |= sign;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}

// One vector of inputs, widened.
LINBIAS_INLINE Vector<float> load_wide(const float* from) { return load(from); }
LINBIAS_INLINE Vector<double> load_wide(const double* from) { return load(from); }
LINBIAS_INLINE Vector<float> load_wide(const Bfloat16* from) {
  typedef uint16_t Narrow __attribute__((vector_size(LINBIAS_VECTOR_BYTES / 2)));
  typedef uint32_t Wide __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  Narrow x;
  __builtin_memcpy(&x, from, sizeof x);
#if defined(__AVX512DQ__) && LINBIAS_VECTOR_BYTES == 64  // for convertvector GCC takes five instructions
  const Wide wide = (Wide)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__) && LINBIAS_VECTOR_BYTES == 32
  const Wide wide = (Wide)_mm256_cvtepu16_epi32((__m128i)x);
#else
  const Wide wide = __builtin_convertvector(x, Wide);
#endif
  return (Vector<float>)(wide << 16);
}
LINBIAS_INLINE Vector<float> load_wide(const Float16* from) {
  Vector<float> x;
  for (int i = 0; i < Simd<float>::kLanes; ++i) x[i] = widen(from[i]);
  return x;
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
