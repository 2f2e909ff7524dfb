"""swiglu, geglu and relu2_glu, separate and packed."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

import llmkernels
import oracles
from oracles import (
    DTYPES,
    LAYOUTS,
    SCALARS,
    SHAPES,
    assert_same,
    assert_within_ulps,
    check_glu,
    check_scalar_gradients,
    laid_out,
)

ACTIVATIONS = {
    "swiglu": (llmkernels.swiglu, oracles.swiglu),
    "geglu_tanh": tuple(partial(f, approximate="tanh") for f in (llmkernels.geglu, oracles.geglu)),
    "geglu_erf": (llmkernels.geglu, oracles.geglu),
    "relu2": (llmkernels.relu2_glu, oracles.relu2_glu),
    **{name: tuple(partial(f, activation=name) for f in (llmkernels.glu, oracles.glu)) for name in ("sigmoid", "relu")},
}
every_activation = pytest.mark.parametrize("ours, eager", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(rows, cols, dtype, device):
    """Gates from the flat part of the activation to its linear part."""
    return tuple(torch.randn(rows, cols, device=device).mul_(3).to(dtype) for _ in range(2))


@every_dtype
@every_activation
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward_and_backward(device, rows, cols, ours, eager, dtype):
    inputs = make(rows, cols, dtype, device)
    check_glu(ours, eager, inputs)


@every_dtype
@every_activation
@pytest.mark.parametrize("rows, cols", [(0, 8), (1, 1), (7, 127), (257, 64), (3, 3584)])
def test_packed(device, rows, cols, ours, eager, dtype):
    """[gate | up] in one tensor: the same numbers, forward and backward."""
    gate, up = make(rows, cols, dtype, device)
    packed = torch.cat((gate, up), -1)
    assert_same(ours(packed), ours(gate, up))
    check_glu(ours, eager, (packed,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_activation
def test_every_gate_there_is(device, ours, eager, dtype):
    """All 65,536 gates: on a GPU bitwise equal to eager, on the CPU as accurate as PyTorch's vectorised functions."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)[None]
    up = torch.ones_like(gate)
    if device == "cuda":
        assert_same(ours(gate, up), eager(gate, up))
    else:
        exact = eager(gate.double(), up.double()).to(dtype).double()  # a square may be out of range
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours(gate, up).double(), exact, rtol=eps, atol=1e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [127, 3584])
def test_swiglu_equals_eager_on_the_gpu(cols):
    """Also in float32, and with the rounding of the product."""
    for dtype in DTYPES:
        gate, up = make(257, cols, dtype, "cuda")
        assert_within_ulps(llmkernels.swiglu(gate, up), oracles.swiglu(gate, up), ulps=int(dtype == torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_activation
def test_rounds_where_eager_rounds(device, ours, eager, dtype):
    """Bitwise equal, except for few elements where the last bit of exp, tanh or erf changes a rounding."""
    gate, up = make(257, 512, dtype, device)
    gate = gate.abs()  # where gelu has no cancellation
    y, expected = ours(gate, up), eager(gate, up)
    assert_within_ulps(y, expected, ulps=2, share=0.99)
    once = (eager(gate.float(), up.float())).to(dtype)
    is_exact = eager(gate, torch.ones_like(up)).equal(gate)  # as relu is
    assert is_exact or (once != expected).double().mean() > 0.1, "this test can't tell one rounding from two"


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1], ids=["gate", "up"])
@every_activation
def test_layouts(device, ours, eager, which, layout, dtype):
    inputs = list(make(9, 96, dtype, device))
    inputs[which] = laid_out(inputs[which], layout)
    inputs[1 - which] = inputs[1 - which][: len(inputs[which])]
    assert_same(ours(*inputs), ours(*(t.contiguous() for t in inputs)))
    check_glu(ours, eager, inputs, grad_layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [64, 63])
def test_layouts_of_packed_input(device, cols, layout):
    packed = laid_out(torch.randn(9, 2 * cols, device=device).half(), layout)
    assert_same(llmkernels.swiglu(packed), llmkernels.swiglu(packed.contiguous()))
    check_glu(llmkernels.swiglu, oracles.swiglu, (packed,), grad_layout=layout)


def test_halves_of_a_packed_projection(device):
    """gate and up as slices of one tensor, as a fused gate_up projection returns them."""
    packed = torch.randn(9, 128, device=device)
    assert_same(llmkernels.swiglu(*packed.chunk(2, -1)), llmkernels.swiglu(packed))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (3, 0), (2, 1, 2, 1, 6)], ids=str)
def test_any_leading_shape(device, shape):
    gate, up = torch.randn(2, *shape, device=device)
    assert_same(llmkernels.swiglu(gate, up), llmkernels.swiglu(gate.flatten(), up.flatten()).view(shape))
    assert llmkernels.geglu(torch.cat((gate, up), -1)).shape == shape


@every_dtype
@every_activation
def test_special_values(device, ours, eager, dtype):
    values = torch.tensor([0.0, -0.0, 1e4, -1e4, 1e-7, -100, 100, torch.inf, -torch.inf, torch.nan], device=device)
    gate, up = (t.to(dtype).contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    y, expected, exact = ours(gate, up), eager(gate, up), eager(gate.double(), up.double())
    # On some processors PyTorch's float32 gelu(inf) is NaN; by the formula it is inf.
    expected = torch.where(gate.isinf(), exact.to(dtype), expected)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert y[-1].isnan().all() and y[:, -1].isnan().all()


@every_activation
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_gradcheck(ours, eager, packed):
    inputs = [torch.cat(make(3, 5, torch.float64, "cpu"), -1)] if packed else make(3, 5, torch.float64, "cpu")
    assert gradcheck(ours, [t.requires_grad_() for t in inputs])


@every_dtype
@pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS.keys())
@every_activation
def test_gradients_that_autograd_makes(device, ours, eager, scalar, dtype):
    gate, up = make(9, 64, dtype, device)
    check_scalar_gradients(ours, eager, (gate / 2, up), scalar)


@pytest.mark.parametrize("which", [0, 1], ids=["gate", "up"])
def test_only_one_input_takes_a_gradient(device, which):
    inputs = list(make(5, 32, torch.float32, device))
    inputs[which].requires_grad_()
    ours, eager = (torch.autograd.grad(f(*inputs).sum(), inputs[which])[0] for f in (llmkernels.swiglu, oracles.swiglu))
    torch.testing.assert_close(ours, eager)


@every_activation
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_mixed_dtypes_compose_as_eager(device, ours, eager, dtype):
    gate, up = make(9, 64, torch.float32, device)
    for inputs in ((gate.to(dtype), up), (gate, up.to(dtype))):
        assert ours(*inputs).dtype == eager(*inputs).dtype
        check_glu(ours, eager, inputs)


def test_geglu_has_the_default_of_gelu(device):
    gate, up = make(9, 64, torch.float32, device)
    for kwargs in ({}, {"approximate": "tanh"}, {"approximate": "none"}):
        expected = F.gelu(gate, **kwargs) * up
        torch.testing.assert_close(llmkernels.geglu(gate, up, **kwargs), expected)


ERRORS = {
    "swiglu: gate must be float32, float16, bfloat16.* got Int": lambda x: llmkernels.swiglu(x.int(), x.int()),
    "swiglu: gate must have at least one dimension": lambda x: llmkernels.swiglu(x[0, 0], x[0, 0]),
    r"swiglu: up must have the shape of gate, \[2, 6\], got \[1, 6\]": lambda x: llmkernels.swiglu(x, x[:1]),
    "glu: up must have the dtype of gate, Float, got Half": lambda x: _op.glu(x, x.half()),
    r"glu_backward: grad_y must have the shape of gate, \[2, 6\], got \[2, 5\]": lambda x: _op.glu_backward(
        x[:, :5], x, x, None, None, "silu", False, False
    ),
    r"swiglu: gate_up must have an even last dimension.* got shape \[2, 5\]": lambda x: llmkernels.swiglu(x[:, :5]),
    r"glu_packed_backward: grad_y must have shape \[2, 3\], got \[2, 6\]": lambda x: _op.glu_packed_backward(
        x, x, None, "silu", False
    ),
    "glu: activation must be 'silu', .*'gelu'.* got 'relu6'": lambda x: llmkernels.glu(x, x, activation="relu6"),
    "glu_packed: activation must be 'silu', .* got ''": lambda x: _op.glu_packed(x, None, ""),
    r"geglu: up must have the shape of gate, \[2, 6\], got \[1, 6\]": lambda x: llmkernels.geglu(x, x[:1]),
    "geglu: approximate must be 'tanh' or 'none'.* got 'erf'": lambda x: llmkernels.geglu(x, x, approximate="erf"),
    "geglu: approximate must be 'tanh' or 'none'.* got ''": lambda x: llmkernels.geglu(x, approximate=""),
}
_op = torch.ops.llmkernels


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(torch.ones(2, 6, device=device))


@pytest.mark.gpu
def test_errors_about_devices():
    x = torch.ones(2, 6, device="cuda")
    with pytest.raises(RuntimeError, match="swiglu: gate is float64, which is supported on the CPU only"):
        llmkernels.swiglu(x.double(), x.double())
    with pytest.raises(RuntimeError, match="swiglu: up must be on the device of gate"):
        llmkernels.swiglu(x, x.cpu())
