// The 128-point transform of many groups at once, by the tensor cores.
//
// H128 = H8 (x) H16. The inner transform is over bits 0, 1, 3 and 4 of a point's index, so that a lane has pieces of
// eight neighbouring points; its 16 x 16 matrix is the B operand, exact in fp16, and sixteen groups are the rows of A.
// The outer one is additions in fp32 within a lane. No shuffles.
#pragma once

#include "hadamard.cuh"
#include "mma.cuh"

namespace exl3 {

constexpr int kOctet = 8;   // groups in a set: one for each four lanes
constexpr int kPieces = 4;  // of a group a lane has, each eight neighbouring points
__device__ __forceinline__ int first_point(int lane, int piece) { return piece * 32 + lane % 4 * 8; }

// Two sets of groups, rows lane / 4 and lane / 4 + 8 of the tensor cores: [2p + q][2j + set] holds points 4q + 2j and
// the next of piece p.
using Groups = uint32_t[2 * kPieces][4];
__device__ __forceinline__ void put_piece(Groups& groups, int set, int piece, uint4 points) {
  groups[2 * piece][set] = points.x, groups[2 * piece][2 + set] = points.y;
  groups[2 * piece + 1][set] = points.z, groups[2 * piece + 1][2 + set] = points.w;
}

// Half of the points, transformed: [2p + q][2 set + i] is point 4q + 2 half + i of piece p.
using HalfOfGroups = float[2 * kPieces][4];

// Signs of entries (i, j) and (i, j + 1) of H16, over those of two fp16: -1 to the popcount of i & j.
__device__ __forceinline__ uint32_t hadamard_signs(int i, int j) {
  return (__popc(i & j) & 1) << 15 | static_cast<uint32_t>(__popc(i & (j + 1)) & 1) << 31;
}

// B operands of the inner transform, 1 or -1: columns 4 * (g / 2) + 2 half + g % 2 of H16, of which lane 4g + c has
// rows 4c to 4c + 3.
struct InnerTransform {
  uint32_t b[2][2];  // [half][pair of rows]
  __device__ __forceinline__ uint32_t operator()(int half, int pair) const { return half ? b[1][pair] : b[0][pair]; }
  __device__ __forceinline__ explicit InnerTransform(int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        b[half][j] = 0x3c003c00u | hadamard_signs(g / 2 * 4 + half * 2 + g % 2, c * 4 + j * 2);
  }
};

// The outer transform of kCount values.
template <int kCount, int kAll>
__device__ __forceinline__ void outer_transform(float (&v)[2 * kPieces][kAll]) {
#pragma unroll
  for (int span = 1; span < 2 * kPieces; span *= 2)
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i)
      if ((i & span) == 0)
#pragma unroll
        for (int e = 0; e < kCount; ++e) butterfly(v[i][e], v[i + span][e]);
}

// v <- H in, half of it.
__device__ __forceinline__ void transform(const Groups& in, const InnerTransform& inner, int half, HalfOfGroups& v) {
#pragma unroll
  for (int i = 0; i < 2 * kPieces; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[i][e] = 0.0f;
    mma_m16n8k16(v[i], in[i], inner(half, 0), inner(half, 1));
  }
  outer_transform<4>(v);
}

// The same of the sum of both sets, into the first.
__device__ __forceinline__ void transform_sum(const Groups& in, const InnerTransform& inner, int half,
                                              HalfOfGroups& v) {
#pragma unroll
  for (int i = 0; i < 2 * kPieces; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[i][e] = 0.0f;
    mma_m16n8k16(v[i], in[i], inner(half, 0), inner(half, 1));
    v[i][0] += v[i][2], v[i][1] += v[i][3];
  }
  outer_transform<2>(v);
}

// v <- H diag(s) in, half of it, for groups with the same s: [2p + q][j] is points 4q + 2j and the next of piece p. A
// sign of H16 turns over that of s, so nothing is rounded before the transform.
__device__ __forceinline__ void transform(const Groups& in, const uint32_t (&s)[2 * kPieces][2],
                                          const InnerTransform& inner, int half, HalfOfGroups& v) {
#pragma unroll
  for (int i = 0; i < 2 * kPieces; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[i][e] = 0.0f;
    mma_m16n8k16(v[i], in[i], s[i][0] ^ (inner(half, 0) & 0x80008000u), s[i][1] ^ (inner(half, 1) & 0x80008000u));
  }
  outer_transform<4>(v);
}

}  // namespace exl3
