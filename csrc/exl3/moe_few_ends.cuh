// Around the two products of few routes: inputs rotated, activation between them, and the weighted sum of a row's experts.
#pragma once

#include "moe_values.cuh"

namespace exl3 {

constexpr int kFewEndWarps = 8, kFewMiddleWarps = 4;

// Two fp16 inputs 2c and 2c + 1 of a tile (of eight from `half` on) in the order of moe_few_kernel's fragments, which
// are 16 or 8 bytes for each of four c.
__device__ __forceinline__ void store_few(unsigned char* tile, int c, int half, float even, float odd, int twice) {
  if (twice == 2) {
    *reinterpret_cast<uint2*>(tile + c * 16 + half * 8) = make_uint2(pack_half2(even, even), pack_half2(odd, odd));
  } else {
    *reinterpret_cast<uint32_t*>(tile + c * 8 + half * 4) = pack_half2(even, odd);
  }
}

// One warp: the inputs of gate and up for one group of 128 of a route or row, four neighbouring k a lane.
__device__ __forceinline__ void rotate_few(const MoeCall& call, int source, int group, int slice) {
  const MoeArgs& args = call.args;
  const int lane = threadIdx.x % 32, first = group * kHadamard + lane * 4;
  InputRow of{source, 0, 1.0f};
  if (!call.by_row) {
    const int expert = expert_of(args, source);
    if (expert < 0) return;
    of = input_row(args, source, expert);
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = first + i < args.hidden ? load(args.x, of.row * args.x_stride + first + i, args.io_type) * of.weight : 0.0f;
  const int64_t pitch = static_cast<int64_t>(args.k) * 2 * call.arena.twice;
  unsigned char* to = args.arena + call.arena.inputs +
                      (static_cast<int64_t>(source) * args.slices + slice) * kMatrices * pitch +
                      static_cast<int64_t>(first / kTile) * kTile * 2 * call.arena.twice;
#pragma unroll
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    const uint2 signs = *reinterpret_cast<const uint2*>(static_cast<const __half*>(args.slice[slice].suh13) +
                                                        (static_cast<int64_t>(of.expert) * kMatrices + matrix) * args.k + first);
    const float2 low = half_pair(signs.x), high = half_pair(signs.y);
    float v[4] = {x[0] * low.x, x[1] * low.y, x[2] * high.x, x[3] * high.y};
    hadamard_128(v, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= kHadamardScale;
    const int c = lane % 2 * 2, half = lane % 4 / 2;
    store_few(to + matrix * pitch, c, half, v[0], v[1], call.arena.twice);
    store_few(to + matrix * pitch, c + 1, half, v[2], v[3], call.arena.twice);
  }
}

// For few routes, whose inputs need not be sorted: one grid does both, the first block sorts. Grid: (1 + ceil(source
// rows * groups of k / 8), slices).
static __global__ void __launch_bounds__(32 * kFewEndWarps)
    moe_route_and_input_kernel(const __grid_constant__ MoeCall call, int rows) {
  wait_for_previous_grid();
  allow_next_grid();
  const int groups = call.args.k / kHadamard;
  const int at = (static_cast<int>(blockIdx.x) - 1) * kFewEndWarps + static_cast<int>(threadIdx.x) / 32;
  if (blockIdx.x == 0) {
    if (blockIdx.y == 0) list_routes(call);
  } else if (at < rows * groups) {
    rotate_few(call, at / groups, at % groups, blockIdx.y);
  }
}

// middle <- had(act(gate, up) * suh), one warp a (route, slice, 128 channels). Grid: (routes, ceil(blocks / 4)).
static __global__ void __launch_bounds__(32 * kFewMiddleWarps)
    moe_middle_few_kernel(const __grid_constant__ MoeCall call) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int blocks = args.width / kBlockColumns, lane = threadIdx.x % 32;
  const int at = blockIdx.y * kFewMiddleWarps + threadIdx.x / 32, slice = at / blocks, block = at % blocks;
  const int place = blockIdx.x;
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
  unsigned char* const tile = to + lane / 4 * kTile * 2 * arena.twice;
  store_few(tile, lane % 4, 0, v[0], v[2], arena.twice);
  store_few(tile, lane % 4, 1, v[1], v[3], arena.twice);
}

// y <- the sum over a row's slots, in their order, for few rows. One warp a (row, 128 columns). Grid: (m, ceil(k/128 / 4)).
static __global__ void __launch_bounds__(32 * kFewMiddleWarps)
    moe_combine_few_kernel(const __grid_constant__ MoeCall call) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArgs& args = call.args;
  const int lane = threadIdx.x % 32, row = blockIdx.x, column = blockIdx.y * kFewMiddleWarps + threadIdx.x / 32;
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

}  // namespace exl3
