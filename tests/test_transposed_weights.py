"""Models whose products have transposed weights, as GPT-2's Conv1D: the step has them in memory by columns, and all
else sees the same parameters."""

import copy

import pytest
import torch
import transformers

import llmkernels
from families import family_model
from generating import generate_step, hf_generate
from hf_models import assert_close, logits_of, tiny_inputs

NAME = "gpt2"


def conv1ds(model):
    found = [module.weight for module in model.modules() if type(module).__name__ == "Conv1D"]
    assert len(found) == 8
    return found


def by_columns(model):
    [layout] = {(weight.is_contiguous(), weight.t().is_contiguous()) for weight in conv1ds(model)}
    return layout == (False, True)


def generated(device, **changes):
    model, ids = family_model(NAME, device, **changes), tiny_inputs(device)
    expected = hf_generate(model, ids)
    handle = llmkernels.patch(model)
    assert torch.equal(hf_generate(model, ids), expected) and by_columns(model)
    assert dict(handle.report().decode[0].calls) == {generate_step(): 1}
    return model, ids, expected, handle


def test_every_parameter_is_the_same(device):
    model, ids = family_model(NAME, device), tiny_inputs(device)
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    logits, size = logits_of(model, ids), sum(p.untyped_storage().nbytes() for p in model.parameters())
    handle = llmkernels.patch(model)
    assert not by_columns(model)
    hf_generate(model, ids)
    assert by_columns(model)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == size
    for name, p in model.named_parameters():
        assert p is before[name][0] and p.shape == before[name][1].shape and torch.equal(p, before[name][1])
    assert_close(logits_of(model, ids), logits)
    handle.unpatch()
    assert not by_columns(model)
    assert torch.equal(logits_of(model, ids), logits)


@pytest.mark.parametrize("change", ["load", "assign", "data", "in_place", "to"])
def test_other_weights(change, device):
    """Written or replaced after steps: the next ones have them."""
    model, ids, before, _ = generated(device)
    other = family_model(NAME, device, seed=5)
    expected = hf_generate(other, ids)
    assert not torch.equal(expected, before)
    if change == "load":
        model.load_state_dict(other.state_dict())
    elif change == "assign":
        model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
        model.tie_weights()
    elif change == "to":
        model.double().float()  # by rows or by columns, as PyTorch likes
        model.load_state_dict(other.state_dict())
    else:
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            with torch.no_grad():
                if change == "data":
                    mine.data = new.detach().clone()
                else:
                    mine.copy_(new)
    assert torch.equal(hf_generate(model, ids), expected)
    assert by_columns(model)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, llmkernels.optim.AdamW])
def test_training_goes_on(optimizer, device):
    """A step of an optimizer, then tokens, as in rollouts: against the same unpatched."""

    def run(model):
        made, found = optimizer(model.parameters(), lr=1e-2), []
        for seed in range(3):
            ids = tiny_inputs(device, seed=seed)
            model.train()
            model(ids, labels=ids).loss.backward()
            made.step()
            made.zero_grad()
            found.append(hf_generate(model.eval(), ids))
        return torch.cat(found), [p.detach().clone() for p in model.parameters()]

    expected, weights = run(family_model(NAME, device))
    model = family_model(NAME, device)
    llmkernels.patch(model, training=True)
    found, others = run(model)
    assert by_columns(model)
    assert torch.equal(found, expected)
    for one, other in zip(others, weights, strict=True):
        assert_close(one, other, tolerance=2e-2)


def test_copies_and_files(tmp_path, device):
    model, ids, expected, _ = generated(device)
    assert torch.equal(hf_generate(copy.deepcopy(model), ids), expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh = family_model(NAME, device, seed=9)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(hf_generate(fresh, ids), expected)
    model.save_pretrained(tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").to(device)
    assert not by_columns(loaded)
    assert torch.equal(hf_generate(loaded, ids), expected)


def test_a_linear_layer_by_columns_runs_by_the_modules(device):
    """Only of Conv1D the step has the transposed matrix."""
    model, ids = family_model("qwen2", device), tiny_inputs(device)
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.t().contiguous().t()
    expected = hf_generate(model, ids)
    handle = llmkernels.patch(model)
    assert torch.equal(hf_generate(model, ids), expected)
    assert "no ordinary memory" in handle.report().decode[0].reason
    assert weight.t().is_contiguous()
