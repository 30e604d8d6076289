// The last step of a whole tile of wide.cuh: from the sums of two warpgroups to rows of y.
#pragma once

#include "finish.cuh"
#include "linear.cuh"
#include "pipeline.cuh"
#include "rotate.cuh"

namespace exl3 {

constexpr int kConsumerWarps = kBlockTiles;  // two warpgroups
constexpr int kExchangeRows = 64;            // of a tile, transformed at a time

#if EXL3_WARPGROUP

__device__ __forceinline__ void store_four(__half* y, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(y) = make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
}
__device__ __forceinline__ void store_four(__nv_bfloat16* y, const float (&v)[4]) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v[0], v[1]), high = __floats2bfloat162_rn(v[2], v[3]);
  *reinterpret_cast<uint2*>(y) =
      make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
}
__device__ __forceinline__ void store_four(float* y, const float (&v)[4]) {
  *reinterpret_cast<float4*>(y) = make_float4(v[0], v[1], v[2], v[3]);
}

// Four neighbouring columns of each tile of a row, from `column` of the shard, times svh.
template <class T>
__device__ __forceinline__ void store_row(const LinearArgs& args, const LinearShard& shard, int column, int row,
                                          const float (&u)[kBlockTiles][4]) {
  const __half* const svh = static_cast<const __half*>(shard.svh) + column;
  T* const y = static_cast<T*>(args.y) + row * args.y_stride + shard.out_column - shard.first + column;
  const bool wide = (args.y_stride | (shard.out_column - shard.first)) % 4 == 0 &&
                    reinterpret_cast<uintptr_t>(args.y) % (4 * sizeof(T)) == 0;
#pragma unroll
  for (int tile = 0; tile < kBlockTiles; ++tile) {
    const uint2 scales = *reinterpret_cast<const uint2*>(svh + tile * kTile);
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&scales.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&scales.y));
    const float v[4] = {u[tile][0] * kHadamardScale * low.x, u[tile][1] * kHadamardScale * low.y,
                        u[tile][2] * kHadamardScale * high.x, u[tile][3] * kHadamardScale * high.y};
    const int n = column + tile * kTile - shard.first;
    if (wide && n >= 0 && n + 4 <= shard.width) {
      store_four(y + tile * kTile, v);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n + i >= 0 && n + i < shard.width) store(args.y, y + tile * kTile + i - static_cast<T*>(args.y), args.y_type, v[i]);
    }
  }
}

// The part of H within a warp's registers, then 64 rows of sums to shared memory.
template <int kChunk, class S>
__device__ __forceinline__ void put_rows(Sums<S>& sums, SharedAddress to, float sign) {
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
template <class S>
__device__ __forceinline__ void transform_tile(const LinearArgs& args, const LinearShard& shard, int block, int row0,
                                               Sums<S>& sums, SharedAddress exchange) {
  static_assert(S::kRows == 4 * kExchangeRows, "four chunks");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SharedAddress to = exchange + (lane % 4 * 2 * kFinishPitch + warp * kTile + lane / 4) * 4;
  const float sign = lane & 16 ? -1.0f : 1.0f;
  // Read back: lanes of a quarter warp take rows four apart, which lie in other banks.
  const int row = warp * 8 + lane / 8 + lane / 4 % 2 * 4, column = lane % 4 * 4;
  const SharedAddress from = exchange + (row * kFinishPitch + column) * 4;
#pragma unroll 1
  for (int chunk = 0; chunk < 4 && row0 + chunk * kExchangeRows < args.m; ++chunk) {
    if (chunk == 0) put_rows<0, S>(sums, to, sign);
    else if (chunk == 1) put_rows<1, S>(sums, to, sign);
    else if (chunk == 2) put_rows<2, S>(sums, to, sign);
    else put_rows<3, S>(sums, to, sign);
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
