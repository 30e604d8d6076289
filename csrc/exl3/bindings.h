// What the operators' files share: checks of tensors, and torch's current stream, on the LibTorch stable ABI.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "exl3.h"

// Lives in the CUDA part of torch, which is absent where only the CPU wheel is installed.
extern "C" __attribute__((weak)) int aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace exl3 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DataType data_type(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Half: return DataType::kHalf;
    case ScalarType::BFloat16: return DataType::kBfloat16;
    case ScalarType::Float: return DataType::kFloat;
    default: break;
  }
  STD_TORCH_CHECK(false, "exl3: ", name, " has scalar type ", static_cast<int>(t.scalar_type()),
                  ", want float16, bfloat16 or float32");
  return DataType::kHalf;
}

inline void check_vector(const Tensor& t, const char* name, ScalarType type, int64_t least, int32_t device) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, "exl3: ", name, " is not on cuda:", device);
  STD_TORCH_CHECK(t.scalar_type() == type, "exl3: ", name, " has scalar type ", static_cast<int>(t.scalar_type()),
                  ", want ", static_cast<int>(type));
  STD_TORCH_CHECK(t.is_contiguous(), "exl3: ", name, " is not contiguous");
  STD_TORCH_CHECK(t.numel() >= least, "exl3: ", name, " has ", t.numel(), " elements, want at least ", least);
}

inline void check_matrix(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cuda() && t.dim() == 2, "exl3: ", name, " has ", t.dim(), " dimensions, want a CUDA matrix");
  STD_TORCH_CHECK(t.size(1) == 1 || t.stride(1) == 1, "exl3: columns of ", name, " are ", t.stride(1),
                  " elements apart, want 1");
}

inline void check_aligned(const Tensor& t, const char* name, uintptr_t bytes) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0, "exl3: ", name, " begins at ", t.data_ptr(),
                  ", want a multiple of ", static_cast<int64_t>(bytes));
}

inline void check_rate(int64_t rate2, int64_t codebook) {
  const bool whole = rate2 >= 2 && rate2 <= 16 && rate2 % 2 == 0;
  const bool half = codebook == 2 && (rate2 == 3 || rate2 == 5 || rate2 == 7);
  STD_TORCH_CHECK(codebook >= 0 && codebook <= 2, "exl3: codebook ", codebook, ", want 0 (3inst), 1 (mcg) or 2 (mul1)");
  STD_TORCH_CHECK(whole || half, "exl3: rate ", rate2, "/2 with codebook ", codebook,
                  ", want 1 to 8 bits, or 1.5, 2.5, 3.5 with mul1");
}

inline cudaStream_t current_stream(int32_t device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "exl3: this torch has no CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0, "exl3: no current stream on cuda:", device);
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(cudaError_t status, const char* what) {
  STD_TORCH_CHECK(status == cudaSuccess, "exl3: ", what, ": ", cudaGetErrorString(status));
}

}  // namespace exl3
