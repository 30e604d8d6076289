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

cudaError_t product(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  return call.args.decode ? launch_moe_decode(call, stage, dependent, stream)
                          : launch_moe_prefill(call, stage, dependent, stream);
}

void divide_items(const MoeArgs& args, MoeStage& stage) {
  stage.sum_pitch = static_cast<int64_t>(args.slices) * stage.matrices * stage.columns * kBlockColumns;
  stage.by_part = Divisor(stage.parts), stage.by_column = Divisor(stage.columns);
  stage.by_matrix = Divisor(stage.matrices), stage.by_slice = Divisor(args.slices);
}

cudaError_t gate_and_up(const MoeCall& call, int window, bool dependent, cudaStream_t stream) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
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
  stage.scale = call.into_scale;
  divide_items(args, stage);
  return product(call, stage, dependent, stream);
}

cudaError_t down(const MoeCall& call, int first, int columns, bool dependent, cudaStream_t stream) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
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
  stage.scale = call.down_scale;
  divide_items(args, stage);
  return product(call, stage, dependent, stream);
}

}  // namespace

cudaError_t launch_moe(const MoeArgs& args, bool dependent, cudaStream_t stream) {
  const MoeCall call(args);
  const MoeArena& arena = call.arena;
  const int rows = call.by_row ? args.m : args.decode ? arena.routes : arena.window;
  const int groups = args.k / kHadamard;
  const int input_blocks = over(rows * (args.decode ? groups : over(groups, kOctet)), kInputWarps);
  const auto grid = [&](dim3 blocks, int warps) { return Launch(blocks, 32 * warps, 0, dependent, stream); };
  cudaError_t status;
  if (args.decode) {
    const dim3 blocks(1 + input_blocks, args.slices);
    status = enqueue(grid(blocks, kInputWarps), moe_route_and_input_kernel, call, rows);
  } else {
    status = enqueue(grid(1, kRouteThreads / 32), moe_route_kernel, call);
  }
  for (int window = 0; window < arena.windows && status == cudaSuccess; ++window) {
    if (!args.decode && (window == 0 || !call.by_row))
      status = enqueue(grid(dim3(input_blocks, args.slices), kInputWarps), moe_input_kernel, call, rows, window);
    if (status == cudaSuccess) status = gate_and_up(call, window, dependent, stream);
    const int here = window + 1 < arena.windows ? args.window : arena.routes - window * args.window;
    const int blocks = over(args.slices * args.width / kBlockColumns, kMiddleWarps);
    if (status == cudaSuccess) status = enqueue(grid(dim3(here, blocks), kMiddleWarps), moe_middle_kernel, call, window);
  }
  for (int pass = 0; pass < arena.passes && status == cudaSuccess; ++pass) {
    const int each = args.down_columns / kBlockColumns, first = pass * each;
    const int left = args.k / kBlockColumns - first, columns = left < each ? left : each;
    status = down(call, first, columns, dependent, stream);
    if (status != cudaSuccess) break;
    if (args.decode) {
      status = enqueue(grid(dim3(args.m, over(columns, kCombineWarps)), kCombineWarps), moe_combine_few_kernel, call);
    } else {
      const int blocks = over(args.m * over(columns, kOctet), kCombineWarps);
      status = enqueue(grid(blocks, kCombineWarps), moe_combine_kernel, call, first, columns);
    }
  }
  return status;
}

}  // namespace exl3
