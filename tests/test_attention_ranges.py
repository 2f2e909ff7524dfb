"""Ranges of keys of attention, of sequences and of queries: forward and backward against the formula in float64, packed
sequences against a loop over them, memory that must not be read, errors."""

import math
import random

import pytest
import torch
from torch.autograd import gradcheck

from attention_oracle import every_device, int32, make  # noqa: F401
from llmkernels import attention
from oracles import DTYPES, SANITIZED_DTYPES, assert_same, captured
from test_attention import check
from test_attention_backward import check as check_gradients
from test_attention_backward import gradients, grads_of, ours, with_sinks

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HEAD_DIMS = [64, 128, 256, 40, 33]  # every kernel: of tensor cores, and the plain one


def ascending(batch: int, count: int, low: int, high: int, device, steps: int = 6):
    """int32 (batch, count) that does not fall: a few steps, some of which are out of range."""
    rows = []
    for _ in range(batch):
        values = sorted(random.randint(low, high) for _ in range(steps))
        ends = sorted(random.randint(0, count) for _ in range(steps - 1))
        rows.append([values[sum(i >= end for end in ends)] for i in range(count)])
    return int32(rows, device)


def packed(lengths, device):
    """Of sequences in a row, queries and keys alike: k_begin and k_end of each query, (1, T)."""
    ends = torch.tensor(lengths).cumsum(0)
    of_query = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return int32([(ends - torch.tensor(lengths))[of_query].tolist()], device), int32([ends[of_query].tolist()], device)


def check_both(inputs, given=None, **options):
    """y, lse and the gradients; `inputs` may have sinks."""
    sinks = {"sinks": inputs[3]} if len(inputs) > 3 else {}
    y, lse = check(inputs[:3], given and given[:3], **options, **sinks)
    return y, lse, check_gradients(inputs, given, slack=16, **options)  # some queries see few keys, or one


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (60, 30)},
        {"causal": True, "window_size": (30, 0), "softcap": 3.0},
        {"softmax_scale": -0.2},
    ],
    ids=str,
)
def test_ranges_of_queries(device, options, head_dim, dtype):
    """Any that do not fall, with and without sinks; where they are empty, y and gradients are zeros."""
    for q_tokens, k_tokens in ((100, 170), (170, 100)):
        inputs = with_sinks(make(device, dtype, q_tokens, k_tokens, head_dim=head_dim))
        begin = ascending(2, q_tokens, -20, k_tokens // 2, device)
        end = ascending(2, q_tokens, 0, k_tokens + 40, device)
        for given in ({"k_begin": begin}, {"k_end": end}, {"k_begin": begin, "k_end": end}):
            y, lse, grads = check_both(inputs[:3], **given, **options)
            nothing = lse == -math.inf
            assert (y.transpose(1, 2)[nothing] == 0).all() and (grads[0].transpose(1, 2)[nothing] == 0).all()
        check_both(inputs, k_begin=begin, k_end=end, **options)


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 256, 33])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (25, 4)}], ids=str)
def test_ranges_of_sequences(device, options, head_dim, dtype):
    """Padding on both sides is not read, and has no gradient."""
    begin = int32([0, 0, 17, 64, 100, 0, 0, -9], device)
    end = int32([130, 129, 65, 64, 90, 1000, -3, 128], device)
    inputs = with_sinks(make(device, dtype, 100, 130, batch=8, head_dim=head_dim))
    key = torch.arange(130, device=device)
    hidden = ((key < begin[:, None]) | (key >= end[:, None]))[..., None, None]
    k, v = (x.masked_fill(hidden, math.nan) for x in inputs[1:3])
    for count in (3, 4):
        given = (inputs[0], k, v, *inputs[3:])[:count]
        y, lse, grads = check_both(inputs[:count], given, k_begin=begin, k_end=end, **options)
        assert all((x.masked_select(hidden) == 0).all() for x in grads[1:3])
        for b in (3, 4, 6):
            assert (y[b] == 0).all() and (grads[0][b] == 0).all()
            expected = inputs[3].to(lse.dtype)[:, None] if count == 4 else torch.full_like(lse[b], -math.inf)
            torch.testing.assert_close(lse[b], expected.expand_as(lse[b]), rtol=1e-6, atol=1e-6)
    given = inputs[0], k, v, inputs[3]
    of_queries = {"k_begin": begin[:, None].expand(-1, 100), "k_end": end[:, None].expand(-1, 100)}
    assert_same(ours(*given, **of_queries, **options), ours(*given, k_begin=begin, k_end=end, **options))


@every_dtype
@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 128, 129, 192])
def test_ends_of_tiles(device, tokens, dtype):
    """Ranges that begin and end where tiles do, and one before and behind."""
    for head_dim in (64, 128, 256):
        inputs = make(device, dtype, 200, 200, batch=1, head_dim=head_dim, heads=2, kv_heads=1)
        for other in (1, 7, 200 - tokens):
            begin, end = packed([tokens, other, 200 - tokens - other], device)
            check_both(inputs, causal=True, k_begin=begin, k_end=end)
        check_both(inputs, k_end=int32([tokens], device))


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 5), "softcap": 4.0}], ids=str)
def test_packed_sequences(device, options, head_dim, dtype):
    """Each is as it is alone."""
    lengths = [1, 70, 3, 128, 40, 58]
    begin, end = packed(lengths, device)
    inputs = with_sinks(make(device, dtype, 300, 300, batch=1, head_dim=head_dim))
    y, lse, grads = check_both(inputs, k_begin=begin, k_end=end, **options)
    parts = [x.split(lengths, 1) for x in inputs[:3]]
    for index, (q, k, v) in enumerate(zip(*parts, strict=True)):
        alone, alone_lse = ours(q, k, v, inputs[3], **options)
        close = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps * alone.abs().max().item()}
        torch.testing.assert_close(y.split(lengths, 1)[index], alone, **close)
        torch.testing.assert_close(lse.split(lengths, 2)[index], alone_lse, rtol=1e-5, atol=1e-5)
    assert all(x.isfinite().all() for x in grads)


@every_dtype
def test_a_prefix_that_all_of_it_sees(device, dtype):
    begin_of_text = 50
    end = torch.arange(1, 121, device=device).clamp_min(begin_of_text)[None].int().expand(2, -1)
    check_both(make(device, dtype, 120, 120, head_dim=128), k_end=end)


@every_dtype
def test_chunks(device, dtype):
    begin = (torch.arange(150, device=device) // 32 * 32)[None].int().expand(2, -1)
    check_both(make(device, dtype, 150, 150, head_dim=64), causal=True, k_begin=begin)


@every_dtype
def test_fuzz(device, dtype):
    random.seed(5)
    for _ in range(25 if device == "cpu" else 100):
        q_tokens, k_tokens = random.randint(1, 300), random.randint(1, 300)
        kv_heads, group = random.choice(((1, 1), (2, 2), (1, 7)))
        sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": random.choice((*HEAD_DIMS, 96))}
        inputs = make(device, dtype, q_tokens, k_tokens, **sizes)
        options = {"causal": random.random() < 0.5, "softcap": random.choice((0.0, 0.0, 5.0))}
        if random.random() < 0.3:
            options["window_size"] = random.randint(-1, 100), random.randint(-1, 100)
        for name in ("k_begin", "k_end"):
            kind = random.randrange(3)
            if kind < 2:
                given = ascending(2, q_tokens, -k_tokens // 3, k_tokens + 30, device, steps=random.choice((1, 3, 20)))
                options[name] = given if kind else given[:, 0]
        check_both(with_sinks(inputs) if random.random() < 0.5 else inputs, **options)


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256, 33])
def test_ranges_that_fall_are_safe(device, head_dim, dtype):
    """The results mean nothing then, but nothing else is read or written."""
    q, k, v = make(device, dtype, 200, 300, head_dim=head_dim)
    for low, high in ((-(2**31), 2**31 - 1), (-50, 350)):
        begin, end = (torch.randint(low, high, (2, 200), device=device).int() for _ in range(2))
        results = gradients(ours, (q, k, v), grads_of(q), k_begin=begin, k_end=end, causal=high < 1000)
        assert [x.shape for x in results] == [q.shape, k.shape, v.shape]


def test_strided_ranges(device):
    q, k, v = make(device, torch.float32, 30, 40)
    begin, end = ascending(2, 30, 0, 20, device), ascending(2, 30, 20, 40, device)
    expected = ours(q, k, v, k_begin=begin, k_end=end)
    for laid in (lambda x: x.t().contiguous().t(), lambda x: torch.stack((x, x + 1), 2)[..., 0]):
        assert_same(ours(q, k, v, k_begin=laid(begin), k_end=laid(end)), expected)
    rows = torch.cat((begin, end), 1)
    assert_same(ours(q, k, v, k_begin=rows[:, :30], k_end=rows[:, 30:]), expected)
    one = begin[:1].expand(2, -1)
    assert_same(ours(q, k, v, k_begin=one), ours(q, k, v, k_begin=one.contiguous()))


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"window_size": (4, 2)}], ids=str)
def test_gradcheck(options):
    random.seed(1)
    inputs = with_sinks(make("cpu", torch.float64, 9, 11, head_dim=3, heads=2, kv_heads=1))
    inputs = [t.requires_grad_() for t in inputs]
    for begin, end in ((ascending(2, 9, 0, 6, "cpu"), ascending(2, 9, 4, 11, "cpu")), (None, int32([5, 9], "cpu"))):
        given = options | {"k_begin": begin, "k_end": end}
        assert gradcheck(lambda *t: ours(*t, **given), inputs)  # noqa: B023


def test_opcheck(device):
    q, k, v = make(device, torch.float32, 5, 7, head_dim=8)
    begin, end = ascending(2, 5, 0, 4, device), ascending(2, 5, 3, 7, device)
    for ranges in ((begin, end), (begin[:, 0], end), (None, end[:, 0])):
        torch.library.opcheck(torch.ops.llmkernels.attention.default, (q, k, v, *ranges))
    q.requires_grad_()
    torch.library.opcheck(torch.ops.llmkernels.attention.default, (q, k, v, begin, end))


def test_compiles_and_maps(device):
    q, k, v = make(device, torch.float32, 9, 12)
    begin, end = ascending(2, 9, 0, 6, device), ascending(2, 9, 4, 12, device)

    def loss(q, k, v, begin, end):
        y, lse = attention(q, k, v, k_begin=begin, k_end=end, return_lse=True)
        return (y * 2).square().sum() + lse.nan_to_num(0, 0, 0).sum()

    torch._dynamo.reset()
    expected = loss(q, k, v, begin, end)
    assert_same(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v, begin, end), expected)
    mapped = torch.func.vmap(loss, (None, None, None, 0, None))(q, k, v, torch.stack((begin, begin * 0)), end)
    torch.testing.assert_close(mapped, torch.stack((expected, loss(q, k, v, begin * 0, end))))


ERRORS = {
    "{} must be int32, got Long": lambda q: q.new_zeros(2, dtype=torch.int64),
    "{} must be int32, got Float": lambda q: q.new_zeros(2, 3),
    r"{} must have shape \[2\] \(the batch\) or \[2, 3\] \(the batch and its queries\), got \[3\]": lambda q: int32(
        [0, 0, 0], q.device
    ),
    r"{} must have shape .*, got \[2, 5\]": lambda q: int32([[0] * 5] * 2, q.device),
    r"{} must have shape .*, got \[1, 3\]": lambda q: int32([[0] * 3], q.device),
    r"{} must have shape .*, got \[2, 3, 1\]": lambda q: int32([[[0]] * 3] * 2, q.device),
    r"{} must have shape .*, got \[\]": lambda q: int32(0, q.device),
    "{} must be on the device of": lambda q: int32([0, 0], "meta"),
}


@pytest.mark.parametrize("name", ["k_begin", "k_end"])
@pytest.mark.parametrize("message, make_range", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, make_range, name):
    q, k, v = make(device, torch.float32, 3, 5, head_dim=8)
    with pytest.raises(RuntimeError, match="attention: " + message.format(name)):
        attention(q, k, v, **{name: make_range(q)})
    y, lse = ours(q, k, v)
    ranges = [make_range(q) if name == of else None for of in ("k_begin", "k_end")]
    with pytest.raises(RuntimeError, match="attention_backward: " + message.format(name)):
        torch.ops.llmkernels.attention_backward(y, lse, q, k, v, y, lse, *ranges, None, None, -1, -1, 0.0)


@pytest.mark.gpu
@every_dtype
def test_cuda_graph(dtype):
    """One capture serves other ranges."""
    inputs = [x.requires_grad_() for x in make("cuda", dtype, 130, 200, head_dim=128)]
    grads, begin, end = grads_of(inputs[0]), int32([[0] * 130] * 2, "cuda"), int32([[200] * 130] * 2, "cuda")

    def step():
        results = ours(*inputs, k_begin=begin, k_end=end)
        return (*(x.detach() for x in results), *torch.autograd.grad(results, inputs, grads))

    graph, results = captured(step)
    for _ in range(3):
        begin.copy_(ascending(2, 130, 0, 150, "cuda")), end.copy_(ascending(2, 130, 50, 220, "cuda"))
        graph.replay()
        assert_same(results, step())


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_packed_sequences(dtype, head_dim):
    begin, end = packed([500, 1, 300, 127, 129, 243], "cuda")
    inputs = with_sinks(make("cuda", dtype, 1300, 1300, heads=8, kv_heads=2, head_dim=head_dim, batch=1))
    for options in ({"causal": True}, {}, {"window_size": (100, 0)}):
        check_both(inputs, k_begin=begin, k_end=end, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SANITIZED_DTYPES, ids=str)
def test_every_path_once(device, dtype):
    if device == "cpu":
        pytest.skip("the paths of GPUs")
    for head_dim in HEAD_DIMS:
        given = {"k_begin": ascending(2, 70, -5, 60, device), "k_end": ascending(2, 70, 30, 120, device)}
        check_both(with_sinks(make(device, dtype, 70, 100, head_dim=head_dim)), window_size=(49, 9), **given)
        check_both(make(device, dtype, 70, 100, head_dim=head_dim), k_end=int32([70, 100], device), causal=True)
