// A matrix in global memory as the copy engine of SM90 knows it: boxes of its rows come to shared memory with the chunks
// swapped that swizzled_descriptor expects. Described on the host, once a launch, and passed to the kernel by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "pipeline.cuh"

namespace exl3 {

using TensorMap = CUtensorMap;
constexpr int kBoxColumns = 64;  // of fp16: 128 bytes

// The driver's function by name, so that nothing needs libcuda to be loaded.
inline cudaError_t find_encoder(void*& found) {
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) return status;
  return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorNotSupported;
}

// fp16 [rows, columns], rows `pitch` bytes apart, a multiple of 16; copied in boxes of box_rows rows.
inline cudaError_t describe_matrix(TensorMap& map, const void* matrix, int64_t rows, int64_t columns, int64_t pitch,
                                   int box_rows) {
  static void* found = nullptr;
  static const cudaError_t status = find_encoder(found);  // once a process
  if (status != cudaSuccess) return status;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitches[] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUresult made = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(matrix), sizes, pitches, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#if EXL3_WARPGROUP

// The box whose first element is (row, column), to an address that is a multiple of 1024; rows beyond the last are 0.
// `barrier` counts the bytes of the whole box.
__device__ __forceinline__ void copy_box(SharedAddress to, const TensorMap& map, int column, int row,
                                         SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

#endif  // EXL3_WARPGROUP

}  // namespace exl3
