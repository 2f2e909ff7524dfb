"""Which models run the decode step, and which run their modules instead, with a reason in the report."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
import transformers
from torch import nn

import llmkernels
from generating import (
    NEW,
    check_counts,
    check_falls_back,
    check_steps,
    generate_step,
    hf_generate,
    left_padded,
    runs_steps,
    small_model,
    steps,
)
from hf_models import FAMILIES, assert_close, count_ops, logits_of, lora, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch
from llmkernels.hf.step import describe


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 7},
        {"head_dim": 128},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"attn_implementation": "eager"},
        {"num_hidden_layers": 1, "intermediate_size": 96},
    ],
    ids=lambda changes: ",".join(changes) + str(changes.get("rope_parameters", {}).get("rope_type", "")),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_configurations(family, changes, device):
    # Beyond 16 positions, where the rope variants differ.
    model = small_model(family, device, **{"max_position_embeddings": 16} | changes)
    check_steps(model, tiny_inputs(device, 3), attention_mask=left_padded(device), max_new_tokens=12)


def test_sliding_window(device):
    model = small_model(device=device, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    check_steps(model, tiny_inputs(device, 3), attention_mask=left_padded(device))
    model = small_model(device=device, use_sliding_window=True, sliding_window=14, max_window_layers=0)
    check_steps(model, tiny_inputs(device), max_new_tokens=12)


def test_another_scale(device):
    model = small_model(device=device)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.4
    check_steps(model, tiny_inputs(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, device):
    """Rounding may change a token, so the logits after the same tokens are compared."""
    model, ids = small_model(device=device, dtype=dtype), tiny_inputs(device)
    llmkernels.patch(model)
    options = {"return_dict_in_generate": True, "output_logits": True}
    check_counts(count_ops(hf_generate, model, ids, **options), steps(NEW), device)
    found = hf_generate(model, ids, **options)
    unpatch(model)
    expected = logits_of(model, found.sequences[:, :-1])[:, 10:]
    assert_close(torch.stack(found.logits, 1), expected, 2 * rounding(dtype))


def test_float64():
    model, ids = small_model(dtype=torch.float64), tiny_inputs()
    check_steps(model, ids)


def break_model(model, how):
    layer = model.model.layers[1]
    if how == "hook":
        layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.5)
    elif how == "pre-hook":
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    elif how == "forward":
        old = layer.self_attn.o_proj.forward
        layer.self_attn.o_proj.forward = lambda x: old(x) * 1.5
    elif how == "class":

        class Other(nn.Linear):
            def forward(self, x):
                return 1.5 * super().forward(x)

        layer.self_attn.q_proj.__class__ = Other
    elif how == "bias":
        layer.mlp.up_proj.bias = nn.Parameter(torch.ones_like(layer.mlp.up_proj.weight[:, 0]))
    elif how == "some biases":
        layer.self_attn.k_proj.bias = None
    elif how == "activation":
        layer.mlp.act_fn = transformers.activations.GELUActivation()
    elif how == "shared":
        weight = layer.mlp.gate_proj.weight
        weight.data = torch.cat([weight.data.flatten(), weight.data.new_zeros(5)])[:-5].view_as(weight)
    elif how == "twice":
        layer.mlp.gate_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    elif how == "training":
        layer.self_attn.train().attention_dropout = 1e-9  # so little that it drops nothing
    elif how == "norm":
        layer.input_layernorm = nn.RMSNorm(112, device=model.device)
    elif how == "eps":
        layer.input_layernorm.variance_epsilon = 0.5
    elif how == "scale":
        layer.self_attn.scaling = 0.5
    elif how == "no biases":
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.bias = None
    elif how == "part":
        layer.self_attn.extra = nn.Identity()
    return model


BROKEN = {
    "hook": "hooks on model.layers.1.mlp.down_proj",
    "pre-hook": "hooks on model.layers.1 have",
    "forward": "model.layers.1.self_attn.o_proj has a forward of its own",
    "class": "model.layers.1.self_attn.q_proj is a test_generate_models.Other, not torch.nn.Linear",
    "bias": "only some of the products of model.layers.1.mlp have a bias",
    "some biases": "only some of the products of model.layers.1.self_attn have a bias",
    "activation": "model.layers.1.mlp.act_fn is a transformers.activations.GELUActivation, not",
    "shared": "a weight shares its memory with other tensors",
    "twice": "layers share weights",
    "training": "model.layers.1.self_attn is in training mode",
    "norm": "model.layers.1.input_layernorm is a torch.nn.RMSNorm, not",
    "part": "model.layers.1.self_attn has other parts than expected",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_the_step_can_not_do_goes_by_the_module_path(how, device):
    model, ids = break_model(small_model(device=device), how), tiny_inputs(device)
    handle = llmkernels.patch(model)
    assert BROKEN[how] in handle.report().decode[0].reason
    handle.unpatch()
    check_falls_back(model, ids, BROKEN[how])
    llmkernels.patch(model)
    assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), hf_generate(model, ids))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "how queries are rotated or"),
        ({"hidden_act": "mish"}, "Qwen2ForCausalLM has an activation without a kernel before the product with"),
    ],
    ids=["dynamic", "mish"],
)
def test_configurations_without_a_step(changes, reason, device):
    model = small_model(device=device, max_position_embeddings=16, **changes)
    check_falls_back(model, tiny_inputs(device), reason, by_forwards="rotated" in reason)  # those up to 16 tokens


@pytest.mark.parametrize("how", ["eps", "scale", "no biases", "gelu", "relu2", "sigmoid", "relu"])
def test_what_differs_from_layer_to_layer(how, device):
    """Numbers and biases are read from each layer."""
    changes = {"hidden_act": how} if how in ("gelu", "relu2", "sigmoid", "relu") else {}
    check_steps(break_model(small_model(device=device, **changes), how), tiny_inputs(device))


def test_a_head_of_another_size_than_the_config_has(device):
    model = small_model(device=device)
    model.lm_head = nn.Linear(112, 100, bias=False, device=device)
    check_falls_back(model, tiny_inputs(device), "the weight of lm_head is 100 x 112, where its config makes 97 x 112")


def test_broken_after_the_first_steps(device):
    """The model is checked in every call."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    for how in ("hook", "some biases"):
        break_model(model, how)
        assert not runs_steps(hf_generate, model, ids)


def test_attention_of_somebody_else(device, monkeypatch):
    model, ids = small_model(device=device, attn_implementation="eager"), tiny_inputs(device)
    module = transformers.models.qwen2.modeling_qwen2
    original = module.eager_attention_forward

    def half(*args, **kwargs):
        return original(*args, **kwargs)[0] / 2, None

    llmkernels.patch(model)
    plain = hf_generate(model, ids)
    monkeypatch.setattr(module, "eager_attention_forward", half)
    assert "attention is computed by" in str(describe.why_not(model))
    assert not torch.equal(hf_generate(model, ids), plain)


def test_lora(device):
    ids = tiny_inputs(device)
    expected = hf_generate(lora(small_model(device=device)), ids)
    adapted = lora(small_model(device=device))
    handle = llmkernels.patch(adapted)
    assert "is a peft." in handle.report().decode[0].reason
    assert not runs_steps(hf_generate, adapted, ids)
    assert torch.equal(hf_generate(adapted, ids), expected)
    merged = adapted.merge_and_unload()
    check_counts(count_ops(hf_generate, merged, ids), steps(NEW), device)
    assert torch.equal(hf_generate(merged, ids), expected)
    # An adapter on a model whose weights are packed already.
    again = lora(merged)
    found = hf_generate(again, ids)
    unpatch(again)
    assert torch.equal(hf_generate(again, ids), found)


def test_mixed_dtypes(device):
    model = small_model(device=device)
    llmkernels.patch(model)
    model.lm_head.half()
    assert describe.why_not(model) == "weights differ in dtype or device"
    model.half()
    assert describe.why_not(model) is None


def test_autocast():
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in describe.why_not(model)
        assert not runs_steps(hf_generate, model, ids)


def test_left_out_on_request():
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model, decode=False)
    assert handle.report().decode[0].reason == "not asked for"
    assert not runs_steps(hf_generate, model, ids)
    handle.unpatch()
    llmkernels.patch(model, rope=False)  # of the modules
    assert runs_steps(hf_generate, model, ids)


def test_report():
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    assert str(handle.report()).splitlines()[-2] == "Qwen2ForCausalLM decodes by the decode step"
    hf_generate(model, ids)
    hf_generate(model, ids)
    hf_generate(model, ids, num_beams=2)
    assert str(handle.report()).splitlines()[-2:] == [
        "Qwen2ForCausalLM decodes by the decode step "
        "(calls of generate: 2 by the decode step, 14 steps; 1 by transformers: beam search, "
        "prompts: 1 by the model's forward: a prompt on cpu, forwards: 7 by the decode step)",
        "forwards under torch.compile are not counted",
    ]
    assert llmkernels.patch(tiny_model().model).report().decode == []


def test_report_as_a_dictionary():
    """For a log in JSON; copies count on."""
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    hf_generate(model, ids)
    report = handle.report()
    logged = json.loads(json.dumps(dataclasses.asdict(report)))
    assert logged["decode"][0]["calls"] == {generate_step(): 1} == report.decode[0].calls
    assert logged["rows"]["rms_norm"]["kernels"] == report["rms_norm"].kernels != {}
    for copied in (copy.deepcopy(report), pickle.loads(pickle.dumps(report)), dataclasses.replace(report)):
        assert copied == report
        assert copied.decode[0].calls["another way"] == 0


def test_other_logits_to_keep_than_the_last_ones(device):
    model = small_model(device=device)
    kept = torch.tensor([0], device=device)  # of the prompt, whose first token the new ones follow then
    check_falls_back(model, tiny_inputs(device), "logits_to_keep is no number of tokens", True, logits_to_keep=kept)
