"""Execution of the ops: determinism, batch invariance, streams, devices, CUDA graphs, launches that overlap."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import llmkernels
from cases import CASES, case_named, every_case
from oracles import angles, assert_same, captured, scaled_rows, tensors

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@every_case
@every_dtype
def test_250_equal_reruns(case, device, dtype):
    """Outputs and all gradients, those of weights included; enough rows for many partial sums."""
    rows = 1000 if device == "cuda" else 66 if "norm" in case.name else 4
    inputs = case.inputs(rows, 136, dtype, device)
    grad_outputs = case.grad_outputs(inputs)
    first = case.differentiate(inputs, grad_outputs)
    same = torch.ones((), dtype=torch.bool, device=device)
    for _ in range(249):
        for a, b in zip(case.differentiate(inputs, grad_outputs), first, strict=True):
            same &= (a == b).all()
    assert same


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [136, 3584, 1037, 4097])
def test_a_row_alone_is_the_same_row_in_a_batch_of_300(case, device, dtype, cols):
    if not case.batch_invariant:
        pytest.skip("PyTorch's matmul sums in an order that depends on the number of rows")
    inputs = case.inputs(300, cols, dtype, device)
    grad_outputs = case.grad_outputs(inputs)
    row_dims = [d for d in case.row_dims[: case.differentiable] if d is not None]
    count = len(grad_outputs) + len(row_dims)  # not the gradients that sum over rows
    dims = [case.out_row_dim] * len(grad_outputs) + row_dims
    batch = case.differentiate(inputs, grad_outputs)[:count]
    for index in (0, 1, 150, 299):
        one = case.one_row(inputs, index), tuple(t.narrow(case.out_row_dim, index, 1) for t in grad_outputs)
        alone = case.differentiate(*one)[:count]
        assert_same(alone, tuple(t.narrow(dim, index, 1) for t, dim in zip(batch, dims, strict=True)))


ROW_OPS = ["rms_norm", "rms_norm_gemma", "add_rms_norm", "layer_norm", "add_layer_norm", "softmax", "softmax_masked"]
ROW_OPS += ["log_softmax", "cross_entropy", "cross_entropy_in_backward"]


def starting_at(t, offset):
    """The values of `t` so many elements behind an aligned address."""
    return t.new_zeros(t.numel() + offset)[offset:].view(t.shape).copy_(t)


@every_dtype
@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("cols", [1001, 4097, 66001])
def test_a_row_has_the_same_bits_wherever_it_starts(name, device, dtype, cols):
    """Several rows per block, one, and in the backward those of a cluster. Of an odd width, they start anywhere."""
    case = case_named(name)
    inputs = case.inputs(3, cols, dtype, device)
    grad_outputs = case.grad_outputs(inputs)
    expected = case.differentiate(inputs, grad_outputs)
    for offset in range(1, 8):
        moved = [[starting_at(t, offset) for t in some] for some in (inputs, grad_outputs)]
        assert_same(case.differentiate(*moved), expected, f"offset {offset}")


def amid_nan(t):
    """The values of `t` with NaN around each row, where it has rows of numbers."""
    if not t.is_floating_point() or t.dim() == 0:
        return t
    return t.new_full((*t.shape[:-1], t.shape[-1] + 4), float("nan"))[..., 1:-3].copy_(t)


@every_dtype
@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("cols", [1001, 4097])
def test_what_lies_around_a_row_does_not_count(name, device, dtype, cols):
    case = case_named(name)
    inputs = case.inputs(3, cols, dtype, device)
    grad_outputs = case.grad_outputs(inputs)
    moved = [[amid_nan(t) for t in some] for some in (inputs, grad_outputs)]
    assert_same(case.differentiate(*moved), case.differentiate(inputs, grad_outputs))


@pytest.mark.parametrize("cols", [1032, 3584, 8192])
def test_every_row_alone_has_the_bits_it_has_in_a_batch(device, cols):
    """With few rows each gets more threads. In float32 another order of summation would show in some rows."""
    x, residual = torch.randn(2, 300, cols, device=device)
    y, (z, s) = llmkernels.rms_norm(x), llmkernels.add_rms_norm(x, residual)
    assert_same(torch.cat([llmkernels.rms_norm(row) for row in x.split(1)]), y)
    alone = [llmkernels.add_rms_norm(*rows) for rows in zip(x.split(1), residual.split(1), strict=True)]
    assert_same((torch.cat([a for a, _ in alone]), torch.cat([b for _, b in alone])), (z, s))
    y, (z, s) = llmkernels.layer_norm(x), llmkernels.add_layer_norm(x, residual)
    assert_same(torch.cat([llmkernels.layer_norm(row) for row in x.split(1)]), y)
    alone = [llmkernels.add_layer_norm(*rows) for rows in zip(x.split(1), residual.split(1), strict=True)]
    assert_same((torch.cat([a for a, _ in alone]), torch.cat([b for _, b in alone])), (z, s))


@pytest.mark.gpu
@every_case
def test_side_stream(case):
    """The inputs are written late, on a side stream. An op on any other stream would read zeros."""
    inputs = case.inputs(64, 256, torch.bfloat16, "cuda")
    grad_outputs = case.grad_outputs(inputs)
    expected = case.differentiate(inputs, grad_outputs)
    late = [torch.zeros_like(t) for t in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        results = case.differentiate(late, grad_outputs)
    stream.synchronize()
    assert_same(results, expected)


@pytest.mark.two_gpus
@every_case
def test_second_device_while_the_first_is_current(case):
    inputs = case.inputs(64, 256, torch.bfloat16, "cuda:0")
    grad_outputs = case.grad_outputs(inputs)
    expected = case.differentiate(inputs, grad_outputs)
    assert torch.cuda.current_device() == 0
    results = case.differentiate([t.to("cuda:1") for t in inputs], [t.to("cuda:1") for t in grad_outputs])
    assert all(t.device == torch.device("cuda:1") for t in results)
    assert torch.cuda.current_device() == 0
    assert_same(tuple(t.to("cuda:0") for t in results), expected)


@pytest.mark.gpu
@every_case
@pytest.mark.parametrize("cols", [256, 255])
def test_cuda_graph(case, cols):
    """Capture forward and backward, change the inputs, replay."""
    static = [t.clone() for t in case.inputs(64, cols, torch.bfloat16, "cuda")]
    static_grads = case.grad_outputs(static)
    graph, results = captured(lambda: case.differentiate(static, static_grads))
    for _ in range(3):
        inputs = case.inputs(64, cols, torch.bfloat16, "cuda")
        grad_outputs = case.grad_outputs(inputs)
        for target, source in zip((*static, *static_grads), (*inputs, *grad_outputs), strict=True):
            target.copy_(source)
        graph.replay()
        assert_same(results, case.differentiate(inputs, grad_outputs))


def even_rope(x):
    return llmkernels.rope(x[None, None], x[None, None], x, x, layout="bhtd")[0]


@functools.cache
def classes(rows):
    """Made once: a kernel that makes them would come between the two."""
    return torch.zeros(rows, dtype=torch.int64, device="cuda")


def loss_and_gradient(x):
    loss, *_, grad = torch.ops.llmkernels.cross_entropy(x, classes(len(x)), gradient_in_forward=True)
    return grad, loss


def even_rms_norm_rope(x):
    x = x[:, : x.size(1) // 2 * 2]
    return llmkernels.rms_norm_rope(x[None, None], x[None, None], x[0], x[0], x, x, layout="bhtd")[0]


def rms_norm_rope_backward(x):
    x = x[:, : x.size(1) // 2 * 2]
    heads, options = [x[None, None]] * 4, (1e-6, 0.0, True, False, True, False, None, True, True)
    return torch.ops.llmkernels.rms_norm_rope_backward(*heads, x[0], x[0], x, x, None, *options)


def glu_backward(grad_y, gate, up):
    return torch.ops.llmkernels.glu_backward(grad_y, gate, up, None, None, "silu", False, False)[:2]


PRODUCERS = {
    "rms_norm": lambda x: llmkernels.rms_norm(x),
    "rms_norm of unaligned rows": lambda x: llmkernels.rms_norm(x[:, 1:]),
    "add_rms_norm": lambda x: llmkernels.add_rms_norm(x, x)[1],
    "swiglu": lambda x: llmkernels.swiglu(x, x),
    "rope": lambda x: even_rope(x)[0, 0],
    "rms_norm_rope": lambda x: even_rms_norm_rope(x)[0, 0],
    "rms_norm_rope_backward": lambda x: rms_norm_rope_backward(x)[0][0, 0],
    "rms_norm_backward": lambda x: torch.ops.llmkernels.rms_norm_backward(x, x, x[0], None, 1e-6, 0.0, True, True)[0],
    "layer_norm": lambda x: llmkernels.layer_norm(x, x[0], x[1]),
    "layer_norm_backward": lambda x: torch.ops.llmkernels.layer_norm_backward(x, x, x[0], None, 1e-5, 0.0, True, True)[
        0
    ],
    "glu_backward": lambda x: glu_backward(x, x, x)[1],
    "softmax": lambda x: llmkernels.softmax(x),
    "softmax_backward": lambda x: torch.ops.llmkernels.softmax_backward(x, x, 1.0),
    "cross_entropy": lambda x: loss_and_gradient(x)[0],
}
CONSUMERS = {
    "rms_norm": lambda x: llmkernels.rms_norm(x),
    "rms_norm of unaligned rows": lambda x: llmkernels.rms_norm(x[:, 1:]),
    "layer_norm": lambda x: llmkernels.layer_norm(x, x[0], x[1]),
    "layer_norm of unaligned rows": lambda x: llmkernels.layer_norm(x[:, 1:]),
    "layer_norm_backward": lambda x: torch.ops.llmkernels.layer_norm_backward(x, x, x[0], None, 1e-5, 0.0, True, True),
    "swiglu": lambda x: llmkernels.swiglu(x, x),
    "rope": lambda x: even_rope(x[:, : x.size(1) // 2 * 2]),
    "rms_norm_rope": even_rms_norm_rope,
    "rms_norm_rope of unaligned rows": lambda x: even_rms_norm_rope(x[:, 1:-1]),
    "rms_norm_rope_backward": rms_norm_rope_backward,
    "rms_norm_rope_backward of unaligned rows": lambda x: rms_norm_rope_backward(x[:, 1:-1]),
    "rms_norm_backward": lambda x: torch.ops.llmkernels.rms_norm_backward(x, x, x[0], None, 1e-6, 0.0, True, True),
    "rms_norm_backward of unaligned rows": lambda x: torch.ops.llmkernels.rms_norm_backward(
        x[:, 1:], x[:, 1:], x[0, 1:], None, 1e-6, 0.0, True, True
    ),
    "glu_backward": lambda x: glu_backward(x, x, x),
    "softmax": lambda x: llmkernels.softmax(x),
    "softmax of unaligned rows": lambda x: llmkernels.softmax(x[:, 1:]),
    "softmax_backward": lambda x: torch.ops.llmkernels.softmax_backward(x, x, 1.0),
    "cross_entropy": loss_and_gradient,
    "cross_entropy of unaligned rows": lambda x: loss_and_gradient(x[:, 1:]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("producer", PRODUCERS.values(), ids=PRODUCERS.keys())
@pytest.mark.parametrize("consumer", CONSUMERS.values(), ids=CONSUMERS.keys())
def test_overlapping_launches(producer, consumer):
    """A large kernel, then a small one on the rows that the large one writes last. Programmatic dependent launch lets
    it start early. If it also read early, it would find the results of the previous round."""
    rounds = [scaled_rows(8192, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    expected = []
    for x in rounds:
        y = producer(x)
        torch.cuda.synchronize()
        expected.append(tensors(consumer(y[-2:])))
        torch.cuda.synchronize()
        del y
    results = []
    for i in range(12):
        torch.cuda._sleep(200_000)  # so that both are queued before the first begins
        results.append(tensors(consumer(producer(rounds[i % 2])[-2:])))
    for i, result in enumerate(results):
        assert_same(result, expected[i % 2], f"round {i}, output")


@pytest.mark.gpu
def test_a_write_behind_a_read():
    """The other order: the next kernel of the stream starts to overwrite x while a large kernel still reads it."""
    x = scaled_rows(1, 8, 8192, 128, dtype=torch.bfloat16, device="cuda")
    cos, sin = angles(8192, 128, dtype=torch.bfloat16, device="cuda")
    expected = llmkernels.rms_norm(x)
    for _ in range(10):
        source = x.clone()
        y = llmkernels.rms_norm(source)
        llmkernels.rope(source[:, :4], source[:, 4:], cos, sin, layout="bhtd", inplace=True)
        assert_same(y, expected)


@pytest.mark.gpu
def test_many_threads_on_streams_of_their_own():
    """One process, several Python threads: no state is shared between launches."""

    def work(case):
        with torch.cuda.stream(torch.cuda.Stream()):
            inputs = case.inputs(64, 256, torch.bfloat16, "cuda")
            grad_outputs = case.grad_outputs(inputs)
            results = [case.differentiate(inputs, grad_outputs) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
            return results

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, CASES * 2):
            for result in results:
                assert_same(result, results[0])
