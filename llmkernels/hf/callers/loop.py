"""The loop behind a patched model's generate(): transformers' own, by the decode step.

LOOPS has the methods that a patched model class has in place of transformers': see model_class.py.

    prompt          prefill -> logits
    each token      processors, choice, criteria        what a user's code sees
                    step -> logits of the next          on CUDA queued before the host waits for
                    read on the host whether to go on   ... this, and taken back if not
"""

import functools
import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput

from ..cache.adopted import check_dynamic, hand_back
from ..cache.fits import check_cache, is_ours
from ..classes.cache_name import cache_name
from ..errors import NoStep
from ..model.description import Description
from ..report import PREFILL, STEP, by_forward, by_transformers
from ..step import prompt
from ..step.decode import MAX_ROWS, Decoder, decoder
from ..step.decode_step import DecodeStep
from ..step.describe import check_batch, check_length
from ..step.program import Program
from . import reading
from .ahead import Ahead, launched, taken_by
from .changed import Rest, is_transformers
from .images import OF_MODULES, images_of
from .positions import check_facts, check_kept, facts_of, left_padding
from .reading import Reading, Text, next_turn

_KNOWN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
_KNOWN_INPUTS |= {"tokenizer", "assistant_tokenizer"}  # which other parts of generate() have used by now


class Asked(NamedTuple):
    """What the loop behind generate() is given, as transformers' own is, and the decoder of the model."""

    state: Decoder
    model: nn.Module
    input_ids: Tensor
    stopping_criteria: Any
    config: Any
    inputs: dict[str, Any]
    synced_gpus: bool = False

    @property
    def cache(self) -> Any:
        """The cache that transformers has prepared, or the caller's."""
        return self.inputs.get(cache_name())

    @property
    def returned(self) -> bool:
        """Whether the caller sees the cache afterwards."""
        return bool(self.config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False))


@dataclass(frozen=True)
class Call:
    """What the decode step needs to know of one call of generate.

    `memory` keeps what `parts` describes where it is. `last` (B,) is the position of a prompt's last token, `leftpad`
    where each sequence starts, None for all at 0; `tokens` how many there are with those in the cache, up to `limit`.
    `holds` says, once the prompt is launched, whether model and arguments are as they were; None where that is known.
    `ahead`: the prompt, if it runs.
    """

    asked: Asked
    parts: Description
    memory: list[Any]
    last: Tensor
    leftpad: Tensor | None
    tokens: int
    limit: float  # as transformers has it, of whatever kind the caller gave
    holds: Callable[[], bool] | None = None
    ahead: Ahead | None = None

    def prefill(self, cache) -> Tensor:
        """The logits (B, V) behind the prompt, whose keys and values are in the cache then. Raises Stale, the cache as
        it was, where the call does not hold."""
        state, model, input_ids, _, config, inputs, _ = self.asked
        if self.ahead is not None:
            self._check(cache, self.tokens)
            self.ahead.join()
            state.count(state.prompts, prompt.way(self.parts, input_ids.numel()))
            return self.ahead.logits[:, -1]
        count = input_ids.shape[1] - cache.length if input_ids.shape[1] == self.tokens else input_ids.shape[1]
        tokens = len(input_ids) * count
        way = STEP if cache.length and tokens <= MAX_ROWS else prompt.way(self.parts, tokens)
        try:
            if config.prefill_chunk_size is not None:
                raise NoStep("prefill_chunk_size")
            if images := images_of(inputs):
                raise NoStep(", ".join(images))
            logits = state.run_prompt(self.parts, cache, input_ids[:, -count:], self.last, self.leftpad)
        except NoStep as reason:
            self._check(cache, 0)
            state.count(state.prompts, by_forward(reason))
            cache.left_to_modules = True
            try:
                outputs = model._prefill(input_ids, config, inputs | {cache_name(): cache})
            finally:
                cache.left_to_modules = False
            return outputs.logits[:, -1]
        self._check(cache, count)
        state.count(state.prompts, way)
        return logits[:, -1]

    def _check(self, cache, count: int) -> None:
        holds = self.holds is None
        try:
            holds = holds or self.holds()
        finally:
            if not holds and self.ahead is None:
                cache.take_back(count)
            elif not holds:
                self.ahead.drop()
        if not holds:
            raise Stale

    def cache(self):
        """A context: the KVCache to use. Where the caller's is none, one on loan."""
        given, returned = self.asked.cache, self.asked.returned
        if self.ahead is not None:
            return nullcontext(self.ahead.cache)
        if is_ours(given):
            return nullcontext(given)
        limit = math.ceil(self.limit)
        return self.asked.state.lend_cache(self.parts, len(self.last), self.tokens, limit, given, returned)

    def shown_cache(self):
        """The DynamicCache that the caller has given, and may look at between two steps; else None."""
        given = self.asked.cache
        return given if getattr(given, "_is_user_defined", False) and not is_ours(given) else None

    def begin(self, cache, program: Program) -> DecodeStep:
        """The step behind the prompt, which is in the cache now."""
        cache.begin(self.last, self.leftpad)
        return self.asked.state.begin(self.parts, cache, program)


class Stale(Exception):
    """A call was prepared early, and does not hold."""


def prepare(asked: Asked, early: bool) -> Call:
    """Raises NoStep where only transformers' own loop does what a call asks for. `early`: the call may turn out to be
    stale, and is prepared again without."""
    if early and (call := _early_call(asked)):
        return call
    state, model, input_ids, stopping_criteria, config, inputs, _ = asked
    parts, memory = state.describe(model)
    if torch.is_grad_enabled():  # generate() itself disables them, but what it wraps can be called as well
        raise NoStep("gradients are enabled")
    _check_call(parts, asked)
    last, leftpad, tokens = left_padding(input_ids, inputs, config, len(parts.embedding), parts.grids is not None)
    behind = tokens - input_ids.shape[1]  # in the cache, but not in input_ids
    limit = behind + stopping_criteria.max_length
    check_length(parts, limit)
    return Call(asked, parts, memory, last, leftpad, tokens, limit)


def _early_call(asked: Asked) -> Call | None:
    """The call of a prompt behind nothing to a model that is known, without a look at the model and at what is on the
    device: both come when the GPU works. None where it takes more than that."""
    state, model, input_ids, stopping_criteria, config, inputs, _ = asked
    cache, mask, positions = asked.cache, inputs.get("attention_mask"), inputs.get("position_ids")
    known = state.known(input_ids) if reading.is_late(input_ids.device) else None
    if known is None or cache is None or torch.is_grad_enabled() or config.prefill_chunk_size is not None:
        return None
    described, memory = known
    parts, (batch, count) = described.parts, input_ids.shape
    shapes = [x.shape for x in (positions, mask) if x is not None]
    if images_of(inputs) or positions is None or any(shape != input_ids.shape for shape in shapes):
        return None
    try:
        _check_call(parts, asked)
        check_length(parts, stopping_criteria.max_length)
    except NoStep:
        return None
    if cache.get_seq_length() or getattr(config, "_mask_length", count) != count:
        return None
    ahead = None if asked.returned else taken_by(described, input_ids, cache)

    def read() -> list[Tensor]:
        return [facts_of(input_ids, mask, positions), *([ahead.agrees(positions)] if ahead else [])]

    facts = Reading(positions[:, -1], later=read)

    def holds() -> bool:
        try:
            if not described.snapshot.holds(model):
                return False
            _last, found, *agrees = facts.wait()
            check_facts(found.tolist(), count, len(parts.embedding))
        except (NoStep, IndexError):
            return False
        return all(agrees)

    last, leftpad = positions[:, -1].expand(batch), None if mask is None else (mask == 0).sum(1)
    return Call(asked, parts, memory, last, leftpad, count, stopping_criteria.max_length, holds, ahead)


def run_by_step(asked: Asked, run: Callable, kind: Hashable, why_not: Callable[[NoStep], str]) -> Any:
    """What `run` makes of the call, its cache and a program of this `kind`: twice, where a call that was prepared early
    turns out to be stale. None where there is no step for what is asked, which is counted as `why_not` says it."""
    state = asked.state
    for early in (True, False):
        try:
            call = prepare(asked, early)
        except NoStep as reason:
            state.count(state.calls, why_not(reason))
            return None
        with suppress(Stale), call.cache() as cache, state.lend(kind, asked.input_ids) as program:
            return run(call, cache, program)


def _sampling_loop(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sample(
        self,
        input_ids: Tensor,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus: bool = False,
        streamer=None,
        **model_kwargs,
    ):
        asked = Asked(decoder(self), self, input_ids, stopping_criteria, generation_config, model_kwargs, synced_gpus)
        run = functools.partial(_run, logits_processor=logits_processor, streamer=streamer)
        if (found := run_by_step(asked, run, "logits", by_transformers)) is not None:
            return found
        return original(
            self,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    return _sample


def _other_loop(original: Callable) -> Callable:
    name = original.__name__.removeprefix("init").strip("_").replace("_", " ")

    @functools.wraps(original)
    def loop(self, *args, **kwargs):
        state = decoder(self)
        state.count(state.calls, by_transformers(name))
        return original(self, *args, **kwargs)

    return loop


def _generate(original: Callable) -> Callable:
    """Launches the prompt. Counts calls with custom_generate: such a loop is not looked up on the class."""

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        loop = kwargs.get("custom_generate")
        is_own = loop is None or getattr(loop, "__module__", None) == f"{__package__}.generate"
        if not is_own:
            state = decoder(self)
            state.count(state.calls, "by custom_generate")
        if not is_own or len(args) > 1:
            return original(self, *args, **kwargs)
        with launched(self, kwargs | {"inputs": args[0]} if args else kwargs):
            return original(self, *args, **kwargs)

    generate.__wrapped__ = getattr(original, "__wrapped__", original)  # as without us: generate() with gradients
    return generate


# By the names of transformers' own, which it looks up on the class.
LOOPS = {
    "_sample": _sampling_loop,
    "_beam_search": _other_loop,
    "_assisted_decoding": _other_loop,
    "init_continuous_batching": _other_loop,  # generate_batch begins with it
    "generate": _generate,
}


def _check_call(parts: Description, asked: Asked) -> None:
    """Raise NoStep for whatever a call asks of the loop that only transformers' own has."""
    _, _, input_ids, stopping_criteria, config, inputs, synced_gpus = asked
    if synced_gpus:
        raise NoStep("synced_gpus")
    if config.is_assistant:
        raise NoStep("assistant of assisted decoding")
    if config.output_attentions or config.output_hidden_states:
        raise NoStep("output_attentions or output_hidden_states")
    known = _KNOWN_INPUTS | {cache_name()} | (OF_MODULES if parts.more_than_text else set())
    if unknown := sorted(key for key in inputs if key not in known and inputs[key] is not None):
        raise NoStep(", ".join(unknown))
    check_kept(inputs)
    cache = asked.cache
    if not inputs.get("use_cache") or cache is None:
        raise NoStep("use_cache=False")
    if config.cache_implementation not in (None, "dynamic"):
        raise NoStep(f"cache_implementation={config.cache_implementation}")
    if is_ours(cache):
        check_cache(cache, parts, input_ids.shape[0])
    else:
        check_dynamic(cache, parts, input_ids.shape[0])
    if stopping_criteria.max_length is None:
        raise NoStep("no max_length")
    check_batch(parts, input_ids)


def _run(call: Call, cache, program: Program, logits_processor, streamer):
    """transformers' GenerationMixin._sample by the decode step: same scores, same random numbers, same results."""
    state, model, input_ids, stopping_criteria, config, inputs, _ = call.asked
    keep_scores = config.return_dict_in_generate and config.output_scores
    keep_logits = config.return_dict_in_generate and config.output_logits
    scores, raw_logits = () if keep_scores else None, () if keep_logits else None
    pad = config._pad_token_tensor
    pad = None if pad is None else pad.to(input_ids.device)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    # transformers' own processors read any layout and keep nothing; other people's get what transformers gives them.
    own = all(map(is_transformers, (*logits_processor, *stopping_criteria)))
    watched = not (own and is_transformers(streamer))
    shown = call.shown_cache() if watched else None
    rest = Rest(model, call.parts, inputs, call.last, cache) if watched else None
    late = reading.is_late(input_ids.device)

    logits = call.prefill(cache)
    text = Text(input_ids, stopping_criteria.max_length, copies=not own)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    step = None

    def forward() -> Tensor:
        return rest.forward(text.last(), text.length - input_ids.shape[1])

    def advance() -> Tensor:
        nonlocal step
        if rest and rest.begun:
            return forward()
        step = step or call.begin(cache, program)
        return step(text.last())

    while logits is not None:
        if shown is not None:
            hand_back(cache, shown, frees=False)
        # A copy: processors write into it, and the next step into logits.
        next_logits = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        next_scores = logits_processor(text.read(), next_logits)
        if keep_scores:
            scores += (next_scores,)
        if keep_logits:
            raw_logits += (next_logits,)
        if config.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(next_scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(next_scores, dim=-1)
        if has_eos:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        text.append(tokens)
        unfinished = unfinished & ~stopping_criteria(text.read(), scores)
        late_cache = cache if late and text.length < stopping_criteria.max_length else None
        logits = next_turn(advance, Reading(tokens, unfinished.max()), streamer, late_cache)
        if logits is not None and rest and rest.begins():  # looked at when the device has the step, which is taken back
            logits = forward()
    if step is None:
        state.count(state.calls, PREFILL)
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return text.result()
    return GenerateDecoderOnlyOutput(
        sequences=text.result(),
        scores=scores,
        logits=raw_logits,
        **{cache_name(): call.asked.cache},
    )
