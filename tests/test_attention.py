"""attention: against the formula in float64, with at most twice the error of eager; sizes, masks, sinks, layouts,
memory that must not be read, errors."""

import contextlib
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention_oracle import every_device, int32, make, portable_kernels, probabilities, weighted  # noqa: F401
from llmkernels import attention, attention_varlen
from oracles import DTYPES, SANITIZED_DTYPES, assert_same, captured, laid_out

LENGTHS = [(1, 1), (1, 100), (17, 64), (64, 17), (64, 64), (100, 257), (257, 100), (257, 257), (17, 1)]  # Tq, Tk

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def in_double(options: dict) -> dict:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in options.items()}


def check(inputs, given=None, **options):
    """attention of `given`, which has the values of `inputs`, by default `inputs` themselves.

    Errors of a query are relative to the size of a sum of its terms of random signs, which is that of one rounding of
    each. A key too few or too many is more than that.
    """
    q, k, v = inputs
    y, lse = attention(*(given or inputs), return_lse=True, **options)
    assert y.shape == q.shape and y.dtype == q.dtype and y.is_contiguous()
    assert lse.shape == (q.size(0), q.size(2), q.size(1)) and lse.dtype == torch.float32 and lse.is_contiguous()
    weights, exact_lse = probabilities(q.double(), k.double(), **in_double(options))
    exact, size = weighted(weights, v.double()), weighted(weights.square(), v.double().square()).sqrt()
    size = torch.maximum(size, exact.abs()).amax(-1, keepdim=True).clamp_min(1e-30)
    eager_weights, eager_lse = probabilities(q, k, **options)
    eager = weighted(eager_weights.to(q.dtype), v)
    # Besides, rounding happens to the float32 scores, whose absolute errors are relative errors of the probabilities.
    scale = q.size(3) ** -0.5 if options.get("softmax_scale") is None else abs(options["softmax_scale"])
    small = torch.finfo(torch.float32).eps * (1 + q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * scale)
    floor = 2 * torch.finfo(q.dtype).eps + 4 * small
    error, allowed = ((x.double() - exact).abs() / size for x in (y, eager))
    for measure in (lambda x: x.amax((1, 3)), lambda x: x.square().mean((1, 3)).sqrt()):
        assert (measure(error) <= 2 * measure(allowed) + floor).all()
    finite = exact_lse.isfinite()
    assert (lse[~finite].double() == exact_lse[~finite]).all()
    if finite.any():
        error, allowed = ((x.double() - exact_lse)[finite].abs().max() for x in (lse, eager_lse))
        assert error <= 2 * allowed + 4 * small * (1 + exact_lse[finite].abs().max())
    assert_same(attention(*(given or inputs), **options), y)
    return y, lse


@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 192, 256])
def test_head_dims(device, head_dim, causal, dtype):
    for q_tokens, k_tokens in ((100, 257), (257, 100), (17, 17)):
        check(make(device, dtype, q_tokens, k_tokens, head_dim=head_dim), causal=causal)


@every_dtype
@pytest.mark.parametrize("head_dim", [1, 7, 33, 100])
def test_odd_head_dims(device, head_dim, dtype):
    check(make(device, dtype, 33, 70, head_dim=head_dim), causal=True)


@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("q_tokens, k_tokens", LENGTHS)
def test_lengths(device, q_tokens, k_tokens, causal, dtype):
    check(make(device, dtype, q_tokens, k_tokens), causal=causal)


@every_dtype
@pytest.mark.parametrize("tokens", [15, 16, 63, 65, 127, 128, 129, 191, 193])
def test_ends_of_tiles(device, tokens, dtype):
    for head_dim in (64, 128):
        check(make(device, dtype, tokens, tokens, batch=1, head_dim=head_dim), causal=True)
        check(make(device, dtype, 65, tokens, batch=1, head_dim=head_dim))


@every_dtype
@pytest.mark.parametrize("ratio", [1, 4, 7])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads(device, ratio, kv_heads, dtype):
    check(make(device, dtype, 33, 70, heads=ratio * kv_heads, kv_heads=kv_heads), causal=True)


@every_dtype
@pytest.mark.parametrize(
    "window_size", [(0, 0), (5, 0), (64, 0), (-1, 3), (7, -1), (20, 9), (99, 99), (0, 300), (-1, 110)], ids=str
)
@pytest.mark.parametrize("q_tokens, k_tokens", [(100, 257), (257, 100), (130, 130)])
def test_windows(device, q_tokens, k_tokens, window_size, dtype):
    check(make(device, dtype, q_tokens, k_tokens, head_dim=64), window_size=window_size)


@every_dtype
def test_causal_windows(device, dtype):
    """A causal window has no right side, whatever is given for it."""
    inputs = make(device, dtype, 100, 140)
    y, _ = check(inputs, causal=True, window_size=(20, 9))
    assert_same(attention(*inputs, window_size=(20, 0)), y)
    assert_same(attention(*inputs, causal=True), attention(*inputs, window_size=(-1, 0)))


@every_dtype
def test_windows_of_any_size(device, dtype):
    inputs = make(device, dtype, 70, 100)
    whole = attention(*inputs)
    for window in (99, 2**31 - 1, 2**31, 2**63 - 1):
        assert_same(attention(*inputs, window_size=(window, window)), whole)


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
    check(make(device, dtype, 100, 140, heads=7, kv_heads=1), **options)


@every_dtype
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (30, 0)}, {"softcap": 3.0}, {"softmax_scale": 0.5}], ids=str
)
def test_sinks(device, options, dtype):
    sinks = torch.tensor([0.0, 3.0, -4.0, 8.0], device=device, dtype=dtype)
    for q_tokens, k_tokens in ((100, 140), (140, 100)):
        check(make(device, dtype, q_tokens, k_tokens), sinks=sinks, **options)
    strided = torch.stack((sinks, sinks + 1), 1)[:, 0]
    inputs = make(device, dtype, 20, 20)
    assert_same(attention(*inputs, sinks=strided, **options), attention(*inputs, sinks=sinks, **options))


@every_dtype
def test_a_sink_of_minus_infinity_is_none(device, dtype):
    inputs = make(device, dtype, 70, 30)
    sinks = torch.full((4,), -math.inf, device=device, dtype=dtype)
    assert_same(
        attention(*inputs, causal=True, sinks=sinks, return_lse=True), attention(*inputs, causal=True, return_lse=True)
    )


@every_dtype
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (25, 4)}], ids=str)
def test_left_padding(device, options, dtype):
    """The padding is not read; a row that is nothing but padding is zeros."""
    k_begin = int32([0, 1, 17, 64, 129, 130, 1000, -5], device)
    q, k, v = make(device, dtype, 100, 130, batch=8)
    padded = k.clone(), v.clone()
    for b, begin in enumerate(k_begin.tolist()):
        for x in padded:
            x[b, : max(begin, 0)] = math.nan
    y, lse = check((q, k, v), (q, *padded), k_begin=k_begin, **options)
    assert (y[5:7] == 0).all() and (lse[5:7] == -math.inf).all()
    sinks = torch.tensor([0.0, 3.0, -4.0, 8.0], device=device, dtype=dtype)
    y, lse = check((q, k, v), (q, *padded), k_begin=k_begin, sinks=sinks, **options)
    assert (y[5:7] == 0).all() and (lse[5:7] == sinks.float()[:, None]).all()
    strided = torch.stack((k_begin, k_begin + 1), 1)[:, 0]
    assert_same(attention(q, *padded, k_begin=strided, sinks=sinks, **options), y)


@every_dtype
def test_more_queries_than_keys(device, dtype):
    """The first queries see no key."""
    y, lse = check(make(device, dtype, 200, 70), causal=True)
    assert (y[:, :130] == 0).all() and (y[:, 130:] != 0).all(-1).any()
    assert (lse[..., :130] == -math.inf).all() and lse[..., 130:].isfinite().all()


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 40])
def test_layouts(device, head_dim, dtype):
    """Strided inputs, between numbers that do not count: equal to contiguous ones bit for bit."""
    q, k, v = make(device, dtype, 90, 90, head_dim=head_dim)
    expected = attention(q, k, v, causal=True, return_lse=True)

    def equal(*inputs):
        assert_same(attention(*inputs, causal=True, return_lse=True), expected)

    nothing = torch.full_like(q, math.nan)
    packed = torch.cat((nothing, q, k, v, nothing), 2)
    equal(*packed[:, :, 4:12].split((4, 2, 2), 2))
    rows = packed.flatten(2)[..., 4 * head_dim : 12 * head_dim]  # of a projection
    equal(*(x.unflatten(2, (-1, head_dim)) for x in rows.split((4 * head_dim, 2 * head_dim, 2 * head_dim), 2)))
    equal(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    longer = [torch.cat((torch.full_like(x, math.nan), x, torch.full_like(x, math.nan)), 1) for x in (q, k, v)]
    equal(*(x[:, 90:180] for x in longer))
    several = [torch.stack((torch.full_like(x, math.nan), x, torch.full_like(x, math.nan))) for x in (q, k, v)]
    equal(*(x[1] for x in several))
    equal(*(x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v)))
    equal(*(x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)))
    one = attention(q, k[:, :, :1], v[:, :, :1], causal=True)
    assert_same(attention(q, k[:, :, :1].expand(-1, -1, 4, -1), v[:, :, :1].expand(-1, -1, 4, -1), causal=True), one)


@every_dtype
def test_addresses_and_strides_that_are_not_aligned(device, dtype):
    inputs = make(device, dtype, 90, 90)
    offset = [laid_out(x.reshape(1, -1), "offset").view(x.shape) for x in inputs]
    check(inputs, offset, causal=True)
    wider = [torch.cat((x, torch.full_like(x[..., :1], math.nan)), -1)[..., :-1] for x in inputs]
    check(inputs, wider, causal=True)
    for index in range(3):  # each alone
        check(inputs, [offset[i] if i == index else x for i, x in enumerate(inputs)], causal=True)


@every_dtype
def test_keys_that_no_query_sees(device, dtype):
    """In tiles that no query needs: not read."""
    q, k, v = make(device, dtype, 64, 1024)
    inputs = q, k.clone(), v.clone()
    k[:, :512] = v[:, :512] = math.nan
    check(inputs, (q, k, v), window_size=(100, 0))


@every_dtype
def test_empty(device, dtype):
    q, k, v = make(device, dtype, 5, 7)
    y, lse = attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (y == 0).all() and (lse == -math.inf).all() and lse.shape == (2, 4, 5)
    sinks = torch.arange(4.0, device=device).to(dtype)
    y, lse = attention(q, k[:, :0], v[:, :0], causal=True, sinks=sinks, return_lse=True)
    assert (y == 0).all() and (lse == sinks.float()[:, None]).all()
    for empty in (
        (q[:0], k[:0], v[:0]),
        (q[:, :0], k, v),
        (q[:, :, :0], k, v),
        (q[:, :, :0], k[:, :, :0], v[:, :, :0]),
    ):
        y, lse = attention(*empty, return_lse=True)
        assert y.shape == empty[0].shape and lse.shape == (len(y), y.size(2), y.size(1)) and y.numel() == 0


@every_dtype
def test_large_scores(device, dtype):
    """No overflow: e^score is relative to the largest, wherever that comes."""
    q, k, v = make(device, dtype, 70, 200, batch=1)
    q, k = q * 8, k * 8
    for i, last in ((3, False), (190, True)):
        k[:, i] *= 4
        y, lse = check((q, k, v), causal=last)
        assert y.isfinite().all() and lse.isfinite().all()


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_far_below_zero(device, head_dim, dtype):
    """All of them: probabilities are relative to the largest, not to 0, where float16 would lose them."""
    q, k, v = make(device, dtype, 130, 40, heads=2, head_dim=head_dim, batch=1)
    q[..., 0], k[..., 0] = 16, -32 * head_dim**0.5 / 16
    y, lse = check((q, k, v))
    assert (lse < -20).all() and (y != 0).any(-1).all()


@every_dtype
def test_nan_and_inf(device, dtype):
    q, k, v = make(device, dtype, 20, 20, batch=3)
    k[0, 3, 0] = math.nan
    v[1, 5, 1, 7] = math.inf
    q[2, 4, 0] = math.nan
    y = attention(q, k, v)
    assert y[0, :, :2].isnan().all() and y[0, :, 2:].isfinite().all()
    assert (y[1, :, 2:, 7] == math.inf).all() and y[1, :, :2].isfinite().all()
    assert y[2, 4, 0].isnan().all() and y[2, 4, 1:].isfinite().all() and y[2, 5:].isfinite().all()


@every_dtype
def test_against_sdpa(device, dtype):
    q, k, v = make(device, dtype, 150, 150)
    heads_first = [x.double().transpose(1, 2) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    y = attention(q, k, v, causal=True)
    assert (y - exact.transpose(1, 2)).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_prompts(dtype, head_dim):
    inputs = make("cuda", dtype, 1000, 1300, heads=8, kv_heads=2, head_dim=head_dim)
    sinks = torch.randn(8, device="cuda").to(dtype)
    for options in ({"causal": True}, {}, {"window_size": (256, 0)}, {"causal": True, "sinks": sinks, "softcap": 30.0}):
        check(inputs, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [60, 130])  # a tile of keys, which lets copies run far ahead, and a few
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_sequences(dtype, head_dim, tokens):
    """A block has ten tiles of queries or more, one after the other: they are what they are alone."""
    inputs = make("cuda", dtype, tokens, tokens, heads=8, head_dim=head_dim, batch=160)
    y, lse = attention(*inputs, causal=True, return_lse=True)
    for b in range(0, 160, 4):
        alone = attention(*(x[b : b + 4] for x in inputs), causal=True, return_lse=True)
        assert_same((y[b : b + 4], lse[b : b + 4]), alone)


def test_float64():
    inputs = make("cpu", torch.float64, 70, 100)
    sinks = torch.randn(4, dtype=torch.float64)
    for options in ({}, {"causal": True, "softcap": 5.0}, {"window_size": (9, 3), "sinks": sinks}):
        y, lse = attention(*inputs, return_lse=True, **options)
        weights, exact_lse = probabilities(*inputs[:2], **options)
        torch.testing.assert_close(y, weighted(weights, inputs[2]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)


@every_dtype
def test_equal_reruns(device, dtype):
    tokens, count = (1000, 100) if device == "cuda" else (130, 20)
    inputs = make(device, dtype, tokens, tokens, heads=8, head_dim=128)
    first = attention(*inputs, causal=True, return_lse=True)
    for _ in range(count):
        assert_same(attention(*inputs, causal=True, return_lse=True), first)


@every_dtype
def test_a_sequence_does_not_depend_on_its_batch(device, dtype):
    q, k, v = make(device, dtype, 130, 130, batch=3)
    y = attention(q, k, v, causal=True)
    for b in range(3):
        assert_same(attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True), y[b : b + 1])


def test_opcheck(device):
    op = torch.ops.llmkernels.attention.default
    q, k, v = make(device, torch.float32, 5, 7, head_dim=8)
    torch.library.opcheck(op, (q, k, v))
    sinks = torch.randn(4, device=device)
    torch.library.opcheck(
        op, (q[:, ::2], k.transpose(0, 1)[:2, :2], v[:2, :2], int32([1, 0], device), None, sinks, 0.3, 2, 1)
    )
    torch.library.opcheck(op, (q, k[:, :0], v[:, :0], None, None, None, None, -1, 0, 3.0))


@pytest.mark.parametrize("dtypes", ["float32", "as from a rotation in float32", "float16"])
def test_autocast(device, dtypes):
    """q, k, v are cast as for PyTorch's attention, whatever they are; so are sinks and masks. Gradients come back."""
    narrow = torch.float16 if dtypes == "float16" else torch.float32
    q, k, v = (torch.randn(2, 9, heads, 16, device=device).to(narrow).requires_grad_() for heads in (4, 2, 2))
    value = v.bfloat16() if dtypes.startswith("as from") else v
    mask, sinks = torch.randn(9, 9, device=device).to(narrow), torch.randn(4, device=device).to(narrow)
    packed = [t.flatten(0, 1) for t in (q, k, value)]
    lengths = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = attention(q, k, value, causal=True)
        grouped = [t.transpose(1, 2).repeat_interleave(n, 1) for t, n in ((q, 1), (k, 2), (value, 2))]
        expected = F.scaled_dot_product_attention(*grouped, is_causal=True).transpose(1, 2)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(attention_varlen(*packed, lengths, causal=True), found.flatten(0, 1))
        assert attention(q, k, value, attn_mask=mask, sinks=sinks).dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    grads = [torch.autograd.grad(y.float().square().sum(), (q, k, v)) for y in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == narrow
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_compiles(device):
    inputs = make(device, torch.float32, 9, 12)

    def doubled(*t):
        y, lse = attention(*t, causal=True, window_size=(5, -1), return_lse=True)
        return y * 2, lse * 2

    torch._dynamo.reset()
    assert_same(torch.compile(doubled, fullgraph=True, backend="aot_eager")(*inputs), doubled(*inputs))


ERRORS = {
    "q must be float32, float16, bfloat16": lambda q, k, v: attention(q.int(), k, v),
    r"q must have shape \(batch, q_tokens, heads, head_dim\), got \[2, 4, 8\]": lambda q, k, v: attention(
        q[:, 0], k, v
    ),
    r"q must have a head_dim of at least 1, got shape \[2, 3, 4, 0\]": lambda q, k, v: attention(q[..., :0], k, v),
    r"k must have shape \(batch, k_tokens, kv_heads, head_dim\), got \[5, 2, 8\]": lambda q, k, v: attention(
        q, k[0], v
    ),
    r"k must have the dtype of q, Float, got Half": lambda q, k, v: attention(q, k.half(), v.half()),
    r"k must have the batch of q, 2, got shape \[1, 5, 2, 8\]": lambda q, k, v: attention(q, k[:1], v[:1]),
    r"k must have the head_dim of q, 8, got shape \[2, 5, 2, 4\]": lambda q, k, v: attention(q, k[..., :4], v[..., :4]),
    r"v must have the dtype of k, Float, got Half": lambda q, k, v: attention(q, k, v.half()),
    r"v must have the shape of k, \[2, 5, 2, 8\], got \[2, 3, 2, 8\]": lambda q, k, v: attention(q, k, v[:, :3]),
    r"v must have the shape of k, .*, got \[2, 5, 2, 4\]": lambda q, k, v: attention(q, k, v[..., :4]),
    "q must have a multiple of the heads of k, got 3 and 2": lambda q, k, v: attention(q[:, :, :3], k, v),
    "q must have a multiple of the heads of k, got 4 and 0": lambda q, k, v: attention(q, k[:, :, :0], v[:, :, :0]),
    "k_begin must be int32, got Long": lambda q, k, v: attention(q, k, v, k_begin=q[:, 0, 0, 0].long()),
    r"k_begin must have shape \[2\] \(the batch\) or .*, got \[3\]": lambda q, k, v: attention(
        q, k, v, k_begin=int32([0, 0, 0], q.device)
    ),
    "k_begin must be on the device of q": lambda q, k, v: attention(q, k, v, k_begin=int32([0, 0], "meta")),
    "sinks must have the dtype of q, Float, got Half": lambda q, k, v: attention(q, k, v, sinks=q[0, 0, :, 0].half()),
    r"sinks must have shape \[4\] \(heads\), got \[2\]": lambda q, k, v: attention(q, k, v, sinks=q[0, 0, :2, 0]),
    "softmax_scale must be finite, got nan": lambda q, k, v: attention(q, k, v, softmax_scale=math.nan),
    "softcap must be finite and at least 0, got -1": lambda q, k, v: attention(q, k, v, softcap=-1.0),
    r"window_size must be .* of at least -1 each, got \(-2, 0\)": lambda q, k, v: attention(
        q, k, v, window_size=(-2, 0)
    ),
    r"window_size must be .* of at least -1 each, got \(4, -2\)": lambda q, k, v: attention(
        q, k, v, window_size=(4, -2)
    ),
}


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, call):
    with pytest.raises((RuntimeError, ValueError), match="attention: " + message):
        call(*make(device, torch.float32, 3, 5, head_dim=8))


@pytest.mark.gpu
def test_head_dims_beyond_what_a_gpu_takes():
    q, k, v = make("cuda", torch.bfloat16, 3, 5, head_dim=264)
    with pytest.raises(RuntimeError, match="attention: q must have a head_dim of at most 256 on a GPU, got 264"):
        attention(q, k, v)
    with pytest.raises(RuntimeError, match="attention: q is float64, which is supported on the CPU only"):
        attention(q.double(), k.double(), v.double())


def test_bits_do_not_depend_on_the_number_of_threads():
    inputs = make("cpu", torch.float32, 300, 400, heads=7, kv_heads=1)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(attention(*inputs, causal=True, return_lse=True))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.gpu
@every_dtype
def test_cuda_graph(dtype):
    """One capture serves other values, those of k_begin among them."""
    inputs = make("cuda", dtype, 130, 200, heads=8, head_dim=128)
    k_begin = int32([0, 0], "cuda")
    graph, results = captured(lambda: attention(*inputs, causal=True, k_begin=k_begin, return_lse=True))
    for starts in ([0, 3], [199, 64], [200, 17]):
        k_begin.copy_(int32(starts, "cuda"))
        for x in inputs:
            x.normal_()
        graph.replay()
        assert_same(results, attention(*inputs, causal=True, k_begin=k_begin, return_lse=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_sections(device, causal, head_dim):
    """Bit for bit what four sequences at a time give. On a Hopper GPU the keys of all do not fit into its L2 cache, so
    that it takes some heads after the other; those of four do."""
    batch, tokens, heads = (12, 131072 // head_dim + 5, 32) if device == "cuda" else (8, 17, 4)
    inputs = make(device, torch.bfloat16, tokens, tokens, heads, heads // 2, head_dim, batch)
    parts = [attention(*(x[i : i + 4] for x in inputs), causal=causal) for i in range(0, batch, 4)]
    assert_same(attention(*inputs, causal=causal), torch.cat(parts))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [contextlib.nullcontext, portable_kernels], ids=["own", "portable"])
@pytest.mark.parametrize("dtype", SANITIZED_DTYPES, ids=str)
def test_every_path_once(dtype, kernels):
    with kernels():
        run_every_path(dtype)


def run_every_path(dtype):
    sinks = torch.randn(4, device="cuda").to(dtype)
    options = {"window_size": (49, 9), "softcap": 3.0, "sinks": sinks, "k_begin": int32([0, 20], "cuda")}
    for head_dim in (64, 128, 256, 40, 33):
        check(make("cuda", dtype, 70, 100, head_dim=head_dim), **options)
        check(make("cuda", dtype, 40, 30, heads=7, kv_heads=1, head_dim=head_dim, batch=1), causal=True)
