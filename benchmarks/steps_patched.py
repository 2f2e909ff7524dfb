"""Decoding with llmkernels: its own generate, and generate of a patched model."""

from collections.abc import Sequence
from functools import partial

import torch

import llmkernels
from benchmarks import steps
from benchmarks.run import Run
from llmkernels.hf.step.decode import decoder


class Bench(steps.Bench):
    def lean(self, batch: int, context: int) -> steps.Measured:
        return self.generate_by(partial(llmkernels.generate, self.model), batch, context)

    def step(self, cache):
        """The decode step, a function from tokens to logits: the caller keeps the cache alive, and this the model."""
        parts, self.memory = decoder(self.model).describe(self.model)
        return decoder(self.model).begin(parts, cache)

    def last_logits(self, ids):
        with llmkernels.patch(self.model):
            cache = llmkernels.KVCache(self.model, ids.shape[1])
            self.model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.begin(torch.full((len(ids),), ids.shape[1] - 2, device=self.device))
            return self.step(cache)(ids[:, -1])

    def patched_rows(self, sizes: Sequence[steps.Size]) -> list[dict]:
        with llmkernels.patch(self.model):
            return self.rows({"llmkernels": self.lean, "generate": self.generate}, sizes)


def measure_first_sizes(run: Run) -> list[dict]:
    bench = Bench(run)
    bench.compare_logits("llmkernels", bench.last_logits)
    return bench.patched_rows(bench.first_sizes)


def measure_other_sizes(run: Run) -> list[dict]:
    bench = Bench(run)
    return bench.patched_rows(bench.other_sizes)
