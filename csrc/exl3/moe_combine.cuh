// Between and after the products: activation, and the weighted sum of a row's experts.
#pragma once

#include "moe_route.cuh"

namespace exl3 {

__device__ __forceinline__ float2 half_pair(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

// This lane's four of the 128 sums of a row and column block; sums begins at the block.
__device__ __forceinline__ void load_sums(const unsigned char* sums, int64_t at, int sum_bytes, float (&v)[4]) {
  if (sum_bytes == 4) {
    const float4 read = load_from_l2(reinterpret_cast<const float4*>(sums + at * 4));
    v[0] = read.x, v[1] = read.y, v[2] = read.z, v[3] = read.w;
  } else {
    const uint2 read = *reinterpret_cast<const uint2*>(sums + at * 2);
    const float2 low = half_pair(read.x), high = half_pair(read.y);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
}

// Sums lie so that a lane's four belong to channels `channel`, + 8, + 1 and + 9 of the 128.
__device__ __forceinline__ int first_channel(int lane) { return lane / 4 * kTile + lane % 4 * 2; }

// v <- v * scale * s for channels of that order; s begins at the block.
__device__ __forceinline__ void multiply_channels(float (&v)[4], const __half* s, int channel, float scale) {
  const float2 low = half_pair(*reinterpret_cast<const uint32_t*>(s + channel));
  const float2 high = half_pair(*reinterpret_cast<const uint32_t*>(s + channel + 8));
  v[0] *= low.x * scale, v[2] *= low.y * scale, v[1] *= high.x * scale, v[3] *= high.y * scale;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float activate(const MoeArgs& args, float gate, float up) {
  switch (args.activation) {
    case MoeActivation::kSilu:
      gate = fminf(gate, args.limit);
      up = fminf(fmaxf(up, -args.limit), args.limit);
      return gate * sigmoid(args.alpha * gate) * (up + args.beta);
    case MoeActivation::kSiluStep:
      return fminf(gate * sigmoid(gate), args.limit) * fminf(fmaxf(up, -args.limit), args.limit);
    case MoeActivation::kGelu: return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    case MoeActivation::kGeluTanh:
      return gate * sigmoid(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)) * up;
    case MoeActivation::kSquaredRelu: break;
  }
  gate = fmaxf(gate, 0.0f);
  return gate * gate * up;
}

constexpr int kMiddleWarps = 4, kCombineWarps = 4;

// middle <- had(act(gate, up) * suh), one warp a (route, slice, 128 channels). Grid: (window, ceil(blocks / 4)).
static __global__ void __launch_bounds__(32 * kMiddleWarps)
    moe_middle_kernel(const __grid_constant__ MoeArgs args, int window) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArena arena(args);
  const int blocks = args.width / kBlockColumns, lane = threadIdx.x % 32;
  const int at = blockIdx.y * kMiddleWarps + threadIdx.x / 32, slice = at / blocks, block = at % blocks;
  const int place = window * args.window + blockIdx.x;
  if (slice >= args.slices || place >= *reinterpret_cast<const int*>(args.arena + arena.header)) return;
  const int expert = reinterpret_cast<const Route*>(args.arena + arena.sorted)[place].expert;
  const int channel = first_channel(lane);
  const float scale = kHadamardScale / sum_scale(args, args.k);
  float halves[kMatrices][4];
#pragma unroll
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    float(&v)[4] = halves[matrix];
    int64_t sums = ((static_cast<int64_t>(blockIdx.x) * args.slices + slice) * kMatrices + matrix) * args.width +
                   block * kBlockColumns + lane * 4;
    load_sums(args.arena + arena.sums, sums, arena.sum_bytes, v);
#pragma unroll 1
    for (int part = 1; part < args.parts; ++part) {
      float more[4];
      sums += static_cast<int64_t>(arena.window) * args.slices * kMatrices * args.width;
      load_sums(args.arena + arena.sums, sums, arena.sum_bytes, more);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] += more[i];
    }
    hadamard_128(v, lane);
    const __half* svh = static_cast<const __half*>(args.slice[slice].svh13) +
                        (static_cast<int64_t>(expert) * kMatrices + matrix) * args.width + block * kBlockColumns;
    multiply_channels(v, svh, channel, scale);
  }
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int of_all = slice * args.width + block * kBlockColumns + channel + i % 2 * 8 + i / 2;
    v[i] = of_all < args.intermediate ? activate(args, halves[0][i], halves[1][i]) : 0.0f;
  }
  multiply_channels(v, static_cast<const __half*>(args.slice[slice].suh2) + static_cast<int64_t>(expert) * args.width +
                           block * kBlockColumns,
                    channel, 1.0f);
  hadamard_128(v, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= kHadamardScale;
  unsigned char* to = args.arena + arena.middle +
                      ((static_cast<int64_t>(place) * args.slices + slice) * args.width + block * kBlockColumns) * 2 *
                          arena.twice;
  if (arena.twice == 2) {  // each twice, in the order of decode_tile_twice
    uint32_t* four = reinterpret_cast<uint32_t*>(to) + lane / 4 * 16 + lane % 4;
    four[0] = pack_half2(v[0], v[0]), four[4] = pack_half2(v[2], v[2]);
    four[8] = pack_half2(v[1], v[1]), four[12] = pack_half2(v[3], v[3]);
  } else {
    *reinterpret_cast<uint32_t*>(to + channel * 2) = pack_half2(v[0], v[2]);
    *reinterpret_cast<uint32_t*>(to + (channel + 8) * 2) = pack_half2(v[1], v[3]);
  }
}

// y <- the sum over a row's slots, in their order. One warp a (row, 128 columns), columns from first_column blocks on.
// Grid: (m, ceil(column blocks of the pass / 4)).
static __global__ void __launch_bounds__(32 * kCombineWarps)
    moe_combine_kernel(const __grid_constant__ MoeArgs args, int first_column, int columns) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArena arena(args);
  const int lane = threadIdx.x % 32, row = blockIdx.x;
  const int column = blockIdx.y * kCombineWarps + threadIdx.x / 32, channel = first_channel(lane);
  if (column >= columns) return;
  const int64_t block = static_cast<int64_t>(first_column + column) * kBlockColumns;
  const float scale = kHadamardScale / sum_scale(args, args.width);
  const int* places = reinterpret_cast<const int*>(args.arena + arena.places) + row * args.top_k;
  float y[4] = {};
#pragma unroll 1
  for (int slice = 0; slice < args.slices; ++slice) {
    const __half* svh = static_cast<const __half*>(args.slice[slice].svh2) + block;
    float of_slice[4] = {};
#pragma unroll 2
    for (int slot = 0; slot < args.top_k; ++slot) {
      const int route = row * args.top_k + slot, place = places[slot];
      if (place < 0) continue;
      float v[4];
      const int64_t sums = ((static_cast<int64_t>(place) * args.slices + slice) * columns + column) * kBlockColumns + lane * 4;
      load_sums(args.arena + arena.outputs, sums, arena.sum_bytes, v);
      const float weight = args.weight_on_input ? scale : args.weights[route] * scale;
      if (args.shared_h) {  // one transform for all
#pragma unroll
        for (int i = 0; i < 4; ++i) of_slice[i] = fmaf(v[i], weight, of_slice[i]);
        continue;
      }
      hadamard_128(v, lane);
      multiply_channels(v, svh + static_cast<int64_t>(expert_of(args, route)) * args.k, channel, weight);
#pragma unroll
      for (int i = 0; i < 4; ++i) of_slice[i] += v[i];
    }
    if (args.shared_h) {
      hadamard_128(of_slice, lane);
      multiply_channels(of_slice, svh, channel, 1.0f);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] += of_slice[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = block + channel + i % 2 * 8 + i / 2;
    if (at < args.hidden) store(args.y, row * args.y_stride + at, args.io_type, y[i]);
  }
}

}  // namespace exl3
