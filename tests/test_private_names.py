"""A torch that lacks a private name which the ops use, or is newer than those whose names are known: the same results
by the public way. And docs/building.md names what is private.

Run as a program, this file is such a process: it hides the name, or the version, and saves the results.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

OWNER, NAME = "torch.autograd.forward_ad", "_set_fwd_grad_enabled"
ROOT = Path(__file__).parent.parent


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


@pytest.fixture
def newer_abi(tmp_path):
    """A library that says, in place of torch, that this is torch 2.99."""
    cxx = (os.environ.get("CXX") or "g++").split()
    if not shutil.which(cxx[0]):
        pytest.skip("needs g++")
    source, library = tmp_path / "newer.cpp", tmp_path / "newer.so"
    source.write_text('extern "C" unsigned long aoti_torch_abi_version() { return 0x0263000000000000; }')
    subprocess.run([*cxx, "-shared", "-fPIC", source, "-o", library], check=True)
    return library


@pytest.mark.parametrize("how", ["hidden", "newer"])
def test_results_without_them(tmp_path, how, newer_abi):
    from llmkernels import _library
    from llmkernels.ops import _common

    assert _common.HAS_PRIVATE  # here
    environment = os.environ | {"PYTHONPATH": str(_library.PATH.parent.parent)}
    if how == "newer":
        environment["LD_PRELOAD"] = str(newer_abi)
    command = [sys.executable, Path(__file__), tmp_path / "results", how]
    subprocess.run(command, check=True, env=environment, timeout=300)
    expected, (*saved, error) = results(), torch.load(tmp_path / "results")
    for found in saved:
        assert found.keys() == expected.keys()
        for name in expected:  # the loss computes its gradient later, and rounds it once more
            torch.testing.assert_close(
                found[name], expected[name], rtol=1e-6, atol=1e-6, msg=partial("{}: {}".format, name)
            )
    assert ("aten::empty_strided failed" in error) == (how == "newer")  # torch's stable functions let no error through


def error_of_the_library() -> str:
    from llmkernels import rms_norm

    with pytest.raises(RuntimeError) as caught:
        rms_norm(torch.zeros(()).expand(2**30, 2**28))
    return str(caught.value)


def test_one_newest_torch():
    from llmkernels import _library

    if not (ROOT / "csrc").exists():
        pytest.skip("needs csrc")
    (code,) = re.findall(r"kNewestTorch = (0x\w+);", (ROOT / "csrc" / "torch" / "aten.h").read_text())
    assert (int(code, 16) >> 8, int(code, 16) & 255) == _library.parse_version(_library.NEWEST_TORCH)


def private_names():
    """(file, name) of what llmkernels takes of torch that begins with an underscore, or lies in a module that does."""
    package = Path(importlib.util.find_spec("llmkernels").origin).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                hidden = any(part.startswith("_") for part in node.module.split("."))
                yield from ((path, alias.name) for alias in node.names if hidden or alias.name.startswith("_"))
            elif isinstance(node, ast.Attribute):
                names, root = [node.attr], node.value
                while isinstance(root, ast.Attribute):
                    names.append(root.attr)
                    root = root.value
                hidden = any(name.startswith("_") and not name.startswith("__") for name in names)
                of_torch = isinstance(root, ast.Name) and root.id in ("torch", "Tensor")
                if of_torch and hidden and names[-1] != "ops" and node.attr not in ("_C", "_ops"):
                    yield path, node.attr


def test_the_documents_name_them():
    page = ROOT / "docs" / "building.md"
    if not page.exists():
        pytest.skip("needs docs/")
    section = page.read_text().split("these private ones are used:")[1]
    found = {name for path, name in private_names() if path.name != "_common.py"}
    assert found, "there is nothing to look for"
    assert sorted(name for name in found if not re.search(rf"\b{name}`", section)) == []


def main(path: str, how: str) -> None:
    owner = importlib.import_module(OWNER)
    version, value = torch.__version__, getattr(owner, NAME)
    if how == "hidden":
        delattr(owner, NAME)
    else:
        torch.__version__ = "2.99.0"
    from llmkernels.ops import _common

    assert not _common.HAS_PRIVATE
    setattr(owner, NAME, value)  # torch itself cannot do without it
    torch.__version__ = version
    torch.save([results(), results(compiled=True), error_of_the_library()], path)


if __name__ == "__main__":
    main(*sys.argv[1:])
