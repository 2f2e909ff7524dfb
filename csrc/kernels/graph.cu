// Capturing and launching CUDA graphs. llmkernels/hf/graphs.py calls these functions through ctypes, and says why they
// replace PyTorch's. All return a cudaError_t. Any thread may call them, but only one at a time may use a slot or
// launch a graph. The current device must be that of the slot.
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/decode_attention.h"

namespace {

// What graphs that are alive at the same time must not share. A slot is used again when its graph is dead.
struct CaptureSlot {
  cudaStream_t stream;  // for captures only; does not synchronize with the legacy default stream
  cudaEvent_t done;     // the end of the last launch of a graph of this slot
  int counters;         // a reserved set of decode_attention's
  uint64_t capture;     // the id of the capture in progress
};

struct Graph {
  cudaGraphExec_t executable;
  CaptureSlot* slot;
  cudaStream_t stream;  // of the last launch
  bool launched;
};

cudaError_t clear_error(cudaError_t status) {
  if (status != cudaSuccess) (void)cudaGetLastError();  // clears it, or the next launch would report it
  return status;
}

}  // namespace

#define LLMK_EXPORT extern "C" __attribute__((visibility("default")))

// A new slot, which is never destroyed, and its stream.
LLMK_EXPORT int llmk_graph_slot(void** result, void** stream) {
  CaptureSlot slot{};
  slot.counters = llmk::kernels::reserve_counters();
  cudaError_t status = slot.counters < 0 ? cudaErrorMemoryAllocation : cudaSuccess;
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&slot.stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming);
  if (status != cudaSuccess) return clear_error(status);
  *result = new CaptureSlot(slot);
  *stream = slot.stream;
  return cudaSuccess;
}

LLMK_EXPORT int llmk_graph_begin(void* at) {
  CaptureSlot& slot = *static_cast<CaptureSlot*>(at);
  // Forbids only this thread to call functions that could wait for the device.
  cudaError_t status = cudaStreamBeginCapture(slot.stream, cudaStreamCaptureModeThreadLocal);
  if (status != cudaSuccess) return clear_error(status);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  status = cudaStreamGetCaptureInfo(slot.stream, &capturing, &capture);
  slot.capture = capture;
  if (status == cudaSuccess) {
    llmk::kernels::use_counters(capture, slot.counters);
  } else {
    cudaGraph_t graph = nullptr;
    if (cudaStreamEndCapture(slot.stream, &graph) == cudaSuccess && graph) (void)cudaGraphDestroy(graph);
  }
  return clear_error(status);
}

// Ends the capture, also if it has failed. `result` receives the graph; null: no graph is made.
LLMK_EXPORT int llmk_graph_end(void* at, void** result) {
  CaptureSlot& slot = *static_cast<CaptureSlot*>(at);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaError_t status = cudaStreamEndCapture(slot.stream, &graph);
  llmk::kernels::forget_counters(slot.capture);
  if (status == cudaSuccess && !graph) status = cudaErrorStreamCaptureInvalidated;
  if (status == cudaSuccess && result) {
    // The flags that PyTorch uses, for cudaMallocAsync and for streams with priorities.
    status = cudaGraphInstantiate(&executable, graph,
                                  cudaGraphInstantiateFlagAutoFreeOnLaunch | cudaGraphInstantiateFlagUseNodePriority);
  }
  if (graph) (void)cudaGraphDestroy(graph);
  if (status == cudaSuccess && result) *result = new Graph{executable, &slot, nullptr, false};
  return clear_error(status);
}

LLMK_EXPORT int llmk_graph_launch(void* given, void* in) {
  Graph& graph = *static_cast<Graph*>(given);
  const auto stream = static_cast<cudaStream_t>(in);
  cudaError_t status = cudaSuccess;
  // A dead graph of the same slot may still be running, with the same memory; so may this one, in another stream.
  if (!graph.launched || graph.stream != stream) status = cudaStreamWaitEvent(stream, graph.slot->done, 0);
  graph.launched = true;
  graph.stream = stream;
  if (status == cudaSuccess) status = cudaGraphLaunch(graph.executable, stream);
  if (status == cudaSuccess) status = cudaEventRecord(graph.slot->done, stream);
  return clear_error(status);
}

// The graph may still be running: CUDA frees it when it is done.
LLMK_EXPORT int llmk_graph_destroy(void* given) {
  const auto* const graph = static_cast<Graph*>(given);
  const cudaError_t status = cudaGraphExecDestroy(graph->executable);
  delete graph;
  return clear_error(status);
}

LLMK_EXPORT const char* llmk_graph_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
