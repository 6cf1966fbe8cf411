// The keys that queries can reach, found before any key is read: new tokens beside a long cache then pack no more of it
// than their heads' slopes leave in sight. With |q.k| <= a for every key, a query's own key, or the nearest to it, has
// a score of -a at least, and one that lies w further away of a - m w at most. What lies from w on outwards is then no
// larger a share of the row than e^(2 a - m w) / (1 - e^-m).
#pragma once

#include "kernel/bounds-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// What part of the tolerance goes to keys that are out of reach.
constexpr double kReachShare = 1.0 / 16;

// The range of keys that each key/value head shows, narrowed: [B, G, 2].
template <typename W, typename In>
struct Reach {
  const Call& call;
  Buffer<int64_t> ranges;
  bool narrower = false;

  explicit Reach(const Call& of_call) : call(of_call) {}

  // Whether there is a bound on keys, and so many more keys than queries that it pays to measure these.
  bool pays() const {
    return call.key_bound && !call.positions.data && !call.query_range && call.T > 0 && call.S >= 2 * call.T;
  }

  bool find() {
    if (!ranges.allocate(call.B * call.G, 2)) return false;
    for (int64_t index = 0; index < call.B * call.G; ++index) narrow(index);
    return true;
  }

  void narrow(int64_t index) {
    const Readers readers(call, index);
    const KeyRange range(call, readers.b, index % call.G);
    const int64_t beyond = range.first + range.count;
    int64_t first = beyond, end = range.first;
    for (int64_t h = readers.first; h < readers.end; ++h) {
      // Where the keys nearest to the first and to the last query stand.
      const int64_t low = smaller_of(order_of(call, readers.b, h, 0), beyond - 1),
                    high = order_of(call, readers.b, h, call.T - 1);
      if (low < range.first || range.count == 0) return keep(index, range);
      const double a = largest_product(index, readers.b, h);
      const int64_t left = away(kLeft, readers.b, h, a), right = away(kRight, readers.b, h, a);
      first = smaller_of(first, low - smaller_of(left, low - range.first));
      end = larger_of(end, high + 1 + smaller_of(right, larger_of(beyond - high - 1, 0)));
    }
    // To whole blocks: `visited` counts blocks outwards from the queries, which stay the same ones.
    first = range.first + (first - range.first) / kKeys * kKeys;
    end = smaller_of(range.first + round_up(end - range.first, kKeys), beyond);
    narrower |= first > range.first || end < beyond;
    ranges.data[index * 2] = first;
    ranges.data[index * 2 + 1] = end;
  }

  void keep(int64_t index, const KeyRange& range) {
    ranges.data[index * 2] = range.first;
    ranges.data[index * 2 + 1] = range.first + range.count;
  }

  // At least |scale q.k|, of all queries of a head and all keys; NaN or infinite where there is no bound.
  double largest_product(int64_t index, int64_t b, int64_t h) const {
    W longest = 0;
    for (int64_t t = 0; t < call.T; ++t) {
      const In* query = row_of<In>(call.q, b, h, t);
      W squares = 0;
      for (int64_t d = 0; d < call.D; ++d) squares += static_cast<W>(widen(query[d])) * static_cast<W>(widen(query[d]));
      longest = larger_or_nan(longest, length_from(squares, query, call.D));
    }
    const W slack = slack_of<W>(call.D);
    return static_cast<double>(longest) * static_cast<double>(static_cast<const W*>(call.key_bound)[index]) *
           __builtin_fabs(call.scale) * (1 + 4 * static_cast<double>(slack));
  }

  // From how far away on a side's keys are out of reach; S where none is known to be. Comparisons with NaN say so, too.
  int64_t away(Side side, int64_t b, int64_t h, double a) const {
    const double m = static_cast<double>(slope_of<W>(call, side, b, h));
    if (is_infinite(m)) return 0;
    if (!(m > 0)) return call.S;
    const double share = kReachShare * call.tolerance / (call.right ? 2 : 1);
    const double w = (2 * a + kSumRounding - __builtin_log(share) - __builtin_log(-__builtin_expm1(-m))) /
                     (m * (1 - static_cast<double>(slack_of<W>(call.D))));
    return w < static_cast<double>(call.S) ? static_cast<int64_t>(w) + 1 : call.S;
  }
};

// Run compute(call) on a call whose ranges of keys are as narrow as is known beforehand.
template <typename W, typename In, typename Compute>
Status within_reach(const Call& call, const Compute& compute) {
  Reach<W, In> reach(call);
  if (!reach.pays()) return compute(call);
  if (!reach.find()) return Status::out_of_memory;
  if (!reach.narrower) return compute(call);
  Call narrowed = call;
  narrowed.key_range = reach.ranges.data;
  narrowed.tolerance = call.tolerance * (1 - kReachShare);
  // Where queries stand was counted from the last key.
  Buffer<int64_t> starts;
  if (!call.query_start) {
    if (!starts.allocate(call.B)) return Status::out_of_memory;
    for (int64_t b = 0; b < call.B; ++b) starts.data[b] = call.S - call.T;
    narrowed.query_start = starts.data;
  }
  return compute(narrowed);
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
