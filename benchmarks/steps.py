"""What a call of generate takes per token, patched and not: a call for many tokens less a call for few, over the tokens
between.

Both begin with the same cache. Contexts are random keys and values, since what they hold does not change what reading
them takes. All ways are timed in turn, so that a busy moment of the host is nobody's alone; all but ours have
transformers' own growing cache.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import llmkernels
from benchmarks import timing
from benchmarks.cases import OURS
from benchmarks.models import fits_in_float32, float32_copy, head_dim, load
from benchmarks.run import Run

BATCHES, MORE_BATCHES = (1, 4, 16, 64), (32,)  # a section each, since a GPU is rarely free for long
CONTEXTS = (128, 512, 2048, 8192, 32768)
FIRST_SIZES = ((1, 512), (8, 512), (64, 512), (1, 8192))  # where everybody is measured
CPU_SIZES = ((1, 128), (8, 128))
# Tokens of the two calls: MANY at most, and no more than it takes for a difference of so many us. What a call takes
# beside its tokens varies by several thousand.
FEW, MANY, DIFFERENCE_US = 4, 100, 330e3
TURNS = 3  # of everybody
REPEATS, SECONDS = 3, 1 / TURNS  # samples in a turn: at least so many, for at least so long

Size = tuple[int, int]  # batch, context
Measured = tuple[list[float], int]  # samples in us per token, and the peak memory
Way = Callable[[int, int], Measured]  # to generate, of batch and context


class Bench:
    """One model over batches and contexts."""

    def __init__(self, run: Run, loaded: tuple[nn.Module, str] | None = None):
        self.run, self.device = run, run.device
        self.model, self.name = loaded or load(run.device, run.model_id)
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self.few, self.many, self.seconds = (2, 6, 0) if run.small else (FEW, MANY, SECONDS)
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.facts: dict[str, dict] = {}

    @property
    def first_sizes(self) -> Sequence[Size]:
        return CPU_SIZES if self.run.small else FIRST_SIZES

    def other_sizes(self, batches: Sequence[int]) -> Sequence[Size]:
        sizes = [(batch, context) for context in CONTEXTS for batch in batches]
        return [] if self.run.small else [size for size in sizes if size not in FIRST_SIZES]

    @torch.no_grad()
    def rows(self, ways: Mapping[str, Way], sizes: Sequence[Size], op: str = "decode", beams: int = 1) -> list[dict]:
        """A row for each way at each size, from samples of all turns. What does not run is left out by name."""
        found = []
        for batch, context in sizes:
            samples = {name: [] for name in ways if self.run.wants(name)}
            peaks = dict.fromkeys(samples, 0)
            for provider in timing.in_turn(list(samples), 1 if self.run.small else TURNS):
                if provider not in samples:
                    continue
                self.run.begin(f"{op}, batch {batch}, context {context}, {provider}")
                try:
                    self.need_room(batch * beams, context)
                    with timing.garbage_collection_paused():
                        measured, peak = ways[provider](batch, context)
                    samples[provider] += measured
                    peaks[provider] = max(peaks[provider], peak)
                except Exception as problem:
                    if provider == OURS and not isinstance(problem, torch.OutOfMemoryError):
                        raise
                    self.run.warn(f"{provider}, batch {batch}, context {context}", problem)
                    del samples[provider]
                finally:
                    self.clear()
            for provider, measured in samples.items():
                row = {"op": op, "model": self.name, "batch": batch, "context": context, "dtype": self.dtype}
                row |= {"provider": provider, "timing": "wall", **timing.summary(measured)}
                row |= {"bytes": self.bytes(batch * beams, context), **self.facts.get(provider, {})}
                found.append(row | ({"peak_bytes": peaks[provider]} if peaks[provider] else {}))
        return found

    @property
    def our_ways(self) -> dict[str, Way]:
        return {OURS: self.patched(self.lean), "generate": self.patched(self.generate)}

    def patched(self, way: Way) -> Way:
        """With the model patched for as long as it is measured."""

        def measure(batch: int, context: int) -> Measured:
            with llmkernels.patch(self.model):
                return way(batch, context)

        return measure

    def lean(self, batch: int, context: int) -> Measured:
        """llmkernels.generate, on our cache."""
        return self.generate_by(partial(llmkernels.generate, self.model), self.cache(batch, context), batch, context)

    def generate(self, batch: int, context: int) -> Measured:
        """model.generate."""
        return self.generate_by(self.model.generate, self.growing_cache(batch, context), batch, context)

    def generate_by(self, function: Callable, cache, batch: int, context: int) -> Measured:
        ids = self.ids(batch, context + 1)
        options = {"past_key_values": cache, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def call(tokens):
            function(ids, max_new_tokens=tokens, **options)
            cache.crop(context - cache.get_seq_length())

        return self.per_token(call)

    def loop(self, batch: int, context: int) -> Measured:
        """A user's own over the forward, which goes on behind a cache that is cut back afterwards."""
        cache = self.model(self.ids(batch, context), use_cache=True, logits_to_keep=1).past_key_values
        first = self.ids(batch, 1)

        def call(tokens):
            ids = first
            for _ in range(tokens):
                output = self.model(ids, past_key_values=cache, use_cache=True)
                ids = output.logits[:, -1:].argmax(-1)
            cache.crop(context - cache.get_seq_length())

        return self.per_token(call)

    def per_token(self, call: Callable[[int], None], many: int | None = None) -> Measured:
        """`many` tokens, where it matters which; else as many as it takes."""

        def timed(tokens):
            return self.timed(lambda: call(tokens))

        timed(many or self.few)  # captures graphs
        if many is None:
            few, thrice = timed(self.few), timed(3 * self.few)
            per_token = max(thrice - few, 1) / (2 * self.few)
            many = min(self.many, self.few + max(2 * self.few, round(DIFFERENCE_US / per_token)))
        if self.run.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        samples: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(samples) < REPEATS or time.perf_counter() < end:
            samples.append((timed(many) - timed(self.few)) / (many - self.few))
        return samples, torch.cuda.max_memory_allocated(self.device) if self.run.on_gpu else 0

    def timed(self, call: Callable[[], object]) -> float:
        """Microseconds of wall time, the device synchronized before and after."""
        timing.synchronize(self.device)
        start = time.perf_counter()
        call()
        timing.synchronize(self.device)
        return (time.perf_counter() - start) * 1e6

    @torch.no_grad()
    def compare_logits(self, provider: str, last_logits: Callable[[Tensor], Tensor]) -> None:
        """How far the logits behind a few sequences are from those of the model in float32."""
        if not self.run.wants(provider) or not fits_in_float32(self.model):
            return
        self.run.begin(f"logits of {provider}")
        ids = self.ids(4, 65)
        found = last_logits(ids).float()
        exact = float32_copy(self.model)(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        self.facts[provider] = {"logits_error_float32": float(f"{((found - exact).norm() / exact.norm()).item():.3g}")}
        self.clear()

    def cache(self, batch: int, context: int):
        """A cache of ours with `context` tokens of random keys and values."""
        cache = llmkernels.KVCache(self.model, context + self.many + 1)
        like = torch.empty(self.cache_shape(batch, 1), dtype=self.model.dtype, device=self.device)
        for layer in cache.layers:
            layer.lazy_initialization(like, like)
            for buffer in (layer.k, layer.v):
                buffer.normal_(generator=self.generator)
            layer.length = context
        return cache

    def growing_cache(self, batch: int, context: int):
        """Likewise the one that model.generate makes where it is given none."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for layer in range(self.model.config.num_hidden_layers):
            like = torch.empty(self.cache_shape(batch, context), dtype=self.model.dtype, device=self.device)
            cache.update(*(torch.empty_like(like).normal_(generator=self.generator) for _ in "kv"), layer)
        return cache

    def cache_shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        return batch, self.model.config.num_key_value_heads, tokens, head_dim(self.model.config)

    def ids(self, batch: int, tokens: int) -> Tensor:
        size = (batch, tokens)
        return torch.randint(1, self.model.config.vocab_size, size, device=self.device, generator=self.generator)

    def clear(self) -> None:
        """Drop the caches and graphs of the last size."""
        gc.collect()
        if self.run.on_gpu:
            torch.cuda.empty_cache()

    def need_room(self, batch: int, context: int) -> None:
        needed = self.cache_bytes(batch, context + self.many)
        if self.run.on_gpu and needed > 0.95 * torch.cuda.mem_get_info(self.device)[0]:
            raise torch.OutOfMemoryError(f"{needed / 1e9:.0f} GB of keys and values do not fit")

    def cache_bytes(self, batch: int, tokens: int) -> int:
        of_layer = math.prod(self.cache_shape(batch, tokens)) * self.model.dtype.itemsize
        return 2 * self.model.config.num_hidden_layers * of_layer

    def bytes(self, batch: int, context: int) -> int:
        """What a step has to read: every weight but the embedding, and the keys and values."""
        return weight_bytes(self.model) + self.cache_bytes(batch, context)


def weight_bytes(model: nn.Module) -> int:
    parameters = model.named_parameters(remove_duplicate=False)  # a head that is the embedding is read, too
    return sum(parameter.nbytes for name, parameter in parameters if "embed_tokens" not in name)
