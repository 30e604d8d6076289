// What csrc/exl3/tensor_map.cuh offers, on the emulated machine.
#pragma once

#include <cuda_runtime.h>

#include "pipeline.cuh"

namespace exl3 {

struct TensorMap {
  const unsigned char* matrix;
  int64_t rows, columns, pitch;
  int box_rows;
};
constexpr int kBoxColumns = 64;

inline cudaError_t describe_matrix(TensorMap& map, const void* matrix, int64_t rows, int64_t columns, int64_t pitch,
                                   int box_rows) {
  if (reinterpret_cast<uintptr_t>(matrix) % 16 || pitch % 16 || box_rows > 256 || rows < 1) return cudaErrorInvalidValue;
  map = {static_cast<const unsigned char*>(matrix), rows, columns, pitch, box_rows};
  return cudaSuccess;
}

inline void copy_box(SharedAddress to, const TensorMap& map, int column, int row, SharedAddress barrier) {
  alignas(16) static const unsigned char zeros[16] = {};
  if (to % 1024 || column < 0 || row < 0 || column + kBoxColumns > map.columns)
    emulate::fail("copy of a box: row %d, column %d to %#x", row, column, to);
  for (int r = 0; r < map.box_rows; ++r)
    for (int chunk = 0; chunk < 8; ++chunk) {
      const unsigned char* from = map.matrix + (row + r) * map.pitch + column * 2 + chunk * 16;
      bulk_copy(to + r * 128 + (chunk ^ r % 8) * 16, row + r < map.rows ? from : zeros, 16, barrier);
    }
}

}  // namespace exl3
