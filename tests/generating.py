"""Shared by the tests of generation: a small model, the ops that a call runs, and comparisons with transformers."""

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner

import llmkernels
from hf_models import OPS, PROMPT, STEP, count_ops, tiny_model
from llmkernels.hf import unpatch

NEW = 8


def small_model(family="qwen2", device="cpu", **changes):
    return tiny_model(family, device, **{"head_dim": 64} | changes)  # the smallest with a fast kernel


def steps(tokens, **changes):
    """The ops that a generate call runs: a prompt, then decode steps."""
    return {op: PROMPT.get(op, 0) + STEP.get(op, 0) * (tokens - 1) for op in PROMPT | STEP} | changes


def lean_steps(tokens):
    return steps(tokens, sample=tokens)


def check_counts(found, expected, device):
    """These ops ran, and no others. On CUDA a step is counted twice: when it runs first, and when it is captured; its
    replays are not counted. Prompts in float32 are the modules' there."""
    if device == "cuda":
        for name in (*STEP, "sample"):
            assert found.pop(name, 0) <= expected.pop(name, 0)
        if "attention" not in found:
            expected = {op: count for op, count in expected.items() if op not in PROMPT} | OPS
    assert found == expected


def pad_batches(monkeypatch, graphs=False):
    """Let continuous batching pad its batches, as for CUDA graphs of transformers, which it may record as well: options
    with as many requests as tokens."""
    make = ModelRunner.__init__

    def make_padding(runner, *arguments, **options):
        make(runner, *arguments, **options)
        runner.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", make_padding)
    sizes = {"q_padding_interval_size": 8, "kv_padding_interval_size": 16, "max_requests_per_batch": 8}
    return sizes | {"use_cuda_graph": graphs}


def hf_generate(model, ids, **options):
    torch.manual_seed(11)
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | options)


@torch.no_grad()
def loop(model, ids, mask=None, new=NEW + 1, cache=None, **options):
    """Greedy search by hand: the tokens, and the logits of each."""
    tokens, logits = [], []
    for _ in range(new):
        output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens.append(ids)
        logits.append(output.logits[:, -1])
        mask = mask if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.cat(tokens, 1), torch.stack(logits, 1)


def check_steps(model, ids, **options):
    """The patched model generates by the step what it generates unpatched."""
    handle = llmkernels.patch(model)
    found = hf_generate(model, ids, **options)
    assert handle.report().decode[0].reason is None
    ways = [generate_step()]
    if found.shape[1] == ids.shape[1] + 1:  # on CUDA a step is queued before it is known that none is wanted
        ways.append("by the prefill alone")
    assert handle.report().decode[0].calls in [{way: 1} for way in ways]
    unpatch(model)
    expected = hf_generate(model, ids, **options)
    assert torch.equal(found, expected)
    return found


def runs_steps(function, *args, **kwargs):
    return "rope_decode_attention" in count_ops(function, *args, **kwargs)


def generate_step():
    return "by the decode step"


def check_falls_back(model, ids, reason, by_forwards=False, **options):
    """It generates the same without the step, and the report has the reason. `by_forwards`: forwards run by it."""
    handle = llmkernels.patch(model)
    assert runs_steps(hf_generate, model, ids, **options) == by_forwards
    found = hf_generate(model, ids, **options)
    assert [way for way in handle.report().decode[0].calls if reason in way], handle.report()
    assert reason in str(handle.report())
    unpatch(model)
    assert torch.equal(found, hf_generate(model, ids, **options))


def left_padded(device):
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0, :4] = mask[2, :9] = 0
    return mask.to(device)


class Stream:
    """A streamer that records what it gets."""

    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, ids):
        self.got.append(ids.clone())

    def end(self):
        self.ended += 1

    def check(self, sequences, prompt):
        assert self.ended == 1
        assert torch.equal(self.got[0], prompt.cpu())
        assert torch.equal(torch.stack(self.got[1:], 1), sequences[:, prompt.shape[1] :].cpu())
