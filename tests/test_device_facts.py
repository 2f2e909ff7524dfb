"""What launchers know of devices and kernels, from many threads: csrc/kernels/launch.* on a stub of the runtime."""

import subprocess

import pytest

from stub_cuda import compile_stub


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return compile_stub("device_facts", tmp_path_factory.mktemp("device_facts"))


@pytest.mark.parametrize("scenario", ["reads", "failures", "launches", "calls"])
def test_facts_and_attributes_from_many_threads(harness, scenario):
    """reads: 8 threads that ask first at the same time all get whole answers. failures: one is not kept. launches: of
    one kernel with different needs never undercut each other. calls: nothing is asked or set a second time."""
    for _ in range(3 if scenario in ("reads", "launches") else 1):
        done = subprocess.run([harness, scenario], capture_output=True, text=True, timeout=300)
        assert done.stdout == f"{scenario}: 0 wrong\n", done.stdout + done.stderr
