// Input transform: x -> fp16(H (x * suh) / sqrt(128)), written in the order in which the fused kernels read it.
#pragma once

#include "hadamard.cuh"
#include "mma.cuh"
#include "values.cuh"

namespace exl3 {

constexpr int kRotateWarps = 4;

// One warp a (row, 128-group of k), four neighbouring k a lane. Grid: (ceil(k/128 / 4), m, shards).
template <class T>
__global__ void __launch_bounds__(32 * kRotateWarps)
    rotate_kernel(const __grid_constant__ LinearArgs args, int64_t rotation_bytes, int rows) {
  const int lane = threadIdx.x % 32, row = blockIdx.y;
  const int first = (blockIdx.x * kRotateWarps + threadIdx.x / 32) * kHadamard + lane * 4;
  allow_next_grid();
  if (first >= args.k) return;
  const __half* suh = static_cast<const __half*>(args.shard[blockIdx.z].suh) + first;
  float scale[4], v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = __half2float(suh[i]);
  wait_for_previous_grid();
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride + first;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = first + i < args.k_true ? to_float(x[i]) * scale[i] : 0.0f;
  hadamard_128(v, lane);
  unsigned char* out = args.scratch + blockIdx.z * rotation_bytes + rotated_offset(row, first, rows, args.k);
  *reinterpret_cast<uint2*>(out) = make_uint2(pack_half2(v[0] * kHadamardScale, v[1] * kHadamardScale),
                                              pack_half2(v[2] * kHadamardScale, v[3] * kHadamardScale));
}

constexpr int kRotateRows = 16;  // of a block of rotate_rows_kernel
constexpr int kRotateRowsWarps = 8;

// The same bytes for many rows: a block transforms 16 rows of one 128-group and writes them as whole core matrices, 256
// bytes in a row. Grid: (k / 128, ceil(m / 16), shards).
template <class T>
__global__ void __launch_bounds__(32 * kRotateRowsWarps)
    rotate_rows_kernel(const __grid_constant__ LinearArgs args, int64_t rotation_bytes, int rows) {
  constexpr int kPitch = kRotateRows * 16 + 16;  // bytes from eight k to the next: a quarter warp writes all banks
  __shared__ __align__(16) unsigned char block[kHadamard / 8 * kPitch];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = blockIdx.x * kHadamard + lane * 4, row0 = blockIdx.y * kRotateRows;
  allow_next_grid();
  const uint2 signs = *reinterpret_cast<const uint2*>(static_cast<const __half*>(args.shard[blockIdx.z].suh) + first);
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&signs.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&signs.y));
  const float scale[4] = {low.x, low.y, high.x, high.y};
  wait_for_previous_grid();
  float v[kRotateRows / kRotateRowsWarps][4] = {};
#pragma unroll
  for (int i = 0; i < kRotateRows / kRotateRowsWarps; ++i) {
    const int row = row0 + warp + i * kRotateRowsWarps;
    if (row < args.m) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride + first;
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i][j] = first + j < args.k_true ? to_float(x[j]) * scale[j] : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kRotateRows / kRotateRowsWarps; ++i) {
    hadamard_128(v[i], lane);
    *reinterpret_cast<uint2*>(block + lane / 2 * kPitch + (warp + i * kRotateRowsWarps) * 16 + lane % 2 * 8) =
        make_uint2(pack_half2(v[i][0] * kHadamardScale, v[i][1] * kHadamardScale),
                   pack_half2(v[i][2] * kHadamardScale, v[i][3] * kHadamardScale));
  }
  __syncthreads();
  const int row = threadIdx.x % kRotateRows, eight = threadIdx.x / kRotateRows;
  if (row0 + row >= args.m) return;
  unsigned char* out = args.scratch + blockIdx.z * rotation_bytes +
                       rotated_offset(row0 + row, blockIdx.x * kHadamard + eight * 8, rows, args.k);
  *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(block + eight * kPitch + row * 16);
}

}  // namespace exl3
