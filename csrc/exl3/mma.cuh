// How the fused kernels cut a product into blocks, stages and fragments: one place for every size.
#pragma once

#include "exl3.h"
#include "trellis.cuh"

namespace exl3 {

constexpr int kTile = 16;            // a trellis tile is 16 x 16
constexpr int kBlockColumns = 128;   // columns of a block: one Hadamard group of outputs, eight tiles
constexpr int kBlockTiles = kBlockColumns / kTile;
constexpr int kUnitDepth = 128;      // k of a unit of work: the grain of the split over thread blocks
constexpr int kGroupRows = 8;        // rows of x in one MMA
constexpr int kStepDepth = 32;       // k decoded at a time: two MMAs deep

// kRows rows of x; kDepth k a pipeline stage; kStages stages, loaded and multiplied kTogether at a time. A warp owns one
// tile of a block's eight, so two blocks an SM give each scheduler four warps: enough to hide latency, and few enough to
// leave each its registers.
template <int kRows_, int kDepth_, int kStages_, int kTogether_ = 1>
struct Shape {
  static constexpr int kRows = kRows_, kDepth = kDepth_, kStages = kStages_, kTogether = kTogether_;
  static constexpr int kGroups = kRows / kGroupRows;
  static constexpr int kWarps = kBlockTiles, kThreads = 32 * kWarps;
  static constexpr int kSteps = kDepth / kStepDepth;        // per stage
  static constexpr int kUnitStages = kUnitDepth / kDepth;   // stages per unit
  static constexpr int kTileRows = kDepth / kTile;          // rows of tiles per stage
  static constexpr int kXStageBytes = kRows * kDepth * 2;
  static constexpr int kSlots = kStages / kTogether;        // of the ring

  static_assert(kRows % kGroupRows == 0 && kUnitDepth % kDepth == 0 && kDepth % kStepDepth == 0, "sizes nest");
  static_assert(kStages % kTogether == 0 && kSlots >= 2, "slots are whole, and one is read while another is filled");
  __host__ __device__ static constexpr int stage_weight_bytes(int rate2) { return kTileRows * kBlockTiles * 16 * rate2; }
  __host__ __device__ static constexpr int shared_bytes(int max_rate2) {
    return kStages * (stage_weight_bytes(max_rate2) + kXStageBytes);
  }
};

// Bytes from the start of a rotated input to element (row, k). Layout: [row tile][k/8][row of the tile][k%8] fp16, so
// that a stage is one contiguous copy, and eight rows of eight k are the 128-byte core matrix that ldmatrix reads
// without bank conflicts and warpgroup MMA reads as it is.
__host__ __device__ inline int64_t rotated_offset(int row, int k, int rows, int depth_k) {
  return ((static_cast<int64_t>(row / rows) * (depth_k / 8) + k / 8) * rows + row % rows) * 16 + k % 8 * 2;
}

// How units are dealt to thread blocks: block b has units [start(b), start(b + 1)), the first `longer` of them one more.
// depth: units of one column block. A thread block and a column block share at most one run of units; counting those
// runs along the units, the one of thread block b in column block c is number b + c, and no two share a number.
struct Cut {
  int splits, depth, shorter, longer;
  __host__ __device__ Cut(int units, int depth, int wanted)
      : splits(wanted < units ? wanted : units), depth(depth), shorter(units / splits), longer(units % splits) {}
  __host__ __device__ int start(int b) const { return b * shorter + (b < longer ? b : longer); }
  __host__ __device__ int owner(int unit) const {
    const int first = longer * (shorter + 1);
    return unit < first ? unit / (shorter + 1) : longer + (unit - first) / shorter;
  }
};

// A ring of stages: the next one and the parity of its phase.
struct Turn {
  int stage;
  uint32_t parity;
  __device__ __forceinline__ void advance(int stages, int by) {
    if ((stage += by) >= stages) stage -= stages, parity ^= 1;
  }
  // By one: fewer instructions that wait for one another.
  __device__ __forceinline__ void step(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// The scratch of one call: rotated inputs, then partial sums [row tile][part][8-row group][tile][lane] float4.
struct Scratch {
  int64_t row_tile_bytes, rotation_bytes, partials, partial_bytes, bytes;
  __host__ __device__ Scratch(int m, int rows, int k, int total_blocks, int shards, int splits) {
    const int64_t row_tiles = (m + rows - 1) / rows;
    row_tile_bytes = static_cast<int64_t>(rows) * k * 2;
    rotation_bytes = row_tiles * row_tile_bytes;
    partials = shards * rotation_bytes;
    partial_bytes = static_cast<int64_t>(splits + total_blocks) * rows * kBlockColumns * 4;
    bytes = partials + row_tiles * partial_bytes;
  }
};

}  // namespace exl3
