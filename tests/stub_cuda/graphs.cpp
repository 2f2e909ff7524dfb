// Tests of csrc/kernels/graph.cu on a stub of CUDA's graphs, streams and events. Prints how often something was wrong.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#define CUDART_VERSION 13000

using cudaGraph_t = void*;
using cudaGraphNode_t = void*;
using cudaGraphExec_t = void*;
using cudaEvent_t = void*;

constexpr auto cudaErrorMemoryAllocation = static_cast<cudaError_t>(2);
constexpr auto cudaErrorIllegalState = static_cast<cudaError_t>(401);
constexpr auto cudaErrorStreamCaptureInvalidated = static_cast<cudaError_t>(901);
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
constexpr unsigned char cudaGraphKernelNodePortProgrammatic = 1, cudaGraphDependencyTypeProgrammatic = 1;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
struct cudaGraphEdgeData {
  unsigned char from_port, to_port, type;
};
struct cudaKernelNodeParams {
  void* func;
  dim3 gridDim, blockDim;
  unsigned sharedMemBytes;
  void** kernelParams;
};
struct cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
};

namespace stub {

std::string fails;             // the function that fails
std::set<cudaStream_t> alive;  // streams
unsigned long long id = 1;     // of any stream
int waits = 0, launches = 0;

cudaError_t done(const char* function) { return fails == function ? cudaErrorUnknown : cudaSuccess; }

}  // namespace stub

const char* cudaGetErrorString(cudaError_t) { return ""; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const cudaError_t status = stub::done("stream");
  if (status == cudaSuccess) stub::alive.insert(*stream = new char);
  return status;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stub::alive.erase(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* id) {
  *id = stub::id;
  return stub::done("id");
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) { return stub::done("event"); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return stub::done("record"); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  ++stub::waits;
  return stub::done("wait");
}
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  *graph = new char;
  return stub::done("create");
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
  return stub::done("instantiate");
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  ++stub::launches;
  return stub::done("launch");
}
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, size_t,
                                   const cudaKernelNodeParams*) {
  return cudaSuccess;
}
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t, cudaLaunchAttributeID, const cudaLaunchAttributeValue*) {
  return cudaSuccess;
}
cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*,
                                     const cudaGraphEdgeData*, size_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus*, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                          size_t, cudaStreamCaptureMode) {
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaSuccess; }

#include "kernels/graph.cu"

namespace {

// Slots that cannot be made leave nothing behind, and do not count: there are as many as before.
int make_slots() {
  int wrong = 0;
  void *slot = nullptr, *stream = nullptr;
  for (const char* function : {"stream", "event"}) {
    stub::fails = function;
    for (int i = 0; i < 2 * kMaxGraphs; ++i) wrong += llmk_graph_slot(&slot, &stream) == cudaSuccess;
  }
  wrong += static_cast<int>(stub::alive.size());
  stub::fails = "";
  std::set<int> numbers;
  for (int i = 0; i < kMaxGraphs; ++i) {
    wrong += llmk_graph_slot(&slot, &stream) != cudaSuccess;
    numbers.insert(static_cast<GraphSlot*>(slot)->number);
  }
  wrong += numbers.size() != kMaxGraphs || *numbers.begin() != 0 || *numbers.rbegin() != kMaxGraphs - 1;
  wrong += llmk_graph_slot(&slot, &stream) != cudaErrorMemoryAllocation;
  return wrong + (stub::alive.size() != kMaxGraphs);
}

// A recording that fails leaves the thread and the slot as they were: the next one succeeds.
int record_after_failures() {
  int wrong = 0;
  void *slot = nullptr, *stream = nullptr, *graph = nullptr;
  wrong += llmk_graph_slot(&slot, &stream) != cudaSuccess;
  for (int i = 0; i < 2 * kMaxGraphs; ++i) {
    stub::fails = "create";
    wrong += llmk_graph_begin(slot) == cudaSuccess || current_recorder;
    stub::fails = "instantiate";
    wrong += llmk_graph_begin(slot) != cudaSuccess || !current_recorder;
    wrong += llmk_graph_end(&graph) == cudaSuccess || graph || current_recorder;
  }
  stub::fails = "";
  wrong += llmk_graph_begin(slot) != cudaSuccess || llmk_graph_end(&graph) != cudaSuccess || !graph;
  return wrong + (llmk_graph_destroy(graph) != cudaSuccess);
}

// A launch waits for the last one of its slot, unless that was one of the same graph in the same stream. A stream that
// has the handle of another, destroyed one is not the same.
int wait_for_other_streams() {
  int wrong = 0;
  void *slot = nullptr, *stream = nullptr, *graph = nullptr;
  wrong += llmk_graph_slot(&slot, &stream) != cudaSuccess || llmk_graph_begin(slot) != cudaSuccess ||
           llmk_graph_end(&graph) != cudaSuccess;
  const auto launch = [&](unsigned long long id, bool succeeds, bool waits) {
    const int before = stub::waits;
    stub::id = id;
    wrong += (llmk_graph_launch(graph, stream) == cudaSuccess) != succeeds;
    wrong += stub::waits - before != waits;
  };
  launch(1, true, true);
  launch(1, true, false);
  launch(2, true, true);
  launch(2, true, false);
  stub::fails = "id";
  const int launches = stub::launches;
  launch(2, false, false);
  wrong += stub::launches != launches;
  stub::fails = "wait";
  launch(3, false, true);
  stub::fails = "";
  launch(3, true, true);
  launch(3, true, false);
  return wrong;
}

}  // namespace

int main(int, char** arguments) {
  const struct {
    const char* name;
    int (*run)();
  } scenarios[] = {{"slots", make_slots}, {"recordings", record_after_failures}, {"streams", wait_for_other_streams}};
  for (const auto& scenario : scenarios) {
    if (std::strcmp(scenario.name, arguments[1]) == 0) {
      const int wrong = scenario.run();
      std::printf("%s: %d wrong\n", scenario.name, wrong);
      return wrong != 0;
    }
  }
  return 2;
}
