"""`python -m llmkernels info`: what is installed, what runs where, and what is wrong."""

import argparse
import ctypes
import importlib
import json
import platform
import re
import runpy
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from llmkernels import __version__, _library, _trial
from llmkernels._versions import OLDEST_TRANSFORMERS, driver_cuda, installed, untested_torch, untested_transformers

OLDEST_CAPABILITY = (8, 0)
BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "autograd": "Autograd", "fake": "Meta"}  # the dispatcher's names


def add_command(commands):
    parser = commands.add_parser("info", help="versions, GPUs, ops by backend, and what is wrong")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 if something is wrong, else 0."""
    report = collect()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(text(report), end="")
    return 1 if report["problems"] else 0


# ---- collecting


def collect() -> dict:
    library = _library.build_info()
    versions = {
        "llmkernels": __version__,
        "python": platform.python_version(),
        "torch": installed("torch"),
        "transformers": installed("transformers"),
        "cuda_of_torch": None,
        "cuda_of_library": library.get("cuda"),
        "cuda_of_driver": driver_cuda(),
        "driver": driver_version(),
    }
    gpus, gpu_error, ops = [], None, {}
    if versions["torch"]:
        import torch

        versions["torch"] = torch.__version__
        versions["cuda_of_torch"] = torch.version.cuda
        try:
            gpus = list_gpus(library.get("architectures", []))
        except RuntimeError as problem:  # torch finds the driver too old, for one
            gpu_error = str(problem)
        ops = list_ops()
    report = {"versions": versions, "library": {"path": str(_library.PATH), **library}, "gpus": gpus, "ops": ops}
    report["untested"] = None if _library.error else try_untested()
    report["untested_torch"] = untested_torch()
    return {**report, "problems": find_problems(report) + ([gpu_error] if gpu_error else [])}


def driver_version() -> str | None:
    """The driver's own version, as nvidia-smi has it, or None without a driver."""
    version = ctypes.create_string_buffer(80)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    failed = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, len(version))
    return None if failed else version.value.decode()


def try_untested() -> dict | None:
    """Of a transformers newer than what was tested: that it is, and what is left alone with it of a small Llama."""
    if (says := untested_transformers()) is None:
        return None
    try:
        return {"says": says, "left_alone": _trial.trial()}
    except Exception as error:  # of a release that nobody here has seen
        return {"says": says, "left_alone": [f"everything ({type(error).__name__}: {error})"]}


def list_gpus(architectures: list[str]) -> list[dict]:
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "runs": covering((gpu.major, gpu.minor), architectures),
        }
        for gpu in properties
    ]


def covering(capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Which of the compiled architectures a GPU runs: its own code, older code of its generation, else PTX."""
    code, ptx = [], []
    for name in architectures:
        kind, major, minor, variant = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name).groups()
        target = (int(major), int(minor))
        if variant:
            fits = target == capability
        else:
            fits = target <= capability and (kind == "compute" or target[0] == capability[0])
        if fits:
            (code if kind == "sm" else ptx).append((target, name))
    best = max(code or ptx, default=None)
    return best and best[1]


def list_ops() -> dict[str, dict[str, bool]]:
    import torch

    names = sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("llmkernels::") and not name.endswith(".no_grad")
    )
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name.removeprefix("llmkernels::"): {column: has_kernel(name, key) for column, key in BACKENDS.items()}
        for name in names
    }


# ---- judging


def find_problems(report: dict) -> list[str]:
    if _library.error:
        return [_library.error]
    versions, library = report["versions"], report["library"]
    problems = [*_stale_library(library), *_module_problems()]
    transformers = versions["transformers"]
    if transformers and _library.parse_version(transformers) < _library.parse_version(OLDEST_TRANSFORMERS):
        problems.append(
            f"transformers {transformers} is older than {OLDEST_TRANSFORMERS}, the oldest that llmkernels.patch knows: "
            "pip install --upgrade transformers"
        )
    if (untested := report["untested"]) and untested["left_alone"]:
        problems.append(
            f"{untested['says']}; in a small Llama, patch leaves alone: {', '.join(untested['left_alone'])}"
        )
    for name, kernels in report["ops"].items():
        needed = ["cpu", "fake"] + (["cuda"] if library["cuda"] else [])
        if missing := [backend for backend in needed if not kernels[backend]]:
            problems.append(f"op {name} has no kernel for: {', '.join(missing)}")
    return problems + _gpu_problems(report)


def _stale_library(library: dict) -> list[str]:
    """In a source tree: whether the sources have changed since the library was built."""
    scripts = Path(__file__).resolve().parent.parent / "scripts"
    if not (scripts / "fingerprint.py").exists():
        return []
    tools = runpy.run_path(str(scripts / "fingerprint.py"))
    if tools["fingerprint"](tools["LIBRARY_SOURCES"]) == library["sources"]:
        return []
    return ["the library is older than the sources beside it: run `pip install -e . --no-build-isolation` again"]


def _module_problems() -> list[str]:
    folder = _library.PATH.parent
    consequence = "The ops work without it; patched models generate without a decode step"
    if not any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        others = ", ".join(sorted(path.name for path in folder.glob("_C.*"))) or "none at all"
        return [f"there is no module _C for Python {platform.python_version()}, but {others}. {consequence}"]
    try:
        module = importlib.import_module("llmkernels._C")
    except ImportError as problem:
        return [f"the module _C cannot be imported: {problem}. {consequence}"]
    if module.build_info() != _library.build_info():
        return ["the module _C and the library come from different builds: install the package again"]
    return []


def driver_suffices(report: dict) -> bool:
    """By its CUDA rather than its version, as NVIDIA's compatibility packages let older drivers run a newer CUDA."""
    built, newest = report["library"]["cuda"], report["versions"]["cuda_of_driver"]
    # Within a major version an older driver serves a newer runtime.
    return _library.parse_version(newest)[0] >= _library.parse_version(built)[0]


def _gpu_problems(report: dict) -> list[str]:
    versions, library, gpus = report["versions"], report["library"], report["gpus"]
    if gpus and not library["cuda"]:
        return ["there is a GPU, but the library was built for the CPU only: build it again where nvcc is found"]
    problems = []
    if library["cuda"] and versions["cuda_of_driver"] and not driver_suffices(report):
        built, newest = library["cuda"], versions["cuda_of_driver"]
        problems.append(
            f"the GPU driver, {versions['driver'] or 'of unknown version'}, supports CUDA {newest}, and the library was"
            f" built with CUDA {built}: install driver {library.get('oldest_driver')} or newer, or build the library "
            f"with CUDA {newest.split('.')[0]}"
        )
    for index, gpu in enumerate(gpus):
        capability = gpu["compute_capability"]
        if _library.parse_version(capability) < OLDEST_CAPABILITY:
            problems.append(
                f"GPU {index}, {gpu['name']}, has compute capability {capability}; the oldest supported is 8.0"
            )
        elif not gpu["runs"]:
            problems.append(
                f"GPU {index}, {gpu['name']}, has compute capability {capability}, and the library has kernels for "
                f"{', '.join(library['architectures'])}: build it again with TORCH_CUDA_ARCH_LIST={capability}"
            )
    return problems


# ---- printing


def text(report: dict) -> str:
    """As a terminal shows it, or a file holds it: rich looks at what standard output is."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.begin_capture()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in report["versions"].items():
        table.add_row(name.replace("_", " "), value or "-")
    library = report["library"]
    table.add_row("library", escape(library["path"]))
    if library.get("llmkernels"):
        compilers = ", ".join(filter(None, [library["cxx"], library["nvcc"] and f"nvcc {library['nvcc']}"]))
        table.add_row("built with", escape(f"torch {library['torch']}, {compilers}"))
        table.add_row("architectures", ", ".join(library["architectures"]) or "CPU only")
    if library.get("cuda"):
        table.add_row("needs a driver", f"{library.get('oldest_driver')} or newer; {_driver_here(report)}")
    for index, gpu in enumerate(report["gpus"]):
        runs = f"runs {gpu['runs']}" if gpu["runs"] else "no kernels for it"
        table.add_row(f"GPU {index}", f"{gpu['name']}, {gpu['compute_capability']}, {gpu['memory_gib']} GiB, {runs}")
    if not report["gpus"]:
        table.add_row("GPU", "none")
    console.print(table)

    if report["ops"]:
        table = Table("op", *BACKENDS)
        for name, kernels in report["ops"].items():
            table.add_row(name, *("yes" if kernels[backend] else "-" for backend in BACKENDS))
        console.print(table)
    for problem in report["problems"]:
        console.print(f"[bold red]problem[/] {escape(problem)}", soft_wrap=True)
    if report["untested_torch"]:
        console.print(f"[yellow]note[/] {escape(report['untested_torch'])}", soft_wrap=True)
    if (untested := report["untested"]) and not untested["left_alone"]:
        console.print(f"[yellow]note[/] {escape(untested['says'])}; a small Llama runs on kernels", soft_wrap=True)
    if not report["problems"]:
        console.print("[green]nothing is wrong[/]")
    return console.end_capture()


def _driver_here(report: dict) -> str:
    versions = report["versions"]
    if not versions["cuda_of_driver"]:
        return "there is none here"
    return f"{versions['driver'] or 'the one here'} {'suffices' if driver_suffices(report) else 'is too old'}"
