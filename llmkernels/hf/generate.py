"""The lean loop: prefill by the model's own forward into a KVCache, then decode steps with sampling on the device."""

import functools
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from llmkernels.ops import sample

from . import reading
from .decode import decoder
from .reading import Reader, Text
from .report import STEP, by_forward
from .trunk import NoStep, check_batch, check_cache, is_ours, pack, trunk


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
            tokens come from the model's own forward, slower. So do those of an unpatched model. The two compute the
            same, but round differently: where two tokens are as good as equally likely, they may choose another one.
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
    Raises: ValueError for wrong shapes, options out of range, padding on the right, or a cache that is too small;
        TypeError for arguments of another kind.

    >>> llmkernels.patch(model)
    >>> llmkernels.generate(model, ids, max_new_tokens=64, do_sample=True, temperature=0.7, top_p=0.9)
    """
    ids, mask, past = _check_arguments(input_ids, attention_mask, max_new_tokens, streamer, generator, cache)
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
        check_batch(parts, ids)
        if cache is not None:
            check_cache(cache, parts, batch)
        pack(parts)
        state.calls[STEP] += 1
    except NoStep as reason:
        parts = None
        state.calls[by_forward(reason)] += 1
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
    with state.lend_cache(model, parts, batch, prompt, total) as loan:
        return run(loan.cache)


def _check_kind(name: str, value: Any, kind: type, words: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"generate: {name} must be {words}, got {value!r}")


def _check_arguments(input_ids, attention_mask, max_new_tokens, streamer, generator, cache):
    """(input_ids, the mask unless it is all ones, tokens in the cache)."""
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not isinstance(value, Tensor) and (value is not None or name == "input_ids"):
            raise TypeError(f"generate: {name} must be a tensor, got {type(value).__name__}")
    _check_kind("max_new_tokens", max_new_tokens, Integral, "an integer")
    if generator is not None:
        _check_kind("generator", generator, torch.Generator, "a torch.Generator")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"generate: streamer must have put() and end(), got {type(streamer).__name__}")
    if input_ids.ndim != 2 or input_ids.numel() == 0 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"generate: input_ids must be (batch, tokens) of integers, got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be positive, got {max_new_tokens}")
    if cache is not None and not is_ours(cache):
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
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.tolist()
    eos = [] if eos_token_id is None else list(eos_token_id) if _is_list(eos_token_id) else [eos_token_id]
    if pad_token_id is None:
        pad_token_id = getattr(config, "pad_token_id", None)
    pad = pad_token_id if pad_token_id is not None else eos[0] if eos else 0
    for name, token in [("eos_token_id", token) for token in eos] + [("pad_token_id", pad)]:
        _check_kind(name, token, Integral, "an integer" if name == "pad_token_id" else "an integer or several")
    return eos, pad


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


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
    off, dtype, is_valid, words = _OPTIONS[name]
    if isinstance(value, Tensor):
        return True
    for number in value if _is_list(value) else (value,):
        if dtype.is_floating_point:
            _check_kind(name, number, Real, "a number, or one per sequence")
        else:
            _check_kind(name, number, Integral, "an integer, or one per sequence")
        if not is_valid(number):
            raise ValueError(f"generate: {name} must be {words}, got {number}")
    return _is_list(value) or value != off


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
        text = Text(self._ids, prompt + max_new_tokens)
        reads = streamer is not None or self._eos is not None
        reader = Reader(self._ids.device, reading.is_late(self._ids.device))
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
