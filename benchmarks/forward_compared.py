"""The forward of a model as it is, patched by llmkernels, and patched by Liger-Kernel."""

from benchmarks.forward import Bench
from benchmarks.run import Run
from benchmarks.variants import VARIANTS

LENGTHS = (128, 256, 512, 1024, 2048)
BATCHES = (1, 8)
CPU_VARIANTS = ("eager", "llmkernels")


def bench(run: Run) -> Bench:
    asked = run.providers or (VARIANTS if run.on_gpu else CPU_VARIANTS)
    found = Bench(run, {name: variant for name, variant in VARIANTS.items() if name in asked})
    found.leave_out_what_fails()
    return found


def measure_prefill(run: Run) -> list[dict]:
    lengths = LENGTHS[:: 2 if run.quick else 1] if run.on_gpu else LENGTHS[: 2 if run.quick else 3]
    compared = bench(run)
    compared.compare_logits()
    return [row for tokens in lengths for logits in ("last", "all") for row in compared.prefill(tokens, logits)]


def measure_decode(run: Run) -> list[dict]:
    compared = bench(run)
    return [row for batch in BATCHES for row in compared.decode(batch)]
