// Host side of the fused kernels: from a shape to two launches, the input transform and the product.
#pragma once

#include "linear.cuh"

namespace exl3 {

struct Launch {
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config;
  Launch(dim3 grid, int threads, int shared_bytes, bool dependent, cudaStream_t stream) : attribute(), config() {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
  }
};

template <Codebook kBook, class S>
cudaError_t launch_shape(const LinearArgs& args, bool dependent, cudaStream_t stream) {
  const LinearShard& last = args.shard[args.shards - 1];
  const int row_tiles = (args.m + S::kRows - 1) / S::kRows, counters = row_tiles * (last.first_block + last.blocks);
  int rate2 = 0;
  for (int i = 0; i < args.shards; ++i) rate2 = args.shard[i].rate2 > rate2 ? args.shard[i].rate2 : rate2;
  const int x_offset = S::stage_weight_bytes(rate2), shared = S::shared_bytes(rate2);

  const int groups = args.k / kHadamard;
  const Launch first(dim3((groups + kRotateWarps - 1) / kRotateWarps, args.m, args.shards), 32 * kRotateWarps, 0,
                     dependent, stream);
  auto rotate = args.x_type == DataType::kHalf       ? rotate_kernel<__half>
                : args.x_type == DataType::kBfloat16 ? rotate_kernel<__nv_bfloat16>
                                                     : rotate_kernel<float>;
  cudaError_t status = cudaLaunchKernelEx(&first.config, rotate, args, S::kRows, S::kDepth, counters);
  if (status != cudaSuccess) return status;

  auto kernel = linear_kernel<kBook, S>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  const Launch second(dim3(args.splits, row_tiles), S::kThreads, shared, dependent, stream);
  return cudaLaunchKernelEx(&second.config, kernel, args, x_offset, (counters * 4 + 255) / 256 * 256);
}

template <class S>
cudaError_t launch_book(const LinearArgs& args, int codebook, bool dependent, cudaStream_t stream) {
  switch (static_cast<Codebook>(codebook)) {
    case Codebook::k3inst: return launch_shape<Codebook::k3inst, S>(args, dependent, stream);
    case Codebook::kMcg: return launch_shape<Codebook::kMcg, S>(args, dependent, stream);
    case Codebook::kMul1: return launch_shape<Codebook::kMul1, S>(args, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

// The shapes, one row a row count. Few rows: one tile a warp, so that two blocks fill an SM with sixteen warps.
// Many rows: two tiles a warp halve the reads of x from shared memory, which would otherwise bind.
using Rows8 = Shape<8, 1, 128, 4, 2>;
using Rows16 = Shape<16, 1, 128, 4, 2>;
using Rows32 = Shape<32, 1, 128, 4, 2>;
using Rows64 = Shape<64, 2, 128, 3, 2>;
using Rows128 = Shape<128, 2, 64, 3, 2>;

cudaError_t launch_few_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream);
cudaError_t launch_mid_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream);

}  // namespace exl3
