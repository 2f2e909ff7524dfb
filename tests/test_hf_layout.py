"""Modules that patch does not replace, the reasons that it gives, and the checks behind them."""

import functools
import inspect
import linecache
import types

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.utils.deprecation import deprecate_kwarg

import llmkernels
from families import family_model
from generating import check_steps
from hf_models import (
    FAMILIES,
    LAYERS,
    OPS,
    as_transformers,
    assert_close,
    count_ops,
    logits_of,
    tiny_inputs,
    tiny_model,
)
from llmkernels.hf import unpatch
from llmkernels.hf.classes.layout import norm_of, rotation_of
from llmkernels.hf.classes.options import NormOptions, Rotation
from llmkernels.hf.classes.source import bind_global, fuse_adds
from llmkernels.hf.errors import UnknownLayout


def left_alone(model, kind, **asked):
    """The reasons for one kind, after patching; the model still equals transformers'."""
    ids = tiny_inputs()
    before = logits_of(model, ids)
    handle = llmkernels.patch(model, **asked)
    assert_close(logits_of(model, ids), before)
    return handle.report()[kind].left_alone


# --- activations


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("hidden_act", "op"),
    [
        ("silu", "swiglu"),
        ("swish", "swiglu"),
        ("gelu", "geglu"),
        ("gelu_pytorch_tanh", "geglu"),
        ("relu2", "relu2_glu"),
        ("sigmoid", "glu"),
        ("relu", "glu"),
        ("relu6", None),
    ],
)
def test_activation(family, hidden_act, op, device):
    model, ids = tiny_model(family, device, hidden_act=hidden_act), tiny_inputs(device)
    before = logits_of(model, ids)
    row = llmkernels.patch(model).report()["gated_mlp"]
    assert count_ops(model, ids).get(op, 0) == (LAYERS if op else 0)
    assert row.kernels == ({f"llmkernels::{op}": LAYERS} if op else {})
    assert set(row.left_alone.values()) == (set() if op else {"no kernel for its activation, ReLU6"})
    assert_close(logits_of(model, ids), before)


def test_activation_changed_after_patching():
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    model.model.layers[0].mlp.act_fn = nn.ReLU6()
    model.model.layers[1].mlp.act_fn = ACT2FN["gelu"]
    patched = logits_of(model, ids)
    assert count_ops(model, ids) == {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, "geglu": 1}
    assert handle.report()["gated_mlp"].left_alone == {"model.layers.0.mlp": "no kernel for its activation, ReLU6"}
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
        "model.layers.1.self_attn": "its forward is not transformers' own but from test_hf_layout"
    }
    assert type(model.model.norm).original is PlainNorm
    assert count_ops(model, ids) == {"rms_norm": 3, "add_rms_norm": 1, "rope": 1, "swiglu": 2}
    assert_close(logits_of(model, ids), before)
    unpatch(model)
    assert type(model.model.norm) is PlainNorm
    assert torch.equal(logits_of(model, ids), before)


def test_unknown_norm_behind_attention():
    model = tiny_model()
    model.model.layers[0].post_attention_layernorm = nn.Identity()
    assert left_alone(model, "add_rms_norm") == {
        "model.layers.0": "its post_attention_layernorm follows an add and is no norm with a kernel, but Identity"
    }


def test_layer_norm_behind_attention():
    """One of torch's has a kernel where it is part of a decoder, and nowhere else."""
    model, ids = tiny_model(), tiny_inputs()
    model.model.layers[0].post_attention_layernorm = nn.LayerNorm(112)
    model.other = nn.Sequential(nn.LayerNorm(112))
    before = logits_of(model, ids)
    report = llmkernels.patch(model).report()
    assert report["layer_norm"].patched == ["model.layers.0.post_attention_layernorm"]
    assert report["layer_norm"].found == 1
    assert report["layer_norm"].kernels == {"llmkernels::add_layer_norm": 1}
    assert report["add_rms_norm"].kernels == {"llmkernels::add_layer_norm": 1, "llmkernels::add_rms_norm": 1}
    assert count_ops(model, ids) == {"rms_norm": 3, "add_rms_norm": 1, "add_layer_norm": 1, "rope": 2, "swiglu": 2}
    assert_close(logits_of(model, ids), before)
    with torch.autocast("cpu", torch.bfloat16):  # which runs layer_norm in float32
        assert "add_layer_norm" not in count_ops(model, ids)


# --- formulas of a future release


def norm_like(formula):
    def forward(self, hidden_states):
        return formula(hidden_states.float(), self.weight, self.variance_epsilon, hidden_states.dtype)

    return as_transformers(forward)


_FORMULAS = [
    *("same", "same-otherwise-written", "cast-late", "offset", "no-weight", "mean"),
    *("eps-outside", "offset-of-2", "rounded-offset", "variance", "float32-result"),
]


@pytest.mark.parametrize(
    ("formula", "options"),
    [
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)).to(T), NormOptions()),
        (
            lambda x, w, eps, T: w * (x / (x.norm(dim=-1, keepdim=True) ** 2 / x.shape[-1] + eps).sqrt()).to(T),
            NormOptions(),
        ),
        (
            lambda x, w, eps, T: (w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps))).to(T),
            NormOptions(cast_before_weight=False),
        ),
        (
            lambda x, w, eps, T: ((1 + w.float()) * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps))).to(T),
            NormOptions(weight_offset=1, cast_before_weight=False),
        ),
        (lambda x, w, eps, T: (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)).to(T), NormOptions(has_weight=False)),
        (
            lambda x, w, eps, T: (w * (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, False, keepdim=True) + eps)).to(T),
            NormOptions("layer_norm"),
        ),
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.pow(2).mean(-1, True)) + eps).to(T), None),
        (lambda x, w, eps, T: (2 + w) * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)).to(T), None),
        (lambda x, w, eps, T: (1 + w) * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)).to(T), None),
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.var(-1, keepdim=True) + eps)).to(T), None),
        (lambda x, w, eps, T: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)), None),
    ],
    ids=_FORMULAS,
)
def test_norm_formula(formula, options, monkeypatch):
    monkeypatch.setattr(modeling_qwen2.Qwen2RMSNorm, "forward", norm_like(formula))
    if options is not None:
        assert norm_of(modeling_qwen2.Qwen2RMSNorm) == options
        assert left_alone(tiny_model(), options.kind) == {}
    else:
        reasons = left_alone(tiny_model(), "rms_norm")
        assert len(reasons) == 2 * LAYERS + 1
        assert set(reasons.values()) == {"its forward computes no norm that has a kernel"}


def test_norms_of_transformers():
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.gemma import modeling_gemma as gemma
    from transformers.models.nemotron import modeling_nemotron as nemotron

    assert norm_of(modeling_llama.LlamaRMSNorm) == NormOptions()
    assert norm_of(gemma.GemmaRMSNorm) == NormOptions(eps="eps", weight_offset=1, cast_before_weight=False)
    assert norm_of(cohere.CohereLayerNorm) == NormOptions("layer_norm")
    assert norm_of(nemotron.NemotronLayerNorm1P) == NormOptions("layer_norm", "eps", weight_offset=1, has_bias=True)
    assert norm_of(nn.LayerNorm) == NormOptions("layer_norm", "eps", has_bias=True)
    with pytest.raises(UnknownLayout):
        norm_of(nn.GroupNorm)


def test_rotations_of_transformers():
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie
    from transformers.models.glm import modeling_glm as glm
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.olmo2 import modeling_olmo2 as olmo2

    for module, options in (
        (modeling_qwen2, Rotation()),
        (olmo2, Rotation(keeps_dtype=True)),
        (gpt_oss, Rotation(table="pairs")),
        (glm, Rotation(interleaved=True, table="half", partial=True)),
        (ernie, Rotation(interleaved=True, table="half", float32=True, keeps_dtype=True)),
        (cohere, Rotation(interleaved=True, float32=True, keeps_dtype=True)),
    ):
        assert rotation_of("apply_rotary_pos_emb", module.apply_rotary_pos_emb) == options


def test_tables_that_a_rotation_does_not_take():
    """Those of half a head, which Llama's adds nowhere; and those of two elements for one, which it broadcasts."""
    half = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model, ids = tiny_model("llama", rope_parameters=half), tiny_inputs()
    llmkernels.patch(model)
    with pytest.raises(RuntimeError, match="must match the size"):
        logits_of(model, ids)
    with pytest.raises(RuntimeError, match="must match the size"):
        model.generate(ids, max_new_tokens=2)

    one = half | {"partial_rotary_factor": 0.25}
    model = family_model("stablelm", hidden_size=24, rope_parameters=one)
    expected = logits_of(model, ids)
    llmkernels.patch(model)
    assert_close(logits_of(model, ids), expected)


def test_rope_formula(monkeypatch):
    check_steps(tiny_model(), tiny_inputs())  # what was proved of it holds as long as its functions are these

    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turned = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    def backwards(q, k, cos, sin, unsqueeze_dim=1):
        return interleaved(q, k, cos, -sin, unsqueeze_dim)

    interleaved = as_transformers(interleaved)
    assert rotation_of("rotary", interleaved) == Rotation("rotary", interleaved=True)
    for other in (as_transformers(backwards), as_transformers(lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))):
        with pytest.raises(UnknownLayout, match="rotary computes a rotation that has no kernel"):
            rotation_of("rotary", other)
    with pytest.raises(UnknownLayout, match="rotary has other arguments"):
        rotation_of("rotary", as_transformers(lambda q, k, cos, sin: (q, k)))
    with pytest.raises(UnknownLayout, match="not transformers' own"):
        rotation_of("rotary", backwards)
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", interleaved)
    model = tiny_model()
    assert left_alone(model, "rope") == {}
    ids = tiny_inputs()
    before = logits_of(model, ids)
    unpatch(model)
    assert_close(before, logits_of(model, ids))
    # Its tables are half-split, so that the two elements of a pair turn by different angles.
    assert "computes something else than its description" in str(llmkernels.patch(model).report())


# --- layers


def layer_like(scale="residual + hidden_states", between="", norm="self.post_attention_layernorm(hidden_states)"):
    source = f"""
def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
            position_embeddings=None, **kwargs):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, weights = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask,
        position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
        position_embeddings=position_embeddings, **kwargs)
    hidden_states = {scale}
    {between}
    residual = hidden_states
    return residual + self.mlp({norm})
"""
    return from_source(source.replace("    return", "    hidden_states =") + "    return hidden_states\n")


def from_source(source):
    """A function `forward` of transformers, whose source is found."""
    name = f"<source {hash(source)}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    scope = {"__name__": "transformers.models.qwen2.modeling_qwen2"}
    exec(compile(source, name, "exec"), scope)
    return scope["forward"]


X = torch.linspace(-1, 1, 8, dtype=torch.float64)
PARTS = types.SimpleNamespace(
    input_layernorm=torch.sin,
    self_attn=lambda hidden_states, **_: (hidden_states.cos(), None),
    post_attention_layernorm=torch.tanh,
    norm2=lambda x: x + 0.5,
    any_name=torch.exp,
    mlp=lambda x: x * x,
    multiplier=3,
)


@pytest.mark.parametrize(
    ("changes", "norms"),
    [
        ({}, ("post_attention_layernorm",)),
        ({"scale": "residual + hidden_states * self.multiplier"}, ("post_attention_layernorm",)),
        ({"scale": "residual + self.norm2(hidden_states)"}, ("post_attention_layernorm",)),
        ({"norm": "self.norm2(residual)"}, ("norm2",)),
        ({"scale": "residual * hidden_states"}, None),
        ({"scale": "hidden_states"}, None),
        ({"norm": "self.any_name(hidden_states)"}, ("any_name",)),
        ({"between": "hidden_states = self.mlp(hidden_states)"}, ("mlp",)),  # which the instance knows is no norm
        ({"norm": "self.norm2(hidden_states, residual)"}, None),
        ({"norm": "self.norm2(weights)"}, None),
    ],
)
def test_fused_adds(changes, norms):
    """What is fused computes the same."""
    forward = layer_like(**changes)
    if norms is None:
        with pytest.raises(UnknownLayout, match="no norm follows an add directly"):
            fuse_adds(forward, None)
        return
    fused, found = fuse_adds(forward, lambda layer, norm, x, residual: (norm(residual + x), residual + x))
    assert found == norms
    assert "_add_norm" in fused.__code__.co_freevars
    assert torch.equal(fused(PARTS, X), forward(PARTS, X))


def test_a_layer_of_another_formula(monkeypatch):
    scaled = layer_like("residual + hidden_states * 0.5")
    monkeypatch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", scaled)
    model, ids = tiny_model(), tiny_inputs()
    before = logits_of(model, ids)
    handle = llmkernels.patch(model)
    assert len(handle.report()["add_rms_norm"].patched) == LAYERS
    assert_close(logits_of(model, ids), before)
    handle.unpatch()
    check_steps(model, ids)


@pytest.mark.parametrize("name", ["scale", "mlp"])
def test_what_follows_an_add(name, monkeypatch):
    """A norm of any name is fused, and nothing else."""
    monkeypatch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", layer_like(norm=f"self.{name}(hidden_states)"))
    model = tiny_model()
    for layer in model.model.layers:
        layer.scale = layer.post_attention_layernorm
    found = left_alone(model, "add_rms_norm")
    if name == "scale":
        assert not found
        assert count_ops(model, tiny_inputs())["add_rms_norm"] == LAYERS
    else:
        assert {*found.values()} == {"its mlp follows an add and is no norm with a kernel, but Qwen2MLP"}


def test_an_mlp_of_another_formula(monkeypatch):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", as_transformers(forward))
    model, ids = tiny_model(), tiny_inputs()
    before = logits_of(model, ids)
    handle = llmkernels.patch(model)
    assert len(handle.report()["gated_mlp"].patched) == LAYERS
    assert_close(logits_of(model, ids), before)
    handle.unpatch()
    check_steps(model, ids)


def test_unknown_mlp_layout_falls_back(monkeypatch):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) + self.act_fn(self.up_proj(x)))

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", as_transformers(forward))
    reason = "self.down_proj(add(self.gate_proj(x), self.act_fn(self.up_proj(x))))"
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


def test_bind_global_keeps_decorators():
    renaming = deprecate_kwarg("first", "99.0", new_name="x")
    renamed = renaming(renaming(shifted))
    bound = bind_global(renamed, "offset", 100)
    assert (renamed(1), bound(1), bound(x=1)) == (12, 102, 102)
    assert inspect.signature(bound) == inspect.signature(shifted)
    with pytest.warns(FutureWarning, match="`first` is deprecated"):
        assert bound(first=1) == 102


def test_renamed_arguments_of_a_model(monkeypatch):
    """The forwards of an attention, a layer and a model have decorators of transformers that rename an argument."""
    modules = modeling_qwen2.Qwen2Attention, modeling_qwen2.Qwen2DecoderLayer, modeling_qwen2.Qwen2ForCausalLM
    for cls in modules:
        monkeypatch.setattr(cls, "forward", deprecate_kwarg("mask", "99.0", new_name="attention_mask")(cls.forward))
    model, ids = tiny_model(), tiny_inputs()
    mask = (torch.arange(ids.shape[1]) > 2).expand(ids.shape).long()
    before = logits_of(model, ids, attention_mask=mask)
    handle = llmkernels.patch(model, training=True)
    assert not any(row.left_alone for row in handle.report().rows.values())
    with pytest.warns(FutureWarning, match="`mask` is deprecated"):
        assert_close(logits_of(model, ids, mask=mask), before)
    assert count_ops(model, ids) == OPS
    handle.unpatch()
    check_steps(model, ids)


def test_a_decorator_that_hides_what_it_wraps():
    def decorator(function):
        held = [function]

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return held[0](*args, **kwargs)

        return wrapper

    with pytest.raises(UnknownLayout, match="wrapped by a decorator of an unknown layout"):
        bind_global(decorator(shifted), "offset", 100)


def test_bind_global_refuses():
    with pytest.raises(UnknownLayout, match="does not call missing directly"):
        bind_global(shifted, "missing", 1)
    with pytest.raises(UnknownLayout, match="not available"):
        bind_global(as_transformers(eval("lambda: offset")), "offset", 1)
    for line in (1, shifted.__code__.co_firstlineno + 9):  # as if the file had changed since it was imported
        moved = types.FunctionType(shifted.__code__.replace(co_firstlineno=line), globals())
        with pytest.raises(UnknownLayout, match="source of its forward"):
            bind_global(moved, "offset", 1)
