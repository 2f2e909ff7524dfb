"""What a user's own loop over the forward of a model takes: prefill, and decode with a cache that grows.

Wall time around a forward, the device synchronized before and after. The variants take turns on one instance, so that a
drift of the machine hits all alike.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.cases import OURS
from benchmarks.models import fits_in_float32, float32_copy, head_dim, load, load_published
from benchmarks.run import Run
from benchmarks.variants import FP8

CONTEXT = 512
WARM_STEPS = 2

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """What the rows of a case say of it; the samples of a forward, in microseconds; variants that have none."""

    facts: dict
    measure: Callable[[Callable], list[float]]
    without: Collection[str] = ()


class Bench:
    """One model and its variants: context managers as in variants.py."""

    def __init__(self, run: Run, variants: Mapping[str, Callable], published: str | None = None):
        """Of the model that the caller names, or of this one of ours."""
        self.run, self.device = run, run.device
        self.model, self.name = load_published(published, run.device) if published else load(run.device, run.model_id)
        self.rounds, self.samples, self.steps = (3, 3, 6) if run.quick else (8, 8, 16)
        self.variants = dict(variants)
        self.facts: dict[str, dict] = {name: {} for name in variants}

    @torch.no_grad()
    def leave_out_what_fails(self) -> None:
        for name, variant in list(self.variants.items()):
            try:
                with variant(self.model) as (forward, facts):
                    forward(self.ids(1, 16))
                self.facts[name] = facts
            except Exception as problem:
                if name == OURS:
                    raise
                self.run.warn(name, problem)
                del self.variants[name]

    def ids(self, batch: int, tokens: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(self.model.config.vocab_size, (batch, tokens), device=self.device, generator=generator)

    def rows(self, case: dict, samples: Samples) -> list[dict]:
        common = {**case, "model": self.name, "dtype": str(self.model.dtype).removeprefix("torch."), "timing": "wall"}
        return [
            {**common, "provider": name, **timing.summary(found), **self.facts[name]} for name, found in samples.items()
        ]

    @torch.no_grad()
    def measure(self, cases: Sequence[Case], rounds: int | None = None) -> list[dict]:
        """The rows of every case by every variant, patched in and out again round after round.

        That takes longer than most cases do, so a variant measures all of them in its turn.
        """
        samples: list[Samples] = [{name: [] for name in self.variants if name not in case.without} for case in cases]
        for name in timing.in_turn(list(self.variants), rounds or self.rounds):
            self.run.begin(f"{self.name}: {name}")
            with self.variants[name](self.model) as (forward, _), timing.garbage_collection_paused():
                for case, found in zip(cases, samples, strict=True):
                    if name in found:
                        found[name] += case.measure(forward)
        return [row for case, found in zip(cases, samples, strict=True) for row in self.rows(case.facts, found)]

    def prefill(self, tokens: int, logits: str, at_once: bool = False) -> Case:
        """`at_once`: all samples in one round, for what would be compiled anew in each."""
        ids = self.ids(1, tokens)
        options = {"use_cache": True, "logits_to_keep": 1} if logits == "last" else {"use_cache": False}
        samples = self.samples * (self.rounds if at_once else 1)

        def measure(forward):
            for _ in range(2):
                forward(ids, **options)
            return [self.timed(forward, ids, **options)[0] for _ in range(samples)]

        flops = self.flops(tokens, 1 if logits == "last" else tokens)
        facts = {"op": "prefill", "batch": 1, "tokens": tokens, "logits": logits, "flops": flops}
        # The head of the last is as that of the others.
        return Case(facts, measure, without=() if logits == "last" else (FP8,))

    def prefill_of_lengths(self, batch: int, shortest: int, longest: int) -> Case:
        """Prompts of lengths from `shortest` to `longest`, evenly apart and in any order, padded on the left."""
        ids = self.ids(batch, longest)
        lengths = torch.linspace(shortest, longest, batch, device=self.device).long()
        lengths = lengths[torch.randperm(batch, generator=torch.Generator().manual_seed(0)).to(self.device)]
        mask = (torch.arange(longest, device=self.device) >= longest - lengths[:, None]).long()
        options = {"attention_mask": mask, "use_cache": True, "logits_to_keep": 1}

        def measure(forward):
            return [self.timed(forward, ids, **options)[0] for _ in range(1 + self.samples // 2)][1:]

        flops = sum(self.flops(tokens, 1) for tokens in lengths.tolist())
        facts = {"op": "prefill", "batch": batch, "tokens": longest, "logits": "last", "flops": flops}
        if shortest < longest:
            facts["shortest"] = shortest
        return Case(facts, measure)

    def decode(self, batch: int) -> Case:
        """Greedy tokens with a cache that grows from CONTEXT tokens on."""
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

        return Case({"op": "decode", "batch": batch, "context": CONTEXT, "bytes": self.decode_bytes(batch)}, measure)

    def timed(self, call: Callable, *arguments, **options) -> tuple[float, object]:
        timing.synchronize(self.device)
        start = time.perf_counter()
        result = call(*arguments, **options)
        timing.synchronize(self.device)
        return (time.perf_counter() - start) * 1e6, result

    @torch.no_grad()
    def compare_logits(self) -> None:
        """Relative L2 distance of each variant's logits from eager's and from those of the model in float32."""
        self.run.begin("logits")
        ids = self.ids(1, 256)
        logits = {}
        for name, variant in self.variants.items():
            with variant(self.model) as (forward, _):
                logits[name] = forward(ids, use_cache=False).logits.float()
        if fits_in_float32(self.model):
            reference = float32_copy(self.model)
            logits["float32"] = reference(ids, use_cache=False).logits
            del reference
        for name in self.variants:
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
