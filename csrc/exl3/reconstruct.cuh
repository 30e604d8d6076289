// Whole matrices out of trellises, for many rows: the product is then a library's.
#pragma once

#include "rotate.cuh"

namespace exl3 {

constexpr int kReconstructWarps = 8;  // one a tile of a 128-column block

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) { return pack_half2(low, high); }
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 to_float2(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <class T>
__device__ __forceinline__ uint32_t from_half2(uint32_t pair) {
  if constexpr (sizeof(T) == 2 && !std::is_same_v<T, __half>) {
    const float2 v = to_float2(pair);
    return pack_pair<T>(v.x, v.y);
  } else {
    return pair;
  }
}

// 16-byte row pieces of a [rows, 128] tile in shared memory to w; pitch in 16-bit elements.
template <class T, int kRows, int kPitch>
__device__ __forceinline__ void store_rows(const uint16_t* tile, T* w, int64_t stride, int rows, int columns) {
  constexpr int kPieces = kBlockColumns / 8;
  const bool wide = stride % 8 == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0;
  for (int i = threadIdx.x; i < kRows * kPieces; i += 32 * kReconstructWarps) {
    const int row = i / kPieces, column = i % kPieces * 8;
    if (row >= rows) return;
    const uint4 piece = *reinterpret_cast<const uint4*>(tile + row * kPitch + column);
    uint16_t* to = reinterpret_cast<uint16_t*>(w) + row * stride + column;
    if (wide && column + 8 <= columns) {
      *reinterpret_cast<uint4*>(to) = piece;
    } else {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(&piece);
      for (int j = 0; j < 8 && column + j < columns; ++j) to[j] = from[j];
    }
  }
}

// w [k, n] = decoded trellis, exact in fp16. Grid: (n / 128, ceil(k / 64)).
template <Codebook kBook, int kRate2, class T>
__global__ void __launch_bounds__(32 * kReconstructWarps) reconstruct_kernel(const unsigned char* trellis, int k, int n,
                                                                            T* w) {
  constexpr int kDepth = 64, kPitch = kBlockColumns + 8;
  __shared__ __align__(16) uint16_t tile[kDepth * kPitch];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = min(kDepth, k - static_cast<int>(blockIdx.y) * kDepth);
  const LanePlace<kRate2> place(lane);
  const unsigned char* from =
      trellis + (static_cast<int64_t>(blockIdx.y) * (kDepth / kTile) * (n / kTile) + blockIdx.x * kBlockTiles + warp) *
                    Rate<kRate2>::kTileBytes;
#pragma unroll
  for (int i = 0; i < kDepth / kTile; ++i) {
    if (i * kTile >= rows) break;
    uint32_t a[4];  // each register: rows 2c, 2c+1 (+8) of one column
    const GlobalTile source{from + static_cast<int64_t>(i) * (n / kTile) * Rate<kRate2>::kTileBytes};
    decode_tile<kBook, kRate2>(source, place, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t pair = from_half2<T>(a[r]);
      const int row = i * kTile + lane % 4 * 2 + r / 2 * 8, column = warp * kTile + lane / 4 + r % 2 * 8;
      tile[row * kPitch + column] = static_cast<uint16_t>(pair);
      tile[(row + 1) * kPitch + column] = static_cast<uint16_t>(pair >> 16);
    }
  }
  __syncthreads();
  store_rows<T, kDepth, kPitch>(tile, w + static_cast<int64_t>(blockIdx.y) * kDepth * n + blockIdx.x * kBlockColumns, n,
                                rows, kBlockColumns);
}

// A fragment's pair of entries (i, j), (i, j + 1) of the 16-point Hadamard matrix times 1 / kDivide, exact in fp16: the
// sign of an entry is -1 to the popcount of i & j.
template <int kDivide = 1>
__device__ __forceinline__ uint32_t hadamard_pair(int i, int j) {
  static_assert(kDivide == 1 || kDivide == 16, "powers of two whose fp16 is known here");
  constexpr uint32_t kEntry = kDivide == 1 ? 0x3c00u : 0x2c00u;
  const uint32_t low = kEntry | (__popc(i & j) & 1) << 15, high = kEntry | (__popc(i & (j + 1)) & 1) << 15;
  return low | high << 16;
}
// The four transforms of a matrix add 128 x 128 weights of up to 4, which is as much as fp16 holds. Dividing by 16 at first
// leaves room, and costs no bit of what is not far below the rounding of the rest.
constexpr int kOriginalDivide = 16;
constexpr float kRowScale = static_cast<float>(kOriginalDivide) / kHadamard;

// v <- H8 v over eight registers of fp16 pairs, for each of kCount sets.
template <int kCount>
__device__ __forceinline__ void hadamard_8(uint32_t (&v)[8][kCount]) {
#pragma unroll
  for (int span = 1; span < 8; span *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if ((i & span) == 0)
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          const uint32_t low = v[i][e], high = v[i + span][e];
          v[i][e] = add_half2(low, high);
          v[i + span][e] = sub_half2(low, high);
        }
}

// A pair of fp16 times a scale, as T.
template <class T>
__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float scale) {
  if constexpr (std::is_same_v<T, __half>) return mul_half2(pair, pack_half2(scale, scale));
  const float2 v = to_float2(pair);
  return pack_pair<T>(v.x * scale, v.y * scale);
}

// Blocks an SM that the compiler leaves registers for: 7 and 8 bits have the most places to hold; with three blocks SM80
// would spill at 5 bits of mul1 and SM100 at 1.5.
__host__ __device__ constexpr int original_blocks(Codebook book, int rate2) {
  return rate2 >= 14 || (book == Codebook::kMul1 && (rate2 == 3 || rate2 == 10)) ? 2 : 3;
}

// Four neighbouring columns of each of a row's eight tiles, times their scales; left: columns from the first to the end.
template <class T>
__device__ __forceinline__ void store_original(T* w, const uint32_t (&u)[8][2], const uint2 (&scales)[8], float row_scale,
                                               bool wide, int64_t left) {
  uint16_t* to = reinterpret_cast<uint16_t*>(w);
#pragma unroll
  for (int i = 0; i < 8; ++i, left -= kTile) {
    const uint2 four = make_uint2(scale_pair<T>(mul_half2(u[i][0], scales[i].x), row_scale),
                                  scale_pair<T>(mul_half2(u[i][1], scales[i].y), row_scale));
    if (wide) {
      *reinterpret_cast<uint2*>(to + i * kTile) = four;
    } else {
      if (left > 0) to[i * kTile] = static_cast<uint16_t>(four.x);
      if (left > 1) to[i * kTile + 1] = static_cast<uint16_t>(four.x >> 16);
      if (left > 2) to[i * kTile + 2] = static_cast<uint16_t>(four.y);
      if (left > 3) to[i * kTile + 3] = static_cast<uint16_t>(four.y >> 16);
    }
  }
}

constexpr int kOriginalPitch = kBlockColumns / 2 + 8;  // words: rows 8 banks apart, 8-byte accesses free of conflicts

// w [k_true, columns] = diag(suh) H W H diag(svh), columns from 128 * first_block, 128 x 128 at a time. Grid: as many blocks
// as run at once. groups: k_true / 128, rounded up. Dynamic shared memory: kBlockTiles^2 packed tiles.
//
// H128 = H8 (x) H16. The tile is the B operand of H16 W, whose accumulators, rounded to fp16, are the A operand of
// (H16 W) H16: the tensor cores do both sides of the inner transform without a shuffle. The columns of the second H16
// are ordered so that a lane ends up with four neighbours. The outer H8 over tiles is adds of fp16 pairs: along k
// within a warp, along n after one exchange through shared memory. Eight roundings to fp16 cost about 6e-4 of error.
template <Codebook kBook, int kRate2, class T>
__global__ void __launch_bounds__(32 * kReconstructWarps, original_blocks(kBook, kRate2))
    reconstruct_original_kernel(const unsigned char* trellis, const __half* suh, const __half* svh, int n, int k_true,
                                int first_block, int columns, T* w, int64_t stride, int groups) {
  __shared__ __align__(16) uint32_t block[kHadamard * kOriginalPitch];
  constexpr int kBytes = Rate<kRate2>::kTileBytes, kPieces = kBytes / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int blocks = (columns + kBlockColumns - 1) / kBlockColumns;
  const uint32_t pitch = n / kTile * kBytes;  // from a row of tiles to the next
  const SharedAddress packed = dynamic_shared() + warp * kBlockTiles * kBytes;
  // A warp's eight tiles, one below the other.
  const auto fetch = [&](int group, int at) {
    const unsigned char* from = trellis + static_cast<uint64_t>(kBlockTiles * pitch) * group +
                                ((first_block + at) * kBlockTiles + warp) * kBytes;
#pragma unroll
    for (int i = 0; i < kBlockTiles * kPieces; i += 32)
      if (group < groups && (i + 32 <= kBlockTiles * kPieces || i + lane < kBlockTiles * kPieces))
        cp_async_16(packed + (i + lane) * 16, from + (i + lane) / kPieces * pitch + (i + lane) % kPieces * 16);
    cp_async_commit();
  };
  const uint32_t h[4] = {hadamard_pair<kOriginalDivide>(g, 2 * c), hadamard_pair<kOriginalDivide>(g + 8, 2 * c),
                         hadamard_pair<kOriginalDivide>(g, 2 * c + 8), hadamard_pair<kOriginalDivide>(g + 8, 2 * c + 8)};
  const int column = g / 2 * 4 + g % 2;  // of accumulator column g in the first product; two more in the second
  const uint32_t right[2][2] = {{hadamard_pair(column, 2 * c), hadamard_pair(column, 2 * c + 8)},
                                {hadamard_pair(column + 2, 2 * c), hadamard_pair(column + 2, 2 * c + 8)}};
  const LanePlace<kRate2> place(lane);
  int group = blockIdx.x / blocks, at = blockIdx.x % blocks;  // 128 rows, 128 columns
  const int groups_on = gridDim.x / blocks, on = gridDim.x % blocks;
  fetch(group, at);
#pragma unroll 1
  while (group < groups) {
    const int64_t k0 = static_cast<int64_t>(group) * kHadamard, n0 = static_cast<int64_t>(at) * kBlockColumns;
    uint32_t v[8][4];  // rows g, g + 8 of tile i; columns 4c, 4c+1, then 4c+2, 4c+3
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t b[4];  // b[0], b[2]: columns 0-7; b[1], b[3]: columns 8-15
      decode_tile_by_tensor_cores<kBook, kRate2>(SharedTile{packed + i * kBytes}, place, b);
      uint32_t left[2], middle[2];
      mma_m16n8k16_half(left, h, b[0], b[2]);
      mma_m16n8k16_half(middle, h, b[1], b[3]);
      const uint32_t a[4] = {left[0], left[1], middle[0], middle[1]};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t out[2];
        mma_m16n8k16_half(out, a, right[half][0], right[half][1]);
        v[i][half] = out[0], v[i][2 + half] = out[1];
      }
    }
    __syncwarp();
    group += groups_on, at += on;
    if (at >= blocks) at -= blocks, ++group;
    fetch(group, at);
    hadamard_8(v);
    __syncthreads();  // all have read the block before
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<uint2*>(block + (i * kTile + g + 8 * half) * kOriginalPitch + warp * 8 + 2 * c) =
            make_uint2(v[i][2 * half], v[i][2 * half + 1]);
    // A lane now takes four neighbouring columns of all eight tiles of a row.
    const bool wide = stride % 4 == 0 && reinterpret_cast<uintptr_t>(w) % 8 == 0 && n0 + kBlockColumns <= columns;
    uint2 scales[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      scales[i] = *reinterpret_cast<const uint2*>(svh + first_block * kBlockColumns + n0 + i * kTile + 4 * c);
    const __half row_scales[2] = {suh[k0 + warp * 8 + g], suh[k0 + warp * 8 + g + 64]};
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 8 + g + 64 * half;
      uint32_t u[8][2];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint2 read = *reinterpret_cast<const uint2*>(block + row * kOriginalPitch + i * 8 + 2 * c);
        u[i][0] = read.x, u[i][1] = read.y;
      }
      hadamard_8(u);
      const float row_scale = __half2float(row_scales[half]) * kRowScale;
      if (k0 + row < k_true)
        store_original(w + (k0 + row) * stride + n0 + 4 * c, u, scales, row_scale, wide, columns - (n0 + 4 * c));
    }
  }
}

// One warp a (row, 128-group): y = H (x * pre) / sqrt(128) * post. Grid: (ceil(n/128 / 4), m).
template <class X, class Y>
__global__ void __launch_bounds__(128) hadamard_kernel(const X* x, int64_t x_stride, int n_in, const __half* pre,
                                                       const __half* post, Y* y, int64_t y_stride, int n_out, int n) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * 4 + threadIdx.x / 32) * kHadamard + lane * 4;
  if (first >= n) return;
  const int64_t row = blockIdx.y;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = first + i < n_in ? to_float(x[row * x_stride + first + i]) : 0.0f;
    if (pre) v[i] *= __half2float(pre[first + i]);
  }
  hadamard_128(v, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i >= n_out) return;
    float out = v[i] * kHadamardScale;
    if (post) out *= __half2float(post[first + i]);
    y[row * y_stride + first + i] = static_cast<Y>(out);
  }
}

}  // namespace exl3
