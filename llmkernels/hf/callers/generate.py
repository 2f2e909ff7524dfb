"""The lean loop: model.generate() of transformers up to its loop, then decode steps with sampling on the device."""

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, logits_process

from llmkernels.ops import sample

from ..modules.replaced import has_kernel
from ..report import PREFILL, by_forward
from ..step.decode import decoder
from ..step.program import Program
from . import reading
from .loop import Asked, Call, run_by_step
from .reading import Reading, Text, next_turn


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    streamer: Any = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    r"""``model.generate(input_ids, **options)`` for greedy search and sampling, with the tokens drawn on the device.

    The call is prepared by ``model.generate`` itself: defaults come from ``model.generation_config`` and then from
    transformers (so ``do_sample=True`` alone means ``top_k=50``), a mask that is not given is inferred from pad tokens,
    and what is refused or warned about there is here. Only the loop over tokens is another one, and its random numbers.

    Args:
        model: a causal language model of transformers, best one given to :func:`patch`. Where its decode step can not
            run (``handle.report()`` says why) or the model is not patched, the tokens come from the model's own
            forward, slower. The two compute the same, but round differently: where two tokens are as good as equally
            likely, they may choose another one.
        input_ids: (B, T) prompts, on the model's device.
        attention_mask: (B, T), 0 for padding.
        max_new_tokens, max_length: where to stop.
        do_sample: draw from the distribution; else take the most likely token.
        temperature, top_k, top_p, min_p, repetition_penalty: as transformers has them, one number each; or one per
            sequence, a list or a tensor (B,), where a temperature of 0 takes the most likely token. All but the penalty
            only matter with ``do_sample``.
        eos_token_id: stop a sequence there, and fill it up with ``pad_token_id``. None or ``[]``: never stop.
        pad_token_id, num_return_sequences, prefill_chunk_size, generation_config: as transformers has them.
        past_key_values: a :class:`KVCache` or ``DynamicCache``, which then holds everything but the last token. If it
            has tokens already, ``input_ids`` are all tokens, and those in the cache are not computed again. From
            transformers 5.24 on also ``cache``.
        streamer: gets the prompt, then the tokens of each step: ``put(ids)`` and ``end()``.
        generator: source of the seed. None: torch's default CPU generator, so ``torch.manual_seed`` counts.

    Returns:
        int64 (B, T + new), as long as the longest sequence: prompt and new tokens.

    Differentiable: no. Deterministic: yes; random numbers included, by the seed.
    Raises: ValueError for an option out of range, or one that only ``model.generate`` has (beam search, processors and
        criteria of one's own, scores), by its name; TypeError for arguments of another kind, and for a model that does
        not generate; RuntimeError for ``input_ids`` that are not (B, T) integers or elsewhere. What
        ``model.generate`` raises besides.

    >>> llmkernels.patch(model)
    >>> llmkernels.generate(model, ids, max_new_tokens=64, do_sample=True, temperature=0.7, top_p=0.9)
    """
    _check_model(model)
    _check_arguments(model.device, input_ids, streamer, generator, options)
    per_sequence = {name: options[name] for name in _OPTIONS if _is_several(options.get(name))}
    options |= dict.fromkeys(per_sequence)
    if "repetition_penalty" in per_sequence:
        options["repetition_penalty"] = 2.0  # any: for its processor, which knows what ids it sees
    if isinstance(options.get("eos_token_id"), Sequence) and not options["eos_token_id"]:
        options["eos_token_id"] = None

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
        _check_config(generation_config, stopping_criteria)
        numbers = _sampling(logits_processor) | per_sequence
        seen = _seen(input_ids, logits_processor)
        if not generation_config.do_sample:
            numbers = {name: value for name, value in numbers.items() if name == "repetition_penalty"}
        return _run(model, input_ids, seen, numbers, stopping_criteria, generation_config, streamer, generator, inputs)

    return model.generate(input_ids, streamer=streamer, custom_generate=loop, **options)


# --- arguments


# What turns each option off, its dtype, and which numbers it takes where there is one per sequence.
_OPTIONS = {
    "temperature": (1.0, torch.float32, lambda x: x >= 0, "at least 0"),
    "top_k": (0, torch.int32, lambda x: x >= 0, "at least 0"),
    "top_p": (1.0, torch.float32, lambda x: 0 <= x <= 1, "in [0, 1]"),
    "min_p": (0.0, torch.float32, lambda x: 0 <= x <= 1, "in [0, 1]"),
    "repetition_penalty": (1.0, torch.float32, lambda x: x > 0, "positive"),
}

# Entries of a generation_config that are read here or in transformers' preparation, or change no result.
_TAKEN = {
    "max_length",
    "max_new_tokens",
    "do_sample",
    *_OPTIONS,
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "num_return_sequences",
    "prefill_chunk_size",
    "token_healing",
    "disable_compile",
    "compile_config",
    "transformers_version",
}

# Arguments that are refused, though model.generate would ignore some of them.
_REFUSED = ("custom_generate", "assistant_model", "inputs_embeds", "input_ids", "inputs", "stop_strings", "synced_gpus")


def _check_model(model: Any) -> None:
    can_generate = getattr(model, "can_generate", None)
    if not callable(can_generate) or not can_generate() or not callable(getattr(model, "generate", None)):
        raise TypeError(
            "generate: model must be a causal language model of transformers, which has generate(), "
            f"got {type(model).__name__}"
        )
    if model.config.is_encoder_decoder:
        raise TypeError(f"generate: model must have a decoder only, got {type(model).__name__}; use model.generate")


def _check_arguments(device: torch.device, input_ids, streamer, generator, options: dict[str, Any]) -> None:
    for name, value in (("input_ids", input_ids), ("attention_mask", options.get("attention_mask"))):
        if not isinstance(value, Tensor) and (value is not None or name == "input_ids"):
            raise TypeError(f"generate: {name} must be a tensor, got {type(value).__name__}")
    for name in ("max_new_tokens", "max_length"):
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise TypeError(f"generate: {name} must be an integer, got {value!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generate: generator must be a torch.Generator, got {generator!r}")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"generate: streamer must have put() and end(), got {type(streamer).__name__}")
    if input_ids.ndim != 2 or input_ids.numel() == 0 or input_ids.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"generate: input_ids must be (batch, tokens) of integers, got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if input_ids.device != device and device.type != "meta":  # which is where weights are that come only when used
        raise RuntimeError(f"generate: input_ids must be on the model's device, {device}, got {input_ids.device}")
    for name in _REFUSED:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"generate: {name} must not be given; model.generate takes it")
    for name, (_, dtype, is_valid, words) in _OPTIONS.items():
        value = options.get(name)
        if not _is_several(value):
            continue
        value = _tensor(value)
        if value.dtype == torch.bool or value.is_complex() or value.is_floating_point() > dtype.is_floating_point:
            kind = "a number" if dtype.is_floating_point else "an integer"
            raise TypeError(f"generate: {name} must be {kind}, or one per sequence, got {options[name]!r}")
        if value.device.type == "cpu":  # nothing waits for a tensor on the device: see `sample`
            for number in value.flatten().tolist():
                if not is_valid(number):
                    raise ValueError(f"generate: {name} must be {words}, got {number}")


def _is_several(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Sequence) and not isinstance(value, str))


def _tensor(value: Any) -> Tensor:
    """Numbers as a tensor; floats in full, though the default dtype may be a short one, and the default device any."""
    if isinstance(value, Tensor):
        return value
    tensor = torch.as_tensor(value, device="cpu")
    return torch.as_tensor(value, device="cpu", dtype=torch.float64) if tensor.is_floating_point() else tensor


def _check_config(config, stopping_criteria) -> None:
    """Raise ValueError for what the loop does not do, by its name."""
    default = GenerationConfig()
    off = vars(default) | default._get_default_generation_params()
    for name, value in vars(config).items():
        if name.startswith("_") or name in _TAKEN or (name in off and value == off[name]):
            continue
        if (not value and name != "use_cache") or (name, value) == ("cache_implementation", "dynamic"):
            continue
        if name == "min_length" and config.min_new_tokens is not None:  # of which transformers has made it
            continue
        raise ValueError(f"generate: {name} must be {off.get(name)!r}, got {value!r}; model.generate takes it")
    for criterion in stopping_criteria:
        if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria):
            raise ValueError(
                f"generate: stopping_criteria must be empty, got {type(criterion).__name__}; model.generate takes it"
            )


def _sampling(logits_processor) -> dict[str, float | int]:
    """What transformers' processors do, as options of `sample`. Raises ValueError for others."""
    # In the order in which `sample` applies them.
    known = {
        logits_process.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
        logits_process.TemperatureLogitsWarper: ("temperature", "temperature"),
        logits_process.TopKLogitsWarper: ("top_k", "top_k"),
        logits_process.TopPLogitsWarper: ("top_p", "top_p"),
        logits_process.MinPLogitsWarper: ("min_p", "min_p"),
    }
    order = list(known)
    found = {}
    for processor in logits_processor:
        kind = type(processor)
        if kind not in order or isinstance(getattr(processor, "prompt_ignore_length", None), int):
            raise ValueError(f"generate: logits_processor must be empty, got {kind.__name__}; model.generate takes it")
        del order[: order.index(kind) + 1]
        name, attribute = known[kind]
        found[name] = getattr(processor, attribute)
    return found


def _seen(ids: Tensor, logits_processor) -> Tensor:
    """The prompt as the penalty sees it: transformers 5.23 leaves out padding, where the last token stands here."""
    for processor in logits_processor:
        padding = getattr(processor, "prompt_ignore_length", None)
        if padding is not None:
            positions = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.where(positions >= padding.to(ids.device)[:, None], ids[:, -1:])
    return ids


# --- the loop


class _ModuleStep:
    """What DecodeStep does, by the model's forward, with the inputs that transformers gives it."""

    def __init__(self, model, outputs, inputs: dict[str, Any], ids: Tensor):
        self.tokens = ids[:, -1].clone()
        self._ids = ids
        self._model = model
        self._inputs = model._update_model_kwargs_for_generation(outputs, inputs)
        self.program = Program()  # for its buffers

    def forward(self) -> Tensor:
        self._ids = torch.cat([self._ids, self.tokens[:, None]], 1)  # which some models look at, for their length
        inputs = self._model.prepare_inputs_for_generation(self._ids, next_sequence_length=1, **self._inputs)
        outputs = self._model(**inputs, return_dict=True)
        self._inputs = self._model._update_model_kwargs_for_generation(outputs, self._inputs)
        return outputs.logits[:, -1].to(self.tokens.device)  # parts of a model may be on several devices

    def run(self, function: Callable[[], Any]) -> Any:
        return function()


def _run(model, input_ids, seen, numbers, stopping_criteria, config, streamer, generator, inputs) -> Tensor:
    state, limit, eos = decoder(model), stopping_criteria.max_length, config._eos_token_tensor
    kind = ("lean", config.do_sample, 0 if eos is None else len(eos), *numbers)

    def loop(step, logits: Tensor, late_cache=None) -> Tensor:
        """`late_cache`: the cache where a step is queued before it is known that it is wanted, and may be undone."""
        text, choice = Text(input_ids, limit), _Choice(step, logits, seen, numbers, config, generator)
        tokens = choice(logits)
        while tokens is not None:
            text.append(tokens)
            more = text.length < limit
            if streamer is None and choice.going is None:
                tokens = choice.next() if more else None
            else:
                # The tokens of the text, since the next step may write over `tokens` meanwhile.
                tokens = next_turn(choice.next, Reading(text.last(), choice.goes_on()), streamer, late_cache, more)
        return text.result()

    def run(call: Call, cache, program: Program) -> Tensor:
        logits = call.prefill(cache)
        step = call.begin(cache, program)
        text = loop(step, logits, cache if reading.is_late(input_ids.device) else None)
        if not step.count:
            state.count(state.calls, PREFILL)
        return text

    asked = Asked(state, model, input_ids, stopping_criteria, config, inputs)
    text = run_by_step(asked, run, kind, by_forward)
    if text is None:
        outputs = model._prefill(input_ids, config, inputs)
        logits = outputs.logits[:, -1].to(input_ids.device)
        step = _ModuleStep(model, outputs, inputs, input_ids)
        del outputs
        text = loop(step, logits)
    if streamer is not None:
        streamer.end()
    return text


class _Choice:
    """Logits to tokens. What the sampling reads stays in place, so that the graph of a step covers it too."""

    def __init__(self, step, logits: Tensor, prompt: Tensor, numbers: dict[str, Any], config, generator):
        self._step = step
        batch, vocab = logits.shape
        buffer = functools.partial(step.program.buffer, device=prompt.device)
        eos, pad = config._eos_token_tensor, config._pad_token_tensor
        self._eos = self.going = None
        if eos is not None:
            self._eos = buffer("eos", (len(eos),), torch.long).copy_(eos)
            self._pad = buffer("pad", (), torch.long).copy_(pad)
            self.going = buffer("going", (batch,), torch.bool).fill_(True)
        self._always = torch.ones((), dtype=torch.bool, device=prompt.device)
        # Tensors, and not numbers that a graph would keep; but those that are off are not there, which costs nothing.
        self._options = {
            name: self._fill(buffer(name, (batch,), _OPTIONS[name][1]), name, value, vocab)
            for name, value in numbers.items()
        }
        if not config.do_sample:
            self._options["temperature"] = 0.0
        if "repetition_penalty" in numbers:
            self._options["seen"] = buffer("seen", (batch, vocab), torch.bool).zero_().scatter_(1, prompt.long(), True)
        self._options["rng_state"] = buffer("rng_state", (2,), torch.long)
        home = "cpu" if generator is None else generator.device  # never the default device
        self._options["rng_state"].copy_(torch.randint(1 << 43, (2,), generator=generator, device=home))

    @staticmethod
    def _fill(buffer: Tensor, name: str, value, vocab: int) -> Tensor:
        value = _tensor(value)
        if value.ndim and value.shape != buffer.shape:
            raise ValueError(
                f"generate: {name} must be a number or one per sequence {tuple(buffer.shape)}, got {tuple(value.shape)}"
            )
        if name == "top_k":  # before it can overflow
            value = value.clamp(max=vocab)
        if name == "top_p":  # 0 leaves one token, as in transformers
            value = value.clamp(min=torch.finfo(torch.float32).tiny)
        return buffer.copy_(value)

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token of each sequence, int64 (B,), into the step's `tokens`."""
        return self._finish(self._sample(logits))

    def next(self) -> Tensor:
        """The same after a step."""
        return self._finish(self._step.run(self._advance))

    def _advance(self) -> Tensor:
        return self._sample(self._step.forward())

    def _sample(self, logits: Tensor) -> Tensor:
        return sample(logits if has_kernel(logits) else logits.float(), **self._options)

    def _finish(self, tokens: Tensor) -> Tensor:
        if self._eos is not None:
            tokens = torch.where(self.going, tokens, self._pad)
            self.going &= (tokens[:, None] != self._eos).all(1)
        self._step.tokens.copy_(tokens)
        return tokens

    def goes_on(self) -> Tensor:
        """Whether there is a sequence that has not ended."""
        return self._always if self.going is None else self.going.any()
