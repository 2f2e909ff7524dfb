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
from benchmarks.sources import ROOT, fingerprint

CASES = "benchmarks/measure.py"


@dataclass(frozen=True)
class Section:
    """`roots` are the files that measure it, whose imports and ops say what else it depends on."""

    file: str
    name: str
    roots: tuple[str, ...]
    measure: Callable[[Run], list[dict]]
    seconds: int  # about so many on an H200, until it has been measured

    @property
    def title(self) -> str:
        return f"{self.file}/{self.name}"


def of_op(file: str, name: str, module: str, seconds: int, methods: Sequence[str]) -> Section:
    def measure(run: Run) -> list[dict]:
        from benchmarks.measure import measure_op
        from benchmarks.ops import DECODE_OPS, OPS

        return measure_op((OPS | DECODE_OPS)[name], run, methods)

    return Section(file, name, (CASES, f"benchmarks/ops/{module}.py"), measure, seconds)


def of(file: str, name: str, module: str, function: str, seconds: int) -> Section:
    def measure(run: Run) -> list[dict]:
        return getattr(importlib.import_module(f"benchmarks.{module}"), function)(run)

    return Section(file, name, (f"benchmarks/{module}.py",), measure, seconds)


def of_model(name: str) -> Section:
    def measure(run: Run) -> list[dict]:
        from benchmarks import families

        return families.measure(name, run)

    return Section("decode", name, ("benchmarks/families.py",), measure, seconds=20)


op = partial(of_op, "ops", methods=("graph", "events", "wall"))
graph_op = partial(of_op, "ops", methods=("graph",))
decode_op = partial(of_op, "decode_ops", methods=("graph",))

# Those that matter most come first.
TABLE = (
    of("ops", "call_overhead", "call_overhead", "measure", 15),  # soon: before others have filled the host's caches
    of("decode", "steps", "steps_patched", "measure_first_sizes", 30),
    decode_op("linear", "linear", 30),
    decode_op("rms_norm_linear", "linear", 40),
    decode_op("decode_attention", "decode_attention", 30),
    decode_op("sample", "sample", 15),
    op("rms_norm", "rms_norm", 65),
    op("add_rms_norm", "add_rms_norm", 25),
    graph_op("layer_norm", "layer_norm", 20),
    op("rope", "rope", 40),
    graph_op("rms_norm_rope", "rms_norm_rope", 20),
    op("swiglu", "swiglu", 35),
    op("geglu", "geglu", 10),
    graph_op("softmax", "softmax", 30),
    graph_op("cross_entropy", "cross_entropy", 20),
    graph_op("cross_entropy_gradient", "cross_entropy", 30),
    graph_op("linear_cross_entropy", "linear_cross_entropy", 40),
    graph_op("bias_gelu", "bias_gelu", 15),
    graph_op("fp8_quantize", "fp8", 15),
    graph_op("rms_norm_fp8_quantize", "fp8", 15),
    graph_op("swiglu_fp8_quantize", "fp8", 15),
    decode_op("fp8_linear", "fp8", 40),
    graph_op("gated_mlp", "gated_mlp", 40),
    graph_op("lora_linear", "lora_linear", 40),
    graph_op("adamw", "adamw", 30),
    of("ops", "odd", "odd", "measure", 60),
    of("model", "prefill", "forward_compared", "measure_prefill", 70),
    of("model", "decode", "forward_compared", "measure_decode", 30),
    *(of_model(name) for name in MODELS),
    of("decode", "other_sizes", "steps_patched", "measure_other_sizes", 100),
    of("decode", "parts", "step_parts", "measure", 15),
    of("decode", "host", "host", "measure", 10),
    of("decode", "unpatched", "steps_unpatched", "measure_first_sizes", 35),
    of("decode", "unpatched_other_sizes", "steps_unpatched", "measure_other_sizes", 80),
    of("train", "full", "training", "measure_full", 80),
    of("train", "adapters", "training", "measure_adapters", 130),
    of("train", "real", "training_real", "measure", 120),
    of("model", "compiled", "forward_compiled", "measure", 120),
    of("decode", "compiled", "steps_unpatched", "measure_compiled", 130),
)
COMMANDS = {
    "ops": ("ops",),
    "decode": ("decode_ops", "decode"),
    "model": ("model",),
    "train": ("train",),
}  # and the files that they write


def find(files: Iterable[str], names: Sequence[str] = ()) -> list[Section]:
    return [section for section in TABLE if section.file in files and (not names or section.name in names)]


def stale(folder: Path, sections: Iterable[Section] = TABLE, tree=None) -> list[tuple[Section, str]]:
    """The sections whose rows in `folder` are not of these sources, and why not."""
    tree = tree or fingerprint.Tree(ROOT)
    found = []
    for section in sections:
        measured = results.sections(folder / f"{section.file}.json").get(section.name)
        if measured is None:
            found.append((section, "not measured"))
        elif measured.get("roots") != list(section.roots) or fingerprint.is_stale(measured, tree):
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
    component = fingerprint.Tree(ROOT).component(section.roots, gpu=bool(meta["gpu"]))
    entry = {**meta, "sources": component, "roots": list(section.roots)}
    rows = [{"section": section.name, **row} for row in rows]
    meta = {key: value for key, value in meta.items() if key != "seconds"}
    results.merge(output / f"{section.file}.json", {**meta, "sections": {section.name: entry}}, rows)


def clear(run: Run) -> None:
    """So that a section finds the host and the device as if it came first."""
    torch._dynamo.reset()
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()
