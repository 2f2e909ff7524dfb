"""Where the time of a decode step, or of a prompt, goes: launch by launch, in its place, by the profiler.

A launch that starts while the one before still runs has no time of its own. What it costs is *end to end*: from the end
of all launches before it to its own end. These add up to the step. `runs` is how long the kernel itself ran.

    python -m benchmarks.launches qwen2.5-7b                 a step behind 512 tokens; a name of models.py
    python -m benchmarks.launches qwen2.5-7b --tokens 4096   behind 4096
    python -m benchmarks.launches qwen2.5-0.5b --prompt 128  a forward of 128 tokens
    python -m benchmarks.launches olmo-2-7b --variants LLMK_RING=144 LLMK_RING=176 --turns 2

`--variants` are for code under trial that reads an environment variable: each is measured in turn, in one process and
beside none of them, since GPUs of a kind differ by more than most changes are worth.
"""

import argparse
import itertools
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import llmkernels
from benchmarks.families import GREEDY
from benchmarks.models import MODELS, load_published
from llmkernels.profiling.kernels import short_name

NEW = 40  # tokens that a call of generate makes for a step's time
SKIPPED = 5  # steps at either end of these, which the profiler starts and stops in
PROMPTS = 5  # that the profiler records


@dataclass(frozen=True)
class Event:
    """A kernel or a copy on the GPU, in us."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Launch:
    """What one launch of every layer costs: medians over layers and runs, in us."""

    name: str
    count: float  # of a run
    end_to_end: float
    runs: float

    @property
    def total(self) -> float:
        return self.count * self.end_to_end


def summarize(runs: Sequence[Sequence[Event]], layers: int) -> list[Launch]:
    """The launches of runs of the same function, in their order. Kernels of one name that a layer has several of count
    as several launches, and one more of them than the layers have as that of the head."""
    costs, times, order = defaultdict(list), defaultdict(list), {}
    for run in runs:
        events = sorted(run, key=lambda event: event.end)
        counts, seen, last = Counter(event.name for event in events), Counter(), min(event.start for event in events)
        for event in events:
            per_layer, rest = divmod(counts[event.name], layers)
            place = seen[event.name] % per_layer if per_layer and rest <= 1 else 0
            if rest == 1 and per_layer and seen[event.name] == per_layer * layers:
                place = per_layer
            seen[event.name] += 1
            key = event.name, place
            order.setdefault(key, len(order))
            costs[key].append(max(0.0, event.end - last))
            times[key].append(event.end - event.start)
            last = max(last, event.end)
    return [
        Launch(
            name, len(costs[name, place]) / len(runs), *map(statistics.median, (costs[name, place], times[name, place]))
        )
        for name, place in order
    ]


def record(function: Callable[[], object]) -> list[Event]:
    """What a function does on the GPU, by when it began."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    kernels = (
        e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    )
    return sorted(
        (Event(e.time_range.start, e.time_range.end, short_name(e.name)) for e in kernels), key=lambda e: e.start
    )


class Subject:
    """A forward of a prompt, or the steps of a call of generate."""

    def __init__(self, model, tokens: int, is_prompt: bool):
        ids = torch.randint(1, 1000, (1, tokens), generator=torch.Generator().manual_seed(1)).to(model.device)
        self._layers, self._is_prompt = model.config.num_hidden_layers, is_prompt

        def generate(count: int) -> Callable[[], object]:
            return lambda: model.generate(ids, max_new_tokens=count, **GREEDY)

        self._long = (lambda: model(ids, logits_to_keep=1)) if is_prompt else generate(NEW + 1)
        self._short = (lambda: None) if is_prompt else generate(1)

    def wall(self) -> float:
        """us of a forward, or of a step."""
        steps, times = 1 if self._is_prompt else NEW, []
        for _ in range(3):
            self._long(), self._short()
        for _ in range(9 if self._is_prompt else 5):
            long, short = _seconds(self._long), _seconds(self._short)
            times.append((long - short * (not self._is_prompt)) * 1e6 / steps)
        return statistics.median(times)

    def launches(self) -> list[Launch]:
        if self._is_prompt:
            return summarize([record(self._long) for _ in range(PROMPTS)], self._layers)
        begin = len(record(self._short))
        events = record(self._long)[begin:]
        size = len(events) // NEW
        runs = [events[size * step : size * (step + 1)] for step in range(SKIPPED, NEW - SKIPPED)]
        return summarize(runs, self._layers)


def _seconds(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def _variable(assignment: str):
    """The environment with NAME=VALUE; as it is where there is none."""
    name, _, value = assignment.partition("=")
    if name:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def table_of(title: str, launches: Sequence[Launch]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("launch", "of a run", "end to end, us", "all of them, us", "runs, us"):
        table.add_column(column, justify="left" if column == "launch" else "right")
    for launch in launches:
        row = f"{launch.count:g}", f"{launch.end_to_end:.2f}", f"{launch.total:.1f}", f"{launch.runs:.2f}"
        table.add_row(launch.name, *row)
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=512, help="of context, of a step (default: 512)")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="a forward of so many tokens, and no step")
    parser.add_argument(
        "--variants", nargs="+", default=[], metavar="NAME=VALUE", help="environment variables, in turn"
    )
    parser.add_argument("--turns", type=int, default=1, help="how often each is measured (default: 1)")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    options, console = parse(), Console(width=110)
    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks.launches: this machine has no GPU that torch can use")
    model, _ = load_published(options.model, torch.device("cuda"))
    walls, launches = defaultdict(list), {}
    for _, variant in itertools.product(range(options.turns), ["", *options.variants]):
        with _variable(variant), llmkernels.patch(model):  # whose graphs are recorded with it
            subject = Subject(model, options.prompt or options.tokens, options.prompt is not None)
            walls[variant].append(subject.wall())
            launches[variant] = subject.launches()
    for variant, found in launches.items():
        what = f"a prompt of {options.prompt} tokens" if options.prompt else f"a step behind {options.tokens} tokens"
        times = ", ".join(f"{wall:.0f}" for wall in walls[variant])
        title = " ".join(filter(None, (f"{options.model}, {what}", variant)))
        console.print(table_of(f"{title}: {times} us", found))


if __name__ == "__main__":
    main()
