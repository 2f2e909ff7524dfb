"""Prompts that are composed of ops, on a CPU as on a GPU."""

import torch

from generating import hf_generate
from hf_models import assert_close, rounding, tiny_inputs
from llmkernels.hf.callers import forward
from llmkernels.hf.step import prompt
from llmkernels.hf.step.decode import decoder

LONG = "by the model's forward: the prompt is longer than what a sliding window keeps"


def masked(device, tokens, seed=0):
    """Three prompts of different lengths, padded on the left."""
    ids = tiny_inputs(device, 3, tokens, seed=seed)
    mask = torch.ones_like(ids)
    mask[1, : tokens // 2] = mask[2, : tokens - 1] = 0
    return ids, {"attention_mask": mask, "eos_token_id": None}


def prompts(model):
    return decoder(model).prompts


def run_padded(monkeypatch):
    """Prompts run as a GPU runs short ones: with tokens behind them."""

    def length(parts, cache, batch, count):
        found = -(-count // 4) * 4 + 4
        has_room = found <= len(parts.positions[: cache.capacity]) and all(
            found <= layer.rows for layer in cache.layers
        )
        return found if has_room and not cache.length else None

    monkeypatch.setattr(prompt, "padded_length", length)


def compose_forwards(monkeypatch):
    """Forwards of prompts are composed as on a GPU."""
    monkeypatch.setattr(forward, "PROMPT_DEVICES", {"cpu", "cuda"})


def check_generate_in_half_precision(model, exact, tokens):
    """The logits behind padded prompts and in steps of a bfloat16 model on a GPU, against those in float32."""
    ids, options = masked("cuda", tokens, seed=tokens)
    options |= {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    found = hf_generate(model, ids, **options)
    text = found.sequences[:, :-1]
    mask = torch.cat([options["attention_mask"], torch.ones_like(text[:, tokens:])], 1)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        expected = exact(text, **given).logits[:, tokens - 1 :]
    assert_close(torch.stack(found.logits, 1).float(), expected, 4 * rounding(torch.bfloat16))
