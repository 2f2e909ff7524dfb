"""Models of many families behind one prompt: what a token takes by each way to generate, and how long the first takes.

A section is one model, since each of them fills a good part of a GPU. A token is timed as in steps.py.
"""

from contextlib import nullcontext
from functools import partial

import torch

import llmkernels
from benchmarks import steps, timing, variants
from benchmarks.cases import OURS
from benchmarks.models import QWEN, load_published
from benchmarks.run import Run

SIZE, SMALL_SIZE = (1, 512), (1, 64)  # batch, context
CALLERS = (QWEN, "qwen3-8b")  # of other ways to generate
BEAMS = 4
# Prompt lookup: how many tokens it guesses at once, in a prompt that repeats a piece of so many; and how many a call is
# for, whoever is timed, since some are easier to guess than others.
GUESSES, PIECE, MANY = 10, 32, 28
TURNS = 3  # of patched and not patched
ROUNDS, SAMPLES = 4, 3  # of first tokens
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def measure(name: str, run: Run) -> list[dict]:
    """One of our models. None where the caller names another, which steps.py measures."""
    if run.model_id:
        return []
    bench = Bench(run, name)
    rows = bench.decode_rows()
    if name in CALLERS:
        for provider in (OURS, "eager"):
            with variants.VARIANTS[provider](bench.model):
                rows += bench.rows({provider: bench.beams}, [bench.size], "beams", BEAMS) + bench.lookup_rows(provider)
    return rows + bench.first_token(*bench.size)


class Bench(steps.Bench):
    def __init__(self, run: Run, name: str):
        super().__init__(run, load_published(name, run.device))
        self.size = SMALL_SIZE if run.small else SIZE
        self.seconds /= TURNS
        self.piece = self.ids(1, PIECE)

    @torch.no_grad()
    def decode_rows(self) -> list[dict]:
        """Patched by each way and not patched, in turn, so that a busy moment of the host is nobody's."""
        ways = {OURS: self.lean, "generate": self.generate, "forward": self.loop, "eager": self.loop}
        found: dict[str, list[steps.Measured]] = {name: [] for name in ways if self.run.wants(name)}
        for _ in range(1 if self.run.small else TURNS):
            for name, measured in found.items():
                self.run.begin(f"decode, {name}")
                patched = nullcontext() if name == "eager" else llmkernels.patch(self.model)
                with patched, timing.garbage_collection_paused():
                    measured.append(ways[name](*self.size))
                self.clear()
        return self.rows({name: partial(all_of, measured) for name, measured in found.items()}, [self.size])

    def lean(self, batch: int, context: int) -> steps.Measured:
        return self.generate_by(partial(llmkernels.generate, self.model), batch, context)

    def loop(self, batch: int, context: int) -> steps.Measured:
        """A user's own over the forward, patched or not, which goes on behind a cache that is cut back afterwards."""
        cache = self.model(self.ids(batch, context), use_cache=True, logits_to_keep=1).past_key_values
        first = self.ids(batch, 1)

        def call(tokens):
            ids = first
            for _ in range(tokens):
                output = self.model(ids, past_key_values=cache, use_cache=True)
                ids = output.logits[:, -1:].argmax(-1)
            cache.crop(context - cache.get_seq_length())

        return self.per_token(call)

    def beams(self, batch: int, context: int) -> steps.Measured:
        ids = self.ids(batch, context)
        return self.per_token(lambda tokens: self.model.generate(ids, max_new_tokens=tokens, num_beams=BEAMS, **GREEDY))

    def lookup_rows(self, provider: str) -> list[dict]:
        """With the tokens of a step: where rounding decides, patched and unpatched may guess differently well."""
        rows = self.rows({provider: self.lookup}, [self.size], "lookup")
        for row in rows:
            counter = Counter()
            self.look_up(MANY, streamer=counter)
            row["tokens_per_step"] = round(MANY / counter.steps, 2)
        return rows

    def lookup(self, batch: int, context: int) -> steps.Measured:
        return self.per_token(self.look_up, MANY)

    def look_up(self, tokens: int, **options) -> None:
        batch, context = self.size
        ids = self.piece.repeat(batch, context // PIECE)
        self.model.generate(ids, max_new_tokens=tokens, prompt_lookup_num_tokens=GUESSES, **GREEDY, **options)

    @torch.no_grad()
    def first_token(self, batch: int, tokens: int) -> list[dict]:
        """Patched and not, in turn."""
        samples = {provider: [] for provider in (OURS, "eager") if self.run.wants(provider)}
        ids = self.ids(batch, tokens)
        self.run.begin(f"first token behind {tokens}")

        def generate():
            self.model.generate(ids, max_new_tokens=1, **GREEDY)

        for provider in timing.balanced(samples, 2 if self.run.small else ROUNDS):
            with variants.VARIANTS[provider](self.model), timing.garbage_collection_paused():
                generate()
                samples[provider] += [self.timed(generate) for _ in range(SAMPLES)]
        row = {"op": "first_token", "model": self.name, "batch": batch, "tokens": tokens, "dtype": self.dtype}
        return [row | {"provider": name, "timing": "wall", **timing.summary(found)} for name, found in samples.items()]


def all_of(measured: list[steps.Measured], batch: int, context: int) -> steps.Measured:
    """The samples of several measurements, and the largest of their peaks."""
    return [sample for samples, _ in measured for sample in samples], max(peak for _, peak in measured)


class Counter:
    """A streamer that counts the steps."""

    steps = -1  # the prompt comes first

    def put(self, tokens: torch.Tensor) -> None:
        self.steps += 1

    def end(self) -> None:
        pass
