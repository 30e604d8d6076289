// Many rows on SM90: see wide.cuh. Elsewhere these kernels are empty, and nobody launches them.
#include "launch.cuh"
#include "wide.cuh"

namespace exl3 {
namespace {

int blocks_of(const LinearArgs& args) {
  const LinearShard& last = args.shard[args.shards - 1];
  return last.first_block + last.blocks;
}

// Whole tiles where they fill the card's blocks well enough, else single units.
WideWork direct_work(const LinearArgs& args, int rows, int workers) {
  const int depth = args.k / kUnitDepth, row_tiles = (args.m + rows - 1) / rows, tiles = blocks_of(args) * row_tiles;
  const int waves = (tiles + workers - 1) / workers;
  const bool whole = 100 * tiles >= kFullWavePercent * waves * workers;
  const int grain = whole ? depth : 1;
  const int64_t rotation_bytes = static_cast<int64_t>(row_tiles) * rows * args.k * 2;
  return {Cut(tiles * depth / grain, depth, workers), grain, depth, row_tiles, 1, rotation_bytes,
          args.shards * rotation_bytes};
}

// The cut and the parts of linear_kernel. A worker has two runs: that kernel's blocks are two an SM.
WideWork shared_work(const LinearArgs& args, int rows) {
  const int depth = args.k / kUnitDepth;
  const Scratch scratch(args.m, rows, args.k, blocks_of(args), args.shards, args.splits);
  return {Cut(blocks_of(args) * depth, depth, args.splits), 1, depth, 1, 2, scratch.rotation_bytes, scratch.partials};
}

template <Codebook kBook, class S>
cudaError_t launch_wide(const LinearArgs& args, const WideWork& work, bool dependent, cudaStream_t stream) {
  const dim3 rotations(args.k / kHadamard, (args.m + kRotateRows - 1) / kRotateRows, args.shards);
  const Launch first(rotations, 32 * kRotateRowsWarps, 0, dependent, stream);
  auto rotate = args.x_type == DataType::kHalf       ? rotate_rows_kernel<__half>
                : args.x_type == DataType::kBfloat16 ? rotate_rows_kernel<__nv_bfloat16>
                                                     : rotate_rows_kernel<float>;
  cudaError_t status = cudaLaunchKernelEx(&first.config, rotate, args, work.rotation_bytes, S::kRows);
  if (status != cudaSuccess) return status;

  auto multiply = wide_kernel<kBook, S>;
  const int rate2 = largest_rate2(args), shared = S::shared_bytes(rate2);
  status = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  const int workers = (work.cut.splits + work.runs - 1) / work.runs;
  const Launch second(dim3(workers), S::kThreads, shared, dependent, stream);
  status = cudaLaunchKernelEx(&second.config, multiply, args, work, S::packed_bytes(rate2));
  if (status != cudaSuccess) return status;

  if constexpr (S::kDirect) {
    if (work.grain > 1 || work.cut.splits == 1) return cudaSuccess;
    const Launch third(dim3(work.cut.splits - 1, S::kRows / kGroupRows), kFinishThreads, 0, dependent,
                       stream);
    return cudaLaunchKernelEx(&third.config, finish_wide_kernel<S>, args, work);
  } else {
    const Scratch scratch(args.m, S::kRows, args.k, blocks_of(args), args.shards, args.splits);
    const Launch third(dim3(blocks_of(args), (args.m + kGroupRows - 1) / kGroupRows), kFinishThreads, 0, dependent, stream);
    return cudaLaunchKernelEx(&third.config, finish_kernel, args, work.cut, scratch, S::kRows);
  }
}

template <class S>
cudaError_t launch_book(const LinearArgs& args, const WideWork& work, int codebook, bool dependent, cudaStream_t stream) {
  switch (static_cast<Codebook>(codebook)) {
    case Codebook::k3inst: return launch_wide<Codebook::k3inst, S>(args, work, dependent, stream);
    case Codebook::kMcg: return launch_wide<Codebook::kMcg, S>(args, work, dependent, stream);
    case Codebook::kMul1: return launch_wide<Codebook::kMul1, S>(args, work, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_wide_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream) {
  if (args.m > rows) return cudaErrorInvalidValue;
  return rows == 64 ? launch_book<Wide<64>>(args, shared_work(args, 64), codebook, dependent, stream)
                    : launch_book<Wide<128>>(args, shared_work(args, 128), codebook, dependent, stream);
}

size_t many_rows_scratch_bytes(int m, int k, int shards, int blocks) {
  using S = Wide<256>;
  const int64_t rotated = static_cast<int64_t>((m + S::kRows - 1) / S::kRows) * S::kRows * k * 2;
  return static_cast<size_t>(shards * rotated + 2ll * blocks * S::kRows * kBlockColumns * 4);
}

cudaError_t launch_many_rows(const LinearArgs& args, int codebook, bool dependent, cudaStream_t stream) {
  using S = Wide<256>;
  return launch_book<S>(args, direct_work(args, S::kRows, args.splits), codebook, dependent, stream);
}

}  // namespace exl3
