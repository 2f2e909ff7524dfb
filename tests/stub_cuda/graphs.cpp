// Tests of csrc/kernels/graph.cu on a stub of CUDA's graphs, streams and events. Prints how often something was wrong.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
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
constexpr auto cudaErrorGraphExecUpdateFailure = static_cast<cudaError_t>(910);
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
int waits = 0, launches = 0, records = 0;
uintptr_t nodes = 0;                              // that were added
std::map<cudaGraphNode_t, const void*> pointers;  // the first argument of kernels, by node
std::map<cudaGraphNode_t, cudaGraph_t> owners;    // the graph of a node, which its executable is here, too
int graphs = 0, edges = 0;                        // that are alive; that were added

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
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  ++stub::records;
  return stub::done("record");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  ++stub::waits;
  return stub::done("wait");
}
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  const cudaError_t status = stub::done("create");
  if (status == cudaSuccess) *graph = new char, ++stub::graphs;
  return status;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
  --stub::graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = graph;
  return stub::done("instantiate");
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  ++stub::launches;
  return stub::fails == "second launch" && stub::launches % 2 == 0 ? cudaErrorUnknown : stub::done("launch");
}
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t*, size_t,
                                   const cudaKernelNodeParams* params) {
  *node = reinterpret_cast<cudaGraphNode_t>(++stub::nodes);
  stub::owners[*node] = graph;
  stub::pointers[*node] = *static_cast<const void* const*>(params->kernelParams[0]);
  return cudaSuccess;
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t executable, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
  if (stub::owners[node] != executable) return cudaErrorUnknown;
  stub::pointers[node] = *static_cast<const void* const*>(params->kernelParams[0]);
  return stub::done("update");
}
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t, cudaLaunchAttributeID, const cudaLaunchAttributeValue*) {
  return cudaSuccess;
}
cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from, const cudaGraphNode_t* to,
                                     const cudaGraphEdgeData*, size_t) {
  ++stub::edges;
  return stub::owners[*from] == graph && stub::owners[*to] == graph ? cudaSuccess : cudaErrorUnknown;
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
    wrong += llmk_graph_begin(slot, 0) == cudaSuccess || current_recorder;
    stub::fails = "instantiate";
    wrong += llmk_graph_begin(slot, 0) != cudaSuccess || !current_recorder;
    wrong += llmk_graph_end(&graph) == cudaSuccess || graph || current_recorder;
  }
  stub::fails = "";
  wrong += llmk_graph_begin(slot, 0) != cudaSuccess || llmk_graph_end(&graph) != cudaSuccess || !graph;
  return wrong + (llmk_graph_destroy(graph) != cudaSuccess);
}

// A launch waits for the last one of its slot, unless that was one of the same graph in the same stream. A stream that
// has the handle of another, destroyed one is not the same.
int wait_for_other_streams() {
  int wrong = 0;
  void *slot = nullptr, *stream = nullptr, *graph = nullptr;
  wrong += llmk_graph_slot(&slot, &stream) != cudaSuccess || llmk_graph_begin(slot, 0) != cudaSuccess ||
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

// A graph that is pointed at other memory: the kernels that were recorded with its addresses get new ones, from
// whatever they were pointed at before, and others stay as they are.
int point_at_other_memory() {
  struct Params {
    const void* cache;
    int kernels;
  };
  const char memory[8] = {};
  int wrong = 0, added = 0;
  const auto launch = [&](const Params& params) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < params.kernels + added && status == cudaSuccess; ++i) {
      const void* pointer = params.cache;
      void* arguments[] = {&pointer, nullptr};
      status = current_recorder->add_launch(nullptr, {1, dim3(1)}, false, arguments);
    }
    return status;
  };
  const auto move = [](Params& params, const Moves& moves) { moves(params.cache); };
  void *slot = nullptr, *stream = nullptr, *graph = nullptr;
  wrong += llmk_graph_slot(&slot, &stream) != cudaSuccess || llmk_graph_begin(slot, 0) != cudaSuccess;
  wrong += launch_movable(Params{memory, 1}, launch, move) != cudaSuccess;
  wrong += launch({memory, 1}) != cudaSuccess;
  wrong += launch_movable(Params{memory + 1, 2}, launch, move) != cudaSuccess;
  wrong += launch_movable(Params{memory + 2, 0}, launch, move) != cudaSuccess;
  wrong += llmk_graph_end(&graph) != cudaSuccess;
  const auto expect = [&](std::initializer_list<int> places) {
    int node = 0;
    for (const int place : places) {
      wrong += stub::pointers[reinterpret_cast<cudaGraphNode_t>(uintptr_t(++node))] != memory + place;
    }
  };
  expect({0, 0, 1, 1});
  const void* const from[] = {memory, memory + 1};
  for (const int by : {4, 6, 0}) {
    const void* const to[] = {memory + by, memory + by + 1};
    wrong += llmk_graph_point(graph, from, to, 2) != cudaSuccess || current_recorder;
    expect({by, 0, by + 1, by + 1});
  }
  wrong += stub::nodes != 4;
  stub::fails = "update";
  wrong += llmk_graph_point(graph, from, from, 2) == cudaSuccess || current_recorder;
  stub::fails = "";
  for (const int more : {1, -1}) {  // kernels than were recorded
    added = more;
    wrong += llmk_graph_point(graph, from, from, 2) != cudaErrorGraphExecUpdateFailure || current_recorder;
  }
  return wrong + (llmk_graph_destroy(graph) != cudaSuccess);
}

// A long graph in pieces is launched in two, and what moves belongs to one of them. If the second piece cannot be
// launched, who takes the slot next waits for the first one.
int launch_in_pieces() {
  struct Params {
    const void* cache;
  };
  const char memory[8] = {};
  int wrong = 0;
  const auto launch = [](const Params& params) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < 4 && status == cudaSuccess; ++i) {
      const void* pointer = params.cache;
      void* arguments[] = {&pointer, nullptr};
      status = current_recorder->add_launch(nullptr, {1, dim3(1)}, true, arguments);
    }
    return status;
  };
  const auto move = [](Params& params, const Moves& moves) { moves(params.cache); };
  void *slot = nullptr, *stream = nullptr;
  wrong += llmk_graph_slot(&slot, &stream) != cudaSuccess;
  for (const int groups : {0, 1, kFirstLaunches / 4, kFirstLaunches / 4 + 1, kFirstLaunches / 2, kFirstLaunches}) {
    for (const int alone : {0, 2}) {  // the first piece ends within what moves
      const int alive = stub::graphs, edges = stub::edges, kernels = 4 * groups + alone;
      const int last_begins = kernels - (groups > 0 ? 4 : 1);
      const int pieces = kernels > 0 && last_begins >= kFirstLaunches ? 2 : 1;
      void* graph = nullptr;
      wrong += llmk_graph_begin(slot, 1) != cudaSuccess;
      const void* pointer = memory;
      void* arguments[] = {&pointer, nullptr};
      for (int i = 0; i < alone; ++i)
        wrong += current_recorder->add_launch(nullptr, {1, dim3(1)}, true, arguments) != 0;
      for (int i = 0; i < groups; ++i) wrong += launch_movable(Params{memory}, launch, move) != cudaSuccess;
      wrong += llmk_graph_end(&graph) != cudaSuccess || stub::graphs - alive != pieces;
      wrong += stub::edges - edges != std::max(kernels - pieces, 0);
      const void *const from[] = {memory}, *const to[] = {memory + 1};
      wrong += llmk_graph_point(graph, from, to, 1) != cudaSuccess;
      const int launches = stub::launches;
      wrong += llmk_graph_launch(graph, stream) != cudaSuccess || stub::launches - launches != pieces;
      if (pieces == 2) {
        stub::launches = 0;
        stub::fails = "second launch";
        const int records = stub::records;
        wrong += llmk_graph_launch(graph, stream) == cudaSuccess || stub::records - records != 1;
        stub::fails = "";
        wrong += llmk_graph_launch(graph, stream) != cudaSuccess;  // by a stream that is not known to have the last one
      }
      wrong += llmk_graph_destroy(graph) != cudaSuccess || stub::graphs != alive;
    }
  }
  return wrong;
}

}  // namespace

int main(int, char** arguments) {
  const struct {
    const char* name;
    int (*run)();
  } scenarios[] = {{"slots", make_slots},
                   {"recordings", record_after_failures},
                   {"streams", wait_for_other_streams},
                   {"points", point_at_other_memory},
                   {"pieces", launch_in_pieces}};
  for (const auto& scenario : scenarios) {
    if (std::strcmp(scenario.name, arguments[1]) == 0) {
      const int wrong = scenario.run();
      std::printf("%s: %d wrong\n", scenario.name, wrong);
      return wrong != 0;
    }
  }
  return 2;
}
