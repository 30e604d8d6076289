// Few routes an expert: launches of moe_few_kernel.
#include "grid.cuh"
#include "moe_few.cuh"
#include "moe_launch.cuh"

namespace exl3 {

namespace {

template <Codebook kBook>
cudaError_t launch_few(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  const int shared = few_shared_bytes(call.args.max_rate2);
  auto multiply = moe_few_kernel<kBook>;
  const cudaError_t status = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  MoeStage sized = stage;
  sized.stage_bytes = few_stage_bytes(call.args.max_rate2);
  const Launch launch(dim3(call.args.grid), 32 * kFewWarps, shared, dependent, stream);
  return cudaLaunchKernelEx(&launch.config, multiply, call, sized);
}

}  // namespace

cudaError_t launch_moe_decode(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  switch (static_cast<Codebook>(call.args.codebook)) {
    case Codebook::k3inst: return launch_few<Codebook::k3inst>(call, stage, dependent, stream);
    case Codebook::kMcg: return launch_few<Codebook::kMcg>(call, stage, dependent, stream);
    case Codebook::kMul1: return launch_few<Codebook::kMul1>(call, stage, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace exl3
