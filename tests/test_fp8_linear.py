"""fp8_linear: accuracy, layouts, what torch's own product makes of quantized tensors; errors of all
ops of FP8."""

import pytest
import torch
from torch.library import opcheck

from llmkernels import fp8_linear, fp8_quantize, rms_norm_fp8_quantize, swiglu_fp8_quantize
from oracles import DEVICES, DTYPES, LAYOUTS, assert_same, laid_out
from test_fp8 import FORMATS

has_products = "cuda" in DEVICES and torch.cuda.get_device_capability() >= (8, 9)
devices_with_products = pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * has_products)


def operands(m, n, k, device, formats=(torch.float8_e4m3fn, torch.float8_e4m3fn), bias=None):
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device) / max(k, 1) ** 0.5
    (q, s), (w, t) = (fp8_quantize(y, fp8_dtype=f) for y, f in zip((x, weight), formats, strict=True))
    return (q, w, s, t, *(() if bias is None else (torch.randn(n, device=device).to(bias),)))


def check_linear(found, x, weight, x_scale, weight_scale, bias=None):
    exact = (x.double() * x_scale) @ (weight.double() * weight_scale).t()
    size = (x.double() * x_scale).abs() @ (weight.double() * weight_scale).abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert found.shape == exact.shape and found.is_contiguous()
    rounding = torch.finfo(found.dtype).eps / 2 * exact.abs()
    of_sum = 2e-6 if found.device.type == "cpu" else 2e-4  # tensor cores add up groups of products with fewer bits
    error = (found.double() - exact).abs()
    assert (error <= 1.01 * rounding + of_sum * size).all(), f"largest error {error.max():.3g}"


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    "m, n, k", [(1, 16, 16), (5, 64, 128), (7, 33, 99), (16, 1, 7), (300, 272, 3584), (2, 1300, 3584), (2, 5, 1)]
)
@devices_with_products
def test_linear(device, m, n, k, biased, out_dtype):
    arguments = operands(m, n, k, device, bias=out_dtype if biased else None)
    check_linear(fp8_linear(*arguments, out_dtype=out_dtype), *arguments)


@devices_with_products
@pytest.mark.parametrize("formats", [FORMATS, FORMATS[::-1]], ids=["e4m3_e5m2", "e5m2_e4m3"])
def test_linear_of_two_formats(device, formats):
    arguments = operands(9, 32, 64, device, formats)
    check_linear(fp8_linear(*arguments), *arguments)


def test_linear_of_two_e5m2():
    arguments = operands(9, 32, 64, "cpu", [torch.float8_e5m2] * 2)
    check_linear(fp8_linear(*arguments), *arguments)


@pytest.mark.gpu
def test_linear_of_two_e5m2_is_refused():
    with pytest.raises(RuntimeError, match="fp8_linear: weight must be float8_e4m3fn where x is float8_e5m2"):
        fp8_linear(*operands(9, 32, 64, "cuda", [torch.float8_e5m2] * 2))


@pytest.mark.gpu
@pytest.mark.skipif(has_products, reason="has products of FP8")
def test_linear_on_an_old_gpu():
    with pytest.raises(RuntimeError, match=r"fp8_linear: products of FP8 need a GPU of compute capability 8\.9"):
        fp8_linear(*operands(9, 32, 64, "cuda"))


@devices_with_products
@pytest.mark.parametrize("m, n, k", [(0, 16, 16), (3, 0, 16), (3, 16, 0)])
def test_linear_of_nothing(device, m, n, k):
    x, weight = (torch.zeros(size, k, device=device).to(torch.float8_e4m3fn) for size in (m, n))
    bias = torch.randn(n, device=device).bfloat16()
    scales = torch.ones(m, 1, device=device), torch.ones(n, 1, device=device)
    y = fp8_linear(x, weight, *scales, bias)
    assert_same(y, bias.expand(m, n))


@devices_with_products
@pytest.mark.parametrize("layout", [*LAYOUTS, "batched"])
def test_layouts_of_the_linear(device, layout):
    x, weight, x_scale, weight_scale, bias = operands(12, 48, 96, device, bias=torch.bfloat16)
    expected = fp8_linear(x, weight, x_scale, weight_scale, bias)

    def assert_close(found, expected):  # cuBLASLt may take another kernel for other strides
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)

    if layout == "batched":
        found = fp8_linear(x.view(3, 4, 96), weight, x_scale.view(3, 4, 1), weight_scale, bias)
        assert found.shape == (3, 4, 48)
        assert_close(found.view(12, 48), expected)
        return

    def moved(t):  # FP8 has few ops
        return laid_out(t.view(torch.uint8), layout).view(t.dtype) if t.element_size() == 1 else laid_out(t, layout)

    rows = 1 if layout == "size_one" else 12
    first = 0 if layout in ("expanded", "size_one") else slice(None)
    placed = moved(x)
    scale = x_scale[:1].expand(12, 1) if layout == "expanded" else moved(x_scale)[:rows]
    assert_close(fp8_linear(placed, weight, scale, weight_scale, bias), expected[first].expand(rows, 48))
    if layout not in ("expanded", "size_one"):
        assert_close(fp8_linear(x, moved(weight), x_scale, moved(weight_scale), bias), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not has_products, reason="no products of FP8")
@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_linear_is_torchs_product(use_fast_accum):
    x, weight, s, t, bias = operands(64, 128, 256, "cuda", bias=torch.bfloat16)
    expected = torch._scaled_mm(x, weight.t(), s, t.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum)
    assert_same(fp8_linear(x, weight, s, t, bias, use_fast_accum=use_fast_accum), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not has_products, reason="no products of FP8")
def test_torchs_products_take_the_results():
    x, weight = torch.randn(64, 256, device="cuda"), torch.randn(128, 256, device="cuda")
    q, s = fp8_quantize(x, granularity="tensor")
    w, t = fp8_quantize(weight, granularity="tensor")
    y = torch._scaled_mm(q, w.t(), s, t, out_dtype=torch.bfloat16)
    torch.testing.assert_close(y.float(), (q.float() * s) @ (w.float() * t).t(), rtol=0.01, atol=0.05)
    if torch.cuda.get_device_capability()[0] == 9 and int(torch.version.cuda.split(".")[0]) >= 13:
        (q, s), (w, t) = (fp8_quantize(z, granularity="block") for z in (x, weight))
        y = torch._scaled_mm(q, w.t(), s, t.t(), out_dtype=torch.bfloat16)
        wide = [a.float() * b.repeat_interleave(128, -1) for a, b in ((q, s), (w, t))]
        torch.testing.assert_close(y.float(), wide[0] @ wide[1].t(), rtol=0.01, atol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not has_products, reason="no products of FP8")
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_linear_in_a_graph(out_dtype):
    arguments = operands(32, 64, 128, "cuda", bias=out_dtype)
    expected = fp8_linear(*arguments, out_dtype=out_dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fp8_linear(*arguments, out_dtype=out_dtype)
    found.zero_()
    graph.replay()
    assert_same(found, expected)


@devices_with_products
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_opcheck_of_the_linear(device, out_dtype):
    """All but test_schema, which multiplies the inputs: torch has no product of FP8 numbers by elements."""
    arguments = *operands(5, 6, 160, device, bias=out_dtype), str(out_dtype).removeprefix("torch.")
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.llmkernels.fp8_linear.default, arguments, test_utils=checks)


def test_compiled(device):
    def layer(x, weight, scale):
        q, s = rms_norm_fp8_quantize(x, x[0])
        q, s = fp8_quantize(q.float() * s, granularity="token")
        return fp8_linear(q, weight, s, scale, out_dtype=torch.float32)

    if device == "cuda" and not has_products:
        pytest.skip("no products of FP8")
    torch._dynamo.reset()
    x = torch.randn(6, 32, device=device)
    weight, scale = fp8_quantize(torch.randn(48, 32, device=device))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 3):
        assert_same(compiled(x[:rows], weight, scale), layer(x[:rows], weight, scale))


# Errors.


E4M3 = torch.zeros(3, 8).to(torch.float8_e4m3fn)
ONES = torch.ones(3, 1)
ERRORS = {
    r"fp8_quantize: x must be float32, float16, bfloat16.* got Int": lambda: fp8_quantize(torch.ones(3, 8).int()),
    r"fp8_quantize: x must be float32, float16, bfloat16.* got Float8_e4m3fn": lambda: fp8_quantize(E4M3),
    r"fp8_quantize: x must have at least one dimension": lambda: fp8_quantize(torch.ones(())),
    r"swiglu_fp8_quantize: gate must have an even last dimension": lambda: swiglu_fp8_quantize(torch.ones(3, 7)),
    r"swiglu_fp8_quantize: up must have the shape of gate": lambda: swiglu_fp8_quantize(torch.ones(3, 8), ONES),
    r"rms_norm_fp8_quantize: weight must have shape \[8\]": lambda: rms_norm_fp8_quantize(torch.ones(3, 8), ONES[0]),
    r"fp8_linear: x must be float8_e4m3fn or float8_e5m2, got Float": lambda: fp8_linear(ONES, E4M3, ONES, ONES),
    r"fp8_linear: weight must have shape \[N, 8\]": lambda: fp8_linear(E4M3, E4M3[:, :4], ONES, ONES),
    r"fp8_linear: x_scale must have shape \[3, 1\] \(one per row of x\), got \[2, 1\]":
        lambda: fp8_linear(E4M3, E4M3, ONES[:2], ONES),
    r"fp8_linear: weight_scale must be float32, got Half": lambda: fp8_linear(E4M3, E4M3, ONES, ONES.half()),
    r"fp8_linear: bias must have the dtype of the result, BFloat16, got Float":
        lambda: fp8_linear(E4M3, E4M3, ONES, ONES, ONES[:, 0]),
}  # fmt: skip


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(message, call):
    with pytest.raises(RuntimeError, match=message):
        call()


def test_words_that_are_unknown():
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"granularity must be .*'tensor', got 'row'"):
        fp8_quantize(x, granularity="row")
    with pytest.raises(ValueError, match=r"fp8_dtype must be .* got torch\.float16"):
        rms_norm_fp8_quantize(x, fp8_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"out_dtype must be .* got torch\.float64"):
        fp8_linear(E4M3, E4M3, ONES, ONES, out_dtype=torch.float64)


def test_gradients_are_refused():
    x = torch.ones(3, 8, requires_grad=True)
    for call in (fp8_quantize, rms_norm_fp8_quantize, swiglu_fp8_quantize):
        with pytest.raises(RuntimeError, match=f"{call.__name__}: (x|gate) must not require a gradient"):
            call(x)
        with torch.no_grad():
            call(x)
    with pytest.raises(RuntimeError, match="fp8_linear: bias must not require a gradient"):
        fp8_linear(E4M3, E4M3, ONES, ONES, torch.ones(3, dtype=torch.bfloat16, requires_grad=True))
