"""Measured choices as files of JSON: those of the package, and those in the user's cache.

A file has `format`, what it was measured on, and `linears`. One that is damaged, or from elsewhere, is ignored with a
warning that says why; none raises.

The cache is the folder $LLMKERNELS_CACHE, or llmkernels/ in $XDG_CACHE_HOME, or ~/.cache/llmkernels. It has a file for
each kind of GPU, which holds for one build of the library and one driver. The package has one for each architecture and
number of SMs that was measured (scripts/tune.py), which holds for every build.
"""

import contextlib
import fcntl
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from llmkernels import _library
from llmkernels._versions import driver_cuda

from .table import VARIANTS, Choice, Linear, Measured, merge, set_table

FORMAT = 1
PACKAGED = Path(__file__).parents[1] / "tuned"

Identity = dict[str, str | int]  # what a file was measured on


class Unusable(Exception):
    """Why a file is ignored."""


# ---- what they are for


def identity_of(index: int) -> Identity:
    """Of a GPU of this machine, the newest CUDA that its driver supports, and the sources of the library."""
    facts = torch.cuda.get_device_properties(index)
    return {
        "gpu": facts.name,
        "compute_capability": 10 * facts.major + facts.minor,
        "sm_count": facts.multi_processor_count,
        "driver": driver_cuda() or "unknown",
        "library": _library.build_info().get("sources", "unknown")[:16],
    }


def cache_path(identity: Identity) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", str(identity["gpu"]).lower()).strip("-")
    return _cache_folder() / f"linear-{name}.json"


def packaged_path(identity: Identity) -> Path:
    return PACKAGED / f"sm{identity['compute_capability']}-{identity['sm_count']}.json"


def _cache_folder() -> Path:
    if folder := os.environ.get("LLMKERNELS_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmkernels"


# ---- reading


_loaded: set[int] = set()
_LOCK = threading.Lock()


def load(index: int) -> None:
    """Set the table of a GPU to what the files have for it. Once in a process; never raises."""
    if index in _loaded or _library.build_info().get("cuda") is None:
        return
    with _LOCK:
        if index in _loaded:
            return
        _loaded.add(index)
        try:
            identity = identity_of(index)
            packaged = read(packaged_path(identity), architecture(identity))
            entries = merge(packaged, _read_cache(identity))
            if entries:
                set_table(index, entries)
        except Exception as problem:  # a choice that cannot run: the rules are good enough
            warn(f"no measured choices are used on GPU {index}: {problem}")


def _read_cache(identity: Identity) -> tuple[Measured, ...]:
    """The choices in the user's cache: none without a home folder, where it cannot be."""
    try:
        path = cache_path(identity)
    except RuntimeError as problem:
        warn(f"no choices of this machine are read: {problem}")
        return ()
    return read(path, identity)


def read(path: Path, identity: Identity) -> tuple[Measured, ...]:
    """The choices in a file that was measured on this; none, and a warning unless there is no file, if it cannot be
    used."""
    try:
        return parse(path.read_text(encoding="utf-8"), identity)
    except FileNotFoundError:
        return ()
    except Unusable as reason:
        warn(f"{path} is ignored: {reason}")
    except (OSError, UnicodeDecodeError) as problem:
        warn(f"{path} is ignored: it cannot be read ({problem})")
    return ()


def parse(text: str, identity: Identity) -> tuple[Measured, ...]:
    """Raises Unusable."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise Unusable(f"it is damaged ({problem})") from None
    if not isinstance(content, dict) or "format" not in content:
        raise Unusable("it is no file of measured choices")
    if content["format"] != FORMAT:
        raise Unusable(f"its format is {content['format']}, and this version reads {FORMAT}")
    for name, expected in identity.items():
        if content.get(name) != expected:
            raise Unusable(
                f"it was measured with {name} {content.get(name)}, and here it is {expected}; measure again with "
                "llmkernels.autotune(model)"
            )
    linears = content.get("linears")
    if not isinstance(linears, list):
        raise Unusable("it is damaged (linears is no list)")
    return tuple(_measured(index, entry) for index, entry in enumerate(linears))


def _measured(index: int, entry: Any) -> Measured:
    """An entry, all of whose numbers are of the types that they should be."""
    try:
        linear, choice = _typed(Linear, entry["linear"]), _typed(Choice, entry["choice"])
        found = _typed(Measured, {**entry, "linear": linear, "choice": choice})
    except (KeyError, TypeError, ValueError) as problem:
        raise Unusable(f"it is damaged (entry {index}: {problem})") from None
    if choice.variant not in VARIANTS or any(abs(number) >= 1 << 62 for number in found.numbers):
        raise Unusable(f"it is damaged (entry {index}: {choice})")
    return found


def _typed(kind: type, values: dict[str, Any]) -> Any:
    made = kind(**values)
    for field in fields(kind):
        value = getattr(made, field.name)
        if type(value) is not field.type and not (field.type is float and type(value) is int):
            raise TypeError(f"{field.name} is {value!r}")
    return made


# ---- writing


def save(path: Path, identity: Identity, entries: Iterable[Measured], notes: Identity | None = None) -> str | None:
    """Add choices to a file, in which those of other linears stay; a file from elsewhere is replaced. `notes`: facts
    that it need not have to be read.

    It is replaced as a whole: who reads it meanwhile has the old one or the new one. Returns why it was not written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            try:
                old = parse(path.read_text(encoding="utf-8"), identity)
            except (FileNotFoundError, UnicodeDecodeError, Unusable):
                old = ()
            _write(path, render({**identity, **(notes or {})}, merge(old, entries)))
    except OSError as problem:
        return f"{path} cannot be written ({problem.strerror or problem})"
    return None


def keep(identity: Identity, entries: Iterable[Measured]) -> Path | None:
    """Add choices to the cache. Returns the file, or None and a warning where it cannot be written."""
    try:
        path = cache_path(identity)
        reason = save(path, identity, entries)
    except RuntimeError as problem:  # no home folder
        reason = f"what was measured is not written to a file: {problem} LLMKERNELS_CACHE can name a folder"
    if not reason:
        return path
    warn(reason)
    return None


def render(identity: Identity, entries: Iterable[Measured]) -> str:
    linears = ",\n    ".join(json.dumps(asdict(one)) for one in entries)
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in identity.items())
    return f'{{\n  "format": {FORMAT},\n{head}  "linears": [\n    {linears}\n  ]\n}}\n'


def save_packaged(path: Path, identity: Identity, entries: Iterable[Measured]) -> str | None:
    """The same for a file of the package, which holds for all GPUs of an architecture with as many SMs."""
    return save(path, architecture(identity), entries, {"gpu": identity["gpu"]})


def architecture(identity: Identity) -> Identity:
    return {name: identity[name] for name in ("compute_capability", "sm_count")}


def _write(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time, so that none loses what another one adds. Where the file system has no locks the last one
    wins."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # ends the lock


def warn(text: str) -> None:
    warnings.warn(f"llmkernels: {text}", stacklevel=2)
