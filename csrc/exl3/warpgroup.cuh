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
// The places of 32 sums in the text of an instruction.
#define EXL3_PLACES0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EXL3_PLACES1 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EXL3_PLACES2 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define EXL3_PLACES3 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define EXL3_SUM(g) "+f"(d[g][0]), "+f"(d[g][1]), "+f"(d[g][2]), "+f"(d[g][3])
#define EXL3_SUMS4(g) EXL3_SUM(g), EXL3_SUM(g + 1), EXL3_SUM(g + 2), EXL3_SUM(g + 3)
#define EXL3_SUMS8(g) EXL3_SUMS4(g), EXL3_SUMS4(g + 4)
#define EXL3_SUMS16(g) EXL3_SUMS8(g), EXL3_SUMS8(g + 8)

// d += a * x^T, a this warp's 16x16 of 64x16, x [8 * groups, 16]. d and a are in use until warpgroup_wait.
__device__ __forceinline__ void warpgroup_mma(float (&d)[1][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
      "%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
      : EXL3_SUM(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[2][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
      : EXL3_SUM(0), EXL3_SUM(1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[4][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : EXL3_SUMS4(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" EXL3_PLACES0 "}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : EXL3_SUMS8(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[12][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" EXL3_PLACES0 ", "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
      "{%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
      : EXL3_SUMS8(0), EXL3_SUMS4(8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" EXL3_PLACES0 ", " EXL3_PLACES1 "}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : EXL3_SUMS16(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[20][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 {" EXL3_PLACES0 ", " EXL3_PLACES1 ", "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, "
      "{%80, %81, %82, %83}, %84, 1, 1, 1, 0;"
      : EXL3_SUMS16(0), EXL3_SUMS4(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[24][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" EXL3_PLACES0 ", " EXL3_PLACES1 ", " EXL3_PLACES2
      "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 0;"
      : EXL3_SUMS16(0), EXL3_SUMS8(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[28][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n224k16.f32.f16.f16 {" EXL3_PLACES0 ", " EXL3_PLACES1 ", " EXL3_PLACES2 ", "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111}, "
      "{%112, %113, %114, %115}, %116, 1, 1, 1, 0;"
      : EXL3_SUMS16(0), EXL3_SUMS8(16), EXL3_SUMS4(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[32][4], const uint32_t (&a)[4], uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" EXL3_PLACES0 ", " EXL3_PLACES1 ", " EXL3_PLACES2 ", " EXL3_PLACES3
      "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
      : EXL3_SUMS16(0), EXL3_SUMS16(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

// The same with a as core matrices in shared memory: the descriptor of this warpgroup's 64 rows.
__device__ __forceinline__ void warpgroup_mma(float (&d)[8][4], uint64_t a, uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" EXL3_PLACES0 "}, "
      "%32, %33, 1, 1, 1, 0, 0;"
      : EXL3_SUMS8(0)
      : "l"(a), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[16][4], uint64_t a, uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" EXL3_PLACES0 ", " EXL3_PLACES1 "}, "
      "%64, %65, 1, 1, 1, 0, 0;"
      : EXL3_SUMS16(0)
      : "l"(a), "l"(x));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[32][4], uint64_t a, uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" EXL3_PLACES0 ", " EXL3_PLACES1 ", " EXL3_PLACES2
      ", " EXL3_PLACES3 "}, %128, %129, 1, 1, 1, 0, 0;"
      : EXL3_SUMS16(0), EXL3_SUMS16(16)
      : "l"(a), "l"(x));
}

#undef EXL3_SUMS16
#undef EXL3_SUMS8
#undef EXL3_SUMS4
#undef EXL3_SUM
#undef EXL3_PLACES0
#undef EXL3_PLACES1
#undef EXL3_PLACES2
#undef EXL3_PLACES3
#endif  // EXL3_WARPGROUP

}  // namespace exl3
