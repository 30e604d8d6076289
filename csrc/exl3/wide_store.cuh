// The last step of a whole tile of wide.cuh: from the sums of two warpgroups to rows of y.
#pragma once

#include "finish.cuh"
#include "linear.cuh"
#include "pipeline.cuh"
#include "rotate.cuh"

namespace exl3 {

constexpr int kConsumerWarps = kBlockTiles;  // two warpgroups
constexpr int kExchangeRows = 64;            // of a tile, transformed at a time

constexpr int kWideRows = 256;               // of a tile, beside its 128 columns
using WideSums = float[kWideRows / kGroupRows][4];

#if EXL3_WARPGROUP

// Four neighbouring columns of each tile of a row, from `column` of the shard, times svh.
template <class T>
__device__ __forceinline__ void store_row(const LinearArgs& args, const LinearShard& shard, int column, int row,
                                          const float (&u)[kBlockTiles][4]) {
  const OutputRow<T> y(args, shard, row);
  const __half* const svh = static_cast<const __half*>(shard.svh) + column;
#pragma unroll
  for (int tile = 0; tile < kBlockTiles; ++tile)
    y.store(column + tile * kTile, u[tile], *reinterpret_cast<const uint2*>(svh + tile * kTile));
}

// The part of H within a warp's registers, then 64 rows of sums to shared memory.
template <int kChunk>
__device__ __forceinline__ void put_rows(WideSums& sums, SharedAddress to, float sign) {
#pragma unroll
  for (int g = 0; g < kExchangeRows / kGroupRows; ++g) {
    float(&v)[4] = sums[kChunk * (kExchangeRows / kGroupRows) + g];
    butterfly(v[0], v[2]);
    butterfly(v[1], v[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = fmaf(sign, v[i], shuffle_xor(v[i], 16));
      store_shared_float(to + ((g * kGroupRows + i % 2) * kFinishPitch + i / 2 * 8) * 4, v[i]);
    }
  }
}

// H and svh for one whole tile: sums to y. All consumers together.
__device__ __forceinline__ void transform_tile(const LinearArgs& args, const LinearShard& shard, int block, int row0,
                                               WideSums& sums, SharedAddress exchange) {
  static_assert(kWideRows == 4 * kExchangeRows, "four chunks");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SharedAddress to = exchange + (lane % 4 * 2 * kFinishPitch + warp * kTile + lane / 4) * 4;
  const float sign = lane & 16 ? -1.0f : 1.0f;
  // Read back: lanes of a quarter warp take rows four apart, which lie in other banks.
  const int row = warp * 8 + lane / 8 + lane / 4 % 2 * 4, column = lane % 4 * 4;
  const SharedAddress from = exchange + (row * kFinishPitch + column) * 4;
#pragma unroll 1
  for (int chunk = 0; chunk < 4 && row0 + chunk * kExchangeRows < args.m; ++chunk) {
    if (chunk == 0) put_rows<0>(sums, to, sign);
    else if (chunk == 1) put_rows<1>(sums, to, sign);
    else if (chunk == 2) put_rows<2>(sums, to, sign);
    else put_rows<3>(sums, to, sign);
    group_barrier<32 * kConsumerWarps>(1);
    float u[kBlockTiles][4];
#pragma unroll
    for (int tile = 0; tile < kBlockTiles; ++tile) {
      const float4 read = load_shared_float4(from + tile * kTile * 4);
      u[tile][0] = read.x, u[tile][1] = read.y, u[tile][2] = read.z, u[tile][3] = read.w;
      butterfly(u[tile][0], u[tile][1]);
      butterfly(u[tile][2], u[tile][3]);
      butterfly(u[tile][0], u[tile][2]);
      butterfly(u[tile][1], u[tile][3]);
    }
    group_barrier<32 * kConsumerWarps>(1);
#pragma unroll
    for (int span = 1; span < kBlockTiles; span *= 2)
#pragma unroll
      for (int tile = 0; tile < kBlockTiles; ++tile)
        if ((tile & span) == 0)
#pragma unroll
          for (int i = 0; i < 4; ++i) butterfly(u[tile][i], u[tile + span][i]);
    const int at = row0 + chunk * kExchangeRows + row, first = block * kBlockColumns + column;
    if (at >= args.m) continue;
    if (args.y_type == DataType::kHalf) store_row<__half>(args, shard, first, at, u);
    else if (args.y_type == DataType::kBfloat16) store_row<__nv_bfloat16>(args, shard, first, at, u);
    else store_row<float>(args, shard, first, at, u);
  }
}

#endif  // EXL3_WARPGROUP

}  // namespace exl3
