"""Kernels' own source, run on the CPU thread by thread: see stub_cuda/gpu.h. The programs say what they look at."""

import subprocess

import pytest

from stub_cuda import compile_stub


@pytest.mark.parametrize("program", ["bias_act", "cross_entropy", "glu", "norm", "softmax", "tile_scheduler"])
def test_kernel_on_the_cpu(program, tmp_path):
    done = subprocess.run([compile_stub(program, tmp_path, "-O0")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
