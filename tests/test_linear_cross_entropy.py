"""linear_cross_entropy: accuracy, options, chunks, which gradients, the gradient of the loss, autocast, errors."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import oracles
from llmkernels import cross_entropy, linear, linear_cross_entropy
from oracles import DEVICES, DTYPES, LAYOUTS, assert_accurate, assert_same, captured, in_double, laid_out

WAYS = {"in_forward": {}, "in_backward": {"gradient_in_forward": False}}
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z_loss": {"lse_square_scale": 1e-2},
    "capped": {"softcap": 5.0},
    "all": {"label_smoothing": 0.3, "lse_square_scale": 1e-3, "softcap": 8.0},
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
# Bytes of the logits: one row at a time, some, all.
every_budget = pytest.mark.parametrize(
    "max_logits_bytes", [1, 10_000, 2**29, None], ids=["row", "chunks", "whole", "default"]
)


def make(rows, vocab, k, dtype, device, ignored=0.2):
    """x, linear_weight, linear_bias, target."""
    x = torch.randn(rows, k, device=device).to(dtype)
    weight = torch.randn(vocab, k, device=device).mul_(3 * max(k, 1) ** -0.5).to(dtype)
    target = torch.randint(vocab, (rows,), device=device)
    target[torch.rand(rows, device=device) < ignored] = -100
    if rows:
        target[0] = vocab - 1
    return x, weight, torch.randn(vocab, device=device).to(dtype), target


def eager(x, linear_weight, linear_bias, target, weight=None, **options):
    """With the logits rounded to the dtype of x, as a model's are."""
    return oracles.cross_entropy(F.linear(x, linear_weight, linear_bias), target, weight, **options)


def ours(x, linear_weight, linear_bias, target, weight=None, **options):
    return linear_cross_entropy(x, linear_weight, target, linear_bias=linear_bias, weight=weight, **options)


def gradients(function, inputs, grad_loss=None, **options):
    """Loss, and the gradients of x, linear_weight and linear_bias if there is one."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs[:3]]
    loss = function(*leaves, *inputs[3:], **options)
    wanted = [t for t in leaves if t is not None]
    grads = torch.autograd.grad(loss, wanted, torch.ones_like(loss) if grad_loss is None else grad_loss)
    return loss.detach(), *grads


def check(inputs, way, max_logits_bytes=2**29, grad_loss=None, **options):
    """Errors relative to a loss of at least a guess, and to what a gradient of 1 of a logit makes: these cancel."""
    results = gradients(ours, inputs, grad_loss, max_logits_bytes=max_logits_bytes, **way, **options)
    rounded = gradients(eager, inputs, grad_loss, **options)
    exact_loss = None if grad_loss is None else grad_loss.double()
    exact = gradients(eager, in_double(inputs), exact_loss, **options)
    if not inputs[0].numel():
        scales = [None] * len(exact)
    else:
        factor = exact[0].new_ones(()) if grad_loss is None else exact_loss.abs().max()
        vocab = torch.tensor(float(len(inputs[1])))
        if options.get("reduction", "mean") == "mean" and exact[0].isfinite() and exact[0]:
            factor = factor * exact[0] / gradients(eager, in_double(inputs), **options | {"reduction": "sum"})[0]
        # grad_x adds up as many terms as there are classes; the order of them is the library's.
        terms = (vocab / 1024).clamp_min(1).sqrt().to(exact[0])
        reaches = terms * inputs[1].double().abs().max(), inputs[0].double().abs().max(), factor.new_ones(())
        # Of one class the loss is nothing, but for the roundings of logits.
        scales = [exact[0].abs() + vocab.log().clamp_min(1).to(exact[0]), *(factor.abs() * reach for reach in reaches)]
        scales = [torch.maximum(c.abs().max(), scale) for c, scale in zip(exact, scales, strict=False)]
        # grad_weight adds up as many terms as there are rows, in another order with more threads: with 300 rows eager's
        # error is 0.7e-7 with two threads, and 7e-7, as ours, with one.
        scales[2] = scales[2] * max(1.0, len(inputs[0].flatten(0, -2)) / 128) ** 0.5
    for name, a, b, c, scale in zip(NAMES, results, rounded, exact, scales, strict=False):
        assert_accurate(a, b, c, scale, name)


NAMES = ("loss", "grad_x", "grad_weight", "grad_bias")
SHAPES = [(rows, 127, 40) for rows in (0, 1, 2, 7, 255, 257)]
SHAPES += [(7, vocab, 40) for vocab in (1, 7, 8, 3584)] + [(7, 127, k) for k in (1, 8, 257)]


@every_dtype
@every_way
@pytest.mark.parametrize("rows, vocab, k", SHAPES)
def test_loss_and_gradients(device, rows, vocab, k, way, dtype):
    inputs = make(rows, vocab, k, dtype, device)
    few_rows = max(10_000, 4 * vocab * dtype.itemsize)  # PyTorch may sum a single row in another order, less exactly
    for budget in (few_rows, 2**29):
        check(inputs, way, budget, reduction="sum")


@every_dtype
@every_way
@every_option
@every_reduction
@pytest.mark.parametrize("weighted", [False, True], ids=["no_weight", "weight"])
def test_options(device, weighted, reduction, options, way, dtype):
    inputs = make(70, 264, 48, dtype, device)
    if weighted:
        inputs += (torch.rand(264, device=device) + 0.5,)
    check(inputs, way, 264 * 16 * 4, reduction=reduction, **options)


@every_dtype
@pytest.mark.parametrize(
    "device, vocab",
    [("cpu", 16400)] + [("cuda", v) for v in (32000, 50257, 128256, 152064) if "cuda" in DEVICES],
)
def test_vocabularies(device, vocab, dtype):
    """A last tile that is empty, 152064, and an odd number among them."""
    inputs = make(9, vocab, 64, dtype, device)
    check(inputs, {}, 4 * vocab * dtype.itemsize, label_smoothing=0.1)


@every_way
@every_budget
def test_it_is_cross_entropy_of_linear(device, max_logits_bytes, way):
    x, weight, bias, target = make(300, 264, 48, torch.float32, device)

    def composed(x, weight, bias, target):
        return cross_entropy(linear(x, weight, bias), target)

    expected = gradients(composed, (x, weight, bias, target))
    found = gradients(ours, (x, weight, bias, target), max_logits_bytes=max_logits_bytes, **way)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    without = gradients(ours, (x, weight, None, target), max_logits_bytes=max_logits_bytes, **way)
    expected = gradients(composed, (x, weight, None, target))
    for a, b in zip(without, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@every_dtype
@every_way
def test_many_chunks_are_as_accurate_as_one(device, way, dtype):
    """The sum of the weight's gradient is in float32: in 16 bits, 400 additions would cost most of its digits."""
    inputs = make(400, 48, 16, dtype, device, ignored=0)
    inputs[0].abs_()  # so that the sums grow
    inputs[3].fill_(5)
    check(inputs, way, 1, reduction="sum")


@every_way
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)], ids=str)
@every_reduction
def test_only_some_need_gradients(device, reduction, wanted, way):
    inputs = make(20, 64, 24, torch.float32, device)
    options = {"reduction": reduction, "max_logits_bytes": 2000, **way}
    _, *every = gradients(ours, inputs, **options)
    leaves = [t.clone().requires_grad_(bool(want)) for t, want in zip(inputs[:3], wanted, strict=True)]
    ours(*leaves, inputs[3], **options).sum().backward()
    for leaf, expected, want in zip(leaves, every, wanted, strict=True):
        assert (leaf.grad is not None) == bool(want)
        if want:
            assert_same(leaf.grad, expected)


@every_dtype
@every_way
def test_the_gradient_of_the_loss(device, way, dtype):
    inputs = make(20, 64, 24, dtype, device)
    check(inputs, way, 3000, grad_loss=torch.tensor(3.0, device=device))
    check(inputs, way, 3000, grad_loss=torch.tensor(3.0, device=device), reduction="sum")
    check(inputs, way, 3000, grad_loss=torch.randn(20, device=device), reduction="none")
    ones = torch.ones(1, device=device)[0].expand(20)
    check(inputs, way, 3000, grad_loss=ones, reduction="none")


def test_float16_with_a_grad_scaler(device):
    """Gradients that a float16 could not hold before they are scaled."""
    inputs = make(64, 4096, 16, torch.float16, device, ignored=0)
    inputs[1].mul_(0.1)
    check(inputs, {}, 2**15, grad_loss=torch.tensor(2.0**16, device=device))
    _, _, of_weight, _ = gradients(ours, inputs, torch.tensor(2.0**16, device=device))
    assert (of_weight != 0).double().mean() > 0.999


@every_way
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_float16_with_weights_of_any_size(device, size, way):
    """A mean divides by them, so gradients are in the range of float16."""
    inputs = make(64, 4096, 16, torch.float16, device, ignored=0)
    weight = size * (torch.rand(4096, device=device) + 0.5)
    scale = torch.tensor(2.0**10, device=device)
    check((*inputs, weight), way, 2**15, grad_loss=scale)
    _, *found = gradients(ours, (*inputs, weight), scale, **way)
    _, *expected = gradients(eager, (*inputs, weight), scale)
    for grad, of_eager in zip(found, expected, strict=True):
        assert (grad != 0).double().mean() > (of_eager != 0).double().mean() - 0.01


@every_way
def test_more_than_one_backward(device, way):
    inputs = make(20, 64, 24, torch.float32, device)
    _, *expected = gradients(ours, inputs)
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    loss = ours(*leaves, inputs[3], **way)
    for factor in (1.0, 2.0, 1.0):
        grads = torch.autograd.grad(loss, leaves, torch.tensor(factor, device=device), retain_graph=True)
        for grad, one in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, factor * one)
            grad.zero_()  # it is the caller's
    again = [t.clone().requires_grad_() for t in inputs[:3]]
    ours(*again, inputs[3], **way).backward()
    for leaf, one in zip(again, expected, strict=True):
        torch.testing.assert_close(leaf.grad, one)


@every_way
def test_accumulated_gradients(device, way):
    """Of a weight that two losses share, as a tied head and embedding or two micro-batches do."""
    x, weight, _, target = make(40, 64, 24, torch.float32, device, ignored=0)
    leaf = weight.clone().requires_grad_()
    for half, targets in zip(x.chunk(2), target.chunk(2), strict=True):
        (linear_cross_entropy(half, leaf, targets, **way) / 2).backward()
    whole = weight.clone().requires_grad_()
    linear_cross_entropy(x, whole, target, **way).backward()
    torch.testing.assert_close(leaf.grad, whole.grad)


@every_way
@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (0, 6)], ids=str)
@every_reduction
def test_any_leading_shape(device, shape, reduction, way):
    _, weight, bias, _ = make(1, 10, 6, torch.float32, device)
    x, target = torch.randn(shape, device=device), torch.randint(10, shape[:-1], device=device)
    loss, grad_x, *grads = gradients(ours, (x, weight, bias, target), reduction=reduction, **way)
    flat = gradients(ours, (x.view(-1, 6), weight, bias, target.view(-1)), reduction=reduction, **way)
    assert grad_x.shape == x.shape and loss.shape == (target.shape if reduction == "none" else ())
    assert_same((loss.view_as(flat[0]), grad_x.view(-1, 6), *grads), flat)
    if x.numel() == 0:
        assert all((g == 0).all() for g in grads)
        assert loss.isnan() if reduction == "mean" else not loss.any()


@every_way
@every_budget
def test_rows_that_are_all_ignored(device, max_logits_bytes, way):
    x, weight, bias, _ = make(4, 64, 24, torch.float32, device)
    target = torch.full((4,), 7, device=device)
    options = {"ignore_index": 7, "max_logits_bytes": max_logits_bytes, **way}
    loss, *grads = gradients(ours, (x, weight, bias, target), **options)
    assert loss.isnan() and not any(g.any() for g in grads)
    for reduction in ("sum", "none"):
        loss, *grads = gradients(ours, (x, weight, bias, target), reduction=reduction, **options)
        assert not loss.any() and not any(g.any() for g in grads)


@every_way
def test_targets_that_all_have_weight_zero(device, way):
    """A mean that divides by 0: NaN, its gradients too, as PyTorch's. Those of the forward were 0."""
    x, weight, bias, target = make(4, 64, 24, torch.float32, device, ignored=0)
    of_class = torch.ones(64, device=device).index_fill(0, target, 0.0)
    loss, *grads = gradients(ours, (x, weight, bias, target), weight=of_class, **way)
    assert loss.isnan() and all(g.isnan().all() for g in grads)
    loss, *grads = gradients(ours, (x, weight, bias, target.fill_(-100)), weight=of_class, **way)
    assert loss.isnan() and not any(g.any() for g in grads)


@every_way
def test_layouts(device, way):
    x, weight, bias, target = make(9, 64, 24, torch.float32, device)
    for layout in LAYOUTS:
        of_x, of_weight = laid_out(x, layout), laid_out(weight, layout)
        targets = target[: len(of_x)] % len(of_weight)
        given = of_x, of_weight, bias[: len(of_weight)], targets
        expected = gradients(ours, (of_x.contiguous(), of_weight.contiguous(), *given[2:]), **way)
        for budget in (1000, 2**29):
            found = gradients(ours, given, max_logits_bytes=budget, **way)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    strided = linear_cross_entropy(x, weight, target, linear_bias=bias.repeat_interleave(2)[::2])
    torch.testing.assert_close(strided, linear_cross_entropy(x, weight, target, linear_bias=bias))


@every_way
def test_special_values(device, way):
    inputs = make(6, 64, 8, torch.float32, device, ignored=0)
    for row, value in enumerate([float("inf"), float("nan"), 1e4]):
        inputs[0][row, row] = value
    loss, grad_x, *_ = gradients(ours, inputs, reduction="none", max_logits_bytes=600, **way)
    expected = F.cross_entropy(F.linear(*inputs[:3]), inputs[3], reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert grad_x[1].isnan().all() and grad_x[2:].isfinite().all()


@every_option
@every_reduction
@every_way
@pytest.mark.parametrize("max_logits_bytes", [2 * 7 * 8, 2**29], ids=["chunks", "whole"])
def test_gradcheck(options, reduction, way, max_logits_bytes):
    *inputs, target = make(5, 7, 3, torch.float64, "cpu")
    weight = torch.rand(7, dtype=torch.float64) + 0.5
    options = {"reduction": reduction, "max_logits_bytes": max_logits_bytes, **options, **way}
    function = lambda *t: ours(*t, target, weight, **options)  # noqa: E731
    assert gradcheck(function, [t.requires_grad_() for t in inputs])


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, dtype, way):
    inputs = make(20, 64, 24, torch.float32, device)
    rounded = gradients(ours, [t.to(dtype) for t in inputs[:3]] + [inputs[3]], **way)
    with torch.autocast(device, dtype):
        found = gradients(ours, inputs, **way)
    assert all(t.dtype == torch.float32 for t in found)
    assert_same(found, tuple(t.float() for t in rounded))
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    with torch.autocast(device, dtype):
        ours(*leaves, inputs[3], **way).backward()  # under autocast, too
    assert_same(tuple(leaf.grad for leaf in leaves), found[1:])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@every_reduction
@every_way
def test_compiled(device, way, reduction, dynamic):
    torch._dynamo.reset()
    inputs = make(20, 64, 24, torch.bfloat16, device)

    def scaled(*inputs):
        return ours(inputs[0] * 1, *inputs[1:], max_logits_bytes=2000, reduction=reduction, **way)

    compiled = torch.compile(scaled, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same(gradients(compiled, inputs), gradients(scaled, inputs))


def resident_kb(name):
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def most_bytes(run):
    """What a run takes beside what there was: by the most memory that this process has had."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what there is
    before = resident_kb("VmRSS")
    run()
    return 1024 * (resident_kb("VmHWM") - before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@every_way
def test_nothing_but_a_chunk_of_the_logits_is_allocated(way):
    """All logits are 128 MiB."""
    x, weight, _, target = make(1024, 2**15, 4, torch.float32, "cpu")
    x.requires_grad_(), weight.requires_grad_()
    linear_cross_entropy(x[:9], weight, target[:9], **way).backward()
    assert most_bytes(lambda: linear_cross_entropy(x, weight, target, max_logits_bytes=2**21, **way).backward()) < 2**25


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_chunk_on_the_cpu_sums_nothing(dtype):
    """The gradient of the weight, which its product rounds to 16 bits there, exists once, and in 16 bits.

    PyTorch's product takes memory of its own on a CPU that has no such instructions.
    """
    x, weight, _, target = make(16, 2**15, 512, dtype, "cpu")
    x.requires_grad_(), weight.requires_grad_()
    linear_cross_entropy(x[:9], weight, target[:9]).backward()
    grad_logits, out = torch.zeros(16, 2**15, dtype=dtype), torch.ones_like(weight)
    of_product = most_bytes(lambda: torch.mm(grad_logits.t(), x.detach(), out=out.detach()))
    x.grad = weight.grad = None
    assert most_bytes(lambda: linear_cross_entropy(x, weight, target).backward()) < of_product + 1.5 * weight.nbytes


@pytest.mark.gpu
@every_way
def test_memory(way):
    """What a step takes beside its results: the chunk, and the sum of the weight's gradient in float32."""
    x, weight, _, target = make(4096, 32768, 256, torch.bfloat16, "cuda")
    x.requires_grad_(), weight.requires_grad_()
    budget = 2**24
    linear_cross_entropy(x[:64], weight, target[:64]).backward()
    weight.grad = x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, target, max_logits_bytes=budget, **way).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < budget + 3 * weight.nbytes + 2 * x.nbytes + 2**25, used  # and cuBLAS's workspace


@pytest.mark.gpu
@every_way
def test_graph(way):
    inputs = make(64, 1032, 128, torch.bfloat16, "cuda")
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]

    def step():
        loss = ours(*leaves, inputs[3], max_logits_bytes=2**15, **way)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    graph, result = captured(step)
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    for a, b in zip(result, step(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


@every_way
def test_deterministic(device, way):
    inputs = make(300, 520, 64, torch.bfloat16, device)
    first = gradients(ours, inputs, max_logits_bytes=2**16, **way)
    for _ in range(20):
        assert_same(gradients(ours, inputs, max_logits_bytes=2**16, **way), first)


ERRORS = {
    "x must be float32, float16, bfloat16.* got Int": lambda x, w, t: linear_cross_entropy(x.int(), w, t),
    "x must have at least one dimension": lambda x, w, t: linear_cross_entropy(x[0, 0], w, t),
    "linear_weight must have at least one class": lambda x, w, t: linear_cross_entropy(x, w[:0], t),
    r"linear_weight must have shape \[V, 8\] .* got \[5, 4\]": lambda x, w, t: linear_cross_entropy(x, w[:, :4], t),
    "linear_weight must have the dtype of x, Float, got Half": lambda x, w, t: linear_cross_entropy(x, w.half(), t),
    r"linear_bias must have shape \[5\] .* got \[8\]": lambda x, w, t: linear_cross_entropy(x, w, t, linear_bias=x[0]),
    "target must be Long, got Int": lambda x, w, t: linear_cross_entropy(x, w, t.int()),
    r"target must have the shape of x but its last .*, \[2, 8\], got \[1\]":
        lambda x, w, t: linear_cross_entropy(x, w, t[:1]),
    r"weight must have shape \[5\] .* got \[4\]": lambda x, w, t: linear_cross_entropy(x, w, t, weight=x[0, :4]),
    "weight must not require a gradient":
        lambda x, w, t: linear_cross_entropy(x, w, t, weight=w[:, 0].clone().requires_grad_()),
    "grad_loss must be a scalar":
        lambda x, w, t: _op.linear_cross_entropy_backward(x[0], x, w, t, None, None, x[:, 0], *_options),
    "lse must have the shape of x":
        lambda x, w, t: _op.linear_cross_entropy_backward(x[0, 0], x, w, t, None, None, x[0], *_options),
    "reduction must be 'mean' or 'sum' for gradients in the forward":
        lambda x, w, t: _op.linear_cross_entropy(x, w, t, None, None, -100, "none", needs_x=True),
}  # fmt: skip
_op, _options = torch.ops.llmkernels, (-100, "mean", 0.0, 0.0, 0.0, 100, False, True, True, False)


def test_all_rows_at_once(device):
    """What the default is in bfloat16, if memory allows: gradients of the weight as of chunks, but in bfloat16."""
    x, weight, _, target = make(37, 16, 19, torch.bfloat16, device)
    inputs = x, weight, target, None, None, -100, "sum", 0.0, 0.0, 0.0, None
    chunks, once = (_op.linear_cross_entropy(*inputs, at_once, True, True, False) for at_once in (False, True))
    assert (chunks[4].dtype, once[4].dtype) == (torch.float32, torch.bfloat16)
    for found, expected in zip(once, chunks, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)


def test_default_budget_in_bfloat16(device):
    check(make(300, 64, 70, torch.bfloat16, device), {}, None)


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    inputs = torch.ones(2, 8, device=device), torch.ones(5, 8, device=device)
    with pytest.raises(RuntimeError, match="linear_cross_entropy(_backward)?: " + message):
        call(*inputs, torch.ones(2, dtype=torch.long, device=device))


def test_options_out_of_range(device):
    x, weight, _, target = make(2, 8, 4, torch.float32, device)
    with pytest.raises(ValueError, match="linear_cross_entropy: max_logits_bytes must be at least 1, got 0"):
        linear_cross_entropy(x, weight, target, max_logits_bytes=0)
    with pytest.raises(ValueError, match="linear_cross_entropy: reduction must be 'mean', 'sum' or 'none', got 'max'"):
        linear_cross_entropy(x, weight, target, reduction="max")


def test_it_is_torchs_own_where_torch_has_it():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has none")
    x, weight, bias, target = make(5, 9, 4, torch.float32, "cpu")
    named = {"linear_bias": bias, "weight": torch.rand(9), "label_smoothing": 0.1}
    for reduction in ("mean", "sum", "none"):
        expected = F.linear_cross_entropy(x, weight, target, reduction=reduction, **named)
        torch.testing.assert_close(linear_cross_entropy(x, weight, target, reduction=reduction, **named), expected)
