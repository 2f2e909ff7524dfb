"""rms_norm: accuracy, layouts, special values, gradients, weights of other kinds, errors."""

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from llmkernels import rms_norm
from oracles import (
    DEVICES,
    DTYPES,
    LAYOUTS,
    SCALARS,
    SHAPES,
    assert_same,
    assert_within_ulps,
    check,
    check_norm,
    check_scalar_gradients,
    differentiate,
    laid_out,
    scaled_rows,
)

VARIANTS = {
    "llama": {},
    "gemma": {"weight_offset": 1.0, "cast_before_weight": False},
    "one_rounding": {"cast_before_weight": False},
    "offset_and_two_roundings": {"weight_offset": 1.0},
    "large_eps": {"eps": 0.5},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(rows, cols, dtype, device):
    return scaled_rows(rows, cols, dtype=dtype, device=device), torch.randn(cols, device=device).to(dtype)


@every_dtype
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward_and_backward(device, rows, cols, dtype):
    check_norm(rms_norm, oracles.rms_norm, make(rows, cols, dtype, device))


@every_dtype
@every_variant
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_variants(device, options, weighted, dtype):
    inputs = make(65, 384, dtype, device)
    check_norm(rms_norm, oracles.rms_norm, inputs if weighted else inputs[:1], **options)


@every_dtype
@pytest.mark.parametrize("rows, cols", [(5, 8), (3, 64), (33, 72), (133, 256), (1, 896), (267, 520)])
def test_no_eps(device, rows, cols, dtype):
    """Threads without a row have a rms of 0, and 1 / 0 must stay with them."""
    check_norm(rms_norm, oracles.rms_norm, make(rows, cols, dtype, device), eps=0.0)


# Both sides of every limit of the launch plans: lanes of a warp, registers of a block, rows read twice; a vocabulary.
LENGTHS = [16, 48, 256, 264, 1024, 1032, 2048, 4096, 8192, 8200, 16384, 16392, 32776, 40001, 152064]


@every_dtype
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 3, cols) for cols in (4095, 4097, 16400)]
    # With few rows each gets more threads than with many.
    + [("cuda", rows, cols) for rows in (3, 300) for cols in LENGTHS if "cuda" in DEVICES],
)
def test_row_lengths(device, rows, cols, dtype):
    check_norm(rms_norm, oracles.rms_norm, make(rows, cols, dtype, device))


# The same of rows that are not aligned, of 16 and of 32 bits: element by element, then by warps of a row and vectors of
# a thread. With many rows each group of threads takes several, one after the other.
UNALIGNED = [*range(1, 41), 123, 125, 247, 249, 511, 513, 1001, 1021, 1025, 1921, 2050, 2883, 3841, 4095, 4097, 5761]
UNALIGNED += [7681, 11521, 15359, 15361, 16391]
FEW_AND_MANY = [("cpu", 3, 1001)] + [
    ("cuda", rows, cols)
    for rows, widths in ((3, UNALIGNED), (300, UNALIGNED), (1700, (1001, 4097)))
    for cols in widths
    if "cuda" in DEVICES
]


@every_dtype
@pytest.mark.parametrize("device, rows, cols", FEW_AND_MANY)
def test_row_lengths_that_are_not_aligned(device, rows, cols, dtype):
    x, weight = make(rows, cols, dtype, device)
    check_norm(rms_norm, oracles.rms_norm, (x, weight) if cols % 3 else (x,), cast_before_weight=cols % 2 > 0)


@every_dtype
@pytest.mark.parametrize("layout, grad_layout", [("offset", None), (None, "offset"), ("offset", "row_strided")])
@pytest.mark.parametrize("cols", [1000, 4096])
def test_rows_of_different_alignment(device, cols, layout, grad_layout, dtype):
    x, weight = make(9, cols, dtype, device)
    check_norm(rms_norm, oracles.rms_norm, (laid_out(x, layout) if layout else x, weight), grad_layout=grad_layout)


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [96, 99, 1001])
def test_layouts(device, layout, cols, dtype):
    x, weight = make(9, cols, dtype, device)
    check_norm(rms_norm, oracles.rms_norm, (laid_out(x, layout), weight), grad_layout=layout)


# Rows that are too long for words: both sides of the limits, and of a turn of a block's 1024 threads, of 16 and of 32
# bits.
UNALIGNED_AND_LONG = [8193, 16385, 16391, 20001, 32767, 32769, 50257, 65537]
LONG = [("cpu", 3, 16385)] + [("cuda", rows, cols) for rows in (3, 130) for cols in UNALIGNED_AND_LONG]
every_long = pytest.mark.parametrize("device, rows, cols", [case for case in LONG if case[0] in DEVICES])


@every_dtype
@every_long
def test_long_rows_that_are_not_aligned(device, rows, cols, dtype):
    x, weight = make(rows, cols, dtype, device)
    options = {"weight_offset": float(cols % 2), "cast_before_weight": rows > 3}
    check_norm(rms_norm, oracles.rms_norm, (x, weight) if cols % 3 else (x,), **options)


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [16392, 16399])
def test_layouts_of_long_rows(device, layout, cols, dtype):
    x, weight = make(5, cols, dtype, device)
    check_norm(rms_norm, oracles.rms_norm, (laid_out(x, layout), weight), grad_layout=layout)
    weight = laid_out(weight[None], "offset")[0]
    check_norm(rms_norm, oracles.rms_norm, (laid_out(x, layout), weight))


@every_dtype
@pytest.mark.parametrize("cols", [5, 17, 20001])
def test_gradients_have_the_same_bits_wherever_rows_start(device, cols, dtype):
    """Rows of odd widths, of which each starts at another element of a vector."""
    x, weight = make(33, cols, dtype, device)
    grad_y = torch.randn_like(x)
    expected = differentiate(rms_norm, (x, weight), [grad_y])
    for layout in ("offset", "row_strided"):
        for moved in ((laid_out(x, layout), grad_y), (x, laid_out(grad_y, layout))):
            assert_same(differentiate(rms_norm, (moved[0], weight), [moved[1]]), expected)


def test_layouts_of_the_weight(device):
    x, weight = make(5, 64, torch.float16, device)
    expected = rms_norm(x, weight)
    assert_within_ulps(rms_norm(x, laid_out(weight[None], "offset")[0]), expected, ulps=1)  # not aligned
    assert_same(rms_norm(x, laid_out(weight[:, None], "every_other")[:, 0]), expected)
    assert_same(rms_norm(x, weight.new_ones(1).expand(64)), rms_norm(x))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (3, 0), (2, 1, 2, 1, 6)], ids=str)
def test_any_leading_shape(device, shape):
    shape = torch.Size(shape)
    x, weight = torch.randn(shape, device=device), torch.randn(shape[-1], device=device)
    y = rms_norm(x, weight)
    assert y.is_contiguous() and y.shape == x.shape
    rows = (shape.numel() // max(shape[-1], 1), shape[-1])
    assert_same(y.view(rows), rms_norm(x.view(rows), weight))


def test_rows_that_no_single_stride_describes(device):
    x, weight = make(6, 32, torch.bfloat16, device)
    expected = rms_norm(x, weight).view(2, 3, 32)
    swapped = x.view(2, 3, 32).transpose(0, 1).contiguous().transpose(0, 1)
    for view in (swapped, x.new_zeros(2, 4, 32)[:, :3].copy_(x.view(2, 3, 32))):
        assert_same(rms_norm(view, weight), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast_before_weight", [True, False])
@pytest.mark.parametrize("cols", [127, 3584])
def test_rounding_order(device, cols, cast_before_weight, dtype):
    """Bitwise equal to eager, except for few elements where the float32 error of the sum changes a rounding."""
    x, weight = make(64, cols, dtype, device)
    expected = oracles.rms_norm(x, weight, cast_before_weight=cast_before_weight)
    assert_within_ulps(rms_norm(x, weight, cast_before_weight=cast_before_weight), expected, ulps=2, share=0.99)


@every_dtype
@pytest.mark.parametrize("cols", [64, 63, 5000])
def test_special_values(device, cols, dtype):
    x, weight = make(8, cols, dtype, device)
    for row, value in enumerate([float("inf"), float("-inf"), float("nan"), 1e4, -1e4, 0.0]):
        x[row, row] = value
    x[6] = 0
    y, expected = rms_norm(x, weight), oracles.rms_norm(x, weight)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=10 * torch.finfo(dtype).eps, atol=1e-6)
    assert y[2].isnan().all() and (y[6] == 0).all() and y[3:6].isfinite().all()


def test_eps_is_added_to_the_mean_square(device):
    x = torch.full((1, 16), 1e-3, device=device)
    for eps in (1e-12, 1e-6, 1e-3):
        torch.testing.assert_close(rms_norm(x, eps=eps), x / (1e-6 + eps) ** 0.5)


@every_variant
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_gradcheck(options, weighted):
    inputs = [t.requires_grad_() for t in make(4, 7, torch.float64, "cpu")][: 1 + weighted]
    assert gradcheck(lambda *tensors: rms_norm(*tensors, **options), inputs)


@every_dtype
@pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS.keys())
def test_gradients_that_autograd_makes(device, scalar, dtype):
    check_scalar_gradients(rms_norm, oracles.rms_norm, make(9, 64, dtype, device), scalar)


@every_dtype
def test_grad_weight_sums_many_rows(device, dtype):
    """More rows than there are partial sums, on every path."""
    for rows, cols in ((3001, 24), (3001, 25), (700, 2048)):
        check_norm(rms_norm, oracles.rms_norm, make(rows, cols, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast_before_weight", [True, False])
@pytest.mark.parametrize("cols", [64, 257, 2048, 40000])
def test_grad_weight_is_of_what_the_weight_multiplied(device, cols, cast_before_weight, dtype):
    """Two rows whose normalized values differ by a tenth of a rounding: rounded, most are equal and cancel."""
    row = torch.randn(cols).to(dtype)
    x, options = torch.stack([row, 2 * row]), {"eps": torch.finfo(dtype).eps / 8}
    grad_y = torch.ones_like(x) * torch.tensor([[1], [-1]], dtype=dtype)

    def grad_weight(function, x, grad_y, **options):
        weight = torch.ones(cols, dtype=x.dtype, device=x.device, requires_grad=True)
        return torch.autograd.grad(function(x, weight, **options), weight, grad_y)[0]

    options["cast_before_weight"] = cast_before_weight
    result = grad_weight(rms_norm, x.to(device), grad_y.to(device), **options).cpu()
    if cast_before_weight:
        expected = grad_weight(oracles.rms_norm, x, grad_y, **options)
        assert (expected == 0).double().mean() > 0.7
        assert (result == expected).double().mean() > 0.95  # the others are within a bit of where the rounding turns
    else:
        exact = grad_weight(oracles.rms_norm, x.double(), grad_y.double(), **options)
        torch.testing.assert_close(result.double(), exact, rtol=0.02, atol=1e-6)


def test_a_frozen_weight_gets_no_gradient(device):
    x, weight = make(5, 32, torch.float32, device)
    x.requires_grad_()
    rms_norm(x, weight).sum().backward()
    assert weight.grad is None
    weight.requires_grad_()
    expected, x.grad = x.grad, None
    rms_norm(x, weight).sum().backward()
    assert weight.grad is not None
    assert_same(x.grad, expected)


def test_a_frozen_input_gets_no_gradient(device):
    x, weight = make(5, 32, torch.float32, device)
    rms_norm(x, weight.requires_grad_()).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_backward_op_leaves_out_what_is_not_wanted(device):
    x, weight = make(5, 32, torch.float32, device)
    backward = torch.ops.llmkernels.rms_norm_backward
    both = backward(x, x, weight, None, 1e-6, 0.0, True, True)
    alone = backward(x, x, weight, None, 1e-6, 0.0, True, False)
    assert both[1].shape == (32,) and alone[1].shape == (0,)
    assert_same(both[0], alone[0])
    assert backward(x, x, None, None, 1e-6, 0.0, True, True)[1].shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_variant
def test_float32_weight_on_narrow_input(device, options, dtype):
    x, weight = make(9, 64, dtype, device)
    inputs = x, weight.float()
    assert rms_norm(*inputs, **options).dtype == oracles.rms_norm(*inputs, **options).dtype
    ours, eager = (lambda *t, f=f: f(*t, **options) for f in (rms_norm, oracles.rms_norm))
    check(ours, eager, inputs)


ERRORS = {
    "x must be float32, float16, bfloat16.* got Int": lambda x, w: rms_norm(x.int(), w),
    "x must have at least one dimension": lambda x, w: rms_norm(x[0, 0]),
    r"weight must have shape \[8\] .* got \[4\]": lambda x, w: rms_norm(x, w[:4]),
    r"weight must have shape \[8\] .* got \[1, 8\]": lambda x, w: rms_norm(x, w[None]),
    "weight must have the dtype of x, Float, got Half": lambda x, w: _op.rms_norm(x, w.half()),
    r"grad_y must have the shape of x, \[2, 8\], got \[1, 8\]": lambda x, w: _backward(x[:1], x, w, None),
    r"grad_sum must have the shape of x, \[2, 8\], got \[1, 8\]": lambda x, w: _backward(x, x, w, x[:1]),
    "grad_y must have the dtype of x, Float, got Half": lambda x, w: _backward(x.half(), x, w, None),
}
_op = torch.ops.llmkernels


def _backward(grad_y, x, weight, grad_sum):
    return _op.rms_norm_backward(grad_y, x, weight, grad_sum, 1e-6, 0.0, True, True)


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises(RuntimeError, match="rms_norm(_backward)?: " + message):
        call(torch.ones(2, 8, device=device), torch.ones(8, device=device))


@pytest.mark.gpu
def test_errors_about_devices():
    x = torch.ones(2, 8, device="cuda")
    with pytest.raises(RuntimeError, match="rms_norm: x is float64, which is supported on the CPU only"):
        rms_norm(x.double())
    with pytest.raises(RuntimeError, match="rms_norm: weight must be on the device of x"):
        rms_norm(x, torch.ones(8))
