"""The forward of a patched model by its decode step: a few tokens per sequence behind a cache.

So whoever calls the model gets the step: a loop of one's own, beam search, assisted decoding and prompt lookup, which
verify several tokens at once, a chat that goes on with a returned cache, a pipeline.

    prompt            the model's modules, into whatever cache the caller has
    next tokens       the first time the cache becomes one of ours, in place (adopt.py); from then on the step

A forward that asks for anything else, or has more than MAX_ROWS tokens, is the modules'. Report.decode counts both.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .cache_name import cache_name
from .decode import Decoder, DecodeStep, decoder
from .report import by_forward
from .trunk import check_cache, check_length, is_ours, pack, trunk
from .trust import NoStep

MAX_ROWS = 64  # tokens of all sequences together
# Arguments of a forward that the step has, and those that change nothing where it runs.
_KNOWN = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "return_dict",
}


def by_step(original: Callable, signature: Any) -> Callable:
    """A forward of a model class that takes the step where it can, and else is `original`."""
    name = cache_name()

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        given = signature(self, args, kwargs)
        cache = given.get(name)
        if cache is None or not _has_few_tokens(given.get("input_ids"), cache):
            return original(self, *args, **kwargs)
        state = decoder(self)
        try:
            logits = _step(self, state, given)
        except NoStep as reason:
            state.count_forward(by_forward(reason))
            return original(self, *args, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(logits=logits, **{name: cache})

    return forward


def bound_arguments(forward: Callable) -> Callable:
    """A function that gives the arguments of a call of `forward` by name, with those in its **kwargs."""
    signature = inspect.signature(forward)
    variable = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def given(self, args, kwargs) -> dict[str, Any]:
        if not args:
            return kwargs
        try:
            named = dict(signature.bind(self, *args, **kwargs).arguments)
        except TypeError:  # which the original raises
            return {}
        return named | named.pop(variable, {})

    return given


def _has_few_tokens(ids: Any, cache: Any) -> bool:
    """Whether these may be tokens behind a cache, few enough for a step."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not 0 < ids.numel() <= MAX_ROWS:
        return False
    try:
        return cache.get_seq_length() > 0
    except (AttributeError, ValueError):  # one of states, without a length
        return False


def _step(model: nn.Module, state: Decoder, given: dict[str, Any]) -> Tensor:
    """The logits of the tokens to keep. Raises NoStep."""
    for name, value in given.items():
        if name not in _KNOWN and name not in ("self", cache_name()) and value is not None and value is not False:
            raise NoStep(name)
    if given.get("use_cache") is False or given.get("return_dict") is False:
        raise NoStep("use_cache=False or return_dict=False")
    config = model.config
    if config.output_hidden_states or getattr(config, "_output_attentions", False):
        raise NoStep("output_attentions or output_hidden_states in the config")
    if getattr(config, "use_cache", True) is False and given.get("use_cache") is None:
        raise NoStep("use_cache=False in the config")
    ids, cache = given["input_ids"], given[cache_name()]
    if (reason := state.refusal(cache)) is not None:
        raise NoStep(reason)
    positions, leftpad = _places(given, ids, int(cache.get_seq_length()))
    try:
        step = _prepared(model, state, ids, cache, positions, leftpad)
    except NoStep as reason:
        state.refuse(cache, str(reason))
        raise
    kept = given.get("logits_to_keep")
    logits = step(ids.flatten()).view(*ids.shape, -1)
    logits = logits[:, slice(-(kept or 0), None) if kept is None or isinstance(kept, int) else kept].clone()
    state.park(step, model, ids.shape[1])
    return logits


def _prepared(
    model: nn.Module, state: Decoder, ids: Tensor, cache: Any, positions: Tensor | int, leftpad: Tensor | None
) -> DecodeStep:
    """The step of a model behind a cache, which becomes one of ours. Raises NoStep, and changes nothing then.

    `positions` and `leftpad` as `_places` gives them.
    """
    from .adopt import become_ours, check_dynamic

    batch, count = ids.shape
    if (step := state.resume(model, cache, count)) is not None:
        cache.begin(positions - count, leftpad)
        return step
    parts = trunk(model)
    if ids.device != parts.weight.device:
        raise NoStep(f"input_ids on {ids.device}")
    is_own = is_ours(cache)
    if is_own:
        check_cache(cache, parts, batch)
        if not cache.has_room(count):
            raise NoStep("the cache is full")
    else:
        check_dynamic(cache, parts, batch, recorded=True)
    check_length(parts, int(cache.get_seq_length()) + count)
    parts = pack(model, parts)
    if not is_own:
        become_ours(cache, parts, batch)
    cache.begin(positions - count, leftpad)
    return state.begin_forward(parts, cache, count)


def _places(given: dict[str, Any], ids: Tensor, past: int) -> tuple[Tensor | int, Tensor | None]:
    """The positions (B,) of the last tokens, or that of all; and where each sequence starts, None for all at 0.

    Raises NoStep for other masks and positions than those of padding on the left. Reads a few numbers on the host where
    there are any.
    """
    batch, count = ids.shape
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    facts = []
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != (batch, past + count):
            raise NoStep("attention_mask is not (batch, tokens)")
        live = mask != 0
        facts += [live.all(), (live[:, 1:] >= live[:, :-1]).all() & live[:, -1].all()]
    else:
        facts += [torch.ones((), dtype=torch.bool)] * 2
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[-1] != count:
            raise NoStep("position_ids are not (batch, tokens)")
        ahead = (positions < 0) | (positions >= past + count)
        facts += [~ahead.any() & (positions[:, 1:] == positions[:, :-1] + 1).all()]
    if mask is None and positions is None:
        return past + count - 1, None
    full, padded_left, *in_order = torch.stack([fact.to(ids.device) for fact in facts]).tolist()
    if not padded_left:
        raise NoStep("attention_mask masks more than padding on the left")
    if not all(in_order):
        raise NoStep("position_ids do not follow each other, or run ahead of the tokens")
    last = past + count - 1 if positions is None else positions[:, -1].expand(batch)
    return last, None if full else (~live).sum(1)
