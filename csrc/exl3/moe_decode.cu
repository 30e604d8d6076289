// The decode plan: five launches.
#include "moe_few.cuh"
#include "moe_few_ends.cuh"
#include "moe_plan.cuh"

namespace exl3 {

namespace {

// An SM divides its memory between cache and shared memory anew only when nothing runs on it. A grid that begins while
// the one ahead of it still runs would find too little shared memory there, and stay on fewer SMs than there are.
template <class... P, class... A>
cudaError_t enqueue_beside(const Launch& launch, void (*kernel)(P...), A... arguments) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return status == cudaSuccess ? enqueue(launch, kernel, arguments...) : status;
}

template <Codebook kBook>
cudaError_t launch_few(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  const int shared = few_shared_bytes(call.args.max_rate2);
  auto multiply = moe_few_kernel<kBook>;
  const cudaError_t status = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  MoeStage sized = stage;
  sized.stage_bytes = few_stage_bytes(call.args.max_rate2);
  return enqueue_beside(Launch(dim3(call.args.grid), 32 * kFewWarps, shared, dependent, stream), multiply, call, sized);
}

cudaError_t product(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  switch (static_cast<Codebook>(call.args.codebook)) {
    case Codebook::k3inst: return launch_few<Codebook::k3inst>(call, stage, dependent, stream);
    case Codebook::kMcg: return launch_few<Codebook::kMcg>(call, stage, dependent, stream);
    case Codebook::kMul1: return launch_few<Codebook::kMul1>(call, stage, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_moe_decode(const MoeCall& call, bool dependent, cudaStream_t stream) {
  const MoeArgs& args = call.args;
  const int rows = call.by_row ? args.m : call.arena.routes, columns = args.k / kBlockColumns;
  const int input_blocks = over(rows * args.k / kHadamard, kFewEndWarps);
  const int middle_blocks = over(args.slices * args.width / kBlockColumns, kFewMiddleWarps);
  const auto grid = [&](dim3 blocks, int warps) { return Launch(blocks, 32 * warps, 0, dependent, stream); };
  cudaError_t status =
      enqueue_beside(grid(dim3(1 + input_blocks, args.slices), kFewEndWarps), moe_route_and_input_kernel, call, rows);
  if (status == cudaSuccess) status = product(call, into_stage(call, 0), dependent, stream);
  if (status == cudaSuccess)
    status = enqueue_beside(grid(dim3(call.arena.routes, middle_blocks), kFewMiddleWarps), moe_middle_few_kernel, call);
  if (status == cudaSuccess) status = product(call, down_stage(call, 0, columns), dependent, stream);
  if (status == cudaSuccess)
    status = enqueue_beside(grid(dim3(args.m, columns), kFewSlots), moe_combine_few_kernel, call);
  return status;
}

}  // namespace exl3
