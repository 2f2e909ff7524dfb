"""Shared by the loops around the decode step: the tokens so far, asynchronous copies of results to the host, and the
turn to the next step.

On CUDA the next step is queued before the host has read the stop flag of the last one, so that the device does not
wait. If the text had ended, that step is undone. The user's code (processors, criteria) is called for a step only when
the host knows that it counts. Idea: transformers' DeferredStopCheck, which does this on MPS.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Text:
    """The tokens so far, int64, in a buffer with room for more.

    With `copies` every token makes a new tensor, as in transformers: the user's code may need a contiguous tensor, may
    keep it, and may write to it.
    """

    def __init__(self, ids: Tensor, limit: float, copies: bool = False):
        self.length = ids.shape[1]
        self._copies = copies
        self._ids = ids
        if not copies:
            size = max(math.ceil(min(limit, self.length + 4096)), self.length + 1)
            self._ids = torch.empty(len(ids), size, dtype=torch.long, device=ids.device)
            self._ids[:, : self.length] = ids

    def append(self, tokens: Tensor) -> None:
        if self._copies:
            self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        else:
            if self.length == self._ids.shape[1]:
                self._ids = nn.functional.pad(self._ids, (0, self.length))
            self._ids[:, self.length] = tokens
        self.length += 1

    def read(self) -> Tensor:
        """The tokens, as processors and criteria get them. Rows may be longer in memory than in the tensor."""
        return self._ids[:, : self.length]

    def last(self) -> Tensor:
        """The tokens (B,) that the next step takes: those chosen, or what the user's code has written over them."""
        return self._ids[:, self.length - 1]

    def result(self) -> Tensor:
        """All tokens, with no more memory than they take."""
        text = self.read()
        return text if text.untyped_storage().nbytes() == text.nbytes else text.clone()


def is_late(device: torch.device) -> bool:
    """Whether a step is queued before the host has read the stop flag of the last one."""
    return device.type == "cuda"


class Reading:
    """An asynchronous copy of small tensors to the host. Nothing may write to them before wait() has returned.

    In a stream of its own, beside what the caller's goes on with: one that goes from a kernel to a copy and back takes
    8 us on an H200, in which it does nothing else. `later` computes further tensors, of what there is now; then all of
    it begins in wait(), so that the host can launch something else first.
    """

    def __init__(self, *tensors: Tensor, later: Callable[[], Sequence[Tensor]] | None = None):
        self._tensors = [tensor.detach() for tensor in tensors]  # until wait(): their memory must stay theirs
        self._later = later
        self._copies: list[Tensor] = []
        self._event = None
        if tensors[0].is_cuda:
            stream = torch.cuda.current_stream(tensors[0].device)
            self._beside = stream_beside(stream.device_index, stream.cuda_stream, "copies")
            self._event = stream.record_event()
            if later is None:
                self._begin()

    def _begin(self) -> None:
        with torch.cuda.stream(self._beside):
            self._beside.wait_event(self._event)
            self._copies = [_on_host(tensor) for tensor in self._all()]
            self._event = self._beside.record_event()

    def _all(self) -> list[Tensor]:
        if self._later is not None:
            self._tensors += self._later()
        return self._tensors

    def wait(self) -> list[Tensor]:
        if self._event is None:
            return [tensor.cpu() for tensor in self._all()]
        if not self._copies:
            self._begin()
        self._event.synchronize()
        return self._copies


def _on_host(x: Tensor) -> Tensor:
    # With the device, since torch.set_default_device() may have set another one.
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


@functools.lru_cache(maxsize=128)
def stream_beside(device: int, handle: int, work: str) -> torch.cuda.Stream:
    """The stream for some work beside another stream. One for all would let a thread wait for what others compute."""
    return torch.cuda.Stream(device)


def next_turn(
    step: Callable[[], Tensor], decision: Reading, streamer: Any, late_cache: Any = None, more: bool = True
) -> Tensor | None:
    """What the next step returns, or None where the loop ends: as `decision` has it, which reads the tokens for the
    streamer and whether to go on, or where no `more` tokens are wanted.

    With a `late_cache`, where it has room, the step is queued before the host waits, and taken back if unwanted.
    """
    ahead = more and late_cache is not None and late_cache.has_room(1)
    result = step() if ahead else None
    going = False  # and so it is when the streamer raises
    try:
        tokens, goes_on = decision.wait()
        if streamer is not None:
            streamer.put(tokens)
        going = more and bool(goes_on)
    finally:
        if ahead and not going:
            late_cache.take_back(1)
    if not going:
        return None
    return result if ahead else step()
