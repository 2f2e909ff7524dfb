"""setup.py: toolkits, architectures, platforms and switches; the contents of the sdist and the wheel."""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from llmkernels import _library

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")

SWITCHES = ("LLMKERNELS_CUDA", "LLMKERNELS_LINEINFO", "LLMKERNELS_REUSE_LIBRARY", "TORCH_CUDA_ARCH_LIST")


@pytest.fixture(scope="module")
def definitions() -> dict:
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


@pytest.fixture
def build(definitions, monkeypatch) -> dict:
    """The names that setup.py defines, in an environment without its switches."""
    for name in (*SWITCHES, "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return definitions


def write_program(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def toolkit(build, tmp_path):
    """A fake toolkit, whose nvcc lists some architectures and compiles nothing."""

    def make(release="13.0.88", architectures=(75, 80, 86, 89, 90, 100, 103, 120)):
        known = "\n".join(f"compute_{number}" for number in architectures)
        version = f"Cuda compilation tools, release {release[:4]}, V{release}"
        write_program(
            tmp_path / "cuda" / "bin" / "nvcc",
            f'case $1 in --version) echo "{version}" ;; --list-gpu-*) echo "{known}" ;; esac',
        )
        return build["Toolkit"](tmp_path / "cuda")

    return make


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """A fake nvidia-smi; each line is a compute capability and a driver."""

    def set_gpus(*lines: str):
        write_program(tmp_path / "smi" / "nvidia-smi", "\n".join(f'echo "{line}"' for line in lines))
        monkeypatch.setenv("PATH", str(tmp_path / "smi"), prepend=os.pathsep)

    set_gpus()
    return set_gpus


# ---- architectures


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("8.0", "sm_80"),
        ("8.0;9.0a;9.0+PTX", "sm_80 sm_90a compute_90"),
        ("9.0", "sm_90a"),  # wgmma is nowhere else
        ("8.6 9.0a+PTX", "sm_86 sm_90a compute_90a"),
        ("12.0,12.0", "sm_120"),
        ("10.0a;10.0f;10.3+PTX", "sm_100a sm_100f sm_103 compute_103"),
        (" 8.0; 9.0 ;", "sm_80 sm_90a"),
        ("7.5 8.0 8.6 9.0 10.0+PTX", "sm_80 sm_86 sm_90a sm_100 compute_100"),
        ("5.2+PTX 7.0 8.0 13.0+PTX", "sm_80 compute_80"),  # PTX is for later GPUs, whichever entry asked for it
    ],
)
def test_architecture_list(build, toolkit, gpus, monkeypatch, capsys, listed, names):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert build["choose_architectures"](toolkit()) == names.split()
    out = capsys.readouterr().out
    assert ("passing over 7.5 of TORCH_CUDA_ARCH_LIST: the oldest architecture with kernels is 8.0" in out) == (
        "7.5" in listed
    )
    assert ("passing over 13.0+PTX of TORCH_CUDA_ARCH_LIST: nvcc 13.0.88 does not know it" in out) == ("13.0" in listed)


def test_architectures_that_an_older_nvcc_does_not_know(build, toolkit, gpus, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0 10.0f 12.0+PTX")
    names = build["choose_architectures"](toolkit("12.8.93"))
    assert names == ["sm_80", "sm_90a", "sm_120", "compute_120"]
    assert "passing over 10.0f" in capsys.readouterr().out
    names = build["choose_architectures"](toolkit("12.4.131", (80, 89, 90)))
    assert names == ["sm_80", "sm_90a", "compute_90"]


@pytest.mark.parametrize("listed", ["Hopper", "90", "9.0+PTX+PTX", "7.5", "6.0;7.0+PTX", "13.0"])
def test_bad_architecture_list(build, toolkit, gpus, monkeypatch, listed):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST"):
        build["choose_architectures"](toolkit())


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ([], "sm_80 sm_90a compute_90"),
        (["9.0, 580.82.07"], "sm_90a compute_90"),
        (["8.6, 580.82.07", "12.0, 580.82.07", "8.6, 580.82.07"], "sm_86 sm_120 compute_120"),
        (["7.5, 580.82.07"], "sm_80 sm_90a compute_90"),
        (["13.0, 620.10"], "sm_80 sm_90a compute_90"),
    ],
)
def test_a_build_is_for_the_gpus_present(build, toolkit, gpus, capsys, lines, names):
    gpus(*lines)
    assert build["choose_architectures"](toolkit()) == names.split()
    out = capsys.readouterr().out
    assert "WARNING" not in out
    assert ("does not know the architecture of this machine's GPU, 13.0" in out) == (lines == ["13.0, 620.10"])


@pytest.mark.parametrize(
    ("release", "driver", "warned"),
    [("13.0.88", "570.124.06", True), ("13.0.88", "580.65.06", False), ("12.8.93", "535.54", False)],
)
def test_a_driver_too_old_for_what_is_built(build, toolkit, gpus, capsys, release, driver, warned):
    gpus(f"9.0, {driver}")
    build["choose_architectures"](toolkit(release))
    assert ("needs a driver 580 or newer, and this machine has an older one" in capsys.readouterr().out) == warned


# ---- toolkits


def test_cuda_switch(build, monkeypatch, capsys):
    choose = build["choose_toolkit"]
    monkeypatch.setitem(choose.__globals__, "find_toolkit", lambda: None)
    assert choose() is None
    assert "for the CPU ONLY" in capsys.readouterr().out
    monkeypatch.setenv("LLMKERNELS_CUDA", "1")
    with pytest.raises(SystemExit, match="LLMKERNELS_CUDA=1, but no nvcc"):
        choose()
    monkeypatch.setenv("LLMKERNELS_CUDA", "0")
    assert choose() is None
    monkeypatch.setenv("LLMKERNELS_CUDA", "yes")
    with pytest.raises(SystemExit, match="LLMKERNELS_CUDA must be 0, 1 or unset"):
        choose()


def test_old_nvcc_is_passed_over(build, toolkit, monkeypatch, capsys):
    home = toolkit("11.8.89").home
    monkeypatch.setenv("CUDA_HOME", str(home))
    found = build["find_toolkit"]()
    assert found is None or found.home != home
    assert "passing over CUDA 11.8.89" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("include", "lib"),
    [
        ("include", "lib64"),  # NVIDIA
        ("include", "lib"),  # PyPI
        ("targets/{machine}-linux/include", "targets/{machine}-linux/lib"),  # conda
        ("include", "lib/{machine}-linux-gnu"),  # Debian, in /usr
    ],
)
def test_layouts_of_toolkits(toolkit, include, lib):
    found = toolkit()
    with pytest.raises(SystemExit, match=r"has nvcc, but no libcudart_static\.a"):
        _ = found.cudart
    include, lib = (found.home / part.format(machine=platform.machine()) for part in (include, lib))
    for path in (include / "cuda_runtime.h", lib / "libcudart_static.a"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert found.include == include
    assert found.cudart == lib / "libcudart_static.a"


# ---- what nvcc is asked for


def codes(build, names, source):
    """{architecture of the PTX: code that comes out of it}."""
    result = {}
    for flag in build["gencodes"](names.split(), source):
        ptx, code = re.fullmatch(r"-gencode arch=(\w+),code=(\w+)", flag).groups()
        result.setdefault(ptx, []).append(code)
    return result


@pytest.mark.parametrize(
    ("names", "plain", "variant"),
    [
        (
            "sm_80 sm_90a compute_90 sm_100 sm_120",
            {"compute_80": "sm_80", "compute_90": "sm_90 compute_90 sm_100 sm_120"},
            {"compute_80": "sm_80", "compute_90a": "sm_90a", "compute_90": "compute_90 sm_100 sm_120"},
        ),
        ("sm_90a", {"compute_90": "sm_90"}, {"compute_90a": "sm_90a"}),
        ("sm_90a compute_90a", {"compute_90": "sm_90 compute_90"}, {"compute_90a": "sm_90a compute_90a"}),
        (
            "sm_80 sm_86 sm_90a sm_100 compute_100",
            {"compute_80": "sm_80", "compute_86": "sm_86", "compute_90": "sm_90 sm_100", "compute_100": "compute_100"},
            {
                "compute_80": "sm_80",
                "compute_86": "sm_86",
                "compute_90a": "sm_90a",
                "compute_100": "sm_100 compute_100",
            },
        ),
        ("sm_100a sm_103", {"compute_100a": "sm_100a", "compute_103": "sm_103"}, None),
    ],
)
def test_code_of_one_ptx(build, tmp_path, names, plain, variant):
    """What asks for nothing that only sm_90a has shares a PTX; what includes such a thing has its own."""
    (tmp_path / "plain.cu").write_text("#if __CUDA_ARCH__ >= 900\n#endif\n")
    (tmp_path / "feature.cuh").write_text("#if defined(__CUDA_ARCH_FEAT_SM90_ALL)\n#endif\n")
    (tmp_path / "between.cuh").write_text('#include "feature.cuh"\n')
    (tmp_path / "variant.cu").write_text('#include "between.cuh"\n#include "nowhere.h"\n')
    for name, expected in (("plain", plain), ("variant", variant or plain)):
        found = {ptx: " ".join(code) for ptx, code in codes(build, names, tmp_path / f"{name}.cu").items()}
        assert found == expected, name


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the source tree")
def test_sources_that_need_a_variant(build):
    sources = sorted((ROOT / "csrc" / "kernels").glob("**/*.cu"))
    needing = {source.stem for source in sources if "sm_90a" in str(build["gencodes"](["sm_90a"], source))}
    assert needing == {"flash_attention", "flash_attention_backward", "gemm", "launch", "linear"}


# ---- switches and platforms


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the source tree")
@pytest.mark.parametrize("lineinfo", [False, True])
def test_line_numbers_for_profilers(build, toolkit, monkeypatch, lineinfo):
    if lineinfo:
        monkeypatch.setenv("LLMKERNELS_LINEINFO", "1")
    found = toolkit()
    for name in ("include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (found.home / name).parent.mkdir()
        (found.home / name).touch()
    ninja = build["Ninja"]("g++", found.nvcc, [])
    build["add_library"](ninja, found, {"architectures": ["sm_90a"]})
    assert any("-lineinfo" in line for line in ninja.lines) == lineinfo


@pytest.mark.parametrize(
    ("where", "what", "sentence"),
    [
        ("platform", "darwin", "on Linux only, and this is macOS"),
        ("platform", "win32", "on Linux only, and this is Windows (Windows: use WSL2)"),
        ("platform", "freebsd14", "on Linux only, and this is freebsd14"),
        ("maxsize", 2**31 - 1, "need a 64-bit Python"),
    ],
)
def test_other_platforms_get_a_sentence(build, monkeypatch, where, what, sentence):
    build["check_platform"]()
    monkeypatch.setattr(sys, where, what)
    with pytest.raises(SystemExit) as error:
        build["check_platform"]()
    assert sentence in str(error.value)


def test_stale_library_is_not_reused(build, monkeypatch, tmp_path):
    reused_info = build["reused_info"]
    monkeypatch.setitem(reused_info.__globals__, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="there is no"):
        reused_info()
    (tmp_path / "llmkernels").mkdir()
    shutil.copy(_library.PATH, tmp_path / "llmkernels")
    monkeypatch.setitem(reused_info.__globals__, "fingerprint", lambda parts: _library.build_info()["sources"])
    assert reused_info() == _library.build_info()
    monkeypatch.setitem(reused_info.__globals__, "fingerprint", lambda parts: "0" * 64)
    with pytest.raises(SystemExit, match="is stale: it was built from sources"):
        reused_info()


# ---- what is released


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        ("GLIBC_2.2.5 GLIBC_2.17 CXXABI_1.3", "manylinux_2_28"),  # torch's own wheels need that
        ("GLIBC_2.29 GLIBCXX_3.4.21", "manylinux_2_31"),
        ("GLIBC_2.34 GLIBC_2.2.5 GLIBCXX_3.4.29 CXXABI_1.3.13", "manylinux_2_34"),
        ("GLIBC_2.14 GLIBCXX_3.4.30", "manylinux_2_35"),  # the compiler's library may be newer than glibc
        ("GLIBC_2.36", "manylinux_2_36"),
        ("GLIBC_2.17 CXXABI_1.3.14", "manylinux_2_39"),
        ("GLIBC_2.99", None),
    ],
)
def test_manylinux_tag(build, symbols, tag):
    lines = "\n".join(f"    0x0297f870 0x00 16 {name}" for name in symbols.split())
    assert build["manylinux"](lines) == (tag and f"{tag}_{platform.machine()}")


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_wheel_is_named_by_what_its_libraries_need(build, monkeypatch, tmp_path):
    from setuptools import Distribution, Extension

    distribution = Distribution({"name": "llmkernels", "ext_modules": [Extension("a", []), Extension("b", [])]})
    wheel = build["Wheel"](distribution)
    wheel.finalize_options()
    builder = distribution.get_command_obj("build_ext")
    paths = [str(_library.PATH), str(tmp_path / "missing.so")]
    monkeypatch.setattr(builder, "get_outputs", lambda: paths)
    assert "-linux_" in "-".join(wheel.get_tag())
    paths.pop()
    symbols = subprocess.run(["objdump", "-p", *paths], check=True, capture_output=True, text=True).stdout
    assert wheel.get_tag()[2] == build["manylinux"](symbols)


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the whole source tree")
def test_sdist_holds_all_that_builds_and_tests_it(tmp_path):
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path]
    subprocess.run(command, check=True, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        held = {Path(*Path(name).parts[1:]) for name in sdist.getnames()}
    suffixes = (".cpp", ".cu", ".cuh", ".h", ".py", ".sh", ".typed")
    for folder in ("benchmarks", "csrc", "llmkernels", "scripts", "tests"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in suffixes}
        assert files - held == set()
    documents = {path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*"))}
    assert {Path("setup.py"), Path("pyproject.toml"), Path("LICENSE"), *documents} <= held
    assert not any(path.suffix in (".so", ".pyc") for path in held)
