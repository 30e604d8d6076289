// The grouped product for few routes, where decoding binds: warps that never wait for one another.
//
// A warp decodes two neighbouring columns of tiles from its own ring of stages in shared memory and reads x straight
// from the cache, in the order of its fragments; barriers are left only between lists of items. With mcg and 3inst a
// decoded word's two fp16 halves, whose sum is the weight, are multiplied apart: x then holds every value twice. It
// saves a fifth of the instructions; the sum is not rounded to fp16.
#pragma once

#include "moe_items.cuh"
#include "trellis.cuh"

namespace exl3 {

constexpr int kFewStages = 3, kFewListed = 64;
constexpr int kFewColumns = 2;                 // of tiles, of a warp
constexpr int kFewWarps = kBlockTiles / kFewColumns;
constexpr int kFewBlocksPerSm = 4;             // as registers allow
constexpr int kFewDepth = kUnitDepth / kTile;  // tiles of a stage and column
constexpr int kFewChunk = kFewDepth / 2;       // tiles of a column whose inputs are loaded at once

__host__ __device__ constexpr int few_stage_bytes(int rate2) { return kFewDepth * kFewColumns * 16 * rate2; }
__host__ __device__ constexpr int few_shared_bytes(int max_rate2) {
  return kFewWarps * kFewStages * few_stage_bytes(max_rate2);
}

template <Codebook kBook>
constexpr bool kHalvesApart = kBook != Codebook::kMul1;

// Two A fragments of one tile: of each state the masked word as it is. The first has inputs 2c and 2c + 1 of lane c in
// places of two, the second those + 8.
template <Codebook kBook, int kRate2, class Load>
__device__ __forceinline__ void decode_tile_apart(const Load& load, const LanePlace<kRate2>& place,
                                                  uint32_t (&a)[2][4]) {
  uint32_t s[8];
  load_states<kRate2, true>(load, place, s);
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j / 2 % 2][j % 2 * 2 + j / 4] = expand<kBook>(s[j]);
}

// Copies stages of a warp's items from global to shared memory, as many rows of tiles at once as 32 lanes hold.
struct FewLoader {
  static constexpr uint32_t kNowhere = ~0u;
  const MoeItem* items;
  const unsigned char* from;  // of this lane's first copy in the next stage
  uint32_t to;                // and where it goes, from the start of a stage; or kNowhere
  int left, pitch, rate2;

  __device__ __forceinline__ explicit FewLoader(const MoeItem* items) : items(items), to(kNowhere) { seek(); }
  static constexpr __host__ __device__ int rows_at_once(int rate2) {
    return kFewColumns * rate2 <= 8 ? 4 : kFewColumns * rate2 <= 16 ? 2 : 1;
  }
  __device__ __forceinline__ void seek() {
    left = items->stages;
    if (left == 0) return;
    rate2 = items->rate2, pitch = items->pitch;
    const int rows = rows_at_once(rate2), row_bytes = kFewColumns * 16 * rate2;
    const int row = threadIdx.x % 32 * rows / 32, byte = threadIdx.x % (32 / rows) * 16;
    to = byte < row_bytes ? row * row_bytes + byte : kNowhere;
    from = items->weights + threadIdx.x / 32 * row_bytes + row * pitch + byte;
  }
  // kRate2: the item's rate, or 0 where it is not known.
  template <int kRate2>
  __device__ __forceinline__ void copy(SharedAddress stage) {
    if (to != kNowhere) {
      constexpr int kRows = rows_at_once(kRate2);
      if constexpr (kRate2 != 0) {
#pragma unroll
        for (int row = 0; row < kFewDepth; row += kRows)
          cp_async_16(stage + to + row * kFewColumns * 16 * kRate2, from + row * pitch);
      } else {
        const int rows = rows_at_once(rate2);
#pragma unroll 1
        for (int row = 0; row < kFewDepth; row += rows)
          cp_async_16(stage + to + row * kFewColumns * 16 * rate2, from + row * pitch);
      }
    }
    from += kFewDepth * pitch;
    --left;
  }
  __device__ __forceinline__ void next_item() {
    if (left > 0 || items->stages == 0) return;
    ++items;
    seek();
  }
};

// Where a lane's inputs of an item are: row lane/4 of its block, of every tile the fragments of lane%4. A row that is
// not there is not read: nobody stores its sums.
template <bool kApart>
struct FewSource {
  static constexpr int kTileBytes = kTile * 2 * (kApart ? 2 : 1);
  const unsigned char* from;
  bool here;
  __device__ __forceinline__ void seek(const MoeStage& stage, const MoeItem& item) {
    const int lane = threadIdx.x % 32;
    here = item.stages > 0 && lane / 4 < item.rows;
    if (here) from = stage.x + item.sources[lane / 4] * stage.x_pitch + item.x + lane % 4 * (kApart ? 16 : 8);
  }
  // Loads that follow wait for this one. The compiler lets all loads share one scoreboard, so that whoever waits for the
  // inputs he needs next would wait for those that were just asked for as well.
  __device__ __forceinline__ void wait_for(uint32_t loaded, uint32_t zero) { from += loaded & zero; }
};

// The inputs of some tiles.
template <bool kApart>
struct FewInputs {
  uint4 x[kFewChunk];
  __device__ __forceinline__ void load(const FewSource<kApart>& source, int tile) {
    if (!source.here) return;
#pragma unroll
    for (int i = 0; i < kFewChunk; ++i) {
      const unsigned char* from = source.from + (tile + i) * FewSource<kApart>::kTileBytes;
      if constexpr (kApart) {
        x[i] = *reinterpret_cast<const uint4*>(from);
      } else {
        const uint2 read = *reinterpret_cast<const uint2*>(from);
        x[i].x = read.x, x[i].y = read.y;
      }
    }
  }
};

// sums += some rows of tiles; weights: the first tile.
template <Codebook kBook, int kRate2>
__device__ __forceinline__ void multiply_chunk(SharedAddress weights, const LanePlace<kRate2>& place,
                                               const FewInputs<kHalvesApart<kBook>>& inputs,
                                               float (&sums)[kFewColumns][4]) {
#pragma unroll
  for (int i = 0; i < kFewChunk; ++i) {
    const uint4 x = inputs.x[i];
#pragma unroll
    for (int column = 0; column < kFewColumns; ++column) {
      const SharedTile from{weights + (i * kFewColumns + column) * Rate<kRate2>::kTileBytes};
      if constexpr (kHalvesApart<kBook>) {
        uint32_t a[2][4];
        decode_tile_apart<kBook, kRate2>(from, place, a);
        mma_m16n8k16(sums[column], a[0], x.x, x.y);
        mma_m16n8k16(sums[column], a[1], x.z, x.w);
      } else {
        uint32_t a[4];
        decode_tile<kBook, kRate2>(from, place, a);
        mma_m16n8k16(sums[column], a, x.x, x.y);
      }
    }
  }
}

// A warp's ring of stages.
struct FewRing {
  SharedAddress begin, read;  // the stage that is multiplied next
  uint32_t stage_bytes;
  __device__ __forceinline__ SharedAddress last() const { return begin + (kFewStages - 1) * stage_bytes; }
};

// Multiply `count` stages of one item while loading the stages ahead. source: of the next stage; inputs: its first
// ones, and room for more; after: stages of the item that follow; next: the item that does.
template <Codebook kBook, int kRate2>
__device__ __forceinline__ void multiply_few(const MoeStage& stage, FewLoader& loader, FewRing& ring, int count,
                                             int after, const MoeItem& next, FewSource<kHalvesApart<kBook>>& source,
                                             FewInputs<kHalvesApart<kBook>> (&inputs)[2],
                                             float (&sums)[kFewColumns][4]) {
  constexpr int kChunks = kFewDepth / kFewChunk, kChunkBytes = kFewChunk * kFewColumns * Rate<kRate2>::kTileBytes;
  const LanePlace<kRate2> place(threadIdx.x % 32);
#pragma unroll 1
  for (; count > 0; --count) {
    cp_async_wait<kFewStages - 2>();
    __syncwarp();
    if (loader.left > 0) {
      const SharedAddress fill = ring.read == ring.begin ? ring.last() : ring.read - ring.stage_bytes;
      if (loader.rate2 == kRate2) loader.copy<kRate2>(fill);
      else loader.copy<0>(fill);
    }
    cp_async_commit();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      FewInputs<kHalvesApart<kBook>>& use = inputs[chunk % 2];
      FewInputs<kHalvesApart<kBook>>& fill = inputs[(chunk + 1) % 2];
      if (chunk + 1 == kChunks) {
        if (count == 1 && after == 0) source.seek(stage, next);
        else source.from += kFewDepth * FewSource<kHalvesApart<kBook>>::kTileBytes;
      }
      source.wait_for(use.x[kFewChunk - 1].x, stage.zero);
      fill.load(source, (chunk + 1) % kChunks * kFewChunk);
      multiply_chunk<kBook, kRate2>(ring.read + chunk * kChunkBytes, place, use, sums);
    }
    ring.read = ring.read == ring.last() ? ring.begin : ring.read + ring.stage_bytes;
  }
}

// All items of a list, by one warp: its columns of tiles of each.
template <Codebook kBook>
__device__ __forceinline__ void multiply_list(const MoeStage& stage, const MoeItem* items, SharedAddress begin) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  FewLoader loader(items);
  for (int s = 0; s < kFewStages - 1; ++s) {
    if (loader.left > 0) {
      loader.copy<0>(begin + s * stage.stage_bytes);
      loader.next_item();
    }
    cp_async_commit();
  }
  wait_for_previous_grid();  // for its inputs; the weights are on their way
  allow_next_grid();
  FewRing ring{begin, begin, stage.stage_bytes};
  FewSource<kHalvesApart<kBook>> source{stage.x, false};
  source.seek(stage, items[0]);
  FewInputs<kHalvesApart<kBook>> inputs[2] = {};
  inputs[0].load(source, 0);
#pragma unroll 1
  for (; items->stages > 0; ++items) {
    float sums[kFewColumns][4] = {};
    const int rate2 = items->rate2;
    int count = items->stages;
#pragma unroll 1
    while (count > 0) {
      const int run = loader.left > 0 && loader.left < count ? loader.left : count;
      count -= run;
      switch (rate2) {
#define EXL3_RATE(r)                                                                         \
  case r:                                                                                    \
    multiply_few<kBook, r>(stage, loader, ring, run, count, items[1], source, inputs, sums); \
    break;
        EXL3_RATE(2) EXL3_RATE(4) EXL3_RATE(6) EXL3_RATE(8) EXL3_RATE(10) EXL3_RATE(12) EXL3_RATE(14) EXL3_RATE(16)
        default:
          if constexpr (kBook == Codebook::kMul1) switch (rate2) {
              EXL3_RATE(3) EXL3_RATE(5) EXL3_RATE(7)
            }
#undef EXL3_RATE
      }
      loader.next_item();
    }
    // An accumulator holds column lane/4 (+8) of its tile, rows 2(lane%4) and the next: see MoeArena for the order.
    const int low = lane % 4 * 2, rows = items->rows;
    float* to = reinterpret_cast<float*>(stage.sums) + items->sums + low * stage.sum_pitch +
                warp * kFewColumns * kTile + lane / 4 * 2;
#pragma unroll
    for (int column = 0; column < kFewColumns; ++column, to += kTile) {
      const float(&sum)[4] = sums[column];
      if (low < rows) *reinterpret_cast<float2*>(to) = make_float2(sum[0], sum[2]);
      if (low + 1 < rows) *reinterpret_cast<float2*>(to + stage.sum_pitch) = make_float2(sum[1], sum[3]);
    }
  }
}

// Grid: any number of blocks; dynamic shared memory: few_shared_bytes of the largest rate in the table.
template <Codebook kBook>
__global__ void __launch_bounds__(32 * kFewWarps, kFewBlocksPerSm)
    moe_few_kernel(const __grid_constant__ MoeCall call, const __grid_constant__ MoeStage stage) {
  __shared__ __align__(16) MoeItem items[kFewListed + 1];  // and one that ends the list
  const SharedAddress begin = dynamic_shared() + threadIdx.x / 32 * kFewStages * stage.stage_bytes;
  // The routes are sorted two grids before down, and by the grid ahead of gate and up.
  if (stage.down) earlier_grids_have_ended();
  else wait_for_previous_grid();
  for (int first = 0;; first += kFewListed) {
    if (threadIdx.x < kFewListed)
      describe_item(call, stage, blockIdx.x + (first + static_cast<int>(threadIdx.x)) * gridDim.x, items[threadIdx.x]);
    else if (threadIdx.x == kFewListed)
      items[kFewListed].stages = 0;
    __syncthreads();
    const bool last = items[kFewListed - 1].stages == 0;
    multiply_list<kBook>(stage, items, begin);
    if (last) return;
    cp_async_wait<0>();
    __syncthreads();
  }
}

}  // namespace exl3
