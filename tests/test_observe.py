"""What is read off a small model that runs: made-up layers, and those of transformers."""

import copy
import dataclasses

import pytest
import torch
import transformers

from families import FAMILIES, family_config
from llmkernels.hf.errors import UnknownLayout
from llmkernels.hf.model.description import Attention
from llmkernels.hf.model.reference import small_config
from llmkernels.hf.model.template import Path, Window
from llmkernels.hf.step.proof import _observed
from test_family_strangers import lantern  # noqa: F401, a fixture


def template_of(cls, config):
    with torch.no_grad():
        return _observed(cls, small_config(config))[1]


def layers_of(template):
    """Of each layer whether its blocks run side by side, and of each block the norms around it and its multiplier."""

    def name(norm):
        return norm and norm.weight.name.split(".")[-2]

    def block(branch):
        kind = "attn" if isinstance(branch.block, Attention) else "mlp"
        return kind, name(branch.pre), name(branch.post), round(branch.multiplier.value, 6)

    return [(layer.parallel, [*map(block, layer.branches)]) for layer in template.description.layers]


@pytest.fixture
def read_layer(lantern, monkeypatch):  # noqa: F811
    def read(body):
        """What is read of a family whose layers return the x of `body`."""
        source = f"""
def forward(self, x, **kwargs):
    def attn(x):
        return self.attention_of_tokens(x, **kwargs)[0]
    mlp, n1, n2, n3, scale = self.feed_forward, self.first, self.second, self.third, self.residual_multiplier
    {body}
    return x
"""
        exec(source, vars(lantern))
        monkeypatch.setattr(lantern.LanternDecoderLayer, "forward", vars(lantern)["forward"])
        config = lantern.LanternConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
        config._attn_implementation = "eager"
        return template_of(lantern.LanternForCausalLM, config)

    return read


def attn(pre=None, post=None, multiplier=1.0):
    return "attn", pre, post, multiplier


def mlp(pre=None, post=None, multiplier=1.0):
    return "mlp", pre, post, multiplier


KNOWN = {
    "x = x + attn(n1(x)); x = x + mlp(n2(x))": [attn("first"), mlp("second")],
    "y = attn(n1(x)); x = y + x; y = n2(x); y = mlp(y); x = y + x": [attn("first"), mlp("second")],
    "x += attn(n1(x)); x += mlp(n2(x))": [attn("first"), mlp("second")],
    "x = torch.add(attn(n1(x)), x); x = x.add(mlp(n2(x)))": [attn("first"), mlp("second")],
    "x = x + torch.dropout(attn(n1(x)), 0.5, False); x = x + mlp(n2(x)).clone()": [attn("first"), mlp("second")],
    "x = x + attn(x); x = x + mlp(x)": [attn(), mlp()],
    "x = x + n1(attn(x)); x = x + n2(mlp(x))": [attn(None, "first"), mlp(None, "second")],
    "x = x + n2(attn(n1(x))); x = x + n3(mlp(x))": [attn("first", "second"), mlp(None, "third")],
    "x = attn(n1(x)) * scale + x; x = x + 2 * (mlp(n2(x)) * scale)": [
        attn("first", None, 0.6),
        mlp("second", None, 1.2),
    ],
    "x = x + scale * n2(attn(n1(x))); x = x + mlp(x) / 4": [attn("first", "second", 0.6), mlp(None, None, 0.25)],
    "x = x + mlp(n1(x)); x = x + attn(n2(x))": [mlp("first"), attn("second")],
    "x = x + attn(n1(x))": [attn("first")],
    "x = x.float().to(x.dtype) + attn(n1(x.contiguous()))": [attn("first")],
}


@pytest.mark.parametrize("body", KNOWN)
def test_known(body, read_layer):
    assert layers_of(read_layer(body)) == 2 * [(False, KNOWN[body])]


PARALLEL = {
    "x = x + attn(n1(x)) + mlp(n1(x))": [attn("first"), mlp("first")],
    "y = mlp(n2(x)); x = y + (attn(n1(x)) + x)": [mlp("second"), attn("first")],
}


@pytest.mark.parametrize("body", PARALLEL)
def test_parallel(body, read_layer):
    assert layers_of(read_layer(body)) == 2 * [(True, PARALLEL[body])]


UNKNOWN = {
    "x = 2 * x + attn(n1(x))": "residual stream",
    "x = x + x + attn(n1(x))": "begins with 4",
    "x = attn(n1(x))": "adds what",
    "x = x - attn(n1(x))": "adds what sub makes",
    "x = x * attn(n1(x))": "adds what mul makes",
    "x = (x + attn(n1(x))) / 2": "adds what a multiple makes",
    "x = x + 1": "attends without",
    "x = x + 1 + attn(n1(x))": "adds what add makes",
    "x = n2(x + attn(n1(x)))": "adds what the module model.layers.1.second makes",
    "x = x + n1(x) + attn(x)": "begins with 2",
    "x = x + mlp(n2(attn(n1(x))))": "reads something of its own",
    "x = x + attn(n1(n2(x)))": "reads something of its own",
    "x = x + n1(n2(attn(x)))": "adds what the module model.layers.0.second makes",
    "x = x + attn(scale * n1(x))": "reads something of its own",
    "x = x + n1(scale * attn(x))": "adds what a multiple makes",
    "x = x + scale * (attn(n1(x)) + mlp(n1(x)))": "adds what a sum makes",
    "y = attn(n1(x)); x = x + y + y": "adds the same twice",
    "x = x + attn(n1(x)) + attn(n2(x))": "without attention, or with two",
    "y = x + attn(n1(x)); x = x + mlp(n2(y))": "reads something of its own",
    "y = x + x; x = x + attn(n1(y))": "read neither",
    "x = x + self.first.weight * attn(n1(x))": "adds what mul makes",
    "x = x + torch.tanh(attn(n1(x)))": "adds what tanh makes",
    "x = x + mlp(n1(x)).relu() + attn(x)": "adds what relu makes",
}


@pytest.mark.parametrize("body", UNKNOWN)
def test_unknown(body, read_layer):
    with pytest.raises(UnknownLayout, match=UNKNOWN[body]):
        read_layer(body)


@pytest.mark.parametrize(
    ("name", "blocks", "parallel"),
    [
        ("llama", [attn("input_layernorm"), mlp("post_attention_layernorm")], False),
        ("phi3", [attn("input_layernorm"), mlp("post_attention_layernorm")], False),
        ("granite", [attn("input_layernorm", None, 0.35), mlp("post_attention_layernorm", None, 0.35)], False),
        (
            "gemma2",
            [
                attn("input_layernorm", "post_attention_layernorm"),
                mlp("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            ],
            False,
        ),
        ("olmo2", [attn(None, "post_attention_layernorm"), mlp(None, "post_feedforward_layernorm")], False),
        ("cohere", [attn("input_layernorm"), mlp("input_layernorm")], True),
    ],
)
def test_layers_of_families(name, blocks, parallel):
    template = template_of(getattr(transformers, FAMILIES[name].model), family_config(name))
    found = layers_of(template)
    assert [(wired, sorted(branches)) for wired, branches in found] == len(found) * [(parallel, sorted(blocks))]


def attentions_of(name, **changes):
    template = template_of(getattr(transformers, FAMILIES[name].model), family_config(name, **changes))
    return template.description, [layer.attention for layer in template.description.layers]


def test_windows():
    """By the masks that layers are given, not by what the config says of them."""
    _, attentions = attentions_of("gemma3")
    assert [one.window_left for one in attentions] == [Window(), Window(), -1]
    assert [one.table for one in attentions] == ["sliding_attention", "sliding_attention", "full_attention"]
    _, attentions = attentions_of("qwen2", sliding_window=6)  # not used
    assert {one.window_left for one in attentions} == {-1}


def test_windows_of_another_name(lantern, monkeypatch):  # noqa: F811
    """However long: in a small model all of them are short. Without a name that is known, they have no step."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    def forward(self, x, **kwargs):
        config = copy.copy(self.attention_of_tokens.config)
        config.sliding_window = config.sight_window
        mask = create_sliding_window_causal_mask(config, x, None, None)
        return original(self, x, **kwargs | {"attention_mask": mask})

    original = lantern.LanternDecoderLayer.forward
    monkeypatch.setattr(lantern.LanternDecoderLayer, "forward", forward)
    config = lantern.LanternConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
    config.sight_window, config._attn_implementation = 4096, "eager"
    template = template_of(lantern.LanternForCausalLM, config)
    assert {layer.attention.window_left for layer in template.description.layers} == {Window()}


def test_layers_that_do_not_rotate():
    description, attentions = attentions_of("smollm3")
    assert [one.table for one in attentions] == ["", None][: len(attentions)]
    assert description.rotary == Path("model.rotary_emb")


@pytest.mark.parametrize(
    ("name", "interleaved", "alternates"),
    [("llama", False, False), ("glm", True, False), ("cohere", True, True), ("phi", False, False)],
)
def test_rotations(name, interleaved, alternates):
    _, attentions = attentions_of(name)
    assert {(one.interleaved, one.alternates) for one in attentions} == {(interleaved, alternates)}


def test_numbers_of_the_logits():
    description, _ = attentions_of("granite")
    assert (description.logit_scale.value, description.embed_scale.value) == (1 / 2.5, 3.0)
    description, attentions = attentions_of("gemma2")
    assert (description.logit_scale.value, description.logit_softcap.value) == (1, 3.0)
    assert {one.softcap.value for one in attentions} == {2.0}
    description, _ = attentions_of("cohere")
    assert description.logit_scale.value == pytest.approx(0.4)


def test_products_are_known_by_their_parameters():
    description, (attention, *_) = attentions_of("phi3")
    assert attention.qkv.weights == (Path("model.layers.0.self_attn.qkv_proj.weight"),)
    description, (attention, *_) = attentions_of("qwen2")
    assert [path.name.split(".")[-2] for path in attention.qkv.biases] == ["q_proj", "k_proj", "v_proj"]
    assert description.head.weights == (Path("lm_head.weight"),)
    assert dataclasses.is_dataclass(description)


def test_a_number_that_depends_on_sizes(lantern, monkeypatch):  # noqa: F811
    from llmkernels.hf.step import proof

    def forward(self, x, **kwargs):
        x = x + self.attention_of_tokens(self.first(x), **kwargs)[0] * (1 / self.third.weight.shape[0])
        return x + self.feed_forward(self.third(x))

    monkeypatch.setattr(lantern.LanternDecoderLayer, "forward", forward)
    config = lantern.LanternConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
    config._attn_implementation = "eager"
    config = small_config(config)
    with torch.no_grad():
        template = proof._observed(lantern.LanternForCausalLM, config)[1]
        with pytest.raises(UnknownLayout, match="a number that depends on its sizes"):
            proof._check_numbers(template, lantern.LanternForCausalLM, config)
