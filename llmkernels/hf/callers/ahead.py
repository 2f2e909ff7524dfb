"""A prompt of generate() that runs on a GPU while transformers prepares the call, which takes 1 to 2 ms of the host.

    generate      launched(): the prompt of a call of a model that is known, for greedy search or sampling
    its loop      taken_by(): the logits and the cache, if the call is what they were made for; else they are dropped,
                  and the prompt runs once more

It runs in a stream of its own: transformers copies numbers to the GPU meanwhile, and waits for its stream each time.
Where one was dropped, prompts of that model run no more ahead until it is read anew.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from ..cache.adopted import windows
from ..errors import NoStep
from ..step import prompt
from ..step.decode import Decoder, decoder, stream_handle
from ..step.describe import Described, check_batch, check_length
from ..step.program import Program
from . import reading
from .reading import stream_beside

# Arguments of generate() that leave its prompt as it is.
_KNOWN = {
    "inputs",
    "input_ids",
    "attention_mask",
    "max_new_tokens",
    "min_new_tokens",
    "max_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "eos_token_id",
    "pad_token_id",
    "logits_processor",
    "stopping_criteria",
    "streamer",
    "tokenizer",
    "disable_compile",
    "generation_config",
    "custom_generate",
}
# Options that change the prompt, its cache or the loop behind it, as arguments or in the generation_config, unless they
# have one of these values.
_HARMLESS = {
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "hybrid"),  # the last of which transformers takes for none
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "return_dict_in_generate": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "is_assistant": (None, False),
    "synced_gpus": (None, False),
    "token_healing": (None, False),
    "prefill_chunk_size": (None,),
    "prompt_lookup_num_tokens": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
}
_ANY_LENGTH = 20  # that transformers takes where a call names none
# Of all sequences together: what the host does hardly matters beside more, whose activations take memory.
_MOST_TOKENS = 4096
# A prompt that takes an H200 1.5 ms, to read the weights or for the products. Shorter ones end before the host is done,
# which has more to do for a prompt ahead. us of generate() for one token behind 128, without / with that, on one H200:
# Qwen2.5-7B 7122 / 5319, Qwen2.5-0.5B 3510 / 3698.
_LEAST_WEIGHTS, _LEAST_PRODUCTS = 3 * 10**9, 45 * 10**10


@dataclass(eq=False)
class Ahead:
    """A prompt `ids` (B, T) under way in `stream`, None on a CPU.

    `last` (B,) are the positions of the last tokens, or that of all, and `leftpad` where each sequence starts: the
    stream reads them. `given` is a cache like the one that transformers makes, `cache` the KVCache in its place, on
    `loan`; `program` is the loan of the graph.
    """

    described: Described
    memory: list[Any]
    ids: Tensor
    last: Tensor | int
    leftpad: Tensor | None
    given: DynamicCache
    cache: Any
    logits: Tensor
    loan: ExitStack
    program: ExitStack
    stream: torch.cuda.Stream | None
    is_taken: bool = False

    def join(self) -> None:
        """Let the caller's stream wait for it, where others may run its graph from then on."""
        if self.stream is not None:
            torch.cuda.current_stream(self.ids.device).wait_stream(self.stream)
        self.program.close()

    def end(self) -> None:
        """Give the cache back."""
        self.join()
        self.loan.close()

    def drop(self) -> None:
        """It is of no use: let the call have the cache."""
        self.is_taken = False
        self.end()

    def agrees(self, positions: Tensor) -> Tensor:
        """Whether it ran with these positions (B, T). With those of another mask it did not."""
        return (positions[:, -1] == self.last).all()


_CURRENT: ContextVar[Ahead | None] = ContextVar("llmkernels_prompt_ahead", default=None)


@contextmanager
def launched(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """A call of model.generate() by these arguments, for the block."""
    state = decoder(model)
    found = _launch(model, state, arguments)
    token = _CURRENT.set(found)
    try:
        yield
        if found is not None and not found.is_taken:
            state.dropped_ahead = found.described
    finally:
        _CURRENT.reset(token)
        if found is not None:
            found.end()


def taken_by(described: Described, ids: Tensor, given: Any) -> Ahead | None:
    """The prompt ahead, if it is of these ids and this empty cache would be its; the caller compares the positions."""
    found = _CURRENT.get()
    if found is None or found.is_taken or found.described is not described:
        return None
    same_ids = (ids.data_ptr(), ids.shape, ids.stride()) == (found.ids.data_ptr(), found.ids.shape, found.ids.stride())
    layers = len(described.parts.layers)
    same_windows = windows(given, layers) == windows(found.given, layers)
    same_cache = same_windows and not getattr(given, "_is_user_defined", False)
    if not (same_ids and same_cache):
        found.drop()
        return None
    found.is_taken = True
    return found


def _launch(model: nn.Module, state: Decoder, arguments: Mapping[str, Any]) -> Ahead | None:
    # By priority, as transformers has it.
    configs = arguments.get("generation_config"), model.generation_config
    options = [arguments, *(vars(config) for config in configs if isinstance(config, GenerationConfig))]
    found = _find_prompt(arguments) if _is_simple(options) else None
    if found is None:
        return None
    ids, mask = found
    known, limit = state.known(ids), _limit(options, ids.shape[1])
    if known is None or limit is None or known[0] is state.dropped_ahead:
        return None
    (described, memory), (batch, count) = known, ids.shape
    parts = described.parts
    if parts.layer_weights < _LEAST_WEIGHTS and ids.numel() * parts.layer_weights < _LEAST_PRODUCTS:
        return None
    given = DynamicCache(config=model.config.get_text_config(decoder=True))
    try:
        check_batch(parts, ids)
        check_length(parts, limit)
        with torch.no_grad(), ExitStack() as loan, ExitStack() as program:
            caller = stream_handle(ids.device)

            def lend(kind: Hashable, ids: Tensor, padded: int) -> AbstractContextManager[Program]:
                # One of the caller's stream, which has run it before and will again.
                return nullcontext(program.enter_context(state.lend(kind, ids, padded, caller)))

            cache = loan.enter_context(state.lend_cache(parts, batch, count, limit, given))
            leftpad = None if mask is None else (mask == 0).sum(1)
            last = count - 1 if leftpad is None else count - 1 - leftpad
            # What outlives the prompt is allocated in the caller's stream, to which its memory goes back.
            prompt.check_prompt(parts, cache, count)
            prompt.allocate(parts, cache, batch)
            cache.begin(last - count, leftpad)
            _parts, _fp8 = prompt.for_prompt(parts, ids.numel())
            with _beside(ids.device) as stream:
                logits = state.run_prompt(parts, cache, ids, last, leftpad, lend=lend)
            if stream is not None:
                logits.record_stream(torch.cuda.current_stream(ids.device))
            loans = loan.pop_all(), program.pop_all()
            return Ahead(described, memory, ids, last, leftpad, given, cache, logits, *loans, stream)
    except NoStep:
        return None


def _find_prompt(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """The ids and the mask of a call, if they are a prompt that may run ahead."""
    ids = arguments.get("input_ids") if arguments.get("inputs") is None else arguments["inputs"]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not 0 < ids.numel() <= _MOST_TOKENS:
        return None
    if ids.dtype not in (torch.int32, torch.int64) or not reading.is_late(ids.device):
        return None
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape and mask.device == ids.device):
        return None
    return ids, mask


def _is_simple(options: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the call is for greedy search or sampling of one text behind each prompt, and for nothing but its
    tokens."""
    arguments, *_ = options
    if any(name not in _KNOWN and name not in _HARMLESS and value is not None for name, value in arguments.items()):
        return False
    return all(one.get(name) in harmless for name, harmless in _HARMLESS.items() for one in options)


def _limit(options: Sequence[Mapping[str, Any]], count: int) -> int | None:
    """How long the text may get. None where an option is no number, which transformers refuses."""
    new, length = (
        next((one[name] for one in options if one.get(name) is not None), None)
        for name in ("max_new_tokens", "max_length")
    )
    limit = count + _ANY_LENGTH if length is None else length
    if new is not None:
        limit = count + new if isinstance(new, int) else None
    return limit if isinstance(limit, int) and limit > count else None


@contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """For the block a stream of its own, which goes on where the caller's is; None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    caller = torch.cuda.current_stream(device)
    stream = stream_beside(caller.device_index, caller.cuda_stream, "prompts")
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            yield stream
    except BaseException:
        caller.wait_stream(stream)
        raise
