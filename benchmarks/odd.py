"""Rows whose width is no multiple of a 16-byte vector, each behind its aligned neighbour."""

from dataclasses import replace

import torch

from benchmarks.cases import OURS, Case
from benchmarks.measure import measure_op
from benchmarks.ops import bias_gelu, cross_entropy, fp8, layer_norm, rms_norm, softmax, swiglu
from benchmarks.run import Run

# {(rows, the aligned width): odd widths beside it}
NARROW = {(8192, 1000): (1001,), (8192, 2048): (2050,), (8192, 4096): (4095, 4097)}
FEW = {(8192, 1000): (1001,), (8192, 4096): (4097,)}
WIDE = {(1024, 50304): (50257,)}
VOCABS = {(4096, 50304): (50257,), (4096, 32000): (32001,), (2048, 128256): (128257,), (2048, 151936): (151669,)}
GATED = {(4096, 11008): (11009,)}

OPS = (
    (rms_norm.OP, NARROW, lambda rows, cols: rms_norm.case(rows, cols, torch.bfloat16)),
    (layer_norm.OP, NARROW, lambda rows, cols: layer_norm.case(rows, cols, torch.bfloat16)),
    (softmax.OP, NARROW | WIDE, lambda rows, cols: softmax.case(rows, cols, torch.bfloat16)),
    (cross_entropy.GRADIENT, VOCABS, cross_entropy.case_with_gradient),
    (swiglu.OP, GATED, lambda rows, cols: swiglu.case("swiglu", rows, cols)),
    (fp8.QUANTIZE, FEW, lambda rows, cols: fp8.case("fp8_quantize", rows, cols)),
    (rms_norm.OP, FEW, lambda rows, cols: rms_norm.case(rows, cols, torch.bfloat16, "bwd")),
    (layer_norm.OP, FEW, lambda rows, cols: layer_norm.case(rows, cols, torch.bfloat16, "bwd")),
    (softmax.OP, FEW, lambda rows, cols: softmax.case(rows, cols, torch.bfloat16, "bwd")),
    (bias_gelu.OP, FEW, lambda rows, cols: bias_gelu.case(rows, cols, "bwd")),
    (swiglu.OP, GATED, lambda rows, cols: swiglu.case("swiglu", rows, cols, "bwd")),
)


def cases(widths, case_of) -> tuple[list[Case], list[Case]]:
    """The neighbours, and the odd ones."""
    odd = [case_of(rows, width) for (rows, _), found in widths.items() for width in found]
    return [case_of(*neighbour) for neighbour in widths], odd


def measure(run: Run) -> list[dict]:
    """The neighbours by this library alone: their peers are measured with each op."""
    beside = replace(run, providers=run.providers or ("compile", OURS))
    rows = []
    for op, widths, case_of in OPS:
        neighbours, odd = cases(widths, case_of)
        rows += measure_op(replace(op, cases=tuple(neighbours)), replace(run, providers=(OURS,)), ("graph",))
        rows += measure_op(replace(op, cases=tuple(odd)), beside, ("graph",))
    return rows
