"""Which sources a result depends on, and which changes of them count."""

import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "fingerprint.py"
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the source tree")

tools = runpy.run_path(str(SCRIPT)) if SCRIPT.exists() else {}
OPS = ("rms_norm", "rope", "swiglu", "linear", "decode_attention", "sample")
MODEL = "steps"


def hashes(root: Path = ROOT) -> dict[str, str]:
    pytest.importorskip("rich")
    from benchmarks.sections import TABLE
    from benchmarks.sources import hash_of

    return {section.name: hash_of(section.roots, root) for section in TABLE if section.name in (*OPS, MODEL)}


unchanged = cache(hashes)


@pytest.fixture
def copy(tmp_path) -> Path:
    for folder in ("csrc", "llmkernels", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("setup.py", {*OPS, MODEL}),
        ("csrc/kernels/launch.h", {*OPS, MODEL}),
        ("csrc/kernels/launch.cu", {*OPS, MODEL}),
        ("csrc/torch/binding.h", {*OPS, MODEL}),
        ("csrc/kernels/rope/rope.cu", {"rope", MODEL}),
        # The whole folder of a kernel counts for those that include one of its headers.
        ("csrc/kernels/activation/glu.cu", {"swiglu", MODEL}),
        ("csrc/kernels/linear/linear.cu", {"linear", MODEL}),
        ("csrc/kernels/attention/decode_attention_bf16.cu", {"decode_attention", MODEL}),
        ("csrc/kernels/norm/backward.cuh", {"rms_norm", "rope", "linear", "decode_attention", MODEL}),
        ("csrc/kernels/graph.cu", {MODEL}),
        ("csrc/cpu/rope.cpp", set()),
        ("llmkernels/ops/rope.py", {"rope", MODEL}),
        ("llmkernels/ops/_common.py", {*OPS, MODEL}),
        ("llmkernels/hf/patch.py", {MODEL}),
        ("llmkernels/_info.py", set()),
        ("benchmarks/ops/rope.py", {"rope"}),
        ("benchmarks/timing.py", {*OPS, MODEL}),
        ("benchmarks/plots.py", set()),
    ],
)
def test_a_change_reaches_what_depends_on_it(copy, file, stale):
    path = copy / file
    path.write_text(path.read_text() + ("\n# why\n" if file.endswith(".py") else "\n// why\n"))
    assert hashes(copy) == unchanged()
    path.write_text(path.read_text() + ("more = 1\n" if file.endswith(".py") else "int more();\n"))
    after = hashes(copy)
    assert {name for name in after if after[name] != unchanged()[name]} == stale


def test_every_kernel_is_reached_by_the_section_of_an_op():
    pytest.importorskip("rich")
    from benchmarks.sections import TABLE
    from benchmarks.sources import depended_on

    reached = {name for section in TABLE if "ops" in section.file for name in depended_on(section.roots)}
    parts = ("csrc/kernels", "csrc/device", "csrc/params", "csrc/torch")
    assert set(tools["source_files"](parts)) - reached == {
        "csrc/kernels/graph.cu",  # of models, as the embedding
        "csrc/kernels/embedding/embed_tokens.cu",
        "csrc/kernels/embedding/embed_tokens.h",
        "csrc/params/embed_tokens.h",
        "csrc/torch/embed_tokens.cpp",
        "csrc/torch/ops.cpp",
        "csrc/torch/softcap.cpp",
    }


def test_the_whole_is_of_code_and_names(tmp_path):
    hashed = set()

    def distinct() -> bool:
        known = len(hashed)
        hashed.add(tools["fingerprint"](root=tmp_path))
        return len(hashed) > known

    (tmp_path / "csrc").mkdir()
    (tmp_path / "llmkernels").mkdir()
    (tmp_path / "setup.py").write_text("1")
    assert distinct()
    (tmp_path / "csrc" / "a.cu").write_text("1")
    assert distinct()
    (tmp_path / "csrc" / "a.cu").rename(tmp_path / "csrc" / "b.cu")
    assert distinct()
    (tmp_path / "csrc" / "b.cu").write_text("  // one\n\n1\n")
    (tmp_path / "setup.py").write_text("# one\n1\n")
    (tmp_path / "llmkernels" / "__pycache__").mkdir()
    (tmp_path / "llmkernels" / "__pycache__" / "a.pyc").write_text("1")
    (tmp_path / "llmkernels" / "libllmkernels.so").write_text("1")
    (tmp_path / "README.md").write_text("1")
    assert not distinct()
    (tmp_path / "csrc" / "b.cu").write_text("#if 1")  # not a comment
    assert distinct()
    (tmp_path / "csrc" / "b.cu").write_text("#if 2")
    assert distinct()


def test_it_needs_no_package():
    run = subprocess.run([sys.executable, "-S", "-I", str(SCRIPT)], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[0-9a-f]{64}\n", run.stdout) and not run.stderr
    assert run.stdout.split() == [tools["fingerprint"]()]


def git(*arguments) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


@pytest.fixture
def clone() -> Path:
    """A wheel is tested in a folder inside its clone."""
    found = git("rev-parse", "--show-toplevel")
    if not found or not (Path(found) / "setup.py").exists():
        pytest.skip("needs a git clone")
    return Path(found)


def test_it_takes_the_tracked_files(clone):
    patterns = [f":(top){part}" for part in tools["SOURCES"]]
    listed = git("ls-files", "--full-name", "--cached", "--others", "--exclude-standard", "--", *patterns).splitlines()
    found = tools["source_files"](root=clone)
    assert found == sorted(name for name in listed if (clone / name).exists())
