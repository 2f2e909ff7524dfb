"""The decode step of one model on one cache, in a program that any cache of the same shape takes (program.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..model.description import Description
from . import compose
from .attend import Tokens
from .place import Place, place_of
from .program import Program


class DecodeStep:
    """One model on one cache, in a program on loan: the next `ahead` tokens of each sequence.

    `tokens` int64 (B * ahead,) are the last tokens of each sequence, which are not in the cache yet: `run` runs what
    calls `forward`, which appends them to the cache and returns the logits (B * ahead, V) behind each. What is run may
    be recorded, so it calls ops of llmkernels only.
    """

    def __init__(
        self,
        parts: Description,
        cache: Any,
        place: Place,
        program: Program,
        ahead: int = 1,
        note: Callable[[int], None] | None = None,
    ):
        self.program = program
        self.device = parts.weight.device
        self.count = 0  # of the steps that ran
        self.parts = parts
        self._cache = cache
        self._ahead = ahead
        self._note = note  # called with that count
        program.bind(parts)
        weight, self._batch = parts.weight, cache.layers[0].k.shape[0]
        rows = self._batch * ahead
        self.tokens = program.buffer("tokens", (rows,), torch.long, self.device)
        self._hidden = program.buffer("hidden", (rows, weight.shape[1]), weight.dtype, self.device)
        self._positions: Tensor | None = None  # where they are not those of the cache
        if ahead > 1:
            self._positions = program.buffer("positions", (self._batch, ahead), torch.int32, self.device)
        self._move(place)

    def _move(self, place: Place) -> None:
        """Run at this place."""
        self._place, self._caches = place, place.layers
        tables = self.program.tables(place, self._cache.capacity)
        positions = place.positions if self._positions is None else self._positions
        self._where = Tokens(self._batch, self._ahead, positions, tables)

    def forward(self) -> Tensor:
        counts = self._place.counters, self._ahead, self._positions
        compose.embed(self.parts, self.tokens, self._hidden, self._where.positions, *counts)
        return compose.forward(self.parts, self._hidden, self._where, self._caches)

    def run(self, function: Callable[[], Any], tokens: Tensor | None = None) -> Any:
        """What `function`, which calls `forward` once, returns: all tensors of fixed buffers, on CUDA by a graph.

        `tokens`: those that go to the buffer first.
        """
        cache = self._cache
        if cache.make_room(self._ahead):
            self._move(place_of(cache))
        if tokens is not None:
            self.tokens.copy_(tokens)
        with cache.counting(self._ahead):
            result = self.program.run(function, self.device, self._place)
        cache.advance(self._ahead)
        self.count += 1
        if self._note is not None:
            self._note(self.count)
        return result

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits behind the tokens, until the next call."""
        return self.run(self.forward, tokens)
