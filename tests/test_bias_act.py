"""bias_gelu, relu2, bias_swiglu and bias_geglu."""

import math
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

import llmkernels
import oracles
from oracles import (
    DEVICES,
    DTYPES,
    LAYOUTS,
    SCALARS,
    SHAPES,
    assert_same,
    assert_within_ulps,
    check,
    check_scalar_gradients,
    differentiate,
    laid_out,
)


def named(name, **options):
    return tuple(partial(getattr(module, name), **options) for module in (llmkernels, oracles))


def packed(name, **options):
    """Of a packed [gate | up] and its bias."""

    def of(function):
        return lambda gate_up, bias=None: function(gate_up, None, bias)

    return tuple(map(of, named(name, **options)))


# By name: ours, eager, and how many matrices it takes, each with a bias.
FUNCTIONS = {
    "bias_gelu": (*named("bias_gelu"), 1),
    "bias_gelu_tanh": (*named("bias_gelu", approximate="tanh"), 1),
    "relu2": (*named("relu2"), 1),
    "bias_swiglu": (*named("bias_swiglu"), 2),
    "bias_geglu": (*named("bias_geglu"), 2),
    "bias_geglu_tanh": (*named("bias_geglu", approximate="tanh"), 2),
    "relu2_glu": (*named("glu", activation="relu2"), 2),
    "sigmoid": (*named("bias_act", activation="sigmoid"), 1),
    "silu": (*named("bias_act", activation="silu"), 1),
    "sigmoid_glu": (*named("glu", activation="sigmoid"), 2),
    "relu": (*named("bias_act", activation="relu"), 1),
    "relu_glu": (*named("glu", activation="relu"), 2),
}
# Those that are rounded once, by eager formula; without the cancellation of 1 + erf and of 1 + tanh.
ROUNDED_ONCE = {
    FUNCTIONS["bias_gelu"][1]: lambda x: 0.5 * x * torch.special.erfc(-x / math.sqrt(2)),
    FUNCTIONS["bias_gelu_tanh"][1]: lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    FUNCTIONS["silu"][1]: lambda x: x * torch.sigmoid(x),
    FUNCTIONS["sigmoid"][1]: torch.sigmoid,
}
PACKED = {
    "bias_swiglu": packed("bias_swiglu"),
    "bias_geglu": packed("bias_geglu"),
    "bias_geglu_tanh": packed("bias_geglu", approximate="tanh"),
    "relu2_glu": packed("glu", activation="relu2"),
    "sigmoid_glu": packed("glu", activation="sigmoid"),
}
every_packed = pytest.mark.parametrize("name", PACKED)
every_function = pytest.mark.parametrize("ours, eager, matrices", FUNCTIONS.values(), ids=FUNCTIONS.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(matrices, rows, cols, dtype, device):
    """Gates from the flat part of the activation to its linear part, then the biases."""
    inputs = [torch.randn(rows, cols, device=device).mul_(3).to(dtype) for _ in range(matrices)]
    return (*inputs, *(torch.randn(cols, device=device).to(dtype) for _ in range(matrices)))


def check_biased(ours, eager, inputs, matrices, grad_layout=None):
    """`check`, with errors relative to the size of the products, and for the biases of the sums of their squares."""
    grad_y = torch.randn_like(eager(*inputs))
    grad_y = laid_out(grad_y, grad_layout) if grad_layout else grad_y
    biases = list(inputs[matrices:]) + [None] * (2 * matrices - len(inputs))
    biased = [
        oracles.biased(x.double(), None if b is None else b.double()) for x, b in zip(inputs, biases, strict=False)
    ]
    gate, up = biased[0].abs(), biased[1].abs() if matrices == 2 else torch.ones_like(biased[0])
    value, slope = (gate.square(), 2 * gate) if "relu2" in str(eager) else (gate, torch.ones_like(gate))
    scales = [(value * up).amax(-1, keepdim=True)]
    terms = [grad_y.double().abs() * up * slope, grad_y.double().abs() * value][:matrices]
    scales += [t.amax(-1, keepdim=True) for t in terms]
    if len(grad_y):
        scales += [t.square().sum(0).sqrt().max() for t in terms[: len(inputs) - matrices]]
    else:
        scales += [None] * (len(inputs) - matrices)
    check(ours, eager, inputs, scales=scales, grad_outputs=[grad_y])


@every_dtype
@every_function
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward_and_backward(device, rows, cols, ours, eager, matrices, dtype):
    check_biased(ours, eager, make(matrices, rows, cols, dtype, device), matrices)


@every_dtype
@every_function
def test_without_biases(device, ours, eager, matrices, dtype):
    inputs = make(matrices, 65, 384, dtype, device)
    check_biased(ours, eager, inputs[:matrices], matrices)
    if matrices == 2:
        gate, up, _, up_bias = inputs
        alone = [partial(lambda f, gate, up, bias: f(gate, up, None, bias), f) for f in (ours, eager)]
        check(*alone, (gate, up, up_bias), scales=[torch.tensor(100.0, device=device)] * 4)
        assert_same(ours(gate, up), eager(gate, up) if device == "cuda" and dtype != torch.float32 else ours(gate, up))


@every_dtype
@every_function
def test_many_rows(device, ours, eager, matrices, dtype):
    """More than there are partial sums, vectors and single elements."""
    for cols in (24, 25):
        check_biased(ours, eager, make(matrices, 3001, cols, dtype, device), matrices)


# Rows that are not aligned, around one vector, a warp's, and a block's.
UNALIGNED = [*range(1, 10), 31, 33, 127, 255, 257, 1001, 2049, 4095, 4097]


@every_dtype
@pytest.mark.parametrize("name", ["bias_gelu", "bias_swiglu"])
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 3, cols) for cols in (9, 1001)]
    + [("cuda", rows, cols) for rows in (3, 300) for cols in UNALIGNED if "cuda" in DEVICES],
)
def test_row_lengths_that_are_not_aligned(device, rows, cols, name, dtype):
    ours, eager, matrices = FUNCTIONS[name]
    inputs = make(matrices, rows, cols, dtype, device)
    check_biased(ours, eager, inputs if rows > 3 or cols % 2 else inputs[:matrices], matrices)


@every_function
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rounds_where_eager_rounds(device, ours, eager, matrices, dtype):
    """Bitwise equal, except for few elements where the last bit of exp, tanh or erf changes a rounding."""
    inputs = [t.abs() for t in make(matrices, 257, 512, dtype, device)]  # where gelu has no cancellation
    assert_within_ulps(ours(*inputs), eager(*inputs), ulps=2, share=0.99)
    once = eager(*(t.float() for t in inputs)).to(dtype)
    some = 0.01 if "'sigmoid'" in str(eager) and matrices == 1 else 0.1  # which is flat
    if "'relu'" in str(eager) and matrices == 1:  # which is exact
        return
    assert (once != eager(*inputs)).double().mean() > some, "this test can't tell one rounding from two"


def assert_as_rounded(y, exact):
    normal = exact.abs() > 1e-30  # below, e^x has no digits left
    assert_within_ulps(y[normal], exact.to(y.dtype)[normal], ulps=1, share=0.98)


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_equals_eager_on_the_gpu(ours, eager, matrices, dtype):
    for cols in (127, 3584):
        inputs = make(matrices, 65, cols, dtype, "cuda")
        if eager in ROUNDED_ONCE:  # closer to the true value than eager
            exact = ROUNDED_ONCE[eager]((inputs[0] + inputs[1]).double())
            assert_as_rounded(ours(*inputs), exact)
        else:
            assert_same(ours(*inputs), eager(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gelu_of_every_number_there_is(dtype, approximate):
    """Rounded as the true value is, up to one unit in few cases, also where eager's 1 + erf cancels."""
    ours, eager, _ = FUNCTIONS["bias_gelu" if approximate == "none" else "bias_gelu_tanh"]
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(dtype)
    exact = ROUNDED_ONCE[eager](x.double())
    assert_as_rounded(ours(x), exact)
    torch.testing.assert_close(ours(x).double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7, equal_nan=True)


@every_dtype
@every_function
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, ours, eager, matrices, layout, dtype):
    inputs = list(make(matrices, 9, 96, dtype, device))
    inputs[0] = laid_out(inputs[0], layout)
    inputs[1:matrices] = [t[: len(inputs[0])] for t in inputs[1:matrices]]
    assert_same(ours(*inputs), ours(*(t.contiguous() for t in inputs)))
    check_biased(ours, eager, inputs, matrices, grad_layout=layout)
    inputs[matrices] = laid_out(inputs[matrices][None], "offset")[0]
    check_biased(ours, eager, inputs, matrices)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (3, 0), (2, 1, 2, 1, 6)], ids=str)
@every_function
def test_any_leading_shape(device, ours, eager, matrices, shape):
    rows, biases = torch.randn(matrices, *shape, device=device), torch.randn(matrices, shape[-1], device=device)
    y = ours(*rows, *biases)
    assert y.shape == shape and y.is_contiguous()
    torch.testing.assert_close(y, eager(*rows, *biases))


@every_dtype
@every_function
def test_special_values(device, ours, eager, matrices, dtype):
    values = torch.tensor([0.0, -0.0, 100, -100, 1e-7, torch.inf, torch.nan], device=device, dtype=dtype)
    inputs = (*(values[None] for _ in range(matrices)), *(torch.ones_like(values) for _ in range(matrices)))
    y, exact = ours(*inputs), eager(*(t.double() for t in inputs)).to(dtype)  # a square may be out of range
    torch.testing.assert_close(y.double(), exact.double(), equal_nan=True, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@every_function
def test_gradcheck(ours, eager, matrices):
    inputs = [t.requires_grad_() for t in make(matrices, 3, 5, torch.float64, "cpu")]
    assert gradcheck(ours, inputs)
    assert gradcheck(ours, inputs[:matrices])


@every_dtype
@pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS.keys())
@every_function
def test_gradients_that_autograd_makes(device, ours, eager, matrices, scalar, dtype):
    inputs = tuple(t / 2 for t in make(matrices, 9, 64, dtype, device))
    check_scalar_gradients(ours, eager, inputs, scalar)


@every_function
def test_what_is_frozen_gets_no_gradient(device, ours, eager, matrices):
    inputs = make(matrices, 70, 33, torch.float32, device)
    grad_y = torch.randn(70, 33, device=device)
    _, *expected = differentiate(ours, inputs, [grad_y])
    for index in range(len(inputs)):
        leaf = inputs[index].detach().clone().requires_grad_()
        y = ours(*inputs[:index], leaf, *inputs[index + 1 :])
        assert_same(torch.autograd.grad(y, leaf, grad_y)[0], expected[index])


@every_function
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_mixed_dtypes_compose_as_eager(device, ours, eager, matrices, dtype):
    inputs = list(make(matrices, 9, 64, dtype, device))
    inputs[-1] = inputs[-1].float()
    y = ours(*inputs)
    assert y.dtype == eager(*inputs).dtype
    torch.testing.assert_close(y, eager(*(t.float() for t in inputs)), rtol=1e-4, atol=1e-4)


# A packed [gate | up] has the bits of the halves, in any layout.


def check_packed(name, gate_up, bias):
    cols = gate_up.size(-1) // 2
    inputs, halves = [(gate_up,), gate_up.chunk(2, -1)], FUNCTIONS[name][0]
    if bias is not None:
        inputs = [(gate_up, bias), (*inputs[1], *bias.chunk(2))]
    grad_y = [torch.randn(*gate_up.shape[:-1], cols, device=gate_up.device).to(gate_up.dtype)]
    y, grad, *of_bias = differentiate(PACKED[name][0], inputs[0], grad_y)
    expected, grad_gate, grad_up, *of_halves = differentiate(halves, [t.contiguous() for t in inputs[1]], grad_y)
    assert y.is_contiguous() and grad.is_contiguous()
    assert_same((y, grad), (expected, torch.cat((grad_gate, grad_up), -1)))
    for found, parts in zip(of_bias, [torch.cat(of_halves)] if of_halves else [], strict=True):
        # The halves may be summed in other parts.
        torch.testing.assert_close(found, parts, rtol=4 * torch.finfo(y.dtype).eps, atol=1e-3)


@every_dtype
@every_packed
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_packed(device, rows, cols, name, dtype):
    gate_up, bias = torch.randn(rows, 2 * cols, device=device).mul_(3).to(dtype), torch.randn(2 * cols, device=device)
    check_packed(name, gate_up, bias.to(dtype))
    check_packed(name, gate_up, None)


@every_dtype
@every_packed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_layouts(device, name, layout, dtype):
    gate_up, bias = torch.randn(9, 96, device=device).to(dtype), torch.randn(1, 96, device=device).to(dtype)
    check_packed(name, laid_out(gate_up, layout), bias[0])
    check_packed(name, gate_up, laid_out(bias, "offset")[0])


@every_packed
def test_packed_gradcheck(name):
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 10), (10,))]
    assert gradcheck(PACKED[name][0], inputs)
    assert gradcheck(PACKED[name][0], inputs[:1])


@every_packed
@pytest.mark.parametrize("shape", [(6,), (2, 0, 6), (3, 0), (2, 1, 2, 1, 6)], ids=str)
def test_packed_of_any_leading_shape(device, name, shape):
    x, bias = torch.randn(shape, device=device), torch.randn(shape[-1], device=device)
    ours, eager = PACKED[name]
    assert ours(x, bias).shape == (*shape[:-1], shape[-1] // 2)
    torch.testing.assert_close(ours(x, bias), eager(x, bias))


ERRORS = {
    r"bias_swiglu: gate_up must have an even last dimension.* got shape \[2, 7\]": lambda x, b: llmkernels.bias_swiglu(
        x[:, :7]
    ),
    r"bias_geglu: bias must have shape \[8\] \(gate_up.size\(-1\)\), got \[4\]": lambda x, b: llmkernels.bias_geglu(
        x, None, b[:4]
    ),
    "bias_swiglu: up_bias must be None without up": lambda x, b: llmkernels.bias_swiglu(x, None, b, b),
    r"glu_packed_backward: grad_y must have shape \[2, 4\], got \[2, 8\]": lambda x, b: _op.glu_packed_backward(
        x, x, b, "silu", True
    ),
    "bias_act: activation must be 'silu', .* got 'relu6'": lambda x, b: llmkernels.bias_act(x, b, activation="relu6"),
    "bias_gelu: x must be float32, float16, bfloat16.* got Int": lambda x, b: llmkernels.bias_gelu(x.int()),
    "bias_gelu: x must have at least one dimension": lambda x, b: llmkernels.bias_gelu(x[0, 0]),
    r"bias_gelu: bias must have shape \[8\] \(x.size\(-1\)\), got \[4\]": lambda x, b: llmkernels.bias_gelu(x, b[:4]),
    "bias_gelu: approximate must be 'tanh' or 'none'.* got 'erf'": lambda x, b: llmkernels.bias_gelu(
        x, b, approximate="erf"
    ),
    r"relu2: bias must have shape \[8\] .* got \[1, 8\]": lambda x, b: llmkernels.relu2(x, b[None]),
    r"bias_swiglu: up must have the shape of gate, \[2, 8\], got \[1, 8\]": lambda x, b: llmkernels.bias_swiglu(
        x, x[:1]
    ),
    r"bias_swiglu: gate_bias must have shape \[8\] .* got \[4\]": lambda x, b: llmkernels.bias_swiglu(x, x, b[:4]),
    r"bias_geglu: up_bias must have shape \[8\] .* got \[4\]": lambda x, b: llmkernels.bias_geglu(x, x, None, b[:4]),
    "glu: up_bias must have the dtype of gate, Float, got Half": lambda x, b: _op.glu(x, x, b, b.half()),
    r"bias_act_backward: grad_y must have the shape of x, \[2, 8\], got \[1, 8\]": lambda x, b: _op.bias_act_backward(
        x[:1], x, b, "relu2", True
    ),
}
_op = torch.ops.llmkernels


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(torch.ones(2, 8, device=device), torch.ones(8, device=device))
