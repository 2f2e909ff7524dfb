"""Decoding without llmkernels: generate, a user's own loop over the forward, and a static cache with torch.compile."""

from benchmarks import steps
from benchmarks.run import Run

COMPILED_SIZES = ((1, 512), (8, 512), (1, 8192))  # each is compiled anew, a minute and more


class Bench(steps.Bench):
    def forward_loop(self, batch: int, context: int) -> steps.Measured:
        """With transformers' growing cache."""
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

    def static(self, batch: int, context: int) -> steps.Measured:
        """transformers' static cache, its step compiled by torch."""
        ids = self.ids(batch, context)
        options = {"cache_implementation": "static", "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def call(tokens):
            self.model.generate(ids, max_new_tokens=tokens, **options)

        call(self.many)  # first, so that the cache that is made has room for all that follow
        return self.per_token(call)

    def last_logits(self, ids):
        return self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def measure_first_sizes(run: Run) -> list[dict]:
    bench = Bench(run)
    bench.compare_logits("eager", bench.last_logits)
    return bench.rows({"eager": bench.forward_loop, "eager_generate": bench.generate}, bench.first_sizes)


def measure_other_sizes(run: Run) -> list[dict]:
    bench = Bench(run)
    return bench.rows({"eager_generate": bench.generate}, bench.other_sizes)


def measure_compiled(run: Run) -> list[dict]:
    bench = Bench(run)
    return bench.rows({"static_compile": bench.static}, () if run.small else COMPILED_SIZES)
