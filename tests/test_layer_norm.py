"""layer_norm and add_layer_norm: accuracy, layouts, large means, special values, gradients, other dtypes, errors."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

import oracles
from llmkernels import add_layer_norm, layer_norm
from oracles import (
    DEVICES,
    DTYPES,
    LAYOUTS,
    SCALARS,
    SHAPES,
    assert_accurate,
    assert_same,
    check,
    check_layer_norm,
    check_scalar_gradients,
    differentiate,
    laid_out,
    scaled_rows,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FUNCTIONS = {"layer_norm": (layer_norm, oracles.layer_norm), "add_layer_norm": (add_layer_norm, oracles.add_layer_norm)}
every_function = pytest.mark.parametrize("name", FUNCTIONS)
GIVEN = [("weight", "bias"), ("weight",), ("bias",), ()]
every_given = pytest.mark.parametrize("given", GIVEN, ids=lambda names: "+".join(names) or "none")


def make(name, rows, cols, dtype, device, given=("weight", "bias")):
    """Rows, whose mean is not zero, and parameters."""
    tensors = [
        scaled_rows(rows, cols, dtype=dtype, device=device) + shift for shift in (1, 2)[: 1 + name.startswith("add")]
    ]
    return tensors, {key: torch.randn(cols, device=device).to(dtype) for key in given}


@every_dtype
@every_function
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward_and_backward(device, rows, cols, name, dtype):
    inputs = make(name, rows, cols, dtype, device)
    check_layer_norm(*FUNCTIONS[name], *inputs)
    if name == "add_layer_norm":
        x, residual = inputs[0]
        assert torch.equal(add_layer_norm(x, residual)[1], x + residual)


@every_dtype
@every_function
@every_given
@pytest.mark.parametrize("cols", [384, 385, 1001, 20000, 20001])
def test_weight_offset(device, name, given, cols, dtype):
    rows, parameters = make(name, 65 if device == "cuda" else 7, cols, dtype, device, given)
    check_layer_norm(*FUNCTIONS[name], rows, parameters, weight_offset=1.0)


@every_dtype
@every_function
@every_given
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_parameters_that_are_absent(device, name, given, eps, dtype):
    check_layer_norm(*FUNCTIONS[name], *make(name, 65, 384, dtype, device, given), eps=eps)


# Both sides of every limit of the launch plans: see test_rms_norm.py.
LENGTHS = [16, 48, 256, 264, 1024, 1032, 2048, 4096, 8192, 8200, 16384, 16392, 32776, 40001, 152064]


@every_dtype
@every_function
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 3, cols) for cols in (4095, 4097, 16400)]
    + [("cuda", rows, cols) for rows in (3, 300) for cols in LENGTHS if "cuda" in DEVICES],
)
def test_row_lengths(device, rows, cols, name, dtype):
    check_layer_norm(*FUNCTIONS[name], *make(name, rows, cols, dtype, device))


# See test_rms_norm.py.
UNALIGNED = [*range(1, 41), 123, 125, 247, 249, 511, 513, 1001, 1021, 1025, 1921, 2050, 2883, 3841, 4095, 4097, 5761]
UNALIGNED += [7681, 11519, 11521, 16391]
FEW_AND_MANY = [("cpu", 3, 1001)] + [
    ("cuda", rows, cols)
    for rows, widths in ((3, UNALIGNED), (300, UNALIGNED), (1700, (1001, 4097)))
    for cols in widths
    if "cuda" in DEVICES
]


@every_dtype
@every_function
@pytest.mark.parametrize("device, rows, cols", FEW_AND_MANY)
def test_row_lengths_that_are_not_aligned(device, rows, cols, name, dtype):
    given = GIVEN[cols % len(GIVEN)] if rows == 3 else ("weight", "bias")
    check_layer_norm(*FUNCTIONS[name], *make(name, rows, cols, dtype, device, given))


@every_dtype
@every_function
@pytest.mark.parametrize("layout, grad_layout", [("offset", None), (None, "offset"), ("offset", "row_strided")])
@pytest.mark.parametrize("cols", [1000, 4096])
def test_rows_of_different_alignment(device, cols, name, layout, grad_layout, dtype):
    (x, *residual), parameters = make(name, 9, cols, dtype, device)
    rows = [laid_out(x, layout) if layout else x, *residual]
    check_layer_norm(*FUNCTIONS[name], rows, parameters, grad_layout=grad_layout)


@every_dtype
def test_a_gradient_that_all_rows_share(device, dtype):
    """It starts where its operand starts, for every row; some groups of threads have a row less than others."""
    (x,), parameters = make("layer_norm", 700 if device == "cuda" else 7, 1001, dtype, device)
    grad_y = laid_out(torch.randn(1, 1001, device=device).to(dtype), "offset").expand(x.shape)
    inputs = (x, *parameters.values())
    assert_same(differentiate(layer_norm, inputs, [grad_y]), differentiate(layer_norm, inputs, [grad_y.contiguous()]))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [96, 99, 1001])
def test_layouts(device, layout, cols, dtype):
    (x,), parameters = make("layer_norm", 9, cols, dtype, device)
    check_layer_norm(layer_norm, oracles.layer_norm, [laid_out(x, layout)], parameters, grad_layout=layout)


# See test_rms_norm.py.
UNALIGNED_AND_LONG = [8193, 12289, 16391, 20001, 32767, 32769, 50257, 65537]
LONG = [("cpu", 3, 12289)] + [("cuda", rows, cols) for rows in (3, 130) for cols in UNALIGNED_AND_LONG]
every_long = pytest.mark.parametrize("device, rows, cols", [case for case in LONG if case[0] in DEVICES])


@every_dtype
@every_function
@every_long
def test_long_rows_that_are_not_aligned(device, rows, cols, name, dtype):
    given = GIVEN[cols % len(GIVEN)] if rows == 3 else ("weight", "bias")
    check_layer_norm(*FUNCTIONS[name], *make(name, rows, cols, dtype, device, given))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [16392, 16399])
def test_layouts_of_long_rows(device, layout, cols, dtype):
    (x, residual), parameters = make("add_layer_norm", 5, cols, dtype, device)
    rows = [laid_out(x, layout), residual[: 1 if layout in ("expanded", "size_one") else 5]]
    rows[1] = rows[1].expand(rows[0].shape)
    check_layer_norm(add_layer_norm, oracles.add_layer_norm, rows, parameters, grad_layout=layout)
    moved = {name: laid_out(t[None], "offset")[0] for name, t in parameters.items()}
    check_layer_norm(layer_norm, oracles.layer_norm, rows[:1], moved)


@every_dtype
@pytest.mark.parametrize("cols", [5, 17, 20001])
def test_gradients_have_the_same_bits_wherever_rows_start(device, cols, dtype):
    (x, residual), parameters = make("add_layer_norm", 33, cols, dtype, device)
    inputs = [x, residual, *parameters.values()]
    grads = [torch.randn_like(x) for _ in range(2)]
    expected = differentiate(add_layer_norm, inputs, grads)
    for layout in ("offset", "row_strided"):
        assert_same(differentiate(add_layer_norm, [laid_out(x, layout), *inputs[1:]], grads), expected)
        for moved in ((laid_out(grads[0], layout), grads[1]), (grads[0], laid_out(grads[1], layout))):
            assert_same(differentiate(add_layer_norm, inputs, moved), expected)


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1], ids=["x", "residual"])
def test_layouts_of_what_is_added(device, which, layout, dtype):
    rows, parameters = make("add_layer_norm", 9, 96, dtype, device)
    rows[which] = laid_out(rows[which], layout)
    rows[1 - which] = rows[1 - which][: len(rows[which])]
    check_layer_norm(add_layer_norm, oracles.add_layer_norm, rows, parameters, grad_layout=layout)


def test_layouts_of_the_parameters(device):
    (x,), parameters = make("layer_norm", 5, 64, torch.float16, device)
    weight, bias = parameters.values()
    expected = layer_norm(x, weight, bias)
    for change in (lambda t: laid_out(t[None], "offset")[0], lambda t: laid_out(t[:, None], "every_other")[:, 0]):
        for changed in ((change(weight), bias), (weight, change(bias))):
            torch.testing.assert_close(layer_norm(x, *changed), expected, rtol=2e-3, atol=2e-3)
    one, none = weight.new_ones(1).expand(64), weight.new_zeros(1).expand(64)
    assert_same(layer_norm(x, one, none), layer_norm(x))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (3, 0), (2, 1, 2, 1, 6)], ids=str)
def test_any_leading_shape(device, shape):
    shape = torch.Size(shape)
    x, parameters = torch.randn(shape, device=device), torch.randn(2, shape[-1], device=device)
    y = layer_norm(x, *parameters)
    assert y.is_contiguous() and y.shape == x.shape
    rows = (shape.numel() // max(shape[-1], 1), shape[-1])
    assert_same(y.view(rows), layer_norm(x.view(rows), *parameters))


def test_no_rows_give_zero_gradients(device):
    x, parameters = torch.ones(0, 8, device=device), torch.ones(2, 8, device=device)
    *_, grad_weight, grad_bias = differentiate(layer_norm, (x, *parameters), [x])
    assert_same((grad_weight, grad_bias), (torch.zeros_like(parameters[0]),) * 2)


@every_dtype
@pytest.mark.parametrize("cols", [64, 99, 3584, 40000])
def test_large_means(device, cols, dtype):
    """mean(x^2) - mean(x)^2 would cancel: here the mean is up to a thousand times the deviation."""
    ratio = {torch.float32: 1000, torch.float16: 60, torch.bfloat16: 8}[dtype]
    x = (
        torch.randn(6, cols, device=device) + ratio * torch.tensor([[1], [-1], [0.5], [1], [-0.5], [1]], device=device)
    ).to(dtype)
    parameters = torch.randn(2, cols, device=device).to(dtype)
    y, exact = layer_norm(x, *parameters), oracles.layer_norm(x.double(), *parameters.double())
    assert_accurate(y, oracles.layer_norm(x, *parameters), exact)
    check_layer_norm(layer_norm, oracles.layer_norm, [x], dict(zip(("weight", "bias"), parameters, strict=True)))


def elements_far_from_the_others(cols, dtype, device):
    """A row of each kind."""
    last = cols - 1
    outliers = [
        {0: 1e4}, {0: -6e4}, {1: 1e4}, {cols // 2: 1e4}, {last: 100.0}, {0: 1e4, 1: 1e4}, {0: 1e4, 3: -6e4},
        {1: 1e4, 3: 1e4}, dict.fromkeys((0, cols // 2, last), 1e4), dict.fromkeys(range(8), 1e4),
        dict.fromkeys(range(0, cols, 32), 1e4),
    ]  # fmt: skip
    x = torch.randn(len(outliers), cols, device=device).to(dtype)
    for row, values in enumerate(outliers):
        for col, value in values.items():
            x[row, min(col, last)] = value
    return x


@every_dtype
@pytest.mark.parametrize("cols", [64, 99, 1024, 3584, 16384, 40000])
def test_elements_far_from_the_others(device, cols, dtype):
    """Wherever they are, the others keep their digits: all is right to one rounding, in float32 to a few. A GPU sums
    1024 up around one element, that may be one of these: see scale_of_row()."""
    x = elements_far_from_the_others(cols, dtype, device)
    exact = oracles.layer_norm(x.double())
    units = 4 if dtype == torch.float32 else 0.75 if cols == 1024 else 0.51
    rounding = {"rtol": units * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(layer_norm(x).double(), exact, **rounding)
    residual = torch.zeros_like(x)
    torch.testing.assert_close(add_layer_norm(x, residual)[0].double(), exact, **rounding)


@every_dtype
@pytest.mark.parametrize("cols", [16, 64, 99, 1001, 3584, 4097, 8192, 16384, 40000])
def test_gradients_where_elements_are_far_from_the_others(device, cols, dtype):
    """They are right to one rounding, in float32 to a few: a GPU sums up around the mean of the first 32 elements."""
    x = elements_far_from_the_others(cols, dtype, device)
    weight = (1 + torch.rand(cols, device=device)).to(dtype)
    grad_y = (1 + torch.rand(x.shape, device=device)).to(dtype)
    grad_x, grad_weight = differentiate(layer_norm, (x, weight), [grad_y])[1:]
    exact_x, exact_weight = differentiate(oracles.layer_norm, (x.double(), weight.double()), [grad_y.double()])[1:]
    unit, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    rounding = 4 * unit if dtype == torch.float32 else 0.51 * unit
    rstd = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    n = (x.double() - x.double().mean(-1, keepdim=True)) * rstd  # is multiplied by what is wrong with mean(g n)
    allowed = rounding * exact_x.abs().clamp(min=smallest) + 2e-5 * rstd * (1 + n.abs())
    assert ((grad_x - exact_x).abs() <= allowed).all()
    torch.testing.assert_close(grad_weight.double(), exact_weight, rtol=rounding, atol=1e-4)


@every_dtype
@pytest.mark.parametrize("cols", [1, 63, 64, 3584, 40000])
def test_rows_of_equal_numbers(device, cols, dtype):
    """They give the bias exactly, and only the mean of the gradient is taken from it."""
    values = torch.tensor([[0.1], [-3.3], [1000.0], [0.0]], device=device).to(dtype)
    weight, bias = torch.randn(2, cols, device=device).to(dtype)
    x = values.expand(4, cols).contiguous()
    assert_same(layer_norm(x, weight, bias), bias.expand(4, cols))
    assert_same(add_layer_norm(x, x, weight, bias)[0], bias.expand(4, cols))
    grad_y = torch.randn_like(x)
    _, grad_x, grad_weight, grad_bias = differentiate(layer_norm, (x, weight, bias), [grad_y])
    g = grad_y.double() * weight.double()
    expected = (g - g.mean(-1, keepdim=True)) / 1e-5**0.5
    torch.testing.assert_close(grad_x.double(), expected, rtol=2e-2, atol=2e-3 * expected.abs().max().item())
    torch.testing.assert_close(grad_weight, torch.zeros_like(weight), rtol=0, atol=1e-2)
    torch.testing.assert_close(grad_bias.double(), grad_y.double().sum(0), rtol=1e-2, atol=2e-2)


@every_dtype
@pytest.mark.parametrize("cols", [64, 63, 5000, 40000])
def test_special_values(device, cols, dtype):
    (x,), parameters = make("layer_norm", 8, cols, dtype, device)
    for row, value in enumerate([float("inf"), float("-inf"), float("nan"), 1e4, -1e4]):
        x[row, 0 if row % 2 else -1] = value  # where the mean begins: see forward.cuh
    y, exact = layer_norm(x, **parameters), oracles.layer_norm(x.double(), *(t.double() for t in parameters.values()))
    assert y[:3].isnan().all() and y[3:].isfinite().all()
    torch.testing.assert_close(
        y[3:].double(), exact[3:], rtol=10 * torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps
    )


@every_dtype
@pytest.mark.parametrize("cols", [64, 1001, 4096])
def test_squares_out_of_range(device, cols, dtype):
    """Finite numbers do not become NaN."""
    x = (torch.rand(4, cols, device=device) * (6e4 if dtype == torch.float16 else 1e25)).to(dtype)
    for result in differentiate(layer_norm, (x,), [torch.randn_like(x)]):
        assert result.isfinite().all()


@every_function
@every_given
def test_gradcheck(name, given):
    rows, parameters = make(name, 4, 7, torch.float64, "cpu", given)
    inputs = [t.requires_grad_() for t in (*rows, *parameters.values())]
    function, count = FUNCTIONS[name][0], len(rows)
    assert gradcheck(lambda *t: function(*t[:count], **dict(zip(given, t[count:], strict=True))), inputs)


@every_dtype
@pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS.keys())
def test_gradients_that_autograd_makes(device, scalar, dtype):
    (x,), parameters = make("layer_norm", 9, 64, dtype, device)
    check_scalar_gradients(layer_norm, oracles.layer_norm, (x, *parameters.values()), scalar)


@every_dtype
def test_gradients_of_parameters_sum_many_rows(device, dtype):
    """More rows than there are partial sums, on every path."""
    for rows, cols in ((3001, 24), (3001, 25), (700, 2048)):
        check_layer_norm(layer_norm, oracles.layer_norm, *make("layer_norm", rows, cols, dtype, device))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("cols", [32, 33])
def test_what_is_frozen_gets_no_gradient(device, cols, frozen):
    (x,), parameters = make("layer_norm", 70, cols, torch.float32, device)
    inputs = (x, *parameters.values())
    wanted = [t.requires_grad_() for i, t in enumerate(inputs) if i not in frozen]
    grads = torch.autograd.grad(layer_norm(*inputs).square().sum(), wanted)
    assert all(inputs[i].grad is None for i in frozen)
    everything = [t.detach().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(layer_norm(*everything).square().sum(), everything)
    assert_same(grads, tuple(t for i, t in enumerate(expected) if i not in frozen))


def test_backward_op_leaves_out_what_is_not_wanted(device):
    (x,), parameters = make("layer_norm", 5, 32, torch.float32, device)
    weight = parameters["weight"]
    backward = torch.ops.llmkernels.layer_norm_backward
    for given in (weight, None):
        for wanted in ((True, True), (True, False), (False, True), (False, False)):
            sizes = [len(t) for t in backward(x, x, given, None, 1e-5, 0.0, *wanted)[1:]]
            assert sizes == [32 * (wanted[0] and given is not None), 32 * wanted[1]]


@pytest.mark.parametrize("used", [0, 1], ids=["y", "sum"])
def test_one_output_unused(device, used):
    rows, parameters = make("add_layer_norm", 5, 32, torch.float32, device)
    inputs = [t.requires_grad_() for t in (*rows, *parameters.values())]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    ours = torch.autograd.grad(add_layer_norm(*inputs)[used].square().sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad(oracles.add_layer_norm(*exact)[used].square().sum(), exact, allow_unused=True)
    for a, b, leaf in zip(ours, expected, inputs, strict=True):
        a, b = (torch.zeros_like(leaf) if t is None else t.float() for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_dtype
@pytest.mark.parametrize("cols", [64, 63, 40000])
def test_is_layer_norm_of_the_sum(device, cols, dtype):
    (x, residual), parameters = make("add_layer_norm", 5, cols, dtype, device)
    y, total = add_layer_norm(x, residual, **parameters)
    assert_same(y, layer_norm(total, **parameters))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_parameters_of_another_dtype(device, dtype):
    (x, residual), parameters = make("add_layer_norm", 9, 64, dtype, device)
    weight, bias = parameters["weight"].float(), parameters["bias"]
    for inputs in ((x, weight, bias.float()), (x, weight, bias), (x, weight)):
        assert layer_norm(*inputs).dtype == dtype
        check(layer_norm, oracles.layer_norm, inputs)
    y, total = add_layer_norm(x, residual.float(), weight, bias)
    assert y.dtype == total.dtype == torch.float32
    torch.testing.assert_close(y, F.layer_norm(x + residual.float(), (64,), weight, bias.float()), rtol=1e-4, atol=1e-4)


ERRORS = {
    "x must be float32, float16, bfloat16.* got Int": lambda x, w: layer_norm(x.int(), w),
    "x must have at least one dimension": lambda x, w: layer_norm(x[0, 0]),
    r"weight must have shape \[8\] .* got \[4\]": lambda x, w: layer_norm(x, w[:4]),
    r"bias must have shape \[8\] .* got \[1, 8\]": lambda x, w: layer_norm(x, None, w[None]),
    "bias must have the dtype of x, Float, got Half": lambda x, w: _op.layer_norm(x, w, w.half()),
    r"residual must have the shape of x, \[2, 8\], got \[1, 8\]": lambda x, w: add_layer_norm(x, x[:1], w),
    r"grad_y must have the shape of x, \[2, 8\], got \[1, 8\]": lambda x, w: _backward(x[:1], x, w, None),
    r"grad_sum must have the shape of x, \[2, 8\], got \[1, 8\]": lambda x, w: _backward(x, x, w, x[:1]),
}
_op = torch.ops.llmkernels


def _backward(grad_y, x, weight, grad_sum):
    return _op.layer_norm_backward(grad_y, x, weight, grad_sum, 1e-5, 0.0, True, True)


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises(RuntimeError, match="layer_norm(_backward)?: " + message):
        call(torch.ones(2, 8, device=device), torch.ones(8, device=device))
