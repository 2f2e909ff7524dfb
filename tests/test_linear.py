"""The linear ops: accuracy, layouts, rounding, gradients, dtypes, modules, errors."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

import llmkernels
import oracles
from linear_cases import (
    SHAPES,
    add,
    compare,
    eager_add,
    eager_glu,
    eager_linear,
    eager_norm_glu,
    eager_norm_linear,
    every_dtype,
    every_m,
    every_narrow_dtype,
    every_option,
    make,
)
from llmkernels import linear, nn, rms_norm_linear
from oracles import assert_same, check, laid_out, scaled_rows

_op = torch.ops.llmkernels


@every_dtype
@pytest.mark.parametrize("device, m, n, k", SHAPES)
def test_forward(device, m, n, k, dtype):
    x, norm_weight, weight, bias = make(m, n, k, dtype, device)
    compare(linear, F.linear, (x, weight, bias))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    compare(add, eager_add, (torch.randn_like(F.linear(x, weight)), x, weight))
    if n % 2 == 0:
        compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight))


@every_dtype
@every_m
@every_option
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_norm_options(device, m, options, weighted, dtype):
    x, norm_weight, weight, bias = make(m, 24, 136, dtype, device)
    norm_weight = norm_weight if weighted else None
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias), **options)
    compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight), **options)


@every_dtype
@every_m
@pytest.mark.parametrize("activation", oracles.ACTIVATIONS)
@pytest.mark.parametrize("n, k", [(24, 136), (262, 72)])
def test_gated_activations(device, m, n, k, activation, dtype):
    x, norm_weight, weight, _ = make(m, n, k, dtype, device)
    x, weight = x * 2, weight * 2  # gates from about -8 to 8
    compare(_op.glu_linear, eager_glu, (x, weight), activation=activation)
    compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight), activation=activation)


@every_dtype
@every_m
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no_bias"])
def test_alpha(device, m, biased, dtype):
    x, _, weight, bias = make(m, 24, 136, dtype, device, bias=biased)
    residual = torch.randn(m, 24, device=device).to(dtype)
    for alpha in (0.22, -3.0, 0.0):
        compare(partial(add, alpha=alpha), partial(eager_add, alpha=alpha), (residual, x, weight, bias))


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
@pytest.mark.parametrize("n, k", [(4608, 512), (8192, 8456), (37888, 512), (50001, 200), (73920, 512), (80000, 512)])
def test_tall_weights(m, n, k, dtype):
    """Output tiles of two boxes, blocks with several tiles, MMA tiles of wgmma that cross from one box to the next.

    SwiGLU of 73920 rows: several tiles for each block, with partial sums in the memory of the ring.
    """
    x, norm_weight, weight, bias = make(m, n, k, dtype, "cuda")
    compare(linear, F.linear, (x, weight, bias))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    compare(add, eager_add, (torch.randn(m, n, device="cuda").to(dtype), x, weight, bias))
    if n % 2 == 0:
        compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight))


@pytest.mark.gpu
@every_narrow_dtype
@pytest.mark.parametrize(
    "n, k",
    [(2, 264), (16000, 40), (9730, 896), (262, 2568), (40002, 2056), (130, 14344), (130, 20480),
     (130, 20488),
     *(pytest.param(n, k, marks=pytest.mark.sanitizer)  # more k tiles than stages
       for n, k in ((1154, 896), (6002, 2008), (4608, 3584), (1002, 5128), (1000, 10248), (130, 14336)))],
)  # fmt: skip
def test_one_token(n, k, dtype):
    """gemv.cu: every number of vectors per lane, 1 to 8 groups of warps, K that ends anywhere in a warp's slice, more
    rows than threads."""
    x, norm_weight, weight, bias = make(1, n, k, dtype, "cuda")
    compare(linear, F.linear, (x, weight, bias))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    compare(add, eager_add, (torch.randn(1, n, device="cuda").to(dtype), x, weight, bias))
    compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight))


@pytest.mark.gpu
@every_m
@pytest.mark.parametrize("k", [72, 200, 3080, 6152])
def test_what_was_in_shared_memory_does_not_matter(m, k):
    x, _, weight, _ = make(m, 264, k, torch.bfloat16, "cuda")
    ours = partial(_op.linear, in_step=True)  # and not cuBLAS
    expected = ours(x, weight)
    for columns in (2048, 8192):
        nan = torch.full((4096, columns), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert ours(nan[:m], nan).isnan().all()
        assert_same(ours(x, weight), expected)
    assert expected.isfinite().all()


@pytest.mark.gpu
@every_m
def test_a_vocabulary(m):
    x, norm_weight, weight, _ = make(m, 152064, 256, torch.bfloat16, "cuda", bias=False)
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight))


@every_narrow_dtype
@every_m
@pytest.mark.parametrize("k", [200, 8456])
def test_one_rounding(device, m, k, dtype):
    """Small integers: every sum is exact, so results are bitwise equal."""
    if m > 16 and k > 256:
        pytest.skip("cuBLAS may split such a K and round the parts")
    x = torch.randint(-4, 5, (m, k), device=device).to(dtype)
    weight = torch.randint(-4, 5, (36, k), device=device).to(dtype)
    bias, residual = (torch.randint(-9, 9, s, device=device).to(dtype) / 8 for s in ((36,), (m, 36)))
    exact = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    assert_same(linear(x, weight, bias), exact)
    assert_same(add(residual, x, weight, bias), residual + exact)
    assert_same(add(residual, x, weight, bias, alpha=0.3), residual + exact * 0.3)


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
        compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight))
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


@every_m
@pytest.mark.parametrize("size", [0, 2**-20, 2**-10, 1, 30, 1e4])
def test_norm_weights_of_any_size_in_float16(device, m, size):
    x, norm_weight, weight, bias = make(m, 24, 136, torch.float32, device)
    inputs = [t.half() for t in (x, norm_weight.clamp(-1, 1) * size, weight / 32, bias)]
    compare(rms_norm_linear, eager_norm_linear, inputs)
    compare(rms_norm_linear, eager_norm_linear, (inputs[0] / 64, *inputs[1:]))


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
    if device == "cpu":  # PyTorch multiplies there: with AMX, NaN of a row reaches other rows
        touched |= F.linear(x, weight, bias).isnan()
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
    """Outputs and gradients have eager's dtypes, and its values up to rounding."""
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
    r"linear_add_: residual must have shape \[2, 4\] .* got \[2, 8\]": lambda x, w, b: _op.linear_add_(x.clone(), x, w),
    r"rms_norm_glu_linear: weight must have an even number of rows.* got shape \[3, 8\]": lambda x, w, b: (
        _op.rms_norm_glu_linear(x, None, w[:3])
    ),
    "glu_linear: activation must be 'silu', .* got 'relu6'": lambda x, w, b: _op.glu_linear(x, w, "relu6"),
    "rms_norm_linear: squares must be given with scaled": lambda x, w, b: _op.rms_norm_linear(x, None, w, scaled=x),
    r"rms_norm_linear: scaled must be contiguous, of shape \[2, 8\] .* got \[1, 8\]": lambda x, w, b: (
        _op.rms_norm_linear(x, None, w, scaled=x[:1], squares=x.new_zeros(2, 64))
    ),
    r"linear_add_scale_: next_weight must have shape \[any, 4\] .* got \[4, 8\]": lambda x, w, b: _op.linear_add_scale_(
        x.new_zeros(2, 4), x, w, b, w
    ),
    r"linear_add_scale_: next_weight must have an even number of rows.* got shape \[3, 4\]": lambda x, w, b: (
        _op.linear_add_scale_(x.new_zeros(2, 4), x, w, b, w[:3, :4], next_glu=True)
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
    compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight))
    compare(add, eager_add, (torch.randn(m, 130, device="cuda").bfloat16(), x, weight, bias))


@pytest.mark.parametrize("module", ["linear", "rms_norm_linear", "int8_linear"])
def test_backward_under_autocast_of_a_forward_without(module):
    """The gradients are those of the forward, in its dtypes."""
    weight, norm_weight = torch.randn(8, 16), torch.ones(16)
    ways = {
        "linear": lambda x, w: linear(x, w),
        "rms_norm_linear": lambda x, w: rms_norm_linear(x, norm_weight, w),
        "int8_linear": lambda x, w: llmkernels.int8_linear(x, *llmkernels.int8_quantize(w.detach())),
    }
    grads = []
    for enabled in (True, False):
        x, w = torch.ones(3, 16).mul(0.3).requires_grad_(), weight.clone().requires_grad_()
        y = ways[module](x, w)
        with torch.autocast("cpu", enabled=enabled):
            y.square().sum().backward()
        grads.append([t.grad for t in (x, w) if t.grad is not None])
    assert_same(*grads)


def test_autocast_of_a_cpu_leaves_meta_tensors_alone():
    with torch.autocast("cpu"):
        assert linear(torch.ones(2, 8, device="meta"), torch.ones(4, 8, device="meta")).dtype == torch.float32
