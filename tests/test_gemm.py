"""Linears of many tokens by the library's own kernel for Hopper (csrc/kernels/gemm)."""

import ctypes
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import oracles
from linear_cases import (
    add,
    check_every_linear,
    check_not_a_number_stays_in_its_row,
    check_nothing_beyond_the_result_is_written,
    check_rows_apart,
    compare,
    eager_add,
    eager_glu,
    eager_norm_glu,
    eager_norm_linear,
    every_narrow_dtype,
    kernels,
    make,
)
from llmkernels import _library, gated_mlp, linear
from oracles import assert_same

pytestmark = pytest.mark.gpu
_op = torch.ops.llmkernels

# Tokens on both sides of a block's 128 and a cluster's 256; columns and K of one vector, of a tile and some more.
EVERY_M = pytest.mark.parametrize("m", [65, 127, 128, 129, 256, 257, 700])
EVERY_SHAPE = pytest.mark.parametrize(
    "n, k", [(16, 8), (16, 3584), (240, 72), (256, 64), (272, 136), (512, 200), (4608, 1024), (1040, 18944)]
)


SPLIT_WIDTHS = [2192, 2144, 2128, 2080]  # of a tile, as llmk_force_gemm takes them: gemm_tile() in gemm/plan.h
WIDTHS = [256, 224, 1192, 1144, 1128, *SPLIT_WIDTHS]


@pytest.fixture(autouse=True)
def force():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    force = ctypes.CDLL(str(_library.PATH)).llmk_force_gemm
    force(1)
    yield force
    force(0)


@every_narrow_dtype
@EVERY_M
@EVERY_SHAPE
def test_forward(m, n, k, dtype):
    check_every_linear(m, n, k, dtype)


@every_narrow_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("m", [65, 129, 300, 520])  # clusters that share x, or W; tiles beyond the tokens
@pytest.mark.parametrize("n", [480, 1536])
def test_every_width(m, n, width, dtype, force):
    x, _, weight, bias = make(m, n, 1096, dtype, "cuda")
    force(width)
    compare(linear, F.linear, (x, weight, bias))
    compare(_op.glu_linear, eager_glu, (x, weight))
    compare(add, eager_add, (torch.randn_like(F.linear(x, weight)), x, weight, bias))


@every_narrow_dtype
@pytest.mark.parametrize("width", SPLIT_WIDTHS)
@pytest.mark.parametrize("m, n", [(65, 16), (100, 3584), (128, 896), (129, 2048), (300, 5120)])
def test_splits_of_k(m, n, width, dtype, force):
    """From a K of one tile, which is not split, to parts of different lengths; a block may have no columns."""
    force(width)
    for k in (8, 128, 200, 1096, 4864):
        x, _, weight, bias = make(m, n, k, dtype, "cuda")
        compare(linear, F.linear, (x, weight, bias))
        compare(add, eager_add, (torch.randn_like(F.linear(x, weight)), x, weight, None))


@pytest.mark.parametrize("width", SPLIT_WIDTHS)
def test_every_run_of_a_split_gives_the_same(width, force):
    """The sums are added up in one order. Launches overlap, as in a step."""
    force(width)
    x, _, weight, _ = make(128, 3584, 18944, torch.bfloat16, "cuda", bias=False)
    expected = linear(x, weight)
    names = kernels(lambda: linear(x, weight))
    assert any(f"{width % 1000}, false, (llmk::kernels::GemmSchedule)2" in name for name in names), names
    found = [_op.linear(x, weight, None, True) for _ in range(50)]
    for one in found:
        assert_same(one, expected)


@every_narrow_dtype
@pytest.mark.parametrize("activation", oracles.ACTIVATIONS)
def test_gated_activations(activation, dtype):
    x, _, weight, _ = make(300, 528, 136, dtype, "cuda")
    compare(_op.glu_linear, eager_glu, (x * 2, weight * 2), activation=activation)


def test_which_kernel_runs():
    x, _, weight, _ = make(300, 528, 136, torch.bfloat16, "cuda")
    assert any("gemm_kernel" in name for name in kernels(lambda: linear(x, weight)))
    odd = weight[:523]
    assert not any("gemm_kernel" in name for name in kernels(lambda: linear(x, odd)))
    compare(linear, F.linear, (x, odd, None))


@every_narrow_dtype
def test_rows_apart(dtype):
    check_rows_apart(260, dtype)


@every_narrow_dtype
def test_rows_that_are_one(dtype):
    """Expanded x and W, for which there is no tensor map."""
    x, _, weight, _ = make(300, 272, 136, dtype, "cuda", bias=False)
    compare(linear, F.linear, (x[:1].expand(300, 136), weight, None))
    compare(linear, F.linear, (x, weight[:1].expand(272, 136), None))
    compare(_op.glu_linear, eager_glu, (x[:1].expand(300, 136), weight))


def test_nothing_beyond_the_result_is_written():
    check_nothing_beyond_the_result_is_written(257, 264)


def test_every_run_gives_the_same():
    x, _, weight, _ = make(2048, 4608, 3584, torch.bfloat16, "cuda", bias=False)
    expected = linear(x, weight)
    for _ in range(50):
        assert_same(linear(x, weight), expected)


def test_rows_do_not_depend_on_their_number():
    x, _, weight, _ = make(1000, 4608, 3584, torch.bfloat16, "cuda", bias=False)
    expected = linear(x, weight)
    for m in (65, 128, 300, 999):
        assert_same(linear(x[:m], weight), expected[:m])


def test_not_a_number_stays_in_its_row():
    check_not_a_number_stays_in_its_row(300)


def test_in_a_graph():
    x, _, weight, _ = make(300, 528, 136, torch.bfloat16, "cuda", bias=False)
    expected = linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear(x, weight)
    x.neg_()
    graph.replay()
    assert_same(found, -expected)


def test_gated_mlp():
    x, _, gate_up, _ = make(300, 512, 136, torch.bfloat16, "cuda", bias=False)
    down = make(1, 136, 256, torch.bfloat16, "cuda")[2]
    with torch.no_grad():
        names = kernels(lambda: gated_mlp(x, gate_up, down))
    assert sum("gemm_kernel" in name for name in names) == 2
    assert not any("glu_kernel" in name for name in names)


# The norm hand-off, from a linear that adds to the residual and splits K.

EVERY_HANDOFF = pytest.mark.parametrize("m", [65, 97, 128])
READERS = {_op.rms_norm_linear: eager_norm_linear, _op.rms_norm_glu_linear: eager_norm_glu}


def hand_off(residual, x, weight, bias, following, norm_weight, offset=0.0, alpha=1.0):
    """What linear_add_scale_ returns, after checks."""
    expected = add(residual, x, weight, bias, alpha=alpha, in_step=True)
    scaled, squares = _op.linear_add_scale_(residual, x, weight, bias, following, norm_weight, offset, alpha, True)
    assert_same(residual.contiguous(), expected.contiguous())
    assert scaled.shape == residual.shape and squares.shape[1] == 128
    sums = squares[:-1, : len(residual)].double().sum(0)
    torch.testing.assert_close(sums, residual.double().square().sum(1), rtol=1e-5, atol=0)
    scale = squares[-1, 0].item()
    assert scale == 1 if residual.dtype == torch.bfloat16 else scale > norm_weight.abs().max().item() >= scale / 2
    assert_same(scaled, (residual.float() * ((norm_weight.float() + offset) / scale)).to(residual.dtype))
    return {"scaled": scaled, "squares": squares}


def check_readers(residual, norm_weight, following, bias, handoff, offset=0.0):
    for op, eager in READERS.items():
        inputs = residual, norm_weight, following, *([bias] if eager is eager_norm_linear else [])
        compare(partial(op, in_step=True, **handoff), eager, inputs, weight_offset=offset)


@every_narrow_dtype
@EVERY_HANDOFF
@pytest.mark.parametrize("width", [1, *SPLIT_WIDTHS])
@pytest.mark.parametrize("n, k", [(16, 72), (904, 904), (3592, 904), (904, 3592)])
def test_handoff(m, n, k, width, dtype, force):
    """linear_add_scale_ adds the bits of linear_add_, and the next linear takes what it returned."""
    force(width)
    x, _, weight, bias = make(m, n, k, dtype, "cuda")
    _, norm_weight, following, next_bias = make(1, 1040, n, dtype, "cuda")
    for offset, alpha, biased in [(0.0, 1.0, bias), (float(dtype == torch.bfloat16), 0.22, None)]:
        residual = torch.randn(m, n, device="cuda").to(dtype)
        handoff = hand_off(residual, x, weight, biased, following, norm_weight, offset, alpha)
        check_readers(residual, norm_weight, following, next_bias if biased is None else None, handoff, offset)


@every_narrow_dtype
@EVERY_HANDOFF
@pytest.mark.parametrize("width", WIDTHS)
def test_every_reader(m, width, dtype, force):
    """Several tiles for each block; a linear with other tiles that does not split K normalizes x itself."""
    force(SPLIT_WIDTHS[0])
    x, _, weight, _ = make(m, 904, 200, dtype, "cuda")
    _, norm_weight, following, bias = make(1, 40000, 904, dtype, "cuda")
    residual = torch.randn(m, 904, device="cuda").to(dtype)
    handoff = hand_off(residual, x, weight, None, following, norm_weight)
    force(width)
    check_readers(residual, norm_weight, following, bias, handoff)


@EVERY_HANDOFF
@pytest.mark.parametrize("size", [0, 2**-10, 30, 1e4])
def test_handoff_of_any_size_in_float16(m, size):
    """Of large weights the residual times the weight would be infinite."""
    x, _, weight, _ = make(m, 904, 904, torch.float16, "cuda")
    _, norm_weight, following, bias = make(1, 1040, 904, torch.float32, "cuda")
    norm_weight, following = (norm_weight.clamp(-1, 1) * size).half(), (following / 32).half()
    residual = torch.randn(m, 904, device="cuda").mul_(30).half()
    scaled, squares = _op.linear_add_scale_(residual, x, weight, None, following, norm_weight, in_step=True)
    assert scaled.numel() > 0 and scaled.isfinite().all()
    ours = partial(_op.rms_norm_linear, in_step=True, scaled=scaled, squares=squares)
    compare(ours, eager_norm_linear, (residual, norm_weight, following, bias.half()))


@every_narrow_dtype
@EVERY_HANDOFF
def test_handoff_of_a_residual_between_others(m, dtype):
    x, _, weight, bias = make(m, 904, 904, dtype, "cuda")
    _, norm_weight, following, _ = make(1, 1040, 904, dtype, "cuda")
    wide = torch.randn(m, 1024, device="cuda").to(dtype)
    before, residual = wide.clone(), wide[:, 64:968]
    handoff = hand_off(residual, x, weight, bias, following, norm_weight)
    assert_same(wide[:, :64], before[:, :64])
    assert_same(wide[:, 968:], before[:, 968:])
    check_readers(residual.contiguous(), norm_weight, following, None, handoff)


@every_narrow_dtype
@EVERY_HANDOFF
@pytest.mark.parametrize("in_step", [True, False])
def test_every_run_of_a_handoff_gives_the_same(m, in_step, dtype, force):
    """Launches overlap, as in a step, and each takes the memory of an earlier one."""
    force(SPLIT_WIDTHS[-1])
    x, _, weight, bias = make(m, 3592, 904, dtype, "cuda")
    _, norm_weight, following, _ = make(1, 1040, 3592, dtype, "cuda")
    residual = torch.randn(m, 3592, device="cuda").to(dtype)

    def run():
        h = residual.clone()
        scaled, squares = _op.linear_add_scale_(h, x, weight, bias, following, norm_weight, in_step=in_step)
        assert scaled.numel() > 0
        options = {"in_step": in_step, "scaled": scaled, "squares": squares}
        return h, scaled, *(op(h, norm_weight, following, **options) for op in READERS), squares[:-1, :m].clone()

    expected = run()
    torch.cuda.synchronize()
    for found in [run() for _ in range(50)]:
        assert_same(found, expected)


@pytest.mark.parametrize("gated, rows", [(False, 4608), (True, 20480), (True, 4608)])
def test_which_kernels_hand_the_norm_off(gated, rows, force):
    """K is split on both sides, or the tiles of a gated activation fill the GPU, else a norm of its own comes first."""
    force(0)
    x, _, weight, _ = make(128, 3584, 3584, torch.bfloat16, "cuda")
    _, norm_weight, following, _ = make(1, rows, 3584, torch.bfloat16, "cuda")
    residual = torch.zeros(128, 3584, device="cuda", dtype=torch.bfloat16)

    def step():
        options = {"in_step": True, "next_glu": gated}
        scaled, squares = _op.linear_add_scale_(residual, x, weight, None, following, norm_weight, **options)
        op = _op.rms_norm_glu_linear if gated else _op.rms_norm_linear
        op(residual, norm_weight, following, in_step=True, scaled=scaled, squares=squares)
        return scaled.numel()

    takes = (gated, rows) != (True, 4608)
    assert (step() > 0) == takes
    names = [name for name in kernels(step) if "kernel" in name]
    assert "many_tokens" in names[0]
    assert (len(names) == 2 and "many_tokens" in names[1]) == takes, names


def test_route(force):
    """What is faster by measurement (csrc/kernels/gemm/plan.h): a gated activation, and tiles that fill the GPU."""
    force(0)
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("measured on 132 multiprocessors")
    x = torch.randn(2048, 3584, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(7168, 3584, device="cuda", dtype=torch.bfloat16).mul_(3584**-0.5)

    def takes(function):
        return any("many_tokens" in name for name in kernels(function))

    assert takes(lambda: linear(x, weight[:3584]))
    assert not takes(lambda: linear(x, weight[:4608]))
    assert takes(lambda: _op.glu_linear(x, weight))
    assert not takes(lambda: _op.glu_linear(x[:65], weight))


@pytest.mark.sanitizer
@pytest.mark.parametrize("width", WIDTHS)
def test_once_for_the_sanitizers_gpu(width, force):
    """Tiles of fewer tokens than rows, pairs and splits."""
    force(width)
    x, _, weight, bias = make(100, 272, 328, torch.bfloat16, "cuda")
    for rows in (100, 66):
        compare(linear, F.linear, (x[:rows], weight, bias))
    compare(add, eager_add, (torch.randn_like(F.linear(x, weight)), x, weight, bias))
    compare(_op.glu_linear, eager_glu, (x, weight))
    if width in SPLIT_WIDTHS:
        _, norm_weight, following, _ = make(1, 400, 272, torch.bfloat16, "cuda")
        residual = torch.randn(100, 272, device="cuda").bfloat16()
        handoff = hand_off(residual, x, weight, bias, following, norm_weight)
        check_readers(residual, norm_weight, following, None, handoff)
