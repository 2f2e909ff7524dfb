"""What every way to run a forward of a patched model asks of its call, and what it returns."""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..cache.fits import may_become_ours
from ..classes.cache_name import cache_name
from ..errors import NoStep
from ..model.description import Description
from ..model.text import entries_of
from ..step.decode import Decoder
from .images import is_nothing

# Arguments of a forward that the step takes, and those that change nothing for it.
_KNOWN = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "return_dict",
}


def check_inputs(given: dict[str, Any]) -> None:
    """Raise NoStep for gradients, and for anything but token ids (B, T)."""
    if torch.is_grad_enabled():
        raise NoStep("gradients are enabled")
    ids = given.get("input_ids")
    if ids is None and given.get("inputs_embeds") is not None:
        raise NoStep("inputs_embeds")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.numel() == 0:
        raise NoStep("input_ids are not (batch, tokens)")
    if ids.dtype not in (torch.int32, torch.int64):
        raise NoStep(f"input_ids of {ids.dtype}")


def check_call(model: nn.Module, given: dict[str, Any], also: Set[str] = frozenset()) -> None:
    """Raise NoStep for what only the modules do, and arguments that are neither known nor in `also`. Reads nothing on
    the device."""
    device = given["input_ids"].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NoStep("a CUDA graph is being captured")
    if torch.is_autocast_enabled(device.type):
        raise NoStep("autocast decides the dtypes")
    for name, value in given.items():
        is_known = name in _KNOWN or name in also or name in ("self", cache_name())
        if not is_known and value is not False and not is_nothing(value):
            raise NoStep(name)
    cache = given.get(cache_name())
    if cache is not None and not may_become_ours(cache):
        raise NoStep(f"the cache given is a {type(cache).__name__}")
    if given.get("logits_to_keep", 0) is None:  # which adds a dimension to the logits
        raise NoStep("logits_to_keep=None")
    if given.get("return_dict") is False:
        raise NoStep("return_dict=False")
    for entries in entries_of(model.config):
        if entries.get("output_hidden_states") or entries.get("_output_attentions"):
            raise NoStep("output_attentions or output_hidden_states in the config")


def description(model: nn.Module, state: Decoder, ids: Tensor) -> tuple[Description, list[Any]]:
    """The description of the model as it is now, and what keeps its memory alive. Raises NoStep."""
    found = state.describe_or_pause(model)
    if ids.device != found[0].weight.device:
        raise NoStep(f"input_ids on {ids.device}")
    return found


def output(parts: Description, found: dict[str, Any]) -> ModelOutput:
    """What a forward returns, as the modules do."""
    if parts.grids is not None and "rope_deltas" in parts.output.__dataclass_fields__:
        found["rope_deltas"] = parts.grids.rope_deltas
    return parts.output(**found)


def as_returned(parts: Description, logits: Tensor) -> Tensor:
    """Logits in the dtype in which the model returns them."""
    return logits.float() if parts.returns_float32 else logits
