// One product of the experts: from a codebook to its kernel.
#pragma once

#include "grid.cuh"
#include "moe_product.cuh"

namespace exl3 {

template <Codebook kBook, class S>
cudaError_t launch_moe_shape(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  const int shared = S::shared_bytes(call.args.max_rate2);
  auto multiply = moe_product_kernel<kBook, S>;
  const cudaError_t status = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  const int blocks = S::kWhole ? (call.args.grid + 1) / 2 : call.args.grid;  // half as many fill the card
  const Launch launch(dim3(blocks), S::kThreads, shared, dependent, stream);
  MoeStage sized = stage;
  sized.item_columns = S::kColumnBlocks;
  sized.by_column = Divisor(stage.columns / S::kColumnBlocks);
  sized.stage_bytes = S::stage_bytes(call.args.max_rate2);
  return cudaLaunchKernelEx(&launch.config, multiply, call, sized);
}

template <class S>
cudaError_t launch_moe_book(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  switch (static_cast<Codebook>(call.args.codebook)) {
    case Codebook::k3inst: return launch_moe_shape<Codebook::k3inst, S>(call, stage, dependent, stream);
    case Codebook::kMcg: return launch_moe_shape<Codebook::kMcg, S>(call, stage, dependent, stream);
    case Codebook::kMul1: return launch_moe_shape<Codebook::kMul1, S>(call, stage, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

// One product of the prefill plan, and of its largest blocks.
cudaError_t launch_moe_prefill(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream);
cudaError_t launch_moe_tall(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream);

}  // namespace exl3
