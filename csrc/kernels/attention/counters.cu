// The counters of decode_attention launches. Launches that may run at the same time must use different sets of them.
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "decode_attention.h"
#include "kernels/recorder.h"
#include "plan.h"

namespace llmk::kernels {
namespace {

constexpr int kSets = 2048;
// One array per device. The last kMaxGraphs sets are those of the library's own graphs, by their slots.
__device__ int counter_sets[(kSets + kMaxGraphs) * kDecodeAttentionCounters];

// Launches of the same key never overlap, so they may share a set: those of one stream, and within one capture those of
// one captured stream (the branches of a graph come from several). The key has the stream's id. While a stream captures
// its id cannot be queried, so the key has its handle, which no other stream has during the capture.
using Key = std::pair<uint64_t, uint64_t>;  // the stream; the capture, or 0

class Sets {
 public:
  int of(const Key& key) {
    const std::lock_guard lock(mutex_);
    // Round robin: a new key takes the next set, and with it the set's previous key, if any, is dropped. So the kSets
    // newest keys have sets of their own; a dropped key takes a new set. One case remains: a graph that another library
    // captured keeps its set, and after kSets newer streams or captures a launch may share it.
    const auto [found, is_new] = sets_.try_emplace(key, 0);
    if (is_new) {
      const int set = static_cast<int>(taken_ % kSets);
      if (taken_++ >= kSets) sets_.erase(owners_[set]);
      owners_[set] = key;
      found->second = set;
    }
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, int> sets_;
  Key owners_[kSets];
  int64_t taken_ = 0;
};

Sets& sets() {
  static Sets* const sets = new Sets;  // never destroyed: other static objects may launch to the end
  return *sets;
}

}  // namespace

cudaError_t decode_attention_counters(cudaStream_t stream, int*& counters) {
  int set = 0;
  if (current_recorder) {
    set = kSets + current_recorder->slot();
  } else {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0, id = 0;
    if (const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture); error != cudaSuccess) {
      return error;
    }
    if (status == cudaStreamCaptureStatusNone) {
      capture = 0;
      if (const cudaError_t error = cudaStreamGetId(stream, &id); error != cudaSuccess) return error;
    } else {
      id = reinterpret_cast<uintptr_t>(stream);
    }
    set = sets().of({id, capture});
  }
  void* memory = nullptr;
  if (const cudaError_t error = cudaGetSymbolAddress(&memory, counter_sets); error != cudaSuccess) return error;
  counters = static_cast<int*>(memory) + set * kDecodeAttentionCounters;
  return cudaSuccess;
}

}  // namespace llmk::kernels
