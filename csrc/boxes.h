// Boxes around points that follow each other, and in which order a tile of queries visits blocks of keys.
#pragma once

#include <cstdint>

#include "linbias/points.h"

namespace linbias {

struct Box {
  double low[kMostAxes], high[kMostAxes];
};

// The boxes around each `size` tokens of a cloud: to[ceil(N / size)]. One that holds a global token
// or a point that is not a number is everywhere.
void find_boxes(const Points& points, std::int64_t N, std::int64_t cloud, std::int64_t size, Box* to);

// A block of keys, and how far its box lies from a tile's: no key is nearer to a query.
struct Near {
  double gap;
  std::int64_t steps, block;  // steps: from the block in which the tile begins, along the order
};

// The blocks from near to far; of equally near ones those first that are few steps away.
void order_blocks(const Points& points, const Box& tile, std::int64_t own_block, const Box* blocks,
                  std::int64_t num_blocks, Near* to);

}  // namespace linbias
