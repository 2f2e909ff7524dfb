"""What a patched model does before its first token: it is read in the first call, and in no later one."""

import copy
import io

import pytest
import torch
from transformers.models.llama import modeling_llama

import llmkernels
from families import family_model
from hf_models import tiny_inputs
from llmkernels.hf.report import PREFILL
from llmkernels.hf.step import decode, proof


@pytest.fixture
def reads(monkeypatch):
    """A list that grows with each reading of a model."""
    found = []

    def counted(name):
        original = getattr(decode, name)

        def function(model):
            found.append(name)
            return original(model)

        monkeypatch.setattr(decode, name, function)

    for name in ("describe", "Snapshot"):
        counted(name)
    return found


def generate(model, ids):
    model.generate(ids, max_new_tokens=1, do_sample=False)


@torch.no_grad()
def forwards(model, ids):
    cache = None
    for tokens in (ids, ids[:, :1], ids[:, :1]):
        cache = model(tokens, past_key_values=cache, use_cache=True).past_key_values


def check_read_once(model, call, reads):
    ids = tiny_inputs()
    call(model, ids)
    assert reads
    reads.clear()
    call(model, ids)
    assert reads == []


@pytest.mark.parametrize("call", [generate, forwards])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "phi3", "cohere2", "starcoder2", "phi"])
def test_a_model_is_read_once(name, call, reads):
    model = family_model(name)
    llmkernels.patch(model)
    check_read_once(model, call, reads)


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, loaded])
def test_a_copy_is_read_once(duplicate, reads):
    model = family_model("llama")
    llmkernels.patch(model)
    generate(model, tiny_inputs())
    reads.clear()
    check_read_once(duplicate(model), generate, reads)


def test_a_model_patched_again_is_read_once(reads):
    model = family_model("llama")
    for _ in range(2):
        with llmkernels.patch(model):
            check_read_once(model, generate, reads)
        reads.clear()


@pytest.mark.parametrize("name", ["cohere_qk_norm", "stablelm_parallel", "mixtral", "gpt_oss"])
def test_a_refusal_is_read_once(name, reads):
    model = family_model(name)
    handle = llmkernels.patch(model)
    check_read_once(model, generate, reads)
    [row] = handle.report().decode
    assert [*row.calls] == [f"by transformers: {row.reason}"]


def test_a_refusal_ends_with_what_it_was_for(monkeypatch):
    model, ids = family_model("llama"), tiny_inputs()
    handle = llmkernels.patch(model)
    original = modeling_llama.rotate_half
    with monkeypatch.context() as context:
        context.setattr(modeling_llama, "rotate_half", lambda x: original(x))
        for _ in range(2):
            generate(model, ids)
    assert PREFILL not in handle.report().decode[0].calls
    generate(model, ids)
    assert handle.report().decode[0].calls[PREFILL] == 1


def test_an_error_is_no_refusal(monkeypatch):
    """Neither is one of the proof, which is tried again."""
    monkeypatch.setattr(proof, "_proofs", [])
    monkeypatch.setattr(proof, "_failed", [])
    model, ids = family_model("llama"), tiny_inputs()
    handle = llmkernels.patch(model)
    with monkeypatch.context() as context:
        context.setattr(proof, "_logits", None)
        generate(model, ids)
    assert PREFILL not in handle.report().decode[0].calls
    generate(model, ids)
    assert handle.report().decode[0].calls[PREFILL] == 1
