// Warpgroup MMA of SM90: four warps multiply 64 rows of register fragments with x straight from shared memory, in the
// background. Compiled for sm_90a only; every other target uses mma_m16n8k16. Same fragments, same sums per warp.
#pragma once

#include "ptx.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EXL3_WARPGROUP 1
#else
#define EXL3_WARPGROUP 0
#endif

namespace exl3 {

// This thread's ordinary writes to shared memory become visible to warpgroup MMA.
__device__ __forceinline__ void publish_shared() {
#if EXL3_WARPGROUP
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if EXL3_WARPGROUP

// Shared memory as the MMA reads it: 8x8 core matrices of 128 contiguous bytes, `along_k` bytes from one to the next in
// k and 128 from one to the next in rows of x. No swizzle.
__device__ __forceinline__ uint64_t matrix_descriptor(SharedAddress x, uint32_t along_k) {
  return static_cast<uint64_t>(x >> 4) | static_cast<uint64_t>(along_k >> 4) << 16 | static_cast<uint64_t>(128 >> 4) << 32;
}

// The same for rows of 64 k in 128 bytes, whose 16-byte chunks are swapped by (address / 128) % 8; rows follow each other,
// and the first of eight lies at a multiple of 1024. x + 32 is the next 16 k.
__device__ __forceinline__ uint64_t swizzled_descriptor(SharedAddress x) {
  return static_cast<uint64_t>(x >> 4) | 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}

// The descriptor of what lies so many bytes after what this one describes; nothing carries beyond the address.
__device__ __forceinline__ uint64_t descriptor_after(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000ull) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// Registers written before are the MMA's to read from here on.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The sums of so many groups of 8 rows: their places in the text of an instruction, and themselves.
#define EXL3_PLACES1 "%0, %1, %2, %3"
#define EXL3_PLACES2 EXL3_PLACES1 ", %4, %5, %6, %7"
#define EXL3_PLACES4 EXL3_PLACES2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define EXL3_PLACES8 EXL3_PLACES4 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EXL3_PLACES12 EXL3_PLACES8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define EXL3_PLACES16 EXL3_PLACES12 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EXL3_PLACES20 EXL3_PLACES16 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define EXL3_PLACES24 EXL3_PLACES20 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define EXL3_PLACES28 \
  EXL3_PLACES24 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define EXL3_PLACES32 \
  EXL3_PLACES28 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define EXL3_SUM(g) "+f"(d[g][0]), "+f"(d[g][1]), "+f"(d[g][2]), "+f"(d[g][3])
#define EXL3_FOUR(g) EXL3_SUM(g), EXL3_SUM(g + 1), EXL3_SUM(g + 2), EXL3_SUM(g + 3)
#define EXL3_SUMS1 EXL3_SUM(0)
#define EXL3_SUMS2 EXL3_SUMS1, EXL3_SUM(1)
#define EXL3_SUMS4 EXL3_FOUR(0)
#define EXL3_SUMS8 EXL3_SUMS4, EXL3_FOUR(4)
#define EXL3_SUMS12 EXL3_SUMS8, EXL3_FOUR(8)
#define EXL3_SUMS16 EXL3_SUMS12, EXL3_FOUR(12)
#define EXL3_SUMS20 EXL3_SUMS16, EXL3_FOUR(16)
#define EXL3_SUMS24 EXL3_SUMS20, EXL3_FOUR(20)
#define EXL3_SUMS28 EXL3_SUMS24, EXL3_FOUR(24)
#define EXL3_SUMS32 EXL3_SUMS28, EXL3_FOUR(28)

// d += a * x^T, a this warp's 16x16 of 64x16, x [8 * groups, 16]; without `add` d = a * x^T. d and a are in use until
// warpgroup_wait. After the sums' places come those of a, a0 to a3, of x, b, and of add, c.
#define EXL3_MULTIPLY(groups, rows, a0, a1, a2, a3, b, p)                                                             \
  "wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32.f16.f16 {" EXL3_PLACES##groups "}, {%" #a0 ", %" #a1 ", %" #a2   \
  ", %" #a3 "}, %" #b ", " #p ", 1, 1, 0;"
#define EXL3_WARPGROUP_MMA(groups, rows, a0, a1, a2, a3, b, c)                                                        \
  __device__ __forceinline__ void warpgroup_mma(float (&d)[groups][4], const uint32_t (&a)[4], uint64_t x) {          \
    asm volatile(EXL3_MULTIPLY(groups, rows, a0, a1, a2, a3, b, 1)                                                    \
                 : EXL3_SUMS##groups                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));                                               \
  }                                                                                                                   \
  __device__ __forceinline__ void warpgroup_mma(float (&d)[groups][4], const uint32_t (&a)[4], uint64_t x, bool add) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #c ", 0; " EXL3_MULTIPLY(groups, rows, a0, a1, a2, a3, b, p) "}"   \
                 : EXL3_SUMS##groups                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(static_cast<int>(add)));                   \
  }
EXL3_WARPGROUP_MMA(1, 8, 4, 5, 6, 7, 8, 9)
EXL3_WARPGROUP_MMA(2, 16, 8, 9, 10, 11, 12, 13)
EXL3_WARPGROUP_MMA(4, 32, 16, 17, 18, 19, 20, 21)
EXL3_WARPGROUP_MMA(8, 64, 32, 33, 34, 35, 36, 37)
EXL3_WARPGROUP_MMA(12, 96, 48, 49, 50, 51, 52, 53)
EXL3_WARPGROUP_MMA(16, 128, 64, 65, 66, 67, 68, 69)
EXL3_WARPGROUP_MMA(20, 160, 80, 81, 82, 83, 84, 85)
EXL3_WARPGROUP_MMA(24, 192, 96, 97, 98, 99, 100, 101)
EXL3_WARPGROUP_MMA(28, 224, 112, 113, 114, 115, 116, 117)
EXL3_WARPGROUP_MMA(32, 256, 128, 129, 130, 131, 132, 133)
#undef EXL3_WARPGROUP_MMA
#undef EXL3_MULTIPLY

// The same with a as core matrices in shared memory: the descriptor of this warpgroup's 64 rows.
__device__ __forceinline__ void warpgroup_mma(float (&d)[32][4], uint64_t a, uint64_t x) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" EXL3_PLACES32 "}, %128, %129, 1, 1, 1, 0, 0;"
               : EXL3_SUMS32
               : "l"(a), "l"(x));
}

#undef EXL3_FOUR
#undef EXL3_SUM
#undef EXL3_SUMS1
#undef EXL3_SUMS2
#undef EXL3_SUMS4
#undef EXL3_SUMS8
#undef EXL3_SUMS12
#undef EXL3_SUMS16
#undef EXL3_SUMS20
#undef EXL3_SUMS24
#undef EXL3_SUMS28
#undef EXL3_SUMS32
#undef EXL3_PLACES1
#undef EXL3_PLACES2
#undef EXL3_PLACES4
#undef EXL3_PLACES8
#undef EXL3_PLACES12
#undef EXL3_PLACES16
#undef EXL3_PLACES20
#undef EXL3_PLACES24
#undef EXL3_PLACES28
#undef EXL3_PLACES32
#endif  // EXL3_WARPGROUP

}  // namespace exl3
