// Every instruction the kernels need that C++ cannot spell, one thin wrapper each.
// Kernel bodies use nothing outside this file and plain C++, so that a host build can replace this file alone.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace exl3 {

// Hide where a value came from: the compiler would rather work out a loop constant again than hold it.
__device__ __forceinline__ void keep_in_register(uint32_t& value) { asm volatile("" : "+r"(value)); }

// A byte address in the block's shared memory. Kept as a number: as a pointer the compiler works its window out anew
// before every access.
using SharedAddress = uint32_t;

// Start of the dynamic shared memory, 16-byte aligned; opaque, so that it stays in a register.
__device__ __forceinline__ SharedAddress dynamic_shared() {
  extern __shared__ __align__(16) unsigned char exl3_dynamic_shared[];
  SharedAddress address = static_cast<SharedAddress>(__cvta_generic_to_shared(exl3_dynamic_shared));
  keep_in_register(address);
  return address;
}

__device__ __forceinline__ uint32_t load_shared_32(SharedAddress address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_shared_64(SharedAddress address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
// Four 8x8 matrices of fp16; lane l gives the address of the 16-byte row l%8 of matrix l/8 and gets of each matrix the
// elements 2(l%4)+{0,1} of row l/4: with k along a row, the B fragments of two MMAs.
__device__ __forceinline__ uint4 load_matrices(SharedAddress row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(row));
  return v;
}

// The same of matrices stored the other way round, with k down the rows: elements of column l/4, rows 2(l%4)+{0,1}.
__device__ __forceinline__ uint4 load_matrices_transposed(SharedAddress row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(row));
  return v;
}
__device__ __forceinline__ void store_shared_64(SharedAddress address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

// Asynchronous 16-byte copy, global to shared, past L1: weights are read once. Both addresses 16-byte aligned.
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same where `wanted`, without a branch.
__device__ __forceinline__ void cp_async_16_if(bool wanted, SharedAddress to, const void* from) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to), "l"(from),
               "r"(static_cast<int>(wanted))
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of this thread's committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// d = a * b + d, one m16n8k16 step: a [16, 16] fp16 row-major, b [16, 8] fp16 column-major, d [16, 8] fp32.
// Lane l holds a rows l/4 and l/4+8, columns 2(l%4)+{0,1} and +8; b column l/4; d row l/4 (+8), columns 2(l%4)+{0,1}.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a * b, fp16 rounded once: fragments as above, but d row l/4, columns 2(l%4)+{0,1} in d[0], row l/4+8 in d[1].
__device__ __forceinline__ void mma_m16n8k16_half(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
      : "=r"(d[0]), "=r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// d = a * b, bytes without sign: a [16, 32] row-major, b [32, 8] column-major. Lane l holds a rows l/4 and l/4+8, columns
// 4(l%4)+{0..3} and +16; b column l/4; d as mma_m16n8k16.
__device__ __forceinline__ void mma_m16n8k32_bytes(uint32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// (x & kMask) ^ kFlip in one instruction: the compiler would otherwise sometimes split it.
template <uint32_t kMask, uint32_t kFlip>
__device__ __forceinline__ uint32_t and_xor(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "n"(kMask), "n"(kFlip));
  return y;
}

// Bytes of the 64-bit value {high, low} picked by the four nibbles of selector.
__device__ __forceinline__ uint32_t byte_pick(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// The 32 bits that start `shift` bits into the bit string high:low, most significant first; shift in 0..32.
__device__ __forceinline__ uint32_t funnel_left(uint32_t high, uint32_t low, uint32_t shift) {
  return __funnelshift_lc(low, high, shift);
}

// Sum of the four bytes of x, plus base.
__device__ __forceinline__ uint32_t byte_sum(uint32_t x, uint32_t base) { return __dp4a(x, 0x01010101u, base); }

// The upper half of x, as a dot product with (0, 1).
__device__ __forceinline__ uint32_t dot_upper_half(uint32_t x) { return __dp2a_lo(x, 0x0100u, 0u); }

// fp16 pair arithmetic on raw words.
__device__ __forceinline__ uint32_t add_half2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ uint32_t sub_half2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ uint32_t mul_half2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// Rounded sum of the two fp16 halves of x, in both halves of the result: one instruction with operand swizzles.
__device__ __forceinline__ uint32_t add_halves(uint32_t x) {
  uint32_t y;
  asm("{.reg .b16 l, h; .reg .b32 ll, hh; mov.b32 {l, h}, %1; mov.b32 ll, {l, l}; mov.b32 hh, {h, h};"
      " add.rn.f16x2 %0, ll, hh;}"
      : "=r"(y)
      : "r"(x));
  return y;
}

// Both halves of x times one half of y, the low one or the high one: one instruction with an operand swizzle.
template <bool kHigh>
__device__ __forceinline__ uint32_t mul_by_half(uint32_t x, uint32_t y) {
  uint32_t z;
  if constexpr (kHigh)
    asm("{.reg .b16 l, h; .reg .b32 hh; mov.b32 {l, h}, %2; mov.b32 hh, {h, h}; mul.rn.f16x2 %0, %1, hh;}"
        : "=r"(z)
        : "r"(x), "r"(y));
  else
    asm("{.reg .b16 l, h; .reg .b32 ll; mov.b32 {l, h}, %2; mov.b32 ll, {l, l}; mul.rn.f16x2 %0, %1, ll;}"
        : "=r"(z)
        : "r"(x), "r"(y));
  return z;
}

__device__ __forceinline__ float shuffle_xor(float x, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, x, lane_mask);
}

// What lane `lane` of the warp has.
__device__ __forceinline__ uint32_t shuffle_from(uint32_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// The lanes of the warp for which this holds, a bit each.
__device__ __forceinline__ uint32_t lanes_where(bool holds) { return __ballot_sync(0xffffffffu, holds); }

// 16 bytes from another block's writes: from L2, never from this SM's L1.
template <class T>
__device__ __forceinline__ T load_from_l2(const T* p) {
  return __ldcg(p);
}

// What is read once and by nobody else: the caches give it up first.
template <class T>
__device__ __forceinline__ T load_once(const T* p) {
  return __ldcs(p);
}

// `to` + count * pitch bytes, as one instruction: the compiler would add up 64 bits in two.
__device__ __forceinline__ unsigned char* rows_after(unsigned char* to, uint32_t pitch, uint32_t count) {
  uint64_t at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(pitch), "r"(count), "l"(reinterpret_cast<uint64_t>(to)));
  return reinterpret_cast<unsigned char*>(at);
}
// Store where count > limit, without a branch.
__device__ __forceinline__ void store_32_if_more(int count, int limit, unsigned char* to, uint32_t value) {
  asm volatile("{.reg .pred p; setp.gt.s32 p, %0, %1; @p st.global.b32 [%2], %3;}" ::"r"(count), "r"(limit), "l"(to),
               "r"(value)
               : "memory");
}

__device__ __forceinline__ void fence_device() { __threadfence(); }

// What the threads of a block wrote before a barrier, one of them makes known to a block that waits for the flag. That one
// reads it from L2, all threads after another barrier.
__device__ __forceinline__ void raise_flag(unsigned* flag) {
  __threadfence();
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_for_flag(const unsigned* flag) {
  unsigned raised;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  while (raised == 0);
}

__device__ __forceinline__ unsigned atomic_increment(unsigned* counter) { return atomicAdd(counter, 1u); }

// Programmatic dependent launch, SM90 and newer: a launch that was not made dependent passes through at once.
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Says that what follows reads what grids before the one ahead wrote, without having waited for that one. Holds wherever
// the grid ahead waits before it allows the next: nothing is left to do.
__device__ __forceinline__ void earlier_grids_have_ended() {}

}  // namespace exl3
