"""Loads libllmkernels.so, and says what to do where that fails."""

import json
import platform
import re
import sys
from pathlib import Path

PATH = Path(__file__).with_name("libllmkernels.so")
OLDEST_TORCH = "2.10"
NEWEST_TORCH = "2.15"  # of which private functions are used: ops/_common.py, csrc/torch/aten.h

error: str | None = None  # why nothing was loaded, while `python -m llmkernels` runs


def load() -> bool:
    """Make the ops known to torch. Raises ImportError, but returns False where `python -m llmkernels` reports it."""
    global error
    try:
        _load()
    except ImportError as problem:
        if not _is_command_line():
            raise
        error = str(problem)
    return error is None


def build_info() -> dict:
    """What the library was built from and for; empty if it is missing or not ours. Does not load it."""
    text = re.search(rb'\{"llmkernels": [^\0]+\}(?=\0)', PATH.read_bytes()) if PATH.exists() else None
    return json.loads(text.group()) if text else {}


def parse_version(text: str) -> tuple[int, int]:
    """(2, 11) of "2.11.0+cu130"."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _is_command_line() -> bool:
    after_m = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return after_m[:1] == ["llmkernels"]


def _load():
    try:
        import torch
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        raise ImportError("llmkernels needs PyTorch, which is not installed: pip install torch") from None
    if parse_version(torch.__version__) < parse_version(OLDEST_TORCH):
        raise ImportError(
            f"llmkernels needs torch {OLDEST_TORCH} or newer, and this is {torch.__version__}: "
            "pip install --upgrade torch"
        )
    if not PATH.exists():
        raise ImportError(f"llmkernels: {PATH} is missing. {_why_missing()}")
    built_for = build_info().get("platform")
    if not sys.platform.startswith("linux") or built_for not in (None, platform.machine()):
        raise ImportError(
            f"llmkernels: {PATH} was built for Linux on {built_for}, and this is {sys.platform} on "
            f"{platform.machine()}. Build it here: pip install ."
        )
    try:
        torch.ops.load_library(PATH)
    except OSError as problem:
        text = str(problem.__cause__ or problem)
        raise ImportError(f"llmkernels: {PATH} cannot be loaded: {text}. {_why_not_loaded(text)}") from problem


def _why_missing() -> str:
    root = PATH.parent.parent
    if (root / "csrc").exists():
        return (
            f"This is the source tree, not built yet: run `pip install -e . --no-build-isolation` in {root}, or start "
            "Python in another folder to import the installed package."
        )
    return "The installation is incomplete: pip install --force-reinstall llmkernels."


def _why_not_loaded(text: str) -> str:
    import torch

    info = build_info()
    if not info:
        return "The file is damaged or not a library of this package: install it again."
    if "undefined symbol" in text:
        return (
            f"It was built with torch {info['torch']} for torch {info['oldest_torch']} and newer, and this torch, "
            f"{torch.__version__}, lacks what it needs: build it here with `pip install . --no-build-isolation`."
        )
    if "GLIBC" in text or "CXXABI" in text:
        return "It was built on a newer Linux than this: build it here with `pip install . --no-build-isolation`."
    return "Build it here with `pip install . --no-build-isolation`."
