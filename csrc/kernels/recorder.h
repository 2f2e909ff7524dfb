// Recording of CUDA graphs: while a thread records, each launch of this library becomes a node of its graph instead.
//
// This replaces stream capture. During a capture no thread of the process may wait for the device: its
// cudaDeviceSynchronize() fails, the capture fails too, and the driver may crash (seen with version 580.159: a program
// that only captures in one thread and synchronizes in another dies within seconds). Nodes that are added to a graph
// concern nobody else. Only what PyTorch launches, cuBLAS for example, has to be captured.
#pragma once
#include <cuda_runtime_api.h>

namespace llmk::kernels {

struct LaunchShape;

constexpr int kMaxGraphs = 1024;  // that are alive at the same time

// Implemented in graph.cu.
class Recorder {
 public:
  // Adds a kernel behind what is recorded. `overlaps`: by programmatic dependent launch.
  virtual cudaError_t add_launch(const void* kernel, const LaunchShape& shape, bool overlaps, void** arguments) = 0;
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

}  // namespace llmk::kernels
