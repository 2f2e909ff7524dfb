"""softmax and log_softmax: accuracy, masks, layouts, special values, gradients, errors."""

import pytest
import torch
from torch.autograd import gradcheck

import llmkernels
import oracles
from llmkernels import log_softmax, softmax
from oracles import (
    DEVICES,
    DTYPES,
    LAYOUTS,
    SCALARS,
    SHAPES,
    assert_same,
    check_scalar_gradients,
    check_softmax,
    laid_out,
    scaled_rows,
)

NAMES = ["softmax", "log_softmax"]
every_name = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pair(name):
    return getattr(llmkernels, name), getattr(oracles, name)


def make(rows, cols, dtype, device):
    return scaled_rows(rows, cols, dtype=dtype, device=device)


@every_dtype
@every_name
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward_and_backward(device, rows, cols, name, dtype):
    check_softmax(*pair(name), make(rows, cols, dtype, device))


# Both sides of every limit of the launch plans: lanes of a warp, registers of a block, the shared memory of one block
# and of clusters, rows read twice.
LENGTHS = [16, 128, 256, 512, 520, 1024, 1032, 2048, 4096, 4104, 8192, 8200, 16384, 16388, 32768, 32776, 40001, 65544]
LENGTHS += [51200, 51204, 102400, 102408, 131072, 152064, 262144, 262152, 524288, 524296]


@every_dtype
@every_name
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 3, cols) for cols in (1023, 1025, 16400)]
    + [("cuda", rows, cols) for rows in (1, 3, 300) for cols in LENGTHS if "cuda" in DEVICES and rows * cols < 2e7],
)
def test_row_lengths(device, rows, cols, name, dtype):
    check_softmax(*pair(name), make(rows, cols, dtype, device))


@every_dtype
@every_name
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [96, 99])
def test_layouts(device, layout, cols, name, dtype):
    check_softmax(*pair(name), laid_out(make(9, cols, dtype, device), layout), grad_layout=layout)


@every_name
@pytest.mark.parametrize("scale", [0.125, -0.5, 0.0])
def test_scale(device, scale, name):
    check_softmax(*pair(name), make(9, 130, torch.float32, device), scale=scale)


# Shapes of a mask for x of (2, 3, 5, N).
MASKS = [(), (1,), (-1,), (5, 1), (5, -1), (3, 1, -1), (2, 1, 1, -1), (2, 1, 5, -1), (1, 3, 5, -1), (2, 3, 1, 1)]
MASKS += [(2, 3, 5, -1)]


@every_dtype
@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("cols", [64, 67, 8200])
def test_masks(device, cols, shape, kind, dtype):
    if device == "cpu" and cols > 1000 and len(shape) != 2:
        pytest.skip("one shape is enough")
    x = make(30, cols, dtype, device).view(2, 3, 5, cols)
    mask = torch.randn([cols if size < 0 else size for size in shape], device=device)
    mask = mask > -0.5 if kind == "bool" else mask.to(dtype)
    check_softmax(*pair("softmax"), x, mask)
    assert_same(softmax(x, mask), softmax(x, mask.expand(x.shape).contiguous()))


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_layouts_of_the_mask(device, kind):
    x = make(15, 64, torch.float32, device).view(3, 5, 64)
    mask = torch.randn(5, 64, device=device)
    mask = mask > 0 if kind == "bool" else mask
    expected = softmax(x, mask)
    for layout in ("row_strided", "row_strided_aligned", "transposed", "offset", "every_other"):
        assert_same(softmax(x, laid_out(mask, layout)), expected, layout)
    x = make(2 * 3 * 4 * 5, 8, torch.float32, device).view(2, 3, 4, 5, 8)
    mask = torch.randn(3, 1, 5, 2, 8, device=device).permute(3, 0, 1, 2, 4)  # more strides than the kernel takes
    assert_same(softmax(x, mask), softmax(x, mask.contiguous().expand(x.shape).clone()))


@every_dtype
@pytest.mark.parametrize("rows, cols", [(1, 9), (7, 64), (64, 64), (64, 7), (33, 4100), (5, 16400)])
def test_causal(device, rows, cols, dtype):
    """The last row takes part as a whole; rows without columns are zero. Columns beyond are not read."""
    x = make(2 * rows, cols, dtype, device).view(2, rows, cols)
    check_softmax(*pair("softmax"), x, causal=True)
    check_softmax(*pair("softmax"), x, torch.rand(2, 1, cols, device=device) > 0.5, causal=True, scale=0.5)
    beyond = ~torch.ones(rows, cols, dtype=torch.bool, device=device).tril(cols - rows)
    assert_same(softmax(x.masked_fill(beyond, float("nan")), causal=True), softmax(x, causal=True))


@every_dtype
@pytest.mark.parametrize("cols", [1, 8, 64, 63, 5000])
def test_rows_of_which_nothing_takes_part(device, cols, dtype):
    x = make(4, cols, dtype, device).requires_grad_()
    mask = torch.ones(4, cols, dtype=torch.bool, device=device)
    mask[1:3] = False
    y = softmax(x, mask)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert (y[1:3] == 0).all() and (grad[1:3] == 0).all() and grad.isfinite().all()
    assert_same(y[::3], softmax(x[::3]))
    added = torch.zeros(4, cols, dtype=dtype, device=device).masked_fill(~mask, float("-inf"))
    assert_same(softmax(x, added), y)
    assert (softmax(torch.full((2, cols), float("-inf"), dtype=dtype, device=device)) == 0).all()


@every_dtype
@every_name
@pytest.mark.parametrize("cols", [64, 63, 1001, 4097, 5000, 40001])
def test_special_values(device, cols, name, dtype):
    """Numbers far above the others of their row, too, and not where a few are looked at first (row_powers.cuh)."""
    x = make(8, cols, dtype, device)
    for row, value in enumerate([float("inf"), float("-inf"), float("nan"), 1e4, -1e4, 0.0]):
        x[row, row] = value
    x[6] = 0
    ours, eager = pair(name)
    y, expected = ours(x), eager(x)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=10 * torch.finfo(dtype).eps, atol=4e-6)
    assert y[0].isnan().all() and y[2].isnan().all() and not y[3:].isnan().any()


def test_a_masked_nan_is_not_seen(device):
    x = make(4, 64, torch.float32, device)
    keep = torch.rand(4, 64, device=device) > 0.3
    assert_same(softmax(x.masked_fill(~keep, float("nan")), keep), softmax(x, keep))


@every_name
def test_gradcheck(name):
    x = make(4, 7, torch.float64, "cpu").requires_grad_()
    assert gradcheck(lambda x: pair(name)[0](x, scale=0.5), x)


@pytest.mark.parametrize("kind", ["bool", "added", "causal"])
def test_gradcheck_of_masks(kind):
    x, mask = make(4, 7, torch.float64, "cpu").requires_grad_(), torch.randn(4, 7, dtype=torch.float64)
    options = {"bool": {"mask": mask > 0}, "added": {"mask": mask}, "causal": {"causal": True}}[kind]
    assert gradcheck(lambda x: softmax(x, **options), x)


@every_dtype
@every_name
@pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS.keys())
def test_gradients_that_autograd_makes(device, scalar, name, dtype):
    check_scalar_gradients(*pair(name), (make(9, 64, dtype, device),), scalar, least=1.0)  # a sum has none


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_an_added_mask_of_another_dtype_is_promoted(device, dtypes):
    x, mask = make(3, 64, dtypes[0], device), torch.randn(64, device=device).to(dtypes[1])
    assert softmax(x, mask).dtype == torch.float32
    assert_same(softmax(x, mask), softmax(x.float(), mask.float()))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (3, 0), (2, 1, 2, 1, 6)], ids=str)
@every_name
def test_any_leading_shape(device, shape, name):
    x = torch.randn(shape, device=device)
    y = pair(name)[0](x)
    assert y.is_contiguous() and y.shape == x.shape
    torch.testing.assert_close(y, pair(name)[1](x))


ERRORS = {
    "x must be float32, float16, bfloat16.* got Int": lambda x: softmax(x.int()),
    "x must have at least one dimension": lambda x: log_softmax(x[0, 0]),
    "x must have at least two dimensions for a causal mask": lambda x: softmax(x[0], causal=True),
    r"mask must have a shape that broadcasts to that of x, \[2, 8\], got \[3, 8\]": lambda x: softmax(
        x, x.new_ones(3, 8)
    ),
    r"mask must have a shape that broadcasts to that of x, \[2, 8\], got \[1, 2, 8\]": lambda x: softmax(x, x[None]),
    "mask must be Bool or have the dtype of x, Float, got Int": lambda x: softmax(x, x.int()),
    "mask must not require a gradient": lambda x: softmax(x, x.clone().requires_grad_()),
    r"grad_y must have the shape of y, \[2, 8\], got \[1, 8\]": lambda x: _op.softmax_backward(x[:1], x, 1.0),
    "grad_y must have the dtype of y, Float, got Half": lambda x: _op.log_softmax_backward(x.half(), x, 1.0),
}
_op = torch.ops.llmkernels


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises(RuntimeError, match="(log_)?softmax(_backward)?: " + message):
        call(torch.ones(2, 8, device=device))


def exponentials(x):
    """e^x as the kernels compute it in float32: the gradient of log_softmax where that of all but one column is 0."""
    y, grad_y = torch.zeros(2, x.numel() + 1, device=x.device)
    y[1:], grad_y[0] = x, 1
    return -torch.ops.llmkernels.log_softmax_backward(grad_y[None], y[None], 1.0)[0, 1:]


@pytest.mark.parametrize(
    "first, last",
    [
        (-1e-3, 1e-3),
        (-1, 1),
        (-20, 20),
        (-86.98, -20),
        (-87.5, -86.9),
        (-110, -87.3),
        (20, 88.7),
        (88.7, 88.8),
        (88, 1e4),
    ],
)
def test_exponential(device, first, last):
    """Over its whole domain: the units in the last place that device/ptx.cuh and cpu/exponential.h in csrc promise."""
    x = torch.linspace(first, last, 1 << 20, dtype=torch.float64).float()
    found, exact = exponentials(x.to(device)).cpu().double(), x.double().exp()
    if device == "cpu":
        allowed, smallest = torch.full_like(exact, 1.3), -86.99
    else:
        allowed, smallest = 2 + 1.25 * x.double().abs(), -87.3365
    unit = torch.exp2(exact.log2().floor() - 23)
    largest = torch.finfo(torch.float32).max
    assert (found[exact > largest * (1 + 1e-5)] == torch.inf).all()
    assert (found[x < smallest - 1e-3] == 0).all()
    normal = (x > smallest + 1e-3) & (exact < largest * (1 - 1e-5))
    assert ((found - exact).abs() <= allowed * unit)[normal].all()
    between = ~normal & (exact < 1)
    assert ((found == 0) | ((found - exact).abs() <= allowed * unit))[between].all()


def test_exponential_of_special_values(device):
    x = torch.tensor([-torch.inf, -3e38, -104.0, -0.0, 0.0, 1e-40, -1e-40, 3e38, torch.inf, torch.nan], device=device)
    found = exponentials(x).tolist()
    assert found[:9] == [0, 0, 0, 1, 1, 1, 1, torch.inf, torch.inf]
    assert found[9] != found[9]
