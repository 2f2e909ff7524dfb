"""Training a patched model: the gradient of every parameter, checkpointing, mixed precision, loss curves."""

import copy

import pytest
import torch

import llmkernels
from hf_models import FAMILIES, OPS, CountOps, assert_close, lora, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch


def gradients(model, ids):
    """Loss and gradients by name of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(model, ids, tolerance=1e-4, norms=OPS["rms_norm"] + OPS["add_rms_norm"]):
    """Patched and unpatched give the same gradients for the same parameters. Unpatches the model.

    `norms` is how many of them have a gradient to pass on.
    """
    with CountOps() as counter:
        loss, found = gradients(model, ids)
    assert counter.counts["rms_norm_backward"] == norms
    assert counter.counts["rope_backward"] == OPS["rope"]
    assert counter.counts["swiglu_backward"] == OPS["swiglu"]
    unpatch(model)
    expected_loss, expected = gradients(model, ids)
    assert_close(loss, expected_loss, tolerance)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert_close(found[name], gradient, tolerance)
    return counter.counts


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_every_parameter(family, device):
    model = tiny_model(family, device).train()
    llmkernels.patch(model)
    check_gradients(model, tiny_inputs(device))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_low_precision(dtype, device):
    """The error against float32 is at most twice that of the unpatched model."""
    model, ids = tiny_model(device=device, dtype=dtype).train(), tiny_inputs(device)
    _, oracle = gradients(copy.deepcopy(model).float(), ids)
    _, unpatched = gradients(model, ids)
    llmkernels.patch(model)
    _, patched = gradients(model, ids)
    for name, expected in oracle.items():
        error, allowed = ((g[name].float() - expected).norm() / expected.norm() for g in (patched, unpatched))
        assert error <= 2 * allowed + torch.finfo(dtype).eps, name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family, reentrant, device):
    model = tiny_model(family, device).train()
    llmkernels.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    counts = check_gradients(model, tiny_inputs(device))
    assert counts["swiglu"] == 2 * OPS["swiglu"]  # once more in the backward pass


def test_frozen_parameters_get_no_gradient(device):
    model = tiny_model(device=device).train()
    llmkernels.patch(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "norm" not in name)
    check_gradients(model, tiny_inputs(device))


def test_lora_gradients(device):
    model = lora(tiny_model(device=device)).train()
    llmkernels.patch(model)
    check_gradients(model, tiny_inputs(device), norms=4)  # before the first norm there is nothing to train
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora" in name or "lm_head" in name for name in trained)


def test_gradient_of_inputs_embeds(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    results = []
    for patched in (False, True):
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        handle = llmkernels.patch(model) if patched else None
        model(inputs_embeds=embeds).logits.square().sum().backward()
        results.append(embeds.grad)
    assert handle.report()["rope"].patched
    assert_close(*reversed(results), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family, dtype, device):
    """float32 weights under autocast: the types of every module's output and the gradients are those of eager."""
    model, ids = tiny_model(family, device).train(), tiny_inputs(device)

    def step():
        types = {}
        hooks = []
        for name, module in model.named_modules():
            if name.endswith(("proj", "mlp", "self_attn", "input_layernorm", "model.norm")) or name[-1:].isdigit():

                def record(module, args, output, name=name):
                    types[name] = (output[0] if isinstance(output, tuple) else output).dtype

                hooks.append(module.register_forward_hook(record))
        with torch.autocast(device, dtype):
            loss, grads = gradients(model, ids)
        for hook in hooks:
            hook.remove()
        return types, loss, grads

    types, loss, expected = step()
    handle = llmkernels.patch(model)
    patched_types, patched_loss, found = step()
    assert len(handle.report()["add_rms_norm"].patched) == 2
    assert patched_types == types
    assert dtype in types.values()
    tolerance = 2 * rounding(dtype)
    assert_close(patched_loss, loss, tolerance)
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        assert_close(found[name], gradient, tolerance)


def loss_curve(model, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    losses = []
    for step in range(steps):
        loss, _ = gradients(model, tiny_inputs(device, seed=step % 4))
        optimizer.step()
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_curve_of_20_steps(family, device):
    model = tiny_model(family, device).train()
    twin = copy.deepcopy(model)
    llmkernels.patch(model)
    found, expected = loss_curve(model), loss_curve(twin)
    assert expected[-4:].mean() < 0.8 * expected[:4].mean()  # it learns
    assert_close(found, expected, 1e-3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(ours, theirs, 5e-3)


def scaled_run(model, optimizer, dtype=torch.float16, skipped=()):
    """The loss and the scale of 24 steps; in float32 without a scale, where the steps to skip are given."""
    device = next(model.parameters()).device.type
    half = dtype is not torch.float32
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=3, enabled=half)
    losses, scales = [], []
    for step in range(24):
        ids = tiny_inputs(device, seed=step % 4)
        with torch.autocast(device, torch.float16, enabled=half):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step not in skipped:
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().float())
        scales.append(scaler.get_scale())
    return torch.stack(losses), scales


@pytest.mark.parametrize("family", FAMILIES)
def test_grad_scaler_end_to_end(family, device):
    """Loss, layers and optimizer in fp16: the scales of eager, which skips steps, too, and no more of an error."""
    model = tiny_model(family, device).train()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model)
    handle = llmkernels.patch(model, training=True)
    found, scales = scaled_run(model, llmkernels.optim.AdamW(model.parameters(), lr=1e-3))
    assert handle.report()["loss"].patched
    expected, expected_scales = scaled_run(eager, torch.optim.AdamW(eager.parameters(), lr=1e-3))
    assert scales == expected_scales
    before = [2.0**16, *scales]
    skipped = [step for step, scale in enumerate(scales) if scale < before[step]]
    assert 1 <= len(skipped) <= 8  # a larger scale overflows
    oracle, _ = scaled_run(exact, torch.optim.AdamW(exact.parameters(), lr=1e-3), torch.float32, skipped)
    assert oracle[-4:].mean() < 0.8 * oracle[:4].mean()  # it learns
    assert (found - oracle).norm() <= 2 * (expected - oracle).norm()
