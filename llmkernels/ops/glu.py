"""Gated activations, SwiGLU, GEGLU and squared ReLU: public functions, fakes, autograd.

Kernels: csrc/kernels/activation/glu.cu, csrc/cpu/glu.cpp.
"""

import torch
from torch import Tensor

from llmkernels.ops._common import (
    batched_rows,
    caller,
    contiguous_like,
    differentiable_once,
    public,
    register_autograd,
    register_fake,
    register_vmap,
    widened_by_autocast,
)

_ops = torch.ops.llmkernels
_swiglu, _swiglu_packed = caller("swiglu"), caller("swiglu_packed")
_geglu, _geglu_packed = caller("geglu"), caller("geglu_packed")
_relu2_glu, _relu2_glu_packed = caller("relu2_glu"), caller("relu2_glu_packed")


@public
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    r"""SiLU-gated product, :math:`y = \mathrm{silu}(g) \cdot u` with :math:`\mathrm{silu}(g) = g / (1 + e^{-g})`.

    Args:
        gate: (..., F); float32, float16 or bfloat16, on the CPU also float64. Without ``up``: (..., 2F), packed as
            [gate | up].
        up: (..., F), of the shape of ``gate``; a different dtype is promoted, as in eager PyTorch.

    Returns:
        y, (..., F), contiguous.

    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Arithmetic: float32 (float64 for float64); silu(g) is rounded to the dtype before the product, as in eager PyTorch.
    Differentiable: once, in both inputs.
    Deterministic: yes, each element independent of the others.
    Matches: ``torch.nn.functional.silu(gate) * up``, on a GPU bit for bit.
    Raises: RuntimeError for other dtypes, different shapes or devices, an odd packed dimension.
    Source: Shazeer 2020, "GLU Variants Improve Transformer".

    >>> swiglu(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0]))
    tensor([0.0000, 1.7616])
    """
    if up is None:
        return _swiglu_packed(gate)
    return _swiglu(*_promoted(gate, up))


@public
def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    r"""GELU-gated product, :math:`y = \mathrm{gelu}(g) \cdot u`.

    Args:
        gate, up: as in :func:`swiglu`.
        approximate: "none" for :math:`g (1 + \mathrm{erf}(g / \sqrt 2)) / 2`, "tanh" for
            :math:`g (1 + \tanh(\sqrt{2/\pi} (g + 0.044715 g^3))) / 2`; as in ``torch.nn.functional.gelu``.

    Matches: ``torch.nn.functional.gelu(gate, approximate=approximate) * up``, on a GPU bit for bit.
    Raises: ValueError for another ``approximate``. Everything else as in :func:`swiglu`.

    >>> geglu(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0]))
    tensor([0.0000, 1.9545])
    """
    if up is None:
        return _geglu_packed(gate, approximate)
    return _geglu(*_promoted(gate, up), approximate)


@public
def relu2_glu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    r"""Squared-ReLU-gated product, :math:`y = \max(g, 0)^2 \cdot u`.

    Args:
        gate, up: as in :func:`swiglu`.

    Matches: ``torch.nn.functional.relu(gate).square() * up``, on a GPU bit for bit. Everything else as in
        :func:`swiglu`.
    Autocast: on a GPU y is float32, as PyTorch's own power is.
    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".

    >>> relu2_glu(torch.tensor([-1.0, 2.0]), torch.tensor([5.0, 0.5]))
    tensor([0., 2.])
    """
    if up is None:
        return _relu2_glu_packed(*widened_by_autocast(gate))
    return _relu2_glu(*widened_by_autocast(*_promoted(gate, up)))


def _promoted(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if gate.dtype == up.dtype:
        return gate, up
    common = torch.promote_types(gate.dtype, up.dtype)
    return gate.to(common), up.to(common)


def _empty_half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _register(name: str) -> None:
    """Fakes and autograd of op `name` and of its packed form; what follows the tensors are options of the op."""
    separate_backward, packed_backward = getattr(_ops, f"{name}_backward"), getattr(_ops, f"{name}_packed_backward")

    register_fake(name, lambda gate, up, *options, **named: contiguous_like(gate))
    register_fake(f"{name}_packed", lambda gate_up, *options, **named: _empty_half(gate_up))
    register_fake(
        f"{name}_backward",
        lambda grad_y, gate, up, *options: (contiguous_like(gate), contiguous_like(gate)),
        overloads=("",),
    )
    register_fake(
        f"{name}_packed_backward", lambda grad_y, gate_up, *options: contiguous_like(gate_up), overloads=("",)
    )

    def setup_separate(ctx, inputs, output):
        gate, up, *ctx.options = inputs
        ctx.save_for_backward(gate, up)

    @differentiable_once
    def backward_separate(ctx, grad_y):
        return *separate_backward(grad_y, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)

    def setup_packed(ctx, inputs, output):
        gate_up, *ctx.options = inputs
        ctx.save_for_backward(gate_up)

    @differentiable_once
    def backward_packed(ctx, grad_y):
        return packed_backward(grad_y, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)

    register_autograd(name, backward_separate, setup_separate)
    register_autograd(f"{name}_packed", backward_packed, setup_packed)
    register_vmap(name, batched_rows(0, 1))
    register_vmap(f"{name}_packed", batched_rows(0))
    register_vmap(f"{name}_backward", batched_rows(0, 1, 2))
    register_vmap(f"{name}_packed_backward", batched_rows(0, 1))


_register("swiglu")
_register("geglu")
_register("relu2_glu")
