"""What a class from outside of transformers reads beside its parameters: a step has it as it is, or does not run."""

import copy

import pytest
import torch

import llmkernels
from hf_models import assert_close, tiny_inputs
from llmkernels.hf.classes.cache_name import cache_name
from test_family_strangers import made
from test_foreign_models import check_no_step, fresh, replace


@pytest.fixture
def beacon():
    return fresh("beacon")


def loop(model, ids):
    """The logits of some tokens behind a prompt, one by one."""
    output = model(ids, use_cache=True)
    cache, found = {cache_name(): getattr(output, cache_name())}, []
    for index in range(3):
        found.append(model(ids[:, index : index + 1], use_cache=True, **cache).logits)
    return torch.cat(found, 1)


def multiply_attention(beacon, by, init=""):
    """What attention gives is multiplied by an expression."""
    if init:
        replace(beacon, "Gaze.__init__", f"def __init__(self, *args):\n    original_init(self, *args)\n    {init}")
        vars(beacon)["original_init"] = vars(beacon)["original"]
    replace(beacon, "Gaze.forward", f"def forward(self, *args):\n    return original(self, *args) * {by}")


def other_method(gaze):
    gaze.attended = lambda q, k, v, mask: 2 * type(gaze).attended(gaze, q, k, v, mask)


def other_config(gaze):
    gaze.settings = copy.deepcopy(gaze.settings)
    gaze.settings.gain = 3.0


# What is read, by which line of __init__ it is there, and what gives it another value.
VALUES = {
    "a list": ("self.gains[0]", "self.gains = [1.5, 2.0]", lambda gaze: gaze.gains.__setitem__(0, 3.0)),
    "a tuple": ("self.gains[0]", "self.gains = (1.5, 2.0)", lambda gaze: setattr(gaze, "gains", (3.0, 2.0))),
    "a private number": ("self._gain", "self._gain = 1.5", lambda gaze: setattr(gaze, "_gain", 3.0)),
    "a tensor": ("self.gain", "self.gain = torch.tensor(1.5)", lambda gaze: gaze.gain.fill_(3.0)),
    "a number of the class": ("self.GAIN", "", lambda gaze: setattr(gaze, "GAIN", 3.0)),
    "a number that may be there": ("getattr(self, 'gain', 1.5)", "", lambda gaze: setattr(gaze, "gain", 3.0)),
    "a method": ("1.5", "", other_method),
    "a config": ("self.settings.gain", "self.settings = self.config; self.settings.gain = 1.5", other_config),
}


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "amid"])
@pytest.mark.parametrize("what", VALUES)
def test_a_value_of_a_module(what, when, beacon, device):
    by, init, change = VALUES[what]
    beacon.Gaze.GAIN = 1.5
    multiply_attention(beacon, by, init)
    model, ids = made(beacon.BeaconForCausalLM).to(device), tiny_inputs(device)
    changed = copy.deepcopy(model)
    change(changed.tower[1].gaze)
    assert not torch.equal(changed(ids).logits, model(ids).logits)
    expected = loop(changed, ids)
    if when == "before":
        change(model.tower[1].gaze)
    llmkernels.patch(model)
    if when == "amid":
        loop(model, ids)
        change(model.tower[1].gaze)
    assert_close(loop(model, ids), expected)


@torch.no_grad()
@pytest.mark.parametrize("place", ["a file", "a class"])
def test_a_constant_beside_a_module(place, beacon, device):
    owner = beacon if place == "a file" else beacon.Gaze
    owner.GAIN = 1.5
    multiply_attention(beacon, "GAIN" if place == "a file" else "self.GAIN")
    model, ids = made(beacon.BeaconForCausalLM).to(device), tiny_inputs(device)
    owner.GAIN = 3.0
    expected = loop(model, ids)
    owner.GAIN = 1.5
    handle = llmkernels.patch(model)
    loop(model, ids)
    owner.GAIN = 3.0
    assert_close(loop(model, ids), expected)
    assert set(handle.report().decode[0].forwards) == {"by the decode step"}


def test_sequences_that_see_each_other(beacon, device):
    multiply_attention(beacon, "len(args[0])")
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, "something else for a sequence beside others")
