"""rms_norm_add_: the sum. The norm has the kernels of rms_norm, which test_rms_norm.py tests."""

import pytest
import torch

import llmkernels
import oracles
from oracles import DEVICES, LAYOUTS, SHAPES, assert_accurate, assert_same, laid_out, scaled_rows
from test_rms_norm import every_dtype, every_variant

_op = torch.ops.llmkernels


def make(rows, cols, dtype, device):
    """The residual, x and the weight."""
    residual, x = (scaled_rows(rows, cols, dtype=dtype, device=device) for _ in range(2))
    return residual, x, torch.randn(cols, device=device).to(dtype)


def added(residual, *inputs, alpha=1.0, **options):
    result = residual.clone()
    _op.rms_norm_add_(result, *inputs, alpha=alpha, **options)
    return result


def eager(residual, *inputs, alpha=1.0, **options):
    y = oracles.rms_norm(*inputs, **options)
    return residual + (y if alpha == 1 else y * alpha)


def compare(inputs, **options):
    exact = eager(*(t.double() for t in inputs), **options)
    scale = exact.abs().amax(-1, keepdim=True) if exact.numel() else None
    assert_accurate(added(*inputs, **options), eager(*inputs, **options), exact, scale)


@every_dtype
@pytest.mark.parametrize("alpha", [1.0, 0.22])
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_forward(device, rows, cols, alpha, dtype):
    compare(make(rows, cols, dtype, device), alpha=alpha)


@every_dtype
@every_variant
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
def test_variants(device, options, weighted, dtype):
    inputs = make(65, 384, dtype, device)
    compare(inputs if weighted else inputs[:2], alpha=-1.7, **options)


@every_dtype
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 3, 4097)]
    + [("cuda", r, c) for r in (3, 300) for c in (1032, 8192, 16384, 16392, 32776, 40001) if "cuda" in DEVICES],
)
def test_row_lengths(device, rows, cols, dtype):
    compare(make(rows, cols, dtype, device), alpha=0.5)


@every_dtype
@every_variant
@pytest.mark.parametrize("alpha", [1.0, 0.22])
def test_roundings(device, options, alpha, dtype):
    """The bits of the norm, times alpha, plus the residual: three operations, each rounded."""
    residual, x, weight = make(33, 136, dtype, device)
    y = llmkernels.rms_norm(x, weight, **options)
    assert_same(added(residual, x, weight, alpha=alpha, **options), residual + y * alpha)


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_x(device, layout, dtype):
    residual, x, weight = make(6, 64, dtype, device)
    x = laid_out(x, layout)
    residual = residual[: len(x), : x.size(1)]
    weight = weight[: x.size(1)]
    assert_same(added(residual, x, weight), residual + llmkernels.rms_norm(x, weight))  # reads x as it does


@pytest.mark.parametrize("layout", ["row_strided", "row_strided_aligned", "offset", "size_one"])
def test_layouts_of_the_residual(device, layout):
    residual, x, weight = make(6, 64, torch.bfloat16, device)
    view = laid_out(residual, layout)
    x = x[: len(view)]
    expected = added(view.contiguous(), x, weight)
    _op.rms_norm_add_(view, x, weight)
    assert_same(view, expected)


@pytest.mark.parametrize("layout", ["transposed", "every_other"])
def test_a_residual_that_cannot_be_written_by_its_rows(device, layout):
    residual, x, weight = make(6, 64, torch.bfloat16, device)
    view = laid_out(residual, layout)
    with pytest.raises(RuntimeError, match="rms_norm_add_: residual must have contiguous columns and rows"):
        _op.rms_norm_add_(view, x, weight)
    assert_same(view.contiguous(), residual)


def test_any_leading_shape(device):
    residual, x, weight = make(12, 64, torch.float32, device)
    expected = added(residual, x, weight)
    assert_same(added(residual.view(2, 1, 6, 64), x.view(2, 1, 6, 64), weight).view(12, 64), expected)
    assert_same(added(residual[0], x[0], weight), expected[0])


@pytest.mark.gpu
def test_a_chain_of_overlapping_launches():
    """Each kernel starts while the previous one still runs, and must not read early what that one writes."""
    residual, x, weight = make(4, 2048, torch.bfloat16, "cuda")

    def chain(synchronize):
        a, b = residual.clone(), x.clone()
        if not synchronize:
            torch.cuda._sleep(5_000_000)  # about 2.5 ms, in which all launches are made
        for _ in range(8):
            for target, source in ((a, b), (b, a)):
                _op.rms_norm_add_(target, source, weight, alpha=0.3)
                if synchronize:
                    torch.cuda.synchronize()
        return a, b

    expected = chain(True)
    for _ in range(10):
        assert_same(chain(False), expected)
