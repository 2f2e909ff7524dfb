"""Which kernels the products of a decode step take, for the report."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from llmkernels._explain import explain

from ..model.description import Branch, Description, Norm, Product
from .describe import describe


def kernels_in(model: nn.Module) -> Counter:
    """Those of a model that has a step, by their names in `llmkernels.explain`; none off a GPU."""
    parts = describe(model)
    return kernels_of(parts, parts.weight.device) if parts.weight.is_cuda else Counter()


def kernels_of(parts: Description, device: str | torch.device) -> Counter:
    """Those that multiply one token on such a GPU, with the number of products each."""
    dtype = parts.weight.dtype
    found: Counter = Counter()
    for (op, rows, columns, bias), count in products_of(parts).items():
        route = explain(op, (1, columns), (rows, columns), dtype=dtype, device=device, bias=bias, in_step=True)
        found[route.variant + (" as measured" if route.measured else "")] += count
    return found


def products_of(parts: Description) -> Counter[tuple[str, int, int, bool]]:
    """The ops of the products of a step, each with the rows and columns of its weight and whether it has a bias."""
    return Counter((op, *product.shape, bool(product.biases)) for op, product in _products(parts))


def _products(parts: Description) -> Iterator[tuple[str, Product]]:
    """Each product of a step and its op, as compose.py has them."""
    for layer in parts.layers:
        for branch in layer.branches:
            yield _op(branch.pre, branch.first, branch.gated and not branch.first.biases), branch.first
            yield _added(branch, branch.last), branch.last
    yield _op(parts.norm, parts.head), parts.head


def _op(norm: Norm | None, product: Product, glu: bool = False) -> str:
    if product.adapters:
        return "linear"
    is_fused = norm is not None and norm.options.kind == "rms_norm"
    return ("rms_norm_" if is_fused else "") + ("glu_linear" if glu else "linear")


def _added(branch: Branch, product: Product) -> str:
    return "linear_add_" if branch.post is None and not product.adapters else "linear"
