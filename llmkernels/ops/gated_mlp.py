"""The feed-forward block of gated models as one op: public function, fakes, autograd.

Composition: csrc/torch/gated_mlp.cpp; kernels: csrc/kernels/linear, csrc/kernels/activation/glu.cu.
"""

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from llmkernels.ops._common import (
    _is_transforming,
    _requires_grad,
    batched_rows,
    caller,
    contiguous_like,
    differentiable_once,
    is_batched,
    keeps_graph,
    narrowed_by_autocast,
    public,
    register_autograd,
    register_fake,
    register_vmap,
    without_autocast,
)
from llmkernels.ops.linear import _grad_bias, _grad_weight

_ops = torch.ops.llmkernels
_gated_mlp = caller("gated_mlp")


@public
def gated_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    r"""Gated feed-forward block, :math:`y = (\mathrm{act}(g) \cdot u) W_d^\top + b_d`, :math:`[g | u] = x W^\top + b`.

    Args:
        x: (..., K); float32, float16 or bfloat16, on the CPU also float64.
        gate_up_weight: (2F, K), the rows of the gate, then those of the up projection.
        down_weight: (N, F).
        gate_up_bias: (2F,), or None.
        down_bias: (N,), or None.
        activation: as in :func:`glu`.

    Returns:
        y, (..., N).

    What runs, by the number of rows of x; :func:`linear` says for which dtypes and GPUs its kernel exists, and where it
    does not PyTorch's linear (cuBLAS, MKL) runs at any number of rows:

    ==========================  ==========================================================================
    rows                        kernels
    ==========================  ==========================================================================
    up to 16, on 9.0 up to 64   without gate_up_bias, no gradient: one kernel for g, u and act(g) u
    the same, anything else     the kernel of :func:`linear`, then packed :func:`glu`
    more                        PyTorch's linear, then packed :func:`glu`
    ==========================  ==========================================================================

    and for the product with down_weight what :func:`linear` runs. The backward is PyTorch's matmul around one kernel
    that makes the gradient of [g | u] and act(g) u from the gradient of the latter.

    Layout: rows of x and of the weights any constant distance apart are read in place.
    Arithmetic: products summed in float32; rounds where eager PyTorch rounds, that is g and u, act(g), act(g) u and y.
    Autocast: casts the tensors, as it does for ``torch.nn.functional.linear``.
    Differentiable: once, in all five tensors. Saves x and [g | u] besides the weights; act(g) u is computed again. The
        backward writes over the saved [g | u] if it is the last one of its graph (no ``retain_graph``), outside of
        CUDA graphs and of compiled code, which keep it. Frozen weights cost no product.
    Deterministic: yes, gradients included (as far as PyTorch's matmul is). Not batch invariant: the order of the sums
        of both products depends on the number of rows of x. The activation between them is.
    Matches: ``F.linear(F.silu(g) * u, down_weight, down_bias)`` with
        ``g, u = F.linear(x, gate_up_weight, gate_up_bias).chunk(2, -1)``, to the rounding of the sums.
    Raises: RuntimeError for other dtypes, shapes that do not fit, tensors on different devices; ValueError for another
        ``activation``.
    Source: Shazeer 2020, "GLU Variants Improve Transformer".

    >>> gated_mlp(torch.tensor([2.0]), torch.tensor([[1.0], [0.5]]), torch.tensor([[10.0]]))
    tensor([17.6159])
    """
    tensors = narrowed_by_autocast(x, gate_up_weight, down_weight, gate_up_bias, down_bias)
    is_recorded = _is_recorded(tensors)
    if is_recorded and not (torch.compiler.is_compiling() or _is_transforming() or forward_ad._current_level >= 0):
        return _Recorded.apply(*tensors, activation)
    return _gated_mlp(*tensors, activation, is_recorded)[0]


def _is_recorded(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a backward may follow. If one does that is not foreseen here, it computes [g | u] again."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return False
    return _requires_grad(tensors) or (not torch.compiler.is_compiling() and _is_transforming())


def _fake(x, gate_up_weight, down_weight, gate_up_bias=None, down_bias=None, activation="silu", save_gate_up=False):
    columns = gate_up_weight.shape[0] if save_gate_up else 0
    return x.new_empty((*x.shape[:-1], down_weight.shape[0])), x.new_empty((*x.shape[:-1], columns))


register_fake("gated_mlp", _fake)
register_fake(
    "glu_packed_forward_backward",
    lambda grad_y, gate_up, activation: (contiguous_like(grad_y), contiguous_like(gate_up)),
    overloads=("",),
)
register_fake("glu_packed_forward_backward_", lambda grad_y, gate_up, activation: None, overloads=("",))


class _Recorded(Function):
    """A plain call with a gradient. Nobody else has its [g | u], as callers of the op have."""

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, activation = inputs
        y, gate_up = _ops.gated_mlp.no_grad(*tensors, activation, True)
        _save(ctx, tensors, activation, gate_up)
        ctx.owns_gate_up = True
        return y

    @staticmethod
    def backward(ctx, grad_y):
        return _backward(ctx, grad_y, None)[:-1]


def _save(ctx, tensors, activation, gate_up):
    x, gate_up_weight, down_weight, gate_up_bias, _ = tensors
    ctx.save_for_backward(x, gate_up_weight, down_weight, None if gate_up is not None else gate_up_bias, gate_up)
    ctx.set_materialize_grads(False)
    ctx.activation, ctx.owns_gate_up, ctx.is_overwritten = activation, False, False


def _setup(ctx, inputs, output):
    *tensors, activation, is_saved = inputs
    ctx.mark_non_differentiable(output[1])
    _save(ctx, tensors, activation, output[1] if is_saved else None)


@differentiable_once
def _backward(ctx, grad_y, _grad_gate_up):
    none = (None,) * 7
    if grad_y is None:
        return none
    if not grad_y.is_meta and torch.is_autocast_enabled(grad_y.device.type):
        with without_autocast(grad_y.device):  # the gradients have the dtypes of the forward
            return _gradients(ctx, grad_y)
    return _gradients(ctx, grad_y)


def _gradients(ctx, grad_y):
    x, gate_up_weight, down_weight, gate_up_bias, gate_up = ctx.saved_tensors
    if ctx.is_overwritten:  # an error ended the first backward, say for lack of memory: nothing was freed
        raise RuntimeError("gated_mlp: a backward that has failed can be repeated only with retain_graph=True")
    needs = *ctx.needs_input_grad, False, False  # torch.library leaves out biases that are not given
    needs_x, needs_gate_up_weight, needs_down_weight, needs_gate_up_bias, needs_down_bias, *_ = needs
    grad_x = grad_gate_up_weight = grad_gate_up_bias = grad_down_weight = None
    grad_down_bias = _grad_bias(grad_y) if needs_down_bias else None
    in_place = ctx.owns_gate_up and _may_overwrite(gate_up, grad_y)
    if gate_up is None and any(ctx.needs_input_grad[:4]):
        gate_up = _ops.linear(x, gate_up_weight, gate_up_bias)
    if needs_x or needs_gate_up_weight or needs_gate_up_bias:
        product, grad_gate_up = grad_y @ down_weight, gate_up
        if in_place:
            ctx.is_overwritten = True
            _ops.glu_packed_forward_backward_(product, gate_up, ctx.activation)
        elif needs_down_weight:
            product, grad_gate_up = _ops.glu_packed_forward_backward(product, gate_up, ctx.activation)
        else:
            grad_gate_up, _ = _ops.glu_packed_backward(product, gate_up, None, ctx.activation, False)
        grad_down_weight = _grad_weight(grad_y, product) if needs_down_weight else None
        del product
        grad_gate_up_weight = _grad_weight(grad_gate_up, x) if needs_gate_up_weight else None
        grad_gate_up_bias = _grad_bias(grad_gate_up) if needs_gate_up_bias else None
        grad_x = grad_gate_up @ gate_up_weight if needs_x else None
    elif needs_down_weight:
        grad_down_weight = _grad_weight(grad_y, _ops.glu_packed(gate_up, None, ctx.activation))
    return grad_x, grad_gate_up_weight, grad_down_weight, grad_gate_up_bias, grad_down_bias, None, None


def _may_overwrite(gate_up: Tensor, grad_y: Tensor) -> bool:
    """Whether nobody reads the saved [g | u] after this backward: it is the graph's last, and neither traced nor
    batched nor captured. A second replay of a captured one would find what the first has left."""
    if _is_transforming() or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if not (type(gate_up) is type(grad_y) is Tensor) or is_batched(grad_y):
        return False
    if gate_up.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not keeps_graph()


register_autograd("gated_mlp", _backward, _setup)
register_vmap("gated_mlp", batched_rows(0))
register_vmap("glu_packed_forward_backward", batched_rows(0, 1))
