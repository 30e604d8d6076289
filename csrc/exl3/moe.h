// Routed experts: what one call is told, how its arena is laid out, and the launcher. As in exl3.h no torch, no
// allocation and no host synchronization; pointers are device memory, shapes are in elements.
#pragma once

#include "exl3.h"

namespace exl3 {

constexpr int kMaxSlices = 8;
constexpr int kMaxExperts = 2048;
constexpr int kMaxWindows = 64;
constexpr int kMatrices = 2;       // into the middle: gate and up
constexpr int kDecodeRows = 8;     // rows of a block of the decode plan
constexpr int kMaxRowTile = 256;   // of the prefill plan, on SM90; elsewhere kPairRowTile
constexpr int kPairRowTile = 128;

enum class MoeActivation : int { kSilu = 0, kSiluStep = 1, kGelu = 2, kGeluTanh = 3, kSquaredRelu = 4 };

// One slice of every expert: its slabs as they were loaded, and its vectors.
struct MoeSlice {
  const unsigned char* trellis[2];  // gate and up; down: each expert's [k/16, n/16, 16*K] i16 at the table's offset
  const void* suh13;                // [experts, 2, k] fp16; shared rotations: [2, k]
  const void* svh13;                // [experts, 2, width]
  const void* suh2;                 // [experts, width]
  const void* svh2;                 // [experts, k]; shared rotations: [k]
};

// y[row] = sum over a row's experts, in the order of its slots, and over slices of
//   weight * down(act(gate(x), up(x))), each of the three a had(had(. * suh) @ W) * svh.
struct MoeArgs {
  MoeSlice slice[kMaxSlices];
  const int64_t* table;   // [gate, up, down][experts]: bytes from the start of the slab, times 32, plus 2K
  const void* x;          // [m, hidden], rows x_stride elements apart; zero-extended to k
  const float* weights;   // [m, top_k]
  const void* ids;        // [m, top_k] int32, or int64 if wide_ids; outside 0..experts-1: nobody's
  void* y;                // [m, hidden], rows y_stride elements apart
  unsigned char* arena;   // moe_arena_bytes(), 256-byte aligned, contents ignored
  int64_t x_stride, y_stride;
  int m, top_k, experts, slices;
  int k, hidden, width, intermediate;  // see MoeQuery
  int row_tile;           // rows of a block of the product: 8 in the decode plan, else 16, 32, 64, 128, or 256 (see tall_blocks)
  bool pairs;             // SM90: blocks of 64 and 128 rows take two column blocks at once, where they are even in number
  int parts;              // into which k of gate and up is cut, the same for every m; 1 but in the decode plan
  int window;             // routes in one pass of gate and up, of which there are at most kMaxWindows
  int down_columns;       // columns of y in one pass of down, a multiple of 128
  int grid;               // thread blocks of a product, all of which run at once
  int max_rate2;          // the largest 2K in the table
  int codebook;
  bool decode;            // the plan for few rows, whose sums keep both halves of a decoded word apart
  bool shared_h, weight_on_input, wide_ids;
  bool wide_x;            // rows of x and of y begin at multiples of 16 bytes
  DataType io_type;
  MoeActivation activation;
  float limit, alpha, beta;  // see Activation; limit is infinite where there is none
};

// Whether the inputs of gate and up belong to rows, not to routes.
inline bool inputs_by_row(const MoeArgs& args) { return args.shared_h && !args.weight_on_input; }

// Whether blocks of kMaxRowTile rows can be multiplied: on SM90, whose copy engine fetches neighbouring rows.
inline bool tall_blocks(const MoeArgs& args) { return args.pairs && !inputs_by_row(args); }

// Bytes of the arena for args.m rows; grows with m, all else being equal.
int64_t moe_arena_bytes(const MoeArgs& args);

// dependent_launch: let each kernel of the call begin before the one ahead of it has ended (SM90+).
cudaError_t launch_moe(const MoeArgs& args, bool dependent_launch, cudaStream_t stream);

}  // namespace exl3
