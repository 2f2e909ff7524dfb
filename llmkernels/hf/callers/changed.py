"""The rest of a call of generate whose processors, criteria or streamer have changed the model, as hooks that begin
amid the text do."""

from typing import Any

import torch
from torch import Tensor, nn

from ..cache.adopted import hand_back
from ..cache.fits import is_ours
from ..classes.cache_name import cache_name
from ..errors import NoStep
from ..model.description import Description
from ..step.decode import decoder


def is_transformers(user: Any) -> bool:
    """Whether a processor, criterion or streamer is transformers' own, or none."""
    return user is None or type(user).__module__.startswith("transformers.")


class Rest:
    """The forwards behind the last step.

    `parts` is what the step computes, `inputs` those of the prompt, `last` (B,) the position of its last token,
    `cache` that of the step.
    """

    def __init__(self, model: nn.Module, parts: Description, inputs: dict[str, Any], last: Tensor, cache: Any):
        self._model, self._parts, self._cache, self._given = model, parts, cache, inputs[cache_name()]
        self._described = decoder(model).described
        self._mask, self._last = inputs.get("attention_mask"), last[:, None]
        self._gives_positions = inputs.get("position_ids") is not None  # else the forward may take none
        self.begun = False

    def begins(self) -> bool:
        """Whether the forwards begin now, since the model is not what the step computes any more; then the last step is
        taken back."""
        if self.begun:
            return False
        self.begun = not self._holds()
        if self.begun:
            self._cache.take_back(1)
            if not is_ours(self._given):  # where keys and values may change their dtype
                hand_back(self._cache, self._given, frees=False)
                self._cache = self._given
        return self.begun

    def _holds(self) -> bool:
        known = self._described
        try:
            return known is not None and known.parts is self._parts and known.snapshot.holds(self._model)
        except NoStep:
            return False

    def forward(self, ids: Tensor, count: int) -> Tensor:
        """The logits (B, V) behind tokens (B,), the last of `count` behind the prompt."""
        mask = self._mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), count)], 1)
        positions = {"position_ids": self._last + count} if self._gives_positions else {}
        outputs = self._model(
            ids[:, None],
            attention_mask=mask,
            **positions,
            use_cache=True,
            return_dict=True,
            **{cache_name(): self._cache},
        )
        return outputs.logits[:, -1]
