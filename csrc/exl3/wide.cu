// Many rows on SM90: see wide.cuh. Elsewhere the kernel is empty, and nobody launches it.
#include "launch.cuh"
#include "wide.cuh"

namespace exl3 {
namespace {

// Whole tiles where they fill the card's blocks well enough, else single units.
WideWork work_of(const LinearArgs& args) {
  const int depth = args.k / kUnitDepth, row_tiles = (args.m + Wide::kRows - 1) / Wide::kRows;
  const int tiles = column_blocks(args) * row_tiles, waves = (tiles + args.splits - 1) / args.splits;
  const bool whole = 100 * tiles >= kFullWavePercent * waves * args.splits;
  const int grain = whole ? depth : 1;
  const int64_t rotation_bytes = static_cast<int64_t>(row_tiles) * Wide::kRows * args.k * 2;
  return {Cut(tiles * depth / grain, depth, args.splits), grain, depth, row_tiles, rotation_bytes,
          args.shards * rotation_bytes};
}

template <Codebook kBook>
cudaError_t launch_wide(const LinearArgs& args, bool dependent, cudaStream_t stream) {
  const WideWork work = work_of(args);
  cudaError_t status = launch_rotation(args, work.rotation_bytes, Wide::kRows, dependent, stream);
  if (status != cudaSuccess) return status;

  auto multiply = wide_kernel<kBook>;
  const int rate2 = largest_rate2(args), shared = Wide::shared_bytes(rate2);
  status = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  const Launch second(dim3(work.cut.splits), Wide::kThreads, shared, dependent, stream);
  status = cudaLaunchKernelEx(&second.config, multiply, args, work, Wide::packed_bytes(rate2));
  if (status != cudaSuccess || work.grain > 1 || work.cut.splits == 1) return status;

  const Launch third(dim3(work.cut.splits - 1, Wide::kGroups), kFinishThreads, 0, dependent, stream);
  return cudaLaunchKernelEx(&third.config, finish_wide_kernel, args, work);
}

}  // namespace

size_t many_rows_scratch_bytes(int m, int k, int shards, int blocks) {
  const int64_t rotated = static_cast<int64_t>((m + Wide::kRows - 1) / Wide::kRows) * Wide::kRows * k * 2;
  return static_cast<size_t>(shards * rotated + 2ll * blocks * Wide::kRows * kBlockColumns * 4);
}

cudaError_t launch_many_rows(const LinearArgs& args, int codebook, bool dependent, cudaStream_t stream) {
  switch (static_cast<Codebook>(codebook)) {
    case Codebook::k3inst: return launch_wide<Codebook::k3inst>(args, dependent, stream);
    case Codebook::kMcg: return launch_wide<Codebook::kMcg>(args, dependent, stream);
    case Codebook::kMul1: return launch_wide<Codebook::kMul1>(args, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace exl3
