// What a grouped product has to do: one launch, and its items.
#pragma once

#include "moe_layout.cuh"

namespace exl3 {

// A divisor, and ceil(2^32 / divisor), which is 0 for 1.
struct Divisor {
  int divisor;
  uint32_t inverse;
  Divisor() = default;
  explicit Divisor(int divisor)
      : divisor(divisor), inverse(divisor == 1 ? 0 : static_cast<uint32_t>(((1ull << 32) + divisor - 1) / divisor)) {}
};

// One launch: gate and up of a window, or down of a range of columns.
struct MoeStage {
  bool down;
  int first_window, windows;  // whose blocks take part
  int matrices;               // gate and up, or down
  bool cut;                   // perhaps into shares, which end within items: moe_shares.cuh, moe_tail.cuh
  int before;                 // routes ahead of the first source row
  int width;                  // columns of a whole matrix
  int columns, first_column;  // column blocks of a matrix
  int item_columns;           // of an item, which divide them
  int parts, depth;           // of k; k / 128
  int64_t x_pitch;            // bytes from a source row to the next
  int64_t x_matrix;           // bytes from a matrix's input to the next within it
  const unsigned char* x;
  unsigned char* sums;
  int64_t part_rows;          // rows of sums from a part to the next
  int64_t sum_pitch;          // sums of a row
  Divisor by_part, by_column, by_matrix, by_slice;
  float scale;                // of sums
  uint32_t stage_bytes;       // of shared memory, for the largest rate
  uint32_t zero;              // always: see FewSource
};

// One item of a thread block's list.
struct alignas(16) MoeItem {
  const unsigned char* weights;  // the first tile
  int64_t sums;                  // place of the first sum of its first row
  uint32_t x;                    // bytes from the start of a source row to its first k
  int pitch;                     // bytes from a row of tiles to the next
  int start, source;             // first route of the block in the sorted list; its source row
  int rows, stages, rate2;       // rows of the block; stages: 0 beyond the last item
  bool takes, gives;             // sums from the share before, sums to the share after
  int sources[kDecodeRows];      // in the decode plan
};

__device__ __forceinline__ int part_start(const MoeStage& stage, int part) { return stage.depth * part / stage.parts; }

// n / d for n below 2^24 and inverse = ceil(2^32 / d), d > 1.
__device__ __forceinline__ int divide(int n, Divisor d) {
  return d.inverse ? static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * d.inverse >> 32) : n;
}
__device__ __forceinline__ int take(int& n, Divisor d) {
  const int quotient = divide(n, d), rest = n - quotient * d.divisor;
  n = quotient;
  return rest;
}

// Of a list of items, one.
struct MoePlace {
  int block, slice, matrix, column, part;  // block: of all; column: in steps of an item's
  int first, stages;                       // of its part of k, in units of 128
};

__device__ __forceinline__ void describe_place(const MoeCall& call, const MoeStage& stage, const MoePlace& at, MoeItem& item) {
  const MoeArgs& args = call.args;
  const int slice = at.slice, matrix = at.matrix, column = at.column, part = at.part, first = at.first;
  const MoeBlock& block = reinterpret_cast<const MoeBlock*>(args.arena + call.arena.blocks)[at.block];
  const int64_t entry = block.weights[stage.down ? kMatrices : matrix];
  const int rate2 = static_cast<int>(entry & 31);
  item.rate2 = rate2;
  item.pitch = stage.width * rate2;
  item.weights = args.slice[slice].trellis[stage.down] + (entry >> 5) +
                 static_cast<int64_t>(first) * (kUnitDepth / kTile) * item.pitch +
                 static_cast<int64_t>(stage.first_column + column * stage.item_columns) * kBlockTiles * 16 * rate2;
  item.x = static_cast<uint32_t>((slice * stage.matrices + matrix) * stage.x_matrix + first * kUnitDepth * 2 * call.arena.twice);
  item.start = block.start;
  item.source = block.start - stage.before;
  item.rows = block.count;
  item.sums = (part * stage.part_rows + item.source) * stage.sum_pitch +
              ((slice * stage.matrices + matrix) * stage.columns + column * stage.item_columns) * kBlockColumns;
  item.stages = at.stages;
}
// In the decode plan.
__device__ __forceinline__ void describe_sources(const MoeCall& call, const MoeStage& stage, MoeItem& item) {
  const Route* sorted = reinterpret_cast<const Route*>(call.args.arena + call.arena.sorted) + item.start;
#pragma unroll
  for (int row = 0; row < kDecodeRows; ++row) {
    const int route = row < item.rows ? sorted[row].route : 0;
    item.sources[row] = stage.down ? item.source + row : call.by_row ? route / call.args.top_k : route;
  }
}

// Number `index` of a list by columns first, then matrix, slice and block of routes, of which first_block is the first.
__device__ __forceinline__ MoePlace place_of_item(const MoeStage& stage, int index, int first_block) {
  MoePlace at{};
  at.column = take(index, stage.by_column), at.matrix = take(index, stage.by_matrix), at.slice = take(index, stage.by_slice);
  at.block = first_block + index;
  return at;
}

// The item of number `index`: its part of k first, then as above.
__device__ __forceinline__ void describe_item(const MoeCall& call, const MoeStage& stage, int index, MoeItem& item) {
  const int* first_of_window = reinterpret_cast<const int*>(call.args.arena + call.arena.header) + 1 + stage.first_window;
  const int part = take(index, stage.by_part);
  MoePlace at = place_of_item(stage, index, first_of_window[0]);
  item.stages = 0;
  if (at.block >= first_of_window[stage.windows]) return;
  at.part = part, at.first = part_start(stage, part), at.stages = part_start(stage, part + 1) - at.first;
  item.takes = item.gives = false;
  describe_place(call, stage, at, item);
  if (call.args.decode) describe_sources(call, stage, item);
}

// Items are dealt to the thread blocks in rounds. A window's items become smaller along the list, so every second round goes
// the other way: after a larger item comes a smaller one.
__device__ __forceinline__ int dealt_item(int round, int block) {
  const int blocks = gridDim.x;
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

}  // namespace exl3
