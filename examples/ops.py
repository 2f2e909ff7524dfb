"""A few ops alone, forward and backward, beside the same in eager PyTorch.

    python examples/ops.py

Each line has the largest error of the results and of each gradient, relative to the largest value of eager.
"""

import torch
import torch.nn.functional as F

import llmkernels

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)


def inputs(*shapes):
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def run(function, tensors):
    """The result, and the gradient of each input."""
    result = function(*tensors)
    return [result.detach(), *torch.autograd.grad(result, tensors, torch.ones_like(result))]


def compare(name, ours, eager, tensors):
    pairs = zip(run(ours, tensors), run(eager, tensors), strict=True)
    errors = [((found - expected).abs().max() / expected.abs().max()).item() for found, expected in pairs]
    print(f"{name:14}", *(f"{error:.1e}" for error in errors))


def attention(q, k, v):
    """As transformers computes it: heads before tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


targets = torch.randint(1000, (64,), device=device)
compare(
    "rms_norm",
    lambda x, weight: llmkernels.rms_norm(x, weight, eps=1e-6),
    lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
    inputs((64, 512), (512,)),
)
compare("swiglu", llmkernels.swiglu, lambda gate, up: F.silu(gate) * up, inputs((64, 512), (64, 512)))
compare(
    "cross_entropy",
    lambda logits: llmkernels.cross_entropy(logits, targets),
    lambda logits: F.cross_entropy(logits, targets),
    inputs((64, 1000)),
)
compare("linear", llmkernels.linear, F.linear, inputs((64, 512), (256, 512)))
compare(
    "attention",
    lambda q, k, v: llmkernels.attention(q, k, v, causal=True),
    attention,
    inputs((2, 48, 8, 64), (2, 48, 2, 64), (2, 48, 2, 64)),
)
