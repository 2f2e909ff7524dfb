"""Measured choices, and those of each GPU in this process."""

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from llmkernels import _library

VARIANTS = {"rule": -1, "library": 0, "gemv": 1, "mma": 2, "wgmma": 3, "gemm": 5}  # tuned.h
MARGIN = 0.02  # by how much a choice must be faster than that of the rules, to be taken in place of it


@dataclass(frozen=True, order=True)
class Linear:
    """What a choice is for, beside the number of tokens: a weight (n, k), and what is fused into its product."""

    n: int
    k: int
    glu: bool = False
    norm: bool = False
    residual: bool = False
    in_step: bool = False


@dataclass(frozen=True)
class Choice:
    """A kernel, and what its plan is made with: see LinearTuning in csrc/kernels/linear/plan.h; of gemm the columns of
    a tile. "rule" is whatever the rules of route.h choose."""

    variant: str
    cluster: int = 0
    max_chunks: int = 0
    max_shared_bytes: int = 0
    max_tile_rows: int = 0
    prefetch_chunks: int = 0
    columns: int = 0


RULE = Choice("rule")


@dataclass(frozen=True)
class Measured:
    """The fastest choice for `first_m` to `last_m` tokens, as measured with the most of them, and the time that the
    choice of the rules takes."""

    linear: Linear
    first_m: int
    last_m: int
    choice: Choice
    time_us: float
    rule_us: float

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those of a TunedLinear in csrc/kernels/linear/tuned.h."""
        of, to = self.linear, self.choice
        flags = map(int, (of.glu, of.norm, of.residual, of.in_step))
        plan = to.cluster, to.max_chunks, to.max_shared_bytes, to.max_tile_rows, to.prefetch_chunks, to.columns
        return self.first_m, self.last_m, of.n, of.k, *flags, VARIANTS[to.variant], *plan

    @property
    def text(self) -> str:
        if self.choice == RULE:
            return f"measured: {self.time_us:.1f} us, and nothing is more than {MARGIN:.0%} faster"
        return f"{self.time_us:.1f} us, and {self.rule_us:.1f} us by the rule"


def merge(old: Iterable[Measured], new: Iterable[Measured]) -> tuple[Measured, ...]:
    """All of `new`; and of `old` what is for other tokens, or other linears."""
    found: dict[Linear, list[Measured]] = {}
    for one in (*old, *new):
        rest = found.setdefault(one.linear, [])
        rest[:] = [part for other in rest for part in _without(other, one.first_m, one.last_m)] + [one]
    entries = (one for linear in sorted(found) for one in found[linear])
    return tuple(sorted(entries, key=lambda one: (one.linear, one.first_m)))


def _without(one: Measured, first: int, last: int) -> list[Measured]:
    """What is left of a choice whose tokens `first` to `last` are another's."""
    parts = (one.first_m, min(one.last_m, first - 1)), (max(one.first_m, last + 1), one.last_m)
    return [replace(one, first_m=low, last_m=high) for low, high in parts if low <= high]


_LOCK = threading.RLock()  # held by a thread that changes a table
_TABLES: dict[int, tuple[Measured, ...]] = {}  # by the index of the GPU


def table_of(index: int) -> tuple[Measured, ...]:
    return _TABLES.get(index, ())


def set_table(index: int, entries: Sequence[Measured]) -> None:
    """The choices of a GPU of this machine from now on, in place of those that it had.

    Raises ValueError, and changes nothing, if it cannot run one of them. Recorded CUDA graphs keep their kernels.
    """
    with _LOCK:
        _set(index, entries)
        _TABLES[index] = tuple(entries)


@contextmanager
def only(index: int, entries: Sequence[Measured]) -> Iterator[None]:
    """A block in which these are the choices of a GPU, in all threads."""
    with _LOCK:
        _set(index, entries)
        try:
            yield
        finally:
            _set(index, table_of(index))


def _set(index: int, entries: Sequence[Measured]) -> None:
    numbers = [number for one in entries for number in one.numbers]
    refused, reason = ctypes.c_int64(), ctypes.c_char_p()
    function = ctypes.CDLL(str(_library.PATH)).llmk_set_tuned_linears
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    array = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
    with torch.cuda.device(index):
        status = function(array, len(entries), ctypes.byref(refused), ctypes.byref(reason))
    if reason.value is not None:
        raise ValueError(f"a choice of the table cannot run: {reason.value.decode()}: {entries[refused.value]}")
    if status != 0:
        raise RuntimeError(f"the library has no kernels for {torch.cuda.get_device_name(index)} (CUDA error {status})")
