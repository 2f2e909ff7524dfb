"""Decoding with transformers' static cache, its step compiled by torch: the fastest way without llmkernels.

Not in turn with the others (steps.py), since it is compiled anew for each size, a minute and more.
"""

from benchmarks import steps
from benchmarks.run import Run

SIZES = ((1, 512), (8, 512), (1, 8192))


class Bench(steps.Bench):
    def static(self, batch: int, context: int) -> steps.Measured:
        ids = self.ids(batch, context)
        options = {"cache_implementation": "static", "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def call(tokens):
            self.model.generate(ids, max_new_tokens=tokens, **options)

        call(self.many)  # first, so that the cache that is made has room for all that follow
        return self.per_token(call)


def measure(run: Run) -> list[dict]:
    bench = Bench(run)
    return bench.rows({"static_compile": bench.static}, () if run.small else SIZES)
