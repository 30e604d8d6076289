// Between and after the products for many rows: activation, and the weighted sum of a row's experts.
#pragma once

#include "moe_rotate.cuh"
#include "warpgroup.cuh"

namespace exl3 {

// Sums lie in the order of the tensor cores: the eight of a lane's piece are channels first_channel and the next three,
// and those + 8, in turn. So point 4q + 2 half + i of a piece is channel 2q + half + 8i from the first.
__device__ __forceinline__ int first_channel_of(int lane, int piece) {
  const int place = first_point(lane, piece);
  return place / kTile * kTile + place % kTile / 2;
}

// The eight factors of a piece, [i][2q + half], from those of 128 channels. A lane reads eight neighbouring ones, for a
// load takes the longer the more lines it touches, and exchanges four of them with the lane that has the other half of
// the tile.
struct PieceFactors {
  uint2 four[2];
  __device__ __forceinline__ PieceFactors(const __half* s, int lane, int piece) {
    const uint4 read = *reinterpret_cast<const uint4*>(s + first_point(lane, piece));
    const bool second = lane % 2;
    const uint2 kept = second ? make_uint2(read.z, read.w) : make_uint2(read.x, read.y);
    const uint2 given = second ? make_uint2(read.x, read.y) : make_uint2(read.z, read.w);
    const uint2 taken = make_uint2(shuffle_from(given.x, lane ^ 1), shuffle_from(given.y, lane ^ 1));
    four[0] = second ? taken : kept, four[1] = second ? kept : taken;
  }
  __device__ __forceinline__ float operator()(int i, int of_four) const {
    const float2 pair = half_pair(of_four < 2 ? four[i].x : four[i].y);
    return of_four % 2 ? pair.y : pair.x;
  }
};

constexpr int kMiddleWarps = 4, kCombineWarps = 4;

// middle <- had(act(gate, up) * suh). A warp has eight (route, slice, 128 channels), gate in one set of groups and up
// in the other; then what is transformed, rounded to fp16, in one and what the rounding left out in the other.
template <MoeActivation kKind>
__device__ __forceinline__ void make_middle(const MoeCall& call, int window) {
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int blocks = args.width / kBlockColumns, lane = threadIdx.x % 32;
  const int at = (blockIdx.x * kMiddleWarps + threadIdx.x / 32) * kOctet + lane / 4;
  const int block = at % blocks, slice = at / blocks % args.slices, source = at / blocks / args.slices;
  const int place = window * args.window + source;
  const bool here = source < arena.window && place < *reinterpret_cast<const int*>(args.arena + arena.header);
  const int expert = here ? reinterpret_cast<const Route*>(args.arena + arena.sorted)[place].expert : 0;
  const __half* sums = reinterpret_cast<const __half*>(args.arena + arena.sums) +
                       (static_cast<int64_t>(source) * args.slices + slice) * kMatrices * args.width +
                       block * kBlockColumns;
  Groups in = {};
#pragma unroll
  for (int matrix = 0; matrix < kMatrices; ++matrix)
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (here)
        put_piece(in, matrix, piece,
                  *reinterpret_cast<const uint4*>(sums + matrix * args.width + first_point(lane, piece)));
  const InnerTransform inner(lane);
  const float scale = kHadamardScale * kHadamardScale / kInputScale / call.into_scale;
  const __half* svh = static_cast<const __half*>(args.slice[slice].svh13) +
                      static_cast<int64_t>(expert) * kMatrices * args.width + block * kBlockColumns;
  const __half* suh = static_cast<const __half*>(args.slice[slice].suh2) + static_cast<int64_t>(expert) * args.width +
                      block * kBlockColumns;
  HalfOfGroups v[2];
  transform(in, inner, 0, v[0]);
  transform(in, inner, 1, v[1]);
  Groups middle;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int channel = first_channel_of(lane, piece), of_all = slice * args.width + block * kBlockColumns + channel;
    const PieceFactors of_gate(svh, lane, piece), of_up(svh + args.width, lane, piece), of_middle(suh, lane, piece);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        float m[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float(&pair)[4] = v[half][2 * piece + q];
          const float gate = pair[i] * (of_gate(i, 2 * q + half) * scale);
          const float up = pair[2 + i] * (of_up(i, 2 * q + half) * scale);
          const bool used = of_all + 2 * q + half + 8 * i < args.intermediate;
          m[i] = used ? activate<true>(args, kKind, gate, up) * (of_middle(i, 2 * q + half) * kHadamardScale) : 0.0f;
        }
        const uint32_t high = pack_half2(m[0], m[1]);
        const float2 kept = half_pair(high);
        middle[2 * piece + q][2 * half] = high;
        middle[2 * piece + q][2 * half + 1] = pack_half2(m[0] - kept.x, m[1] - kept.y);
      }
  }
  transform_sum(middle, inner, 0, v[0]);
  transform_sum(middle, inner, 1, v[1]);
  __half* to = reinterpret_cast<__half*>(args.arena + arena.middle) +
               (static_cast<int64_t>(place) * args.slices + slice) * args.width + block * kBlockColumns;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (here)
        *reinterpret_cast<uint2*>(to + first_channel_of(lane, piece) + 8 * i) =
            make_uint2(pack_half2(v[0][2 * piece][i], v[1][2 * piece][i]),
                       pack_half2(v[0][2 * piece + 1][i], v[1][2 * piece + 1][i]));
}

// Grid: ceil(window * slices * blocks / 32). The activation is asked for once: what is run stays short.
static __global__ void __launch_bounds__(32 * kMiddleWarps, 3)
    moe_middle_kernel(const __grid_constant__ MoeCall call, int window) {
  wait_for_previous_grid();
  allow_next_grid();
  switch (call.args.activation) {
    case MoeActivation::kSilu: return make_middle<MoeActivation::kSilu>(call, window);
    case MoeActivation::kSiluStep: return make_middle<MoeActivation::kSiluStep>(call, window);
    case MoeActivation::kGelu: return make_middle<MoeActivation::kGelu>(call, window);
    case MoeActivation::kGeluTanh: return make_middle<MoeActivation::kGeluTanh>(call, window);
    case MoeActivation::kSquaredRelu: return make_middle<MoeActivation::kSquaredRelu>(call, window);
  }
}

// Four neighbouring outputs of a row.
__device__ __forceinline__ void store_outputs(const MoeArgs& args, int row, int64_t first, const float (&v)[4]) {
  const int64_t at = row * args.y_stride + first;
  if (args.wide_x && first + 4 <= args.hidden && args.io_type != DataType::kFloat) {
    const bool half = args.io_type == DataType::kHalf;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.y) + at) =
        half ? make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]))
             : make_uint2(pack_bfloat162(v[0], v[1]), pack_bfloat162(v[2], v[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (first + i < args.hidden) store(args.y, at + i, args.io_type, v[i]);
}

// Where the sums of a row's slot are, -1: nowhere; whose svh they take, and what they are multiplied by.
struct SlotSums {
  int place, expert;
  float weight;
};
__device__ __forceinline__ SlotSums slot_sums(const MoeArgs& args, const int* places, int row, int slot, float scale) {
  if (slot >= args.top_k) return {-1, 0, 0.0f};
  const int route = row * args.top_k + slot, place = places[slot], expert = args.shared_h ? 0 : expert_of(args, route);
  const float weight = args.weight_on_input ? scale : args.weights[route] * scale;
  return {place, expert < 0 ? 0 : expert, place < 0 ? 0.0f : weight};
}

// What lane `from` has of it.
__device__ __forceinline__ SlotSums from_lane(const SlotSums& of, int from) {
  const auto take = [&](uint32_t v) { return shuffle_from(v, from); };
  return {static_cast<int>(take(of.place)), static_cast<int>(take(of.expert)), bits_to_float(take(float_to_bits(of.weight)))};
}

// Three blocks an SM, as it was measured on SM90; on SM100 that would spill.
constexpr int kCombineBlocksPerSm = EXL3_WARPGROUP ? 3 : 2;

// y <- the sum over a row's slots, in their order. A warp has an octet of a row's columns, from block first_column on,
// of two slots at a time: of one in one set of groups, of the next in the other. Grid: ceil(m * octets / 4).
static __global__ void __launch_bounds__(32 * kCombineWarps, kCombineBlocksPerSm)
    moe_combine_kernel(const __grid_constant__ MoeCall call, int first_column, int columns) {
  wait_for_previous_grid();
  allow_next_grid();
  const MoeArgs& args = call.args;
  const MoeArena& arena = call.arena;
  const int octets = (columns + kOctet - 1) / kOctet, at = blockIdx.x * kCombineWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, row = at / octets, column = at % octets * kOctet + lane / 4;
  if (row >= args.m) return;
  const bool here = column < columns;
  const int64_t block = here ? static_cast<int64_t>(first_column + column) * kBlockColumns : 0;
  const float scale = kHadamardScale / call.down_scale;
  const int* places = reinterpret_cast<const int*>(args.arena + arena.places) + row * args.top_k;
  const __half* outputs = reinterpret_cast<const __half*>(args.arena + arena.outputs) + column * kBlockColumns;
  const InnerTransform inner(lane);
  float y[2][2 * kPieces][2] = {};
#pragma unroll 1
  for (int slice = 0; slice < args.slices; ++slice) {
    const __half* svh = static_cast<const __half*>(args.slice[slice].svh2) + block;
    SlotSums of_lane;  // a slot for each lane
#pragma unroll 1
    for (int slot = 0; slot < args.top_k; slot += 2) {
      if (slot % 32 == 0) of_lane = slot_sums(args, places, row, slot + lane, scale);
      const SlotSums now[2] = {from_lane(of_lane, slot % 32), from_lane(of_lane, slot % 32 + 1)};
      Groups in = {};
#pragma unroll
      for (int set = 0; set < 2; ++set) {
        const int64_t number = static_cast<int64_t>(now[set].place) * args.slices + slice;
        const __half* from = outputs + number * columns * kBlockColumns;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          if (here && now[set].place >= 0)  // once, so not at the cost of what is read again
            put_piece(in, set, piece, load_once(reinterpret_cast<const uint4*>(from + first_point(lane, piece))));
      }
      const __half* of_set[2];
#pragma unroll
      for (int set = 0; set < 2; ++set) of_set[set] = svh + static_cast<int64_t>(now[set].expert) * args.k;
      const PieceFactors factors[2][kPieces] = {
          {{of_set[0], lane, 0}, {of_set[0], lane, 1}, {of_set[0], lane, 2}, {of_set[0], lane, 3}},
          {{of_set[1], lane, 0}, {of_set[1], lane, 1}, {of_set[1], lane, 2}, {of_set[1], lane, 3}}};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        HalfOfGroups v;
        transform(in, inner, half, v);
#pragma unroll
        for (int set = 0; set < 2; ++set)
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
            for (int q = 0; q < 2; ++q)
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float& sum = y[half][2 * piece + q][i];
                const float factor = factors[set][piece](i, 2 * q + half) * now[set].weight;
                sum = fmaf(v[2 * piece + q][2 * set + i], factor, sum);
              }
      }
    }
  }
  if (!here) return;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float four[4] = {y[0][2 * piece][i], y[1][2 * piece][i], y[0][2 * piece + 1][i], y[1][2 * piece + 1][i]};
      store_outputs(args, row, block + first_channel_of(lane, piece) + 8 * i, four);
    }
}

}  // namespace exl3
