// The 128-point transform for many rows, and the inputs of gate and up rotated by it.
//
// hadamard_128 of one warp spends its time in shuffles. Here a lane has 32 of the 128 points, so five of the seven
// butterflies stay in its registers, and a warp transforms eight groups at once, four lanes each: an octet.
#pragma once

#include "moe_route.cuh"
#include "values.cuh"
#include "warpgroup.cuh"

namespace exl3 {

constexpr int kOctet = 8;        // groups of 128 a warp transforms at once
constexpr int kLanePoints = 32;  // point (i / 8) * 32 + (lane % 4) * 8 + i % 8 of a group is v[i] of its lane
__device__ __forceinline__ int lane_point(int lane, int eight) { return eight * 32 + lane % 4 * 8; }

// v <- H v, unscaled, for the eight groups of a warp.
__device__ __forceinline__ void hadamard_octet(float (&v)[kLanePoints], int lane) {
#pragma unroll
  for (int span = 1; span < kLanePoints; span *= 2)
#pragma unroll
    for (int i = 0; i < kLanePoints; ++i)
      if ((i & span) == 0) butterfly(v[i], v[i + span]);
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const float sign = lane & bit ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kLanePoints; ++i) v[i] = fmaf(sign, v[i], shuffle_xor(v[i], bit));
  }
}

__device__ __forceinline__ float2 half_pair(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

// Eight neighbouring fp16, 16-byte aligned.
__device__ __forceinline__ void load_8(const __half* from, float (&v)[8]) {
  const uint4 read = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = half_pair(words[i]);
    v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
  }
}

// Eight neighbouring inputs of a row, zero from `hidden` on.
__device__ __forceinline__ void load_inputs(const MoeArgs& args, int row, int first, float (&v)[8]) {
  const int64_t at = row * args.x_stride + first;
  if (args.wide_x && first + 8 <= args.hidden && args.io_type != DataType::kFloat) {
    const uint4 read = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.x) + at);
    const uint32_t words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (args.io_type == DataType::kHalf) {
        const float2 pair = half_pair(words[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
      } else {
        v[2 * i] = bits_to_float(words[i] << 16), v[2 * i + 1] = bits_to_float(words[i] & 0xffff0000u);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = first + i < args.hidden ? load(args.x, at + i, args.io_type) : 0.0f;
}

// Where a route's input is, whose expert's signs it takes, and what it is multiplied by.
struct InputRow {
  int row, expert;
  float weight;
};
__device__ __forceinline__ InputRow input_row(const MoeArgs& args, int route, int expert) {
  return {route / args.top_k, args.shared_h ? 0 : expert, args.weight_on_input ? args.weights[route] : 1.0f};
}

// One warp: the inputs of gate and up for an octet of one source row, of routes from `window` on.
__device__ __forceinline__ void rotate_inputs(const MoeCall& call, int source, int octet, int slice, int window) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int lane = threadIdx.x % 32, group = octet * kOctet + lane / 4, first = group * kHadamard;
  const bool here = group < args.k / kHadamard;
  InputRow of{source, 0, 1.0f};
  if (!call.by_row) {
    const int place = window * args.window + source;
    if (place >= *reinterpret_cast<const int*>(args.arena + arena.header)) return;
    const Route sorted = reinterpret_cast<const Route*>(args.arena + arena.sorted)[place];
    of = input_row(args, sorted.route, sorted.expert);
  }
  const int64_t pitch = static_cast<int64_t>(args.k) * 2;
  unsigned char* to = args.arena + arena.inputs + (static_cast<int64_t>(source) * args.slices + slice) * kMatrices * pitch;
#pragma unroll 1
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    const __half* suh = static_cast<const __half*>(args.slice[slice].suh13) +
                        (static_cast<int64_t>(of.expert) * kMatrices + matrix) * args.k + first;
    float v[kLanePoints];
#pragma unroll
    for (int eight = 0; eight < kLanePoints / 8; ++eight) {
      float x[8] = {}, scale[8] = {};
      if (here) load_inputs(args, of.row, first + lane_point(lane, eight), x);
      if (here) load_8(suh + lane_point(lane, eight), scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[eight * 8 + i] = x[i] * of.weight * scale[i];
    }
    hadamard_octet(v, lane);
#pragma unroll
    for (int eight = 0; eight < kLanePoints / 8; ++eight) {
      uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[i] = pack_half2(v[eight * 8 + 2 * i] * kHadamardScale, v[eight * 8 + 2 * i + 1] * kHadamardScale);
      if (here)
        *reinterpret_cast<uint4*>(to + matrix * pitch + (first + lane_point(lane, eight)) * 2) =
            make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}

constexpr int kInputWarps = 8;

// Four blocks an SM, as it was measured on SM90; elsewhere that would spill.
constexpr int kInputBlocksPerSm = EXL3_WARPGROUP ? 4 : 2;

// For many rows. Grid: (ceil(source rows * octets of k / 8), slices).
static __global__ void __launch_bounds__(32 * kInputWarps, kInputBlocksPerSm)
    moe_input_kernel(const __grid_constant__ MoeCall call, int rows, int window) {
  wait_for_previous_grid();
  allow_next_grid();
  const int octets = (call.args.k / kHadamard + kOctet - 1) / kOctet;
  const int at = blockIdx.x * kInputWarps + threadIdx.x / 32;
  if (at < rows * octets) rotate_inputs(call, at / octets, at % octets, blockIdx.y, window);
}

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
static __global__ void __launch_bounds__(32 * kInputWarps)
    moe_route_and_input_kernel(const __grid_constant__ MoeCall call, int rows) {
  wait_for_previous_grid();
  allow_next_grid();
  const int groups = call.args.k / kHadamard;
  const int at = (static_cast<int>(blockIdx.x) - 1) * kInputWarps + static_cast<int>(threadIdx.x) / 32;
  if (blockIdx.x == 0) {
    if (blockIdx.y == 0) list_routes(call);
  } else if (at < rows * groups) {
    rotate_few(call, at / groups, at % groups, blockIdx.y);
  }
}

}  // namespace exl3
