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


HEADS = ((8192, 151936, 896), (8192, 152064, 3584))  # Qwen2.5-0.5B and -7B


def case(rows, vocab, hidden, quick=False):
    keys, products = {"rows": rows, "vocab": vocab, "hidden": hidden}, 3
    moved = 2 * (rows + vocab) * hidden * torch.bfloat16.itemsize
    flops = products * 2 * rows * vocab * hidden
    return Case("linear_cross_entropy", keys, torch.bfloat16, moved, "fwd+bwd", quick, flops)


def inputs(case, device):
    """The head is larger than the cache, so one call in a replay is enough where every call has a head of its own."""
    rows, vocab, hidden = (case.keys[name] for name in ("rows", "vocab", "hidden"))
    x = torch.randn(rows, hidden, dtype=case.dtype, device=device)
    return x, torch.randn(vocab, hidden, dtype=case.dtype, device=device).mul_(hidden**-0.5)


def shared(case, device):
    return (torch.randint(case.keys["vocab"], (case.keys["rows"],), device=device),)


OP = Op(
    name="linear_cross_entropy",
    cases=(case(512, 4096, 256, quick=True), *(case(*head) for head in HEADS)),
    inputs=inputs,
    shared=shared,
    eager=with_gradients(eager),
    providers=providers,
    differentiable=2,
)
