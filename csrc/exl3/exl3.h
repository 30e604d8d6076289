// Launchers of the kernels. No torch, no allocation, no host synchronization: a call only enqueues work on its stream.
// Pointers are device memory unless said otherwise; shapes are in elements.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace exl3 {

enum class DataType : int { kHalf = 0, kBfloat16 = 1, kFloat = 2 };

constexpr int kMaxShards = 8;
constexpr int kMaxFusedRows = 128;  // rows of one tile of the widest fused kernel

// One quantized matrix [k, n] of a merged projection. k and n are multiples of 128. y takes its columns
// [first, first + width): the others are padding, or belong to another rank.
struct LinearShard {
  const unsigned char* trellis;  // [k/16, n/16, 16*K] i16, 16-byte aligned
  const void* suh;               // [k] fp16
  const void* svh;               // [n] fp16
  int first_block;               // 128-column blocks of the shards before this one
  int blocks;                    // n / 128
  int first, width;              // columns written
  int out_column;                // where they begin in y
  int rate2;                     // 2K
};

// y[:, out_column : out_column + width] = had(had(x * suh) @ W) * svh for every shard.
struct LinearArgs {
  LinearShard shard[kMaxShards];
  const void* x;           // [m, k_true], rows x_stride elements apart; zero-extended to k
  void* y;                 // [m, sum of widths], rows y_stride elements apart
  unsigned char* scratch;  // linear_scratch_bytes(), 256-byte aligned, contents ignored
  int64_t x_stride, y_stride;
  int shards, m, k, k_true, splits;
  DataType x_type, y_type;
};

// Rows of the kernel that serves m rows: 8, 16, 32, 64 or 128 (then several row tiles).
int linear_row_tile(int m);

// Scratch of one call. splits: blocks of the grid, over which the work is cut evenly; the same for every m.
size_t linear_scratch_bytes(int m, int k, int total_blocks, int shards, int splits);

// codebook: 0 3inst, 1 mcg, 2 mul1. dependent_launch: let the kernels of the call overlap their prologues (SM90+).
cudaError_t launch_linear(const LinearArgs& args, int codebook, bool dependent_launch, cudaStream_t stream);

// The same product for any number of rows by a kernel that only SM90 has; the sums are in another order.
// args.splits: thread blocks, one a multiprocessor. args.scratch: many_rows_scratch_bytes().
cudaError_t launch_many_rows(const LinearArgs& args, int codebook, bool dependent_launch, cudaStream_t stream);
size_t many_rows_scratch_bytes(int m, int k, int shards, int blocks);

// w [k, n] <- decoded trellis, exact, in the rotated basis. type: fp16, or bf16 (rounded once more).
cudaError_t launch_reconstruct(const void* trellis, int k, int n, int rate2, int codebook, void* w, DataType type,
                               cudaStream_t stream);

// w [k_true, columns] <- diag(suh) H W H diag(svh), the matrix before rotation, of column blocks first_block and up.
// n: columns of the trellis; columns: those written, from 128 * first_block; rows of w are w_stride elements apart.
cudaError_t launch_reconstruct_original(const void* trellis, const void* suh, const void* svh, int n, int k_true,
                                        int first_block, int columns, int rate2, int codebook, void* w,
                                        int64_t w_stride, DataType type, cudaStream_t stream);

// y [m, n_out] <- (H (x * pre) / sqrt(128)) * post, x [m, n_in] zero-extended to n and the result cut; n % 128 == 0.
// pre, post: [n] fp16 or null.
cudaError_t launch_hadamard(const void* x, int64_t x_stride, int n_in, const void* pre, const void* post, void* y,
                            int64_t y_stride, int n_out, int m, int n, DataType x_type, DataType y_type,
                            cudaStream_t stream);

}  // namespace exl3
