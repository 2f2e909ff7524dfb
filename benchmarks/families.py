"""Models of many families behind one prompt: what a token takes by each way to generate, and how long the first takes.

A section is one model, since each of them fills a good part of a GPU. A token is timed as in steps.py.
"""

import copy

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
DRAFT = 5  # tokens that a draft model, which is always right, is ahead
TURN = 16  # tokens that a chat goes on with
ROUNDS, SAMPLES = 4, 3  # of first tokens
FIRST_TOKENS = 128  # of a short prompt
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def measure(name: str, run: Run) -> list[dict]:
    """One of our models. None where the caller names another, which steps.py measures."""
    if run.model_id:
        return []
    bench = Bench(run, name)
    rows = bench.rows(bench.ways, [bench.size])
    if name in CALLERS:
        rows += bench.rows(bench.both(bench.beams), [bench.size], "beams", BEAMS) + bench.lookup_rows()
        for op, way in (("sampling", bench.sampling), ("chat", bench.chat)):
            rows += bench.rows(bench.both(way), [bench.size], op)
        rows += bench.assisted_rows()
        rows += [] if run.small else bench.first_token(1, FIRST_TOKENS)
    return rows + bench.first_token(*bench.size)


class Bench(steps.Bench):
    def __init__(self, run: Run, name: str):
        super().__init__(run, load_published(name, run.device))
        self.size = SMALL_SIZE if run.small else SIZE
        self.piece = self.ids(1, PIECE)

    @property
    def ways(self) -> dict[str, steps.Way]:
        return self.our_ways | {
            "forward": self.patched(self.loop),
            "eager": self.loop,
            "eager_generate": self.generate,
        }

    def both(self, way: steps.Way) -> dict[str, steps.Way]:
        return {OURS: self.patched(way), "eager": way}

    def beams(self, batch: int, context: int) -> steps.Measured:
        ids = self.ids(batch, context)
        return self.per_token(lambda tokens: self.model.generate(ids, max_new_tokens=tokens, num_beams=BEAMS, **GREEDY))

    def lookup_rows(self) -> list[dict]:
        """With the tokens of a step: where rounding decides, patched and unpatched may guess differently well."""
        rows = self.rows(self.both(self.lookup), [self.size], "lookup")
        for row in rows:
            counter = Counter()
            with variants.VARIANTS[row["provider"]](self.model):
                self.look_up(MANY, streamer=counter)
            row["tokens_per_step"] = round(MANY / counter.steps, 2)
        return rows

    def lookup(self, batch: int, context: int) -> steps.Measured:
        return self.per_token(self.look_up, MANY)

    def look_up(self, tokens: int, **options) -> None:
        batch, context = self.size
        ids = self.piece.repeat(batch, context // PIECE)
        self.model.generate(ids, max_new_tokens=tokens, prompt_lookup_num_tokens=GUESSES, **GREEDY, **options)

    def sampling(self, batch: int, context: int) -> steps.Measured:
        ids, options = self.ids(batch, context), GREEDY | {"do_sample": True, "top_k": 0, "top_p": 0.9}
        return self.per_token(lambda tokens: self.model.generate(ids, max_new_tokens=tokens, **options))

    def chat(self, batch: int, context: int) -> steps.Measured:
        """Turns behind the cache that the one before has returned."""
        history, cache, options = self.ids(batch, context), None, GREEDY | {"return_dict_in_generate": True}

        def turn(tokens):
            nonlocal history, cache
            ids = torch.cat((history, self.ids(batch, TURN)), -1)
            found = self.model.generate(ids, past_key_values=cache, max_new_tokens=tokens, **options)
            history, cache = found.sequences, found.past_key_values

        return self.per_token(turn)

    def assisted_rows(self) -> list[dict]:
        """By a draft model of the same weights, patched where the model is."""
        draft = copy.deepcopy(self.model)
        config = draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = DRAFT, "constant"
        config.assistant_confidence_threshold = 0.0
        ids = self.ids(*self.size)

        def assisted(batch, context):
            return self.per_token(
                lambda tokens: self.model.generate(ids, assistant_model=draft, max_new_tokens=tokens, **GREEDY), MANY
            )

        def patched(batch, context):
            with llmkernels.patch(draft):
                return assisted(batch, context)

        return self.rows({OURS: self.patched(patched), "eager": assisted}, [self.size], "assisted")

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


class Counter:
    """A streamer that counts the steps."""

    steps = -1  # the prompt comes first

    def put(self, tokens: torch.Tensor) -> None:
        self.steps += 1

    def end(self) -> None:
        pass
