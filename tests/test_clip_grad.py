"""optim.clip_grad_norm_: against torch.nn.utils.clip_grad_norm_ in float64, and its promises."""

import math

import pytest
import torch

from llmkernels.optim import clip_grad_norm_
from oracles import assert_same

_ops = torch.ops.llmkernels
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
every_norm = pytest.mark.parametrize("norm_type", [2.0, math.inf])


def with_grads(grads):
    params = []
    for grad in grads:
        params.append(torch.nn.Parameter(torch.zeros_like(grad)))
        params[-1].grad = grad.clone(memory_format=torch.preserve_format)
    return params


def in_double(params, max_norm, norm_type):
    exact = with_grads([param.grad.double() for param in params])
    norm = torch.nn.utils.clip_grad_norm_([param for param in exact if param.numel()], max_norm, norm_type)
    return norm, [param.grad for param in exact]


def drawn(device, dtype=torch.float32):
    shapes = [(3, 5), (100_000,), (), (0,), (7, 9, 2), (1,), (8, 128), (5001,)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


@every_norm
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 50.0, 1e6, math.inf])
def test_against_float64(norm_type, dtype, max_norm, device):
    params = with_grads(drawn(device, dtype))
    expected_norm, expected = in_double(params, max_norm, norm_type)
    before = [param.grad.clone() for param in params]
    norm = clip_grad_norm_(params, max_norm, norm_type)
    assert norm.dtype == torch.float32 and norm.device == params[0].device and norm.shape == ()
    torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-6, atol=0)
    for param, grad in zip(params, expected, strict=True):
        tiny = 1e-7 if dtype == torch.float16 else 1e-38
        torch.testing.assert_close(param.grad.double(), grad, rtol=2 * torch.finfo(dtype).eps, atol=tiny)
    if max_norm > 1e5:
        assert_same(tuple(param.grad for param in params), tuple(before))


@every_norm
def test_dtypes_in_one_list(norm_type, device):
    grads = [x.to(dtype) for x in drawn(device) for dtype in FLOATS]
    params = with_grads(grads)
    expected_norm, expected = in_double(params, 2.0, norm_type)
    torch.testing.assert_close(clip_grad_norm_(params, 2.0, norm_type).double(), expected_norm, rtol=1e-6, atol=0)
    for param, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad, grad.to(param.dtype), rtol=torch.finfo(param.dtype).eps, atol=1e-7)


@pytest.mark.parametrize("count", [1, 179, 180, 181, 1485, 1486, 1487, 3100])
def test_lists_of_any_length(count, device):
    params = with_grads([torch.randn(i % 5 + 1, device=device) for i in range(count)])
    expected_norm, expected = in_double(params, 1.0, 2.0)
    torch.testing.assert_close(clip_grad_norm_(params, 1.0).double(), expected_norm, rtol=1e-6, atol=0)
    for param, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad.double(), grad, rtol=1e-6, atol=1e-9)


@every_norm
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norms_that_are_not_finite(norm_type, bad, device):
    for where in (0, 5000, -1):
        grads = [torch.ones(9, device=device), torch.ones(5001, device=device), torch.ones(3, device=device)]
        grads[1][where] = bad
        params, others = with_grads(grads), with_grads(grads)
        with pytest.raises(RuntimeError, match=f"The total norm of order {norm_type} for gradients .* is non-finite"):
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        assert_same(tuple(param.grad for param in params), tuple(grads))
        norm = clip_grad_norm_(params, 1.0, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(others, 1.0, norm_type)
        torch.testing.assert_close(norm, expected, equal_nan=True)
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param.grad, other.grad, equal_nan=True)


@pytest.mark.parametrize("layout", ["transposed", "gaps", "expanded", "channels_last"])
def test_layouts(layout, device):
    grad = torch.randn(4, 3, 5, 6, device=device)
    given = {
        "transposed": lambda: grad.transpose(0, 2),
        "gaps": lambda: grad[..., ::2],
        "expanded": lambda: grad[:1].expand(4, 3, 5, 6),
        "channels_last": lambda: grad.to(memory_format=torch.channels_last),
    }[layout]()
    param = torch.nn.Parameter(torch.zeros(given.shape, device=device))
    param.grad = given
    norm, factor = given.norm(), 0.5 / (given.norm() + 1e-6)
    if layout == "expanded":  # PyTorch refuses to write there, too
        torch.testing.assert_close(_ops.grad_norm([given.contiguous()]), norm)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
            clip_grad_norm_(param, 0.5)
        return
    expected = given * factor
    torch.testing.assert_close(clip_grad_norm_(param, 0.5), norm)
    torch.testing.assert_close(param.grad, expected)
    assert param.grad is given


def test_what_may_be_given(device):
    params = with_grads([torch.ones(4, device=device), torch.ones(5, device=device)])
    assert clip_grad_norm_(params[0], 10.0).item() == 2.0
    assert clip_grad_norm_((param for param in params), 10, norm_type=2).item() == 3.0
    assert clip_grad_norm_(params, 10.0, "inf").item() == 1.0
    params.append(torch.nn.Parameter(torch.ones(3, device=device)))
    assert clip_grad_norm_(params, 10.0, foreach=True).item() == 3.0
    assert clip_grad_norm_([], 1.0).item() == 0.0 and clip_grad_norm_(params[2:], 1.0).item() == 0.0
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"clip_grad_norm_: max_norm must be at least 0"):
            clip_grad_norm_(params, wrong)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_a_parameter_that_comes_twice_counts_once(norm_type, device):
    once, twice = (torch.nn.Parameter(torch.zeros(4, device=device)) for _ in range(2))
    once.grad, twice.grad = torch.ones(2, 4, device=device)
    norms = clip_grad_norm_([once], 1.0, norm_type), clip_grad_norm_([twice, twice], 1.0, norm_type)
    assert_same(*norms)
    assert_same(once.grad, twice.grad)


@pytest.mark.parametrize("norm_type, dtype", [(1.0, torch.float32), (3.0, torch.float32), (2.0, torch.float64)])
def test_what_is_left_to_torch(norm_type, dtype):
    params = with_grads(drawn("cpu", dtype))
    others = with_grads([param.grad for param in params])
    norm = clip_grad_norm_(params, 1.0, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(others, 1.0, norm_type), rtol=0, atol=0)
    assert_same(tuple(param.grad for param in params), tuple(param.grad for param in others))


def test_autograd_knows_of_the_write():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    version = param.grad._version
    clip_grad_norm_(param, 0.1)
    assert param.grad._version > version


@every_norm
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_reruns(norm_type, dtype, device):
    grads = [torch.randn(size, device=device).to(dtype) for size in (3_000_001, 17, 40_000)]
    first = _ops.grad_norm(grads, norm_type)
    same = torch.ones((), dtype=torch.bool, device=device)
    for _ in range(50 if device == "cuda" else 5):
        same &= _ops.grad_norm(grads, norm_type) == first
    assert same


@every_norm
def test_every_element_counts(norm_type, device):
    """One that is not 0, anywhere."""
    for size in (1, 3, 1024, 1025, 8193):
        grad = torch.zeros(size + 1, device=device)
        for offset in (0, 1):
            view = grad[offset : offset + size]
            for where in {0, size // 2, size - 1}:
                view[where] = 3.0
                assert _ops.grad_norm([torch.zeros(5, device=device), view], norm_type).item() == 3.0
                view[where] = 0.0


@every_norm
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 1023, 1025, 40_001])
def test_any_alignment(norm_type, dtype, size, device):
    """Memory that begins between two vectors is clipped to the bits of aligned memory, and what is around it stays."""
    grad = torch.randn(size, device=device).to(dtype)
    aligned = grad.clone()
    expected = _ops.grad_norm([aligned], norm_type)
    _ops.clip_grads_([aligned], expected, 0.25)
    for offset in range(9):
        memory = torch.full((size + 16,), 1e4, dtype=dtype, device=device)
        view = memory[offset : offset + size].copy_(grad)
        torch.testing.assert_close(_ops.grad_norm([view], norm_type), expected, rtol=1e-6, atol=0)
        _ops.clip_grads_([view], expected, 0.25)
        assert_same(view.clone(), aligned)
        assert (memory[:offset] == 1e4).all() and (memory[offset + size :] == 1e4).all()


@pytest.mark.gpu
def test_the_host_does_not_wait():
    params = with_grads([torch.randn(1000, device="cuda") for _ in range(3)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm_(params, 0.1)
        clip_grad_norm_(params, 0.1, math.inf)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_graph():
    params = with_grads([torch.randn(1000, device="cuda"), torch.randn(33, 9, device="cuda").bfloat16()])
    clip_grad_norm_(params, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, 1.0)
    for _ in range(3):
        for param in params:
            param.grad.normal_()
        expected_norm, expected = in_double(params, 1.0, 2.0)
        graph.replay()
        torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-6, atol=0)
        for param, grad in zip(params, expected, strict=True):
            torch.testing.assert_close(param.grad, grad.to(param.dtype), rtol=2**-7, atol=1e-7)


@pytest.mark.two_gpus
@every_norm
def test_gradients_on_two_gpus(norm_type):
    params = with_grads([torch.randn(100, device=f"cuda:{i % 2}") for i in range(5)])
    cpu = with_grads([param.grad.cpu() for param in params])
    norm = clip_grad_norm_(params, 0.5, norm_type)
    torch.testing.assert_close(norm.cpu(), clip_grad_norm_(cpu, 0.5, norm_type))
    for param, other in zip(params, cpu, strict=True):
        torch.testing.assert_close(param.grad.cpu(), other.grad)


@pytest.mark.large(20)
def test_more_than_2_32_elements():
    grad = torch.zeros(2**32 + 2**20 + 3, dtype=torch.bfloat16, device="cuda")
    grad[-1], grad[2**31 + 5], grad[7] = 3.0, 6.0, -2.0
    assert _ops.grad_norm([grad]).item() == 7.0 and _ops.grad_norm([grad], math.inf).item() == 6.0
    _ops.clip_grads_([grad], torch.tensor(7.0, device="cuda"), 3.5)
    assert [grad[-1].item(), grad[2**31 + 5].item(), grad[7].item()] == [1.5, 3.0, -1.0]
