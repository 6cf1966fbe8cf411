// Keys that stand at given positions (call.positions), and queries among them. Sides go by order all the same, and so
// does what is hidden. Positions may be as large as 2^53 and lie close together: differences are formed in double, and
// rounded to W.
#pragma once

#include "kernel/simd-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// Where the keys, or the queries, of a query head stand, from `first` on; null where they are counted.
inline const double* positions_of(const Array& x, int64_t b, int64_t h, int64_t first) {
  return x.data ? static_cast<const double*>(x.data) + b * x.batch + h * x.head + first : nullptr;
}

// The key of a block that is nearest to queries which have it on this side.
inline int64_t nearest_key(int side, int64_t block, int64_t num_keys) {
  return side == kLeft ? smaller_of((block + 1) * kKeys, num_keys) - 1 : block * kKeys;
}

// The positions of the keys of a block, 0 where there is none.
LINBIAS_INLINE void load_positions(const double* keys, int64_t count, double* to) {
  for (int64_t s = 0; s < kKeys; ++s) to[s] = s < count ? keys[s] : 0;
}

// How far the keys of a block that lies to one side stand beyond the nearest of them: the signs of these distances and
// of those from a query to the nearest are opposed, so that both may be rounded before they are added.
template <typename W>
LINBIAS_INLINE void find_offsets(const double* keys, double nearest, W* to) {
  for (int64_t s = 0; s < kKeys; ++s) to[s] = static_cast<W>(keys[s] - nearest);
}

// How far a query stands from one vector of keys.
template <typename W>
LINBIAS_INLINE Vector<W> distances_from(double query, const double* keys) {
  typename Simd<W>::Doubles x;
  __builtin_memcpy(&x, keys, sizeof x);
  return __builtin_convertvector(query - x, Vector<W>);
}

// At least the sum of e^(-m |x - x'|) over the keys x of a block, seen from key x' = keys[nearest].
template <typename W>
double sum_of_block(const double* keys, int64_t count, int64_t nearest, W m, W slack) {
  W exponent[kKeys];
  for (int64_t s = 0; s < kKeys; ++s) {
    const W distance = static_cast<W>(__builtin_fabs(keys[s < count ? s : nearest] - keys[nearest]));
    exponent[s] = s < count ? -(m * (1 - slack)) * distance : -kInfinity<W>;
  }
  Vector<W> total{};
  for (int64_t s = 0; s < kKeys; s += Simd<W>::kLanes) total += exponential<W>(load(exponent + s));
  return static_cast<double>(sum<W>(total) * (1 + slack));
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
