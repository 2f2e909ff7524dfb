// Runs the tile scheduler of decode attention for all clusters of random launches. Prints what was run, and fails where
// a KV tile is not attended to exactly once, or clusters do not agree on who shares a work tile.
#include "kernels/attention/tile_scheduler.cuh"

#include <cstdio>
#include <map>
#include <random>
#include <set>

using namespace llmk;
using namespace llmk::kernels;

namespace {

struct Short {
  static constexpr int kKvTile = 64;
};

struct Case {
  int batch, work_tiles, clusters, min_tiles, switch_tiles;
  int64_t window_left;
  std::vector<SequenceInfo> sequences;
  int capacity;
};

// What `body`, which a whole warp runs, returns in its first lane.
template <typename Body>
auto of_warp(const Body& body) {
  decltype(body()) result;
  gpu::run_block({32, 1, 1}, [&] {
    const auto mine = body();
    if (threadIdx.x == 0) result = mine;
  });
  return result;
}

int failures = 0;
void check(bool holds, const Case& c, const char* what, int cluster) {
  if (holds) return;
  if (++failures > 20) gpu::fail();
  std::printf("%s: cluster %d of %d, %d sequences of %d work tiles\n", what, cluster, c.clusters, c.batch,
              c.work_tiles);
}

SplitPlan run(Case& c) {
  DecodeAttentionParams params{};
  params.batch = c.batch, params.tokens = 1, params.cache.capacity = c.capacity, params.window_left = c.window_left;
  const SequenceLengths<Short> lengths(params, c.sequences.data());
  const SplitPlan plan =
      of_warp([&] { return plan_splits(lengths, c.work_tiles, c.clusters, c.min_tiles, c.switch_tiles); });
  using Tile = std::pair<int, int>;
  std::map<Tile, std::vector<int>> seen;                         // how often each key of a work tile
  std::map<Tile, std::set<int>> sharing;                         // clusters
  std::map<Tile, std::set<std::pair<int, int>>> first_and_last;  // by each of them
  std::map<Tile, bool> whole;
  std::set<std::pair<int, int>> rows;  // of the workspace
  for (int cluster = 0; cluster < c.clusters; ++cluster) {
    auto scheduler = of_warp([&] { return TileScheduler<Short>(lengths, c.work_tiles, plan, cluster); });
    for (int turns = 0; !scheduler.done(c.batch); ++turns) {
      const Tile tile{scheduler.b, scheduler.work_tile};
      check(scheduler.work_tile < c.work_tiles, c, "no such work tile", cluster);
      auto& keys = seen[tile];
      keys.resize(c.capacity + Short::kKvTile);
      const int first = scheduler.first_key(), end = scheduler.end_key();
      check(first < end || scheduler.keys.begin == scheduler.keys.end, c, "nothing to do", cluster);
      for (int key = first; key < end; ++key) ++keys[key];
      sharing[tile].insert(cluster);
      first_and_last[tile].insert({scheduler.first_cluster(), scheduler.last_cluster()});
      if (scheduler.first_cluster() != scheduler.last_cluster()) {
        const bool is_last_split = scheduler.work_tile_begin > cluster * scheduler.splits.kv_tiles;
        check(rows.insert({cluster, is_last_split}).second, c, "a place of the workspace twice", cluster);
      } else {
        whole[tile] = true;
      }
      const bool last = scheduler.is_last(c.batch, c.work_tiles);
      scheduler.next(lengths, c.work_tiles);
      check(last == scheduler.done(c.batch), c, "the last work tile", cluster);
      if (last || turns > 100000) break;
    }
  }
  for (int b = 0; b < c.batch; ++b) {
    const KeyRange<Short> keys = lengths.keys(b);
    for (int t = 0; t < c.work_tiles; ++t) {
      const Tile tile{b, t};
      check(sharing.contains(tile), c, "no cluster has a work tile", b);
      const auto& clusters = sharing[tile];
      check(first_and_last[tile].size() == 1, c, "clusters do not agree", b);
      const auto [first, last] = *first_and_last[tile].begin();
      if (whole[tile]) {
        check(clusters.size() == 1, c, "several clusters each have a work tile by themselves", b);
      } else {
        check(*clusters.begin() == first && *clusters.rbegin() == last &&
                  static_cast<int>(clusters.size()) == last - first + 1,
              c, "others share a work tile than was thought", b);
      }
      for (int key = keys.begin; key < keys.end; ++key) check(seen[tile][key] == 1, c, "a key", key);
    }
  }
  return plan;
}

}  // namespace

int main() {
  std::mt19937 random(0);
  const auto pick = [&](std::initializer_list<int> from) { return std::data(from)[random() % from.size()]; };
  int whole = 0, aligned = 0, launches = 0;
  for (; launches < 800; ++launches) {
    Case c{};
    const bool equal = random() % 2 == 0;
    const int blocks = pick({1, 1, 1, 2, 8});
    c.batch = pick({1, 2, 5, 31, 32, 33, 70}), c.work_tiles = pick({1, 2, 3, 8, 13});
    c.clusters = pick({1, 2, 3, 7, 16, 33, 66});
    c.min_tiles = max(4 * blocks, 8), c.switch_tiles = min(2 * blocks, 8);
    c.capacity = pick({64, 640, 3000});
    c.window_left = equal ? -1 : pick({-1, 0, 100});
    const int longest = 1 + static_cast<int>(random() % c.capacity), spread = equal ? 1 : pick({20, 3000});
    for (int b = 0; b < c.batch; ++b) {
      const int shorter = static_cast<int>(random() % spread);
      c.sequences.push_back({max(longest - shorter, 0), equal ? 0 : pick({0, 0, 5, 70})});
    }
    const SplitPlan plan = run(c);
    whole += plan.whole > 0, aligned += plan.aligned;
  }
  std::printf("%d launches: %d with work tiles before the line, %d with a cluster for each work tile, %d failures\n",
              launches, whole, aligned, failures);
  return failures > 0 || whole < launches / 10 || aligned < launches / 10;
}
