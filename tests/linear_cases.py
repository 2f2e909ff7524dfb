"""Shared by the tests of the linear ops: shapes, inputs, eager formulas, comparisons."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import oracles
from llmkernels import linear, rms_norm_linear
from oracles import DEVICES, DTYPES, assert_accurate, assert_same, scaled_rows

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
# Both sides of every boundary between kernels and plans: one token; tiles of 8, 16, 32, 48 and 64; cuBLAS.
every_m = pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65])


def make(m, n, k, dtype, device, bias=True):
    """x, norm_weight, weight, bias; elements of y have a size of about 1."""
    x = scaled_rows(m, k, dtype=dtype, device=device)
    weight = torch.randn(n, k, device=device).mul_(k**-0.5).to(dtype)
    norm_weight = torch.randn(k, device=device).to(dtype)
    return x, norm_weight, weight, torch.randn(n, device=device).to(dtype) if bias else None


def eager_linear(x, weight, bias):
    plain = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)  # cuBLAS reads strides of size 1, too
    return F.linear(plain, weight, bias)


def eager_norm_linear(x, norm_weight, weight, bias=None, **options):
    return F.linear(oracles.rms_norm(x, norm_weight, **options), weight, bias)


def eager_add(residual, x, weight, bias=None, alpha=1.0):
    y = F.linear(x, weight, bias)
    return residual + (y if alpha == 1 else y * alpha)


def eager_norm_glu(x, norm_weight, weight, activation="silu", **options):
    gate, up = eager_norm_linear(x, norm_weight, weight, **options).chunk(2, -1)
    return oracles.ACTIVATIONS[activation](gate) * up


def eager_glu(x, weight, activation="silu"):
    gate, up = F.linear(x, weight).chunk(2, -1)
    return oracles.ACTIVATIONS[activation](gate) * up


def add(residual, x, weight, bias=None, **options):
    result = residual.clone()
    _op.linear_add_(result, x, weight, bias, **options)
    return result


class Sizes(TorchFunctionMode):
    """Inside, F.linear returns the root of the sum of squares: the size of its sums without cancellation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        return F.linear(*(t if t is None else t.square() for t in args)).sqrt()


def compare(ours, eager, inputs, **options):
    """`ours` is as accurate as `eager`. Errors are relative to the largest value, or sum, in the row of the result."""
    inputs64 = [t if t is None else t.double() for t in inputs]
    exact = eager(*inputs64, **options)
    with Sizes():
        sizes = eager(*(t if t is None else t.abs() for t in inputs64), **options)
    scale = torch.maximum(exact.abs(), sizes).amax(-1, keepdim=True)
    assert_accurate(ours(*inputs, **options), eager(*inputs, **options), exact, scale)


def kernels(function):
    """The names of the kernels that a call runs."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


def check_every_linear(m, n, k, dtype):
    """All forms of a linear on the GPU, beside eager."""
    x, norm_weight, weight, bias = make(m, n, k, dtype, "cuda")
    compare(linear, F.linear, (x, weight, bias))
    compare(linear, F.linear, (x, weight, None))
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    residual = torch.randn_like(F.linear(x, weight))
    compare(add, eager_add, (residual, x, weight))
    compare(partial(add, alpha=0.22), partial(eager_add, alpha=0.22), (residual, x, weight, bias))
    compare(_op.glu_linear, eager_glu, (x, weight))
    compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight))


def check_overlapping_launches(m):
    """A chain in which each kernel starts while the previous one still runs gives what it gives launch by launch."""
    inputs = [make(m, 2048, 2048, torch.bfloat16, "cuda", bias=False) for _ in range(4)]

    def chain(synchronize):
        h = inputs[0][0].clone()
        if not synchronize:
            torch.cuda._sleep(10_000_000)  # about 5 ms, in which all launches are made
        for _, norm_weight, weight, _ in inputs * 2:
            y = _op.rms_norm_linear(h, norm_weight, weight, in_step=True)
            if synchronize:
                torch.cuda.synchronize()
            _op.linear_add_(h, y, weight, in_step=True)
            if synchronize:
                torch.cuda.synchronize()
        return h

    expected = chain(True)
    for _ in range(20):
        assert_same(chain(False), expected)


def check_rows_apart(m, dtype):
    """x, W and the residual are slices of wider tensors."""
    wide_x, _, wide_weight, _ = make(m, 512, 192, dtype, "cuda")
    wide = torch.randn(m, 1024, device="cuda").to(dtype)
    x, weight, residual = wide_x[:, 8:144], wide_weight[:, 48:184], wide[:, 256:768]
    compare(linear, F.linear, (x, weight, None))
    before, expected = wide.clone(), residual.clone()
    _op.linear_add_(expected, x.contiguous(), weight.contiguous())
    _op.linear_add_(residual, x, weight)
    assert_same(residual, expected)
    assert_same(wide[:, :256], before[:, :256])
    assert_same(wide[:, 768:], before[:, 768:])


def check_nothing_beyond_the_result_is_written(m, n):
    x, _, weight, _ = make(m, n, 72, torch.bfloat16, "cuda")
    wide = torch.full((m + 40, n + 130), 7.0, device="cuda", dtype=torch.bfloat16)
    _op.linear_add_(wide[:m, :n], x, weight)
    assert (wide[m:] == 7).all()
    assert (wide[:, n:] == 7).all()


def check_not_a_number_stays_in_its_row(m):
    x, _, weight, _ = make(m, 528, 136, torch.bfloat16, "cuda", bias=False)
    expected = linear(x, weight)
    x[m // 2] = float("nan")
    found = linear(x, weight)
    assert found[m // 2].isnan().all()
    assert_same(found[: m // 2], expected[: m // 2])
    assert_same(found[m // 2 + 1 :], expected[m // 2 + 1 :])
