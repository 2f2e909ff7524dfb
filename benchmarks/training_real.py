"""Fine-tuning a real model on the sources of Python's standard library: all weights, then adapters.

The model is that of llmkernels/_real_model.py. Beside the time of a step the losses of all steps, and the perplexity of
files that it is not trained on, before and after; ours beside eager's.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.cases import OURS
from benchmarks.run import Run
from benchmarks.training import PROVIDERS, clear, row_of, train, with_adapters

STEPS, FIRST_TIMED, BATCH, TOKENS, HELD_OUT = 200, 20, 8, 512, 16
LEARNING_RATES = {"": 2e-5, "-lora": 2e-4}


def measure(run: Run) -> list[dict]:
    from llmkernels import _real_model
    from llmkernels._checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(str(_real_model.fetch()))
    except _real_model.Unavailable as reason:
        run.warn(_real_model.NAME, reason)
        return []
    steps, first_timed, batch, tokens = (3, 1, 1, 64) if run.small else (STEPS, FIRST_TIMED, BATCH, TOKENS)
    held_out = 2 if run.small else HELD_OUT
    text = sources_of_python(checkpoint.tokenizer(), (steps * batch + held_out) * tokens).view(-1, tokens)
    unseen, batches = text[:held_out].to(run.device), text[held_out:].view(steps, batch, tokens).to(run.device)
    rows = []
    for kind, learning_rate in LEARNING_RATES.items():
        for name in ("eager", OURS):
            if not run.wants(name):
                continue
            run.begin(f"{_real_model.NAME}{kind}, {name}")
            dtype = torch.bfloat16 if run.on_gpu else torch.float32
            model = checkpoint.model(dtype).to(run.device)
            model = with_adapters(model) if kind else model
            before = perplexity(model, unseen)
            with PROVIDERS[name](model.train(), learning_rate) as parts:
                times, losses = train(run, parts, batches, steps)
                row = row_of(run, name, _real_model.NAME + kind, batches, times, losses, first_timed)
            rows.append(row | {"perplexity_before": before, "perplexity_after": perplexity(model, unseen)})
            del model, parts
            clear(run)
    return rows


def sources_of_python(tokenizer, tokens: int) -> Tensor:
    """The first tokens of the library's modules in the order of their names, but for its tests."""
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "test" not in str(path) and "site-packages" not in str(path):
            found += tokenizer(path.read_text(errors="ignore"), verbose=False).input_ids
        if len(found) >= tokens:
            return torch.tensor(found[:tokens])
    raise RuntimeError(f"the standard library has {len(found)} tokens, not {tokens}")


@torch.no_grad()
def perplexity(model: nn.Module, texts: Tensor) -> float:
    model.eval()
    losses = [model(input_ids=ids[None], labels=ids[None], use_cache=False).loss.float() for ids in texts]
    return round(torch.stack(losses).mean().exp().item(), 3)
