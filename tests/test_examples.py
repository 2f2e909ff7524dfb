"""The scripts of examples/, each in a process of its own: they end well, and the kernels ran in them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmkernels import _library

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = 30
# By script, what its report has to count: (kernel, times).
RUNS = {
    "generate": [],  # prompts and steps are composed, without the modules
    "chat": [],
    "ops": [],  # without a model
    "train": [("swiglu", STEPS * 2), ("linear_cross_entropy", STEPS)],
    "trainer": [("swiglu", STEPS * 2), ("linear_cross_entropy", STEPS)],
    "lora": [("swiglu", STEPS * 2), ("linear_cross_entropy", STEPS), ("lora_linear", STEPS * 2 * 7)],
}


def run(name: str, folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(_library.PATH.parent.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # other tests may run beside it
    }
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert list(folder.iterdir()) == []
    return result.stdout


def test_all_are_known():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_example(name, tmp_path):
    if name == "lora":
        pytest.importorskip("peft")
    out = run(name, tmp_path)
    for kernel, times in RUNS[name]:
        assert f"llmkernels::{kernel} {times} times" in out, out
    assert "left alone" not in out
    if name == "generate":
        assert "2 by the decode step, 62 steps" in out
        assert "greedy: 32 of 32 new tokens as without the patch" in out
    elif name == "chat":
        assert "2 by the decode step, 62 steps" in out
        (_, cached), (tokens, cached_then) = re.findall(r"\((\d+) tokens, (\d+) of them in the cache\)", out)
        assert int(cached) == 0 < int(cached_then) < int(tokens)
        assert out.count("assistant: '") == 2
    elif name == "ops":
        errors = [line.split()[1:] for line in out.splitlines()]
        assert [len(line) for line in errors] == [3, 3, 2, 3, 4]  # the result, and the gradient of each input
        assert all(float(error) < 1e-5 for line in errors for error in line), out
    else:
        losses = [float(loss) for loss in re.findall(r"\bloss'?:? '?(\d+\.\d+)", out)]
        assert len(losses) >= 3
        assert losses[-1] < losses[0] - 0.3, out
