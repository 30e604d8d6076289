// The 128-point transform for many rows, and the inputs of gate and up rotated by it.
//
// hadamard_128 of one warp spends its time in shuffles. Here a lane has 32 of the 128 points, so five of the seven
// butterflies stay in its registers, and a warp transforms eight groups at once, four lanes each: an octet.
#pragma once

#include "moe_values.cuh"
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

constexpr int kRouteThreads = 1024;

static __global__ void __launch_bounds__(kRouteThreads, 1)
    moe_route_kernel(const __grid_constant__ MoeCall call) {
  wait_for_previous_grid();
  allow_next_grid();
  list_routes(call);
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

}  // namespace exl3
