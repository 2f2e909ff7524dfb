"""Which forwards are those of an MLP, whatever the names of its parts."""

import pytest
import torch  # noqa: F401, of formulas
from torch import nn
from torch.nn import functional as F  # noqa: F401
from transformers.models.beit.modeling_beit import BeitConvLayer
from transformers.models.qwen2 import modeling_qwen2

import llmkernels
from hf_models import LAYERS, as_transformers, assert_close, count_ops, logits_of, tiny_inputs, tiny_model
from llmkernels.hf.classes.layout import kind_of, mlp_of
from llmkernels.hf.classes.options import MLPNames
from llmkernels.hf.errors import UnknownLayout


@pytest.mark.parametrize(
    ("formula", "kind", "options"),
    [
        ("self.d(self.act(self.g(x)) * self.u(x))", "gated_mlp", MLPNames("d", "act", "g", "u")),
        ("self.d(self.u(x) * self.act(self.g(x)))", "gated_mlp", MLPNames("d", "act", "g", "u")),
        (
            "self.act(self.u(self.d(x)).mul_(self.g(x)))",
            "gated_mlp",
            MLPNames("act", "u", "d", "g"),
        ),  # whatever their names
        ("self.a(self.b(self.c(x)))", "mlp", MLPNames("a", "b", None, "c")),
        ("self.d(self.act(self.u(x)))", "mlp", MLPNames("d", "act", None, "u")),
        (
            "F.dropout(self.d(self.act(self.u(x))), p=self.p, training=self.training)",
            "mlp",
            MLPNames("d", "act", None, "u", "p"),
        ),
        (
            "self.d((lambda g, u: u * self.act(g))(*self.g(x).chunk(2, dim=-1)))",
            "gated_mlp",
            MLPNames("d", "act", "g", None),
        ),
        (
            "self.d((lambda g, u: self.f(g) * u)(*torch.chunk(self.g(x), 2, -1)))",
            "gated_mlp",
            MLPNames("d", "f", "g", None),
        ),
        ("self.d((lambda u, g: u * self.act(g))(*self.g(x).chunk(2, dim=-1)))", None, None),
        ("self.d((lambda g, u: u * self.act(g))(*self.g(x).chunk(3, dim=-1)[:2]))", None, None),
        ("self.d((lambda g, u: u * self.act(g))(*self.g(x).chunk(2, dim=0)))", None, None),
        ("self.d((lambda g, u: self.f(u) * u)(*self.g(x).chunk(2, -1)))", None, None),
        ("self.d(self.f(self.g(x).chunk(2, -1)[0]) * self.h(x).chunk(2, -1)[1])", None, None),
        ("self.d((lambda p: self.f(p.chunk(2, -1)[0]) * p.chunk(8, -1)[1])(self.g(x)))", None, None),
        ("self.d(self.act(self.g(x)) * self.u(self.g(x)))", None, None),
        ("self.d(self.act(self.g(x)) + self.u(x))", None, None),
        ("self.d(self.act(self.g(x)) * self.u(x)) * self.scale", None, None),
        ("F.dropout(self.d(self.act(self.u(x))), p=self.p)", None, None),
        ("F.dropout(self.d(self.act(self.u(x))), p=self.p, training=self.other)", None, None),
        ("self.d(self.act(self.u(x).float()))", None, None),
        ("self.d(self.act(self.u(x))) if self.flag else x", None, None),
        ("self.d(self.act(self.u(x))) if self.way != 'other' else x", None, None),
        ("self.d(self.act(self.u(x))) if x.shape[0] > 1 else x", None, None),
        ("(self.seen.append(x), self.d(self.act(self.u(x))))[1]", None, None),
        ("(self.d(self.act(self.u(x))),)", None, None),
        ("setattr(self, 'last', x) or self.d(self.act(self.u(x)))", None, None),
        ("self.d(self.act(self.u(x)) if x.sum() else x)", None, None),
    ],
)
def test_mlp_layout(formula, kind, options):
    forward = as_transformers(eval(f"lambda self, x: {formula}"))
    cls = type("Mystery", (nn.Module,), {"forward": forward, "__module__": "transformers.models.qwen2.modeling_qwen2"})
    assert kind_of(cls) == kind
    if kind is None:
        with pytest.raises(UnknownLayout, match="unknown layout of its forward"):
            mlp_of(forward)
    else:
        assert mlp_of(forward) == options


def test_an_mlp_whose_members_have_other_names(monkeypatch):
    def forward(self, x):
        return self.third(self.second(self.first(x)) * self.fourth(x))

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", as_transformers(forward))
    model, ids = tiny_model(), tiny_inputs()
    for layer in model.model.layers:
        old, new = ("gate_proj", "act_fn", "down_proj", "up_proj"), ("first", "second", "third", "fourth")
        layer.mlp._modules = {name: layer.mlp._modules[before] for name, before in zip(new, old, strict=True)}
    before = logits_of(model, ids)
    handle = llmkernels.patch(model)
    assert len(handle.report()["gated_mlp"].patched) == LAYERS
    assert count_ops(model, ids)["swiglu"] == LAYERS
    assert_close(logits_of(model, ids), before)


def test_a_block_that_is_no_mlp():
    """Three layers, of which the middle one has weights."""
    model = tiny_model()
    model.vision = BeitConvLayer(3, 4, 3)
    assert "mlp" not in llmkernels.patch(model).report().rows
