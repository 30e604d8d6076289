// Many rows on SM90: half of a block's warps decode, the other half multiply. Decoding then costs the tensor cores no
// time as long as it takes less than they do.
//
// Producers turn packed tiles into fp16 core matrices in shared memory; consumers, two warpgroups with half of the 128
// columns each, multiply those with the rotated input, which the copy engine brings. A ring of stages of 32 k joins them.
// Sums add their k16 steps in ascending order, as in linear.cuh.
//
// Work is cut as there, into units of 128 columns x 128 k, but by `Wide::kRows` rows at a time: see WideWork.
#pragma once

#include "wide_store.cuh"

namespace exl3 {

constexpr int kFullWavePercent = 88;  // of the last wave of whole tiles; below, tiles are shared

// Sizes of the kernel. An instruction of 256 rows needs more registers than 512 threads can be compiled for, so four warps
// decode.
struct Wide {
  static constexpr int kRows = kWideRows, kGroups = kRows / kGroupRows;
  static constexpr int kDepth = kStepDepth;  // of a stage
  static constexpr int kStages = 6;
  static constexpr int kProducerWarps = 4;
  static constexpr int kPackedStages = 3;  // of each producer, its own
  static constexpr int kThreads = 32 * (kConsumerWarps + kProducerWarps);
  static constexpr int kConsumerRegisters = 200, kProducerRegisters = 104;
  static constexpr int kUnitStages = kUnitDepth / kDepth;
  static constexpr int kWeightBytes = kBlockColumns * kDepth * 2, kXBytes = kRows * kDepth * 2;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kFixedBytes = kBarrierBytes + kStages * kStageBytes + kExchangeRows * kFinishPitch * 4;
  static_assert(3 * kStages * 8 <= kBarrierBytes, "barriers fit");
  static_assert(kProducerWarps <= kStages, "a producer's next stage is at most one turn of the ring away");
  // What a block has from its launch is what its warps may exchange; asking for more waits for ever.
  static_assert(kConsumerWarps * kConsumerRegisters + kProducerWarps * kProducerRegisters <=
                    65536 / kThreads / 8 * 8 * (kThreads / 32), "registers are there");

  __host__ __device__ static constexpr int packed_bytes(int rate2) { return kDepth / kTile * kBlockTiles * 16 * rate2; }
  __host__ __device__ static constexpr int shared_bytes(int rate2) {
    return kFixedBytes + kProducerWarps * kPackedStages * packed_bytes(rate2);
  }
};

static_assert(Wide::shared_bytes(16) <= 232448, "every rate fits into what a block may have");

// A tile is kRows rows x 128 columns and `depth` units deep; tiles are ordered column by column. Grains, whole tiles or
// single units, are dealt to workers, one a thread block.
struct WideWork {
  Cut cut;
  int grain, depth, row_tiles;
  int64_t rotation_bytes, parts;  // scratch: of the rotated input of one shard, and where the parts begin
};

// What a worker does: f(tile, first unit in the tile, units) for each segment in turn.
template <class F>
__device__ __forceinline__ void for_segments(const WideWork& work, int worker, F&& f) {
  const int end = work.cut.start(worker + 1) * work.grain;
#pragma unroll 1
  for (int unit = work.cut.start(worker) * work.grain; unit < end;) {
    const int tile = unit / work.depth, next = min(end, (tile + 1) * work.depth);
    f(tile, unit - tile * work.depth, next - unit);
    unit = next;
  }
}

// Where a tile lies. block: within its shard.
struct TilePlace {
  int shard, block, row_tile;
  __device__ __forceinline__ TilePlace(const LinearArgs& args, const WideWork& work, int tile) {
    const int column = tile / work.row_tiles;
    row_tile = tile - column * work.row_tiles;
    shard = shard_of(args, column);
    block = column - args.shard[shard].first_block;
  }
};

constexpr int64_t kWidePart = Wide::kRows * kBlockColumns / 4;  // float4 of a part of a tile

// The block's shared memory.
struct WideShared {
  SharedAddress base;
  int packed_bytes;
  __device__ __forceinline__ SharedAddress weights_full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ SharedAddress x_full(int stage) const { return base + (Wide::kStages + stage) * 8; }
  __device__ __forceinline__ SharedAddress empty(int stage) const { return base + (2 * Wide::kStages + stage) * 8; }
  __device__ __forceinline__ SharedAddress weights(int stage) const {
    return base + Wide::kBarrierBytes + stage * Wide::kStageBytes;
  }
  __device__ __forceinline__ SharedAddress x(int stage) const { return weights(stage) + Wide::kWeightBytes; }
  __device__ __forceinline__ SharedAddress exchange() const { return weights(Wide::kStages); }
  __device__ __forceinline__ SharedAddress packed(int warp) const {
    return base + Wide::kFixedBytes + warp * Wide::kPackedStages * packed_bytes;
  }
};

#if EXL3_WARPGROUP

// A worker's segments, for those who fetch ahead.
struct Cursor {
  const LinearArgs& args;
  const WideWork& work;
  int unit, end, left = 0;  // left: stages of this segment, 0 after the last

  __device__ __forceinline__ Cursor(const LinearArgs& args, const WideWork& work, int worker)
      : args(args), work(work), unit(work.cut.start(worker) * work.grain), end(work.cut.start(worker + 1) * work.grain) {}
  // The next segment, if there is one: f(place, first unit in its tile).
  template <class F>
  __device__ __forceinline__ void next(F&& f) {
    if (unit == end) return;
    const int tile = unit / work.depth, first = unit - tile * work.depth, beyond = min(end, (tile + 1) * work.depth);
    f(TilePlace(args, work, tile), first);
    left = (beyond - unit) * Wide::kUnitStages;
    unit = beyond;
  }
};

constexpr int kXWarp = 4;
// One thread of the consumers fetches x: a producer would wait for its copies at each of its fences.
struct Fetcher {
  const WideShared& shared;
  Cursor at;
  const unsigned char* from = nullptr;
  Turn turn{0, 0};

  __device__ __forceinline__ void start() {
    seek();
    wait_for_previous_grid();
    for (int stage = 0; stage < Wide::kStages; ++stage) fetch();
  }
  __device__ __forceinline__ void seek() {
    at.next([&](const TilePlace& place, int first) {
      from = at.args.scratch + place.shard * at.work.rotation_bytes +
             (static_cast<int64_t>(place.row_tile) * at.args.k + first * kUnitDepth) * (Wide::kRows * 2);
    });
  }
  // Into the place of a stage that all consumers have left, or will have soon.
  __device__ __forceinline__ void fetch() {
    if (at.left == 0) return;
    const SharedAddress to = shared.x(turn.stage), full = shared.x_full(turn.stage);
    barrier_wait(shared.empty(turn.stage), turn.parity ^ 1);
    barrier_expect(full, Wide::kXBytes);
    bulk_copy(to, from, Wide::kXBytes, full);
    turn.advance(Wide::kStages, 1);
    from += Wide::kXBytes;
    if (--at.left == 0) seek();
  }
};

// A producer warp takes every kProducerWarps-th stage, whole, and copies its packed tiles some of its stages ahead.
struct PackedAhead {
  Cursor at;
  const SharedAddress ring;
  const uint32_t slot_bytes;
  const int lane;
  int phase, slot = 0, left = 0;  // phase: stages from here to this warp's next; left: of its own in this segment
  const unsigned char* from = nullptr;  // this lane's first piece of 16 bytes of its next stage
  int64_t pitch = 0;                    // bytes from a row of tiles to the next
  int pieces = 0;                       // of a row of tiles

  __device__ __forceinline__ PackedAhead(const LinearArgs& args, const WideWork& work, const WideShared& shared,
                                         int worker, int warp, int lane)
      : at(args, work, worker), ring(shared.packed(warp)), slot_bytes(shared.packed_bytes), lane(lane), phase(warp) {
    seek();
  }
  __device__ __forceinline__ void seek() {
    do {
      at.left = 0;
      at.next([&](const TilePlace& place, int first) {
        const LinearShard& shard = at.args.shard[place.shard];
        pieces = kBlockTiles * shard.rate2;
        pitch = static_cast<int64_t>(shard.blocks) * pieces * 16;
        from = shard.trellis + (first * (kUnitDepth / kTile) + phase * (Wide::kDepth / kTile)) * pitch +
               (static_cast<int64_t>(place.block) * pieces + lane) * 16;
      });
      left = at.left > phase ? (at.left - phase + Wide::kProducerWarps - 1) / Wide::kProducerWarps : 0;
      phase += left * Wide::kProducerWarps - at.left;
    } while (left == 0 && at.left > 0);
  }
  __device__ __forceinline__ void fetch() {
    if (left > 0) {
      const SharedAddress to = ring + slot * slot_bytes + lane * 16;
#pragma unroll
      for (int row = 0; row < Wide::kDepth / kTile; ++row)
#pragma unroll 1
        for (int i = 0; i < pieces; i += 32)
          if (i + lane < pieces) cp_async_16(to + (row * pieces + i) * 16, from + row * pitch + i * 16);
      from += Wide::kProducerWarps * (Wide::kDepth / kTile) * pitch;
      if (--left == 0) seek();
    }
    cp_async_commit();
    slot = slot + 1 == Wide::kPackedStages ? 0 : slot + 1;
  }
};

struct Producer {
  const WideShared& shared;
  const int warp = threadIdx.x / 32 - kConsumerWarps, lane = threadIdx.x % 32;
  PackedAhead ahead;
  Turn turn{warp, 0};
  int phase = warp, slot = 0;

  __device__ __forceinline__ Producer(const LinearArgs& args, const WideWork& work, const WideShared& shared,
                                      int worker)
      : shared(shared), ahead(args, work, shared, worker, warp, lane) {
    for (int stage = 0; stage < Wide::kPackedStages - 1; ++stage) ahead.fetch();
  }

  // This warp's stages of a segment of `stages`.
  template <Codebook kBook, int kRate2>
  __device__ __forceinline__ void decode(int stages) {
    constexpr int kTogether = 4;  // tiles: they hide each other's latency
    const LanePlace<kRate2> place(lane);
    // Lane l stores row l%8 of matrix l/8: column halves 8 columns apart, then halves of the tile's k.
    const uint32_t matrix = lane % 16 * 16 + lane / 16 * (kBlockColumns * 16);
#pragma unroll 1
    for (; phase < stages; phase += Wide::kProducerWarps) {
      ahead.fetch();
      cp_async_wait<Wide::kPackedStages - 1>();
      __syncwarp();
      SharedAddress from = ahead.ring + slot * ahead.slot_bytes;
      barrier_wait(shared.empty(turn.stage), turn.parity ^ 1);
#pragma unroll 1
      for (int tiles = 0; tiles < Wide::kDepth / kTile * kBlockTiles; tiles += kTogether) {
        const SharedAddress to = shared.weights(turn.stage) + matrix + tiles % kBlockTiles * (kTile * 16) +
                                 tiles / kBlockTiles * (2 * kBlockColumns * 16);
        uint32_t a[kTogether][4];
#pragma unroll
        for (int tile = 0; tile < kTogether; ++tile, from += Rate<kRate2>::kTileBytes)
          decode_tile<kBook, kRate2>(SharedTile{from}, place, a[tile]);
#pragma unroll
        for (int tile = 0; tile < kTogether; ++tile) store_matrices(to + tile * (kTile * 16), a[tile]);
      }
      publish_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.weights_full(turn.stage));
      turn.advance(Wide::kStages, Wide::kProducerWarps);
      slot = slot + 1 == Wide::kPackedStages ? 0 : slot + 1;
    }
    phase -= stages;
  }
};

template <Codebook kBook>
__device__ __forceinline__ void decode_at(Producer& producer, int rate2, int stages) {
  switch (rate2) {
#define EXL3_RATE(r) \
  case r: return producer.decode<kBook, r>(stages);
    EXL3_RATE(2) EXL3_RATE(4) EXL3_RATE(6) EXL3_RATE(8) EXL3_RATE(10) EXL3_RATE(12) EXL3_RATE(14) EXL3_RATE(16)
    default: break;
  }
  if constexpr (kBook == Codebook::kMul1) {
    switch (rate2) { EXL3_RATE(3) EXL3_RATE(5) EXL3_RATE(7) }
  }
#undef EXL3_RATE
}

template <Codebook kBook>
__device__ __forceinline__ void produce(const LinearArgs& args, const WideWork& work, const WideShared& shared, int worker) {
  Producer producer(args, work, shared, worker);
  for_segments(work, worker, [&](int tile, int, int units) {
    const TilePlace place(args, work, tile);
    decode_at<kBook>(producer, args.shard[place.shard].rate2, units * Wide::kUnitStages);
  });
}

// The worker's share of the product: sums of segments, each to y or to its part of the scratch.
__device__ __forceinline__ void consume(const LinearArgs& args, const WideWork& work, const WideShared& shared, int worker) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t mine = warp / 4 * (kBlockColumns / 2 * 16);  // this warpgroup's columns
  constexpr uint32_t kAlongWeights = kBlockColumns * 16, kAlongX = Wide::kRows * 16;
  const bool fetches = lane == 0 && warp == kXWarp;
  Fetcher fetcher{shared, Cursor(args, work, worker)};
  if (fetches) fetcher.start();
  __syncwarp();
  Turn turn{0, 0};
  int wait = 2;  // stages until the first has been left by all consumers, most likely
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(shared.empty(stage));
  };
  for_segments(work, worker, [&](int tile, int first, int units) {
    WideSums sums = {};
    int before = -1;
#pragma unroll 1
    for (int stages = units * Wide::kUnitStages; stages > 0; --stages) {
      barrier_wait(shared.x_full(turn.stage), turn.parity);
      barrier_wait(shared.weights_full(turn.stage), turn.parity);
      const SharedAddress a = shared.weights(turn.stage) + mine, x = shared.x(turn.stage);
      warpgroup_arrive();
#pragma unroll
      for (int eight = 0; eight < Wide::kDepth / 8; eight += 2)
        warpgroup_mma(sums, matrix_descriptor(a + eight * kAlongWeights, kAlongWeights),
                      matrix_descriptor(x + eight * kAlongX, kAlongX));
      warpgroup_commit();
      warpgroup_wait<1>();
      if (before >= 0) release(before);
      if (fetches) {
        if (wait == 0) fetcher.fetch();
        else --wait;
      }
      __syncwarp();
      before = turn.stage;
      turn.advance(Wide::kStages, 1);
    }
    warpgroup_wait<0>();
    release(before);

    const TilePlace place(args, work, tile);
    const LinearShard& shard = args.shard[place.shard];
    if (units == work.depth)
      return transform_tile(args, shard, place.block, place.row_tile * Wide::kRows, sums, shared.exchange());
    // A worker has at most one segment that begins within a tile, its first, and one that begins a tile and does not end it.
    float4* const to = reinterpret_cast<float4*>(args.scratch + work.parts) +
                       (2 * worker + (first == 0)) * kWidePart + warp * 32 + lane;
#pragma unroll
    for (int g = 0; g < Wide::kGroups; ++g)
      to[g * kBlockTiles * 32] = make_float4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
  });
}

#endif  // EXL3_WARPGROUP

// Grid: workers. Dynamic shared memory: Wide::shared_bytes.
template <Codebook kBook>
__global__ void __launch_bounds__(Wide::kThreads, 1)
    wide_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ WideWork work, int packed_bytes) {
#if EXL3_WARPGROUP
  const WideShared shared{dynamic_shared(), packed_bytes};
  const int worker = blockIdx.x;
  allow_next_grid();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Wide::kStages; ++stage) {
      barrier_init(shared.weights_full(stage), 1);
      barrier_init(shared.x_full(stage), 1);
      barrier_init(shared.empty(stage), kConsumerWarps);
    }
    barrier_publish();
  }
  __syncthreads();
  if (threadIdx.x >= 32 * kConsumerWarps) {
    give_registers<Wide::kProducerRegisters>();
    produce<kBook>(args, work, shared, worker);
  } else {
    take_registers<Wide::kConsumerRegisters>();
    consume(args, work, shared, worker);
  }
#else
  (void)args, (void)work, (void)packed_bytes;
#endif
}

// Adds the parts of the tiles that several workers share, in ascending order of k, then H and svh. Grid: (borders between
// workers; groups of 8 rows of a tile). A tile is done by the first border within it.
static __global__ void __launch_bounds__(kFinishThreads)
    finish_wide_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ WideWork work) {
  __shared__ __align__(16) float tile_rows[kGroupRows][kFinishPitch];
  allow_next_grid();
  const int first = blockIdx.x, border = work.cut.start(first + 1);
  const int tile = border / work.depth, begin = tile * work.depth;
  if (border == begin || work.cut.start(first) > begin) return;
  const TilePlace place(args, work, tile);
  const LinearShard& shard = args.shard[place.shard];
  const int row = place.row_tile * Wide::kRows + blockIdx.y * kGroupRows;
  if (row >= args.m) return;
  const int last = work.cut.owner(begin + work.depth - 1), column = place.block * kBlockColumns + threadIdx.x % 32 * 4;
  const uint2 scales = *reinterpret_cast<const uint2*>(static_cast<const __half*>(shard.svh) + column);
  const float4* part = reinterpret_cast<const float4*>(args.scratch + work.parts) +
                       blockIdx.y * (kGroupRows * kBlockColumns / 4) + threadIdx.x;
  wait_for_previous_grid();
  float4 sum = load_from_l2(part + (2 * first + 1) * kWidePart);
#pragma unroll 4
  for (int worker = first + 1; worker <= last; ++worker) {
    const float4 v = load_from_l2(part + 2 * worker * kWidePart);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  finish_rows(args, shard, column, row, sum, scales, tile_rows);
}

}  // namespace exl3
