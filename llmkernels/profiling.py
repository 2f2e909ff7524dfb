"""Where the time of a model goes: `profile(model, input_ids)`."""

import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from llmkernels.hf import patch, unpatch

FIRST, NEXT = "first token", "each next token"
REPEATS = 5  # of what is timed without the profiler

# Kinds by the names of kernels on a GPU and of ops on a CPU, the first that matches.
_KINDS = (
    ("copies", r"memcpy|memset"),
    ("attention", r"attention|flash|fmha|sdpa"),
    ("linear", r"gemm|gemv|nvjet|xmma|cutlass|splitk|linear|::(add)?b?mm\b|matmul|mkldnn"),
    ("norm", r"norm"),
    ("rope", r"rope|rotary"),
    ("activation", r"glu|silu|gelu|relu|bias_act|softcap"),
    ("sampling", r"sample|arg_?max|multinomial|topk|sort"),
)
OTHERS = "other"  # elementwise kernels, embeddings, masks
_OWNERS = (
    ("llmkernels", r"llmk"),
    ("cuDNN", r"cudnn"),
    ("cuBLAS", r"nvjet|gemm|gemv|xmma|splitk|cublas"),
    ("Triton", r"triton"),
    ("PyTorch", r""),
)


@dataclass
class Line:
    """The kernels of one kind. Times are of one call, in milliseconds; `limit` is None where it is not known.

    Attributes:
        time: on the device; on a CPU in the ops themselves.
        launches: how many kernels, or ops.
        owners: their time by whose they are.
    """

    time: float = 0.0
    launches: float = 0.0
    owners: Counter = field(default_factory=Counter)


@dataclass(frozen=True)
class Phase:
    """The first token, or each next one.

    Attributes:
        name: which of them.
        wall: milliseconds of a call, by what ran: "unpatched", "patched". That of a next token is a difference of two
            calls, which noise may turn negative where a step takes less than it.
        lines: of each of these, the lines by kind.
        limits: milliseconds that what a kind reads, writes and multiplies takes at the measured rates of this device.
    """

    name: str
    wall: dict[str, float]
    lines: dict[str, dict[str, Line]]
    limits: dict[str, float]

    def kinds(self) -> list[str]:
        """The longest first."""
        times = Counter()
        for lines in self.lines.values():
            for kind, line in lines.items():
                times[kind] = max(times[kind], line.time)
        return [kind for kind, _ in times.most_common()]


@dataclass(frozen=True)
class Profile:
    """What `profile` found. As text it is a table of each phase.

    Attributes:
        model: its class.
        device: its name.
        bandwidth: bytes per second of a copy, read and written.
        rate: operations per second of a product of large matrices in the model's dtype.
        phases: of the first token and of each next one.
        unpatchable: why there is nothing to patch, or None.
    """

    model: str
    device: str
    bandwidth: float
    rate: float
    phases: tuple[Phase, ...]
    unpatchable: str | None = None

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, no_color=True, highlight=False)
        with console.capture() as capture:
            self.print(console)
        return capture.get()

    def print(self, console: Any = None) -> None:
        """Print the tables, with rich."""
        from rich.console import Console
        from rich.table import Table

        console = console or Console()
        console.print(
            f"{self.model} on {self.device}: a copy moves {self.bandwidth / 1e12:.3g} TB/s, products of large matrices "
            f"take {self.rate / 1e12:.3g} T operations per second"
        )
        if self.unpatchable:
            console.print(f"not patched: {self.unpatchable}")
        for phase in self.phases:
            table = Table(title=f"{phase.name}, ms", title_justify="left")
            ways = list(phase.lines)
            for column in ("kind", *ways, "limit", "left to win", *(f"kernels, {way}" for way in ways)):
                table.add_column(column, justify="left" if column[:4] in ("kind", "kern") else "right")
            for kind in phase.kinds():
                lines, limit = [phase.lines[way].get(kind, Line()) for way in ways], phase.limits.get(kind)
                left = None if limit is None else max(0.0, lines[-1].time - limit)
                table.add_row(
                    kind, *(_number(line.time) for line in lines), _number(limit), _number(left), *map(_kernels, lines)
                )
            table.add_section()
            totals = [sum(line.time for line in phase.lines[way].values()) for way in ways]
            table.add_row("on the device", *map(_number, totals), _number(sum(phase.limits.values())))
            table.add_row("wall time", *(_number(phase.wall[way]) for way in ways))
            console.print(table)

    def plot(self, path: str) -> None:
        """Write a picture of the same: a bar for each way, with a part for each kind. Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.2 + 1.3 * len(self.phases) * 1.6), layout="constrained")
        for index, phase in enumerate(self.phases):
            axes = figure.add_subplot(len(self.phases), 1, index + 1)
            names = [*reversed(phase.lines), "limit"]
            starts = dict.fromkeys(names, 0.0)
            for kind in phase.kinds():
                parts = [phase.lines[way].get(kind, Line()).time for way in names[:-1]] + [phase.limits.get(kind, 0.0)]
                axes.barh(names, parts, left=[starts[name] for name in names], label=kind)
                starts = {name: starts[name] + part for name, part in zip(names, parts, strict=True)}
            axes.set_title(f"{phase.name}, ms on the device", loc="left", fontsize=10)
            axes.legend(fontsize=8, ncols=4)
        figure.suptitle(f"{self.model} on {self.device}")
        figure.savefig(path)


def profile(model: nn.Module, input_ids: Tensor, *, new_tokens: int = 16) -> Profile:
    """Where the time of generating with a Hugging Face model goes, by kind of kernel.

    The model is measured as it is, and then patched, unless it is patched already; it is left as it was. The limit of
    linear layers and attention is what their operands take at the rate of this device, of the bytes that they move or
    of the operations, whichever takes longer; all else could be part of these, so its limit is 0.

    Args:
        model: a causal language model of transformers.
        input_ids: int64 (B, T), the prompt.
        new_tokens: over how many steps the time of one is measured.

    Returns: a :class:`Profile`, which prints as tables.

    Raises: TypeError when model is no module or input_ids no tensor, ValueError for a prompt of another shape.

    >>> print(llmkernels.profile(model, torch.randint(0, 1000, (1, 512), device=model.device)))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"profile: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"profile: input_ids must be a tensor, got {type(input_ids).__name__}")
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"profile: input_ids must be (batch, tokens), not empty, got {tuple(input_ids.shape)}")
    if new_tokens < 1:
        raise ValueError(f"profile: new_tokens must be at least 1, got {new_tokens}")
    device = input_ids.device
    bandwidth, rate = _measure_rates(device, model.dtype)
    unpatchable, found = None, {}
    with torch.no_grad():
        limits = _limits(model, input_ids, bandwidth, rate)
        if hasattr(type(model), "original"):
            found["patched"] = _measure(model, input_ids, new_tokens)
        else:
            found["unpatched"] = _measure(model, input_ids, new_tokens)
            try:
                patch(model)
            except ValueError as reason:
                unpatchable = str(reason)
            else:
                try:
                    found["patched"] = _measure(model, input_ids, new_tokens)
                finally:
                    unpatch(model)
    phases = tuple(
        Phase(
            name,
            {way: measured[name][0] for way, measured in found.items()},
            {way: measured[name][1] for way, measured in found.items()},
            limits[name],
        )
        for name in (FIRST, NEXT)
    )
    names = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return Profile(type(model).__name__, names, bandwidth, rate, phases, unpatchable)


# --- measuring


def _measure(model: nn.Module, ids: Tensor, new_tokens: int) -> dict[str, tuple[float, dict[str, Line]]]:
    """Wall time and lines of the first token, and of each next one."""

    def generate(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)

    calls = [partial(generate, count) for count in (1, 1 + new_tokens)]
    for call in (*calls, *calls):  # records graphs
        call()
    times = [[_timed(ids.device, call) for call in calls] for _ in range(REPEATS)]  # in turn: a machine's speed varies
    lines = [_profiled(ids.device, call) for call in calls]
    first = statistics.median(one for one, _ in times)
    each_next = statistics.median(many - one for one, many in times) / new_tokens
    steps: dict[str, Line] = defaultdict(Line)
    for sign, found in ((-1, lines[0]), (1, lines[1])):
        for kind, line in found.items():
            steps[kind].time += sign * line.time / new_tokens
            steps[kind].launches += sign * line.launches / new_tokens
            for owner, part in line.owners.items():
                steps[kind].owners[owner] += sign * part / new_tokens
    steps = {kind: line for kind, line in steps.items() if line.time > 0 and line.launches > 0}
    return {FIRST: (first, lines[0]), NEXT: (each_next, steps)}


def _timed(device: torch.device, call: Callable[[], object]) -> float:
    """Milliseconds of wall time."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _profiled(device: torch.device, call: Callable[[], object]) -> dict[str, Line]:
    from torch.profiler import ProfilerActivity

    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as recorded:
        call()
        _synchronize(device)
    lines: dict[str, Line] = defaultdict(Line)
    for event in recorded.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) != on_gpu:
            continue
        line, spent = lines[kind_of(event.name)], (event.device_time if on_gpu else event.self_cpu_time_total) / 1e3
        line.time += spent
        line.launches += 1
        line.owners[owner_of(event.name)] += spent
    return dict(lines)


def kind_of(name: str) -> str:
    """The kind of a kernel, or of an op, by its name."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), OTHERS)


def owner_of(name: str) -> str:
    """Whose kernel it is."""
    return next(owner for owner, pattern in _OWNERS if re.search(pattern, name, re.IGNORECASE))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- limits


def _measure_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a copy, and operations per second of a product."""
    size, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, a = torch.empty_like(source), torch.randn(side, side, device=device).to(dtype)

    def rate_of(amount: float, call: Callable[[], object]) -> float:
        call()
        return amount / min(_timed(device, lambda: [call() for _ in range(4)]) / 4e3 for _ in range(3))

    return rate_of(2 * size, lambda: target.copy_(source)), rate_of(2 * side**3, lambda: a @ a)


class _Counts(TorchDispatchMode):
    """Seconds that products and attention take at the rates of the device, by kind."""

    def __init__(self, bandwidth: float, rate: float):
        super().__init__()
        self.bandwidth, self.rate = bandwidth, rate
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = getattr(function, "_overloadpacket", function)
        attends = "scaled_dot_product" in str(packet)
        if attends or packet in flop_registry:
            operations = _of_attention(*args, **kwargs) if attends else flop_registry[packet](*args, out_val=result)
            moved = sum(x.numel() * x.element_size() for x in _tensors((args, result)))
            self.seconds["attention" if attends else "linear"] += max(moved / self.bandwidth, operations / self.rate)
        return result


def _of_attention(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> float:
    """The operations of q k^T and of the product with v, (B, H, T, D) each; half of them where it is causal."""
    causal = kwargs.get("is_causal", any(value is True for value in args))
    return 4 * q.numel() * k.shape[2] * (0.5 if causal else 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _limits(model: nn.Module, ids: Tensor, bandwidth: float, rate: float) -> dict[str, dict[str, float]]:
    """Milliseconds by phase and kind. A patched model runs its modules here, whose products are the same."""

    @contextmanager
    def counted(name: str):
        with _Counts(bandwidth, rate) as counts:
            yield
        limits[name] = {kind: seconds * 1e3 for kind, seconds in counts.seconds.items()}

    limits: dict[str, dict[str, float]] = {}
    with counted(FIRST):
        output = model(ids, use_cache=True, logits_to_keep=1)
    cache = next(output[name] for name in ("past_key_values", "cache") if name in output)
    name = "past_key_values" if "past_key_values" in output else "cache"
    with counted(NEXT):
        model(ids[:, -1:], use_cache=True, **{name: cache})
    return limits


# --- words


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _kernels(line: Line) -> str:
    if not line.launches:
        return ""
    owners = ", ".join(owner for owner, part in line.owners.most_common() if part > 0.05 * line.time)
    return f"{line.launches:.3g} {owners}"
