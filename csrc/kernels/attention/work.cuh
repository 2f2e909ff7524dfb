// Which keys a cluster of blocks attends to. The work is a line of units: sequence after sequence, in each every pair
// of a kv head and a chunk of queries, in each pair units of kUnit keys. Cluster i takes units [i, i + 1) * quota, so
// that each gets its share whatever the lengths are, and they are read on the device: a captured launch serves any.
#pragma once
#include <algorithm>
#include <cstdint>

#include "device/divide.cuh"
#include "params/attention.h"
#include "shape.h"

namespace llmk::kernels {

// What memory says about a sequence.
struct Live {
  int length, start;

  // Past L1, which may hold what was there before the predecessor had finished.
  __device__ static Live load(const DecodeAttentionParams& params, int b) {
    return {__ldcg(params.cache_seqlens + b), params.cache_leftpad ? __ldcg(params.cache_leftpad + b) : 0};
  }
  bool operator==(const Live&) const = default;
};

__device__ inline int window_left_of(const DecodeAttentionParams& params) {
  return static_cast<int>(min(params.window_left, int64_t{1} << 30));  // as many as the largest capacity
}

// The keys of a sequence that any of its queries sees, and where its last one ends.
struct Keys {
  int begin, end;
  int origin;  // where units begin: a multiple of kUnit, so that no part of one lies across the border of a page
  int fresh;   // fused form: the key that this launch brings, or -1

  Keys() = default;
  __device__ Keys(const DecodeAttentionParams& params, const Live& live) {
    const int capacity = static_cast<int>(params.cache.capacity), tokens = static_cast<int>(params.tokens);
    const int window_left = window_left_of(params);
    end = max(min(live.length, capacity), 0);
    begin = max(live.start, 0);
    if (window_left >= 0) begin = max(begin, end - tokens - window_left);
    begin = min(begin, end);
    origin = begin / kUnit * kUnit;
    fresh = params.new_k && live.length == end ? end - 1 : -1;
  }
  __device__ int units() const { return max((end - origin + kUnit - 1) / kUnit, 1); }  // one where there is no key, too
};

// What memory says about all sequences: of up to 32 a lane keeps one, so that finding the work costs one trip to
// memory and not four after each other. All lanes of a warp call together.
class Lengths {
 public:
  __device__ explicit Lengths(const DecodeAttentionParams& params) : params_(params), mine_(look()) {}

  // What memory says now of the sequence of this lane; and whether that is what was known.
  __device__ Live look() const { return Live::load(params_, min(static_cast<int>(threadIdx.x % 32), batch() - 1)); }
  __device__ bool update(const Live& now) {
    const bool same = __all_sync(0xffffffffu, mine_ == now);
    mine_ = now;
    return same;
  }
  __device__ int batch() const { return static_cast<int>(params_.batch); }

  // Of sequence b, the same for all lanes.
  __device__ Keys keys(int b) const {
    if (batch() > 32) return Keys(params_, Live::load(params_, b));
    return Keys(params_, Live{__shfl_sync(0xffffffffu, mine_.length, b), __shfl_sync(0xffffffffu, mine_.start, b)});
  }
  // The units of sequence first + lane; 0 behind the last one. `first` is a multiple of 32.
  __device__ int units(int first) const {
    const int b = first + threadIdx.x % 32;
    if (b >= batch()) return 0;
    return Keys(params_, batch() > 32 ? Live::load(params_, b) : mine_).units();
  }

 private:
  const DecodeAttentionParams& params_;
  Live mine_;
};

__device__ inline int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
__device__ inline int warp_add(int x) { return __reduce_add_sync(0xffffffffu, x); }

// How many units a cluster takes. Where there are few pairs, every pair begins with a cluster of its own: its length
// counts as a multiple of the quota. Else a cluster takes its share wherever it ends.
struct Quota {
  int units;
  bool whole;  // lengths count as multiples of the quota

  __device__ int padded(int length) const { return whole ? divide_up(length, units) * units : length; }
};

// All lanes of a warp; `pairs` is per sequence. `least`: units that a cluster gets through so soon that a second one
// does not help, and that an uneven share may cost before a line without regard to pairs is better.
__device__ inline Quota plan_quota(const Lengths& lengths, int pairs, int clusters, int least) {
  const int batch = lengths.batch();
  int total = 0, longest = 0;
#pragma unroll 1
  for (int first = 0; first < batch; first += 32) {
    const int units = lengths.units(first);
    total += units;
    longest = max(longest, units);
  }
  total = warp_add(total);
  longest = warp_max(longest);
  total *= pairs;  // below 2^31: see sequences_per_launch()
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
  __device__ Walk(const Lengths& lengths, int pairs, Quota given, int cluster)
      : quota(given), end((cluster + 1) * given.units), b(0), pair(0) {
    const int batch = lengths.batch(), begin = cluster * quota.units, lane = threadIdx.x % 32;
    int base = 0;  // where sequence b begins
    if (batch > 1) {
#pragma unroll 1
      for (int first = 0; first < batch; first += 32) {
        const int length = quota.padded(lengths.units(first)) * pairs;
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
    }
    keys = lengths.keys(min(b, batch - 1));
    measure();
    pair = divide(begin - base, padded);
    pair_begin = base + pair * padded;
    from = begin - pair_begin;
    if (batch == 1 && pair >= pairs) b = 1;
  }

  __device__ bool done(int batch) const { return b >= batch || pair_begin + from >= end; }
  // Whether no pair follows this one.
  __device__ bool is_last(int batch, int pairs) const {
    return pair_begin + padded >= end || (pair + 1 == pairs && b + 1 == batch);
  }
  __device__ void next(const Lengths& lengths, int pairs) {
    pair_begin += padded;
    from = 0;
    if (++pair < pairs) return;
    pair = 0;
    if (++b < lengths.batch()) {
      keys = lengths.keys(b);
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
  __device__ Feed(const Walk& start, int rank, int blocks)
      : walk(start), key(start.first_key() + rank * kUnit), first(rank * kUnit), step(blocks * kUnit) {}

  // Skips pairs without a unit of ours, as is to be done before a unit is taken. Whether it is of the same pair.
  __device__ bool seek(const Lengths& lengths, int pairs) {
    bool same = true;
#pragma unroll 1
    while (!(done = walk.done(lengths.batch())) && key >= walk.end_key()) {
      walk.next(lengths, pairs);
      key = walk.first_key() + first;
      same = false;
    }
    return same;
  }
  __device__ void take() { key += step; }
  // Whether no more than so many units are left.
  __device__ bool is_ending(int batch, int pairs, int last_units) const {
    return done || (walk.is_last(batch, pairs) && key + last_units * step >= walk.end_key());
  }
};

}  // namespace llmk::kernels
