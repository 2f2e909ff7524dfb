"""Whole calls by what others have built around a model, patched and not, in turn: pipelines, several chats at once,
continuous batching, and lm-evaluation-harness, where it is installed.

The words of a tokenizer made for it are w0, w1, ...; prompts are words at random.
"""

import random
import threading
from collections.abc import Callable

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from benchmarks import timing, variants
from benchmarks.cases import OURS
from benchmarks.forward import Bench
from benchmarks.models import QWEN
from benchmarks.run import Run

WORDS = 1000
PROMPTS, SHORTEST, LONGEST = 8, 64, 256  # of each call but the harness's, in words
NEW = 32  # tokens
CHATS = 4  # at once
REQUESTS, CONTINUED = 64, 8  # of log-likelihoods, by so many words at most
PAGES, CHUNK = 512, 256  # of continuous batching: blocks of memory, tokens of a step
ROUNDS, SAMPLES = 4, 2
GREEDY = {"do_sample": False, "pad_token_id": 0}

Call = Callable[[], object]


def measure(run: Run) -> list[dict]:
    """None where the caller names a model, whose tokenizer is another one."""
    return [] if run.model_id else Harnesses(run).rows_of_all()


class Harnesses(Bench):
    def __init__(self, run: Run):
        super().__init__(run, {name: variants.VARIANTS[name] for name in ("eager", OURS) if run.wants(name)}, QWEN)
        self.model.generation_config.eos_token_id = None
        self.tokenizer, self.random = tokenizer(), random.Random(0)
        self.count, self.new = (2, 4) if run.small else (PROMPTS, NEW)
        self.texts = [self.text(self.random.randint(SHORTEST, LONGEST)) for _ in range(self.count)]

    def text(self, words: int) -> str:
        return " ".join(f"w{self.random.randrange(WORDS)}" for _ in range(4 if self.run.small else words))

    def rows_of_all(self) -> list[dict]:
        calls = {
            "pipeline": self.pipeline,
            "chats": self.chats,
            "continuous_batching": self.continuous_batching,
            "lm_eval_likelihoods": self.likelihoods,
            "lm_eval_generation": self.generation,
        }
        return [row for op, make in calls.items() for row in self.rows_of(op, make)]

    @torch.no_grad()
    def rows_of(self, op: str, make: Callable[[], Call]) -> list[dict]:
        self.run.begin(op)
        try:
            call = make()
        except ImportError as problem:
            self.run.warn(op, problem)
            return []
        samples: dict[str, list[float]] = {name: [] for name in self.variants}
        for name in timing.in_turn(list(samples), 1 if self.run.small else ROUNDS):
            with self.variants[name](self.model), timing.garbage_collection_paused():
                call()
                samples[name] += [self.timed(call)[0] for _ in range(1 if self.run.small else SAMPLES)]
        return self.rows({"op": op, "batch": self.count}, samples)

    def pipeline(self) -> Call:
        pipe = transformers.pipeline("text-generation", self.model, tokenizer=self.tokenizer, device=self.device)
        return lambda: pipe(self.texts, batch_size=self.count, max_new_tokens=self.new, **GREEDY)

    def chats(self) -> Call:
        """Each in a thread, of the same model."""
        prompts = [self.ids(1, SHORTEST) for _ in range(2 if self.run.small else CHATS)]

        def chat(ids):
            self.model.generate(ids, max_new_tokens=self.new, **GREEDY)

        def call():
            threads = [threading.Thread(target=chat, args=(ids,)) for ids in prompts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return call

    def continuous_batching(self) -> Call:
        prompts = [self.tokenizer(text).input_ids for text in self.texts]
        memory = ContinuousBatchingConfig(num_blocks=PAGES, max_batch_tokens=CHUNK)
        options = GenerationConfig(max_new_tokens=self.new, eos_token_id=None, **GREEDY)
        return lambda: self.model.generate_batch(
            prompts, generation_config=options, continuous_batching_config=memory, progress_bar=False
        )

    def harness(self):
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=self.model, tokenizer=self.tokenizer, batch_size=self.count, max_length=2 * LONGEST)

    def likelihoods(self) -> Call:
        harness, count = self.harness(), 2 if self.run.small else REQUESTS
        pairs = [
            (self.text(self.random.randint(SHORTEST, LONGEST)) + " ", self.text(self.random.randint(1, CONTINUED)))
            for _ in range(count)
        ]
        requests = instances("loglikelihood", pairs)
        return lambda: harness.loglikelihood(requests, disable_tqdm=True)

    def generation(self) -> Call:
        harness = self.harness()
        options = {"until": ["w5 w5 w5"], "max_gen_toks": self.new, "do_sample": False}
        requests = instances("generate_until", [(text, options) for text in self.texts])
        return lambda: harness.generate_until(requests, disable_tqdm=True)


def instances(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def tokenizer() -> PreTrainedTokenizerFast:
    import tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)
