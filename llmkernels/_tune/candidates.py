"""What there is to choose from for a linear."""

import itertools
from collections.abc import Iterator
from typing import Any

from llmkernels._explain import Gpu, facts_of

from .table import RULE, Choice, Linear, Measured

# The last numbers of tokens that the same code of a kernel computes. Beyond them it is tiles of 128 tokens.
_LAST_OF_CODE = (1, 8, 16, 32, 48, 64)
_GEMM_ROWS = 128
_KB = 1024
_GEMM_TILES = (256, 224, 1192, 1144, 1128, 2192, 2144, 2128, 2080)  # kGemmTiles in csrc/kernels/gemm/plan.h
_ALL = 56  # chunks in the ring: as many as fit


def first_m(m: int, smaller: int) -> int:
    """The fewest tokens that a choice measured with m is for, if the next smaller number that is measured is `smaller`:
    those in between, as far as the same code computes them."""
    if m > _LAST_OF_CODE[-1]:
        begin = max((m - 1) // _GEMM_ROWS * _GEMM_ROWS, _LAST_OF_CODE[-1])
    else:
        begin = max((last for last in _LAST_OF_CODE if last < m), default=0)
    return max(begin, smaller) + 1


def candidates(gpu: Gpu, linear: Linear, m: int) -> list[Choice]:
    """Choices with different plans that the GPU can run, and first RULE, with the plan of which no other one is."""
    found = {_plan(gpu, linear, m, RULE): RULE}
    for choice in _grid(linear, m):
        plan = _plan(gpu, linear, m, choice)
        if plan is not None:
            found.setdefault(plan, choice)
    return list(found.values())


def route(gpu: Gpu, linear: Linear, m: int, choice: Choice) -> dict[str, Any]:
    """What linear_route says with this choice alone in the table."""
    from llmkernels._C import linear_route

    tuned = [Measured(linear, m, m, choice, 0.0, 0.0).numbers]
    fused = {"glu": linear.glu, "norm": linear.norm, "residual": linear.residual, "in_step": linear.in_step}
    return linear_route(m, linear.n, linear.k, **fused, tuned=tuned, **facts_of(gpu))


def _plan(gpu: Gpu, linear: Linear, m: int, choice: Choice) -> tuple | None:
    """None where the GPU cannot run it, or not all of its blocks at the same time."""
    found = route(gpu, linear, m, choice)
    if not found["tuned"] or found["plan"].get("blocks", 0) > gpu.sm_count:
        return None
    return found["variant"], *found["plan"].values()


def _grid(linear: Linear, m: int) -> Iterator[Choice]:
    if m == 1:
        yield Choice("gemv")
    if not linear.in_step:  # a decode step does without cuBLAS, of whose calls its graph would be captured
        yield Choice("library")
    if m > _LAST_OF_CODE[-1]:
        for columns in _GEMM_TILES:
            yield Choice("gemm", columns=columns)
    elif m <= 16:
        rings = [(200, _ALL), (225, _ALL), (160, _ALL)]
        for rows, chunks in itertools.product((288, 192, 144, 96, 64), (1, 2, 3, 4, 6)):
            for shared, prefetch in [*rings, (225, 2 * chunks), (225, 3 * chunks)]:
                yield Choice("mma", 1, chunks, shared * _KB, rows, prefetch)
    else:
        for rows, cluster, chunks, shared in itertools.product(
            (288, 192, 128, 96, 64), (1, 2, 4), (1, 2, 4), (200, 225)
        ):
            yield Choice("wgmma", cluster, chunks, shared * _KB, rows, _ALL)
