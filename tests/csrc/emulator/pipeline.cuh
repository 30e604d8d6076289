// What csrc/exl3/pipeline.cuh offers, on the emulated machine.
#pragma once

#include "warpgroup.cuh"

namespace exl3 {

inline void barrier_init(SharedAddress barrier, uint32_t arrivals) { emulate::barrier_init(barrier, arrivals); }
inline void barrier_publish() {}
inline void barrier_arrive(SharedAddress barrier) { emulate::barrier_arrive(barrier, 0); }
inline void barrier_expect(SharedAddress barrier, uint32_t bytes) { emulate::barrier_arrive(barrier, bytes); }
inline void barrier_wait(SharedAddress barrier, uint32_t parity) { emulate::barrier_wait(barrier, parity); }
inline void bulk_copy(SharedAddress to, const void* from, uint32_t bytes, SharedAddress barrier) {
  emulate::bulk_copy(to, from, bytes, barrier);
}

inline void store_shared_float(SharedAddress address, float v) {
  std::memcpy(emulate::shared_pointer(address, 4, "st.shared.f32"), &v, 4);
}
inline float4 load_shared_float4(SharedAddress address) { return load_shared<float4>(address, "ld.shared.v4.f32"); }

// Matrix by matrix, lane 8 * matrix + r gave the address of row r, whose elements 2c and the next lane 4r + c holds.
struct StoredRows {
  SharedAddress row;
  const uint32_t* a;
};
inline void write_matrices(void* const (&requests)[emulate::kLanes]) {
  for (int lane = 0; lane < emulate::kLanes; ++lane) {
    const SharedAddress row = static_cast<const StoredRows*>(requests[lane])->row;
    unsigned char* to = emulate::shared_pointer(row, 16, "stmatrix");
    for (int c = 0; c < 4; ++c)
      std::memcpy(to + 4 * c, &static_cast<const StoredRows*>(requests[lane % 8 * 4 + c])->a[lane / 8], 4);
  }
}
inline void store_matrices(SharedAddress row, const uint32_t (&a)[4]) {
  StoredRows mine{row, a};
  emulate::wait_for_warp(write_matrices, &mine);
  emulate::written(row);
}

template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}

template <int kThreads>
void group_barrier(int id) { emulate::wait_for_group(id, kThreads); }

}  // namespace exl3
