"""Code of csrc/kernels, compiled with g++ on a stub of the CUDA runtime: host code, and kernels themselves (gpu.h)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CSRC = FOLDER.parent.parent / "csrc"


def compile_stub(name: str, folder: Path, optimize: str = "-O1") -> Path:
    """The program that `name`.cpp beside this file makes. Skips where there is no compiler."""
    cxx = (os.environ.get("CXX") or "g++").split()
    if not shutil.which(cxx[0]) or not CSRC.exists():
        pytest.skip("needs g++ and csrc")
    program = folder / name
    # Shared memory is thread_local, and needs no initialization.
    options = ["-std=c++20", optimize, "-pthread", "-fno-extern-tls-init", "-w", "-I", FOLDER, "-I", CSRC]
    done = subprocess.run([*cxx, *options, FOLDER / f"{name}.cpp", "-o", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program
