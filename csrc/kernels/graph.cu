// Recording and launching CUDA graphs, see graph.h. llmkernels/hf/graphs.py calls the exported functions through ctypes.
// They return a cudaError_t. Any thread may call them, but only one at a time may use a slot or launch a graph. The
// current device must be that of the slot.
#include "graph.h"

#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "attention/decode_attention.h"
#include "launch.h"

namespace llmk::kernels {
namespace {

// What graphs that are alive at the same time must not share. A slot is used again when its graph is dead.
struct GraphSlot {
  cudaStream_t stream;  // for captures only; does not synchronize with the legacy default stream
  cudaEvent_t done;     // the end of the last launch of a graph of this slot
  int counters;         // a reserved set of decode_attention's
};

struct Graph {
  cudaGraphExec_t executable;
  GraphSlot* slot;
  cudaStream_t stream;  // of the last launch
  bool launched;
};

cudaError_t clear_error(cudaError_t status) {
  if (status != cudaSuccess) (void)cudaGetLastError();  // clears it, or the next launch would report it
  return status;
}

cudaError_t add_edge(cudaGraph_t graph, cudaGraphNode_t from, cudaGraphNode_t to, bool programmatic) {
  cudaGraphEdgeData edge{};
  if (programmatic) {
    edge.from_port = cudaGraphKernelNodePortProgrammatic;
    edge.type = cudaGraphDependencyTypeProgrammatic;
  }
#if CUDART_VERSION >= 13000
  return cudaGraphAddDependencies(graph, &from, &to, &edge, 1);
#else
  return cudaGraphAddDependencies_v2(graph, &from, &to, &edge, 1);
#endif
}

// What a node that is captured next would depend on.
cudaError_t captured_tail(cudaStream_t stream, std::vector<cudaGraphNode_t>& tail) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t status =
      cudaStreamGetCaptureInfo(stream, &capturing, nullptr, nullptr, &nodes, nullptr, &count);
#else
  const cudaError_t status = cudaStreamGetCaptureInfo_v2(stream, &capturing, nullptr, nullptr, &nodes, &count);
#endif
  if (status != cudaSuccess) return status;
  if (capturing != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  tail.assign(nodes, nodes + count);
  return cudaSuccess;
}

thread_local Recording* current = nullptr;

}  // namespace

// One line of launches, on one thread.
struct Recording {
  GraphSlot* slot;
  cudaGraph_t graph = nullptr;
  std::vector<cudaGraphNode_t> last;  // what the next node comes after
  bool last_is_ours = false;          // one kernel of this library
  cudaError_t status = cudaSuccess;   // of the captures
};

Recording* current_recording() { return current; }

int recorded_counters(const Recording& recording) { return recording.slot->counters; }

cudaError_t record_launch(Recording& recording, const void* kernel, const LaunchShape& shape, bool overlaps,
                          void** arguments) {
  if (recording.status != cudaSuccess) return recording.status;
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(kernel);
  params.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  params.blockDim = shape.threads;
  params.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  params.kernelParams = arguments;
  cudaGraphNode_t node = nullptr;
  cudaError_t status = cudaGraphAddKernelNode(&node, recording.graph, nullptr, 0, &params);
  if (status == cudaSuccess && shape.cluster > 1) {
    cudaLaunchAttributeValue value{};
    value.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    status = cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeClusterDimension, &value);
  }
  for (size_t i = 0; i < recording.last.size() && status == cudaSuccess; ++i) {
    status = add_edge(recording.graph, recording.last[i], node, overlaps && recording.last_is_ours);
  }
  recording.last = {node};
  recording.last_is_ours = true;
  return status;
}

CaptureOthers::CaptureOthers() : recording_(current) {
  if (!recording_ || recording_->status != cudaSuccess) return;
  const std::vector<cudaGraphNode_t>& last = recording_->last;
  recording_->status =
      cudaStreamBeginCaptureToGraph(recording_->slot->stream, recording_->graph, last.empty() ? nullptr : last.data(),
                                    nullptr, last.size(), cudaStreamCaptureModeRelaxed);
  clear_error(recording_->status);
}

CaptureOthers::~CaptureOthers() {
  if (!recording_ || recording_->status != cudaSuccess) return;
  const cudaStream_t stream = recording_->slot->stream;
  cudaError_t status = captured_tail(stream, recording_->last);
  cudaGraph_t graph = nullptr;  // the recording's
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  recording_->status = clear_error(status == cudaSuccess ? ended : status);
  recording_->last_is_ours = false;
}

}  // namespace llmk::kernels

using namespace llmk::kernels;

#define LLMK_EXPORT extern "C" __attribute__((visibility("default")))

// A new slot, which is never destroyed, and its stream.
LLMK_EXPORT int llmk_graph_slot(void** result, void** stream) {
  GraphSlot slot{};
  slot.counters = reserve_counters();
  cudaError_t status = slot.counters < 0 ? cudaErrorMemoryAllocation : cudaSuccess;
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&slot.stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming);
  if (status != cudaSuccess) return clear_error(status);
  *result = new GraphSlot(slot);
  *stream = slot.stream;
  return cudaSuccess;
}

// From here on this thread records, in the stream of the slot.
LLMK_EXPORT int llmk_graph_begin(void* slot) {
  if (current) return cudaErrorIllegalState;
  auto recording = std::make_unique<Recording>(static_cast<GraphSlot*>(slot));
  const cudaError_t status = cudaGraphCreate(&recording->graph, 0);
  if (status == cudaSuccess) current = recording.release();
  return clear_error(status);
}

// Ends this thread's recording. `result` receives the graph; null: no graph is made.
LLMK_EXPORT int llmk_graph_end(void** result) {
  const std::unique_ptr<Recording> recording(current);
  current = nullptr;
  if (!recording) return cudaErrorIllegalState;
  cudaGraphExec_t executable = nullptr;
  cudaError_t status = recording->status;
  if (status == cudaSuccess && result) {
    // The flag is for what allocates inside a capture by cudaMallocAsync.
    status = cudaGraphInstantiate(&executable, recording->graph, cudaGraphInstantiateFlagAutoFreeOnLaunch);
  }
  (void)cudaGraphDestroy(recording->graph);
  if (status == cudaSuccess && result) *result = new Graph{executable, recording->slot, nullptr, false};
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
