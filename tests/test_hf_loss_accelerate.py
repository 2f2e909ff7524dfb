"""patch(training=True) of models that accelerate, or Trainer by it, prepares before or behind the patch."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import llmkernels
from hf_models import ComputedLogits, assert_close, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch
from test_hf_loss import OP, assert_equal, gradients, only_the_loss, runs

accelerate = pytest.importorskip("accelerate")


def forget_precision():
    """The state of the process has that of the last test."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _without_precision():
    forget_precision()


@pytest.mark.parametrize("name", ["Accelerator", "Trainer"])
def test_bf16_of_accelerate(name, tmp_path):
    """The loss runs on its op, the report says so, and the logits are there, in float32, for whoever reads them."""
    model, ids = tiny_model().train(), tiny_inputs()
    handle = only_the_loss(model)
    outputs = []
    if name == "Accelerator":
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        twin = accelerator.prepare(tiny_model().train())
        prepared = accelerator.prepare(model)
        with ComputedLogits() as computed:
            outputs.append(prepared(ids, labels=ids))
            accelerator.backward(outputs[0].loss)
        assert computed.count == 0
        assert_equal(outputs[0]["logits"], twin(ids, labels=ids).logits)
    else:

        class Reading(Trainer):
            def compute_loss(self, model, inputs, **options):
                outputs.append(model(**inputs))
                return outputs[-1].loss

        arguments = TrainingArguments(
            tmp_path, max_steps=1, bf16=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
        )
        data = [{"input_ids": row, "labels": row} for row in ids]
        Reading(model, arguments, train_dataset=data).train()
        assert outputs[0]["logits"].dtype == torch.float32
    row = handle.report()["loss"]
    assert (row.patched, row.left_alone, row.runs) == ([""], {}, {f"llmkernels::{OP}": 1})


def prepared(model, precision="bf16"):
    forget_precision()
    return accelerate.Accelerator(mixed_precision=precision, cpu=True).prepare(model)


def computes_no_logits(model, twin, handle, times=1):
    """Loss, gradients and logits are those of the twin, which is prepared alike, and only the loss's op has run."""
    ids = tiny_inputs()
    expected_loss, expected = gradients(twin, ids)
    with ComputedLogits() as computed:
        loss, found = gradients(model, ids)
    assert computed.count == 0
    assert_close(loss, expected_loss, 1e-5)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, 2 * rounding(torch.bfloat16))
    with torch.no_grad():
        assert_equal(model(ids, labels=ids)["logits"], twin(ids, labels=ids).logits)
    row = handle.report()["loss"]
    assert (row.patched, row.left_alone, row.runs) == ([""], {}, {f"llmkernels::{OP}": times + 1})


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_patched_after_accelerate(precision):
    """The loss runs under the wrappers that accelerate has put around the forward, and undoing restores these."""
    model, twin = prepared(tiny_model().train(), precision), prepared(tiny_model().train(), precision)
    before = vars(model).get("forward")
    handle = only_the_loss(model)
    computes_no_logits(model, twin, handle)
    handle.unpatch()
    after = vars(model).get("forward")
    assert after == before and getattr(after, "__func__", None) is getattr(before, "__func__", None)
    ids = tiny_inputs()
    assert_equal(model(ids, labels=ids), twin(ids, labels=ids))
    computes_no_logits(model, twin, only_the_loss(model))


def test_every_layer_patched_after_accelerate():
    """The same as patched before."""
    first, second = tiny_model().train(), prepared(tiny_model().train())
    handles = [llmkernels.patch(model, training=True) for model in (first, second)]
    models, ids = (prepared(first), second), tiny_inputs()
    (loss, found), (other_loss, other) = [gradients(model, ids) for model in models]
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(found[name], other[name]) for name in found)
    assert str(handles[0].report()) == str(handles[1].report())
    for model, handle in zip(models, handles, strict=True):
        handle.unpatch()  # accelerate's wrappers stay
        assert not handle.report()["loss"].patched
        assert "linear_cross_entropy" not in str(handle.report())
        logits = model(ids, labels=ids).logits
        assert type(logits) is Tensor and logits.dtype == torch.float32
        assert_equal(logits, prepared(tiny_model().train())(ids, labels=ids).logits)


@pytest.mark.parametrize("when", ["before", "after"])
def test_unwrapped_by_accelerate(when):
    """Without mixed precision then, and still on the op."""
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = tiny_model().train()
    handle = only_the_loss(model) if when == "before" else None
    model = accelerator.prepare(model)
    handle = handle or only_the_loss(model)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    computes_no_logits(model, tiny_model().train(), handle)
    handle.unpatch()
    ids = tiny_inputs()
    assert_equal(model(ids, labels=ids), tiny_model().train()(ids, labels=ids))


def test_a_copy_of_a_model_patched_after_accelerate():
    model, ids = prepared(tiny_model().train()), tiny_inputs()
    handle = only_the_loss(model)
    copied = copy.deepcopy(model)
    copied.lm_head.weight.data.mul_(2)
    unpatch(copied)
    doubled = copied(ids, labels=ids).logits
    assert type(doubled) is Tensor
    assert_close(doubled, 2 * model(ids, labels=ids)["logits"], rounding(torch.bfloat16))
    assert runs(handle) == {f"llmkernels::{OP}": 1}


def test_compiled_after_accelerate():
    model, twin, ids = prepared(tiny_model().train()), prepared(tiny_model().train()), tiny_inputs()
    only_the_loss(model)
    compiled = torch.compile(model, backend="eager")
    with ComputedLogits() as computed:
        loss, found = gradients(compiled, ids)
    assert computed.count == 0
    expected_loss, expected = gradients(twin, ids)
    assert_close(loss, expected_loss, 1e-5)
    for name, gradient in expected.items():
        assert_close(found[f"_orig_mod.{name}"], gradient, 2 * rounding(torch.bfloat16))


def test_patched_in_a_callback_of_trainer(tmp_path):
    """Which comes when the model is prepared."""
    handles = []

    class Patching(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **_):
            assert "forward" in vars(model)
            handles.append(llmkernels.patch(model, training=True))

    arguments = TrainingArguments(
        tmp_path, max_steps=2, bf16=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    data = [{"input_ids": row, "labels": row} for row in tiny_inputs()]
    Trainer(tiny_model(), arguments, train_dataset=data, callbacks=[Patching()]).train()
    row = handles[0].report()["loss"]
    assert (row.patched, row.left_alone, row.runs) == ([""], {}, {f"llmkernels::{OP}": 2})


def test_hooks_of_accelerate_around_the_model():
    """These are left alone, and the report says what to do."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = tiny_model().train(), tiny_inputs()
    hooks.add_hook_to_module(model, hooks.ModelHook())
    handle = llmkernels.patch(model, training=True)
    assert type(model(ids, labels=ids).logits) is Tensor
    row = handle.report()["loss"]
    assert row.left_alone == {
        "": "it has a forward of its own, set by hooks of accelerate: patch the model before those"
    }
    assert not row.patched and not row.runs
