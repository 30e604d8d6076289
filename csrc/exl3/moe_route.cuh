// From the router's choice to sorted routes and blocks of them.
#pragma once

#include "hadamard.cuh"
#include "moe_layout.cuh"

namespace exl3 {

// The expert of a route, -1 if it is nobody's.
__device__ __forceinline__ int expert_of(const MoeArgs& args, int route) {
  const int64_t id = args.wide_ids ? static_cast<const int64_t*>(args.ids)[route]
                                   : static_cast<int64_t>(static_cast<const int*>(args.ids)[route]);
  return id >= 0 && id < args.experts ? static_cast<int>(id) : -1;
}

// Sum of v over the lanes before this one. Exact below 2^24.
__device__ __forceinline__ float lanes_before(float v, int lane, float& total) {
  float before = 0.0f;
  total = v;
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const float other = shuffle_xor(total, bit);
    if (lane & bit) before += other;
    total += other;
  }
  return before;
}

// Sum of v over the threads before this one, and over all. scratch: one float a warp.
__device__ __forceinline__ int threads_before(int v, float* scratch, int& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = static_cast<int>(blockDim.x) / 32;
  float sum = 0.0f;
  const float before = lanes_before(static_cast<float>(v), lane, sum);
  __syncthreads();
  if (lane == 0) scratch[warp] = sum;
  __syncthreads();
  const float warps_before = lanes_before(lane < warps ? scratch[lane] : 0.0f, lane, sum);
  total = static_cast<int>(sum);
  __syncthreads();
  if (warp == 0) scratch[lane] = warps_before;
  __syncthreads();
  return static_cast<int>(scratch[warp] + before);
}

// Of the blocks of one expert's routes [start, end), the one that begins at `from` ends here.
__device__ __forceinline__ int block_end(const MoeArgs& args, int from, int end) {
  const int window_end = (from / args.window + 1) * args.window;
  return min(min(from + args.row_tile, end), window_end);
}

// The experts of this thread's next routes, all asked for at once: a thread block alone has little else to hide time in.
constexpr int kAtOnce = 8;
__device__ __forceinline__ void load_experts(const MoeArgs& args, int first, int end, int (&expert)[kAtOnce]) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int route = first + i * static_cast<int>(blockDim.x);
    expert[i] = route < end ? expert_of(args, route) : -1;
  }
}

// How many routes of [begin, end) each expert has, for the whole thread block after the barrier at the end.
__device__ __forceinline__ void count_routes(const MoeArgs& args, int begin, int end, unsigned* count) {
  const int thread = threadIdx.x, threads = blockDim.x;
  for (int expert = thread; expert < args.experts; expert += threads) count[expert] = 0;
  __syncthreads();
  for (int first = begin + thread; first < end; first += threads * kAtOnce) {
    int expert[kAtOnce];
    load_experts(args, first, end, expert);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (expert[i] >= 0) atomic_increment(&count[expert[i]]);
  }
  __syncthreads();
}

// Sort the routes of a chunk by expert, among those of all chunks, and list the blocks if it is the first chunk. The
// order of an expert's routes does not matter: no route's result depends on its place. One thread block each; where
// there is more than one chunk, all of them have been counted.
__device__ __forceinline__ void list_routes(const MoeCall& call, int chunk = 0, int chunks = 1) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  __shared__ __align__(16) unsigned cursor[kMaxExperts];  // routes of an expert; then where its next of the chunk goes
  __shared__ __align__(16) unsigned before[kMaxExperts];  // of them in chunks before this one
  __shared__ __align__(16) float scratch[32];
  const int thread = threadIdx.x, threads = blockDim.x;
  const int begin = chunk * kChunkRoutes;
  const int end = chunks == 1 ? arena.routes : min(begin + kChunkRoutes, arena.routes);
  if (chunks == 1) count_routes(args, begin, end, cursor);
  const unsigned* counts = reinterpret_cast<const unsigned*>(args.arena + arena.counts);
  for (int expert = thread; expert < args.experts; expert += threads) {
    unsigned all = 0, some = 0;
#pragma unroll 8
    for (int other = 0; chunks > 1 && other < chunks; ++other) {
      const unsigned count = counts[other * args.experts + expert];
      all += count, some += other < chunk ? count : 0;
    }
    if (chunks > 1) cursor[expert] = all;
    before[expert] = some;
  }
  __syncthreads();

  // Each thread has neighbouring experts: their routes, then their blocks.
  const int each = (args.experts + threads - 1) / threads, mine = thread * each;
  int routes = 0, valid = 0, blocks = 0, all_blocks = 0;
#pragma unroll 1
  for (int i = 0; i < each && mine + i < args.experts; ++i) routes += cursor[mine + i];
  const int first = threads_before(routes, scratch, valid);
  if (chunk == 0) {
    int start = first;
#pragma unroll 1
    for (int i = 0; i < each && mine + i < args.experts; ++i) {
      const int last = start + cursor[mine + i];
      for (int from = start; from < last; from = block_end(args, from, last)) ++blocks;
      start = last;
    }
    int block = threads_before(blocks, scratch, all_blocks);

    int* header = reinterpret_cast<int*>(args.arena + arena.header);
    MoeBlock* list = reinterpret_cast<MoeBlock*>(args.arena + arena.blocks);
    if (thread == 0) header[0] = valid;
    for (int window = thread; window <= arena.windows; window += threads)
      if (window * args.window >= valid) header[1 + window] = all_blocks;
    start = first;
#pragma unroll 1
    for (int i = 0; i < each && mine + i < args.experts; ++i) {
      const int expert = mine + i, last = start + cursor[expert];
      for (int from = start; from < last; ++block) {
        const int to = block_end(args, from, last);
        // Windows cut blocks, so a block begins where a window does.
        if (from % args.window == 0) header[1 + from / args.window] = block;
        list[block] = {expert,
                       from,
                       to - from,
                       0,
                       {args.table[expert], args.table[args.experts + expert], args.table[2 * args.experts + expert], 0}};
        from = to;
      }
      start = last;
    }
  }
  int start = first;
#pragma unroll 1
  for (int i = 0; i < each && mine + i < args.experts; ++i) {
    const int next = start + cursor[mine + i];
    cursor[mine + i] = start + before[mine + i];
    start = next;
  }
  __syncthreads();

  Route* sorted = reinterpret_cast<Route*>(args.arena + arena.sorted);
  int* places = reinterpret_cast<int*>(args.arena + arena.places);
  for (int first = begin + thread; first < end; first += threads * kAtOnce) {
    int expert[kAtOnce], place[kAtOnce];
    load_experts(args, first, end, expert);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      place[i] = expert[i] >= 0 ? static_cast<int>(atomic_increment(&cursor[expert[i]])) : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int route = first + i * threads;
      if (route < end) places[route] = place[i];
      if (place[i] >= 0) sorted[place[i]] = {route, expert[i]};
    }
  }
}

}  // namespace exl3
