// Blocks of up to 256 routes, on SM90.
#include "moe_launch.cuh"
#include "moe_tall.cuh"

namespace exl3 {

namespace {

template <Codebook kBook>
cudaError_t launch_tall(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  const int shared = Tall::shared_bytes(call.args.max_rate2);
  auto multiply = moe_tall_kernel<kBook>;
  cudaError_t status = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  TensorMap map;
  const int64_t rows = stage.down ? call.arena.routes : call.arena.window;
  status = describe_matrix(map, stage.x, rows, stage.x_pitch / 2, stage.x_pitch, Tall::kBoxRows);
  if (status != cudaSuccess) return status;
  const int blocks = (call.args.grid + 1) / 2;  // half as many fill the card
  const Launch launch(dim3(blocks), Tall::kThreads, shared, dependent, stream);
  MoeStage sized = stage;
  sized.stage_bytes = Tall::stage_bytes(call.args.max_rate2);
  return cudaLaunchKernelEx(&launch.config, multiply, call, sized, map);
}

}  // namespace

cudaError_t launch_moe_tall(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  if (!tall_blocks(call.args)) return cudaErrorInvalidValue;
  switch (static_cast<Codebook>(call.args.codebook)) {
    case Codebook::k3inst: return launch_tall<Codebook::k3inst>(call, stage, dependent, stream);
    case Codebook::kMcg: return launch_tall<Codebook::kMcg>(call, stage, dependent, stream);
    case Codebook::kMul1: return launch_tall<Codebook::kMul1>(call, stage, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace exl3
