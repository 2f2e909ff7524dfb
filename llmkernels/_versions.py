"""Which releases of transformers and torch llmkernels knows, and which ones are installed."""

import ctypes
import importlib.metadata

from llmkernels._library import NEWEST_TORCH, parse_version

OLDEST_TRANSFORMERS = "5.17"
NEWEST_TRANSFORMERS = "5.24"


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested_transformers() -> str | None:
    """What to say of a transformers that is newer than what was tested; None of any other."""
    version = installed("transformers")
    if version is None or parse_version(version) <= parse_version(NEWEST_TRANSFORMERS):
        return None
    return f"transformers {version} is newer than {NEWEST_TRANSFORMERS}, the newest that llmkernels was tested with"


def untested_torch() -> str | None:
    """What to say of a torch that is newer than what was tested; None of any other."""
    version = installed("torch")
    if version is None or parse_version(version) <= parse_version(NEWEST_TORCH):
        return None
    return (
        f"torch {version} is newer than {NEWEST_TORCH}, the newest whose private functions llmkernels knows: its ops "
        "go by public ones, which are slower and without torch.func"
    )


def driver_cuda() -> str | None:
    """The newest CUDA that the driver supports, or None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"
