// The grouped product for few routes, where decoding binds: warps that never wait for one another.
//
// A warp decodes its own column of tiles from its own ring of stages in shared memory and reads x straight from the
// cache, in the order of its fragments; barriers are left only between lists of items. With mcg and 3inst a decoded
// word's two fp16 halves, whose sum is the weight, are multiplied apart: x then holds every value twice. It saves a
// fifth of the instructions; the sum is not rounded to fp16.
#pragma once

#include "moe_items.cuh"
#include "trellis.cuh"

namespace exl3 {

constexpr int kFewStages = 4, kFewWarps = kBlockTiles, kFewListed = 64;
constexpr int kFewTiles = kUnitDepth / kTile;  // of a stage
constexpr int kFewCopies = 4;                  // of 16 bytes a lane and stage, at 8 bits

__host__ __device__ constexpr int few_stage_bytes(int rate2) { return kFewTiles * 16 * rate2; }
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
  constexpr uint32_t kMultiplier = kBook == Codebook::kMcg ? 0xCBAC1FEDu : 89226354u;
  constexpr uint32_t kIncrement = kBook == Codebook::kMcg ? 0u : 64248484u;
  uint32_t s[8];
  load_states<kRate2>(load, place, s);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    a[j / 2 % 2][j % 2 * 2 + j / 4] = and_xor<0x8fff8fffu, 0x3b603b60u>(s[j] * kMultiplier + kIncrement);
}

// Copies stages of a warp's items from global to shared memory.
struct FewLoader {
  static constexpr uint32_t kNothing = ~0u;
  const MoeItem* items;
  const unsigned char* weights;
  uint32_t from[kFewCopies];  // of this lane's copies
  int number, left, pitch, rate2;

  __device__ __forceinline__ explicit FewLoader(const MoeItem* items) : items(items), number(0) { seek(); }
  __device__ __forceinline__ void seek() {
    left = items[number].stages;
    if (left == 0) return;
    rate2 = items[number].rate2, pitch = items[number].pitch;
    weights = items[number].weights + threadIdx.x / 32 * 16 * rate2;
#pragma unroll
    for (int i = 0; i < kFewCopies; ++i) {
      const int piece = threadIdx.x % 32 + 32 * i, tile = piece / rate2;
      from[i] = tile < kFewTiles ? tile * pitch + (piece - tile * rate2) * 16 : kNothing;
    }
  }
  // kRate2: the item's rate, or 0 where it is not known.
  template <int kRate2>
  __device__ __forceinline__ void copy(SharedAddress to) const {
    constexpr int kPieces = kFewTiles * kRate2;
    to += threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < (kRate2 ? (kPieces + 31) / 32 : kFewCopies); ++i)
      if ((kRate2 && 32 * (i + 1) <= kPieces) || from[i] != kNothing) cp_async_16(to + 512 * i, weights + from[i]);
  }
  __device__ __forceinline__ void advance() {
    weights += kFewTiles * pitch;
    --left;
  }
  __device__ __forceinline__ void next_item() {
    if (left > 0 || items[number].stages == 0) return;
    ++number;
    seek();
  }
};

// Some tiles of a lane's inputs: row lane/4 of the block, of every tile the fragments of lane%4.
template <bool kApart>
struct FewInputs {
  static constexpr int kTileBytes = kTile * 2 * (kApart ? 2 : 1), kTiles = kFewTiles / 2;
  uint4 x[kTiles];
  __device__ __forceinline__ void load(const unsigned char* from) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if constexpr (kApart) {
        x[i] = *reinterpret_cast<const uint4*>(from + i * kTileBytes);
      } else {
        const uint2 read = *reinterpret_cast<const uint2*>(from + i * kTileBytes);
        x[i].x = read.x, x[i].y = read.y;
      }
    }
  }
};

// sums += half a stage; weights: its first tile.
template <Codebook kBook, int kRate2>
__device__ __forceinline__ void multiply_half(SharedAddress weights, const LanePlace<kRate2>& place,
                                              const FewInputs<kHalvesApart<kBook>>& inputs, float (&sums)[2][4]) {
#pragma unroll
  for (int i = 0; i < kFewTiles / 2; ++i) {
    const SharedTile from{weights + i * Rate<kRate2>::kTileBytes};
    const uint4 x = inputs.x[i];
    if constexpr (kHalvesApart<kBook>) {
      uint32_t a[2][4];
      decode_tile_apart<kBook, kRate2>(from, place, a);
      mma_m16n8k16(sums[0], a[0], x.x, x.y);
      mma_m16n8k16(sums[1], a[1], x.z, x.w);
    } else {
      uint32_t a[4];
      decode_tile<kBook, kRate2>(from, place, a);
      mma_m16n8k16(sums[i % 2], a, x.x, x.y);
    }
  }
}

// A warp's ring of stages.
struct FewRing {
  SharedAddress begin, read;  // the stage that is multiplied next
  uint32_t stage_bytes;
  __device__ __forceinline__ SharedAddress last() const { return begin + (kFewStages - 1) * stage_bytes; }
};

// Where this lane's inputs of an item begin. A row that is not there takes another's: nobody stores its sums.
template <Codebook kBook>
__device__ __forceinline__ const unsigned char* few_inputs(const MoeStage& stage, const MoeItem& item) {
  const int lane = threadIdx.x % 32;
  return stage.x + item.sources[min(lane / 4, item.rows - 1)] * stage.x_pitch + item.x +
         lane % 4 * (kHalvesApart<kBook> ? 16 : 8);
}

// Multiply `count` stages of one item while loading the stages ahead. x: the item's inputs from the next stage on;
// first: those of half a stage; after: stages of the item that follow; next: the item that does.
template <Codebook kBook, int kRate2>
__device__ __forceinline__ void multiply_few(const MoeStage& stage, FewLoader& loader, FewRing& ring, int count,
                                             int after, const MoeItem& next, const unsigned char*& x,
                                             FewInputs<kHalvesApart<kBook>>& first, float (&sums)[2][4]) {
  using Inputs = FewInputs<kHalvesApart<kBook>>;
  constexpr int kHalfBytes = Inputs::kTiles * Inputs::kTileBytes;
  const LanePlace<kRate2> place(threadIdx.x % 32);
  for (; count > 0; --count) {
    cp_async_wait<kFewStages - 2>();
    __syncwarp();
    if (loader.left > 0) {
      const SharedAddress fill = ring.read == ring.begin ? ring.last() : ring.read - ring.stage_bytes;
      if (loader.rate2 == kRate2) loader.copy<kRate2>(fill);
      else loader.copy<0>(fill);
      loader.advance();
    }
    cp_async_commit();
    Inputs second;
    second.load(x + kHalfBytes);
    multiply_half<kBook, kRate2>(ring.read, place, first, sums);
    x += 2 * kHalfBytes;
    if (count == 1 && after == 0 && next.stages > 0) x = few_inputs<kBook>(stage, next);
    if (count > 1 || after > 0 || next.stages > 0) first.load(x);
    multiply_half<kBook, kRate2>(ring.read + kFewTiles / 2 * Rate<kRate2>::kTileBytes, place, second, sums);
    ring.read = ring.read == ring.last() ? ring.begin : ring.read + ring.stage_bytes;
  }
}

// All items of a list, by one warp: its column of tiles of each.
template <Codebook kBook>
__device__ __forceinline__ void multiply_list(const MoeStage& stage, const MoeItem* items, SharedAddress begin) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  FewLoader loader(items);
  for (int s = 0; s < kFewStages - 1; ++s) {
    if (loader.left > 0) {
      loader.copy<0>(begin + s * stage.stage_bytes);
      loader.advance();
      loader.next_item();
    }
    cp_async_commit();
  }
  FewRing ring{begin, begin, stage.stage_bytes};
  const unsigned char* x = few_inputs<kBook>(stage, items[0]);
  FewInputs<kHalvesApart<kBook>> inputs;
  inputs.load(x);
  for (int number = 0; items[number].stages > 0; ++number) {
    const MoeItem& item = items[number];
    float sums[2][4] = {};
    const int rate2 = item.rate2;
    int count = item.stages;
    while (count > 0) {
      const int run = loader.left > 0 && loader.left < count ? loader.left : count;
      count -= run;
      switch (rate2) {
#define EXL3_RATE(r)                                                                             \
  case r:                                                                                        \
    multiply_few<kBook, r>(stage, loader, ring, run, count, items[number + 1], x, inputs, sums); \
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
    const int low = lane % 4 * 2;
    float* to = reinterpret_cast<float*>(stage.sums) + item.sums + low * stage.sum_pitch + warp * kTile + lane / 4 * 2;
    if (low < item.rows) *reinterpret_cast<float2*>(to) = make_float2(sums[0][0] + sums[1][0], sums[0][2] + sums[1][2]);
    if (low + 1 < item.rows)
      *reinterpret_cast<float2*>(to + stage.sum_pitch) = make_float2(sums[0][1] + sums[1][1], sums[0][3] + sums[1][3]);
  }
}

// Grid: any number of blocks; dynamic shared memory: few_shared_bytes of the largest rate in the table.
template <Codebook kBook>
__global__ void __launch_bounds__(32 * kFewWarps, 2)
    moe_few_kernel(const __grid_constant__ MoeCall call, const __grid_constant__ MoeStage stage) {
  __shared__ __align__(16) MoeItem items[kFewListed + 1];  // and one that ends the list
  const SharedAddress begin = dynamic_shared() + threadIdx.x / 32 * kFewStages * stage.stage_bytes;
  wait_for_previous_grid();
  allow_next_grid();
  for (int first = 0;; first += kFewListed) {
    if (threadIdx.x < kFewListed)
      describe_item(call, stage, blockIdx.x + (first + static_cast<int>(threadIdx.x)) * gridDim.x, items[threadIdx.x]);
    else if (threadIdx.x == kFewListed)
      items[kFewListed].stages = 0;
    __syncthreads();
    if (items[0].stages == 0) return;
    const bool last = items[kFewListed - 1].stages == 0;
    multiply_list<kBook>(stage, items, begin);
    if (last) return;
    cp_async_wait<0>();
    __syncthreads();
  }
}

}  // namespace exl3
