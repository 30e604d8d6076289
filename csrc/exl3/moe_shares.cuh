// Gate and up of a window in equal shares of the time they take, one for each thread block.
//
// A window has few items for each thread block, so whole ones leave some idle while others work at their last. Here a
// share may begin and end within an item. Who ends within one does that piece first and leaves the sums as they are;
// who begins within it does the rest last and goes on from those sums. So k ascends and the sums are those of an item in
// one piece. A share is taken by number in the order in which thread blocks start, and waits only for the one before,
// whose holder started earlier and waits for nobody before it leaves its sums.
//
// Where whole items fill the card well enough they stay whole: thread blocks then go through neighbouring blocks at the
// same time, which reads an expert's weights once where it has several.
//
// For shares items are listed by slice, matrix and columns, then by block, so that thread blocks which read the same
// rows of x do so at about the same time.
#pragma once

#include "moe_items.cuh"

namespace exl3 {

// What a stage takes, for a block of this size: 20, 22, 26 and 31 for 32, 64, 96 and 128 rows by the times of a whole
// layer (H200, GLM-5.2 at TP4, 3 bits).
__device__ __forceinline__ int stage_cost(const MoeArgs& args, int size) {
  const int steps = max(args.row_tile / kSizeRows - size, 1);
  return 19 + steps * steps * 3 / 4;
}

// Where a share ends and the next begins: before a stage of an item.
struct MoeBorder {
  int place, stage;  // in the list of items
};
struct MoeShare {
  MoeBorder from, to;
  bool cut;                 // else items are whole, as describe_item lists them
  int number;               // of the share
  int first_block, blocks;  // of the window
};

// Whether so many items, dealt whole, leave more of the card idle than shares cost. Those cost 5% of the time where a
// thread block has more than 4 items of the highest blocks (8,192 rows of GLM-5.2, Zipf) and 1 to 2% where it has fewer; of
// lower blocks an expert mostly has one, and no weights are read twice.
__device__ __forceinline__ bool worth_cutting(const MoeArgs& args, int64_t items) {
  const int64_t grid = gridDim.x, rounds = (items + grid - 1) / grid;
  return args.row_tile < kPairRowTile || (rounds <= 4 && items * 100 < rounds * grid * 93);
}

// The border before which `at` of the window's time lies. column: time of one column block of all blocks; all in stages.
__device__ __forceinline__ MoeBorder share_border(const MoeArgs& args, const MoeStage& stage, const int* first_of_size,
                                                  int64_t column, int64_t at) {
  int64_t rest = at % column;
  MoeBorder found{static_cast<int>(at / column) * (first_of_size[kBlockSizes] - first_of_size[0]), 0};
#pragma unroll 1
  for (int size = 0; size < kBlockSizes; ++size) {
    const int cost = stage_cost(args, size), count = first_of_size[size + 1] - first_of_size[size];
    const int64_t item = static_cast<int64_t>(cost) * stage.depth, all = item * count;
    if (rest < all) {
      found.place += static_cast<int>(rest / item);
      found.stage = static_cast<int>(rest % item) / cost;
      break;
    }
    rest -= all, found.place += count;
  }
  return found;
}

// Of a stage's window: how many shares have been taken, then whether each has left sums.
__device__ __forceinline__ unsigned* window_flags(const MoeCall& call, const MoeStage& stage) {
  return reinterpret_cast<unsigned*>(call.args.arena + call.arena.flags) + stage.first_window * (1 + call.args.grid);
}

// Take the next share of the window. One thread.
__device__ __forceinline__ MoeShare take_share(const MoeCall& call, const MoeStage& stage) {
  const MoeArgs& args = call.args;
  MoeShare share{};
  const int* first_of_size =
      reinterpret_cast<const int*>(args.arena + call.arena.sizes) + stage.first_window * kBlockSizes;
  const int64_t columns = static_cast<int64_t>(args.slices) * stage.matrices * stage.by_column.divisor;
  share.blocks = first_of_size[kBlockSizes] - first_of_size[0];
  share.cut = worth_cutting(args, share.blocks * columns);
  if (!share.cut) return share;
  share.number = static_cast<int>(atomic_increment(window_flags(call, stage)));
  share.first_block = first_of_size[0];
  int column_cost = 0, most = 0;
#pragma unroll 1
  for (int size = 0; size < kBlockSizes; ++size) {
    const int count = first_of_size[size + 1] - first_of_size[size], cost = stage_cost(args, size);
    column_cost += count * cost;
    if (count > 0 && cost > most) most = cost;
  }
  if (column_cost == 0) return share;
  // None is shorter than the longest item, so no piece both begins and ends within one.
  const int shares = static_cast<int>(min(static_cast<int64_t>(gridDim.x), column_cost * columns / most));
  if (share.number >= shares) return share;
  const int64_t column = static_cast<int64_t>(column_cost) * stage.depth, all = column * columns;
  share.from = share_border(args, stage, first_of_size, column, all * share.number / shares);
  share.to = share_border(args, stage, first_of_size, column, all * (share.number + 1) / shares);
  return share;
}

// Piece `number` of a share: the one it ends within, whole items, the one it begins within. Of an item in the list, stages
// [first, first + stages): none beyond the last piece.
struct MoePiece {
  int place, first, stages;
  bool takes, gives;
};
__device__ __forceinline__ MoePiece piece_of_share(MoeBorder from, MoeBorder to, int depth, int number) {
  const bool gives = to.stage > 0, within = from.stage > 0;
  const int whole = from.place + within, count = to.place - whole;
  if (gives && number == 0) return {to.place, 0, to.stage, false, true};
  if (within && number == gives + count) return {from.place, from.stage, depth - from.stage, true, false};
  return {whole + number - gives, 0, number < gives + count ? depth : 0, false, false};
}
__device__ __forceinline__ void describe_piece(const MoeCall& call, const MoeStage& stage, const MoeShare& share,
                                               int number, MoeItem& item) {
  const MoePiece piece = piece_of_share(share.from, share.to, stage.depth, number);
  item.stages = 0;
  if (piece.stages == 0) return;
  MoePlace at{0, 0, 0, 0, 0, piece.first, piece.stages};
  int column = piece.place / share.blocks;
  at.block = share.first_block + piece.place % share.blocks;
  at.column = take(column, stage.by_column), at.matrix = take(column, stage.by_matrix), at.slice = column;
  describe_place(call, stage, at, item);
  item.gives = piece.gives, item.takes = piece.takes;
}

// Where the next share finds what this one leaves of an item. Of an accumulator's two columns the first goes to where both
// will be stored, in fp16, once they are whole; the second, a pair of rows a thread, lies here.
template <int kGroups>
__device__ __forceinline__ float2* second_columns(const MoeCall& call, int number, int threads) {
  return reinterpret_cast<float2*>(call.args.arena + call.arena.carry) + static_cast<int64_t>(number) * kGroups * threads +
         threadIdx.x;
}
__device__ __forceinline__ unsigned* share_flag(const MoeCall& call, const MoeStage& stage, int number) {
  return window_flags(call, stage) + 1 + number;
}

// Where a thread's sums go: the pair of its first row of each 8, that of the row after it `row` further on.
struct SumPlace {
  __half* first;
  int64_t row;
  int rows;  // of the block, from this thread's first on
  __device__ __forceinline__ bool has(int row) const { return rows > row; }
  __device__ __forceinline__ unsigned char* at(int at) const {
    return rows_after(reinterpret_cast<unsigned char*>(first), static_cast<uint32_t>(row) * 2, at);
  }
  __device__ __forceinline__ void next() { first += kGroupRows * row, rows -= kGroupRows; }
};

// To the next share, and from the one before; all threads.
template <int kGroups>
__device__ __forceinline__ void leave_sums(const MoeCall& call, const MoeStage& stage, int number,
                                           const float (&sums)[kGroups][4], SumPlace place) {
  float2* second = second_columns<kGroups>(call, number, blockDim.x);
#pragma unroll
  for (int group = 0; group < kGroups; ++group, place.next(), second += blockDim.x) {
    if (place.has(0)) *reinterpret_cast<float*>(place.first) = sums[group][0];
    if (place.has(1)) *reinterpret_cast<float*>(place.first + place.row) = sums[group][1];
    *second = make_float2(sums[group][2], sums[group][3]);
  }
  __syncthreads();
  if (threadIdx.x == 0) raise_flag(share_flag(call, stage, number));
}
template <int kGroups>
__device__ __forceinline__ void take_sums(const MoeCall& call, const MoeStage& stage, int number,
                                          float (&sums)[kGroups][4], SumPlace place) {
  if (threadIdx.x == 0) wait_for_flag(share_flag(call, stage, number - 1));
  __syncthreads();
  const float2* second = second_columns<kGroups>(call, number - 1, blockDim.x);
#pragma unroll
  for (int group = 0; group < kGroups; ++group, place.next(), second += blockDim.x) {
    if (place.has(0)) sums[group][0] = load_from_l2(reinterpret_cast<const float*>(place.first));
    if (place.has(1)) sums[group][1] = load_from_l2(reinterpret_cast<const float*>(place.first + place.row));
    const float2 v = load_from_l2(second);
    sums[group][2] = v.x, sums[group][3] = v.y;
  }
}

}  // namespace exl3
