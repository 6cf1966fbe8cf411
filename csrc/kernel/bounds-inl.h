// What the certificate knows of keys that are not read (docs/math.md). For each block of a key/value head, their
// distances from a center: the largest, and a bound on how much they spread in any one direction. For each query head
// and side, from these and the slope, a table of bounds on everything from a block outwards, at some lengths of q.
#pragma once

#include "kernel/head-inl.h"
#include "kernel/positions-inl.h"
#include "kernel/products-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

template <typename W>
constexpr W kUnitRoundoff = static_cast<W>(sizeof(W) == 4 ? 0x1p-24 : 0x1p-53);

template <typename W>
constexpr W slack_of(int64_t D) {
  return static_cast<W>(2 * (D + 8)) * kUnitRoundoff<W>;
}

// Rounding may make a row's sum, and its logarithm, too large by less than this, in nats (docs/math.md, section 4).
constexpr double kSumRounding = 0x1p-7;

// Whether neither the squares that add up to this, nor their own squares, vanish or overflow where it matters: what
// underflow can take from either sum, its terms times the smallest normal number, is below the rounding of the sum. Not
// so for 0 and NaN.
template <typename W>
LINBIAS_INLINE bool is_ordinary(W squares) {
  constexpr W kSmallest = sizeof(W) == 4 ? static_cast<W>(0x1p-32) : static_cast<W>(0x1p-256);
  return squares >= kSmallest && squares <= 1 / kSmallest;
}

// The length of `size` numbers, `step` apart: that of these divided by the largest, times the largest. It is rounded
// up where it is no normal number, and NaN where something is not finite.
template <typename W, typename X>
__attribute__((noinline)) W length_of(const X* x, int64_t size, int64_t step) {
  constexpr W kSmallestNormal = static_cast<W>(sizeof(W) == 4 ? 0x1p-126 : 0x1p-1022);
  W largest = 0, squares = 0;
  for (int64_t d = 0; d < size; ++d) {
    const W entry = static_cast<W>(widen(x[d * step]));
    largest = larger_or_nan(largest, entry < 0 ? -entry : entry);
  }
  if (largest == 0) return 0;
  for (int64_t d = 0; d < size; ++d) {
    const W entry = static_cast<W>(widen(x[d * step])) / largest;
    squares += entry * entry;
  }
  return square_root(squares) * largest + kSmallestNormal;
}

// The length of numbers whose squares add up to `squares`, which may have vanished or overflowed.
template <typename W, typename X>
LINBIAS_INLINE W length_from(W squares, const X* x, int64_t size) {
  return is_ordinary(squares) ? square_root(squares) : length_of<W>(x, size, 1);
}

// Fill in the radius and the spread of a block. `room` holds [D + kKeys, kKeys].
// With g_st = (k_s - c).(k_t - c), the sum of (u.(k_s - c))^4 over a block is u x u against the k x k, whose Gram
// matrix has entries g_st^2 >= 0 and hence no eigenvalue above its largest row sum. Where that is not worth its cost
// (measure_spread is false), or squares of squares would vanish or overflow, the spread is the radius, as if all keys
// lay along one line.
template <typename W>
void measure_block(const Call& call, const Head<W>& head, int64_t block, int64_t padded_E, bool measure_spread, W slack,
                   W* room) {
  const int64_t count = smaller_of(kKeys, head.num_keys - block * kKeys);
  constexpr int kLanes = Simd<W>::kLanes, kVectors = kKeys / kLanes;
  W squares[kKeys];
  Vector<W> ramp, totals[kVectors] = {};
  for (int i = 0; i < kLanes; ++i) ramp[i] = static_cast<W>(i);
  for (int64_t d = 0; d < call.D; ++d) {
    const W* entries = head.key_columns + (block * call.D + d) * kKeys;
    const Vector<W> center = broadcast(head.center[d]);
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> difference = load(entries + j * kLanes) - center;
      const Vector<W> kept = ramp < static_cast<W>(count - j * kLanes) ? difference : Vector<W>{};
      store<W>(room + d * kKeys + j * kLanes, kept);
      totals[j] += kept * kept;
    }
  }
  __builtin_memcpy(squares, totals, sizeof squares);
  W largest_square = 0, radius = 0;
  for (const W square : squares) largest_square = larger_or_nan(largest_square, square);
  const bool ordinary = is_ordinary(largest_square);
  if (ordinary) radius = square_root(largest_square);
  for (int64_t i = 0; i < count && !ordinary; ++i)
    radius = larger_or_nan(radius, length_of<W>(room + i, call.D, kKeys));
  head.radius[block] = radius + zero_or_nan(head.values + block * kKeys * padded_E, kKeys * padded_E);
  head.spread[block] = head.radius[block];
  if (!measure_spread || !ordinary) return;
  W* gram = room + call.D * kKeys;
  multiply<W>(kKeys, kKeys, call.D, {room, 1, kKeys}, {room, kKeys}, {gram, kKeys}, false);
  W largest_row = 0;
  for (int64_t s = 0; s < kKeys; ++s) {
    Vector<W> total{};
    for (int64_t t = 0; t < kKeys; t += Simd<W>::kLanes)
      total += load(gram + s * kKeys + t) * load(gram + s * kKeys + t);
    const W row = sum<W>(total);
    largest_row = row <= largest_row ? largest_row : row;
  }
  const W square = square_root(largest_row / static_cast<W>(count)) * (1 + slack) + slack * largest_square;
  head.spread[block] = square_root(square);
}

// log sum exp(q.(k - c) - m distance) over the keys of a block and all beyond it, distances counted from the block's
// nearest key, at most; for |q| = kShortest * 2^(entry / 2) / (the head's largest |k - c|). The bound grows with |q|
// and is convex in log |q|, so that between two entries their chord serves.
constexpr int kEntries = 15;
constexpr double kShortest = 4;

// The first terms of exp.
inline double first_terms(double x) { return 1 + x * (1 + x / 2 * (1 + x / 3)); }

// The bound for one block. With x = q.(k - c) <= a = |q| radius, and since (e^x - first_terms(x)) / x^4 grows with x,
// sum e^x <= n (first_terms(y) + (y / a)^4 (e^a - first_terms(a))) with y = |q| spread, of which y^4 is at least the
// mean of x^4, and its powers those of x, x^2, x^3.
struct BlockBound {
  double radius, spread, share, log_count;
  bool by_spread;

  // `discounted` is what the keys weigh by their distances alone, seen from the nearest.
  template <typename W>
  BlockBound(const Head<W>& head, int64_t block, double count, double discounted)
      : radius(head.radius[block]), spread(head.spread[block]) {
    const double ratio = spread / radius;
    share = ratio * ratio * ratio * ratio;
    by_spread = count * share < discounted;
    log_count = __builtin_log(by_spread ? count : discounted);
  }

  double at(double q) const {
    const double a = q * radius;
    if (!by_spread) return log_count + a;
    return log_count + __builtin_log(first_terms(q * spread) + share * (__builtin_exp(a) - first_terms(a)));
  }
};

// table[blocks, kEntries] of one query head and side, whose keys stand at `positions` or are counted; NaN wherever
// something beyond is not finite.
template <typename W>
void fill_tails(const Head<W>& head, Side side, W slope, const double* positions, W slack, W* table) {
  const double m = static_cast<double>(slope);
  double tail[kEntries], q[kEntries];
  const double unit = kShortest / (head.largest > 0 ? static_cast<double>(head.largest) : 1);
  for (int entry = 0; entry < kEntries; ++entry) {
    q[entry] = unit * __builtin_exp2(entry / 2.0);
    tail[entry] = -__builtin_inf();
  }
  double step = m * (1 - static_cast<double>(slack)) * kKeys;
  int64_t before = -1;  // the nearest key of the block before
  for (int64_t i = 0; i < head.num_blocks; ++i) {
    const int64_t block = side == kLeft ? i : head.num_blocks - 1 - i;
    const int64_t keys = smaller_of(kKeys, head.num_keys - block * kKeys);
    const double count = static_cast<double>(keys);
    double discounted;
    if (positions) {
      const int64_t nearest = nearest_key(side, block, head.num_keys);
      discounted = sum_of_block<W>(positions + block * kKeys, keys, nearest - block * kKeys, slope, slack);
      if (before >= 0)
        step = m * (1 - static_cast<double>(slack)) * __builtin_fabs(positions[nearest] - positions[before]);
      before = nearest;
    } else {
      discounted = __builtin_expm1(-m * count) / __builtin_expm1(-m);  // sum of e^(-m i), i < count
    }
    const BlockBound bound(head, block, count, discounted);
    for (int entry = 0; entry < kEntries; ++entry) {
      const double here = bound.at(q[entry]), beyond = tail[entry] - step;
      const double above = here > beyond ? here : beyond, below = here > beyond ? beyond : here;
      tail[entry] = above + __builtin_log1p(__builtin_exp(below - above));
      table[block * kEntries + entry] = static_cast<W>(tail[entry]) * (1 + slack);
    }
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
