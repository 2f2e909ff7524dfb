"""One case of an op by every provider: checked against the formula in float32, then timed."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.cases import OURS, Case, Op, Provider, as_tuple
from benchmarks.run import Run
from benchmarks.timing import Subject

TOLERANCE = 0.02  # relative L2 error against float32; roundings to bfloat16 stay below 0.01, a wrong kernel does not
METHODS = ("graph", "events", "wall")

Tensors = tuple[Tensor, ...]


def measure_op(op: Op, run: Run, methods: Sequence[str] = METHODS) -> list[dict]:
    """The rows of all cases. A CPU gets the short list: the other sizes are for a GPU."""
    rows = []
    with timing.side_stream(run.device):
        for case in op.cases:
            if case.quick or (run.on_gpu and not run.quick):
                run.begin(case.title)
                rows += measure_case(op, case, run, methods if run.on_gpu else ("wall",))
    return rows


@torch.no_grad()
def measure_case(op: Op, case: Case, run: Run, methods: Sequence[str]) -> list[dict]:
    torch._dynamo.reset()  # else a function compiled for eight shapes falls back to eager silently
    torch.manual_seed(0)
    device, effort = run.device, run.effort
    shared = op.shared(case, device)
    first = op.inputs(case, device)
    plan = timing.plan(sum(tensor.nbytes for tensor in first), case.bytes, effort, case.flops or 0)
    more = plan.sets - 1 if run.on_gpu else 0
    sets = [first, *(op.inputs(case, device) for _ in range(more))]
    expected, grads = reference(op, case, (*first, *shared))
    table = {name: provider for name, provider in op.providers(case).items() if name in run.op_providers}
    subjects, rows = {}, []
    for name, provider in table.items():
        try:
            subjects[name] = prepare(op, case, provider, sets, shared, grads)
            error = judge(op, provider, subjects[name].calls[0](), expected, first)
            if not error < TOLERANCE:
                raise ArithmeticError(f"{case.title}: relative error {error:.3g} against the formula in float32")
            if subjects[name].restore:
                subjects[name].restore()
            if "graph" in methods:
                subjects[name].graph = timing.capture(subjects[name].calls, plan.laps)
        except Exception as problem:  # whatever a peer raises, the others go on
            if name == OURS:
                raise
            subjects.pop(name, None)
            run.warn(name, problem)
    del expected
    measures = {
        "graph": partial(timing.time_graphs, calls_per_replay=plan.laps * len(sets), effort=effort),
        "events": partial(timing.time_events, effort=effort),
        "wall": partial(timing.time_wall, device=device, effort=effort),
    }
    for method in methods:
        for name, samples in measures[method](subjects).items():
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
    eager = op.reference(case) if op.reference else op.eager
    wide = [tensor.detach().float() if tensor.is_floating_point() else tensor for tensor in inputs]
    if case.direction != "bwd":
        return as_tuple(eager(*wide)), ()
    leaves = [tensor.requires_grad_() for tensor in wide[: op.differentiable]]
    outputs = as_tuple(eager(*wide))
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
    if case.direction != "bwd":
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
        for output, wanted in zip(as_tuple(outputs), (tensor.float() for tensor in expected), strict=True)
    ]
    return max(errors)
