"""The forward of a patched model by its decode step: a few tokens per sequence behind a cache.

Every caller of the model gets the step: a user's own loop, beam search, a chat on a returned cache, a pipeline, and
assisted decoding and prompt lookup, which verify several tokens at once.

    prompt            on a GPU, without a cache given or with an empty one: composed of ops (step/prompt.py), into a
                      cache that is one of ours from then on, or without a cache if the caller wants none; else by the
                      model's modules, into the cache that the caller has
    next tokens       by the step; before the first one the cache becomes one of ours, in place (adopted.py)
    batches           of continuous batching: batches.py

The modules run a forward that asks for anything else, has more than MAX_ROWS tokens behind a cache, or is compiled.
Report.decode counts all but the compiled ones, with the reason.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..cache.adopted import become_ours, check_dynamic, fill, new_cache
from ..cache.fits import check_cache, check_empty, is_kv_cache, is_ours, may_become_ours
from ..classes.cache_name import cache_name
from ..errors import NoStep, reason_of
from ..model.description import Description
from ..model.text import entries_of, text_config
from ..report import STEP, by_forward
from ..step import prompt
from ..step.block import Layout
from ..step.decode import MAX_ROWS, Decoder, decoder
from ..step.describe import check_batch, check_length
from ..step.program import Program
from .batches import by_batch, is_batch
from .call import as_returned, check_call, check_inputs, description, output
from .positions import Positions, check_kept

# What positions of images are made of, where they are not given.
_OF_POSITIONS = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids"}
_OF_PROMPTS = {"labels", "num_items_in_batch", "output_hidden_states"}  # which prompts take as well


def by_step(original: Callable, signature: Any) -> Callable:
    """A forward of a model class: by the step where that is possible, else `original`."""
    name = cache_name()

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        given = signature(self, args, kwargs)
        cache = given.get(name)
        of_a_batch = is_batch(given)
        is_prompt = not of_a_batch and (cache is None or _is_empty(cache))
        is_refused = getattr(cache, "left_to_modules", False)  # by generate(), which has counted it
        if is_prompt and is_refused:
            return original(self, *args, **kwargs)
        state = decoder(self)
        if torch.is_grad_enabled():  # weights may change now
            state.free_fp8()
        try:
            check_inputs(given)
            if of_a_batch:
                return by_batch(self, state, given)
            if is_prompt:
                return _prompt(self, state, given)
            parts, logits = _step(self, state, given)
            return output(parts, {"logits": logits, name: cache})
        except NoStep as refusal:
            reason = str(refusal)
        if not is_refused:
            counter = state.prompts if is_prompt and not torch.is_grad_enabled() else state.forwards
            state.count(counter, by_forward(reason))
        return original(self, *args, **kwargs)

    return forward


PROMPT_DEVICES = {"cuda"}  # on a CPU the modules are as fast


def _prompt(model: nn.Module, state: Decoder, given: dict[str, Any]) -> ModelOutput:
    """The output of a prompt behind nothing, which makes a cache, fills an empty one, or neither: composed of ops.
    Raises NoStep."""
    device = given["input_ids"].device.type
    if device not in PROMPT_DEVICES:
        raise NoStep(f"a prompt on {device}")
    check_call(model, given, _OF_PROMPTS)
    check_kept(given)
    parts, logits, cache, states = _early_prompt(model, state, given) or _composed_prompt(model, state, given)
    if (empty := given.get(cache_name())) is not None and empty is not cache:
        fill(empty, cache)
        cache = empty
    state.count(state.prompts, prompt.way(parts, given["input_ids"].numel()))
    logits = as_returned(parts, logits)
    found = {"loss": _loss(model, logits, given), "logits": logits, "hidden_states": states, cache_name(): cache}
    return output(parts, found)


def _loss(model: nn.Module, logits: Tensor, given: dict[str, Any]) -> Tensor | None:
    if given.get("labels") is None:
        return None
    counted = given.get("num_items_in_batch")
    options = {} if counted is None else {"num_items_in_batch": counted}
    return model.loss_function(logits, given["labels"], text_config(model.config).vocab_size, **options)


def _check_prompt(model: nn.Module, parts: Description, given: dict[str, Any]) -> None:
    """Raise NoStep for prompts that the ops do not take, and where the modules make or have another cache."""
    ids, cache = given["input_ids"], given.get(cache_name())
    check_batch(parts, ids)
    check_length(parts, ids.shape[1])
    use_cache = _use_cache(model, given)
    if cache is not None:
        if use_cache is False:
            raise NoStep("use_cache=False")
        (check_cache if is_kv_cache(cache) else check_empty)(cache, parts, len(ids))
    elif not (parts.no_cache_when_told if use_cache is False else use_cache in parts.dynamic_cache_for):
        raise NoStep("the modules make a cache of another kind, or none")
    if given.get("labels") is not None and (model.training or not parts.has_loss_of_logits):
        raise NoStep("labels in training mode, or of which the modules compute another loss")
    if given.get("output_hidden_states") and not parts.has_hidden_states:
        raise NoStep("output_hidden_states, of which the modules return others")


def _use_cache(model: nn.Module, given: dict[str, Any]) -> bool | None:
    """Whether a call asks for a cache; None: it says nothing, and neither does the config."""
    use_cache = given.get("use_cache")
    told = use_cache is None and any(entries.get("use_cache") is False for entries in entries_of(model.config))
    return False if told else use_cache


def _early_prompt(
    model: nn.Module, state: Decoder, given: dict[str, Any]
) -> tuple[Description, Tensor, Any, None] | None:
    """The same as _composed_prompt(), launched first: the host checks the model, and makes the cache's objects, while
    the GPU works.

    None where no such prompt has run before, or the model or the kind of padding has changed: only new memory has been
    written then; for a long one that is to leave no cache, as the block is one; and with hidden states, of which graphs
    keep none.
    """
    ids, kept = given["input_ids"], given.get("logits_to_keep", 0)
    found = state.known(ids)
    layout = None if found is None else state.layouts.find(found[0].parts, *ids.shape)
    if layout is None or is_kv_cache(given.get(cache_name())) or given.get("output_hidden_states"):
        return None
    known, _memory = found
    _check_prompt(model, known.parts, given)
    if _use_cache(model, given) is False and prompt.padded_length(known.parts, layout, *ids.shape) is None:
        return None
    if state.is_padded_behind and given.get("attention_mask") is not None:
        return None
    positions = Positions(given, ids, 0)
    _count_positions(known.parts, positions, is_prompt=True)
    kept = min(kept or ids.shape[1], ids.shape[1])
    try:
        logits, block = state.launch_prompt(known.parts, layout, ids, positions.last, positions.leftpad, kept)
    except (torch.OutOfMemoryError, NoStep):
        return None
    if not known.snapshot.holds(model) or not layout.holds(model.config):
        return None
    if reason_of(positions.check, len(known.parts.embedding)) is not None:  # waits for the device: last
        return None
    return known.parts, logits, None if _use_cache(model, given) is False else block.cache(ids.shape[1]), None


def _composed_prompt(
    model: nn.Module, state: Decoder, given: dict[str, Any]
) -> tuple[Description, Tensor, Any, tuple[Tensor, ...] | None]:
    """The description of the model, the logits of the tokens to keep, the cache, and the hidden states, None where they
    are not asked for. Raises NoStep."""
    ids, kept = given["input_ids"], given.get("logits_to_keep", 0)
    parts, _memory = description(model, state, ids)
    _check_prompt(model, parts, given)
    batch, count = ids.shape
    positions = Positions(given, ids, 0, may_end=True)
    _count_positions(parts, positions, is_prompt=True)
    positions.check(len(parts.embedding))
    state.is_padded_behind = positions.ends is not None
    is_kept, cache = _use_cache(model, given) is not False, given.get(cache_name())
    is_new = is_kept and not is_kv_cache(cache)
    if is_new:
        cache = new_cache(model.config, parts, batch, count)
    elif not is_kept:
        cache = prompt.cache_of_a_call(parts, batch, count)
    kept = min(kept or count, count)
    seen: list[Tensor] | None = [] if given.get("output_hidden_states") else None
    where, ends = (positions.last, positions.leftpad), positions.ends
    logits = state.run_prompt(parts, cache, ids, *where, kept, seen=seen, ends=ends)
    states = None if seen is None else tuple(x.view(batch, count, -1) for x in seen)
    if not is_new:
        return parts, logits, cache if is_kept else None, states
    if (layout := Layout(cache, model.config)).is_kept:
        state.layouts.note(parts, batch, layout)
    return parts, logits, cache, states


def bound_arguments(forward: Callable) -> Callable:
    """A function that names the arguments of a call of `forward`, those in its **kwargs included; {} for a call that
    `forward` refuses."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]  # behind self
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def given(self, args, kwargs) -> dict[str, Any]:
        if not args:
            return kwargs
        named = dict(zip(names, args, strict=False))  # signature.bind() takes 20 us
        return {} if len(args) > len(names) or named.keys() & kwargs.keys() else named | kwargs

    return given


def _is_empty(cache: Any) -> bool:
    """Whether a cache that the step takes has no tokens. False of others, whose length may be on the device."""
    if not may_become_ours(cache):
        return False
    try:
        return int(cache.get_seq_length()) == 0
    except ValueError:  # one of states alone, which has no length
        return True


def _step(model: nn.Module, state: Decoder, given: dict[str, Any]) -> tuple[Description, Tensor]:
    """The description of the model, and the logits of the tokens to keep. Raises NoStep, and then the modules find
    everything as it was."""
    check_call(model, given, frozenset() if given.get("position_ids") is None else _OF_POSITIONS)
    if _use_cache(model, given) is False:
        raise NoStep("use_cache=False")
    ids, cache = given["input_ids"], given[cache_name()]
    if ids.numel() > MAX_ROWS:
        raise NoStep(f"more than {MAX_ROWS} tokens behind a cache")
    positions = Positions(given, ids, int(cache.get_seq_length()))
    kept = given.get("logits_to_keep", 0)
    with state.lend("logits", ids, ids.shape[1]) as program:
        found = _replayed(model, state, program, ids, cache, positions)
        parts, logits = found or _described(model, state, program, ids, cache, positions)
        state.count(state.forwards, STEP)
        logits = logits.view(*ids.shape, -1)
        return parts, logits[:, slice(-kept, None) if isinstance(kept, int) else kept].clone()


def _replayed(
    model: nn.Module, state: Decoder, program: Program, ids: Tensor, cache: Any, positions: "Positions"
) -> tuple[Description, Tensor] | None:
    """The description, and the logits by the graph of an earlier forward. None where there is none, or the model has
    changed since.

    The graph is queued first, and the host checks the model while the GPU works. If the model has changed, the result
    is dropped: the graph has only written keys and values behind the cache's end.
    """
    recorded = state.recorded_forward(cache, program, *ids.shape)
    if recorded is None:
        return None
    step, known, _memory = recorded
    _count_positions(known.parts, positions)
    cache.begin(positions.last - ids.shape[1], positions.leftpad)
    logits = step(ids.flatten())
    kept = False
    try:
        if known.snapshot.holds(model):
            positions.check(len(known.parts.embedding))  # waits for the device: last
            kept = True
    finally:
        if not kept:
            cache.take_back(ids.shape[1])
            state.forget_place(cache)  # the next forward checks first
    return (known.parts, as_returned(known.parts, logits)) if kept else None


def _described(
    model: nn.Module, state: Decoder, program: Program, ids: Tensor, cache: Any, positions: "Positions"
) -> tuple[Description, Tensor]:
    """The description of the model as it is, and the logits by it, behind a cache that becomes one of ours."""
    batch, ahead = ids.shape
    is_own = is_ours(cache)
    if is_own and not cache.has_room(ahead):
        raise NoStep("the cache is full")
    parts, _memory = description(model, state, ids)
    _count_positions(parts, positions)
    check_length(parts, positions.past + ahead)
    positions.check(len(parts.embedding))
    if is_own:
        check_cache(cache, parts, batch)
    else:
        check_dynamic(cache, parts, batch, recorded=True)
        become_ours(cache, parts, batch)
    cache.begin(positions.last - ahead, positions.leftpad)
    return parts, as_returned(parts, state.begin(parts, cache, program, ahead)(ids.flatten()))


def _count_positions(parts: Description, positions: "Positions", is_prompt: bool = False) -> None:
    """Count positions that are not given as the modules do. Raises NoStep where they count images, and for positions of
    another shape than they take, or of prompts, whose first row may pack sequences."""
    if positions.have_rows and (parts.grids is None or is_prompt):
        raise NoStep("position_ids are not (batch, tokens)")
    if parts.positions_of_mask:
        positions.count_live_tokens()
    if parts.grids is not None and not positions.are_given:
        raise NoStep("no position_ids, which the modules make of images")
