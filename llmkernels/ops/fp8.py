"""Quantization to FP8, alone or behind RMSNorm or SwiGLU, and a linear layer of FP8: public functions, fakes.

Kernels: csrc/kernels/quant, csrc/cpu/fp8.cpp; the product: csrc/torch/fp8_linear.cpp.
"""

import torch
from torch import Tensor

from llmkernels.ops._common import public, refuse_gradients, register_fake
from llmkernels.ops.rms_norm import rms_norm

_ops = torch.ops.llmkernels
_fp8_quantize, _fp8_linear = _ops.fp8_quantize.default, _ops.fp8_linear.default
_rms_norm_fp8_quantize, _swiglu_fp8_quantize = _ops.rms_norm_fp8_quantize.default, _ops.swiglu_fp8_quantize.default

FP8_DTYPES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
_OUT_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_BLOCK = 128
_NO_GRADIENT = "{name} must not require a gradient, since a quantization has none; call it under torch.no_grad()"


@public
def fp8_quantize(
    x: Tensor,
    *,
    granularity: str = "token",
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Quantization to FP8, with one scale per row, per 128 elements of a row, or for all of ``x``.

    .. math:: s = \max(\mathrm{amax}(|x|) / \mathrm{max}, 2^{-126}), \qquad q = \mathrm{round}(x \cdot (1 / s))

    max is the largest finite number of the format: 448 for float8_e4m3fn, 57344 for float8_e5m2.

    Args:
        x: (..., N); float32, float16 or bfloat16, on the CPU also float64, which is rounded to float32 first. N of any
            size.
        granularity: which elements share a scale: "token", a row; "block", 128 elements of a row, the last of a row
            maybe fewer; "tensor", all.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        power_of_two: round scales up to a power of two: the quotients are exact then.

    Returns:
        (q, scale): q of ``fp8_dtype`` with the shape of ``x``, contiguous; scale of float32, to multiply q by. Its
        shape is (..., 1) for "token", contiguous; (..., ceil(N / 128)) for "block", with the rows next to each other in
        memory, so that its strides are (1, rows) for a matrix ``x``; () for "tensor". These are the layouts that
        ``torch._scaled_mm`` takes: ``q, scale`` for its first operand, ``q.t(), scale.t()`` for its second, which is a
        weight with a scale per output channel.

    Rounding: to nearest even, saturated. Zeros get the scale 2^-126, so it is never 0. Where the largest magnitude is
        so small that the quotient would be below that, the scale is 2^-126, too.
    inf and NaN: those that share a scale with an infinity have an infinite scale, with a NaN a scale of NaN; so q times
        scale is NaN for all of them.
    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Differentiable: no; an ``x`` that requires a gradient is refused.
    Deterministic: yes, with the same bits on the CPU and on a GPU. A row's bits do not depend on the other rows, but
        for "tensor".
    Matches: ``(x.float() * (1 / scale)).clamp(-max, max).to(fp8_dtype)``, bit for bit. On a GPU before compute
        capability 8.9 the conversion takes several instructions.
    Raises: RuntimeError for other dtypes or a scalar; ValueError for another ``granularity`` or ``fp8_dtype``.
    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; blocks of 128: DeepSeek-AI 2024, "DeepSeek-V3
        Technical Report".

    >>> q, scale = fp8_quantize(torch.tensor([[1.0, 2.0, 448.0]]))
    >>> q.float(), scale
    (tensor([[  1.,   2., 448.]]), tensor([[1.]]))
    """
    refuse_gradients("fp8_quantize", _NO_GRADIENT, x=x)
    return _fp8_quantize(x, granularity, _name(FP8_DTYPES, fp8_dtype), power_of_two)


@public
def rms_norm_fp8_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    granularity: str = "token",
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""RMSNorm, then quantization to FP8: ``fp8_quantize(rms_norm(x, weight, eps))``, in one pass over memory.

    Args:
        x, weight, eps, weight_offset, cast_before_weight: as in :func:`llmkernels.rms_norm`.
        granularity, fp8_dtype, power_of_two: as in :func:`fp8_quantize`.

    Returns:
        (q, scale), as :func:`fp8_quantize`.

    One kernel on a GPU for "token" and "block", rows aligned to 16 bytes and up to 2048 vectors of 16 bytes long (16384
    elements of 16 bits). Everything else is the two ops after each other, with the same bits.
    Matches: ``fp8_quantize(rms_norm(x, weight, ...), ...)``, bit for bit: the normalized row is rounded to its dtype
        before it is quantized.
    Shape, dtype, layout, differentiable, deterministic, raises: as both.

    >>> q, scale = rms_norm_fp8_quantize(torch.tensor([[3.0, 4.0]]))
    >>> q.float() * scale
    tensor([[0.8081, 1.1314]])
    """
    refuse_gradients("rms_norm_fp8_quantize", _NO_GRADIENT, x=x)
    if weight is not None:
        refuse_gradients("rms_norm_fp8_quantize", _NO_GRADIENT, weight=weight)
        if weight.dtype != x.dtype:
            y = rms_norm(x, weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight)
            return _fp8_quantize(y, granularity, _name(FP8_DTYPES, fp8_dtype), power_of_two)
    return _rms_norm_fp8_quantize(
        x, weight, eps, weight_offset, cast_before_weight, granularity, _name(FP8_DTYPES, fp8_dtype), power_of_two
    )


@public
def swiglu_fp8_quantize(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    granularity: str = "token",
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""SwiGLU, then quantization to FP8: ``fp8_quantize(swiglu(gate, up))``, in one pass over memory.

    Args:
        gate, up: (..., N) each, or only ``gate`` with [gate | up] packed along its last dimension, as in
            :func:`llmkernels.swiglu`.
        granularity, fp8_dtype, power_of_two: as in :func:`fp8_quantize`.

    Returns:
        (q, scale), as :func:`fp8_quantize`.

    One kernel on a GPU for "token" and "block" and rows aligned to 16 bytes, of any length; for "token" those of more
    than 2560 vectors of 16 bytes (20480 elements of 16 bits) are read twice, the second time mostly from cache.
    Everything else is the two ops after each other, with the same bits.
    Matches: ``fp8_quantize(swiglu(gate, up), ...)``, bit for bit.
    Shape, dtype, layout, differentiable, deterministic, raises: as both.

    >>> q, scale = swiglu_fp8_quantize(torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, 2.0]]))
    >>> q.float() * scale
    tensor([[ 0.7311, -0.5222]])
    """
    refuse_gradients("swiglu_fp8_quantize", _NO_GRADIENT, gate=gate)
    if up is not None:
        refuse_gradients("swiglu_fp8_quantize", _NO_GRADIENT, up=up)
    return _swiglu_fp8_quantize(gate, up, granularity, _name(FP8_DTYPES, fp8_dtype), power_of_two)


@public
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    r"""Linear layer of FP8 numbers, :math:`y_{mn} = s_m t_n \sum_k x_{mk} W_{nk} + b_n`.

    Args:
        x: (..., K), float8_e4m3fn or float8_e5m2.
        weight: (N, K), likewise; on a GPU not float8_e5m2 if ``x`` is, too.
        x_scale: (..., 1), float32: s, one per row of ``x``, as from :func:`fp8_quantize` of "token".
        weight_scale: (N, 1), float32: t, one per row of ``weight``, likewise.
        bias: (N,) of ``out_dtype``, or None.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        use_fast_accum: let the tensor cores add up with fewer bits than float32 has, which is faster; see
            ``torch._scaled_mm``.

    Returns:
        y, (..., N), of ``out_dtype``, contiguous.

    On a GPU the product is ``torch._scaled_mm`` (cuBLASLt or CUTLASS), which needs a compute capability of 8.9 or
    later. With a weight of float8_e4m3fn a bfloat16 result comes from it directly, a float16 result on a Hopper GPU
    with cuBLASLt 12.9. Everything else takes a float32 product and a further kernel. K, N or rows that are no multiple
    of 16 bytes are copied and padded first. On the CPU the product is that of float32 numbers, of a part of the weight
    at a time.
    Layout: any; rows of ``x`` and ``weight`` any constant distance apart, aligned to 16 bytes, are read in place.
    Arithmetic: products, which are exact, are summed in float32; scales, bias and one rounding follow.
    Differentiable: no; tensors that require a gradient are refused.
    Deterministic: as far as PyTorch's matmul is.
    Matches: ``torch.nn.functional.linear`` of the dequantized tensors, to the rounding of the sum.
    Raises: RuntimeError for other dtypes, shapes that do not fit, tensors on different devices, or a GPU without
        products of FP8; ValueError for another ``out_dtype``.

    >>> (x, x_scale), (w, w_scale) = map(fp8_quantize, (torch.ones(1, 4), torch.ones(2, 4)))
    >>> fp8_linear(x, w, x_scale, w_scale)
    tensor([[4., 4.]], dtype=torch.bfloat16)
    """
    tensors = {"x": x, "weight": weight, "x_scale": x_scale, "weight_scale": weight_scale}
    refuse_gradients("fp8_linear", _NO_GRADIENT, **tensors if bias is None else tensors | {"bias": bias})
    return _fp8_linear(x, weight, x_scale, weight_scale, bias, _name(_OUT_DTYPES, out_dtype), use_fast_accum)


def _name(names: dict[torch.dtype, str], dtype: torch.dtype) -> str:
    """What the op calls it. An unknown one gets a name that the op refuses."""
    return names.get(dtype) or str(dtype)


def _fake_quantize(x: Tensor, shape: tuple, granularity: str, fp8_dtype: str) -> tuple[Tensor, Tensor]:
    q = x.new_empty(shape, dtype=getattr(torch, fp8_dtype))
    if granularity == "tensor":
        return q, x.new_empty((), dtype=torch.float32)
    *leading, cols = shape
    if granularity == "token":
        return q, x.new_empty((*leading, 1), dtype=torch.float32)
    blocks_first = x.new_empty(((cols + _BLOCK - 1) // _BLOCK, *leading), dtype=torch.float32)
    return q, blocks_first.movedim(0, -1)


def _fake_fp8_quantize(x, granularity="token", fp8_dtype="float8_e4m3fn", power_of_two=False):
    return _fake_quantize(x, x.shape, granularity, fp8_dtype)


def _fake_rms_norm_fp8_quantize(
    x, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=True, *options, **named
):  # fmt: skip
    return _fake_fp8_quantize(x, *options, **named)


def _fake_swiglu_fp8_quantize(
    gate, up=None, granularity="token", fp8_dtype="float8_e4m3fn", power_of_two=False
):  # fmt: skip
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    return _fake_quantize(gate, shape, granularity, fp8_dtype)


def _fake_fp8_linear(
    x, weight, x_scale, weight_scale, bias=None, out_dtype="bfloat16", use_fast_accum=False
):  # fmt: skip
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=getattr(torch, out_dtype))


for _op, _fake in (
    ("fp8_quantize", _fake_fp8_quantize),
    ("rms_norm_fp8_quantize", _fake_rms_norm_fp8_quantize),
    ("swiglu_fp8_quantize", _fake_swiglu_fp8_quantize),
    ("fp8_linear", _fake_fp8_linear),
):
    register_fake(_op, _fake, overloads=("",))
