// The emulated device: fibers, the scheduler of a block, the queue of grids. See machine.h.

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "block.h"
#include "cuda_runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Save the callee's registers on this stack, keep its pointer in *from, go on where `to` was saved. A new fiber's stack
// holds zeros for the registers and fiber_entry as the address to return to.
extern "C" __attribute__((visibility("hidden"))) void exl3_emulator_switch(void** from, void* to);
asm(R"(
.pushsection .text
.hidden exl3_emulator_switch
.globl exl3_emulator_switch
.type exl3_emulator_switch, @function
exl3_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size exl3_emulator_switch, .-exl3_emulator_switch
.popsection
)");

namespace emulate {

Block* block = nullptr;
bool early_copies = false;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kSavedRegisters = 6;
const char* const kWaits[] = {"runs", "waits for its warp", "waits for its block", "waits for the grid before",
                              "waits for a barrier", "has returned"};

struct Grid {
  std::function<void()> thread;
  dim3 grid, block;
  size_t shared_bytes;
  bool done = false;
  bool relied_on = false;  // to let the next one start only when the one ahead has ended
};

// What one block needs. A grid that waits and the grid it waits for need one each.
struct Memory {
  unsigned char* stacks;
  unsigned char* shared_end;  // of dynamic shared memory; the page after it faults
  Memory() {
    constexpr size_t kStacks = kMostThreads * kStackBytes, kShared = (kLargestSharedBytes + 4095) / 4096 * 4096;
    void* const pages = mmap(nullptr, kStacks + kShared + 4096, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw Fault{"the emulator cannot map its memory"};
    stacks = static_cast<unsigned char*>(pages);
    shared_end = stacks + kStacks + kShared;
    mprotect(shared_end, 4096, PROT_NONE);
  }
};

void* scheduler = nullptr;   // saved pointer of the scheduler's stack
std::string fault;           // first one since the last synchronization
std::vector<Grid> queue;
std::vector<Memory> memories;  // one a grid in the queue
std::map<const void*, int> allowed_shared;
bool backward = false, blocking = false;

void fiber_entry() {
  try {
    (*block->thread)();
  } catch (const Fault& caught) {
    if (fault.empty()) fault = caught.message;
  }
  leave(State::kDone);
  __builtin_unreachable();
}

void start(Fiber& fiber, unsigned char* stack) {
  auto** top = reinterpret_cast<void**>(stack + kStackBytes) - 2;  // a call leaves the stack 8 bytes off 16
  *top = reinterpret_cast<void*>(fiber_entry);
  std::memset(top - kSavedRegisters, 0, kSavedRegisters * sizeof(void*));
  fiber = Fiber{};
  fiber.stack = top - kSavedRegisters;
}

void resume(int thread) {
  block->running = thread;
  threadIdx = {static_cast<unsigned>(thread), 0, 0};
  exl3_emulator_switch(&scheduler, self().stack);
  if (!fault.empty()) throw Fault{fault};
  block->progress |= self().state != State::kBarrier;
}

void run_grid(size_t index);

// Runs a warp until each of its lanes waits for the block, a barrier or a lane that does, or has returned.
void run_warp(int first, size_t grid) {
  auto* const lanes = &block->fibers[first];
  for (int lane = 0; lane < kLanes; ++lane)
    if (lanes[lane].state == State::kBarrier) lanes[lane].state = State::kReady;
  for (;;) {
    for (int i = 0; i < kLanes; ++i) {
      const int lane = backward ? kLanes - 1 - i : i;
      while (lanes[lane].state == State::kReady || lanes[lane].state == State::kGrid) {
        if (lanes[lane].state == State::kGrid && grid >= lanes[lane].ahead) {
          // Who relies on the one before the one ahead may start as soon as that has ended, or as late as he would have to.
          const bool relies = lanes[lane].ahead > 1, late = (grid + backward) % 2 == 0;
          queue[grid - 1].relied_on |= relies;
          run_grid(grid - (relies && late ? 1 : lanes[lane].ahead));
        }
        resume(first + lane);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane)
      if (lanes[lane].state == State::kBarrier) return;
    void* requests[kLanes];
    int together = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      requests[lane] = lanes[lane].request;
      together += lanes[lane].state == State::kWarp && lanes[lane].collective == lanes[0].collective;
    }
    if (together == 0 && lanes[0].state != State::kWarp) {
      bool waiting = false;
      for (int lane = 0; lane < kLanes; ++lane) waiting |= lanes[lane].state == State::kWarp;
      if (!waiting) return;
    }
    for (int lane = 0; lane < kLanes && together < kLanes; ++lane)
      if (lanes[lane].state != lanes[0].state || lanes[lane].collective != lanes[0].collective)
        fail("a warp's lanes part: thread %d %s, thread %d %s%s", first, kWaits[static_cast<int>(lanes[0].state)],
             first + lane, kWaits[static_cast<int>(lanes[lane].state)],
             lanes[lane].state == lanes[0].state ? " at another instruction" : "");
    lanes[0].collective(requests);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane].state = State::kReady;
  }
}

void check_borders(const Block& block) {
  for (const auto& [line, memory] : block.statics)
    for (size_t i = memory.size() - kBorder; i < memory.size(); ++i)
      if (memory[i] != kBorderFill)
        fail("a write %zu bytes beyond the static shared memory of line %d", i + kBorder - memory.size(), line);
}

void run_block(const Grid& work, size_t grid, const Memory& memory) {
  const int threads = static_cast<int>(work.block.x);
  Block mine{};
  mine.thread = &work.thread;
  mine.grid = grid;
  mine.shared_bytes = work.shared_bytes;
  mine.shared = memory.shared_end - (work.shared_bytes + 15) / 16 * 16;
  std::memset(mine.shared, kPoison, work.shared_bytes);
  mine.published.assign(work.shared_bytes, kPoison);
  mine.fibers.resize(threads);
  for (int thread = 0; thread < threads; ++thread) start(mine.fibers[thread], memory.stacks + thread * kStackBytes);
  for (;;) {
    for (int i = 0; i < threads; i += kLanes) {
      // What a nested grid changed is set anew for every warp; within one, run_grid puts it back.
      block = &mine;
      run_warp(backward ? threads - kLanes - i : i, grid);
    }
    int waiting = 0, other = -1, stuck = -1;
    for (int thread = 0; thread < threads; ++thread) {
      if (mine.fibers[thread].state == State::kBarrier) stuck = thread;
      if (mine.fibers[thread].state == State::kBlock) ++waiting;
      else other = thread;
    }
    if (stuck >= 0 && !std::exchange(mine.progress, false)) fail("a barrier that thread %d waits for never completes", stuck);
    if (stuck >= 0) continue;
    if (waiting == 0) return check_borders(mine);
    if (waiting < threads) fail("a barrier that thread %d never reaches: it %s", other,
                                kWaits[static_cast<int>(mine.fibers[other].state)]);
    for (auto& fiber : mine.fibers) fiber.state = State::kReady;
  }
}

void run_grid(size_t index) {
  if (queue[index].done) return;
  queue[index].done = true;
  const Grid work = queue[index];
  while (memories.size() <= index) memories.emplace_back();
  Block* const outer = block;
  void* const outer_scheduler = scheduler;
  const uint3 outer_index = blockIdx;
  const dim3 outer_block = blockDim, outer_grid = gridDim;
  const unsigned blocks = work.grid.x * work.grid.y * work.grid.z;
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned at = backward ? blocks - 1 - i : i;
    blockIdx = {at % work.grid.x, at / work.grid.x % work.grid.y, at / work.grid.x / work.grid.y};
    blockDim = work.block, gridDim = work.grid;
    run_block(work, index, memories[index]);
  }
  block = outer, scheduler = outer_scheduler, blockIdx = outer_index, blockDim = outer_block, gridDim = outer_grid;
}

// An access outside every allocation, or one whose address its type does not allow, ends the kernel and not the process.
sigjmp_buf before_kernels;
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL};
void on_signal(int signal) { siglongjmp(before_kernels, signal); }

void run_queue() {
  if (queue.empty()) return;
  static auto* const signal_stack = new unsigned char[64 << 10];
  stack_t alternate{}, old_stack{};
  alternate.ss_sp = signal_stack;
  alternate.ss_size = 64 << 10;
  sigaltstack(&alternate, &old_stack);
  struct sigaction old[std::size(kSignals)], action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK;
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &old[i]);
  if (const int signal = sigsetjmp(before_kernels, 1); signal == 0) {
    try {
      for (size_t i = queue.size(); i-- > 0;) run_grid(i);
    } catch (const Fault& caught) {
      if (fault.empty()) fault = caught.message;
    }
  } else {
    const char* what = signal == SIGILL ? "a misaligned address" : "an address outside every allocation";
    char place[128];
    std::snprintf(place, sizeof place, "block (%u, %u, %u), thread %u: %s", blockIdx.x, blockIdx.y, blockIdx.z,
                  threadIdx.x, what);
    if (fault.empty()) fault = place;
  }
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  block = nullptr;
  queue.clear();
}

}  // namespace

void leave(State state) {
  self().state = state;
  exl3_emulator_switch(&self().stack, scheduler);
}

void fail(const char* format, ...) {
  char text[256], place[384];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  std::snprintf(place, sizeof place, "block (%u, %u, %u), thread %u: %s", blockIdx.x, blockIdx.y, blockIdx.z,
                threadIdx.x, text);
  throw Fault{place};
}

void wait_for_warp(Collective what, void* request) {
  self().collective = what;
  self().request = request;
  leave(State::kWarp);
}

void wait_for_block() { leave(State::kBlock); }
void wait_for_grid() {
  self().waited = true;
  leave(State::kGrid);
}
void wait_for_earlier_grids() {
  self().ahead = 2;
  leave(State::kGrid);
  self().ahead = 1;
}
void allow_next_grid() {
  if (queue[block->grid].relied_on && !self().waited)
    fail("the next grid may start, which reads what grids before the one ahead wrote, but that one has not ended");
}

const char* what_failed() { return fault.c_str(); }

int allow_shared_bytes(const void* kernel, int bytes, int most) {
  if (bytes < 0 || bytes > most) return cudaErrorInvalidValue;
  allowed_shared[kernel] = bytes;
  return cudaSuccess;
}

int enqueue(std::function<void()> thread, const void* kernel, Dim grid, Dim block, size_t shared_bytes, bool dependent) {
  const auto allowed = allowed_shared.find(kernel);
  const size_t most = allowed == allowed_shared.end() ? kDefaultSharedBytes : std::max(allowed->second, kDefaultSharedBytes);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || block.x == 0 || block.x % kLanes ||
      block.x > kMostThreads || block.y != 1 || block.z != 1 || shared_bytes > most)
    return cudaErrorInvalidValue;
  if (!fault.empty()) return cudaErrorLaunchFailure;
  if (!dependent) run_queue();
  queue.push_back({std::move(thread), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes});
  if (blocking) run_queue();
  return fault.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace emulate

// Backward: the last block, warp and lane first, and copies land when they are asked for. Forward: the first ones first,
// and copies land when they are waited for.
extern "C" __attribute__((visibility("default"))) void exl3_emulator_schedule(int go_backward) {
  emulate::backward = emulate::early_copies = go_backward != 0;
}

// Whether a launch runs its kernel before it returns.
extern "C" __attribute__((visibility("default"))) void exl3_emulator_blocking(int on) { emulate::blocking = on != 0; }

// Runs what was launched. Returns what went wrong first, or null.
extern "C" __attribute__((visibility("default"))) const char* exl3_emulator_synchronize() {
  static std::string message;
  emulate::run_queue();
  message = std::exchange(emulate::fault, {});
  return message.empty() ? nullptr : message.c_str();
}

extern "C" int aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
