"""linear, rms_norm_linear, linear_add_ and rms_norm_swiglu_linear: accuracy, layouts, rounding, gradients,
registration, execution on the GPU, errors."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import llmkernels
import oracles
from llmkernels import linear, nn, rms_norm_linear
from oracles import DEVICES, DTYPES, assert_accurate, assert_same, check, laid_out, scaled_rows

_op = torch.ops.llmkernels

ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 48, 49, 63, 64, 65, 255]
OUTS = [1, 7, 8, 127, 130, 3584]
COLS = [8, 16, 72, 3584, 18944]
# (device, m, n, k): on the CPU a cross, on the GPU every m with every n and with every k.
SHAPES = [("cpu", m, n, k) for m in (0, 1, 7, 65) for n in (1, 130) for k in (8, 72)]
SHAPES += [
    ("cuda", m, n, k) for m in ROWS for n in OUTS for k in COLS if "cuda" in DEVICES and (n == 130 or k in (72, 3584))
]
OPTIONS = {
    "llama": {},
    "gemma": {"weight_offset": 1.0, "cast_before_weight": False},
    "one_rounding": {"cast_before_weight": False},
    "another_offset": {"weight_offset": 0.5},
    "large_eps": {"eps": 0.5},
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_narrow_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
# Both sides of every boundary between kernels and plans: one token, tiles of 8, 16, 32, 48 and 64, PyTorch's own.
every_m = pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65])


def make(m, n, k, dtype, device, bias=True):
    """x, norm_weight, weight, bias; y is of the size of 1."""
    x = scaled_rows(m, k, dtype=dtype, device=device)
    weight = torch.randn(n, k, device=device).mul_(k**-0.5).to(dtype)
    norm_weight = torch.randn(k, device=device).to(dtype)
    return x, norm_weight, weight, torch.randn(n, device=device).to(dtype) if bias else None


def eager_linear(x, weight, bias):
    plain = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)  # cuBLAS takes the stride of a 1 literally
    return F.linear(plain, weight, bias)


def eager_norm_linear(x, norm_weight, weight, bias=None, **options):
    return F.linear(oracles.rms_norm(x, norm_weight, **options), weight, bias)


def eager_add(residual, x, weight, bias=None):
    return residual + F.linear(x, weight, bias)


def eager_swiglu(x, norm_weight, weight, **options):
    return oracles.swiglu(eager_norm_linear(x, norm_weight, weight, **options))


def add(residual, x, weight, bias=None):
    result = residual.clone()
    _op.linear_add_(result, x, weight, bias)
    return result


class Sizes(TorchFunctionMode):
    """In here F.linear returns the root of the sum of squares: how large its sums are, but for what cancels."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        return F.linear(*(t if t is None else t.square() for t in args)).sqrt()


def compare(ours, eager, inputs, **options):
    """`ours` is as accurate as `eager`, with errors relative to the largest value, or sum, in the row of the result."""
    inputs64 = [t if t is None else t.double() for t in inputs]
    exact = eager(*inputs64, **options)
    with Sizes():
        sizes = eager(*(t if t is None else t.abs() for t in inputs64), **options)
    scale = torch.maximum(exact.abs(), sizes).amax(-1, keepdim=True)
    assert_accurate(ours(*inputs, **options), eager(*inputs, **options), exact, scale)


@every_dtype
@pytest.mark.parametrize("device, m, n, k", SHAPES)
def test_forward(device, m, n, k, dtype):
    x, norm_weight, weight, bias = make(m, n, k, dtype, device)
    compare(linear, F.linear, (x, weight, bias))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    compare(add, eager_add, (torch.randn_like(F.linear(x, weight)), x, weight))
    if n % 2 == 0:
        compare(_op.rms_norm_swiglu_linear, eager_swiglu, (x, norm_weight, weight))


@every_dtype
@every_m
@every_option
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_norm_options(device, m, options, weighted, dtype):
    x, norm_weight, weight, bias = make(m, 24, 136, dtype, device)
    norm_weight = norm_weight if weighted else None
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias), **options)
    compare(_op.rms_norm_swiglu_linear, eager_swiglu, (x, norm_weight, weight), **options)


@every_m
def test_activations_that_float16_holds_but_their_scaled_values_would_not(device, m):
    x, norm_weight, weight, bias = make(m, 16, 64, torch.float32, device)
    x, norm_weight = x * (3e4 / x.abs().amax(-1, keepdim=True)), norm_weight.abs() + 5
    inputs = [t.half() for t in (x, norm_weight, weight, bias)]
    y = rms_norm_linear(*inputs)
    assert y.isfinite().all()
    compare(rms_norm_linear, eager_norm_linear, inputs)


@pytest.mark.gpu
@every_narrow_dtype
@every_m
@pytest.mark.parametrize("n, k", [(4608, 512), (8192, 8456), (37888, 512), (50001, 200), (80000, 512)])
def test_tall_weights(m, n, k, dtype):
    """Tiles of two boxes, blocks with several tiles, tiles of wgmma that begin in one box and end in the next."""
    x, norm_weight, weight, bias = make(m, n, k, dtype, "cuda")
    compare(linear, F.linear, (x, weight, bias))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    compare(add, eager_add, (torch.randn(m, n, device="cuda").to(dtype), x, weight, bias))
    if n % 2 == 0:
        compare(_op.rms_norm_swiglu_linear, eager_swiglu, (x, norm_weight, weight))


@pytest.mark.gpu
@every_m
def test_a_vocabulary(m):
    x, norm_weight, weight, _ = make(m, 152064, 256, torch.bfloat16, "cuda", bias=False)
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight))


@every_narrow_dtype
@every_m
@pytest.mark.parametrize("k", [200, 8456])
def test_one_rounding(device, m, k, dtype):
    """Small integers: every sum is exact, so the results are equal to the bit."""
    if m > 64 and k > 256:
        pytest.skip("cuBLAS may split such a K and round the parts")
    x = torch.randint(-4, 5, (m, k), device=device).to(dtype)
    weight = torch.randint(-4, 5, (36, k), device=device).to(dtype)
    bias, residual = (torch.randint(-9, 9, s, device=device).to(dtype) / 8 for s in ((36,), (m, 36)))
    exact = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    assert_same(linear(x, weight, bias), exact)
    assert_same(add(residual, x, weight, bias), residual + exact)


@every_dtype
@every_m
@pytest.mark.parametrize("which", ["x", "weight"])
@pytest.mark.parametrize("layout", oracles.LAYOUTS)
def test_layouts(device, which, m, layout, dtype):
    x, norm_weight, weight, bias = make(m, 24, 64, dtype, device)
    if which == "x":
        x = laid_out(x, layout)
    else:
        weight = laid_out(weight, layout)
        bias = bias[: len(weight)]
    compare(linear, eager_linear, (x, weight, bias))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    if len(weight) % 2 == 0:
        compare(_op.rms_norm_swiglu_linear, eager_swiglu, (x, norm_weight, weight))
    residual = torch.randn(len(x), len(weight), device=device).to(dtype)
    compare(add, lambda residual, *inputs: residual + eager_linear(*inputs), (residual, x, weight, bias))


@every_m
@pytest.mark.parametrize("layout", ["row_strided", "row_strided_aligned", "transposed", "offset", "every_other"])
def test_layouts_of_the_residual(device, m, layout):
    x, _, weight, bias = make(m, 24, 64, torch.bfloat16, device)
    residual = torch.randn(m, 24, device=device).bfloat16()
    expected = add(residual, x, weight, bias)
    view = laid_out(residual, layout)
    _op.linear_add_(view, x, weight, bias)
    oracles.assert_within_ulps(view.contiguous(), expected, ulps=1)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 0, 64), (2, 1, 2, 64)], ids=str)
def test_any_leading_shape(device, shape):
    _, norm_weight, weight, bias = make(1, 24, 64, torch.float32, device)
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    expected = eager_norm_linear(x, norm_weight, weight, bias)
    torch.testing.assert_close(rms_norm_linear(x, norm_weight, weight, bias), expected)


def test_no_columns(device):
    x, weight, bias = torch.randn(3, 0, device=device), torch.randn(5, 0, device=device), torch.randn(5, device=device)
    assert_same(linear(x, weight, bias), bias.expand(3, 5))


@every_narrow_dtype
@every_m
def test_special_values_stay_in_their_row(device, m, dtype):
    x, norm_weight, weight, bias = make(m, 24, 136, dtype, device)
    clean = linear(x, weight, bias)
    x[m // 2, 3], x[m - 1, 5] = float("nan"), float("inf")
    weight[7, 100] = float("nan")
    y = linear(x, weight, bias)
    touched = torch.zeros_like(y, dtype=torch.bool)
    touched[m // 2] = touched[m - 1] = touched[:, 7] = True
    assert_same(y[~touched], clean[~touched])
    assert y[m // 2].isnan().all() and y[:, 7].isnan().all() and not y[m - 1].isfinite().any()
    assert rms_norm_linear(x, norm_weight, weight, bias)[m // 2].isnan().all()


@pytest.mark.gpu
@every_m
@pytest.mark.parametrize("n", [7, 130, 1000])
def test_nothing_else_is_written(m, n):
    x, _, weight, bias = make(m, n, 72, torch.bfloat16, "cuda")
    around = torch.full((m + 2, n + 6), float("nan"), device="cuda", dtype=torch.bfloat16)
    residual = around[1:-1, 2 : n + 2]
    residual.zero_()
    _op.linear_add_(residual, x, weight, bias)
    compare(lambda *t: residual.contiguous(), F.linear, (x, weight, bias))
    assert around.isnan().sum() == around.numel() - m * n


# Gradients.


@every_option
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_gradcheck(options, weighted):
    x, norm_weight, weight, bias = make(3, 5, 7, torch.float64, "cpu")
    leaves = [t.requires_grad_() for t in (x, weight, bias, norm_weight)][: 3 + weighted]

    def function(x, weight, bias, norm_weight=None):
        return rms_norm_linear(x, norm_weight, weight, bias, **options)

    assert gradcheck(function, leaves)
    assert gradcheck(linear, leaves[:3])


@every_dtype
@pytest.mark.parametrize("m", [1, 9, 70])
def test_gradients(device, m, dtype):
    x, norm_weight, weight, bias = make(m, 24, 64, dtype, device)
    grad_outputs = [torch.randn(m, 24, device=device).to(dtype)]
    for ours, eager, inputs in (
        (linear, F.linear, (x, weight, bias)),
        (rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias)),
    ):
        check(ours, eager, inputs, grad_outputs=grad_outputs)


def test_gradients_that_are_not_wanted(device):
    inputs = make(3, 5, 16, torch.float32, device)
    for index, leaf in enumerate(inputs):
        grad = torch.autograd.grad(
            rms_norm_linear(*inputs[:index], leaf.requires_grad_(), *inputs[index + 1 :]).sum(), leaf
        )
        assert grad[0].shape == leaf.shape
        leaf.requires_grad_(False)


@pytest.mark.parametrize("scalar", oracles.SCALARS.values(), ids=oracles.SCALARS.keys())
def test_gradients_that_autograd_makes(device, scalar):
    inputs = make(9, 24, 64, torch.float32, device)
    oracles.check_scalar_gradients(rms_norm_linear, eager_norm_linear, inputs, scalar)


# Autocast.

AUTOCAST = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16_x": (torch.bfloat16, torch.float32),
    "float64": (torch.float64, torch.float64),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("m", [3, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_x, of_weights", AUTOCAST.values(), ids=AUTOCAST.keys())
def test_autocast_does_what_eager_does(device, of_x, of_weights, dtype, m, grad):
    """Outputs and gradients have eager's dtypes, and its numbers but for the roundings."""
    if device == "cuda" and of_x == torch.float64:
        pytest.skip("float64 is for the CPU")
    x, *weights = make(m, 24, 64, torch.float32, device)
    inputs = [t.to(of) for t, of in zip((x, *weights), (of_x, *[of_weights] * 3), strict=True)]
    for ours, eager, count in (
        (lambda x, _, weight, bias: linear(x, weight, bias), lambda x, _, weight, bias: F.linear(x, weight, bias), 0),
        (rms_norm_linear, eager_norm_linear, 1),
        (functional_module, eager_norm_linear, 1),
    ):
        results = []
        for function in (ours, eager):
            leaves = [t.detach().clone().requires_grad_(grad) for t in inputs]
            with torch.autocast(device, dtype):
                y = function(*leaves)
            results.append([y])
            if grad:
                used = [leaf for i, leaf in enumerate(leaves) if i != 1 or count]
                results[-1] += torch.autograd.grad(y.square().sum(), used)
        for a, b in zip(*results, strict=True):
            assert a.dtype == b.dtype
            eps = torch.finfo(torch.bfloat16 if torch.bfloat16 in (dtype, of_x) else dtype).eps
            eps = torch.finfo(a.dtype).eps if of_x == torch.float64 else eps
            torch.testing.assert_close(a, b, rtol=0, atol=4 * eps * b.abs().max().item())


def functional_module(x, norm_weight, weight, bias):
    module = nn.RMSNormLinear(weight.shape[1], weight.shape[0], device="meta")
    parameters = {"norm_weight": norm_weight, "weight": weight, "bias": bias}
    return torch.func.functional_call(module, parameters, (x,))


def test_autocast_under_compile(device):
    torch._dynamo.reset()
    x, norm_weight, weight, bias = make(5, 8, 16, torch.float32, device)

    def function(x):
        with torch.autocast(device, torch.bfloat16):
            return rms_norm_linear(x, norm_weight, weight, bias), linear(x, weight)

    for a, b in zip(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x), strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        torch.testing.assert_close(a, b)


# A norm_weight of another dtype.


@every_option
@pytest.mark.parametrize("of_x, of_norm", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_norm_weight_of_another_dtype(device, options, of_x, of_norm):
    x, norm_weight, weight, bias = make(5, 24, 64, torch.float32, device)
    x, norm_weight = x.to(of_x), norm_weight.to(of_norm)
    normed = llmkernels.rms_norm(x, norm_weight, **options)
    weight, bias = weight.to(normed.dtype), bias.to(normed.dtype)
    y, expected = rms_norm_linear(x, norm_weight, weight, bias, **options), F.linear(normed, weight, bias)
    assert y.dtype == expected.dtype
    tolerance = 2 * torch.finfo(y.dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(y, expected, rtol=0, atol=tolerance)
    wrong = torch.float32 if normed.dtype == torch.bfloat16 else torch.bfloat16
    for name, tensors in (("weight", (weight.to(wrong), bias)), ("bias", (weight, bias.to(wrong)))):
        expected = f"rms_norm_linear: {name} must have the dtype of rms_norm.*, {normed.dtype}, got {wrong}"
        with pytest.raises(RuntimeError, match=expected):
            rms_norm_linear(x, norm_weight, *tensors, **options)


# Registration and compilation.


def calls(device, dtype=torch.float32):
    x, norm_weight, weight, bias = make(6, 8, 16, dtype, device)
    x = x.view(2, 3, 16)
    residual = torch.randn(2, 3, 8, device=device).to(dtype)
    yield "linear", (x, weight)
    yield "linear", (x, weight, bias)
    yield "rms_norm_linear", (x, norm_weight, weight, bias)
    yield "rms_norm_linear", (x, None, weight, None, 1e-5, 1.0, False)
    yield "rms_norm_swiglu_linear", (x, norm_weight, weight)
    yield "linear_add_", (residual, x, weight, bias)


def test_opcheck(device):
    for dtype in (torch.float32, torch.bfloat16):
        for name, arguments in calls(device, dtype):
            opcheck(getattr(_op, name).default, arguments)
            if name in ("linear", "rms_norm_linear") and dtype == torch.float32:
                opcheck(
                    getattr(_op, name).default,
                    tuple(a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments),
                )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(device, dynamic):
    torch._dynamo.reset()
    x, norm_weight, weight, bias = make(5, 8, 16, torch.float32, device)

    def function(x):
        y = rms_norm_linear(x, norm_weight, weight, bias)
        _op.linear_add_(y, x, weight, bias)
        return y + linear(x, weight)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (5, 9):
        x = torch.randn(m, 16, device=device)
        torch.testing.assert_close(compiled(x), function(x))


# Execution on the GPU.


@pytest.mark.gpu
@every_m
@pytest.mark.parametrize("n, k", [(3584, 3584), (1000, 18944)])
def test_250_equal_reruns(m, n, k):
    x, norm_weight, weight, bias = make(m, n, k, torch.bfloat16, "cuda")
    residual = torch.randn(m, n, device="cuda").bfloat16()

    def run():
        normed = rms_norm_linear(x, norm_weight, weight, bias)
        return normed, add(residual, x, weight), _op.rms_norm_swiglu_linear(x, norm_weight, weight)

    first = run()
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(249):
        for a, b in zip(run(), first, strict=True):
            same &= (a == b).all()
    assert same


@pytest.mark.gpu
@every_m
def test_a_chain_of_overlapping_launches(m):
    """Each kernel begins while the one before it still runs, and must not read early what that one writes."""
    inputs = [make(m, 2048, 2048, torch.bfloat16, "cuda", bias=False) for _ in range(4)]

    def chain(synchronize):
        h = inputs[0][0].clone()
        if not synchronize:
            torch.cuda._sleep(10_000_000)  # about 5 ms, in which all launches are made
        for _, norm_weight, weight, _ in inputs * 2:
            h = rms_norm_linear(h, norm_weight, weight)
            if synchronize:
                torch.cuda.synchronize()
            _op.linear_add_(h, h.clone(), weight)
            if synchronize:
                torch.cuda.synchronize()
        return h

    expected = chain(True)
    for _ in range(20):
        assert_same(chain(False), expected)


@pytest.mark.gpu
@every_m
def test_side_stream(m):
    x, norm_weight, weight, bias = make(m, 512, 512, torch.bfloat16, "cuda")
    expected = rms_norm_linear(x, norm_weight, weight, bias)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        late.copy_(x)
        y = rms_norm_linear(late, norm_weight, weight, bias)
    stream.synchronize()
    assert_same(y, expected)


@pytest.mark.gpu
@every_m
def test_cuda_graph(m):
    x, norm_weight, weight, bias = make(m, 512, 768, torch.bfloat16, "cuda")
    residual = torch.zeros(m, 512, device="cuda", dtype=torch.bfloat16)

    def step():
        y = rms_norm_linear(x, norm_weight, weight, bias)
        _op.linear_add_(residual, x, weight, bias)
        return y, _op.rms_norm_swiglu_linear(x, norm_weight, weight)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(3):
        x.copy_(scaled_rows(m, 768, dtype=torch.bfloat16, device="cuda"))
        residual.normal_()
        start = residual.clone()
        graph.replay()
        replayed = [t.clone() for t in (*results, residual)]
        residual.copy_(start)
        assert_same(tuple(replayed), (*step(), residual))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_second_device_while_the_first_is_current():
    inputs = make(4, 256, 512, torch.bfloat16, "cuda:0")
    y = rms_norm_linear(*(t.to("cuda:1") for t in inputs))
    assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert_same(y.to("cuda:0"), rms_norm_linear(*inputs))


# The module.


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_module(device, offset):
    options = {"weight_offset": offset, "device": device}
    module = nn.RMSNormLinear(32, 24, eps=1e-5, **options)
    norm, layer = nn.RMSNorm(32, 1e-5, **options), torch.nn.Linear(32, 24, device=device)
    norm.load_state_dict({"weight": module.norm_weight})
    layer.load_state_dict({"weight": module.weight, "bias": module.bias})
    x = scaled_rows(3, 5, 32, device=device)
    torch.testing.assert_close(module(x), layer(norm(x)))
    torch.nn.init.normal_(module.norm_weight)
    module.reset_parameters()
    torch.testing.assert_close(module.norm_weight + offset, torch.ones(32, device=device))
    assert "32" in repr(module) and "eps=1e-05" in repr(module)


# Errors.

ERRORS = {
    "linear: x must be float32, float16, bfloat16.* got Int": lambda x, w, b: linear(x.int(), w),
    "linear: x must have at least one dimension": lambda x, w, b: linear(x[0, 0], w),
    r"linear: weight must have shape \[N, 8\] .* got \[8, 4\]": lambda x, w, b: linear(x, w.t().contiguous()),
    r"linear: weight must have shape \[N, 8\] .* got \[8\]": lambda x, w, b: linear(x, w[0]),
    "linear: weight must have the dtype of x, Float, got Half": lambda x, w, b: linear(x, w.half()),
    r"linear: bias must have shape \[4\] .* got \[3\]": lambda x, w, b: linear(x, w, b[:3]),
    r"rms_norm_linear: norm_weight must have shape \[8\] .* got \[4\]": lambda x, w, b: rms_norm_linear(x, b, w),
    r"linear_add_: residual must have shape \[2, 4\] .* got \[2, 8\]": lambda x, w, b: _op.linear_add_(x, x, w),
    r"rms_norm_swiglu_linear: weight must have an even number of rows.* got shape \[3, 8\]": lambda x, w, b: (
        _op.rms_norm_swiglu_linear(x, None, w[:3])
    ),
}


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises(RuntimeError, match=message):
        call(torch.ones(2, 8, device=device), torch.ones(4, 8, device=device), torch.ones(4, device=device))


def test_public_names():
    assert {"linear", "rms_norm_linear"} <= set(llmkernels.__all__)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("k", [72, 264, 8456])
@pytest.mark.parametrize("m", [1, 3, 9, 16, 17, 40, 64])
def test_every_kernel_path(m, k):
    x, norm_weight, weight, bias = make(m, 130, k, torch.bfloat16, "cuda")
    compare(linear, F.linear, (x, weight, bias))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    compare(_op.rms_norm_swiglu_linear, eager_swiglu, (x, norm_weight, weight))
    compare(add, eager_add, (torch.randn(m, 130, device="cuda").bfloat16(), x, weight, bias))


# Weights that are promised to be complete, and weights that are not.

CALLS = {
    "linear": lambda residual, x, norm_weight, weight: linear(x, weight),
    "rms_norm_linear": lambda residual, x, norm_weight, weight: rms_norm_linear(x, norm_weight, weight),
    "linear_add_": lambda residual, x, norm_weight, weight: _op.linear_add_(residual, x, weight) or residual,
    "rms_norm_swiglu_linear": lambda residual, *inputs: _op.rms_norm_swiglu_linear(*inputs),
}


@every_m
def test_settled_weights(device, m):
    x, norm_weight, weight, bias = make(m, 24, 136, torch.bfloat16, device)
    residual = torch.randn(m, 24, device=device).bfloat16()
    added = residual.clone()
    _op.linear_add_(added, x, weight, bias, settled=True)
    assert_same(added, add(residual, x, weight, bias))
    assert_same(linear(x, weight, bias, settled=True), linear(x, weight, bias))
    inputs = (x, norm_weight, weight, bias)
    assert_same(rms_norm_linear(*inputs, settled=True), rms_norm_linear(*inputs))
    inputs = (x, norm_weight, weight)
    assert_same(_op.rms_norm_swiglu_linear(*inputs, settled=True), _op.rms_norm_swiglu_linear(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_weights_that_the_kernel_before_has_just_written(call, m, captured):
    """That kernel takes long, lets the next one begin at once and leaves room for it; what it writes to is where the
    weights of the call before were."""
    n, k = 512, 64
    x = scaled_rows(m, k, dtype=torch.bfloat16, device="cuda")
    token, sources = make(1, 8, 1024, torch.bfloat16, "cuda")[0], []
    for _ in range(3):
        sources.append(make(1, k + n * k, 1024, torch.bfloat16, "cuda")[2])

    def chain(synchronize):
        results, places = [], set()
        for source, residual in zip(sources * 2, torch.zeros(6, m, n, dtype=x.dtype, device="cuda"), strict=True):
            written = linear(token, source)[0]
            if synchronize:
                torch.cuda.synchronize()
            results.append(call(residual, x, written[:k], written[k:].view(n, k)))
            places.add(written.data_ptr())
            del written
        assert len(places) < len(results)
        return torch.stack(results)

    expected = chain(True)
    assert not torch.equal(expected[0], expected[1])
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(False)
    for _ in range(10):
        if captured:
            graph.replay()
        else:
            torch.cuda._sleep(5_000_000)  # about 2.5 ms, in which all launches are made
            found = chain(False)
        assert_same(found, expected)
