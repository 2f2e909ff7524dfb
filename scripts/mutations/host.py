"""Mutations of the host code behind the kernels, which a stub of the CUDA runtime tests on any machine."""

from .mutation import Mutation

FACTS, LAUNCH, PLAN = "csrc/kernels/per_device.h", "csrc/kernels/launch.cu", "csrc/kernels/attention/plan.h"

HOST = [
    Mutation(
        "cpu_facts_are_published_early",
        "other threads read the facts of a device while they are being written",
        FACTS,
        "T found{};\n",
        "T& found = values_[device];\n        known_[device] = true;\n",
        "tests/test_device_facts.py -k reads",
    ),
    Mutation(
        "cpu_failed_query_is_cached",
        "a device whose query failed once has no SMs from then on",
        FACTS,
        "if (const cudaError_t status = find(device, found); status != cudaSuccess) return status;",
        "(void)find(device, found);",
        "tests/test_device_facts.py -k failures",
    ),
    Mutation(
        "cpu_attributes_are_set_on_one_device",
        "the attributes of a kernel are set on the first device only",
        LAUNCH,
        "if (configured[device].contains(kernel)) return cudaSuccess;",
        "if (configured[device = 0].contains(kernel)) return cudaSuccess;",
        "tests/test_device_facts.py -k 'launches or calls'",
    ),
    Mutation(
        "cpu_attributes_are_set_at_every_launch",
        "the attributes of a kernel are set at every launch",
        LAUNCH,
        "if (status == cudaSuccess) configured[device].add(kernel);",
        "",
        "tests/test_device_facts.py -k calls",
    ),
    Mutation(
        "cpu_static_shared_memory_is_forgotten",
        "a kernel asks for all dynamic shared memory, without regard to its static shared memory",
        LAUNCH,
        "static_cast<int>(device.shared_bytes - attributes.sharedSizeBytes)",
        "static_cast<int>(device.shared_bytes)",
        "tests/test_device_facts.py -k launches",
    ),
    Mutation(
        "cpu_clusters_of_four_wait",
        "attention takes clusters of four even if not all of them run at the same time",
        PLAN,
        "is_small && work_tiles <= device.clusters[4]",
        "is_small && work_tiles * 4 <= device.sm_count",
        "tests/test_plans.py -k attention",
    ),
    Mutation(
        "cpu_one_block_behind_a_linear",
        "attention behind a linear has one block per SM, however long the contexts are",
        PLAN,
        "const bool unbalanced = params.new_k &&",
        "const bool unbalanced = false &&",
        "tests/test_plans.py -k two_blocks",
    ),
    Mutation(
        "cpu_kv_tiles_overflow",
        "a launch of attention has more KV tiles than 32 bits can count",
        PLAN,
        "kMaxKvTiles = int64_t{1} << 29",
        "kMaxKvTiles = int64_t{1} << 31",
        "tests/test_plans.py -k attention",
    ),
]
