"""Facts of devices and attributes of kernels, from many threads: csrc/kernels/launch.* on a stub of CUDA."""

import subprocess

import pytest

from stub_cuda import CSRC, compile_stub


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return compile_stub("device_facts", tmp_path_factory.mktemp("device_facts"))


@pytest.mark.parametrize("scenario", ["reads", "failures", "launches", "calls", "rows"])
def test_facts_and_attributes_from_many_threads(harness, scenario):
    """reads: 8 threads make the first query at the same time, and all get complete results. failures: one is not
    cached. launches: those of one kernel that need different attributes never lower each other's. calls: nothing is
    queried or set twice, neither for launches nor for fp8_linear. rows: which can be moved by vectors."""
    for _ in range(3 if scenario in ("reads", "launches") else 1):
        done = subprocess.run([harness, scenario], capture_output=True, text=True, timeout=300)
        assert done.stdout == f"{scenario}: 0 wrong\n", done.stdout + done.stderr


@pytest.mark.skipif(not CSRC.exists(), reason="needs csrc")
def test_devices_are_queried_in_one_place():
    """That which the stub tests: no op asks the runtime itself, call by call."""
    queries = "cudaDeviceGetAttribute", "cudaGetDeviceProperties"
    sources = [path for path in CSRC.rglob("*.*") if any(query in path.read_text() for query in queries)]
    assert [path.relative_to(CSRC).as_posix() for path in sources] == ["kernels/launch.cu"]
