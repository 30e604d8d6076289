// What lets the warps of a block work at different things on SM90: barriers that count arrivals and bytes, copies by the
// copy engine, registers handed from warp to warp. Compiled for sm_90a only, as warpgroup.cuh.
#pragma once

#include "warpgroup.cuh"

namespace exl3 {

#if EXL3_WARPGROUP

// A barrier is eight bytes of shared memory. It flips its phase, 0 at first, when `arrivals` threads have arrived and
// all bytes announced have been copied.
__device__ __forceinline__ void barrier_init(SharedAddress barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Barriers initialized before are there for the copy engine too.
__device__ __forceinline__ void barrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void barrier_expect(SharedAddress barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(SharedAddress barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copy by the engine, global to shared, addresses and bytes multiples of 16; `barrier` counts the bytes.
__device__ __forceinline__ void bulk_copy(SharedAddress to, const void* from, uint32_t bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_shared_float(SharedAddress address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ float4 load_shared_float4(SharedAddress address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Four 8x8 matrices of fp16 to shared memory; lane l gives the address of the 16-byte row l%8 of matrix l/8 and of each
// matrix the elements 2(l%4)+{0,1} of row l/4.
__device__ __forceinline__ void store_matrices(SharedAddress row, const uint32_t (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a[0]), "r"(a[1]),
               "r"(a[2]), "r"(a[3])
               : "memory");
}

// Registers a thread of this warpgroup from here on.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Barrier `id`, not 0, of kThreads threads, whole warps.
template <int kThreads>
__device__ __forceinline__ void group_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

#endif  // EXL3_WARPGROUP

}  // namespace exl3
