// Captured graphs, for llmkernels/hf/graphs.py, which calls these functions through ctypes and says why they are not
// PyTorch's. All return a cudaError_t and are for any thread; one thread at a time has a place, or launches a graph.
// The current device is that of the place.
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/decode_attention.h"

namespace {

// Where a graph is captured, and what it shares with those that were captured there before it and are dead.
struct Place {
  cudaStream_t stream;  // that nobody else is handed, and that work in the legacy default stream does not wait for
  cudaEvent_t done;     // the last launch of a graph from here
  int counters;
  uint64_t capture;  // under way
};

struct Graph {
  cudaGraphExec_t executable;
  Place* place;
  cudaStream_t stream;  // of the last launch
  bool launched;
};

cudaError_t without_trace(cudaError_t status) {
  if (status != cudaSuccess) (void)cudaGetLastError();  // or the next launch would be blamed for it
  return status;
}

}  // namespace

#define LLMK_EXPORT extern "C" __attribute__((visibility("default")))

// A new place, which is never destroyed, and its stream.
LLMK_EXPORT int llmk_graph_place(void** result, void** stream) {
  Place place{};
  place.counters = llmk::kernels::reserve_counters();
  cudaError_t status = place.counters < 0 ? cudaErrorMemoryAllocation : cudaSuccess;
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&place.stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&place.done, cudaEventDisableTiming);
  if (status != cudaSuccess) return without_trace(status);
  *result = new Place(place);
  *stream = place.stream;
  return cudaSuccess;
}

LLMK_EXPORT int llmk_graph_begin(void* at) {
  Place& place = *static_cast<Place*>(at);
  // Other threads may do as they like; this one may do nothing that could wait for the device.
  cudaError_t status = cudaStreamBeginCapture(place.stream, cudaStreamCaptureModeThreadLocal);
  if (status != cudaSuccess) return without_trace(status);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  status = cudaStreamGetCaptureInfo(place.stream, &capturing, &capture);
  place.capture = capture;
  if (status == cudaSuccess) {
    llmk::kernels::use_counters(capture, place.counters);
  } else {
    cudaGraph_t graph = nullptr;
    if (cudaStreamEndCapture(place.stream, &graph) == cudaSuccess && graph) (void)cudaGraphDestroy(graph);
  }
  return without_trace(status);
}

// Ends the capture in any case. The graph, to be destroyed, goes to `result`; null: there is to be none.
LLMK_EXPORT int llmk_graph_end(void* at, void** result) {
  Place& place = *static_cast<Place*>(at);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaError_t status = cudaStreamEndCapture(place.stream, &graph);
  llmk::kernels::forget_counters(place.capture);
  if (status == cudaSuccess && !graph) status = cudaErrorStreamCaptureInvalidated;
  if (status == cudaSuccess && result) {
    // As PyTorch has them: for its allocator of cudaMallocAsync, and for streams of several priorities.
    status = cudaGraphInstantiate(&executable, graph,
                                  cudaGraphInstantiateFlagAutoFreeOnLaunch | cudaGraphInstantiateFlagUseNodePriority);
  }
  if (graph) (void)cudaGraphDestroy(graph);
  if (status == cudaSuccess && result) *result = new Graph{executable, &place, nullptr, false};
  return without_trace(status);
}

LLMK_EXPORT int llmk_graph_launch(void* given, void* in) {
  Graph& graph = *static_cast<Graph*>(given);
  const auto stream = static_cast<cudaStream_t>(in);
  cudaError_t status = cudaSuccess;
  // A dead graph from the same place may still be running, with the same memory; or this one, in another stream.
  if (!graph.launched || graph.stream != stream) status = cudaStreamWaitEvent(stream, graph.place->done, 0);
  graph.launched = true;
  graph.stream = stream;
  if (status == cudaSuccess) status = cudaGraphLaunch(graph.executable, stream);
  if (status == cudaSuccess) status = cudaEventRecord(graph.place->done, stream);
  return without_trace(status);
}

// The graph may still be running: CUDA then frees it when it is done.
LLMK_EXPORT int llmk_graph_destroy(void* given) {
  const auto* const graph = static_cast<Graph*>(given);
  const cudaError_t status = cudaGraphExecDestroy(graph->executable);
  delete graph;
  return without_trace(status);
}

LLMK_EXPORT const char* llmk_graph_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
