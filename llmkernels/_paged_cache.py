"""A paged KV cache: sequences get pages as they grow."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llmkernels._checks import check_count


class OutOfPages(RuntimeError):
    """No free page is left. Nothing was changed."""


class _BySequence(dict):
    """What is known of each sequence."""

    def __missing__(self, sequence: Any) -> None:
        raise KeyError(f"PagedKVCache: sequence must be one that was allocated and is not free, got {sequence!r}")


class PagedKVCache:
    r"""Keys and values of every layer in pages, which sequences of any length share.

    A sequence owns ``ceil(length / page_size)`` pages, in the order of its tokens. ``fork`` makes a second sequence on
    the same pages; ``append`` copies a shared page before a sequence gets new tokens in it (copy on write). The page
    numbers are kept on the host.

    Args:
        layers: of the model.
        pages: how many there are, for all sequences together.
        page_size: tokens per page.
        kv_heads, head_dim: of the keys and values.
        dtype, device: of the pages.

    Attributes:
        k, v: the pages of each layer, a list of (pages, page_size, kv_heads, head_dim).

    Layout: the block table of a batch is int32 (B, width), padded with 0. Token t of sequence b lies in page
        ``table[b, t // page_size]`` at row ``t % page_size``.
    Raises: OutOfPages when a sequence can not grow, KeyError for an unknown sequence, IndexError for an unknown layer.
    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".

    >>> cache = PagedKVCache(layers=28, pages=4096, page_size=16, kv_heads=4, head_dim=128)
    >>> sequence = cache.allocate()
    >>> cache.append(sequence, 7)
    >>> cache.write(0, [sequence], k, v)  # (1, 7, kv_heads, head_dim)
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ):
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, value in sizes.items():
            check_count(f"PagedKVCache: {name}", value)
        shape = pages, page_size, kv_heads, head_dim
        with torch.inference_mode(False):
            self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
            self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))  # the last one is taken first
        self._owners: Counter[int] = Counter()  # by page
        self._pages: dict[int, list[int]] = _BySequence()
        self._length: dict[int, int] = _BySequence()
        self._next = 0  # the name of the next sequence

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> list[int]:
        return list(self._pages)

    def length(self, sequence: int) -> int:
        return self._length[sequence]

    def pages(self, sequence: int) -> tuple[int, ...]:
        return tuple(self._pages[sequence])

    def allocate(self) -> int:
        """A new, empty sequence."""
        sequence, self._next = self._next, self._next + 1
        self._pages[sequence], self._length[sequence] = [], 0
        return sequence

    def free(self, sequence: int) -> None:
        """Forget a sequence. Those of its pages that no other sequence owns are free again."""
        pages = self._pages[sequence]
        del self._pages[sequence], self._length[sequence]
        for page in reversed(pages):
            self._release(page)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages."""
        pages, length = list(self._pages[sequence]), self._length[sequence]
        fork = self.allocate()
        self._pages[fork], self._length[fork] = pages, length
        self._owners.update(pages)
        return fork

    def append(self, sequence: int, tokens: int = 1) -> None:
        """Make room for `tokens` more at the end of a sequence; `write` fills it.

        If the last page has room but is shared, it is copied first.
        """
        check_count("PagedKVCache.append: tokens", tokens, least=0)
        pages, length = self._pages[sequence], self._length[sequence]
        shared = tokens > 0 and length % self.page_size != 0 and self._owners[pages[-1]] > 1
        needed = -(-(length + tokens) // self.page_size) - len(pages) + shared
        if needed > len(self._free):
            raise OutOfPages(
                f"PagedKVCache: sequence {sequence} must find {needed} free pages for {tokens} more tokens, "
                f"got {len(self._free)} of {len(self.k[0])}"
            )
        taken = [self._free.pop() for _ in range(needed)]
        self._owners.update(taken)
        if shared:
            copy, *taken = taken
            for buffer in (*self.k, *self.v):
                buffer[copy].copy_(buffer[pages[-1]])
            self._release(pages[-1])
            pages[-1] = copy
        pages += taken
        self._length[sequence] = length + tokens

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens."""
        check_count("PagedKVCache.truncate: length", length, 0)
        if length > self._length[sequence]:
            raise ValueError(f"PagedKVCache.truncate: length must be from 0 to {self._length[sequence]}, got {length}")
        pages, kept = self._pages[sequence], -(-length // self.page_size)
        for page in reversed(pages[kept:]):
            self._release(page)
        del pages[kept:]
        self._length[sequence] = length

    def cache_seqlens(self, sequences: list[int]) -> Tensor:
        """int32 (B,) on the device."""
        sequences = _listed("cache_seqlens", sequences)
        return self._to_device([self._length[sequence] for sequence in sequences])

    def block_table(self, sequences: list[int], width: int | None = None) -> Tensor:
        """int32 (B, width) on the device; `width` defaults to the most pages of a sequence."""
        rows = [self._pages[sequence] for sequence in _listed("block_table", sequences)]
        longest = max(map(len, rows), default=0)
        width = longest if width is None else width
        check_count("PagedKVCache.block_table: width", width, 0)
        if width < longest:
            raise ValueError(f"PagedKVCache.block_table: width must be at least {longest}, got {width}")
        # Padded with a page that exists, so that an address computed before the check against the length is valid.
        return self._to_device([row + [0] * (width - len(row)) for row in rows]).view(len(rows), width)

    def write(self, layer: int, sequences: list[int], k: Tensor, v: Tensor) -> None:
        """Store the keys and values, (B, T, kv_heads, head_dim), of the last T tokens of each sequence.

        They are cast to the dtype of the cache.
        Raises: RuntimeError for a k or v of another shape or device, or that requires a gradient; ValueError when a
            sequence has fewer tokens or is there twice, or one of these tokens lies in a shared page. Nothing is
            written then.
        """
        self._check_layer("write", layer)
        sequences = _listed("write", sequences)
        self._check(sequences, k, v)
        rows = []
        for sequence in sequences:
            length, pages = self._length[sequence], self._pages[sequence]
            if length < k.shape[1]:
                raise ValueError(
                    f"PagedKVCache.write: sequence {sequence} must have {k.shape[1]} tokens, got {length}; append first"
                )
            first = length - k.shape[1]
            if any(self._owners[page] > 1 for page in pages[first // self.page_size :] if k.shape[1]):
                raise ValueError(f"PagedKVCache.write: the tokens of sequence {sequence} must be its own, got shared")
            rows.append([self._row(pages, token) for token in range(first, length)])
        index = self._to_device(rows, torch.long).flatten()
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            buffer.flatten(0, 1).index_copy_(0, index, new.flatten(0, 1).to(buffer.dtype))

    def read(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of one sequence, (length, kv_heads, head_dim)."""
        self._check_layer("read", layer)
        pages = self._pages[sequence]
        index = self._to_device([self._row(pages, token) for token in range(self._length[sequence])], torch.long)
        return self.k[layer].flatten(0, 1)[index], self.v[layer].flatten(0, 1)[index]

    def _check(self, sequences: list[int], k: Tensor, v: Tensor) -> None:
        for name, states in (("k", k), ("v", v)):
            if not isinstance(states, Tensor):
                raise TypeError(f"PagedKVCache.write: {name} must be a tensor, got {type(states).__name__}")
            pages = self.k[0]
            tokens = k.shape[1] if k.ndim == 4 else 1
            expected = (len(sequences), tokens, *pages.shape[2:])
            if states.shape != expected or states.device != pages.device:
                raise RuntimeError(
                    f"PagedKVCache.write: {name} must have shape {expected} on {pages.device}, "
                    f"got {tuple(states.shape)} on {states.device}"
                )
            if torch.is_grad_enabled() and states.requires_grad:  # else the pages would keep its graph
                raise RuntimeError(f"PagedKVCache.write: {name} must not require a gradient; use torch.no_grad()")
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"PagedKVCache.write: sequences must differ, got {sequences}")

    def _check_layer(self, method: str, layer: int) -> None:
        check_count(f"PagedKVCache.{method}: layer", layer, -math.inf)
        if not -len(self.k) <= layer < len(self.k):
            raise IndexError(
                f"PagedKVCache.{method}: layer must be from {-len(self.k)} to {len(self.k) - 1}, got {layer}"
            )

    def _row(self, pages: list[int], token: int) -> int:
        return pages[token // self.page_size] * self.page_size + token % self.page_size

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            del self._owners[page]
            self._free.append(page)

    def _to_device(self, numbers: list, dtype: torch.dtype = torch.int32) -> Tensor:
        device = self.k[0].device
        tensor = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        return tensor.to(device, non_blocking=True)

    def __repr__(self) -> str:
        used = len(self.k[0]) - len(self._free)
        return f"PagedKVCache({len(self._pages)} sequences, {used} of {len(self.k[0])} pages of {self.page_size})"


def _listed(method: str, sequences: Any) -> list:
    if not isinstance(sequences, Iterable):
        raise TypeError(f"PagedKVCache.{method}: sequences must be a list, got {sequences!r}")
    return list(sequences)
