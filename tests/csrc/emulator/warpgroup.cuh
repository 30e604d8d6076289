// What csrc/exl3/warpgroup.cuh offers, on the emulated machine: a warp's quarter of each product. That the four warps of
// a group issue together is not checked. Compiled in with -DEXL3_WARPGROUP=1, as for SM90.
#pragma once

#include <algorithm>
#include <vector>

#include "ptx.cuh"

namespace exl3 {

inline void publish_shared() { emulate::publish_copies(); }

struct MatrixDescriptor {
  SharedAddress x;
  uint32_t along_k;  // 0: rows of 128 bytes with swapped chunks
  SharedAddress chunk(int half, int row) const {
    if (along_k != 0) return x + half * along_k + row / 8 * 128 + row % 8 * 16;
    const SharedAddress plain = x + half * 16 + row * 128;
    return plain ^ (plain >> 3 & 0x70);
  }
};
inline MatrixDescriptor matrix_descriptor(SharedAddress x, uint32_t along_k) { return {x, along_k}; }
inline MatrixDescriptor swizzled_descriptor(SharedAddress x) {
  if (x % 1024 >= 128) emulate::fail("wgmma: offset %u of swizzled rows, want a multiple of 1024", x);
  return {x, 0};
}
inline MatrixDescriptor descriptor_after(MatrixDescriptor descriptor, uint32_t bytes) {
  return {descriptor.x + bytes, descriptor.along_k};
}

struct Product {
  float (*d)[4];
  const uint32_t* a;
  MatrixDescriptor x;
  int groups, committed;  // groups of eight rows of x; whether a commit followed
  MatrixDescriptor shared_a{};  // where a is null
  int quarter = 0;              // of its 64 rows
  bool add = true;
};
struct Background {  // of one lane
  std::vector<Product> products;
  bool arrived = false;
  size_t finishing = 0;
};

// One product of all lanes, its x read as its descriptor says.
inline void multiply_quarter(const Product* const (&lanes)[emulate::kLanes]) {
  uint32_t a[emulate::kLanes][4];
  for (int lane = 0; lane < emulate::kLanes && !lanes[0]->a; ++lane)
    for (int r = 0; r < 4; ++r) {
      const SharedAddress core = lanes[0]->shared_a.x + (2 * lanes[0]->quarter + r % 2) * 128 + r / 2 * lanes[0]->shared_a.along_k;
      std::memcpy(&a[lane][r], emulate::published_pointer(core + lane / 4 * 16, 16, "wgmma") + lane % 4 * 4, 4);
    }
  for (int group = 0; group < lanes[0]->groups; ++group) {
    MmaOperands operands[emulate::kLanes];
    void* requests[emulate::kLanes];
    for (int lane = 0; lane < emulate::kLanes; ++lane) {
      if (!lanes[lane]->add) std::fill_n(lanes[lane]->d[group], 4, 0.0f);
      operands[lane] = {lanes[lane]->d[group], lanes[lane]->a ? lanes[lane]->a : a[lane], {}};
      for (int half = 0; half < 2; ++half) {
        const SharedAddress chunk = lanes[0]->x.chunk(half, group * 8 + lane / 4);
        std::memcpy(&operands[lane].b[half], emulate::published_pointer(chunk, 16, "wgmma") + lane % 4 * 4, 4);
      }
      requests[lane] = &operands[lane];
    }
    multiply_fragments(requests);
  }
}
inline void finish_products(void* const (&requests)[emulate::kLanes]) {
  const size_t count = static_cast<const Background*>(requests[0])->finishing;
  for (size_t i = 0; i < count; ++i) {
    const Product* lanes[emulate::kLanes];
    for (int lane = 0; lane < emulate::kLanes; ++lane)
      lanes[lane] = &static_cast<const Background*>(requests[lane])->products.at(i);
    multiply_quarter(lanes);
  }
}

inline void warpgroup_arrive() { emulate::local<Background>().arrived = true; }
// What follows needs another fence: a thread may have written registers by then.
inline void warpgroup_commit() {
  auto& mine = emulate::local<Background>();
  for (auto& product : mine.products) ++product.committed;
  mine.arrived = false;
}
// Products happen when they are waited for, or, where copies land early, when they are issued.
inline void finish(size_t count) {
  auto& mine = emulate::local<Background>();
  mine.finishing = count;
  emulate::wait_for_warp(finish_products, &mine);
  mine.products.erase(mine.products.begin(), mine.products.begin() + static_cast<std::ptrdiff_t>(count));
}
template <int kPending>
void warpgroup_wait() {
  size_t count = 0;
  auto& mine = emulate::local<Background>();
  for (const auto& product : mine.products) count += product.committed > kPending;
  finish(count);
}
template <int kGroups>
void warpgroup_mma(float (&d)[kGroups][4], const uint32_t (&a)[4], MatrixDescriptor x, bool add = true) {
  auto& mine = emulate::local<Background>();
  if (!mine.arrived) emulate::fail("wgmma.mma_async: registers without wgmma.fence");
  mine.products.push_back({d, a, x, kGroups, 0, {}, 0, add});
  if (emulate::lands_early()) finish(mine.products.size());
}
template <int kGroups>
void warpgroup_mma(float (&d)[kGroups][4], MatrixDescriptor a, MatrixDescriptor x) {
  auto& mine = emulate::local<Background>();
  if (!mine.arrived) emulate::fail("wgmma.mma_async: registers without wgmma.fence");
  mine.products.push_back({d, nullptr, x, kGroups, 0, a, static_cast<int>(threadIdx.x / emulate::kLanes % 4)});
  if (emulate::lands_early()) finish(mine.products.size());
}

}  // namespace exl3
