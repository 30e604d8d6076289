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

// 128-column blocks of all shards.
inline int column_blocks(const LinearArgs& args) {
  const LinearShard& last = args.shard[args.shards - 1];
  return last.first_block + last.blocks;
}

constexpr int kFewRotated = 64;  // rows up to which a warp for each row and group is faster

template <class X>
cudaError_t launch_rotation_of(const LinearArgs& args, int64_t rotation_bytes, int rows, bool dependent,
                               cudaStream_t stream) {
  const int groups = args.k / kHadamard;
  if (args.m <= kFewRotated) {
    const Launch few(dim3((groups + kRotateWarps - 1) / kRotateWarps, args.m, args.shards), 32 * kRotateWarps, 0, dependent,
                     stream);
    return cudaLaunchKernelEx(&few.config, rotate_kernel<X>, args, rotation_bytes, rows);
  }
  const Launch many(dim3(groups, (args.m + kRotateRows - 1) / kRotateRows, args.shards), 32 * kRotateRowsWarps, 0,
                    dependent, stream);
  return cudaLaunchKernelEx(&many.config, rotate_rows_kernel<X>, args, rotation_bytes, rows);
}

// The input transform. rotation_bytes: of one shard; rows: of a row tile.
inline cudaError_t launch_rotation(const LinearArgs& args, int64_t rotation_bytes, int rows, bool dependent,
                                   cudaStream_t stream) {
  switch (args.x_type) {
    case DataType::kHalf: return launch_rotation_of<__half>(args, rotation_bytes, rows, dependent, stream);
    case DataType::kBfloat16: return launch_rotation_of<__nv_bfloat16>(args, rotation_bytes, rows, dependent, stream);
    default: return launch_rotation_of<float>(args, rotation_bytes, rows, dependent, stream);
  }
}

template <Codebook kBook, class S>
cudaError_t launch_shape(const LinearArgs& args, bool dependent, cudaStream_t stream) {
  const int blocks = column_blocks(args), depth = args.k / kUnitDepth;
  const int row_tiles = (args.m + S::kRows - 1) / S::kRows;
  const Cut cut(blocks * depth, depth, args.splits);
  const Scratch scratch(args.m, S::kRows, args.k, blocks, args.shards, args.splits);
  const int rate2 = largest_rate2(args);
  const int x_offset = S::stage_weight_bytes(rate2), shared = S::shared_bytes(rate2);

  cudaError_t status = launch_rotation(args, scratch.rotation_bytes, S::kRows, dependent, stream);
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

}  // namespace exl3
