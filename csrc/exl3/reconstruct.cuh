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

// The four transforms of a matrix divide by 128 together, all in the second: 128 x 128 weights of up to 4 are as much
// as fp16 holds. It costs no bit of what is not far below the rounding of the rest.
constexpr int kOriginalDivide = kHadamard;

// A fragment's pair of entries (i, j), (i, j + 1) of the 16-point Hadamard matrix times 1 / kDivide, exact in fp16: the
// sign of an entry is -1 to the popcount of i & j.
template <int kDivide = 1>
__device__ __forceinline__ uint32_t hadamard_pair(int i, int j) {
  static_assert(kDivide == 1 || kDivide == 128, "powers of two whose fp16 is known here");
  constexpr uint32_t kEntry = kDivide == 1 ? 0x3c00u : 0x2000u;
  const uint32_t low = kEntry | (__popc(i & j) & 1) << 15, high = kEntry | (__popc(i & (j + 1)) & 1) << 15;
  return low | high << 16;
}

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

// a * (b0, b1) of tensor cores, columns 2c, 2c+1 of two rows, times scales, as T: rounded once where T is bfloat16.
template <class T>
struct ScaledProduct {
  float scale[2];
  __device__ __forceinline__ explicit ScaledProduct(uint32_t pair) {
    const float2 v = to_float2(pair);
    scale[0] = v.x, scale[1] = v.y;
  }
  __device__ __forceinline__ void operator()(uint32_t (&out)[2], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) const {
    float sum[4] = {};
    mma_m16n8k16(sum, a, b0, b1);
#pragma unroll
    for (int r = 0; r < 2; ++r) out[r] = pack_pair<T>(sum[2 * r] * scale[0], sum[2 * r + 1] * scale[1]);
  }
};
template <>
struct ScaledProduct<__half> {
  uint32_t scale;
  __device__ __forceinline__ explicit ScaledProduct(uint32_t pair) : scale(pair) {}
  __device__ __forceinline__ void operator()(uint32_t (&out)[2], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) const {
    mma_m16n8k16_half(out, a, b0, b1);
#pragma unroll
    for (int r = 0; r < 2; ++r) out[r] = mul_half2(out[r], scale);
  }
};

constexpr int kOriginalPitch = kBlockColumns * 2 + 32;  // bytes: rows 8 banks apart, 8-byte writes free of conflicts
constexpr int kOriginalRows = kHadamard / kReconstructWarps;  // that a warp stores of a block

// Dynamic shared memory: the block that warps exchange, then the packed tiles.
__host__ __device__ constexpr int original_shared_bytes(int rate2) {
  return kHadamard * kOriginalPitch + kBlockTiles * kBlockTiles * 16 * rate2;
}
// Blocks an SM that the compiler leaves registers for: 7 and 8 bits have the most places to hold; with three blocks
// SM86 would spill at 3.5 and 6 bits of mul1, SM80 at 5.
__host__ __device__ constexpr int original_blocks(Codebook book, int rate2) {
  return rate2 >= 14 || (book == Codebook::kMul1 && (rate2 == 7 || rate2 == 10 || rate2 == 12)) ? 2 : 3;
}

// Pairs of rows of which a warp's last products may be under way at once: fp32 sums take twice the registers, and up to
// 2 bits SM100 and SM120 have none to spare.
template <int kRate2, class T>
constexpr int kPairsAtOnce = std::is_same_v<T, __half> && kRate2 > 4 ? kOriginalRows / 2 : kOriginalRows / 4;

// Four neighbouring columns of a row, of which `left` are there.
__device__ __forceinline__ void store_some(uint16_t* to, uint32_t first, uint32_t second, int left) {
  if (left > 0) to[0] = static_cast<uint16_t>(first);
  if (left > 1) to[1] = static_cast<uint16_t>(first >> 16);
  if (left > 2) to[2] = static_cast<uint16_t>(second);
  if (left > 3) to[3] = static_cast<uint16_t>(second >> 16);
}

// w [k_true, columns] = diag(suh) H W H diag(svh), columns from 128 * first_block, 128 x 128 at a time. Grid: as many
// blocks as run at once. groups: k_true / 128, rounded up. Dynamic shared memory: original_shared_bytes.
//
// H128 = H8 (x) H16. The tile is the B operand of H16 W, whose accumulators, rounded to fp16, are the A operand of
// (H16 W) H16: the tensor cores do both sides of the inner transform without a shuffle. The outer H8 along k is adds of
// fp16 pairs over a warp's tiles. Along n, after an exchange through shared memory, the eight tiles of two rows are the
// B operand (k: tiles of the first row, then of the second) and H8 twice, times suh of either row, the A operand: a
// lane ends up with two columns of tile g of both rows. The exchange keeps a tile's columns 0, 1, 4, 5, 8, 9, 12, 13
// before the others, so that two products give a lane four neighbours, and a warp a row of 256 bytes. Five roundings to
// fp16, and two more where T is fp16, cost about 6e-4 of error.
template <Codebook kBook, int kRate2, class T>
__global__ void __launch_bounds__(32 * kReconstructWarps, original_blocks(kBook, kRate2))
    reconstruct_original_kernel(const unsigned char* trellis, const __half* suh, const __half* svh, int n, int k_true,
                                int first_block, int columns, T* w, int64_t stride, int groups) {
  constexpr int kBytes = Rate<kRate2>::kTileBytes, kPieces = kBytes / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int blocks = (columns + kBlockColumns - 1) / kBlockColumns;
  const uint32_t pitch = n / kTile * kBytes;  // from a row of tiles to the next
  const SharedAddress block = dynamic_shared();
  const SharedAddress packed = block + kHadamard * kOriginalPitch + warp * kBlockTiles * kBytes;
  // A warp's eight tiles, one below the other, four lanes to each.
  const auto fetch = [&](int group, int at) {
    const unsigned char* from = trellis + static_cast<uint64_t>(group * kBlockTiles + g) * pitch +
                                (((first_block + at) * kBlockTiles + warp) * kBytes + c * 16);
    if (group < groups)
#pragma unroll
      for (int i = 0; i < kPieces; i += 4)
        if (i + 4 <= kPieces || i + c < kPieces) cp_async_16(packed + g * kBytes + (i + c) * 16, from + i * 16);
    cp_async_commit();
  };
  const uint32_t h[4] = {hadamard_pair(g, 2 * c), hadamard_pair(g + 8, 2 * c), hadamard_pair(g, 2 * c + 8),
                         hadamard_pair(g + 8, 2 * c + 8)};  // h[0] is H8 as well
  // Of the tile, column g of the second product's first half; its other half has the columns four further on.
  const int column = g / 2 % 2 * 8 + g / 4 * 2 + g % 2;
  const uint32_t right[2][2] = {
      {hadamard_pair<kOriginalDivide>(column, 2 * c), hadamard_pair<kOriginalDivide>(column, 2 * c + 8)},
      {hadamard_pair<kOriginalDivide>(column + 4, 2 * c), hadamard_pair<kOriginalDivide>(column + 4, 2 * c + 8)}};
  // The two halves of a tile change places from tile 4 on, so that no two tiles of a row lie in the same banks.
  const SharedAddress put = block + g * kOriginalPitch + ((warp * 32 + 8 * c) ^ (warp & 4) * 4);
  const SharedAddress get = block + (warp * kOriginalRows + lane / 8 % 2) * kOriginalPitch +
                            ((lane % 8 * 32 + lane / 16 * 16) ^ (lane & 4) * 4);
  const bool aligned = stride % 4 == 0 && reinterpret_cast<uintptr_t>(w) % 8 == 0;
  const LanePlace<kRate2> place(lane);
  int group = blockIdx.x / blocks, at = blockIdx.x % blocks;  // 128 rows, 128 columns
  const int groups_on = gridDim.x / blocks, on = gridDim.x % blocks;
  fetch(group, at);
#pragma unroll 1
  while (group < groups) {
    const int n0 = at * kBlockColumns;
    const int64_t k0 = static_cast<int64_t>(group) * kHadamard + warp * kOriginalRows;  // what this warp stores
    uint32_t v[8][4];  // rows g, g + 8 of tile i; accumulator columns 2c, 2c+1 of the two products
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t b[2][2];  // columns 0-7, columns 8-15
      decode_tile_for_columns<kBook, kRate2>(SharedTile{packed + i * kBytes}, place, b);
      uint32_t left[2], middle[2];
      mma_m16n8k16_half(left, h, b[0][0], b[0][1]);
      mma_m16n8k16_half(middle, h, b[1][0], b[1][1]);
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
        store_shared_64(put + (i * kTile + 8 * half) * kOriginalPitch, make_uint2(v[i][2 * half], v[i][2 * half + 1]));
    const uint2 column_scales = *reinterpret_cast<const uint2*>(svh + first_block * kBlockColumns + n0 + 4 * lane);
    const ScaledProduct<T> low(column_scales.x), high(column_scales.y);
    const uint32_t row_scales = reinterpret_cast<const uint32_t*>(suh + k0)[lane % (kOriginalRows / 2)];
    const auto two_rows = [&](int pair, uint32_t (&first)[2], uint32_t (&second)[2]) {
      const uint32_t scales = shuffle_from(row_scales, pair);
      const uint32_t a[4] = {mul_by_half<false>(h[0], scales), 0, 0, mul_by_half<true>(h[0], scales)};
      const uint4 tiles = load_matrices_transposed(get + 2 * pair * kOriginalPitch);
      low(first, a, tiles.x, tiles.y);  // columns 4 * lane and the next, then two further on
      high(second, a, tiles.z, tiles.w);
    };
    uint16_t* to = reinterpret_cast<uint16_t*>(w) + k0 * stride + n0 + 4 * lane;
    __syncthreads();
    if (aligned && k0 + kOriginalRows <= k_true && n0 + kBlockColumns <= columns) {
#pragma unroll (kPairsAtOnce<kRate2, T>)
      for (int pair = 0; pair < kOriginalRows / 2; ++pair) {
        uint32_t first[2], second[2];
        two_rows(pair, first, second);
#pragma unroll
        for (int r = 0; r < 2; ++r, to += stride) *reinterpret_cast<uint2*>(to) = make_uint2(first[r], second[r]);
      }
    } else {
#pragma unroll 1
      for (int pair = 0; pair < kOriginalRows / 2; ++pair) {
        uint32_t first[2], second[2];
        two_rows(pair, first, second);
#pragma unroll
        for (int r = 0; r < 2; ++r, to += stride)
          if (k0 + 2 * pair + r < k_true) store_some(to, first[r], second[r], columns - (n0 + 4 * lane));
      }
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
