"""FP8: quantization per token, alone and behind RMSNorm or SwiGLU, and a linear layer with the quantization of x."""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain
from benchmarks.ops import rms_norm
from benchmarks.ops.linear import QWEN_SHAPES

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def eager(x):
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(2**-126)
    return (wide * (1 / scale)).clamp(-LARGEST, LARGEST).to(FP8), scale


def eager_rms_norm(x, weight):
    return eager(rms_norm.eager(x, weight))


def eager_swiglu(gate, up):
    return eager(F.silu(gate) * up)


def ours(name):
    def build():
        import llmkernels

        return getattr(llmkernels, name)

    return Provider(build)


def peers(function, name):
    return lambda case: {"eager": plain(function), "compile": compiled(function), "llmkernels": ours(name)}


def rounding(function, outputs, inputs):
    """How much larger or smaller the error of the quantization is than that of the formula's."""
    wide = [tensor.float() for tensor in inputs]
    q, scale = eager(y := function(*wide))
    errors = [(a.float() * b - y).norm() for a, b in ((q, scale), outputs)]
    return ((errors[1] - errors[0]).abs() / y.norm()).item()


def case(op, rows, cols, operands=1, quick=False):
    dtype = torch.bfloat16
    moved = rows * cols * (operands * dtype.itemsize + 1) + rows * 4
    return Case(op, {"rows": rows, "cols": cols}, dtype, moved, quick=quick)


def matrices(count):
    def draw(case, device):
        shape = case.keys["rows"], case.keys["cols"]
        return tuple(torch.randn(shape, dtype=case.dtype, device=device) for _ in range(count))

    return draw


QUANTIZE = Op(
    name="fp8_quantize",
    cases=(
        *(case("fp8_quantize", 2048, cols, quick=cols == 3584) for cols in (3584, 18944)),
        case("fp8_quantize", 16384, 3584),
    ),
    inputs=matrices(1),
    eager=eager,
    providers=peers(eager, "fp8_quantize"),
    differentiable=0,
)

RMS_NORM = Op(
    name="rms_norm_fp8_quantize",
    cases=tuple(case("rms_norm_fp8_quantize", 2048, cols, quick=cols == 896) for cols in (896, 3584)),
    inputs=lambda case, device: (
        *matrices(1)(case, device),
        torch.ones(case.keys["cols"], device=device).to(case.dtype),
    ),
    eager=eager_rms_norm,
    providers=peers(eager_rms_norm, "rms_norm_fp8_quantize"),
    differentiable=0,
    error=partial(rounding, rms_norm.eager),
)

SWIGLU = Op(
    name="swiglu_fp8_quantize",
    cases=tuple(case("swiglu_fp8_quantize", 2048, cols, 2, quick=cols == 4864) for cols in (4864, 18944, 28672)),
    inputs=matrices(2),
    eager=eager_swiglu,
    providers=peers(eager_swiglu, "swiglu_fp8_quantize"),
    differentiable=0,
    error=partial(rounding, lambda gate, up: F.silu(gate) * up),
)


# The linear layer: x is quantized in every call, the weight before; `narrow` is the weight as bfloat16. Fast
# accumulation, which sums with fewer bits, is an op of its own here, so that like is compared with like.
FAST = "fp8_linear_fast_accum"


def eager_linear(x, weight, scale, narrow):
    q, x_scale = eager(x)
    return ((q.float() * x_scale) @ (weight.float() * scale).t()).to(x.dtype)


def scaled_mm(quantization, use_fast_accum):
    """torch's product behind a quantization."""
    quantize = quantization.forward()

    def run(x, weight, scale, narrow):
        q, x_scale = quantize(x)
        options = {"out_dtype": x.dtype, "use_fast_accum": use_fast_accum}
        return torch._scaled_mm(q, weight.t(), x_scale, scale.t(), **options)

    return run


def our_linear(use_fast_accum):
    from llmkernels import fp8_linear, fp8_quantize

    def run(x, weight, scale, narrow):
        q, x_scale = fp8_quantize(x)
        return fp8_linear(q, weight, x_scale, scale, out_dtype=x.dtype, use_fast_accum=use_fast_accum)

    return run


def linear_providers(case):
    fast = case.op == FAST
    return {
        "torch": Provider(partial(scaled_mm, plain(eager), fast)),
        "compile": Provider(partial(scaled_mm, compiled(eager), fast)),
        "cublas": plain(lambda x, weight, scale, narrow: F.linear(x, narrow), approximate=True),  # without FP8
        "llmkernels": Provider(partial(our_linear, fast)),
    }


def linear_case(m, n, k, op="fp8_linear"):
    moved = n * k + 3 * m * k + 2 * m * n
    return Case(op, {"m": m, "n": n, "k": k}, torch.bfloat16, moved, "fwd", (m, n) == (16, 4608), 2 * m * n * k)


def linear_weights(case, device):
    narrow = torch.randn(case.keys["n"], case.keys["k"], dtype=case.dtype, device=device).mul_(case.keys["k"] ** -0.5)
    return *eager(narrow), narrow


LINEAR = Op(
    name="fp8_linear",
    cases=(
        *(linear_case(16, n, 3584) for n in (4608, 37888)),
        *(linear_case(2048, *shape) for shape in QWEN_SHAPES[:4]),
        *(linear_case(2048, *shape, FAST) for shape in QWEN_SHAPES[:4]),
    ),
    inputs=lambda case, device: (torch.randn(case.keys["m"], case.keys["k"], dtype=case.dtype, device=device),),
    shared=linear_weights,
    eager=eager_linear,
    providers=linear_providers,
    differentiable=0,
)
