"""The CPU cost of one Python call without a gradient, not waiting for the device, at the sizes of one decoded token.

The provider `empty` is the floor: an op with the schema of ours, defined through `torch.library.Library`, whose kernel
is a Python function that returns tensors made beforehand. It is called as torch.ops.<library>.<op>(...) with every
argument and so pays for parsing, dispatch and boxing, and for nothing else: no allocation, no check, no launch. (An op
of the same kind in C++ costs the same within 0.2 us; `torch.library.custom_op` costs eight times that.)
"""

from functools import partial

import torch
from torch._inductor import config as inductor

from benchmarks import timing
from benchmarks.cases import OURS, Case, as_tuple
from benchmarks.ops import add_rms_norm, rms_norm, rope, swiglu
from benchmarks.run import Run

OP = "call_overhead"
DTYPE = torch.bfloat16
OPS = {op.name: op for op in (rms_norm.OP, add_rms_norm.OP, rope.OP, swiglu.OP)}
CASES = {
    "rms_norm": {"rows": 1, "cols": 3584},
    "add_rms_norm": {"rows": 1, "cols": 3584},
    "rope": {"batch": 1, "tokens": 1, "heads": 28, "kv_heads": 4, "head_dim": 128, "in_place": False},
    "swiglu": {"rows": 1, "cols": 18944, "packed": False},
}
SCHEMAS = {  # of the ops in csrc/torch/ops.cpp, and the arguments that follow the tensors
    "rms_norm": ("(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast) -> Tensor", (1e-6, 0.0, True)),
    "add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, bool cast) -> (Tensor, Tensor)",
        (1e-6, 0.0, True),
    ),
    "rope": (
        "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? position_ids, bool heads_first, bool interleaved, "
        "int? rotary_dim) -> (Tensor, Tensor)",
        (None, True, False, None),
    ),
    "swiglu": (
        "(Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, str activation) -> Tensor",
        (None, None, "silu"),
    ),
}


@torch.no_grad()
def measure(run: Run) -> list[dict]:
    library = torch.library.Library("llmkernels_empty", "FRAGMENT")
    rows = []
    with timing.side_stream(run.device):
        # All of them first, and without the compiler's pool of processes, which would begin beside what is timed.
        with inductor.patch(compile_threads=1):
            prepared = {name: prepare(library, name, run) for name in CASES}
        for name, (functions, moved) in prepared.items():
            run.begin(name)
            common = {"op": OP, "function": name, "dtype": "bfloat16", "pass": "fwd", "timing": "wall", "bytes": moved}
            times = timing.time_calls(functions, run.device, run.effort)
            rows += [{**common, "provider": provider, **timing.summary(samples)} for provider, samples in times.items()]
    return rows


def prepare(library, name, run):
    """What to call, by provider, and the bytes that one call moves."""
    op, case = OPS[name], Case(name, CASES[name], DTYPE, bytes=0)
    inputs = (*op.inputs(case, run.device), *op.shared(case, run.device))
    outputs = as_tuple(op.eager(*inputs))
    functions = {"empty": empty(library, name, inputs, outputs)}
    for provider, entry in op.providers(case).items():
        if provider not in run.op_providers:
            continue
        try:
            function = partial(entry.forward(), *inputs)
            function()
            functions[provider] = function
        except Exception as problem:
            if provider == OURS:
                raise
            run.warn(provider, problem)
    return functions, sum(tensor.nbytes for tensor in (*inputs, *outputs))


def empty(library, name, inputs, outputs):
    schema, options = SCHEMAS[name]
    library.define(name + schema)
    result = outputs[0] if len(outputs) == 1 else outputs
    library.impl(name, lambda *arguments: result, inputs[0].device.type.upper())
    return partial(getattr(torch.ops.llmkernels_empty, name), *inputs, *options)
