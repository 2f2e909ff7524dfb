"""What the decode step reads of a model: `trunk(model)`, or the reason why the step can not run.

The step computes what the forwards of a patched model compute, without calling its modules; so nothing may have to see
those calls, and nothing may compute otherwise.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from llmkernels.ops import swiglu

from . import packing
from .families import Family
from .layers import MLP, Attention, DecoderLayer, Generating, RMSNorm, gated_unit, patched_class
from .layout import UnknownLayout, check_origin

MAX_BATCH = 64
MAX_HEAD_DIM = 512  # of decode_attention on CUDA; on the CPU there is no limit
_OP = "decode_step"
_ops = torch.ops.llmkernels


class NoStep(Exception):
    """Why the decode step can not run."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its modules, the parameters to pack, and what the attention needs to know."""

    input_norm: nn.Module
    post_norm: nn.Module
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

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        return [group for group in (self.qkv, self.qkv_bias, self.gate_up) if group]


@dataclass(frozen=True)
class Trunk:
    """What a token passes through, in this order."""

    embedding: nn.Embedding
    rotary: nn.Module
    layers: list[Layer]
    norm: nn.Module
    head: nn.Parameter
    head_bias: nn.Parameter | None

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        return [group for layer in self.layers for group in layer.groups]


def trunk(model: nn.Module) -> Trunk:
    """The parts of a patched model. Raises NoStep where the model computes anything but what the step computes."""
    if not isinstance(model, Generating) or "original" not in vars(type(model)):
        raise NoStep("the model is not patched for it")
    if model.training:
        raise NoStep("the model is in training mode")
    if _has_any_global_hook():
        raise NoStep("hooks on all modules have to see their calls")
    family, base = model.family, getattr(model, "model", None)
    _check_class(model, family, "ForCausalLM", type(model).__name__)
    _check_helpers(model, family)
    _check_class(base, family, "Model", "model")
    config = base.config
    _check(type(base.embed_tokens) is nn.Embedding and base.embed_tokens.max_norm is None, "model.embed_tokens")
    _check_calls(base.embed_tokens, "model.embed_tokens")
    _check_kind(base.norm, RMSNorm, "model.norm", ())
    head, head_bias = _linear(model.lm_head, "lm_head")
    _check_class(base.rotary_emb, family, "RotaryEmbedding", "model.rotary_emb")
    rope_type = getattr(base.rotary_emb, "rope_type", None)
    if not isinstance(rope_type, str) or "dynamic" in rope_type or rope_type == "longrope":
        raise NoStep(f"rope of type {rope_type} depends on the length of the sequence")
    layers = [
        _layer(layer, f"model.layers.{index}", config, index)
        for index, layer in enumerate(base.layers[: config.num_hidden_layers])
    ]
    if not layers or len(layers) != config.num_hidden_layers:
        raise NoStep(f"{len(layers)} layers, of {config.num_hidden_layers} in the config")
    parts = Trunk(base.embed_tokens, base.rotary_emb, layers, base.norm, head, head_bias)
    norms = [base.norm, *(norm for layer in layers for norm in (layer.input_norm, layer.post_norm))]
    if len({getattr(norm, family.eps) for norm in norms}) > 1:
        raise NoStep("the norms differ in eps")
    if len({(layer.heads, layer.scale, bool(layer.qkv_bias), layer.output_bias is None) for layer in layers}) > 1:
        raise NoStep("the layers differ in heads, biases or the scale of their scores")
    _check_attention(base, config)
    _check_tensors(parts, norms)
    return parts


def _layer(layer: nn.Module, name: str, config: Any, index: int) -> Layer:
    # Through _modules and _parameters: this runs for every layer in every call, and getattr of a module is slow.
    _check_kind(layer, DecoderLayer, name, ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
    attention, mlp, input_norm, post_norm = (
        layer._modules[key] for key in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    )
    _check_kind(attention, Attention, f"{name}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"))
    _check_attention_class(attention, f"{name}.self_attn")
    if getattr(attention, "layer_idx", None) != index:
        raise NoStep(f"{name}.self_attn has layer {getattr(attention, 'layer_idx', None)} of the cache")
    _check_kind(mlp, MLP, f"{name}.mlp", ("gate_proj", "up_proj", "down_proj", "act_fn"))
    _check_kind(input_norm, RMSNorm, f"{name}.input_layernorm", ())
    _check_kind(post_norm, RMSNorm, f"{name}.post_attention_layernorm", ())
    linears = {key: _linear(linear, f"{name}.self_attn.{key}") for key, linear in attention._modules.items()}
    for key, module in mlp._modules.items():
        if key == "act_fn":
            if gated_unit(module) is not swiglu:
                raise NoStep(f"no decode step with {type(module).__name__}")
            _check_calls(module, f"{name}.mlp.{key}")
            continue
        linears[key] = _linear(module, f"{name}.mlp.{key}")
        if linears[key][1] is not None:
            raise NoStep(f"{name}.mlp.{key} has a bias")
    q, k, v = qkv = [linears[key][0] for key in ("q_proj", "k_proj", "v_proj")]
    biases = [linears[key][1] for key in ("q_proj", "k_proj", "v_proj") if linears[key][1] is not None]
    if len(biases) not in (0, 3):
        raise NoStep(f"only some of q, k, v in {name}.self_attn have a bias")
    output, output_bias = linears["o_proj"]
    head_dim = attention.head_dim
    heads, kv_heads = q.shape[0] // head_dim, k.shape[0] // head_dim
    rows = (q.shape[0], k.shape[0], v.shape[0], output.shape[1])
    if rows != tuple(n * head_dim for n in (heads, kv_heads, kv_heads, heads)) or heads % kv_heads:
        raise NoStep(f"{name}.self_attn has an unknown layout of heads")
    types = getattr(config, "layer_types", None)
    window = getattr(attention, "sliding_window", None) or 0
    if types is not None and types[index] != ("sliding_attention" if window else "full_attention"):
        raise NoStep(f"{name}.self_attn attends by {types[index]}")
    gate_up = [linears["gate_proj"][0], linears["up_proj"][0]]
    if gate_up[0].shape != gate_up[1].shape:
        raise NoStep(f"gate and up of {name}.mlp differ in shape")
    return Layer(
        input_norm=input_norm,
        post_norm=post_norm,
        output=output,
        output_bias=output_bias,
        down=linears["down_proj"][0],
        qkv=qkv,
        qkv_bias=biases,
        gate_up=gate_up,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=attention.scaling,
        window_left=window - 1,
    )


def _check(condition: bool, name: str) -> None:
    if not condition:
        raise NoStep(f"{name} is of an unknown kind")


def _check_calls(module: nn.Module, name: str) -> None:
    """The module's call is its class's forward, with no hook that would have to see it."""
    members = vars(module)
    if "forward" in members:
        raise NoStep(f"{name} has a forward of its own")
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for hook in [hook for kind in kinds if members[kind] for hook in members[kind].values()]:
        # transformers leaves those behind that collect hidden states; they do nothing unless asked to.
        if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
            raise NoStep(f"hooks on {name} have to see its calls")


def _check_class(module: nn.Module | None, family: Family, suffix: str, name: str) -> None:
    """The module runs the forward of this family's class."""
    for base in type(module).__mro__:
        if (base.__module__, base.__name__) == (family.module, family.prefix + suffix):
            _check(type(module).forward is base.forward, name)
            _check_is_transformers(base.forward, name)
            return _check_calls(module, name)
    raise NoStep(f"{name} is of an unknown kind")


def _check_is_transformers(function: Callable, name: str) -> None:
    try:
        check_origin(function, ("transformers", "torch"))  # torch's: decorators such as no_grad
    except UnknownLayout as reason:
        raise NoStep(f"{name}: {reason}") from None


# What generate() asks of a model besides its forward.
_HELPERS = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "__call__")


def _check_helpers(model: nn.Module, family: Family) -> None:
    """generate() asks nothing else of the model than of this family's class."""
    original = type(model).original
    known = next(
        c for c in original.__mro__ if (c.__module__, c.__name__) == (family.module, f"{family.prefix}ForCausalLM")
    )
    for name in _HELPERS:
        if name in vars(model) or getattr(original, name) is not getattr(known, name):
            raise NoStep(f"{name} was replaced")
        _check_is_transformers(getattr(known, name), name)


def _check_attention_class(attention: nn.Module, name: str) -> None:
    """The attention is transformers' own, and the one that was patched."""
    original = type(attention).original
    _check_is_transformers(original.forward, name)
    try:
        same = patched_class(original) is type(attention)
    except UnknownLayout:
        same = False
    if not same:
        raise NoStep(f"the forward of {name} has changed since it was patched")


def _check_kind(module: nn.Module, kind: type, name: str, children: tuple[str, ...]) -> None:
    """The module is a patched one of this kind, with these children and no more."""
    if not isinstance(module, kind) or "original" not in vars(type(module)):
        raise NoStep(f"{name} is not patched")
    if set(module._modules) != set(children) or (children and module._parameters):
        raise NoStep(f"{name} has other parts than expected")
    _check_calls(module, name)


def _linear(module: nn.Module, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight and bias of a Linear that is one and no more."""
    if type(module) is not nn.Linear:
        raise NoStep(f"{name} is a {type(module).__module__}.{type(module).__name__}, not torch.nn.Linear")
    _check_calls(module, name)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or (bias is None and getattr(module, "bias", None) is not None):
        raise NoStep(f"{name} has tensors that are no parameters")
    if weight.shape != (module.out_features, module.in_features):
        raise NoStep(f"{name} holds a part of its weight only")
    return weight, bias


def _check_attention(base: nn.Module, config: Any) -> None:
    """The model attends by a function of transformers: another one may compute anything."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modeling = vars(sys.modules[base.layers[0].self_attn.original.__module__])
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, modeling["eager_attention_forward"])
    try:
        check_origin(function)
    except UnknownLayout:
        raise NoStep(f"attention is computed by {getattr(function, '__qualname__', function)}") from None


def _check_tensors(parts: Trunk, norms: list[nn.Module]) -> None:
    head = parts.head
    tensors = [parts.embedding.weight, head, parts.head_bias, *(norm.weight for norm in norms)]
    tensors += [parameter for group in parts.groups for parameter in group]
    for layer in parts.layers:
        tensors += [layer.output, layer.output_bias, layer.down]
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != head.dtype or tensor.device != head.device):
            raise NoStep("weights differ in dtype or device")
    device = head.device
    if device.type not in ("cpu", "cuda"):
        raise NoStep(f"no kernels for {device.type}")
    name = f"llmkernels::{_OP}"
    if not hasattr(_ops, _OP) or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, device.type.upper()):
        raise NoStep(f"this build of llmkernels has no {name} for {device.type}")
    if device.type == "cuda" and (head.dtype.itemsize == 8 or parts.layers[0].head_dim > MAX_HEAD_DIM):
        raise NoStep(f"no kernel for {head.dtype} with head_dim {parts.layers[0].head_dim} on {device.type}")
    if torch.is_autocast_enabled(device.type):
        raise NoStep("autocast decides the dtypes")
    seen: Counter[int] = Counter(id(parameter) for group in parts.groups for parameter in group)
    if seen and max(seen.values()) > 1:
        raise NoStep("layers share weights")
    for group in parts.groups:
        if reason := packing.obstacle(group):
            raise NoStep(reason)


def check_batch(parts: Trunk, input_ids: Tensor) -> None:
    """Raise NoStep unless the step takes these tokens."""
    if input_ids.shape[0] > MAX_BATCH:
        raise NoStep(f"a batch of more than {MAX_BATCH}")
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


def pack(parts: Trunk) -> None:
    """Pack the weights, where they are not packed yet. Raises NoStep when there is no memory for it."""
    try:
        packing.pack(parts.groups)
    except torch.OutOfMemoryError:
        raise NoStep("there is no memory to pack the weights of a layer") from None


def why_not(model: nn.Module) -> str | None:
    """Why the decode step of a model can not run now, or None."""
    try:
        trunk(model)
    except NoStep as reason:
        return str(reason)
    return None
