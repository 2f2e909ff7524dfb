"""`python -m benchmarks decode`: the kernels of a decode step beside their peers, then whole steps of a model.

The model part measures what a user's call of generate takes per token: a call for many tokens less a call for few, both
from the same cache, over the tokens between. Contexts are random keys and values, since what they hold does not change
what reading them takes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import machine, plots, report, timing
from benchmarks.ops import DECODE_OPS
from benchmarks.run_model import head_dim, load
from benchmarks.run_ops import measure_case, plausible
from benchmarks.variants import fits_in_float32, float32_copy

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192, 32768)
SLOW_SIZES = ((1, 512), (8, 512), (64, 512), (1, 8192))  # of the forward in a loop, and measured before all others
COMPILED_SIZES = ((1, 512), (8, 512), (1, 8192))  # each is compiled anew, a minute and more
# Tokens of the two calls: MANY at most, and no more than it takes for a difference of so many us. What a call takes
# beside its tokens varies by several thousand.
FEW, MANY, DIFFERENCE_US = 4, 100, 330e3
REPEATS, SECONDS = 3, 1  # samples: at least so many, for at least so long
PEERS = ("eager", "torch", "compile", "cublas", "cudnn", "flash", "llmkernels")  # of the kernels
PROVIDERS = ("llmkernels", "generate", "eager", "eager_generate", "static_compile")  # of whole steps
DEFAULT_PROVIDERS = PROVIDERS[:4]
KERNELS, STEPS = "decode_ops.json", "decode.json"  # apart, as either may be measured again without the other


def run(
    device: torch.device, output: Path, model_id: str | None, only: Sequence[str], providers: Sequence[str], quick: bool
) -> None:
    effort = timing.QUICK if quick else timing.FULL
    ops = [op for name, op in DECODE_OPS.items() if not only or name in only]
    on_gpu = device.type == "cuda"
    todo = [(op, case) for op in ops for case in op.cases if case.quick or (on_gpu and not quick)]
    kernels: list[dict] = []
    steps: list[dict] = []
    with timing.side_stream(device), report.progress(2 + len(todo)) as begin:
        begin("bandwidth limits")
        meta = machine.describe(device)
        for op, case in todo:
            begin(case.title)
            try:
                found = measure_case(op, case, PEERS, device, effort, ("graph",) if on_gpu else ("wall",))
                kernels += plausible(found, meta)
            except Exception as problem:
                report.warn(case.title, problem)
            report.save(output / KERNELS, meta, kernels)
        begin("whole steps")
    if not only or "decode" in only:
        model, name = load(device, model_id)
        bench = Bench(model, name, device, tuple(providers) or DEFAULT_PROVIDERS, quick)
        for found in bench.measure():
            steps += found
            report.save(output / STEPS, meta, steps)
    print_tables([*kernels, *steps], meta)
    plots.draw(output)
    for name, rows in ((KERNELS, kernels), (STEPS, steps)):
        if rows:
            report.console.print(f"\n{output / name}: {len(rows)} rows")


class Bench:
    """One model, patched and not, over batches and contexts."""

    def __init__(self, model: nn.Module, name: str, device: torch.device, providers: Sequence[str], quick: bool):
        self.model, self.name, self.device, self.providers = model, name, device, providers
        self.dtype = str(model.dtype).removeprefix("torch.")
        small = quick or device.type == "cpu"
        self.sizes = [(b, c) for c in CONTEXTS for b in BATCHES if not small or (b, c) in ((1, 128), (8, 128))]
        self.few, self.many, self.seconds = (2, 6, 0) if small else (FEW, MANY, SECONDS)
        self.generator = torch.Generator(device).manual_seed(0)
        self.facts: dict[str, dict] = {}

    def measure(self):
        """Rows, size by size: first those that compare, last what takes longest, so that a run may be cut short."""
        import llmkernels

        functions = {"llmkernels": self.lean, "generate": self.generate}
        slow = {"eager": self.forward_loop, "eager_generate": self.generate}
        compared = [size for size in self.sizes if size in SLOW_SIZES or self.device.type == "cpu"]
        others = [size for size in self.sizes if size not in compared]
        compiled = [size for size in compared if size in COMPILED_SIZES and "static_compile" in self.providers]
        with report.progress(2 + 2 * len(self.sizes) + len(compiled)) as begin, torch.no_grad():
            begin("logits")
            if fits_in_float32(self.model):
                self.compare_logits()
            else:
                report.console.print("  no room for the model in float32, to which logits would be compared")

            def rows(functions, sizes, what):
                for batch, context in sizes:
                    begin(f"batch {batch}, context {context}, {what}")
                    yield self.rows(functions, batch, context)

            yield from rows(slow, compared, "unpatched")
            with llmkernels.patch(self.model):
                begin("parts of a step")  # first, so that the GPU is warm
                yield self.waterfall()
                yield from rows(functions, [*compared, *others], "patched")
            yield from rows({"eager_generate": self.generate}, others, "unpatched")
            yield from rows({"static_compile": self.static}, compiled, "compiled")

    def rows(self, functions: dict[str, Callable], batch: int, context: int) -> list[dict]:
        found = []
        for provider, function in functions.items():
            if provider not in self.providers:
                continue
            needed = self.cache_bytes(batch, context + self.many) * (3 if provider == "eager" else 1)
            if self.device.type == "cuda" and needed > 0.95 * torch.cuda.mem_get_info(self.device)[0]:
                report.console.print(f"  {provider}: a cache of {needed / 1e9:.0f} GB does not fit, not measured")
                continue
            try:
                with timing.garbage_collection_paused():
                    samples, peak = function(batch, context)
            except Exception as problem:
                report.warn(provider, problem)
                continue
            row = {"op": "decode", "model": self.name, "batch": batch, "context": context, "dtype": self.dtype}
            row |= {"provider": provider, "timing": "wall", **timing.summary(samples)}
            row |= {"bytes": self.bytes(batch, context), **self.facts.get(provider, {})}
            found.append(row | ({"peak_bytes": peak} if peak else {}))
            self.clear()
        return found

    def compare_logits(self) -> None:
        """How far the logits of one decode step, and of the unpatched forward, are from the model's in float32."""
        import llmkernels
        from llmkernels.hf.decode import decoder
        from llmkernels.hf.trunk import pack, trunk

        ids = self.ids(4, 65)
        logits = {"eager": self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()}
        with llmkernels.patch(self.model):
            cache = llmkernels.KVCache(self.model, ids.shape[1])
            self.model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.begin(torch.full((len(ids),), ids.shape[1] - 2, device=self.device))
            parts = trunk(self.model)
            pack(parts)
            step = decoder(self.model).begin(self.model, parts, cache)
            logits["llmkernels"] = step(ids[:, -1]).float()
        wide = float32_copy(self.model)
        exact = wide(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        for name, found in logits.items():
            error = (found - exact).norm() / exact.norm()
            self.facts[name] = {"logits_error_float32": float(f"{error.item():.3g}")}
        del wide, cache, step
        self.clear()

    # ---- ways to generate: samples in us per token, and the peak memory

    def lean(self, batch: int, context: int) -> tuple[list[float], int]:
        import llmkernels

        cache = self.cache(batch, context)
        ids = self.ids(batch, 1)
        options = {"cache": cache, "eos_token_id": []}

        def call(tokens):
            llmkernels.generate(self.model, ids, max_new_tokens=tokens, **options)
            cache.crop(context - cache.get_seq_length())

        return self.per_token(call)

    def generate(self, batch: int, context: int) -> tuple[list[float], int]:
        """model.generate, patched or not, on a cache of ours: of the same capacity, so that memory compares."""
        cache = self.cache(batch, context)
        ids = self.ids(batch, context + 1)
        options = {"past_key_values": cache, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def call(tokens):
            self.model.generate(ids, max_new_tokens=tokens, **options)
            cache.crop(context - cache.get_seq_length())

        return self.per_token(call)

    def static(self, batch: int, context: int) -> tuple[list[float], int]:
        """transformers' static cache, its step compiled by torch."""
        ids = self.ids(batch, context)
        options = {"cache_implementation": "static", "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def call(tokens):
            self.model.generate(ids, max_new_tokens=tokens, **options)

        call(self.many)  # first, so that the cache that is made has room for all that follow
        return self.per_token(call)

    def forward_loop(self, batch: int, context: int) -> tuple[list[float], int]:
        """A user's own loop over the forward, with transformers' growing cache."""
        from transformers import DynamicCache

        filled = self.cache(batch, context)
        token = self.ids(batch, 1)

        def call(tokens):
            cache = DynamicCache(config=self.model.config)
            for index, layer in enumerate(filled.layers):
                cache.update(layer.keys, layer.values, index)
            ids = token
            for _ in range(tokens):
                output = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = output.logits[:, -1:].argmax(-1)

        return self.per_token(call)

    def per_token(self, call: Callable[[int], None]) -> tuple[list[float], int]:
        on_gpu = self.device.type == "cuda"

        def timed(tokens):
            timing.synchronize(self.device)
            start = time.perf_counter()
            call(tokens)
            timing.synchronize(self.device)
            return (time.perf_counter() - start) * 1e6

        timed(self.few)  # captures graphs
        few, thrice = timed(self.few), timed(3 * self.few)
        per_token = max(thrice - few, 1) / (2 * self.few)
        many = min(self.many, self.few + max(2 * self.few, round(DIFFERENCE_US / per_token)))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        samples: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(samples) < REPEATS or time.perf_counter() < end:
            samples.append((timed(many) - timed(self.few)) / (many - self.few))
        return samples, torch.cuda.max_memory_allocated(self.device) if on_gpu else 0

    # ---- where a step's time goes

    def waterfall(self) -> list[dict]:
        """Each launch of a step alone: the same one of every layer, in one graph, so that no weight is in the cache."""
        found = []
        if self.device.type != "cuda" or "llmkernels" not in self.providers:
            return found
        for batch in (1, 8, 64):
            cache = self.cache(batch, 512)
            for part, calls in self.launches(cache).items():
                stream = torch.cuda.Stream(self.device)
                with torch.cuda.stream(stream):
                    graph = timing.capture(calls, laps=2)
                    times = timing.time_graphs({part: timing.Subject(calls, None, graph)}, 2, timing.QUICK)[part]
                row = {"op": "decode_part", "part": part, "model": self.name, "batch": batch, "context": 512}
                row |= {"dtype": self.dtype, "provider": "llmkernels", "timing": "graph", "launches": len(calls)}
                found.append(row | timing.summary(times))
            del cache
            self.clear()
        return found

    def launches(self, cache) -> dict[str, list[Callable]]:
        """The calls that `decode_step` is composed of, for every layer, and the op itself.

        For more than 16 sequences a norm is a launch of its own in these calls, which it is not within the op.
        """
        from llmkernels.hf.decode import decoder
        from llmkernels.hf.trunk import pack, trunk

        ops = torch.ops.llmkernels
        batch = cache.layers[0].k.shape[0]
        cache.begin(torch.full((batch,), cache.get_seq_length() - 1, device=self.device), None)
        parts = trunk(self.model)
        pack(parts)
        step = decoder(self.model).begin(self.model, parts, cache)
        calls = {name: [] for name in ("q|k|v", "attention", "o", "gate|up", "down", "head")}
        hidden = torch.randn(batch, self.model.config.hidden_size, dtype=self.model.dtype, device=self.device)
        given = step.arguments
        norm = [given[name] for name in ("eps", "weight_offset", "cast_before_weight")]
        places = [given[name] for name in ("cos", "sin", "positions", "cache_seqlens", "cache_leftpad")]
        lists = ("input_norms", "qkv_weights", "qkv_biases", "o_weights", "o_biases", "post_norms", "gate_up_weights",
                 "down_weights", "k_caches", "v_caches", "windows_left")  # fmt: skip
        none = [None] * len(given["windows_left"])
        for layer in zip(*(given[name] or none for name in lists), strict=True):
            input_norm, qkv, qkv_bias, o, o_bias, post_norm, gate_up, down, k, v, left = layer
            packed = ops.rms_norm_linear(hidden, input_norm, qkv, qkv_bias, *norm)
            attention = partial(ops.rope_decode_attention, packed, *places, k, v, None, given["heads"],
                                given["softmax_scale"], left, 0.0, True)  # fmt: skip
            attended = attention()
            activated = ops.rms_norm_swiglu_linear(hidden, post_norm, gate_up, *norm)
            calls["q|k|v"].append(partial(ops.rms_norm_linear, hidden, input_norm, qkv, qkv_bias, *norm, True))
            calls["attention"].append(attention)
            calls["o"].append(partial(ops.linear_add_, hidden, attended, o, o_bias, True))
            calls["gate|up"].append(partial(ops.rms_norm_swiglu_linear, hidden, post_norm, gate_up, *norm, True))
            calls["down"].append(partial(ops.linear_add_, hidden, activated, down, None, True))
        head = [given[name] for name in ("norm", "head", "head_bias")]
        calls["head"].append(partial(ops.rms_norm_linear, hidden, *head, *norm, True))
        calls[plots.WHOLE_STEP] = [partial(ops.decode_step, hidden, **given)]
        return calls

    # ----

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
        import gc

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def cache_bytes(self, batch: int, tokens: int) -> int:
        config = self.model.config
        kept = config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * tokens * batch
        return 2 * kept * self.model.dtype.itemsize

    def bytes(self, batch: int, context: int) -> int:
        """What a step has to read: every weight but the embedding, and the keys and values."""
        parameters = self.model.named_parameters(remove_duplicate=False)  # a head that is the embedding is read, too
        weights = sum(p.nbytes for name, p in parameters if "embed_tokens" not in name)
        return weights + self.cache_bytes(batch, context)


def print_tables(rows: list[dict], meta: dict) -> None:
    for op in DECODE_OPS:
        found = [row for row in rows if row["op"] == op]
        report.print_table(f"{op}, us", found, meta["read_gb_s"], limit="read")
    steps = [row for row in rows if row["op"] == "decode"]
    report.print_table("decode, ms per token", steps, meta["read_gb_s"], unit_us=1e3, limit="read")
    report.print_table("the launches of one step, us", [row for row in rows if row["op"] == "decode_part"])
    errors = {row["provider"]: row["logits_error_float32"] for row in steps if "logits_error_float32" in row}
    for provider, error in errors.items():
        report.console.print(f"{provider}: logits {error} from those of the model in float32 (relative L2)")
    if steps:
        for row in steps:
            if row["provider"] == "llmkernels":
                share = row["bytes"] / row["time_us"] / 1e3 / meta["read_gb_s"]
                report.console.print(
                    f"batch {row['batch']}, context {row['context']}: {row['time_us'] / 1e3:.2f} ms per token, "
                    f"{row['batch'] / row['time_us'] * 1e6:.0f} tokens/s, {share:.0%} of the read limit"
                )
