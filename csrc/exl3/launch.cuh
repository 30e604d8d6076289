// Host side of the fused kernels: from a shape to three launches: input transform, product, output transform.
#pragma once

#include "finish.cuh"
#include "grid.cuh"
#include "linear.cuh"
#include "rotate.cuh"

namespace exl3 {

inline int largest_rate2(const LinearArgs& args) {
  int rate2 = 0;
  for (int i = 0; i < args.shards; ++i) rate2 = args.shard[i].rate2 > rate2 ? args.shard[i].rate2 : rate2;
  return rate2;
}

template <Codebook kBook, class S>
cudaError_t launch_shape(const LinearArgs& args, bool dependent, cudaStream_t stream) {
  const LinearShard& last = args.shard[args.shards - 1];
  const int blocks = last.first_block + last.blocks, depth = args.k / kUnitDepth;
  const int row_tiles = (args.m + S::kRows - 1) / S::kRows;
  const Cut cut(blocks * depth, depth, args.splits);
  const Scratch scratch(args.m, S::kRows, args.k, blocks, args.shards, args.splits);
  const int rate2 = largest_rate2(args);
  const int x_offset = S::stage_weight_bytes(rate2), shared = S::shared_bytes(rate2);

  const dim3 rotations((args.k / kHadamard + kRotateWarps - 1) / kRotateWarps, args.m, args.shards);
  const Launch first(rotations, 32 * kRotateWarps, 0, dependent, stream);
  auto rotate = args.x_type == DataType::kHalf       ? rotate_kernel<__half>
                : args.x_type == DataType::kBfloat16 ? rotate_kernel<__nv_bfloat16>
                                                     : rotate_kernel<float>;
  cudaError_t status = cudaLaunchKernelEx(&first.config, rotate, args, scratch.rotation_bytes, S::kRows);
  if (status != cudaSuccess) return status;

  auto multiply = linear_kernel<kBook, S>;
  status = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  const Launch second(dim3(cut.splits, row_tiles), S::kThreads, shared, dependent, stream);
  status = cudaLaunchKernelEx(&second.config, multiply, args, cut, scratch, x_offset);
  if (status != cudaSuccess) return status;

  const Launch third(dim3(blocks, (args.m + kGroupRows - 1) / kGroupRows), kFinishThreads, 0, dependent, stream);
  return cudaLaunchKernelEx(&third.config, finish_kernel, args, cut, scratch, S::kRows);
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

// The shapes, one for each row count; two blocks an SM fit in shared memory.
using Rows8 = Shape<8, 128, 4, 2>;
using Rows16 = Shape<16, 128, 4, 2>;
using Rows32 = Shape<32, 128, 4, 2>;
using Rows64 = Shape<64, 128, 3>;
using Rows128 = Shape<128, 128, 2>;

cudaError_t launch_few_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream);
cudaError_t launch_mid_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream);
// The same bytes by the kernels of SM90 for many rows; one row tile.
constexpr int kLeastWideRows = 64;
cudaError_t launch_wide_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream);

}  // namespace exl3
