"""What the loops around the decode step share: the text so far, and reading what a step decided.

On CUDA that is read one step late, so that the next step is queued before the last one is done; whoever reads so undoes
the step too many. Source of that: transformers' DeferredStopCheck, which does it on MPS.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Text:
    """The tokens so far, in a buffer that is appended to."""

    def __init__(self, ids: Tensor, limit: int, copies: bool = False):
        self.length = ids.shape[1]
        self._copies = copies
        self._ids = ids.new_empty(len(ids), max(min(limit, self.length + 4096), self.length + 1))
        self._ids[:, : self.length] = ids

    def append(self, tokens: Tensor) -> None:
        if self.length == self._ids.shape[1]:
            self._ids = nn.functional.pad(self._ids, (0, self.length))
        self._ids[:, self.length] = tokens
        self.length += 1

    def read(self) -> Tensor:
        """The tokens as processors and criteria get them: rows may be further apart than they are long."""
        ids = self._ids[:, : self.length]
        return ids.clone(memory_format=torch.contiguous_format) if self._copies else ids

    def result(self) -> Tensor:
        return self._ids[:, : self.length].contiguous()


def is_late(device: torch.device) -> bool:
    return device.type == "cuda"


class Reader:
    """Brings the tokens of a step and a number to the host, one step late where that saves a wait."""

    def __init__(self, device: torch.device, late: bool):
        self._late = late
        self._cuda = device.type == "cuda"
        self._under_way: list[tuple[Tensor, Tensor, Any]] = []

    @property
    def pending(self) -> int:
        return len(self._under_way)

    def put(self, tokens: Tensor, number: Tensor) -> list[tuple[Tensor, int]]:
        """Start reading a step; returns those that are there, oldest first."""
        copies = [self._copy(x) for x in (tokens, number)]
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tokens.device))
        self._under_way.append((*copies, event))
        return self._take(1 if self._late else 0)

    def flush(self) -> list[tuple[Tensor, int]]:
        return self._take(0)

    def _take(self, left: int) -> list[tuple[Tensor, int]]:
        done = []
        while len(self._under_way) > left:
            tokens, number, event = self._under_way.pop(0)
            if event is not None:
                event.synchronize()
            done.append((tokens, int(number)))
        return done

    def _copy(self, x: Tensor) -> Tensor:
        if not self._cuda:
            return x.detach().clone()
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
