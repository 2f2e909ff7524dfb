// Runs kernels on the CPU: their own source, one block after another, each thread of a block a fiber that gives way to
// the next one at a barrier or a shuffle. For tests on machines without a GPU of what no plan shows: indices, ends of
// rows, who waits for whom. What instructions do that C++ does not have is in device/ beside this file, mma.sync
// included. Not for clusters of several blocks, TMA or wgmma; and timing, caches and races are not a GPU's.
//
// A block whose threads all wait, for barriers that cannot complete, ends the program with a message.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local  // and so static, if in a function; `extern` may stand before it
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(condition)

using std::max;
using std::min;

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx{}, blockIdx{}, blockDim{1, 1, 1}, gridDim{1, 1, 1};

namespace gpu {

// Ends the program, from within a fiber, too.
[[noreturn]] inline void fail() {
  std::fflush(nullptr);
  std::_Exit(1);
}

struct Barrier {
  int arrived = 0, turns = 0;
};
struct Warp {
  Barrier barrier;
  uint64_t brought[2][32];  // by each lane, to this exchange and the one before
  int running;              // lanes
};
struct Fiber {
  ucontext_t context;
  Index thread;
  Warp* warp;
  int lane, exchanges = 0;
  const Barrier* waits_for = nullptr;
  int turn = 0;  // of that barrier
  bool ended = false;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  // Of __syncthreads_or(), for two turns of the first barrier: what has come so far, and of which turn.
  bool any[2];
  int any_turns[2] = {-1, -1};
  int running;  // threads
  ucontext_t scheduler;
  std::function<void()> body;
};
inline Block* block = nullptr;
inline Fiber* fiber = nullptr;  // that runs

inline void complete_if(bool enough, Barrier& barrier) {
  if (enough) barrier.arrived = 0, ++barrier.turns;
}
inline void arrive(Barrier& barrier, int count) { complete_if(++barrier.arrived >= count, barrier); }
// Lets the others run until the barrier has had `count` arrivals.
inline void wait(Barrier& barrier, int count) {
  fiber->waits_for = &barrier, fiber->turn = barrier.turns;
  arrive(barrier, count);
  while (barrier.turns == fiber->turn) swapcontext(&fiber->context, &block->scheduler);
  fiber->waits_for = nullptr;
}

// What all lanes have brought, until the exchange after the next one. Every lane of the warp that still runs calls it.
template <typename T>
const uint64_t* bring(const T& mine) {
  static_assert(sizeof(T) <= 8);
  auto& brought = fiber->warp->brought[fiber->exchanges++ % 2];
  std::memcpy(&brought[fiber->lane], &mine, sizeof(T));
  wait(fiber->warp->barrier, fiber->warp->running);
  return brought;
}
template <typename T>
T exchange(const T& mine, int from) {
  T result;
  std::memcpy(&result, &bring(mine)[from & 31], sizeof(T));
  return result;
}

inline void run_fiber() {
  block->body();
  Fiber& mine = *fiber;
  mine.ended = true;
  // A thread that has ended is not waited for.
  --block->running, --mine.warp->running;
  const auto is_complete = [](const Barrier& barrier, int count) { return count > 0 && barrier.arrived >= count; };
  complete_if(is_complete(block->barriers[0], block->running), block->barriers[0]);
  complete_if(is_complete(mine.warp->barrier, mine.warp->running), mine.warp->barrier);
  swapcontext(&mine.context, &block->scheduler);
}

// The stack of thread i of a block; blocks run one after another.
constexpr size_t kStackBytes = 256 * 1024;
inline char* stack_of(size_t i) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= i) stacks.emplace_back(new char[kStackBytes]);
  return stacks[i].get();
}

// Runs `body` in every thread of a block.
inline void run_block(const Index& threads, const std::function<void()>& body) {
  Block here;
  const int count = static_cast<int>(threads.x * threads.y * threads.z);
  here.fibers.resize(count), here.warps.resize((count + 31) / 32);
  here.running = count, here.body = body;
  block = &here;
  for (int i = 0; i < count; ++i) {
    Fiber& f = here.fibers[i];
    f.thread = {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)};
    f.warp = &here.warps[i / 32], f.lane = i % 32;
    f.warp->running = min(count - i / 32 * 32, 32);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stack_of(i), f.context.uc_stack.ss_size = kStackBytes;
    makecontext(&f.context, run_fiber, 0);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (Fiber& f : here.fibers) {
      if (f.ended || (f.waits_for && f.waits_for->turns == f.turn)) continue;
      moved = true, fiber = &f, threadIdx = f.thread;
      swapcontext(&here.scheduler, &f.context);
    }
  }
  if (here.running > 0) {
    std::printf("block %u: %d threads wait for ever\n", blockIdx.x, here.running);
    fail();
  }
}

// Memory of `bytes` that begins or ends where pages begin that no one may touch. What instructions of device/ptx.cuh
// and stores of vectors touch is held to its bytes.
class Guarded {
 public:
  Guarded(size_t bytes, bool at_end, size_t align) {
    const size_t pages = (bytes + kPage - 1) / kPage * kPage;
    size_ = pages + 2 * kPage;
    base_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_, kPage, PROT_NONE), mprotect(base_ + kPage + pages, kPage, PROT_NONE);
    data_ = base_ + kPage + (at_end ? (pages - bytes) / align * align : 0), end_ = data_ + bytes;
    std::memset(base_ + kPage, 0xff, pages);  // NaN
    all().push_back(this);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() {
    std::erase(all(), this);
    munmap(base_, size_);
  }
  void* data() const { return data_; }

  static void check(const void* address, size_t bytes) {
    const char* const begin = static_cast<const char*>(address);
    for (const Guarded* one : all()) {
      if (begin < one->base_ || begin >= one->base_ + one->size_) continue;
      if (begin >= one->data_ && begin + bytes <= one->end_) return;
      std::printf("an access of %zu bytes, %td from a tensor's begin and %td from its end\n", bytes, begin - one->data_,
                  one->end_ - begin);
      fail();
    }
  }

 private:
  static constexpr size_t kPage = 4096;
  size_t size_;
  char *base_, *data_, *end_;

  static std::vector<const Guarded*>& all() {
    static std::vector<const Guarded*> list;
    return list;
  }
};

}  // namespace gpu

inline void __syncthreads() { gpu::wait(gpu::block->barriers[0], gpu::block->running); }
inline void __threadfence() {}
inline bool __syncthreads_or(bool mine) {
  gpu::Block& block = *gpu::block;
  const int turn = block.barriers[0].turns, which = turn % 2;
  if (std::exchange(block.any_turns[which], turn) != turn) block.any[which] = false;
  block.any[which] |= mine;
  __syncthreads();
  return block.any[which];
}
inline bool __syncthreads_and(bool mine) { return !__syncthreads_or(!mine); }
inline void __syncwarp(unsigned = 0xffffffffu) { gpu::exchange(0, 0); }
template <typename T>
T __shfl_sync(unsigned, T mine, int from, int width = 32) {
  return gpu::exchange(mine, gpu::fiber->lane / width * width + from % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T mine, int by) {
  return gpu::exchange(mine, gpu::fiber->lane ^ by);
}
template <typename T>
T __shfl_up_sync(unsigned, T mine, int by) {
  return gpu::exchange(mine, gpu::fiber->lane >= by ? gpu::fiber->lane - by : gpu::fiber->lane);
}
template <typename T>
T __shfl_down_sync(unsigned, T mine, int by) {
  return gpu::exchange(mine, gpu::fiber->lane + by < 32 ? gpu::fiber->lane + by : gpu::fiber->lane);
}
template <typename T, typename Combine>
T combine_lanes(T mine, const Combine& combine) {
  for (int by = 16; by > 0; by /= 2) mine = combine(mine, __shfl_xor_sync(0xffffffffu, mine, by));
  return mine;
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  return combine_lanes(static_cast<unsigned>(mine) << gpu::fiber->lane, [](unsigned a, unsigned b) { return a | b; });
}
inline int __reduce_max_sync(unsigned, int mine) {
  return combine_lanes(mine, [](int a, int b) { return a > b ? a : b; });
}
inline int __reduce_add_sync(unsigned, int mine) {
  return combine_lanes(mine, [](int a, int b) { return a + b; });
}

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (by & 31));
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, const T& value) {
  *address = value;
}
template <typename T>
void __stwb(T* address, const T& value) {
  gpu::Guarded::check(address, sizeof(T));
  *address = value;
}
template <typename T>
bool __isGlobal(const T*) {
  return true;
}
