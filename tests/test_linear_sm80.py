"""Linears of few tokens by the kernel of GPUs without TMA (csrc/kernels/linear/linear_sm80.cuh), on any GPU."""

import ctypes

import pytest
import torch
from torch.nn import functional as F

import oracles
from linear_cases import (
    add,
    check_every_linear,
    check_not_a_number_stays_in_its_row,
    check_nothing_beyond_the_result_is_written,
    check_overlapping_launches,
    check_rows_apart,
    compare,
    eager_glu,
    eager_norm_glu,
    eager_norm_linear,
    every_narrow_dtype,
    kernels,
    make,
)
from llmkernels import _library, linear, rms_norm_linear
from oracles import assert_same, captured, scaled_rows

pytestmark = pytest.mark.gpu
_op = torch.ops.llmkernels

EVERY_M = pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15, 16])
# Fewer k tiles than warps, K and columns that fill no tile, one row, every height of a tile.
EVERY_SHAPE = pytest.mark.parametrize(
    "n, k",
    [(2, 8), (24, 64), (36, 200), (896, 896), (1002, 1096), (3584, 3584), (5002, 456), (37888, 264), (520, 18944)],
)


@pytest.fixture(autouse=True)
def force():
    force = ctypes.CDLL(str(_library.PATH)).llmk_force_linear_sm80
    force(1)
    yield force
    force(0)


@every_narrow_dtype
@EVERY_M
@EVERY_SHAPE
def test_forward(m, n, k, dtype):
    check_every_linear(m, n, k, dtype)


@every_narrow_dtype
@EVERY_M
@pytest.mark.parametrize("k", [200, 8456])
def test_one_rounding(m, k, dtype):
    """Small integers: every sum is exact, so results are bitwise equal."""
    x = torch.randint(-4, 5, (m, k), device="cuda").to(dtype)
    weight = torch.randint(-4, 5, (36, k), device="cuda").to(dtype)
    bias, residual = (torch.randint(-9, 9, s, device="cuda").to(dtype) / 8 for s in ((36,), (m, 36)))
    exact = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    assert_same(linear(x, weight, bias), exact)
    assert_same(add(residual, x, weight, bias, alpha=0.3), residual + exact * 0.3)


@every_narrow_dtype
@pytest.mark.parametrize("activation", oracles.ACTIVATIONS)
def test_gated_activations(activation, dtype):
    x, _, weight, _ = make(9, 528, 136, dtype, "cuda")
    compare(_op.glu_linear, eager_glu, (x * 2, weight * 2), activation=activation)


def test_a_norm_weight_that_float16_cannot_hold_times_x():
    x, norm_weight, weight, _ = make(3, 40, 520, torch.float16, "cuda", bias=False)
    inputs = (x * 300, norm_weight * 3000, weight)
    compare(rms_norm_linear, eager_norm_linear, (*inputs, None))


def test_which_kernel_runs(force):
    x, norm_weight, weight, _ = make(16, 528, 136, torch.bfloat16, "cuda")
    assert any("linear_sm80" in name for name in kernels(lambda: rms_norm_linear(x, norm_weight, weight)))
    force(0)
    if torch.cuda.get_device_capability()[0] == 9:
        assert not any("linear_sm80" in name for name in kernels(lambda: rms_norm_linear(x, norm_weight, weight)))


@every_narrow_dtype
def test_rows_apart(dtype):
    check_rows_apart(13, dtype)


def test_nothing_beyond_the_result_is_written():
    check_nothing_beyond_the_result_is_written(9, 268)


def test_not_a_number_stays_in_its_row():
    check_not_a_number_stays_in_its_row(16)


@pytest.mark.parametrize("m", [1, 9])
def test_a_chain_of_overlapping_launches(m):
    """Each kernel starts while the previous one still runs, and must not read early what that one writes."""
    check_overlapping_launches(m)


@pytest.mark.parametrize("m", [1, 16])
def test_cuda_graph(m):
    x, norm_weight, weight, bias = make(m, 512, 768, torch.bfloat16, "cuda")
    graph, results = captured(lambda: (rms_norm_linear(x, norm_weight, weight, bias),))
    for _ in range(3):
        x.copy_(scaled_rows(m, 768, dtype=torch.bfloat16, device="cuda"))
        graph.replay()
        assert_same(results[0], rms_norm_linear(x, norm_weight, weight, bias))


@pytest.mark.sanitizer
@pytest.mark.parametrize("m", [3, 16])
def test_once_for_the_sanitizers_gpu(m):
    x, norm_weight, weight, bias = make(m, 100, 200, torch.float16, "cuda")
    compare(rms_norm_linear, eager_norm_linear, (x, norm_weight, weight, bias))
    compare(_op.rms_norm_glu_linear, eager_norm_glu, (x, norm_weight, weight))
