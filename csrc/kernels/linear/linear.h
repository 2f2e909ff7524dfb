#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"
#include "route.h"

namespace llmk::kernels {

// choose_route() for the current device.
LinearRoute route_linear(const LinearProblem& problem);

// choose_handoff() for the current device.
int linear_parts(const LinearRoute& route, const LinearProblem& next);

// y = epilogue(norm(x) weight^T + bias), or residual += that, by the kernel of `route`, which is not the library's.
// For the kernel of many tokens x is normalized already, or it is the `scaled` of a norm hand-off.
cudaError_t linear(const LinearParams& params, const LinearRoute& route, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
