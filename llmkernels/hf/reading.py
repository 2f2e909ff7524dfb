"""What the loops around the decode step share: the text so far, and reading on the host what a step decided.

On CUDA the next step is queued before the host has read whether there is to be one, so that the device need not wait;
one that was not wanted is taken back. What a user's code sees of a step, processors and criteria, runs only after the
host knows that the step counts. Source of the idea: transformers' DeferredStopCheck, which does it on MPS.
"""

import torch
from torch import Tensor, nn


class Text:
    """The tokens so far, int64, in a buffer that is appended to.

    With `copies` they are a new tensor for every token, as in transformers: code that we do not know may need them
    contiguous, may keep what it gets, and may write into it.
    """

    def __init__(self, ids: Tensor, limit: int, copies: bool = False):
        self.length = ids.shape[1]
        self._copies = copies
        self._ids = ids
        if not copies:
            size = max(min(limit, self.length + 4096), self.length + 1)
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
        """The tokens as processors and criteria get them: rows may be further apart than they are long."""
        return self._ids[:, : self.length]

    def last(self) -> Tensor:
        """The tokens (B,) that the next step takes: those chosen, unless somebody has written over them."""
        return self._ids[:, self.length - 1]

    def result(self) -> Tensor:
        """All tokens, with no more memory than they take."""
        text = self.read()
        return text if text.untyped_storage().nbytes() == text.nbytes else text.clone()


def is_late(device: torch.device) -> bool:
    """Whether a step is queued before it is known that it is wanted."""
    return device.type == "cuda"


class Reading:
    """The tokens of a step and a number, on their way to the host."""

    def __init__(self, tokens: Tensor, number: Tensor):
        self._tensors = tokens.detach(), number.detach()
        self._event = None
        if tokens.is_cuda:
            self._tensors = tuple(self._start(x) for x in self._tensors)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tokens.device))

    @staticmethod
    def _start(x: Tensor) -> Tensor:
        # Said in full: the default device may be another one.
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

    def wait(self) -> tuple[Tensor, int]:
        if self._event is not None:
            self._event.synchronize()
        tokens, number = self._tensors
        return tokens.cpu(), int(number)
