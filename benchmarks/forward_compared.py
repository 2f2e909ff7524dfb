"""The forward of a model as it is, patched by llmkernels, patched by Liger-Kernel, and prompts with products in FP8."""

from collections.abc import Callable, Mapping

from benchmarks.forward import Bench
from benchmarks.models import QWEN_05B
from benchmarks.run import Run
from benchmarks.variants import OF_PREFILL, VARIANTS

LENGTHS = (128, 256, 512, 1024, 2048)
LONG = 8192  # with the last logits alone
SMALL_LENGTHS = (128, 2048)  # of the small model
OF_LENGTHS = ((32, 100, 2000), (32, 1050, 1050))  # prompts, the shortest, the longest: as many tokens, padded or not
LONG_ROUNDS, OF_LENGTHS_ROUNDS = 4, 2
BATCHES = (1, 8)
CPU_VARIANTS = ("eager", "llmkernels")


def bench(run: Run, variants: Mapping[str, Callable], published: str | None = None) -> Bench:
    asked = run.providers or (variants if run.on_gpu else CPU_VARIANTS)
    found = Bench(run, {name: variant for name, variant in variants.items() if name in asked}, published)
    found.leave_out_what_fails()
    return found


def measure_prefill(run: Run) -> list[dict]:
    lengths = LENGTHS[:: 2 if run.quick else 1] if run.on_gpu else LENGTHS[: 2 if run.quick else 3]
    compared = bench(run, OF_PREFILL)
    compared.compare_logits()
    rows = compared.measure([compared.prefill(tokens, logits) for tokens in lengths for logits in ("last", "all")])
    if run.small or run.model_id:
        return rows
    rows += compared.measure([compared.prefill(LONG, "last")], LONG_ROUNDS)
    rows += compared.measure([compared.prefill_of_lengths(*lengths) for lengths in OF_LENGTHS], OF_LENGTHS_ROUNDS)
    small = bench(run, OF_PREFILL, QWEN_05B)
    return rows + small.measure([small.prefill(tokens, "last") for tokens in SMALL_LENGTHS])


def measure_decode(run: Run) -> list[dict]:
    compared = bench(run, VARIANTS)
    return compared.measure([compared.decode(batch) for batch in BATCHES])
