// Gate and up of a window in blocks of 256: rounds of whole items, then the rest in shares with which all thread blocks end
// at the same time.
//
// The rest is two rounds or more where there are as many, so that a share is longer than any item although the rounds before
// have kept thread blocks busy for different times. Who ends within an item does that piece before the others of the share;
// the next one goes on from its sums last of all, and hardly waits for them. Items keep their order, by which neighbours read
// the same rows of x at about the same time: only within a share they no longer do.
#pragma once

#include "moe_shares.cuh"

namespace exl3 {

// What a stage of a block of 256 takes, by its size: within 4% of what items of 32 to 256 rows take, 62.5, 71, 79, 88, 98.5,
// 107, 113.5 and 125 thousand cycles (H200, GLM-5.2 at TP4, 3 bits).
__device__ __forceinline__ int tall_cost(int size) { return 14 - size; }

// More of them leave less idle than shares cost.
constexpr int kMostWholeRounds = 12;

// One thread block's part of a launch, in shared memory.
struct MoeTail {
  int block;               // which one it is, in the order in which they start
  int rounds;              // of whole items, before its share or to the end
  int first_block, items;  // of the launch
  bool cut;                // whether there are shares; then this one's, in the list of whole items
  MoeBorder from, to;
  int end[kBlockSizes];    // items up to the last of each size
};

// join of v over the lanes of a warp.
template <class Join>
__device__ __forceinline__ int over_lanes(int v, Join join) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2)
    v = join(v, static_cast<int>(shuffle_from(v, static_cast<int>(threadIdx.x) % 32 ^ bit)));
  return v;
}

// The border `at` after the beginning of item `first`, in the time of a stage.
__device__ __forceinline__ MoeBorder tail_border(const int* end, int first, int depth, int64_t at) {
#pragma unroll 1
  for (int size = 0; size < kBlockSizes; ++size) {
    const int count = max(end[size] - first, 0), cost = tall_cost(size);
    const int64_t item = static_cast<int64_t>(cost) * depth;
    if (at < item * count) {
      const int within = static_cast<int>(at % item);
      return {first + static_cast<int>(at / item), within / cost};
    }
    at -= item * count, first += count;
  }
  return {first, 0};
}

// Whether the last rounds are cut into shares, and this thread block's. One warp.
__device__ __forceinline__ void find_share(const MoeStage& stage, MoeTail& tail) {
  const int lane = threadIdx.x % 32, grid = gridDim.x, begin = tail.rounds * grid;
  if (tail.rounds > kMostWholeRounds) return;
  int end[kBlockSizes];
#pragma unroll
  for (int size = 0; size < kBlockSizes; ++size) end[size] = tail.end[size];
  const auto cost = [&](int item) {
    int size = 0;
#pragma unroll
    for (int i = 0; i < kBlockSizes; ++i) size += item >= end[i];
    return size < kBlockSizes ? tall_cost(size) : 0;
  };
  // Time of the whole rounds before: of all thread blocks, of those up to this one, of this one, the most; then the most if
  // all rounds were whole.
  int all = 0, before = 0, own = 0, most = 0, longest = 0;
#pragma unroll 1
  for (int other = lane; other < grid; other += 32) {
    int time = 0, to_the_end = 0;
#pragma unroll 1
    for (int round = 0; round * grid < tail.items; ++round) {
      const int of_item = cost(dealt_item(round, other));
      to_the_end += of_item, time += round < tail.rounds ? of_item : 0;
    }
    all += time, before += other < tail.block ? time : 0, own += other == tail.block ? time : 0;
    most = max(most, time), longest = max(longest, to_the_end);
  }
  const auto sum = [](int a, int b) { return a + b; };
  const auto larger = [](int a, int b) { return max(a, b); };
  all = over_lanes(all, sum), before = over_lanes(before, sum), own = over_lanes(own, sum);
  most = over_lanes(most, larger), longest = over_lanes(longest, larger);
#pragma unroll
  for (int size = 0, first = begin; size < kBlockSizes; ++size) {
    const int count = max(end[size] - first, 0);
    all += count * tall_cost(size), first += count;
  }
  // No share is shorter than an item, and shares save more than the 6% that they cost where nobody was idle.
  if (all - most * grid < cost(begin) * grid || longest * grid * 50ll <= all * 53ll) return;
  const auto border = [&](int number, int spent) {
    const int64_t at = static_cast<int64_t>(all) * number * stage.depth / grid - spent * stage.depth;
    return tail_border(tail.end, begin, stage.depth, at);
  };
  const MoeBorder from = border(tail.block, before), to = border(tail.block + 1, before + own);
  if (lane == 0) tail.from = from, tail.to = to, tail.cut = true;
}

// Item `number` of this thread block.
__device__ __forceinline__ void describe_tall(const MoeCall& call, const MoeStage& stage, const MoeTail& tail, int number,
                                              MoeItem& item) {
  MoePiece piece{dealt_item(number, tail.block), 0, stage.depth, false, false};
  if (piece.place >= tail.items) piece.stages = 0;
  if (number >= tail.rounds && tail.cut) piece = piece_of_share(tail.from, tail.to, stage.depth, number - tail.rounds);
  item.stages = 0;
  if (piece.stages == 0) return;
  MoePlace at = place_of_item(stage, piece.place, tail.first_block);
  at.first = piece.first, at.stages = piece.stages;
  item.gives = piece.gives, item.takes = piece.takes;
  describe_place(call, stage, at, item);
}

// What is known before any item: the first kBlockSizes threads, before a barrier.
__device__ __forceinline__ void begin_tail(const MoeCall& call, const MoeStage& stage, MoeTail& tail) {
  const int thread = threadIdx.x;
  if (thread >= kBlockSizes) return;
  const int* first = reinterpret_cast<const int*>(call.args.arena + call.arena.sizes) + stage.first_window * kBlockSizes;
  const bool last = thread == kBlockSizes - 1;
  const int columns = call.args.slices * stage.matrices * stage.by_column.divisor;
  // Of several windows, which are not cut, only all items are asked for.
  const int first_block = load_from_l2(first);
  const int end = (load_from_l2(first + (last ? stage.windows * kBlockSizes : thread + 1)) - first_block) * columns;
  tail.end[thread] = end;
  if (!last) return;
  tail.block = stage.cut ? static_cast<int>(atomic_increment(window_flags(call, stage))) : static_cast<int>(blockIdx.x);
  tail.rounds = stage.cut ? max(end / static_cast<int>(gridDim.x) - 2, 0) : 1 << 30;
  tail.first_block = first_block, tail.items = end;
  tail.cut = false;
}

}  // namespace exl3
