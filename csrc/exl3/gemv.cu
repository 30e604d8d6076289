// Few rows: up to 16, where decoding binds and the tensor cores idle.
#include "launch.cuh"

namespace exl3 {

int linear_row_tile(int m) {
  int rows = kGroupRows;
  while (rows < m && rows < kMaxFusedRows) rows *= 2;
  return rows;
}

size_t linear_scratch_bytes(int m, int k, int total_blocks, int shards, int splits) {
  return static_cast<size_t>(Scratch(m, linear_row_tile(m), k, total_blocks, shards, splits).bytes);
}

cudaError_t launch_linear(const LinearArgs& args, int codebook, bool dependent_launch, cudaStream_t stream) {
  const int rows = linear_row_tile(args.m);
  return rows <= 16 ? launch_few_rows(args, rows, codebook, dependent_launch, stream)
                    : launch_mid_rows(args, rows, codebook, dependent_launch, stream);
}

cudaError_t launch_few_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream) {
  return rows == 8 ? launch_book<Rows8>(args, codebook, dependent, stream)
                   : launch_book<Rows16>(args, codebook, dependent, stream);
}

}  // namespace exl3
