"""The head of a language model and its loss, with the gradients of hidden states and head, as a training step takes it:
the mean over all rows of the cross-entropy of x W^T."""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, plain


def eager(x, weight, target):
    """In float32 behind the head, as transformers computes the loss of a language model."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def compiled():
    return torch.compile(eager, dynamic=False)


def liger():
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


def ours():
    from llmkernels import linear_cross_entropy

    return linear_cross_entropy


def with_gradients(function):
    def call(x, weight, target):
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(function(*leaves, target), leaves)

    return call


def providers(case):
    return {
        "eager": plain(with_gradients(eager)),
        "compile": Provider(lambda: with_gradients(compiled())),
        "liger": Provider(lambda: with_gradients(liger())),
        "llmkernels": Provider(lambda: with_gradients(ours())),
    }


HEADS = ((8192, 151936, 896), (2048, 152064, 3584), (8192, 128256, 2048))  # Qwen2.5-0.5B and -7B, Llama-3.2-1B


def case(rows, vocab, k, quick=False):
    moved = 2 * (rows + vocab) * k * torch.bfloat16.itemsize
    keys, products = {"rows": rows, "vocab": vocab, "k": k}, 3
    return Case("linear_cross_entropy", keys, torch.bfloat16, moved, quick=quick, flops=products * 2 * rows * vocab * k)


def inputs(case, device):
    return (torch.randn(case.keys["rows"], case.keys["k"], dtype=case.dtype, device=device),)


def shared(case, device):
    rows, vocab, k = (case.keys[name] for name in ("rows", "vocab", "k"))
    weight = torch.randn(vocab, k, dtype=case.dtype, device=device).mul_(k**-0.5)
    return weight, torch.randint(vocab, (rows,), device=device)


OP = Op(
    name="linear_cross_entropy",
    cases=(case(512, 4096, 256, quick=True), *(case(*head) for head in HEADS)),
    inputs=inputs,
    shared=shared,
    eager=with_gradients(eager),
    providers=providers,
    differentiable=2,
)
