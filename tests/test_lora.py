"""lora_linear and add_lora: accuracy in every mix of dtypes, layouts, unneeded gradients, autocast, errors."""

import copy
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from hf_models import assert_close
from llmkernels import add_lora, lora_linear
from llmkernels.ops import lora as op
from lora_cases import DTYPES, every_dtype
from oracles import assert_accurate, differentiate, in_double, laid_out

# rows, N, K, r
SHAPES = [(33, 40, 48, 16), (1, 8, 8, 1), (7, 13, 29, 3), (64, 72, 24, 8), (130, 24, 200, 64)]
SPLIT = torch.bfloat16, torch.float32
_ops = torch.ops.llmkernels


def peft_linear(x, weight, a, b, bias=None, *, scaling=1.0):
    return peft_add(F.linear(x, weight, bias), x, a, b, scaling=scaling)


def peft_add(y, x, a, b, *, scaling=1.0):
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scaling).to(y.dtype)


@pytest.fixture(params=["whole", "split"])
def split(request, monkeypatch):
    """Whether float32 factors are split on the CPU, too: in the same way, but for the products."""
    if request.param == "split":
        monkeypatch.setattr(op, "_splits", lambda y, x, a: (x.dtype, a.dtype) == SPLIT and y.dtype == x.dtype)
    return request.param == "split"


def make(rows, n, k, r, dtypes, device):
    """x, W, A, B, b: of a size at which base and adapter both count in the result, and sums do not overflow."""
    dtype, narrow = dtypes

    def normal(*shape, size=1.0, to=dtype):
        return (torch.randn(shape, device=device) * size).to(to)

    a, b = normal(r, k, size=k**-0.5, to=narrow), normal(n, r, size=r**-0.5, to=narrow)
    return normal(rows, k), normal(n, k, size=k**-0.5), a, b, normal(n)


def compare(ours, eager, inputs, scaling=1.0, split=False, grad_y=None, adapters=(2, 3)):
    """Result and all gradients are as accurate as eager's; those of split factors have 16 bits and more."""

    def scaled(function):
        return lambda *tensors: function(*tensors, scaling=scaling)

    grads = [torch.randn_like(eager(*inputs)) if grad_y is None else grad_y]
    found, rounded = (differentiate(scaled(function), inputs, grads) for function in (ours, eager))
    exact = differentiate(scaled(eager), in_double(inputs), in_double(grads))
    for index, values in enumerate(zip(found, rounded, exact, strict=True)):
        name = "y" if index == 0 else f"gradient {index - 1}"
        if split and index - 1 in adapters:
            a, b, c = values
            assert a.dtype == b.dtype == torch.float32 and a.shape == c.shape, name
            if a.numel():
                assert (a - c).abs().max() <= 2**-15 * c.abs().max(), name
        else:
            # The rows of a product share their terms, and single ones may cancel.
            scale = values[2].abs().max() if values[2].numel() else None
            assert_accurate(*values, scale=scale, name=name)


def is_split(device, dtypes, split):
    return dtypes == SPLIT and (split or device == "cuda")


@every_dtype
@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.37, -1.5, 0.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(shape, scaling, dtypes, split, device):
    x, weight, a, b, bias = make(*shape, dtypes, device)
    split = is_split(device, dtypes, split)
    compare(lora_linear, peft_linear, (x, weight, a, b, bias), scaling, split)
    compare(lora_linear, peft_linear, (x, weight, a, b), scaling, split)
    y = F.linear(x, weight, bias)
    compare(add_lora, peft_add, (y, x, a, b), scaling, split)


@pytest.mark.large(6)
@pytest.mark.parametrize("n, k", [(3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)])
def test_layers_of_a_7b_model(n, k):
    inputs = make(2048, n, k, 16, SPLIT, "cuda")
    compare(lora_linear, peft_linear, inputs, 2.0, split=True)


@every_dtype
def test_small_numbers(dtypes, split, device):
    """B as it is after a few steps; gradients of a loss that is a mean over many tokens."""
    x, weight, a, b, bias = make(33, 40, 48, 16, dtypes, device)
    if dtypes[1] != torch.float16:  # which does not hold such numbers
        b = b * 1e-6
    grad_y = torch.randn_like(F.linear(x, weight)) * 1e-4
    compare(lora_linear, peft_linear, (x, weight, a, b, bias), 2.0, is_split(device, dtypes, split), grad_y)


@every_dtype
def test_no_rows(dtypes, split, device):
    for shape in ((0, 48), (2, 0, 48)):
        _, weight, a, b, bias = make(1, 40, 48, 16, dtypes, device)
        tensors = [t.requires_grad_() for t in (torch.zeros(shape, dtype=dtypes[0], device=device), weight, a, b, bias)]
        y = lora_linear(*tensors)
        assert y.shape == (*shape[:-1], 40)
        grads = torch.autograd.grad(y, tensors, torch.ones_like(y))
        for tensor, gradient in zip(tensors, grads, strict=True):
            assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype and not gradient.any()


@every_dtype
def test_batches_and_a_single_row(dtypes, split, device):
    x, weight, a, b, bias = make(30, 40, 48, 16, dtypes, device)
    expected = lora_linear(x, weight, a, b, bias, scaling=2.0)
    batched = lora_linear(x.view(2, 3, 5, 48), weight, a, b, bias, scaling=2.0)
    assert batched.shape == (2, 3, 5, 40)
    assert_close(batched.view(30, 40), expected, 4 * torch.finfo(dtypes[0]).eps)
    compare(lora_linear, peft_linear, (x[0], weight, a, b, bias), 2.0, is_split(device, dtypes, split))
    added = add_lora(F.linear(x, weight, bias).view(2, 15, 40), x.view(2, 15, 48), a, b, scaling=2.0)
    assert added.shape == (2, 15, 40)
    assert_close(added.view(30, 40), expected, 4 * torch.finfo(dtypes[0]).eps)


@pytest.mark.parametrize("layout", ["row_strided", "transposed", "offset", "expanded", "every_other"])
@pytest.mark.parametrize("dtypes", [SPLIT, DTYPES[0]], ids=["split", "float32"])
def test_strides(layout, dtypes, split, device):
    inputs = [laid_out(t, layout) if t.dim() == 2 else t for t in make(33, 40, 48, 16, dtypes, device)]
    grad_y = laid_out(torch.randn(33, 40, device=device).to(dtypes[0]), layout)
    compare(lora_linear, peft_linear, inputs, 2.0, is_split(device, dtypes, split), grad_y)
    y = laid_out(torch.randn(33, 40, device=device).to(dtypes[0]), layout)
    x, _, a, b, _ = inputs
    compare(add_lora, peft_add, (y, x, a, b), 2.0, is_split(device, dtypes, split), grad_y)


@pytest.mark.parametrize(
    "of_y, of_x, of_a",
    [
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float32", "float32", "bfloat16"),
        ("bfloat16", "float16", "float32"),
    ],
)
def test_mixed_dtypes(of_y, of_x, of_a, device):
    """A base that returns another dtype than it gets; adapters narrower than x."""
    y, x, a, b = torch.randn(9, 8), torch.randn(9, 16), torch.randn(4, 16) / 4, torch.randn(8, 4)
    dtypes = [getattr(torch, name) for name in (of_y, of_x, of_a, of_a)]
    inputs = [t.to(device, dtype) for t, dtype in zip((y, x, a, b), dtypes, strict=True)]
    compare(add_lora, peft_add, inputs, 2.0)


@every_dtype
@pytest.mark.parametrize("trained", ["x", "a", "b", "ab", "xab", "w", "xw", "c", ""])
def test_gradients_that_are_needed(trained, dtypes, split, device):
    """Each combination gives what all of them give, and leaves the rest alone."""
    values = dict(zip("xwabc", make(9, 8, 16, 4, dtypes, device), strict=True))
    everything = [t.requires_grad_() for t in copy.deepcopy(list(values.values()))]
    grad_y = torch.randn(9, 8, device=device).to(dtypes[0])
    expected = torch.autograd.grad(lora_linear(*everything, scaling=2.0), everything, grad_y)
    for name in trained:
        values[name].requires_grad_()
    y = lora_linear(*values.values(), scaling=2.0)
    assert y.requires_grad == bool(trained)
    if trained:
        y.backward(grad_y)
    for name, gradient in zip(values, expected, strict=True):
        if name in trained:
            torch.testing.assert_close(values[name].grad, gradient, rtol=0, atol=0)
        else:
            assert values[name].grad is None


def test_add_lora_leaves_y_alone(split, device):
    x, weight, a, b, _ = make(9, 8, 16, 4, SPLIT, device)
    y = F.linear(x, weight)
    before = y.clone()
    assert not torch.equal(add_lora(y, x, a, b), before)
    a.requires_grad_()
    add_lora(y, x, a, b).sum().backward()
    assert torch.equal(y, before)


def test_the_result_is_an_ordinary_tensor(split, device):
    """Others may write to it."""
    rows, weight, a, b, of_base = make(9, 8, 16, 4, SPLIT, device)
    a.requires_grad_()
    for x, bias in product((rows, rows[None], rows[0]), (None, of_base)):
        y = lora_linear(x, weight, a, b, bias)
        gradient = torch.autograd.grad(y.sum() * 2, a, retain_graph=True)[0]
        y += 1
        y.mul_(2)
        y.retain_grad()
        assert torch.equal(torch.autograd.grad(y.sum(), a)[0], gradient)


def test_two_backwards(split, device):
    x, weight, a, b, _ = make(9, 8, 16, 4, SPLIT, device)
    a.requires_grad_()
    y = lora_linear(x, weight, a, b).sum()
    first = torch.autograd.grad(y, a, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, a)[0], first)


def test_differentiable_once(split, device):
    tensors = [t.requires_grad_() for t in make(9, 8, 16, 4, SPLIT, device)]
    gradient = torch.autograd.grad(lora_linear(*tensors).float().sum(), tensors[2], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once"):
        gradient.sum().backward()


def test_a_changed_adapter_is_noticed(split, device):
    x, weight, a, b, _ = make(9, 8, 16, 4, SPLIT, device)
    a.requires_grad_()
    y = lora_linear(x, weight, a, b).sum()
    with torch.no_grad():
        b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, split, device):
    """Dtypes of the results and of the gradients as in eager, and no larger errors."""
    inputs = make(33, 40, 48, 16, (torch.float32, torch.float32), device)

    def under_autocast(function):
        def call(*tensors, **options):
            if tensors[0].dtype == torch.float64:
                return function(*tensors, **options)
            with torch.autocast(device, dtype):
                return function(*tensors, **options)

        return call

    compare(under_autocast(lora_linear), under_autocast(peft_linear), inputs, 2.0)
    x, weight, a, b, _ = inputs
    y = F.linear(x, weight).to(dtype)
    compare(under_autocast(add_lora), under_autocast(peft_add), (y, x, a, b), 2.0)


def test_backward_under_autocast(split, device):
    tensors = [t.requires_grad_() for t in make(33, 40, 48, 16, SPLIT, device)]
    y = lora_linear(*tensors, scaling=2.0)
    grad_y = torch.randn_like(y)
    expected = torch.autograd.grad(y, tensors, grad_y, retain_graph=True)
    with torch.autocast(device, torch.float16):
        found = torch.autograd.grad(y, tensors, grad_y)
    assert all(map(torch.equal, found, expected))


def test_compiled_and_transformed(device):
    x, weight, a, b, bias = make(9, 8, 16, 4, DTYPES[0], device)
    expected = lora_linear(x, weight, a, b, bias, scaling=2.0)
    compiled = torch.compile(lora_linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, a, b, bias, scaling=2.0), expected)
    each = torch.func.vmap(lambda row: lora_linear(row, weight, a, b, bias, scaling=2.0))
    torch.testing.assert_close(each(x), expected)
    gradient = torch.func.grad(lambda a: lora_linear(x, weight, a, b, bias).sum())(a)
    a.requires_grad_()
    lora_linear(x, weight, a, b, bias).sum().backward()
    torch.testing.assert_close(gradient, a.grad)


def parts_of(t):
    upper = t.bfloat16()
    return upper, (t - upper).bfloat16()


@pytest.mark.parametrize("layout", ["row_strided", "row_strided_aligned", "offset", "every_other"])
@pytest.mark.parametrize("shape", [*SHAPES, (70, 5, 4, 12), (3, 1, 4096, 4), (2, 300, 1, 256)], ids=str)
def test_parts(shape, layout, device):
    """Bit by bit, whatever the width of the kernel's accesses."""
    rows, n, k, r = shape
    a, b = (laid_out(torch.randn(size, device=device) * 3, layout) for size in ((r, k), (n, r)))
    y, x = torch.randn(rows, n, device=device).bfloat16(), torch.randn(rows, k, device=device).bfloat16()
    _, h, a_parts, b_parts = _ops.add_lora(y, x, a, b, 0.7, True)
    (a1, a2), (b1, b2) = parts_of(a), parts_of(b)
    assert torch.equal(a_parts, torch.cat((a1, a2, a1))) and torch.equal(b_parts, torch.cat((b1, b2, b1), 1))
    first, again, rest = h.chunk(3, 1)
    assert torch.equal(first, again)
    exact = x.double() @ a.double().t() * 0.7
    assert (first.double() + rest.double() - exact).abs().max() <= 2**-15 * exact.abs().max()
    assert (first.double() - exact).abs().max() <= 2**-7 * exact.abs().max()


def test_parts_of_what_is_not_finite(device):
    a = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45, 3e38]], device=device)
    x, y, b = (torch.zeros(shape, device=device) for shape in ((1, 5), (1, 1), (1, 1)))
    a_parts = _ops.add_lora(y.bfloat16(), x.bfloat16(), a, b, 1.0, True)[2]
    expected = torch.cat([*parts_of(a), a.bfloat16()])
    torch.testing.assert_close(a_parts, expected, rtol=0, atol=0, equal_nan=True)
    assert a_parts[0, 2].signbit()


def test_batched_gradients(split, device):
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them."""
    x, weight, a, b, _ = make(5, 8, 16, 4, SPLIT, device)
    tensors = [t.requires_grad_() for t in (x, a, b)]
    y = lora_linear(x, weight, a, b, scaling=0.5)
    grads = torch.randn(3, *y.shape, device=device).bfloat16()
    found = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
    for index, grad_y in enumerate(grads):
        expected = torch.autograd.grad(y, tensors, grad_y, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[index], b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_in_a_graph():
    tensors = [t.requires_grad_() for t in make(130, 72, 200, 16, SPLIT, "cuda")]
    grad_y = torch.randn(130, 72, device="cuda").bfloat16()

    def run():
        y = lora_linear(*tensors, scaling=0.37)
        return y, *torch.autograd.grad(y, tensors, grad_y)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(-0.5)
    graph.replay()
    for a, b in zip(found, run(), strict=True):
        assert_close(a, b, 0.02)


@pytest.mark.gpu
def test_only_products_and_our_own_kernels_run():
    """None of PyTorch's element-wise kernels, of which each costs the host as much as a product."""
    x, weight, a, b, bias = make(2048, 512, 1024, 16, SPLIT, "cuda")
    for tensor in (x, a, b):
        tensor.requires_grad_()

    def run():
        y = lora_linear(x, weight, a, b, bias, scaling=2.0)
        torch.autograd.grad(y, (x, a, b), y.detach())

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ours = [name for name in names if "llmk" in name]
    assert sum("split_kernel" in name for name in ours) == 3 and sum("sum_kernel" in name for name in ours) == 1
    assert not [name for name in names if "at::native" in name]


def test_errors_of_the_ops(device):
    x, weight, a, b, _ = make(9, 8, 16, 4, SPLIT, device)
    with pytest.raises(RuntimeError, match=r"lora_linear: split must be False, .* got BFloat16 and BFloat16"):
        _ops.lora_linear(x, weight, a.bfloat16(), b.bfloat16(), None, 1.0, True)
    with pytest.raises(RuntimeError, match="add_lora: y must have the dtype of x"):
        _ops.add_lora(x[:, :8].float(), x, a, b, 1.0, True)
    y, *parts = _ops.lora_linear(x, weight, a, b, None, 1.0, True)
    with pytest.raises(RuntimeError, match="x must be a tensor for the gradient of lora_a, got None"):
        _ops.lora_linear_backward(y, None, weight, a, b, *parts, 1.0, True, True, True, True)
    with pytest.raises(RuntimeError, match=r"h must have shape \[8, 12\], got \[9, 12\]"):
        _ops.lora_linear_backward(y[1:], x[1:], weight, a, b, *parts, 1.0, True, True, True, True)
    with pytest.raises(RuntimeError, match=r"h must be Float, got BFloat16"):
        _ops.lora_linear_backward(y, x, weight, a, b, *parts, 1.0, False, True, True, True)
    for of_x, of_a in ((False, False), (True, False), (False, True)):
        grads = _ops.lora_linear_backward(y, x, weight, a, b, *parts, 1.0, True, of_x, of_a, False)
        assert [g.numel() > 0 for g in grads] == [of_x, of_a, False]


def test_errors(device):
    x, weight, a, b, _ = make(9, 8, 16, 4, DTYPES[0], device)
    with pytest.raises(RuntimeError, match=r"lora_linear: lora_a must have shape \[r, 16\] .*, got \[4, 15\]"):
        lora_linear(x, weight, a[:, 1:], b)
    with pytest.raises(RuntimeError, match=r"lora_linear: lora_b must have shape \[8, 4\] .*, got \[8, 3\]"):
        lora_linear(x, weight, a, b[:, 1:])
    with pytest.raises(RuntimeError, match=r"add_lora: lora_b must have shape \[7, 4\] .*, got \[8, 4\]"):
        add_lora(x[:, :7], x, a, b)
    with pytest.raises(RuntimeError, match=r"add_lora: y must have shape \[9, 8\], got \[1, 8\]"):
        add_lora(x[:1, :8], x, a, b)
    with pytest.raises(RuntimeError, match="lora_b must have the dtype of lora_a"):
        lora_linear(x, weight, a, b.double())
    with pytest.raises(TypeError, match="lora_a must be a tensor, got None"):
        lora_linear(x, weight, None, b)
    with pytest.raises(TypeError, match="scaling must be a number"):
        lora_linear(x, weight, a, b, scaling="2")
