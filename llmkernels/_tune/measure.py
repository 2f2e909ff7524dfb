"""How long the choices for a linear take, and which one wins.

A time is that of a replayed CUDA graph, of the kind that decode steps replay: calls one behind the other, over weights
that together are larger than the L2 cache. First each choice is timed by itself, in short; then the best ones in turn
with the choice of the rules, in rounds. Clocks and temperature change over time, so times of one round are compared.

Beyond 16 tokens a norm is a launch of its own here, in the times of all choices alike; in a step the linear before does
most of it.
"""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmkernels._explain import DTYPES, OPS, Gpu
from llmkernels.hf.step import graphs

from . import table
from .candidates import candidates
from .table import MARGIN, RULE, Choice, Linear, Measured

ROUNDS = 9  # in which the best choices are compared
FINALISTS = 4  # that are, beside the choice of the rules
L2_TIMES = 4  # by so much the weights of a graph exceed the L2 cache
REPLAY_US = 1500  # about; a launch of a graph is nothing beside it
MOST_CALLS = 1024  # of a graph
BYTES_PER_US, CALL_US = 4e6, 2  # about what a call takes; only set how long a graph is
TOLERANCE = 0.02  # relative L2 error against the result of the rules' choice; another order of sums makes 0.004

_ops = torch.ops.llmkernels


@dataclass(frozen=True)
class Problem:
    """A linear to be measured with m tokens; the result is for `first_m` to m."""

    op: str  # of explain()
    n: int
    k: int
    m: int
    first_m: int
    dtype: torch.dtype
    bias: bool = False
    in_step: bool = True

    @property
    def linear(self) -> Linear:
        (product,) = OPS[self.op]
        return Linear(self.n, self.k, product.glu, product.norm, product.residual, self.in_step)

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.op} ({self.m}, {self.k}) x ({self.n}, {self.k}) {DTYPES[self.dtype]}"


class Weights:
    """Random numbers that the weights of all problems are views of."""

    def __init__(self, problems: Sequence[Problem], index: int):
        self.index = index
        self.device = torch.device("cuda", index)
        self.least_bytes = L2_TIMES * torch.cuda.get_device_properties(index).L2_cache_size
        largest = max(problem.weight_bytes for problem in problems)
        self._memory = torch.empty(max(self.least_bytes, largest) // 2, dtype=torch.bfloat16, device=self.device)
        self._memory.normal_(0, 0.02)

    def of(self, problem: Problem) -> list[Tensor]:
        """One behind the other."""
        if self._memory.dtype != problem.dtype:
            self._memory = self._memory.to(problem.dtype)
        size = problem.n * problem.k
        count = max(1, self._memory.numel() // size)
        rows = self._memory[: count * size].view(count, problem.n, problem.k)
        return list(rows[: max(1, min(math.ceil(self.least_bytes / problem.weight_bytes), MOST_CALLS))])


class Calls:
    """A problem as calls of its op."""

    def __init__(self, problem: Problem, weights: Weights):
        self.problem, self.index, self._weights = problem, weights.index, weights.of(problem)
        call_us = problem.weight_bytes / BYTES_PER_US + CALL_US
        laps = max(1, math.ceil(REPLAY_US / (call_us * len(self._weights))))
        self.count = min(laps * len(self._weights), max(MOST_CALLS, len(self._weights)))
        options = {"dtype": problem.dtype, "device": weights.device}
        self._x = torch.randn(problem.m, problem.k, **options)
        self._norm = torch.rand(problem.k, **options) + 0.5
        self._bias = torch.randn(problem.n, **options) if problem.bias else None
        self._residual = torch.zeros(problem.m, problem.n, **options)

    def once(self, weight: Tensor | None = None) -> Tensor:
        """The result of one call. Of a residual it is the sum of all calls."""
        op, x, in_step = self.problem.op, self._x, self.problem.in_step
        weight = self._weights[0] if weight is None else weight
        norm = 1e-6, 0.0, True, in_step, None, None
        if op == "linear":
            return _ops.linear(x, weight, self._bias, in_step)
        if op == "rms_norm_linear":
            return _ops.rms_norm_linear(x, self._norm, weight, self._bias, *norm)
        if op == "glu_linear":
            return _ops.glu_linear(x, weight, "silu", in_step)
        if op == "rms_norm_glu_linear":
            return _ops.rms_norm_glu_linear(x, self._norm, weight, "silu", *norm)
        _ops.linear_add_(self._residual, x, weight, self._bias, 1.0, in_step)
        return self._residual

    def result(self) -> Tensor:
        """Of the first weight; what a residual was is not in it."""
        self._residual.zero_()
        return self.once().double()

    def record(self) -> graphs.Graph:
        def run() -> None:
            alive: deque[Tensor] = deque(maxlen=len(self._weights))  # no two calls of a lap share memory
            for call in range(self.count):
                alive.append(self.once(self._weights[call % len(self._weights)]))

        graph, _ = graphs.record(run, self._x.device)
        return graph

    def time_us(self, graph: graphs.Graph) -> float:
        """Of a call; the replay before it brings the clocks to where it leaves them."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._residual.zero_()
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.count


def measure(problem: Problem, weights: Weights, gpu: Gpu, note: Callable[[], None] = lambda: None) -> Measured:
    """The winner of all candidates. `note` is called behind each.

    Raises RuntimeError where the choice of the rules fails. Another one that does is left out, with a warning.
    """
    calls = Calls(problem, weights)
    choices = candidates(gpu, problem.linear, problem.m)
    expected, times = None, {}
    for choice in choices:  # RULE is the first
        try:
            with using(problem, choice, weights.index):
                found = calls.result()
                expected = found if expected is None else expected
                if _is_wrong(found, expected):
                    raise ArithmeticError("its result is wrong")
                times[choice] = calls.time_us(calls.record())
        except (ArithmeticError, RuntimeError, graphs.NoGraph) as reason:
            if choice == RULE:
                raise RuntimeError(f"autotune: {problem} fails: {reason}") from reason
            warnings.warn(f"llmkernels: {problem} is measured without {choice}: {reason}", stacklevel=2)
        note()
    return winner(problem, _compare(calls, finalists(times)))


def using(problem: Problem, choice: Choice, index: int):
    """A block in which this choice, and no other one, is in the table."""
    return table.only(index, [Measured(problem.linear, problem.m, problem.m, choice, 0.0, 0.0)])


def _is_wrong(found: Tensor, expected: Tensor) -> bool:
    return not (found - expected).norm() <= TOLERANCE * expected.norm()


def _compare(calls: Calls, choices: Sequence[Choice]) -> dict[Choice, list[float]]:
    recorded, samples = {}, {choice: [] for choice in choices}
    for choice in choices:
        with using(calls.problem, choice, calls.index):
            recorded[choice] = calls.record()
    for number in range(ROUNDS):
        start = number % len(choices)
        order = [*choices[start:], *choices[:start]]
        for choice in order if number % 2 else reversed(order):
            samples[choice].append(calls.time_us(recorded[choice]))
    return samples


# ---- which one wins


def finalists(times: dict[Choice, float]) -> list[Choice]:
    """The choice of the rules, and the fastest others."""
    others = sorted(times.keys() - {RULE}, key=times.__getitem__)
    return [RULE, *others[:FINALISTS]]


def is_faster(times: Sequence[float], rule_times: Sequence[float]) -> bool:
    """Than the choice of the rules, in the same rounds, by more than the noise: by more than MARGIN in the median, and
    faster in three rounds of four."""
    ratios = [time / rule for time, rule in zip(times, rule_times, strict=True)]
    return statistics.median(ratios) < 1 - MARGIN and sum(ratio < 1 for ratio in ratios) >= 0.75 * len(ratios)


def winner(problem: Problem, samples: dict[Choice, list[float]]) -> Measured:
    medians = {choice: statistics.median(times) for choice, times in samples.items()}
    faster = [choice for choice, times in samples.items() if choice != RULE and is_faster(times, samples[RULE])]
    best = min(faster, key=medians.__getitem__, default=RULE)
    return Measured(problem.linear, problem.first_m, problem.m, best, round(medians[best], 3), round(medians[RULE], 3))
