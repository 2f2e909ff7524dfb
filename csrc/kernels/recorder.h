// Recording of CUDA graphs: while a thread records, each launch of this library becomes a node of its graph instead.
//
// This replaces stream capture. During a capture no thread of the process may wait for the device: its
// cudaDeviceSynchronize() fails, the capture fails too, and the driver may crash (seen with version 580.159: a program
// that only captures in one thread and synchronizes in another dies within seconds). Nodes that are added to a graph
// concern nobody else. Only what PyTorch launches, cuBLAS for example, has to be captured.
//
// A graph is made for one cache of keys and values, and can be pointed at another one of the same shape: the launches
// that have addresses of it are kept, and made again with the other addresses (launch_movable).
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <unordered_map>

namespace llmk::kernels {

struct LaunchShape;

constexpr int kMaxGraphs = 1024;  // that are alive at the same time

// What has moved: where it was when a graph was recorded, and where it is now.
class Moves {
 public:
  void add(const void* from, const void* to) { to_[from] = to; }

  // Replaces each of the pointers that has moved.
  template <typename... T>
  void operator()(T*&... pointers) const {
    (move(pointers), ...);
  }

 private:
  template <typename T>
  void move(T*& pointer) const {
    if (const auto found = to_.find(pointer); found != to_.end())
      pointer = static_cast<T*>(const_cast<void*>(found->second));
  }

  std::unordered_map<const void*, const void*> to_;
};

// Implemented in graph.cu.
class Recorder {
 public:
  // Adds a kernel behind what is recorded. `overlaps`: by programmatic dependent launch.
  virtual cudaError_t add_launch(const void* kernel, const LaunchShape& shape, bool overlaps, void** arguments) = 0;
  // Adds the kernels that `launch` launches, and keeps it: called with other moves, it launches the same kernels with
  // other parameters.
  virtual cudaError_t add_movable(std::function<cudaError_t(const Moves&)> launch) = 0;
  // Around launches of PyTorch, which are captured. The first throws std::runtime_error where that is impossible, since
  // the launches would then be made.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  // From 0 to kMaxGraphs - 1, different for graphs that are alive at the same time: for state on the device that they
  // must not share.
  virtual int slot() const = 0;

 protected:
  ~Recorder() = default;
};

// This thread's; null: launches are made.
inline constinit thread_local Recorder* current_recorder = nullptr;

// launch(params), where a recorded graph may be pointed at other memory: move(params, moves) replaces those pointers.
template <typename Params, typename Launch, typename Move>
cudaError_t launch_movable(const Params& params, Launch launch, Move move) {
  if (!current_recorder) return launch(params);
  return current_recorder->add_movable([=](const Moves& moves) {
    Params moved = params;
    move(moved, moves);
    return launch(moved);
  });
}

}  // namespace llmk::kernels
