// A CUDA device on the CPU, in as much as the kernels of csrc/exl3 can tell: every thread is a fiber, a warp's
// instructions wait for all its lanes, blocks run one after the other, and memory that nothing wrote reads as NaN.
//
// It does not know time, caches, or blocks that wait for each other. What it adds is malice: two schedules of opposite
// habits, so that a missing barrier, a copy read too early, a buffer overwritten too soon or a grid that does not wait
// for the one before gives another answer under one of them, and accesses that a card would refuse are errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace emulate {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Ends the kernel; the message reaches the caller through exl3_emulator_synchronize().
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

constexpr int kLanes = 32;
constexpr uint32_t kSharedBase = 0x400;      // where dynamic shared memory begins: an address is not an offset
constexpr int kDefaultSharedBytes = 48 << 10;
constexpr int kLargestSharedBytes = 227 << 10;  // of SM90, whose kernels may ask for it
constexpr int kLeastSharedBytes = 99 << 10;     // that any card from SM80 on lets a block ask for (SM86, 89, 120)
constexpr int kMostThreads = 1024;

// What a warp does together once all its lanes are there: requests holds one lane's operands each.
using Collective = void (*)(void* const (&requests)[kLanes]);
void wait_for_warp(Collective what, void* request);
void wait_for_block();
void wait_for_grid();
void wait_for_earlier_grids();  // before the one ahead; the one ahead must have let this grid start late enough
void allow_next_grid();

// A lane's asynchronous copies, 16 bytes each.
void copy_later(uint32_t to, const void* from);
void commit_copies();
void finish_copies(int but);

// Barriers in shared memory that count arrivals and announced bytes; a waiting fiber lets the others run. The copy engine's
// copies are visible to all once counted, and happen when somebody waits for them.
void barrier_init(uint32_t barrier, uint32_t arrivals);
void barrier_arrive(uint32_t barrier, uint32_t bytes);
void barrier_wait(uint32_t barrier, uint32_t parity);
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void wait_for_group(int id, int threads);  // barrier `id` of some of the block's threads

bool lands_early();  // of the schedule: what is asynchronous happens at once, and not at the last moment

// This thread's finished copies become visible to instructions that read shared memory as another proxy: those read
// published_pointer(), checked as shared_pointer(), where all else is NaN.
void publish_copies();
void written(uint32_t address);  // 16 bytes, which await publish_copies()
unsigned char* published_pointer(uint32_t address, uint32_t bytes, const char* what);

// A fiber's own variable; one type only.
std::shared_ptr<void>& fiber_local();
template <class T>
T& local() {
  auto& variable = fiber_local();
  if (!variable) variable = std::make_shared<T>();
  return *static_cast<T*>(variable.get());
}

// Checked pointer to `bytes` bytes of dynamic shared memory, whose alignment must be `bytes` too.
unsigned char* shared_pointer(uint32_t address, uint32_t bytes, const char* what);
unsigned char* dynamic_shared();  // the block's; memory that nobody may touch follows it
// The block's static shared memory: the same storage for the same key.
void* static_shared(int key, size_t bytes);
template <class T>
T& block_shared(int key) {
  return *static_cast<T*>(static_shared(key, sizeof(T)));
}

// Queues a grid: it runs when somebody synchronizes. One marked `dependent` runs before the grid ahead of it, up to the
// point where it waits for that; any other waits for all ahead of it first.
int enqueue(std::function<void()> thread, const void* kernel, Dim grid, Dim block, size_t shared_bytes, bool dependent);
const char* what_failed();  // of a launch that was refused because a kernel before it failed
int allow_shared_bytes(const void* kernel, int bytes, int most);

}  // namespace emulate
