// Linear-bias attention on the CPU, near to far: the whole interface of the core.
//
// Computes DESIGN section 1 for arrays [B, heads, length, size] with any strides but a unit last one. Knows no
// Python and no framework. Sizes, strides and addresses are the caller's promise; whatever else a caller passes
// (ranges, starts, counts, numbers), nothing outside the arrays is read or written. "Wide" is double for float64 inputs
// and float otherwise: the type of scores, sums, slopes, `out` and the gradients of slopes.
#pragma once

#include <cstdint>

namespace linbias {

enum class DType : std::int32_t { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3 };

// Strides count elements; the last axis has stride 1.
struct Array {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;
};

// Threads of the caller's own: run work(data) on each of them, the calling thread among them, and return when all are
// done. The last two arguments are 0. OpenMP's GOMP_parallel is such a function: where a framework shares out its
// operations by that, its threads are awake, and further threads would wait for their turn.
using Team = void (*)(void (*work)(void* data), void* data, unsigned num_threads, unsigned flags);

// Key s stands at position s, query t of batch row b at query_start[b] + t, or at own_key; or keys stand where
// `positions` says, and queries between them. Which side of a query a key is on, and what is hidden, goes by order all
// the same.
struct Call {
  DType dtype = DType::float32;
  std::int64_t B = 0, H = 0, G = 0, T = 0, S = 0, D = 0, E = 0;
  Array q, k, v;                            // [B, H, T, D], [B, G, S, D], [B, G, S, E]
  const void* left = nullptr;               // [B, H], wide; infinite hides the side
  const void* right = nullptr;              // likewise, or null: causal
  const std::int64_t* key_range = nullptr;  // [B, G, 2], first and one past last, clamped to [0, S]; or null: all keys
  const std::int64_t* query_start = nullptr;  // [B], clamped to +-kLargestStart; or null: S - T
  const std::int64_t* own_key = nullptr;      // [B, H, T], likewise, never falling: where each query stands instead
  const std::int64_t* query_range = nullptr;  // [B, T, 2], likewise: the keys of each query, of those of its head
  const void* key_bound = nullptr;            // [B, G], wide: at least |k| of every key, all of them finite; or null
  Array positions;        // [B, H, S], double: of the keys of a query head, never falling; or no data: counted
  Array query_positions;  // [B, H, T], likewise, with positions: each between those of its own key and of the next
  // Keys and values in pages of `page_keys` rows, for forward: key s of batch row b is row s % page_keys of page
  // pages[b * pages_row + s / page_keys], clamped to [0, num_pages), of k and v, whose `batch` is from page to page.
  const std::int32_t* pages = nullptr;  // or null: one row after the other
  std::int64_t pages_row = 0, page_keys = 0, num_pages = 0;
  bool by_row =
      false;  // rows before heads, where arrays say [B, H, T] or [B, G, S]: own_key, and all results but visited
  double scale = 1, dropout = 0, tolerance = 0;
  std::uint32_t seed = 0;
  std::uint32_t first_query = 0, first_key = 0;  // what row 0 of q and of k count as in the mask of dropout
  int num_threads = 1;                           // clamped to [1, kLargestNumThreads]
  Team team = nullptr;                           // or null: threads that the core keeps
  bool precise = false;  // the result will be differentiated: `out` to float32 even where 16-bit products are faster
};

inline constexpr std::int64_t kLargestStart = std::int64_t{1} << 30;
inline constexpr int kLargestNumThreads = 1024;

// Rows of queries per tile and keys per block.
inline constexpr std::int64_t kTileRows = 48;
inline constexpr std::int64_t kBlockKeys = 64;

// lse = row_max + log_sum.
//
// `visited` says which keys a tile read. The keys [first, end) of a head lie in n = ceil((end - first) / kBlockKeys)
// blocks, counted from `first`: block j holds the keys from first + j * kBlockKeys on, kBlockKeys of them but for the
// last block. A tile has `rows` queries, kTileRows of them but for the last tile, from position p up to p + rows; with
// own_key, from that of the first up to one past that of the last. It always
// reads its near blocks, of which there are none where all keys lie to one side of the tile:
//
//     near_first = clamp(floor((p - first) / kBlockKeys), 0, n)
//     near_end   = clamp(ceil((p + rows - first) / kBlockKeys), 0, n)    one past the last
//
// visited[0] counts the blocks read to the left of these, visited[1] those to the right. So the tile read the keys
//
//     from            first + (near_first - visited[0]) * kBlockKeys
//     up to min(end,  first + (near_end   + visited[1]) * kBlockKeys)    one past the last
//
// of which it left out blocks that none of its queries sees (query_range). Where there is room for twice as many tiles,
// the counts behind those of all tiles reach likewise to the outermost blocks that were computed in full: float32's
// blocks further off may be computed in fewer terms than float32 has digits for (kernel/bfloat16/precision-inl.h).
//
// Calls of few queries that will not be differentiated read row by row, each its own keys, and leave `visited` as it
// is.
struct Forward {
  void* out = nullptr;              // [B, H, T, E], wide but for `narrow`, contiguous
  void* row_max = nullptr;          // [B, H, T], wide; or null, in calls of few queries
  void* log_sum = nullptr;          // [B, H, T], wide; likewise
  std::int32_t* visited = nullptr;  // [B, H, visited_tiles, 2], of at least ceil(T / kTileRows) tiles
  std::int64_t visited_tiles = 0;
  bool narrow = false;  // `out` in the type of the inputs, which is bfloat16; backward wants it wide
};

// New tokens of a cache: what becomes the last T rows of a call's keys and values.
struct NewTokens {
  Array k, v;                 // [B, G, T, D], [B, G, T, E]
  void* key_bound = nullptr;  // [B, G], wide: that of the call, raised to new keys' norms; NaN where one, or a value,
                              // is not finite
};

// Sequences of lengths of their own in one call, whose B is 1 and whose T and S are the rows of all of them: sequence i
// has the rows of q [query_offsets[i], query_offsets[i + 1]), which results have as well, and likewise of k and v; or,
// with pages, key_counts[i] keys in pages of its own. `left`, `right`, `key_range`, `query_start`, dleft and dright
// have a row for each sequence, in which keys count from its first; `query_range` counts them so, too. `visited` is [H,
// visited_tiles, 2], of 2 (T / kTileRows + count) tiles at least: those of sequence i begin at tile 2 (query_offsets[i]
// / kTileRows + i), divisions rounded down.
struct Sequences {
  std::int64_t count = 0;
  const std::int64_t* query_offsets = nullptr;  // [count + 1], never falling, from 0 up to T
  const std::int64_t* key_offsets = nullptr;    // likewise, up to S; or null, with pages
  const std::int32_t* key_counts = nullptr;     // [count], clamped to the pages of a row of the table
  const void* page_norms = nullptr;             // [num_pages, G], wide: at least |k| of every key of a page; or null
};

// All arrays contiguous; dq, dk, dv are wide.
struct Backward {
  const void* dout = nullptr;        // [B, H, T, E], wide
  const void* dlse = nullptr;        // [B, H, T], wide; or null: zeros
  Forward saved;                     // counts in `visited` are clamped to the blocks that there are
  void* dq = nullptr;                // [B, H, T, D]
  void* dk = nullptr;                // [B, G, S, D]
  void* dv = nullptr;                // [B, G, S, E]
  void* dleft = nullptr;             // [B, H]; or null, and dright with it: nobody asks
  void* dright = nullptr;            // [B, H]
  void* dpositions = nullptr;        // [B, H, S]; or both null: nobody asks
  void* dquery_positions = nullptr;  // [B, H, T]
};

enum class Status : std::int32_t { ok = 0, out_of_memory = 1 };

Status forward(const Call& call, const Forward& results);
Status forward(const Call& call, const NewTokens& tokens, const Forward& results);  // after writing them
// Write new tokens [1, G, T, size] to pages, of which a call has the form: token t to row slots[t] % page_keys of page
// slots[t] / page_keys, or nowhere where there is none. `key_bound` is [num_pages, G], or null; that of a page starts
// again where its first row is written.
Status write(const Call& call, const NewTokens& tokens, const std::int64_t* slots);
Status backward(const Call& call, const Backward& results);
Status forward(const Call& call, const Sequences& sequences, const Forward& results);
Status backward(const Call& call, const Sequences& sequences, const Backward& results);

// The CPU target in use ("baseline", "avx2", "avx512", "neon"), those that were compiled and run on this machine,
// and a switch for tests; force_target(nullptr) goes back to the best. Returns whether the target is there.
const char* target();
const char* targets();  // separated by commas, best first
bool force_target(const char* name);

}  // namespace linbias
