// Recording and launching CUDA graphs, see recorder.h. llmkernels/hf/step/graphs.py calls the exported functions
// through ctypes. They return a cudaError_t. Any thread may call them, but only one at a time may use a slot or launch
// a graph. The current device must be that of the slot.
#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "launch.h"
#include "recorder.h"

namespace llmk::kernels {
namespace {

// What graphs that are alive at the same time must not share. A slot is used again when its graph is dead.
struct GraphSlot {
  cudaStream_t stream;  // for captures only; does not synchronize with the legacy default stream
  cudaEvent_t done;     // the end of the last launch of a graph of this slot
  int number;
};

// The host takes 0.4 us for each kernel of a graph before the first one starts. So of a graph in pieces the first
// kernels are launched by themselves, and those behind them while the GPU works.
constexpr int kFirstLaunches = 24;

// Kernels of a graph that have addresses of a cache.
struct Movable {
  std::function<cudaError_t(const Moves&)> launch;
  size_t piece;
  std::vector<cudaGraphNode_t> nodes;
};

// A part of a graph that is launched by itself.
struct Piece {
  cudaGraph_t recorded;  // which has the nodes that are updated
  cudaGraphExec_t executable = nullptr;
};

cudaError_t destroy(std::vector<Piece>& pieces) {
  cudaError_t status = cudaSuccess;
  for (const Piece& piece : pieces) {
    if (piece.executable) {
      if (const cudaError_t found = cudaGraphExecDestroy(piece.executable); found != cudaSuccess) status = found;
    }
    (void)cudaGraphDestroy(piece.recorded);
  }
  pieces.clear();
  return status;
}

struct Graph {
  std::vector<Piece> pieces;  // one after the other
  GraphSlot* slot;
  std::vector<Movable> movables;
  // The stream of the last launch, if there was one. Its id and not its handle, which another stream may have once this
  // one is destroyed, while the graph still runs.
  std::optional<unsigned long long> stream;
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
  const cudaError_t status = cudaStreamGetCaptureInfo(stream, &capturing, nullptr, nullptr, &nodes, nullptr, &count);
#else
  const cudaError_t status = cudaStreamGetCaptureInfo_v2(stream, &capturing, nullptr, nullptr, &nodes, &count);
#endif
  if (status != cudaSuccess) return status;
  if (capturing != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  tail.assign(nodes, nodes + count);
  return cudaSuccess;
}

cudaKernelNodeParams node_params(const void* kernel, const LaunchShape& shape, void** arguments) {
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(kernel);
  params.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  params.blockDim = shape.threads;
  params.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  params.kernelParams = arguments;
  return params;
}

// One line of launches.
class GraphRecorder final : public Recorder {
 public:
  GraphRecorder(GraphSlot* slot, bool in_pieces) : slot_(slot), in_pieces_(in_pieces), status_(begin_piece()) {}
  ~GraphRecorder() { (void)destroy(pieces_); }
  GraphRecorder(const GraphRecorder&) = delete;
  GraphRecorder& operator=(const GraphRecorder&) = delete;

  cudaError_t add_launch(const void* kernel, const LaunchShape& shape, bool overlaps, void** arguments) override {
    if (!in_movable_) end_first_piece();
    if (status_ != cudaSuccess) return status_;
    const cudaKernelNodeParams params = node_params(kernel, shape, arguments);
    cudaGraphNode_t node = nullptr;
    cudaError_t status = cudaGraphAddKernelNode(&node, graph(), nullptr, 0, &params);
    if (status == cudaSuccess && shape.cluster > 1) {
      cudaLaunchAttributeValue value{};
      value.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
      status = cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeClusterDimension, &value);
    }
    for (size_t i = 0; i < last_.size() && status == cudaSuccess; ++i) {
      status = add_edge(graph(), last_[i], node, overlaps && last_is_ours_);
    }
    last_ = {node};
    ++launches_;
    last_is_ours_ = true;
    if (in_movable_) movables_.back().nodes.push_back(node);
    return status_ = status;
  }

  cudaError_t add_movable(std::function<cudaError_t(const Moves&)> launch) override {
    end_first_piece();
    if (status_ != cudaSuccess) return status_;
    movables_.push_back({std::move(launch), pieces_.size() - 1, {}});
    in_movable_ = true;
    const cudaError_t status = movables_.back().launch({});
    in_movable_ = false;
    return status_ = status;
  }

  void begin_capture() override {
    end_first_piece();
    if (status_ == cudaSuccess) {
      status_ = cudaStreamBeginCaptureToGraph(slot_->stream, graph(), last_.empty() ? nullptr : last_.data(), nullptr,
                                              last_.size(), cudaStreamCaptureModeRelaxed);
    }
    if (status_ != cudaSuccess) throw std::runtime_error(cudaGetErrorString(clear_error(status_)));
  }

  void end_capture() override {
    const cudaError_t status = captured_tail(slot_->stream, last_);
    cudaGraph_t captured = nullptr;  // graph()
    const cudaError_t ended = cudaStreamEndCapture(slot_->stream, &captured);
    status_ = clear_error(status == cudaSuccess ? ended : status);
    last_is_ours_ = false;
    ++launches_;
  }

  int slot() const override { return slot_->number; }

  cudaError_t finish(Graph*& result) {
    for (Piece& piece : pieces_) {
      if (status_ == cudaSuccess) status_ = cudaGraphInstantiate(&piece.executable, piece.recorded, 0);
    }
    if (status_ == cudaSuccess) {
      result = new Graph{std::exchange(pieces_, {}), slot_, std::move(movables_), std::nullopt};
    }
    return status_;
  }

  cudaError_t status() const { return status_; }

 private:
  cudaGraph_t graph() const { return pieces_.back().recorded; }

  cudaError_t begin_piece() {
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaGraphCreate(&graph, 0);
    if (status == cudaSuccess) pieces_.push_back({graph});
    last_.clear();
    return status;
  }

  // What comes next belongs to the second piece if the first one is complete.
  void end_first_piece() {
    if (in_pieces_ && status_ == cudaSuccess && pieces_.size() == 1 && launches_ >= kFirstLaunches) {
      status_ = begin_piece();
    }
  }

  GraphSlot* const slot_;
  const bool in_pieces_;
  std::vector<Piece> pieces_;
  int launches_ = 0;
  std::vector<cudaGraphNode_t> last_;  // what the next node of the piece comes after
  bool last_is_ours_ = false;          // one kernel of this library
  std::vector<Movable> movables_;
  bool in_movable_ = false;  // whether the next nodes are those of the last one
  cudaError_t status_;       // the first failure
};

// Gives the nodes of a Movable the parameters of the launches that are made.
class GraphUpdater final : public Recorder {
 public:
  GraphUpdater(const Graph& graph, const Movable& movable)
      : executable_(graph.pieces[movable.piece].executable), slot_(graph.slot->number), nodes_(movable.nodes) {}

  cudaError_t add_launch(const void* kernel, const LaunchShape& shape, bool, void** arguments) override {
    if (next_ == nodes_.size()) return cudaErrorGraphExecUpdateFailure;
    const cudaKernelNodeParams params = node_params(kernel, shape, arguments);
    return cudaGraphExecKernelNodeSetParams(executable_, nodes_[next_++], &params);
  }
  cudaError_t add_movable(std::function<cudaError_t(const Moves&)>) override { return cudaErrorGraphExecUpdateFailure; }
  void begin_capture() override { throw std::logic_error("a launch of PyTorch's can not be pointed at other memory"); }
  void end_capture() override {}
  int slot() const override { return slot_; }

  bool is_complete() const { return next_ == nodes_.size(); }

 private:
  const cudaGraphExec_t executable_;
  const int slot_;
  const std::vector<cudaGraphNode_t>& nodes_;
  size_t next_ = 0;
};

cudaError_t update(const Graph& graph, const Movable& movable, const Moves& moves) {
  GraphUpdater updater(graph, movable);
  current_recorder = &updater;
  const cudaError_t status = movable.launch(moves);
  current_recorder = nullptr;
  return status == cudaSuccess && !updater.is_complete() ? cudaErrorGraphExecUpdateFailure : status;
}

thread_local std::unique_ptr<GraphRecorder> own_recorder;  // current_recorder

}  // namespace
}  // namespace llmk::kernels

using namespace llmk::kernels;

#define LLMK_EXPORT extern "C" __attribute__((visibility("default")))

// A new slot, which is never destroyed, and its stream. A failure takes nothing: neither a number nor a stream.
LLMK_EXPORT int llmk_graph_slot(void** result, void** stream) {
  static std::mutex mutex;
  static int count = 0;
  const std::lock_guard lock(mutex);
  GraphSlot slot{};
  slot.number = count;
  cudaError_t status = slot.number < kMaxGraphs ? cudaSuccess : cudaErrorMemoryAllocation;
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&slot.stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) {
    status = cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming);
    if (status != cudaSuccess) (void)cudaStreamDestroy(slot.stream);
  }
  if (status != cudaSuccess) return clear_error(status);
  *result = new GraphSlot(slot);
  ++count;
  *stream = slot.stream;
  return cudaSuccess;
}

// From here on this thread records, in the stream of the slot. `in_pieces`: a launch of the graph starts sooner, and
// takes 2 us more.
LLMK_EXPORT int llmk_graph_begin(void* slot, int in_pieces) {
  if (own_recorder) return cudaErrorIllegalState;
  auto recorder = std::make_unique<GraphRecorder>(static_cast<GraphSlot*>(slot), in_pieces != 0);
  if (recorder->status() != cudaSuccess) return clear_error(recorder->status());
  own_recorder = std::move(recorder);
  current_recorder = own_recorder.get();
  return cudaSuccess;
}

// Ends this thread's recording. `result` receives the graph; null: no graph is made.
LLMK_EXPORT int llmk_graph_end(void** result) {
  const std::unique_ptr<GraphRecorder> recorder = std::move(own_recorder);
  current_recorder = nullptr;
  if (!recorder) return cudaErrorIllegalState;
  Graph* graph = nullptr;
  const cudaError_t status = result ? recorder->finish(graph) : cudaSuccess;
  if (graph) *result = graph;
  return clear_error(status);
}

// Points the graph at other memory: what was at from[i] when it was recorded is at to[i] for the launches to come.
// Those before are not concerned. After a failure it must not be launched any more.
LLMK_EXPORT int llmk_graph_point(void* given, const void* const* from, const void* const* to, int64_t count) {
  if (current_recorder) return cudaErrorIllegalState;
  const Graph& graph = *static_cast<Graph*>(given);
  Moves moves;
  for (int64_t i = 0; i < count; ++i) moves.add(from[i], to[i]);
  for (const Movable& movable : graph.movables) {
    if (const cudaError_t status = update(graph, movable, moves); status != cudaSuccess) return clear_error(status);
  }
  return cudaSuccess;
}

LLMK_EXPORT int llmk_graph_launch(void* given, void* in) {
  Graph& graph = *static_cast<Graph*>(given);
  const auto stream = static_cast<cudaStream_t>(in);
  unsigned long long id = 0;
  cudaError_t status = cudaStreamGetId(stream, &id);  // fails while the stream captures: no graph is launched then
  // A dead graph of the same slot may still be running, with the same memory; so may this one, in another stream.
  if (status == cudaSuccess && graph.stream != id) {
    graph.stream.reset();  // until the launch has succeeded
    status = cudaStreamWaitEvent(stream, graph.slot->done, 0);
  }
  bool runs = false;
  for (const Piece& piece : graph.pieces) {
    if (status == cudaSuccess) status = cudaGraphLaunch(piece.executable, stream);
    if (status == cudaSuccess) runs = true;
  }
  if (runs) {  // also if a later piece has failed: who takes the slot next waits for those before
    const cudaError_t recorded = cudaEventRecord(graph.slot->done, stream);
    if (status == cudaSuccess) status = recorded;
  }
  if (status == cudaSuccess) graph.stream = id;
  return clear_error(status);
}

// The graph may still be running: CUDA frees it when it is done.
LLMK_EXPORT int llmk_graph_destroy(void* given) {
  auto* const graph = static_cast<Graph*>(given);
  const cudaError_t status = destroy(graph->pieces);
  delete graph;
  return clear_error(status);
}

LLMK_EXPORT const char* llmk_graph_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
