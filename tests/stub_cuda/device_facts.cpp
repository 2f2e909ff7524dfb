// Tests of csrc/kernels/launch.* on the stub beside this file. Each scenario needs a process of its own, since the
// facts of a device are cached. Prints how often something was wrong.
#include <barrier>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/launch.cu"

namespace {

using llmk::kernels::device_info;
using llmk::kernels::DeviceInfo;
using llmk::kernels::launch;

void first_kernel(int) {}
void second_kernel(int) {}

// Calls body(thread) in `count` threads that start at the same time.
template <typename Body>
void in_threads(int count, const Body& body) {
  std::barrier start(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      stub::device = i % stub::kDevices;
      start.arrive_and_wait();
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

bool is_right(const DeviceInfo& info) {
  bool right = info.sm_count == stub::sm_count(stub::device) && info.compute_capability == 90 &&
               info.shared_bytes == stub::kShared && info.clusters[1] == info.sm_count;
  for (const unsigned size : {2, 4, 8, 16}) right &= info.clusters[size] == stub::clusters(stub::device, size);
  return right;
}

// All threads read until each has had its first result, which takes some of them long.
int read_from_eight_threads() {
  std::atomic<int> wrong{0}, begun{0};
  in_threads(8, [&](int thread) {
    stub::device = thread / 4;
    for (int i = 0; i < 20000 || begun < 8; ++i) {
      DeviceInfo info{};
      wrong += device_info(info) != cudaSuccess || !is_right(info);
      begun += i == 0;
    }
  });
  return wrong;
}

// A query that fails is made again by the next call, and its result is then cached.
int fail_at_first() {
  int wrong = 0;
  for (const int failures : {1, 3}) {
    stub::failures = failures;
    for (int i = 0; i < failures; ++i) {
      DeviceInfo info{};
      wrong += device_info(info) == cudaSuccess;
    }
    DeviceInfo info{};
    wrong += device_info(info) != cudaSuccess || !is_right(info);
    ++stub::device;
  }
  return wrong;
}

// Two kernels on all devices, with launches that need more and less shared memory and larger and smaller clusters.
int launch_from_sixteen_threads() {
  std::atomic<int> wrong{0};
  in_threads(16, [&](int thread) {
    for (int i = 0; i < 2000; ++i) {
      llmk::kernels::LaunchShape shape{16, dim3(32), static_cast<size_t>(thread + i) % 4 * 64 * 1024};
      shape.cluster = (thread / 4 + i) % 2 ? 16 : 1;
      wrong += launch(i % 3 ? first_kernel : second_kernel, shape, nullptr, 0) != cudaSuccess;
    }
  });
  return wrong + stub::lowered;
}

// Launches, and what fp8_linear asks for in each call.
int ask_no_more_than_once() {
  llmk::kernels::LaunchShape shape{16, dim3(32), 200 * 1024};
  shape.cluster = 16;
  int wrong = 0;
  const auto ask_everywhere = [&] {
    for (stub::device = 0; stub::device < stub::kDevices; ++stub::device) {
      int capability = 0;
      wrong += launch(first_kernel, shape, nullptr, 0) != cudaSuccess;
      wrong += llmk::kernels::device_capability(capability) != cudaSuccess || capability != 90;
    }
  };
  ask_everywhere();
  const int before = stub::calls;
  ask_everywhere();
  return wrong + stub::calls - before;
}

// Rows of vectors: the columns, and of each operand that is there the address and the distance of the rows.
int align_rows() {
  using llmk::kernels::all_rows_aligned;
  alignas(16) float memory[8];
  const void *at = memory, *next = memory + 1;
  int wrong = 0;
  wrong += !all_rows_aligned<float>({2, 4, {{at, 4}, {at, 8}, {at}}});
  wrong += all_rows_aligned<float>({2, 6, {{at}}});
  wrong += all_rows_aligned<float>({2, 4, {{at, 4}, {next, 4}}});
  wrong += all_rows_aligned<float>({2, 4, {{at, 5}, {at}}});
  wrong += !all_rows_aligned<float>({1, 4, {{at, 5}, {at}}});
  wrong += !all_rows_aligned<float>({2, 4, {{at, 4}, {nullptr, 5}}});
  wrong += all_rows_aligned<uint16_t>({2, 4, {{at}}}) || !all_rows_aligned<uint16_t>({2, 8, {{at}}});
  return wrong;
}

}  // namespace

int main(int, char** arguments) {
  stub::static_bytes = {{reinterpret_cast<const void*>(first_kernel), 2048},
                        {reinterpret_cast<const void*>(second_kernel), 16 * 1024}};
  const struct {
    const char* name;
    int (*run)();
  } scenarios[] = {{"reads", read_from_eight_threads},
                   {"failures", fail_at_first},
                   {"launches", launch_from_sixteen_threads},
                   {"calls", ask_no_more_than_once},
                   {"rows", align_rows}};
  for (const auto& scenario : scenarios) {
    if (std::strcmp(scenario.name, arguments[1]) == 0) {
      const int wrong = scenario.run();
      std::printf("%s: %d wrong\n", scenario.name, wrong);
      return wrong != 0;
    }
  }
  return 2;
}
