"""Commands say what stopped them in one line on standard error, and exit with status 1."""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llmkernels import _library

LONGEST = 500  # characters of a message; some of transformers' list every architecture there is


class Problem(Exception):
    """What the user has to know, in words that need no type before them."""


def check_model_path(name: str) -> None:
    """Raise Problem for a path without a model, which transformers would look for on the Hub."""
    path = Path(name)
    if name.startswith(("/", "./", "../")) or path.exists():
        if not path.is_dir():
            raise Problem(f"MODEL must be a folder, and {name} {'is a file' if path.exists() else 'does not exist'}")
        if not any((path / config).exists() for config in ("config.json", "adapter_config.json")):
            raise Problem(f"MODEL must be a folder with a model, and {name} has no config.json")


def check_installation() -> None:
    """Raise Problem where the kernels or transformers are missing, which `python -m llmkernels` starts without."""
    if _library.error:
        raise Problem(_library.error)
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise Problem("transformers must be installed: pip install 'llmkernels[hf]'") from None


def quiet_transformers() -> None:
    """No warnings, and progress bars for a terminal alone."""
    import transformers

    transformers.logging.set_verbosity_error()
    if not sys.stderr or not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()


def choose_device(name: str | None):
    """What `--device` names, or else the GPU where there is one. Raises Problem for what is not here."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise Problem(f"--device must be cpu, cuda or cuda:N, got {name}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Problem(f"--device {name} must have a GPU that torch can use; python -m llmkernels info says more")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Problem(f"--device {name} must be one of the {torch.cuda.device_count()} GPUs here")
    return device


def number(kind: type, is_valid: Callable, words: str) -> Callable[[str], int | float]:
    """A parser of numbers in a range, which `words` are for."""

    def parse(text):
        number = kind(text)
        if not is_valid(number):
            raise argparse.ArgumentTypeError(f"must be {words}, got {text}")
        return number

    parse.__name__ = kind.__name__  # argparse calls it that where the text is no number
    return parse


def run_command(name: str, run: Callable[[], int | None]) -> int:
    """The exit status of `run()`. `python -X dev` shows tracebacks instead of lines."""
    if sys.flags.dev_mode:
        return run() or 0
    if sys.stdout:
        with suppress(AttributeError):  # another file in its place
            sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that don't have every character
    status = 1
    try:
        try:
            return run() or 0
        finally:
            if sys.stdout:
                sys.stdout.flush()  # at exit it would be too late to say why it fails
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except BrokenPipeError:
        message = "standard output was closed before the end"
    except Problem as problem:
        message = str(problem)
    except Exception as error:
        message = _describe(error)
    message = " ".join(message.split())
    with suppress(OSError, ValueError):
        print(f"{name}: {message[:LONGEST]}{'...' * (len(message) > LONGEST)}", file=sys.stderr, flush=True)
    _discard_output()
    return status


def _describe(error: Exception) -> str:
    text = str(error).strip() or "no message"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory: {text}"
    if isinstance(error, OSError) and error.errno:
        return f"{error.filename or 'standard output'}: {error.strerror}"
    return f"{type(error).__name__}: {text} (python -X dev shows where)"


def _discard_output() -> None:
    """What is left in the buffer where it can't be written: Python would try again at exit."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
