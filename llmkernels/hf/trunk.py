"""What the decode step reads of a model: `trunk(model)`, or the reason why the step can not run.

The step computes what the forwards of a patched model compute, without calling its modules; so nothing may have to see
those calls, and nothing may compute otherwise. Of every module and parameter trust.py finds that out.
"""

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmkernels.ops import swiglu

from . import packing, trust
from .families import MLP as MLPNames
from .families import Family, Norm, Rotation
from .layers import MLP, Attention, CausalLM, DecoderLayer, Generating, RMSNorm, gated_unit
from .layout import UnknownLayout, check_origin
from .trust import Distrust, Inspection, Kind, NoStep

MAX_BATCH = 64
MAX_HEAD_DIM = 512  # of decode_attention on CUDA; on the CPU there is no limit
_OP = "decode_step"
_ops = torch.ops.llmkernels


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its parameters, those to pack in groups, and what the attention needs to know."""

    input_norm: nn.Parameter
    post_norm: nn.Parameter
    output: nn.Parameter
    output_bias: nn.Parameter | None
    down: nn.Parameter
    qkv: list[nn.Parameter]
    qkv_bias: list[nn.Parameter]
    gate_up: list[nn.Parameter]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window_left: int  # a query sees so many keys before its own, or -1: all


@dataclass(frozen=True)
class Trunk:
    """What a token passes through, in this order. `packed` is filled by `pack`: tensors by the name of their group."""

    family: Family
    embedding: nn.Parameter
    rotary: nn.Module
    layers: list[Layer]
    norm: nn.Parameter
    eps: float
    head: nn.Parameter
    head_bias: nn.Parameter | None
    packed: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def groups_by_name(self) -> dict[str, list[list[nn.Parameter]]]:
        """What is packed: one group for each layer, and none where there are no biases."""
        names = ("qkv", "qkv_bias", "gate_up")
        return {name: [group for layer in self.layers if (group := getattr(layer, name))] for name in names}

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        return [group for groups in self.groups_by_name.values() for group in groups]


def _check_patched(kind: type, computes: Any = None):
    """`computes`: what its `options` must say, or of a layer what these say that it computes."""

    def check(cls: type) -> None:
        if not issubclass(cls, kind) or "original" not in vars(cls):
            raise UnknownLayout("is not patched")
        if cls.forward is not cls.made or not cls.is_current():
            raise UnknownLayout("has another forward: that of its class was replaced")
        if computes not in (None, cls.options, getattr(cls.options, "computes", None)):
            raise UnknownLayout(f"computes something else than the decode step: {cls.options}")

    return check


def _check_activation(cls: type) -> None:
    if gated_unit(cls.__new__(cls)) is not swiglu:
        raise UnknownLayout(f"is a {cls.__name__}, for which there is no decode step")
    check_origin(cls.forward, ("transformers", "torch"))


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)


_ATTENDED = (
    "(hidden_states + self_attn(attention_mask=attention_mask, hidden_states=input_layernorm(hidden_states), "
    "kwargs=kwargs, past_key_values=past_key_values, position_embeddings=position_embeddings, "
    "position_ids=position_ids, use_cache=use_cache))"
)
_LAYER = Kind(
    _check_patched(DecoderLayer, f"({_ATTENDED} + mlp(post_attention_layernorm({_ATTENDED})))"),
    _names("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    trains=True,
)
_ATTENTION = Kind(_check_patched(Attention, Rotation()), _names("q_proj", "k_proj", "v_proj", "o_proj"), trains=True)
_MLP_NAMES = MLPNames(down="down_proj", act="act_fn", gate="gate_proj", up="up_proj")
_MLP = Kind(_check_patched(MLP, _MLP_NAMES), _names("gate_proj", "up_proj", "down_proj", "act_fn"))
_NORM = Kind(_check_patched(RMSNorm, Norm()), parameters=_names("weight"))
_LINEAR = trust.torch_kind(nn.Linear, parameters=_names("weight", "bias"))
_EMBEDDING = trust.torch_kind(nn.Embedding, parameters=_names("weight"))
_LIST = trust.torch_kind(nn.ModuleList, children=None)
_ACTIVATION = Kind(_check_activation)


def _of_family(family: Family, suffix: str, **options: Any) -> Kind:
    def check(cls: type) -> None:
        if issubclass(cls, CausalLM):  # without labels it computes what the original does
            _check_patched(CausalLM)(cls)
            cls = cls.original
        trust.check_base(cls, family.module, family.prefix + suffix)

    return Kind(check, **options)


def trunk(model: nn.Module) -> Trunk:
    """The parts of a patched model. Raises NoStep where the model computes anything but what the step computes."""
    if not isinstance(model, Generating) or "original" not in vars(type(model)):
        raise NoStep("the model is not patched for it")
    try:
        return _trunk(model, type(model).family)
    except Distrust as reason:
        raise reason.named_in(model) from None


def _trunk(model: nn.Module, family: Family) -> Trunk:
    trust.check_surroundings()
    weight = getattr(model.get_submodule("lm_head"), "weight", None)
    inspection = Inspection(getattr(weight, "dtype", None), getattr(weight, "device", None))
    inspect = inspection.module
    children = inspect(model, _of_family(family, "ForCausalLM", children=_names("model", "lm_head"), trains=True))
    _check_helpers(model, family)
    lm_head, base = (children["_modules"][key] for key in ("lm_head", "model"))
    head = inspect(lm_head, _LINEAR)["_parameters"]
    parts = _names("embed_tokens", "layers", "norm", "rotary_emb")
    children = inspect(base, _of_family(family, "Model", children=parts, trains=True))["_modules"]
    embed_tokens, rotary, norm = (children[key] for key in ("embed_tokens", "rotary_emb", "norm"))
    embedding = inspect(embed_tokens, _EMBEDDING)
    if embedding["max_norm"] is not None:
        raise Distrust(embed_tokens, "{} has a max_norm")
    inspect(rotary, _of_family(family, "RotaryEmbedding"))
    rope_type = getattr(rotary, "rope_type", None)
    if not isinstance(rope_type, str) or "dynamic" in rope_type or rope_type == "longrope":
        raise NoStep(f"rope of type {rope_type} depends on the length of the sequence")
    config = base.config
    count = config.num_hidden_layers
    blocks = [*inspect(children["layers"], _LIST)["_modules"].values()][:count]
    eps = inspect(norm, _NORM)[family.eps]
    layers = [_layer(inspect, layer, config, index, (family.eps, eps)) for index, layer in enumerate(blocks)]
    if not layers or len(layers) != count:
        raise NoStep(f"{len(layers)} layers, of {count} in the config")
    if len({(layer.heads, layer.scale, bool(layer.qkv_bias), layer.output_bias is None) for layer in layers}) > 1:
        raise NoStep("the layers differ in heads, biases or the scale of their scores")
    _check_attention(base, config)
    parts = Trunk(
        family=family,
        embedding=embedding["_parameters"]["weight"],
        rotary=rotary,
        layers=layers,
        norm=norm._parameters["weight"],
        eps=eps,
        head=head["weight"],
        head_bias=head["bias"],
    )
    _check_tensors(parts)
    return parts


def _layer(inspect, layer: nn.Module, config: Any, index: int, eps: tuple[str, float]) -> Layer:
    children = inspect(layer, _LAYER)["_modules"]
    norms = [children["input_layernorm"], children["post_attention_layernorm"]]
    for norm in norms:
        if inspect(norm, _NORM)[eps[0]] != eps[1]:
            raise NoStep("the norms differ in eps")
    self_attn, mlp = children["self_attn"], children["mlp"]
    attention = inspect(self_attn, _ATTENTION)
    if attention.get("layer_idx") != index:
        raise Distrust(self_attn, f"{{}} has layer {attention.get('layer_idx')} of the cache")
    linears = attention["_modules"] | inspect(mlp, _MLP)["_modules"]
    inspect(linears.pop("act_fn"), _ACTIVATION)
    weights, biases = {}, {}
    for key, linear in linears.items():
        members = inspect(linear, _LINEAR)
        weight, biases[key] = members["_parameters"]["weight"], members["_parameters"]["bias"]
        if weight is None or weight.shape != (members["out_features"], members["in_features"]):
            raise Distrust(linear, "{} holds a part of its weight only")
        weights[key] = weight
    for key in ("gate_proj", "up_proj", "down_proj"):
        if biases[key] is not None:
            raise Distrust(linears[key], "{} has a bias")
    qkv = [weights[key] for key in ("q_proj", "k_proj", "v_proj")]
    qkv_bias = [biases[key] for key in ("q_proj", "k_proj", "v_proj") if biases[key] is not None]
    if len(qkv_bias) not in (0, 3):
        raise Distrust(self_attn, "only some of q, k, v in {} have a bias")
    head_dim = attention["head_dim"]
    rows = (*(weight.shape[0] for weight in qkv), weights["o_proj"].shape[1])
    heads, kv_heads = rows[0] // head_dim, rows[1] // head_dim
    if rows != tuple(n * head_dim for n in (heads, kv_heads, kv_heads, heads)) or heads % kv_heads:
        raise Distrust(self_attn, "{} has an unknown layout of heads")
    types = getattr(config, "layer_types", None)
    window = attention.get("sliding_window") or 0
    if types is not None and types[index] != ("sliding_attention" if window else "full_attention"):
        raise Distrust(self_attn, f"{{}} attends by {types[index]}")
    gate_up = [weights["gate_proj"], weights["up_proj"]]
    if gate_up[0].shape != gate_up[1].shape:
        raise Distrust(mlp, "gate and up of {} differ in shape")
    return Layer(
        input_norm=norms[0]._parameters["weight"],
        post_norm=norms[1]._parameters["weight"],
        output=weights["o_proj"],
        output_bias=biases["o_proj"],
        down=weights["down_proj"],
        qkv=qkv,
        qkv_bias=qkv_bias,
        gate_up=gate_up,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=attention["scaling"],
        window_left=window - 1,
    )


# What generate() asks of a model besides its forward.
_HELPERS = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "__call__")


def _check_helpers(model: nn.Module, family: Family) -> None:
    """generate() asks nothing else of the model than of this family's class."""
    original = type(model).original
    name = f"{family.prefix}ForCausalLM"
    known = next(cls for cls in original.__mro__ if (cls.__module__, cls.__name__) == (family.module, name))
    for name in _HELPERS:
        if name in vars(model) or getattr(original, name) is not getattr(known, name):
            raise NoStep(f"{name} was replaced")
        try:
            check_origin(getattr(known, name), ("transformers", "torch"))  # torch's: decorators such as no_grad
        except UnknownLayout as reason:
            raise NoStep(f"{name}: {reason}") from None


def _check_attention(base: nn.Module, config: Any) -> None:
    """The model attends by a function of transformers: another one may compute anything."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modeling = vars(sys.modules[base.layers[0].self_attn.original.__module__])
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, modeling["eager_attention_forward"])
    try:
        check_origin(function)
    except UnknownLayout:
        raise NoStep(f"attention is computed by {getattr(function, '__qualname__', function)}") from None


def _check_tensors(parts: Trunk) -> None:
    device, dtype, head_dim = parts.head.device, parts.head.dtype, parts.layers[0].head_dim
    if device.type not in ("cpu", "cuda"):
        raise NoStep(f"no kernels for {device.type}")
    name = f"llmkernels::{_OP}"
    if not hasattr(_ops, _OP) or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, device.type.upper()):
        raise NoStep(f"this build of llmkernels has no {name} for {device.type}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64) or (
        device.type == "cuda" and (dtype.itemsize == 8 or head_dim > MAX_HEAD_DIM)
    ):
        raise NoStep(f"no kernel for {dtype} with head_dim {head_dim} on {device.type}")
    if torch.is_autocast_enabled(device.type):
        raise NoStep("autocast decides the dtypes")
    seen: Counter[int] = Counter(id(parameter) for group in parts.groups for parameter in group)
    if seen and max(seen.values()) > 1:
        raise NoStep("layers share weights")


def check_batch(parts: Trunk, input_ids: Tensor) -> None:
    """Raise NoStep unless the step takes these tokens."""
    if input_ids.shape[0] > MAX_BATCH:
        raise NoStep(f"a batch of more than {MAX_BATCH}")
    if type(input_ids) is not Tensor:
        raise NoStep(f"input_ids are a {type(input_ids).__name__}")
    if input_ids.device != parts.head.device:
        raise NoStep(f"input_ids on {input_ids.device}")
    if input_ids.numel() == 0:
        raise NoStep("empty input_ids")


def check_cache(cache: Any, parts: Trunk, batch: int) -> None:
    """Raise NoStep unless a KVCache fits the model."""
    if len(cache.layers) != len(parts.layers):
        raise NoStep(f"the cache has {len(cache.layers)} layers")
    weight = parts.head
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        if buffers.is_initialized:
            expected = (batch, buffers.capacity, layer.kv_heads, layer.head_dim)
            for buffer in (buffers.k, buffers.v):
                if buffer.shape != expected or buffer.dtype != weight.dtype or buffer.device != weight.device:
                    raise NoStep("the cache was made for other keys and values")


def fits_cache(cache: Any, parts: Trunk, batch: int) -> bool:
    try:
        check_cache(cache, parts, batch)
    except NoStep:
        return False
    return True


def is_ours(cache: Any) -> bool:
    from .cache import KVCache

    return type(cache) is KVCache


def pack(model: nn.Module, parts: Trunk) -> Trunk:
    """The parts with their packed weights. Raises NoStep where they can not be packed.

    They stay what they are for whoever has them, also when another thread unpatches the model.
    """
    with packing.LOCK:
        if not isinstance(model, Generating):
            raise NoStep("the model is not patched any more")
        packed = _packed(parts)
        if any(tensor is None for tensors in packed.values() for tensor in tensors):
            _check_packable(parts)
            try:
                packing.pack(parts.groups)
            except torch.OutOfMemoryError:
                raise NoStep("there is no memory to pack the weights of a layer") from None
            packed = _packed(parts)
    return dataclasses.replace(parts, packed=packed)


def _packed(parts: Trunk) -> dict[str, list[Tensor | None]]:
    return {name: [packing.packed(group) for group in groups] for name, groups in parts.groups_by_name.items()}


def _check_packable(parts: Trunk) -> None:
    for group in parts.groups:
        if packing.packed(group) is None and (reason := packing.obstacle(group)):
            raise NoStep(reason)


def why_not(model: nn.Module) -> str | None:
    """Why the decode step of a model can not run now, or None."""
    try:
        _check_packable(trunk(model))
    except NoStep as reason:
        return str(reason)
    return None
