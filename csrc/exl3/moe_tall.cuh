// The grouped product for experts with many routes, on SM90: up to 256 routes x 128 columns at once, so that a tile of
// weights is decoded for twice as many rows.
//
// Four warps fetch in turn: packed weights and, by the copy engine, rows of x. Two warpgroups decode and multiply, 64 columns
// each, with as many rows as the block has, rounded up: 128 sums a thread at most, for which the other warps hand their
// registers over. A ring of stages of 64 k joins them, so no warp waits for all. Within an item k ascends as in
// moe_product.cuh, and the sums are the same.
#pragma once

#include "moe_product.cuh"
#include "moe_tail.cuh"
#include "tensor_map.cuh"
#include "values.cuh"

namespace exl3 {

struct Tall {
  static constexpr int kRows = kMaxRowTile, kGroups = kRows / kGroupRows;
  static constexpr int kDepth = kBoxColumns;  // of a stage
  static constexpr int kBoxRows = 64;
  static constexpr int kTileRows = kDepth / kTile, kUnitStages = kUnitDepth / kDepth;
  static constexpr int kSumWarps = kBlockTiles, kSumThreads = 32 * kSumWarps;
  // Who fetches takes instructions from those who multiply on the same scheduler, so each of the four has a warp of them.
  static constexpr int kFetchWarps = 4, kThreads = kSumThreads + 32 * kFetchWarps;
  static constexpr int kSumRegisters = 232, kFetchRegisters = 40;
  static constexpr int kMostStages = 6;
  static constexpr int kRowBytes = kDepth * 2, kBoxBytes = kBoxRows * kRowBytes, kXBytes = kRows * kRowBytes;
  static constexpr int kListed = 16;  // items
  static constexpr int kFirstBox = 8;  // the lane that fetches the first rows of x; lanes from 0 on fetch weights
  static constexpr int kBarrierBytes = 8 * (2 * kMostStages + 1 + kListed);
  static constexpr int kStaticBytes = 2048;  // at most, of the lists

  __host__ __device__ static constexpr int stage_bytes(int rate2) {
    return kXBytes + (kTileRows * kBlockTiles * 16 * rate2 + 1023) / 1024 * 1024;  // x begins at multiples of 1024
  }
  __host__ __device__ static constexpr int stages(int stage_bytes) {
    const int room = (232448 - kStaticBytes - kBarrierBytes - 1024) / stage_bytes;
    return room < kMostStages ? room : kMostStages;
  }
  static constexpr int shared_bytes(int rate2) {
    return stages(stage_bytes(rate2)) * stage_bytes(rate2) + kBarrierBytes + 1024;
  }

  // What a block has from its launch is what its warps may exchange; asking for more waits for ever.
  static_assert(kSumThreads * kSumRegisters + 32 * kFetchWarps * kFetchRegisters <= 65536 / kThreads / 8 * 8 * kThreads,
                "registers are there");
  // An item's place in the list is read until all warps have come to a later item. Who describes the item kListed further on
  // has fetched a stage at most kFetchWarps before the item ahead of that, for which the stage kMostStages before was released:
  // it must belong to a later item than the first, and an item has kUnitStages stages at least.
  static_assert(kListed > (kMostStages + kFetchWarps) / kUnitStages + 2, "an item is described anew when nobody needs it");
};
static_assert(Tall::stages(Tall::stage_bytes(16)) >= Tall::kFetchWarps, "each of those who fetch begins in its own stage");

#if EXL3_WARPGROUP

// The thread block's ring of stages, each x, then weights, with two barriers each.
struct TallRing {
  SharedAddress begin, barriers;
  uint32_t stage_bytes;
  int stages;
  __device__ __forceinline__ SharedAddress x(int stage) const { return begin + stage * stage_bytes; }
  __device__ __forceinline__ SharedAddress weights(int stage) const { return x(stage) + Tall::kXBytes; }
  __device__ __forceinline__ SharedAddress full(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ SharedAddress empty(int stage) const { return barriers + (Tall::kMostStages + stage) * 8; }
  __device__ __forceinline__ SharedAddress shared_out() const { return barriers + 2 * Tall::kMostStages * 8; }
  __device__ __forceinline__ SharedAddress item(int number) const {  // has been described
    return shared_out() + (1 + number % Tall::kListed) * 8;
  }
};

// Every kFetchWarps-th stage of this thread block's items, from stage `warp` of the first on; one warp. They describe the items
// in turn, each one item ahead, for all.
__device__ __forceinline__ void fetch_items(const MoeCall& call, const MoeStage& stage, const TensorMap& map,
                                            const TallRing& ring, const MoeTail& tail, MoeItem* items, int warp) {
  const int lane = threadIdx.x % 32, box = lane - Tall::kFirstBox;
  Turn turn{warp, 0};
  int at = warp;  // the stage that is this warp's next, from the item's first on
#pragma unroll 1
  for (int next_item = 0;; ++next_item) {
    const MoeItem& item = items[(next_item + Tall::kListed - 1) % Tall::kListed];
    if (next_item > 0) {
      barrier_wait(ring.item(next_item - 1), (next_item - 1) / Tall::kListed % 2);
      if (item.stages == 0) break;
    }
    if (next_item % Tall::kFetchWarps == warp) {
      if (next_item >= tail.rounds) barrier_wait(ring.shared_out(), 0);
      if (lane == 0) {
        describe_tall(call, stage, tail, next_item, items[next_item % Tall::kListed]);
        barrier_arrive(ring.item(next_item));
      }
      __syncwarp();
    }
    if (next_item == 0) continue;
    const int stages = item.stages * Tall::kUnitStages;
    const int boxes = (item.rows + Tall::kBoxRows - 1) / Tall::kBoxRows, row = item.source + box * Tall::kBoxRows;
    const uint32_t bytes = kBlockTiles * 16 * item.rate2;  // of a row of tiles
    const int64_t pitch = item.pitch, next = pitch * Tall::kTileRows;
    const unsigned char* weights = item.weights + lane * pitch + at * next;
    int k = item.x / 2 + at * Tall::kDepth;
#pragma unroll 1
    for (; at < stages; at += Tall::kFetchWarps, turn.advance(ring.stages, Tall::kFetchWarps)) {
      const SharedAddress full = ring.full(turn.stage);
      barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
      if (lane == 0) barrier_expect(full, boxes * Tall::kBoxBytes + Tall::kTileRows * bytes);
      __syncwarp();
      // Weights first: they come from farther away.
      if (lane < Tall::kTileRows) bulk_copy(ring.weights(turn.stage) + lane * bytes, weights, bytes, full);
      if (box >= 0 && box < boxes) copy_box(ring.x(turn.stage) + box * Tall::kBoxBytes, map, k, row, full);
      weights += next * Tall::kFetchWarps, k += Tall::kDepth * Tall::kFetchWarps;
    }
    at -= stages;
  }
  if (at > 0) return;
  // A stage of nothing, for the item that says there is none.
  barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
  if (lane == 0) barrier_arrive(ring.full(turn.stage));
}

// sums = `units` times 128 k, for as many groups of rows as there are sums; going on, sums += them.
template <Codebook kBook, int kRate2, int kGroups>
__device__ __forceinline__ void multiply_units(const TallRing& ring, Turn& turn, int units, bool going_on,
                                               float (&sums)[kGroups][4]) {
  constexpr int kTileRowBytes = kBlockTiles * Rate<kRate2>::kTileBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const LanePlace<kRate2> place(lane);
  uint32_t a[Tall::kUnitStages][Tall::kTileRows][4];
  // Of one lane, so that the compiler knows: of all.
  units = static_cast<int>(shuffle_from(units, 0));
  bool add = shuffle_from(going_on, 0) != 0;
#pragma unroll 1
  for (; units > 0; --units) {
    SharedAddress empty = 0;  // of the stage before
#pragma unroll
    for (int stage = 0; stage < Tall::kUnitStages; ++stage) {
      barrier_wait(ring.full(turn.stage), turn.parity);
      const SharedAddress weights = ring.weights(turn.stage) + warp * Rate<kRate2>::kTileBytes;
      const auto x = swizzled_descriptor(ring.x(turn.stage));
      SharedAddress leaving = ring.empty(turn.stage);
      // Now, and not among the products: those who wait for them would wait for this too.
      turn.step(ring.stages);
      keep_in_register(leaving);
      const auto x_of = [&](int tile) { return descriptor_after(x, tile * kTile * 2); };
      multiply_tiles<kBook, kRate2, (kGroups <= kSumGroups)>(weights, kTileRowBytes, place, a[stage], sums, x_of, add);
      if (stage > 0) {
        warpgroup_wait<1>();  // all products of the stage before are done
        if (lane == 0) barrier_arrive(empty);
      }
      add = true, empty = leaving;
    }
    warpgroup_wait<0>();
    if (lane == 0) barrier_arrive(empty);
  }
}

// Rows by which products differ. Rates that experts hardly have get fewer products, which take long to compile.
template <int kRate2>
constexpr int kTallStep = kRate2 <= kTallFineRate2 ? kSizeRows : 128;

// One item's sums, for as many rows as the block has, rounded up.
template <Codebook kBook, int kRate2, int kGroups = Tall::kGroups>
__device__ __forceinline__ void multiply_item(const MoeItem& item, const TallRing& ring, Turn& turn, bool add,
                                              float (&sums)[Tall::kGroups][4]) {
  constexpr int kLess = kGroups - kTallStep<kRate2> / kGroupRows;
  if constexpr (kLess > 0)
    if (item.rows <= kLess * kGroupRows) return multiply_item<kBook, kRate2, kLess>(item, ring, turn, add, sums);
  multiply_units<kBook, kRate2>(ring, turn, item.stages, add, reinterpret_cast<float(&)[kGroups][4]>(sums));
}

// The sums of a block of `rows` rows. All heights and rates share it: what is run once an item has to be fetched first, and
// with a copy for each of them the kernel was half as large again. Lanes beyond the last row store nothing.
using TallSums = float[Tall::kGroups][4];
__device__ __forceinline__ void store_block(float scale, const TallSums& sums, const SumPlace& place, int rows) {
#pragma unroll
  for (int group = 0; group < Tall::kGroups; ++group) {
    const int row = group * kGroupRows;
    if (group % 2 == 0 && row >= rows) break;
    const float(&v)[4] = sums[group];
    store_32_if_more(place.rows, row, place.at(row), pack_half2(v[0] * scale, v[2] * scale));
    store_32_if_more(place.rows, row + 1, place.at(row + 1), pack_half2(v[1] * scale, v[3] * scale));
  }
}

// The same to the next thread block, as they are, and from the one before. See leave_sums, which goes from row to row by
// adding: the pairs of moe_product.cuh have no registers to address rows as here.
__device__ __forceinline__ void leave_block(const MoeCall& call, const MoeStage& stage, int block, const TallSums& sums,
                                            const SumPlace& place, int rows) {
  float2* const second = second_columns<Tall::kGroups>(call, block, Tall::kSumThreads);
#pragma unroll
  for (int group = 0; group < Tall::kGroups; ++group) {
    const int row = group * kGroupRows;
    if (group % 4 == 0 && row >= rows) break;
    const float(&v)[4] = sums[group];
    if (place.has(row)) *reinterpret_cast<float*>(place.at(row)) = v[0];
    if (place.has(row + 1)) *reinterpret_cast<float*>(place.at(row + 1)) = v[1];
    second[group * Tall::kSumThreads] = make_float2(v[2], v[3]);
  }
  group_barrier<Tall::kSumThreads>(1);
  if (threadIdx.x == 0) raise_flag(share_flag(call, stage, block));
}
__device__ __forceinline__ void take_block(const MoeCall& call, const MoeStage& stage, int block, TallSums& sums,
                                           const SumPlace& place, int rows) {
  if (threadIdx.x == 0) wait_for_flag(share_flag(call, stage, block - 1));
  group_barrier<Tall::kSumThreads>(1);
  const float2* const second = second_columns<Tall::kGroups>(call, block - 1, Tall::kSumThreads);
#pragma unroll
  for (int group = 0; group < Tall::kGroups; ++group) {
    const int row = group * kGroupRows;
    if (group % 4 == 0 && row >= rows) break;
    float(&v)[4] = sums[group];
    if (place.has(row)) v[0] = load_from_l2(reinterpret_cast<const float*>(place.at(row)));
    if (place.has(row + 1)) v[1] = load_from_l2(reinterpret_cast<const float*>(place.at(row + 1)));
    const float2 of_second = load_from_l2(second + group * Tall::kSumThreads);
    v[2] = of_second.x, v[3] = of_second.y;
  }
}

template <Codebook kBook>
__device__ __forceinline__ void multiply_all(const MoeCall& call, const MoeStage& stage, const MoeTail& tail,
                                             const MoeItem* items, const TallRing& ring) {
  Turn turn{0, 0};
  TallSums sums = {};
#pragma unroll 1
  for (int number = 0;; ++number) {
    barrier_wait(ring.full(turn.stage), turn.parity);  // who fetched this has seen the item described
    const MoeItem& item = items[number % Tall::kListed];
    if (item.stages == 0) return;
    const bool takes = stage.cut && item.takes;
    if (takes) take_block(call, stage, tail.block, sums, sum_place(stage, item), item.rows);
    switch (item.rate2) {
#define EXL3_RATE(r) \
  case r: multiply_item<kBook, r>(item, ring, turn, takes, sums); break;
      EXL3_RATE(2) EXL3_RATE(4) EXL3_RATE(6) EXL3_RATE(8) EXL3_RATE(10) EXL3_RATE(12) EXL3_RATE(14) EXL3_RATE(16)
      default:
        if constexpr (kBook == Codebook::kMul1) switch (item.rate2) {
            EXL3_RATE(3) EXL3_RATE(5) EXL3_RATE(7)
          }
#undef EXL3_RATE
    }
    if (stage.cut && item.gives) leave_block(call, stage, tail.block, sums, sum_place(stage, item), item.rows);
    else store_block(stage.scale, sums, sum_place(stage, item), item.rows);
  }
}

#endif  // EXL3_WARPGROUP

// Grid: any number of blocks, one an SM; dynamic shared memory: Tall::shared_bytes of the largest rate in the table. For
// cards without warpgroups the kernel is empty, and nobody launches it.
template <Codebook kBook>
__global__ void __launch_bounds__(Tall::kThreads, 1)
    moe_tall_kernel(const __grid_constant__ MoeCall call, const __grid_constant__ MoeStage stage,
                    const __grid_constant__ TensorMap map) {
#if EXL3_WARPGROUP
  __shared__ __align__(16) MoeItem items[Tall::kListed];
  __shared__ __align__(16) MoeTail tail;
  __shared__ __align__(16) MoeStage described;  // of a launch parameter those who fetch would keep too much in registers
  static_assert(sizeof(items) + sizeof(tail) + sizeof(described) <= Tall::kStaticBytes, "shared memory was counted");
  const SharedAddress barriers = dynamic_shared();
  const SharedAddress begin = (barriers + Tall::kBarrierBytes + 1023) / 1024 * 1024;
  const TallRing ring{begin, barriers, stage.stage_bytes, Tall::stages(stage.stage_bytes)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < ring.stages; ++s) {
      barrier_init(ring.full(s), 1);
      barrier_init(ring.empty(s), Tall::kSumWarps);
    }
    barrier_init(ring.shared_out(), 1);
    for (int item = 0; item < Tall::kListed; ++item) barrier_init(ring.item(item), 1);
    barrier_publish();
    described = stage;
  }
  earlier_grids_have_ended();
  begin_tail(call, stage, tail);
  __syncthreads();
  wait_for_previous_grid();
  allow_next_grid();
  if (threadIdx.x >= Tall::kSumThreads) {
    give_registers<Tall::kFetchRegisters>();
    const int warp = (threadIdx.x - Tall::kSumThreads) / 32;
    if (stage.cut && warp == Tall::kFetchWarps - 1) {
      find_share(stage, tail);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(ring.shared_out());
    }
    fetch_items(call, described, map, ring, tail, items, warp);
  } else {
    take_registers<Tall::kSumRegisters>();
    multiply_all<kBook>(call, stage, tail, items, ring);
  }
#else
  (void)call, (void)stage, (void)map;
#endif
}

}  // namespace exl3
