// Between and after the products: activation, and the weighted sum of a row's experts.
#pragma once

#include "moe_rotate.cuh"

namespace exl3 {

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


// Gate (matrix 0) or up (1) of a route, four channels a lane: its parts added in ascending order of k, then H and svh.
__device__ __forceinline__ void load_projection(const MoeCall& call, int expert, int slice, int matrix, int block,
                                                float (&v)[4]) {
  const MoeArgs& args = call.args;
  const int lane = threadIdx.x % 32;
  const unsigned char* sums = args.arena + call.arena.sums;
  const int64_t at = ((static_cast<int64_t>(blockIdx.x) * args.slices + slice) * kMatrices + matrix) * args.width +
                     block * kBlockColumns + lane * 4;
  const int64_t part_sums = static_cast<int64_t>(call.arena.window) * args.slices * kMatrices * args.width;
  load_sums(sums, at, call.arena.sum_bytes, v);
#pragma unroll 4
  for (int part = 1; part < args.parts; ++part) {
    float more[4];
    load_sums(sums, at + part * part_sums, call.arena.sum_bytes, more);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += more[i];
  }
  hadamard_128(v, lane);
  const __half* svh = static_cast<const __half*>(args.slice[slice].svh13) +
                      (static_cast<int64_t>(expert) * kMatrices + matrix) * args.width + block * kBlockColumns;
  multiply_channels(v, svh, first_channel(lane), kHadamardScale / call.into_scale);
}

// middle <- had(act(gate, up) * suh), one warp a (route, slice, 128 channels). Grid: (window, ceil(blocks / 4)).
static __global__ void __launch_bounds__(32 * kMiddleWarps)
    moe_middle_kernel(const __grid_constant__ MoeCall call, int window) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int blocks = args.width / kBlockColumns, lane = threadIdx.x % 32;
  const int at = blockIdx.y * kMiddleWarps + threadIdx.x / 32, slice = at / blocks, block = at % blocks;
  const int place = window * args.window + blockIdx.x;
  if (slice >= args.slices || place >= *reinterpret_cast<const int*>(args.arena + arena.header)) return;
  const int expert = reinterpret_cast<const Route*>(args.arena + arena.sorted)[place].expert;
  const int channel = first_channel(lane);
  float gate[4], up[4];
  load_projection(call, expert, slice, 0, block, gate);
  load_projection(call, expert, slice, 1, block, up);
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int of_all = slice * args.width + block * kBlockColumns + channel + i % 2 * 8 + i / 2;
    v[i] = of_all < args.intermediate ? activate(args, gate[i], up[i]) : 0.0f;
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
  if (args.decode) {
    unsigned char* const tile = to + lane / 4 * kTile * 2 * arena.twice;
    store_few(tile, lane % 4, 0, v[0], v[2], arena.twice);
    store_few(tile, lane % 4, 1, v[1], v[3], arena.twice);
  } else {
    *reinterpret_cast<uint32_t*>(to + channel * 2) = pack_half2(v[0], v[2]);
    *reinterpret_cast<uint32_t*>(to + (channel + 8) * 2) = pack_half2(v[1], v[3]);
  }
}

// Eight neighbouring places of sums, which hold channels first_of_eight and the next three, and those + 8: in turn.
__device__ __forceinline__ void load_sums(const unsigned char* sums, int64_t at, int sum_bytes, float (&v)[8]) {
  if (sum_bytes == 2) return load_8(reinterpret_cast<const __half*>(sums) + at, v);
  const float4 low = load_from_l2(reinterpret_cast<const float4*>(sums + at * 4));
  const float4 high = load_from_l2(reinterpret_cast<const float4*>(sums + at * 4) + 1);
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}
__device__ __forceinline__ int first_of_eight(int place) { return place / kTile * kTile + place % kTile / 2; }

// v <- v * scale * s for an octet's sums; s: of the group.
__device__ __forceinline__ void multiply_octet(float (&v)[kLanePoints], const __half* s, int lane, float scale) {
#pragma unroll
  for (int eight = 0; eight < kLanePoints / 8; ++eight) {
    const int channel = first_of_eight(lane_point(lane, eight));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 read = *reinterpret_cast<const uint2*>(s + channel + 8 * half);
      const float2 low = half_pair(read.x), high = half_pair(read.y);
      const float four[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) v[eight * 8 + 2 * i + half] *= four[i] * scale;
    }
  }
}

// Four neighbouring outputs of a row.
__device__ __forceinline__ void store_outputs(const MoeArgs& args, int row, int64_t first, const float (&v)[4]) {
  const int64_t at = row * args.y_stride + first;
  if (args.wide_x && first + 4 <= args.hidden && args.io_type != DataType::kFloat) {
    const bool half = args.io_type == DataType::kHalf;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.y) + at) =
        half ? make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]))
             : make_uint2(pack_bfloat162(v[0], v[1]), pack_bfloat162(v[2], v[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (first + i < args.hidden) store(args.y, at + i, args.io_type, v[i]);
}

// y <- the sum over a row's slots, in their order, for few rows. One warp a (row, 128 columns). Grid: (m, ceil(k/128 / 4)).
static __global__ void __launch_bounds__(32 * kCombineWarps)
    moe_combine_few_kernel(const __grid_constant__ MoeCall call) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArgs& args = call.args;
  const int lane = threadIdx.x % 32, row = blockIdx.x, column = blockIdx.y * kCombineWarps + threadIdx.x / 32;
  const int channel = first_channel(lane);
  if (column >= args.k / kBlockColumns) return;
  const int* places = reinterpret_cast<const int*>(args.arena + call.arena.places) + row * args.top_k;
  float y[4] = {};
  for (int slice = 0; slice < args.slices; ++slice) {
    const __half* svh = static_cast<const __half*>(args.slice[slice].svh2) + column * kBlockColumns;
#pragma unroll 4
    for (int slot = 0; slot < args.top_k; ++slot) {
      const int route = row * args.top_k + slot, place = places[slot], expert = args.shared_h ? 0 : expert_of(args, route);
      float v[4] = {};
      const int64_t sums = (static_cast<int64_t>(place) * args.slices + slice) * args.k + column * kBlockColumns + lane * 4;
      if (place >= 0) load_sums(args.arena + call.arena.outputs, sums, 4, v);
      hadamard_128(v, lane);
      if (place < 0) continue;
      const float weight = args.weight_on_input ? 1.0f : args.weights[route];
      multiply_channels(v, svh + static_cast<int64_t>(expert) * args.k, channel, kHadamardScale * weight);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] += v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = static_cast<int64_t>(column) * kBlockColumns + channel + i % 2 * 8 + i / 2;
    if (at < args.hidden) store(args.y, row * args.y_stride + at, args.io_type, y[i]);
  }
}

// The same for many rows: one warp an octet of a row's columns, from block first_column on.
// Grid: ceil(m * octets / 4).
static __global__ void __launch_bounds__(32 * kCombineWarps)
    moe_combine_kernel(const __grid_constant__ MoeCall call, int first_column, int columns) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int octets = (columns + kOctet - 1) / kOctet, at = blockIdx.x * kCombineWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, row = at / octets, column = at % octets * kOctet + lane / 4;
  if (row >= args.m) return;
  const bool here = column < columns;
  const int64_t block = static_cast<int64_t>(first_column + column) * kBlockColumns;
  const float scale = kHadamardScale / call.down_scale;
  const int* places = reinterpret_cast<const int*>(args.arena + arena.places) + row * args.top_k;
  float y[kLanePoints] = {};
#pragma unroll 1
  for (int slice = 0; slice < args.slices; ++slice) {
    const __half* svh = static_cast<const __half*>(args.slice[slice].svh2) + block;
    float v[kLanePoints] = {};
#pragma unroll 1
    for (int slot = 0; slot < args.top_k; ++slot) {
      const int route = row * args.top_k + slot, place = places[slot];
      if (place < 0) continue;
      const float weight = args.weight_on_input ? scale : args.weights[route] * scale;
      const int64_t sums = ((static_cast<int64_t>(place) * args.slices + slice) * columns + column) * kBlockColumns;
#pragma unroll
      for (int eight = 0; eight < kLanePoints / 8; ++eight) {
        float read[8] = {};
        if (here) load_sums(args.arena + arena.outputs, sums + lane_point(lane, eight), arena.sum_bytes, read);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[eight * 8 + i] = args.shared_h ? fmaf(read[i], weight, v[eight * 8 + i]) : read[i];
      }
      if (args.shared_h) continue;  // one transform for all
      hadamard_octet(v, lane);
      if (here) multiply_octet(v, svh + static_cast<int64_t>(expert_of(args, route)) * args.k, lane, weight);
#pragma unroll
      for (int i = 0; i < kLanePoints; ++i) y[i] += v[i];
    }
    if (!args.shared_h) continue;
    hadamard_octet(v, lane);
    if (here) multiply_octet(v, svh, lane, 1.0f);
#pragma unroll
    for (int i = 0; i < kLanePoints; ++i) y[i] += v[i];
  }
  if (!here) return;
#pragma unroll
  for (int eight = 0; eight < kLanePoints / 8; ++eight)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = y[eight * 8 + 2 * i + half];
      store_outputs(args, row, block + first_of_eight(lane_point(lane, eight)) + 8 * half, four);
    }
}

}  // namespace exl3
