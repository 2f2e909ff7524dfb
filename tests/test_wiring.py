"""How the blocks of a decoder layer are wired, read from its forward: made-up layers, and those of transformers."""

import pytest
import torch
from torch import nn

from families import family_model
from hf_models import as_transformers, assert_close
from llmkernels.hf.errors import UnknownLayout
from llmkernels.hf.model.wiring import Wire, is_attention, wiring

SIZE = 8


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.linear(x).tanh()


class SomeAttention(MLP):
    def forward(self, hidden_states, past_key_values=None, position_ids=None):
        return self.linear(hidden_states).sin(), "weights"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.dropout, self.scale = SomeAttention(), MLP(), nn.Dropout(0.5), 0.3
        self.n1, self.n2, self.n3, self.n4 = (nn.LayerNorm(SIZE) for _ in range(4))
        self.gamma = nn.Parameter(torch.rand(SIZE))
        for name, parameter in self.named_parameters():
            nn.init.uniform_(parameter, 0.5 if name.startswith("n") else -0.5)


def layer_of(body):
    """A layer in eval mode, and its forward, whose result is the x of `body`."""
    source = f"""
def forward(self, x, past_key_values=None, position_ids=None, **kwargs):
    def attn(x):
        return self.attention(hidden_states=x, past_key_values=past_key_values, position_ids=position_ids)[0]
    mlp, n1, n2, n3, n4, scale = self.mlp, self.n1, self.n2, self.n3, self.n4, self.scale
    {body}
    return x
"""
    scope = {"torch": torch}
    exec(source, scope)
    torch.manual_seed(0)
    return Layer().double().eval(), as_transformers(scope["forward"])


def run(layer, wires, x):
    """What wires compute."""
    streams = [x]
    for wire in wires:
        y = streams[wire.source]
        if wire.pre is not None:
            y = getattr(layer, wire.pre)(y)
        block = getattr(layer, wire.block)
        y = block(y)[0] if is_attention(block) else block(y)
        if wire.post is not None:
            y = getattr(layer, wire.post)(y)
        streams.append(streams[-1] + wire.multiplier * y)
    return streams[-1]


def attention(pre=None, post=None, multiplier=1.0, source=0):
    return Wire("attention", pre, post, multiplier, source)


def mlp(pre=None, post=None, multiplier=1.0, source=1):
    return Wire("mlp", pre, post, multiplier, source)


KNOWN = {
    "x = x + attn(n1(x)); x = x + mlp(n2(x))": [attention("n1"), mlp("n2")],
    "y = attn(n1(x)); x = y + x; y = n2(x); y = mlp(y); x = y + x": [attention("n1"), mlp("n2")],
    "x = x + self.dropout(attn(n1(x))); x = x + self.dropout(mlp(n2(x)))": [attention("n1"), mlp("n2")],
    "x = x + attn(x); x = x + mlp(x)": [attention(), mlp()],
    "x = x + n1(attn(x)); x = x + n2(mlp(x))": [attention(None, "n1"), mlp(None, "n2")],
    "x = x + n2(attn(n1(x))); x = x + n4(mlp(n3(x)))": [attention("n1", "n2"), mlp("n3", "n4")],
    "x = x + attn(n1(x)) + mlp(n1(x))": [attention("n1"), mlp("n1", source=0)],
    "y = mlp(n2(x)); x = y + (attn(n1(x)) + x)": [mlp("n2", source=0), attention("n1")],
    "x = attn(n1(x)) * scale + x; x = x + 2 * (mlp(n2(x)) * scale)": [attention("n1", None, 0.3), mlp("n2", None, 0.6)],
    "x = x + scale * n2(attn(n1(x))); x = x + mlp(x)": [attention("n1", "n2", 0.3), mlp()],
    "x = x + mlp(n1(x)); x = x + attn(n2(x))": [mlp("n1", source=0), attention("n2", source=1)],
    "x = x + attn(n1(x))": [attention("n1")],
    "x = x + attn(n1(x)), None": [attention("n1")],
}


@pytest.mark.parametrize("body", KNOWN)
def test_known(body):
    layer, forward = layer_of(body)
    found = wiring(layer, forward)
    assert {*found} == {*KNOWN[body]}  # blocks that read the same may come in any order
    x = torch.randn(3, SIZE, dtype=torch.float64)
    result = forward(layer, x.clone())
    expected = result[0] if isinstance(result, tuple) else result
    assert_close(run(layer, found, x), expected, 1e-12)
    for index, wire in enumerate(found):  # each of them counts
        others = [*found[:index], *found[index + 1 :]]
        if all(other.source <= place for place, other in enumerate(others)):
            assert (run(layer, others, x) - expected).abs().max() > 1e-3, wire


UNKNOWN = {
    "x = 2 * x + attn(n1(x))": "nothing is added",
    "x = x + x + attn(n1(x))": "unknown layout",
    "x = attn(n1(x))": "unknown layout",
    "x = x - attn(n1(x))": "unsupported operand",
    "x = x * attn(n1(x))": "unsupported operand",
    "x = (x + attn(n1(x))) / 2": "unsupported operand",
    "x = x + 1": "unsupported operand",
    "x = n2(x + attn(n1(x)))": "n2 is added",
    "x = x + n1(x)": "n1 is added",
    "x = x + mlp(n2(attn(n1(x))))": "mlp of n2 of attention of n1 is added",
    "x = x + attn(n1(n2(x)))": "attention of n1 of n2 is added",
    "x = x + n1(n2(attn(x)))": "n1 of n2 of attention is added",
    "x = x + attn(scale * n1(x))": "multiplies inside of a block",
    "x = x + n1(scale * attn(x))": "multiplies inside of a block",
    "x = x + scale * (attn(n1(x)) + mlp(n1(x)))": "nothing is added",
    "x = x + attn(n1(x)) + attn(n1(x))": "unknown layout",
    "x = x + attn(n1(x)) + attn(n2(x))": "unknown layout",
    "y = x + attn(n1(x)); x = x + mlp(n2(y))": "mlp reads something of its own",
    "y = x + x; x = x + attn(n1(y))": "attention reads something of its own",
    "y = x; x = x + mlp(n1(x)); y = y + attn(n1(y)); x = x + y": "unknown layout",
    "x = x + self.gamma * attn(n1(x))": "TypeError",
    "x = x + torch.tanh(attn(n1(x)))": "TypeError",
    "x = x + self.attention(n1(x))": "unsupported operand",
    "x = x + self.attention(n1(x))[1]": "unsupported operand",
    "x = x + self.mlp(n1(x), n2(x))": "ValueError",
    "x = x + attn(n1(x)).to(torch.float32)": "AttributeError",
    "x = x.clone() + attn(n1(x))": "AttributeError",
    "x = x + (attn(n1(x)) if kwargs['flag'] else mlp(n1(x)))": "KeyError",
    "x = None": "unknown layout",
    "y = x; y += attn(n1(x)); x = x + mlp(n2(x))": "adds in place",  # to x, too
}


@pytest.mark.parametrize("body", UNKNOWN)
def test_unknown(body):
    with pytest.raises(UnknownLayout, match=UNKNOWN[body]):
        wiring(*layer_of(body))


def test_numbers_are_those_of_the_layer():
    layer, forward = layer_of("x = x + attn(n1(x)) * scale")
    layer.scale = 1.75
    assert wiring(layer, forward) == (attention("n1", None, 1.75),)


def test_a_forward_of_somebody_else():
    def forward(self, x):
        return x + self.mlp(x)

    with pytest.raises(UnknownLayout, match="not transformers' own but from test_wiring"):
        wiring(Layer(), forward)


PRE = ["input_layernorm", None], ["post_attention_layernorm", None]
BOTH = (
    ["input_layernorm", "post_attention_layernorm"],
    ["pre_feedforward_layernorm", "post_feedforward_layernorm"],
)


@pytest.mark.parametrize(
    ("name", "norms", "multiplier", "parallel"),
    [
        ("llama", PRE, 1.0, False),
        ("qwen3", PRE, 1.0, False),
        ("phi3", PRE, 1.0, False),
        ("starcoder2", PRE, 1.0, False),
        ("granite", PRE, 0.35, False),
        ("gemma2", BOTH, 1.0, False),
        ("glm4", (["input_layernorm", "post_self_attn_layernorm"], ["post_attention_layernorm", "post_mlp_layernorm"]),
         1.0, False),
        ("olmo2", ([None, "post_attention_layernorm"], [None, "post_feedforward_layernorm"]), 1.0, False),
        ("cohere", (["input_layernorm", None], ["input_layernorm", None]), 1.0, True),
        ("phi", (["input_layernorm", None], ["input_layernorm", None]), 1.0, True),
        ("stablelm_parallel", (["input_layernorm", None], ["input_layernorm", None]), 1.0, True),
    ],
)  # fmt: skip
def test_families(name, norms, multiplier, parallel):
    layer = family_model(name).model.layers[0]
    expected = {
        Wire(block, *names, multiplier, 0 if parallel else index)
        for index, (block, names) in enumerate(zip(("self_attn", "mlp"), norms, strict=True))
    }
    assert {*wiring(layer, type(layer).forward)} == expected
