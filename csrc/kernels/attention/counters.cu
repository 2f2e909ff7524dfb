// Which counters a launch of decode_attention uses: two launches that may run at the same time must not share them.
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "decode_attention.h"
#include "plan.h"

namespace llmk::kernels {
namespace {

constexpr int kSets = 2048, kGraphSets = 1024;
static_assert(kDecodeAttentionCounters == kMaxBlocks);
// Every device has its own. The last kGraphSets are for graphs that keep theirs, see graph.cu.
__device__ int counter_sets[(kSets + kGraphSets) * kDecodeAttentionCounters];

// Launches that have the same key follow one another: those of a stream, and within one capture those that came to the
// graph by one stream (branches of a graph come from several). A stream is known by its identity; while it captures, by
// its handle, since it may not be asked for its identity then, and no other stream has that handle as long.
using Key = std::pair<uint64_t, uint64_t>;  // the stream; the capture, or 0

class Sets {
 public:
  int of(const Key& key) {
    const std::lock_guard lock(mutex_);
    if (key.second != 0) {
      if (const auto found = of_captures_.find(key.second); found != of_captures_.end()) return found->second;
    }
    // Every new key takes the next set. So no two of the kSets newest share one; a key that is older than that may find
    // its set taken, and then takes another. Only a graph of somebody else's, which keeps what it has captured, might
    // run at the same time as a launch that has taken its set: one behind which there were kSets other captures or
    // streams.
    const auto [found, is_new] = sets_.try_emplace(key, 0);
    if (is_new) {
      const int set = static_cast<int>(taken_ % kSets);
      if (taken_++ >= kSets) sets_.erase(owners_[set]);
      owners_[set] = key;
      found->second = set;
    }
    return found->second;
  }

  int reserve() {
    const std::lock_guard lock(mutex_);
    return reserved_ < kGraphSets ? kSets + reserved_++ : -1;
  }
  void use(uint64_t capture, int set) {
    const std::lock_guard lock(mutex_);
    of_captures_[capture] = set;
  }
  void forget(uint64_t capture) {
    const std::lock_guard lock(mutex_);
    of_captures_.erase(capture);
  }

 private:
  std::mutex mutex_;
  std::map<Key, int> sets_;
  Key owners_[kSets];
  int64_t taken_ = 0;
  int reserved_ = 0;
  std::map<uint64_t, int> of_captures_;  // that are under way
};

Sets& sets() {
  static Sets* const sets = new Sets;  // never destroyed: other static objects may launch to the end
  return *sets;
}

}  // namespace

cudaError_t decode_attention_counters(cudaStream_t stream, int*& counters) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0, id = 0;
  if (const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture); error != cudaSuccess) return error;
  if (status == cudaStreamCaptureStatusNone) {
    capture = 0;
    if (const cudaError_t error = cudaStreamGetId(stream, &id); error != cudaSuccess) return error;
  } else {
    id = reinterpret_cast<uintptr_t>(stream);
  }
  void* memory = nullptr;
  if (const cudaError_t error = cudaGetSymbolAddress(&memory, counter_sets); error != cudaSuccess) return error;
  counters = static_cast<int*>(memory) + sets().of({id, capture}) * kDecodeAttentionCounters;
  return cudaSuccess;
}

int reserve_counters() { return sets().reserve(); }
void use_counters(uint64_t capture, int set) { sets().use(capture, set); }
void forget_counters(uint64_t capture) { sets().forget(capture); }

}  // namespace llmk::kernels
