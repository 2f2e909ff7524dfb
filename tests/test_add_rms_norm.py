"""add_rms_norm: the sum and its gradient. The norm has the kernels of rms_norm, which test_rms_norm.py tests."""

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from llmkernels import add_rms_norm, rms_norm
from oracles import (
    DEVICES,
    DTYPES,
    LAYOUTS,
    SHAPES,
    assert_same,
    assert_within_ulps,
    check,
    check_norm,
    differentiate,
    laid_out,
    scaled_rows,
)
from test_rms_norm import every_dtype, every_variant


def make(rows, cols, dtype, device):
    x, residual = (scaled_rows(rows, cols, dtype=dtype, device=device) for _ in range(2))
    return x, residual, torch.randn(cols, device=device).to(dtype)


@every_dtype
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward_and_backward(device, rows, cols, dtype):
    inputs = make(rows, cols, dtype, device)
    check_norm(add_rms_norm, oracles.add_rms_norm, inputs)
    assert torch.equal(add_rms_norm(*inputs)[1], inputs[0] + inputs[1])


@every_dtype
@every_variant
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_variants(device, options, weighted, dtype):
    inputs = make(65, 384, dtype, device)
    check_norm(add_rms_norm, oracles.add_rms_norm, inputs if weighted else inputs[:2], **options)


@every_dtype
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 3, 4097)]
    + [("cuda", r, c) for r in (3, 300) for c in (1032, 8192, 16384, 16392, 32776, 40001) if "cuda" in DEVICES]
    + [("cuda", r, c) for r in (3, 1700) for c in (513, 1001, 2050, 4097, 7681) if "cuda" in DEVICES],
)
def test_row_lengths(device, rows, cols, dtype):
    check_norm(add_rms_norm, oracles.add_rms_norm, make(rows, cols, dtype, device))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1], ids=["x", "residual"])
def test_layouts(device, which, layout, dtype):
    """x, the residual or both have other strides, and so have the gradients."""
    inputs = list(make(9, 96, dtype, device))
    inputs[which] = laid_out(inputs[which], layout)
    inputs[1 - which] = inputs[1 - which][: len(inputs[which])]
    check_norm(add_rms_norm, oracles.add_rms_norm, inputs, grad_layout=layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast_before_weight", [True, False])
def test_rounding_order(device, cast_before_weight, dtype):
    """The sum is rounded to the dtype before it is normalized; then everything is rounded as in rms_norm."""
    inputs = make(64, 3584, dtype, device)
    y, _ = add_rms_norm(*inputs, cast_before_weight=cast_before_weight)
    expected, _ = oracles.add_rms_norm(*inputs, cast_before_weight=cast_before_weight)
    assert_within_ulps(y, expected, ulps=2, share=0.99)


@every_dtype
@pytest.mark.parametrize("cols", [64, 63, 40000])
def test_is_rms_norm_of_the_sum(device, cols, dtype):
    x, residual, weight = make(5, cols, dtype, device)
    y, total = add_rms_norm(x, residual, weight)
    assert_same(y, rms_norm(total, weight))


@every_dtype
def test_special_values(device, dtype):
    x, residual, weight = make(8, 64, dtype, device)
    for row, (a, b) in enumerate([(float("inf"), 1), (float("inf"), -float("inf")), (1, float("nan")), (1e4, -1e4)]):
        x[row, 3], residual[row, 3] = a, b
    residual[4] = -x[4]  # a row of zeros
    ours, eager = add_rms_norm(x, residual, weight), oracles.add_rms_norm(x, residual, weight)
    assert_same(ours[1], eager[1])
    torch.testing.assert_close(ours[0], eager[0], equal_nan=True, rtol=10 * torch.finfo(dtype).eps, atol=1e-6)
    assert (ours[0][4] == 0).all()


@every_variant
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_gradcheck(options, weighted):
    inputs = [t.requires_grad_() for t in make(4, 7, torch.float64, "cpu")][: 2 + weighted]
    assert gradcheck(lambda *tensors: add_rms_norm(*tensors, **options), inputs)


@pytest.mark.parametrize("used", [0, 1], ids=["y", "sum"])
def test_one_output_unused(device, used):
    """Only one of the two outputs has a gradient."""
    inputs = [t.requires_grad_() for t in make(5, 32, torch.float32, device)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    ours = torch.autograd.grad(add_rms_norm(*inputs)[used].square().sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad(oracles.add_rms_norm(*exact)[used].square().sum(), exact, allow_unused=True)
    for a, b, leaf in zip(ours, expected, inputs, strict=True):
        a, b = (torch.zeros_like(leaf) if t is None else t.float() for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_both_outputs_flow_on(device):
    """As in a decoder layer: the sum is the next residual, so its gradient has two sources."""

    def layers(add_norm, x, residual, weight):
        for _ in range(3):
            x, residual = add_norm(x, residual, weight)
        return x, residual

    inputs = make(5, 64, torch.float32, device)
    check(
        lambda *t: layers(add_rms_norm, *t),
        lambda *t: layers(oracles.add_rms_norm, *t),
        inputs,
        scales=[None, None, *[torch.full((), 50.0, device=device)] * 3],
    )


def test_the_same_tensor_twice(device):
    x = scaled_rows(5, 64, device=device)
    assert_same(add_rms_norm(x, x), (rms_norm(2 * x), 2 * x))
    grad = differentiate(lambda t: add_rms_norm(t, t), (x,), [torch.ones_like(x)] * 2)[-1]
    expected = differentiate(lambda t: oracles.add_rms_norm(t, t), (x.double(),), [torch.ones_like(x).double()] * 2)[-1]
    torch.testing.assert_close(grad, expected.float(), rtol=1e-4, atol=1e-5)


def test_inputs_are_left_alone(device):
    inputs = make(5, 64, torch.bfloat16, device)
    copies = [t.clone() for t in inputs]
    y, total = add_rms_norm(*inputs)
    total.zero_(), y.zero_()
    assert_same(tuple(inputs), tuple(copies))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_mixed_dtypes_compose_as_eager(device, dtype):
    x, residual, weight = make(9, 64, dtype, device)
    for inputs in ((x, residual.float(), weight), (x, residual, weight.float()), (x.float(), residual, weight.float())):
        ours, eager = add_rms_norm(*inputs), oracles.add_rms_norm(*inputs)
        assert [t.dtype for t in ours] == [t.dtype for t in eager]
        check(add_rms_norm, oracles.add_rms_norm, inputs)


ERRORS = {
    "x must be float32, float16, bfloat16.* got Int": lambda x, w: add_rms_norm(x.int(), x.int(), w),
    r"residual must have the shape of x, \[2, 8\], got \[1, 8\]": lambda x, w: add_rms_norm(x, x[:1], w),
    r"weight must have shape \[8\] .* got \[3\]": lambda x, w: add_rms_norm(x, x, w[:3]),
    "residual must have the dtype of x, Float, got Half": lambda x, w: _op.add_rms_norm(x, x.half(), w),
}
_op = torch.ops.llmkernels


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises(RuntimeError, match="rms_norm: " + message):
        call(torch.ones(2, 8, device=device), torch.ones(8, device=device))
