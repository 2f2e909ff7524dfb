// A warp without a GPU. Its lanes run one after another, each from the beginning up to the first exchange that not all
// of them have come to yet; then all again, until they are through.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <vector>

#define __device__
#define __host__

using std::max;
using std::min;

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx{}, blockDim{32, 1, 1};

namespace warp {

using Lanes = std::array<int, 32>;
struct Waits {};

inline std::vector<Lanes> exchanged;  // what the lanes have brought to each exchange so far
inline Lanes brought;
inline size_t next;

inline const Lanes& exchange(int mine) {
  if (next < exchanged.size()) return exchanged[next++];
  brought[threadIdx.x] = mine;
  throw Waits();
}

// What `body` returns in each lane.
template <typename Body>
auto run(const Body& body) {
  std::array<decltype(body()), 32> results;
  exchanged.clear();
  for (int waiting = 32; waiting > 0;) {
    waiting = 0;
    for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) {
      next = 0;
      try {
        results[threadIdx.x] = body();
      } catch (const Waits&) {
        ++waiting;
      }
    }
    if (waiting % 32 != 0) std::abort();  // some lanes exchange, and others do not
    exchanged.push_back(brought);
  }
  threadIdx.x = 0;
  return results;
}

}  // namespace warp

inline int lane() { return static_cast<int>(threadIdx.x); }
inline int __shfl_sync(unsigned, int mine, int from) { return warp::exchange(mine)[from % 32]; }
inline int __shfl_up_sync(unsigned, int mine, int by) {
  const warp::Lanes& all = warp::exchange(mine);
  return lane() >= by ? all[lane() - by] : mine;
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  const warp::Lanes& all = warp::exchange(mine);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}
inline int __reduce_max_sync(unsigned, int mine) {
  const warp::Lanes& all = warp::exchange(mine);
  return *std::max_element(all.begin(), all.end());
}
inline int __reduce_add_sync(unsigned, int mine) {
  int sum = 0;
  for (const int x : warp::exchange(mine)) sum += x;
  return sum;
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
