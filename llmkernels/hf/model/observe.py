"""What a small model computes, observed while it runs: `observe(model, ids)` gives a graph of tensors.

Products and embeddings are known by the parameters that they read, attention by the function that gets q, k and v, of
transformers' AttentionInterface or PyTorch's own, and a module without parts is one node. Names of modules do not
matter: read.py finds out by their numbers what norms, rotations and activations are.
"""

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..classes.cache_name import cache_name
from ..classes.recorder import SAME, Node, Recorder
from ..errors import UnknownLayout
from .text import modules_of_text, text_config

CONFIG = "config of the model"


@dataclass(frozen=True)
class Number:
    """A number that a forward multiplies by: the attribute or buffer `name` of the module `path`, or the entry `name`
    of CONFIG; with an empty name a number of the forward's own. `power` is -1 where it divides."""

    value: float
    path: str = ""
    name: str = ""
    power: int = 1


@dataclass(frozen=True, eq=False)
class Record:
    model: nn.Module
    positions: Tensor
    logits: Node
    attentions: tuple[Node, ...]  # in the order of the calls


def number_of(model: nn.Module, value: float, paths: Iterable[str], power: int = 1) -> Number:
    """A number by where it is from: an attribute of one of these modules, or of the config."""
    for path, members in [
        *((path, vars(model.get_submodule(path))) for path in paths),
        (CONFIG, vars(text_config(model.config))),
    ]:
        for name, member in members.items():
            if isinstance(member, float) and member == value:
                return Number(float(value), path, name, power)
    return Number(float(value), power=power)


def observe(model: nn.Module, ids: Tensor, positions: Tensor, attention: Callable[[nn.Module], Callable]) -> Record:
    """Run a model on token ids (1, T), and record how its logits are made.

    `attention(module)` is the function by which a module of the model attends. Raises UnknownLayout for a model that
    does not attend by the function that its config names.
    """
    config = text_config(model.config)
    implementation = config._attn_implementation
    recorder, expected = _ModelRecorder(model, attention), modules_of_text(model)
    handles = [hook for name, module in model.named_modules() for hook in recorder.hooks(name, module)]
    handles += [m.register_forward_pre_hook(_refuse_other) for m in model.modules() if m not in expected]
    config._attn_implementation = _registered()
    try:
        _active.recorder = recorder
        with recorder, _watched_indices(model):
            cache = {cache_name(): _Observed(recorder)}
            output = model(ids, position_ids=positions, use_cache=True, **cache)
    finally:
        _active.recorder = None
        config._attn_implementation = implementation
        for handle in handles:
            handle.remove()
    if not recorder.attentions:
        raise UnknownLayout("attends without the function that its config names")
    return Record(model, positions, recorder.node(output.logits), tuple(recorder.attentions))


def _refuse_other(module: nn.Module, _: tuple) -> None:
    raise UnknownLayout(f"calls {type(module).__name__}, which is no part of its text, for tokens alone")


class _ModelRecorder(Recorder):
    def __init__(self, model: nn.Module, attention: Callable):
        super().__init__()
        self.attentions: list[Node] = []
        self._model, self._attention = model, attention
        self._running: list[tuple[str, int]] = []  # modules, and how many nodes there were
        self._atomic = 0  # the last node that must not be hidden in one of a module
        self._cached: dict[int, int] = {}  # the layers of keys and values
        self._attending = False
        for name, parameter in model.named_parameters():
            self.add(parameter, Node("parameter", parameter.detach(), name=name))
        for name, buffer in model.named_buffers():
            self.add(buffer, Node("constant", buffer.detach(), name=name))

    def add(self, tensor: Tensor, node: Node) -> Node:
        super().add(tensor, node)
        if node.kind in ("product", "embedding", "attention"):
            self._atomic = node.order
        return node

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention and not self._attending:
            return self._attend_directly(*args, **kwargs or {})
        return super().__torch_function__(function, types, args, kwargs)

    def made(self, name: str, value: Tensor, given: tuple, index: int | None) -> Node:
        tensors = [x for x in given if isinstance(x, Node)]
        if name in ("linear", "embedding") and len(tensors) > 1 and all(x.kind == "parameter" for x in tensors[1:]):
            kind = "product" if name == "linear" else "embedding"
            bias = (tensors[2] if len(tensors) > 2 else None,) if name == "linear" else ()
            return Node(kind, value, (*tensors[:2], *bias))
        if name == "addmm" and all(isinstance(x, Node) and x.kind == "parameter" for x in given[::2]):
            return Node("product", value[None], (given[1], given[2], given[0]), options={"transposed": True})
        if name in ("add", "mul", "div") and len(given) == 2:
            a, b = given
            a, b = (b, a) if name != "div" and self._number(a) is not None else (a, b)
            if name == "add" and len(tensors) == 2 and a.value.shape == b.value.shape == value.shape:
                return Node("add", value, (a, b))
            if name != "add" and isinstance(a, Node) and (number := self._number(b, -1 if name == "div" else 1)):
                return Node("scale", value, (a, number))
        if name == "tanh" and len(tensors) == 1:
            return Node("tanh", value, (tensors[0],))
        if name in SAME and tensors and tensors[0].value.numel() == value.numel():
            return Node("same", value, (tensors[0],))
        return super().made(name, value, given, index)

    def _number(self, x: Any, power: int = 1) -> Number | None:
        """A number, or a tensor that is one and depends on no token."""
        if isinstance(x, Node):
            leaf = x.stripped()
            if leaf.kind != "constant" or leaf.value.numel() != 1 or not leaf.value.is_floating_point():
                return None
            path, _, name = leaf.name.rpartition(".")
            return Number(float(leaf.value), path, name, power)
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            return None
        return number_of(self._model, x, [path for path, _ in reversed(self._running)], power)

    # --- modules

    def hooks(self, path: str, module: nn.Module) -> Iterator[Any]:
        def enter(module, args, kwargs):
            self._running.append((path, len(self.kept)))

        def leave(module, args, kwargs, output):
            _, before = self._running.pop()
            if not module._modules and self._atomic <= before:
                self._as_one(path, (*args, *kwargs.values()), output)

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    def _as_one(self, path: str, given: tuple, output: Any) -> None:
        """What a module without parts returns is made of its arguments, by it."""
        args = tuple(self.node(x) if isinstance(x, Tensor) else x for x in given)
        several = isinstance(output, (tuple, list))
        for index, result in enumerate(output if several else (output,)):
            if isinstance(result, Tensor) and all(x is not result for x in given):
                node = Node("tables" if several else "module", self.node(result).value, args, path, {"index": index})
                self.add(result, node)

    # --- attention

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict) -> Any:
        def function(q: Tensor) -> Tensor:
            return by_transformers(module, q, k, v, mask, **options)[0]

        by_transformers = self._attention(module)
        self._attending = True
        output, weights = by_transformers(module, q, k, v, mask, **options)
        self._attending = False
        self._add_attention(output, (q, k, v), mask, options | {"function": function})
        return output, weights

    def _attend_directly(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """A call of PyTorch's function: heads come before tokens, and k and v may have been repeated for all heads."""
        given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        given |= {"scale": scale, "enable_gqa": enable_gqa}

        def function(q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2)

        output = F.scaled_dot_product_attention(q, k, v, **given)
        qkv = q, self._before_repeat(k), self._before_repeat(v)
        options = {"scaling": scale, "function": function}
        self._add_attention(output, qkv, None if is_causal else attn_mask, options)
        self.node(output).value = output.detach().transpose(1, 2).clone()
        return output

    def _before_repeat(self, x: Tensor) -> Tensor:
        """The tensor of the cache of which a function has repeated the heads."""
        node = self.node(x)
        tensors = {self.known[key]: tensor for tensor in self.kept if (key := id(tensor)) in self._cached}
        while node not in tensors and len(before := [*node.nodes()]) == 1 and node.kind in ("same", "other"):
            node = before[0]
        first = tensors.get(node, x)
        groups = x.shape[1] // first.shape[1]
        return first if torch.equal(first.repeat_interleave(groups, 1), x) else x

    def _add_attention(self, output: Tensor, qkv: tuple[Tensor, ...], mask: Tensor | None, options: dict) -> None:
        args = *map(self.node, qkv), None if mask is None else self.node(mask)
        cached = {name: self._cached.get(id(x)) for name, x in zip(("layer", "layer of v"), qkv[1:], strict=True)}
        node = Node("attention", self.node(output).value, args, self._running[-1][0], options | cached)
        self.attentions.append(self.add(output, node))

    def cached(self, k: Tensor, v: Tensor, layer: int) -> None:
        self._cached[id(k)] = self._cached[id(v)] = operator.index(layer)


# --- indices of layers


class _Index(int):
    """The index of a layer, which may name a layer of the cache or an item of a list, and nothing else.

    The layers of a small model stand for all of a large one, so what they compute must not depend on it.
    """


def _refuse(*_: Any) -> Any:
    raise UnknownLayout("has layers that compute something by their index")


_COMPUTED = "eq ne lt le gt ge bool add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow"
for _name in f"{_COMPUTED} and rand neg float".split():
    setattr(_Index, f"__{_name}__", _refuse)
_Index.__hash__ = int.__hash__


@contextmanager
def _watched_indices(model: nn.Module) -> Iterator[None]:
    """Members that number the layers of a list are _Index meanwhile."""
    found = []
    for stack in model.modules():
        layers = [dict(layer.named_modules()) for layer in stack] if isinstance(stack, nn.ModuleList) else []
        for path, first in layers[0].items() if len(layers) > 1 else ():
            modules = [layer.get(path) for layer in layers]
            for name, value in vars(first).items():
                if type(value) is int and [vars(m).get(name) if m else None for m in modules] == [*range(len(layers))]:
                    found += [(module, name) for module in modules]
    try:
        for module, name in found:
            vars(module)[name] = _Index(vars(module)[name])
        yield
    finally:
        for module, name in found:
            vars(module)[name] = operator.index(vars(module)[name])


# --- transformers' interfaces


_active = threading.local()
_NAME = "llmkernels_observed"


def _attend(module, query, key, value, attention_mask, **options):
    if (recorder := getattr(_active, "recorder", None)) is None:
        raise RuntimeError(f"attention {_NAME} is for llmkernels alone, which watches a small model by it")
    return recorder.attend(module, query, key, value, attention_mask, options)


@functools.cache
def _registered() -> str:
    """The name of an attention that tells the recorder of this thread. Masks are those of eager attention."""
    type(ALL_ATTENTION_FUNCTIONS).register(_NAME, _attend)
    type(ALL_MASK_ATTENTION_FUNCTIONS).register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    return _NAME


class _Observed(DynamicCache):
    """An empty cache that says what it is given, and keeps nothing."""

    def __init__(self, recorder: _ModelRecorder):
        super().__init__()
        self._recorder = recorder

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self._recorder.cached(key_states, value_states, layer_idx)
        return key_states, value_states
