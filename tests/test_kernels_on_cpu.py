"""Kernels' own source, run on the CPU thread by thread: see stub_cuda/gpu.h. The programs say what they look at."""

import subprocess

import pytest

from stub_cuda import compile_stub

# Optimized where running takes longer than compiling.
PROGRAMS = {
    "bias_act": "-O0",
    "cross_entropy": "-O0",
    "decode_attention": "-O1",
    "glu": "-O0",
    "norm": "-O0",
    "optim": "-O0",
    "rope": "-O0",
    "softmax": "-O0",
    "tile_scheduler": "-O1",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_kernel_on_the_cpu(program, tmp_path):
    compiled = compile_stub(program, tmp_path, PROGRAMS[program])
    done = subprocess.run([compiled], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
