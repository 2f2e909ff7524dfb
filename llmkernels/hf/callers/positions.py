"""Where the new tokens of a forward are, by its mask and positions."""

from typing import Any

import torch
from torch import Tensor

from ..errors import NoStep
from .reading import Reading

BAD_MASK = "attention_mask masks more than padding on the left"
BAD_MASK_OF_A_PROMPT = "attention_mask masks more than padding on the left and on the right"
LOSS_OF_PADDING = "labels behind padding, whose first token is predicted by it"
_BAD_POSITIONS = "position_ids do not follow each other, or run ahead of the tokens"
_NO_END = "no sequence ends before the last token"  # no reason against a step


def check_ids(least: int, largest: int, vocabulary: int) -> None:
    """Raise IndexError for ids of no token, whose embeddings would be NaN."""
    if least < 0 or largest >= vocabulary:
        raise IndexError("index out of range in self")  # as torch.nn.functional.embedding has it


class Positions:
    """Where the new tokens of a forward are.

    `last` is the position of the last token, of all sequences or of each (B,); `leftpad` (B,) is where each sequence
    starts, None for all at 0; `ends` (B,) is where padding behind it begins, None for no such padding, which only
    prompts may have (`may_end`). All of it holds if `check` passes: it reads on the host what the device has computed
    meanwhile.
    """

    def __init__(self, given: dict[str, Any], ids: Tensor, past: int, may_end: bool = False):
        batch, count = ids.shape
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        self.past = past
        self.last: Tensor | int = past + count - 1
        self.leftpad: Tensor | None = None
        self.ends: Tensor | None = None
        indices = None if mask is None and positions is None else torch.arange(past + count, device=ids.device)
        facts = {}
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != (batch, past + count):
                raise NoStep("attention_mask is not (batch, tokens)")
            live = (mask != 0).to(ids.device)
            self.leftpad = live.int().argmax(1)
            ends = self.leftpad + live.sum(1)
            inside = (indices >= self.leftpad[:, None]) & (indices < ends[:, None])
            is_range = (live == inside).all() & live.any(1).all()
            if may_end:
                self.ends = ends
                facts |= {BAD_MASK_OF_A_PROMPT: is_range, _NO_END: live[:, -1].all()}
            else:
                facts[BAD_MASK] = is_range & live[:, -1].all()
            if given.get("labels") is not None:
                facts[LOSS_OF_PADDING] = (self.leftpad == 0).all()
        if positions is not None:
            if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[-1] != count:
                raise NoStep("position_ids are not (batch, tokens)")
            positions = positions.to(ids.device)
            self.last = positions[:, -1].expand(batch)
            inside = (positions >= 0) & (positions < past + count)
            facts[_BAD_POSITIONS] = inside.all() & (positions == positions[:, :1] + indices[:count]).all()
        self._names = list(facts)
        self._reading = Reading(ids, *([torch.stack(list(facts.values()))] if facts else []), later=True)

    def check(self, vocabulary: int) -> None:
        """Raise NoStep unless mask and positions are those of padding, and IndexError for ids of no token."""
        ids, *facts = self._reading.wait()
        check_ids(*map(int, ids.aminmax()), vocabulary)
        found = dict(zip(self._names, facts[0].tolist() if facts else (), strict=True))
        if found.pop(_NO_END, True):
            self.ends = None
        for name, holds in found.items():
            if not holds:
                raise NoStep(name)
