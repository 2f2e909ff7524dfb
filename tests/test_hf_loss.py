"""patch(training=True): the loss of a causal language model without its logits."""

import copy
import pickle

import pytest
import torch
from transformers import Trainer, TrainingArguments

import llmkernels
from hf_models import FAMILIES, assert_close, lora, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch

OP = "linear_cross_entropy"


def runs(model_or_handle):
    return dict(model_or_handle.report()["loss"].runs)


def gradients(model, ids, labels=None, **options):
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids if labels is None else labels, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model, ids, tolerance=1e-4, **options):
    """Loss and gradients are those of the unpatched model, and the loss was computed without logits."""
    handle = llmkernels.patch(model, training=True)
    loss, found = gradients(model, ids, **options)
    assert runs(handle) == {f"llmkernels::{OP}": 1}
    handle.unpatch()
    expected_loss, expected = gradients(model, ids, **options)
    assert_close(loss, expected_loss, tolerance)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient(family, device):
    check(tiny_model(family, device).train(), tiny_inputs(device))


def test_ignored_labels(device):
    ids = tiny_inputs(device)
    labels = ids.masked_fill(torch.rand(ids.shape, device=device) < 0.4, -100)
    check(tiny_model(device=device).train(), ids, labels=labels)


@pytest.mark.parametrize("count", [7, torch.tensor(7)], ids=["int", "tensor"])
def test_accumulated_gradients(count, device):
    """A Trainer gives the number of tokens of all batches that are accumulated."""
    check(tiny_model(device=device).train(), tiny_inputs(device), num_items_in_batch=count)


def test_shifted_labels(device):
    """As context parallelism gives them."""
    ids = tiny_inputs(device)
    check(tiny_model(device=device).train(), ids, labels=ids, shift_labels=ids.roll(-1, 1))


def test_a_tied_head(device):
    model = tiny_model(device=device, tie_word_embeddings=True).train()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    check(model, tiny_inputs(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    with torch.autocast(device, dtype):
        check(model, ids, tolerance=2 * rounding(dtype))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device):
    model = tiny_model(device=device).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    check(model, tiny_inputs(device))


def test_lora(device):
    model = lora(tiny_model(device=device)).train()
    ids = tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    gradients(model, ids)
    head = model.get_base_model().lm_head
    assert runs(handle) == {f"llmkernels::{OP}" if type(head) is torch.nn.Linear else "without a kernel": 1}


def test_logits_are_there_for_whoever_asks(device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    expected = model(ids, labels=ids)
    llmkernels.patch(model, training=True)
    output = model(ids, labels=ids)
    assert "logits" not in output
    assert_close(output.logits, expected.logits, 1e-4)
    assert output.logits is output["logits"] is output[1] is output.to_tuple()[1]
    assert list(output.keys())[:2] == ["loss", "logits"]
    assert_close(model(ids, labels=ids)[1], expected.logits, 1e-4)
    assert_close(model(ids, labels=ids)["logits"], expected.logits, 1e-4)
    model(ids, labels=ids).logits.sum().backward()
    with torch.no_grad():
        output = model(ids, labels=ids)
    for copied in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert_close(copied.logits, expected.logits, 1e-4)


def test_logits_are_those_of_the_call(device):
    """In the grad mode and under the autocast of the forward, whenever somebody asks."""
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    llmkernels.patch(model, training=True)
    with torch.autocast(device, torch.bfloat16):
        output = model(ids, labels=ids)
    assert output.logits.dtype == torch.bfloat16 and output.logits.requires_grad
    with torch.no_grad():
        output = model(ids, labels=ids)
    assert output.logits.dtype == torch.float32 and not output.logits.requires_grad


def test_who_gets_the_logits_as_before(device):
    """Evaluation, no labels, a tuple, a part of the logits, another loss, a head that has to be called."""
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    assert model.eval()(ids, labels=ids).logits is not None
    assert model.train()(ids).loss is None
    assert not runs(handle)
    loss, logits, *_ = model(ids, labels=ids, return_dict=False)
    assert logits.shape[:2] == ids.shape
    part = model(ids, labels=ids[:, -3:], logits_to_keep=3)
    assert part.logits.shape[1] == 3
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert_close(model(ids, labels=ids).loss, model(ids).logits.sum(), 1e-4)
    assert "another loss function" in str(handle.report())
    del model._loss_function
    hook = model.lm_head.register_forward_hook(lambda module, args, output: output * 0)
    assert_close(model(ids, labels=ids).loss, torch.tensor(float(model.config.vocab_size)).log(), 1e-4)
    hook.remove()
    assert runs(handle) == {"without a kernel": 4}
    assert_close(model(ids, labels=ids).loss, loss, 1e-4)
    assert runs(handle) == {"without a kernel": 4, f"llmkernels::{OP}": 1}


def test_not_asked_for(device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    handle = llmkernels.patch(model)
    assert model(ids, labels=ids).logits is not None
    assert "loss" not in handle.report().rows


@pytest.mark.parametrize("decode", [True, False])
def test_generating_and_undoing(decode, device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected, cls = model.generate(ids, **options), type(model)
    handle = llmkernels.patch(model, training=True, decode=decode)
    for patched in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(patched) is type(model) and isinstance(patched, cls)
        assert torch.equal(patched.generate(ids, **options), expected)
        assert patched.train()(ids, labels=ids).loss.requires_grad
        patched.eval()
    if decode:
        assert handle.report().decode[0].reason is None, handle.report()
    unpatch(model)
    assert type(model) is cls


def test_a_replaced_forward_runs(device, monkeypatch):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    original = type(model).original.forward
    monkeypatch.setattr(type(model).original, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    assert model(ids, labels=ids).logits is not None
    assert runs(handle) == {"without a kernel": 1}


def test_compiled(device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    expected = model(ids, labels=ids).loss
    llmkernels.patch(model, training=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    assert_close(loss, expected, 1e-4)


def test_trainer(device, tmp_path):
    """The losses of ten steps with accumulated gradients, of transformers' Trainer."""

    def losses(training):
        model = tiny_model(device=device)
        llmkernels.patch(model, training=training)
        data = [{"input_ids": row, "labels": row} for seed in range(10) for row in tiny_inputs("cpu", seed=seed)]
        arguments = TrainingArguments(
            tmp_path,
            max_steps=10,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=device == "cpu",
            disable_tqdm=True,
            learning_rate=1e-3,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    found, expected = losses(True), losses(False)
    assert len(expected) == 10
    assert_close(found, expected, 1e-3)
