"""A frozen linear layer with a low-rank adapter beside it, y = x W^T + s (x A^T) B^T: x and W in bfloat16, A and B in
float32, as PEFT trains them. The backward gives the gradients of x, A and B. Every call has weights of its own."""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain

SCALING = 2.0


def eager(x, lora_a, lora_b, weight):
    """What PEFT computes."""
    y = F.linear(x, weight)
    return (y + F.linear(F.linear(x.to(lora_a.dtype), lora_a), lora_b) * SCALING).to(y.dtype)


def ours():
    from llmkernels import lora_linear

    return lambda x, lora_a, lora_b, weight: lora_linear(x, weight, lora_a, lora_b, scaling=SCALING)


def providers(case):
    return {"eager": plain(eager), "compile": compiled(eager), "llmkernels": Provider(ours)}


def case(m, n, k, r, direction="fwd", quick=False):
    """Moved: x, W, y and the adapter; in the backward also the gradients of x and of the adapter."""
    keys, adapter = {"m": m, "n": n, "k": k, "r": r}, r * (n + k)
    moved = 2 * (m * k + n * k + m * n) + 4 * adapter
    flops = 2 * m * (n * k + adapter)
    if direction == "bwd":
        moved, flops = moved + 2 * m * k + 4 * adapter, flops + 2 * m * adapter
    return Case("lora_linear", keys, torch.bfloat16, moved, direction, quick, flops)


def inputs(case, device):
    m, n, k, r = (case.keys[name] for name in ("m", "n", "k", "r"))

    def draw(*shape, dtype=case.dtype):
        return torch.randn(shape, dtype=dtype, device=device).mul_(shape[1] ** -0.5)

    wide = torch.float32
    return (
        torch.randn(m, k, dtype=case.dtype, device=device),
        draw(r, k, dtype=wide),
        draw(n, r, dtype=wide),
        draw(n, k),
    )


QWEN_7B = 3584, 4608, 18944  # rows of W: attention's output, q|k|v, gate or up

OP = Op(
    name="lora_linear",
    cases=(
        case(256, 896, 896, 16, quick=True),
        *(case(2048, n, 3584, 16, direction) for direction in ("fwd", "bwd") for n in QWEN_7B),
    ),
    inputs=inputs,
    eager=eager,
    providers=providers,
    differentiable=3,
)
