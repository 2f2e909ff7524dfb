"""Which releases of transformers and torch llmkernels knows, and which ones are installed."""

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
