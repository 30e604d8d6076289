// A block of the emulated device and its fibers: what the scheduler (machine.cpp) and the memory (memory.cpp) share.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"

namespace emulate {

constexpr int kBorder = 256;
constexpr unsigned char kBorderFill = 0xa5;
constexpr unsigned char kPoison = 0xff;  // NaN in fp16, bf16 and fp32

struct Fault {
  std::string message;
};

enum class State { kReady, kWarp, kBlock, kGrid, kBarrier, kDone };

struct Copy {
  uint32_t to;
  const void* from;
  int group;
};

struct BulkCopy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
};

struct Barrier {
  uint32_t arrivals, missing;  // of a phase, and of this one
  int64_t bytes = 0;           // announced and not yet copied
  uint32_t phase = 0;
  std::vector<BulkCopy> copies;
};

struct Group {
  int arrived = 0;
  unsigned phase = 0;
};

struct Fiber {
  State state = State::kReady;
  void* stack = nullptr;  // its saved pointer
  Collective collective = nullptr;
  void* request = nullptr;
  std::vector<Copy> copies;
  int group = 0;  // of the copies not yet committed
  std::vector<uint32_t> unpublished;
  size_t ahead = 1;     // which grid it waits for: the one ahead of its own, or the one before that
  bool waited = false;  // for the grid ahead
  std::shared_ptr<void> local;
};

struct Block {
  const std::function<void()>* thread;
  std::vector<Fiber> fibers;
  unsigned char* shared;  // dynamic
  size_t shared_bytes;
  std::vector<unsigned char> published;
  std::map<int, std::vector<unsigned char>> statics;  // each with kBorder bytes of kBorderFill after it
  size_t static_bytes = 0;
  std::map<uint32_t, Barrier> barriers;
  std::map<int, Group> groups;
  bool progress = false;  // since the warps were last gone through
  size_t grid = 0;        // its place in the queue
  int running = -1;
};

extern Block* block;       // of the fiber that runs
extern bool early_copies;  // whether copies land when they are asked for, and not when they are waited for

inline Fiber& self() { return block->fibers[block->running]; }
void leave(State state);  // this fiber waits; returns once it runs again

}  // namespace emulate
