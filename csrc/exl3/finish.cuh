// Output transform: add the parts of a column block in ascending order of k, then H and svh.
#pragma once

#include "hadamard.cuh"
#include "mma.cuh"
#include "values.cuh"

namespace exl3 {

constexpr int kFinishThreads = 256;  // one thread a (tile, lane) of the parts, then one warp a row
constexpr int kFinishPitch = kBlockColumns + 4;  // floats: fragments written down columns spread over all banks

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

// A row of y as a shard's columns count: column `shard.first` is the first that is there.
template <class T>
struct OutputRow {
  T* y;
  int first, end;
  bool aligned;  // four columns may be stored at once
  __device__ __forceinline__ OutputRow(const LinearArgs& args, const LinearShard& shard, int row)
      : y(static_cast<T*>(args.y) + row * args.y_stride + (shard.out_column - shard.first)), first(shard.first),
        end(shard.first + shard.width),
        aligned((args.y_stride | (shard.out_column - shard.first)) % 4 == 0 &&
                reinterpret_cast<uintptr_t>(args.y) % (4 * sizeof(T)) == 0) {}
  // Columns n to n + 3, times 1 / sqrt(128) and svh.
  __device__ __forceinline__ void store(int n, const float (&u)[4], uint2 svh) const {
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&svh.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&svh.y));
    const float v[4] = {u[0] * kHadamardScale * low.x, u[1] * kHadamardScale * low.y, u[2] * kHadamardScale * high.x,
                        u[3] * kHadamardScale * high.y};
    if (aligned && n >= first && n + 4 <= end) {
      store_four(y + n, v);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n + i >= first && n + i < end) y[n + i] = from_float<T>(v[i]);
    }
  }
};

// H and svh for 8 rows of a column block, and y. sum: this thread's element of the added parts, as accumulators lie.
__device__ __forceinline__ void finish_rows(const LinearArgs& args, const LinearShard& shard, int column, int row0,
                                            float4 sum, uint2 scales, float (&tile)[kGroupRows][kFinishPitch]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // An accumulator holds column lane/4 (+8) of its tile, rows 2(lane%4) and the next.
  const int at = warp * kTile + lane / 4, low = lane % 4 * 2;
  tile[low][at] = sum.x, tile[low + 1][at] = sum.y, tile[low][at + 8] = sum.z, tile[low + 1][at + 8] = sum.w;
  __syncthreads();

  const int row = row0 + warp;
  if (row >= args.m) return;
  const float4 read = *reinterpret_cast<const float4*>(&tile[warp][lane * 4]);
  float v[4] = {read.x, read.y, read.z, read.w};
  hadamard_128(v, lane);
  if (args.y_type == DataType::kHalf) OutputRow<__half>(args, shard, row).store(column, v, scales);
  else if (args.y_type == DataType::kBfloat16) OutputRow<__nv_bfloat16>(args, shard, row).store(column, v, scales);
  else OutputRow<float>(args, shard, row).store(column, v, scales);
}

// Grid: (column blocks, groups of 8 rows). rows: of a row tile.
[[maybe_unused]] static __global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ Cut cut,
                  const __grid_constant__ Scratch scratch, int rows) {
  __shared__ __align__(16) float tile[kGroupRows][kFinishPitch];
  const int lane = threadIdx.x % 32, block = blockIdx.x;
  allow_next_grid();
  int index = 0;
  while (block >= args.shard[index].first_block + args.shard[index].blocks) ++index;
  const LinearShard& shard = args.shard[index];
  const int column = (block - shard.first_block) * kBlockColumns + lane * 4;
  const int first = cut.owner(block * cut.depth), last = cut.owner((block + 1) * cut.depth - 1);
  const uint2 scales = *reinterpret_cast<const uint2*>(static_cast<const __half*>(shard.svh) + column);
  const int groups = rows / kGroupRows, row_tile = blockIdx.y / groups, group = blockIdx.y % groups;
  const int64_t stride = static_cast<int64_t>(rows) * (kBlockColumns / 4);
  const float4* part =
      reinterpret_cast<const float4*>(args.scratch + scratch.partials + row_tile * scratch.partial_bytes) +
      (first + block) * stride + group * (kGroupRows * kBlockColumns / 4) + threadIdx.x;
  wait_for_previous_grid();

  float4 sum = load_from_l2(part);
#pragma unroll 4
  for (int b = first + 1; b <= last; ++b) {
    const float4 v = load_from_l2(part + (b - first) * stride);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  finish_rows(args, shard, column, row_tile * rows + group * kGroupRows, sum, scales, tile);
}

}  // namespace exl3
