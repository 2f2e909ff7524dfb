"""Activations with biases in front, gated or not: public functions, fakes, autograd.

Kernels: csrc/kernels/activation/bias_act.cu, csrc/cpu/bias_act.cpp.
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

_bias_gelu, _relu2 = caller("bias_gelu"), caller("relu2")
_bias_swiglu, _bias_swiglu_packed = caller("bias_swiglu"), caller("bias_swiglu_packed")
_bias_geglu, _bias_geglu_packed = caller("bias_geglu"), caller("bias_geglu_packed")


@public
def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    r"""GELU of a linear layer's output before its bias, :math:`y = \mathrm{gelu}(x + b)`.

    Args:
        x: (..., F); float32, float16 or bfloat16, on the CPU also float64.
        bias: (F,), or None.
        approximate: "none" or "tanh", as in :func:`geglu`.

    Returns:
        y, (..., F), contiguous.

    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Arithmetic: float32 (float64 for float64); x + b is rounded to the dtype first, as in eager PyTorch, and gelu of it
        once, also where the 1 + erf of eager PyTorch cancels. Other dtypes of x and the bias are promoted, as in eager
        PyTorch.
    Differentiable: once, in both inputs. The gradient of the bias is the sum over rows of that of x, as rounded.
    Deterministic: yes, gradients included. A row's bits do not depend on the other rows.
    Matches: ``torch.nn.functional.gelu(x + bias, approximate=approximate)``.
    Raises: RuntimeError for other dtypes, a bias that is not (F,), tensors on different devices; ValueError for another
        ``approximate``.
    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; the fusion is Megatron-LM's.

    >>> bias_gelu(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 1.9545])
    """
    return _bias_gelu(*_promoted(x, bias), approximate)


@public
def relu2(x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Squared ReLU, :math:`y = \max(x + b, 0)^2`.

    Args:
        x, bias: as in :func:`bias_gelu`.

    Matches: ``torch.nn.functional.relu(x + bias).square()``, on a GPU bit for bit. Everything else as in
        :func:`bias_gelu`; gated it is :func:`relu2_glu`.
    Autocast: on a GPU y is float32, as PyTorch's own power is.
    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".

    >>> relu2(torch.tensor([-1.0, 2.0]))
    tensor([0., 4.])
    """
    return _relu2(*widened_by_autocast(*_promoted(x, bias)))


@public
def bias_swiglu(
    gate: Tensor, up: Tensor | None = None, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    r"""SwiGLU of two linear layers' outputs before their biases, :math:`y = \mathrm{silu}(g + b_g) (u + b_u)`.

    Args:
        gate, up: (..., F), of one shape. Without ``up``, gate: (..., 2F), packed as [gate | up].
        gate_bias, up_bias: (F,), or None; each of them without the other, too. Without ``up``, gate_bias: (2F,),
            packed in the same way, or None; no up_bias.

    Matches: ``swiglu(gate + gate_bias, up + up_bias)``, on a GPU bit for bit. Layout, arithmetic, differentiable,
        deterministic, raises: as in :func:`bias_gelu`; RuntimeError for an up_bias without ``up``.

    >>> bias_swiglu(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([0.5]))
    tensor([1.7616])
    """
    if up is None:
        _refuse_up_bias("bias_swiglu", up_bias)
        return _bias_swiglu_packed(*_promoted(gate, gate_bias))
    return _bias_swiglu(*_promoted(gate, up, gate_bias, up_bias))


@public
def bias_geglu(
    gate: Tensor,
    up: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    approximate: str = "none",
) -> Tensor:
    r"""GEGLU of two linear layers' outputs before their biases, :math:`y = \mathrm{gelu}(g + b_g) (u + b_u)`.

    Args:
        gate, up, gate_bias, up_bias: as in :func:`bias_swiglu`.
        approximate: "none" or "tanh", as in :func:`geglu`.

    Matches: ``geglu(gate + gate_bias, up + up_bias)``, on a GPU bit for bit. Everything else as in
        :func:`bias_swiglu`.

    >>> bias_geglu(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([0.5]))
    tensor([1.9545])
    """
    if up is None:
        _refuse_up_bias("bias_geglu", up_bias)
        return _bias_geglu_packed(*_promoted(gate, gate_bias), approximate)
    return _bias_geglu(*_promoted(gate, up, gate_bias, up_bias), approximate)


def _refuse_up_bias(op: str, up_bias: Tensor | None) -> None:
    if up_bias is not None:
        raise RuntimeError(f"{op}: up_bias must be None without up: gate_bias is that of the packed [gate | up]")


def _promoted(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if all(other is None or other.dtype == x.dtype for other in others):
        return x, *others
    common = x.dtype
    for other in others:
        common = common if other is None else torch.promote_types(common, other.dtype)
    return tuple(None if t is None else t.to(common) for t in (x, *others))


def _empty_half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _register(name: str, rows: int, empty_result=contiguous_like) -> None:
    """Fakes and autograd of op `name`, whose arguments are `rows` matrices, a bias of each, then options."""
    backward_op = getattr(torch.ops.llmkernels, f"{name}_backward")
    tensors = 2 * rows

    def fake_backward(grad_y, *args):
        matrices, biases, wanted = args[:rows], args[rows:tensors], args[-rows:]
        sizes = [bias.shape if bias is not None and want else (0,) for bias, want in zip(biases, wanted, strict=True)]
        return *map(contiguous_like, matrices), *(grad_y.new_empty(size) for size in sizes)

    register_fake(name, lambda x, *others, **named: empty_result(x))
    register_fake(f"{name}_backward", fake_backward, overloads=("",))

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:tensors])
        ctx.options = inputs[tensors:]
        biases = zip(inputs[rows:tensors], ctx.needs_input_grad[rows:tensors], strict=True)
        ctx.wanted = [bias is not None and needed for bias, needed in biases]

    @differentiable_once
    def backward(ctx, grad_y):
        grads = backward_op(grad_y, *ctx.saved_tensors, *ctx.options, *ctx.wanted)
        biases = (grad if want else None for grad, want in zip(grads[rows:], ctx.wanted, strict=True))
        return *grads[:rows], *biases, *(None for _ in ctx.options)

    def batched_backward(op, size, dims, *args):
        found = None if any(args[-rows:]) else batched_rows(*range(1 + rows))(op, size, dims, *args)
        return found and (found[0], (0,) * rows + (None,) * rows)

    register_autograd(name, backward, setup)
    register_vmap(name, batched_rows(*range(rows)))
    register_vmap(f"{name}_backward", batched_backward)


_register("bias_gelu", 1)
_register("relu2", 1)
_register("bias_swiglu", 2)
_register("bias_geglu", 2)
_register("bias_swiglu_packed", 1, _empty_half)
_register("bias_geglu_packed", 1, _empty_half)
