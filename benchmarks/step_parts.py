"""Where a decode step's time goes: each of its launches alone, the same one of every layer in one graph.

So no weight is in the cache, as in a step.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import llmkernels
from benchmarks import steps_compared, timing
from benchmarks.run import Run
from llmkernels.hf.step import compose

BATCHES, CONTEXT = (1, 8, 64), 512
PARTS = "q|k|v", "attention", "o", "gate|up", "down"  # of a layer, an op each
WHOLE_STEP = "step"  # a decode_part that the others make up


@torch.no_grad()
def measure(run: Run) -> list[dict]:
    if not run.on_gpu or not run.wants("llmkernels"):
        return []
    bench = Bench(run)
    with llmkernels.patch(bench.model):
        return [row for batch in BATCHES for row in bench.parts(batch)]


class Bench(steps_compared.Bench):
    def parts(self, batch: int) -> list[dict]:
        found = []
        self.run.begin(f"parts of a step, batch {batch}")
        cache = self.cache(batch, CONTEXT)  # which the launches do not keep alive
        for part, calls in self.launches(cache).items():
            with timing.side_stream(self.device):
                graph = timing.capture(calls, laps=2)
                times = timing.time_graphs({part: timing.Subject(calls, None, graph)}, 2, timing.QUICK)[part]
            row = {"op": "decode_part", "part": part, "model": self.name, "batch": batch, "context": CONTEXT}
            row |= {"dtype": self.dtype, "provider": "llmkernels", "timing": "graph", "launches": len(calls)}
            found.append(row | timing.summary(times))
        self.clear()
        return found

    def launches(self, cache) -> dict[str, list[Callable]]:
        """The calls that a step is composed of, of every layer by their part of it, and all of them."""
        batch = cache.layers[0].k.shape[0]
        cache.begin(torch.full((batch,), cache.get_seq_length() - 1, device=self.device), None)
        step = self.step(cache)
        # Without its beginning, which counts tokens: made again and again, these calls are of the same token.
        layers = partial(compose.forward, step.parts, step._hidden, step._where, step._caches)
        with Recorder() as recorder:
            layers()
        names = [*PARTS * len(cache.layers), "head"]
        calls = {part: [] for part in names}
        for name, call in zip(names, recorder.calls, strict=True):
            calls[name].append(call)
        return calls | {WHOLE_STEP: [layers]}


class Recorder(TorchDispatchMode):
    """Collects the calls of our ops, to be made again with the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, arguments=(), named=None):
        if op.namespace == "llmkernels":
            self.calls.append(partial(op, *arguments, **named or {}))
        return op(*arguments, **named or {})
