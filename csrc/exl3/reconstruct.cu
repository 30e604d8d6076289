// Many rows: the weights decoded once, and the transforms for a product done by a library.
#include "reconstruct.cuh"

namespace exl3 {
namespace {

struct Matrix {
  const unsigned char* trellis;
  const __half *suh, *svh;
  int k, n, k_true, first_block, columns;
  void* w;
  int64_t stride;
  cudaStream_t stream;
};

template <Codebook kBook, int kRate2, class T>
cudaError_t run(const Matrix& a) {
  if (!a.suh) {
    reconstruct_kernel<kBook, kRate2, T><<<dim3(a.n / kBlockColumns, (a.k + 63) / 64), 32 * kReconstructWarps, 0, a.stream>>>(
        a.trellis, a.k, a.n, static_cast<T*>(a.w));
    return cudaGetLastError();
  }
  const int blocks = (a.columns + kBlockColumns - 1) / kBlockColumns, groups = (a.k_true + kHadamard - 1) / kHadamard;
  auto kernel = reconstruct_original_kernel<kBook, kRate2, T>;
  constexpr int kShared = original_shared_bytes(kRate2), kThreads = 32 * kReconstructWarps;
  int device, sms, each;  // blocks that run on an SM at once: smaller cards have shared memory for fewer than registers
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, kShared);
  if (status != cudaSuccess) return status;
  const int tiles = blocks * groups, most = each * sms, grid = tiles < most ? tiles : most;
  kernel<<<grid, kThreads, kShared, a.stream>>>(
      a.trellis, a.suh, a.svh, a.n, a.k_true, a.first_block, a.columns, static_cast<T*>(a.w), a.stride, groups);
  return cudaGetLastError();
}

template <Codebook kBook, class T>
cudaError_t run_rate(const Matrix& a, int rate2) {
  switch (rate2) {
    case 2: return run<kBook, 2, T>(a);
    case 4: return run<kBook, 4, T>(a);
    case 6: return run<kBook, 6, T>(a);
    case 8: return run<kBook, 8, T>(a);
    case 10: return run<kBook, 10, T>(a);
    case 12: return run<kBook, 12, T>(a);
    case 14: return run<kBook, 14, T>(a);
    case 16: return run<kBook, 16, T>(a);
    default: break;
  }
  if constexpr (kBook == Codebook::kMul1) {
    if (rate2 == 3) return run<kBook, 3, T>(a);
    if (rate2 == 5) return run<kBook, 5, T>(a);
    if (rate2 == 7) return run<kBook, 7, T>(a);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t run_book(const Matrix& a, int codebook, int rate2) {
  switch (static_cast<Codebook>(codebook)) {
    case Codebook::k3inst: return run_rate<Codebook::k3inst, T>(a, rate2);
    case Codebook::kMcg: return run_rate<Codebook::kMcg, T>(a, rate2);
    case Codebook::kMul1: return run_rate<Codebook::kMul1, T>(a, rate2);
  }
  return cudaErrorInvalidValue;
}

cudaError_t run_type(const Matrix& a, int codebook, int rate2, DataType type) {
  if (type == DataType::kHalf) return run_book<__half>(a, codebook, rate2);
  if (type == DataType::kBfloat16) return run_book<__nv_bfloat16>(a, codebook, rate2);
  return cudaErrorInvalidValue;
}

template <class X, class Y>
cudaError_t run_hadamard(const void* x, int64_t x_stride, int n_in, const void* pre, const void* post,
                         void* y, int64_t y_stride, int n_out, int m, int n, cudaStream_t stream) {
  hadamard_kernel<X, Y><<<dim3((n / kHadamard + 3) / 4, m), 128, 0, stream>>>(
      static_cast<const X*>(x), x_stride, n_in, static_cast<const __half*>(pre), static_cast<const __half*>(post),
      static_cast<Y*>(y), y_stride, n_out, n);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_reconstruct(const void* trellis, int k, int n, int rate2, int codebook, void* w, DataType type,
                               cudaStream_t stream) {
  return run_type({static_cast<const unsigned char*>(trellis), nullptr, nullptr, k, n, k, 0, n, w, n, stream}, codebook,
                  rate2, type);
}

cudaError_t launch_reconstruct_original(const void* trellis, const void* suh, const void* svh, int n, int k_true,
                                        int first_block, int columns, int rate2, int codebook, void* w,
                                        int64_t w_stride, DataType type, cudaStream_t stream) {
  return run_type({static_cast<const unsigned char*>(trellis), static_cast<const __half*>(suh),
                   static_cast<const __half*>(svh), k_true, n, k_true, first_block, columns, w, w_stride,
                   stream},
                  codebook, rate2, type);
}

cudaError_t launch_hadamard(const void* x, int64_t x_stride, int n_in, const void* pre, const void* post, void* y,
                            int64_t y_stride, int n_out, int m, int n, DataType x_type, DataType y_type,
                            cudaStream_t stream) {
  auto pick = [&](auto x_tag) {
    using X = decltype(x_tag);
    switch (y_type) {
      case DataType::kHalf: return run_hadamard<X, __half>(x, x_stride, n_in, pre, post, y, y_stride, n_out, m, n, stream);
      case DataType::kBfloat16:
        return run_hadamard<X, __nv_bfloat16>(x, x_stride, n_in, pre, post, y, y_stride, n_out, m, n, stream);
      default: return run_hadamard<X, float>(x, x_stride, n_in, pre, post, y, y_stride, n_out, m, n, stream);
    }
  };
  switch (x_type) {
    case DataType::kHalf: return pick(__half{});
    case DataType::kBfloat16: return pick(__nv_bfloat16{});
    default: return pick(float{});
  }
}

}  // namespace exl3
