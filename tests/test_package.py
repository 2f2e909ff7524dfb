"""The installed package: import errors that say what to do, the library's dependencies, the GPU report."""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import llmkernels
from llmkernels import _library

ROOT = Path(__file__).resolve().parent.parent


def python(*arguments, folder: Path) -> subprocess.CompletedProcess:
    """Runs a Python that finds llmkernels in `folder` first."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder with a copy of the installed package in it, to be broken."""
    shutil.copytree(_library.PATH.parent, tmp_path / "llmkernels")
    return tmp_path


def replace_in_library(copy: Path, old: bytes, new: bytes):
    library = copy / "llmkernels" / _library.PATH.name
    content = library.read_bytes()
    assert len(old) == len(new)
    assert old in content
    library.write_bytes(content.replace(old, new))


def import_error(copy: Path, before: str = "") -> str:
    result = python("-c", f"{before}\nimport llmkernels", folder=copy)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: llmkernels")
    return last


def test_without_torch(copy):
    assert "pip install torch" in import_error(copy, "import sys; sys.modules['torch'] = None")


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1+cu128"])
def test_old_torch(copy, version):
    error = import_error(copy, f"import torch; torch.__version__ = '{version}'")
    assert f"needs torch 2.10 or newer, and this is {version}: pip install --upgrade torch" in error


def test_missing_library(copy):
    (copy / "llmkernels" / _library.PATH.name).unlink()
    assert "libllmkernels.so is missing. The installation is incomplete: pip install" in import_error(copy)


def test_source_tree_that_is_not_built(copy):
    (copy / "llmkernels" / _library.PATH.name).unlink()
    (copy / "csrc").mkdir()
    assert "This is the source tree, not built yet: run `pip install -e ." in import_error(copy)


def test_damaged_library(copy):
    (copy / "llmkernels" / _library.PATH.name).write_bytes(b"no library")
    assert "The file is damaged or not a library of this package" in import_error(copy)


def test_library_for_another_platform(copy):
    other = "armv7l"
    replace_in_library(copy, f'"platform": "{platform.machine()}"'.encode(), f'"platform": "{other}"'.encode())
    assert f"was built for Linux on {other}, and this is linux on {platform.machine()}" in import_error(copy)


def test_torch_that_lacks_a_symbol(copy):
    replace_in_library(copy, b"torch_call_dispatcher", b"torch_call_dispatchex")
    error = import_error(copy)
    assert "undefined symbol: torch_call_dispatchex" in error
    assert "build it here with `pip install . --no-build-isolation`" in error


def test_ops_work_without_the_module(copy):
    for path in (copy / "llmkernels").glob("_C.*"):
        path.rename(path.with_name("_C.cpython-27-other.so"))
    code = "import torch, llmkernels; print(llmkernels.swiglu(torch.zeros(2), torch.ones(2)).tolist())"
    result = python("-c", code, folder=copy)
    assert result.stdout.strip() == "[0.0, 0.0]", result.stderr
    info = python("-m", "llmkernels", "info", folder=copy)
    assert info.returncode == 1
    assert f"no module _C for Python {platform.python_version()}, but _C.cpython-27-other.so" in info.stdout


def test_one_version():
    versions = {llmkernels.__version__, _library.build_info()["llmkernels"]}
    if importlib.util.find_spec("llmkernels").origin.startswith(sys.prefix):  # else the tree need not be installed
        versions.add(importlib.metadata.version("llmkernels"))
    assert len(versions) == 1


def test_module_and_library_are_of_one_build():
    module = pytest.importorskip("llmkernels._C")
    assert module.build_info() == _library.build_info()
    plan = module.norm_plan(3584, 2)
    assert plan["width"] * plan["vectors"] * plan["threads_per_row"] >= 3584


def test_public_names():
    for name in llmkernels.__all__:
        assert getattr(llmkernels, name) is not None
    assert {"KVCache", "unpatch", *llmkernels.__all__} <= set(dir(llmkernels))
    assert {"KVCache", *llmkernels.hf.__all__} <= set(dir(llmkernels.hf))


def test_type_checkers_read_the_annotations():
    assert (_library.PATH.parent / "py.typed").exists()


def test_names_are_listed_without_transformers():
    listed = "import sys, llmkernels; assert 'KVCache' in dir(llmkernels); assert 'transformers' not in sys.modules"
    result = python("-c", listed, folder=_library.PATH.parent.parent)
    assert result.returncode == 0, result.stderr


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
import torch
import llmkernels

assert llmkernels.swiglu(torch.zeros(2), torch.ones(2)).tolist() == [0, 0]
llmkernels.PagedKVCache(layers=1, pages=2, page_size=4, kv_heads=1, head_dim=8)
assert not hasattr(llmkernels, "another_name")
for name in ("hf", "profiling", *llmkernels.__all__):
    try:
        getattr(llmkernels, name)
    except ImportError as error:
        print(error)
"""


def test_what_needs_transformers_says_so():
    result = python("-c", WITHOUT_TRANSFORMERS, folder=_library.PATH.parent.parent)
    assert result.returncode == 0, result.stderr
    says = " needs transformers, which is not installed: pip install 'llmkernels[hf]'"
    assert {*result.stdout.splitlines()} == {f"llmkernels.{name}{says}" for name in llmkernels._OF_TRANSFORMERS}


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_library_needs_torch_and_nothing_of_cuda():
    """One library for every torch: CUDA is linked statically or looked up at run time, and there is no RPATH."""
    text = subprocess.run(["readelf", "-d", _library.PATH], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed  # libtorch.so brings libtorch_cuda into scope where it exists
    assert not any("cuda" in name or "python" in name for name in needed)
    assert "PATH" not in text


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_functions_of_torch_beside_its_stable_ones():
    """This torch has them all: where one is absent, the library takes a stable function that loses the error's type."""
    text = subprocess.run(["nm", "-D", _library.PATH], capture_output=True, text=True, check=True).stdout
    wanted = re.findall(r" w (_ZN2at.+)", text)
    folder = Path(torch.__file__).parent / "lib"
    libraries = [ctypes.CDLL(path) for path in folder.glob("libtorch_c[pu]*.so")]
    absent = [name for name in wanted if not any(hasattr(library, name) for library in libraries)]
    assert len(wanted) == (13 if _library.build_info().get("cuda") else 12)  # products of FP8 are called on a GPU only
    assert absent == [name for name in wanted if "cuda" in name and not torch.version.cuda]


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs the README")
def test_example_of_an_op_in_the_readme(tmp_path):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (example,) = [example for example in examples if "transformers" not in example]
    (tmp_path / "example.py").write_text(example)
    result = python(tmp_path / "example.py", folder=_library.PATH.parent.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout


# ---- the GPU report

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_rope" name="test_a[cuda]"/>
<testcase classname="tests.test_rope" name="test_b[cuda]"><skipped/></testcase>
<testcase classname="tests.test_rope" name="test_c[cuda]"><failure/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("set_by_user", [None, "3"])
def test_workers_of_the_gpu_check_have_one_thread_each(tmp_path, monkeypatch, set_by_user):
    """... but not the tests that run alone, whose references on the CPU take long."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu_check.sh", tmp_path / "scripts")
    recorder = tmp_path / ".venv" / "bin" / "python"
    recorder.parent.mkdir(parents=True)
    recorder.write_text(f'#!/bin/sh\necho "${{OMP_NUM_THREADS:-unset}} $*" >> "{tmp_path}/calls"\n')
    recorder.chmod(0o755)
    monkeypatch.delenv("LLMKERNELS_VENV", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    subprocess.run(["bash", tmp_path / "scripts" / "gpu_check.sh", "-n", "16"], check=True)
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if "-m pytest" in line]
    threads = {"not large" in line: line.split()[0] for line in calls}
    assert threads == {True: set_by_user or "1", False: set_by_user or "unset"}


def test_gpu_report_counts_tests_and_sanitizer_errors(tmp_path):
    tools = runpy.run_path(str(ROOT / "scripts" / "gpu_report.py"))
    tests, log = tmp_path / "memcheck.1.xml", tmp_path / "memcheck.1.log"
    tests.write_text(JUNIT)
    counts, failures = tools["read_tests"](tests)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert failures == ["tests.test_rope::test_c[cuda]"]

    def found(*more):
        return tools["read_sanitizer"](tmp_path, "memcheck", ["memcheck.1", *more])

    assert found()[1] == ["memcheck: did not run to its end"]
    tests.write_text(JUNIT.replace("<failure/>", ""))
    log.write_text("========= ERROR SUMMARY: 0 errors\n")
    assert found() == ({"errors": 0, "tests": 2}, [])
    log.write_text("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n")
    assert found() == ({"errors": 3, "tests": 2}, ["memcheck: 3 errors"])
    assert found("memcheck.2")[1] == ["memcheck: did not run to its end"]
    shutil.copy(tests, tmp_path / "memcheck.2.xml")
    shutil.copy(log, tmp_path / "memcheck.2.log")
    assert found("memcheck.2") == ({"errors": 6, "tests": 4}, ["memcheck: 6 errors"])
    log.write_text("========= Internal error\n")
    assert found()[1] == ["memcheck: did not run to its end"]


def test_gpu_report_keeps_the_parts_of_other_runs(tmp_path, monkeypatch):
    """Of one GPU and of two; a part that is run again is replaced, with its failures."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import machine

    monkeypatch.setattr(machine, "describe", lambda device: {"sources": "a", "gpu": "b", "torch": "c"})
    tools, output = runpy.run_path(str(ROOT / "scripts" / "gpu_report.py")), tmp_path / "report.json"

    def run(part, junit):
        (tmp_path / "command").write_text("command")
        (tmp_path / "started").write_text(part)
        (tmp_path / f"{part}.xml").write_text(junit)
        failed = tools["main"](tmp_path, output)
        report = json.loads(output.read_text())
        assert bool(report["failures"]) == failed
        return report

    bad, good = JUNIT, JUNIT.replace("<failure/>", "")
    assert run("two_gpus", bad)["failures"] == ["two_gpus: tests.test_rope::test_c[cuda]"]
    report = run("tests", bad)
    assert report["failures"] == ["two_gpus: tests.test_rope::test_c[cuda]", "tests.test_rope::test_c[cuda]"]
    assert run("two_gpus", good)["failures"] == ["tests.test_rope::test_c[cuda]"]
    report = run("tests", good)
    library = report["meta"].pop("library")
    assert report == {
        "meta": {"sources": "a", "gpu": "b", "torch": "c", "command": "command"},
        "tests": {"passed": 2, "failed": 0, "skipped": 1},
        "sanitizer": {},
        "failures": [],
        "two_gpus": {"passed": 2, "failed": 0, "skipped": 1},
    }

    # A test that was wrong runs again with all its parameters, by which it may have another name now.
    run("tests", bad)
    assert tools["failed_tests"](output) == ["tests/test_rope.py::test_c"]
    assert run("again", bad)["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    report = run("again", good.replace("test_c[cuda]", "test_c[other]"))
    assert report["tests"] == {"passed": 2, "failed": 0, "skipped": 1} and report["failures"] == []
    run("tests", good)

    # What the sanitizers have seen is kept while the kernels are the same, and the report says of which sources it is.
    (tmp_path / "memcheck.1.log").write_text("========= ERROR SUMMARY: 3 errors\n")
    assert run("memcheck.1", good)["failures"] == ["memcheck: 3 errors"]
    for sources in ("d", "e"):
        monkeypatch.setattr(machine, "describe", lambda device, of=sources: {"sources": of, "gpu": "b", "torch": "c"})
        report = run("tests", good)
        assert report["sanitizer"] == {"memcheck": {"errors": 3, "tests": 2}} and "two_gpus" not in report
        assert report["failures"] == ["memcheck: 3 errors"] and report["sanitizer_sources"] == "a"
    assert "sanitizer_sources" not in run("memcheck.1", good)
    output.write_text(output.read_text().replace(library, "of other kernels"))
    monkeypatch.setattr(machine, "describe", lambda device: {"sources": "f", "gpu": "b", "torch": "c"})
    assert run("tests", good)["sanitizer"] == {}
