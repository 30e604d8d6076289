// The 128-point Sylvester Hadamard transform of one warp: four values a lane.
//
// The transform is a product of seven butterflies, one for each bit of the index, in any order; which bit of the index
// a register or lane bit stands for is the caller's choice, and the result comes back in the places of the input.
#pragma once

#include "ptx.cuh"

namespace exl3 {

constexpr int kHadamard = 128;
constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128): makes the transform its own inverse

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// v <- H v, unscaled, over 4 registers x 32 lanes. The order of additions is fixed: every caller gets the same bytes.
__device__ __forceinline__ void hadamard_128(float (&v)[4], int lane) {
  butterfly(v[0], v[1]);
  butterfly(v[2], v[3]);
  butterfly(v[0], v[2]);
  butterfly(v[1], v[3]);
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const float sign = lane & bit ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(sign, v[i], shuffle_xor(v[i], bit));
  }
}

}  // namespace exl3
