"""scale_softcap: the logits of Gemma 2 (softcap), Cohere (a scale) and Granite (a division, as its reciprocal)."""

import pytest
import torch

import llmkernels  # noqa: F401, the op
from oracles import DTYPES, LAYOUTS, SHAPES, assert_accurate, assert_same, assert_within_ulps, laid_out, scaled_rows

_op = torch.ops.llmkernels
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OPTIONS = {"gemma": (1.0, 30.0), "cohere": (0.0625, 0.0), "granite": (1 / 16, 0.0), "both": (0.3, 5.0)}
every_option = pytest.mark.parametrize("scale, softcap", OPTIONS.values(), ids=OPTIONS)


def eager(logits, scale=1.0, softcap=0.0):
    y = logits if scale == 1 else logits * scale
    if softcap:
        y = y / softcap
        y = torch.tanh(y)
        y = y * softcap
    return y


@every_dtype
@every_option
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward(device, rows, cols, scale, softcap, dtype):
    logits = scaled_rows(rows, cols, dtype=dtype, device=device) * 3
    y, expected = _op.scale_softcap(logits, scale, softcap), eager(logits, scale, softcap)
    assert_accurate(y, expected, eager(logits.double(), scale, softcap))
    if softcap == 0:
        assert_same(y, expected)
    elif y.numel():  # tanh is another one
        assert_within_ulps(y, expected, ulps=4 if dtype == torch.float32 else 1, share=0.0)


def test_float64():
    logits = torch.randn(3, 50, dtype=torch.float64)
    torch.testing.assert_close(_op.scale_softcap(logits, 0.7, 2.0), eager(logits, 0.7, 2.0))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, dtype):
    logits = laid_out(torch.randn(6, 64, device=device).to(dtype), layout)
    y = _op.scale_softcap(logits, 0.5, 2.0)
    assert y.is_contiguous()
    assert_same(y, _op.scale_softcap(logits.contiguous(), 0.5, 2.0))


@every_dtype
def test_special_values(device, dtype):
    logits = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], device=device).to(dtype)
    nan, *y = _op.scale_softcap(logits, 2.0, 3.0).tolist()
    assert nan != nan and y == [3.0, -3.0, 0.0, 0.0]
    assert_same(_op.scale_softcap(logits), logits)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 0, 64)], ids=str)
def test_any_leading_shape(device, shape):
    logits = torch.randn(shape, device=device)
    assert_same(_op.scale_softcap(logits, 0.5, 2.0).view(-1), _op.scale_softcap(logits.view(-1), 0.5, 2.0))
