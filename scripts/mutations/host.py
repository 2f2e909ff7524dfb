"""Mutations of the host code behind the kernels, which a stub of the CUDA runtime tests on any machine."""

from .mutation import Mutation

FACTS, LAUNCH, PLAN = "csrc/kernels/per_device.h", "csrc/kernels/launch.cu", "csrc/kernels/attention/plan.h"

HOST = [
    Mutation(
        "cpu_facts_are_published_early",
        "other threads read what is known of a device while it is being filled in",
        FACTS,
        "T found{};\n",
        "T& found = values_[device];\n        known_[device] = true;\n",
        "tests/test_device_facts.py -k reads",
    ),
    Mutation(
        "cpu_failed_question_is_kept",
        "a device that did not answer once is taken to have nothing",
        FACTS,
        "if (const cudaError_t status = find(device, found); status != cudaSuccess) return status;",
        "(void)find(device, found);",
        "tests/test_device_facts.py -k failures",
    ),
    Mutation(
        "cpu_attributes_are_set_on_one_device",
        "what a kernel may have is set on the first device that launches it, and on no other",
        LAUNCH,
        "if (configured[device].contains(kernel)) return cudaSuccess;",
        "if (configured[device = 0].contains(kernel)) return cudaSuccess;",
        "tests/test_device_facts.py -k 'launches or calls'",
    ),
    Mutation(
        "cpu_attributes_are_set_at_every_launch",
        "nothing is kept of the kernels that have their attributes",
        LAUNCH,
        "if (status == cudaSuccess) configured[device].add(kernel);",
        "",
        "tests/test_device_facts.py -k calls",
    ),
    Mutation(
        "cpu_static_shared_memory_is_forgotten",
        "a kernel is to have all the shared memory of a block beside its own",
        LAUNCH,
        "static_cast<int>(device.shared_bytes - attributes.sharedSizeBytes)",
        "static_cast<int>(device.shared_bytes)",
        "tests/test_device_facts.py -k launches",
    ),
    Mutation(
        "cpu_clusters_of_four_wait",
        "attention takes clusters of four whether or not there is room for all of them",
        PLAN,
        "is_small && work_tiles <= device.clusters[4]",
        "is_small && work_tiles * 4 <= device.sm_count",
        "tests/test_plans.py -k attention",
    ),
    Mutation(
        "cpu_units_overflow",
        "a launch of attention has more KV tiles than 32 bits can count",
        PLAN,
        "kMaxKvTiles = int64_t{1} << 29",
        "kMaxKvTiles = int64_t{1} << 31",
        "tests/test_plans.py -k attention",
    ),
]
