"""`python -m benchmarks model`: prefill and decode of a Hugging Face model as it is, patched, and by its peers.

What a user's own loop sees: wall time around a forward, the device synchronized before and after. The providers take
turns on one instance, so that a drift of the machine hits all alike.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import machine, plots, report, timing
from benchmarks.variants import VARIANTS, fits_in_float32, float32_copy

QWEN = "qwen2.5-7b"
QWEN_CONFIG = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
SMALL = "qwen2-small"
SMALL_CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
LENGTHS = (128, 256, 512, 1024, 2048)
COMPILE_LENGTHS = (128, 512, 2048)  # each length is compiled anew, the better part of a minute,
COMPILE_UNASKED = (512,)  # so a whole run has this one alone, and a quick run none, unless compile is asked for by name
CONTEXT = 512
BATCHES = (1, 8)
WARM_STEPS = 2
DEFAULT_PROVIDERS = {"cuda": ("eager", "llmkernels", "liger", "compile"), "cpu": ("eager", "llmkernels")}


def run(device: torch.device, output: Path, model_id: str | None, providers: Sequence[str], quick: bool) -> None:
    lengths = LENGTHS[:: 2 if quick else 1] if device.type == "cuda" else LENGTHS[: 2 if quick else 3]
    compile_lengths = COMPILE_LENGTHS if "compile" in providers else () if quick else COMPILE_UNASKED
    providers = tuple(providers) or DEFAULT_PROVIDERS[device.type]
    compile_lengths = [length for length in compile_lengths if "compile" in providers and length in lengths]
    steps = 4 + 2 * len(lengths) + len(BATCHES) + len(compile_lengths)
    with report.progress(steps) as begin, torch.no_grad():
        begin("bandwidth limits")
        meta = machine.describe(device)
        begin("model")
        model, name = load(device, model_id)
        bench = Bench(model, name, device, [one for one in providers if one != "compile"], quick)
        begin("logits")
        try:
            bench.compare_logits()
        except Exception as problem:
            report.warn("comparison of logits", problem)

        def save():
            report.save(output / "model.json", meta, bench.rows)

        for tokens in lengths:
            for logits in ("last", "all"):
                begin(f"prefill {tokens} tokens, {logits} logits")
                bench.prefill(tokens, logits)
                save()
        for batch in BATCHES:
            begin(f"decode batch {batch}")
            bench.decode(batch)
            save()
        for tokens in compile_lengths:
            begin(f"compile, prefill {tokens} tokens")
            bench.prefill(tokens, "last", compiled=True)
            save()
        begin("pictures")
    print_results(bench, meta)
    plots.draw(output)
    report.console.print(f"\n{output / 'model.json'}: {len(bench.rows)} rows")


def load(device: torch.device, model_id: str | None) -> tuple[nn.Module, str]:
    """A model in bfloat16 (float32 on the CPU) with sdpa attention, and the name it has in the results."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if model_id:
        model = AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype, attn_implementation="sdpa").to(device)
        return model.eval(), Path(model_id).name if Path(model_id).exists() else model_id
    name, config = (QWEN, QWEN_CONFIG) if device.type == "cuda" else (SMALL, SMALL_CONFIG)
    config = Qwen2Config(**config, rms_norm_eps=1e-6, max_position_embeddings=32768, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:  # made where it runs: 15 GB of random numbers in a second
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):  # all ones would hide a norm that forgets its weight
            parameter.data.normal_(1, 0.1)
    return model.to(device).eval(), name


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Bench:
    """One model, several providers, rows of results."""

    def __init__(self, model: nn.Module, name: str, device: torch.device, providers: list[str], quick: bool):
        self.model, self.name, self.device = model, name, device
        self.rounds, self.samples, self.steps = (3, 3, 6) if quick else (8, 8, 16)
        self.rows: list[dict] = []
        self.facts: dict[str, dict] = {}
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.providers = [one for one in providers if self.works(one)]

    def works(self, provider: str) -> bool:
        try:
            with VARIANTS[provider](self.model) as (forward, facts):
                forward(self.ids(1, 16))
            self.facts[provider] = facts
        except Exception as problem:
            report.warn(provider, problem)
            return False
        return True

    def ids(self, batch: int, tokens: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (batch, tokens)
        return torch.randint(self.model.config.vocab_size, shape, device=self.device, generator=generator)

    def interleave(self, measure: Callable[[Callable], list[float]], providers: list[str], rounds: int) -> dict:
        """Samples in microseconds of every provider, patched in and out again round after round."""
        samples: dict[str, list[float]] = {name: [] for name in providers}
        for name in timing.in_turn(providers, rounds):
            try:
                with VARIANTS[name](self.model) as (forward, _), timing.garbage_collection_paused():
                    samples[name] += measure(forward)
            except Exception as problem:
                report.warn(name, problem)
        return {name: found for name, found in samples.items() if found}

    def add(self, case: dict, samples: dict[str, list[float]]) -> None:
        for provider, found in samples.items():
            common = {**case, "model": self.name, "dtype": self.dtype, "provider": provider, "timing": "wall"}
            self.rows.append({**common, **timing.summary(found), **self.facts.get(provider, {})})

    def prefill(self, tokens: int, logits: str, compiled: bool = False) -> None:
        """The compiled model is measured alone: it would be compiled anew each time it comes back."""
        ids = self.ids(1, tokens)
        options = {"use_cache": True, "logits_to_keep": 1} if logits == "last" else {"use_cache": False}
        rounds, samples = (1, self.rounds * self.samples) if compiled else (self.rounds, self.samples)

        def measure(forward):
            for _ in range(2):
                forward(ids, **options)
            return [self.timed(forward, ids, **options)[0] for _ in range(samples)]

        flops = self.flops(tokens, 1 if logits == "last" else tokens)
        case = {"op": "prefill", "batch": 1, "tokens": tokens, "logits": logits, "flops": flops}
        self.add(case, self.interleave(measure, ["compile"] if compiled else self.providers, rounds))

    def decode(self, batch: int) -> None:
        """A user's loop: greedy tokens with a cache that grows from CONTEXT tokens on."""
        ids = self.ids(batch, CONTEXT)

        def measure(forward):
            def step(output):
                token = output.logits[:, -1:].argmax(-1)
                return forward(token, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)

            output = forward(ids, use_cache=True, logits_to_keep=1)
            times = []
            for _ in range(WARM_STEPS + self.steps):
                time_us, output = self.timed(step, output)
                times.append(time_us)
            return times[WARM_STEPS:]

        case = {"op": "decode", "batch": batch, "context": CONTEXT, "bytes": self.decode_bytes(batch)}
        self.add(case, self.interleave(measure, self.providers, self.rounds))

    def timed(self, call: Callable, *arguments, **options) -> tuple[float, object]:
        timing.synchronize(self.device)
        start = time.perf_counter()
        result = call(*arguments, **options)
        timing.synchronize(self.device)
        return (time.perf_counter() - start) * 1e6, result

    def compare_logits(self) -> None:
        """Relative L2 distance of each provider's logits from eager's and from those of the model in float32."""
        ids = self.ids(1, 256)
        logits = {}
        for name in self.providers:
            with VARIANTS[name](self.model) as (forward, _):
                logits[name] = forward(ids, use_cache=False).logits.float()
        if fits_in_float32(self.model):
            reference = float32_copy(self.model)
            logits["float32"] = reference(ids, use_cache=False).logits
            del reference
        for name in self.providers:
            for other in ("eager", "float32"):
                if other in logits and other != name:
                    distance = (logits[name] - logits[other]).norm() / logits[other].norm()
                    self.facts[name][f"logits_error_{other}"] = float(f"{distance.item():.3g}")

    def flops(self, tokens: int, kept: int) -> int:
        """Multiply-adds of the linear layers and of causal attention, two operations each."""
        config = self.model.config
        head = config.vocab_size * config.hidden_size
        layers = self.layer_parameters()
        width = config.num_attention_heads * head_dim(config)
        attention = config.num_hidden_layers * width * tokens**2  # two products, half of each masked
        return 2 * (layers * tokens + head * kept + attention)

    def decode_bytes(self, batch: int) -> int:
        """Every weight but the embedding once, and the keys and values of the context."""
        config = self.model.config
        size = self.model.dtype.itemsize
        cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * CONTEXT * batch
        return size * (self.layer_parameters() + config.vocab_size * config.hidden_size + cache)

    def layer_parameters(self) -> int:
        return sum(parameter.numel() for name, parameter in self.model.named_parameters() if ".layers." in name)


def print_results(bench: Bench, meta: dict) -> None:
    for op in ("prefill", "decode"):
        report.print_table(f"{op}, {bench.name}, ms", [row for row in bench.rows if row["op"] == op], unit_us=1e3)
    console = report.console
    console.print()
    for name, facts in bench.facts.items():
        if facts:
            console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    decode = [row for row in bench.rows if row["op"] == "decode" and row["batch"] == 1]
    if decode and bench.device.type == "cuda":
        floor_ms = decode[0]["bytes"] / meta["read_gb_s"] / 1e6
        console.print(f"decode cannot take less than {floor_ms:.2f} ms: its weights at {meta['read_gb_s']:.0f} GB/s")
