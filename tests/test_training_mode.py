"""Steps of a model in training mode: rollouts of reinforcement learning generate so."""

import pytest
import torch

import llmkernels
from families import family_model
from generating import generate_step, small_model
from hf_models import tiny_inputs


def tokens_of(model, ids, **options):
    torch.manual_seed(7)
    return model.generate(ids, max_new_tokens=8, eos_token_id=None, **options)


@pytest.mark.parametrize("do_sample", [False, True])
def test_without_dropout_training_changes_nothing(do_sample, device):
    model, ids = small_model(device=device).train(), tiny_inputs(device)
    expected, state = tokens_of(model, ids, do_sample=do_sample), torch.get_rng_state()
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, ids, do_sample=do_sample), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert handle.report().decode[0].calls == {generate_step(): 1}


def test_modes_that_change(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    expected = tokens_of(model, ids)
    handle = llmkernels.patch(model)
    for training in (False, True, False, True):
        assert torch.equal(tokens_of(model.train(training), ids), expected)
    assert handle.report().decode[0].calls == {generate_step(): 4}


def by_the_model(model, ids, reason):
    expected = tokens_of(model, ids)
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, ids), expected)
    assert handle.report().decode[0].calls == {f"by transformers: {reason}": 1}
    return handle


def test_dropout_of_the_config(device):
    model = small_model(device=device, attention_dropout=0.5).train()
    by_the_model(model, tiny_inputs(device), "model.layers.0.self_attn is in training mode")


def test_dropout_in_a_module(device):
    model = family_model("phi", resid_pdrop=0.5).to(device).train()
    handle = by_the_model(model, tiny_inputs(device), "PhiForCausalLM is in training mode")
    tokens_of(model.eval(), tiny_inputs(device))
    assert handle.report().decode[0].calls[generate_step()] == 1


def test_dropout_set_later(device):
    model, ids = small_model(device=device).train(), tiny_inputs(device)
    handle = llmkernels.patch(model)
    tokens_of(model, ids)
    model.model.layers[1].self_attn.attention_dropout = 0.5
    found = tokens_of(model, ids)
    handle.unpatch()
    assert torch.equal(tokens_of(model, ids), found)


def test_gradient_checkpointing(device):
    model, ids = small_model(device=device).train(), tiny_inputs(device)
    handle = llmkernels.patch(model)
    tokens_of(model, ids)
    model.gradient_checkpointing_enable()
    tokens_of(model, ids)
    model.gradient_checkpointing_disable()
    tokens_of(model, ids)
    calls = handle.report().decode[0].calls
    assert calls.pop(generate_step()) == 2
    assert [reason.partition(":")[0] for reason in calls] == ["by transformers"]
