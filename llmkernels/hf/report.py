"""What `patch` found in a model, and what runs now."""

import re
from collections import Counter
from dataclasses import dataclass, field

# How a call of generate went.
STEP = "by the decode step"
STEP_IN_FP8 = "by the decode step in FP8"  # of a prompt
NOT_ASKED = "not asked for"
PREFILL = "by the prefill alone"  # which has the first token


def by_forward(reason: object) -> str:
    return f"by the model's forward: {reason}"


def by_transformers(reason: object) -> str:
    return f"by transformers: {reason}"


class Counts(Counter):
    """How often by what. Made of items, so that `dataclasses.asdict`, which makes each dict anew of its items, copies
    it: a Counter would count the items."""

    def __init__(self, items=()):
        super().__init__(dict(items))


@dataclass(frozen=True)
class Row:
    """One kind of replacement.

    Attributes:
        kind: the keyword of `patch`.
        patched: names of the modules that run on a kernel.
        left_alone: why each other module of this kind does not, by name.
        kernels: the functions that run, as `llmkernels::swiglu`, with the number of modules.
        backends: the device types that the patched modules are on, with their number.
        runs: what the patched modules ran so far, each time counted: a function, or "without a kernel". What a graph
            replays and what is compiled is not seen. `kernels` is the plan, `runs` what came of it.
        fallbacks: why patched modules ran without a kernel, each time counted, as far as only the call could tell.
    """

    kind: str
    patched: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    kernels: Counts = field(default_factory=Counts)
    backends: Counts = field(default_factory=Counts)
    runs: Counts = field(default_factory=Counts)
    fallbacks: Counts = field(default_factory=Counts)

    @property
    def found(self) -> int:
        return len(self.patched) + len(self.left_alone)

    @property
    def reasons(self) -> set[str]:
        """Why modules that were asked for do not run on a kernel."""
        return {*self.left_alone.values()} - {NOT_ASKED}


@dataclass(frozen=True)
class Fp8Prompts:
    """Prompts in FP8, where they were asked for.

    Attributes:
        reason: why they can not be now, or None.
        nbytes: the memory of the weights in FP8, from the first prompt on.
    """

    reason: str | None
    nbytes: int = 0

    def __str__(self) -> str:
        if self.reason is not None:
            return f"prompts not in FP8: {self.reason}"
        return "prompts in FP8" + (f", with weights of {self.nbytes / 2**20:.1f} MiB" if self.nbytes else "")


@dataclass(frozen=True)
class Decode:
    """How one model generates.

    Attributes:
        model: its class.
        reason: why the decode step can not run now, or None.
        calls: the calls of generate so far, by the way they took: `by the decode step` if one ran.
        steps: the decode steps that ran in all of them.
        forwards: the forwards behind a cache so far, and those with gradients, by the way they took, in the same words.
        prompts: the prompts so far, of calls by the decode step and of other forwards, in the same words.
        graphs: the CUDA graphs that are kept for calls to come. Caches of one shape share them.
        graph_bytes: the memory of these on the GPU, besides caches.
        products: the kernels that multiply one token in a step on a GPU, by their names in `llmkernels.explain`, with
            the number of products each; "as measured" where `llmkernels.autotune` has measured them.
        fp8: of prompts in FP8; None where they were not asked for.
    """

    model: str
    reason: str | None
    calls: Counts = field(default_factory=Counts)
    steps: int = 0
    forwards: Counts = field(default_factory=Counts)
    prompts: Counts = field(default_factory=Counts)
    graphs: int = 0
    graph_bytes: int = 0
    products: Counts = field(default_factory=Counts)
    fp8: Fp8Prompts | None = None

    def __str__(self) -> str:
        way = STEP if self.reason is None else by_forward(self.reason)
        names = {way: f"{way}, {self.steps} steps" if way == STEP else way for way in self.calls}
        counts = "; ".join(f"{count} {names[way]}" for way, count in self.calls.items())
        forwards = "; ".join(f"{count} {way}" for way, count in self.forwards.items())
        kept = f"{self.graphs} of {self.graph_bytes / 2**20:.0f} MiB" if self.graphs else ""
        products = ", ".join(f"{count} by {kernel}" for kernel, count in self.products.items())
        prompts = "; ".join(f"{count} {way}" for way, count in self.prompts.items() if way != STEP)
        found = ("calls of generate", counts), ("prompts", prompts), ("forwards", forwards), ("CUDA graphs", kept)
        found += (("products of a token", products),)
        said = [f"{what}: {text}" for what, text in found if text]
        said += [str(self.fp8)] if self.fp8 is not None else []
        return f"{self.model} decodes {way}" + (f" ({', '.join(said)})" if said else "")


@dataclass(frozen=True)
class Report:
    """Printable; `report["rms_norm"]` is the row of one kind, `report.decode` has an entry per model that generates.

    `untested` says of a transformers that is newer than what was tested that it is, else it is None.
    """

    title: str
    rows: dict[str, Row]
    decode: list[Decode] = field(default_factory=list)
    untested: str | None = None

    def __getitem__(self, kind: str) -> Row:
        return self.rows[kind]

    def left_alone(self) -> list[str]:
        """What was asked for and does not run on a kernel, or not in all modules, or is not there: kinds of rows, "the
        decode step" and "fp8"."""
        kinds = [row.kind for row in self.rows.values() if row.kind != "experts" and (not row.found or row.reasons)]
        kinds += ["the decode step"] * any(entry.reason not in (None, NOT_ASKED) for entry in self.decode)
        return kinds + ["fp8"] * any(entry.fp8 is not None and entry.fp8.reason is not None for entry in self.decode)

    def __str__(self) -> str:
        cells = [("kind", "patched", "kernel", "backend", "has run")]
        for row in self.rows.values():
            counts = f"{len(row.patched)} of {row.found}"
            cells.append((row.kind, counts, _counted(row.kernels), _counted(row.backends), _times(row.runs)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [self.title, *("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)]
        for row in self.rows.values():
            for reason in dict.fromkeys(row.left_alone.values()):
                names = [name for name, why in row.left_alone.items() if why == reason]
                lines.append(f"{row.kind} left alone, {len(names)}: {reason}: {abbreviate(names)}")
            lines += [f"{row.kind} without a kernel, {times} times: {why}" for why, times in row.fallbacks.items()]
        lines += map(str, self.decode)
        if any(entry.reason != NOT_ASKED for entry in self.decode):
            lines.append("forwards under torch.compile are not counted")
        if self.untested is not None:
            lines.append(f"{self.untested}; left alone, maybe for that: {', '.join(self.left_alone()) or 'nothing'}")
        return "\n".join(lines)

    __repr__ = __str__


def _counted(counter: Counts) -> str:
    if len(counter) < 2:
        return next(iter(counter), "-")
    return ", ".join(f"{name} ({count})" for name, count in counter.items())


def _times(counter: Counts) -> str:
    return ", ".join(f"{name} {count} times" for name, count in counter.items()) or "-"


def abbreviate(names: list[str]) -> str:
    """Module names with their runs of numbers folded.

    >>> abbreviate(["layers.0.mlp", "layers.1.mlp", "layers.3.mlp", "norm"])
    'layers.{0-1,3}.mlp, norm'
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = re.fullmatch(r"(?:(.*?\.|)(\d+)(?=\.|$))?(.*)", name).groups()
        groups.setdefault((before or "", after), []).extend([int(number)] if number else [])
    return ", ".join(f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in groups.items())


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return "{" + text + "}" if len(numbers) > 1 else text
