// The fused product of rotated rows and trellis weights: decode into registers, multiply on the tensor cores.
//
// Work is cut into units of 128 columns x 128 k, ordered column block by column block, and dealt to `splits` thread
// blocks in contiguous runs whose lengths differ by one at most. The cut depends on k, n and `splits` alone, and every
// accumulator adds its k16 steps in ascending order, so a row's bytes depend neither on the rows beside it nor on the
// shape of the kernel. Each thread block writes the sums of its part of a column block; finish.cuh adds the parts.
#pragma once

#include "mma.cuh"
#include "warpgroup.cuh"

namespace exl3 {

// The shard that holds a column block.
__device__ __forceinline__ int shard_of(const LinearArgs& args, int block) {
  int shard = 0;
  while (block >= args.shard[shard].first_block + args.shard[shard].blocks) ++shard;
  return shard;
}

// Copies a run of stages from global to shared memory, a slot of the ring at a time. Each thread keeps its own two
// addresses: a warp copies one row of a stage's tiles, and all threads share the rows of x.
template <class S>
struct Loader {
  static_assert(S::kTileRows == S::kWarps, "one row of tiles for each warp");
  const LinearArgs& args;
  const unsigned char* rotated;  // this row tile's rotated input, first shard
  int64_t rotation_bytes;
  uint32_t pitch;  // bytes of weights from a stage to the next
  const unsigned char* weights;
  const unsigned char* x;
  int block, left_in_block, remaining, rate2;  // stages left in the column block and in the run

  __device__ __forceinline__ Loader(const LinearArgs& args, const unsigned char* rotated, int64_t rotation_bytes,
                                    int block, int stage, int count)
      : args(args), rotated(rotated), rotation_bytes(rotation_bytes), block(block), remaining(count) {
    seek(stage);
  }
  __device__ __forceinline__ void seek(int stage) {
    const int index = shard_of(args, block);
    const LinearShard& shard = args.shard[index];
    rate2 = shard.rate2;
    const uint32_t row = shard.blocks * kBlockTiles * 16 * rate2;
    pitch = S::kTileRows * row;
    left_in_block = args.k / S::kDepth - stage;
    weights = shard.trellis + static_cast<uint64_t>(pitch) * stage + threadIdx.x / 32 * row +
              (block - shard.first_block) * kBlockTiles * 16 * rate2 + threadIdx.x % 32 * 16;
    x = rotated + index * rotation_bytes + static_cast<int64_t>(stage) * S::kXStageBytes + threadIdx.x * 16;
  }
  // Stages of the next slot: none of another column block.
  __device__ __forceinline__ int together() const { return min(min(S::kTogether, left_in_block), remaining); }
  __device__ __forceinline__ void advance(int stages) {
    remaining -= stages;
    left_in_block -= stages;
    weights += static_cast<uint64_t>(pitch) * stages;
    x += stages * S::kXStageBytes;
    if (left_in_block == 0) {
      ++block;
      if (remaining > 0) seek(0);
    }
  }
  // This thread's place in the weights of a stage.
  __device__ __forceinline__ static uint32_t place(int rate2) {
    return (threadIdx.x / 32 * kBlockTiles * rate2 + threadIdx.x % 32) * 16;
  }
  // The weights of a slot of a rate that the compiler knows. to: this thread's place.
  template <int kRate2>
  __device__ __forceinline__ void copy_weights(SharedAddress to, uint32_t stage_bytes, int stages) const {
    constexpr int kPieces = kBlockTiles * kRate2;  // of 16 bytes in a row of tiles
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int stage = 0; stage < S::kTogether; ++stage)
#pragma unroll
      for (int i = 0; i < kPieces; i += 32)
        cp_async_16_if(stage < stages && (i + 32 <= kPieces || i + lane < kPieces), to + stage * stage_bytes + i * 16,
                       weights + stage * pitch + i * 16);
  }
  __device__ __forceinline__ void copy_weights(SharedAddress slot, uint32_t stage_bytes, int stages) const {
    const int pieces = kBlockTiles * rate2, lane = threadIdx.x % 32;
    const SharedAddress to = slot + place(rate2);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage)
#pragma unroll 1
      for (int i = 0; i + lane < pieces; i += 32)
        cp_async_16(to + stage * stage_bytes + i * 16, weights + stage * pitch + i * 16);
  }
  __device__ __forceinline__ void copy_x(SharedAddress slot, uint32_t stage_bytes, int stages) const {
    constexpr int kPass = 16 * S::kThreads;
    const int mine = threadIdx.x * 16;
#pragma unroll
    for (int stage = 0; stage < S::kTogether; ++stage)
#pragma unroll
      for (int i = 0; i < S::kXStageBytes; i += kPass)
        cp_async_16_if(stage < stages && (i + kPass <= S::kXStageBytes || i + mine < S::kXStageBytes),
                       slot + stage * stage_bytes + i + mine, x + stage * S::kXStageBytes + i);
  }
};

// Whether this compilation multiplies a shape by warpgroups: from 32 rows on it saves reading x into registers.
template <class S>
constexpr bool kWarpgroup = EXL3_WARPGROUP && S::kRows >= 32;

// Blocks an SM the compiler leaves registers for.
template <class S>
constexpr int kBlocksPerSm = S::kRows < 64 || kWarpgroup<S> ? 2 : 1;

template <class S>
using Sums = float[S::kGroups][4];

// The two A fragments of one step of k: this warp's tile of two rows of tiles. Few rows leave the tensor cores time to add.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void decode_step(SharedAddress weights, const LanePlace<kRate2>& place, uint32_t (&a)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const SharedTile tile{weights + half * kBlockTiles * Rate<kRate2>::kTileBytes};
    if constexpr (S::kRows < 32) decode_tile_by_tensor_cores<kBook, kRate2>(tile, place, a[half]);
    else decode_tile<kBook, kRate2>(tile, place, a[half]);
  }
}

// sums += one stage. weights: this warp's first tile; x: the stage's rows of x.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_stage(SharedAddress weights, SharedAddress x, const LanePlace<kRate2>& place,
                                               Sums<S>& sums) {
  constexpr int kEightDeep = S::kRows * 16;  // bytes of x from one group of eight k to the next
  constexpr int kRowBytes = kBlockTiles * Rate<kRate2>::kTileBytes;
  if constexpr (kWarpgroup<S>) {
#if EXL3_WARPGROUP
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t a[2][4];
      decode_step<kBook, kRate2, S>(weights + 2 * step * kRowBytes, place, a);
      warpgroup_arrive();
      warpgroup_mma(sums, a[0], matrix_descriptor(x + 4 * step * kEightDeep, kEightDeep));
      warpgroup_mma(sums, a[1], matrix_descriptor(x + (4 * step + 2) * kEightDeep, kEightDeep));
      warpgroup_commit();
      warpgroup_wait<0>();  // the scheduler's other warps decode meanwhile
    }
#endif
  } else {
    const int lane = threadIdx.x % 32;
    const SharedAddress row = x + lane / 8 * kEightDeep + lane % 8 * 16;
    // Many sums leave no registers for several steps at once.
#pragma unroll(S::kRows < 64 ? S::kSteps : 1)
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t a[2][4];
      decode_step<kBook, kRate2, S>(weights + 2 * step * kRowBytes, place, a);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {
        const uint4 b = load_matrices(row + 4 * step * kEightDeep + group * kGroupRows * 16);
        mma_m16n8k16(sums[group], a[0], b.x, b.y);
        mma_m16n8k16(sums[group], a[1], b.z, b.w);
      }
    }
  }
}

// The ring of slots in shared memory: where the next one is read, and where the one to be loaded goes. A slot has room for
// kTogether stages, each with its weights before its x; at the end of a column block's run some may be left empty.
struct Ring {
  SharedAddress begin, end, read, fill;
  uint32_t stage_bytes, slot_bytes, x_offset;
  __device__ __forceinline__ SharedAddress after(SharedAddress slot) const {
    return slot + slot_bytes == end ? begin : slot + slot_bytes;
  }
};

// Multiply `count` stages of one column block while loading the slots ahead.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_run(Loader<S>& loader, Ring& ring, int count, Sums<S>& sums) {
  const int warp = threadIdx.x / 32;
  const LanePlace<kRate2> place(threadIdx.x % 32);
  uint32_t mine = Loader<S>::place(kRate2);
  if constexpr (S::kRows < 64) keep_in_register(mine);  // many sums leave no register for it
#pragma unroll 1
  while (count > 0) {
    cp_async_wait<S::kSlots - 2>();
    if constexpr (kWarpgroup<S>) publish_shared();
    __syncthreads();
    // The run ahead has this rate except across a border between shards: let the compiler count the copies.
    const int ahead = loader.together();
    if (loader.rate2 == kRate2) loader.template copy_weights<kRate2>(ring.fill + mine, ring.stage_bytes, ahead);
    else loader.copy_weights(ring.fill, ring.stage_bytes, ahead);
    loader.copy_x(ring.fill + ring.x_offset, ring.stage_bytes, ahead);
    loader.advance(ahead);
    cp_async_commit();
    SharedAddress from = ring.read;
    const int now = min(S::kTogether, count);
    count -= now;
#pragma unroll 1
    for (int stage = 0; stage < now; ++stage, from += ring.stage_bytes)
      multiply_stage<kBook, kRate2, S>(from + warp * Rate<kRate2>::kTileBytes, from + ring.x_offset, place, sums);
    ring.fill = ring.read;
    ring.read = ring.after(ring.read);
  }
}

// Grid: (splits, row tiles). Dynamic shared memory: S::shared_bytes of the largest rate among the shards.
template <Codebook kBook, class S>
__global__ void __launch_bounds__(S::kThreads, kBlocksPerSm<S>) linear_kernel(const __grid_constant__ LinearArgs args,
                                                                             const __grid_constant__ Cut cut,
                                                                             const __grid_constant__ Scratch scratch,
                                                                             int x_offset) {
  const uint32_t stage_bytes = x_offset + S::kXStageBytes, slot_bytes = S::kTogether * stage_bytes;
  const SharedAddress shared = dynamic_shared();
  Ring ring{shared,     shared + S::kSlots * slot_bytes, shared, shared + (S::kSlots - 1) * slot_bytes, stage_bytes,
            slot_bytes, static_cast<uint32_t>(x_offset)};
  int unit = cut.start(blockIdx.x);
  const int end = cut.start(blockIdx.x + 1);
  const unsigned char* rotated = args.scratch + blockIdx.y * scratch.row_tile_bytes;
  float4* partials = reinterpret_cast<float4*>(args.scratch + scratch.partials + blockIdx.y * scratch.partial_bytes);

  // Weights do not depend on the kernel before this one: fetch the first stages before waiting for it.
  int block = unit / cut.depth;
  Loader<S> loader(args, rotated, scratch.rotation_bytes, block, (unit - block * cut.depth) * S::kUnitStages,
                   (end - unit) * S::kUnitStages);
  Loader<S> x_loader = loader;
  allow_next_grid();
  for (int slot = 0; slot < S::kSlots - 1; ++slot) {
    const int ahead = loader.together();
    loader.copy_weights(shared + slot * slot_bytes, stage_bytes, ahead);
    loader.advance(ahead);
  }
  wait_for_previous_grid();
  for (int slot = 0; slot < S::kSlots - 1; ++slot) {
    const int ahead = x_loader.together();
    x_loader.copy_x(shared + slot * slot_bytes + x_offset, stage_bytes, ahead);
    x_loader.advance(ahead);
    cp_async_commit();
  }

  for (; unit < end; ++block) {
    const int next = min(end, (block + 1) * cut.depth), count = (next - unit) * S::kUnitStages;
    Sums<S> sums = {};
    switch (args.shard[shard_of(args, block)].rate2) {
#define EXL3_RATE(r)                                       \
  case r:                                                  \
    multiply_run<kBook, r, S>(loader, ring, count, sums);  \
    break;
      EXL3_RATE(2) EXL3_RATE(4) EXL3_RATE(6) EXL3_RATE(8) EXL3_RATE(10) EXL3_RATE(12) EXL3_RATE(14) EXL3_RATE(16)
      default:
        if constexpr (kBook == Codebook::kMul1) switch (args.shard[shard_of(args, block)].rate2) {
            EXL3_RATE(3) EXL3_RATE(5) EXL3_RATE(7)
          }
#undef EXL3_RATE
    }
    // Parts of a column block lie side by side, in ascending order of k: see Cut.
    float4* part = partials + static_cast<int64_t>(blockIdx.x + block) * (S::kRows * kBlockColumns / 4);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const float(&v)[4] = sums[group];
      part[(group * kBlockTiles + warp) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
    unit = next;
  }
}

}  // namespace exl3
