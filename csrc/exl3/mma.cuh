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
constexpr int kStepDepth = 32;       // k of one 16-byte load of x a lane: two MMAs deep
constexpr int kStepBytes = kStepDepth * kGroupRows * 2;

// kRows rows of x; kWarpTiles tiles of a block a warp; kDepth k a pipeline stage; kStages stages.
template <int kRows_, int kWarpTiles_, int kDepth_, int kStages_, int kBlocksPerSm_>
struct Shape {
  static constexpr int kRows = kRows_, kWarpTiles = kWarpTiles_, kDepth = kDepth_, kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kGroups = kRows / kGroupRows;
  static constexpr int kWarps = kBlockTiles / kWarpTiles;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSteps = kDepth / kStepDepth;           // per stage
  static constexpr int kUnitStages = kUnitDepth / kDepth;      // stages per unit
  static constexpr int kTileRows = kDepth / kTile;             // rows of tiles per stage
  static constexpr int kXStageBytes = kRows * kDepth * 2;
  static_assert(kRows % kGroupRows == 0 && kUnitDepth % kDepth == 0 && kDepth % kStepDepth == 0, "sizes nest");
  __host__ __device__ static constexpr int stage_weight_bytes(int rate2) { return kTileRows * kBlockTiles * 16 * rate2; }
  __host__ __device__ static constexpr int shared_bytes(int max_rate2) {
    return kStages * (stage_weight_bytes(max_rate2) + kXStageBytes);
  }
};

// Bytes from the start of a rotated input to the 16 bytes of (row, k32 step, lane column c = 0..3).
// Layout: [row tile][stage][group of 8 rows][step][lane = row % 8 * 4 + c][16 bytes], so that a stage is one
// contiguous copy and a B fragment of two MMAs is one 16-byte load a lane, free of bank conflicts.
__host__ __device__ inline int64_t rotated_offset(int row, int step, int c, int rows, int depth, int k) {
  const int steps = depth / kStepDepth, stage = step / steps;
  const int64_t unit = (static_cast<int64_t>(row / rows) * (k / depth) + stage) * (rows / kGroupRows) +
                       row % rows / kGroupRows;
  return (unit * steps + step % steps) * kStepBytes + (row % kGroupRows * 4 + c) * 16;
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
