// Which counters a launch of decode_attention uses: two launches that may run at the same time must not share them.
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "decode_attention.h"
#include "plan.h"

namespace llmk::kernels {
namespace {

constexpr int kSets = 2048;
static_assert(kDecodeAttentionCounters == kMaxBlocks);
__device__ int counter_sets[kSets * kDecodeAttentionCounters];  // every device has its own

// Launches that have the same key follow one another: those of a stream, and within one capture those that came to the
// graph by one stream (branches of a graph come from several). A stream is known by its identity; while it captures, by
// its handle, since it may not be asked for its identity then, and no other stream has that handle as long.
using Key = std::pair<uint64_t, uint64_t>;  // the stream; the capture, or 0

// Every new key takes the next set. So no two of the kSets newest share one; a key that is older than that may find its
// set taken, and then takes another. Only a graph, which keeps what it has captured, might run at the same time as a
// launch that has taken its set: one behind which there were kSets other captures or streams.
int set_of(const Key& key) {
  static std::mutex mutex;
  static std::map<Key, int> sets;
  static Key owners[kSets];
  static int64_t taken = 0;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = sets.try_emplace(key, 0);
  if (is_new) {
    const int set = static_cast<int>(taken % kSets);
    if (taken++ >= kSets) sets.erase(owners[set]);
    owners[set] = key;
    found->second = set;
  }
  return found->second;
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
  void* sets = nullptr;
  if (const cudaError_t error = cudaGetSymbolAddress(&sets, counter_sets); error != cudaSuccess) return error;
  counters = static_cast<int*>(sets) + set_of({id, capture}) * kDecodeAttentionCounters;
  return cudaSuccess;
}

}  // namespace llmk::kernels
