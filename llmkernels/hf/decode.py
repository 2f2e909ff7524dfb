"""The decode step: one token for every sequence, through `llmkernels::decode_layer` and, on CUDA, one graph.

    trunk(model)     what the step reads of a model, or the reason why it can not
    Decoder          what a model keeps between calls: its cache, graphs, and how often which way was taken
    DecodeStep       one model on one cache, for one call of generate

A step reads the model as it is when a call begins. Nothing of it is kept longer than the call but addresses, against
which a graph is checked before it is used again: weights that moved, or a cache that grew, make a new one.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from llmkernels.ops import swiglu

from . import packing
from .families import Family
from .layers import MLP, Attention, DecoderLayer, Generating, RMSNorm, gated_unit

MAX_BATCH = 64
MAX_HEAD_DIM = 512  # of decode_attention on CUDA; on the CPU there is no limit
_OPS = ("decode_layer", "rms_norm_linear")
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
    window: int

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
    _check_class(base, family, "Model", "model")
    config = base.config
    _check(type(base.embed_tokens) is nn.Embedding and base.embed_tokens.max_norm is None, "model.embed_tokens")
    _check_calls(base.embed_tokens, "model.embed_tokens")
    _check_kind(base.norm, RMSNorm, "model.norm", ())
    head, head_bias = _linear(model.lm_head, "lm_head")
    _check_calls(base.rotary_emb, "model.rotary_emb")
    rope_type = getattr(base.rotary_emb, "rope_type", None)
    if not isinstance(rope_type, str) or "dynamic" in rope_type or rope_type == "longrope":
        raise NoStep(f"rope of type {rope_type} depends on the length of the sequence")
    layers = [
        _layer(layer, f"model.layers.{index}", config, index)
        for index, layer in enumerate(base.layers[: config.num_hidden_layers])
    ]
    parts = Trunk(base.embed_tokens, base.rotary_emb, layers, base.norm, head, head_bias)
    norms = [base.norm, *(norm for layer in layers for norm in (layer.input_norm, layer.post_norm))]
    if len({getattr(norm, family.eps) for norm in norms}) > 1:
        raise NoStep("the norms differ in eps")
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
        window=window,
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
            return _check_calls(module, name)
    raise NoStep(f"{name} is of an unknown kind")


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
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if weight.shape != (module.out_features, module.in_features):
        raise NoStep(f"{name} holds a part of its weight only")
    return weight, bias


def _check_attention(base: nn.Module, config: Any) -> None:
    """The model attends by a function of transformers: another one may compute anything."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modeling = vars(sys.modules[base.layers[0].self_attn.original.__module__])
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, modeling["eager_attention_forward"])
    if not getattr(function, "__module__", "").startswith("transformers."):
        raise NoStep(f"attention is computed by {getattr(function, '__qualname__', function)}")


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
    for op in _OPS:
        name = f"llmkernels::{op}"
        if not hasattr(_ops, op) or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(
            name, device.type.upper()
        ):
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


@dataclass
class Program:
    """A function of fixed buffers: on CUDA run once, then captured, then replayed."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    addresses: tuple = ()
    warm: bool = False
    graph: Any = None
    output: Any = None

    def bind(self, addresses: tuple) -> None:
        """Forget the graph unless it was made with these addresses."""
        if addresses != self.addresses:
            self.addresses, self.warm, self.graph, self.output = addresses, False, None, None

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that stays where it is for as long as the program lives. New ones are 0."""
        tensor = self.buffers.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            with torch.inference_mode(False):
                tensor = self.buffers[name] = torch.zeros(shape, dtype=dtype, device=device)
            self.warm, self.graph, self.output = False, None, None
        return tensor

    def run(self, function: Callable[[], Any], device: torch.device) -> Any:
        """The function's result. On CUDA the next call overwrites it."""
        if device.type != "cuda":
            return function()
        with torch.cuda.device(device):
            if not self.warm:  # loads kernels and libraries, which can not be done while capturing
                self.warm = True
                return function()
            if self.graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.output = function()
                self.graph = graph
            self.graph.replay()
            return self.output


class DecodeStep:
    """One model on one cache, for one call of generate.

    `tokens` int64 (B,) are the last token of each sequence, which is not in the cache yet: `forward` appends it and
    returns the logits (B, V) of the next. `forward` may be captured; `run` runs what calls it.
    """

    def __init__(self, parts: Trunk, family: Family, cache: Any, program: Program):
        self.cache = cache
        self.program = program
        self.device = parts.head.device
        self._parts = parts
        self._norm_options = (getattr(parts.norm, family.eps), family.weight_offset, family.cast_before_weight)
        self.tokens = program.buffer("tokens", (cache.layers[0].k.shape[0],), torch.long, self.device)
        self._bind()

    def _bind(self) -> None:
        """Collect the arguments of the ops, and with them the addresses that a graph has to have."""
        parts, cache = self._parts, self.cache
        self._embedding = parts.embedding.weight
        positions, slots, lengths = cache.counters
        tables = self._tables(parts.rotary)
        self._layers = [
            (
                layer.input_norm.weight,
                packing.packed(layer.qkv),
                packing.packed(layer.qkv_bias) if layer.qkv_bias else None,
                layer.output,
                layer.output_bias,
                layer.post_norm.weight,
                packing.packed(layer.gate_up),
                layer.down,
                *tables,
                positions,
                slots,
                lengths,
                cache.starts,
                buffers.k,
                buffers.v,
                None,  # block_table
                layer.heads,
                *self._norm_options,
                layer.scale,
                layer.window,
            )
            for layer, buffers in zip(parts.layers, cache.layers, strict=True)
        ]
        self._head = (parts.norm.weight, parts.head, parts.head_bias, *self._norm_options)
        used = [self._embedding, cache.counters, *self._head, *(x for layer in self._layers for x in layer)]
        self.program.bind(tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in used))

    def forward(self) -> Tensor:
        self.cache.counters.add_(1)
        hidden = F.embedding(self.tokens, self._embedding)
        for arguments in self._layers:
            _ops.decode_layer(hidden, *arguments)
        return _ops.rms_norm_linear(hidden, *self._head)

    def run(self, function: Callable[[], Any]) -> Any:
        """What `function`, which calls `forward` once, returns: all tensors of fixed buffers, on CUDA by a graph."""
        if self.cache.make_room(1):
            self._bind()
        result = self.program.run(function, self.device)
        self.cache.advance()
        return result

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (B, V) behind the tokens (B,), until the next call."""
        self.tokens.copy_(tokens)
        return self.run(self.forward)

    def _tables(self, rotary: nn.Module) -> list[Tensor]:
        """cos and sin of every position in the cache. Computed anew by the model's module, which may have changed."""
        positions = torch.arange(self.cache.capacity, device=self.device)[None]
        tables = rotary(self._embedding[:1], positions)
        buffers = []
        for name, table in zip(("cos", "sin"), tables, strict=True):
            buffers.append(self.program.buffer(name, table.shape[1:], table.dtype, self.device))
            buffers[-1].copy_(table[0])
        return buffers


class Decoder:
    """What is kept for one model between calls of generate."""

    def __init__(self):
        self.calls: Counter[str] = Counter()  # how often generate took which way, by the words of the report
        self._programs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache: graphs die with it
        self._cache: Any = None
        self._stream: int | None = None

    def begin(self, model: nn.Module, parts: Trunk, cache: Any, kind: Any = "step") -> DecodeStep:
        """The step of a model on a cache whose counters are set. Programs of one `kind` run the same function."""
        programs = self._programs.setdefault(cache, {})
        return DecodeStep(parts, model.family, cache, programs.setdefault(kind, Program()))

    @contextmanager
    def lend_cache(self, model: nn.Module, batch: int, tokens: int, limit: int) -> Iterator["Loan"]:
        """An empty cache with room for `tokens` and some more, up to `limit`; behind that it grows.

        The same as last time where possible, as its graphs need no new capture then.
        """
        from .cache import growable

        # Taken, so that a call within this call, or by another thread, gets one of its own.
        cache, self._cache = self._cache, None
        weight = next(model.parameters())
        fits = (
            cache is not None
            and cache.layers[0].is_initialized
            and cache.layers[0].k.shape[0] == batch
            and cache.layers[0].k.dtype == weight.dtype
            and cache.layers[0].k.device == weight.device
            and cache.capacity >= min(tokens, limit)
            and self._stream == _stream(weight.device)  # on another one it may still be in use
        )
        if fits:
            cache.reset()
        else:
            del cache  # before there is another one
            cache = growable(model, tokens, limit)
        loan = Loan(cache)
        del cache
        try:
            yield loan
        finally:
            if not loan.kept:
                self._cache, self._stream = loan.cache, _stream(weight.device)

    def release(self) -> None:
        """Free the cache and the graphs."""
        self._cache = None
        self._programs.clear()


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


@dataclass
class Loan:
    """A cache on loan. Whoever hands it to the caller of generate says so by `kept`."""

    cache: Any
    kept: bool = False


_DECODERS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def decoder(model: nn.Module) -> Decoder:
    """The decoder of this very model: not of a copy, and not in its pickle."""
    return _DECODERS.setdefault(model, Decoder())


def pack(parts: Trunk) -> None:
    """Pack the weights, where they are not packed yet. Raises NoStep when there is no memory for it."""
    try:
        packing.pack(parts.groups)
    except torch.OutOfMemoryError:
        raise NoStep("there is no memory to pack the weights of a layer") from None


def forget(model: nn.Module) -> None:
    """Undo what decoding did to a model: its weights are unpacked, its graphs and its cache gone."""
    _DECODERS.pop(model, None)
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            packing.unpack(_groups(layer))


def _groups(layer: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of a layer that `trunk` may have led to pack, whatever has become of the layer since."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = [(attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))]
    groups = []
    for module, keys in names:
        linears = [getattr(module, key, None) for key in keys]
        for name in ("weight", "bias"):
            group = [getattr(linear, name, None) for linear in linears]
            if all(type(parameter) is nn.Parameter and type(parameter.data) is Tensor for parameter in group):
                groups.append(group)
    return groups


def why_not(model: nn.Module) -> str | None:
    """Why the decode step of a model can not run now, or None."""
    try:
        trunk(model)
    except NoStep as reason:
        return str(reason)
    return None
