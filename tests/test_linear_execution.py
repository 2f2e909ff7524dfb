"""Execution of the linear ops: registration, compilation, determinism, streams, graphs, prefetched weights."""

from functools import partial

import pytest
import torch
from torch.library import opcheck

from linear_cases import add, check_overlapping_launches, compare, eager_norm_glu, eager_norm_linear, every_m, make
from llmkernels import linear, rms_norm_linear
from oracles import assert_same, captured, scaled_rows

_op = torch.ops.llmkernels


# Registration and compilation.


def calls(device, dtype=torch.float32):
    x, norm_weight, weight, bias = make(6, 8, 16, dtype, device)
    x = x.view(2, 3, 16)
    residual = torch.randn(2, 3, 8, device=device).to(dtype)
    yield "linear", (x, weight)
    yield "linear", (x, weight, bias)
    yield "rms_norm_linear", (x, norm_weight, weight, bias)
    yield "rms_norm_linear", (x, None, weight, None, 1e-5, 1.0, False)
    yield "rms_norm_glu_linear", (x, norm_weight, weight)
    yield "glu_linear", (x, weight, "gelu")
    yield "linear_add_", (residual, x, weight, bias, 0.5)
    yield "linear_add_scale_", (residual, x, weight, bias, weight.t().contiguous(), weight[:, 0].contiguous())


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
        return normed, add(residual, x, weight), _op.rms_norm_glu_linear(x, norm_weight, weight)

    first = run()
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(249):
        for a, b in zip(run(), first, strict=True):
            same &= (a == b).all()
    assert same


@pytest.mark.gpu
@every_m
def test_a_chain_of_overlapping_launches(m):
    """Each kernel starts while the previous one still runs, and must not read early what that one writes."""
    check_overlapping_launches(m)


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
        return y, _op.rms_norm_glu_linear(x, norm_weight, weight)

    graph, results = captured(step)
    for _ in range(3):
        x.copy_(scaled_rows(m, 768, dtype=torch.bfloat16, device="cuda"))
        residual.normal_()
        start = residual.clone()
        graph.replay()
        replayed = [t.clone() for t in (*results, residual)]
        residual.copy_(start)
        assert_same(tuple(replayed), (*step(), residual))


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    inputs = make(4, 256, 512, torch.bfloat16, "cuda:0")
    y = rms_norm_linear(*(t.to("cuda:1") for t in inputs))
    assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert_same(y.to("cuda:0"), rms_norm_linear(*inputs))


# Weights with and without the promise of `in_step`.


# of a residual, x, norm_weight and weight; `linear_add_` changes the residual
CALLS = {
    "linear": lambda residual, x, norm, *weight, **options: _op.linear(x, *weight, **options),
    "rms_norm_linear": lambda residual, *inputs, **options: _op.rms_norm_linear(*inputs, **options),
    "linear_add_": lambda residual, x, norm, *weight, **options: (
        _op.linear_add_(residual, x, *weight, **options) or residual
    ),
    "rms_norm_glu_linear": lambda residual, *inputs, **options: _op.rms_norm_glu_linear(*inputs, **options),
}


def close_in_bfloat16(found, expected):
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@every_m
def test_prefetched_weights(device, m):
    x, norm_weight, weight, bias = make(m, 24, 136, torch.bfloat16, device)
    residual = torch.randn(m, 24, device=device).bfloat16()
    added = residual.clone()
    _op.linear_add_(added, x, weight, bias, in_step=True)
    assert_same(added, add(residual, x, weight, bias))
    same = assert_same if m <= 16 else close_in_bfloat16  # beyond that these two may be cuBLAS outside of a step
    same(_op.linear(x, weight, bias, in_step=True), linear(x, weight, bias))
    inputs = (x, norm_weight, weight, bias)
    same(_op.rms_norm_linear(*inputs, in_step=True), rms_norm_linear(*inputs))
    inputs = (x, norm_weight, weight)
    assert_same(_op.rms_norm_glu_linear(*inputs, in_step=True), _op.rms_norm_glu_linear(*inputs))
    assert_same(_op.glu_linear(x, weight, in_step=True), _op.glu_linear(x, weight))


# The norm hand-off.


@every_m
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset, alpha", [(0.0, 1.0), (1.0, 0.22)])
def test_handoff(device, m, offset, alpha, dtype):
    """linear_add_scale_ adds the bits of linear_add_, and the linear after it takes what it returned."""
    x, _, weight, bias = make(m, 520, 136, dtype, device)
    _, norm_weight, gate_up, _ = make(1, 264, 520, dtype, device)
    residual = torch.randn(m, 520, device=device).to(dtype)
    expected = add(residual, x, weight, bias, alpha=alpha, in_step=True)
    found = residual.clone()
    scaled, squares = _op.linear_add_scale_(found, x, weight, bias, gate_up, norm_weight, offset, alpha, True)
    assert_same(found, expected)
    assert scaled.dtype == dtype and squares.dtype == torch.float32
    if m <= 16 or m > 64 or device == "cpu" or dtype == torch.float32 or (offset and dtype == torch.float16):
        assert scaled.numel() == squares.numel() == 0
    elif torch.cuda.get_device_capability() == (9, 0):
        assert scaled.shape == (m, 520) and squares.shape[1] == 128
    inputs, options = (found, norm_weight, gate_up), {"weight_offset": offset, "in_step": True}
    for op, eager in ((_op.rms_norm_linear, eager_norm_linear), (_op.rms_norm_glu_linear, eager_norm_glu)):
        ours = partial(op, scaled=scaled, squares=squares, in_step=True)
        compare(ours, eager, inputs, weight_offset=offset)
        close = assert_same if scaled.numel() == 0 else close_in_bfloat16
        close(op(*inputs, scaled=scaled, squares=squares, **options), op(*inputs, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 17, 33, 64, 65, 97, 128])
def test_a_chain_of_handoffs(m):
    """Each kernel starts while the previous one still runs."""
    inputs = [make(m, 2048, 2048, torch.bfloat16, "cuda", bias=False) for _ in range(4)]

    def chain(synchronize):
        h, handoff = inputs[0][0].clone(), {}
        if not synchronize:
            torch.cuda._sleep(10_000_000)  # about 5 ms, in which all launches are made
        for i in range(8):
            _, norm_weight, weight, _ = inputs[i % 4]
            _, next_norm_weight, next_weight, _ = inputs[(i + 1) % 4]
            y = _op.rms_norm_linear(h, norm_weight, weight, in_step=True, **handoff)
            if synchronize:
                torch.cuda.synchronize()
            results = _op.linear_add_scale_(h, y, weight, None, next_weight, next_norm_weight, in_step=True)
            handoff = dict(zip(("scaled", "squares"), results, strict=True))
            if synchronize:
                torch.cuda.synchronize()
        return h

    expected = chain(True)
    for _ in range(20):
        assert_same(chain(False), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("what", ["weights", "x"])
def test_what_the_kernel_before_has_just_written(what, call, m, captured):
    """The previous kernel takes long, and lets the next one start at once, with room beside it. It writes where its
    result of the previous round was. Weights may be prefetched before it has ended; x must not be read."""
    n, k = 512, 64
    x, norm_weight, weight, _ = make(m, n, k, torch.bfloat16, "cuda", bias=False)
    token, sources = make(1, 8, 1024, torch.bfloat16, "cuda")[0], []
    for _ in range(3):
        sources.append(make(1, k + n * k, 1024, torch.bfloat16, "cuda")[2])
    torch.cuda.synchronize()

    def follow(residual, written):
        if what == "weights":
            return call(residual, x, written[:k], written[k:].view(n, k))
        last = written[-m * k :].view(m, k)
        return call(residual, last, norm_weight, weight, in_step=True)

    def chain(synchronize):
        results, places = [], set()
        for source, residual in zip(sources * 2, torch.zeros(6, m, n, dtype=x.dtype, device="cuda"), strict=True):
            written = linear(token, source)[0]
            if synchronize:
                torch.cuda.synchronize()
            results.append(follow(residual, written))
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
