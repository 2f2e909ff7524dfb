"""What a call of generate takes per token: a call for many tokens less a call for few, over the tokens between.

Both begin with the same cache. Contexts are random keys and values, since what they hold does not change what reading
them takes.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.cases import OURS
from benchmarks.models import fits_in_float32, float32_copy, head_dim, load
from benchmarks.run import Run

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192, 32768)
FIRST_SIZES = ((1, 512), (8, 512), (64, 512), (1, 8192))  # where everybody is measured
CPU_SIZES = ((1, 128), (8, 128))
# Tokens of the two calls: MANY at most, and no more than it takes for a difference of so many us. What a call takes
# beside its tokens varies by several thousand.
FEW, MANY, DIFFERENCE_US = 4, 100, 330e3
REPEATS, SECONDS = 3, 1  # samples: at least so many, for at least so long

Size = tuple[int, int]  # batch, context
Measured = tuple[list[float], int]  # samples in us per token, and the peak memory


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

    @property
    def other_sizes(self) -> Sequence[Size]:
        sizes = [(batch, context) for context in CONTEXTS for batch in BATCHES]
        return [] if self.run.small else [size for size in sizes if size not in FIRST_SIZES]

    @torch.no_grad()
    def rows(
        self,
        functions: Mapping[str, Callable[[int, int], Measured]],
        sizes: Sequence[Size],
        op: str = "decode",
        beams: int = 1,
    ) -> list[dict]:
        found = []
        for batch, context in sizes:
            for provider, function in functions.items():
                if not self.run.wants(provider):
                    continue
                self.run.begin(f"{op}, batch {batch}, context {context}, {provider}")
                try:
                    self.need_room(batch * beams, context, caches=3 if provider == "eager" else 1)
                    with timing.garbage_collection_paused():
                        samples, peak = function(batch, context)
                except Exception as problem:
                    if provider == OURS and not isinstance(problem, torch.OutOfMemoryError):
                        raise
                    self.run.warn(f"{provider}, batch {batch}, context {context}", problem)
                    continue
                finally:
                    self.clear()
                row = {"op": op, "model": self.name, "batch": batch, "context": context, "dtype": self.dtype}
                row |= {"provider": provider, "timing": "wall", **timing.summary(samples)}
                row |= {"bytes": self.bytes(batch * beams, context), **self.facts.get(provider, {})}
                found.append(row | ({"peak_bytes": peak} if peak else {}))
        return found

    def generate(self, batch: int, context: int) -> Measured:
        """model.generate, patched or not."""
        return self.generate_by(self.model.generate, batch, context)

    def generate_by(self, function: Callable, batch: int, context: int) -> Measured:
        """On a cache of ours, whoever generates: of the same capacity, so that memory compares."""
        cache = self.cache(batch, context)
        ids = self.ids(batch, context + 1)
        options = {"past_key_values": cache, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def call(tokens):
            function(ids, max_new_tokens=tokens, **options)
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
        """A cache with `context` tokens of random keys and values."""
        import llmkernels

        config = self.model.config
        cache = llmkernels.KVCache(self.model, context + self.many + 1)
        shape = (batch, config.num_key_value_heads, 1, head_dim(config))
        like = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        for layer in cache.layers:
            layer.lazy_initialization(like, like)
            for buffer in (layer.k, layer.v):
                buffer.normal_(generator=self.generator)
            layer.length = context
        return cache

    def ids(self, batch: int, tokens: int) -> Tensor:
        size = (batch, tokens)
        return torch.randint(1, self.model.config.vocab_size, size, device=self.device, generator=self.generator)

    def clear(self) -> None:
        """Drop the caches and graphs of the last size."""
        gc.collect()
        if self.run.on_gpu:
            torch.cuda.empty_cache()

    def need_room(self, batch: int, context: int, caches: int) -> None:
        needed = caches * self.cache_bytes(batch, context + self.many)
        if self.run.on_gpu and needed > 0.95 * torch.cuda.mem_get_info(self.device)[0]:
            raise torch.OutOfMemoryError(f"{needed / 1e9:.0f} GB of keys and values do not fit")

    def cache_bytes(self, batch: int, tokens: int) -> int:
        config = self.model.config
        kept = config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * tokens * batch
        return 2 * kept * self.model.dtype.itemsize

    def bytes(self, batch: int, context: int) -> int:
        """What a step has to read: every weight but the embedding, and the keys and values."""
        return weight_bytes(self.model) + self.cache_bytes(batch, context)


def weight_bytes(model: nn.Module) -> int:
    parameters = model.named_parameters(remove_duplicate=False)  # a head that is the embedding is read, too
    return sum(parameter.nbytes for name, parameter in parameters if "embed_tokens" not in name)
