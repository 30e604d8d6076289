// Between and after the products: activation, and the weighted sum of a row's experts.
#pragma once

#include "moe_rotate.cuh"

namespace exl3 {

constexpr int kMiddleWarps = 4, kCombineWarps = 4;

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
                      ((static_cast<int64_t>(place) * args.slices + slice) * args.width + block * kBlockColumns) * 2;
  *reinterpret_cast<uint32_t*>(to + channel * 2) = pack_half2(v[0], v[2]);
  *reinterpret_cast<uint32_t*>(to + (channel + 8) * 2) = pack_half2(v[1], v[3]);
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

// y <- the sum over a row's slots, in their order. One warp an octet of a row's columns, from block first_column on.
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
