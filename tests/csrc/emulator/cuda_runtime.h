// The part of the CUDA runtime that csrc/exl3 uses, for a host compiler. See machine.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float __expf(float x) { return std::exp(x); }
// For so large a divisor the fast division gives 0, and of an infinity no number.
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f ? x * 0.0f : x / y; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern uint3 threadIdx, blockIdx;  // of the fiber that runs
extern dim3 blockDim, gridDim;

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void __syncthreads() { emulate::wait_for_block(); }
inline void __syncwarp(unsigned = 0xffffffffu) {
  emulate::wait_for_warp([](void* const (&)[emulate::kLanes]) {}, nullptr);
}

using cudaStream_t = struct Stream*;
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorInvalidValue ? "invalid argument" : status == cudaSuccess ? "no error" : emulate::what_failed();
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
constexpr int cudaSharedmemCarveoutMaxShared = 100;

// A card of one multiprocessor.
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }

// As many blocks as its smallest card has shared memory for.
template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(P...), int, size_t shared_bytes) {
  return *blocks = static_cast<int>(emulate::kLeastSharedBytes / (shared_bytes + 1024)), cudaSuccess;
}

inline cudaError_t& last_launch() {
  static cudaError_t status = cudaSuccess;
  return status;
}
inline cudaError_t cudaGetLastError() { return std::exchange(last_launch(), cudaSuccess); }

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;  // caches are not emulated
#if defined(EXL3_WARPGROUP) && EXL3_WARPGROUP
  constexpr int most = emulate::kLargestSharedBytes;
#else
  constexpr int most = emulate::kLeastSharedBytes;
#endif
  return static_cast<cudaError_t>(emulate::allow_shared_bytes(reinterpret_cast<const void*>(kernel), value, most));
}

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  bool dependent = false;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    dependent |= config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                 config->attrs[i].val.programmaticStreamSerializationAllowed;
  const dim3 grid = config->gridDim, block = config->blockDim;
  auto thread = [kernel, values = std::tuple<P...>(std::forward<A>(arguments)...)] { std::apply(kernel, values); };
  return static_cast<cudaError_t>(emulate::enqueue(thread, reinterpret_cast<const void*>(kernel), {grid.x, grid.y, grid.z},
                                                   {block.x, block.y, block.z}, config->dynamicSmemBytes, dependent));
}

// kernel<<<grid, block, shared, stream>>>(arguments), as tests/csrc/emulation.py spells it for a host compiler.
template <class... P>
auto launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
  return [=](auto&&... arguments) {
    const cudaLaunchConfig_t config{grid, block, shared_bytes, stream, nullptr, 0};
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments...);
    if (status != cudaSuccess) last_launch() = status;
  };
}
