"""The sections of the results: what is measured at once, of which sources, and which of them are stale."""

import gc
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import machine, report, results
from benchmarks.models import MODELS
from benchmarks.run import Run
from benchmarks.sources import hash_of

# What every op depends on, and every patched model, beside what these import and include.
OP = ("setup.py", "benchmarks/measure.py")
PATCHED = ("setup.py", "csrc/kernels", "csrc/torch", "csrc/module.cpp", "llmkernels/hf", "llmkernels/ops")
TRAINED = (*PATCHED, "llmkernels/optim")


@dataclass(frozen=True)
class Section:
    """`roots` are the files and folders it depends on, beside those that these include and import.

    It has what the sections `replaces` of older results had.
    """

    file: str
    name: str
    roots: tuple[str, ...]
    measure: Callable[[Run], list[dict]]
    seconds: int  # about so many on an H200, until it has been measured
    replaces: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.file}/{self.name}"


def op_of(module: str, name: str):
    """The op of that name in a module of benchmarks/ops."""
    from benchmarks.cases import Op

    values = vars(importlib.import_module(f"benchmarks.ops.{module}")).values()
    return next(op for op in values if isinstance(op, Op) and op.name == name)


def ops(*files: str) -> list:
    """The ops that sections of these files measure."""
    roots = [(Path(root), section.name) for section in find(files) for root in section.roots]
    return [op_of(root.stem, name) for root, name in roots if root.parent == Path("benchmarks/ops")]


def of_op(file: str, name: str, module: str, seconds: int, ours: str, methods: Sequence[str] = ("graph",)) -> Section:
    """`ours` are files of llmkernels/ops and of the bindings in csrc/torch, or paths."""

    def measure(run: Run) -> list[dict]:
        from benchmarks.measure import measure_op

        return measure_op(op_of(module, name), run, methods)

    return Section(file, name, (*OP, f"benchmarks/ops/{module}.py", *sources_of(ours)), measure, seconds)


def of(file: str, name: str, module: str, function: str, seconds: int, roots: Sequence[str] = PATCHED, **more):
    def measure(run: Run) -> list[dict]:
        return getattr(importlib.import_module(f"benchmarks.{module}"), function)(run)

    return Section(file, name, (f"benchmarks/{module}.py", *roots), measure, seconds, **more)


def of_model(name: str) -> Section:
    def measure(run: Run) -> list[dict]:
        from benchmarks import families

        return families.measure(name, run)

    return Section("decode", name, ("benchmarks/families.py", *PATCHED), measure, seconds=30)


def sources_of(ours: str) -> list[str]:
    folders = {".cpp": "csrc/torch/", ".py": "llmkernels/ops/"}
    return [name if "/" in name else folders[Path(name).suffix] + name for name in ours.split()]


op = partial(of_op, "ops")
timed_by_all = partial(of_op, "ops", methods=("graph", "events", "wall"))
decode_op = partial(of_op, "decode_ops")
NORM, GLU, LINEAR = "rms_norm.py norm.cpp", "activation.py activation.cpp", "linear.py linear.cpp"
QUANT, CROSS_ENTROPY = "fp8.py fp8.cpp fp8_linear.cpp", "cross_entropy.py cross_entropy.cpp"

# Those that matter most come first.
TABLE = (
    of(  # soon: before others have filled the host's caches
        "ops", "call_overhead", "call_overhead", "measure", 15,
        roots=("setup.py", *sources_of(f"{NORM} {GLU} rope.py rope.cpp")),
    ),
    of("decode", "steps", "steps_compared", "measure_first_sizes", 80, replaces=("unpatched",)),
    decode_op("linear", "linear", 30, LINEAR),
    decode_op("rms_norm_linear", "linear", 40, LINEAR),
    decode_op("decode_attention", "decode_attention", 30, "attention.py attention.cpp"),
    decode_op("decode_attention_short", "decode_attention", 70, "attention.py attention.cpp"),
    decode_op("decode_attention_heads", "decode_attention", 135, "attention.py attention.cpp"),
    decode_op("decode_attention_sizes", "decode_attention", 225, "attention.py attention.cpp"),
    decode_op("sample", "sample", 15, "sampling.py sampling.cpp"),
    timed_by_all("rms_norm", "rms_norm", 65, NORM),
    timed_by_all("add_rms_norm", "add_rms_norm", 25, NORM),
    op("layer_norm", "layer_norm", 20, "layer_norm.py norm.cpp"),
    timed_by_all("rope", "rope", 40, "rope.py rope.cpp"),
    op("rms_norm_rope", "rms_norm_rope", 20, "rms_norm_rope.py rms_norm_rope.cpp"),
    timed_by_all("swiglu", "swiglu", 35, GLU),
    timed_by_all("geglu", "geglu", 10, GLU),
    op("softmax", "softmax", 30, "softmax.py softmax.cpp"),
    op("attention", "attention", 30, "attention.py flash_attention.cpp"),
    op("cross_entropy", "cross_entropy", 20, CROSS_ENTROPY),
    op("cross_entropy_gradient", "cross_entropy", 30, CROSS_ENTROPY),
    op("linear_cross_entropy", "linear_cross_entropy", 40, "linear_cross_entropy.py linear_cross_entropy.cpp"),
    op("bias_gelu", "bias_gelu", 15, GLU),
    op("fp8_quantize", "fp8", 15, QUANT),
    op("rms_norm_fp8_quantize", "fp8", 15, QUANT),
    op("swiglu_fp8_quantize", "fp8", 15, QUANT),
    decode_op("fp8_linear", "fp8", 40, QUANT),
    decode_op("int8_linear", "int8", 40, "int8.py int8_linear.cpp linear.cpp"),
    op("gated_mlp", "gated_mlp", 40, f"gated_mlp.py gated_mlp.cpp {GLU} {LINEAR}"),
    op("lora_linear", "lora_linear", 40, f"lora.py lora.cpp {LINEAR}"),
    op("adamw", "adamw", 30, "llmkernels/optim optim.cpp"),
    of("ops", "odd", "odd", "measure", 90, roots=(*OP, *sources_of(
        f"{NORM} {GLU} {CROSS_ENTROPY} {QUANT} layer_norm.py softmax.py softmax.cpp"
    ))),
    of("model", "prefill", "forward_compared", "measure_prefill", 70),
    of("model", "decode", "forward_compared", "measure_decode", 30),
    *(of_model(name) for name in MODELS),
    of("decode", "adapters", "adapters", "measure", 60),
    of("decode", "callers", "harnesses", "measure_callers", 120),
    of("decode", "harnesses", "harnesses", "measure_harnesses", 120),
    of("decode", "other_sizes", "steps_compared", "measure_other_sizes", 360),
    of("decode", "more_batches", "steps_compared", "measure_more_batches", 90),
    of("decode", "parts", "step_parts", "measure", 15),
    of("decode", "host", "host", "measure", 10),
    of("train", "full", "training", "measure_full", 80, roots=TRAINED),
    of("train", "adapters", "training", "measure_adapters", 130, roots=TRAINED),
    of("train", "real", "training_real", "measure", 120, roots=TRAINED),
    of("model", "compiled", "forward_compiled", "measure", 120, roots=()),
    of("decode", "compiled", "steps_compiled", "measure", 130, roots=()),
)  # fmt: skip
COMMANDS = {
    "ops": ("ops",),
    "decode": ("decode_ops", "decode"),
    "model": ("model",),
    "train": ("train",),
}  # and the files that they write


def find(files: Iterable[str], names: Sequence[str] = ()) -> list[Section]:
    return [section for section in TABLE if section.file in files and (not names or section.name in names)]


def stale(folder: Path, sections: Iterable[Section] = TABLE) -> list[tuple[Section, str]]:
    """The sections whose rows in `folder` are not of these sources, and why not."""
    found = []
    for section in sections:
        measured = results.sections(folder / f"{section.file}.json").get(section.name)
        if measured is None:
            found.append((section, "not measured"))
        elif measured["sources"] != hash_of(section.roots):
            found.append((section, f"measured on other sources, {measured['date'][:10]}"))
    return found


def measure(
    sections: Iterable[Section], run: Run, output: Path, budget_s: float = float("inf"), known: Path | None = None
) -> list[Section]:
    """Measures one section after the other, and saves each when it is complete. Returns those that failed.

    A section is begun only if it is expected to end within the budget: what it took in the results in `known` says.
    """
    begun, failed = time.perf_counter(), []
    described = machine.describe(run.device)
    limits = f"copy {described['copy_gb_s']} GB/s, read {described['read_gb_s']}, {described['sm_clock_mhz']} MHz"
    report.console.print(f"{described['gpu'] or described['cpu']}: {limits}")
    for section in sections:
        recorded = results.sections(known / f"{section.file}.json").get(section.name, {}) if known else {}
        expected_s = 0 if run.small else recorded.get("seconds", section.seconds)
        spent_s = time.perf_counter() - begun
        if spent_s + expected_s > budget_s:
            report.console.print(f"{section.title}: left for another run, {spent_s:.0f} s of {budget_s:.0f} are spent")
            continue
        report.console.print(f"\n{section.title}")
        start = time.perf_counter()
        try:
            with report.progress() as begin:
                rows = section.measure(replace(run, begin=begin, warn=report.warn))
        except Exception as problem:  # the others go on
            report.warn(section.title, problem)
            failed.append(section)
            continue
        finally:
            clear(run)
        seconds = round(time.perf_counter() - start)
        if rows:
            save(section, {**described, "date": machine.now(), "seconds": seconds}, rows, output)
            report.plausible(rows, described)
            report.print_rows(rows, described)
            report.console.print(f"{section.title}: {len(rows)} rows in {seconds} s")
    return failed


def save(section: Section, meta: dict, rows: list[dict], output: Path) -> None:
    entry = {**meta, "sources": hash_of(section.roots)} | ({"replaces": section.replaces} if section.replaces else {})
    rows = [{"section": section.name, **row} for row in rows]
    meta = {key: value for key, value in meta.items() if key != "seconds"}
    results.merge(output / f"{section.file}.json", {**meta, "sections": {section.name: entry}}, rows)


def clear(run: Run) -> None:
    """So that a section finds the host and the device as if it came first."""
    torch._dynamo.reset()
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()
