// Vectors that all blocks of decode_step make together and all of them read: two elements to a word of 64 bits, with
// the number of the layer, counted from 1, in its other half. A reader takes a word when it bears the number that it
// waits for. So nobody waits for a barrier of the grid, nor for memory to be flushed before one: the way from writer to
// reader is one store and one load. (The idea is that of NCCL's low-latency protocol.)
//
// The words are zero before the launch. A vector is written again only when every block has read it, which the layer's
// one barrier of the grid sees to: it always lies between the reading of a vector and its next writing. (That who
// writes has read something that every block made after its reading would not do: a block may have no columns to make.)
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "device/vec.cuh"

namespace llmk::kernels {

struct Exchange {
  static constexpr int kHeld = 3;  // of what was found, per thread
  uint2* words;
  unsigned number;

  // Elements i and i + 1, i even.
  __device__ void put(int i, __nv_bfloat162 pair) const {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(words + i / 2),
                 "l"(static_cast<uint64_t>(number) << 32 | reinterpret_cast<const uint32_t&>(pair))
                 : "memory");
  }

  // Eight elements, perhaps not there yet.
  struct Found {
    uint64_t word[4];
  };
  __device__ Found look(int i) const {
    Found found;
    const uint2* const from = words + i / 2;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(found.word[0]), "=l"(found.word[1])
                 : "l"(from)
                 : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(found.word[2]), "=l"(found.word[3])
                 : "l"(from + 2)
                 : "memory");
    return found;
  }
  // The eight elements from i on, multiple of 8, once they are there.
  __device__ uint4 take(int i, Found found) const {
    while (
        !(is_there(found.word[0]) && is_there(found.word[1]) && is_there(found.word[2]) && is_there(found.word[3]))) {
      found = look(i);
    }
    return make_uint4(static_cast<uint32_t>(found.word[0]), static_cast<uint32_t>(found.word[1]),
                      static_cast<uint32_t>(found.word[2]), static_cast<uint32_t>(found.word[3]));
  }
  __device__ uint4 take(int i) const { return take(i, look(i)); }

 private:
  __device__ bool is_there(uint64_t word) const { return static_cast<unsigned>(word >> 32) == number; }
};

// The same for an array that is complete.
struct Complete {
  using Found = uint4;
  static constexpr int kHeld = 7;
  const void* data;

  // Past L1, since other blocks have written it.
  __device__ uint4 look(int i) const { return __ldcg(static_cast<const uint4*>(data) + i / 8); }
  __device__ uint4 take(int, uint4 found) const { return found; }
};

}  // namespace llmk::kernels
