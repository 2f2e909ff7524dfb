"""patch(training=True): the loss of a causal language model without its logits."""

import copy
import dataclasses
import io
import pickle
from collections import Counter, OrderedDict

import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from transformers import Trainer, TrainingArguments

import llmkernels
from hf_models import FAMILIES, LAYERS, ComputedLogits, assert_close, lora, rounding, tiny_inputs, tiny_model
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


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (2, 1, -1)])
def test_labels_of_another_shape(shape, device):
    """transformers flattens both logits and labels."""
    ids = tiny_inputs(device)
    labels = ids.view(shape)
    check(tiny_model(device=device).train(), ids, labels=labels)
    check(tiny_model(device=device).train(), ids, labels=labels, shift_labels=ids.roll(-1, 1).view(shape))


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


# What may be done with an output whose logits may not have been computed.
WAYS = {
    "attribute": lambda out: out.logits,
    "getattr": lambda out: getattr(out, "logits", None),
    "hasattr": lambda out: hasattr(out, "logits"),
    "vars": lambda out: vars(out)["logits"],
    "name": lambda out: out["logits"],
    "number": lambda out: out[1],
    "number from the end": lambda out: out[-2],
    "slice": lambda out: out[:2],
    "slice of the rest": lambda out: out[1:],
    "get": lambda out: out.get("logits"),
    "get with a default": lambda out: out.get("logits", 3),
    "in": lambda out: "logits" in out,
    "len": len,
    "iter": list,
    "reversed": lambda out: [*reversed(out)],
    "keys": lambda out: [*out.keys()],
    "values": lambda out: [*out.values()],
    "items": lambda out: [*out.items()],
    "to_tuple": lambda out: out.to_tuple(),
    "dict": dict,
    "OrderedDict": lambda out: OrderedDict(out),
    "merged": lambda out: {} | out,
    "update": lambda out: (found := {}, found.update(out))[0],
    "**": lambda out: dict(**out),
    "type of dict": lambda out: type(out)(dict(out)),
    "type of items": lambda out: type(out)([*out.items()]),
    "type of **": lambda out: type(out)(**out),
    "pattern": lambda out: _matched(out),
    "tree_map": lambda out: tree_map_only(Tensor, lambda tensor: tensor * 2, out),
    "tree_flatten": lambda out: tree_flatten(out)[0],
    "tree_unflatten": lambda out: tree_unflatten(*tree_flatten(out)),
    "fields": lambda out: [(field.name, getattr(out, field.name)) for field in dataclasses.fields(out)],
    "replace": lambda out: dataclasses.replace(out, loss=None),
    "asdict": dataclasses.asdict,
    "astuple": dataclasses.astuple,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda out: pickle.loads(pickle.dumps(out)),
    "save": lambda out: _saved(out),
    "repr": lambda out: repr(out).partition("logits=")[2],
    "==": lambda out: out == out,
    "== of another": lambda out: out == type(out)(loss=out.loss, logits=out.logits + 1),
    "assigned": lambda out: (setattr(out, "logits", out.logits * 2), out)[1],
    "assigned by name": lambda out: (out.__setitem__("logits", out["logits"] * 2), out)[1],
    "numpy": lambda out: out.logits.numpy().tolist(),
    "in place": lambda out: (out.logits.mul_(2)[..., 0].zero_(), out.logits)[1],
    "compiled": lambda out: torch.compile(lambda logits: logits * 2, backend="eager")(out.logits),
    "address": lambda out: out.logits.data_ptr() != 0,
}


def _matched(out):
    match out:
        case {"logits": logits}:
            return logits


def _saved(out):
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def outcome(way, out):
    try:
        return way(out)
    except Exception as error:
        return type(error), str(error)


def assert_equal(found, expected, name=None):
    """The same containers, and the very logits; the loss is computed by another op."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and (found.dtype, found.device) == (expected.dtype, expected.device)
        assert_close(found, expected, 1e-5 if expected.dim() == 0 else 0)
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [*found] == [*expected]
        found, expected = [*found.values()], [*expected.values()]
    if isinstance(expected, tuple | list):
        for ours, theirs in zip(found, expected, strict=True):
            assert_equal(ours, theirs)
    elif isinstance(expected, bool | int | str | None):
        assert found == expected


def only_the_loss(model):
    """The layers stay transformers', so the hidden states are the same bits."""
    kinds = ("rms_norm", "layer_norm", "rope", "gated_mlp", "mlp", "add_rms_norm", "decode")
    return llmkernels.patch(model, **dict.fromkeys(kinds, False), training=True)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_logits_are_there_for_whoever_asks(way, device):
    """In whatever way, as if they had been computed in the forward."""
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    expected = outcome(WAYS[way], model(ids, labels=ids))
    handle = only_the_loss(model)
    output = model(ids, labels=ids)
    assert runs(handle) == {f"llmkernels::{OP}": 1}
    assert_equal(outcome(WAYS[way], output), expected)


CONVERSIONS = {
    "none": lambda out: out,
    "mapping": lambda out: type(out)(dict(out.items())),
    "tree_map": lambda out: tree_map_only(Tensor, lambda tensor: tensor.float(), out),
    "fsdp": lambda out: _apply_to_tensors(lambda tensor: tensor.requires_grad and tensor.to(torch.float64), out),
    "fsdp2": lambda out: (out["logits"]._base, out["logits"].register_hook(lambda grad: grad), out)[-1],
    "accelerate": lambda out: pytest.importorskip("accelerate.utils").convert_outputs_to_fp32(lambda: out)(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_wrappers_read_nothing(name, device):
    """What wrappers do to every output computes no logits, and gives the same once somebody reads them."""
    model, ids = tiny_model(device=device, dtype=torch.bfloat16).train(), tiny_inputs(device)
    expected = CONVERSIONS[name](model(ids, labels=ids))["logits"]
    only_the_loss(model)
    with ComputedLogits() as computed:
        logits = CONVERSIONS[name](model(ids, labels=ids))["logits"]
        assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
        assert logits.requires_grad == expected.requires_grad
        assert computed.count == 0
        _ = logits + 0
        assert computed.count > 0
    assert_equal(logits, expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["attribute", "items", "tree_map", "replace", "type of dict"])
def test_gradients_of_logits(name, tied, device):
    """Beside those of the loss; the parameters' are summed."""

    def gradients_of_both(model):
        output = WAYS[name](model(ids, labels=ids))
        logits = next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.dim() == 3)
        model.zero_grad(set_to_none=True)
        logits.register_hook(lambda grad: grad * 2)
        (model(ids, labels=ids).loss + logits.square().mean()).backward()
        return [p.grad for p in model.parameters()]

    model, ids = tiny_model(device=device, tie_word_embeddings=tied).train(), tiny_inputs(device)
    expected = gradients_of_both(model)
    only_the_loss(model)
    for found, gradient in zip(gradients_of_both(model), expected, strict=True):
        assert_close(found, gradient, 1e-4)


# What is done to logits in place, and what is asked of them then: results, or gradients of a sum of squares.
IN_PLACE = {
    "scaled": lambda logits: logits.mul_(3),
    "masked": lambda logits: logits[..., 3].fill_(-2),
    "a view": lambda logits: logits.view(-1).mul_(3),
    "never": lambda logits: logits,
}


def _squares(logits):
    return logits.double().square().sum()


def _of_conversion_before(model, logits, write):
    converted = logits.double()
    write(logits)
    return converted * 1


def _of_conversion_written(model, logits, write):
    converted = logits.float()
    write(converted)
    return torch.autograd.grad(_squares(converted), model.lm_head.weight)[0]


def _retained(model, logits, write):
    write(logits)
    logits.retain_grad()
    (_squares(logits) + logits.sum()).backward()
    return logits.grad


def _accumulated(model, logits, write):
    write(logits)
    (_squares(logits) + logits.sum()).backward(inputs=[logits])
    return logits.grad


ASKED = {
    "values": lambda model, logits, write: (write(logits), logits.double())[1] * 1,
    "conversion before": _of_conversion_before,
    "conversion written": _of_conversion_written,
    "of weight": lambda model, logits, write: torch.autograd.grad(
        (write(logits), _squares(logits))[1], model.lm_head.weight
    )[0],
    "of logits": lambda model, logits, write: torch.autograd.grad((write(logits), _squares(logits))[1], logits)[0],
    "retained": _retained,
    "accumulated": _accumulated,
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("write", IN_PLACE)
def test_conversions_of_logits_that_change(write, asked, device):
    """A conversion has the values, and the gradient, of the time it was made."""
    model, ids = tiny_model(device=device, dtype=torch.bfloat16).train(), tiny_inputs(device)
    expected = ASKED[asked](model, model(ids, labels=ids).logits, IN_PLACE[write])
    only_the_loss(model)
    found = ASKED[asked](model, model(ids, labels=ids).logits, IN_PLACE[write])
    assert_close(found, expected, 2e-2)


def test_logits_in_a_function_of_autograd(device):
    """Which gets the tensor itself, past __torch_function__."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    [expected] = torch.autograd.grad(2 * model(ids, labels=ids).logits.square().sum(), model.lm_head.weight)
    only_the_loss(model)
    logits = model(ids, labels=ids).logits
    [found] = torch.autograd.grad((Double.apply(logits) * logits).sum(), model.lm_head.weight)
    assert_close(found, expected, 1e-4)


def test_logits_under_torch_func(device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        output = torch.func.functional_call(model, parameters, (ids,), {"labels": ids})
        return output.loss + output["logits"].square().mean()

    expected = torch.func.grad(loss)(parameters)
    only_the_loss(model)
    for name, gradient in torch.func.grad(loss)(parameters).items():
        assert_close(gradient, expected[name], 1e-4)


def test_logits_of_changed_weights_are_an_error(device):
    """They would be others than those of the forward. Read before, they stay."""
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    llmkernels.patch(model, training=True)
    read, unread = model(ids, labels=ids), model(ids, labels=ids)
    before = read.logits.clone()
    read.loss.backward()
    optimizer.step()
    assert torch.equal(read.logits, before)
    with pytest.raises(RuntimeError, match="read the logits before the optimizer steps"):
        unread.logits.sum()


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


def test_a_newer_torch_computes_the_loss_from_logits(monkeypatch, device):
    monkeypatch.setattr("llmkernels.hf.modules.loss.HAS_PRIVATE", False)
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    expected = model(ids, labels=ids).loss
    handle = llmkernels.patch(model, training=True)
    assert_close(model(ids, labels=ids).loss, expected, 1e-4)
    assert runs(handle) == {"without a kernel": 1} and "torch.func may be at work" in str(handle.report())


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


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family, device):
    """The graph has the op, and the product with the head is in no other place."""
    model, ids = tiny_model(family, device).train(), tiny_inputs(device)
    expected_loss, expected = gradients(model, ids)
    llmkernels.patch(model, training=True)
    ops = Counter()

    def backend(graph, _):
        ops.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    loss, found = gradients(torch.compile(model, fullgraph=True, backend=backend), ids)
    assert ops[f"llmkernels.{OP}.default"] == 1
    assert ops[str(torch.nn.functional.linear)] == 7 * LAYERS
    assert_close(loss, expected_loss, 1e-4)
    for name, gradient in expected.items():
        assert_close(found[f"_orig_mod.{name}"], gradient, 1e-4)


def test_compiled_with_another_loss(device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    llmkernels.patch(model, training=True)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids, labels=ids).loss, model(ids).logits.sum(), 1e-4)


def test_report_of_calls_that_need_logits(device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    model(ids, labels=ids, return_dict=False)
    model(ids, labels=ids[:, -3:], logits_to_keep=3)
    report = handle.report()
    assert report["loss"].fallbacks == {
        "return_dict=False asks for a tuple": 1,
        "logits_to_keep asks for a part of the logits": 1,
    }
    assert "loss without a kernel, 1 times: return_dict=False asks for a tuple" in str(report)


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
