"""nn.FP8Linear and nn.Int8Linear: in place of a linear layer, state dicts, casts, autocast, gradients."""

import copy

import pytest
import torch

import llmkernels
from llmkernels import nn
from oracles import DTYPES, assert_same
from test_fp8_linear import devices_with_products

KINDS = [nn.FP8Linear, nn.Int8Linear]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture
def linear(request):
    return torch.nn.Linear(96, 48)


@devices_with_products
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@every_kind
@torch.no_grad()
def test_it_takes_the_place_of_a_linear(kind, device, dtype, bias):
    linear = torch.nn.Linear(96, 48, bias, device=device, dtype=dtype).eval()
    module = kind.from_linear(linear)
    stored, scales, close = (torch.float8_e4m3fn, (48, 1), 0.06) if kind is nn.FP8Linear else (torch.int8, (48,), 0.015)
    assert not module.training and module.weight.dtype == stored and module.weight_scale.shape == scales
    for rows in ((2, 5), (40,)):  # few, and more than the kernel for int8 takes
        x = torch.randn(*rows, 96, device=device, dtype=dtype)
        y, expected = module(x), linear(x)
        assert y.dtype == dtype and y.shape == expected.shape
        assert (y - expected).double().norm() < close * expected.double().norm()
    torch.testing.assert_close(module.dequantize(), linear.weight.float(), rtol=0.07, atol=1e-3)


@every_kind
@torch.no_grad()
def test_state_dict(kind, linear):
    module = kind.from_linear(linear)
    assert set(module.state_dict()) == {"weight", "weight_scale", "bias"}
    x = torch.randn(5, 96)
    for state in (module.state_dict(), linear.state_dict()):
        loaded = kind(96, 48)
        assert not loaded.dequantize().any()
        loaded.load_state_dict(state)
        assert_same(loaded(x), module(x))
    nested = torch.nn.Sequential(kind(96, 48))
    nested.load_state_dict(torch.nn.Sequential(linear).state_dict())
    assert_same(nested(x), module(x))
    assert_same(copy.deepcopy(module)(x), module(x))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        kind(96, 40).load_state_dict(linear.state_dict())


@pytest.mark.parametrize("assign", [False, True])
@torch.no_grad()
def test_a_state_dict_in_the_other_fp8_format(linear, assign):
    weight, scale = llmkernels.fp8_quantize(linear.weight, fp8_dtype=torch.float8_e5m2)
    module, x = nn.FP8Linear.from_linear(linear), torch.randn(5, 96)
    state = module.state_dict()
    module.load_state_dict({**state, "weight": weight, "weight_scale": scale}, assign=assign)
    assert_same(module.dequantize(), weight.float() * scale)
    torch.testing.assert_close(module(x), linear(x), rtol=0.1, atol=0.2)
    module.load_state_dict(linear.state_dict(), assign=assign)
    assert_same(module.dequantize(), nn.FP8Linear.from_linear(linear).dequantize())


@every_kind
@torch.no_grad()
def test_casts_leave_the_weight_alone(kind, linear):
    module, x = kind.from_linear(linear), torch.randn(5, 96)
    weight, scale = module.weight.clone(), module.weight_scale.clone()
    module.bfloat16()
    assert module.bias.dtype == torch.bfloat16
    assert torch.equal(module.weight.float(), weight.float()) and module.weight.dtype == weight.dtype
    assert torch.equal(module.weight_scale, scale) and module.weight_scale.dtype == torch.float32
    assert module(x.bfloat16()).dtype == torch.bfloat16
    for meta in (module.to("meta"), kind(96, 48, device="meta", dtype=torch.bfloat16)):
        assert meta.weight.is_meta and meta.weight.dtype == weight.dtype and meta.weight_scale.dtype == torch.float32


@every_kind
@torch.no_grad()
def test_under_autocast(kind, linear):
    module, x = kind.from_linear(linear), torch.randn(5, 96)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    assert_same(y, copy.deepcopy(module).bfloat16()(x.bfloat16()))


def test_gradients(linear):
    """Those of int8 are those of the dequantized weight; FP8, which quantizes x, has none."""
    module, x = nn.Int8Linear.from_linear(linear), torch.randn(5, 96, requires_grad=True)
    found = torch.autograd.grad(module(x).square().sum(), (x, module.bias))
    expected = torch.autograd.grad(
        torch.nn.functional.linear(x, module.dequantize(), module.bias).square().sum(), (x, module.bias)
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="fp8_quantize: x must not require a gradient"):
        nn.FP8Linear.from_linear(linear)(x)


@every_kind
def test_it_says_what_it_is(kind, linear):
    facts = "in_features=96, out_features=48, bias=True" + ", use_fast_accum=False" * (kind is nn.FP8Linear)
    assert repr(kind.from_linear(linear)) == f"{kind.__name__}({facts})"
    with pytest.raises(TypeError, match=f"{kind.__name__}: linear must be a torch.nn.Linear, got ReLU"):
        kind.from_linear(torch.nn.ReLU())
    with pytest.raises(TypeError, match=f"{kind.__name__}: linear must have the forward .* RMSNormLinear has its own"):
        kind.from_linear(nn.RMSNormLinear(96, 48))
    assert getattr(llmkernels.nn, kind.__name__) is kind


@every_kind
@torch.no_grad()
def test_scales_are_float32_under_any_default_dtype(kind):
    linear = torch.nn.Linear(16, 8)
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = kind(16, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    module.load_state_dict(linear.state_dict())
    x = torch.randn(2, 16)
    assert module.weight_scale.dtype == torch.float32
    assert_same(module.bfloat16()(x.bfloat16()), kind.from_linear(linear).bfloat16()(x.bfloat16()))
