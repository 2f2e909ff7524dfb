"""The forward of a model, unpatched, compiled by torch. Each length is compiled anew, the better part of a minute."""

from contextlib import contextmanager

import torch
from torch import nn

from benchmarks.forward import Bench
from benchmarks.run import Run

LENGTHS = (128, 512, 2048)


@contextmanager
def compiled(model: nn.Module):
    torch._dynamo.reset()
    yield torch.compile(model, dynamic=False), {}
    torch._dynamo.reset()


def measure(run: Run) -> list[dict]:
    if not run.wants("compile") or (run.small and not run.providers):
        return []
    alone = Bench(run, {"compile": compiled})
    lengths = LENGTHS[:1] if run.small else LENGTHS
    return [row for tokens in lengths for row in alone.measure([alone.prefill(tokens, "last", at_once=True)], 1)]
