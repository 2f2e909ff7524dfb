"""What a decoder computes, as data: bind.py makes it of a model, compose.py runs it.

A decoder layer adds blocks to a residual stream x, one after the other:

    x += multiplier * post(block(pre(x)))        pre, post: norms, each there or not; block: attention or MLP

A norm `inner` is that of what the last product of a block reads. With `parallel` all blocks of a layer read what the
layer was given. Multipliers, scales and softcaps that are off are 1 or 0. Parameters are those of the model; `packed`
in describe.py puts those of one product into one tensor.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..classes.options import NormOptions


@dataclass(frozen=True)
class Norm:
    options: NormOptions
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Adapter:
    """s (x A^T) B^T, which is added to the columns of a product from `begin` on."""

    a: Tensor
    b: Tensor
    begin: int
    scaling: float


@dataclass(frozen=True)
class Product:
    """x W^T + b with the rows of `weights` one below the other. `weight` and `bias` are those rows, once packed. With a
    `scale` of each row, float32 (N, 1), `weight` is float8_e4m3fn. `adapters` are added to it. With `transposed` the
    one parameter is W^T, as in GPT-2's Conv1D, and `weight` is W."""

    weights: tuple[nn.Parameter, ...]
    biases: tuple[nn.Parameter, ...] = ()
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        rows, columns = sum(len(weight) for weight in self.weights), self.weights[0].shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def groups(self) -> list[tuple[nn.Parameter, ...]]:
        """What has to be packed."""
        return [group for group in (self.weights, self.biases) if len(group) > 1]


@dataclass(frozen=True)
class Attention:
    """Heads of `head_dim` against a cache. A query sees `window_left` keys before its own; -1: all.

    `table` names the tables of cos and sin among those of the model; None: no rotation. With `alternates` they have the
    columns of a pair next to each other. `row_norms`: q_norm and k_norm take all heads of a token together. `by_head`:
    the rows of `qkv` are q, k and v of one head after the other, and not all of q first.
    """

    qkv: Product
    output: Product
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window_left: int
    softcap: float
    table: str | None
    interleaved: bool
    alternates: bool
    q_norm: Norm | None
    k_norm: Norm | None
    row_norms: bool
    by_head: bool = False


@dataclass(frozen=True)
class MLP:
    """down(act(gate) * up) of a packed [gate | up], or without `gated` down(act(up))."""

    up: Product
    down: Product
    activation: str
    gated: bool


@dataclass(frozen=True)
class Branch:
    block: Attention | MLP
    pre: Norm | None
    post: Norm | None
    multiplier: float
    inner: Norm | None = None

    @property
    def first(self) -> Product:
        """The product that reads pre(x)."""
        return self.block.qkv if isinstance(self.block, Attention) else self.block.up

    @property
    def last(self) -> Product:
        """The product behind which post is."""
        return self.block.output if isinstance(self.block, Attention) else self.block.down

    @property
    def gated(self) -> bool:
        return isinstance(self.block, MLP) and self.block.gated


@dataclass(frozen=True)
class Layer:
    branches: tuple[Branch, ...]
    parallel: bool

    @functools.cached_property
    def attention(self) -> Attention:
        return next(branch.block for branch in self.branches if isinstance(branch.block, Attention))


@dataclass(frozen=True)
class Description:
    """What a token passes through, in this order.

    `embed_scale`: what embeddings are multiplied by, rounded to their dtype where the model has a tensor of it. Those
    of positions may be added to them: the row `first_position` of `position_embedding` is that of position 0. A forward
    without positions counts the tokens that its mask shows if `positions_of_mask`, else all.
    `rotary` makes the tables of cos and sin, one for each of `tables`: the types of layers, or "" if all have the same.
    `positions` are those for which they hold. `more_than_text`: the model takes images or sound as well. With `grids`
    the rotary module takes three rows of positions, of time, height and width, which are one but for images; that
    module keeps how far they are behind the tokens, its `rope_deltas`. Logits are multiplied by `logit_scale`, then
    capped. `dynamic_cache_for`: with these values of `use_cache` the modules make the cache of a prompt as
    DynamicCache(config=config);
    `no_cache_when_told`: with use_cache=False, of the call or else of the config, they make none. `has_loss_of_logits`:
    given labels, they return the model's loss_function of its logits. `has_hidden_states`: asked for them, they return
    what each layer is given, and the last one's behind the norm. `returns_float32`: the logits, in any dtype. `output`:
    the class of what they return. `fp8`: where prompts run in FP8, makes the description for that: step/fp8.py.
    """

    embedding: nn.Parameter
    embed_scale: float
    rotary: nn.Module | None
    tables: tuple[str, ...]
    positions: range
    layers: tuple[Layer, ...]
    norm: Norm
    head: Product
    logit_scale: float
    logit_softcap: float
    position_embedding: nn.Parameter | None = None
    first_position: int = 0
    positions_of_mask: bool = False
    more_than_text: bool = False
    grids: nn.Module | None = None
    output: type | None = None
    dynamic_cache_for: tuple[bool | None, ...] = ()
    no_cache_when_told: bool = False
    has_loss_of_logits: bool = False
    has_hidden_states: bool = False
    returns_float32: bool = False
    fp8: Any = None

    @property
    def weight(self) -> Tensor:
        """One for its dtype and device."""
        return self.embedding

    @functools.cached_property
    def token_bytes(self) -> int:
        """The size of the keys and values of one token of one sequence."""
        elements = sum(layer.attention.kv_heads * layer.attention.head_dim for layer in self.layers)
        return 2 * elements * self.weight.dtype.itemsize

    @functools.cached_property
    def layer_weights(self) -> int:
        """How many weights a token is multiplied by in the layers, once their products are packed."""
        return sum(product.weight.numel() for product in all_of(Product, self.layers))

    @property
    def groups(self) -> list[tuple[nn.Parameter, ...]]:
        """What has to be packed, of all products."""
        return [group for product in all_of(Product, self) for group in product.groups]

    @property
    def transposed(self) -> list[nn.Parameter]:
        """What has to be transposed in memory, of all products."""
        return [product.weights[0] for product in all_of(Product, self) if product.transposed]


# --- walks


def fields_of(node: Any) -> tuple[Any, ...] | None:
    """What a tuple or a dataclass holds; None of anything else."""
    if isinstance(node, tuple):
        return node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return tuple(getattr(node, field.name) for field in dataclasses.fields(node))
    return None


def with_fields(node: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple or a dataclass with what `change` makes of each thing that it holds; anything else as it is."""
    if (items := fields_of(node)) is None:
        return node
    made = map(change, items)
    return tuple(made) if isinstance(node, tuple) else type(node)(*made)


def all_of(kind: type, node: Any) -> Iterator[Any]:
    """All that a description has of one class."""
    if isinstance(node, kind):
        yield node
    else:
        for item in fields_of(node) or ():
            yield from all_of(kind, item)


def with_products(node: Any, change: Callable[[Product], Product]) -> Any:
    """The same description with other products."""
    return change(node) if isinstance(node, Product) else with_fields(node, lambda item: with_products(item, change))


def map_tensors(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same description with other tensors, of packed products and without their parameters."""
    if isinstance(node, Tensor):
        return change(node)
    if isinstance(node, Product):
        tensors = (None if x is None else change(x) for x in (node.weight, node.bias, node.scale))
        return Product((), (), *tensors, map_tensors(node.adapters, change))
    return with_fields(node, lambda item: map_tensors(item, change))


def tensors_and_numbers(node: Any) -> Iterator[Any]:
    """All tensors and numbers of a description. Not the modules and functions, nor the parameters that a packed product
    stands for."""
    if isinstance(node, Product):
        yield from (node.weight, node.bias, node.scale, *tensors_and_numbers(node.adapters))
    elif (items := fields_of(node)) is not None:
        for item in items:
            yield from tensors_and_numbers(item)
    elif not callable(node):
        yield node
