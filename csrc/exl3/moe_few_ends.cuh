// Around the two products of few routes: inputs rotated, activation between them, and the sum of a row's experts.
//
// A warp transforms 128 points; its lanes hold four each in the order of the tensor cores' fragments. What a kernel
// reads of the grids before the one ahead of it, it reads before it waits.
#pragma once

#include "moe_values.cuh"

namespace exl3 {

constexpr int kFewEndWarps = 8, kFewMiddleWarps = 4;

// Stores channels 2c, 2c + 1, 2c + 8 and 2c + 9 of tile lane/4, c = lane%4, in fp16 in the order of moe_few_kernel's
// fragments; twice: each two times.
__device__ __forceinline__ void store_fragment(unsigned char* group, int lane, int twice, float a, float b, float c,
                                               float d) {
  if (twice == 2) {
    reinterpret_cast<uint4*>(group)[lane] =
        make_uint4(pack_half2(a, a), pack_half2(b, b), pack_half2(c, c), pack_half2(d, d));
  } else {
    reinterpret_cast<uint2*>(group)[lane] = make_uint2(pack_half2(a, b), pack_half2(c, d));
  }
}

// Two neighbouring inputs of a row, zero from `hidden` on.
__device__ __forceinline__ float2 load_input_pair(const MoeArgs& args, int row, int first) {
  const int64_t at = row * args.x_stride + first;
  if (args.wide_x && args.io_type != DataType::kFloat && first + 2 <= args.hidden) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(args.x) + at);
    return args.io_type == DataType::kHalf ? half_pair(pair)
                                           : make_float2(bits_to_float(pair << 16), bits_to_float(pair & 0xffff0000u));
  }
  return make_float2(first < args.hidden ? load(args.x, at, args.io_type) : 0.0f,
                     first + 1 < args.hidden ? load(args.x, at + 1, args.io_type) : 0.0f);
}

// One warp: the inputs of gate and up for one group of 128 of a route or row.
__device__ __forceinline__ void rotate_few(const MoeCall& call, int source, int group, int slice) {
  const MoeArgs& args = call.args;
  const int lane = threadIdx.x % 32, channel = group * kHadamard + first_channel(lane);
  InputRow of{source, 0, 1.0f};
  if (!call.by_row) {
    const int expert = expert_of(args, source);
    if (expert < 0) return;
    of = input_row(args, source, expert);
  }
  const float2 low = load_input_pair(args, of.row, channel), high = load_input_pair(args, of.row, channel + 8);
  const __half* suh = static_cast<const __half*>(args.slice[slice].suh13) +
                      static_cast<int64_t>(of.expert) * kMatrices * args.k + channel;
  float2 signs[kMatrices][2];
#pragma unroll
  for (int matrix = 0; matrix < kMatrices; ++matrix)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      signs[matrix][half] = half_pair(*reinterpret_cast<const uint32_t*>(suh + matrix * args.k + half * 8));
  const int64_t pitch = static_cast<int64_t>(args.k) * 2 * call.arena.twice;
  unsigned char* to = args.arena + call.arena.inputs +
                      (static_cast<int64_t>(source) * args.slices + slice) * kMatrices * pitch +
                      static_cast<int64_t>(group) * kHadamard * 2 * call.arena.twice;
  const float scale = kHadamardScale * of.weight;
#pragma unroll
  for (int matrix = 0; matrix < kMatrices; ++matrix, to += pitch) {
    float v[4] = {low.x * signs[matrix][0].x, low.y * signs[matrix][0].y, high.x * signs[matrix][1].x,
                  high.y * signs[matrix][1].y};
    hadamard_128(v, lane);
    store_fragment(to, lane, call.arena.twice, v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale);
  }
}

// The inputs need not be sorted: one grid does both, the first block sorts. Grid: (1 + ceil(source rows * groups of k /
// 8), slices).
static __global__ void __launch_bounds__(32 * kFewEndWarps, 4)
    moe_route_and_input_kernel(const __grid_constant__ MoeCall call, int rows) {
  wait_for_previous_grid();
  allow_next_grid();
  const int groups = call.args.k / kHadamard;
  const int at = (static_cast<int>(blockIdx.x) - 1) * kFewEndWarps + static_cast<int>(threadIdx.x) / 32;
  if (blockIdx.x == 0) {
    if (blockIdx.y == 0) list_routes<true>(call);
  } else if (at < rows * groups) {
    rotate_few(call, at / groups, at % groups, blockIdx.y);
  }
}

// A lane's channels of a vector of signs, in the order of sums.
__device__ __forceinline__ void load_signs(const __half* s, float (&v)[4]) {
  const float2 low = half_pair(*reinterpret_cast<const uint32_t*>(s));
  const float2 high = half_pair(*reinterpret_cast<const uint32_t*>(s + 8));
  v[0] = low.x, v[2] = low.y, v[1] = high.x, v[3] = high.y;
}

// middle <- had(act(gate, up) * suh), one warp a (route, slice, 128 channels). Grid: (routes, ceil(blocks / 4)).
static __global__ void __launch_bounds__(32 * kFewMiddleWarps)
    moe_middle_few_kernel(const __grid_constant__ MoeCall call) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int blocks = args.width / kBlockColumns, lane = threadIdx.x % 32;
  const int at = blockIdx.y * kFewMiddleWarps + threadIdx.x / 32, slice = at / blocks, block = at % blocks;
  const int place = blockIdx.x;
  earlier_grids_have_ended();
  const bool here = slice < args.slices && place < *reinterpret_cast<const int*>(args.arena + arena.header);
  const int channel = block * kBlockColumns + first_channel(lane);
  float svh[kMatrices][4] = {}, suh[4] = {};
  if (here) {
    const int64_t expert = reinterpret_cast<const Route*>(args.arena + arena.sorted)[place].expert;
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix)
      load_signs(
          static_cast<const __half*>(args.slice[slice].svh13) + (expert * kMatrices + matrix) * args.width + channel,
          svh[matrix]);
    load_signs(static_cast<const __half*>(args.slice[slice].suh2) + expert * args.width + channel, suh);
  }
  wait_for_previous_grid();
  allow_next_grid();
  if (!here) return;
  float v[kMatrices][4] = {};
  const float* sums = reinterpret_cast<const float*>(args.arena + arena.sums) +
                      (static_cast<int64_t>(place) * args.slices + slice) * kMatrices * args.width +
                      block * kBlockColumns + lane * 4;
  const int64_t part_sums = static_cast<int64_t>(arena.window) * args.slices * kMatrices * args.width;
#pragma unroll 8
  for (int part = 0; part < args.parts; ++part) {
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      const float4 read = load_from_l2(reinterpret_cast<const float4*>(sums + part * part_sums + matrix * args.width));
      v[matrix][0] += read.x, v[matrix][1] += read.y, v[matrix][2] += read.z, v[matrix][3] += read.w;
    }
  }
  hadamard_128(v[0], lane);
  hadamard_128(v[1], lane);
  float middle[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int of_all = slice * args.width + channel + i % 2 * 8 + i / 2;
    middle[i] = activate(args, v[0][i] * svh[0][i] * kHadamardScale, v[1][i] * svh[1][i] * kHadamardScale) * suh[i];
    if (of_all >= args.intermediate) middle[i] = 0.0f;
  }
  hadamard_128(middle, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) middle[i] *= kHadamardScale;
  unsigned char* to = args.arena + arena.middle +
                      ((static_cast<int64_t>(place) * args.slices + slice) * args.width + block * kBlockColumns) * 2 *
                          arena.twice;
  store_fragment(to, lane, arena.twice, middle[0], middle[2], middle[1], middle[3]);
}

constexpr int kFewSlots = 8;  // of a row at once, a warp each

// y <- the sum over a row's slots, slice by slice and in their order. Grid: (m, k / 128).
static __global__ void __launch_bounds__(32 * kFewSlots) moe_combine_few_kernel(const __grid_constant__ MoeCall call) {
  __shared__ __align__(16) float terms[kFewSlots][kBlockColumns];
  const MoeArgs& args = call.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x;
  const int64_t block = static_cast<int64_t>(blockIdx.y) * kBlockColumns;
  const int* places = reinterpret_cast<const int*>(args.arena + call.arena.places) + row * args.top_k;
  float y = 0.0f;
  earlier_grids_have_ended();
#pragma unroll 1
  for (int slice = 0; slice < args.slices; ++slice) {
#pragma unroll 1
    for (int first = 0; first < args.top_k; first += kFewSlots) {
      const int slot = first + warp, place = slot < args.top_k ? places[slot] : -1;
      float v[4] = {}, svh[4] = {};
      if (place >= 0) {
        const int route = row * args.top_k + slot, expert = args.shared_h ? 0 : expert_of(args, route);
        const float weight = args.weight_on_input ? kHadamardScale : args.weights[route] * kHadamardScale;
        load_signs(static_cast<const __half*>(args.slice[slice].svh2) + static_cast<int64_t>(expert) * args.k + block +
                       first_channel(lane),
                   svh);
#pragma unroll
        for (int i = 0; i < 4; ++i) svh[i] *= weight;
      }
      wait_for_previous_grid();
      allow_next_grid();
      if (place >= 0) {
        const int64_t sums = (static_cast<int64_t>(place) * args.slices + slice) * args.k + block + lane * 4;
        load_sums(args.arena + call.arena.outputs, sums, v);
      }
      hadamard_128(v, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) terms[warp][first_channel(lane) + i % 2 * 8 + i / 2] = v[i] * svh[i];
      __syncthreads();
      if (threadIdx.x < kBlockColumns) {
#pragma unroll
        for (int i = 0; i < kFewSlots; ++i) y += terms[i][threadIdx.x];
      }
      __syncthreads();
    }
  }
  if (threadIdx.x < kBlockColumns && block + threadIdx.x < args.hidden)
    store(args.y, row * args.y_stride + block + threadIdx.x, args.io_type, y);
}

}  // namespace exl3
