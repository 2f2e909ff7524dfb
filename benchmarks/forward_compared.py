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
    rows = [row for tokens in lengths for logits in ("last", "all") for row in compared.prefill(tokens, logits)]
    if run.small or run.model_id:
        return rows
    rows += compared.prefill(LONG, "last")
    rows += [row for lengths in OF_LENGTHS for row in compared.prefill_of_lengths(*lengths)]
    small = bench(run, OF_PREFILL, QWEN_05B)
    return rows + [row for tokens in SMALL_LENGTHS for row in small.prefill(tokens, "last")]


def measure_decode(run: Run) -> list[dict]:
    compared = bench(run, VARIANTS)
    return [row for batch in BATCHES for row in compared.decode(batch)]
