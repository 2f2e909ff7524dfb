// Recording of CUDA graphs: while a thread records, each launch of this library becomes a node of its graph instead.
//
// This replaces stream capture. During a capture no thread of the process may wait for the device: its
// cudaDeviceSynchronize() fails, the capture fails too, and the driver may crash (seen with version 580.159: a program that only
// captures in one thread and synchronizes in another dies within seconds). Nodes that are added to a
// graph concern nobody else. Only what PyTorch launches, cuBLAS for example, has to be captured.
#pragma once
#include <cuda_runtime_api.h>

namespace llmk::kernels {

struct LaunchShape;
struct Recording;

// This thread's; null: launches are made.
Recording* current_recording();

// Adds a kernel behind what is recorded. `overlaps`: by programmatic dependent launch.
cudaError_t record_launch(Recording& recording, const void* kernel, const LaunchShape& shape, bool overlaps,
                          void** arguments);

// The set of decode_attention's counters that the graph has for itself.
int recorded_counters(const Recording& recording);

// For its lifetime, while this thread records: captures what PyTorch launches, as part of the recording.
class CaptureOthers {
 public:
  CaptureOthers();
  ~CaptureOthers();
  CaptureOthers(const CaptureOthers&) = delete;
  CaptureOthers& operator=(const CaptureOthers&) = delete;

 private:
  Recording* const recording_;
};

}  // namespace llmk::kernels
