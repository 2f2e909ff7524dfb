"""Prompts of different lengths, which run one after the other without their padding: step/prompt.py."""

import pytest
import torch

import llmkernels
from families import LEARNED_POSITIONS, family_model
from generating import NEW, hf_generate
from hf_models import assert_close, tiny_inputs
from llmkernels.hf.report import STEP
from llmkernels.hf.step import prompt
from prompting import LONG, check_generate_in_half_precision, compose_forwards, masked, prompts
from test_forward import DESCRIBED


@pytest.fixture
def packed(monkeypatch):
    """How many tokens each packed prompt has; prompts never run by a graph."""
    tokens = []
    run_packed = prompt._run_packed

    def noting(parts, cache, ids, last, leftpad, padding):
        tokens.append(ids.numel() - sum(padding))
        return run_packed(parts, cache, ids, last, leftpad, padding)

    monkeypatch.setattr(prompt, "_run_packed", noting)
    monkeypatch.setattr(prompt, "PACKED_DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(prompt, "_GRAPH_TOKENS", 0)
    return tokens


@pytest.mark.parametrize("name", DESCRIBED)
def test_generate(name, packed):
    model = family_model(name)
    ids, options = masked("cpu", 8)
    expected = hf_generate(model, ids, **options)
    llmkernels.patch(model)
    assert torch.equal(hf_generate(model, ids, **options), expected)
    assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW, **options), expected)
    assert packed == [8 + 4 + 1] * 2
    assert prompts(model) == {STEP: 2}


@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_forward(name, packed, monkeypatch):
    """The first forward, then those that are launched before the model is checked; and steps behind each."""
    compose_forwards(monkeypatch)
    model, exact = family_model(name), family_model(name)
    llmkernels.patch(model)
    for seed in range(3):
        ids, options = masked("cpu", 7, seed)
        given = {"attention_mask": options["attention_mask"], "logits_to_keep": 1}
        found, expected = model(ids, **given), exact(ids, **given)
        assert_close(found.logits, expected.logits)
        step = {"attention_mask": torch.cat([given["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)}
        step["position_ids"] = step["attention_mask"].sum(1, keepdim=True) - 1
        next_ids = expected.logits.argmax(-1)
        found = model(next_ids, past_key_values=found.past_key_values, **step)
        assert_close(found.logits, exact(next_ids, past_key_values=expected.past_key_values, **step).logits)
    assert prompts(model) in ({STEP: 3}, {LONG: 3})
    assert packed == [7 + 4 + 1] * prompts(model)[STEP]


def test_little_padding_is_computed(packed):
    model = family_model("llama")
    ids = tiny_inputs("cpu", 3, 20)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # 5 of 60
    expected = hf_generate(model, ids, attention_mask=mask)
    llmkernels.patch(model)
    assert torch.equal(hf_generate(model, ids, attention_mask=mask), expected)
    mask[2, 0] = 0  # 6 of 60
    assert packed == []
    hf_generate(model, ids, attention_mask=mask)
    assert packed == [54]


def test_on_a_cpu_nothing_is_packed(packed, monkeypatch):
    monkeypatch.undo()
    model = family_model("llama")
    ids, options = masked("cpu", 8)
    llmkernels.patch(model)
    hf_generate(model, ids, **options)
    assert prompts(model) == {STEP: 1} and packed == []


def test_under_a_default_device(packed):
    model = family_model("llama")
    ids, options = masked("cpu", 8)
    expected = hf_generate(model, ids, **options)
    llmkernels.patch(model)
    with torch.device("meta"):
        found = hf_generate(model, ids, **options)
    assert torch.equal(found, expected) and packed == [13]


@torch.no_grad()
def test_all_logits_are_those_of_padding_too(packed, monkeypatch):
    """Where they are asked for, nothing is packed."""
    compose_forwards(monkeypatch)
    model, exact = family_model("llama"), family_model("llama")
    llmkernels.patch(model)
    ids, options = masked("cpu", 9)
    mask = options["attention_mask"]
    live = mask.bool()
    assert_close(model(ids, attention_mask=mask).logits[live], exact(ids, attention_mask=mask).logits[live])
    assert prompts(model) == {STEP: 1} and packed == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESCRIBED)
def test_on_a_gpu(name, packed):
    """The logits behind prompts and in steps, in half precision, against those in float32."""
    more = {"max_position_embeddings": 256} if name in LEARNED_POSITIONS else {}
    model = family_model(name, "cuda", torch.bfloat16, **more)
    exact = family_model(name, "cuda", torch.float32, **more)
    llmkernels.patch(model)
    for tokens in (9, 24, 150):
        check_generate_in_half_precision(model, exact, tokens)
    assert len(packed) == prompts(model)[STEP] >= 1
