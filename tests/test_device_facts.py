"""Facts of devices and attributes of kernels, from many threads: csrc/kernels/launch.* on a stub of CUDA."""

import subprocess

import pytest

from stub_cuda import compile_stub


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return compile_stub("device_facts", tmp_path_factory.mktemp("device_facts"))


@pytest.mark.parametrize("scenario", ["reads", "failures", "launches", "calls", "rows"])
def test_facts_and_attributes_from_many_threads(harness, scenario):
    """reads: 8 threads make the first query at the same time, and all get complete results. failures: one is not
    cached. launches: those of one kernel that need different attributes never lower each other's. calls: nothing is
    queried or set twice. rows: which can be moved by vectors."""
    for _ in range(3 if scenario in ("reads", "launches") else 1):
        done = subprocess.run([harness, scenario], capture_output=True, text=True, timeout=300)
        assert done.stdout == f"{scenario}: 0 wrong\n", done.stdout + done.stderr
