"""Wall times of a model's prefill and step, and what their kernels take in PyTorch's profiler."""

import re
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity

from .kernels import COPIES, OTHER, kind_of, kind_of_module

PREFILL, STEP = "prefill", "step"
REPEATS = 5  # of what is timed without the profiler
_SCOPE = "llmkernels.profile: "  # begins the name of what the profiler records around a module


class Run(NamedTuple):
    """A kernel, copy or fill on the GPU; on a CPU an op, whose time is without the ops that it calls."""

    kind: str
    name: str
    start_us: float
    time_us: float


@dataclass(frozen=True)
class Trace:
    """A prefill, or a step.

    Attributes:
        wall_ms: without the profiler.
        runs: what ran, in the profiler, in `count` of them.
        busy_ms: in which at least one of these runs. Less than the sum of their times where they overlap.
    """

    wall_ms: float
    runs: list[Run]
    busy_ms: float
    count: int = 1


def phases(
    model: nn.Module, input_ids: Tensor, new_tokens: int, prefill: dict[str, Any], by_module: bool
) -> dict[str, Trace]:
    """Of a forward over the prompt with the arguments `prefill`, and of a step of model.generate.

    The runs of the steps are the last ones of a long call, as many as it has more than a short one: the difference of
    their times would have the noise of two prompts in it.

    Args:
        by_module: tell elementwise kernels apart by the modules that launch them. Not of patched models, which look
            at hooks.
    """
    device = input_ids.device
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls = (
        partial(model, input_ids, **prefill),
        partial(model.generate, input_ids, max_new_tokens=1, **options),
        partial(model.generate, input_ids, max_new_tokens=1 + new_tokens, **options),
    )
    for call in calls * 3:  # CUDA graphs are recorded meanwhile
        call()
    times = [[timed_ms(device, call) for call in calls] for _ in range(REPEATS)]  # in turn: a machine's speed varies
    first, short, long = (_profiled(device, call, by_module) for call in calls)
    steps = long[len(short) :]
    wall_ms = statistics.median(many - one for _, one, many in times) / new_tokens
    return {
        PREFILL: Trace(statistics.median(time for time, _, _ in times), first, _busy_ms(first, device)),
        STEP: Trace(wall_ms, steps, _busy_ms(steps, device) / new_tokens, new_tokens),
    }


def timed_ms(device: torch.device, call: Callable[[], object]) -> float:
    """Wall time."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _profiled(device: torch.device, call: Callable[[], object], by_module: bool) -> list[Run]:
    """In the order of their starts."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    if on_gpu and by_module:
        activities.append(ProfilerActivity.CPU)
    with (
        _scopes() if by_module else nullcontext(),
        torch.profiler.profile(activities=activities, acc_events=True) as recorded,
    ):
        call()
        _synchronize(device)
    runs = (_kernels if on_gpu else _ops)(recorded.events())
    return sorted(runs, key=lambda run: run.start_us)


def _ops(events: Iterable[Any]) -> Iterator[Run]:
    for event in events:
        if event.device_type == DeviceType.CPU and not event.is_user_annotation:
            kind = _kind(event.name, _scope_of(event))
            yield Run(kind, event.name, event.time_range.start, event.self_cpu_time_total)


def _kernels(events: Iterable[Any]) -> Iterator[Run]:
    scopes = defaultdict(deque)  # by name and duration, which is how an op knows what it launched
    for event in events:
        for kernel in event.kernels if event.device_type == DeviceType.CPU else ():
            scopes[kernel.name, kernel.duration].append(_scope_of(event))
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            time_us = event.time_range.end - event.time_range.start
            found = scopes.get((event.name, time_us))
            kind = _kind(event.name, found.popleft() if found else None)
            yield Run(kind, event.name, event.time_range.start, time_us)


def _kind(name: str, scope: str | None) -> str:
    kind = kind_of(name)
    return scope if scope and kind in (OTHER, COPIES) else kind


def _busy_ms(runs: list[Run], device: torch.device) -> float:
    """How long at least one of them runs. Those of a CPU have no overlap."""
    if device.type != "cuda":
        return sum(run.time_us for run in runs) / 1e3
    total_us, until = 0.0, float("-inf")
    for run in runs:  # by their starts
        end = run.start_us + run.time_us
        total_us += max(0.0, end - max(run.start_us, until))
        until = max(until, end)
    return total_us / 1e3


@contextmanager
def _scopes() -> Iterator[None]:
    """Records a kind in the profiler around each forward of a module that has one."""
    running = []

    def begin(module: nn.Module, args: Any) -> None:
        if kind := kind_of_module(type(module).__name__):
            running.append(torch.profiler.record_function(_SCOPE + kind))
            running[-1].__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if kind_of_module(type(module).__name__):
            running.pop().__exit__(None, None, None)

    hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _scope_of(event: Any) -> str | None:
    while event is not None:
        if found := re.match(f"{re.escape(_SCOPE)}(.+)", event.name):
            return found[1]
        event = event.cpu_parent
    return None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
