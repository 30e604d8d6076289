// What both plans compute between the products: whose input a route takes, sums as the tensor cores left them, activation.
#pragma once

#include "moe_route.cuh"
#include "values.cuh"

namespace exl3 {

__device__ __forceinline__ float2 half_pair(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

// Where a route's input is, whose expert's signs it takes, and what it is multiplied by.
struct InputRow {
  int row, expert;
  float weight;
};
__device__ __forceinline__ InputRow input_row(const MoeArgs& args, int route, int expert) {
  return {route / args.top_k, args.shared_h ? 0 : expert, args.weight_on_input ? args.weights[route] : 1.0f};
}

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

}  // namespace exl3
