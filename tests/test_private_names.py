"""A torch that lacks a private name: the ops give the same results by the public way, as with a torch that is newer
than those whose names are known, and a model can be patched. And docs/building.md names what is private.

Run as a program, this file is such a process: it hides the name, or the version, and saves the results; or it hides one
name after the other, each in a fork.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

OWNER, NAME = "torch.autograd.forward_ad", "_set_fwd_grad_enabled"
# Which torch itself asks for while a library of ops is loaded.
OF_TORCH_ITSELF = {"DispatchKeySet", "OpOverload", "_dispatch_has_kernel_for_dispatch_key"}
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
    """(file, owner, name) of what llmkernels takes of torch that begins with an underscore, or lies in a module that
    does."""
    package = Path(importlib.util.find_spec("llmkernels").origin).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                hidden = any(part.startswith("_") for part in node.module.split("."))
                names = [alias.name for alias in node.names]
                yield from ((path, node.module, name) for name in names if hidden or name.startswith("_"))
            elif isinstance(node, ast.Attribute):
                names, root = [node.attr], node.value
                while isinstance(root, ast.Attribute):
                    names.append(root.attr)
                    root = root.value
                hidden = any(name.startswith("_") and not name.startswith("__") for name in names)
                of_torch = isinstance(root, ast.Name) and root.id in ("torch", "Tensor")
                owner = ".".join(["torch", *(["Tensor"] if of_torch and root.id == "Tensor" else []), *names[:0:-1]])
                if of_torch and hidden and names[-1] != "ops" and not isinstance(found(owner, node.attr), ModuleType):
                    yield path, owner, node.attr


def found(owner: str, name: str):
    """What the owner, a module or a class, has by this name; None where it has none."""
    root, *names = owner.split(".")
    value = importlib.import_module(root)
    for one in (*names, name):
        value = getattr(value, one, None)
    return value


def of_modules():
    """The names that can be hidden: those of classes can not. Each with whether hf/ has it from hf/_private.py."""
    files = {}
    for path, owner, name in private_names():
        if owner in sys.modules and name not in OF_TORCH_ITSELF:
            files.setdefault((owner, name), set()).add(path.name)
    return {key: "_private.py" in names for key, names in sorted(files.items())}


@cache
def without_each() -> dict[str, list]:
    """By name what a process was left with that lacks it: its error, and why the model had no step."""
    from llmkernels import _library

    package, tests = _library.PATH.parent.parent, Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{package}:{tests}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = json.dumps([*of_modules()])
    result = subprocess.run(
        [sys.executable, Path(__file__), names, "each"], capture_output=True, text=True, env=environment, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(("owner", "name"), of_modules())
def test_a_model_is_patched_without_it(owner, name):
    """Its modules run on kernels. Of hf/'s own names the report says which one the step lacks."""
    pytest.importorskip("transformers")
    error, reason = without_each()[f"{owner}.{name}"]
    assert error is None, error
    if of_modules()[owner, name]:
        assert f"'{name}'" in reason
    else:
        assert reason is None


def test_no_graph_without_memory_pools(monkeypatch):
    from llmkernels.hf.step import graphs

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    with pytest.raises(graphs.NoGraph, match="this torch lacks a private name: _cuda_"):
        graphs.record(lambda: None, torch.device("cuda", 0))


def test_the_documents_name_them():
    page = ROOT / "docs" / "building.md"
    if not page.exists():
        pytest.skip("needs docs/")
    section = page.read_text().split("these private ones are used:")[1]
    names = {name for path, _, name in private_names() if path.name != "_common.py"}
    assert names, "there is nothing to look for"
    assert sorted(name for name in names if not re.search(rf"\b{name}`", section)) == []


def patched_without(owner: str, name: str) -> list:
    """The error, and why there was no step, of a model that is patched by a package whose torch lacked the name."""
    module = importlib.import_module(owner)
    value = getattr(module, name, None)
    if value is not None:
        delattr(module, name)
    try:
        import llmkernels.hf

        if value is not None:
            setattr(module, name, value)  # torch itself cannot do without it
        from hf_models import assert_close, logits_of, tiny_inputs, tiny_model

        model, ids = tiny_model(), tiny_inputs()
        expected = logits_of(model, ids), model.generate(ids, max_new_tokens=4, do_sample=False)
        handle = llmkernels.patch(model, training=True)
        assert_close(logits_of(model, ids), expected[0])
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected[1])
        model.train()(ids, labels=ids).loss.backward()
        report = handle.report()
        assert report["rms_norm"].runs and report["rope"].runs and report["gated_mlp"].runs, report
        return [None, report.decode[0].reason]
    except Exception as error:
        return [f"{type(error).__name__}: {error}", None]


def each(names: str) -> None:
    """Prints what each name leads to; by forks of a process that has what others import late."""
    import torch.utils.flop_counter  # noqa: F401
    import transformers.generation
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    results = {}
    for owner, name in json.loads(names):
        read, write = os.pipe()
        if not (child := os.fork()):
            os.write(write, json.dumps(patched_without(owner, name)).encode())
            os._exit(0)
        os.close(write)
        with open(read) as pipe:
            results[f"{owner}.{name}"] = json.loads(pipe.read() or '["the process died", null]')
        os.waitpid(child, 0)
    print(json.dumps(results))


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
    each(sys.argv[1]) if sys.argv[2] == "each" else main(*sys.argv[1:])
