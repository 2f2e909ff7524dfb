"""cross_entropy: accuracy, options, the three ways to its gradient, layouts, special values, errors."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import oracles
from llmkernels import cross_entropy
from oracles import (
    COLS,
    DEVICES,
    DTYPES,
    LAYOUTS,
    ROWS,
    assert_same,
    assert_within_ulps,
    captured,
    check_cross_entropy,
    laid_out,
)

# Where the gradient is computed.
WAYS = {
    "in_forward": {},
    "in_backward": {"gradient_in_forward": False},
    "in_place": {"inplace_backward": True},
}
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z_loss": {"lse_square_scale": 1e-2},
    "capped": {"softcap": 5.0},
    "all": {"label_smoothing": 0.3, "lse_square_scale": 1e-3, "softcap": 8.0},
}
REDUCTIONS = ["mean", "sum", "none"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def make(rows, vocab, dtype, device, ignored=0.2):
    logits = torch.randn(rows, vocab, device=device).mul_(3).to(dtype)
    target = torch.randint(vocab, (rows,), device=device)
    target[torch.rand(rows, device=device) < ignored] = -100
    if rows:
        target[0] = vocab - 1
    return logits, target


def gradient(logits, target, *weight, grad_loss=None, **options):
    """The loss and the gradient of the logits, of which a copy is taken: it may be overwritten."""
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    loss = cross_entropy(leaf.view_as(leaf), target, *weight, **options)
    grads = torch.autograd.grad(loss, leaf, torch.ones_like(loss) if grad_loss is None else grad_loss)
    return loss.detach(), *grads


def in_place_of_a_copy(logits, *others, **options):
    return cross_entropy(logits.clone(memory_format=torch.preserve_format), *others, **options)


SHAPES = [("cpu", rows, cols) for rows in ROWS for cols in COLS if rows == 7 or cols == 127]
SHAPES += [("cuda", rows, cols) for rows in ROWS for cols in COLS if "cuda" in DEVICES]


@every_dtype
@every_way
@pytest.mark.parametrize("device, rows, vocab", SHAPES)
def test_loss_and_gradient(device, rows, vocab, way, dtype):
    check_cross_entropy(in_place_of_a_copy, make(rows, vocab, dtype, device), reduction="sum", **way)


@every_dtype
@every_way
@every_option
@every_reduction
@pytest.mark.parametrize("weighted", [False, True], ids=["no_weight", "weight"])
def test_options(device, weighted, reduction, options, way, dtype):
    inputs = make(33, 1032, dtype, device)
    if weighted:
        inputs += (torch.rand(1032, device=device) + 0.5,)
    check_cross_entropy(in_place_of_a_copy, inputs, reduction=reduction, **options, **way)


# Both sides of every limit of the launch plans: the shared memory of one block and of clusters, rows read twice; a
# vocabulary whose last tile is empty.
VOCABS = [16384, 16392, 32000, 32768, 32776, 50257, 65536, 65544, 128256, 131072, 152064, 262144, 524296]


@every_dtype
@every_way
@pytest.mark.parametrize(
    "device, rows, vocab",
    [("cpu", 3, 16400)] + [("cuda", rows, v) for rows in (3, 40) for v in VOCABS if "cuda" in DEVICES],
)
def test_vocabularies(device, rows, vocab, way, dtype):
    check_cross_entropy(in_place_of_a_copy, make(rows, vocab, dtype, device), label_smoothing=0.1, **way)


@every_dtype
@every_reduction
def test_all_ways_agree(device, reduction, dtype):
    """Those of the same pass bit for bit: float16 in place is the backward's."""
    inputs = make(20, 4104, dtype, device)
    forward, backward, in_place = (gradient(*inputs, reduction=reduction, **way) for way in WAYS.values())
    assert_same(in_place, backward if dtype == torch.float16 else forward)
    assert_same(backward[0], forward[0])
    torch.testing.assert_close(backward[1], forward[1], rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


@every_way
def test_layouts(device, way):
    logits, target = make(9, 96, torch.float32, device)
    for layout in LAYOUTS:
        x = laid_out(logits, layout)
        expected = gradient(x.contiguous(), target[: len(x)], **way)
        loss, grad = gradient(x, target[: len(x)], **way)
        assert_same(loss, expected[0], layout) if layout != "offset" else torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(grad, expected[1], rtol=1e-5, atol=1e-8)
    weight = torch.rand(96, device=device)
    assert_same(
        cross_entropy(logits, target, weight),
        cross_entropy(logits, target, laid_out(weight[:, None], "every_other")[:, 0]),
    )
    assert_same(cross_entropy(logits, target), cross_entropy(logits, target.repeat_interleave(2)[::2]))


@every_way
@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (0, 6)], ids=str)
@every_reduction
def test_any_leading_shape(device, shape, reduction, way):
    logits, target = torch.randn(shape, device=device), torch.randint(6, shape[:-1], device=device)
    loss, grad = gradient(logits, target, reduction=reduction, **way)
    flat = gradient(logits.view(-1, 6), target.view(-1), reduction=reduction, **way)
    assert grad.shape == logits.shape
    assert_same((loss.view_as(flat[0]), grad.view(-1, 6)), flat)
    expected = F.cross_entropy(logits.view(-1, 6), target.view(-1), reduction=reduction)
    torch.testing.assert_close(flat[0], expected, equal_nan=True)


@every_way
def test_rows_that_are_all_ignored(device, way):
    logits, _ = make(4, 64, torch.float32, device)
    logits[2] = float("nan")  # nor seen
    target = torch.full((4,), 7, device=device)
    loss, grad = gradient(logits, target, ignore_index=7, **way)
    assert loss.isnan() and (grad == 0).all()
    for reduction in ("sum", "none"):
        loss, grad = gradient(logits, target, ignore_index=7, reduction=reduction, **way)
        assert (loss == 0).all() and (grad == 0).all()


@every_dtype
@every_way
@pytest.mark.parametrize("vocab", [64, 63, 1001, 5000, 40001])
def test_special_values(device, vocab, way, dtype):
    """Numbers far above the others of their row, too, and not where a few are looked at first (row_powers.cuh)."""
    logits, target = make(6, vocab, dtype, device, ignored=0)
    target[:] = 10
    for row, value in enumerate([float("inf"), float("-inf"), float("nan"), 1e4, -1e4]):
        logits[row, row] = value
    loss, grad = gradient(logits, target, reduction="none", **way)
    expected = F.cross_entropy(logits.float(), target, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert grad[0].isnan().any() and grad[2].isnan().all()
    assert grad[1].isfinite().all() and grad[3:].isfinite().all()


@every_way
def test_a_target_that_is_no_class(device, way):
    logits, target = make(3, 64, torch.float32, device, ignored=0)
    for wrong in (64, -1, 2**40):
        target[1] = wrong
        if device == "cpu":
            with pytest.raises(RuntimeError, match=f"target must be from 0 to 63 or ignore_index, got {wrong}"):
                gradient(logits, target, **way)
        else:
            loss, grad = gradient(logits, target, reduction="none", **way)
            assert loss[1].isnan() and grad[1].isnan().all() and loss[::2].isfinite().all()
            assert cross_entropy(logits, target, torch.ones(64, device=device)).isnan()


@every_way
def test_the_gradient_of_the_loss(device, way):
    """Twice one, and not one, and of two rows."""
    logits, target = make(3, 64, torch.float32, device, ignored=0)
    _, one = gradient(logits, target, **way)
    _, three = gradient(logits, target, grad_loss=torch.tensor(3.0, device=device), **way)
    torch.testing.assert_close(three, 3 * one)
    factors = torch.tensor([1.0, 0.0, -2.0], device=device)
    _, each = gradient(logits, target, grad_loss=factors, reduction="none", **way)
    torch.testing.assert_close(each, 3 * one * factors[:, None])
    _, same = gradient(logits, target, grad_loss=torch.ones(1, device=device)[0].expand(3), reduction="none", **way)
    torch.testing.assert_close(same, 3 * one)


SINGLE_ROUNDINGS = [(name, dtype) for name in WAYS for dtype in (torch.float16, torch.bfloat16)]
SINGLE_ROUNDINGS.remove(("in_place", torch.bfloat16))  # whose gradient has replaced the logits


@pytest.mark.parametrize("name, dtype", SINGLE_ROUNDINGS, ids=str)
@every_reduction
def test_the_gradient_is_rounded_once(device, name, dtype, reduction):
    """Whatever the gradient of the loss: that of a GradScaler is in it before it is rounded."""
    logits, target = make(64, 4104, dtype, device)
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, target, reduction=reduction)
    factor = torch.rand_like(loss.detach()) * 2.0**14
    (expected,) = torch.autograd.grad(loss, exact, factor)
    _, found = gradient(logits, target, grad_loss=factor.float(), reduction=reduction, **WAYS[name])
    assert_within_ulps(found, expected.to(dtype), 1, share=0.99)


@every_way
@pytest.mark.parametrize(
    "device, rows, vocab", [("cpu", 256, 4000)] + [("cuda", 2048, 32000)] * ("cuda" in DEVICES), ids=str
)
def test_float16_with_a_grad_scaler(device, rows, vocab, way):
    """A step with float16 logits: what reaches float32 parameters is as exact as with eager's loss."""
    values, target = make(rows, vocab, torch.float32, device, ignored=0)

    def unscaled(loss_of, dtype):
        param = torch.nn.Parameter(values.half().to(torch.promote_types(dtype, torch.float32)))
        optimizer, scaler = torch.optim.SGD([param]), torch.amp.GradScaler(device, init_scale=2.0**16)
        scaler.scale(loss_of(param.to(dtype), target)).backward()
        scaler.unscale_(optimizer)
        return param.grad.double()

    exact = unscaled(F.cross_entropy, torch.float64)
    eager = unscaled(lambda x, t: F.cross_entropy(x.float(), t), torch.float16)
    found = unscaled(lambda x, t: cross_entropy(x, t, **way), torch.float16)
    assert (found - exact).abs().mean() <= 1.01 * (eager - exact).abs().mean()
    assert (found == 0).double().mean() <= (eager == 0).double().mean() + 1e-4


def test_more_than_one_backward(device):
    logits, target = make(5, 64, torch.float32, device)
    expected = gradient(logits, target)[1]
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target)
    for factor in (1.0, 2.0, 1.0):
        (grad,) = torch.autograd.grad(loss, leaf, torch.tensor(factor, device=device), retain_graph=True)
        torch.testing.assert_close(grad, factor * expected)
        grad.zero_()  # it is the caller's
    assert_same(leaf.detach(), logits)


@every_dtype
def test_in_place(device, dtype):
    logits, target = make(5, 64, dtype, device)
    expected = gradient(logits, target, gradient_in_forward=dtype != torch.float16)[1]
    leaf = logits.clone().requires_grad_()
    given = leaf * 1
    pointer = given.data_ptr()
    loss = cross_entropy(given, target, inplace_backward=True)
    grads = []
    given.register_hook(grads.append)
    loss.backward(retain_graph=True)
    assert_same(leaf.grad, expected)
    assert_same(given.detach(), expected)
    assert given.data_ptr() == pointer
    with pytest.raises(RuntimeError, match="the backward can run once"):
        loss.backward()


@every_dtype
def test_in_place_is_told_to_autograd(device, dtype):
    """What saved the logits does not compute with the gradient."""
    logits, target = make(5, 64, dtype, device)
    given = logits.clone().requires_grad_().sigmoid()  # which saves its result
    loss = cross_entropy(given, target, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    given = logits.clone().requires_grad_() * 1
    loss = cross_entropy(given, target, inplace_backward=True)
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="must not be changed before the backward"):
        loss.backward()


def test_in_place_without_a_gradient_writes_nothing(device):
    logits, target = make(5, 64, torch.float32, device)
    before = logits.clone()
    cross_entropy(logits, target, inplace_backward=True)
    with torch.no_grad():
        cross_entropy(logits.requires_grad_(), target, inplace_backward=True)
    assert_same(logits.detach(), before)
    strided = torch.zeros(5, 70, device=device)[:, :64].copy_(before).requires_grad_()
    cross_entropy(strided, target, inplace_backward=True)
    assert_same(strided.detach(), before)


@every_option
@every_reduction
@pytest.mark.parametrize("way", [WAYS["in_forward"], WAYS["in_backward"]], ids=["in_forward", "in_backward"])
def test_gradcheck(options, reduction, way):
    logits, target = make(4, 7, torch.float64, "cpu")
    weight = torch.rand(7, dtype=torch.float64) + 0.5
    function = lambda x: cross_entropy(x, target, weight, reduction=reduction, **options, **way)  # noqa: E731
    assert gradcheck(function, logits.requires_grad_())


@every_dtype
def test_a_row_does_not_depend_on_the_others(device, dtype):
    for vocab in (65, 1032, 40008):
        logits, target = make(50, vocab, dtype, device, ignored=0)
        loss, grad = gradient(logits, target, reduction="none")
        for row in (0, 17, 49):
            alone = gradient(logits[row : row + 1], target[row : row + 1], reduction="none")
            assert_same((loss[row : row + 1], grad[row : row + 1]), alone)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@every_way
def test_compiled(device, way, dynamic):
    torch._dynamo.reset()
    logits, target = make(5, 64, torch.float32, device)
    expected = gradient(logits, target, **way)[1]
    compiled = torch.compile(
        lambda x: cross_entropy(x * 1, target, **way), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    leaf = logits.clone().requires_grad_()
    compiled(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.gpu
@every_way
def test_graph(way):
    logits, target = make(64, 1032, torch.bfloat16, "cuda")
    leaf = logits.clone().requires_grad_()

    def step():
        return torch.autograd.grad(cross_entropy(leaf * 1, target, **way), leaf)[0]

    graph, result = captured(step)
    with torch.no_grad():
        leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    assert_same(result, step())


ERRORS = {
    "logits must be float32, float16, bfloat16.* got Int": lambda x, t: cross_entropy(x.int(), t),
    "logits must have at least one dimension": lambda x, t: cross_entropy(x[0, 0], t),
    "logits must have at least one class": lambda x, t: cross_entropy(x[:, :0], t),
    "target must be Long, got Int": lambda x, t: cross_entropy(x, t.int()),
    r"target must have the shape of logits but its last .*, \[2, 8\], got \[1\]": lambda x, t: cross_entropy(x, t[:1]),
    r"weight must have shape \[8\] .* got \[4\]": lambda x, t: cross_entropy(x, t, x[0, :4]),
    "weight must be Float, got Half": lambda x, t: _op.cross_entropy(x, t, x[0].half()),
    "weight must be Float, got ComplexFloat": lambda x, t: cross_entropy(x, t, x[0] * 1j),
    "weight must not require a gradient": lambda x, t: cross_entropy(x, t, x[0].clone().requires_grad_()),
    "grad_loss must be a scalar": lambda x, t: _backward(x[0], x, t, None, x[0, :2], x[0, :2]),
    "lse must have the shape of logits": lambda x, t: _backward(x[0, 0], x, t, None, x[0], x[0, :2]),
    r"sums must have shape \[2\], got \[3\]": lambda x, t: _backward(x[0, 0], x, t, None, x[0, :2], x[0, :3]),
    "grad must have the shape of logits": lambda x, t: _backward_(x[:1] + 1, x[0, 0], x, t, None, x[0, :2], x[0, :2]),
    "logits must have contiguous rows": lambda x, t: _op.cross_entropy_(x.t().contiguous().t(), t),
    "grad must be contiguous": lambda x, t: _op.cross_entropy_scale_(x[:, :4], x.new_ones(())),
}
_op = torch.ops.llmkernels
_mean = -100, "mean", 0.0, 0.0, 0.0


def _backward(*arguments):
    return _op.cross_entropy_backward(*arguments, *_mean)


def _backward_(*arguments):
    return _op.cross_entropy_backward_(*arguments, *_mean)


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises(RuntimeError, match="cross_entropy(_|_backward_?|_scale_)?: " + message):
        call(torch.ones(2, 8, device=device), torch.ones(2, dtype=torch.long, device=device))


def test_options_out_of_range(device):
    logits, target = make(2, 8, torch.float32, device)
    with pytest.raises(ValueError, match="cross_entropy: reduction must be 'mean', 'sum' or 'none', got 'max'"):
        cross_entropy(logits, target, reduction="max")
    with pytest.raises(ValueError, match=r"cross_entropy: label_smoothing must be from 0 to 1, got 1\.5"):
        cross_entropy(logits, target, label_smoothing=1.5)


def test_the_formula_of_the_tests_is_that_of_torch():
    logits, target = make(5, 9, torch.float32, "cpu")
    weight = torch.rand(9)
    for reduction in REDUCTIONS:
        options = {"reduction": reduction, "label_smoothing": 0.1}
        torch.testing.assert_close(
            oracles.cross_entropy(logits, target, weight, **options),
            F.cross_entropy(logits, target, weight, **options),
        )
