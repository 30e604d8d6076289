// From the router's choice to sorted routes and blocks of them; inputs rotated for the product.
#pragma once

#include "moe_layout.cuh"
#include "hadamard.cuh"
#include "values.cuh"

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

// One thread block sorts all routes by expert and lists the blocks. The order of an expert's routes does not matter:
// no route's result depends on its place.
__device__ __forceinline__ void list_routes(const MoeArgs& args) {
  __shared__ __align__(16) unsigned cursor[kMaxExperts];
  __shared__ __align__(16) float scratch[32];
  const MoeArena arena(args);
  const int thread = threadIdx.x, threads = blockDim.x;
  for (int expert = thread; expert < args.experts; expert += threads) cursor[expert] = 0;
  __syncthreads();
  for (int route = thread; route < arena.routes; route += threads) {
    const int expert = expert_of(args, route);
    if (expert >= 0) atomic_increment(&cursor[expert]);
  }
  __syncthreads();

  // Each thread has neighbouring experts: their routes, then their blocks.
  const int each = (args.experts + threads - 1) / threads, mine = thread * each;
  int routes = 0, valid = 0, blocks = 0, all_blocks = 0;
#pragma unroll 1
  for (int i = 0; i < each && mine + i < args.experts; ++i) routes += cursor[mine + i];
  const int first = threads_before(routes, scratch, valid);
  int start = first;
#pragma unroll 1
  for (int i = 0; i < each && mine + i < args.experts; ++i) {
    const int end = start + cursor[mine + i];
    for (int from = start; from < end; from = block_end(args, from, end)) ++blocks;
    start = end;
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
    const int expert = mine + i, end = start + cursor[expert];
    cursor[expert] = start;
    for (int from = start; from < end; ++block) {
      const int to = block_end(args, from, end);
      // Windows cut blocks, so a block begins where a window does.
      if (from % args.window == 0) header[1 + from / args.window] = block;
      list[block] = {expert,
                     from,
                     to - from,
                     0,
                     {args.table[expert], args.table[args.experts + expert], args.table[2 * args.experts + expert], 0}};
      from = to;
    }
    start = end;
  }
  __syncthreads();

  Route* sorted = reinterpret_cast<Route*>(args.arena + arena.sorted);
  int* places = reinterpret_cast<int*>(args.arena + arena.places);
  for (int route = thread; route < arena.routes; route += threads) {
    const int expert = expert_of(args, route);
    int place = -1;
    if (expert >= 0) {
      place = static_cast<int>(atomic_increment(&cursor[expert]));
      sorted[place] = {route, expert};
    }
    places[route] = place;
  }
}

constexpr int kRouteThreads = 1024;

static __global__ void __launch_bounds__(kRouteThreads) moe_route_kernel(const __grid_constant__ MoeArgs args) {
  wait_for_previous_grid();
  allow_next_grid();
  list_routes(args);
}

__device__ __forceinline__ float load_input(const MoeArgs& args, int64_t at) {
  if (args.io_type == DataType::kHalf) return to_float(static_cast<const __half*>(args.x)[at]);
  if (args.io_type == DataType::kBfloat16) return to_float(static_cast<const __nv_bfloat16*>(args.x)[at]);
  return static_cast<const float*>(args.x)[at];
}

// Four neighbouring inputs as fp16, once or twice: see decode_tile_twice for the order.
__device__ __forceinline__ void store_inputs(unsigned char* row, int first, const float (&v)[4], int twice) {
  if (twice == 1) {
    *reinterpret_cast<uint2*>(row + first * 2) = make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
    return;
  }
  unsigned char* to = row + first / 8 * 32 + first % 8 * 2;
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_half2(v[0], v[0]), pack_half2(v[2], v[2]));
  *reinterpret_cast<uint2*>(to + 16) = make_uint2(pack_half2(v[1], v[1]), pack_half2(v[3], v[3]));
}

// One warp a (source row, 128-group of k, slice): the inputs of gate and up.
__device__ __forceinline__ void rotate_inputs(const MoeArgs& args, int source, int group, int slice, int window) {
  const MoeArena arena(args);
  const int lane = threadIdx.x % 32, first = group * kHadamard + lane * 4;
  int row = source, expert = 0;
  float weight = 1.0f;
  if (!MoeArena::by_row(args)) {
    int route = source;
    if (!args.decode) {
      const int place = window * args.window + source;
      if (place >= *reinterpret_cast<const int*>(args.arena + arena.header)) return;
      const Route sorted = reinterpret_cast<const Route*>(args.arena + arena.sorted)[place];
      route = sorted.route, expert = sorted.expert;
    } else {
      expert = expert_of(args, route);
      if (expert < 0) return;
    }
    row = route / args.top_k;
    if (args.weight_on_input) weight = args.weights[route];
    if (args.shared_h) expert = 0;
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = first + i < args.hidden ? load_input(args, row * args.x_stride + first + i) * weight : 0.0f;
  const int64_t pitch = static_cast<int64_t>(args.k) * 2 * arena.twice;
  unsigned char* to = args.arena + arena.inputs + (static_cast<int64_t>(source) * args.slices + slice) * kMatrices * pitch;
#pragma unroll
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    const __half* suh = static_cast<const __half*>(args.slice[slice].suh13) +
                        (static_cast<int64_t>(expert) * kMatrices + matrix) * args.k + first;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = x[i] * __half2float(suh[i]);
    hadamard_128(v, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= kHadamardScale;
    store_inputs(to + matrix * pitch, first, v, arena.twice);
  }
}

constexpr int kInputWarps = 8;

// Grid: (source rows, ceil(k/128 / 8), slices).
static __global__ void __launch_bounds__(32 * kInputWarps)
    moe_input_kernel(const __grid_constant__ MoeArgs args, int window) {
  wait_for_previous_grid();
  allow_next_grid();
  const int group = blockIdx.y * kInputWarps + threadIdx.x / 32;
  if (group < args.k / kHadamard) rotate_inputs(args, blockIdx.x, group, blockIdx.z, window);
}

// For few routes, whose inputs need not be sorted: one grid does both. Grid: (1 + source rows, ceil(k/128 / 8), slices).
static __global__ void __launch_bounds__(32 * kInputWarps)
    moe_route_and_input_kernel(const __grid_constant__ MoeArgs args) {
  wait_for_previous_grid();
  allow_next_grid();
  const int group = blockIdx.y * kInputWarps + threadIdx.x / 32;
  if (blockIdx.x == 0) {
    if (blockIdx.y == 0 && blockIdx.z == 0) list_routes(args);
  } else if (group < args.k / kHadamard) {
    rotate_inputs(args, blockIdx.x - 1, group, blockIdx.z, 0);
  }
}

}  // namespace exl3
