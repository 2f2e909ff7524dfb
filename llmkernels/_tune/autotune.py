"""`llmkernels.autotune`: measures the kernels of a model's decode step on the GPU that it is on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from llmkernels import _library
from llmkernels._explain import DTYPES, present_gpu
from llmkernels._progress import progress as show
from llmkernels.hf.errors import NoStep, Refusal
from llmkernels.hf.step import graphs
from llmkernels.hf.step.decode import release
from llmkernels.hf.step.describe import describe
from llmkernels.hf.step.routes import products_of

from . import files, table
from .candidates import candidates, first_m
from .measure import Problem, Weights, measure
from .table import RULE, Measured

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
MAX_BATCH = 64
_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Tuning:
    """What `autotune` has measured. Prints as a table.

    Attributes:
        gpu: its name.
        linears: one for each linear and batch size.
        path: the file that has it now; None where none was written.
    """

    gpu: str
    linears: tuple[Measured, ...]
    path: Path | None

    @property
    def faster(self) -> tuple[Measured, ...]:
        """Those whose choice is another one than that of the rules."""
        return tuple(one for one in self.linears if one.choice != RULE)

    def __str__(self) -> str:
        lines = [f"{'weight':>16}  {'tokens':>8}  {'fused':<22}  {'kernel':<8}  {'us':>8}  {'us by the rule':>14}"]
        for one in self.linears:
            of = one.linear
            tokens = f"{one.first_m}-{one.last_m}" if one.first_m < one.last_m else f"{one.last_m}"
            fused = "+".join(name for name in ("norm", "glu", "residual") if getattr(of, name)) or "-"
            kernel = "as ruled" if one.choice == RULE else one.choice.variant
            lines.append(
                f"{f'{of.n} x {of.k}':>16}  {tokens:>8}  {fused:<22}  {kernel:<8}  {one.time_us:>8.2f}  "
                f"{one.rule_us:>14.2f}"
            )
        where = f", in {self.path}" if self.path else ""
        lines.append(f"{len(self.faster)} of {len(self.linears)} are faster than by the rules on {self.gpu}{where}")
        return "\n".join(lines)


def autotune(
    model: nn.Module, batch_sizes: Sequence[int] = BATCH_SIZES, *, save: bool = True, progress: bool = True
) -> Tuning:
    """Measure which kernel and plan is the fastest for each linear of a model's decode step, on the GPU that it is on.

    Without this the choice is made by rules, which were measured on an H200. The linears are those that ``generate``
    runs for so many sequences, by their shapes alone: q|k|v, the output projection, gate|up, down and the head, with
    what is fused into them. Each choice is timed over random weights, larger together than the L2 cache, by CUDA graphs
    as ``generate`` has them. It takes the place of the rules' if it is more than 2 % faster in the median of rounds in
    which both were timed in turn. It holds from the next smaller batch size to its own, as far as the same code
    computes them: 1 token, 2 to 8, 9 to 16, 17 to 32, 33 to 48, 49 to 64.

    What was measured is in use at once, in this process, for all models; the CUDA graphs that the model keeps are
    released, so that it records new ones. Graphs that other models, or calls in other threads, have recorded keep their
    kernels. Results change as far as another order of sums makes them: in their rounding.

    It is written to a file in the folder ``$LLMKERNELS_CACHE``, or ``llmkernels`` in ``$XDG_CACHE_HOME`` or
    ``~/.cache``, beside what is there of other models. :func:`patch` of a model on such a GPU reads it, and so does the
    first decode step of a model that was moved there. It holds for the GPU, the driver and the build of the library
    that it was measured with; any other file is ignored, with a warning.

    Args:
        model: a patched causal language model on a GPU, in float16 or bfloat16.
        batch_sizes: the numbers of sequences, each from 1 to 64.
        save: whether to write the file.
        progress: whether to show how far it is.

    Returns: a :class:`Tuning`, which prints as a table.

    Nothing else should run on the GPU meanwhile. It takes memory for weights, four times the size of the L2 cache or
    as much as the largest of the model has.
    Raises: TypeError when model is no module; ValueError for a batch size out of range and for another dtype;
        RuntimeError without a GPU or without kernels for it, and for a model without a decode step. A file that cannot
        be written is a warning.

    >>> llmkernels.patch(model)
    >>> print(llmkernels.autotune(model))
    """
    index = _gpu_of(model)
    measured = measure_all(problems_of(model, batch_sizes), index, progress)
    files.load(index)  # what there is of other models
    table.set_table(index, table.merge(table.table_of(index), measured))
    release(model)
    path = files.keep(files.identity_of(index), measured) if save else None
    return Tuning(torch.cuda.get_device_name(index), tuple(measured), path)


def _gpu_of(model: nn.Module) -> int:
    if not isinstance(model, nn.Module):
        raise TypeError(f"autotune: model must be a torch.nn.Module, got {type(model).__name__}")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        raise RuntimeError(f"autotune: model must be on a GPU, whose kernels are measured, got one on {device}")
    if _library.build_info().get("cuda") is None:
        raise RuntimeError("autotune: this build has no CUDA kernels: see `python -m llmkernels info`")
    return torch.cuda.current_device() if device.index is None else device.index


def problems_of(model: nn.Module, batch_sizes: Iterable[int]) -> list[Problem]:
    """What there is to measure. Raises as `autotune`."""
    sizes = sorted(set(batch_sizes))
    if not sizes or any(not isinstance(size, int) or not 1 <= size <= MAX_BATCH for size in sizes):
        raise ValueError(f"autotune: batch_sizes must be numbers from 1 to {MAX_BATCH}, got {batch_sizes}")
    try:
        parts = describe(model)
    except (NoStep, Refusal) as reason:
        raise RuntimeError(f"autotune: model must have a decode step, got one without: {reason}") from None
    dtype = parts.weight.dtype
    if dtype not in _NARROW:
        raise ValueError(f"autotune: model must be float16 or bfloat16, got {DTYPES.get(dtype, dtype)}")
    return problems_for(products_of(parts), sizes, dtype)


def problems_for(
    products: Iterable[tuple[str, int, int, bool]], sizes: Sequence[int], dtype: torch.dtype, in_step: bool = True
) -> list[Problem]:
    """Of products as routes.products_of() has them; those that differ in the bias alone are one."""
    distinct = {product[:3]: product for product in products}.values()
    ranges = [(m, first_m(m, smaller)) for smaller, m in zip([0, *sizes], sizes, strict=False)]
    return [Problem(op, n, k, m, first, dtype, bias, in_step) for op, n, k, bias in distinct for m, first in ranges]


def measure_all(problems: Sequence[Problem], index: int, shown: bool = True) -> list[Measured]:
    """Each of them on a GPU of this machine, on a stream of its own."""
    gpu = present_gpu("autotune", index)
    counts = [len(candidates(gpu, problem.linear, problem.m)) for problem in problems]
    measured = []
    with (
        torch.cuda.device(index),
        torch.cuda.stream(torch.cuda.Stream(index)),
        torch.no_grad(),
        show(sum(counts), shown) as advance,
    ):
        weights = Weights(problems, index)
        for problem in problems:
            measured.append(measure(problem, weights, gpu, partial(advance, str(problem), 1)))
            graphs.release_memory()
        torch.cuda.synchronize(index)
    return measured
