// Marks a function that kernels call, too, in headers that host compilers read as well.
#pragma once

#ifdef __CUDACC__
#define LLMK_HOST_DEVICE __host__ __device__
#else
#define LLMK_HOST_DEVICE
#endif
