"""Gradients of attention: against the formula in float64, with at most twice the error of eager; sizes, masks, sinks,
layouts, one output alone, transforms, errors."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import grad, vmap

from attention_oracle import every_device, int32, make, probabilities, weighted  # noqa: F401
from llmkernels import attention
from oracles import DTYPES, SANITIZED_DTYPES, assert_accurate, assert_same, captured, laid_out

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NAMES = ("q", "k", "v", "sinks")


def eager(q, k, v, sinks=None, **options) -> tuple[Tensor, Tensor]:
    weights, lse = probabilities(q, k, sinks=sinks, **options)
    return weighted(weights.to(q.dtype), v), lse


def ours(q, k, v, sinks=None, **options) -> tuple[Tensor, Tensor]:
    return attention(q, k, v, sinks=sinks, return_lse=True, **options)


def gradients(function, inputs, grads, **options) -> tuple[Tensor, ...]:
    """Of q, k, v and sinks, if given."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves, **options), leaves, grads)


def grads_of(q) -> tuple[Tensor, Tensor]:
    """Random ones of y and lse."""
    return torch.randn_like(q), torch.randn(q.size(0), q.size(2), q.size(1), device=q.device)


def sizes(q, k, v, sinks, grad_y, grad_lse, **options) -> tuple[Tensor, ...]:
    """What the errors of each gradient are relative to: a sum of its terms of random signs, before any cancels."""
    weights, lse = probabilities(q, k, sinks=sinks, **options)
    y, ratio = weighted(weights, v), q.size(2) // k.size(2)
    q, k, v, y, grad_y = (t.transpose(1, 2).square() for t in (q, k, v, y, grad_y))
    k, v = (t.repeat_interleave(ratio, 1) for t in (k, v))
    delta = (grad_y * y).sum(-1).sqrt() + grad_lse.abs()
    ds = (weights * ((grad_y @ v.mT).sqrt() + delta[..., None])).square()
    scale = q.size(-1) ** -0.5 if options.get("softmax_scale") is None else abs(options["softmax_scale"])
    of_heads = ds @ k, *(x.unflatten(1, (-1, ratio)).sum(2) for x in (ds.mT @ q, weights.square().mT @ grad_y))
    of_q, of_k, of_v = (x.sqrt().amax(-1, keepdim=True).transpose(1, 2) for x in of_heads)
    of_sinks = None
    if sinks is not None:
        of_sinks = ((sinks[:, None] - lse).exp() * delta).nan_to_num().square().sum((0, 2)).sqrt()
    return of_q * scale, of_k * scale, of_v, of_sinks


def check(inputs, given=None, grads=None, slack=4, **options) -> tuple[Tensor, ...]:
    """Gradients of `given`, which has the values of `inputs`, by default `inputs` themselves. `slack`: how much larger
    than the sums the error of float32 may be: that of lse is one of all probabilities of a row."""
    grads = grads or grads_of(inputs[0])
    found = gradients(ours, given or inputs, grads, **options)
    rounded = gradients(eager, inputs, grads, **options)
    wide, wide_grads = [t.double() for t in inputs], [t.double() for t in grads]
    exact = gradients(eager, wide, wide_grads, **options)
    scales = sizes(*wide[:3], wide[3] if len(wide) > 3 else None, *wide_grads, **options)
    if inputs[0].dtype == torch.float32:
        scales = [scale if scale is None else slack * scale for scale in scales]
    for name, *results, scale in zip(NAMES, found, rounded, exact, scales, strict=False):
        assert_accurate(*results, torch.maximum(scale, results[2].abs()), f"gradient of {name}")
    return found


def with_sinks(inputs):
    q = inputs[0]
    return (*inputs, torch.randn(q.size(2), device=q.device).to(q.dtype))


@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("head_dim", [1, 8, 33, 40, 64, 96, 128, 192, 256])
def test_head_dims(device, head_dim, causal, dtype):
    for q_tokens, k_tokens in ((70, 100), (100, 70)):
        check(with_sinks(make(device, dtype, q_tokens, k_tokens, head_dim=head_dim)), causal=causal)


@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("q_tokens, k_tokens", [(1, 1), (1, 100), (17, 64), (64, 17), (257, 257), (17, 1), (33, 300)])
def test_lengths(device, q_tokens, k_tokens, causal, dtype):
    check(make(device, dtype, q_tokens, k_tokens), causal=causal)


@every_dtype
@pytest.mark.parametrize("tokens", [15, 16, 31, 32, 33, 63, 65, 127, 128, 129, 191, 193])
def test_ends_of_tiles(device, tokens, dtype):
    for head_dim in (64, 128, 256):
        check(make(device, dtype, tokens, tokens, batch=1, head_dim=head_dim, heads=2, kv_heads=1), causal=True)
        check(make(device, dtype, 65, tokens, batch=1, head_dim=head_dim, heads=2, kv_heads=1))


@every_dtype
@pytest.mark.parametrize("ratio", [1, 4, 7])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads(device, ratio, kv_heads, dtype):
    """The gradients of keys and values are sums over the query heads that have them."""
    check(make(device, dtype, 33, 70, heads=ratio * kv_heads, kv_heads=kv_heads), causal=True)


@every_dtype
@pytest.mark.parametrize("window_size", [(0, 0), (5, 0), (64, 0), (-1, 3), (7, -1), (20, 9), (-1, 110)], ids=str)
@pytest.mark.parametrize("q_tokens, k_tokens", [(100, 257), (257, 100), (130, 130)])
def test_windows(device, q_tokens, k_tokens, window_size, dtype):
    for head_dim in (64, 256):
        check(make(device, dtype, q_tokens, k_tokens, heads=2, batch=1, head_dim=head_dim), window_size=window_size)


@every_dtype
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"softcap": 2.0, "causal": True},
        {"softmax_scale": 0.3},
        {"softmax_scale": -0.2, "causal": True},
        {"softmax_scale": 0.0, "causal": True},
        {"softcap": 20.0, "softmax_scale": 0.5, "window_size": (19, 0)},
    ],
    ids=str,
)
def test_caps_and_scales(device, options, dtype):
    for head_dim in (64, 128, 256):
        check(with_sinks(make(device, dtype, 40, 140, heads=7, kv_heads=1, head_dim=head_dim)), **options)


@every_dtype
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (25, 4)}], ids=str)
def test_left_padding(device, options, dtype):
    """The padding is not read and has no gradient; nor has a query that sees nothing else."""
    k_begin = int32([0, 1, 17, 64, 129, 130, 1000, -5], device)
    q, k, v, sinks = with_sinks(make(device, dtype, 100, 130, batch=8))
    padded = k.clone(), v.clone()
    for b, begin in enumerate(k_begin.tolist()):
        for x in padded:
            x[b, : max(begin, 0)] = math.nan
    for given in ((), (sinks,)):
        grad_q, *grads, _ = *check((q, k, v, *given), (q, *padded, *given), k_begin=k_begin, **options), None
        assert (grad_q[5:7] == 0).all()
        for b, begin in enumerate(k_begin.tolist()):
            assert all((x[b, : max(begin, 0)] == 0).all() for x in grads[:2])


@every_dtype
def test_queries_that_see_no_key(device, dtype):
    inputs = make(device, dtype, 200, 70)
    grad_q, *_ = check(inputs, causal=True)
    assert (grad_q[:, :130] == 0).all()
    grads = grads_of(inputs[0])
    grads[0][:, :130], grads[1][..., :130] = math.inf, math.nan  # no number times no probability
    of_q, *_ = gradients(ours, inputs, grads, causal=True)
    assert (of_q[:, :130] == 0).all()


@every_dtype
def test_large_scores(device, dtype):
    q, k, v = make(device, dtype, 70, 200, batch=1)
    for x in gradients(ours, (q * 8, k * 8, v), grads_of(q), causal=True):
        assert x.isfinite().all()


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 40])
def test_layouts(device, head_dim, dtype):
    """Strided inputs and gradients: equal to contiguous ones bit for bit."""
    inputs = make(device, dtype, 90, 90, head_dim=head_dim)
    grads = grads_of(inputs[0])
    expected = gradients(ours, inputs, grads, causal=True)
    layouts = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: torch.cat((torch.full_like(x, math.nan), x), 2)[:, :, x.size(2) :],
        lambda x: torch.stack((x, torch.full_like(x, math.nan)))[0],
    ]
    for laid in layouts:
        strided = laid(grads[0]), laid(grads[1])
        assert_same(gradients(ours, [laid(x) for x in inputs], grads, causal=True), expected)
        assert_same(gradients(ours, inputs, strided, causal=True), expected)


@every_dtype
def test_addresses_that_are_not_aligned(device, dtype):
    inputs = make(device, dtype, 90, 90)
    grads = grads_of(inputs[0])
    offset = [laid_out(x.reshape(1, -1), "offset").view(x.shape) for x in (*inputs, grads[0])]
    check(inputs, offset[:3], causal=True)
    check(inputs, grads=(offset[3], grads[1]), causal=True)


@every_dtype
def test_expanded_gradients(device, dtype):
    inputs = make(device, dtype, 20, 30)
    q = inputs[0]
    expected = gradients(ours, inputs, (torch.ones_like(q), torch.ones(2, 4, 20, device=device)))
    leaves = [t.detach().requires_grad_() for t in inputs]
    y, lse = ours(*leaves)
    assert_same(torch.autograd.grad(y.sum() + lse.sum(), leaves), expected)


@every_dtype
def test_one_output_alone(device, dtype):
    inputs = with_sinks(make(device, dtype, 20, 30))
    grad_y, grad_lse = grads_of(inputs[0])
    of_y = gradients(ours, inputs, (grad_y, torch.zeros_like(grad_lse)), causal=True)
    of_lse = gradients(ours, inputs, (torch.zeros_like(grad_y), grad_lse), causal=True)
    for index, (given, expected) in enumerate(((grad_y, of_y), (grad_lse, of_lse))):
        leaves = [t.detach().requires_grad_() for t in inputs]
        assert_same(torch.autograd.grad(ours(*leaves, causal=True)[index], leaves, given), expected)
    q = inputs[0].detach().requires_grad_()
    assert_same(torch.autograd.grad(ours(q, *inputs[1:], causal=True)[0], q, grad_y)[0], of_y[0])


@every_dtype
def test_empty(device, dtype):
    q, k, v, sinks = with_sinks(make(device, dtype, 5, 7))
    for empty in (
        (q, k[:, :0], v[:, :0], sinks),
        (q[:0], k[:0], v[:0], sinks),
        (q[:, :0], k, v, sinks),
        (q[:, :, :0], k, v, sinks[:0]),
        (q[:, :, :0], k[:, :, :0], v[:, :, :0], sinks[:0]),
    ):
        grads = torch.randn_like(empty[0]), torch.zeros(len(empty[0]), empty[0].size(2), empty[0].size(1)).to(device)
        for x, gradient in zip(empty, gradients(ours, empty, grads), strict=True):
            assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "softcap": 2.0},
        {"window_size": (2, 1), "softmax_scale": -0.7},
        {"window_size": (3, 0), "softcap": 1.0, "k_begin": [3, 1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("q_tokens, k_tokens", [(3, 5), (5, 3), (40, 35)])
def test_gradcheck(q_tokens, k_tokens, options):
    if "k_begin" in options:
        options = options | {"k_begin": int32(options["k_begin"], "cpu")}
    inputs = with_sinks(make("cpu", torch.float64, q_tokens, k_tokens, head_dim=3, heads=2, kv_heads=1))
    inputs = [t.requires_grad_() for t in inputs]
    assert gradcheck(lambda *t: ours(*t, **options), inputs)
    assert gradcheck(lambda *t: ours(*t, **options)[0], inputs[:3])


def test_float64():
    inputs = with_sinks(make("cpu", torch.float64, 70, 100))
    grads = grads_of(inputs[0])[0], torch.randn(2, 4, 70, dtype=torch.float64)
    for options in ({}, {"causal": True, "softcap": 5.0}, {"window_size": (9, 3)}):
        for a, b in zip(*(gradients(f, inputs, grads, **options) for f in (ours, eager)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_second_derivative_is_refused(device):
    inputs = [t.requires_grad_() for t in make(device, torch.float32, 3, 5)]
    first = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="an op of llmkernels can be differentiated once"):
        torch.autograd.grad(sum(x.sum() for x in first), inputs)


def test_no_graph_without_need(device):
    q, k, v = make(device, torch.float32, 3, 5)
    with torch.no_grad():
        assert not attention(q.requires_grad_(), k, v).requires_grad
    assert not attention(q.detach(), k, v).requires_grad
    assert attention(q, k, v).requires_grad


@every_dtype
def test_equal_reruns(device, dtype):
    tokens, count = (1000, 100) if device == "cuda" else (130, 10)
    inputs = with_sinks(make(device, dtype, tokens, tokens, heads=8, head_dim=128)[:3])
    grads = grads_of(inputs[0])
    first = gradients(ours, inputs, grads, causal=True)
    for _ in range(count):
        assert_same(gradients(ours, inputs, grads, causal=True), first)


@every_dtype
def test_a_sequence_does_not_depend_on_its_batch(device, dtype):
    inputs = make(device, dtype, 130, 130, batch=3)
    grads = grads_of(inputs[0])
    whole = gradients(ours, inputs, grads, causal=True)
    for b in range(3):
        one = gradients(ours, [x[b : b + 1] for x in inputs], [x[b : b + 1] for x in grads], causal=True)
        assert_same(one, tuple(x[b : b + 1] for x in whole))


def test_bits_do_not_depend_on_the_number_of_threads():
    inputs = with_sinks(make("cpu", torch.float32, 100, 140, heads=7, kv_heads=1))
    grads, threads = grads_of(inputs[0]), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(gradients(ours, inputs, grads, causal=True))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles(device, dynamic):
    inputs = with_sinks(make(device, torch.float32, 9, 12))

    def loss(*t):
        y, lse = ours(*t, causal=True, window_size=(5, -1))
        return (y * 2).square().sum() + lse.sin().sum()

    torch._dynamo.reset()
    compiled, results = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic), []
    for function in (compiled, loss):
        leaves = [t.detach().requires_grad_() for t in inputs]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    assert_same(*results)


def test_func(device):
    q, k, v = (torch.stack((x, x + 1)) for x in make(device, torch.float32, 3, 5))

    def loss(function):
        return lambda *t: function(*t, causal=True)[0].square().sum()

    for dims in (0, (0, None, 0)):
        inputs = [x if dims == 0 or dims[i] == 0 else x[0] for i, x in enumerate((q, k, v))]
        found, expected = (vmap(grad(loss(f), (0, 1, 2)), dims)(*inputs) for f in (ours, eager))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


ERRORS = {
    r"grad_y must have the shape of q, \[2, 3, 4, 8\], got \[2, 2, 4, 8\]": {"grad_y": lambda t: t[:, :2]},
    "grad_y must have the dtype of q, Float, got Half": {"grad_y": Tensor.half},
    r"y must have the shape of q, .*, got \[1, 3, 4, 8\]": {"y": lambda t: t[:1]},
    r"lse must be Float of shape \[2, 4, 3\], got Float of shape \[2, 3, 4\]": {"lse": lambda t: t.mT},
    "lse must be Float of shape .*, got Double": {"lse": Tensor.double},
    r"grad_lse must have the shape of lse, \[2, 4, 3\], got \[1, 4, 3\]": {"grad_lse": lambda t: t[:1]},
    "v must have the shape of k": {"v": lambda t: t[:, :3]},
}


@pytest.mark.parametrize("message, change", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, change):
    q, k, v = make(device, torch.float32, 3, 5, head_dim=8)
    y, lse = ours(q, k, v)
    tensors = {"grad_y": y, "grad_lse": lse, "q": q, "k": k, "v": v, "y": y, "lse": lse}
    for name, function in change.items():
        tensors[name] = function(tensors[name])
    with pytest.raises(RuntimeError, match="attention_backward: " + message):
        torch.ops.llmkernels.attention_backward(*tensors.values(), None, None, None, None, -1, -1, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_prompts(dtype, head_dim):
    inputs = make("cuda", dtype, 1000, 1300, heads=8, kv_heads=2, head_dim=head_dim)
    for options in ({"causal": True}, {}, {"window_size": (256, 0)}, {"causal": True, "softcap": 30.0}):
        check(with_sinks(inputs), **options)


@pytest.mark.gpu
@every_dtype
def test_cuda_graph(dtype):
    inputs = [x.requires_grad_() for x in make("cuda", dtype, 130, 200, heads=8, head_dim=128)]
    k_begin, grads = int32([0, 0], "cuda"), grads_of(inputs[0])

    def step():
        return torch.autograd.grad(ours(*inputs, causal=True, k_begin=k_begin), inputs, grads)

    graph, results = captured(step)
    for starts in ([0, 3], [199, 64], [200, 17]):
        k_begin.copy_(int32(starts, "cuda"))
        with torch.no_grad():
            for x in (*inputs, *grads):
                x.normal_()
        graph.replay()
        assert_same(results, step())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SANITIZED_DTYPES, ids=str)
def test_every_path_once(dtype):
    options = {"window_size": (49, 9), "softcap": 3.0, "k_begin": int32([0, 20], "cuda")}
    for head_dim in (64, 128, 256, 40, 33):
        check(with_sinks(make("cuda", dtype, 70, 100, head_dim=head_dim)), **options)
        check(make("cuda", dtype, 40, 30, heads=7, kv_heads=1, head_dim=head_dim, batch=1), causal=True)
