"""Forwards of prompts with padding behind the tokens, as evaluations have it."""

from collections import Counter

import pytest
import torch

import llmkernels
from families import family_model
from hf_models import assert_close, rounding, tiny_inputs
from llmkernels.hf.callers.positions import BAD_MASK_OF_A_PROMPT, LOSS_OF_PADDING, POSITIONS_OF_PADDING
from llmkernels.hf.report import STEP
from llmkernels.hf.report import by_forward as by_forward_of
from llmkernels.hf.step.decode import decoder
from prompting import compose_forwards, masked, prompts
from test_forward import DESCRIBED

BEHIND = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
BOTH = [[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


@pytest.fixture(autouse=True)
def by_forward(monkeypatch):
    compose_forwards(monkeypatch)


def mask_of(rows, device="cpu"):
    return torch.tensor(rows, device=device)


def runs(name):
    """What runs a prompt with padding behind the tokens. OPT gives all padding the same position."""
    return by_forward_of(POSITIONS_OF_PADDING) if name == "opt" else STEP


@pytest.mark.parametrize("rows", [BEHIND, BOTH], ids=["behind", "on both sides"])
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_logits(name, rows):
    """Those of padding behind the tokens, too; twice, as forwards of a length that is known are launched before the
    mask is read. What is in front of the tokens sees no key, of which nothing is expected."""
    model, mask = family_model(name), mask_of(rows)
    behind = mask.cumsum(1) > 0
    calls = [{}, {"use_cache": False}, {"logits_to_keep": 1}, {"output_hidden_states": True}]

    def run(model):
        return [
            model(tiny_inputs("cpu", 3, 4, seed=seed), attention_mask=mask, **call) for seed in (0, 1) for call in calls
        ]

    expected = run(model)
    llmkernels.patch(model)
    for ours, theirs in zip(run(model), expected, strict=True):
        assert ours.keys() == theirs.keys()
        shown = behind[:, -ours.logits.shape[1] :]
        assert_close(ours.logits[shown], theirs.logits[shown])
        for x, y in zip(ours.hidden_states or (), theirs.hidden_states or (), strict=True):
            assert_close(x[behind], y[behind])
    assert prompts(model) == {runs(name): 8}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "smollm3"])
@torch.no_grad()
def test_evaluation(name):
    """The loss of what is no padding. In front of a sequence padding predicts its first token: the modules do that."""
    model, ids = family_model(name), tiny_inputs("cpu", 3, 4)
    calls = [
        {"attention_mask": mask_of(rows), "labels": ids.masked_fill(mask_of(rows) == 0, -100)}
        for rows in (BEHIND, BOTH)
    ]
    expected = [model(ids, **call).loss for call in calls]
    llmkernels.patch(model)
    for _ in range(2):
        for call, loss in zip(calls, expected, strict=True):
            assert_close(model(ids, **call).loss, loss)
    assert prompts(model) == {STEP: 2, by_forward_of(LOSS_OF_PADDING): 2}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "cohere"])
@torch.no_grad()
def test_what_comes_behind(name):
    """The modules go on with the cache, as a step knows no such padding. The next prompt has another kind of it."""
    model, exact, ids = family_model(name), family_model(name), tiny_inputs("cpu", 3, 4)
    llmkernels.patch(model)
    mask = mask_of(BEHIND)
    for _ in range(2):
        ours, theirs = (m(ids, attention_mask=mask) for m in (model, exact))
        for layer, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
            assert_close(layer.keys, other.keys)
            assert_close(layer.values, other.values)
        longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        step = {"attention_mask": longer, "position_ids": longer.sum(1, keepdim=True) - 1}
        ours, theirs = (
            m(ids[:, :1], past_key_values=found.past_key_values, **step)
            for m, found in ((model, ours), (exact, theirs))
        )
        assert_close(ours.logits, theirs.logits)
        padded = masked("cpu", 4)[1]["attention_mask"]
        ours, theirs = (m(ids, attention_mask=padded).logits[padded.bool()] for m in (model, exact))
        assert_close(ours, theirs)
    assert prompts(model) == {STEP: 4} and not decoder(model).forwards[STEP]


@torch.no_grad()
def test_other_masks():
    model, exact, ids = family_model("llama"), family_model("llama"), tiny_inputs("cpu", 3, 4)
    llmkernels.patch(model)
    for rows in ([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]):
        mask = mask_of(rows)
        for _ in range(2):
            ours, theirs = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, exact))
            assert_close(ours, theirs)
    assert prompts(model) == {by_forward_of(BAD_MASK_OF_A_PROMPT): 4}


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_on_a_gpu(name):
    """In half precision, of what is no padding, against float32; left padding in turn, whose graphs know no ends."""
    model = family_model(name, "cuda", torch.bfloat16)
    exact = family_model(name, "cuda", torch.float32)
    llmkernels.patch(model)
    in_front = [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]
    for rows in (BEHIND, BOTH, BEHIND, in_front, BEHIND):
        ids, mask = tiny_inputs("cuda", 3, 4), mask_of(rows, "cuda")
        ours, theirs = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, exact))
        assert_close(ours.float(), theirs, 4 * rounding(torch.bfloat16))
    assert prompts(model) == Counter([runs(name)] * 4) + Counter([STEP])
