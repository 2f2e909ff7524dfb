"""decode_attention: against the formula in float64, with at most twice the error of eager SDPA; lengths, windows,
pages, memory that must not be read, errors, CUDA graphs."""

import math
import time

import pytest
import torch
from torch.nn import functional as F

from llmkernels import decode_attention, linear
from oracles import DTYPES, assert_same, laid_out

ALL = (-1, -1)  # window_size: no window

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(
    device,
    dtype,
    lengths,
    heads=4,
    kv_heads=2,
    head_dim=64,
    tokens=1,
    capacity=64,
    cache_leftpad=None,
    window_size=ALL,
    **_,
):
    """q, k_cache, v_cache, lengths; NaN beyond each sequence's length.

    The values are large on both sides of every multiple of 16 and of both ends of the keys that a query sees. So a key
    too few or too many makes the result wrong by more than rounding does.
    """
    batch, lengths = len(lengths), int32(lengths, device)
    q = torch.randn(batch, tokens, heads, head_dim, device=device).to(dtype)
    k, v = torch.randn(2, batch, capacity, kv_heads, head_dim, device=device)
    seen = F.pad(visible(lengths, cache_leftpad, tokens, capacity, window_size, device), (1, 1))
    large = ((seen[..., 1:-1] != seen[..., :-2]) | (seen[..., 1:-1] != seen[..., 2:])).any(1)
    large[:, ::16] = large[:, 15::16] = True
    v *= torch.where(large, 30.0, 1.0)[..., None, None]
    k, v = k.to(dtype), v.to(dtype)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:] = v[b, length:] = float("nan")
    return q, k, v, lengths


def visible(lengths, cache_leftpad, tokens, capacity, window_size, device):
    """(B, T, capacity): which keys a query sees."""
    key = torch.arange(capacity, device=device)
    end = lengths.long()[:, None] - tokens + torch.arange(1, tokens + 1, device=device)
    seen = key < end[..., None]
    if cache_leftpad is not None:
        seen &= key >= cache_leftpad.long()[:, None, None]
    left, _ = window_size
    if left >= 0:
        seen &= key >= end[..., None] - 1 - left
    return seen


def oracle(q, k, v, lengths, cache_leftpad=None, softmax_scale=None, window_size=ALL, softcap=0.0):
    """In float64; zeros where there is no key."""
    _, tokens, heads, head_dim = q.shape
    group = heads // k.size(2)
    k, v = (x.double().nan_to_num().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.double().transpose(1, 2) @ k.transpose(-1, -2) * (softmax_scale or head_dim**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(lengths, cache_leftpad, tokens, k.size(2), window_size, q.device)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
    return (weights @ v).transpose(1, 2)


def eager(q, k, v, lengths, cache_leftpad=None, softmax_scale=None, window_size=ALL, softcap=0.0):
    """The same in the dtype of q, by SDPA where it can."""
    group = q.size(2) // k.size(2)
    k, v = (x.nan_to_num().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    seen = visible(lengths, cache_leftpad, q.size(1), k.size(2), window_size, q.device)[:, None]
    if not softcap:
        return (
            F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen, scale=softmax_scale)
            .nan_to_num()
            .transpose(1, 2)
        )
    scores = softcap * torch.tanh(
        q.transpose(1, 2) @ k.transpose(-1, -2) * (softmax_scale or q.size(3) ** -0.5) / softcap
    )
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num().to(q.dtype) @ v).transpose(1, 2)


def check(inputs, block_table=None, paged=None, **options):
    q, k, v, lengths = inputs
    ours = decode_attention(q, *(paged or (k, v)), lengths, block_table=block_table, **options)
    assert ours.shape == q.shape and ours.dtype == q.dtype and ours.is_contiguous()
    exact = oracle(*inputs, **options)
    error, allowed = (
        (x.double() - exact).abs() for x in (ours, eager(q.clone(), k, v, lengths, **options))
    )  # eager's kernels need q to be aligned
    # Rounding happens to the float32 scores, whose absolute errors are relative errors of the probabilities, and to the
    # probabilities, which are rounded to the dtype. Every sequence has its own scale: the more keys, the smaller.
    largest = q.double().norm(dim=-1).max() * k.double().nan_to_num().norm(dim=-1).max()
    score = largest * (options.get("softmax_scale") or q.size(3) ** -0.5)
    eps = torch.finfo(q.dtype).eps + torch.finfo(torch.float32).eps * score
    for measure in (lambda x: x.abs().amax((1, 2, 3)), lambda x: x.square().mean((1, 2, 3)).sqrt()):
        assert (measure(error) <= 2 * measure(allowed) + 4 * eps * measure(exact)).all()
    return ours


@every_dtype
@pytest.mark.parametrize("batch", [1, 2, 8, 33, 170, 1100])
def test_batches_of_mixed_lengths(device, batch, dtype):
    lengths = [(37 * b + 1) % 65 for b in range(batch)]  # 0, 1 and the capacity are among them
    check(make(device, dtype, lengths))


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "batch, length, shorter", [(100, 1, 1), (41, 64, 1), (90, 200, 9), (50, 700, 60), (27, 333, 13)]
)
def test_many_sequences_of_as_many_tiles_on_a_gpu(batch, length, shorter, head_dim, dtype):
    """More of them than a GPU has blocks: each attends to some alone before all share what is left."""
    lengths = [length - b % shorter for b in range(batch)]
    inputs = make("cuda", dtype, lengths, heads=32, kv_heads=16, head_dim=head_dim, capacity=length + 5)
    for options in ({}, {"window_size": (50, 0)}):
        check(inputs, **options)
    again = decode_attention(*inputs)
    assert_same(decode_attention(*inputs), again)


@every_dtype
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(device, length, head_dim, dtype):
    check(make(device, dtype, [length, 1024], heads=7, kv_heads=1, head_dim=head_dim, capacity=1024))


@every_dtype
@pytest.mark.parametrize("ratio", [1, 4, 7, 8, 16, 20])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 40])
def test_heads(device, ratio, head_dim, dtype):
    check(make(device, dtype, [33, 70], heads=2 * ratio, kv_heads=2, head_dim=head_dim, capacity=80))


@every_dtype
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": (6, 0)},
        {"window_size": (99, -1)},
        {"softcap": 5.0},
        {"softmax_scale": 0.3},
        {"window_size": (19, 0), "softcap": 2.0},
    ],
    ids=str,
)
def test_several_tokens_windows_and_caps(device, tokens, options, dtype):
    lengths = [tokens, 40, 150]
    check(make(device, dtype, lengths, heads=14, kv_heads=2, tokens=tokens, capacity=160, **options), **options)


@every_dtype
def test_fewer_keys_than_tokens(device, dtype):
    """The first queries see no key; their outputs are zero."""
    ours = check(make(device, dtype, [3, 0], tokens=5))
    assert (ours[0, :2] == 0).all() and (ours[0, 2:] != 0).any() and (ours[1] == 0).all()


@every_dtype
@pytest.mark.parametrize("tokens", [1, 3])
def test_starts(device, tokens, dtype):
    starts = int32([0, 17, 50 - tokens, 63 - tokens], device)
    for options in ({"cache_leftpad": starts}, {"cache_leftpad": starts, "window_size": (8, 0)}):
        q, k, v, lengths = make(device, dtype, [40, 64, 50, 64], tokens=tokens, **options)
        for b, start in enumerate(starts.tolist()):  # nor may the padding be read
            k[b, :start] = v[b, :start] = float("nan")
        check((q, k, v, lengths), **options)


def paged(k, v, page_size, device):
    """The caches cut into pages, in any order, between other pages full of NaN."""
    batch, capacity = k.shape[:2]
    per_sequence = capacity // page_size
    order = torch.randperm(batch * per_sequence + 3, device=device)[: batch * per_sequence]
    pages = []
    for x in (k, v):
        pool = x.new_full((batch * per_sequence + 3, page_size, *x.shape[2:]), float("nan"))
        pool[order] = x.view(batch * per_sequence, page_size, *x.shape[2:])
        pages.append(pool)
    return pages, order.view(batch, per_sequence).int()


@every_dtype
@pytest.mark.parametrize("page_size", [16, 32, 48, 20])
@pytest.mark.parametrize("options", [{}, {"window_size": (29, 0)}], ids=str)
def test_pages(device, page_size, options, dtype):
    inputs = make(device, dtype, [0, 1, 100, 479, 480], heads=14, capacity=480, tokens=2, head_dim=128, **options)
    pools, table = paged(inputs[1], inputs[2], page_size, device)
    ours = check(inputs, table, pools, **options)
    if page_size % 16 == 0:
        assert_same(ours, decode_attention(*inputs, **options))


@every_dtype
def test_layouts(device, dtype):
    q, k, v, lengths = make(device, dtype, [30, 64, 1], capacity=64, head_dim=64)
    expected = decode_attention(q, k, v, lengths)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    assert_same(decode_attention(q, *heads_first, lengths), expected)
    both = torch.stack((k, v), 2)  # k and v of a token side by side
    assert_same(decode_attention(q, both[:, :, 0], both[:, :, 1], lengths), expected)
    packed = torch.cat((q, q), 2)
    assert_same(decode_attention(packed[:, :, q.size(2) :], k, v, lengths), expected)
    offset = laid_out(q.view(1, -1), "offset").view(q.shape)  # not aligned: the slow kernel
    check((offset, k, v, lengths))
    strided = q.new_zeros(*q.shape[:3], 2 * q.size(3))[..., ::2].copy_(q)
    assert_same(decode_attention(strided, k, v, lengths), expected)
    assert_same(decode_attention(q, k, v, int32([30, 7, 64, 7, 1, 7], device)[::2]), expected)


def test_empty(device):
    q, k, v, lengths = make(device, torch.float32, [])
    assert decode_attention(q, k, v, lengths).shape == (0, 1, 4, 64)
    q, k, v, lengths = make(device, torch.float32, [3])
    assert decode_attention(q[:, :0], k, v, lengths).shape == (1, 0, 4, 64)


@every_dtype
def test_nan_and_inf_among_the_live_keys(device, dtype):
    q, k, v, lengths = make(device, dtype, [20, 20, 20])
    k[0, 3, 0] = float("nan")
    v[1, 5, 1, 7] = float("inf")
    y = decode_attention(q, k, v, lengths)
    assert y[0, :, :2].isnan().all() and y[0, :, 2:].isfinite().all()
    assert (y[1, :, 2:, 7] == float("inf")).all() and y[1, :, :2].isfinite().all() and y[2].isfinite().all()


@every_dtype
def test_250_equal_reruns(device, dtype):
    lengths = [3000, 1, 700] if device == "cuda" else [40, 1]
    inputs = make(device, dtype, lengths, heads=28 if device == "cuda" else 4, kv_heads=2, capacity=3000)
    first = decode_attention(*inputs)
    same = torch.ones((), dtype=torch.bool, device=device)
    for _ in range(249):
        same &= (decode_attention(*inputs) == first).all()
    assert same


def test_opcheck(device):
    inputs = make(device, torch.float32, [5, 64])
    op = torch.ops.llmkernels.decode_attention.default
    torch.library.opcheck(op, inputs)
    torch.library.opcheck(op, (*inputs, int32([0, 3], device), None, 0.2, 7, 3.0))
    pools, table = paged(inputs[1], inputs[2], 16, device)
    torch.library.opcheck(op, (inputs[0], *pools, inputs[3], None, table))


def test_compiles(device):
    inputs = make(device, torch.float32, [5, 64])
    compiled = torch.compile(
        lambda *t: decode_attention(*t, window_size=(8, 0)) * 2, fullgraph=True, backend="aot_eager"
    )
    assert_same(compiled(*inputs), decode_attention(*inputs, window_size=(8, 0)) * 2)


ERRORS = {
    "q must be float32, float16, bfloat16": lambda q, k, v, n: decode_attention(q.int(), k, v, n),
    r"q must have shape \(batch, tokens, heads, head_dim\), got \[2, 4, 8\]": lambda q, k, v, n: decode_attention(
        q[:, 0], k, v, n
    ),
    r"k_cache must have shape \(batch, capacity": lambda q, k, v, n: decode_attention(q, k[0], v, n),
    "k_cache must have the batch of q, 2, got": lambda q, k, v, n: decode_attention(q, k[:1], v[:1], n),
    "k_cache must have the head_dim of q, 8": lambda q, k, v, n: decode_attention(q, k[..., :4], v[..., :4], n),
    "k_cache must have the dtype of q": lambda q, k, v, n: decode_attention(q, k.half(), v.half(), n),
    "v_cache must have the shape of k_cache": lambda q, k, v, n: decode_attention(q, k, v[:, :3], n),
    "k_cache must be contiguous along head_dim": lambda q, k, v, n: decode_attention(
        q, k.transpose(2, 3).contiguous().transpose(2, 3), v, n
    ),
    "q must have a multiple of the heads of k_cache, got 3 and 2": lambda q, k, v, n: decode_attention(
        q[:, :, :3], k, v, n
    ),
    "cache_seqlens must be int32, got Long": lambda q, k, v, n: decode_attention(q, k, v, n.long()),
    r"cache_seqlens must have shape \[2\]": lambda q, k, v, n: decode_attention(q, k, v, n[:1]),
    r"cache_leftpad must have shape \[2\]": lambda q, k, v, n: decode_attention(q, k, v, n, cache_leftpad=n[:1]),
    "block_table must be int32": lambda q, k, v, n: decode_attention(q, k, v, n, block_table=n.long()[:, None]),
    r"block_table must have shape \(2, ": lambda q, k, v, n: decode_attention(q, k, v, n, block_table=n),
    r"window_size must be .* got \(-2, 0\)": lambda q, k, v, n: decode_attention(q, k, v, n, window_size=(-2, 0)),
    r"window_size must be .* right -1 or 0, got \(4, 1\)": lambda q, k, v, n: decode_attention(
        q, k, v, n, window_size=(4, 1)
    ),
    "softcap must be finite and at least 0, got -1": lambda q, k, v, n: decode_attention(q, k, v, n, softcap=-1.0),
    "k_cache must not require a gradient": lambda q, k, v, n: decode_attention(q, k.requires_grad_(), v, n),
}


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, call):
    q, k, v, lengths = make(device, torch.float32, [5, 5], head_dim=8, capacity=6)
    with pytest.raises((RuntimeError, ValueError), match="decode_attention: " + message):
        call(q, k, v, lengths)


def test_errors_that_only_the_cpu_can_afford():
    q, k, v, lengths = make("cpu", torch.float32, [5, 5], capacity=16)
    for bad in (17, -1):
        with pytest.raises(RuntimeError, match=rf"cache_seqlens must lie in \[0, 16\].* but \[1\] is {bad}"):
            decode_attention(q, k, v, int32([3, bad], "cpu"))
    with pytest.raises(RuntimeError, match=r"block_table must lie in \[0, 2\).* but \[1, 0\] is 2"):
        decode_attention(q, k, v, lengths, block_table=int32([[0], [2]], "cpu"))


@pytest.mark.gpu
@every_dtype
def test_bad_lengths_and_pages_do_no_harm_on_a_gpu(dtype):
    q, k, v, _ = make("cuda", dtype, [64, 64, 64])
    y = decode_attention(q, k, v, int32([1000000, -5, 64], "cuda"))
    assert_same(y[:1], decode_attention(q[:1], k[:1], v[:1], int32([64], "cuda")))
    assert (y[1] == 0).all()
    table = int32([[-1, 7], [1 << 30, 2], [0, 1]], "cuda")
    y = decode_attention(q, k[:, :32], v[:, :32], int32([64] * 3, "cuda"), block_table=table)
    torch.cuda.synchronize()
    assert y.isfinite().all()


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("tokens", [1, 3])
def test_cuda_graph_with_growing_lengths(dtype, tokens):
    q, k, v, _ = make("cuda", dtype, [4000, 4000], heads=28, kv_heads=4, head_dim=128, tokens=tokens, capacity=4000)
    lengths = int32([1, 1], "cuda")
    decode_attention(q, k, v, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_attention(q, k, v, lengths)
    for live in ([0, 1], [17, 4000], [512, 511], [3999, 2000], [4000, 4000]):
        lengths.copy_(int32(live, "cuda"))
        graph.replay()
        assert_same(y, decode_attention(q, k, v, lengths))


@pytest.mark.gpu
def test_lengths_that_the_launch_before_has_just_written():
    """The plan of the splits is made before the previous kernel ends, from the lengths that are in memory then."""
    q, k, v, _ = make("cuda", torch.bfloat16, [2000], heads=28, kv_heads=4, head_dim=128, capacity=2000)
    expected = {n: decode_attention(q, k, v, int32([n], "cuda")) for n in (3, 700, 2000)}
    lengths, large = int32([5], "cuda"), torch.randn(1 << 26, device="cuda")
    for n in [3, 2000, 700, 3, 2000] * 5:
        large.mul_(1.0)
        lengths.fill_(n)
        assert_same(decode_attention(q, k, v, lengths), expected[n])


def source_of(lengths, columns):
    """Weights with which linear() writes these int32, as pairs of bfloat16, for an x of a one and zeros."""
    source = torch.zeros(40000, columns, dtype=torch.bfloat16)
    source[-2 * len(lengths) :, 0] = int32(lengths, "cpu").view(torch.bfloat16)
    return source


def test_a_linear_writes_lengths(device):
    token = F.one_hot(torch.zeros(1, dtype=torch.long), 8).bfloat16().to(device)
    lengths = [200, 2000, 1999]  # of which 7 bits are an exponent: not that of a subnormal
    written = linear(token, source_of(lengths, 8).to(device))[0, -6:].view(torch.int32)
    assert written.tolist() == lengths


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 40, 100, 170])
def test_lengths_that_a_launch_of_ours_writes_meanwhile(batch):
    """A kernel that changes the lengths lets attention start at once, which plans its splits from the old lengths."""
    q, k, v, _ = make("cuda", torch.bfloat16, [2000] * batch, heads=28, kv_heads=4, head_dim=128, capacity=2000)
    token = F.one_hot(torch.zeros(1, dtype=torch.long, device="cuda"), 512).bfloat16()
    lives = [[first, *[2000 - 30 * i % 1990 for i in range(1, batch)]] for first in (200, 2000, 700)]
    sources = [source_of(live, 512).cuda() for live in lives]
    expected = [decode_attention(q, k, v, int32(live, "cuda")) for live in lives]
    places = set()
    for i in [0, 1, 2, 0, 1] * 8:
        torch.cuda._sleep(500_000)  # so that both are queued before the first starts
        written = linear(token, sources[i])[0]
        assert_same(decode_attention(q, k, v, written[-2 * batch :].view(torch.int32)), expected[i])
        places.add(written.data_ptr())
        del written
    assert len(places) < 40  # memory is used again: before a launch it holds the lengths of an earlier one


def long_sequences(count):
    """Inputs of launches in which several clusters of blocks share a work tile, and count arrivals."""
    options = {"heads": 28, "kv_heads": 4, "head_dim": 128, "capacity": 8000}
    return [make("cuda", torch.bfloat16, [4000 + 400 * i], **options) for i in range(count)]


@pytest.mark.gpu
def test_many_streams_at_once():
    several = long_sequences(8)
    expected = [decode_attention(*inputs) for inputs in several]
    streams = [torch.cuda.Stream(priority=priority) for _ in range(32) for priority in (0, -1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # so that all of them start together
    started, results = torch.cuda.Event(), []
    started.record()
    for stream in streams:
        stream.wait_event(started)
    for _ in range(8):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append(decode_attention(*several[i % 8]))
    torch.cuda.synchronize()
    assert_same(tuple(results), tuple(expected) * (len(results) // 8))


@pytest.mark.gpu
def test_branches_of_one_graph():
    branches = long_sequences(4)
    expected = tuple(decode_attention(*inputs) for inputs in branches for _ in range(3))
    streams, graph, results = [torch.cuda.Stream() for _ in branches], torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        origin = torch.cuda.current_stream()
        for stream, inputs in zip(streams, branches, strict=True):
            stream.wait_stream(origin)
            with torch.cuda.stream(stream):
                results += [decode_attention(*inputs) for _ in range(3)]
        for stream in streams:
            origin.wait_stream(stream)
    for _ in range(50):
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        assert_same(tuple(results), expected)


@pytest.mark.large(24)
def test_more_than_two_to_the_31_elements():
    capacity = (1 << 31) // (4 * 128) + 1000
    k = torch.empty(1, capacity, 4, 128, dtype=torch.bfloat16, device="cuda").normal_()
    v = torch.empty_like(k).normal_()
    q = torch.randn(1, 1, 28, 128, device="cuda").bfloat16()
    lengths, window = int32([capacity], "cuda"), 500
    y = decode_attention(q, k, v, lengths, window_size=(window - 1, 0))
    last = decode_attention(q, k[:, -window:], v[:, -window:], int32([window], "cuda"))
    torch.testing.assert_close(y, last, rtol=0, atol=math.sqrt(torch.finfo(torch.bfloat16).eps) / 16)


@pytest.mark.gpu
@pytest.mark.sanitizer
@every_dtype
def test_every_path_once(dtype):
    options = {"window_size": (49, 0), "softcap": 3.0}
    check(make("cuda", dtype, [0, 40, 64], heads=14, tokens=2, head_dim=128, **options), **options)
    inputs = make("cuda", dtype, [64, 33], heads=8, head_dim=96)
    pools, table = paged(inputs[1], inputs[2], 16, "cuda")
    check(inputs, table, pools)
    check(make("cuda", dtype, [2100], heads=7, kv_heads=1, capacity=2112))


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "cache_seqlens"])
def test_meta_tensors_beside_real_ones_are_refused(name):
    given = {"q": torch.randn(1, 1, 4, 64), "k_cache": torch.randn(1, 8, 2, 64), "v_cache": torch.randn(1, 8, 2, 64)}
    given["cache_seqlens"] = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="device"):
        decode_attention(**given | {name: given[name].to("meta")})


def test_bits_do_not_depend_on_the_number_of_threads():
    inputs = make("cpu", torch.float32, [700, 513], heads=14, kv_heads=2, capacity=800)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(decode_attention(*inputs))
    finally:
        torch.set_num_threads(threads)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_time_is_that_of_sdpa(dtype):
    """CPU time of one thread, the least of several. One query at a time would take four times as long as SDPA."""
    q = torch.randn(1, 1, 28, 128, dtype=dtype)
    k, v = torch.randn(2, 1, 2048, 4, 128, dtype=dtype)
    lengths = int32([2048], "cpu")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def cpu_time(call):
        times = []
        for _ in range(8):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = cpu_time(lambda: decode_attention(q, k, v, lengths))
        peer = cpu_time(lambda: F.scaled_dot_product_attention(*heads_first, enable_gqa=True))
    finally:
        torch.set_num_threads(threads)
    assert ours <= 1.5 * peer, f"{ours * 1e6:.0f} us, SDPA {peer * 1e6:.0f} us"
