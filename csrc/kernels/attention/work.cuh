// Which keys a cluster of blocks attends to. The work is a line of units: sequence after sequence, in each every pair
// of a kv head and a chunk of queries, in each pair units of kUnit keys. Cluster i takes units [i, i + 1) * quota, so
// that each gets its share whatever the lengths are, and they are read on the device: a captured launch serves any.
#pragma once
#include <algorithm>
#include <cstdint>

#include "device/ptx.cuh"
#include "params/attention.h"
#include "shape.h"

namespace llmk::kernels {

// What memory says about a sequence.
struct Live {
  int length, start;

  // Past L1, which may hold what was there before the predecessor had finished.
  __device__ static Live load(const DecodeAttentionParams& params, int b) {
    return {__ldcg(params.lengths + b), params.starts ? __ldcg(params.starts + b) : 0};
  }
  bool operator==(const Live&) const = default;
};

// The keys of a sequence that any of its queries sees, and where its last one ends.
struct Keys {
  int begin, end;
  int origin;  // where units begin: a multiple of kUnit, so that no part of one lies across the border of a page
  int fresh;   // fused form: the key that this launch brings, or -1

  Keys() = default;
  __device__ Keys(const DecodeAttentionParams& params, int b) {
    const Live live = Live::load(params, b);
    end = static_cast<int>(max(min(int64_t{live.length}, params.cache.capacity), int64_t{0}));
    int64_t first = max(live.start, 0);
    if (params.window > 0) first = max(first, end - params.tokens + 1 - params.window);
    begin = static_cast<int>(min(first, int64_t{end}));
    origin = begin / kUnit * kUnit;
    fresh = params.new_k && live.length == end ? end - 1 : -1;
  }
  bool operator==(const Keys&) const = default;

  __device__ int units() const { return max((end - origin + kUnit - 1) / kUnit, 1); }  // one where there is no key, too
};

// a / b, both positive: by floats where they are exact enough, since integer division takes several times as long.
__device__ inline int divide(int a, int b) {
  if (a >= 1 << 22) return a / b;
  const int quotient = static_cast<int>(static_cast<float>(a) * reciprocal_approximate(static_cast<float>(b)));
  const int rest = a - quotient * b;
  return quotient + (rest >= b) - (rest < 0);
}
__device__ inline int divide_up(int a, int b) { return divide(a + b - 1, b); }

__device__ inline int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
__device__ inline int warp_add(int x) { return __reduce_add_sync(0xffffffffu, x); }

// How many units a cluster takes. Where there are few pairs, every pair begins with a cluster of its own: its length
// counts as a multiple of the quota. Else a cluster takes its share wherever it ends.
struct Quota {
  int units;
  bool whole;  // lengths count as multiples of the quota

  bool operator==(const Quota&) const = default;
  __device__ int padded(int length) const { return whole ? divide_up(length, units) * units : length; }
};

// All lanes of a warp; `pairs` is per sequence. `least`: units that a cluster gets through so soon that a second one
// does not help, and that an uneven share may cost before a line without regard to pairs is better.
__device__ inline Quota plan_quota(const DecodeAttentionParams& params, int pairs, int clusters, int least) {
  const int batch = static_cast<int>(params.batch);
  int total, longest;
  if (batch == 1) {
    total = longest = Keys(params, 0).units();
  } else {
    total = longest = 0;
    for (int b = threadIdx.x % 32; b < batch; b += 32) {
      const int units = Keys(params, b).units();
      total += units;
      longest = max(longest, units);
    }
    total = warp_add(total);
    longest = warp_max(longest);
  }
  total *= pairs;
  const int all_pairs = batch * pairs, share = max(divide_up(total, clusters), 1);
  if (all_pairs <= clusters) {
    // Either of the two is enough for all pairs to find room.
    int units = divide_up(longest, divide(clusters, all_pairs));
    if (all_pairs < clusters) units = min(units, divide_up(total, clusters - all_pairs));
    units = max(units, least);
    if (units <= max(share, least) + least) return {units, true};
  }
  return {share, false};
}

// A cluster's way along the line, pair by pair.
struct Walk {
  Quota quota;
  int end;            // where the share of the cluster ends
  int b, pair;        // the sequence, and the pair in it
  int units, padded;  // of this sequence
  int pair_begin;     // where the pair begins
  int from;           // the first unit of the pair that is ours
  Keys keys;

  Walk() = default;
  __device__ Walk(const DecodeAttentionParams& params, int pairs, Quota given, int cluster)
      : quota(given), end((cluster + 1) * given.units), b(0), pair(0), keys(params, 0) {
    const int batch = static_cast<int>(params.batch), begin = cluster * quota.units, lane = threadIdx.x % 32;
    int base = 0;  // where sequence b begins
    if (batch > 1) {
      for (int first = 0; first < batch; first += 32) {
        const int mine = first + lane;
        const int length = mine < batch ? quota.padded(Keys(params, mine).units()) * pairs : 0;
        int until = length;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, until, offset);
          if (lane >= offset) until += other;
        }
        const unsigned beyond = __ballot_sync(0xffffffffu, base + until > begin);
        if (beyond != 0) {
          const int found = __ffs(beyond) - 1;
          b = first + found;
          base += __shfl_sync(0xffffffffu, until - length, found);
          break;
        }
        base += __shfl_sync(0xffffffffu, until, 31);
        b = batch;
      }
      if (b < batch) keys = Keys(params, b);
    }
    measure();
    pair = divide(begin - base, padded);
    pair_begin = base + pair * padded;
    from = begin - pair_begin;
    if (batch == 1 && pair >= pairs) b = 1;
  }

  bool operator==(const Walk&) const = default;

  __device__ bool done(const DecodeAttentionParams& params) const {
    return b >= params.batch || pair_begin + from >= end;
  }
  // Whether no pair follows this one.
  __device__ bool is_last(const DecodeAttentionParams& params, int pairs) const {
    return pair_begin + padded >= end || (pair + 1 == pairs && b + 1 == params.batch);
  }
  __device__ void next(const DecodeAttentionParams& params, int pairs) {
    pair_begin += padded;
    from = 0;
    if (++pair < pairs) return;
    pair = 0;
    if (++b < params.batch) {
      keys = Keys(params, b);
      measure();
    }
  }

  // The keys of the pair that are ours; those before keys.begin do not count.
  __device__ int first_key() const { return keys.origin + from * kUnit; }
  __device__ int end_key() const { return min(keys.end, keys.origin + min(units, end - pair_begin) * kUnit); }
  // Which clusters share the pair.
  __device__ int first_cluster() const { return divide(pair_begin, quota.units); }
  __device__ int last_cluster() const { return divide(pair_begin + units - 1, quota.units); }

 private:
  __device__ void measure() {
    units = keys.units();
    padded = quota.padded(units);
  }
};

// The units of a block, one after another through all of its pairs: within a cluster neighbouring units go to different
// blocks, so that few of them are spread over many SMs.
struct Feed {
  Walk walk;
  int key;          // the first one of the unit
  int first, step;  // in keys: of the block's units in a pair
  bool done;

  Feed() = default;
  __device__ Feed(const DecodeAttentionParams& params, const Walk& start, int pairs, int rank, int blocks)
      : walk(start), key(start.first_key() + rank * kUnit), first(rank * kUnit), step(blocks * kUnit) {
    find(params, pairs);
  }
  // Whether the next one is of the same pair.
  __device__ bool next(const DecodeAttentionParams& params, int pairs) {
    key += step;
    return find(params, pairs);
  }

 private:
  // Skips pairs without a unit of ours.
  __device__ bool find(const DecodeAttentionParams& params, int pairs) {
    bool same = true;
    while (!(done = walk.done(params)) && key >= walk.end_key()) {
      walk.next(params, pairs);
      key = walk.first_key() + first;
      same = false;
    }
    return same;
  }
};

}  // namespace llmk::kernels
