// The grouped product of the experts: every block of routes with every column block of its expert's matrix.
//
// A persistent grid goes through a list of items (block, slice, matrix, columns) that follows from the routing on the
// device, with a fixed stride or in equal shares; each thread block loads the first stages of its next item while it
// multiplies the last ones of this. Within an item k ascends, whoever multiplies it, so a route's sums do not depend on
// the routes beside it, nor on the row tile.
#pragma once

#include "moe_shares.cuh"
#include "warpgroup.cuh"

namespace exl3 {

// kRows routes of a block, kColumnBlocks column blocks of an item.
template <int kRows_, int kStages_, int kColumnBlocks_ = 1>
struct MoeShape {
  static constexpr int kRows = kRows_, kStages = kStages_, kColumnBlocks = kColumnBlocks_, kDepth = kUnitDepth;
  static constexpr int kGroups = kRows / kGroupRows;
  static constexpr int kTiles = kColumnBlocks * kBlockTiles;  // in a row of tiles, a warp each
  static constexpr int kWarps = kTiles, kThreads = 32 * kWarps;
  static constexpr int kTileRows = kDepth / kTile;
  static constexpr int kSwizzled = 128;  // bytes of a row of x that lie together, in 16-byte chunks swapped by row % 8
  static constexpr int kSegments = kDepth * 2 / kSwizzled;  // of a stage
  static constexpr int kSegmentBytes = kRows * kSwizzled;
  static constexpr int kXStageBytes = kSegments * kSegmentBytes;
  // How threads share the copy of x: eight a row's segment.
  static constexpr int kRowsAtOnce = kRows < kThreads / 8 ? kRows : kThreads / 8;
  static constexpr int kSegmentsAtOnce =
      kThreads / 8 / kRowsAtOnce < kSegments ? kThreads / 8 / kRowsAtOnce : kSegments;
  static constexpr int kRowLoops = kRows / kRowsAtOnce;
  static constexpr int kListed = 16;  // items in the list
  static constexpr bool kRowsInShared = kRowLoops > 2;  // registers are scarce
  static constexpr bool kWarpgroup = EXL3_WARPGROUP && kRows >= 32;
  static constexpr bool kWhole = kColumnBlocks > 1;  // SM90 only: one thread block has all of an SM
  static constexpr bool kShares = !kWarpgroup || kRows < 128 || kWhole;  // else there are no registers for it
  static constexpr int kBlocksPerSm = !kWhole && (kRows < 64 || kWarpgroup) ? 2 : 1;

  static_assert(kSegments % kSegmentsAtOnce == 0 && kRows % kRowsAtOnce == 0, "sizes nest");
  __host__ __device__ static constexpr int stage_bytes(int rate2) { return kXStageBytes + kTileRows * kTiles * 16 * rate2; }
  // The tensor cores want x aligned to 1024 bytes, and dynamic shared memory begins anywhere.
  __host__ __device__ static constexpr int shared_bytes(int max_rate2) { return kStages * stage_bytes(max_rate2) + 1024; }
};

// The next items of a thread block, described by one thread each, half a list at a time. A half is written anew once
// the loader is well into the other, when nobody has an item of it left: the stages ahead are fewer than a quarter.
template <class S>
struct MoeList {
  static constexpr int kHalf = S::kListed / 2;
  static_assert(S::kStages - 1 < kHalf / 2, "stages ahead, each of another item at worst");
  const MoeCall& call;
  const MoeStage& stage;
  MoeItem* items;  // [S::kListed], shared
  const MoeShare& share;  // shared
  __device__ __forceinline__ const MoeItem& operator[](int number) const { return items[number % S::kListed]; }
  // Items [first, first + count) of this thread block, for all threads after the next barrier.
  __device__ __forceinline__ void describe(int first, int count) {
    const int number = first + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) >= count) return;
    MoeItem& item = items[number % S::kListed];
    if (S::kShares && share.cut) describe_piece(call, stage, share, number, item);
    else describe_item(call, stage, dealt_item(number, blockIdx.x), item);
  }
  __device__ __forceinline__ void reached(int number) {
    if (number % kHalf == kHalf / 2 && number > kHalf) describe((number / kHalf + 1) * kHalf, kHalf);
  }
};

// Copies stages of this thread block's items, one after the other, from global to shared memory.
template <class S>
struct MoeLoader {
  static constexpr uint32_t kNoRow = ~0u;
  MoeList<S>& list;
  const unsigned char* weights;
  uint32_t x;                 // bytes from the start of a source row
  int pitch;                  // bytes from a row of tiles to the next
  uint32_t* shared_rows;      // [S::kRows] of the block, each slot a warp's own
  uint32_t rows[S::kRowsInShared ? 1 : S::kRowLoops];
  int number, left, rate2;    // of the item; left: stages, 0 where there is no other item

  __device__ __forceinline__ MoeLoader(MoeList<S>& list, uint32_t* shared_rows)
      : list(list), shared_rows(shared_rows), number(0) {
    seek();
  }
  // Where a source row of this thread begins, in units of 16 bytes.
  __device__ __forceinline__ uint32_t& row_of(int loop) {
    if constexpr (S::kRowsInShared) return shared_rows[threadIdx.x / 8 + loop * S::kRowsAtOnce];
    else return rows[loop];
  }
  __device__ __forceinline__ void seek() {
    const MoeItem& item = list[number];
    left = item.stages;
    if (left == 0) return;
    rate2 = item.rate2, pitch = item.pitch;
    const int warp = threadIdx.x / 32;  // each copies one row of tiles of a column block
    weights = item.weights + static_cast<int64_t>(warp / S::kColumnBlocks) * pitch +
              warp % S::kColumnBlocks * kBlockTiles * 16 * rate2 + threadIdx.x % 32 * 16;
    const int segment = threadIdx.x / 8 / S::kRowsAtOnce;
    x = item.x + segment * S::kSwizzled + threadIdx.x % 8 * 16;
    const MoeArgs& args = list.call.args;
    const bool by_row = list.call.by_row && !list.stage.down;
    if constexpr (S::kRowsInShared) __syncwarp();  // the warp has read its rows of the item before
#pragma unroll
    for (int i = 0; i < S::kRowLoops; ++i) {
      const int row = threadIdx.x / 8 % S::kRowsAtOnce + i * S::kRowsAtOnce;
      const bool valid = row < item.rows && segment < S::kSegments;
      int source = item.source + row;
      if (valid && by_row)
        source = reinterpret_cast<const Route*>(args.arena + list.call.arena.sorted)[item.start + row].route / args.top_k;
      row_of(i) = valid ? static_cast<uint32_t>(source * (list.stage.x_pitch / 16)) : kNoRow;
    }
  }
  __device__ __forceinline__ void advance() {
    weights += S::kTileRows * pitch;
    x += S::kSegments * S::kSwizzled;
    --left;
  }
  // After the last stage of an item. Outside the loops of a rate, which would each have a copy of it.
  __device__ __forceinline__ void next_item() {
    if (left > 0 || list[number].stages == 0) return;
    list.reached(++number);
    seek();
  }
  // chunks: 16-byte pieces in a row of tiles, kBlockTiles * rate2.
  __device__ __forceinline__ void copy_weights(SharedAddress to, int chunks) const {
    const int lane = threadIdx.x % 32;
    to += (threadIdx.x / 32 * chunks + lane) * 16;
#pragma unroll 1
    for (int i = 0; i < chunks; i += 32)
      if (i + lane < chunks) cp_async_16(to + i * 16, weights + i * 16);
  }
  template <int kChunks>
  __device__ __forceinline__ void copy_weights(SharedAddress to) const {
    const int lane = threadIdx.x % 32;
    to += (threadIdx.x / 32 * kChunks + lane) * 16;
#pragma unroll
    for (int i = 0; i < kChunks; i += 32) {
      // Lanes beyond the last chunk copy that one again: a branch would cost more.
      const int at = i + 32 <= kChunks ? i : min(i, kChunks - 1 - lane);
      cp_async_16(to + at * 16, weights + at * 16);
    }
  }
  __device__ __forceinline__ void copy_x(SharedAddress to) {
    const int chunk = threadIdx.x % 8, row = threadIdx.x / 8 % S::kRowsAtOnce, segment = threadIdx.x / 8 / S::kRowsAtOnce;
    to += segment * S::kSegmentBytes + row * S::kSwizzled + (chunk ^ row % 8) * 16;
    // All addresses before all copies, which the compiler sets apart from other uses of shared memory.
    const unsigned char* const base = list.stage.x + x;
    uint32_t at[S::kRowLoops];
    const unsigned char* from[S::kRowLoops];
#pragma unroll
    for (int i = 0; i < S::kRowLoops; ++i) at[i] = row_of(i);
#pragma unroll
    for (int i = 0; i < S::kRowLoops; ++i) from[i] = base + static_cast<uint64_t>(at[i]) * 16;
#pragma unroll
    for (int i = 0; i < S::kRowLoops; ++i)
#pragma unroll
      for (int s = 0; s < S::kSegments; s += S::kSegmentsAtOnce)
        if (at[i] != kNoRow)  // what lies there spoils sums that nobody stores
          cp_async_16(to + s * S::kSegmentBytes + i * S::kRowsAtOnce * S::kSwizzled, from[i] + s * S::kSwizzled);
  }
};

template <class S>
using MoeSums = float[S::kGroups][4];

template <Codebook kBook, class S>
constexpr int kMaxRate2 = S::kColumnBlocks > 1 ? max_pair_rate2(kBook) : 16;

// Tiles that a warp decodes side by side, where that leaves it registers: more bits and half rates have more places to keep.
template <Codebook kBook, int kRate2, class S>
constexpr int kTilesAtOnce = S::kWhole && kRate2 <= 8 && !(kBook == Codebook::kMul1 && S::kRows == 128) ? 2 : 1;

#if EXL3_WARPGROUP
// With so few groups of rows the tensor cores have time to add up the words of the weights as well.
constexpr int kSumGroups = 8;

// sums += kCount tiles, `pitch` bytes apart, for as many groups of rows as there are sums; without `add` sums = the same. The
// tiles are decoded side by side into a, by decode_tile_by_tensor_cores with kTensorSums. The products use a and the sums until
// warpgroup_wait. x(tile): the descriptor of a tile's rows of x.
template <Codebook kBook, int kRate2, bool kTensorSums, int kCount, int kGroups, class X>
__device__ __forceinline__ void multiply_tiles(SharedAddress weights, int pitch, const LanePlace<kRate2>& place,
                                               uint32_t (&a)[kCount][4], float (&sums)[kGroups][4], X x, bool add = true) {
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const SharedTile packed{weights + tile * pitch};
    if constexpr (kTensorSums) decode_tile_by_tensor_cores<kBook, kRate2>(packed, place, a[tile]);
    else decode_tile<kBook, kRate2>(packed, place, a[tile]);
  }
  warpgroup_arrive();
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    if (tile == 0) warpgroup_mma(sums, a[tile], x(tile), add);
    else warpgroup_mma(sums, a[tile], x(tile));
  }
  warpgroup_commit();
}

// sums += one stage. Tiles are decoded while the ones before are multiplied.
template <Codebook kBook, int kRate2, class S, int kGroups>
__device__ __forceinline__ void multiply_by_warpgroup(SharedAddress weights, SharedAddress x,
                                                      const LanePlace<kRate2>& place, float (&sums)[kGroups][4]) {
  constexpr int kTileRowBytes = S::kTiles * Rate<kRate2>::kTileBytes, kTilesOfSegment = S::kSwizzled / 2 / kTile;
  constexpr int kAtOnce = kTilesAtOnce<kBook, kRate2, S>;
  constexpr bool kTensorSums = kGroups <= kSumGroups && !(S::kWhole && S::kRows == 128);  // there are no registers
  const auto first = swizzled_descriptor(x);
  uint32_t a[2][kAtOnce][4];
#pragma unroll
  for (int tile = 0; tile < S::kTileRows; tile += kAtOnce) {
    const auto x_of = [&](int i) {
      const int at = tile + i;
      return descriptor_after(first, at / kTilesOfSegment * S::kSegmentBytes + at % kTilesOfSegment * kTile * 2);
    };
    multiply_tiles<kBook, kRate2, kTensorSums>(weights + tile * kTileRowBytes, kTileRowBytes, place,
                                               a[tile / kAtOnce % 2], sums, x_of);
    if (tile + kAtOnce < S::kTileRows) warpgroup_wait<1>();  // the registers of the next tiles are free
  }
  warpgroup_wait<0>();
}

// The same for no more rows than the block has, rounded up to 32.
template <Codebook kBook, int kRate2, class S, int kGroups>
__device__ __forceinline__ void multiply_rows(SharedAddress weights, SharedAddress x, const LanePlace<kRate2>& place,
                                              int rows, MoeSums<S>& sums) {
  constexpr int kLess = kGroups - 32 / kGroupRows;
  if constexpr (kLess > 0)
    if (rows <= kLess * kGroupRows) return multiply_rows<kBook, kRate2, S, kLess>(weights, x, place, rows, sums);
  multiply_by_warpgroup<kBook, kRate2, S>(weights, x, place, reinterpret_cast<float(&)[kGroups][4]>(sums));
}
#endif

// sums += one stage. weights: this warp's first tile; x: the stage's rows of x; even, odd: this lane's chunk for
// ldmatrix of the first and second half of a segment.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_moe_stage(SharedAddress weights, SharedAddress x, uint32_t even, uint32_t odd,
                                                   const LanePlace<kRate2>& place, int rows, MoeSums<S>& sums) {
  constexpr int kTileRowBytes = S::kTiles * Rate<kRate2>::kTileBytes;
  if constexpr (S::kWarpgroup) {
#if EXL3_WARPGROUP
    multiply_rows<kBook, kRate2, S, S::kGroups>(weights, x, place, rows, sums);
#endif
  } else {
    // Many sums leave no registers for several steps at once.
#pragma unroll(S::kRows < 64 ? S::kTileRows / 2 : 1)
    for (int step = 0; step < S::kTileRows / 2; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        decode_tile<kBook, kRate2>(SharedTile{weights + (step * 2 + half) * kTileRowBytes}, place, a[half]);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {
        if (S::kRows >= 64 && group * kGroupRows >= rows) break;
        const uint4 b = load_matrices(x + step / 2 * S::kSegmentBytes + group * kGroupRows * S::kSwizzled +
                                      (step % 2 ? odd : even));
        mma_m16n8k16(sums[group], a[0], b.x, b.y);
        mma_m16n8k16(sums[group], a[1], b.z, b.w);
      }
    }
  }
}

// The ring of stages in shared memory: x, then weights.
template <class S>
struct MoeRing {
  SharedAddress begin, read;  // the stage that is multiplied next
  uint32_t stage_bytes;       // a launch parameter, which takes no register
  __device__ __forceinline__ SharedAddress after(SharedAddress stage) const {
    if constexpr (S::kStages == 2) return 2 * begin + stage_bytes - stage;
    return stage + stage_bytes == begin + S::kStages * stage_bytes ? begin : stage + stage_bytes;
  }
  // The one multiplied last, which is to be filled.
  __device__ __forceinline__ SharedAddress before(SharedAddress stage) const {
    if constexpr (S::kStages == 2) return after(stage);
    return (stage == begin ? begin + S::kStages * stage_bytes : stage) - stage_bytes;
  }
};

// Multiply `count` stages of one item of `rows` rows while loading the stages ahead, as many of one item or none.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_stages(MoeLoader<S>& loader, MoeRing<S>& ring, int count, int rows, MoeSums<S>& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const LanePlace<kRate2> place(lane);
  uint32_t even = lane % 8 * S::kSwizzled + ((lane / 8) ^ (lane % 8)) * 16, odd = even ^ 64;
  keep_in_register(even);
  keep_in_register(odd);
  for (; count > 0; --count) {
    cp_async_wait<S::kStages - 2>();
    if constexpr (S::kWarpgroup) publish_shared();
    __syncthreads();
    if (loader.left > 0) {
      const SharedAddress fill = ring.before(ring.read);
      loader.copy_x(fill);
      // The item ahead mostly has this rate: let the compiler count the copies.
      if (loader.rate2 == kRate2) loader.template copy_weights<kBlockTiles * kRate2>(fill + S::kXStageBytes);
      else loader.copy_weights(fill + S::kXStageBytes, kBlockTiles * loader.rate2);
      loader.advance();
    }
    cp_async_commit();
    multiply_moe_stage<kBook, kRate2, S>(ring.read + S::kXStageBytes + warp * Rate<kRate2>::kTileBytes, ring.read, even,
                                         odd, place, rows, sums);
    ring.read = ring.after(ring.read);
  }
}

__device__ __forceinline__ void store_pair(__half* to, float low, float high) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(low, high);
}

// An accumulator holds column lane/4 (+8) of its tile, rows 2(lane%4) and the next: see MoeArena for the order.
__device__ __forceinline__ SumPlace sum_place(const MoeStage& stage, const MoeItem& item) {
  const int lane = threadIdx.x % 32, low = lane % 4 * 2;
  __half* const sums = reinterpret_cast<__half*>(stage.sums) + item.sums;
  return {sums + low * stage.sum_pitch + threadIdx.x / 32 * kTile + lane / 4 * 2, stage.sum_pitch, item.rows - low};
}

// The sums of a block of `rows` rows.
template <int kGroups>
__device__ __forceinline__ void store_sums(float scale, const float (&sums)[kGroups][4], SumPlace place, int rows) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group, place.next()) {
    if (group * kGroupRows >= rows) break;
    const float(&v)[4] = sums[group];
    if (place.has(0)) store_pair(place.first, v[0] * scale, v[2] * scale);
    if (place.has(1)) store_pair(place.first + place.row, v[1] * scale, v[3] * scale);
  }
}

// All items of this thread block, one after the other.
template <Codebook kBook, class S>
__device__ __forceinline__ void multiply_items(const MoeCall& call, const MoeStage& stage) {
  __shared__ __align__(16) MoeItem items[S::kListed];
  __shared__ __align__(16) uint32_t shared_rows[S::kRowsInShared ? S::kRows : 1];
  __shared__ __align__(16) MoeShare share;
  const uint32_t stage_bytes = stage.stage_bytes;
  const SharedAddress shared = (dynamic_shared() + 1023) / 1024 * 1024;
  MoeRing<S> ring{shared, shared, stage_bytes};
  wait_for_previous_grid();
  allow_next_grid();
  MoeList<S> list{call, stage, items, share};
  if constexpr (S::kShares) {
    if (threadIdx.x == 0) share = stage.cut ? take_share(call, stage) : MoeShare{};
    __syncthreads();
  }
  list.describe(0, S::kListed);
  __syncthreads();

  MoeLoader<S> loader(list, shared_rows);
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (loader.left > 0) {
      loader.copy_weights(shared + s * stage_bytes + S::kXStageBytes, kBlockTiles * loader.rate2);
      loader.copy_x(shared + s * stage_bytes);
      loader.advance();
      loader.next_item();
    }
    cp_async_commit();
  }

  for (int number = 0; list[number].stages > 0; ++number) {
    MoeSums<S> sums = {};
    if (S::kShares && list[number].takes) take_sums(call, stage, share.number, sums, sum_place(stage, list[number]));
    const int rate2 = list[number].rate2;
    int count = list[number].stages;
    while (count > 0) {
      const int run = loader.left > 0 && loader.left < count ? loader.left : count;
      switch (rate2) {
#define EXL3_RATE(r)                                                                                           \
  case r:                                                                                                      \
    if constexpr (r <= (kMaxRate2<kBook, S>)) multiply_stages<kBook, r, S>(loader, ring, run, list[number].rows, sums); \
    break;
        EXL3_RATE(2) EXL3_RATE(4) EXL3_RATE(6) EXL3_RATE(8) EXL3_RATE(10) EXL3_RATE(12) EXL3_RATE(14) EXL3_RATE(16)
        default:
          if constexpr (kBook == Codebook::kMul1) switch (rate2) {
              EXL3_RATE(3) EXL3_RATE(5) EXL3_RATE(7)
            }
#undef EXL3_RATE
      }
      count -= run;
      loader.next_item();
    }
    SumPlace place = sum_place(stage, list[number]);
    if (S::kShares && list[number].gives) {
      leave_sums(call, stage, share.number, sums, place);
      continue;
    }
    store_sums(stage.scale, sums, place, list[number].rows);
  }
}

// Blocks an SM the compiler leaves registers for: mul1 has the most rates to hold places for.
template <Codebook kBook, class S>
constexpr int kMoeBlocksPerSm =
    kBook == Codebook::kMul1 && (S::kRows == 128 || (S::kRows == 32 && !S::kWarpgroup)) ? 1 : S::kBlocksPerSm;

// Grid: any number of blocks; dynamic shared memory: S::shared_bytes of the largest rate in the table. Blocks that have a
// whole SM need SM90: elsewhere their kernel is empty, and nobody launches it.
template <Codebook kBook, class S>
__global__ void __launch_bounds__(S::kThreads, (kMoeBlocksPerSm<kBook, S>))
    moe_product_kernel(const __grid_constant__ MoeCall call, const __grid_constant__ MoeStage stage) {
  if constexpr (!S::kWhole || S::kWarpgroup) multiply_items<kBook, S>(call, stage);
}

}  // namespace exl3
