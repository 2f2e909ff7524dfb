"""Whole calls by what others have built around a model, patched and not, in turn: pipelines, several chats at once,
continuous batching, transformers' server, and, where they are installed, lm-evaluation-harness and TRL.

The words of a tokenizer made for it are w0, w1, ...; prompts are words at random.
"""

import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from benchmarks import timing, training, variants
from benchmarks.cases import OURS
from benchmarks.forward import Bench
from benchmarks.models import QWEN, SMALL_CONFIG, with_random_weights
from benchmarks.run import Run

WORDS = 1000
PROMPTS, SHORTEST, LONGEST = 8, 64, 256  # of each call but the harness's, in words
NEW = 32  # tokens
CHATS = 4  # at once; requests to the server
REQUESTS, CONTINUED = 64, 8  # of log-likelihoods, by so many words at most
PAGES, CHUNK = 512, 256  # of continuous batching: blocks of memory, tokens of a step
ROUNDS, SAMPLES = 2, 2
GROUPS, STEPS = 2, 2  # of GRPO: prompts of a batch, and batches of a call
GREEDY = {"do_sample": False, "pad_token_id": 0}

Call = Callable[[], object]


def measure_callers(run: Run) -> list[dict]:
    """transformers' own. None where a folder's model is measured, whose tokenizer is another one."""
    return [] if run.model_id else Harnesses(run).rows_of_callers()


def measure_harnesses(run: Run) -> list[dict]:
    """Packages of others. None where a folder's model is measured."""
    return [] if run.model_id else Harnesses(run).rows_of_harnesses()


class Harnesses(Bench):
    def __init__(self, run: Run):
        super().__init__(run, {name: variants.VARIANTS[name] for name in ("eager", OURS) if run.wants(name)}, QWEN)
        self.model.generation_config.eos_token_id = None
        self.tokenizer, self.random = tokenizer(), random.Random(0)
        self.count, self.new = (2, 4) if run.small else (PROMPTS, NEW)
        self.texts = [self.text(self.random.randint(SHORTEST, LONGEST)) for _ in range(self.count)]

    def text(self, words: int) -> str:
        return " ".join(f"w{self.random.randrange(WORDS)}" for _ in range(4 if self.run.small else words))

    def rows_of_callers(self) -> list[dict]:
        return [
            *self.rows_of("pipeline", self.pipeline),
            *self.rows_of("chats", self.chats),
            *self.rows_of("continuous_batching", self.continuous_batching),
            *self.rows_of("server", self.server),
        ]

    def rows_of_harnesses(self) -> list[dict]:
        return [
            *self.rows_of("lm_eval_likelihoods", self.likelihoods),
            *self.rows_of("lm_eval_generation", self.generation),
            *self.rows_of("grpo", self.grpo),  # the last, since the model has adapters from then on
        ]

    def rows_of(self, op: str, make: Callable[[], Call]) -> list[dict]:
        self.run.begin(op)
        with ExitStack() as self.opened:
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
        """Of one manager, as a server has it; it would find the prompts of the call before in its pages."""
        prompts = [self.tokenizer(text).input_ids for text in self.texts]
        memory = ContinuousBatchingConfig(num_blocks=PAGES, max_batch_tokens=CHUNK, allow_block_sharing=False)
        options = GenerationConfig(max_new_tokens=self.new, eos_token_id=None, **GREEDY)
        self.opened.callback(self.model.destroy_cached_continuous_batching_manager)
        return lambda: self.model.generate_batch(
            prompts,
            generation_config=options,
            continuous_batching_config=memory,
            progress_bar=False,
            persistent_manager=True,
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

    def server(self) -> Call:
        """Some requests to `transformers serve`, one after the other: its model is a small one until it is this one."""
        for name in ("fastapi", "uvicorn", "openai"):
            __import__(name)
        import requests
        from transformers.cli.serve import Serve

        folder = self.opened.enter_context(tempfile.TemporaryDirectory())
        with_random_weights(SMALL_CONFIG, torch.device("cpu")).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        server = Serve(force_model=folder, device=str(self.device), port=port, non_blocking=True, log_level="error")
        self.opened.callback(server.kill_server)
        (loaded,) = server._model_manager.loaded_models.values()
        loaded.model, loaded.processor = self.model, self.tokenizer
        while not server.server.started:
            time.sleep(0.05)

        def ask(text: str) -> None:
            options = {"prompt": text, "max_tokens": self.new, "temperature": 0.0}
            answer = requests.post(f"http://localhost:{port}/v1/completions", json={"model": folder, **options})
            answer.raise_for_status()

        return lambda: [ask(text) for text in self.texts[:CHATS]]

    def grpo(self) -> Call:
        """Steps of GRPO by TRL, of low-rank adapters: rollouts, their log-likelihoods, and gradients.

        A call makes its trainer, which takes the model's forward and puts its own in the place: patched before that.
        """
        import datasets
        import trl

        def distinct_words(completions: list[str], **_) -> list[float]:
            return [float(len(set(completion.split()))) for completion in completions]

        rollouts = max(2, self.count // GROUPS)
        config = trl.GRPOConfig(
            self.opened.enter_context(tempfile.TemporaryDirectory()),
            per_device_train_batch_size=self.count,
            num_generations=rollouts,
            max_completion_length=self.new,
            max_steps=STEPS,
            bf16=False,  # its autocast: the model is of bfloat16
            use_cpu=self.device.type == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        prompts = datasets.Dataset.from_dict({"prompt": self.texts})
        model = training.with_adapters(self.model)
        if OURS in self.variants:
            self.variants[OURS] = partial(variants.llmkernels, training=True)

        def call():
            trl.GRPOTrainer(model, distinct_words, config, prompts, processing_class=self.tokenizer).train()
            vars(self.model).pop("forward", None)

        return call


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
