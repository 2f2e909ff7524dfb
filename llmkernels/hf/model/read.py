"""Reads the description of a model off its modules, which are as in its reference.

wiring.py says how the blocks of a layer are wired, layout.py what the classes of norms, MLPs and rotations compute.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from llmkernels.ops import relu2, relu2_glu, swiglu

from ..classes.families import Rotation
from ..classes.layout import mlp_of, norm_of, rotation_name, rotation_of
from ..errors import Distrust, UnknownLayout
from ..modules.activations import gated_unit, geglu_erf, geglu_tanh, gelu_erf, gelu_tanh, plain_unit
from ..modules.replaced import own_class
from .description import MLP, Attention, Branch, Layer, Norm, Product, Trunk
from .reference import Part, Reference
from .wiring import is_attention, wiring


@dataclass(frozen=True)
class Facts:
    """What can not be read off a model: proof.py finds out by trying.

    `unrotated`: layers without a window have no rotation. `windowed`: the window of the config is the attention's.
    `softcap`: scores are capped where the attention has a number for it. `logit_scale`: 1 where logits are multiplied
    by `logits_scaling` of the config, -1 where divided.
    """

    unrotated: bool = False
    windowed: bool = True
    softcap: bool = True
    logit_scale: int = -1


def _ask(question: Callable, module: nn.Module, *arguments: Any) -> Any:
    """What layout.py says of a module."""
    try:
        return question(*arguments)
    except UnknownLayout as reason:
        raise UnknownLayout(f"has the module {own_class(type(module)).__name__}: {reason}") from None


def _first(modules: dict[str, Any], *names: str) -> Any:
    return next((modules[name] for name in names if name in modules), None)


def read(model: nn.Module, expected: Reference, facts: Facts) -> Trunk:
    """The description of a model that has all parts of its reference. Raises UnknownLayout where it has no description.

    Distrust is raised for what is known, but is not as expected in this very model.
    """
    config = model.config
    if set(model._modules) != {"model", "lm_head"}:
        raise UnknownLayout(f"has the parts {', '.join(model._modules)}")
    base, head = model.model, model.lm_head
    modules = base._modules
    embedding, layers, rotary = modules.get("embed_tokens"), modules.get("layers"), modules.get("rotary_emb")
    base_part = expected.root.parts["model"]
    norms = [
        module for name, module in modules.items()
        if module not in (embedding, layers, rotary) and not isinstance(module, nn.Dropout)
    ]  # fmt: skip
    if not isinstance(embedding, nn.Embedding) or not isinstance(layers, nn.ModuleList) or rotary is None:
        raise UnknownLayout("has other parts than embed_tokens, layers, rotary_emb and a norm")
    if len(norms) != 1:
        raise UnknownLayout(f"has {len(norms)} modules behind its layers, where a norm is expected")
    if embedding.max_norm is not None:
        raise Distrust(embedding, "{} has a max_norm")
    tables = _tables(rotary, config)
    positions = positions_of(rotary)
    if not facts.windowed:  # what is behind that window is not attended to: transformers' caches drop it
        positions = positions[: config.sliding_window]
    return Trunk(
        embedding=embedding.weight,
        embed_scale=_embed_scale(embedding, base_part),
        rotary=rotary,
        tables=tables,
        positions=positions,
        layers=tuple(
            _layer(layer, part, index, config, tables, facts)
            for index, (layer, part) in enumerate(zip(layers, base_part.parts["layers"].parts.values(), strict=True))
        ),
        norm=read_norm(norms[0]),
        head=_product(model, [head]),
        logit_scale=_logit_scale(config, facts),
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


def _embed_scale(embedding: nn.Module, base: Part) -> float | Tensor | None:
    if "embed_scale" in embedding._buffers:
        return embedding._buffers["embed_scale"]
    default = getattr(base.module, "embedding_multiplier", None)
    return getattr(base.parts["embed_tokens"].module, "embed_scale", default)


def _logit_scale(config: Any, facts: Facts) -> float:
    if (scale := getattr(config, "logits_scaling", None)) is not None:
        return scale if facts.logit_scale > 0 else 1 / scale
    return getattr(config, "logit_scale", None) or 1.0


def _tables(rotary: nn.Module, config: Any) -> tuple[str, ...]:
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return tuple(sorted(set(config.layer_types)))
    return ("",)


def positions_of(rotary: nn.Module) -> range:
    """The positions whose rotation does not depend on how long the sequence is."""
    types = getattr(rotary, "rope_type", "default")
    for kind in types.values() if isinstance(types, dict) else (types,):
        if not isinstance(kind, str):
            raise UnknownLayout(f"has rope of type {kind}")
        if "dynamic" in kind or kind == "longrope":
            original = getattr(rotary, "original_max_seq_len", 0)
            if kind == "longrope":
                original = rotary.config.rope_parameters.get("original_max_position_embeddings", original)
            return range(original)
    return range(1 << 31)


def read_norm(module: nn.Module) -> Norm:
    """A norm by its class. Raises UnknownLayout for one that the step does not have."""
    options = _ask(norm_of, module, own_class(type(module)))
    if options.kind == "layer_norm" and options.weight_offset:
        raise UnknownLayout(f"has a norm whose weight has an offset, {type(module).__name__}")
    parameters = module._parameters
    weight = parameters["weight"] if options.has_weight else None
    return Norm(options, weight, parameters["bias"] if options.has_bias else None, getattr(module, options.eps))


def _product(owner: nn.Module, linears: list[nn.Module]) -> Product:
    weights, biases = [], []
    for linear in linears:
        if not isinstance(linear, nn.Linear):
            raise UnknownLayout(f"has a {type(linear).__name__} where a linear layer is expected")
        members = vars(linear)
        weight, bias = members["_parameters"]["weight"], members["_parameters"]["bias"]
        if weight.shape != (members["out_features"], members["in_features"]):
            raise Distrust(linear, "{} holds a part of its weight only")
        weights.append(weight)
        if bias is not None:
            biases.append(bias)
    if len(biases) not in (0, len(weights)):
        raise Distrust(owner, "only some of the products of {} have a bias")
    if len({weight.shape[1] for weight in weights}) > 1:
        raise Distrust(owner, "the products of {} differ in what they read")
    return Product(tuple(weights), tuple(biases))


def _layer(layer: nn.Module, part: Part, index: int, config: Any, tables: tuple[str, ...], facts: Facts) -> Layer:
    wires = wiring(part.module, type(part.module).forward)
    sources = [wire.source for wire in wires]
    if sources not in (list(range(len(wires))), [0] * len(wires)):
        raise UnknownLayout("has layers whose blocks read neither the layer's input nor what is before them")
    branches = []
    for wire in wires:
        block = getattr(layer, wire.block)
        if is_attention(block):
            block = _attention(block, part.parts[wire.block], index, config, tables, facts)
        else:
            block = _mlp(block)
        pre, post = _block_norm(layer, wire.pre, True), _block_norm(layer, wire.post, False)
        branches.append(Branch(block, pre, post, wire.multiplier))
    if sum(isinstance(branch.block, Attention) for branch in branches) != 1:
        raise UnknownLayout("has layers without attention, or with two")
    return Layer(tuple(branches), parallel=len(wires) > 1 and sources[-1] == 0)


def _block_norm(layer: nn.Module, name: str | None, before: bool) -> Norm | None:
    if name is None or isinstance(module := getattr(layer, name), nn.Identity):
        return None
    norm = read_norm(module)
    if not before and norm.options.kind != "rms_norm":
        raise UnknownLayout(f"has a {type(module).__name__} behind a block")
    return norm


def _mlp(mlp: nn.Module) -> MLP:
    names = _ask(mlp_of, mlp, own_class(type(mlp)).forward)
    gated = names.gate is not None
    act = getattr(mlp, names.act)
    activation = _ACTIVATIONS.get((gated_unit if gated else plain_unit)(act))
    if activation is None:
        raise UnknownLayout(f"has an activation without a kernel, {type(act).__name__}")
    up = [getattr(mlp, name) for name in (names.gate, names.up) if name is not None]
    if len({linear.weight.shape for linear in up}) > 1:
        raise Distrust(mlp, "gate and up of {} differ in shape")
    return MLP(_product(mlp, up), _product(mlp, [getattr(mlp, names.down)]), activation, gated)


# Those of compose.py, by the functions of activations.py.
_ACTIVATIONS = {swiglu: "silu", geglu_erf: "gelu", geglu_tanh: "gelu_pytorch_tanh", relu2_glu: "relu2"}
_ACTIVATIONS |= {gelu_erf: "gelu", gelu_tanh: "gelu_pytorch_tanh", relu2: "relu2"}


def _attention(
    module: nn.Module, part: Part, index: int, config: Any, tables: tuple[str, ...], facts: Facts
) -> Attention:
    # Numbers of the reference, but for those that may differ from it: what its class does not know, it does not read.
    members, modules = {**vars(part.module), **{name: vars(module)[name] for name in part.read}}, module._modules
    if members.get("layer_idx") != index:
        raise UnknownLayout(f"has an attention {index} with layer {members.get('layer_idx')} of the cache")
    output = _product(module, [_first(modules, "o_proj", "dense", "out_proj")])
    packed = modules.get("qkv_proj")
    linears = [packed] if packed is not None else [modules.get(name) for name in ("q_proj", "k_proj", "v_proj")]
    names = {"qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "dense", "out_proj", "q_norm", "k_norm"}
    if (unknown := modules.keys() - names) or module._parameters or None in linears:
        raise UnknownLayout(f"has an attention of an unknown layout: {', '.join(sorted(unknown)) or 'q, k, v'}")
    qkv = _product(module, linears)
    head_dim, scale = members.get("head_dim"), members.get("scaling")
    if not isinstance(head_dim, int) or not isinstance(scale, (int, float)):
        raise UnknownLayout("has an attention without head_dim or scaling")
    heads = output.weights[0].shape[1] // head_dim
    rows = [weight.shape[0] for weight in qkv.weights]
    kv_heads = rows[1] // head_dim if packed is None else (rows[0] // head_dim - heads) // 2
    expected = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    if rows != (expected if packed is None else [sum(expected)]) or kv_heads < 1 or heads % kv_heads:
        raise Distrust(module, "{} has an unknown layout of heads")
    q_norm, k_norm = _head_norms(modules)
    row_norms = q_norm is not None and q_norm.weight.shape[0] != head_dim
    if row_norms and (q_norm.weight.shape[0], k_norm.weight.shape[0]) != (expected[0], expected[1]):
        raise Distrust(module, "{} has norms of an unknown layout")
    window = _window(members, index, config, facts)
    rotation = _rotation(module)
    rotates = members.get("use_rope", True) and not (facts.unrotated and window < 0)
    return Attention(
        qkv=qkv,
        output=output,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=float(scale),
        window_left=window,
        softcap=(members.get("attn_logit_softcapping") or 0.0) if facts.softcap else 0.0,
        table=(config.layer_types[index] if tables != ("",) else "") if rotates else None,
        interleaved=rotation.interleaved,
        alternates=rotation.interleaved and rotation.table == "elements",
        q_norm=q_norm,
        k_norm=k_norm,
        row_norms=row_norms,
    )


def _rotation(module: nn.Module) -> Rotation:
    forward = own_class(type(module)).forward
    name = rotation_name(forward)
    if name is None:
        raise UnknownLayout("has an attention without a rotation")
    return _ask(rotation_of, module, name, inspect.unwrap(forward).__globals__[name])


def _head_norms(modules: dict[str, nn.Module]) -> tuple[Norm | None, Norm | None]:
    found = [modules.get(name) for name in ("q_norm", "k_norm")]
    if found == [None, None]:
        return None, None
    if None in found:
        raise UnknownLayout("has a norm of q or of k alone")
    norms = [read_norm(module) for module in found]
    if norms[0].options != norms[1].options or norms[0].eps != norms[1].eps:
        raise UnknownLayout("has norms of q and k that differ")
    if norms[0].options.kind != "rms_norm" or norms[0].weight is None or norms[0].weight.ndim != 1:
        raise UnknownLayout("has norms of q and k without a kernel")
    return norms[0], norms[1]


def _window(members: dict[str, Any], index: int, config: Any, facts: Facts) -> int:
    """How many keys before its own a query of a layer sees, or -1: all."""
    window = members.get("sliding_window", getattr(config, "sliding_window", None))
    types = getattr(config, "layer_types", None)
    if types is not None and types[index] not in ("full_attention", "sliding_attention"):
        raise UnknownLayout(f"has layers of type {types[index]}")
    if members.get("is_sliding") is False or (types is not None and types[index] != "sliding_attention"):
        window = None
    if window is None or not facts.windowed:
        return -1
    if window < 1:
        raise UnknownLayout(f"has a window of {window}")
    return window - 1
