"""A torch that lacks a private name which the ops use: they give the same results by the public way.

Run as a program, this file is such a process: it hides the name, and saves the results.
"""

import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

OWNER, NAME = "torch.autograd.forward_ad", "_set_fwd_grad_enabled"


def functions():
    """(name, function, inputs, how many of them take gradients): what tests/cases.py has, and the products."""
    import llmkernels
    from cases import CASES

    for case in CASES:
        torch.manual_seed(0)
        yield case.name, case.ours, case.inputs(), case.differentiable
    torch.manual_seed(0)
    x, weight, a, b = torch.randn(5, 16), torch.randn(24, 16), torch.randn(4, 16), torch.randn(24, 4)
    target = torch.tensor([3, 1, -100, 23, 0])
    yield "linear", llmkernels.linear, (x, weight), 2
    yield "lora_linear", llmkernels.lora_linear, (x, weight, a, b), 4
    yield "linear_cross_entropy", llmkernels.linear_cross_entropy, (x, weight, target), 2
    yield "in_place", partial(llmkernels.cross_entropy, inplace_backward=True), (x * 1.0, target % 16), 1


def results(compiled: bool = False) -> dict:
    from oracles import differentiate, tensors

    found = {}
    for name, function, inputs, count in functions():
        grad_outputs = [torch.ones_like(t) for t in tensors(function(*inputs))]
        ours = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        found[name] = differentiate(ours, inputs, grad_outputs, count)
        torch._dynamo.reset()
    return found


def test_results_without_it(tmp_path):
    from llmkernels import _library
    from llmkernels.ops import _common

    assert _common.HAS_PRIVATE  # here
    environment = os.environ | {"PYTHONPATH": str(_library.PATH.parent.parent)}
    command = [sys.executable, Path(__file__), tmp_path / "results"]
    subprocess.run(command, check=True, env=environment, timeout=300)
    expected = results()
    for found in torch.load(tmp_path / "results"):
        assert found.keys() == expected.keys()
        for name in expected:  # the loss computes its gradient later, and rounds it once more
            torch.testing.assert_close(
                found[name], expected[name], rtol=1e-6, atol=1e-6, msg=partial("{}: {}".format, name)
            )


def main(path: str) -> None:
    owner = importlib.import_module(OWNER)
    value = getattr(owner, NAME)
    delattr(owner, NAME)
    from llmkernels.ops import _common

    assert not _common.HAS_PRIVATE
    setattr(owner, NAME, value)  # torch itself cannot do without it
    torch.save([results(), results(compiled=True)], path)


if __name__ == "__main__":
    main(sys.argv[1])
