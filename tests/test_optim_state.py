"""State dicts and copies of the optimizers: what PyTorch's tests of optimizers ask of theirs."""

import copy
import io
import pickle

import pytest
import torch

from llmkernels.optim import AdamW
from optim_cases import (
    FLOATS,
    TORCH,
    assert_close_lists,
    both,
    loss_of,
    model,
    parameters,
    same_weights,
    state_of,
    train,
)
from oracles import assert_same

# State dicts, copies.


def continued(network, optimizer, steps=4):
    train(network, optimizer, steps)
    return network


@both
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"capturable": True}, {"fused": True}], ids=str)
def test_state_dict_round_trip(ours, options, device):
    if options.get("capturable") and device == "cpu":
        options = {}
    network = model(device)
    optimizer = ours(network.parameters(), **options)
    train(network, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(network)
    loaded = ours(other.parameters(), lr=77.0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    same_weights(continued(network, optimizer), continued(other, loaded), rtol=0, atol=0)
    assert loaded.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@both
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_state_dicts_of_torch_and_back(ours, options, device):
    network = model(device)
    optimizer = TORCH[ours](network.parameters(), **options)
    train(network, optimizer)
    for kind in (ours, TORCH[ours], ours):
        other = copy.deepcopy(network)
        loaded = kind(other.parameters(), lr=77.0)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch.optim's may share its tensors
        assert loaded.param_groups[0]["lr"] == 1e-3
        same_weights(continued(network, optimizer), continued(other, loaded), rtol=1e-5, atol=1e-6)
        network, optimizer = other, loaded


@pytest.mark.parametrize("fused", [None, True])
def test_steps_in_a_state_dict_are_where_torch_has_them(fused, device):
    for kind in (AdamW, torch.optim.AdamW):
        network = model(device)
        optimizer = kind(network.parameters(), fused=fused)
        train(network, optimizer)
        saved = optimizer.state_dict()["state"]
        assert {state["step"].device.type for state in saved.values()} == {device if fused else "cpu"}
        assert {state["step"].item() for state in saved.values()} == {5.0}
        train(network, optimizer)  # a copy has been saved
        if kind is AdamW and device == "cuda" and not fused:
            assert {state["step"].item() for state in saved.values()} == {5.0}


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_moments_keep_their_dtype_when_loaded(dtype, state_dtype, device):
    network = model(device, dtype)
    optimizer = AdamW(network.parameters(), state_dtype=state_dtype)
    train(network, optimizer)
    other = copy.deepcopy(network)
    loaded = AdamW(other.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert {x.dtype for x in state_of(loaded, name)} == {state_dtype or torch.float32}
        assert_same(tuple(state_of(loaded, name)), tuple(state_of(optimizer, name)))
    same_weights(continued(network, optimizer), continued(other, loaded), rtol=0, atol=0)


def test_a_state_dict_of_torch_in_16_bits(device):
    network = model(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(network.parameters())
    train(network, optimizer)
    loaded = AdamW(network.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    assert {x.dtype for x in state_of(loaded, "exp_avg")} == {torch.float32}
    assert_close_lists(state_of(loaded, "exp_avg"), [x.float() for x in state_of(optimizer, "exp_avg")], rtol=0, atol=0)
    train(network, loaded)
    optimizer.load_state_dict(loaded.state_dict())
    assert {x.dtype for x in state_of(optimizer, "exp_avg")} == {torch.bfloat16}
    train(network, optimizer)


@both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hooks_that_change_the_moments(ours, dtype, device):
    """Before they are loaded, and after it."""
    network = model(device, dtype)
    optimizer = ours(network.parameters())
    train(network, optimizer)

    def halved(optimizer, state):
        moments = {i: {**of_param, "exp_avg": of_param["exp_avg"] / 2} for i, of_param in state["state"].items()}
        return {**state, "state": moments}

    def cleared(optimizer):
        for state in optimizer.state.values():
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])

    loaded = ours(network.parameters())
    loaded.register_load_state_dict_pre_hook(halved)
    loaded.register_load_state_dict_post_hook(cleared)
    loaded.load_state_dict(optimizer.state_dict())
    assert_same(tuple(state_of(loaded, "exp_avg")), tuple(x / 2 for x in state_of(optimizer, "exp_avg")))
    assert not any(x.any() for x in state_of(loaded, "exp_avg_sq"))
    assert len(loaded._optimizer_load_state_dict_pre_hooks) == len(loaded._optimizer_load_state_dict_post_hooks) == 1


@both
def test_loading_leaves_a_state_dict_as_it_is(ours, device):
    """And equal optimizers have equal state dicts."""
    network = model(device)
    optimizer = ours(network.parameters(), amsgrad=True)
    train(network, optimizer)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = copy.deepcopy(network)
    loaded = ours(other.parameters())
    loaded.load_state_dict(saved)
    assert loaded.state_dict()["param_groups"] == kept["param_groups"]
    train(other, loaded)
    assert saved["param_groups"] == kept["param_groups"] and saved["state"].keys() == kept["state"].keys()
    for number, state in kept["state"].items():
        assert state.keys() == saved["state"][number].keys()
        for name, x in state.items():
            assert_same(x, saved["state"][number][name])
    train(network, optimizer)
    for number, state in optimizer.state_dict()["state"].items():
        for name, x in state.items():
            assert_same(x, loaded.state_dict()["state"][number][name])


@both
def test_state_dicts_of_older_versions(ours, device):
    """Without the options that came later; with steps that are numbers."""
    network = model(device)
    optimizer = ours(network.parameters())
    train(network, optimizer)
    older = copy.deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        for name in set(group) - {"lr", "betas", "eps", "weight_decay", "params"}:
            del group[name]
    for state in older["state"].values():
        state["step"] = int(state["step"])
    other = copy.deepcopy(network)
    loaded = ours(other.parameters())
    loaded.load_state_dict(older)
    same_weights(continued(network, optimizer), continued(other, loaded), rtol=0, atol=0)
    assert {step.item() for step in state_of(loaded, "step")} == {9.0}


@both
def test_a_state_dict_before_the_first_step(ours, device):
    network = model(device)
    optimizer = ours(network.parameters(), lr=0.25)
    assert optimizer.state_dict()["state"] == {}
    other = copy.deepcopy(network)
    for kind in (ours, TORCH[ours]):
        loaded = kind(other.parameters())
        loaded.load_state_dict(optimizer.state_dict())
        assert loaded.param_groups[0]["lr"] == 0.25 and not loaded.state
    back = ours(network.parameters())
    back.load_state_dict(loaded.state_dict())
    train(network, back, 1)


@both
def test_state_dicts_of_some_parameters(ours, device):
    """Those without a gradient so far have no state, before and after."""
    network, other = model(device), model(device)
    optimizer = ours(network.parameters())
    loss_of(network).backward()
    network[0].weight.grad = None
    optimizer.step()
    loaded = TORCH[ours](other.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = ours(other.parameters())
    back.load_state_dict(copy.deepcopy(loaded.state_dict()))
    assert [bool(back.state.get(param)) for param in other.parameters()] == [False, True, True, True]
    other.load_state_dict(network.state_dict())
    same_weights(continued(network, optimizer), continued(other, back), rtol=0, atol=0)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_state_dicts_move_between_devices(ours, options):
    """Saved on one device and loaded on the other, by PyTorch's class in between."""
    network = model("cuda")
    optimizer = ours(network.parameters(), **options)
    train(network, optimizer)
    for device in ("cpu", "cuda"):
        for kind in (ours, TORCH[ours]):
            if device == "cpu" and options.get("capturable"):  # which PyTorch has on accelerators alone
                continue
            other = copy.deepcopy(network).to(device)
            loaded = kind(other.parameters())
            loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert {x.device.type for x in state_of(loaded, "exp_avg")} == {device}
            continued(other, loaded)
            assert {step.item() for step in state_of(loaded, "step")} == {9.0}
            back = ours(network.parameters())
            back.load_state_dict(loaded.state_dict())
            assert {x.device.type for x in state_of(back, "exp_avg")} == {"cuda"}


def test_state_dicts_that_do_not_fit():
    one, two = parameters([torch.ones(2)]), parameters([torch.ones(2), torch.ones(2)])
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        AdamW(one).load_state_dict(AdamW(two).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        AdamW([{"params": [x]} for x in two]).load_state_dict(AdamW(one).state_dict())


@both
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies(ours, how, device):
    network = model(device)
    optimizer = ours(network.parameters(), amsgrad=True, max_grad_norm=0.25, state_dtype=torch.bfloat16)
    train(network, optimizer)
    other, copied = how((network, optimizer))
    assert copied.max_grad_norm == 0.25
    assert {name for name in vars(copied) if name[0] != "_"} == {name for name in vars(optimizer) if name[0] != "_"}
    same_weights(continued(network, optimizer), continued(other, copied), rtol=0, atol=0)
    assert repr(copied) == repr(optimizer)
