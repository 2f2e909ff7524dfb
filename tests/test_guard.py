"""Whether a model is what its description was read from: hf/step/guard.py, and the record it asks, csrc/record.h."""

import collections
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import llmkernels
from families import family_model
from generating import small_model
from llmkernels.hf.errors import NoStep
from llmkernels.hf.step import guard
from llmkernels.hf.step.describe import describe
from llmkernels.hf.step.guard import Snapshot
from llmkernels.hf.step.record import Lists


def layer(model):
    return model.model.layers[1]


def attention(model):
    return layer(model).self_attn


def rotary(model):
    return model.model.rotary_emb


def replace_parameter(module, name="weight"):
    setattr(module, name, nn.Parameter(getattr(module, name).detach().clone()))


def set_data(parameter, data):
    parameter.data = data


# What somebody may do to a model between two steps.
CHANGES = {
    "a parameter": lambda model: replace_parameter(layer(model).mlp.down_proj),
    "a bias": lambda model: replace_parameter(attention(model).q_proj, "bias"),
    "no bias": lambda model: setattr(attention(model).q_proj, "bias", None),
    "data": lambda model: set_data(model.model.norm.weight, model.model.norm.weight.clone()),
    "order": lambda model: set_data(attention(model).o_proj.weight, attention(model).o_proj.weight.data.t()),
    "dtype": lambda model: set_data(model.model.norm.weight, model.model.norm.weight.data.view(torch.half)[:128]),
    "shape": lambda model: set_data(model.model.norm.weight, model.model.norm.weight.data[None]),
    "start": lambda model: set_data(layer(model).mlp.up_proj.weight, layer(model).mlp.up_proj.weight.data[1:]),
    "no memory": lambda model: model.model.norm.weight.untyped_storage().resize_(0),
    "another buffer": lambda model: setattr(
        model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq.clone()
    ),
    "a written buffer": lambda model: rotary(model).inv_freq.mul_(1),
    "one more buffer": lambda model: model.model.norm.register_buffer("more", torch.ones(1)),
    "one more parameter": lambda model: model.model.norm.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a number": lambda model: setattr(attention(model), "scaling", 0.3),
    "eps": lambda model: setattr(layer(model).input_layernorm, "variance_epsilon", 0.5),
    "a member": lambda model: setattr(layer(model), "more", 1),
    "a hidden child": lambda model: vars(layer(model)).update(mlp=nn.Identity()),
    "a child": lambda model: setattr(layer(model), "mlp", nn.Identity()),
    "one more child": lambda model: layer(model).add_module("more", nn.Identity()),
    "a layer less": lambda model: model.model.layers.__delitem__(1),
    "layers in another order": lambda model: model.model.layers._modules.update(
        {"0": model.model.layers[1], "1": model.model.layers[0]}
    ),
    "a class": lambda model: setattr(layer(model).mlp, "__class__", type("Other", (type(layer(model).mlp),), {})),
    "a forward": lambda model: setattr(layer(model).mlp, "forward", lambda x: x),
    "a hook": lambda model: layer(model).mlp.register_forward_hook(lambda *arguments: None),
    "a hook before": lambda model: layer(model).mlp.register_forward_pre_hook(lambda *arguments: None),
    "training": lambda model: layer(model).mlp.train(),
    "a config of its own": lambda model: setattr(attention(model), "config", copy.deepcopy(model.config)),
    "an entry of the config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a list in the config": lambda model: model.config.layer_types.append("full_attention"),
    "the attention": lambda model: model.set_attn_implementation("eager"),
    "a helper": lambda model: setattr(model, "prepare_inputs_for_generation", lambda *arguments, **options: {}),
}


@pytest.mark.parametrize("how", CHANGES)
@torch.no_grad()
def test_a_change_is_seen(how):
    model = family_model("qwen2", hidden_size=128)
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    assert snapshot.holds(model) and snapshot.holds(model)
    CHANGES[how](model)
    assert not snapshot.holds(model)


@torch.no_grad()
def test_what_changes_nothing():
    """Weights that are written in place, which a step reads as they are; and equal numbers."""
    model = small_model()
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    model.lm_head.weight.mul_(2)
    attention(model).scaling = float(str(attention(model).scaling))
    model.config.use_cache = False
    layer(model).mlp.register_forward_hook(lambda *arguments: None).remove()
    assert snapshot.holds(model)


@torch.no_grad()
def test_members_that_come_while_a_model_is_looked_at(monkeypatch):
    """As those of a thread that patches the model meanwhile."""
    model = small_model()
    llmkernels.patch(model)
    members, asked = vars(attention(model)), guard.is_config

    def grow(value):
        members[f"more_{len(members)}"] = None
        return asked(value)

    monkeypatch.setattr(guard, "is_config", grow)
    assert len(describe(model).layers) == len(model.model.layers)


FUNCTIONS = {
    "a forward": lambda model: (type(layer(model).mlp).original, "forward"),
    "a patched forward": lambda model: (type(layer(model).mlp), "forward"),
    "a call": lambda model: (type(attention(model)), "__call__"),
    "a helper": lambda model: (type(model).original, "_update_model_kwargs_for_generation"),
}


@pytest.mark.parametrize("which", FUNCTIONS)
def test_a_replaced_function_is_seen(which):
    model = small_model()
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FUNCTIONS[which](model), lambda *arguments, **options: None)
        assert not snapshot.holds(model)
    assert snapshot.holds(model)


def test_a_name_of_the_file_is_seen(monkeypatch):
    from transformers.models.qwen2 import modeling_qwen2

    model = family_model("qwen2")
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    monkeypatch.setattr(modeling_qwen2, "rotate_half", lambda x: x)
    assert not snapshot.holds(model)


def test_what_a_hook_that_does_nothing_becomes():
    """It is asked again: the record is of what can not change by itself."""

    def make_inputs_require_grads(module, inputs, output):
        pass

    make_inputs_require_grads.__module__ = "transformers.left_behind"
    model = small_model()
    model.model.embed_tokens.register_forward_hook(make_inputs_require_grads)
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    assert snapshot.holds(model)
    (key,) = model.model.embed_tokens._forward_hooks
    model.model.embed_tokens._forward_hooks[key] = lambda *arguments: None
    assert not snapshot.holds(model)


def test_nothing_is_kept_alive():
    model = small_model()
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    dead = weakref.ref(model), weakref.ref(model.lm_head.weight), weakref.ref(model.model.layers[0])
    assert all(isinstance(storage, torch.UntypedStorage) for storage in snapshot.memory())
    del model
    gc.collect()
    assert [each() for each in dead] == [None] * 3
    assert snapshot.memory() is None


def test_memory_ends_with_a_tensor():
    model = small_model()
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    held = snapshot.memory()
    storage = model.lm_head.weight.untyped_storage().data_ptr()
    assert storage in [each.data_ptr() for each in held]
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert snapshot.memory() is None


def test_a_module_less_library_has_no_step(monkeypatch):
    model = small_model()
    llmkernels.patch(model)
    monkeypatch.setitem(__import__("sys").modules, "llmkernels._C", None)
    with pytest.raises(NoStep, match="the module _C of llmkernels can not be imported"):
        Snapshot(model)


# --- records by themselves


class Thing:
    def __init__(self, **members):
        vars(self).update(members)


def lists(thing):
    found = Lists(thing)
    things = found.node(0, "things", thing.things)
    for index, inner in enumerate(thing.things):
        place = found.node(things, index, inner)
        found.equal.append((place, "number", inner.number))
        found.tensors.append((place, "x", inner.x))
    return found


def thing():
    return Thing(things=[Thing(number=1.5, x=torch.ones(2, 3)), Thing(number=[1], x=None)])


def test_lists_and_numbers():
    one = thing()
    record = lists(one).record()
    assert record.holds(one)
    one.things[1].number = [1]
    assert record.holds(one)
    one.things[1].number.append(2)
    assert not record.holds(one)
    one.things[1].number.pop()
    assert record.holds(one)
    one.things.append(Thing())
    assert not record.holds(one)
    one.things = tuple(one.things[:2])
    assert not record.holds(one)
    assert not record.holds(3)
    del one.things
    assert not record.holds(one)


def test_tensors_and_none():
    one = thing()
    record, x = lists(one).record([one.things[0].x]), one.things[0].x
    assert [storage.data_ptr() for storage in record.memory()] == [x.data_ptr()]
    for other in (None, x.clone(), x[:, :2], 3):
        one.things[0].x = other
        assert not record.holds(one)
    one.things[0].x = x
    assert record.holds(one)
    one.things[1].x = x
    assert not record.holds(one)


def test_names_of_dicts_and_attributes():
    one, scope, cls = thing(), {"f": len}, type("Cls", (), {"f": len})
    found = lists(one)
    found.names += [(scope, "f", len), (scope, "g", None), (cls, "f", len), (collections, "abc", collections.abc)]
    record = found.record()
    assert record.holds(one)
    scope["g"] = None
    assert record.holds(one)
    scope["g"] = 1
    assert not record.holds(one)
    del scope["g"], cls.f
    assert not record.holds(one)
    cls.f = print
    assert not record.holds(one)


def test_a_comparison_that_raises():
    class Wrong:
        def __eq__(self, other):
            raise ZeroDivisionError

    one = thing()
    record = lists(one).record()
    one.things[0].number = Wrong()
    with pytest.raises(ZeroDivisionError):
        record.holds(one)


def test_a_comparison_that_changes_what_is_compared():
    """It may free what the record has found."""

    class Changing:
        def __eq__(self, other):
            one.things.clear()
            gc.collect()
            return True

    one = thing()
    record = lists(one).record()
    one.things[0].number = Changing()
    assert record.holds(one)
    assert not record.holds(one)


@pytest.mark.parametrize("node", [-2, -1, 1, 1 << 40])
def test_nodes_that_there_are_none_of(node):
    for kind, entry in (("same", (node, "x", 1)), ("equal", (node, "x", 1)), ("tensors", (node, "x", None))):
        found = Lists(thing())
        getattr(found, kind).append(entry)
        with pytest.raises(IndexError, match=f"Record: a node must be one of the 1 before, got {node}"):
            found.record()
    found = Lists(thing())
    found.nodes.append((node, "x", dict, 0))
    with pytest.raises(IndexError, match="Record: a node must be one of the 1 before"):
        found.record()


def test_tensors_without_memory():
    one = thing()
    one.things[0].x = torch.ones(2, device="meta")
    with pytest.raises(NoStep, match="a tensor has no ordinary memory"):
        lists(one).record()
