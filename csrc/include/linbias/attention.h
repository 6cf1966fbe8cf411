// Linear-bias attention on the CPU, near to far: the whole interface of the core.
//
// Computes DESIGN section 1 for arrays [B, heads, length, size] with any strides but a unit last one. Knows no
// Python and no framework; sizes and slopes come checked. "Wide" is double for float64 inputs and float otherwise:
// the type of scores, sums, slopes, `out` and the gradients of slopes.
#pragma once

#include <cstdint>

namespace linbias {

enum class DType : std::int32_t { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3 };

// Strides count elements; the last axis has stride 1.
struct Array {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;
};

struct Call {
  DType dtype;
  std::int64_t B, H, G, T, S, D, E;
  Array q, k, v;                   // [B, H, T, D], [B, G, S, D], [B, G, S, E]
  const void* left;                // [B, H], wide; infinite hides the side
  const void* right;               // likewise, or null: causal
  const std::int64_t* key_range;   // [B, 2], or null: all keys
  const void* key_bound;           // [B, G], wide: at least |k| of every key, all of them finite; or null
  double scale, dropout, tolerance;
  std::uint32_t seed;
  int num_threads;
  bool precise;  // the result will be differentiated: `out` to float32 even where 16-bit products are faster
};

// Rows of queries per tile and keys per block: the units of `visited`.
inline constexpr std::int64_t kTileRows = 48;
inline constexpr std::int64_t kBlockKeys = 64;

// lse = row_max + log_sum; visited counts the blocks beyond the near ones, to the left and to the right.
struct Forward {
  void* out;               // [B, H, T, E], wide, contiguous
  void* row_max;           // [B, H, T], wide
  void* log_sum;           // [B, H, T], wide
  std::int32_t* visited;   // [B, H, visited_tiles, 2], of which the first ceil(T / kTileRows) tiles are used
  std::int64_t visited_tiles;
};

// All arrays contiguous; dq, dk, dv are wide, and dk and dv must come zeroed.
struct Backward {
  const void* dout;        // [B, H, T, E], wide
  const void* dlse;        // [B, H, T], wide
  Forward saved;
  void *dq, *dk, *dv;      // [B, H, T, D], [B, G, S, D], [B, G, S, E]
  void *dleft, *dright;    // [B, H]
};

enum class Status : std::int32_t { ok = 0, out_of_memory = 1 };

Status forward(const Call& call, const Forward& results);
Status backward(const Call& call, const Backward& results);

// The CPU target in use ("baseline", "avx2", "avx512", "neon"), those that were compiled and run on this machine,
// and a switch for tests; force_target(nullptr) goes back to the best. Returns whether the target is there.
const char* target();
const char* targets();  // separated by commas, best first
bool force_target(const char* name);

}  // namespace linbias
