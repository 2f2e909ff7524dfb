"""Activations, gated or not, with biases in front or without: public functions, fakes, autograd.

Kernels: csrc/kernels/activation, csrc/cpu/glu.cpp, csrc/cpu/bias_act.cpp; csrc/params/glu.h lists the activations.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from llmkernels.ops._common import (
    batched_rows,
    caller,
    common_dtype,
    contiguous_like,
    differentiable_once,
    public,
    register_autograd,
    register_fake,
    register_vmap,
    widened_by_autocast,
)

_bias_act, _glu, _glu_packed = caller("bias_act"), caller("glu"), caller("glu_packed")
# By transformers' name, as PyTorch computes them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
}
# Modules that compute one, by their classes' modules and names, as nothing of transformers is imported here.
CLASSES = {
    ("transformers.activations", "SiLUActivation"): "silu",
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_pytorch_tanh",
    ("transformers.activations", "NewGELUActivation"): "gelu_pytorch_tanh",
    ("transformers.activations", "ReLUSquaredActivation"): "relu2",
    ("torch.nn.modules.activation", "Sigmoid"): "sigmoid",
    ("torch.nn.modules.activation", "ReLU"): "relu",
}
_GELU = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}  # by PyTorch's `approximate`


@public
def glu(
    gate: Tensor,
    up: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    r"""Gated activation, :math:`y = \mathrm{act}(g + b_g) \cdot (u + b_u)`.

    Args:
        gate: (..., F); float32, float16 or bfloat16, on the CPU also float64. Without ``up``: (..., 2F), packed as
            [gate | up].
        up: (..., F), of the shape of ``gate``; a different dtype is promoted, as in eager PyTorch.
        gate_bias, up_bias: (F,), or None; each of them without the other, too. Without ``up``, gate_bias: (2F,),
            packed in the same way, or None; no up_bias.
        activation: transformers' name of it:

            ===================  ================================================================================
            "silu"               :math:`x / (1 + e^{-x})`, :func:`swiglu`
            "gelu"               :math:`x (1 + \mathrm{erf}(x / \sqrt 2)) / 2`, :func:`geglu`
            "gelu_pytorch_tanh"  :math:`x (1 + \tanh(\sqrt{2/\pi} (x + 0.044715 x^3))) / 2`, :func:`geglu`
            "relu2"              :math:`\max(x, 0)^2`, :func:`relu2_glu`
            "sigmoid"            :math:`1 / (1 + e^{-x})`, ``torch.nn.functional.glu``, which has the gate last
            "relu"               :math:`\max(x, 0)`
            ===================  ================================================================================

    Returns:
        y, (..., F), contiguous.

    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Arithmetic: float32 (float64 for float64); g + b_g, u + b_u and act are rounded to the dtype before the product, as
        in eager PyTorch.
    Autocast: on a GPU y is float32 with "relu2", as PyTorch's own power is.
    Differentiable: once, in all inputs. The gradient of a bias is the sum over rows of that of its rows, as rounded.
    Deterministic: yes, gradients included. A row's bits do not depend on the other rows.
    Matches: ``act(gate + gate_bias) * (up + up_bias)`` of eager PyTorch, on a GPU bit for bit.
    Raises: RuntimeError for other dtypes, different shapes or devices, an odd packed dimension, a bias that is not
        (F,), an up_bias without ``up``; ValueError for another ``activation``.
    Source: Dauphin et al. 2017, "Language Modeling with Gated Convolutional Networks", for the sigmoid; Shazeer 2020,
        "GLU Variants Improve Transformer".

    >>> glu(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0]), activation="relu2")
    tensor([0., 4.])
    """
    return _gated(activation, gate, up, gate_bias, up_bias)


@public
def bias_act(x: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    r"""Activation of a linear layer's output before its bias, :math:`y = \mathrm{act}(x + b)`.

    Args:
        x: (..., F); float32, float16 or bfloat16, on the CPU also float64.
        bias: (F,), or None.
        activation: as in :func:`glu`.

    Returns:
        y, (..., F), contiguous.

    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Arithmetic: float32 (float64 for float64); x + b is rounded to the dtype first, as in eager PyTorch, and act of it
        once, also where the 1 + erf of eager PyTorch cancels. Other dtypes of x and the bias are promoted, as in eager
        PyTorch.
    Autocast: on a GPU y is float32 with "relu2", as PyTorch's own power is.
    Differentiable: once, in both inputs. The gradient of the bias is the sum over rows of that of x, as rounded.
    Deterministic: yes, gradients included. A row's bits do not depend on the other rows.
    Matches: ``act(x + bias)`` of eager PyTorch.
    Raises: RuntimeError for other dtypes, a bias that is not (F,), tensors on different devices; ValueError for another
        ``activation``.
    Source: the fusion is Megatron-LM's.

    >>> bias_act(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), activation="silu")
    tensor([0.0000, 1.7616])
    """
    return _plain(activation, x, bias)


@public
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    r"""SiLU-gated product, :math:`y = \mathrm{silu}(g) \cdot u` with :math:`\mathrm{silu}(g) = g / (1 + e^{-g})`.

    Args:
        gate, up: as in :func:`glu`.

    Matches: ``torch.nn.functional.silu(gate) * up``, on a GPU bit for bit. Everything else as in :func:`glu`.

    >>> swiglu(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0]))
    tensor([0.0000, 1.7616])
    """
    return _gated("silu", gate, up)


@public
def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    r"""GELU-gated product, :math:`y = \mathrm{gelu}(g) \cdot u`.

    Args:
        gate, up: as in :func:`glu`.
        approximate: "none" for :math:`g (1 + \mathrm{erf}(g / \sqrt 2)) / 2`, "tanh" for
            :math:`g (1 + \tanh(\sqrt{2/\pi} (g + 0.044715 g^3))) / 2`; as in ``torch.nn.functional.gelu``.

    Matches: ``torch.nn.functional.gelu(gate, approximate=approximate) * up``, on a GPU bit for bit.
    Raises: ValueError for another ``approximate``. Everything else as in :func:`glu`.

    >>> geglu(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0]))
    tensor([0.0000, 1.9545])
    """
    return _gated(_gelu("geglu", approximate), gate, up)


@public
def relu2_glu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    r"""Squared-ReLU-gated product, :math:`y = \max(g, 0)^2 \cdot u`.

    Args:
        gate, up: as in :func:`glu`.

    Matches: ``torch.nn.functional.relu(gate).square() * up``, on a GPU bit for bit. Everything else as in :func:`glu`.
    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".

    >>> relu2_glu(torch.tensor([-1.0, 2.0]), torch.tensor([5.0, 0.5]))
    tensor([0., 2.])
    """
    return _gated("relu2", gate, up)


@public
def bias_swiglu(
    gate: Tensor, up: Tensor | None = None, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    r"""SwiGLU of two linear layers' outputs before their biases, :math:`y = \mathrm{silu}(g + b_g) (u + b_u)`.

    Args:
        gate, up, gate_bias, up_bias: as in :func:`glu`.

    Matches: ``swiglu(gate + gate_bias, up + up_bias)``, on a GPU bit for bit. Everything else as in :func:`glu`.

    >>> bias_swiglu(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([0.5]))
    tensor([1.7616])
    """
    return _gated("silu", gate, up, gate_bias, up_bias)


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
        gate, up, gate_bias, up_bias: as in :func:`glu`.
        approximate: "none" or "tanh", as in :func:`geglu`.

    Matches: ``geglu(gate + gate_bias, up + up_bias)``, on a GPU bit for bit. Everything else as in :func:`glu`.

    >>> bias_geglu(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([0.5]))
    tensor([1.9545])
    """
    return _gated(_gelu("bias_geglu", approximate), gate, up, gate_bias, up_bias)


@public
def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    r"""GELU of a linear layer's output before its bias, :math:`y = \mathrm{gelu}(x + b)`.

    Args:
        x, bias: as in :func:`bias_act`.
        approximate: "none" or "tanh", as in :func:`geglu`.

    Matches: ``torch.nn.functional.gelu(x + bias, approximate=approximate)``.
    Raises: ValueError for another ``approximate``. Everything else as in :func:`bias_act`.
    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".

    >>> bias_gelu(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 1.9545])
    """
    return _plain(_gelu("bias_gelu", approximate), x, bias)


@public
def relu2(x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Squared ReLU, :math:`y = \max(x + b, 0)^2`.

    Args:
        x, bias: as in :func:`bias_act`.

    Matches: ``torch.nn.functional.relu(x + bias).square()``, on a GPU bit for bit. Everything else as in
        :func:`bias_act`; gated it is :func:`relu2_glu`.
    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".

    >>> relu2(torch.tensor([-1.0, 2.0]))
    tensor([0., 4.])
    """
    return _plain("relu2", x, bias)


def _gated(
    activation: str,
    gate: Tensor,
    up: Tensor | None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    if activation == "relu2":
        gate, up, gate_bias, up_bias = widened_by_autocast(gate, up, gate_bias, up_bias)
    if up is not None:
        return _glu(*_promoted("glu", gate=gate, up=up, gate_bias=gate_bias, up_bias=up_bias), activation)
    if up_bias is not None:
        raise RuntimeError("glu: up_bias must be None without up: gate_bias is that of the packed [gate | up]")
    return _glu_packed(*_promoted("glu", gate=gate, gate_bias=gate_bias), activation)


def _plain(activation: str, x: Tensor, bias: Tensor | None) -> Tensor:
    if activation == "relu2":
        x, bias = widened_by_autocast(x, bias)
    return _bias_act(*_promoted("bias_act", x=x, bias=bias), activation)


def _gelu(op: str, approximate: str) -> str:
    if approximate not in _GELU:
        raise ValueError(f"{op}: approximate must be 'tanh' or 'none' (erf), got {approximate!r}")
    return _GELU[approximate]


def _promoted(op: str, **tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    first, *others = tensors.values()
    if all(other is None or other.dtype == first.dtype for other in others):
        return first, *others
    common = common_dtype(op, **tensors)
    return tuple(None if t is None else t.to(common) for t in tensors.values())


def _empty_half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _register(name: str, rows: int, empty_result=contiguous_like) -> None:
    """Fakes and autograd of op `name`, whose arguments are `rows` matrices, a bias of each, then the activation."""
    backward_op = getattr(torch.ops.llmkernels, f"{name}_backward")
    tensors = 2 * rows

    def fake_backward(grad_y, *args):
        matrices, biases, wanted = args[:rows], args[rows:tensors], args[-rows:]
        sizes = [bias.shape if bias is not None and want else (0,) for bias, want in zip(biases, wanted, strict=True)]
        return *map(contiguous_like, matrices), *(grad_y.new_empty(size) for size in sizes)

    register_fake(name, lambda x, *others, **named: empty_result(x))
    register_fake(f"{name}_backward", fake_backward, overloads=("",))

    def setup(ctx, inputs, output):
        *inputs, ctx.activation = inputs
        ctx.save_for_backward(*inputs)
        needs = [*ctx.needs_input_grad, *(False for _ in inputs)]  # torch.library leaves out biases that are not given
        biases = zip(inputs[rows:], needs[rows:tensors], strict=True)
        ctx.wanted = [bias is not None and needed for bias, needed in biases]

    @differentiable_once
    def backward(ctx, grad_y):
        grads = backward_op(grad_y, *ctx.saved_tensors, ctx.activation, *ctx.wanted)
        biases = (grad if want else None for grad, want in zip(grads[rows:], ctx.wanted, strict=True))
        return *grads[:rows], *biases, None

    def batched_backward(op, size, dims, *args):
        found = None if any(args[-rows:]) else batched_rows(*range(1 + rows))(op, size, dims, *args)
        return found and (found[0], (0,) * rows + (None,) * rows)

    register_autograd(name, backward, setup)
    register_vmap(name, batched_rows(*range(rows)))
    register_vmap(f"{name}_backward", batched_backward)


_register("bias_act", 1)
_register("glu", 2)
_register("glu_packed", 1, _empty_half)
