#include "boxes.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <tuple>

namespace linbias {
namespace {

// The least distance between the boxes; 0 where it is not known.
double gap_between(const Points& points, const Box& one, const Box& other) {
  double total = 0;
  for (std::int64_t axis = 0; axis < points.axes; ++axis) {
    const double apart = std::max({0.0, other.low[axis] - one.high[axis], one.low[axis] - other.high[axis]});
    total += points.manhattan || points.axes == 1 ? apart : apart * apart;
  }
  if (!points.manhattan && points.axes > 1) total = std::sqrt(total);
  return total > 0 ? total : 0;
}

}  // namespace

void find_boxes(const Points& points, std::int64_t N, std::int64_t cloud, std::int64_t size, Box* to) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (std::int64_t first = 0; first < N; first += size, ++to) {
    std::fill_n(to->low, kMostAxes, kInfinity);
    std::fill_n(to->high, kMostAxes, -kInfinity);
    bool everywhere = first < points.global_tokens;
    for (std::int64_t i = first; i < std::min(first + size, N) && !everywhere; ++i) {
      const std::int64_t point = cloud * (N - points.global_tokens) + i - points.global_tokens;
      for (std::int64_t axis = 0; axis < points.axes; ++axis) {
        const double x = points.at[point * points.axes + axis];
        everywhere = everywhere || std::isnan(x);  // no other axis bounds how far it is
        to->low[axis] = std::min(to->low[axis], x);
        to->high[axis] = std::max(to->high[axis], x);
      }
    }
    if (!everywhere) continue;
    std::fill_n(to->low, kMostAxes, -kInfinity);
    std::fill_n(to->high, kMostAxes, kInfinity);
  }
}

void order_blocks(const Points& points, const Box& tile, std::int64_t own_block, const Box* blocks,
                  std::int64_t num_blocks, Near* to) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    to[block] = {gap_between(points, tile, blocks[block]), std::abs(block - own_block), block};
  }
  std::sort(to, to + num_blocks, [](const Near& a, const Near& b) {
    return std::tie(a.gap, a.steps, a.block) < std::tie(b.gap, b.steps, b.block);
  });
}

}  // namespace linbias
