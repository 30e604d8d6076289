// What csrc/exl3/ptx.cuh offers, name by name, on the emulated machine. Instructions that a warp performs together
// check that every lane came; memory accesses check bounds and alignment.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace exl3 {

inline void keep_in_register(uint32_t&) {}

using SharedAddress = uint32_t;

inline SharedAddress dynamic_shared() { return emulate::kSharedBase; }

template <class T>
T load_shared(SharedAddress address, const char* what) {
  T value;
  std::memcpy(&value, emulate::shared_pointer(address, sizeof(T), what), sizeof(T));
  return value;
}
inline uint32_t load_shared_32(SharedAddress address) { return load_shared<uint32_t>(address, "ld.shared.b32"); }
inline uint4 load_shared_128(SharedAddress address) { return load_shared<uint4>(address, "ld.shared.v4.b32"); }

inline uint2 load_shared_64(SharedAddress address) { return load_shared<uint2>(address, "ld.shared.v2.b32"); }

// Matrix by matrix, lane l gets elements 2(l%4) and the next of the row whose address lane 8 * matrix + l/4 gave.
struct MatrixRows {
  SharedAddress row;
  uint4 elements;
};
inline void read_matrices(void* const (&requests)[emulate::kLanes]) {
  for (int lane = 0; lane < emulate::kLanes; ++lane) {
    uint32_t words[4];
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto& owner = *static_cast<const MatrixRows*>(requests[matrix * 8 + lane / 4]);
      std::memcpy(&words[matrix], emulate::shared_pointer(owner.row, 16, "ldmatrix") + lane % 4 * 4, 4);
    }
    static_cast<MatrixRows*>(requests[lane])->elements = {words[0], words[1], words[2], words[3]};
  }
}
inline uint4 load_matrices(SharedAddress row) {
  MatrixRows mine{row, {}};
  emulate::wait_for_warp(read_matrices, &mine);
  return mine.elements;
}

// The same transposed: lane l gets of each matrix the elements l/4 of rows 2(l%4) and the next.
inline void read_transposed(void* const (&requests)[emulate::kLanes]) {
  for (int lane = 0; lane < emulate::kLanes; ++lane) {
    uint16_t halves[8];
    for (int i = 0; i < 8; ++i) {
      const auto& owner = *static_cast<const MatrixRows*>(requests[i / 2 * 8 + lane % 4 * 2 + i % 2]);
      std::memcpy(&halves[i], emulate::shared_pointer(owner.row, 16, "ldmatrix") + lane / 4 * 2, 2);
    }
    std::memcpy(&static_cast<MatrixRows*>(requests[lane])->elements, halves, sizeof(halves));
  }
}
inline uint4 load_matrices_transposed(SharedAddress row) {
  MatrixRows mine{row, {}};
  emulate::wait_for_warp(read_transposed, &mine);
  return mine.elements;
}
inline void store_shared_64(SharedAddress address, uint2 v) {
  std::memcpy(emulate::shared_pointer(address, sizeof(v), "st.shared.v2.b32"), &v, sizeof(v));
}

inline void cp_async_16(SharedAddress to, const void* from) { emulate::copy_later(to, from); }
inline void cp_async_16_if(bool wanted, SharedAddress to, const void* from) {
  if (wanted) cp_async_16(to, from);
}
inline void cp_async_commit() { emulate::commit_copies(); }
template <int kPending>
void cp_async_wait() { emulate::finish_copies(kPending); }

struct MmaOperands {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
// The fragments as the instruction set lays them out: lane 4g + c holds of A rows g and g + 8, of B column g, of D rows
// g and g + 8; pairs of neighbours, along k for A and B, along columns for D.
inline void multiply_fragments(void* const (&requests)[emulate::kLanes]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < emulate::kLanes; ++lane) {
    const auto& operands = *static_cast<const MmaOperands*>(requests[lane]);
    const int g = lane / 4, c = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r)
        a[g + r % 2 * 8][2 * c + half + r / 2 * 8] = emulate::half_to_float(operands.a[r] >> 16 * half & 0xffff);
      for (int r = 0; r < 2; ++r)
        b[2 * c + half + r * 8][g] = emulate::half_to_float(operands.b[r] >> 16 * half & 0xffff);
    }
  }
  for (int lane = 0; lane < emulate::kLanes; ++lane) {
    float* d = static_cast<const MmaOperands*>(requests[lane])->d;
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      d[e] += sum;
    }
  }
}
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaOperands operands{d, a, {b0, b1}};
  emulate::wait_for_warp(multiply_fragments, &operands);
}

inline void mma_m16n8k16_half(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float sum[4] = {};
  mma_m16n8k16(sum, a, b0, b1);
  for (int r = 0; r < 2; ++r)
    d[r] = static_cast<uint32_t>(emulate::round_to<10, 5>(sum[2 * r])) |
           static_cast<uint32_t>(emulate::round_to<10, 5>(sum[2 * r + 1])) << 16;
}

struct ByteOperands {
  uint32_t* d;
  const uint32_t* a;
  uint32_t b[2];
};
// As multiply_fragments, with four bytes in the place of two halves.
inline void multiply_bytes(void* const (&requests)[emulate::kLanes]) {
  uint32_t a[16][32], b[32][8];
  for (int lane = 0; lane < emulate::kLanes; ++lane) {
    const auto& operands = *static_cast<const ByteOperands*>(requests[lane]);
    const int g = lane / 4, c = lane % 4;
    for (int byte = 0; byte < 4; ++byte) {
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][4 * c + byte + r / 2 * 16] = operands.a[r] >> 8 * byte & 0xff;
      for (int r = 0; r < 2; ++r) b[4 * c + byte + r * 16][g] = operands.b[r] >> 8 * byte & 0xff;
    }
  }
  for (int lane = 0; lane < emulate::kLanes; ++lane) {
    uint32_t* d = static_cast<const ByteOperands*>(requests[lane])->d;
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
      d[e] = 0;
      for (int k = 0; k < 32; ++k) d[e] += a[row][k] * b[k][column];
    }
  }
}
inline void mma_m16n8k32_bytes(uint32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ByteOperands operands{d, a, {b0, b1}};
  emulate::wait_for_warp(multiply_bytes, &operands);
}

template <uint32_t kMask, uint32_t kFlip>
uint32_t and_xor(uint32_t x) { return (x & kMask) ^ kFlip; }

inline uint32_t byte_pick(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15;
    if (nibble & 8) emulate::fail("prmt: selector %x replicates a sign, which is not emulated", selector);
    picked |= static_cast<uint32_t>(bytes >> 8 * nibble & 0xff) << 8 * i;
  }
  return picked;
}

// The instruction clamps shifts beyond 32.
inline uint32_t funnel_left(uint32_t high, uint32_t low, uint32_t shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (32 - min(shift, 32u)));
}

inline uint32_t byte_sum(uint32_t x, uint32_t base) {
  return base + (x & 0xff) + (x >> 8 & 0xff) + (x >> 16 & 0xff) + (x >> 24);
}

inline uint32_t dot_upper_half(uint32_t x) { return x >> 16; }

// a * b + c on both halves, rounded once: the sum is exact in a double for the magnitudes of the codebooks.
inline uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y = 0;
  for (int at = 0; at < 32; at += 16) {
    const auto half = [at](uint32_t v) { return static_cast<double>(emulate::half_to_float(v >> at & 0xffff)); };
    y |= static_cast<uint32_t>(emulate::round_to<10, 5>(half(a) * half(b) + half(c))) << at;
  }
  return y;
}
inline uint32_t mul_half2(uint32_t a, uint32_t b) { return fma_half2(a, b, 0x80008000u); }
inline uint32_t add_half2(uint32_t a, uint32_t b) { return fma_half2(a, 0x3c003c00u, b); }
inline uint32_t sub_half2(uint32_t a, uint32_t b) { return add_half2(a, b ^ 0x80008000u); }
inline uint32_t add_halves(uint32_t x) { return add_half2((x & 0xffff) * 0x10001u, (x >> 16) * 0x10001u); }

template <bool kHigh>
uint32_t mul_by_half(uint32_t x, uint32_t y) { return mul_half2(x, (kHigh ? y >> 16 : y & 0xffff) * 0x10001u); }

struct Shuffle {
  float value;
  int mask;
  float result;
};
inline float shuffle_xor(float x, int lane_mask) {
  Shuffle mine{x, lane_mask, 0};
  emulate::wait_for_warp(
      [](void* const (&requests)[emulate::kLanes]) {
        for (int lane = 0; lane < emulate::kLanes; ++lane) {
          auto& shuffle = *static_cast<Shuffle*>(requests[lane]);
          shuffle.result = static_cast<const Shuffle*>(requests[(lane ^ shuffle.mask) % emulate::kLanes])->value;
        }
      },
      &mine);
  return mine.result;
}

struct ShuffleFrom {
  uint32_t value;
  int lane;
  uint32_t result;
};
inline uint32_t shuffle_from(uint32_t x, int lane) {
  ShuffleFrom mine{x, lane, 0};
  emulate::wait_for_warp(
      [](void* const (&requests)[emulate::kLanes]) {
        for (int lane = 0; lane < emulate::kLanes; ++lane) {
          auto& shuffle = *static_cast<ShuffleFrom*>(requests[lane]);
          shuffle.result = static_cast<const ShuffleFrom*>(requests[shuffle.lane % emulate::kLanes])->value;
        }
      },
      &mine);
  return mine.result;
}

inline uint32_t lanes_where(bool holds) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < emulate::kLanes; ++lane) lanes |= (shuffle_from(holds, lane) & 1) << lane;
  return lanes;
}

inline unsigned char* rows_after(unsigned char* to, uint32_t pitch, uint32_t count) {
  return to + static_cast<uint64_t>(pitch) * count;
}
inline void store_32_if_more(int count, int limit, unsigned char* to, uint32_t value) {
  if (count > limit) *reinterpret_cast<uint32_t*>(to) = value;
}

template <class T>
T load_once(const T* p) {
  return *p;
}
template <class T>
T load_from_l2(const T* p) {
  return *p;
}

inline void fence_device() {}
// Blocks run one after the other: whoever would have to wait is one that relies on a block which starts later.
inline void raise_flag(unsigned* flag) { *flag = 1; }
inline void wait_for_flag(const unsigned* flag) {
  if (*flag != 1) emulate::fail("a flag that no block before this one raised");
}
inline unsigned atomic_increment(unsigned* counter) { return (*counter)++; }

inline void wait_for_previous_grid() { emulate::wait_for_grid(); }
inline void allow_next_grid() { emulate::allow_next_grid(); }
inline void earlier_grids_have_ended() { emulate::wait_for_earlier_grids(); }

}  // namespace exl3
