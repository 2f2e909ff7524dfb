"""The decode step of every family that has one: the tokens of the unpatched model, whatever was changed since patch().

Prompts and new tokens together are longer than every window, and shorter than where the tables of LongRoPE change.
"""

import copy
import re

import pytest
import torch

import llmkernels
from families import EXPECTED, FAMILIES, LONG, WINDOW, family_model
from generating import generate_step
from hf_models import assert_close, logits_of, tiny_inputs
from llmkernels.hf import unpatch

every_step = pytest.mark.parametrize("name", [name for name, runs in EXPECTED.items() if not runs.no_step])
NEW = 9


def prompt(name, device, batch=3, tokens=None):
    """Padded on the left, if there is more than one."""
    tokens = tokens or (LONG - NEW - 1 if is_long(name) else 11)
    ids = tiny_inputs(device, batch, tokens)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, : tokens // 3] = mask[-1, : tokens - 2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def is_long(name):
    return "original_max_position_embeddings" in FAMILIES[name].options


def with_logits(model, **inputs):
    return model.generate(
        **{"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True} | inputs
    )


def check_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def check_steps(model, call):
    """By the decode step call() gives what it gives unpatched."""
    handle = llmkernels.patch(model)
    found = call()
    [decode] = handle.report().decode
    assert set(decode.calls) == {generate_step()}, decode
    unpatch(model)
    check_same(found, call())


@every_step
@pytest.mark.parametrize("batch", [1, 2, 3, 20])
def test_tokens(name, batch, device):
    model, inputs = family_model(name, device), prompt(name, device, batch)
    check_steps(model, lambda: with_logits(model, **inputs))


@every_step
def test_lean_loop(name, device):
    model, inputs = family_model(name, device), prompt(name, device)
    expected = with_logits(model, **inputs).sequences
    handle = llmkernels.patch(model)
    for _ in range(2):  # again, with the cache of the first call
        assert torch.equal(llmkernels.generate(model, **inputs, max_new_tokens=NEW), expected)
    [decode] = handle.report().decode
    assert decode.calls == {generate_step(): 2}
    assert decode.steps >= 2 * (NEW - 1)
    left = "2 by the model's forward: attention over prompts is slow in torch.float32"
    prompts = f", prompts: {left}" if device == "cuda" else ""
    products = ", ".join(f"{count} by {kernel}" for kernel, count in decode.products.items())
    assert bool(products) == (device == "cuda")
    graphs = f", CUDA graphs: {decode.graphs} of {decode.graph_bytes >> 20} MiB" if device == "cuda" else ""
    assert str(handle.report()).splitlines()[-2] == (
        f"{type(model).__name__} decodes by the decode step "
        f"(calls of generate: 2 by the decode step, {decode.steps} steps{prompts}{graphs}"
        f"{', products of a token: ' + products if products else ''})"
    )


@every_step
def test_short_prompt(name, device):
    """One token: the window fills up during the steps."""
    model, inputs = family_model(name, device), prompt(name, device, 1, 1)
    check_steps(model, lambda: with_logits(model, **inputs, max_new_tokens=WINDOW + 6))


@every_step
def test_goes_on_with_a_returned_cache(name, device):
    model, first = family_model(name, device), prompt(name, device, tokens=3)

    def call():
        before = with_logits(model, **first, max_new_tokens=5)
        ids = torch.cat([before.sequences, tiny_inputs(device, 3, 2, seed=9)], 1)
        mask = torch.cat([first["attention_mask"], torch.ones_like(ids[:, 3:])], 1)
        cache = before.past_key_values
        return with_logits(model, input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5)

    check_steps(model, call)


@every_step
def test_low_precision(name, device):
    """The logits of steps in bfloat16 are no further from float64 than 1.5 times what a forward of the unpatched model
    is, behind the same tokens. Of all errors the median is taken."""
    model, inputs = family_model(name, device, torch.bfloat16), prompt(name, device, batch=4)
    inputs["attention_mask"][:] = 1
    handle = llmkernels.patch(model)
    found = with_logits(model, **inputs)
    assert set(handle.report().decode[0].calls) == {generate_step()}
    unpatch(model)
    text, start = found.sequences[:, :-1], inputs["input_ids"].shape[1]
    oracle_model = copy.deepcopy(model).cpu().double()
    oracle_model.set_experts_implementation("eager")
    oracle = logits_of(oracle_model, text.cpu())[:, start:]
    unpatched = logits_of(model, text)[:, start:].cpu()
    steps = torch.stack(found.logits[1:], 1).float().cpu()
    error, allowed = ((logits - oracle).norm(dim=-1).median() for logits in (steps, unpatched))
    assert 0 < error <= 1.5 * allowed


def test_where_tables_change(device):
    """Calls that go on where LongRoPE has other tables are left to the model's forward, with the reason."""
    for name in [name for name in FAMILIES if is_long(name) and not EXPECTED[name].no_step]:
        model = family_model(name, device)
        handle = llmkernels.patch(model)
        for tokens in (LONG - 3, LONG + 3):
            inputs = prompt(name, device, tokens=tokens)
            found = with_logits(model, **inputs)
            assert "depends on the length" in str(handle.report())
            assert generate_step() not in handle.report().decode[0].calls
            twin = copy.deepcopy(model)
            unpatch(twin)
            check_same(found, with_logits(twin, **inputs))


# --- changes after patch()


def _change(owner, name, value):
    """Set an attribute of a module or a configuration. False where there is none, or it is that already."""
    if getattr(owner, name, None) in (None, value):
        return False
    setattr(owner, name, value)
    return True


def _scaled(owner, name):
    value = getattr(owner, name, None)
    return isinstance(value, float) and value != 0 and _change(owner, name, 0.1 if "eps" in name else 1.5 * value)


def _any(changes):
    """Whether one of them is True, after all of them."""
    return True in list(changes)


def _on_modules(change):
    return lambda model: _any(map(change, model.modules()))


def _of_config(change):
    return lambda model: change(model.config.get_text_config())


def _on_one_layer(change):
    return lambda model: _any(change(module) for key, module in model.named_modules() if re.search(r"layers\.1\b", key))


_NUMBERS = (
    "scaling",
    "variance_epsilon",
    "eps",
    "residual_multiplier",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "attention_scaling",
    "attn_logit_softcapping",
    "scalar_embed_scale",
)
_CONFIG_NUMBERS = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale", "rms_norm_eps")


def _number(name):
    return lambda owner: _scaled(owner, name)


def _embed_scale(module):
    if not isinstance(scale := getattr(module, "embed_scale", None), torch.Tensor):
        return False
    scale.mul_(0.5)
    return True


def _frequencies(module):
    found = [buffer for key, buffer in module.named_buffers(recurse=False) if key.endswith("inv_freq")]
    for buffer in found:
        buffer.mul_(0.7)
    return bool(found)


def _positions(module):
    if not isinstance(module, torch.nn.Embedding) or not isinstance(getattr(module, "offset", None), int):
        return False
    module.offset -= 1
    return True


def _embeddings_of_positions(model):
    names = ("wpe", "embed_positions")
    found = [module for key, module in model.named_modules() if key.rpartition(".")[2] in names]
    for module in found:
        with torch.no_grad():
            module.weight.mul_(2)
    return bool(found)


def _layer_types(config):
    return _change(config, "layer_types", (getattr(config, "layer_types", None) or [])[::-1])


def _fewer_layers(config):
    return _change(config, "num_hidden_layers", config.num_hidden_layers - 1)


def _toggle(name):
    def change(module):
        value = getattr(module, name, None)
        return isinstance(value, (bool, int)) and _change(module, name, type(value)(not value))

    return change


def _activation(module):
    return any(_change(module, name, torch.nn.Tanh()) for name in ("act_fn", "activation_fn", "act"))


def _bias_of_output(module):
    linear = getattr(module, "o_proj", None)
    if linear is None:
        return False
    linear.bias = torch.nn.Parameter(torch.ones_like(linear.weight[:, 0]))
    return True


def _put(owner, name, value):
    """Set an attribute where there may be none, and where nothing may read it."""
    setattr(owner, name, value)
    return True


def _set(name, value, part):
    return lambda model: _any(_put(module, name, value) for key, module in model.named_modules() if key.endswith(part))


CHANGES = {f"{name} of modules": _on_modules(_number(name)) for name in _NUMBERS}
CHANGES |= {f"{name} of one layer": _on_one_layer(_number(name)) for name in _NUMBERS}
CHANGES |= {f"{name} of the configuration": _of_config(_number(name)) for name in _CONFIG_NUMBERS}
CHANGES |= {
    "window of the configuration": _of_config(lambda config: _change(config, "sliding_window", 3)),
    "window of modules": _on_modules(lambda module: _change(module, "sliding_window", 3)),
    "window of each attention": _set("sliding_window", 3, "self_attn"),
    "softcap of each attention": _set("attn_logit_softcapping", 0.5, "self_attn"),
    "softcap in the configuration": _of_config(lambda config: _put(config, "attn_logit_softcapping", 0.5)),
    "window in the configuration": _of_config(lambda config: _put(config, "sliding_window", 40)),
    "multiplier of embeddings": _set("embedding_multiplier", 2.5, "model"),
    "multiplier of each layer": _set("residual_multiplier", 0.5, "layers.1"),
    "use of rotation in each layer": _set("use_rope", False, "self_attn"),
    "layer types": _of_config(_layer_types),
    "fewer layers": _of_config(_fewer_layers),
    "layers without rotation": _on_modules(_toggle("use_rope")),
    "frequencies": _on_modules(_frequencies),
    "offset of positions": _on_modules(_positions),
    "embeddings of positions": _embeddings_of_positions,
    "scale of embeddings": _on_modules(_embed_scale),
    "activation": _on_modules(_activation),
    "activation of one layer": _on_one_layer(_activation),
    "bias of the output projection": _on_one_layer(_bias_of_output),
}


@every_step
def test_changes_after_patch(name, device):
    """A number that is changed after patch(), and after steps, counts as it does unpatched: by the step or without."""
    inputs, mattered = prompt(name, device), set()
    before = with_logits(family_model(name, device), **inputs)
    for what, change in CHANGES.items():
        model, twin = family_model(name, device), family_model(name, device)
        if not change(twin):
            continue
        try:
            expected = with_logits(twin, **inputs)
        except Exception:  # unpatched it does not run any more: nothing to compare with
            continue
        handle = llmkernels.patch(model)
        with_logits(model, **inputs)
        assert set(handle.report().decode[0].calls) == {generate_step()}
        change(model)
        found = with_logits(model, **inputs)
        assert torch.equal(found.sequences, expected.sequences), (what, handle.report().decode)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
        if not torch.equal(torch.stack(before.logits), torch.stack(expected.logits)):
            mattered.add(what)
    assert {"scaling of modules", "activation"} <= mattered
    assert mattered & {"frequencies", "embeddings of positions"}
    assert name != "opt" or "offset of positions" in mattered
