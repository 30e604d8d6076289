// The fused product of rotated rows and trellis weights: decode into registers, multiply on the tensor cores, rotate back.
//
// Work is cut into units of 128 columns x 128 k, ordered column block by column block, and dealt to `splits` thread
// blocks in equal contiguous runs. The cut depends on k, n and `splits` alone and every accumulator adds its k16 steps
// in ascending order, so a row's bytes depend neither on the rows beside it nor on the shape of the kernel.
// A column block that several thread blocks share is finished by the one that arrives last: it adds all parts in
// ascending order of k, whoever wrote them, then applies H, svh and bias.
#pragma once

#include "rotate.cuh"

namespace exl3 {

// The shard that holds a column block.
__device__ __forceinline__ int shard_of(const LinearArgs& args, int block) {
  int shard = 0;
  while (block >= args.shard[shard].first_block + args.shard[shard].blocks) ++shard;
  return shard;
}

// Copies a run of stages, one after the other, from global to shared memory. Each thread keeps its own two addresses:
// warp w copies rows w, w + kWarps, ... of a stage's tiles, and all threads share the rows of x.
template <class S>
struct Loader {
  const LinearArgs& args;
  const unsigned char* rotated;    // this row tile's rotated input, first shard
  int64_t rotation_bytes, pitch;   // pitch: bytes from a row of tiles to the next
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
    pitch = static_cast<int64_t>(shard.blocks) * kBlockTiles * 16 * rate2;
    left_in_block = args.k / S::kDepth - stage;
    weights = shard.trellis + (stage * S::kTileRows + threadIdx.x / 32) * pitch +
              static_cast<int64_t>(block - shard.first_block) * kBlockTiles * 16 * rate2 + threadIdx.x % 32 * 16;
    x = rotated + index * rotation_bytes + static_cast<int64_t>(stage) * S::kXStageBytes + threadIdx.x * 16;
  }
  __device__ __forceinline__ void advance() {
    --remaining;
    weights += S::kTileRows * pitch;
    x += S::kXStageBytes;
    if (--left_in_block == 0 && remaining > 0) ++block, seek(0);
  }
  // chunks: 16-byte pieces in a row of tiles, kBlockTiles * rate2.
  __device__ __forceinline__ void copy_weights(unsigned char* stage, int chunks) const {
    const int lane = threadIdx.x % 32;
    unsigned char* to = stage + (threadIdx.x / 32 * chunks + lane) * 16;
#pragma unroll
    for (int row = 0; row < S::kTileRows; row += S::kWarps)
      for (int i = 0; i < chunks; i += 32)
        if (i + 32 <= chunks || i + lane < chunks)
          cp_async_16(to + (row * chunks + i) * 16, weights + row * pitch + i * 16);
  }
  __device__ __forceinline__ void copy_x(unsigned char* stage) const {
    constexpr int kPass = 16 * S::kThreads;
#pragma unroll
    for (int i = 0; i < S::kXStageBytes; i += kPass)
      if (i + kPass <= S::kXStageBytes || i + static_cast<int>(threadIdx.x) * 16 < S::kXStageBytes)
        cp_async_16(stage + i + threadIdx.x * 16, x + i);
  }
};

template <class S>
using Sums = float[S::kWarpTiles][S::kGroups][4];

// sums += one stage. weights: this warp's first tile; rows: this lane's 16 bytes of the stage's first step.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_stage(const unsigned char* weights, const unsigned char* rows,
                                               const LanePlace<kRate2>& place, Sums<S>& sums) {
  constexpr int kTileBytes = Rate<kRate2>::kTileBytes;
  // 128 rows fill the registers with sums: fewer steps in flight keep them from spilling.
#pragma unroll(S::kRows < 128 ? S::kSteps : 1)
  for (int step = 0; step < S::kSteps; ++step) {
    uint32_t a[2][S::kWarpTiles][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < S::kWarpTiles; ++i)
        decode_tile<kBook, kRate2>(weights + ((step * 2 + half) * kBlockTiles + i) * kTileBytes, place, a[half][i]);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const uint4 b = *reinterpret_cast<const uint4*>(rows + (group * S::kSteps + step) * kStepBytes);
#pragma unroll
      for (int i = 0; i < S::kWarpTiles; ++i) {
        mma_m16n8k16(sums[i][group], a[0][i], b.x, b.y);
        mma_m16n8k16(sums[i][group], a[1][i], b.z, b.w);
      }
    }
  }
}

__device__ __forceinline__ void store(void* y, int64_t at, DataType type, float value) {
  if (type == DataType::kHalf) static_cast<__half*>(y)[at] = __float2half_rn(value);
  else if (type == DataType::kBfloat16) static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16_rn(value);
  else static_cast<float*>(y)[at] = value;
}

__device__ __forceinline__ float load(const void* x, int64_t at, DataType type) {
  if (type == DataType::kHalf) return __half2float(static_cast<const __half*>(x)[at]);
  if (type == DataType::kBfloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[at]);
  return static_cast<const float*>(x)[at];
}

// Four columns a lane of one row to y, after the transform. column: within the shard.
__device__ __forceinline__ void store_row(const LinearArgs& args, const LinearShard& shard, int row, int column,
                                          const float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = column + i - shard.first;
    if (n < 0 || n >= shard.width) continue;
    float out = v[i] * kHadamardScale * __half2float(static_cast<const __half*>(shard.svh)[column + i]);
    if (args.bias) out += load(args.bias, shard.out_column + n, args.y_type);
    store(args.y, row * args.y_stride + shard.out_column + n, args.y_type, out);
  }
}

// y rows of one column block from its complete sums. slice: kSliceBytes of shared memory that nobody else uses.
template <class S>
__device__ __forceinline__ void finish_block(const LinearArgs& args, const LinearShard& shard, int block, int row0,
                                             float* slice, const Sums<S>& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < S::kRows; first += S::kSliceRows) {
    if (row0 + first >= args.m) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < S::kWarpTiles; ++i)
#pragma unroll
      for (int g = 0; g < S::kSliceRows / kGroupRows; ++g)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = (warp * S::kWarpTiles + i) * kTile + lane / 4 + e / 2 * 8;
          const int row = g * kGroupRows + lane % 4 * 2 + e % 2;
          slice[row * S::kSlicePitch + column] = sums[i][first / kGroupRows + g][e];
        }
    __syncthreads();
    for (int row = warp; row < S::kSliceRows && row0 + first + row < args.m; row += S::kWarps) {
      const float4 read = *reinterpret_cast<const float4*>(slice + row * S::kSlicePitch + lane * 4);
      float v[4] = {read.x, read.y, read.z, read.w};
      hadamard_128(v, lane);
      store_row(args, shard, row0 + first + row, (block - shard.first_block) * kBlockColumns + lane * 4, v);
    }
  }
}

// The thread block whose run holds a unit, of `splits` blocks over `units`: the largest b with b * units / splits <= unit.
__device__ __forceinline__ int owner_of(int unit, int units, int splits) {
  return static_cast<int>((static_cast<int64_t>(unit + 1) * splits - 1) / units);
}

// Hand in this block's part of a shared column block. True for the last to arrive, with the complete sums.
template <class S>
__device__ __forceinline__ bool join_parts(const LinearArgs& args, int block, int unit, int units, int depth_units,
                                           float* partials, unsigned* counter, unsigned* arrived, Sums<S>& sums) {
  const int first = owner_of(block * depth_units, units, args.splits);
  const int last = owner_of((block + 1) * depth_units - 1, units, args.splits);
  // A thread block has at most two parts: one that begins inside a column block (even slot), one that ends inside.
  const int slot = 2 * blockIdx.x + (unit % depth_units == 0);
  float4* mine = reinterpret_cast<float4*>(partials + static_cast<int64_t>(slot) * S::kPartialFloats) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < S::kWarpTiles; ++i)
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g)
      mine[(i * S::kGroups + g) * S::kThreads] =
          make_float4(sums[i][g][0], sums[i][g][1], sums[i][g][2], sums[i][g][3]);
  fence_device();
  __syncthreads();
  if (threadIdx.x == 0) *arrived = atomic_increment(counter);
  __syncthreads();
  if (*arrived != static_cast<unsigned>(last - first)) return false;
  fence_device();
#pragma unroll
  for (int i = 0; i < S::kWarpTiles; ++i)
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][g][e] = 0.0f;
#pragma unroll 4
  for (int b = first; b <= last; ++b) {
    const int start = static_cast<int>(static_cast<int64_t>(b) * units / args.splits);
    const int64_t from = 2 * b + (start <= block * depth_units);
    const float4* part = reinterpret_cast<const float4*>(partials + from * S::kPartialFloats) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < S::kWarpTiles; ++i)
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        const float4 v = load_from_l2(part + (i * S::kGroups + g) * S::kThreads);
        sums[i][g][0] += v.x, sums[i][g][1] += v.y, sums[i][g][2] += v.z, sums[i][g][3] += v.w;
      }
  }
  return true;
}

// The ring of stages in shared memory and its place in the run.
template <class S>
struct Ring {
  unsigned char* base;
  int stage_bytes, x_offset, slot;
  __device__ __forceinline__ unsigned char* at(int s) const { return base + s * stage_bytes; }
};

// Multiply `count` stages of one column block while loading the stages ahead.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_run(Loader<S>& loader, Ring<S>& ring, int count, Sums<S>& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const LanePlace<kRate2> place(lane);
  for (; count > 0; --count) {
    cp_async_wait<S::kStages - 2>();
    __syncthreads();
    const int ahead = ring.slot == 0 ? S::kStages - 1 : ring.slot - 1;
    if (loader.remaining > 0) {
      // The run ahead has this rate except across a border between shards: let the compiler count the copies.
      if (loader.rate2 == kRate2) loader.copy_weights(ring.at(ahead), kBlockTiles * kRate2);
      else loader.copy_weights(ring.at(ahead), kBlockTiles * loader.rate2);
      loader.copy_x(ring.at(ahead) + ring.x_offset);
      loader.advance();
    }
    cp_async_commit();
    const unsigned char* stage = ring.at(ring.slot);
    multiply_stage<kBook, kRate2, S>(stage + warp * S::kWarpTiles * Rate<kRate2>::kTileBytes,
                                     stage + ring.x_offset + lane * 16, place, sums);
    ring.slot = ring.slot + 1 == S::kStages ? 0 : ring.slot + 1;
  }
}

// Grid: (splits, row tiles). Dynamic shared memory: S::shared_bytes of the largest rate among the shards.
template <Codebook kBook, class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm) linear_kernel(const __grid_constant__ LinearArgs args,
                                                                             int x_offset, int counter_bytes) {
  unsigned char* shared = dynamic_smem();
  float* slice = reinterpret_cast<float*>(shared);
  Ring<S> ring{shared + S::kSliceBytes, x_offset + S::kXStageBytes, x_offset, 0};
  __shared__ unsigned arrived;

  const LinearShard& last_shard = args.shard[args.shards - 1];
  const int blocks = last_shard.first_block + last_shard.blocks, depth_units = args.k / kUnitDepth;
  const int units = blocks * depth_units;
  int unit = static_cast<int>(static_cast<int64_t>(blockIdx.x) * units / args.splits);
  const int end = static_cast<int>(static_cast<int64_t>(blockIdx.x + 1) * units / args.splits);
  const int row0 = blockIdx.y * S::kRows;
  const int64_t tile_bytes = static_cast<int64_t>(S::kRows) * args.k * 2, rotation_bytes = tile_bytes * gridDim.y;
  const unsigned char* rotated = args.scratch + counter_bytes + blockIdx.y * tile_bytes;
  float* partials = reinterpret_cast<float*>(args.scratch + counter_bytes + args.shards * rotation_bytes) +
                    static_cast<int64_t>(blockIdx.y) * 2 * args.splits * S::kPartialFloats;
  unsigned* counters = reinterpret_cast<unsigned*>(args.scratch) + blockIdx.y * blocks;

  // Weights do not depend on the kernel before this one: fetch the first stages before waiting for it.
  Loader<S> loader(args, rotated, rotation_bytes, unit / depth_units, unit % depth_units * S::kUnitStages,
                   (end - unit) * S::kUnitStages);
  Loader<S> x_loader = loader;
  allow_next_grid();
  for (int s = 0; s < S::kStages - 1 && loader.remaining > 0; ++s, loader.advance())
    loader.copy_weights(ring.at(s), kBlockTiles * loader.rate2);
  wait_for_previous_grid();
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (x_loader.remaining > 0) {
      x_loader.copy_x(ring.at(s) + x_offset);
      x_loader.advance();
    }
    cp_async_commit();
  }

  while (unit < end) {
    const int block = unit / depth_units;
    const LinearShard& shard = args.shard[shard_of(args, block)];
    const int next = min(end, (block + 1) * depth_units), count = (next - unit) * S::kUnitStages;
    Sums<S> sums = {};
    switch (shard.rate2) {
#define EXL3_RATE(r)                                                                                \
  case r:                                                                                           \
    multiply_run<kBook, r, S>(loader, ring, count, sums);                                           \
    break;
      EXL3_RATE(2) EXL3_RATE(4) EXL3_RATE(6) EXL3_RATE(8) EXL3_RATE(10) EXL3_RATE(12) EXL3_RATE(14) EXL3_RATE(16)
      default:
        if constexpr (kBook == Codebook::kMul1) switch (shard.rate2) { EXL3_RATE(3) EXL3_RATE(5) EXL3_RATE(7) }
#undef EXL3_RATE
    }
    const bool whole = next - unit == depth_units;
    if (whole || join_parts<S>(args, block, unit, units, depth_units, partials, counters + block, &arrived, sums))
      finish_block<S>(args, shard, block, row0, slice, sums);
    unit = next;
  }
}

}  // namespace exl3
