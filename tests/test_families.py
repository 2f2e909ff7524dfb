"""Every family of decoders, patched: the same logits, tokens and gradients as unpatched, and which ops run.

EXPECTED is what docs/models.md has as a table, and it is what runs.
"""

import copy
import io
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import llmkernels
from families import EXPECTED, FAMILIES, family_model, image_inputs
from generating import left_padded
from hf_models import assert_close, count_ops, logits_of, tiny_inputs
from llmkernels.hf import unpatch

NEW = 12  # with the prompt, twice as long as a window

every_family = pytest.mark.parametrize("name", EXPECTED)


def masked(device):
    return {"input_ids": tiny_inputs(device, 3), "attention_mask": left_padded(device)}


def logits_from(model, inputs):
    others = {key: value for key, value in inputs.items() if key != "input_ids"}
    return logits_of(model, inputs["input_ids"], **others)


def tokens_of(model, **inputs):
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False)


def gradients(model, ids):
    """Loss and gradients by name of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_every_family_is_expected():
    assert EXPECTED.keys() == FAMILIES.keys()


@every_family
def test_forward(name, device):
    """Without a mask, and padded on the left. A row of nothing but padding is nobody's."""
    model, ids, inputs = family_model(name, device), tiny_inputs(device, tokens=23), masked(device)
    real = inputs["attention_mask"].bool()
    expected, expected_masked = logits_of(model, ids), logits_of(model, inputs["input_ids"], attention_mask=real)
    llmkernels.patch(model)
    assert_close(logits_of(model, ids), expected)
    assert_close(logits_of(model, inputs["input_ids"], attention_mask=real)[real], expected_masked[real])


@every_family
def test_low_precision(name, device):
    """In bfloat16 no further from float64 than 1.5 times what the unpatched model is. Of the error of each token the
    median is taken, as rounding may send one to another expert."""
    model, ids = family_model(name, device, torch.bfloat16), tiny_inputs(device, 4, 32)
    oracle_model = copy.deepcopy(model).cpu().double()
    oracle_model.set_experts_implementation("eager")  # the others have no float64
    oracle = logits_of(oracle_model, ids.cpu())
    errors = []
    for patched in (False, True):
        if patched:
            llmkernels.patch(model)
        errors.append((logits_of(model, ids).cpu() - oracle).norm(dim=-1).median())
    allowed, error = errors
    assert 0 < error <= 1.5 * allowed


@every_family
def test_generate(name, device):
    model, inputs = family_model(name, device), masked(device)
    expected = tokens_of(model, **inputs)
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, **inputs), expected), handle.report()


@pytest.mark.parametrize("name", [name for name in EXPECTED if FAMILIES[name].outer])
def test_image(name, device):
    model, inputs = family_model(name, device), image_inputs(name, device)
    expected, expected_tokens = logits_from(model, inputs), tokens_of(model, **inputs)
    llmkernels.patch(model)
    assert_close(logits_from(model, inputs), expected)
    assert torch.equal(tokens_of(model, **inputs), expected_tokens)
    without = logits_from(model, inputs | {"pixel_values": torch.zeros_like(inputs["pixel_values"])})
    assert (without - expected).abs().max() > 0.01  # the image counts


@every_family
def test_gradient_of_every_parameter(name, device):
    model, ids = family_model(name, device).train(), tiny_inputs(device)
    expected_loss, expected = gradients(model, ids)
    llmkernels.patch(model)
    loss, found = gradients(model, ids)
    assert_close(loss, expected_loss, 1e-5)
    assert found.keys() == expected.keys()
    least = 1e-6 * max(gradient.norm() for gradient in expected.values())  # that of a key's bias may be 0
    for key, gradient in expected.items():
        if gradient.norm() > least:
            assert_close(found[key], gradient, 1e-4)
        else:
            assert found[key].norm() <= least


@every_family
def test_unpatch_restores_every_bit(name, device):
    model, ids = family_model(name, device, torch.bfloat16), tiny_inputs(device)
    tokens_of(model, input_ids=ids)  # rotations with several tables keep the last
    members = {key: (type(module), set(vars(module))) for key, module in model.named_modules()}
    keys, before = list(model.state_dict()), logits_of(model, ids)
    handle = llmkernels.patch(model)
    assert list(model.state_dict()) == keys
    tokens_of(model, input_ids=ids)
    handle.unpatch()
    assert {key: (type(module), set(vars(module))) for key, module in model.named_modules()} == members
    assert torch.equal(logits_of(model, ids), before)


@every_family
def test_copies(name):
    """A deep copy and a pickle run the same ops with the same results, on weights of their own, and are undone."""
    model, inputs = family_model(name), masked("cpu")
    expected = tokens_of(model, **inputs)
    llmkernels.patch(model)
    tokens_of(model, **inputs)
    ops = count_ops(model, inputs["input_ids"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in copies:
        assert count_ops(other, inputs["input_ids"]) == ops != {}
        assert torch.equal(tokens_of(other, **inputs), expected)
        unpatch(other)
        assert count_ops(other, inputs["input_ids"]) == {}
        assert torch.equal(tokens_of(other, **inputs), expected)


# --- what runs


@every_family
def test_ops_that_run(name, device):
    """The ops of one forward are those expected, and those of which the report says so before and after."""
    model = family_model(name, device)
    inputs = image_inputs(name, device) if FAMILIES[name].outer else {"input_ids": tiny_inputs(device)}
    assert count_ops(model, **inputs) == {}
    handle, ops = llmkernels.patch(model), EXPECTED[name].ops
    assert count_ops(model, **inputs) == ops, handle.report()
    planned, ran = Counter(), Counter()
    for row in handle.report().rows.values():  # a fused norm counts for itself and for its layer
        planned |= row.kernels
        ran |= row.runs
    expected = {f"llmkernels::{op}": count for op, count in ops.items()}
    assert ran == expected
    assert planned.keys() == expected.keys()
    assert planned >= ran  # some layers rotate nothing


@every_family
def test_the_rest_has_a_reason(name):
    model = family_model(name)
    report = llmkernels.patch(model).report()
    names = {key for key, _ in model.named_modules()}
    for row in report.rows.values():
        assert row.left_alone.keys() | set(row.patched) <= names
        for key, reason in row.left_alone.items():
            assert len(reason.split()) > 2, (key, reason)
            assert reason not in ("not patched", "not asked for")
            assert f"{row.kind} left alone" in str(report)
    no_step = EXPECTED[name].no_step
    [decode] = report.decode
    assert EXPECTED[name].explains(decode.reason) if no_step else decode.reason is None, decode


# --- docs/models.md


_GROUPS = {
    "norms": ("rms_norm", "layer_norm"),
    "rotation": ("rope",),
    "MLP": ("swiglu", "geglu", "bias_gelu", "relu2"),
    "fused adds": ("add_rms_norm", "add_layer_norm"),
}


def _decodes(runs):
    return f"no: {runs.no_step}" if runs.no_step else f"yes, with {runs.loop} in a loop" if runs.loop else "yes"


def test_table_of_families():
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    table = re.search(r"^## Families\n(?:.*\n)*?((?:\|.*\n)+)", page, re.MULTILINE)[1]
    header, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    assert header == ["family", *_GROUPS, "decode step"]
    found = {family: cells for family, *cells in rows}
    assert len(found) == len(rows)
    expected = {}
    for runs in EXPECTED.values():
        cells = [", ".join(f"`{op}`" for op in group if op in runs.ops) for group in _GROUPS.values()]
        expected[runs.title] = [*(cell or "-" for cell in cells), _decodes(runs)]
    assert found == expected
