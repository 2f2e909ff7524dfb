"""The forward of continuous batching (`generate_batch`): what the scheduler of transformers has put together, by
step/batch.py.

The modules run what calls the kernels of flash-attn with a table of blocks, in CUDA graphs of transformers.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.utils import ModelOutput

from ..attention import PAGED
from ..errors import NoStep
from ..model.description import Description
from ..model.reference import attention_name
from ..report import STEP
from ..step import batch as batches
from ..step.batch import Batch, Group
from ..step.decode import Decoder
from ..step.describe import check_length
from ..step.prompt import check_attention
from .call import as_returned, check_call, description, output
from .positions import check_ids
from .reading import Reading, is_late

DEVICES = {"cuda"}  # on a CPU the modules are as fast
# What such a forward is given, and need not be looked at: masks say again which keys a token sees.
_KNOWN = {"cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"}
_KNOWN |= {"read_index", "write_index", "logits_indices", "logits_processor_args", "is_causal"}
_NO_WINDOW = 1  # of transformers 5.17
_ALLOCATORS = {"FullAttentionCacheAllocator", "SlidingAttentionCacheAllocator"}  # of later ones


def is_batch(given: dict[str, Any]) -> bool:
    """Whether a forward is one of continuous batching."""
    return type(given.get("cache")) is PagedAttentionCache


def by_batch(model: nn.Module, state: Decoder, given: dict[str, Any]) -> ModelOutput:
    """The output of such a forward. Raises NoStep, and then the modules can run it."""
    ids = given["input_ids"]
    if ids.device.type not in DEVICES:
        raise NoStep(f"continuous batching on {ids.device.type}")
    check_call(model, {name: value for name, value in given.items() if name != "cache"}, _KNOWN)
    if ids.is_cuda:  # where transformers writes the arguments, without waiting for that
        torch.cuda.current_stream(ids.device).wait_stream(torch.cuda.default_stream(ids.device))
    parts, _memory = description(model, state, ids)
    has_softcaps = attention_name(model.config) == PAGED
    batch, kept = _batch(parts, given, has_softcaps), given.get("logits_to_keep")
    kept = kept if isinstance(kept, Tensor) else None
    group = batch.layers[0][0]
    reading = Reading(batch.ids, batch.positions, group.begins)
    # The modules can write again what this has written; but not read what was in the pages of windows before.
    if is_late(ids.device) and not any(group.window for group, *_ in batch.layers):
        logits = batches.run(parts, batch, group.longest, kept, state.lend)
        _check(parts, batch, reading)
    else:
        logits = batches.run(parts, batch, _check(parts, batch, reading), kept, state.lend)
    state.count(state.forwards, STEP)
    return output(parts, {"logits": as_returned(parts, logits)[None]})


def _batch(parts: Description, given: dict[str, Any], has_softcaps: bool) -> Batch:
    """Raises NoStep for what only the modules take. `has_softcaps`: their attention does not leave them out."""
    ids, positions, kept = given["input_ids"], given.get("position_ids"), given.get("logits_to_keep", 0)
    if len(ids) != 1 or not isinstance(positions, Tensor) or positions.shape != ids.shape:
        raise NoStep("position_ids are not (1, tokens)")
    if not isinstance(kept, Tensor) and kept != 0:
        raise NoStep("logits_to_keep is no tensor")
    begins, most = given["cu_seq_lens_q"], given.get("max_seqlen_q", given.get("max_length_q"))
    if len(begins) > 2 and most == ids.shape[1]:  # where one of several requests seems to have all tokens
        raise NoStep("batches padded for CUDA graphs of transformers")
    check_attention(parts)
    pages_of_layers, place = _layers_of(given["cache"])
    if len(pages_of_layers) != len(parts.layers):
        raise NoStep("the cache was made for other keys and values")
    groups: dict[int, Group] = {}
    layers = []
    for pages, layer in zip(pages_of_layers, parts.layers, strict=True):
        expected = layer.attention.kv_heads, layer.attention.head_dim
        if any(x.shape[2:] != expected or x.dtype != parts.weight.dtype for x in (pages.k, pages.v)):
            raise NoStep("the cache was made for other keys and values")
        if layer.attention.softcap and not has_softcaps:  # which that of transformers leaves out there
            raise NoStep("softcaps in continuous batching")
        if layer.attention.window_left == 0:  # masks of transformers take it for no window, and its pages for one
            raise NoStep("windows of one token in continuous batching")
        if pages.group not in groups:
            groups[pages.group] = _group(given, pages)
        layers.append((groups[pages.group], pages.k, pages.v))
    return Batch(ids[0], positions[0], begins, most, layers, place)


def _check(parts: Description, batch: Batch, reading: Reading) -> int:
    """How many tokens the longest text has. Raises IndexError for ids of no token; NoStep for positions that are
    negative, or too far for the model, or in a step not those behind the keys."""
    ids, positions, begins = reading.wait()
    check_ids(*map(int, ids.aminmax()), len(parts.embedding))
    lowest, highest = map(int, positions.aminmax())
    if lowest < 0 or (batch.is_step(parts) and not _are_last(positions, begins.diff(), batch.layers[0][0].window)):
        raise NoStep("position_ids are not those of the last tokens")
    check_length(parts, highest + 1)
    return highest + 1


def _are_last(positions: Tensor, keys: Tensor, window: int) -> bool:
    """Whether each is behind all keys that a request had, of which a window keeps the last."""
    return torch.equal((positions + 1).clamp(max=window) if window else positions + 1, keys)


class _Pages(NamedTuple):
    """The keys and values of a layer, (pages, tokens, kv_heads, D): which indices are its own, how many keys of a
    request are kept in a window, or 0, and how far the pages are apart."""

    k: Tensor
    v: Tensor
    group: int
    window: int
    stride: int


_LAYERS: weakref.WeakKeyDictionary[PagedAttentionCache, tuple[list[_Pages], tuple]] = weakref.WeakKeyDictionary()


def _layers_of(cache: PagedAttentionCache) -> tuple[list[_Pages], tuple]:
    """The pages of all layers, and where they are."""
    if (known := _LAYERS.get(cache)) is None:
        count = len(cache.layer_to_allocator if _has_allocators(cache) else cache.layer_index_to_group_indices)
        pages = [_pages(cache, layer) for layer in range(count)]
        place = tuple((x.data_ptr(), x.shape, x.stride()) for one in pages for x in (one.k, one.v))
        known = _LAYERS[cache] = pages, place
    return known


def _has_allocators(cache: PagedAttentionCache) -> bool:
    """As from transformers 5.18 on."""
    return hasattr(cache, "layer_to_allocator")


def _pages(cache: PagedAttentionCache, layer: int) -> _Pages:
    if _has_allocators(cache):
        allocator = cache.layer_to_allocator[layer]
        pages = getattr(allocator, "_kv_page_views", None)
        if type(allocator).__name__ not in _ALLOCATORS or pages is None:
            raise NoStep(f"pages of a {type(allocator).__name__}")
        # Between the pages of a layer are those of others.
        stride = allocator.block_physical_stride
        k, v = (x[:: stride // x.shape[1]] for x in pages[layer])
        return _Pages(k[: len(v)], v, allocator.index, getattr(allocator, "sliding_window", 0), stride)
    group, place = cache.layer_index_to_group_indices[layer]
    k, v = (x[place].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    window = cache.sliding_windows[layer]
    return _Pages(k, v, group, 0 if window == _NO_WINDOW else window, cache.block_size)


def _group(given: dict[str, Any], pages: _Pages) -> Group:
    begins, longest = given["cu_seq_lens_k"], given.get("max_seqlen_k", given.get("max_length_k"))
    if isinstance(begins, dict):
        kind = "sliding_attention" if pages.window else "full_attention"
        begins, longest = begins[kind], longest[kind]
    reads, writes = (given[name][pages.group] for name in ("read_index", "write_index"))
    if reads.numel():
        reads = torch.cat((reads, reads[-1:]))  # one more, where tokens of no request have their keys
    places = [(x // pages.stride, x % pages.stride) if x.numel() else None for x in (reads, writes)]
    return Group(begins, *places, longest, pages.window)
