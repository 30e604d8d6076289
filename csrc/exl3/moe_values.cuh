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

// This lane's four of the decode plan's 128 sums of a row and column block, which begin at the block.
__device__ __forceinline__ void load_sums(const unsigned char* sums, int64_t at, float (&v)[4]) {
  const float4 read = load_from_l2(reinterpret_cast<const float4*>(sums + at * 4));
  v[0] = read.x, v[1] = read.y, v[2] = read.z, v[3] = read.w;
}

// Sums lie so that a lane's four belong to channels `channel`, + 8, + 1 and + 9 of the 128.
__device__ __forceinline__ int first_channel(int lane) { return lane / 4 * kTile + lane % 4 * 2; }

// kFast: by the fast instructions, 1e-6 off at most where it matters; what is made of it is rounded to fp16.
template <bool kFast>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (kFast) return __fdividef(1.0f, 1.0f + __expf(-x));
  else return 1.0f / (1.0f + expf(-x));
}

template <bool kFast>
__device__ __forceinline__ float activate(const MoeArgs& args, MoeActivation kind, float gate, float up) {
  switch (kind) {
    case MoeActivation::kSilu:
      gate = fminf(gate, args.limit);
      up = fminf(fmaxf(up, -args.limit), args.limit);
      return gate * sigmoid<kFast>(args.alpha * gate) * (up + args.beta);
    case MoeActivation::kSiluStep:
      return fminf(gate * sigmoid<kFast>(gate), args.limit) * fminf(fmaxf(up, -args.limit), args.limit);
    case MoeActivation::kGelu: return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    case MoeActivation::kGeluTanh:
      return gate * sigmoid<kFast>(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)) * up;
    case MoeActivation::kSquaredRelu: break;
  }
  gate = fmaxf(gate, 0.0f);
  return gate * gate * up;
}
// In the decode plan, whose time this is not, and which has few registers.
__device__ __forceinline__ float activate(const MoeArgs& args, float gate, float up) {
  return activate<false>(args, args.activation, gate, up);
}

}  // namespace exl3
