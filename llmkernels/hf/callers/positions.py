"""Where the new tokens of a forward are, by its mask and positions."""

from typing import Any

import torch
from torch import Tensor

from ..classes.cache_name import cache_name
from ..errors import NoStep
from .images import last_position
from .reading import Reading

BAD_MASK = "attention_mask masks more than padding on the left"
BAD_MASK_OF_A_PROMPT = "attention_mask masks more than padding on the left and on the right"
POSITIONS_OF_PADDING = "no position_ids, which the modules give padding behind the tokens as well"
LOSS_OF_PADDING = "labels behind padding, whose first token is predicted by it"
_BAD_POSITIONS = "position_ids do not follow each other, or run ahead of the tokens"
_OF_IMAGES = "position_ids of the grid of an image"
_NO_END = "no sequence ends before the last token"  # no reason against a step


def check_ids(least: int, largest: int, vocabulary: int) -> None:
    """Raise IndexError for ids of no token, whose embeddings would be NaN."""
    if least < 0 or largest >= vocabulary:
        raise IndexError("index out of range in self")  # as torch.nn.functional.embedding has it


def check_kept(given: dict[str, Any]) -> None:
    """Raise NoStep unless the logits that a prompt keeps are those of its last tokens, or all."""
    kept = given.get("logits_to_keep", 0)
    if not isinstance(kept, int) or kept < 0:
        raise NoStep("logits_to_keep is no number of tokens")


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
        grids = None
        if isinstance(positions, Tensor) and positions.ndim == 3 and len(positions) in (3, 4):
            grids = positions[-3:].to(ids.device)  # behind those of the mask, where these are given
            positions = grids[0]
        self.past, self.are_given, self.have_rows = past, positions is not None, grids is not None
        self._newest, self._counts_live = past + count - 1, False
        self.last: Tensor | int = self._newest
        self.leftpad: Tensor | None = None
        self.ends: Tensor | None = None
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != (batch, past + count):
                raise NoStep("attention_mask is not (batch, tokens)")
            mask = mask.to(ids.device)
            live = mask != 0
            self.leftpad = live.int().argmax(1)
            if may_end:
                self.ends = self.leftpad + live.sum(1)
        if positions is not None:
            if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[-1] != count:
                raise NoStep("position_ids are not (batch, tokens)")
            positions = positions.to(ids.device)
            self.last = positions[:, -1].expand(batch)
        self._names: list[str] = []

        def facts() -> list[Tensor]:
            found = {}
            if mask is not None:
                found |= self._facts_of_mask(mask != 0, may_end, given.get("labels") is not None)
            if positions is not None:
                along = positions[:, :1] + torch.arange(count, device=ids.device)
                inside = (positions >= 0) & (positions < past + count)
                found[_BAD_POSITIONS] = inside.all() & (positions == along).all()
            if grids is not None:
                found[_OF_IMAGES] = (grids == positions).all()
            self._names = list(found)
            return [torch.stack(list(found.values()))] if found else []

        self._reading = Reading(ids, later=facts)

    def count_live_tokens(self) -> None:
        """Where no positions are given, count those of the tokens that the mask shows."""
        if not self.are_given and self.leftpad is not None:
            self.last, self._counts_live = self._newest - self.leftpad, True

    def _facts_of_mask(self, live: Tensor, may_end: bool, has_labels: bool) -> dict[str, Tensor]:
        indices = torch.arange(live.shape[1], device=live.device)
        ends = self.leftpad + live.sum(1)
        inside = (indices >= self.leftpad[:, None]) & (indices < ends[:, None])
        is_range, is_last = (live == inside).all() & live.any(1).all(), live[:, -1].all()
        found = {BAD_MASK_OF_A_PROMPT: is_range, _NO_END: is_last} if may_end else {BAD_MASK: is_range & is_last}
        if has_labels:
            found[LOSS_OF_PADDING] = (self.leftpad == 0).all()
        return found

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
        if self._counts_live and self.ends is not None:
            raise NoStep(POSITIONS_OF_PADDING)


# --- of a prompt of generate(), whose positions transformers has made


def facts_of(input_ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
    """What check_facts() reads, int64."""
    facts = [*input_ids.aminmax(), *positions[:, -1].aminmax()]
    if mask is not None:
        live = mask != 0
        facts += [live.all(), (live[:, 1:] >= live[:, :-1]).all() & live[:, -1].all()]
    return torch.stack([fact.long() for fact in facts])


def check_facts(facts: list[int], tokens: int, vocabulary: int) -> bool:
    """Whether there is padding. Raises NoStep where it is not on the left alone, or positions are not those of so many
    tokens, and IndexError for ids of no token."""
    least_id, largest_id, lowest, highest, full, padded_left = [*facts, 1, 1][:6]
    check_ids(least_id, largest_id, vocabulary)
    if not padded_left:
        raise NoStep(BAD_MASK)
    if lowest < 0 or highest >= tokens:  # cos and sin are there for as many positions as there are tokens
        raise NoStep("position_ids run ahead of the tokens")
    return not full


def left_padding(
    input_ids: Tensor, inputs: dict[str, Any], config, vocabulary: int, has_rows: bool = False
) -> tuple[Tensor, Tensor | None, int]:
    """The position of the last token (B,); where each sequence starts, None for all at 0; and how many tokens there are
    with those in the cache.

    `has_rows`: positions may have rows, of the grids of images. Raises NoStep for other masks and positions than left
    padding's, and IndexError for ids of no token. Reads a few numbers on the host: before the prefill, where nothing is
    waiting yet.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if positions is not None and positions.ndim not in ((2, 3) if has_rows else (2,)):
        raise NoStep("position_ids are not (batch, tokens)")
    if mask is not None and mask.ndim != 2:
        raise NoStep("attention_mask is not (batch, tokens)")
    # As transformers has it: input_ids are all tokens, or where the mask is longer, those behind the ones in the cache.
    past, given = inputs[cache_name()].get_seq_length(), input_ids.shape[1]
    # transformers from 5.23 drops a mask of ones, and notes its length. Of a forward that takes neither mask nor
    # positions, input_ids are always those behind.
    without = past + given if positions is None else positions.shape[-1]
    tokens = mask.shape[1] if mask is not None else getattr(config, "_mask_length", without)
    last = input_ids.new_full((1,), tokens - 1) if positions is None else last_position(inputs)
    is_padded = check_facts(facts_of(input_ids, mask, last[:, None]).tolist(), tokens, vocabulary)
    if is_padded and positions is None:  # a forward that takes none counts padding, too
        raise NoStep("no position_ids, which a padded sequence needs")
    if past and config.prefill_chunk_size is not None:  # up to 5.22 it computes what is in the cache once more
        raise NoStep("prefill_chunk_size with tokens in the cache")
    if tokens not in (given, past + given) or tokens <= past:
        raise NoStep("input_ids and attention_mask do not go on where the cache ends")
    return last.expand(len(input_ids)), (mask == 0).sum(1) if is_padded else None, tokens
