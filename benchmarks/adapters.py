"""A model with low-rank adapters of PEFT on all of its linear layers: a token of generate, and the first one behind a
prompt, patched and not, in turn."""

from benchmarks import families, training
from benchmarks.models import QWEN
from benchmarks.run import Run

SIZES = ((1, 512), (8, 512))  # batch, context
PROMPTS = (128, 2048)  # tokens


def measure(run: Run) -> list[dict]:
    """None where the caller names a model."""
    if run.model_id:
        return []
    bench = families.Bench(run, QWEN)
    training.with_adapters(bench.model)
    bench.model.eval()
    bench.name += "-lora"
    rows = bench.rows(bench.both(bench.generate), [bench.size] if run.small else SIZES, "adapters")
    return rows + [row for tokens in PROMPTS[: 1 if run.small else None] for row in bench.first_token(1, tokens)]
