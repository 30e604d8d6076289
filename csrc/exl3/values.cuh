// Values as they are stored: fp16, bf16 and fp32.
#pragma once

#include "exl3.h"
#include "ptx.cuh"

namespace exl3 {

template <class T>
__device__ __forceinline__ float to_float(T v) { return static_cast<float>(v); }
template <>
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pack_bfloat162(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float bits_to_float(uint32_t bits) { return *reinterpret_cast<const float*>(&bits); }
__device__ __forceinline__ uint32_t float_to_bits(float v) { return *reinterpret_cast<const uint32_t*>(&v); }

__device__ __forceinline__ float load(const void* x, int64_t at, DataType type) {
  if (type == DataType::kHalf) return to_float(static_cast<const __half*>(x)[at]);
  if (type == DataType::kBfloat16) return to_float(static_cast<const __nv_bfloat16*>(x)[at]);
  return static_cast<const float*>(x)[at];
}

__device__ __forceinline__ void store(void* y, int64_t at, DataType type, float value) {
  if (type == DataType::kHalf) static_cast<__half*>(y)[at] = from_float<__half>(value);
  else if (type == DataType::kBfloat16) static_cast<__nv_bfloat16*>(y)[at] = from_float<__nv_bfloat16>(value);
  else static_cast<float*>(y)[at] = value;
}

}  // namespace exl3
