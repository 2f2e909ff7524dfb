"""int8_quantize and int8_linear: accuracy, layouts, every number of int8, gradients, errors."""

import ctypes

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

from linear_cases import compare, eager_linear, kernels, make
from llmkernels import _library, explain, int8_linear, int8_quantize
from oracles import DEVICES, DTYPES, LAYOUTS, assert_same, laid_out

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_narrow_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
every_device = pytest.mark.parametrize("device", DEVICES)
EVERY_M = [1, 2, 3, 8, 9, 15, 16, 17, 64]


@pytest.fixture(params=[False] + [True] * ("cuda" in DEVICES), ids=lambda forced: "sm80" if forced else "route")
def forced(request):
    """Whether one token takes the kernel for more, too."""
    if not request.param:
        yield False
        return
    force = ctypes.CDLL(str(_library.PATH)).llmk_force_linear_sm80
    force(1)
    yield True
    force(0)


def eager(x, weight, scale, bias=None):
    wide = weight.to(torch.promote_types(scale.dtype, torch.float32)) * scale[:, None]
    return eager_linear(x, wide.to(x.dtype), bias)


def operands(m, n, k, dtype, device, bias=True):
    x, _, weight, bias = make(m, n, k, dtype, device, bias)
    return x, *int8_quantize(weight), bias


# The product.


@every_dtype
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("m", EVERY_M)
@pytest.mark.parametrize("n, k", [(24, 64), (7, 80), (33, 72), (130, 33), (1, 1)])
@every_device
def test_linear(device, m, n, k, biased, dtype):
    compare(int8_linear, eager, operands(m, n, k, dtype, device, biased))


@pytest.mark.gpu
@every_narrow_dtype
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(
    "n, k",
    # Fewer k tiles than warps, K and columns that fill no tile, every height of a tile, blocks with several tiles;
    # every number of vectors per lane of gemv.
    [(2, 16), (36, 208), (896, 896), (1002, 1104), (3584, 3584), (5002, 464), (37888, 272), (520, 18944),
     (130, 20480), (130, 20496)],
)  # fmt: skip
def test_kernels(forced, m, n, k, dtype):
    pytest.importorskip("llmkernels._C")
    x, weight, *_ = inputs = operands(m, n, k, dtype, "cuda")
    compare(int8_linear, eager, inputs)
    names = [name for name in kernels(lambda: int8_linear(*inputs)) if "llmk::" in name]
    variant = "sm80" if forced else explain("int8_linear", x.shape, weight.shape, dtype=dtype).variant
    assert len(names) == 1 and {"gemv": "gemv_kernel", "sm80": "linear_sm80_kernel"}[variant] in names[0]


@pytest.mark.gpu
@every_narrow_dtype
def test_what_the_kernels_do_not_take_is_dequantized(dtype):
    for m, k in ((17, 64), (4, 72), (1, 33)):
        inputs = operands(m, 24, k, dtype, "cuda")
        assert not any(
            "linear_sm80" in name or "gemv_kernel<" in name for name in kernels(lambda i=inputs: int8_linear(*i))
        )


@every_device
@every_dtype
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("k", [256, 272])
def test_every_number(forced, device, m, k, dtype):
    """Each row of x picks one column of the weight, so the result is exact."""
    numbers = torch.arange(-128, 128, device=device)
    weight = torch.stack([numbers.roll(i) for i in range(24)]).repeat(1, 2)[:, :k].to(torch.int8)
    scale = 2.0 ** torch.arange(-3, 3, device=device).repeat(4)
    for first in range(0, k, m):
        columns = torch.arange(first, first + m, device=device) % k
        x = F.one_hot(columns, k).to(dtype)
        assert_same(int8_linear(x, weight, scale), (weight * scale[:, None])[:, columns].t().to(dtype))


@every_device
@pytest.mark.parametrize("m", [1, 2, 16])
def test_each_row_has_its_scale(device, m):
    scale = torch.arange(1.0, 38.0, device=device)
    y = int8_linear(torch.ones(m, 64, device=device).half(), torch.ones(37, 64, device=device).to(torch.int8), scale)
    assert_same(y, (64 * scale).half().expand(m, 37))


@every_device
@every_dtype
def test_leading_dimensions(device, dtype):
    x, *others = operands(12, 24, 64, dtype, device)
    expected = int8_linear(x, *others)
    assert_same(int8_linear(x.view(3, 4, 64), *others), expected.view(3, 4, 24))
    assert_same(int8_linear(x[0], *others), int8_linear(x[:1], *others)[0])


@every_device
@every_narrow_dtype
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, m, layout, dtype):
    x, weight, scale, bias = operands(m, 24, 64, dtype, device)
    placed = laid_out(x, layout)
    compare(int8_linear, eager, (placed, weight, scale, bias))
    if layout not in ("expanded", "size_one"):
        compare(int8_linear, eager, (x, laid_out(weight, layout), scale, bias))
    apart = torch.stack((scale, scale), 1)[:, 0]
    assert_same(int8_linear(x, weight, apart, bias), int8_linear(x, weight, scale, bias))


@every_device
@every_dtype
@pytest.mark.parametrize("m, n, k", [(0, 24, 64), (4, 0, 64), (4, 24, 0), (0, 0, 0)])
def test_empty(device, m, n, k, dtype):
    x, weight = torch.ones(m, k, device=device, dtype=dtype), torch.ones(n, k, device=device, dtype=torch.int8)
    bias = torch.ones(n, device=device, dtype=dtype)
    assert_same(int8_linear(x, weight, torch.ones(n, device=device), bias), bias.expand(m, n))


@every_device
@pytest.mark.parametrize("m", [1, 4, 16])
def test_not_a_number_stays_in_its_row(device, m):
    x, weight, scale, _ = operands(m, 528, 144, torch.bfloat16, device, bias=False)
    expected = int8_linear(x, weight, scale)
    x[m // 2] = float("nan")
    found = int8_linear(x, weight, scale)
    assert found[m // 2].isnan().all()
    assert_same(found[: m // 2], expected[: m // 2])
    assert_same(found[m // 2 + 1 :], expected[m // 2 + 1 :])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 4, 17])
def test_in_a_graph(m):
    inputs = operands(m, 48, 64, torch.bfloat16, "cuda")
    expected = int8_linear(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = int8_linear(*inputs)
    found.zero_()
    graph.replay()
    assert_same(found, expected)


def test_autocast():
    x, weight, scale, bias = operands(5, 24, 64, torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        y = int8_linear(x, weight, scale, bias)
    assert_same(y, int8_linear(x.bfloat16(), weight, scale, bias.bfloat16()))


def test_float64_takes_the_scale_as_it_is():
    x, weight, scale, bias = operands(5, 24, 64, torch.float64, "cpu")
    assert_same(int8_linear(x, weight, scale, bias), eager(x, weight, scale.double(), bias))


# Gradients.


@every_device
@every_dtype
@pytest.mark.parametrize("m", [1, 5, 20])
def test_gradients(device, m, dtype):
    x, weight, scale, bias = operands(m, 24, 64, dtype, device)
    grad_y = torch.randn(m, 24, device=device).to(dtype)
    found = []
    for function in (int8_linear, eager):
        inputs = x.clone().requires_grad_(), bias.clone().requires_grad_()
        found.append(torch.autograd.grad(function(inputs[0], weight, scale, inputs[1]), inputs, grad_y))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck():
    x, weight, scale, bias = operands(3, 5, 9, torch.float64, "cpu")
    assert gradcheck(lambda x, bias: int8_linear(x, weight, scale, bias), (x.requires_grad_(), bias.requires_grad_()))
    assert gradcheck(lambda x: int8_linear(x, weight, scale), x[0].detach().requires_grad_())


def test_a_scale_has_no_gradient():
    x, weight, scale, _ = operands(3, 5, 9, torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="int8_linear: weight_scale must not require a gradient"):
        int8_linear(x, weight, scale.requires_grad_())
    with torch.no_grad():
        int8_linear(x, weight, scale)


# Quantization.


@every_device
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_quantization(device, dtype):
    weight = torch.randn(33, 77, device=device).to(dtype)
    q, scale = int8_quantize(weight)
    assert (q.dtype, scale.dtype, q.shape, scale.shape) == (torch.int8, torch.float32, weight.shape, (33,))
    assert_same(scale, weight.float().abs().amax(1) / 127)
    assert (q.abs().amax(1) == 127).all()
    error = (q.double() * scale[:, None].double() - weight.double()).abs()
    assert (error <= 0.5001 * scale[:, None]).all()


def test_quantization_of_numbers_that_are_not_ordinary():
    inf, nan = float("inf"), float("nan")
    weight = torch.tensor([[0.0, 0.0, 0.0], [1.0, inf, -1.0], [nan, 1.0, 0.0], [1e-44, 0.0, 0.0], [-5.0, 5.0, 0.1]])
    q, scale = int8_quantize(weight)
    assert scale[0] == 1 and not q[0].any()
    wide = q.float() * scale[:, None]
    assert wide[1].isnan().all() and wide[2].isnan().all()
    assert wide[3:].isfinite().all()
    assert q[4].tolist() == [-127, 127, 3]
    q, scale = int8_quantize(torch.ones(2, 0))
    assert q.shape == (2, 0) and (scale == 1).all()


# Errors.


ONES, INT8, SCALE = torch.ones(3, 8), torch.ones(5, 8, dtype=torch.int8), torch.ones(5)
ERRORS = {
    r"int8_linear: x must be float32, float16, bfloat16.* got Int": lambda: int8_linear(ONES.int(), INT8, SCALE),
    r"int8_linear: x must have at least one dimension": lambda: int8_linear(ONES[0, 0], INT8, SCALE),
    r"int8_linear: weight must be int8, got Float": lambda: int8_linear(ONES, ONES, SCALE),
    r"int8_linear: weight must be int8, got Byte": lambda: int8_linear(ONES, INT8.to(torch.uint8), SCALE),
    r"int8_linear: weight must have shape \[N, 8\] \(x.size\(-1\)\), got \[5, 4\]":
        lambda: int8_linear(ONES, INT8[:, :4], SCALE),
    r"int8_linear: weight_scale must be float32, got Half": lambda: int8_linear(ONES, INT8, SCALE.half()),
    r"int8_linear: weight_scale must have shape \[5\] \(weight.size\(0\)\), got \[5, 1\]":
        lambda: int8_linear(ONES, INT8, SCALE[:, None]),
    r"int8_linear: bias must have the dtype of x, Float, got Half":
        lambda: int8_linear(ONES, INT8, SCALE, SCALE.half()),
    r"int8_linear: bias must have shape \[5\] \(weight.size\(0\)\), got \[3\]":
        lambda: int8_linear(ONES, INT8, SCALE, SCALE[:3]),
    r"int8_quantize: weight must be float32, .*, got torch.int8": lambda: int8_quantize(INT8),
    r"int8_quantize: weight must be float32, float16, bfloat16 or float64, got torch.float8_e4m3fn":
        lambda: int8_quantize(ONES.to(torch.float8_e4m3fn)),
    r"int8_quantize: weight must have shape \[N, K\], got \[8\]": lambda: int8_quantize(ONES[0]),
    r"int8_quantize: weight must not require a gradient": lambda: int8_quantize(ONES.clone().requires_grad_()),
}  # fmt: skip


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(message, call):
    with pytest.raises(RuntimeError, match=message):
        call()
