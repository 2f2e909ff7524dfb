"""patch, report and unpatch: what is replaced, that it runs, computes the same, and is undone."""

import copy
import gc
import inspect
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

import hf_models
import llmkernels
from hf_models import FAMILIES, LAYERS, OPS, assert_close, count_ops, logits_of, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch
from llmkernels.hf.report import abbreviate

KINDS = ["rms_norm", "rope", "gated_mlp", "add_rms_norm"]


def test_counts_in_28_layers(device):
    model = tiny_model(device=device, num_hidden_layers=28)
    assert count_ops(model, tiny_inputs(device)) == {}
    report = llmkernels.patch(model).report()
    assert [len(report[kind].patched) for kind in KINDS] == [57, 28, 28, 28]
    assert not any(report[kind].left_alone for kind in KINDS)
    assert report["rms_norm"].kernels == {"llmkernels::rms_norm": 29, "llmkernels::add_rms_norm": 28}
    assert report["gated_mlp"].kernels == {"llmkernels::swiglu": 28}
    assert report["rope"].backends == {device: 28}
    assert count_ops(model, tiny_inputs(device)) == {"rms_norm": 29, "add_rms_norm": 28, "rope": 28, "swiglu": 28}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_unpatched(family, dtype, device):
    """The error against float64 is at most twice that of transformers."""
    model, ids = tiny_model(family, device, dtype), tiny_inputs(device)
    oracle = logits_of(copy.deepcopy(model).cpu().double(), ids.cpu())
    unpatched = logits_of(model, ids).cpu()
    llmkernels.patch(model)
    patched = logits_of(model, ids).cpu()
    scale = oracle.abs().max()
    floor = torch.finfo(dtype).eps
    for norm in (torch.Tensor.norm, lambda error: error.abs().max() / scale * oracle.norm()):
        error, allowed = (norm(x - oracle) / oracle.norm() for x in (patched, unpatched))
        assert error <= 2 * allowed + floor
    assert_close(patched, unpatched, rounding(dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_every_bit(family, device):
    model, ids = tiny_model(family, device, torch.bfloat16), tiny_inputs(device)
    classes = {name: type(module) for name, module in model.named_modules()}
    members = {name: set(vars(module)) for name, module in model.named_modules()}
    keys, before = list(model.state_dict()), logits_of(model, ids)
    handle = llmkernels.patch(model)
    assert list(model.state_dict()) == keys
    assert count_ops(model, ids, return_dict=False) == OPS  # by the modules, on a GPU too
    handle.unpatch()
    handle.unpatch()
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == members
    assert count_ops(model, ids) == {}
    assert torch.equal(logits_of(model, ids), before)
    assert "not patched" in str(handle.report())


def test_context_manager():
    model, ids = tiny_model(), tiny_inputs()
    with llmkernels.patch(model) as handle:
        assert count_ops(model, ids) == OPS
        assert len(handle.report()["rope"].patched) == LAYERS
    assert count_ops(model, ids) == {}
    with pytest.raises(KeyError), llmkernels.patch(model):
        raise KeyError
    assert count_ops(model, ids) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(kind):
    model, ids = tiny_model(), tiny_inputs()
    before = logits_of(model, ids)
    report = llmkernels.patch(model, **{other: other == kind for other in KINDS}).report()
    op = "swiglu" if kind == "gated_mlp" else kind
    assert count_ops(model, ids) == {op: 2 * LAYERS + 1 if kind == "rms_norm" else LAYERS}
    assert_close(logits_of(model, ids), before)
    assert report[kind].found == len(report[kind].patched)
    for other in set(KINDS) - {kind}:
        assert set(report[other].left_alone.values()) == {"not asked for"}
    unpatch(model)
    assert torch.equal(logits_of(model, ids), before)


def test_report_text():
    model = tiny_model(hidden_act="relu6", num_hidden_layers=4)
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda *_: None)
    lines = str(llmkernels.patch(model).report()).splitlines()
    assert lines[0] == "llmkernels in Qwen2ForCausalLM"
    assert [line.split()[:4] for line in lines[2:6]] == [
        ["rms_norm", "9", "of", "9"],
        ["rope", "4", "of", "4"],
        ["gated_mlp", "0", "of", "4"],
        ["add_rms_norm", "3", "of", "4"],
    ]
    assert "llmkernels::rms_norm (6), llmkernels::add_rms_norm (3)" in lines[2]
    assert lines[6:] == [
        "gated_mlp left alone, 4: no kernel for its activation, ReLU6: model.layers.{0-3}.mlp",
        "add_rms_norm left alone, 1: post_attention_layernorm has hooks or was replaced: model.layers.1",
        "Qwen2ForCausalLM decodes by the model's forward: hooks on model.layers.1.post_attention_layernorm have to see "
        "its calls",
        "forwards under torch.compile are not counted",
    ]


def test_abbreviate():
    names = ["a.0.b", "a.1.b", "a.2.b", "a.7.b", "a.3.c", "norm", "5", "x2.b"]
    assert abbreviate(names) == "a.{0-2,7}.b, a.3.c, norm, 5, x2.b"


# --- errors


def test_patching_twice_is_an_error():
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    with pytest.raises(RuntimeError, match=rf"patched already, got one with {5 * LAYERS + 2} patched modules"):
        llmkernels.patch(model)
    assert count_ops(model, ids) == OPS
    handle.unpatch()
    llmkernels.patch(model)
    assert count_ops(model, ids) == OPS


def test_unknown_model_is_an_error():
    with pytest.raises(ValueError, match=r"layers of a decoder of transformers, got <class .*Sequential"):
        llmkernels.patch(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        llmkernels.patch("Qwen/Qwen2.5-7B")


def test_nothing_to_patch_is_an_error_that_says_why():
    model = tiny_model(hidden_act="relu6")
    with pytest.raises(ValueError, match=r"nothing to patch[\s\S]*no kernel for its activation, ReLU6: model.layers"):
        llmkernels.patch(model, rms_norm=False, rope=False, add_rms_norm=False)
    with pytest.raises(ValueError, match=r"nothing to patch[\s\S]*rope left alone, 2: not asked for"):
        llmkernels.patch(model, **dict.fromkeys(KINDS, False))
    assert count_ops(model, tiny_inputs()) == {}


# --- nothing global changes


def _globals_snapshot():
    """Every global of transformers' loaded modules and of torch.nn, and every member of their classes, by identity."""
    gc.collect()
    snapshot = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("transformers.models.", "transformers.modeling", "transformers.act", "torch.nn")):
            continue
        # Class registries and caches, such as those of abc, are none of the module's business.
        for key, value in list(vars(module).items()):
            snapshot[name, key] = id(value)
            if isinstance(value, type):
                snapshot |= {(name, key, k): id(v) for k, v in vars(value).items() if not k.startswith("_abc_")}
    return snapshot


def test_no_global_is_written_and_other_models_are_untouched():
    model, other, ids = tiny_model(), tiny_model(seed=5), tiny_inputs()
    before, expected = _globals_snapshot(), logits_of(other, ids)
    for _ in range(2):
        with llmkernels.patch(model):
            assert count_ops(model, ids) == OPS
            assert _globals_snapshot() == before
            assert count_ops(other, ids) == {}
            assert torch.equal(logits_of(other, ids), expected)
            assert count_ops(tiny_model(seed=6), ids) == {}
    assert _globals_snapshot() == before


def test_globals_changed_after_patching_still_count(monkeypatch):
    """A user may replace a function of the modeling module, for example to log attention: it is called."""
    module = transformers.models.qwen2.modeling_qwen2
    model, ids = tiny_model(attn_implementation="eager"), tiny_inputs()
    llmkernels.patch(model)
    calls = []
    original, rotation = module.eager_attention_forward, module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "eager_attention_forward", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    assert count_ops(model, ids) == OPS
    assert len(calls) == LAYERS
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda *a, **k: (calls.append(2), rotation(*a, **k))[1])
    assert count_ops(model, ids) == {op: n for op, n in OPS.items() if op != "rope"}
    assert calls == [1] * LAYERS + [2, 1] * LAYERS


def test_import_does_not_load_transformers():
    code = "import llmkernels, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# --- what a patched module looks like


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_modules_pass_for_the_original(family):
    model = tiny_model(family)
    originals = {name: type(module) for name, module in model.named_modules()}
    text, signature = repr(model), inspect.signature(model.forward)
    llmkernels.patch(model)
    assert repr(model) == text
    assert inspect.signature(model.forward) == signature
    for name, module in model.named_modules():
        assert isinstance(module, originals[name])
        assert type(module).__name__ == originals[name].__name__
        ours, theirs = (inspect.signature(cls.forward).parameters for cls in (type(module), originals[name]))
        assert [(p.name, p.kind, p.default) for p in list(ours.values())[2:]] == [
            (p.name, p.kind, p.default) for p in list(theirs.values())[2:]
        ]


def test_base_model_and_submodule():
    model, ids = tiny_model(), tiny_inputs()
    before = logits_of(model, ids)
    llmkernels.patch(model.model)
    assert count_ops(model, ids) == OPS
    unpatch(model)
    llmkernels.patch(model.model.layers[0])
    assert count_ops(model, ids) == {"rms_norm": 1, "add_rms_norm": 1, "rope": 1, "swiglu": 1}
    assert_close(logits_of(model, ids), before)


def test_another_family_needs_no_line():
    shape = {key: value for key, value in hf_models.tiny_config().to_dict().items() if key.startswith(("hid", "num"))}
    shape |= {"vocab_size": hf_models.VOCAB, "intermediate_size": 88, "head_dim": 16, "pad_token_id": 0}
    for head, config, glu in (
        (transformers.MistralForCausalLM, transformers.MistralConfig(**shape), "swiglu"),
        (transformers.GemmaForCausalLM, transformers.GemmaConfig(**shape | {"hidden_act": "gelu"}), "geglu"),
    ):
        model, ids = tiny_model(config=config, head=head), tiny_inputs()
        before = logits_of(model, ids)
        handle = llmkernels.patch(model)
        assert count_ops(model, ids) == {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, glu: 2}, handle.report()
        assert_close(logits_of(model, ids), before)
