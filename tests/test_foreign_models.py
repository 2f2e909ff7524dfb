"""Models whose classes are not transformers': they take the step, unless they do more than to compute."""

import importlib
import inspect
import re
import sys

import pytest
import torch

import llmkernels
from generating import generate_step
from hf_models import tiny_inputs
from llmkernels.hf.classes.cache_name import cache_name
from test_family_strangers import made, tokens_of


@pytest.fixture
def lantern():
    return fresh("lantern")


@pytest.fixture
def beacon():
    return fresh("beacon")


def fresh(name):
    """A file of tests as a module that nobody has changed."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def replace(module, place, source):
    """Replace a function of a class in a file's module, as if the file said so."""
    cls, _, name = place.partition(".")
    vars(module)["original"] = getattr(vars(module)[cls], name)
    exec(source, vars(module))
    setattr(vars(module)[cls], name, vars(module)[name])


def check_step(model, device):
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert handle.report().decode[0].reason is None
    assert torch.equal(tokens_of(model, device), expected)
    assert handle.report().decode[0].calls == {generate_step(): 1}
    handle.unpatch()
    assert torch.equal(tokens_of(model, device), expected)


def check_no_step(model, device, reason):
    """It computes what it did, by its modules."""
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert reason in handle.report().decode[0].reason
    assert torch.equal(tokens_of(model, device), expected)
    assert handle.report().decode[0].calls == {f"by transformers: {handle.report().decode[0].reason}": 1}


def check_no_call_by_steps(model, device, reason):
    """The same, for a call that the step can not run, though it can run others."""
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert handle.report().decode[0].reason is None
    assert torch.equal(tokens_of(model, device), expected)
    assert handle.report().decode[0].calls == {f"by transformers: {reason}": 1}
    handle.unpatch()


def test_layers_in_a_model_of_transformers(lantern, device):
    check_step(made(lantern.LanternForCausalLM).to(device), device)


def test_all_of_a_model(beacon, device):
    check_step(made(beacon.BeaconForCausalLM).to(device), device)


@pytest.mark.parametrize("name", ["Scaled", "Capped"])
def test_logits_that_change_behind_the_forward_of_transformers(name, device):
    """With position_ids, which transformers gives forwards that name them, and without."""
    cls = vars(fresh("around"))[f"{name}ForCausalLM"]
    check_step(made(vars(fresh("around"))[f"{name}WithPositions"]).to(device), device)
    model, ids = made(cls).to(device), tiny_inputs(device)
    check_no_call_by_steps(model, device, "no position_ids, which a padded sequence needs")

    def chat():
        first = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        more = torch.cat([first.sequences, ids[:, :3]], 1)
        cache = {cache_name(): getattr(first, cache_name())}
        return torch.cat([first.sequences, model.generate(more, max_new_tokens=8, do_sample=False, **cache)], 1)

    expected = chat()
    handle = llmkernels.patch(model)
    assert torch.equal(chat(), expected)
    assert handle.report().decode[0].calls == {generate_step(): 2}


def test_logits_that_a_forward_keeps(device):
    check_no_step(made(fresh("around").SeenForCausalLM).to(device), device, "SeenForCausalLM.forward sets logits")


def test_a_class_that_each_model_makes_anew(beacon, device):
    """Whatever it computes, it is not that of the small model."""
    source = """
def __init__(self, *args):
    original(self, *args)
    class Own(type(self.b)):
        pass
    self.b.__class__ = Own
"""
    replace(beacon, "Storey.__init__", source)
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, "is a beacon.Own, not another class of that name")


def remote(name, folder, monkeypatch, change=lambda source: source):
    """The model of a family of transformers from a copy of its file with absolute imports, as remote code is."""
    source = inspect.getsource(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))
    for dots, package in (
        ("...", "transformers."),
        ("..", "transformers.models."),
        (".", f"transformers.models.{name}."),
    ):
        source = source.replace(f"from {dots} import", f"from {package[:-1]} import")
        source = re.sub(rf"from {re.escape(dots)}(?=[a-z_])", f"from {package}", source)
    (folder / f"remote_{name}.py").write_text(change(source))
    monkeypatch.syspath_prepend(folder)
    module = fresh(f"remote_{name}")
    (model_class,) = (cls for key, cls in vars(module).items() if key.endswith("ForCausalLM"))
    assert model_class.__module__ == f"remote_{name}"
    return model_class


FAMILIES_OUTSIDE = ["llama", "gemma2", "olmo2", "granite", "mistral", "starcoder2", "qwen3", "smollm3", "olmo3"]


@pytest.mark.parametrize("name", FAMILIES_OUTSIDE)
def test_a_family_of_transformers_outside_of_it(name, device, tmp_path, monkeypatch):
    check_step(made(remote(name, tmp_path, monkeypatch)).to(device), device)


def test_masks_in_a_dict_of_the_caller(device, tmp_path, monkeypatch):
    """As Qwen 3, but where it has been given a dict of masks, it stores into that one, too."""

    def change(source):
        store = """            if self.has_sliding_layers:
                causal_mask_mapping["sliding_attention"] ="""
        assert store in source
        return source.replace(store, store.replace("\n    ", "\n")[4:])

    model = made(remote("qwen3", tmp_path, monkeypatch, change)).to(device)
    check_no_step(model, device, "Qwen3Model.forward sets an item")


@pytest.mark.parametrize(
    "attended",
    [
        "F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), mask, is_causal=causal)",
        "F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=0.3, enable_gqa=True)",
    ],
    ids=["repeated", "groups"],
)
def test_attention_by_pytorch(beacon, attended, device):
    source = f"""
def attended(self, q, k, v, mask):
    causal = mask is None and q.shape[2] > 1
    return {attended}.transpose(1, 2)
"""
    replace(beacon, "Gaze.attended", source)
    check_step(made(beacon.BeaconForCausalLM).to(device), device)


def test_a_loop_of_ones_own(beacon, device):
    model = made(beacon.BeaconForCausalLM).to(device)
    ids = tiny_inputs(device)

    def tokens():
        found, cache, x = [], None, ids
        for _ in range(6):
            output = model(x, use_cache=True, **({beacon.CACHE: cache} if cache is not None else {}))
            cache, x = getattr(output, beacon.CACHE), output.logits[:, -1:].argmax(-1)
            found.append(x)
        return torch.cat(found, 1)

    with torch.no_grad():
        expected = tokens()
        handle = llmkernels.patch(model)
        assert torch.equal(tokens(), expected)
    assert handle.report().decode[0].forwards == {generate_step(): 5}


def test_a_helper_that_is_replaced_later(beacon, device):
    model = made(beacon.BeaconForCausalLM).to(device)
    before = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, device), before)
    exec("def turned(x, cos, sin):\n    return x", vars(beacon))
    after = tokens_of(model, device)
    handle.unpatch()
    assert torch.equal(tokens_of(model, device), after)
    assert not torch.equal(after, before)


EFFECTS = {
    "attribute": "self.calls = getattr(self, 'calls', 0) + 1",
    "attribute-of-the-class": "type(self).calls = 1",
    "global": "global CALLS; CALLS = 1",
    "list": "SEEN.append(x)",
    "item": "SEEN[0] = x",
    "buffer": "self.a.gain.add_(0)",
    "print": "print(x.shape)",
    "setattr": "setattr(self, 'calls', 1)",
    "import": "import os",
    "another-package": "tiny_inputs('cpu')",
    "a-global-that-is-no-constant": "x + SEEN",
}


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_effects_are_kept(beacon, effect, device):
    vars(beacon).update(SEEN=[0], tiny_inputs=tiny_inputs)
    source = f"""
def forward(self, x, cos, sin, mask, memory):
    if x is None:
        {effect}
    return original(self, x, cos, sin, mask, memory)
"""
    replace(beacon, "Storey.forward", source)
    model = made(beacon.BeaconForCausalLM).to(device)
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    reason = handle.report().decode[0].reason
    assert "may do more than return something" in reason or "which is from" in reason
    assert torch.equal(tokens_of(model, device), expected)


def test_a_method_of_another_module(beacon, device):
    """Functions count wherever they are reached."""
    replace(beacon, "Gaze.heads", "def heads(self, x):\n    self.last = x\n    return original(self, x)")
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, "heads sets last")


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ("self.seen.update(last=x)", "noted calls update"),
        ("seen = getattr(self, 'seen'); seen.update(last=x)", "may keep something in seen"),
    ],
)
def test_a_member_that_keeps_something(beacon, update, reason, device):
    source = f"""
def __init__(self, config):
    original(self, config)
    self.seen = {{}}

def noted(self, x):
    {update}
    return x
"""
    replace(beacon, "Thought.__init__", source)
    beacon.Thought.noted = vars(beacon)["noted"]
    vars(beacon)["of_thought"] = beacon.Thought.forward
    exec("def forward(self, x):\n    return of_thought(self, self.noted(x))", vars(beacon))
    beacon.Thought.forward = vars(beacon)["forward"]
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, reason)


def test_padding_that_is_seen(beacon, device):
    source = """
def attended(self, q, k, v, mask):
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, causal, enable_gqa=True).transpose(1, 2)
"""
    replace(beacon, "Gaze.attended", source)
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, "sees padding that its mask hides")


def test_a_mask_that_is_not_passed_on(beacon, device):
    source = """
def forward(self, input_ids=None, attention_mask=None, **kwargs):
    return original(self, input_ids, **kwargs)
"""
    replace(beacon, "BeaconForCausalLM.forward", source)
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, "sees padding that its mask hides")


def test_a_cache_of_its_own_kind(beacon, device):
    source = """
def attended(self, q, k, v, mask):
    return original(self, q, k, v * 2 if q.shape[2] == 1 else v, mask)
"""
    replace(beacon, "Gaze.attended", source)
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, "computes something else behind a cache")


def test_a_rotation_by_the_length(beacon, device):
    source = """
def forward(self, x, positions):
    far = (positions.max() + 1).clamp(min=100) / 100
    return original(self, x, positions / far)
"""
    replace(beacon, "Lens.forward", source)
    check_no_step(made(beacon.BeaconForCausalLM).to(device), device, "depends on the length of the sequence")


def test_attention_of_its_own_file(beacon, device):
    source = """
def eager_attention_forward(module, q, k, v, mask, scaling, dropout=0.0, **kwargs):
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    scores = scaling * q @ k.transpose(2, 3)
    return ((scores if mask is None else scores + mask).softmax(-1) @ v).transpose(1, 2), None
"""
    exec(source, vars(beacon))
    model = made(beacon.BeaconForCausalLM, attn_implementation="eager").to(device)
    check_step(model, device)
    vars(beacon)["SEEN"] = []
    exec(source.replace("    scores =", "    SEEN.append(q)\n    scores =", 1), vars(beacon))
    check_no_step(made(beacon.BeaconForCausalLM, attn_implementation="eager").to(device), device, "calls append")
