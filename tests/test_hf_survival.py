"""Changes of a patched model between two calls: it still runs on the kernels, with the right results."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

import llmkernels
from hf_models import (
    FAMILIES,
    LAYERS,
    OPS,
    VOCAB,
    assert_close,
    count_ops,
    logits_of,
    lora,
    rounding,
    tiny_config,
    tiny_inputs,
    tiny_model,
)
from llmkernels.hf import unpatch


def check(model, ids, ops=OPS, tolerance=1e-5):
    """The model's modules run these ops and compute the same as unpatched. Unpatches it."""
    assert count_ops(model, ids, return_dict=False) == ops  # else a forward on a GPU may run without the modules
    with torch.no_grad():
        patched = model(ids, return_dict=False)[0].float()
    unpatch(model)
    assert count_ops(model, ids) == {}
    expected = logits_of(model, ids)
    assert_close(patched, expected, tolerance)
    return expected


# --- state


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_in_train_mode_then_eval(family, device):
    model = tiny_model(family, device).train()
    llmkernels.patch(model)
    check(model.eval(), tiny_inputs(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_to_dtype(dtype, device):
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("float64 runs on the CPU only")
    model, ids = tiny_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    logits_of(model, ids)
    check(model.to(dtype), ids, tolerance=rounding(dtype))


@pytest.mark.gpu
def test_to_device():
    model = tiny_model()
    handle = llmkernels.patch(model)
    logits_of(model, tiny_inputs())
    model.cuda()
    assert handle.report()["rope"].backends == {"cuda": LAYERS}
    check(model, tiny_inputs("cuda"))


def test_float32_norm_weights_in_a_bfloat16_model(device):
    model = tiny_model(device=device, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    for module in (model.lm_head, *(m for layer in model.model.layers for m in (layer.mlp, layer.self_attn))):
        module.float()
    llmkernels.patch(model)
    patched = logits_of(model, tiny_inputs(device))
    unpatch(model)
    assert_close(patched, logits_of(model, tiny_inputs(device)), rounding(torch.bfloat16))


def test_load_state_dict(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    logits_of(model, ids)
    other = tiny_model(device=device, seed=9)
    result = model.load_state_dict(other.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(check(model, ids), logits_of(other, ids))


def test_parameters_replaced(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    logits_of(model, ids)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight = nn.Parameter(2 * layer.post_attention_layernorm.weight.detach())
        layer.post_attention_layernorm.variance_epsilon = 0.1
        layer.mlp.gate_proj = nn.Linear(112, 40, device=device)
        layer.mlp.up_proj = nn.Linear(112, 40, device=device)
        layer.mlp.down_proj = nn.Linear(40, 112, device=device)
    check(model, ids)


def test_weight_init():
    model, ids = tiny_model(), tiny_inputs()
    llmkernels.patch(model)
    for module in model.modules():
        model._init_weights(module)
    expected = check(model, ids)
    assert all(bool((m.weight == 1).all()) for name, m in model.named_modules() if name.endswith("norm"))
    assert expected.abs().max() < 2


def test_resize_token_embeddings(device):
    model = tiny_model(device=device)
    llmkernels.patch(model)
    model.resize_token_embeddings(VOCAB + 13)
    assert check(model, tiny_inputs(device)).shape[-1] == VOCAB + 13


def test_tied_embeddings():
    model, ids = tiny_model(tie_word_embeddings=True), tiny_inputs()
    llmkernels.patch(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.5)
    check(model, ids)


def test_set_attn_implementation(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    sdpa = logits_of(model, ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert len(attentions) == LAYERS
    assert_close(attentions[-1].sum(-1), torch.ones(2, 7, 11, device=device))
    assert_close(check(model, ids), sdpa)


def test_deepcopy_is_independent(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    before = logits_of(model, ids)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    assert count_ops(twin, ids) == OPS
    assert torch.equal(logits_of(model, ids), before)
    handle.unpatch()
    changed = check(twin, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(logits_of(model, ids), changed)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_handle_copied_with_its_model(copied):
    """It reports and undoes the patch of the copy, and no other."""
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    twin, its_handle = copied((model, handle))
    assert len(its_handle.report()["rope"].patched) == LAYERS
    its_handle.unpatch()
    assert count_ops(twin, ids) == {} and count_ops(model, ids) == OPS
    newer = llmkernels.patch(twin)
    its_handle.unpatch()
    assert count_ops(twin, ids) == OPS
    newer.unpatch()
    handle.unpatch()
    assert count_ops(model, ids) == {}


def test_a_copy_while_another_thread_unpatches():
    """Copies and pickles look up the method, and call it when the module is unpatched."""
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    expected = logits_of(model, ids)
    reductions = {module: module.__reduce_ex__ for module in model.modules()}
    handle.unpatch()
    for module, reduction in reductions.items():
        assert [reduction(protocol)[1] for protocol in (2, 4)] == [(type(module),)] * 2
    assert_close(logits_of(copy.deepcopy(model), ids), expected)


def test_torch_save_and_load_in_a_fresh_process(tmp_path):
    model, ids = tiny_model(), tiny_inputs()
    llmkernels.patch(model)
    torch.save((model, ids), tmp_path / "patched.pt")
    code = f"""
import torch
model, ids = torch.load({str(tmp_path / "patched.pt")!r}, weights_only=False)
assert type(model.model.norm).original.__module__ == "transformers.models.qwen2.modeling_qwen2"
with torch.no_grad():
    patched = model(ids).logits
    import llmkernels.hf
    assert sum(isinstance(m, llmkernels.hf.modules.replaced.Patched) for m in model.modules()) == {5 * LAYERS + 1}
    llmkernels.hf.unpatch(model)
    torch.save((patched, model(ids).logits, model), {str(tmp_path / "out.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    patched, unpatched, loaded = torch.load(tmp_path / "out.pt", weights_only=False)
    assert_close(patched, logits_of(model, ids))
    assert_close(unpatched, patched)
    assert type(loaded.model.norm) is type(tiny_model().model.norm)


def test_new_models_of_the_class_of_a_patched_one(tmp_path, device):
    """They are not patched, nor half of them, and can be."""
    model = tiny_model().to(device)
    original, ids = type(model), tiny_inputs(device)
    expected = model(ids).logits
    llmkernels.patch(model)
    model.save_pretrained(tmp_path)
    for made in (type(model)(model.config), type(model).from_pretrained(tmp_path), model.from_pretrained(tmp_path)):
        assert type(made) is original
        made.load_state_dict(model.state_dict())
        handle = llmkernels.patch(made.to(device).eval())
        assert_close(made(ids).logits, expected)
        handle.unpatch()
        assert type(made) is original


def test_save_pretrained(tmp_path, device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    before = logits_of(model, ids)
    llmkernels.patch(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert count_ops(loaded, ids) == {}
    assert type(loaded) is type(tiny_model())
    assert torch.equal(logits_of(loaded, ids), before)


def test_parameters_on_meta():
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(tiny_config())
        ids = torch.zeros(2, 5, dtype=torch.long)
    report = llmkernels.patch(model).report()
    assert report["rms_norm"].backends == {"meta": 2 * LAYERS + 1}
    assert model(ids).logits.shape == (2, 5, VOCAB)
    model.to_empty(device="cpu")
    assert count_ops(model, tiny_inputs()) == OPS


# --- models


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads(family, head, device):
    cls = getattr(transformers, f"{family}For{head}")
    model, ids = tiny_model(family.lower(), device, head=cls), tiny_inputs(device)

    def result():
        with torch.no_grad():
            output = model(ids)
        return torch.cat([value for key, value in output.items() if key.endswith("logits")], -1)

    before = result()
    handle = llmkernels.patch(model)
    assert count_ops(model, ids) == OPS
    assert_close(result(), before)
    handle.unpatch()
    assert torch.equal(result(), before)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 7},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"attn_implementation": "eager"},
    ],
    ids=lambda changes: ",".join(changes) + str(changes.get("rope_parameters", {}).get("rope_type", "")),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_configurations(family, changes, device):
    model = tiny_model(family, device, max_position_embeddings=16, **changes)
    ids = tiny_inputs(device, tokens=24)  # beyond 16 positions, where the rope variants differ
    before = logits_of(model, ids)
    llmkernels.patch(model)
    assert_close(check(model, ids), before)


def test_sliding_window(device):
    model = tiny_model(device=device, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    llmkernels.patch(model)
    check(model, tiny_inputs(device))


# --- hooks


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_and_change_what_they_should(when):
    """Forward hooks on every module, some of which change the value: they run, and the result is as unpatched."""
    ids = tiny_inputs()
    results = []
    for patched in (False, True):
        model, seen = tiny_model(), {}
        handle = llmkernels.patch(model) if patched and when == "after" else None
        for name, module in model.named_modules():

            def hook(module, args, kwargs, output, name=name, seen=seen):
                value = output[0] if isinstance(output, tuple) else output
                if isinstance(value, torch.Tensor):
                    seen.setdefault(name, []).append(value.clone())

            module.register_forward_hook(hook, with_kwargs=True)
        layer = model.model.layers[0]
        layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        layer.mlp.act_fn.register_forward_hook(lambda module, args, output: output + 0.25)
        layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output * 2)
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
        if patched and when == "before":
            handle = llmkernels.patch(model)
        results.append((logits_of(model, ids), dict(seen)))
        seen.clear()
    assert set(handle.report()["add_rms_norm"].left_alone.values()) == {
        "post_attention_layernorm has hooks or was replaced"
    }
    assert set(handle.report()["gated_mlp"].left_alone.values()) == {"hooks on its activation have to see it"}
    assert count_ops(model, ids) == {"rms_norm": 2 * LAYERS + 1, "rope": LAYERS}
    (expected, all_seen), (found, all_found) = results
    assert_close(found, expected)
    assert all_found.keys() == all_seen.keys()
    for name, values in all_seen.items():
        assert len(all_found[name]) == len(values) == 1, name
        assert_close(all_found[name][0], values[0])


def test_removed_hooks_bring_the_kernels_back():
    model, ids = tiny_model(), tiny_inputs()
    norm, activation = model.model.layers[0].post_attention_layernorm, model.model.layers[1].mlp.act_fn
    hooks = [norm.register_full_backward_hook(lambda *_: None), activation.register_forward_hook(lambda *_: None)]
    llmkernels.patch(model)
    assert count_ops(model, ids) == {"rms_norm": 4, "add_rms_norm": 1, "rope": 2, "swiglu": 1}
    for hook in hooks:
        hook.remove()
    check(model, ids)


def test_global_hooks_see_every_module():
    model, ids = tiny_model(), tiny_inputs()
    llmkernels.patch(model)
    seen = set()
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.add(module)):
        logits_of(model, ids)
    assert {layer.post_attention_layernorm for layer in model.model.layers} < seen
    assert {layer.mlp.act_fn for layer in model.model.layers} < seen
    check(model, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_attentions(family, device):
    model, ids = tiny_model(family, device, attn_implementation="eager"), tiny_inputs(device)
    options = {"output_hidden_states": True, "output_attentions": True}
    llmkernels.patch(model)
    with torch.no_grad():
        found = model(ids, **options)
        again = model(tiny_inputs(device, seed=2), **options)  # must not write to what was returned
        unpatch(model)
        expected = model(ids, **options)
    for key, length in (("hidden_states", LAYERS + 1), ("attentions", LAYERS)):
        assert len(found[key]) == len(expected[key]) == length
        for ours, theirs, other in zip(found[key], expected[key], again[key], strict=True):
            assert_close(ours, theirs)
            assert not torch.equal(ours, other)


# --- accelerate and PEFT


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_hooks(when):
    """Packages that set a forward on the instance: it runs, whether it was set before or after the patch."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny_model(), tiny_inputs()
    before = logits_of(model, ids)
    handle = llmkernels.patch(model) if when == "after" else None
    first, second = model.model.layers
    hooked = [first, second.post_attention_layernorm, second.mlp.act_fn, second.mlp.down_proj, model.model.norm]
    seen = []

    class Seen(accelerate.hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    for module in hooked:
        accelerate.hooks.add_hook_to_module(module, Seen())
    handle = handle or llmkernels.patch(model)
    assert_close(logits_of(model, ids), before)
    assert seen == hooked
    if when == "before":
        assert count_ops(model, ids) == {"rms_norm": 3, "rope": 2, "swiglu": 1}
        handle.unpatch()
    else:
        assert count_ops(model, ids) == {"rms_norm": 4, "add_rms_norm": 1, "rope": 2, "swiglu": 1}
        with pytest.raises(RuntimeError, match=r"model.layers.0 must not have a forward of its own"):
            handle.unpatch()
        accelerate.hooks.remove_hook_from_submodules(model)
        handle.unpatch()
    assert torch.equal(logits_of(model, ids), before)


@pytest.mark.parametrize("when", ["before", "after", "inside"])
def test_lora(when, device):
    """LoRA on the model before and after patching, and a PEFT model whose inner model is patched."""
    ids = tiny_inputs(device)
    expected = logits_of(lora(tiny_model(device=device)), ids)
    model = tiny_model(device=device)
    assert not torch.allclose(logits_of(model, ids), expected, atol=1e-2)
    if when == "after":
        handle = llmkernels.patch(model)
    adapted = lora(model)
    if when != "after":
        handle = llmkernels.patch(adapted if when == "before" else adapted.get_base_model())
    assert count_ops(adapted, ids) == OPS
    assert len(handle.report()["gated_mlp"].patched) == LAYERS
    assert_close(logits_of(adapted, ids), expected)
    with adapted.disable_adapter():
        assert not torch.allclose(logits_of(adapted, ids), expected, atol=1e-2)
    handle.unpatch()
    assert torch.equal(logits_of(adapted, ids), expected)
    llmkernels.patch(adapted)
    merged = adapted.merge_and_unload()
    assert_close(check(merged, ids), expected)


def test_peft_on_the_norms_themselves():
    peft = pytest.importorskip("peft")
    ids = tiny_inputs()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["post_attention_layernorm"])
    model = tiny_model()
    llmkernels.patch(model)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    # The wrapper is called, since it chooses which of its norms runs.
    check(adapted, ids, {"rms_norm": 2 * LAYERS + 1, "rope": LAYERS, "swiglu": LAYERS})
