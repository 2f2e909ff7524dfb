"""The loop behind a patched model's generate(): transformers' own, by the decode step.

LOOPS is what a patched model class has in place of transformers' loops: see layers.generating_class. It prefills by the
model's own forward, into a KVCache.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import reading
from .decode import Decoder, decoder
from .reading import Reader, Text
from .report import STEP
from .trunk import NoStep, Trunk, check_batch, check_cache, is_ours, pack, trunk

_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


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
        state = decoder(self)
        try:
            parts = trunk(self)
            _check_call(self, parts, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs)
            starts = _left_padding(model_kwargs, generation_config)
            pack(parts)
        except NoStep as reason:
            state.calls[f"by transformers: {reason}"] += 1
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
        state.calls[STEP] += 1
        loop = functools.partial(
            _run,
            self,
            state,
            parts,
            starts,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
        )
        cache = model_kwargs["past_key_values"]
        if not is_ours(cache):
            with state.lend_cache(self, *input_ids.shape, stopping_criteria.max_length) as loan:
                loan.kept = bool(generation_config.return_dict_in_generate)
                return loop(model_kwargs | {"past_key_values": loan.cache})
        return loop(model_kwargs)

    return _sample


def _other_loop(original: Callable) -> Callable:
    name = original.__name__.strip("_").replace("_", " ")

    @functools.wraps(original)
    def loop(self, *args, **kwargs):
        decoder(self).calls[f"by transformers: {name}"] += 1
        return original(self, *args, **kwargs)

    return loop


# By the names of transformers' own, which it looks up on the class.
LOOPS = {"_sample": _sampling_loop, "_beam_search": _other_loop, "_assisted_decoding": _other_loop}


def _check_call(model, parts: Trunk, input_ids, stopping_criteria, config, synced_gpus, inputs: dict[str, Any]) -> None:
    """Raise NoStep for whatever a call asks of the loop that only transformers' own has."""
    from transformers import DynamicCache

    if synced_gpus:
        raise NoStep("synced_gpus")
    if config.is_assistant:
        raise NoStep("assistant of assisted decoding")
    if config.output_attentions or config.output_hidden_states:
        raise NoStep("output_attentions or output_hidden_states")
    if unknown := sorted(key for key in inputs if key not in _KNOWN_INPUTS and inputs[key] is not None):
        raise NoStep(", ".join(unknown))
    if "prepare_inputs_for_generation" in vars(model):
        raise NoStep("prepare_inputs_for_generation was replaced")
    cache = inputs.get("past_key_values")
    if not inputs.get("use_cache") or cache is None:
        raise NoStep("use_cache=False")
    if config.cache_implementation not in (None, "dynamic"):
        raise NoStep(f"cache_implementation={config.cache_implementation}")
    if is_ours(cache):
        check_cache(cache, parts, input_ids.shape[0])
    elif type(cache) is not DynamicCache or cache.get_seq_length() or getattr(cache, "_is_user_defined", False):
        raise NoStep(f"the cache given is a {type(cache).__name__}, not a llmkernels.KVCache")
    if stopping_criteria.max_length is None:
        raise NoStep("no max_length")
    check_batch(parts, input_ids)


def _left_padding(inputs: dict[str, Any], config) -> Tensor | None:
    """Where each sequence starts, None for all at 0. Raises NoStep for other masks and positions than left padding's.

    Reads a few numbers on the host: before the prefill, where nothing is waiting yet.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if positions is None or positions.ndim != 2:
        raise NoStep("position_ids are not (batch, tokens)")
    if mask is not None and mask.ndim != 2:
        raise NoStep("attention_mask is not (batch, tokens)")
    last = positions[:, -1]
    facts = [last.max(), last.min()]
    if mask is not None:
        live = mask != 0
        facts += [live.all(), (live[:, 1:] >= live[:, :-1]).all()]
    highest, lowest, full, padded_left = [*torch.stack([fact.long() for fact in facts]).tolist(), 1, 1][:4]
    # transformers from 5.23 drops a mask of ones, and notes its length.
    tokens = mask.shape[1] if mask is not None else getattr(config, "_mask_length", positions.shape[1])
    if not padded_left:
        raise NoStep("attention_mask masks more than padding on the left")
    if lowest < 0 or highest >= tokens:  # cos and sin are there for as many positions as there are tokens
        raise NoStep("position_ids run ahead of the tokens")
    return None if full else (~live).sum(1)


def _run(
    model,
    state: Decoder,
    parts: Trunk,
    starts: Tensor | None,
    input_ids: Tensor,
    logits_processor,
    stopping_criteria,
    config,
    streamer,
    inputs: dict[str, Any],
):
    """transformers' GenerationMixin._sample by the decode step: same scores, same random numbers, same results."""
    cache = inputs["past_key_values"]
    keep_scores = config.return_dict_in_generate and config.output_scores
    keep_logits = config.return_dict_in_generate and config.output_logits
    scores, raw_logits = () if keep_scores else None, () if keep_logits else None
    pad = config._pad_token_tensor
    pad = None if pad is None else pad.to(input_ids.device)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    max_length = stopping_criteria.max_length
    # transformers' own processors read any layout; other people's may call view() or keep what they get.
    own = all(type(x).__module__.startswith("transformers.") for x in (*logits_processor, *stopping_criteria))
    text = Text(input_ids, max_length, copies=not own)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    late = reading.is_late(input_ids.device) and all(map(_is_pure, stopping_criteria))
    reader = Reader(input_ids.device, late)
    random_state = _RandomState(input_ids.device, late and config.do_sample)

    outputs = model._prefill(input_ids, config, inputs)
    logits = outputs.logits[:, -1]
    del outputs
    step = None
    undo = 0
    while True:
        # A copy: processors write into it, and the next step into logits.
        next_logits = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        next_scores = logits_processor(text.read(), next_logits)
        if keep_scores:
            scores += (next_scores,)
        if keep_logits:
            raw_logits += (next_logits,)
        random_state.record()
        if config.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(next_scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(next_scores, dim=-1)
        if has_eos:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        text.append(tokens)
        unfinished = unfinished & ~stopping_criteria(text.read(), scores)
        for seen, going in reader.put(tokens, unfinished.max()):
            if streamer is not None:
                streamer.put(seen)
            if not going:
                undo = reader.pending
                break
        else:
            if text.length < max_length:
                if step is None:
                    step = state.begin(model, parts, _begin(cache, inputs, starts))
                logits = step(tokens)
                continue
            for seen, _ in reader.flush():
                if streamer is not None:
                    streamer.put(seen)
        break
    if undo:  # the step after the last one, which was under way already
        text.length -= 1
        cache.crop(-1)
        random_state.restore()
        scores, raw_logits = (kept and kept[:-1] for kept in (scores, raw_logits))
    if streamer is not None:
        streamer.end()
    ids = text.result()
    if not config.return_dict_in_generate:
        return ids
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=raw_logits, past_key_values=cache)


def _begin(cache, inputs: dict[str, Any], starts: Tensor | None):
    """The cache with its counters set behind the prompt."""
    last = inputs["position_ids"][:, -1]
    cache.begin(last.expand(cache.layers[0].k.shape[0]), starts)
    return cache


def _is_pure(criterion) -> bool:
    """Whether a stopping criterion may be asked once too often."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    return type(criterion) in (EosTokenCriteria, MaxLengthCriteria)


class _RandomState:
    """Takes back the random numbers of an undone step, so that the next call draws what it would have drawn."""

    def __init__(self, device: torch.device, active: bool):
        self._generator = None
        if active and device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generator = torch.cuda.default_generators[index]
        self._offset = 0

    def record(self) -> None:
        if self._generator is not None:
            self._offset = self._generator.get_offset()

    def restore(self) -> None:
        if self._generator is not None:
            self._generator.set_offset(self._offset)
