// One call of the routed experts; the prefill plan: sort, then gate and up window by window, then down by ranges of columns.
#include "moe_combine.cuh"
#include "moe_launch.cuh"
#include "moe_plan.cuh"

namespace exl3 {

int64_t moe_arena_bytes(const MoeArgs& args) { return MoeArena(args).bytes; }

namespace {

cudaError_t launch_prefill(const MoeCall& call, bool dependent, cudaStream_t stream) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int middle_blocks = over(arena.window * args.slices * args.width / kBlockColumns, kOctet * kMiddleWarps);
  const auto grid = [&](dim3 blocks, int warps) { return Launch(blocks, 32 * warps, 0, dependent, stream); };
  cudaError_t status = cudaSuccess;
  if (arena.chunks > 1) status = enqueue(grid(arena.chunks, kRouteThreads / 32), moe_count_kernel, call);
  if (status == cudaSuccess) status = enqueue(grid(arena.chunks, kRouteThreads / 32), moe_route_kernel, call);
  for (int window = 0; window < arena.windows && status == cudaSuccess; ++window) {
    if (window == 0 || !call.by_row)
      status = enqueue(grid(dim3(args.grid, args.slices), kInputWarps), moe_input_kernel, call, window);
    if (status == cudaSuccess) status = launch_moe_prefill(call, into_stage(call, window), dependent, stream);
    if (status == cudaSuccess) status = enqueue(grid(middle_blocks, kMiddleWarps), moe_middle_kernel, call, window);
  }
  for (int pass = 0; pass < arena.passes && status == cudaSuccess; ++pass) {
    const int each = args.down_columns / kBlockColumns, first = pass * each;
    const int left = args.k / kBlockColumns - first, columns = left < each ? left : each;
    status = launch_moe_prefill(call, down_stage(call, first, columns), dependent, stream);
    const int blocks = over(args.m * over(columns, kOctet), kCombineWarps);
    if (status == cudaSuccess)
      status = enqueue(grid(blocks, kCombineWarps), moe_combine_kernel, call, first, columns);
  }
  return status;
}

}  // namespace

cudaError_t launch_moe(const MoeArgs& args, bool dependent, cudaStream_t stream) {
  const MoeCall call(args);
  return args.decode ? launch_moe_decode(call, dependent, stream) : launch_prefill(call, dependent, stream);
}

}  // namespace exl3
