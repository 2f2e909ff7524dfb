"""Puts the parameters and numbers of a model in a template: `bind(template, model, expected)`, the description.

A layer of the model takes the first layer of the template that its class makes alike.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Distrust, UnknownLayout
from .adapted import added_to, base_of, is_adapted
from .description import Attention, Description, Norm, Product, with_fields
from .observe import CONFIG, Number
from .reference import ExpectedModule, Reference, layer_kinds
from .template import Factor, Path, Template, Window
from .text import text_config
from .trust import is_same_partial


def bind(template: Template, model: nn.Module, expected: Reference) -> Description:
    """The description of a model that is as its reference. Raises Distrust where one of its tensors is not,
    and UnknownLayout for a layer that is like none of the template."""
    parts = template.description
    sources = _sources(template, model, expected)
    layers = tuple(
        _Binder(model, expected, _renamed(template.stack, source, index)).bound(parts.layers[source])
        for index, source in enumerate(sources)
    )
    windowed = [layer.attention.window_left >= 0 for layer in layers]
    rest = _Binder(model, expected, lambda path: path).bound(dataclasses.replace(parts, layers=()))
    return dataclasses.replace(
        rest,
        embed_scale=_embed_scale(rest.embed_scale, rest.embedding.dtype),
        layers=layers,
        more_than_text=text_config(model.config) is not model.config,
        grids=_grids(model),
        positions=_positions(rest, text_config(model.config), windowed),
    )


class _Binder:
    def __init__(self, model: nn.Module, expected: Reference, rename: Callable[[str], str]):
        self._model, self._expected, self._rename = model, expected, rename

    def bound(self, node: Any) -> Any:
        if isinstance(node, Path):
            return self._tensor_or_module(node.name)
        if isinstance(node, Factor):
            return self._factor(node)
        if isinstance(node, Number):
            return self._number(node)
        if isinstance(node, Window):
            window = getattr(text_config(self._model.config), "sliding_window", None)
            if not window or window < 1:
                raise UnknownLayout(f"has a window of {window}")
            return window - 1
        if isinstance(node, Norm):  # whose options stay
            self._owner(node.eps.path, with_bias=False)
            return Norm(node.options, *map(self.bound, (node.weight, node.bias)), float(self.bound(node.eps)))
        if isinstance(node, Product):
            return self._product(node)
        node = with_fields(node, self.bound)
        return self._with_heads(node) if isinstance(node, Attention) else node

    def _owner(self, path: str, with_bias: bool) -> tuple[nn.Module, nn.Module]:
        """A module and that of the reference. Both have the same parameters, or one of them may have a bias, too."""
        owner, reference = (_at(model, self._rename(path)) for model in (self._model, self._expected.model))
        for name, parameter in reference._parameters.items():
            if (owner._parameters[name] is None) != (parameter is None) and not (with_bias and name == "bias"):
                raise Distrust(owner, f"{{}} has another {name} than its class makes")
        return owner, reference

    def _tensor_or_module(self, path: str, with_bias: bool = False, may_be_transposed: bool = False) -> Any:
        parent, _, name = path.rpartition(".")
        if name in _at(self._model, self._rename(parent))._modules:
            return _at(self._model, self._rename(path))
        owner, reference = self._owner(parent, with_bias)
        found = owner._parameters[name]
        if found.shape != (made := reference._parameters[name].shape):
            raise Distrust(owner, f"the {name} of {{}} is {_sizes(found.shape)}, where its config makes {_sizes(made)}")
        if not (may_be_transposed or found.is_contiguous()):
            raise Distrust(owner, f"the {name} of {{}} has no ordinary memory")
        return found

    def _product(self, product: Product) -> Product:
        """With the biases of the model's own linear layers, where the reference may have others."""
        parents = [path.name.removesuffix(".weight") for path in product.weights]
        are_linear = all(type(_at(self._expected.model, self._rename(name))) is nn.Linear for name in parents)
        transposed = product.transposed
        weights = tuple(self._tensor_or_module(path.name, are_linear, transposed) for path in product.weights)
        modules = [self._outer(name) for name in parents]
        if transposed:
            found = Product(weights, self.bound(product.biases), transposed=True)
            rows, columns = found.shape
            return dataclasses.replace(found, adapters=added_to(modules, [rows], columns))
        if not are_linear:
            if (with_adapters := next(filter(is_adapted, modules), None)) is not None:
                raise Distrust(with_adapters, "{} has adapters, and is no linear layer of torch's")
            return Product(weights, self.bound(product.biases))
        owners = [_at(self._model, self._rename(name)) for name in parents]
        biases = [owner._parameters["bias"] for owner in owners if owner._parameters["bias"] is not None]
        if len(biases) not in (0, len(owners)):
            block = _at(self._model, self._rename(parents[0].rpartition(".")[0]))
            raise Distrust(block, "only some of the products of {} have a bias")
        adapters = added_to(modules, [len(weight) for weight in weights], weights[0].shape[1])
        return Product(weights, tuple(biases), adapters=adapters)

    def _outer(self, path: str) -> nn.Module:
        """A module with its adapters."""
        parent, _, name = self._rename(path).rpartition(".")
        return _at(self._model, parent)._modules[name]

    def _factor(self, factor: Factor) -> float | Tensor:
        """A tensor only where it is all that there is: reading it would wait for the device."""
        found = [(self._number(number), number.power) for number in factor.numbers]
        if len(found) == 1 and isinstance(found[0][0], Tensor) and found[0][1] == 1:
            return found[0][0]
        result = 1.0
        for value, power in found:
            if isinstance(value, Tensor):
                raise UnknownLayout("multiplies by a tensor")
            result *= float(value) ** power
        return result

    def _number(self, number: Number) -> float | Tensor:
        if not number.name:
            return number.value
        if number.path == CONFIG:
            return getattr(text_config(self._model.config), number.name)
        members = vars(_at(self._model, self._rename(number.path)))
        return members["_buffers"][number.name] if number.name in members["_buffers"] else members[number.name]

    def _with_heads(self, attention: Attention) -> Attention:
        head_dim, rows = attention.head_dim, attention.qkv.shape[0]
        heads = text_config(self._model.config).num_attention_heads
        columns = attention.output.shape[1]
        if heads * head_dim != columns:  # the small model's have the head_dim of the config, which a class may ignore
            raise UnknownLayout(f"has {heads} heads of another size than {head_dim}, as its config has it")
        return dataclasses.replace(attention, heads=heads, kv_heads=(rows // head_dim - heads) // 2)


def _sizes(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))


def _at(model: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else ():
        model = base_of(model._modules[name])
    return model


def _renamed(stack: str, source: int, index: int) -> Callable[[str], str]:
    old, new = f"{stack}.{source}.", f"{stack}.{index}."
    return lambda path: new + path[len(old) :] if path.startswith(old) else path


def _sources(template: Template, model: nn.Module, expected: Reference) -> list[int]:
    """For each layer of a model the index of the template's layer that it is like."""
    part = expected.root
    for name in template.stack.split("."):
        part = part.parts[name]
    layers, kinds = [*part.parts.values()], layer_kinds(model.config)
    for kind in getattr(text_config(model.config), "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnknownLayout(f"has layers of type {kind}")
    sources: list[int] = []
    count = len(template.description.layers)
    for index, layer in enumerate(layers):
        alike = (
            source
            for source in range(min(count, len(layers)))
            if kinds[source] == kinds[index] and _alike(layers[source], layer, source, index)
        )
        if (source := next(alike, None)) is None:
            raise UnknownLayout(f"has a layer {index} that is not as one of the first {count}")
        sources.append(source)
    return sources


def _alike(one: ExpectedModule, other: ExpectedModule, index: int, other_index: int) -> bool:
    """Whether two layers of a reference differ in their indices alone."""
    if one.spec is not other.spec:
        if one.spec.check_class is not other.spec.check_class and type(one.module) is not type(other.module):
            return False
        numbers, others = dict(one.spec.numbers), dict(other.spec.numbers)
        if numbers.keys() != others.keys() or one.spec.parameters != other.spec.parameters:
            return False
        for name, value in numbers.items():
            found = others[name]
            if value != found and not is_same_partial(value, found) and (value, found) != (index, other_index):
                return False
    if one.lists != other.lists or any(vars(one.module)[name] != vars(other.module)[name] for name in one.read):
        return False
    return one.parts.keys() == other.parts.keys() and all(
        _alike(part, other.parts[name], index, other_index) for name, part in one.parts.items()
    )


def _grids(model: nn.Module) -> nn.Module | None:
    """The module that keeps how far positions are behind tokens, where they have rows for the grids of images."""
    return next((module for module in model.modules() if "rope_deltas" in vars(module)), None)


def _embed_scale(scale: float | Tensor | None, dtype: torch.dtype) -> float:
    """That of the embeddings as a number. Waits for the device where it is a tensor, which models cast."""
    if isinstance(scale, Tensor):
        return float(scale.to(dtype))
    return 1.0 if scale is None else scale


def _positions(parts: Description, config: Any, windowed: list[bool]) -> range:
    """Those for which the tables hold, and that have embeddings; and no more than a window, where what is behind it
    leaves the cache although layers attend to it."""
    positions = positions_of(parts.rotary)
    if parts.position_embedding is not None:
        positions = positions[: len(parts.position_embedding) - parts.first_position]
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windowed)
    window = getattr(config, "sliding_window", None)
    drops = (kind == "sliding_attention" and not sees for kind, sees in zip(types, windowed, strict=True))
    return positions[:window] if window is not None and any(drops) else positions


def positions_of(rotary: nn.Module | None) -> range:
    """The positions whose rotation does not depend on how long the sequence is, and whose queries are not scaled."""
    types = getattr(rotary, "rope_type", "default")
    for kind in types.values() if isinstance(types, dict) else (types,):
        if not isinstance(kind, str):
            raise UnknownLayout(f"has rope of type {kind}")
        if "dynamic" in kind or kind == "longrope":
            original = getattr(rotary, "original_max_seq_len", 0)
            if kind == "longrope":
                original = rotary.config.rope_parameters.get("original_max_position_embeddings", original)
            return range(original)
    parameters = getattr(getattr(rotary, "config", None), "rope_parameters", None) or {}
    if parameters.get("llama_4_scaling_beta"):  # of Ministral 3, whose queries are scaled beyond these positions
        return range(parameters["original_max_position_embeddings"])
    return range(1 << 31)
