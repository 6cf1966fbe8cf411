// Attention over points of a line, a plane or space: the interface of the core for a bias that falls with distance.
//
// score[i, j] = scale * q[i] . k[j] - slope * |point i - point j|, and every token sees every token. Calls are those of
// attention.h with T = S = N: `left` holds the slopes, and ranges, starts and dropout are ignored.
#pragma once

#include <cstdint>

#include "linbias/attention.h"

namespace linbias {

inline constexpr std::int64_t kMostAxes = 3;

// Tokens are taken in an order in which those that follow each other lie together. kTileRows of them in this order make
// a tile of queries, and kBlockKeys a block of keys.
struct Points {
  const double* at = nullptr;           // [clouds, N - global_tokens, axes], in that order
  const std::int64_t* order = nullptr;  // [clouds, N]: which token takes each place, clamped to [0, N)
  std::int64_t clouds = 1;              // B where each batch row has points of its own, or 1
  std::int64_t axes = 1;                // clamped to [1, kMostAxes]
  std::int64_t global_tokens = 0;       // tokens that stand nowhere, at distance 0 of everything, and come first
  bool manhattan = false;               // distances are sums over the axes
};

// As for attention.h, but for `visited`: [B, H, ceil(N / kTileRows)] counts the blocks that each tile read, in its own
// order of them, which depends on the points alone. `narrow` is ignored, and so is `dright`; `dleft` is required.
Status forward(const Call& call, const Points& points, const Forward& results);
Status backward(const Call& call, const Points& points, const Backward& results);

}  // namespace linbias
