"""The keys and values of one layer in buffers, which a decode step writes: of a KVCache or a caller's own cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STEP = 64  # the capacity of a cache that grows is a multiple of this
FIRST_TOKENS = 192  # it has room ahead for as many tokens as it has, and at least for this many;
AHEAD_TOKENS = 2048  # but at most for this many,
AHEAD_BYTES = 512 << 20  # of at most this size, or for a quarter of its tokens if that is more


def room_for(tokens: int, row_bytes: int, limit: int | None = None) -> int:
    """The capacity of a cache that has `tokens` and may grow up to `limit`.

    `row_bytes` is the size of one token in all layers and sequences. The room ahead is in proportion to the tokens, so
    that moves to larger buffers stay a small part of the time at any length. Where there is a limit, which will be
    reached soon, the first move is farther away. Where there is none, capacities are four in an octave, since caches of
    one capacity share a graph; but not for more than AHEAD_BYTES.
    """
    ahead = AHEAD_TOKENS if limit is not None else min(max(tokens, FIRST_TOKENS), AHEAD_TOKENS)
    room = tokens + max(tokens // 4, min(ahead, AHEAD_BYTES // max(row_bytes, 1)), 1)
    if limit is not None:
        return _up(min(room, max(limit, tokens)), STEP)
    step = max(STEP, 1 << (room.bit_length() - 3))
    return _up(room, step if step * row_bytes <= AHEAD_BYTES else STEP)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


class Buffers:
    """The keys and values of one layer: buffers `k` and `v` (B, capacity, Hkv, D), filled with `length` tokens.

    Token t is in row t - offset, which is not 0 for layers that drop tokens.
    """

    __slots__ = ()  # so that a layer of transformers can become one

    k: Tensor | None
    v: Tensor | None
    capacity: int
    length: int
    offset: int
    grows: bool
    layers: int  # of the cache; they grow together
    is_shown = False  # someone may keep views of the buffers: what they hold is not overwritten
    window: int | None = None  # how many tokens a query sees, its own included, where the others are dropped

    @property
    def nbytes(self) -> int:
        return 0 if self.k is None else self.k.nbytes + self.v.nbytes

    @property
    def start(self) -> int:
        """The first token that is held."""
        return 0

    @property
    def rows(self) -> int:
        """How many tokens the buffers hold."""
        return self.capacity

    @property
    def end(self) -> int:
        """The number of tokens up to which there is room."""
        return self.capacity

    def views(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, end - start, D) of these tokens."""
        rows = slice(start - self.offset, end - self.offset)
        return self.k[:, rows].transpose(1, 2), self.v[:, rows].transpose(1, 2)

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, Hkv, T, D) keys and values that fit; returns them behind those that were held."""
        start = self.start
        self.make_room(key_states.shape[2])
        first, end = self.length, self.length + key_states.shape[2]
        k, v = self.views(first, end)
        k.copy_(key_states)
        v.copy_(value_states)
        self.length = end
        return (k, v) if start == first else self.views(start, end)

    def make_room(self, tokens: int) -> bool:
        """Make room for more tokens. A layer that grows moves to new buffers if needed; any other raises ValueError.

        Returns whether the capacity or the buffers are others. Where there is no memory, nothing changes.
        """
        needed = self.length + tokens
        if needed <= self.end:
            return False
        before, capacity = (self.capacity, self.k), self._capacity_for(needed)
        if self.k is not None:
            self._move_for(needed, capacity)
        self.capacity = capacity
        return before[0] != capacity or before[1] is not self.k

    def _move_for(self, needed: int, capacity: int) -> None:
        """Move to where there is room for so many tokens."""
        self._move(slice(None), capacity)

    def _capacity_for(self, needed: int) -> int:
        if needed <= self.capacity:
            return self.capacity
        if not self.grows:
            raise ValueError(
                f"KVCache: capacity must be at least {needed} tokens ({self.length} live, {needed - self.length} new), "
                f"got {self.capacity}"
            )
        return room_for(needed, self.nbytes * self.layers // self.rows)

    def _move(self, index: Any, rows: int) -> None:
        """Move the tokens of these sequences to buffers of so many rows."""
        self.k, self.v = self._moved(self.k, index, rows), self._moved(self.v, index, rows)

    def _moved(self, buffer: Tensor, index: Any, rows: int) -> Tensor:
        return filled(buffer[index, : self.length - self.offset].transpose(1, 2), rows)

    def _rows_for(self, capacity: int, least: int = 0) -> int:
        """How many rows new buffers have for a capacity, `least` of them to be used at once."""
        return capacity

    def reorder(self, index: Tensor) -> None:
        """The same number of sequences, in another order, in place: CUDA graphs have the addresses."""
        for buffer in (self.k, self.v):
            live = buffer[:, : self.length - self.offset]
            live.copy_(live.index_select(0, index.to(buffer.device)))


class WindowBuffers(Buffers):
    """The same for a layer whose queries see `sliding_window` tokens, their own included: the others are dropped.

    The buffers have rows for the window and some more. When these are used up, the window moves to the first rows,
    which leaves the buffers where they are, and the graphs valid that have their addresses.
    """

    __slots__ = ()

    sliding_window: int
    spare = 0  # how many tokens are kept besides those that the next query sees

    @property
    def window(self) -> int:
        return self.sliding_window

    @property
    def start(self) -> int:
        return max(self.offset, self.length - self.sliding_window + 1)

    @property
    def _first_kept(self) -> int:
        return max(self.offset, self.start - self.spare)

    @property
    def rows(self) -> int:
        return self._rows_for(self.capacity) if self.k is None else self.k.size(1)

    @property
    def end(self) -> int:
        return min(self.capacity, self.offset + self.rows)

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        states, end = (key_states, value_states), self.length + key_states.shape[2]
        if end - self._first_kept <= _with_slack(self.sliding_window):
            return super().append(*states)
        if self.start < self.length:
            states = [torch.cat(pair, 2) for pair in zip(self.views(self.start, self.length), states, strict=True)]
        capacity, start = self._capacity_for(end), end - self.sliding_window + 1 - self.spare
        self._place([x[:, :, x.shape[2] - (end - start) :] for x in states], start, self._rows_for(capacity))
        self.capacity = capacity
        return tuple(states)

    def _move_for(self, needed: int, capacity: int) -> None:
        start = self._first_kept
        # Copies, since rows that overlap can not be copied at once.
        held = [x.clone() for x in self.views(start, self.length)]
        self._place(held, start, self._rows_for(capacity, needed - start))

    def _place(self, states: Sequence[Tensor], first: int, rows: int) -> None:
        """Hold these keys and values (B, Hkv, T, D) and no others: `first` is the first token. In place, unless more
        rows are needed or someone may keep what is there. Buffers never have fewer rows than before: layers of one
        window have as many, and drop tokens together."""
        buffers = self.k, self.v
        if rows > self.rows or self.is_shown:
            buffers = [zeros_for(x, max(rows, self.rows)) for x in states]
            self.is_shown = False
        for buffer, x in zip(buffers, states, strict=True):
            buffer[:, : x.shape[2]].copy_(x.transpose(1, 2))
        self.k, self.v = buffers
        self.offset, self.length = first, first + states[0].shape[2]

    def _rows_for(self, capacity: int, least: int = 0) -> int:
        rows = _with_slack(self.sliding_window)
        return min(capacity, rows if least <= rows else _with_slack(least))


def _with_slack(tokens: int) -> int:
    """As many rows, and some more: moves of the window to the first rows are rare, and there is room for a step."""
    return tokens + max(tokens // 4, STEP)


def zeros_for(x: Tensor, capacity: int) -> Tensor:
    """A buffer of so many rows for keys or values like these, (B, Hkv, T, D)."""
    batch, heads, _, dim = x.shape
    # Zeros: memory beyond the length may be read, and must not be NaN.
    with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
        return torch.zeros(batch, capacity, heads, dim, dtype=x.dtype, device=x.device)


def filled(x: Tensor, capacity: int) -> Tensor:
    """The same with these keys or values in its first rows."""
    buffer = zeros_for(x, capacity)
    if tokens := x.shape[2]:
        buffer[:, :tokens].copy_(x.transpose(1, 2))
    return buffer
