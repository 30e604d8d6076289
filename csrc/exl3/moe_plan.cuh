// What the launchers of both plans share.
#pragma once

#include "grid.cuh"
#include "moe_items.cuh"

namespace exl3 {

template <class... P, class... A>
cudaError_t enqueue(const Launch& launch, void (*kernel)(P...), A... arguments) {
  return cudaLaunchKernelEx(&launch.config, kernel, arguments...);
}

inline int over(int count, int each) { return (count + each - 1) / each; }

inline void divide_items(const MoeArgs& args, MoeStage& stage) {
  stage.sum_pitch = static_cast<int64_t>(args.slices) * stage.matrices * stage.columns * kBlockColumns;
  stage.item_columns = 1;
  stage.by_part = Divisor(stage.parts), stage.by_column = Divisor(stage.columns);
  stage.by_matrix = Divisor(stage.matrices), stage.by_slice = Divisor(args.slices);
}

// Gate and up of a window of routes.
inline MoeStage into_stage(const MoeCall& call, int window) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  MoeStage stage{};
  stage.first_window = window, stage.windows = 1;
  stage.matrices = kMatrices;
  stage.cut = !args.decode && (args.row_tile < kMaxRowTile || args.max_rate2 <= kTallFineRate2);
  stage.before = window * args.window;
  stage.width = args.width, stage.columns = args.width / kBlockColumns;
  stage.parts = args.parts, stage.depth = args.k / kUnitDepth;
  stage.x_matrix = static_cast<int64_t>(args.k) * 2 * arena.twice;
  stage.x_pitch = stage.x_matrix * args.slices * kMatrices;
  stage.x = args.arena + arena.inputs;
  stage.sums = args.arena + arena.sums;
  stage.part_rows = arena.window;
  stage.scale = call.into_scale;
  divide_items(args, stage);
  return stage;
}

// Down of all routes, column blocks [first, first + columns).
inline MoeStage down_stage(const MoeCall& call, int first, int columns) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  MoeStage stage{};
  stage.down = true;
  stage.windows = arena.windows;
  stage.matrices = 1;
  stage.width = args.k, stage.columns = columns, stage.first_column = first;
  stage.parts = 1, stage.depth = args.width / kUnitDepth;
  stage.x_matrix = static_cast<int64_t>(args.width) * 2 * arena.twice;
  stage.x_pitch = stage.x_matrix * args.slices;
  stage.x = args.arena + arena.middle;
  stage.sums = args.arena + arena.outputs;
  stage.scale = call.down_scale;
  divide_items(args, stage);
  return stage;
}

// The whole decode plan.
cudaError_t launch_moe_decode(const MoeCall& call, bool dependent, cudaStream_t stream);

}  // namespace exl3
