"""Modules that patch does not replace, the reasons that it gives, and the checks behind them."""

import functools
import types

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

import llmkernels
from hf_models import FAMILIES, LAYERS, OPS, assert_close, count_ops, logits_of, tiny_inputs, tiny_model
from llmkernels.hf import layers, unpatch
from llmkernels.hf.layout import UnknownLayout, bind_global, check_rope, check_symbolically


def left_alone(model, kind, **asked):
    """The reasons for one kind, after patching; the model still equals transformers'."""
    ids = tiny_inputs()
    before = logits_of(model, ids)
    handle = llmkernels.patch(model, **asked)
    assert_close(logits_of(model, ids), before)
    return handle.report()[kind].left_alone


def as_transformers(function):
    """`function`, as if it were from a transformers release."""
    scope = {**function.__globals__, "__name__": "transformers.models.qwen2.modeling_qwen2"}
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)


# --- activations


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("hidden_act", "op"),
    [("silu", "swiglu"), ("swish", "swiglu"), ("gelu", "geglu"), ("gelu_pytorch_tanh", "geglu"), ("relu", None)],
)
def test_activation(family, hidden_act, op, device):
    model, ids = tiny_model(family, device, hidden_act=hidden_act), tiny_inputs(device)
    before = logits_of(model, ids)
    row = llmkernels.patch(model).report()["gated_mlp"]
    assert count_ops(model, ids).get(op, 0) == (LAYERS if op else 0)
    assert row.kernels == ({f"llmkernels::{op}": LAYERS} if op else {})
    assert set(row.left_alone.values()) == (set() if op else {"no kernel for its activation, ReLU"})
    assert_close(logits_of(model, ids), before)


def test_activation_changed_after_patching():
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    model.model.layers[1].mlp.act_fn = ACT2FN["gelu"]
    patched = logits_of(model, ids)
    assert count_ops(model, ids) == {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, "geglu": 1}
    assert handle.report()["gated_mlp"].left_alone == {"model.layers.0.mlp": "no kernel for its activation, ReLU"}
    handle.unpatch()
    assert_close(patched, logits_of(model, ids))


# --- classes and instances that were changed


def test_instance_forward_is_left_alone():
    model, ids = tiny_model(), tiny_inputs()
    calls = []
    for module in (model.model.norm, model.model.layers[0], model.model.layers[1].post_attention_layernorm):
        original = module.forward
        module.forward = lambda *a, _f=original, **k: (calls.append(1), _f(*a, **k))[1]
    report = llmkernels.patch(model).report()
    reason = "it has a forward of its own, set on the instance"
    assert report["rms_norm"].left_alone == {
        "model.layers.1.post_attention_layernorm": reason,
        "model.norm": reason,
    }
    assert report["add_rms_norm"].left_alone == {
        "model.layers.0": reason,
        "model.layers.1": f"post_attention_layernorm: {reason}",
    }
    assert count_ops(model, ids) == {"rms_norm": 3, "rope": 2, "swiglu": 2}
    assert len(calls) == 3


def test_instance_forward_set_after_patching_stops_unpatch():
    model, ids = tiny_model(), tiny_inputs()
    before = logits_of(model, ids)
    handle = llmkernels.patch(model)
    model.model.norm.forward = functools.partial(model.model.norm.forward)
    with pytest.raises(RuntimeError, match=r"model.norm must not have a forward of its own, got one set after patch"):
        handle.unpatch()
    assert count_ops(model, ids) == OPS  # all or nothing
    model.model.norm.forward = model.model.norm.forward.func  # what accelerate leaves behind: the class's own
    handle.unpatch()
    assert "forward" not in vars(model.model.norm)
    assert torch.equal(logits_of(model, ids), before)


def test_another_class_on_top_stops_unpatch():
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    nn.utils.parametrize.register_parametrization(model.model.norm, "weight", nn.Identity())
    assert count_ops(model, ids) == OPS
    with pytest.raises(RuntimeError, match=r"class of model.norm must be the patched one, got .*Parametrized"):
        handle.unpatch()
    nn.utils.parametrize.remove_parametrizations(model.model.norm, "weight")
    handle.unpatch()
    assert count_ops(model, ids) == {}


def test_class_forward_replaced_by_someone_is_left_alone(monkeypatch):
    """A global patch of another package still works: its functions run, not ours."""
    original = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: original(self, x))
    reasons = left_alone(tiny_model("llama"), "gated_mlp")
    assert set(reasons.values()) == {"its forward is not transformers' own but from test_hf_layout"}
    monkeypatch.undo()
    assert left_alone(tiny_model("llama"), "gated_mlp") == {}


class PlainNorm(modeling_qwen2.Qwen2RMSNorm):
    pass


class LoudNorm(modeling_qwen2.Qwen2RMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class WideAttention(modeling_qwen2.Qwen2Attention):
    def forward(self, hidden_states, **kwargs):
        output, weights = super().forward(2 * hidden_states, **kwargs)
        return output, weights


def test_subclasses_of_known_classes():
    """A class with the same forward is patched; one with another forward is not. Norms and attention alike."""
    model, ids = tiny_model(), tiny_inputs()
    model.model.norm.__class__ = PlainNorm
    model.model.layers[0].post_attention_layernorm.__class__ = LoudNorm
    model.model.layers[1].self_attn.__class__ = WideAttention
    before = logits_of(model, ids)
    report = llmkernels.patch(model).report()
    loud = "its forward is not transformers' own but from test_hf_layout"
    assert report["rms_norm"].left_alone == {"model.layers.0.post_attention_layernorm": loud}
    assert report["add_rms_norm"].left_alone == {"model.layers.0": f"post_attention_layernorm: {loud}"}
    assert report["rope"].left_alone == {
        "model.layers.1.self_attn": "its forward does not call apply_rotary_pos_emb directly"
    }
    assert type(model.model.norm).original is PlainNorm
    assert count_ops(model, ids) == {"rms_norm": 3, "add_rms_norm": 1, "rope": 1, "swiglu": 2}
    assert_close(logits_of(model, ids), before)
    unpatch(model)
    assert type(model.model.norm) is PlainNorm
    assert torch.equal(logits_of(model, ids), before)


def test_unknown_norm_behind_attention():
    model = tiny_model()
    model.model.layers[0].post_attention_layernorm = nn.LayerNorm(112)
    assert left_alone(model, "add_rms_norm") == {
        "model.layers.0": "no kernel for its post_attention_layernorm, LayerNorm"
    }


# --- formulas of a future release


def norm_like(formula):
    def forward(self, hidden_states):
        return formula(hidden_states.float(), self.weight, self.variance_epsilon, hidden_states.dtype)

    return as_transformers(forward)


@pytest.mark.parametrize(
    ("formula", "same"),
    [
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)).to(T), True),
        (lambda x, w, eps, T: w * (x / (x.norm(dim=-1, keepdim=True) ** 2 / x.shape[-1] + eps).sqrt()).to(T), True),
        (lambda x, w, eps, T: (w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps))).to(T), False),
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.pow(2).mean(-1, True)) + eps).to(T), False),
        (lambda x, w, eps, T: (1 + w) * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)).to(T), False),
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.var(-1, keepdim=True) + eps)).to(T), False),
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)), False),
    ],
    ids=["same", "same-otherwise-written", "cast-late", "eps-outside", "offset", "variance", "float32-result"],
)
def test_norm_formula(formula, same, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(modeling_qwen2.Qwen2RMSNorm, "forward", norm_like(formula))
    if same:
        assert left_alone(model, "rms_norm") == {}
    else:
        reasons = left_alone(model, "rms_norm")
        assert len(reasons) == 2 * LAYERS + 1
        assert set(reasons.values()) == {"its forward computes another norm than this family's"}


def test_rope_formula(monkeypatch):
    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turned = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    ours = layers.rotation_by_kernel(modeling_qwen2.apply_rotary_pos_emb)
    check_rope(modeling_qwen2.apply_rotary_pos_emb, ours)
    for other in (interleaved, lambda q, k, cos, sin: (q, k), lambda *tensors: tensors[5]):
        with pytest.raises(UnknownLayout, match="apply_rotary_pos_emb"):
            check_rope(other, ours)
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", interleaved)
    reasons = left_alone(tiny_model(), "rope")
    assert set(reasons.values()) == {"its apply_rotary_pos_emb computes another rotation than half-split"}


LAYER_SUBMODULES = dict.fromkeys(("input_layernorm", "post_attention_layernorm", "mlp"), False) | {"self_attn": True}


def layer_like(scale="residual + hidden_states", attend="hidden_states=hidden_states", extra=""):
    source = f"""
def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
            position_embeddings=None, **kwargs):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, weights = self.self_attn({attend}, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs)
    hidden_states = residual = {scale}
    {extra}
    return residual + self.mlp(self.post_attention_layernorm(hidden_states))
"""
    scope = {"__name__": "transformers.models.qwen2.modeling_qwen2"}
    exec(source, scope)
    return scope["forward"]


def test_layer_layout():
    check_symbolically(layer_like(), layers.DecoderLayer.forward, LAYER_SUBMODULES)
    for other in (
        layer_like(scale="residual + hidden_states * 0.5"),
        layer_like(scale="hidden_states"),
        layer_like(attend="hidden_states"),
        layer_like(attend="hidden_states=hidden_states, layer=self.layer_idx"),
        layer_like(extra="residual = self.mlp(residual)"),
        layer_like(extra="import torch; hidden_states = torch.dropout(hidden_states, 0.1, True)"),
    ):
        with pytest.raises(UnknownLayout, match="unknown layout of its forward"):
            check_symbolically(other, layers.DecoderLayer.forward, LAYER_SUBMODULES)


def test_unknown_layer_layout_falls_back(monkeypatch):
    monkeypatch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", layer_like("residual + hidden_states * 0.5"))
    reasons = left_alone(tiny_model(), "add_rms_norm")
    assert len(reasons) == LAYERS
    assert all(reason.startswith("unknown layout of its forward, which computes") for reason in reasons.values())


def test_unknown_mlp_layout_falls_back(monkeypatch):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", as_transformers(forward))
    reason = "down_proj((gate_proj(x) * act_fn(up_proj(x))))"
    assert set(left_alone(tiny_model(), "gated_mlp").values()) == {
        f"unknown layout of its forward, which computes {reason}"
    }


# --- bind_global


def shifted(x, by=1, *, scale=lambda x: x):
    """A docstring
    of two lines."""
    return scale(offset + x + by)


offset = 10


def test_bind_global():
    bound = bind_global(shifted, "offset", 100)
    assert (shifted(1), bound(1), bound(1, 2), bound(1, scale=lambda x: -x)) == (12, 102, 103, -102)
    assert bound.__globals__ is globals()
    assert (bound.__name__, bound.__doc__, bound.__module__) == (shifted.__name__, shifted.__doc__, __name__)
    assert bound.__code__.co_firstlineno == shifted.__code__.co_firstlineno
    assert list(bound.__code__.co_lines())[-1][2] == list(shifted.__code__.co_lines())[-1][2]


def test_bind_global_keeps_closures():
    def outer(inner):
        def function():
            return offset + inner

        return function

    assert bind_global(outer(5), "offset", 100)() == 105

    class Base:
        def f(self):
            return offset

    class Derived(Base):
        def f(self):
            return super().f() + offset

    assert bind_global(Derived.f, "offset", 100)(Derived()) == 110


def test_bind_global_refuses():
    with pytest.raises(UnknownLayout, match="does not call missing directly"):
        bind_global(shifted, "missing", 1)
    with pytest.raises(UnknownLayout, match="not available"):
        bind_global(as_transformers(eval("lambda: offset")), "offset", 1)
    for line in (1, shifted.__code__.co_firstlineno + 9):  # as if the file had changed since it was imported
        moved = types.FunctionType(shifted.__code__.replace(co_firstlineno=line), globals())
        with pytest.raises(UnknownLayout, match="source of its forward"):
            bind_global(moved, "offset", 1)
