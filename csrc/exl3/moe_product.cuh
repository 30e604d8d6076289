// The grouped product of the experts: every block of routes with every column block of its expert's matrix.
//
// A persistent grid goes through a list of items (block, slice, matrix, column block, part of k) that follows from the
// routing on the device; each thread block loads the first stages of its next item while it multiplies the last ones of
// this. Within an item k ascends, and how k is cut depends on the plan alone, so a route's sums do not depend on the
// routes beside it, nor on the row tile.
#pragma once

#include "moe_layout.cuh"
#include "warpgroup.cuh"

namespace exl3 {

// kRows routes of a block. kTwice: x holds every value twice, and a decoded word's two fp16 halves, whose sum is the
// weight, are multiplied apart. It saves a fifth of the instructions where decoding binds; the sum is then not rounded.
template <int kRows_, int kStages_, bool kTwice_, class Sum_>
struct MoeShape {
  static constexpr int kRows = kRows_, kStages = kStages_, kDepth = kUnitDepth;
  static constexpr bool kTwice = kTwice_;
  using Sum = Sum_;  // as it is stored
  static constexpr int kGroups = kRows / kGroupRows;
  static constexpr int kWarps = kBlockTiles, kThreads = 32 * kWarps;
  static constexpr int kTileRows = kDepth / kTile;
  static constexpr int kSwizzled = 128;  // bytes of a row of x that lie together, in 16-byte chunks swapped by row % 8
  static constexpr int kSegments = kDepth * 2 * (kTwice ? 2 : 1) / kSwizzled;  // of a stage
  static constexpr int kSegmentBytes = kRows * kSwizzled;
  static constexpr int kXStageBytes = kSegments * kSegmentBytes;
  // How threads share the copy of x: eight a row's segment.
  static constexpr int kRowsAtOnce = kRows < kThreads / 8 ? kRows : kThreads / 8;
  static constexpr int kSegmentsAtOnce =
      kThreads / 8 / kRowsAtOnce < kSegments ? kThreads / 8 / kRowsAtOnce : kSegments;
  static constexpr int kRowLoops = kRows / kRowsAtOnce;
  static constexpr bool kRowsInShared = kRowLoops > 2;  // registers are scarce
  static constexpr bool kWarpgroup = EXL3_WARPGROUP && kRows >= 32;
  static constexpr int kBlocksPerSm = kRows < 64 || kWarpgroup ? 2 : 1;

  static_assert(kSegments % kSegmentsAtOnce == 0 && kRows % kRowsAtOnce == 0, "sizes nest");
  __host__ __device__ static constexpr int stage_bytes(int rate2) { return kXStageBytes + kTileRows * kBlockTiles * 16 * rate2; }
  // The tensor cores want x aligned to 1024 bytes, and dynamic shared memory begins anywhere.
  __host__ __device__ static constexpr int shared_bytes(int max_rate2) { return kStages * stage_bytes(max_rate2) + 1024; }
};

// One launch: gate and up of a window, or down of a range of columns.
struct MoeStage {
  bool down;
  int first_window, windows;  // whose blocks take part
  int matrices;               // gate and up, or down
  int columns, first_column;  // column blocks of a matrix
  int parts, depth;           // of k; k / 128
  int64_t x_pitch;            // bytes from a source row to the next
  int64_t x_matrix;           // bytes from a matrix's input to the next within it
  const unsigned char* x;
  unsigned char* sums;
  int64_t part_rows;          // rows of sums from a part to the next
  float scale;                // of sums
  uint32_t stage_bytes;       // of shared memory, for the largest rate
};

// One item of the list.
struct MoeItem {
  int block, slice, matrix, column, part;
  bool exists;
  __device__ __forceinline__ MoeItem(const MoeArgs& args, const MoeArena& arena, const MoeStage& stage, uint32_t index) {
    const int* first_of_window = reinterpret_cast<const int*>(args.arena + arena.header) + 1 + stage.first_window;
    int item = static_cast<int>(index);
    part = item % stage.parts, item /= stage.parts;
    column = item % stage.columns, item /= stage.columns;
    matrix = item % stage.matrices, item /= stage.matrices;
    slice = item % args.slices, item /= args.slices;
    block = first_of_window[0] + item;
    exists = block < first_of_window[stage.windows];
  }
  __device__ __forceinline__ const MoeBlock& of(const MoeArgs& args, const MoeArena& arena) const {
    return reinterpret_cast<const MoeBlock*>(args.arena + arena.blocks)[block];
  }
  __device__ __forceinline__ int64_t entry(const MoeArgs& args, const MoeArena& arena, const MoeStage& stage) const {
    return of(args, arena).weights[stage.down ? kMatrices : matrix];
  }
};

__device__ __forceinline__ int part_start(const MoeStage& stage, int part) { return stage.depth * part / stage.parts; }

// Copies stages of this thread block's items, one after the other, from global to shared memory.
template <class S>
struct MoeLoader {
  static constexpr uint32_t kNoRow = ~0u;
  const MoeArgs& args;
  const MoeStage& stage;
  const unsigned char* weights;
  uint32_t x;                   // bytes from the start of a source row
  int pitch;                    // bytes from a row of tiles to the next
  uint32_t* shared_rows;        // [S::kRows] of the block, each slot a warp's own
  uint32_t rows[S::kRowsInShared ? 1 : S::kRowLoops];
  int item, left, rate2;        // left: stages of the item; 0 where there is no other

  __device__ __forceinline__ MoeLoader(const MoeArgs& args, const MoeStage& stage, uint32_t* shared_rows)
      : args(args), stage(stage), shared_rows(shared_rows), item(blockIdx.x) {
    seek();
  }
  // Where a source row of this thread begins, in units of 16 bytes.
  __device__ __forceinline__ uint32_t& row_of(int loop) {
    if constexpr (S::kRowsInShared) return shared_rows[threadIdx.x / 8 + loop * S::kRowsAtOnce];
    else return rows[loop];
  }
  __device__ __forceinline__ void seek() {
    left = 0;
    const MoeArena arena(args);
    const MoeItem at(args, arena, stage, item);
    if (!at.exists) return;
    const MoeBlock& block = at.of(args, arena);
    const int64_t entry = at.entry(args, arena, stage);
    const int first = part_start(stage, at.part);
    left = part_start(stage, at.part + 1) - first;
    rate2 = static_cast<int>(entry & 31);
    pitch = (stage.down ? args.k : args.width) * rate2;
    weights = args.slice[at.slice].trellis[stage.down] + (entry >> 5) +
              static_cast<int64_t>(first * S::kTileRows + threadIdx.x / 32) * pitch +
              static_cast<int64_t>(stage.first_column + at.column) * kBlockTiles * 16 * rate2 + threadIdx.x % 32 * 16;
    const int segment = threadIdx.x / 8 / S::kRowsAtOnce;
    x = static_cast<uint32_t>((at.slice * stage.matrices + at.matrix) * stage.x_matrix +
                              (first * S::kSegments + segment) * S::kSwizzled + threadIdx.x % 8 * 16);
    const Route* sorted = reinterpret_cast<const Route*>(args.arena + arena.sorted) + block.start;
    const bool by_row = MoeArena::by_row(args), by_route = args.decode;
    if constexpr (S::kRowsInShared) __syncwarp();  // the warp has read its rows of the item before
#pragma unroll
    for (int i = 0; i < S::kRowLoops; ++i) {
      const int row = threadIdx.x / 8 % S::kRowsAtOnce + i * S::kRowsAtOnce;
      int source = block.start + row;
      const bool valid = row < block.count && segment < S::kSegments;
      if (valid && !stage.down) {
        if (by_row) source = sorted[row].route / args.top_k;
        else if (by_route) source = sorted[row].route;
        else source -= stage.first_window * args.window;
      }
      row_of(i) = valid ? static_cast<uint32_t>(source * (stage.x_pitch / 16)) : kNoRow;
    }
  }
  __device__ __forceinline__ void advance() {
    weights += S::kTileRows * pitch;
    x += S::kSegments * S::kSwizzled;
    --left;
  }
  // After the last stage of an item. Outside the loops of a rate, which would each have a copy of it.
  __device__ __forceinline__ void next_item() {
    if (left > 0) return;
    item += gridDim.x;
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
    for (int i = 0; i < kChunks; i += 32)
      if (i + 32 <= kChunks || i + lane < kChunks) cp_async_16(to + i * 16, weights + i * 16);
  }
  __device__ __forceinline__ void copy_x(SharedAddress to) {
    const int chunk = threadIdx.x % 8, row = threadIdx.x / 8 % S::kRowsAtOnce, segment = threadIdx.x / 8 / S::kRowsAtOnce;
    to += segment * S::kSegmentBytes + row * S::kSwizzled + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < S::kRowLoops; ++i) {
      const uint32_t at = row_of(i);
      if (at == kNoRow) continue;  // what lies there spoils sums that nobody stores
      const unsigned char* from = stage.x + (static_cast<uint64_t>(at) * 16 + x);
#pragma unroll
      for (int s = 0; s < S::kSegments; s += S::kSegmentsAtOnce)
        cp_async_16(to + s * S::kSegmentBytes + i * S::kRowsAtOnce * S::kSwizzled, from + s * S::kSwizzled);
    }
  }
};

// Two A fragments of one tile: of each state the masked word as it is, two fp16 whose sum is the weight. In order of k
// the first fragment holds inputs 0, 2, 4, 6, then 1, 3, 5, 7, the second the same from 8 on, every one twice.
template <Codebook kBook, int kRate2, class Load>
__device__ __forceinline__ void decode_tile_twice(const Load& load, const LanePlace<kRate2>& place,
                                                  uint32_t (&a)[2][4]) {
  constexpr uint32_t kMultiplier = kBook == Codebook::kMcg ? 0xCBAC1FEDu : 89226354u;
  constexpr uint32_t kIncrement = kBook == Codebook::kMcg ? 0u : 64248484u;
  uint32_t s[8];
  load_states<kRate2>(load, place, s);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    a[j / 2 % 2][j % 2 * 2 + j / 4] = and_xor<0x8fff8fffu, 0x3b603b60u>(s[j] * kMultiplier + kIncrement);
}

template <class S>
using MoeSums = float[S::kGroups * (S::kTwice ? 2 : 1)][4];

// sums += one stage. weights: this warp's first tile; x: the stage's rows of x; even, odd: this lane's chunk for
// ldmatrix of the first and second half of a segment.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_moe_stage(SharedAddress weights, SharedAddress x, uint32_t even, uint32_t odd,
                                                   const LanePlace<kRate2>& place, MoeSums<S>& sums) {
  constexpr int kTileRowBytes = kBlockTiles * Rate<kRate2>::kTileBytes;
  if constexpr (S::kTwice) {
#pragma unroll
    for (int tile = 0; tile < S::kTileRows; ++tile) {
      uint32_t a[2][4];
      decode_tile_twice<kBook, kRate2>(SharedTile{weights + tile * kTileRowBytes}, place, a);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {
        const uint4 b = load_matrices(x + tile / 2 * S::kSegmentBytes + group * kGroupRows * S::kSwizzled +
                                      (tile % 2 ? odd : even));
        mma_m16n8k16(sums[2 * group], a[0], b.x, b.y);
        mma_m16n8k16(sums[2 * group + 1], a[1], b.z, b.w);
      }
    }
  } else if constexpr (S::kWarpgroup) {
#if EXL3_WARPGROUP
#pragma unroll
    for (int step = 0; step < S::kTileRows / 2; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        decode_tile<kBook, kRate2>(SharedTile{weights + (step * 2 + half) * kTileRowBytes}, place, a[half]);
      const SharedAddress from = x + step / 2 * S::kSegmentBytes + step % 2 * 64;
      warpgroup_arrive();
      warpgroup_mma(sums, a[0], swizzled_descriptor(from));
      warpgroup_mma(sums, a[1], swizzled_descriptor(from + 32));
      warpgroup_commit();
      warpgroup_wait<0>();  // the scheduler's other warps decode meanwhile; waiting later would cost registers
    }
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

// Multiply `count` stages of one item while loading the stages ahead, as many of one item or none.
template <Codebook kBook, int kRate2, class S>
__device__ __forceinline__ void multiply_stages(MoeLoader<S>& loader, MoeRing<S>& ring, int count, MoeSums<S>& sums) {
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
      // The item ahead mostly has this rate: let the compiler count the copies.
      if (loader.rate2 == kRate2) loader.template copy_weights<kBlockTiles * kRate2>(fill + S::kXStageBytes);
      else loader.copy_weights(fill + S::kXStageBytes, kBlockTiles * loader.rate2);
      loader.copy_x(fill);
      loader.advance();
    }
    cp_async_commit();
    multiply_moe_stage<kBook, kRate2, S>(ring.read + S::kXStageBytes + warp * Rate<kRate2>::kTileBytes, ring.read, even,
                                         odd, place, sums);
    ring.read = ring.after(ring.read);
  }
}

__device__ __forceinline__ void store_sums(float* to, float low, float high, float) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}
__device__ __forceinline__ void store_sums(__half* to, float low, float high, float scale) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(low * scale, high * scale);
}

// Blocks an SM the compiler leaves registers for: mul1 has the most rates to hold places for.
template <Codebook kBook, class S>
constexpr int kMoeBlocksPerSm = kBook == Codebook::kMul1 && S::kRows == 128 ? 1 : S::kBlocksPerSm;

// Grid: any number of blocks; dynamic shared memory: S::shared_bytes of the largest rate in the table.
template <Codebook kBook, class S>
__global__ void __launch_bounds__(S::kThreads, (kMoeBlocksPerSm<kBook, S>))
    moe_product_kernel(const __grid_constant__ MoeArgs args, const __grid_constant__ MoeStage stage) {
  const uint32_t stage_bytes = stage.stage_bytes;
  const SharedAddress shared = (dynamic_shared() + 1023) / 1024 * 1024;
  MoeRing<S> ring{shared, shared, stage_bytes};
  const MoeArena arena(args);
  wait_for_previous_grid();
  allow_next_grid();

  __shared__ __align__(16) uint32_t shared_rows[S::kRowsInShared ? S::kRows : 1];
  MoeLoader<S> loader(args, stage, shared_rows);
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (loader.left > 0) {
      loader.copy_weights(shared + s * stage_bytes + S::kXStageBytes, kBlockTiles * loader.rate2);
      loader.copy_x(shared + s * stage_bytes);
      loader.advance();
      loader.next_item();
    }
    cp_async_commit();
  }

  for (uint32_t item = blockIdx.x;; item += gridDim.x) {
    MoeSums<S> sums = {};
    int rate2, count;
    {
      const MoeItem at(args, arena, stage, item);
      if (!at.exists) return;
      rate2 = static_cast<int>(at.entry(args, arena, stage) & 31);
      count = part_start(stage, at.part + 1) - part_start(stage, at.part);
    }
    while (count > 0) {
      const int run = loader.left > 0 && loader.left < count ? loader.left : count;
      switch (rate2) {
#define EXL3_RATE(r)                                       \
  case r:                                                  \
    multiply_stages<kBook, r, S>(loader, ring, run, sums); \
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
    keep_in_register(item);  // what follows from it is worked out again, since registers are scarce meanwhile
    const MoeItem at(args, arena, stage, item);
    const MoeBlock& block = at.of(args, arena);
    // An accumulator holds column lane/4 (+8) of its tile, rows 2(lane%4) and the next: see MoeArena for the order.
    const int lane = threadIdx.x % 32, low = lane % 4 * 2, rows = block.count;
    const int64_t width = static_cast<int64_t>(args.slices) * stage.matrices * stage.columns * kBlockColumns;
    const int64_t row = at.part * stage.part_rows + block.start - (stage.down ? 0 : stage.first_window * args.window);
    typename S::Sum* to = reinterpret_cast<typename S::Sum*>(stage.sums) + (row + low) * width +
                          ((at.slice * stage.matrices + at.matrix) * stage.columns + at.column) * kBlockColumns +
                          threadIdx.x / 32 * kTile + lane / 4 * 2;
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      float v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = S::kTwice ? sums[2 * group][e] + sums[2 * group + 1][e] : sums[group][e];
      typename S::Sum* const at_group = to + group * kGroupRows * width;
      if (group * kGroupRows + low < rows) store_sums(at_group, v[0], v[2], stage.scale);
      if (group * kGroupRows + low + 1 < rows) store_sums(at_group + width, v[1], v[3], stage.scale);
    }
  }
}

}  // namespace exl3
