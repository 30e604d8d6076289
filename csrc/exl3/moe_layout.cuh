// Where everything of one call lies in its arena: one place for every size.
//
// Routes are sorted by expert. A block is up to row_tile neighbouring routes of one expert within one window of `window`
// routes; gate and up run window by window, so that their inputs and sums need memory for one window only, and down
// runs over ranges of columns, whose sums take the memory of the inputs. How many passes there are follows from m.
//
// Sums lie row by row in the order of the tensor cores: of each tile's 16 channels, place 2g + h holds channel g + 8h.
#pragma once

#include "mma.cuh"
#include "moe.h"

namespace exl3 {

// A block of the grouped products; what a product must know of it in three loads.
struct alignas(16) MoeBlock {
  int expert, start, count, unused;  // routes [start, start + count) of the sorted list
  int64_t weights[4];                // the expert's entries of the table: gate, up, down
};

struct alignas(8) Route {
  int route, expert;  // route: row * top_k + slot
};

// Sizes of a block of the prefill plan, the largest first, in steps of the rows by which the product's time grows.
constexpr int kSizeRows = 32, kBlockSizes = kMaxRowTile / kSizeRows;

// 2K up to which blocks of 256 have products in steps of kSizeRows.
constexpr int kTallFineRate2 = 8;

constexpr int kChunkRoutes = 2048;  // routes that one thread block of the prefill plan sorts

struct MoeArena {
  int64_t header;   // int [2 + windows]: routes that are somebody's; then the first block of each window, then of none
  int64_t blocks;   // MoeBlock []
  int64_t counts;   // int [chunks][experts]: routes of each, where there are several chunks
  int64_t sorted;   // Route [routes]
  int64_t places;   // int [routes]: place of each route in the sorted list, -1: nobody's
  int64_t inputs;   // [source rows][slice][gate, up][k] fp16, each twice in the decode plan: see kTwice
  int64_t outputs;  // [routes][slice][down_columns] fp32 in the decode plan, else fp16: in place of the inputs
  int64_t sums;     // [parts][window][slice][gate, up][width], types as outputs
  int64_t middle;   // [routes][slice][width] fp16, each twice in the decode plan
  // The prefill plan's shares of gate and up, see moe_shares.cuh and moe_tail.cuh:
  int64_t sizes;    // int [windows * kBlockSizes + 1]: first block of each size of each window, then of none
  int64_t flags;    // unsigned [windows][1 + grid]: shares taken, then whether each has left sums
  int64_t carry;    // float [grid][rows * 64], rows of a block, 128 at most: half of the sums that a share leaves to the next
  int64_t bytes;
  int routes, windows, window, passes;  // windows: of routes; passes: of columns
  int chunks;                           // that are sorted by a thread block each
  int twice, sum_bytes;                 // fp16 entries an input takes; bytes of a sum

  static int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  explicit MoeArena(const MoeArgs& args) {
    routes = args.m * args.top_k;
    window = args.window < routes ? args.window : routes;
    windows = window ? (routes + args.window - 1) / args.window : 0;
    chunks = args.decode || routes <= kChunkRoutes ? 1 : (routes + kChunkRoutes - 1) / kChunkRoutes;
    passes = (args.k + args.down_columns - 1) / args.down_columns;
    twice = args.decode && static_cast<Codebook>(args.codebook) != Codebook::kMul1 ? 2 : 1;
    sum_bytes = args.decode ? 4 : 2;
    const int64_t source_rows = inputs_by_row(args) ? args.m : args.decode ? routes : window;
    const int64_t input_bytes = source_rows * args.slices * kMatrices * args.k * 2 * twice;
    const int64_t output_bytes = static_cast<int64_t>(routes) * args.slices * args.down_columns * sum_bytes;
    // Every tile of 8 rows or more makes fewer blocks than this.
    const int64_t most_blocks = routes / kDecodeRows + (routes < args.experts ? routes : args.experts) + windows;
    header = 0;
    blocks = aligned(4 * (2 + windows));
    counts = aligned(blocks + most_blocks * static_cast<int64_t>(sizeof(MoeBlock)));
    sorted = aligned(counts + (chunks > 1 ? static_cast<int64_t>(chunks) * args.experts * 4 : 0));
    places = aligned(sorted + static_cast<int64_t>(routes) * sizeof(Route));
    inputs = outputs = aligned(places + 4ll * routes);
    sums = aligned(inputs + (input_bytes > output_bytes ? input_bytes : output_bytes));
    middle = aligned(sums + static_cast<int64_t>(args.parts) * window * args.slices * kMatrices * args.width * sum_bytes);
    sizes = aligned(middle + static_cast<int64_t>(routes) * args.slices * args.width * 2 * twice);
    flags = aligned(sizes + (args.decode ? 0 : 4ll * (windows * kBlockSizes + 1)));
    carry = aligned(flags + (args.decode ? 0 : 4ll * windows * (1 + args.grid)));
    // Of larger blocks an SM has one thread block instead of two, of 256 rows one with as many sums as two of 128.
    const int64_t rows = args.row_tile < kPairRowTile ? args.row_tile : kPairRowTile;
    bytes = carry + (args.decode ? 0 : 2ll * (args.grid + args.grid % 2) * rows * kBlockColumns);
  }
};

// Sums of the prefill plan are stored in fp16, divided by a power of two near the growth of a sum of `depth` products
// with weights of this codebook's spread: then they are as far from fp16's limits as the inputs, which are fp16 too.
inline float sum_scale(const MoeArgs& args, int depth) {
  float scale = 1.0f;
  if (!args.decode)
    for (int size = 1; size < depth; size *= 4) scale *= 0.5f;
  return scale;
}

// 2K up to which blocks take two column blocks at once: more bits have more places to keep than there are registers.
constexpr int max_pair_rate2(Codebook book) { return book == Codebook::kMul1 ? 8 : 12; }

// What every kernel of a call is given.
struct MoeCall {
  MoeArgs args;
  MoeArena arena;
  bool by_row;  // whether the inputs belong to rows, not to routes
  float into_scale, down_scale;  // of the sums of gate and up, and of down
  explicit MoeCall(const MoeArgs& args)
      : args(args),
        arena(args),
        by_row(inputs_by_row(args)),
        into_scale(sum_scale(args, args.k)),
        down_scale(sum_scale(args, args.width)) {}
};

}  // namespace exl3
