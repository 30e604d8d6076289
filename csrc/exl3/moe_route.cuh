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

// Neighbouring experts [begin, end) of one thread.
struct Experts {
  int begin, end;
  const unsigned* routes;  // of all experts, each one's number
  int first;               // place of their first route in the sorted list
};

// use(expert, from, to) for every block of the experts. The decode plan has one window.
template <bool kDecode, class Use>
__device__ __forceinline__ void each_block(const MoeArgs& args, const Experts& experts, Use use) {
  int start = experts.first;
#pragma unroll 1
  for (int expert = experts.begin; expert < experts.end; ++expert) {
    const int last = start + experts.routes[expert];
    for (int from = start; from < last;) {
      const int to = kDecode ? min(from + kDecodeRows, last) : block_end(args, from, last);
      use(expert, from, to);
      from = to;
    }
    start = last;
  }
}

__device__ __forceinline__ void put_block(const MoeCall& call, int place, int expert, int from, int to) {
  const MoeArgs& args = call.args;
  reinterpret_cast<MoeBlock*>(args.arena + call.arena.blocks)[place] = {
      expert,
      from,
      to - from,
      0,
      {args.table[expert], args.table[args.experts + expert], args.table[2 * args.experts + expert], 0}};
}

// The decode plan's blocks, of its one window, in the order of experts: to sort them would take longer than it saves.
__device__ __forceinline__ void list_blocks(const MoeCall& call, const Experts& mine, float* scratch) {
  int blocks = 0, all_blocks = 0;
  each_block<true>(call.args, mine, [&](int, int, int) { ++blocks; });
  int block = threads_before(blocks, scratch, all_blocks);
  int* first_of_window = reinterpret_cast<int*>(call.args.arena + call.arena.header) + 1;
  if (threadIdx.x == 0) first_of_window[0] = 0, first_of_window[1] = all_blocks;
  each_block<true>(call.args, mine, [&](int expert, int from, int to) { put_block(call, block++, expert, from, to); });
}

// The prefill plan's blocks, within each window the largest first: a product goes over its items in few rounds, and a
// round takes as long as its largest item. Every size of every window has a counter, and each counter a thread.
__device__ __forceinline__ void list_blocks_by_size(const MoeCall& call, const Experts& mine, float* scratch) {
  constexpr int kCounters = kMaxWindows * kBlockSizes;
  __shared__ __align__(16) unsigned next[kCounters];  // blocks of a window and size; then the next one's place
  const MoeArgs& args = call.args;
  const int thread = threadIdx.x;
  const auto counter = [&](int from, int to) {
    return next + from / args.window * kBlockSizes + (args.row_tile - (to - from)) / kSizeRows;
  };
  if (thread < kCounters) next[thread] = 0;
  __syncthreads();
  each_block<false>(args, mine, [&](int, int from, int to) { atomic_increment(counter(from, to)); });
  __syncthreads();
  int all_blocks = 0;
  const int place = threads_before(thread < kCounters ? next[thread] : 0, scratch, all_blocks);
  if (thread < kCounters) next[thread] = place;
  int* first_of_window = reinterpret_cast<int*>(args.arena + call.arena.header) + 1;
  if (thread % kBlockSizes == 0 && thread / kBlockSizes <= call.arena.windows)
    first_of_window[thread / kBlockSizes] = place;
  if (thread <= call.arena.windows * kBlockSizes) reinterpret_cast<int*>(args.arena + call.arena.sizes)[thread] = place;
  unsigned* flags = reinterpret_cast<unsigned*>(args.arena + call.arena.flags);
  for (int i = thread; i < call.arena.windows * (1 + args.grid); i += static_cast<int>(blockDim.x)) flags[i] = 0;
  __syncthreads();
  each_block<false>(args, mine, [&](int expert, int from, int to) {
    put_block(call, static_cast<int>(atomic_increment(counter(from, to))), expert, from, to);
  });
}

// Sort the routes of a chunk by expert, among those of all chunks, and list the blocks if it is the first chunk. The
// order of an expert's routes does not matter: no route's result depends on its place. One thread block each; where
// there is more than one chunk, all of them have been counted.
template <bool kDecode>
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

  const int each = (args.experts + threads - 1) / threads;
  Experts mine{thread * each, min(thread * each + each, args.experts), cursor, 0};
  int routes = 0, valid = 0;
#pragma unroll 1
  for (int expert = mine.begin; expert < mine.end; ++expert) routes += cursor[expert];
  mine.first = threads_before(routes, scratch, valid);
  if (chunk == 0) {
    if (thread == 0) *reinterpret_cast<int*>(args.arena + arena.header) = valid;
    if constexpr (kDecode) list_blocks(call, mine, scratch);
    else list_blocks_by_size(call, mine, scratch);
  }
  int start = mine.first;
#pragma unroll 1
  for (int expert = mine.begin; expert < mine.end; ++expert) {
    const int next = start + cursor[expert];
    cursor[expert] = start + before[expert];
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
