// One call of the routed experts: sort, then gate and up window by window, then down by ranges of columns.
#include "moe_combine.cuh"
#include "moe_launch.cuh"

namespace exl3 {

int64_t moe_arena_bytes(const MoeArgs& args) { return MoeArena(args).bytes; }

namespace {

template <class... P, class... A>
cudaError_t enqueue(const Launch& launch, void (*kernel)(P...), A... arguments) {
  return cudaLaunchKernelEx(&launch.config, kernel, arguments...);
}

int over(int count, int each) { return (count + each - 1) / each; }

cudaError_t product(const MoeArgs& args, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  return args.decode ? launch_moe_decode(args, stage, dependent, stream)
                     : launch_moe_prefill(args, stage, dependent, stream);
}

cudaError_t gate_and_up(const MoeArgs& args, const MoeArena& arena, int window, bool dependent, cudaStream_t stream) {
  MoeStage stage{};
  stage.first_window = window, stage.windows = 1;
  stage.matrices = kMatrices;
  stage.columns = args.width / kBlockColumns;
  stage.parts = args.parts, stage.depth = args.k / kUnitDepth;
  stage.x_matrix = static_cast<int64_t>(args.k) * 2 * arena.twice;
  stage.x_pitch = stage.x_matrix * args.slices * kMatrices;
  stage.x = args.arena + arena.inputs;
  stage.sums = args.arena + arena.sums;
  stage.part_rows = arena.window;
  stage.scale = sum_scale(args, args.k);
  return product(args, stage, dependent, stream);
}

cudaError_t down(const MoeArgs& args, const MoeArena& arena, int first, int columns, bool dependent, cudaStream_t stream) {
  MoeStage stage{};
  stage.down = true;
  stage.windows = arena.windows;
  stage.matrices = 1;
  stage.columns = columns, stage.first_column = first;
  stage.parts = 1, stage.depth = args.width / kUnitDepth;
  stage.x_matrix = static_cast<int64_t>(args.width) * 2 * arena.twice;
  stage.x_pitch = stage.x_matrix * args.slices;
  stage.x = args.arena + arena.middle;
  stage.sums = args.arena + arena.outputs;
  stage.scale = sum_scale(args, args.width);
  return product(args, stage, dependent, stream);
}

}  // namespace

cudaError_t launch_moe(const MoeArgs& args, bool dependent, cudaStream_t stream) {
  const MoeArena arena(args);
  const int groups = over(args.k / kHadamard, kInputWarps), routes = arena.routes;
  const int source_rows = MoeArena::by_row(args) ? args.m : args.decode ? routes : arena.window;
  const auto grid = [&](dim3 blocks, int warps) { return Launch(blocks, 32 * warps, 0, dependent, stream); };
  cudaError_t status;
  if (args.decode) {
    status = enqueue(grid(dim3(1 + source_rows, groups, args.slices), kInputWarps), moe_route_and_input_kernel, args);
  } else {
    status = enqueue(grid(1, kRouteThreads / 32), moe_route_kernel, args);
  }
  for (int window = 0; window < arena.windows && status == cudaSuccess; ++window) {
    if (!args.decode && (window == 0 || !MoeArena::by_row(args)))
      status = enqueue(grid(dim3(source_rows, groups, args.slices), kInputWarps), moe_input_kernel, args, window);
    if (status == cudaSuccess) status = gate_and_up(args, arena, window, dependent, stream);
    const int here = window + 1 < arena.windows ? args.window : routes - window * args.window;
    const int blocks = over(args.slices * args.width / kBlockColumns, kMiddleWarps);
    if (status == cudaSuccess) status = enqueue(grid(dim3(here, blocks), kMiddleWarps), moe_middle_kernel, args, window);
  }
  for (int pass = 0; pass < arena.passes && status == cudaSuccess; ++pass) {
    const int each = args.down_columns / kBlockColumns, first = pass * each;
    const int left = args.k / kBlockColumns - first, columns = left < each ? left : each;
    status = down(args, arena, first, columns, dependent, stream);
    if (status == cudaSuccess)
      status = enqueue(grid(dim3(args.m, over(columns, kCombineWarps)), kCombineWarps), moe_combine_kernel, args, first, columns);
  }
  return status;
}

}  // namespace exl3
