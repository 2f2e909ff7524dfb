"""`python -m benchmarks ops`: every case of every op by every provider, checked against the formula, then timed."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import call_overhead, machine, plots, report, timing
from benchmarks.cases import PROVIDERS, Case, Op, Provider, as_tuple
from benchmarks.ops import OPS
from benchmarks.timing import Effort, Subject

TOLERANCE = 0.02  # relative L2 error against float32; roundings to bfloat16 stay below 0.01, a wrong kernel does not
CPU_PROVIDERS = ("eager", "torch", "llmkernels")

Tensors = tuple[Tensor, ...]


def run(device: torch.device, output: Path, only: Sequence[str], providers: Sequence[str], quick: bool) -> None:
    effort = timing.QUICK if quick else timing.FULL
    providers = providers or (PROVIDERS if device.type == "cuda" else CPU_PROVIDERS)
    names = only or [*OPS, call_overhead.OP]
    ops = [op for name, op in OPS.items() if name in names]
    # A CPU runs the short list too: the other sizes are for a GPU.
    todo = [(op, case) for op in ops for case in op.cases if case.quick or (device.type == "cuda" and not quick)]
    with timing.side_stream(device), report.progress(2 + len(todo)) as begin:
        begin("bandwidth limits")
        meta, rows = machine.describe(device), []
        report.console.print(f"  copy {meta['copy_gb_s']} GB/s, read {meta['read_gb_s']}, {meta['sm_clock_mhz']} MHz")
        begin("call overhead")  # first: before other cases have filled the allocator's lists
        if call_overhead.OP in names:
            rows += call_overhead.measure(providers, device, effort)
        begun = time.perf_counter()
        for op, case in todo:
            begin(f"{case.title}, {time.perf_counter() - begun:.0f} s")
            try:
                rows += plausible(measure_case(op, case, providers, device, effort), meta)
            except Exception as problem:
                report.warn(case.title, problem)
            report.save(output / "ops.json", meta, rows)  # after every case: a crash loses one
    report.save(output / "ops.json", meta, rows)
    print_tables(rows, meta)
    plots.draw(output)
    report.console.print(f"\n{output / 'ops.json'}: {len(rows)} rows")


@torch.no_grad()
def measure_case(
    op: Op,
    case: Case,
    names: Sequence[str],
    device: torch.device,
    effort: Effort,
    methods: Sequence[str] = ("graph", "events", "wall"),
) -> list[dict]:
    torch._dynamo.reset()  # else a function compiled for eight shapes falls back to eager silently
    torch.manual_seed(0)
    shared = op.shared(case, device)
    first = op.inputs(case, device)
    plan = timing.plan(sum(tensor.nbytes for tensor in first), case.bytes, effort)
    more = plan.sets - 1 if device.type == "cuda" else 0
    sets = [first, *(op.inputs(case, device) for _ in range(more))]
    expected, grads = reference(op, case, (*first, *shared))
    table = {name: provider for name, provider in op.providers(case).items() if name in names}
    subjects, rows = {}, []
    for name, provider in table.items():
        try:
            subjects[name] = prepare(op, case, provider, sets, shared, grads)
            error = judge(op, provider, subjects[name].calls[0](), expected, first)
            if not error < TOLERANCE:
                raise ArithmeticError(f"relative error {error:.3g} against the formula in float32")
            if subjects[name].restore:
                subjects[name].restore()
            if device.type == "cuda":
                subjects[name].graph = timing.capture(subjects[name].calls, plan.laps)
        except Exception as problem:  # whatever a peer raises, the others go on
            subjects.pop(name, None)
            report.warn(name, problem)
    del expected
    measures = {"wall": partial(timing.time_wall, device=device, effort=effort)}
    if device.type == "cuda":
        calls = plan.laps * len(sets)
        graph = partial(timing.time_graphs, calls_per_replay=calls, effort=effort)
        measures = {"graph": graph, "events": partial(timing.time_events, effort=effort), **measures}
        measures = {method: measures[method] for method in methods}
    for method, measure in measures.items():
        for name, samples in measure(subjects).items():
            notes = {"mutates_inputs": True} if case.direction in table[name].mutates else {}
            if table[name].approximate:
                notes["approximate"] = True
            if method == "graph":
                notes["touched_bytes"] = len(sets) * case.bytes  # distinct memory that one round walks over
            rows.append({**case.row, "provider": name, "timing": method, **timing.summary(samples), **notes})
    return rows


def judge(op: Op, provider: Provider, outputs: Tensor | Tensors, expected: Tensors, inputs: Tensors) -> float:
    """How wrong a provider's result is."""
    if provider.approximate:
        return 0.0
    return op.error(as_tuple(outputs), inputs) if op.error else relative_error(outputs, expected)


@torch.enable_grad()
def reference(op: Op, case: Case, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """What a provider has to compute, in float32, and (for a backward pass) the gradients it gets."""
    wide = [tensor.detach().float() if tensor.is_floating_point() else tensor for tensor in inputs]
    if case.direction == "fwd":
        return as_tuple(op.eager(*wide)), ()
    leaves = [tensor.requires_grad_() for tensor in wide[: op.differentiable]]
    outputs = as_tuple(op.eager(*wide))
    grads = tuple(torch.randn_like(output).to(case.dtype) for output in outputs)
    return torch.autograd.grad(outputs, leaves, [grad.float() for grad in grads]), grads


def prepare(op: Op, case: Case, provider: Provider, sets: list[Tensors], shared: Tensors, grads: Tensors) -> Subject:
    """One call per input set; a provider that writes into what it is given gets copies, to be restored."""
    forward = provider.forward()
    gradients = [grads, *(tuple(torch.randn_like(grad) for grad in grads) for _ in sets[1:])]
    restore = None
    if case.direction in provider.mutates:
        originals = flat(sets, gradients)
        sets, gradients = copies(sets), copies(gradients)
        # Through `.data`, or autograd would see saved tensors that have changed.
        restore = partial(torch._foreach_copy_, [tensor.data for tensor in flat(sets, gradients)], originals)
    if case.direction == "fwd":
        return Subject([partial(forward, *inputs, *shared) for inputs in sets], restore)
    direct = provider.backward() if provider.backward else None
    pairs = zip(sets, gradients, strict=True)
    return Subject([backward_call(op, forward, direct, (*inputs, *shared), grads) for inputs, grads in pairs], restore)


def backward_call(op: Op, forward, direct, inputs: Tensors, grads: Tensors) -> timing.Call:
    """The backward pass alone: its forward runs here, once, on the stream that the backward will use."""
    if direct:
        return partial(direct, grads, as_tuple(forward(*inputs)), *inputs)
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(index < op.differentiable) for index, tensor in enumerate(inputs)]
        outputs = as_tuple(forward(*leaves))
    return partial(torch.autograd.grad, outputs, leaves[: op.differentiable], grads, retain_graph=True)


def copies(sets: list[Tensors]) -> list[Tensors]:
    return [tuple(tensor.clone() for tensor in one) for one in sets]


def flat(*lists: list[Tensors]) -> list[Tensor]:
    return [tensor for sets in lists for one in sets for tensor in one]


def relative_error(outputs: Tensor | Tensors, expected: Tensors) -> float:
    errors = [
        ((output.float() - wanted).norm() / wanted.norm()).item()
        for output, wanted in zip(as_tuple(outputs), expected, strict=True)
    ]
    return max(errors)


def plausible(rows: list[dict], meta: dict) -> list[dict]:
    """Says so when a time is shorter than the memory allows: then something else was measured."""
    limit_gb_s = 1.1 * max(meta["copy_gb_s"], meta["read_gb_s"])
    for row in rows:
        if row["timing"] == "graph" and row["bytes"] / row["time_us"] / 1e3 > limit_gb_s:
            report.console.print(f"  impossible: {row}")
    return rows


def print_tables(rows: list[dict], meta: dict) -> None:
    ops = [row for row in rows if row["op"] != call_overhead.OP]
    title = {
        "wall": "wall time per Python call, us",
        "events": "single launches, L2 flushed, us",
        "graph": "CUDA graph over rotated inputs, us per call",
    }
    for method, text in title.items():
        report.print_table(text, [row for row in ops if row["timing"] == method], meta["copy_gb_s"])
    overhead = [row for row in rows if row["op"] == call_overhead.OP]
    report.print_table("CPU time of one Python call, not waiting for the device, us", overhead)
