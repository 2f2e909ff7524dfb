"""Rotary position embedding: public function, fakes, autograd. Kernels: csrc/kernels/rope, csrc/cpu/rope.cpp."""

import torch
from torch import Tensor

from llmkernels.ops._common import (
    batch_first,
    caller,
    common_dtype,
    differentiable_once,
    public,
    refuse_gradients,
    register_autograd,
    register_fake,
    register_vmap,
)

_ops = torch.ops.llmkernels
_rope = caller("rope")

_NO_GRADIENT = "rope: cos and sin must not require a gradient, there is none for them; detach() them"
HEADS_FIRST = {"bthd": False, "bhtd": True}


@public
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    layout: str = "bthd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Rotate queries and keys by their positions, both in one launch.

    For each pair (a, b) of the first R = ``rotary_dim`` elements of a head, i.e. (i, i + R/2), or (2i, 2i + 1) when
    ``interleaved``:

    .. math:: a' = a \cos_a - b \sin_a, \qquad b' = b \cos_b + a \sin_b

    The other elements of the head are copied.

    Args:
        q: (B, T, H, D) for layout "bthd", (B, H, T, D) for "bhtd"; float32, float16 or bfloat16, on the CPU also
            float64.
        k: likewise, with any number of heads of its own.
        cos, sin: (T, W), (1, T, W) or (B, T, W), where W is R (one angle per element, as transformers has it) or R/2
            (one per pair, as flash-attn has it). With ``position_ids`` a table (P, W).
        position_ids: (T,), (1, T) or (B, T), int32 or int64: rows of the table. A position outside [0, P) raises on
            the CPU; on a GPU it makes that token NaN, since finding out would stop the stream.
        layout: order of the axes of ``q`` and ``k``.
        interleaved: which elements form a pair.
        rotary_dim: R, even; default W.
        inplace: write into ``q`` and ``k``, which must not need a gradient, nor overlap themselves, each other or
            another input.

    Returns:
        (q', k') in the memory order of ``q`` and ``k``, or these tensors themselves when ``inplace``. A ``cos`` of
        another dtype promotes the result, as in eager PyTorch (not possible in place).

    Layout: any strides with contiguous heads, so transposed views and slices of a packed q|k|v are read in place.
    Arithmetic: each product and the sum rounded to the dtype.
    Differentiable: once, in ``q`` and ``k`` (not in ``cos`` and ``sin``), when not in place.
    Deterministic: yes, each token independent of the others.
    Matches: ``apply_rotary_pos_emb`` of transformers' Llama and Qwen2, bit for bit.
    Raises: ValueError for an unknown layout or a ``rotary_dim`` that is odd or too large; RuntimeError for shapes,
        dtypes and devices that do not fit, each by name.
    Source: Su et al. 2021, "RoFormer".

    >>> q = k = torch.ones(1, 1, 1, 2)
    >>> rope(q, k, cos=torch.zeros(1, 2), sin=torch.ones(1, 2))[0]
    tensor([[[[-1.,  1.]]]])
    """
    heads_first = HEADS_FIRST.get(layout)
    if heads_first is None:
        raise ValueError(f"rope: layout must be 'bthd' or 'bhtd', got {layout!r}")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise RuntimeError(_NO_GRADIENT)
    if inplace:
        refuse_gradients("rope", "inplace must be False where q or k requires a gradient, got True", q=q, k=k)
        _ops.rope_(q, k, cos, sin, position_ids, heads_first, interleaved, rotary_dim)
        count_writes(q, k)
        return q, k
    if cos.dtype != q.dtype and cos.is_floating_point():
        common = common_dtype("rope", q=q, cos=cos)
        q, k, cos, sin = q.to(common), k.to(common), cos.to(common), sin.to(common)
    return _rope(q, k, cos, sin, position_ids, heads_first, interleaved, rotary_dim)


def count_writes(*tensors: Tensor) -> None:
    """Nobody else tells autograd that an op has written to them."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def empty_like(x: Tensor) -> Tensor:
    """In the memory order of x if that keeps the heads contiguous: see output_like() in csrc/torch/rope_call.h."""
    out = torch.empty_like(x)
    return out if out.shape[-1] <= 1 or out.stride(-1) == 1 else out.contiguous()


register_fake("rope", lambda q, k, *options, **named: (empty_like(q), empty_like(k)))


register_fake("rope_", lambda *arguments, **named: None, overloads=("",))
register_fake(
    "rope_backward", lambda grad_q, grad_k, *others: (empty_like(grad_q), empty_like(grad_k)), overloads=("",)
)


def _setup_context(ctx, inputs, output):
    _q, _k, cos, sin, position_ids, *ctx.options = inputs
    ctx.save_for_backward(cos, sin, position_ids)


@differentiable_once
def _backward(ctx, grad_q, grad_k):
    if any(ctx.needs_input_grad[2:4]):  # rope() cannot see it inside two transforms of torch.func
        raise RuntimeError(_NO_GRADIENT)
    grad_q, grad_k = _ops.rope_backward(grad_q, grad_k, *ctx.saved_tensors, *ctx.options)
    return grad_q, grad_k, None, None, None, None, None, None


register_autograd("rope", _backward, _setup_context)


def at_once(op, size, dims, q, k, cos, sin, position_ids, *options):
    """A batch of vmap becomes part of the op's own, B. A table of angles for each is left to one by one."""
    if position_ids is not None and dims[2:4] != (None, None):
        return None

    def fold(x, dim):
        return batch_first(x, dim, size).flatten(0, 1)

    def fold_shared(own, *pairs):
        """Angles or positions with the batch's dimension in each: `own` dimensions behind B, which may be missing."""
        if all(dim is None and (x.dim() == own or x.shape[0] == 1) for x, dim in pairs):
            return [x for x, _ in pairs]
        tensors = [batch_first(x, dim, size) for x, dim in pairs]
        tensors = [x if x.dim() == own + 2 else x.unsqueeze(1) for x in tensors]
        return [x.expand(-1, batch, *x.shape[2:]).flatten(0, 1) for x in tensors]

    q, k = fold(q, dims[0]), fold(k, dims[1])
    batch = q.shape[0] // size
    if position_ids is None:
        cos, sin = fold_shared(2, (cos, dims[2]), (sin, dims[3]))
    else:
        (position_ids,) = fold_shared(1, (position_ids, dims[4]))
    results = op(q, k, cos, sin, position_ids, *options)
    return tuple(x.unflatten(0, (size, batch)) for x in results), (0, 0)


register_vmap("rope", at_once)
register_vmap("rope_backward", at_once)
