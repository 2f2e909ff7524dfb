"""Generation by the decode step: the loop behind a patched model's generate(), and a leaner one of our own.

    LOOPS       what a patched model class has in place of transformers' loops: see layers.generating_class
    generate    the lean loop, with sampling on the device

Both prefill by the model's own forward, into a KVCache. Both look at what a step decided one step late on CUDA, so
that the next step is queued before the last one is done, and undo the step too many. Source of that: transformers'
DeferredStopCheck, which does it on MPS.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmkernels.ops import sample

from .decode import MAX_BATCH, Decoder, NoStep, Trunk, decoder, pack, trunk

STEP = "by the decode step"
_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


# ---- behind model.generate()


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
        if not _is_ours(cache):
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
    if _is_ours(cache):
        _check_cache(cache, parts, input_ids.shape[0])
    elif type(cache) is not DynamicCache or cache.get_seq_length() or getattr(cache, "_is_user_defined", False):
        raise NoStep(f"the cache given is a {type(cache).__name__}, not a llmkernels.KVCache")
    if stopping_criteria.max_length is None:
        raise NoStep("no max_length")
    _check_batch(parts, input_ids)


def _check_batch(parts: Trunk, input_ids: Tensor) -> None:
    if input_ids.shape[0] > MAX_BATCH:
        raise NoStep(f"a batch of more than {MAX_BATCH}")
    if input_ids.device != parts.head.device:
        raise NoStep(f"input_ids on {input_ids.device}")
    if input_ids.numel() == 0:
        raise NoStep("empty input_ids")


def _check_cache(cache, parts: Trunk, batch: int) -> None:
    if len(cache.layers) != len(parts.layers):
        raise NoStep(f"the cache has {len(cache.layers)} layers")
    weight = parts.head
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        if buffers.is_initialized:
            expected = (batch, buffers.capacity, layer.kv_heads, layer.head_dim)
            for buffer in (buffers.k, buffers.v):
                if buffer.shape != expected or buffer.dtype != weight.dtype or buffer.device != weight.device:
                    raise NoStep("the cache was made for other keys and values")


def _is_ours(cache) -> bool:
    from .cache import KVCache

    return type(cache) is KVCache


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
    text = _Text(input_ids, max_length, copies=not own)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    late = _is_late(input_ids.device) and all(map(_is_pure, stopping_criteria))
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


class _Text:
    """The tokens so far, in a buffer that is appended to."""

    def __init__(self, ids: Tensor, limit: int, copies: bool = False):
        self.length = ids.shape[1]
        self._copies = copies
        self._ids = ids.new_empty(len(ids), max(min(limit, self.length + 4096), self.length + 1))
        self._ids[:, : self.length] = ids

    def append(self, tokens: Tensor) -> None:
        if self.length == self._ids.shape[1]:
            self._ids = nn.functional.pad(self._ids, (0, self.length))
        self._ids[:, self.length] = tokens
        self.length += 1

    def read(self) -> Tensor:
        """The tokens as processors and criteria get them: rows may be further apart than they are long."""
        ids = self._ids[:, : self.length]
        return ids.clone(memory_format=torch.contiguous_format) if self._copies else ids

    def result(self) -> Tensor:
        return self._ids[:, : self.length].contiguous()


def _is_pure(criterion) -> bool:
    """Whether a stopping criterion may be asked once too often."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    return type(criterion) in (EosTokenCriteria, MaxLengthCriteria)


def _is_late(device: torch.device) -> bool:
    return device.type == "cuda"


class Reader:
    """Brings the tokens of a step and a number to the host, one step late where that saves a wait."""

    def __init__(self, device: torch.device, late: bool):
        self._late = late
        self._cuda = device.type == "cuda"
        self._under_way: list[tuple[Tensor, Tensor, Any]] = []

    @property
    def pending(self) -> int:
        return len(self._under_way)

    def put(self, tokens: Tensor, number: Tensor) -> list[tuple[Tensor, int]]:
        """Start reading a step; returns those that are there, oldest first."""
        copies = [self._copy(x) for x in (tokens, number)]
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tokens.device))
        self._under_way.append((*copies, event))
        return self._take(1 if self._late else 0)

    def flush(self) -> list[tuple[Tensor, int]]:
        return self._take(0)

    def _take(self, left: int) -> list[tuple[Tensor, int]]:
        done = []
        while len(self._under_way) > left:
            tokens, number, event = self._under_way.pop(0)
            if event is not None:
                event.synchronize()
            done.append((tokens, int(number)))
        return done

    def _copy(self, x: Tensor) -> Tensor:
        if not self._cuda:
            return x.detach().clone()
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


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


# ---- the lean loop


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 256,
    do_sample: bool = False,
    temperature: float | Sequence[float] | Tensor = 1.0,
    top_k: int | Sequence[int] | Tensor = 0,
    top_p: float | Sequence[float] | Tensor = 1.0,
    min_p: float | Sequence[float] | Tensor = 0.0,
    repetition_penalty: float | Sequence[float] | Tensor = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    streamer: Any = None,
    generator: torch.Generator | None = None,
    cache: Any = None,
) -> Tensor:
    r"""Generate tokens with a patched causal language model: prefill, then one decode step per token.

    Args:
        model: a model given to :func:`patch`. Where its decode step can not run (``handle.report()`` says why) the
            tokens come from the model's own forward: the same ones, slower. So do those of an unpatched model.
        input_ids: (B, T) prompts, on the model's device.
        attention_mask: (B, T), 0 for padding, which must be on the left. None: there is none.
        max_new_tokens: stop after so many.
        do_sample: draw from the distribution; else take the most likely token.
        temperature, top_k, top_p, min_p, repetition_penalty: as transformers has them, and applied in its order
            (penalty first). One number, or one per sequence. 0 for ``top_k``, 1 for ``top_p`` and 0 for ``min_p``
            are off. All but the penalty only matter with ``do_sample``.
        eos_token_id: stop a sequence there, and fill it up with ``pad_token_id``. None: that of the model's
            generation_config; ``[]``: never stop.
        pad_token_id: None: that of the generation_config, else the first of ``eos_token_id``.
        streamer: gets the prompt, then the tokens of each step, as from transformers: ``put(ids)`` and ``end()``.
        generator: source of the seed. None: torch's default CPU generator, so ``torch.manual_seed`` counts.
        cache: a :class:`KVCache`, which then holds everything but the last token. With tokens in it, ``input_ids``
            are those behind them, and ``attention_mask`` covers both.

    Returns:
        int64 (B, T + new), as long as the longest sequence: prompt and new tokens.

    Differentiable: no. Deterministic: yes; random numbers included, by the seed.
    Raises: ValueError for wrong shapes, padding on the right, or a cache that is too small.

    >>> llmkernels.patch(model)
    >>> llmkernels.generate(model, ids, max_new_tokens=64, do_sample=True, temperature=0.7, top_p=0.9)
    """
    ids, mask, past = _check_arguments(model, input_ids, attention_mask, max_new_tokens, cache)
    device, (batch, prompt) = ids.device, ids.shape
    eos, pad = _special_tokens(model, eos_token_id, pad_token_id)
    state = decoder(model)
    total = past + prompt + max_new_tokens
    starts = None if mask is None else (mask == 0).sum(1)
    if cache is not None and 0 <= cache.get_max_length() < total - 1:
        raise ValueError(f"generate: cache must have a capacity of at least {total - 1} tokens, got {cache.capacity}")
    positions = torch.arange(past, past + prompt, device=device).expand(batch, -1)
    if starts is not None:
        positions = (positions - starts[:, None]).clamp(min=0)
    try:
        parts = trunk(model)
        _check_batch(parts, ids)
        if cache is not None:
            _check_cache(cache, parts, batch)
        pack(parts)
        state.calls[STEP] += 1
    except NoStep as reason:
        parts = None
        state.calls[f"by the model's forward: {reason}"] += 1
    options = {"repetition_penalty": repetition_penalty}
    if do_sample:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {name: value for name, value in options.items() if _is_on(name, value)}
    if streamer is not None:
        streamer.put(ids.cpu())

    def run(cache) -> Tensor:
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if parts is None:
            step = _ModuleStep(model, cache, mask, positions)
        else:
            cache.begin(positions[:, -1], starts)
            kind = ("lean", do_sample, len(eos), *options)
            step = state.begin(model, parts, cache, kind)
        loop = _Lean(step, output.logits[:, -1], ids, do_sample, options, eos, pad, generator)
        return loop.run(max_new_tokens, streamer)

    if cache is not None:
        return run(cache)
    with state.lend_cache(model, batch, prompt, total) as loan:
        return run(loan.cache)


def _check_arguments(model, input_ids, attention_mask, max_new_tokens, cache):
    """(input_ids, the mask unless it is all ones, tokens in the cache)."""
    if input_ids.ndim != 2 or input_ids.numel() == 0 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"generate: input_ids must be (batch, tokens) of integers, got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be positive, got {max_new_tokens}")
    if cache is not None and not _is_ours(cache):
        raise ValueError(f"generate: cache must be a llmkernels.KVCache, got {type(cache).__name__}")
    past = 0 if cache is None else cache.get_seq_length()
    mask = attention_mask
    if mask is not None:
        expected = (input_ids.shape[0], past + input_ids.shape[1])
        if mask.shape != expected:
            raise ValueError(f"generate: attention_mask must have shape {expected}, got {tuple(mask.shape)}")
        live = mask != 0
        full, padded_left = torch.stack([live.all(), (live[:, 1:] >= live[:, :-1]).all() & live[:, -1].all()]).tolist()
        if not padded_left:
            raise ValueError("generate: attention_mask must have its zeros on the left, got some behind a token")
        mask = None if full else live.long()
    return input_ids.long(), mask, past


def _special_tokens(model, eos_token_id, pad_token_id) -> tuple[list[int], int]:
    config = getattr(model, "generation_config", None)
    if eos_token_id is None:
        eos_token_id = getattr(config, "eos_token_id", None)
    eos = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    if pad_token_id is None:
        pad_token_id = getattr(config, "pad_token_id", None)
    return eos, pad_token_id if pad_token_id is not None else eos[0] if eos else 0


# What turns each option off, its dtype, and which values it takes.
_OPTIONS = {
    "temperature": (1.0, torch.float32, lambda x: x >= 0, "at least 0"),
    "top_k": (0, torch.int32, lambda x: x >= 0, "at least 0"),
    "top_p": (1.0, torch.float32, lambda x: 0 < x <= 1, "in (0, 1]"),
    "min_p": (0.0, torch.float32, lambda x: 0 <= x <= 1, "in [0, 1]"),
    "repetition_penalty": (1.0, torch.float32, lambda x: x > 0, "positive"),
}


def _is_on(name: str, value: Any) -> bool:
    """Raises ValueError where the value, on the host, is out of range."""
    off, _, is_valid, words = _OPTIONS[name]
    if not isinstance(value, Tensor):
        for number in value if isinstance(value, Sequence) else (value,):
            if not is_valid(number):
                raise ValueError(f"generate: {name} must be {words}, got {number}")
    return isinstance(value, Tensor | Sequence) or value != off


class _ModuleStep:
    """What DecodeStep does, by the model's forward."""

    def __init__(self, model, cache, mask: Tensor | None, positions: Tensor):
        self.cache = cache
        self.device = positions.device
        self.tokens = torch.zeros(len(positions), dtype=torch.long, device=self.device)
        self._model = model
        self._mask = mask
        self._positions = positions[:, -1:].clone()
        self._buffers: dict[str, Tensor] = {}

    @property
    def program(self):
        return self

    def buffer(self, name, shape, dtype, device) -> Tensor:
        return self._buffers.setdefault(name, torch.zeros(shape, dtype=dtype, device=device))

    def forward(self) -> Tensor:
        self._positions += 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        return self._model(
            input_ids=self.tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def run(self, function: Callable[[], Any]) -> Any:
        return function()


class _Lean:
    """The loop over steps. What `_choose` reads and writes stays in place, so that a graph covers it too."""

    def __init__(self, step, logits: Tensor, ids: Tensor, do_sample: bool, options, eos, pad, generator):
        self.step = step
        self._ids = ids
        self._first = logits
        batch, vocab = logits.shape
        buffer = functools.partial(step.program.buffer, device=ids.device)
        self._finished = buffer("finished", (batch,), torch.bool).zero_()
        self._eos = buffer("eos", (len(eos),), torch.long) if eos else None
        self._pad = buffer("pad", (), torch.long).fill_(pad)
        if eos:
            self._eos.copy_(torch.tensor(eos))
        # Tensors, and not numbers that a graph would keep; but those that are off are numbers, which cost nothing.
        self._options = {
            name: self._fill(buffer(name, (batch,), _OPTIONS[name][1]), name, value) for name, value in options.items()
        }
        if not do_sample:
            self._options["temperature"] = 0.0
        if "repetition_penalty" in options:
            self._options["seen"] = buffer("seen", (batch, vocab), torch.bool).zero_().scatter_(1, ids, True)
        self._options["rng_state"] = buffer("rng_state", (2,), torch.long)
        seed = torch.randint(1 << 43, (2,), generator=generator, device=generator and generator.device)
        self._options["rng_state"].copy_(seed)

    @staticmethod
    def _fill(buffer: Tensor, name: str, value) -> Tensor:
        value = torch.as_tensor(value, dtype=buffer.dtype)
        if value.ndim and value.shape != buffer.shape:
            raise ValueError(
                f"generate: {name} must be a number or one per sequence {tuple(buffer.shape)}, got {tuple(value.shape)}"
            )
        return buffer.copy_(value)

    def _choose(self, logits: Tensor) -> Tensor:
        """The next token of each sequence, int64 (B,), into the step's `tokens`."""
        tokens = sample(logits, **self._options)
        if self._eos is not None:
            tokens = torch.where(self._finished, self._pad, tokens)
            self._finished |= (tokens[:, None] == self._eos).any(1)
        self.step.tokens.copy_(tokens)
        return tokens

    def _advance(self) -> Tensor:
        return self._choose(self.step.forward())

    def run(self, max_new_tokens: int, streamer) -> Tensor:
        prompt = self._ids.shape[1]
        text = _Text(self._ids, prompt + max_new_tokens)
        reads = streamer is not None or self._eos is not None
        reader = Reader(self._ids.device, _is_late(self._ids.device))
        while True:
            tokens = self._choose(self._first) if text.length == prompt else self.step.run(self._advance)
            text.append(tokens)
            done = text.length == prompt + max_new_tokens
            if not reads:
                if done:
                    return text.result()
                continue
            steps = reader.put(tokens, self._finished.all())
            for seen, finished in steps + (reader.flush() if done and not any(f for _, f in steps) else []):
                if streamer is not None:
                    streamer.put(seen)
                if finished:
                    done = True
                    break
            else:
                if not done:
                    continue
            break
        if reader.pending:  # the step after the last one, which was under way already
            text.length -= 1
            self.step.cache.crop(-1)
        if streamer is not None:
            streamer.end()
        return text.result()
