"""That a description is right: the composed forward of a small model gives the logits that its modules give.

The small model has the class and the config of the model in question but for sizes (reference.py), and random weights,
once of an ordinary size, and once so large in some channels that scores and values reach what clips them.
Both run on the CPU, in float32, over more tokens than a window has, at the first positions and at the last for which
the description is meant: some families scale queries far behind. The description is read from the small model, too,
while it runs: observe.py.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from .._private import _disable_current_modes
from ..classes.cache_name import cache_name
from ..classes.effects import is_foreign
from ..classes.origin import hold
from ..errors import NoStep, UnknownLayout
from ..model.bind import bind
from ..model.description import Description, Product, with_products
from ..model.observe import observe
from ..model.read import read
from ..model.reference import (
    WINDOW,
    Reference,
    WithoutRandomNumbers,
    attention_function,
    attention_scope,
    fill,
    of_account,
    reference_of,
    resized,
    small_config,
    small_model,
)
from ..model.template import Template
from ..model.text import text_config
from .attend import LayerCache, Tokens
from .compose import embed, forward, make_tables

_TOKENS = 2 * WINDOW + 2
# How loud channels are, and how far logits may be off, of the largest: a few times of what rounding makes of them. Of
# a model that enlarges rounding errors, as one with large scores does, `_ROUNDINGS` times of what they come to in it,
# but no more than `_MOST` times as far.
_FILLS = ((1.0, 1e-5), (16.0, 1e-3))
_ROUNDINGS, _MOST = 8, 10

_TRIES = 3  # of a proof that ends in an error: there may be none the next time, when memory was short

_proofs: list[tuple[tuple, Template | str]] = []  # what was proved, or why nothing was
_failed: list[tuple] = []  # the tries that ended in an error


def template_of(model: nn.Module, expected: Reference) -> Template:
    """The template of a model's description, proved. Raises UnknownLayout where it has none,
    and NoStep where that is not known yet.

    Models of one class that differ in their sizes alone have one small model, and so one proof.
    """
    cls = type(expected.model)
    try:
        config = small_config(model.config)
    except Exception as error:
        raise UnknownLayout(_in_its_own_way(error)) from error
    key = cls, of_account(config), expected.attention, expected.called
    found = next((found for known, found in _proofs if known == key), None)
    if found is None:
        try:
            found = _prove(cls, config, expected.attention)
        except UnknownLayout as reason:
            found = str(reason)
        except NoStep:
            raise
        except Exception as error:
            found = _in_its_own_way(error)
            _failed.append(key)
            if _failed.count(key) < _TRIES:
                raise NoStep(f"{cls.__name__} {found}") from error
        if not hold(expected.names):
            raise NoStep("another thread is changing functions that the model calls")
        _proofs.append((key, found))
    if isinstance(found, str):
        raise UnknownLayout(found)
    return found


def _in_its_own_way(error: Exception) -> str:
    """The reason for a family that differs from all others in an unknown way."""
    return f"has an unknown layout ({type(error).__name__}: {error})"


def _prove(cls: type[nn.Module], config: Any, attention: Callable) -> Template:
    # Modes of the caller have nothing to see here, and his autocast no dtypes to decide.
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        small, template = _observed(cls, config)
        _check_numbers(template, cls, config)
        known = reference_of(small, vars(small.config), attention)
        ids = _token_ids()
        for loud, tolerance in _FILLS:
            fill(small, loud)
            _level_embeddings(small, template, ids)
            parts = bind(template, small, known)
            if any(map(is_foreign, known.classes)):
                _check_tables(parts, config)
                _check_conventions(small, ids, _MOST * tolerance)
            for start in {0, max(0, len(parts.positions) - _TOKENS)}:
                expected = _logits(small, ids, start)
                error = _error(_composed(parts, ids, start), torch.cat([expected, expected]))
                if not error <= tolerance and not error <= min(
                    _MOST * tolerance, _ROUNDINGS * _rounding(small, ids, start)
                ):
                    off = f"logits differ by {error:.1g} of the largest"
                    raise UnknownLayout(f"computes something else than its description: {off}")
        description = dataclasses.replace(
            template.description,
            positions_of_mask=_counts_by_mask(small, template, ids),
            dynamic_cache_for=_dynamic_cache_for(small, ids),
            no_cache_when_told=_makes_no_cache_when_told(small, ids),
            has_loss_of_logits=_has_loss_of_logits(small, ids),
            has_hidden_states=_has_hidden_states(small, parts, ids, tolerance),
            returns_float32=_returns_float32(small, ids),
            output=_output_class(small, ids),
        )
        return dataclasses.replace(template, description=description, same_in_training=_same_in_training(small, ids))


def _observed(cls: type[nn.Module], config: Any) -> tuple[nn.Module, Template]:
    """A small model, and what it was seen to compute."""
    small = small_model(cls, config)
    fill(small, 1.0)
    attends = copy.copy(text_config(small.config))

    def attention(module: nn.Module) -> Callable:
        return attention_function(attends, attention_scope(module))

    return small, read(observe(small, _token_ids()[None], torch.arange(_TOKENS)[None], attention))


def _token_ids() -> Tensor:
    return torch.arange(_TOKENS) * 7 % 61


def _check_numbers(template: Template, cls: type[nn.Module], config: Any) -> None:
    """Raise UnknownLayout where a forward makes a number of the sizes of the model: here they are others."""
    numbers = template.own_numbers(len(template.description.layers))
    if any(number != 1 for number in numbers):
        _, other = _observed(cls, resized(config))
        if other.own_numbers(len(template.description.layers)) != numbers:
            raise UnknownLayout("multiplies by a number that depends on its sizes")


def _same_in_training(small: nn.Module, ids: Tensor) -> bool:
    """Whether a model computes the same in training mode. Its random numbers are zeros here, which shows."""
    expected = _logits(small, ids, 0)
    try:
        with WithoutRandomNumbers():
            return torch.equal(_logits(small.train(), ids, 0), expected)
    except UnknownLayout:
        return False
    finally:
        small.eval()


def _dynamic_cache_for(small: nn.Module, ids: Tensor) -> tuple[bool | None, ...]:
    """The values of `use_cache` with which a model makes DynamicCache(config=config) for a prompt; None, if given or
    not."""

    def kinds(cache: Any) -> list[tuple[type, int | None]]:
        return [(type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers]

    def makes(**given: bool | None) -> bool:
        cache = _made_cache(small, ids, **given)
        expected = DynamicCache(config=small.config)
        return type(cache) is DynamicCache and not cache.offloading and kinds(cache) == kinds(expected)

    return tuple(value for value in (None, True) if makes(use_cache=value) and (value or makes()))


def _makes_no_cache_when_told(small: nn.Module, ids: Tensor) -> bool:
    """Whether a model makes no cache with use_cache=False, of a call or else of its config."""
    if _made_cache(small, ids, use_cache=False) is not None:
        return False
    config = text_config(small.config)
    told = getattr(config, "use_cache", True)
    config.use_cache = False
    try:
        return _made_cache(small, ids) is _made_cache(small, ids, use_cache=None) is None
    finally:
        config.use_cache = told


def _made_cache(small: nn.Module, ids: Tensor, **given: bool | None) -> Any:
    """The cache that a model returns behind a prompt, or None."""
    return getattr(_returned(small, ids, **given), cache_name(), None)


def _returned(small: nn.Module, ids: Tensor, **given: Any) -> Any:
    """What a model returns for a prompt; None where it raises, as one that does not take these arguments."""
    try:
        return small(ids[None], **given)
    except Exception:
        return None


def _has_loss_of_logits(small: nn.Module, ids: Tensor) -> bool:
    """Whether a model returns its loss_function of its logits, given labels and how many of them count."""
    labels = ids[None].clone()
    labels[:, 2] = -100
    for counted in ({}, {"num_items_in_batch": 5}):
        try:
            output = small(ids[None], labels=labels, use_cache=False, **counted)
            told = small.loss_function(output.logits, labels, text_config(small.config).vocab_size, **counted)
        except Exception:  # of a model that takes no labels, or has no such function
            return False
        if output.loss is None or not torch.equal(output.loss, told):
            return False
    return True


def _has_hidden_states(small: nn.Module, parts: Description, ids: Tensor, tolerance: float) -> bool:
    """Whether a model returns the hidden states that a description has."""
    expected = getattr(_returned(small, ids, use_cache=False, output_hidden_states=True), "hidden_states", None)
    found: list[Tensor] = []
    _composed(parts, ids, 0, found)
    if not isinstance(expected, tuple) or len(expected) != len(found):
        return False
    return all(
        one.shape == (1, *other.shape) and _error(other, one[0]) <= _MOST * tolerance
        for one, other in zip(expected, found, strict=True)
    )


def _output_class(small: nn.Module, ids: Tensor) -> type[ModelOutput]:
    """The class of what a model returns, if it has the fields that a step fills."""
    found = type(_returned(small, ids, use_cache=False, return_dict=True))
    fields = {field.name for field in dataclasses.fields(found)} if issubclass(found, ModelOutput) else set()
    return found if fields >= {"loss", "logits", "hidden_states", cache_name()} else CausalLMOutputWithPast


def _returns_float32(small: nn.Module, ids: Tensor) -> bool:
    """Whether a model returns logits in float32 when its weights are in another dtype."""
    other = copy.deepcopy(small)
    for parameter in other.parameters():
        parameter.data = parameter.bfloat16()
    logits = getattr(_returned(other, ids, use_cache=False), "logits", None)
    return logits is not None and logits.dtype is torch.float32  # None of a model that runs in float32 alone


def _check_tables(parts: Description, config: Any) -> None:
    """Raise UnknownLayout where a rotation has other angles in a longer sequence. Those of transformers say so, see
    `positions_of`; a foreign one is asked."""
    if parts.rotary is None or not is_foreign(type(parts.rotary)):
        return
    longest = 4 * (getattr(config, "max_position_embeddings", None) or 4096)
    few, many = (make_tables(parts, range(tokens)) for tokens in (_TOKENS, max(longest, 2 * _TOKENS)))
    for name, tables in few.items():
        if any(not torch.equal(table, others[:_TOKENS]) for table, others in zip(tables, many[name], strict=True)):
            raise UnknownLayout("has a rotation that depends on the length of the sequence")


def _check_conventions(small: nn.Module, ids: Tensor, tolerance: float) -> None:
    """Raise UnknownLayout unless a cache, a batch and a mask of padding mean to a foreign model what they do in
    transformers."""
    expected, count, cache = _logits(small, ids, 0), len(ids), DynamicCache(config=small.config)
    positions = torch.arange(count)[None]
    found = []
    for begin, end in ((0, count - 3), (count - 3, count - 2), (count - 2, count)):
        given = {cache_name(): cache, "attention_mask": torch.ones(1, end, dtype=torch.long)}
        output = small(ids[None, begin:end], position_ids=positions[:, begin:end], use_cache=True, **given)
        found.append(output.logits[0])
    if not _error(torch.cat(found), expected) <= tolerance:
        raise UnknownLayout("computes something else behind a cache than without one")
    padding = 3
    other = torch.cat([ids[-padding:], ids])
    mask, whole = torch.ones(2, len(other), dtype=torch.long), torch.arange(len(other))[None]
    mask[0, :padding] = 0
    positions = torch.cat([nn.functional.pad(positions, (padding, 0)), whole])
    ids = torch.stack([nn.functional.pad(ids, (padding, 0)), other])
    # With a cache: else transformers takes positions that begin anew for several sequences, where it gets no mask.
    given = {cache_name(): DynamicCache(config=small.config), "use_cache": True}
    padded, beside = small(ids, position_ids=positions, attention_mask=mask, **given).logits
    if not _error(beside, _logits(small, other, 0)) <= tolerance:
        raise UnknownLayout("computes something else for a sequence beside others")
    if not _error(padded[padding:], expected) <= tolerance:
        raise UnknownLayout("sees padding that its mask hides")


def _counts_by_mask(small: nn.Module, template: Template, ids: Tensor) -> bool:
    """Whether a model that adds embeddings of positions, and is given none, counts live tokens and not all of them."""
    if template.description.position_embedding is None:
        return False
    padding = 3
    mask = torch.ones(1, padding + len(ids), dtype=torch.long)
    mask[:, :padding] = 0
    padded = nn.functional.pad(ids[None], (padding, 0))
    found = small(padded, attention_mask=mask, use_cache=False).logits[0, padding:]
    by_mask, by_all = (_error(found, _logits(small, ids, start)) for start in (0, padding))
    if not min(by_mask, by_all) < 1e-3:
        raise UnknownLayout("counts positions neither by its mask nor from the first token on")
    return by_mask < by_all


def _level_embeddings(small: nn.Module, template: Template, ids: Tensor) -> None:
    """Make what the first layer is given about 1: scaled embeddings would drown what the layers add."""
    found = []

    def note(_, args, kwargs):
        found.extend((*args, *kwargs.values()))

    with small.get_submodule(template.stack)[0].register_forward_pre_hook(note, with_kwargs=True):
        _logits(small, ids, 0)
    small.get_parameter(template.description.embedding.name).div_(found[0].std())


def _logits(small: nn.Module, ids: Tensor, start: int) -> Tensor:
    """Of each token, by the modules. The first one has the position `start`."""
    positions = torch.arange(start, start + len(ids))[None]
    return small(ids[None], position_ids=positions, use_cache=False).logits[0]


def _error(logits: Tensor, target: Tensor) -> float:
    """How far logits differ, of the largest."""
    error = float((logits - target).abs().max() / target.abs().max())
    return float("inf") if math.isnan(error) else error


def _rounding(small: nn.Module, ids: Tensor, start: int) -> float:
    """How far logits differ, of the largest, when every weight is off by a rounding error."""
    expected = _logits(small, ids, start)
    weights = [weight for weight in small.parameters() if weight.is_floating_point()]
    exact = [weight.clone() for weight in weights]
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)
    try:
        return _error(_logits(small, ids, start), expected)
    finally:
        for weight, value in zip(weights, exact, strict=True):
            weight.copy_(value)


def _composed(parts: Description, ids: Tensor, start: int, seen: list[Tensor] | None = None) -> Tensor:
    """The logits of each token, one at a time at first and then several; and those of all as one prompt. The first
    one has the position `start`. `seen` receives the hidden states of the prompt."""
    parts = with_products(parts, _joined)
    tables = make_tables(parts, range(start, start + len(ids)))
    shapes = [(1, len(ids), layer.attention.kv_heads, layer.attention.head_dim) for layer in parts.layers]
    seqlens = torch.zeros(1, dtype=torch.int32)
    zeros = parts.embedding.new_zeros  # of its dtype, whatever the default is
    caches = [LayerCache(zeros(shape), zeros(shape), seqlens) for shape in shapes]
    logits = []
    counts = [1] * WINDOW + [len(ids) - WINDOW - 3, 1, 2]
    for end, count in zip(itertools.accumulate(counts), counts, strict=True):
        hidden = parts.embedding.new_empty(count, parts.embedding.shape[1])
        positions = torch.arange(end - count, end, dtype=torch.int32)[None]  # rows of the tables
        embed(parts, ids[end - count : end], hidden, positions + start)
        seqlens.fill_(end)
        logits.append(forward(parts, hidden, Tokens(1, count, positions, tables), caches))
    hidden = parts.embedding.new_empty(len(ids), parts.embedding.shape[1])
    positions = torch.arange(len(ids), dtype=torch.int32)[None]
    embed(parts, ids, hidden, positions + start)
    tokens = Tokens(1, len(ids), positions, tables, is_prompt=True)
    logits.append(forward(parts, hidden, tokens, caches, seen))
    return torch.cat(logits)


def _joined(product: Product) -> Product:
    weight, bias = (torch.cat(group) if group else None for group in (product.weights, product.biases))
    return Product((), (), weight.t().contiguous() if product.transposed else weight, bias)
