// The inputs of gate and up for many rows: x * suh and the transform.
#pragma once

#include "moe_transform.cuh"
#include "moe_values.cuh"

namespace exl3 {

// Eight neighbouring inputs of a row as they are, where they are 16 bits and all there.
__device__ __forceinline__ bool plain_inputs(const MoeArgs& args, int end) {
  return args.wide_x && end <= args.hidden && args.io_type != DataType::kFloat;
}
__device__ __forceinline__ uint4 load_plain(const MoeArgs& args, int row, int first) {
  return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.x) + row * args.x_stride + first);
}
// Times scale, as fp16.
__device__ __forceinline__ uint32_t convert_plain(DataType type, uint32_t word, float scale) {
  const float2 pair = type == DataType::kHalf ? half_pair(word)
                                              : make_float2(bits_to_float(word << 16), bits_to_float(word & 0xffff0000u));
  return pack_half2(pair.x * scale, pair.y * scale);
}
// Two neighbouring inputs, zero from `hidden` on, times scale, as fp16.
__device__ __forceinline__ uint32_t load_pair(const MoeArgs& args, int row, int first, float scale) {
  const auto at = [&](int k) {
    return k < args.hidden ? load(args.x, row * args.x_stride + k, args.io_type) * scale : 0.0f;
  };
  return pack_half2(at(first), at(first + 1));
}

// Inputs are stored as H x / 16, not over sqrt(128): a power of two keeps x exact in fp16. The middle makes up for it.
constexpr float kInputScale = 1.0f / 16;

// suh of a lane's points, as transform takes it.
struct Signs {
  uint32_t of[2 * kPieces][2];
  __device__ __forceinline__ explicit Signs(const __half* from) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 read = *reinterpret_cast<const uint4*>(from + piece * 32);
      of[2 * piece][0] = read.x, of[2 * piece][1] = read.y, of[2 * piece + 1][0] = read.z, of[2 * piece + 1][1] = read.w;
    }
  }
};

// Whether the inputs' kernel must do with fewer registers, or spill: on cards after SM90.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif

constexpr int kSixteen = 2 * kOctet;  // routes whose inputs a warp rotates at once

// One warp: the inputs of gate and up of up to 16 routes of an expert in one group of 128. Of this lane's two: where they
// go (source; -1: nowhere), their rows of x, and what they are multiplied by.
__device__ __forceinline__ void rotate_inputs(const MoeCall& call, const int (&source)[2], const int (&row)[2],
                                              const float (&weight)[2], int expert, int group, int slice) {
  const MoeArgs& args = call.args;
  const int first = group * kHadamard + static_cast<int>(threadIdx.x) % 4 * 8;
  const __half* suh =
      static_cast<const __half*>(args.slice[slice].suh13) + static_cast<int64_t>(expert) * kMatrices * args.k + first;
  Signs s(suh);  // asked for before x is waited for, and those of up before gate is made
  Groups x = {};
  if (plain_inputs(args, (group + 1) * kHadamard)) {
    uint4 read[2][kPieces] = {};
#pragma unroll
    for (int set = 0; set < 2; ++set)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        if (source[set] >= 0) read[set][piece] = load_plain(args, row[set], first + piece * 32);
#pragma unroll
    for (int set = 0; set < 2; ++set)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) put_piece(x, set, piece, read[set][piece]);
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) x[i][r] = convert_plain(args.io_type, x[i][r], kInputScale);
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (source[r % 2] >= 0)
          x[i][r] = load_pair(args, row[r % 2], first + i / 2 * 32 + i % 2 * 4 + r / 2 * 2, kInputScale);
  }
  const InnerTransform inner(threadIdx.x % 32);
  __half* const inputs = reinterpret_cast<__half*>(args.arena + call.arena.inputs);
  static_assert(kMatrices == 2, "after gate comes up, and nothing");
#pragma unroll 1
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    Signs next = s;
    if (!kFewRegisters && matrix == 0) next = Signs(suh + args.k);
    uint32_t out[2][2 * kPieces][2];  // [half][as in Groups][set]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      HalfOfGroups v;
      transform(x, s.of, inner, half, v);
#pragma unroll
      for (int i = 0; i < 2 * kPieces; ++i)
#pragma unroll
        for (int set = 0; set < 2; ++set)
          out[half][i][set] = pack_half2(v[i][2 * set] * weight[set], v[i][2 * set + 1] * weight[set]);
    }
#pragma unroll
    for (int set = 0; set < 2; ++set) {
      if (source[set] < 0) continue;
      const int64_t number = (static_cast<int64_t>(source[set]) * args.slices + slice) * kMatrices + matrix;
      __half* to = inputs + number * args.k + first;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        *reinterpret_cast<uint4*>(to + piece * 32) = make_uint4(out[0][2 * piece][set], out[1][2 * piece][set],
                                                                out[0][2 * piece + 1][set], out[1][2 * piece + 1][set]);
    }
    if (kFewRegisters && matrix == 0) next = Signs(suh + args.k);
    s = next;
  }
}

constexpr int kRouteThreads = 1024;

// Grid: chunks.
static __global__ void __launch_bounds__(kRouteThreads, 1)
    moe_count_kernel(const __grid_constant__ MoeCall call) {
  __shared__ __align__(16) unsigned count[kMaxExperts];
  wait_for_previous_grid();
  allow_next_grid();
  const int begin = static_cast<int>(blockIdx.x) * kChunkRoutes;
  count_routes(call.args, begin, min(begin + kChunkRoutes, call.arena.routes), count);
  unsigned* to = reinterpret_cast<unsigned*>(call.args.arena + call.arena.counts) + blockIdx.x * call.args.experts;
  for (int expert = threadIdx.x; expert < call.args.experts; expert += kRouteThreads) to[expert] = count[expert];
}

// Grid: chunks.
static __global__ void __launch_bounds__(kRouteThreads, 1)
    moe_route_kernel(const __grid_constant__ MoeCall call) {
  static_assert(kMaxWindows * kBlockSizes < kRouteThreads, "a thread a counter, and one for the end");
  wait_for_previous_grid();
  allow_next_grid();
  list_routes<false>(call, blockIdx.x, call.arena.chunks);
}

// The sixteens of a window's blocks, by their sizes; of those of a size the first sixteens, then the second ones. Lane i of a
// warp has what is of size i. A block's last sixteen may be empty.
struct Sixteens {
  int first, blocks, end, all;  // of the size: its first block, how many; sixteens up to its last; of all sizes
  __device__ __forceinline__ Sixteens(const MoeCall& call, int window) {
    const int lane = threadIdx.x % 32;
    const int* sizes = reinterpret_cast<const int*>(call.args.arena + call.arena.sizes) + window * kBlockSizes;
    first = sizes[min(lane, kBlockSizes)], blocks = sizes[min(lane + 1, kBlockSizes)] - first;
    end = blocks * of_block(call.args, lane);
#pragma unroll
    for (int span = 1; span < kBlockSizes; span *= 2) {
      const int before = static_cast<int>(shuffle_from(end, max(lane - span, 0)));
      if (lane >= span) end += before;
    }
    all = static_cast<int>(shuffle_from(end, kBlockSizes - 1));
  }
  static __device__ __forceinline__ int of_block(const MoeArgs& args, int size) {
    return max((args.row_tile - size * kSizeRows) / kSixteen, 1);
  }
  // The block of one of them, whose number within the block it becomes. All lanes.
  __device__ __forceinline__ int block_of(const MoeArgs& args, int& sixteen) const {
    const int size = __popc(lanes_where(static_cast<int>(threadIdx.x) % 32 < kBlockSizes && end <= sixteen));
    const uint32_t of_size = kFewRegisters ? shuffle_from(first, size + 1) - shuffle_from(first, size)
                                           : shuffle_from(blocks, size);
    const int count = static_cast<int>(of_size);
    sixteen -= static_cast<int>(shuffle_from(end, size)) - count * of_block(args, size);
    const int number = sixteen / count, place = sixteen - number * count;
    sixteen = number;
    return static_cast<int>(shuffle_from(first, size)) + place;
  }
};

constexpr int kInputWarps = 6, kInputGroups = 4;  // groups of k a warp rotates one after the other

// Goes through (16 routes of a block, kInputGroups groups of k), or where inputs belong to rows, (16 rows, groups): a warp
// each.
// Grid: (any, slices).
static __global__ void __launch_bounds__(32 * kInputWarps, 2)
    moe_input_kernel(const __grid_constant__ MoeCall call, int window) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArgs& args = call.args;
  const int groups = args.k / kHadamard, lane = threadIdx.x % 32;
  const MoeBlock* blocks = reinterpret_cast<const MoeBlock*>(args.arena + call.arena.blocks);
  const Sixteens of_window(call, window);
  const Route* sorted = reinterpret_cast<const Route*>(args.arena + call.arena.sorted);
  const int sixteens = call.by_row ? (args.m + kSixteen - 1) / kSixteen : of_window.all;
  const int runs = (groups + kInputGroups - 1) / kInputGroups, all = sixteens * runs, warps = gridDim.x * kInputWarps;
  // Where the last round would leave more than a quarter of the warps idle, its groups go one by one.
  const int whole = min((all + warps / 4) / warps * warps, all);
  for (int at = blockIdx.x * kInputWarps + threadIdx.x / 32; at < whole + (all - whole) * kInputGroups; at += warps) {
    const int run = at < whole ? at : whole + (at - whole) / kInputGroups;
    const int first_group = run % runs * kInputGroups + (at < whole ? 0 : (at - whole) % kInputGroups);
    const int last_group = min(first_group + (at < whole ? kInputGroups : 1), groups);
    int sixteen = run / runs;
    int begin = sixteen * kSixteen, end = args.m, expert = 0;
    if (!call.by_row) {
      const MoeBlock& block = blocks[of_window.block_of(args, sixteen)];
      begin = block.start + sixteen * kSixteen, end = block.start + block.count;
      expert = args.shared_h ? 0 : block.expert;
    }
    if (begin >= end) continue;
    int source[2], row[2];
    float weight[2];
#pragma unroll
    for (int set = 0; set < 2; ++set) {
      const int place = begin + set * kOctet + lane / 4;
      source[set] = place >= end ? -1 : call.by_row ? place : place - window * args.window;
      row[set] = place, weight[set] = 1.0f;
      if (call.by_row || place >= end) continue;
      const InputRow of = input_row(args, sorted[place].route, expert);
      row[set] = of.row, weight[set] = of.weight;
    }
#pragma unroll 1
    for (int group = first_group; group < last_group; ++group)
      rotate_inputs(call, source, row, weight, expert, group, blockIdx.y);
  }
}

}  // namespace exl3
