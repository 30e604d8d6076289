// Memory of the emulated device: asynchronous copies, barriers, shared memory. See machine.h.
#include <cstring>
#include <utility>

#include "block.h"

namespace emulate {
namespace {

void perform(const Copy& copy) {
  std::memcpy(shared_pointer(copy.to, 16, "cp.async"), copy.from, 16);
  self().unpublished.push_back(copy.to);
}

Barrier& barrier_at(uint32_t address) {
  shared_pointer(address, 8, "mbarrier");
  const auto found = block->barriers.find(address);
  if (found == block->barriers.end()) fail("mbarrier: offset %u was not initialized", address - kSharedBase);
  return found->second;
}

void flip_if_complete(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.arrivals;
  barrier.phase ^= 1;
  block->progress = true;
}

void perform(Barrier& barrier, const BulkCopy& copy) {
  for (uint32_t at = 0; at < copy.bytes; at += 16) {
    const auto* from = static_cast<const unsigned char*>(copy.from) + at;
    std::memcpy(shared_pointer(copy.to + at, 16, "cp.async.bulk"), from, 16);
    std::memcpy(published_pointer(copy.to + at, 16, "cp.async.bulk"), from, 16);
  }
  barrier.bytes -= copy.bytes;
}

}  // namespace

void copy_later(uint32_t to, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) fail("cp.async: global address %p, want a multiple of 16", from);
  shared_pointer(to, 16, "cp.async");
  if (early_copies) perform({to, from, 0});
  else self().copies.push_back({to, from, self().group});
}

void commit_copies() { ++self().group; }

void finish_copies(int but) {
  auto& copies = self().copies;
  size_t finished = 0;
  for (; finished < copies.size() && copies[finished].group < self().group - but; ++finished) perform(copies[finished]);
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(finished));
}

void barrier_init(uint32_t address, uint32_t arrivals) {
  shared_pointer(address, 8, "mbarrier.init");
  if (!block->barriers.emplace(address, Barrier{arrivals, arrivals, 0, 0, {}}).second)
    fail("mbarrier.init: offset %u twice", address - kSharedBase);
}

void barrier_arrive(uint32_t address, uint32_t bytes) {
  Barrier& barrier = barrier_at(address);
  if (barrier.missing == 0) fail("mbarrier.arrive: offset %u, more arrivals than expected", address - kSharedBase);
  --barrier.missing;
  barrier.bytes += bytes;
  flip_if_complete(barrier);
}

void barrier_wait(uint32_t address, uint32_t parity) {
  for (;;) {
    Barrier& barrier = barrier_at(address);
    if (barrier.phase != parity) return;
    for (const auto& copy : std::exchange(barrier.copies, {})) perform(barrier, copy);
    flip_if_complete(barrier);
    if (barrier.phase == parity) leave(State::kBarrier);
  }
}

void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t address) {
  Barrier& barrier = barrier_at(address);
  if (bytes == 0 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    fail("cp.async.bulk: %u bytes from %p, want multiples of 16", bytes, from);
  shared_pointer(to, 16, "cp.async.bulk");
  if (early_copies) {
    perform(barrier, {to, from, bytes});
    flip_if_complete(barrier);
  } else {
    barrier.copies.push_back({to, from, bytes});
  }
}

void wait_for_group(int id, int threads) {
  if (id < 1 || id > 15 || threads % kLanes) fail("bar.sync: barrier %d of %d threads", id, threads);
  const unsigned phase = block->groups[id].phase;
  if (++block->groups[id].arrived == threads) {
    block->groups[id] = {0, phase + 1};
    block->progress = true;
  }
  while (block->groups[id].phase == phase) leave(State::kBarrier);
}

void written(uint32_t address) { self().unpublished.push_back(address); }

unsigned char* shared_pointer(uint32_t address, uint32_t bytes, const char* what) {
  const uint32_t offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > block->shared_bytes)
    fail("%s: offset %d of %zu bytes of dynamic shared memory", what, static_cast<int>(offset), block->shared_bytes);
  if (offset % bytes) fail("%s: offset %u, want a multiple of %u", what, offset, bytes);
  return block->shared + offset;
}

void publish_copies() {
  for (const uint32_t address : self().unpublished)
    std::memcpy(published_pointer(address, 16, "cp.async"), shared_pointer(address, 16, "cp.async"), 16);
  self().unpublished.clear();
}

unsigned char* published_pointer(uint32_t address, uint32_t bytes, const char* what) {
  return block->published.data() + (shared_pointer(address, bytes, what) - block->shared);
}

std::shared_ptr<void>& fiber_local() { return self().local; }
bool lands_early() { return early_copies; }

unsigned char* dynamic_shared() { return block->shared; }

void* static_shared(int key, size_t bytes) {
  auto& memory = block->statics[key];
  if (memory.empty()) {
    block->static_bytes += bytes;
    if (block->static_bytes > kDefaultSharedBytes)
      fail("%zu bytes of static shared memory, want at most %d", block->static_bytes, kDefaultSharedBytes);
    memory.assign(bytes + kBorder, kBorderFill);
    std::memset(memory.data(), kPoison, bytes);
  }
  return memory.data();
}

}  // namespace emulate
