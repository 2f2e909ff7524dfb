"""The forward of continuous batching (`generate_batch`): what the scheduler of transformers has put together, by
step/batch.py.

The modules run models whose layers have windows, for which transformers has pages of another kind, and what calls the
kernels of flash-attn with a table of blocks, in CUDA graphs of transformers.
"""

from typing import Any

from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.utils import ModelOutput

from ..errors import NoStep
from ..model.description import Description
from ..report import STEP
from ..step import batch as batches
from ..step.batch import Batch
from ..step.decode import Decoder
from ..step.describe import check_length
from ..step.prompt import check_attention
from .call import as_returned, check_call, description, output
from .positions import check_ids
from .reading import Reading, is_late

DEVICES: set[str] = set()  # has not run on a GPU yet, and on a CPU the modules are as fast
# What such a forward is given, and need not be looked at: masks say again which keys a token sees.
_KNOWN = {"cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"}
_KNOWN |= {"read_index", "write_index", "logits_indices", "logits_processor_args", "is_causal"}
_NO_WINDOW = 1  # of transformers 5.17
_WINDOWS = "layers with windows in continuous batching"


def is_batch(given: dict[str, Any]) -> bool:
    """Whether a forward is one of continuous batching."""
    return type(given.get("cache")) is PagedAttentionCache


def by_batch(model: nn.Module, state: Decoder, given: dict[str, Any]) -> ModelOutput:
    """The output of such a forward. Raises NoStep, and then the modules write what this has written."""
    ids = given["input_ids"]
    if ids.device.type not in DEVICES:
        raise NoStep(f"continuous batching on {ids.device.type}")
    check_call(model, {name: value for name, value in given.items() if name != "cache"}, _KNOWN)
    parts, _memory = description(model, state, ids)
    batch, kept = _batch(parts, given), given.get("logits_to_keep")
    reading, late = Reading(batch.ids, batch.positions), is_late(ids.device)
    if not late:
        _check(parts, batch, reading)
    logits = batches.run(parts, batch, kept if isinstance(kept, Tensor) else None, state.lend)
    if late:  # what has been written the modules write again
        _check(parts, batch, reading)
    state.count_forward(STEP)
    return output(parts, {"logits": as_returned(parts, logits)[None]})


def _batch(parts: Description, given: dict[str, Any]) -> Batch:
    """Raises NoStep for what only the modules take."""
    ids, positions, kept = given["input_ids"], given.get("position_ids"), given.get("logits_to_keep", 0)
    if len(ids) != 1 or not isinstance(positions, Tensor) or positions.shape != ids.shape or parts.grids is not None:
        raise NoStep("position_ids are not (1, tokens)")
    if not isinstance(kept, Tensor) and kept != 0:
        raise NoStep("logits_to_keep is no tensor")
    check_attention(parts)
    pages = [_pages(given["cache"], index) for index in range(len(parts.layers))]
    group, stride, *_ = pages[0]
    for (of_layer, _, *buffers), layer in zip(pages, parts.layers, strict=True):
        expected = layer.attention.kv_heads, layer.attention.head_dim
        if layer.attention.window_left >= 0:
            raise NoStep(_WINDOWS)
        if of_layer != group or any(x.shape[2:] != expected or x.dtype != parts.weight.dtype for x in buffers):
            raise NoStep("the cache was made for other keys and values")
    longest = _of_all(given.get("max_seqlen_k", given.get("max_length_k")))
    check_length(parts, longest)
    reads, writes = (given[name][group] for name in ("read_index", "write_index"))
    return Batch(
        ids=ids[0],
        positions=positions[0],
        begins=given["cu_seq_lens_q"],
        key_begins=_of_all(given["cu_seq_lens_k"]),
        longest=longest,
        reads=(reads // stride, reads % stride) if reads.numel() else None,
        writes=(writes // stride, writes % stride),
        pages=[(k, v) for *_, k, v in pages],
    )


def _check(parts: Description, batch: Batch, reading: Reading) -> None:
    """Raise NoStep for positions that are not those of the keys, and IndexError for ids of no token."""
    ids, positions = reading.wait()
    check_ids(*map(int, ids.aminmax()), len(parts.embedding))
    lowest, highest = positions.aminmax()
    if lowest < 0 or highest >= batch.longest:
        raise NoStep("position_ids run ahead of the tokens")


def _of_all(found: Any) -> Any:
    """That of layers without a window, where each kind of layer has its own."""
    return found["full_attention"] if isinstance(found, dict) else found


def _pages(cache: Any, layer: int) -> tuple[int, int, Tensor, Tensor]:
    """The group of a layer, which has indices of its own; how far they are apart from page to page; and its keys and
    values (pages, tokens, kv_heads, D)."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        if type(allocator).__name__ != "FullAttentionCacheAllocator":
            raise NoStep(_WINDOWS)
        # Between the pages of a layer are those of others.
        stride = allocator.block_physical_stride
        k, v = (x[:: stride // x.shape[1]] for x in allocator.get_cache_for_block_table(layer))
        return allocator.index, stride, k[: len(v)], v
    if cache.sliding_windows[layer] != _NO_WINDOW:
        raise NoStep(_WINDOWS)
    group, place = cache.layer_index_to_group_indices[layer]
    k, v = (x[place].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    return group, cache.block_size, k, v
