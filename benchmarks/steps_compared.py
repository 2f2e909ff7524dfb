"""A model at many sizes: llmkernels.generate and model.generate of the patched model, beside the unpatched one."""

from collections.abc import Sequence

import torch
from torch import Tensor

import llmkernels
from benchmarks import steps
from benchmarks.cases import OURS
from benchmarks.run import Run
from llmkernels.hf.step.decode import decoder
from llmkernels.hf.step.program import Program


class Bench(steps.Bench):
    def step(self, cache):
        """The decode step, a function from tokens to logits: the caller keeps the cache alive, and this the model."""
        parts, self.memory = decoder(self.model).describe(self.model)
        return decoder(self.model).begin(parts, cache, Program())

    def logits_of_step(self, ids: Tensor) -> Tensor:
        with llmkernels.patch(self.model):
            cache = llmkernels.KVCache(self.model, ids.shape[1])
            self.model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.begin(torch.full((len(ids),), ids.shape[1] - 2, device=self.device))
            return self.step(cache)(ids[:, -1])

    def logits_of_forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def measure_first_sizes(run: Run) -> list[dict]:
    bench = Bench(run)
    bench.compare_logits(OURS, bench.logits_of_step)
    bench.compare_logits("eager", bench.logits_of_forward)
    ways = {"eager": bench.loop, "eager_generate": bench.generate}
    return bench.rows(bench.our_ways | ways, bench.first_sizes)


def measure_other_sizes(run: Run) -> list[dict]:
    return _measure_batches(run, steps.BATCHES)


def measure_more_batches(run: Run) -> list[dict]:
    return _measure_batches(run, steps.MORE_BATCHES)


def _measure_batches(run: Run, batches: Sequence[int]) -> list[dict]:
    bench = Bench(run)
    return bench.rows(bench.our_ways | {"eager_generate": bench.generate}, bench.other_sizes(batches))
