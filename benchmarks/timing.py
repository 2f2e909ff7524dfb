"""The timer.

`graph` is the main method: every provider's calls are captured into one CUDA graph that walks over rotated inputs, so
that what one replay touches is far larger than the L2 cache; the graphs of all providers are replayed in turn, so that
a drift of the chip hits all of them alike. `events` times single launches with the L2 flushed, `wall` what a Python
loop sees. All providers get the same plan, the same inputs and the same number of samples.
"""

import functools
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

TOUCHED_BYTES = 320e6  # distinct bytes of inputs in one replay; the L2 cache of an H200 has 60 MB
# Input sets at most; reached by single rows alone. Those stay in the L2 cache, as they are in a decode step, where the
# kernel before has just written the row; from memory (24576 sets) every provider takes 0.2 to 0.3 us longer.
MAX_SETS = 1024
REPLAY_US = 2000  # a replay this long makes the 3-5 us around a graph launch invisible
LONG_REPLAY_MS, MANY_CALLS = 10, 100  # one such replay a round is enough, if it is of so many calls
FLUSH_BYTES = 1 << 30  # its 0.3 ms on the device also give the CPU time to enqueue the call to be timed
PEAK_BYTES_PER_US, PEAK_FLOPS_PER_US = 4.5e6, 1e9  # of an H200, about; only set how long a plan is

Call = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How much time a run may take."""

    rounds: int = 8  # about so many; each times every provider once, see balanced()
    replays: int = 4  # timed graph replays in a round
    launches: int = 8  # timed single launches in a round
    wall_us: float = 10_000  # length of a wall-clock sample
    max_sets: int = MAX_SETS


FULL = Effort()
QUICK = Effort(rounds=3, replays=3, launches=4, wall_us=4_000, max_sets=512)


@dataclass(frozen=True)
class Plan:
    """`sets` distinct input sets, walked over `laps` times in one graph."""

    sets: int
    laps: int


def plan(input_bytes: int, ideal_bytes: int, effort: Effort, flops: int = 0) -> Plan:
    sets = min(math.ceil(TOUCHED_BYTES / input_bytes), effort.max_sets)
    lap_us = sets * max(ideal_bytes / PEAK_BYTES_PER_US, flops / PEAK_FLOPS_PER_US, 1.0)
    return Plan(sets, max(1, math.ceil(REPLAY_US / lap_us)))


@dataclass
class Subject:
    """A provider about to be timed: one call per input set; `restore` undoes what the calls wrote into their inputs."""

    calls: Sequence[Call]
    restore: Call | None = None
    graph: "torch.cuda.CUDAGraph | None" = None


def side_stream(device: torch.device):
    """Runs everything on one stream that can be captured; backward passes run on the stream of their forward."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


@contextmanager
def waiting_refused():
    """RuntimeError where PyTorch makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(calls: Sequence[Call], laps: int) -> "torch.cuda.CUDAGraph":
    """One graph of laps * len(calls) calls, captured on the current stream.

    The outputs of one lap stay alive until the next lap overwrites them, so no two calls of a lap share an output
    buffer, and inputs and outputs of a whole lap are distinct memory.
    """
    for call in calls[:3]:  # compilation, lazily loaded modules and workspaces belong before the capture
        call()
    torch.cuda.synchronize()
    # One that waits for the GPU cannot be captured. To find that out in a capture costs all memory that is freed later.
    with waiting_refused():
        calls[0]()
    graph = torch.cuda.CUDAGraph()
    alive = deque(maxlen=len(calls))
    # A collected graph or event of an earlier case would break the capture.
    with garbage_collection_paused(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(laps):
            for call in calls:
                alive.append(call())
    # The graph's private pool keeps the memory; nobody reads the tensors.
    return graph


def time_graphs(subjects: dict[str, Subject], calls_per_replay: int, effort: Effort) -> dict[str, list[float]]:
    """Microseconds per call, one sample per replay."""

    def replay(subject):
        if subject.restore:
            subject.restore()
            read_flush()
        return between_events(subject.graph.replay)

    samples = {name: [] for name in subjects}
    counts = dict.fromkeys(subjects, 1)
    for name in balanced(subjects, effort.rounds):
        # The first replay is no sample. It brings clocks and caches to the state that this provider leaves behind, and
        # it keeps the device busy while the next ones are enqueued: no launch latency is in what is timed.
        events = [replay(subjects[name]) for _ in range(1 + counts[name])][1:]
        torch.cuda.synchronize()
        times_ms = [start.elapsed_time(end) for start, end in events]
        samples[name] += [time_ms * 1e3 / calls_per_replay for time_ms in times_ms]
        long = max(times_ms) >= LONG_REPLAY_MS and calls_per_replay >= MANY_CALLS
        counts[name] = 1 if long else effort.replays
    return samples


def time_events(subjects: dict[str, Subject], effort: Effort) -> dict[str, list[float]]:
    """Microseconds of single launches, each after the L2 cache was overwritten."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    samples = {name: [] for name in subjects}
    for name in balanced(subjects, effort.rounds):
        subject = subjects[name]
        if subject.restore:
            subject.restore()
        events = []
        for launch in range(effort.launches + 1):
            flush.zero_()
            events.append(between_events(subject.calls[launch % len(subject.calls)]))
        torch.cuda.synchronize()
        samples[name] += [start.elapsed_time(end) * 1e3 for start, end in events[1:]]
    return samples


def time_wall(subjects: dict[str, Subject], device: torch.device, effort: Effort) -> dict[str, list[float]]:
    """Microseconds per call of a Python loop that waits for the device at its end."""

    def loop(calls, count):
        synchronize(device)
        start = time.perf_counter()
        for index in range(count):
            calls[index % len(calls)]()
        synchronize(device)
        return (time.perf_counter() - start) * 1e6 / count

    samples = {name: [] for name in subjects}
    counts = {}
    with garbage_collection_paused():
        for name in balanced(subjects, effort.rounds):
            subject = subjects[name]
            calls = subject.calls[:64]
            if subject.restore:
                subject.restore()
            if name not in counts:
                loop(calls, 1)
                counts[name] = max(1, int(effort.wall_us / loop(calls, 3)))
            samples[name].append(loop(calls, counts[name]))
    return samples


def time_calls(functions: dict[str, Call], device: torch.device, effort: Effort) -> dict[str, list[float]]:
    """Microseconds of CPU per call, without waiting for the device; batches too short to fill its launch queue."""
    samples = {name: [] for name in functions}
    with garbage_collection_paused():
        for name in balanced(functions, 4 * effort.rounds):
            function = functions[name]
            for _ in range(20):
                function()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(100):
                function()
            samples[name].append((time.perf_counter() - start) * 1e4)  # seconds per 100 calls to us per call
            synchronize(device)
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile, as every row has them."""
    values = torch.tensor(samples, dtype=torch.float64)
    low, median, high = torch.quantile(values, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {"time_us": round(median, 4), "time_us_p10": round(low, 4), "time_us_p90": round(high, 4)}


def balanced(names, rounds: int):
    """Every name once a round, in about `rounds` rounds: as many as it takes for in_turn() to come out even."""
    period = max(1, len(names) * (1 + len(names) % 2))
    return in_turn(names, max(1, round(rounds / period)) * period)


def in_turn(names, rounds: int):
    """Every name once a round; over as many rounds as there are names (twice as many if they are odd) each comes behind
    every other one equally often (Williams 1949).

    A chip at its power limit is slower behind a provider that has kept it hot, faster behind one that has let it cool.
    """
    names = list(names)
    count = len(names)
    zigzag = [-(i // 2) if i % 2 == 0 else (i + 1) // 2 for i in range(count)]  # 0, 1, -1, 2, -2, ...
    for start in range(rounds):
        order = [names[(start + step) % count] for step in zigzag]
        yield from reversed(order) if count % 2 and start // count % 2 else order


def between_events(call: Call) -> tuple["torch.cuda.Event", "torch.cuda.Event"]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return start, end


@functools.cache
def scratch() -> Tensor:
    return torch.ones(FLUSH_BYTES // 16, dtype=torch.float32, device="cuda")


def read_flush() -> None:
    """Replaces the contents of the L2 cache by lines that need no write-back."""
    scratch().sum()


@contextmanager
def garbage_collection_paused():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
