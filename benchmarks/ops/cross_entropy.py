"""Cross-entropy, the mean over all rows; and the same with the gradient of the logits, as a training step takes it."""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, plain


def eager(logits, target):
    """In float32, as transformers computes the loss of a language model."""
    return F.cross_entropy(logits.float(), target)


def compiled():
    return torch.compile(eager, dynamic=False)


def liger():
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


def ours():
    from llmkernels import cross_entropy

    return cross_entropy


def with_gradient(function):
    def call(logits, target):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.autograd.grad(function(leaf, target), leaf)

    return call


def providers(case):
    return {
        "eager": plain(eager),
        "compile": Provider(compiled),
        "liger": Provider(liger),
        "llmkernels": Provider(ours),
    }


def providers_with_gradient(case):
    return {
        "eager": plain(with_gradient(eager)),
        "compile": Provider(lambda: with_gradient(compiled())),
        "liger": Provider(lambda: with_gradient(liger()), mutates=("fwd+bwd",)),  # writes the gradient over the logits
        "llmkernels": Provider(lambda: with_gradient(ours())),
    }


def case(rows, vocab, direction="fwd", quick=False):
    passes = 1 if direction == "fwd" else 2
    moved = passes * rows * vocab * torch.bfloat16.itemsize
    return Case("cross_entropy", {"rows": rows, "vocab": vocab}, torch.bfloat16, moved, direction, quick)


def case_with_gradient(rows, vocab):
    return case(rows, vocab, "fwd+bwd")


def cases(direction, vocabs):
    return case(1024, 32768, direction, quick=True), *(case(8192, vocab, direction) for vocab in vocabs)


def inputs(case, device):
    rows, vocab = case.keys["rows"], case.keys["vocab"]
    logits = torch.randn(rows, vocab, dtype=case.dtype, device=device)
    return logits, torch.randint(vocab, (rows,), device=device)


OP = Op(
    name="cross_entropy",
    cases=cases("fwd", (32768, 152064)),
    inputs=inputs,
    eager=eager,
    providers=providers,
    differentiable=1,
)
GRADIENT = Op(
    name="cross_entropy_gradient",
    cases=cases("fwd+bwd", (32768, 131072, 152064)),
    inputs=inputs,
    eager=with_gradient(eager),
    providers=providers_with_gradient,
    differentiable=1,
)
