"""python -m llmkernels info: what it lists, and which faults it finds."""

import copy
import importlib.metadata
import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from llmkernels import __main__, _info, _library, _versions

OPS = ("add_layer_norm", "add_rms_norm", "bias_act", "glu", "layer_norm", "rms_norm", "rope", "rope_")
H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_gib": 139.8, "runs": "sm_90a"}


def test_nothing_is_wrong_here(capsys):
    assert __main__.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["versions"]["torch"] == torch.__version__
    for name in OPS:
        assert report["ops"][name]["cpu"]
        assert report["ops"][name]["fake"]
        assert report["ops"][name]["cuda"] == bool(report["library"]["cuda"])
        assert report["ops"][name]["autograd"] == (name != "rope_")


def test_text_lists_versions_and_ops(capsys):
    assert __main__.main(["info"]) == 0
    text = capsys.readouterr().out
    for word in (torch.__version__, _library.build_info()["torch"], *OPS, "nothing is wrong"):
        assert word in text


def test_works_without_the_library(tmp_path):
    """It also works if the library cannot be imported."""
    shutil.copytree(_library.PATH.parent, tmp_path / "llmkernels", ignore=shutil.ignore_patterns("*.so"))
    command = [sys.executable, "-m", "llmkernels", "info"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert torch.__version__ in result.stdout
    assert "libllmkernels.so is missing" in result.stdout


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90a", "compute_90"], "sm_90a"),
        ((8, 0), ["sm_80", "sm_90a", "compute_90"], "sm_80"),
        ((8, 9), ["sm_80", "sm_86", "sm_90a"], "sm_86"),  # code of an older member of the generation
        ((8, 6), ["sm_89"], None),
        ((10, 0), ["sm_80", "sm_90a", "compute_90"], "compute_90"),
        ((10, 0), ["sm_90a", "compute_90a"], None),  # "a" is for one architecture alone
        ((9, 0), ["sm_80"], None),
        ((7, 5), ["sm_80", "compute_80"], None),
        ((12, 1), ["sm_120", "compute_120"], "sm_120"),
        ((9, 0), [], None),
    ],
)
def test_covering(capability, architectures, runs):
    assert _info.covering(capability, architectures) == runs


@pytest.fixture(scope="module")
def healthy():
    """A report from a machine with an H200, on which nothing is wrong."""
    report = copy.deepcopy(_info.collect())
    report["library"] |= {"cuda": "13.0", "architectures": ["sm_80", "sm_90a", "compute_90"], "oldest_driver": 580}
    report["versions"] |= {"cuda_of_library": "13.0", "cuda_of_driver": "13.0", "driver": "580.82.07"}
    report["gpus"] = [H200]
    for kernels in report["ops"].values():
        kernels["cuda"] = True
    assert _info.find_problems(report) == []
    return report


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        (
            "versions",
            {"cuda_of_driver": "12.8", "driver": "570.124.06"},
            "the GPU driver, 570.124.06, supports CUDA 12.8, and the library was built with CUDA 13.0: "
            "install driver 580 or newer, or build the library with CUDA 12",
        ),
        ("versions", {"transformers": "5.16.2"}, "transformers 5.16.2 is older than 5.17"),
        ("library", {"cuda": None, "architectures": []}, "there is a GPU, but the library was built for the CPU only"),
        ("library", {"sources": "0" * 64}, "the library is older than the sources beside it"),
        (
            "gpus",
            H200 | {"compute_capability": "7.5", "runs": None},
            "has compute capability 7.5; the oldest supported",
        ),
        ("gpus", H200 | {"runs": None}, "build it again with TORCH_CUDA_ARCH_LIST=9.0"),
        ("ops", {"rope": {"cpu": True, "cuda": False, "autograd": True, "fake": False}}, "no kernel for: fake, cuda"),
    ],
)
def test_problems(healthy, part, change, problem):
    if "older than the sources" in problem and not (_library.PATH.parent.parent / "scripts").exists():
        pytest.skip("only in the source tree")
    report = copy.deepcopy(healthy)
    report[part] = [change] if part == "gpus" else report[part] | change
    (found,) = _info.find_problems(report)
    assert problem in found


def test_a_transformers_newer_than_tested(healthy, monkeypatch):
    """A small Llama is tried with it: it costs nothing, or what it costs is a problem."""
    monkeypatch.setattr(_versions, "NEWEST_TRANSFORMERS", "5.16")
    newer = f"transformers {transformers.__version__} is newer than 5.16, the newest that llmkernels was tested with"
    untested = _info.try_untested()
    assert untested == {"says": newer, "left_alone": []}
    report = copy.deepcopy(healthy) | {"untested": untested}
    assert _info.find_problems(report) == []
    assert f"note {newer}; a small Llama runs on kernels\nnothing is wrong" in _info.text(report)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "prepare_inputs_for_generation", None)
    report["untested"] = _info.try_untested()
    (problem,) = _info.find_problems(report)
    assert problem.startswith(f"{newer}; in a small Llama, patch leaves alone: everything (TypeError: ")


def test_a_torch_newer_than_tested(healthy, monkeypatch):
    """Its private functions are left alone, which is no problem."""
    assert healthy["untested_torch"] is None
    monkeypatch.setattr(_versions, "NEWEST_TORCH", "2.9")
    report = healthy | {"untested_torch": _versions.untested_torch()}
    assert _info.find_problems(report) == []
    assert f"note torch {installed_torch()} is newer than 2.9, the newest whose" in _info.text(report)


def installed_torch() -> str:
    return importlib.metadata.version("torch")


def test_driver_within_the_major_version_is_fine(healthy):
    report = copy.deepcopy(healthy)
    report["versions"]["cuda_of_driver"] = "13.1"
    report["library"]["cuda"] = "13.2"
    assert _info.find_problems(report) == []


@pytest.mark.parametrize(
    ("built", "oldest", "cuda", "driver", "words"),
    [
        ("13.0", 580, "13.0", "580.82.07", "580 or newer; 580.82.07 suffices"),
        ("13.0", 580, "13.0", "570.124.06", "580 or newer; 570.124.06 suffices"),  # with a compatibility package
        ("13.0", 580, "12.8", "570.124.06", "580 or newer; 570.124.06 is too old"),
        ("12.4", 525, "12.8", "570.124.06", "525 or newer; 570.124.06 suffices"),
        ("12.4", 525, "13.0", None, "525 or newer; the one here suffices"),
        ("12.4", 525, None, None, "525 or newer; there is none here"),
    ],
)
def test_text_says_which_driver_is_needed(healthy, built, oldest, cuda, driver, words):
    report = copy.deepcopy(healthy)
    report["library"] |= {"cuda": built, "oldest_driver": oldest}
    report["versions"] |= {"cuda_of_driver": cuda, "driver": driver}
    assert words in " ".join(_info.text(report).split())


def test_a_build_for_the_cpu_needs_no_driver(healthy):
    report = copy.deepcopy(healthy)
    report["library"] |= {"cuda": None, "architectures": [], "oldest_driver": None}
    assert "needs a driver" not in _info.text(report)
