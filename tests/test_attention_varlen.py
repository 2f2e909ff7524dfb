"""attention_varlen: as attention of each sequence alone, forward and backward; tokens of no sequence; compiled, in CUDA
graphs; errors."""

import math
import random

import pytest
import torch

from attention_oracle import every_device, int32, make  # noqa: F401
from llmkernels import attention, attention_varlen
from oracles import DTYPES, assert_same, captured
from test_attention_ranges import HEAD_DIMS

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LENGTHS = {  # of queries, of keys
    "equal": ([1, 70, 0, 128, 3, 58], None),
    "different": ([5, 70, 1, 0, 64, 30], [70, 5, 200, 9, 64, 0]),
    "one": ([65], [130]),
    "none": ([], []),
}
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (20, 5)},
    {"window_size": (-1, 3), "softcap": 4.0},
    {"causal": True, "window_size": (9, -1), "softmax_scale": 0.3},
    {"window_size": (2**40, 2**40)},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def offsets(lengths, device):
    return int32([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], device)


def draw(device, dtype, q_lengths, k_lengths, behind=0, **sizes):
    """q, k, v, and `behind` tokens more than the sequences have."""
    inputs = make(device, dtype, sum(q_lengths) + behind, sum(k_lengths or q_lengths) + behind, batch=1, **sizes)
    return [x[0].requires_grad_() for x in inputs]


def one_by_one(q, k, v, q_lengths, k_lengths, **options):
    """y and lse by `attention` of one sequence after the other; zeros and no score for what belongs to none."""
    ys, lses, q_at, k_at = [], [], 0, 0
    for q_count, k_count in zip(q_lengths, k_lengths or q_lengths, strict=True):
        keys = slice(k_at, k_at + k_count)
        y, lse = attention(q[None, q_at : q_at + q_count], k[None, keys], v[None, keys], return_lse=True, **options)
        ys.append(y[0]), lses.append(lse[0])
        q_at, k_at = q_at + q_count, k_at + k_count
    sinks = options.get("sinks")
    nothing = torch.full((q.size(1), len(q) - q_at), -math.inf, device=q.device)
    lses.append(nothing if sinks is None else nothing.copy_(sinks.detach().float()[:, None]))
    return torch.cat([*ys, torch.zeros_like(q[q_at:])]), torch.cat(lses, 1)


def check(inputs, q_lengths, k_lengths, **options):
    q = inputs[0]
    cu_seqlens = [offsets(x, q.device) for x in (q_lengths, k_lengths) if x is not None]
    found = attention_varlen(*inputs, *cu_seqlens, return_lse=True, **options)
    expected = one_by_one(*inputs, q_lengths, k_lengths, **options)
    sinks = options.get("sinks")
    leaves = inputs if sinks is None else [*inputs, sinks]
    grad_y, grad_lse = torch.randn_like(q), torch.randn_like(expected[1])
    grad_lse[:, sum(q_lengths) :] = 0
    results = []
    for y, lse in (found, expected):
        loss = (y * grad_y).sum() + (lse * grad_lse).masked_fill(lse == -math.inf, 0.0).sum()
        loss = loss + 0 * sum(x.sum() for x in leaves)  # of nothing, too
        grads = torch.autograd.grad(loss, leaves)
        results.append((y, lse, *grads))
    for ours, alone in zip(*results, strict=True):
        assert ours.shape == alone.shape and ours.dtype == alone.dtype
        if alone.numel():
            finite = alone.detach()[alone.isfinite()].abs()
            size = finite.max().item() if finite.numel() else 0.0
            roundings = 40 if q.dtype == torch.float32 else 8  # sums are in another order
            close = roundings * torch.finfo(q.dtype).eps * max(size, 1.0)
            torch.testing.assert_close(ours, alone, rtol=0, atol=close)
    assert found[0].is_contiguous() and found[1].shape == (q.size(1), len(q))
    assert_same(attention_varlen(*inputs, *cu_seqlens, **options), found[0])


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@every_option
def test_against_a_loop(device, options, head_dim, dtype):
    sinks = torch.randn(4, device=device).to(dtype).requires_grad_()
    for q_lengths, k_lengths in LENGTHS.values():
        inputs = draw(device, dtype, q_lengths, k_lengths, head_dim=head_dim)
        check(inputs, q_lengths, k_lengths, **options)
        if q_lengths:
            check(inputs, q_lengths, k_lengths, sinks=sinks, **options)


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_slopes(device, head_dim, dtype):
    """Distances are those within a sequence, whatever is before it."""
    slopes = torch.tensor([0.5, 0.25, 0.0, 0.01], device=device)
    for behind in (0, 20):
        inputs = draw(device, dtype, LENGTHS["equal"][0], None, behind, head_dim=head_dim)
        for options in OPTIONS:
            check(inputs, *LENGTHS["equal"], alibi_slopes=slopes, **options)
    cu_seqlens = offsets(LENGTHS["equal"][0], device)
    expected = attention_varlen(*inputs, cu_seqlens, alibi_slopes=slopes)
    assert_same(attention_varlen(*inputs, cu_seqlens, cu_seqlens, alibi_slopes=slopes), expected)
    assert not torch.equal(attention_varlen(*inputs, cu_seqlens), expected)


@every_dtype
def test_tokens_behind_the_last_sequence(device, dtype):
    """They see nothing, and nobody sees them."""
    for q_lengths, k_lengths in LENGTHS.values():
        inputs = draw(device, dtype, q_lengths, k_lengths, behind=20)
        for options in OPTIONS:
            check(inputs, q_lengths, k_lengths, **options)
        check(inputs, q_lengths, k_lengths, sinks=torch.ones(4, device=device, dtype=dtype).requires_grad_())


def test_without_tokens(device):
    q, k, v = draw(device, torch.float32, [], [])
    for cu_seqlens in ([0], [0, 0, 0]):
        y, lse = attention_varlen(q, k, v, int32(cu_seqlens, device), causal=True, return_lse=True)
        assert y.shape == (0, 4, 64) and lse.shape == (4, 0)


@every_dtype
def test_fuzz(device, dtype):
    random.seed(7)
    for _ in range(20 if device == "cpu" else 100):
        count = random.randint(1, 9)
        q_lengths = [random.choice((0, 1, random.randint(0, 150))) for _ in range(count)]
        k_lengths = random.choice((None, [random.choice((0, 1, random.randint(0, 150))) for _ in range(count)]))
        kv_heads, group = random.choice(((1, 1), (2, 2), (1, 7)))
        sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": random.choice(HEAD_DIMS)}
        options = {"causal": random.random() < 0.5}
        if random.random() < 0.5:
            options["window_size"] = random.randint(-1, 60), random.randint(-1, 60)
        check(
            draw(device, dtype, q_lengths, k_lengths, random.choice((0, 5)), **sizes), q_lengths, k_lengths, **options
        )


def test_float64():
    inputs = draw("cpu", torch.float64, *LENGTHS["different"])
    cu_seqlens = [offsets(x, "cpu") for x in LENGTHS["different"]]
    y, lse = attention_varlen(*inputs, *cu_seqlens, causal=True, return_lse=True)
    expected = one_by_one(*inputs, *LENGTHS["different"], causal=True)
    torch.testing.assert_close(y, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1].double(), rtol=1e-12, atol=1e-12)


def test_layouts(device):
    """Slices of a packed projection, and strided lengths."""
    q, k, v = draw(device, torch.float32, [30, 40], None)
    cu_seqlens = offsets([30, 40], device)
    expected = attention_varlen(q, k, v, cu_seqlens, causal=True)
    packed = torch.cat((q, k, v), 1)
    assert_same(attention_varlen(*packed.split((4, 2, 2), 1), cu_seqlens, causal=True), expected)
    strided = torch.stack((cu_seqlens, cu_seqlens + 1), 1)[:, 0]
    assert_same(attention_varlen(q, k, v, strided, strided, causal=True), expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles(device, dynamic):
    inputs = draw(device, torch.float32, *LENGTHS["different"])
    cu_seqlens = [offsets(x, device) for x in LENGTHS["different"]]

    def loss(*t):
        y, lse = attention_varlen(*t, *cu_seqlens, causal=True, window_size=(50, 0), return_lse=True)
        return (y * 2).square().sum() + lse.sigmoid().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same(*(torch.autograd.grad(function(*inputs), inputs) for function in (compiled, loss)))


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, strict):
    """With any number of sequences and of tokens."""

    class Module(torch.nn.Module):
        def forward(self, q, k, v, *cu_seqlens):
            return attention_varlen(q, k, v, *cu_seqlens, causal=True, window_size=(3, 0))

    def inputs(*lengths):
        tensors = [x.detach() for x in draw(device, torch.float32, *lengths)]
        return *tensors, *(offsets(x, device) for x in lengths)

    first = {0: torch.export.Dim.DYNAMIC}
    shapes = first, first, first, (first, first)
    exported = torch.export.export(Module(), inputs([5, 7, 1], [5, 9, 0]), dynamic_shapes=shapes, strict=strict)
    for lengths in (([5, 7, 1], [5, 9, 0]), ([30, 4], [4, 50])):
        given = inputs(*lengths)
        assert_same(exported.module()(*given), Module()(*given))


ERRORS = {
    r"q must have shape \(total_q, heads, head_dim\), got \[1, 6, 4, 64\]": lambda q, k, v, cu: (q[None], k, v, cu),
    r"k must have shape \(total_k, kv_heads, head_dim\), got \[6, 128\]": lambda q, k, v, cu: (q, k.flatten(1), v, cu),
    r"v must have the shape of k, \[6, 2, 64\], got \[5, 2, 64\]": lambda q, k, v, cu: (q, k, v[:5], cu),
    "k must have the dtype of q, Float, got Half": lambda q, k, v, cu: (q, k.half(), v.half(), cu),
    r"k must have the head_dim of q, 64, got shape \[6, 2, 32\]": lambda q, k, v, cu: (q, k[..., :32], v[..., :32], cu),
    "q must have a multiple of the heads of k, got 3 and 2": lambda q, k, v, cu: (q[:, :3], k, v, cu),
    "q must be float32, float16, bfloat16": lambda q, k, v, cu: (q.int(), k, v, cu),
    r"cu_seqlens_q must be int32, got torch.int64": lambda q, k, v, cu: (q, k, v, cu.long()),
    r"cu_seqlens_q must have shape \(sequences \+ 1,\), got \[1, 3\]": lambda q, k, v, cu: (q, k, v, cu[None]),
    r"cu_seqlens_q must have shape \(sequences \+ 1,\), got \[0\]": lambda q, k, v, cu: (q, k, v, cu[:0]),
    "cu_seqlens_q must be on the device of q, .*, got meta": lambda q, k, v, cu: (q, k, v, cu.to("meta")),
    "cu_seqlens_k must be int32, got torch.float32": lambda q, k, v, cu: (q, k, v, cu, cu.float()),
    r"cu_seqlens_k must have the shape of cu_seqlens_q, \[3\], got \[2\]": lambda q, k, v, cu: (q, k, v, cu, cu[:2]),
    "cu_seqlens_q must be a tensor, got None": lambda q, k, v, cu: (q, k, v, None),
}
OPTION_ERRORS = {
    r"window_size must be .* of at least -1 each, got \(-2, 0\)": {"window_size": (-2, 0)},
    "softcap must be finite and at least 0, got -1": {"softcap": -1.0},
    "softmax_scale must be finite, got inf": {"softmax_scale": math.inf},
}


@pytest.mark.parametrize("message, change", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, change):
    inputs = [x.detach() for x in draw(device, torch.float32, [2, 4], None)]
    with pytest.raises((RuntimeError, TypeError), match="attention_varlen: " + message):
        attention_varlen(*change(*inputs, offsets([2, 4], device)))


@pytest.mark.parametrize("message, options", OPTION_ERRORS.items(), ids=range(len(OPTION_ERRORS)))
def test_errors_of_options(device, message, options):
    with pytest.raises(ValueError, match="attention_varlen: " + message):
        attention_varlen(*draw(device, torch.float32, [2, 4], None), offsets([2, 4], device), **options)


SLOPE_ERRORS = {
    r"alibi_slopes must have shape \[4\] \(heads\), got \[1, 4\]": (torch.zeros(1, 4), 6, None),
    r"alibi_slopes must have shape \[4\] \(heads\), got \[2\]": (torch.zeros(2), 6, None),
    "alibi_slopes must be float32, got Half": (torch.zeros(4).half(), 6, None),
    "alibi_slopes must not require a gradient": (torch.zeros(4, requires_grad=True), 6, None),
    "alibi_slopes must come with the same sequences in q and k: ": (torch.zeros(4), 7, None),
    "alibi_slopes must come with the same sequences in q and k: .* itself": (torch.zeros(4), 6, [2, 4]),
}


@pytest.mark.parametrize("message, case", SLOPE_ERRORS.items(), ids=range(len(SLOPE_ERRORS)))
def test_errors_of_slopes(device, message, case):
    slopes, k_tokens, k_lengths = case
    q, k, v = (x.detach() for x in draw(device, torch.float32, [2, 4], [k_tokens]))
    slopes = slopes.to(device).detach().requires_grad_(slopes.requires_grad)
    k_lengths = None if k_lengths is None else offsets(k_lengths, device)
    with pytest.raises(RuntimeError, match="attention_varlen: " + message):
        attention_varlen(q, k, v, offsets([2, 4], device), k_lengths, alibi_slopes=slopes)


@pytest.mark.gpu
@every_dtype
def test_cuda_graph(dtype):
    """One capture serves other lengths of the same totals."""
    inputs = draw("cuda", dtype, [300], None, head_dim=128)
    cu_seqlens, grad = offsets([100, 150, 50], "cuda"), torch.randn_like(inputs[0])

    def step():
        y = attention_varlen(*inputs, cu_seqlens, causal=True)
        return y.detach(), *torch.autograd.grad(y, inputs, grad)

    graph, results = captured(step)
    for lengths in ([1, 298, 1], [0, 0, 300], [70, 70, 70]):
        cu_seqlens.copy_(offsets(lengths, "cuda"))
        graph.replay()
        assert_same(results, step())


@pytest.mark.gpu
def test_no_synchronization():
    inputs = draw("cuda", torch.bfloat16, [100, 28], None)
    cu_seqlens = offsets([100, 28], "cuda")
    attention_varlen(*inputs, cu_seqlens, causal=True)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        attention_varlen(*inputs, cu_seqlens, causal=True).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
