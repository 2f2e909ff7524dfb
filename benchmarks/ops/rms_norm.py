"""RMSNorm: y = x / rms(x) * weight."""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain

EPS = 1e-6


def eager(x, weight):
    """Hugging Face's order: normalize in float32, round to the input's dtype, then multiply."""
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * normalized.to(x.dtype)


def fused(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def triton_forward():
    from benchmarks.triton_kernels import rms_norm

    return lambda x, weight: rms_norm(x, weight, EPS)


def triton_backward():
    from benchmarks.triton_kernels import rms_norm_backward

    return lambda grads, outputs, x, weight: rms_norm_backward(grads[0], None, x, weight, EPS)


def liger():
    from liger_kernel.ops import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", True, None)


def ours():
    from llmkernels import rms_norm

    return lambda x, weight: rms_norm(x, weight, EPS)


def providers(case):
    return {
        "eager": plain(eager),
        "torch": plain(fused),
        "compile": compiled(eager),
        "triton": Provider(triton_forward, triton_backward),
        "liger": Provider(liger, mutates=("bwd",)),  # writes the gradient over the one it got
        "llmkernels": Provider(ours),
    }


def weight(cols, dtype, device):
    return (1 + torch.randn(cols, dtype=dtype, device=device) / 16,)


def case(rows, cols, dtype, direction="fwd", quick=False):
    passes_over_x = 2 if direction == "fwd" else 3
    moved = (passes_over_x * rows + (1 if direction == "fwd" else 2)) * cols * dtype.itemsize
    return Case("rms_norm", {"rows": rows, "cols": cols}, dtype, moved, direction, quick)


HIDDEN_SIZES = (896, 1536, 2048, 3072, 3584, 4096)

OP = Op(
    name="rms_norm",
    cases=(
        case(1, 3584, torch.bfloat16, quick=True),
        *(case(2048, cols, torch.float16, quick=cols == 3584) for cols in HIDDEN_SIZES),
        case(16384, 3584, torch.float16),
        case(32768, 8192, torch.float16),
        *(case(2048, cols, torch.bfloat16, "bwd", quick=cols == 3584) for cols in HIDDEN_SIZES),
        case(16384, 3584, torch.bfloat16, "bwd"),
    ),
    inputs=lambda case, device: (torch.randn(case.keys["rows"], case.keys["cols"], dtype=case.dtype, device=device),),
    shared=lambda case, device: weight(case.keys["cols"], case.dtype, device),
    eager=eager,
    providers=providers,
    differentiable=2,
)
