"""Masks and ALiBi slopes of attention: forward and backward against the formula in float64; every type and shape of a
mask, beside windows, caps, sinks and ranges; rows that see nothing, strides, errors."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.functional import scaled_dot_product_attention

from attention_oracle import every_device, int32, make  # noqa: F401
from llmkernels import attention
from oracles import DTYPES, SANITIZED_DTYPES, assert_same, captured
from test_attention import check
from test_attention_backward import gradients, grads_of, ours, with_sinks
from test_attention_ranges import check_both

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HEAD_DIMS = [64, 128, 256, 40, 33]  # every kernel: of tensor cores, and the plain one
KINDS = ["bool", "input", "float32"]
SHAPES = {  # of a mask for 2 sequences and 4 heads
    "whole": lambda q, k: (2, 4, q, k),
    "of positions": lambda q, k: (q, k),
    "of sequences": lambda q, k: (2, 1, q, k),
    "of heads": lambda q, k: (4, q, k),
    "of keys": lambda q, k: (2, 1, 1, k),
    "of queries": lambda q, k: (1, 4, q, 1),
}


def make_mask(kind, shape, dtype, device, hidden=0.3):
    """Hides some keys, all of them from the query in the middle."""
    seen = torch.rand(shape, device=device) >= hidden
    if len(shape) > 1 and shape[-2] > 1:
        seen[..., shape[-2] // 2, :] = False
    if kind == "bool":
        return seen
    values = torch.randn(shape, device=device).to(dtype if kind == "input" else torch.float32)
    return values.masked_fill(~seen, -math.inf if dtype == torch.float16 else torch.finfo(values.dtype).min)


def make_slopes(heads, device):
    return 2 ** -torch.arange(1.0, heads + 1, device=device)


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(device, kind, head_dim, dtype):
    """With an even and an odd number of keys: rows of the mask whose pairs are aligned, and others."""
    for q_tokens, k_tokens in ((70, 130), (130, 71)):
        inputs = with_sinks(make(device, dtype, q_tokens, k_tokens, head_dim=head_dim))
        mask = make_mask(kind, (2, 4, q_tokens, k_tokens), dtype, device)
        y, lse, _ = check_both(inputs[:3], attn_mask=mask)
        assert (y[:, q_tokens // 2] == 0).all() and (lse[..., q_tokens // 2] == -math.inf).all()
        check_both(inputs, attn_mask=mask, causal=True)


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(device, shape, kind, dtype):
    inputs = make(device, dtype, 70, 100)
    mask = make_mask(kind, SHAPES[shape](70, 100), dtype, device)
    y, lse, _ = check_both(inputs, attn_mask=mask)
    expanded = mask.expand(2, 4, 70, 100)
    assert_same(attention(*inputs, attn_mask=expanded, return_lse=True), (y, lse))
    assert_same(attention(*inputs, attn_mask=expanded.contiguous(), return_lse=True), (y, lse))


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window_size": (30, 0)},
        {"window_size": (20, 9), "softcap": 3.0},
        {"softcap": 2.0, "causal": True},
        {"softmax_scale": -0.2},
    ],
    ids=str,
)
def test_beside_other_options(device, options, kind, dtype):
    inputs = with_sinks(make(device, dtype, 100, 140, heads=7, kv_heads=1))
    mask = make_mask(kind, (2, 7, 100, 140), dtype, device)
    check_both(inputs, attn_mask=mask, alibi_slopes=make_slopes(7, device), **options)
    check_both(inputs, attn_mask=mask, k_begin=int32([0, 30], device), k_end=int32([140, 77], device), **options)


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_slopes(device, causal, head_dim, dtype):
    slopes = make_slopes(4, device)
    for q_tokens, k_tokens in ((130, 130), (33, 300), (100, 40)):
        inputs = make(device, dtype, q_tokens, k_tokens, head_dim=head_dim)
        y, lse, _ = check_both(inputs, alibi_slopes=slopes, causal=causal)
        of_sequences = torch.stack((slopes, slopes))
        assert_same(attention(*inputs, alibi_slopes=of_sequences, causal=causal, return_lse=True), (y, lse))
        of_sequences[1] *= 3
        check_both(inputs, alibi_slopes=of_sequences.t().contiguous().t(), causal=causal)


@every_dtype
def test_ends_of_tiles(device, dtype):
    for tokens in (15, 16, 63, 64, 65, 127, 128, 129):
        inputs = make(device, dtype, tokens, tokens, batch=1)
        mask = make_mask("input", (tokens, tokens), dtype, device)
        check_both(inputs, attn_mask=mask, alibi_slopes=make_slopes(4, device))


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_masks(device, kind, dtype):
    """Strided ones, between numbers that do not count: the same, bit for bit."""
    inputs = make(device, dtype, 60, 90)
    mask = make_mask(kind, (2, 4, 60, 90), dtype, device)
    expected = attention(*inputs, attn_mask=mask, return_lse=True)

    def equal(other):
        assert other.shape == mask.shape
        assert_same(attention(*inputs, attn_mask=other, return_lse=True), expected)

    nothing = torch.zeros_like(mask) if kind == "bool" else torch.full_like(mask, math.nan)
    equal(torch.cat((nothing, mask, nothing), 3)[..., 90:180])
    equal(torch.cat((nothing[..., :1], mask), 3)[..., 1:])
    equal(torch.cat((nothing[..., :2], mask, nothing[..., :4]), 3)[..., 2:92])
    equal(torch.stack((mask, nothing), -1)[..., 0])
    equal(mask.transpose(2, 3).contiguous().transpose(2, 3))
    equal(mask.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3))


@every_dtype
def test_a_mask_of_ranges_is_what_they_are(device, dtype):
    inputs = make(device, dtype, 70, 70)
    keys = torch.arange(70, device=device)
    begin, end = int32([3, 40], device), int32([70, 60], device)
    mask = ((keys >= begin[:, None]) & (keys < end[:, None]))[:, None, None]
    ranges = attention(*inputs, k_begin=begin, k_end=end, causal=True)
    error = (attention(*inputs, attn_mask=mask, causal=True).double() - ranges.double()).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * ranges.abs().max()


@every_dtype
def test_against_sdpa(device, dtype):
    q, k, v = make(device, dtype, 90, 110)
    mask = torch.randn(2, 1, 90, 110, device=device)
    heads_first = [x.double().transpose(1, 2) for x in (q, k, v)]
    exact = scaled_dot_product_attention(*heads_first, attn_mask=mask.double(), enable_gqa=True).transpose(1, 2)
    y = attention(q, k, v, attn_mask=mask)
    assert (y - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@every_dtype
def test_numbers_that_hide(device, dtype):
    """Those below -1e30 hide as -inf does, or False; a row of them is zeros and has no gradient."""
    inputs = make(device, dtype, 40, 50)
    seen = make_mask("bool", (2, 1, 40, 50), dtype, device)
    expected = attention(*inputs, attn_mask=seen, return_lse=True)
    grads = grads_of(inputs[0])
    wanted = gradients(ours, inputs, grads, attn_mask=seen)
    for least in (-math.inf, torch.finfo(torch.float32).min, -1.1e30):
        mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, least)
        assert_same(attention(*inputs, attn_mask=mask, return_lse=True), expected)
        assert_same(gradients(ours, inputs, grads, attn_mask=mask), wanted)
    assert all(grad.isfinite().all() for grad in wanted)


@every_dtype
def test_large_numbers(device, dtype):
    """No overflow, and no loss where all scores of a row are far below 0."""
    inputs = make(device, dtype, 40, 50)
    mask = torch.randn(40, 50, device=device)
    mask[3] -= 60000
    mask[5, 7] = 3e4
    mask[6] = -1e9
    y, lse = attention(*inputs, attn_mask=mask, return_lse=True)
    assert y.isfinite().all() and lse.isfinite().all()
    assert (y[:, 5] - inputs[2][:, 7].repeat_interleave(2, 1)).abs().max() == 0
    mean = inputs[2].double().mean(1).repeat_interleave(2, 1)  # -1e9 + score is -1e9 in float32
    assert (y[:, 6].double() - mean).abs().max() <= 4 * torch.finfo(dtype).eps * inputs[2].abs().max()


@every_dtype
def test_nan(device, dtype):
    """Of a mask: of that row alone. Where a key is hidden, its score may be anything."""
    inputs = make(device, dtype, 20, 30)
    mask = torch.zeros(20, 30, device=device)
    mask[4, 9] = math.nan
    y = attention(*inputs, attn_mask=mask)
    assert y[:, 4].isnan().all() and y[:, :4].isfinite().all() and y[:, 5:].isfinite().all()
    inputs[1][:, 9] = math.nan
    seen = torch.ones(30, dtype=torch.bool, device=device)
    seen[9] = False
    assert attention(*inputs, attn_mask=seen).isfinite().all()


def test_float64():
    inputs = make("cpu", torch.float64, 30, 40)
    slopes = make_slopes(4, "cpu")
    for kind in KINDS:
        mask = make_mask(kind, (2, 1, 30, 40), torch.float64, "cpu")
        y = attention(*inputs, attn_mask=mask, alibi_slopes=slopes)
        exact = attention(*inputs, attn_mask=mask.double() if kind != "bool" else mask, alibi_slopes=slopes)
        torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
    small = [x.requires_grad_() for x in make("cpu", torch.float64, 3, 5, heads=2, kv_heads=1, head_dim=4)]
    mask = make_mask("input", (2, 1, 3, 5), torch.float64, "cpu")
    assert gradcheck(lambda *t: attention(*t, attn_mask=mask, alibi_slopes=slopes[:2], softcap=2.0), small)


def test_opcheck_and_compile(device):
    inputs = [x.requires_grad_() for x in make(device, torch.float32, 5, 7, head_dim=8)]
    mask, slopes = torch.randn(2, 1, 5, 7, device=device), make_slopes(4, device)
    op = torch.ops.llmkernels.attention.default
    torch.library.opcheck(op, inputs, {"attn_mask": mask, "alibi_slopes": slopes})
    torch.library.opcheck(op, inputs, {"attn_mask": mask[0, 0] > 0})

    def doubled(*t):
        return attention(*t, attn_mask=mask, alibi_slopes=slopes, causal=True) * 2

    torch._dynamo.reset()
    assert_same(torch.compile(doubled, fullgraph=True, backend="aot_eager")(*inputs), doubled(*inputs))


ERRORS = {
    r"attn_mask must be bool, float32 or of the dtype of q, Half, got Int": {"attn_mask": torch.zeros(5).int()},
    r"attn_mask must be bool, .* got Double": {"attn_mask": torch.zeros(5).double()},
    r"attn_mask must be broadcastable to \[2, 4, 3, 5\] \(batch, heads, q_tokens, k_tokens\), got shape \[4\]": {
        "attn_mask": torch.zeros(4)
    },
    r"attn_mask must be broadcastable to .* got shape \[1, 1, 1, 1, 5\]": {"attn_mask": torch.zeros(1, 1, 1, 1, 5)},
    r"attn_mask must be broadcastable to .* got shape \[3, 3, 5\]": {"attn_mask": torch.zeros(3, 3, 5)},
    r"alibi_slopes must be float32, got Half": {"alibi_slopes": torch.zeros(4).half()},
    r"alibi_slopes must have shape \[4\] \(heads\) or \[2, 4\] \(batch and heads\), got \[2\]": {
        "alibi_slopes": torch.zeros(2)
    },
    r"alibi_slopes must have shape .* got \[1, 4\]": {"alibi_slopes": torch.zeros(1, 4)},
    r"alibi_slopes must have shape .* got \[\]": {"alibi_slopes": torch.zeros(())},
    r"attn_mask must not require a gradient": {"attn_mask": torch.zeros(5, requires_grad=True)},
    r"alibi_slopes must not require a gradient": {"alibi_slopes": torch.zeros(4, requires_grad=True)},
}


@pytest.mark.parametrize("message, options", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, options):
    inputs = make(device, torch.float16, 3, 5, head_dim=8)
    on_device = {n: x.detach().to(device).requires_grad_(x.requires_grad) for n, x in options.items()}
    with pytest.raises(RuntimeError, match="attention: " + message):
        attention(*inputs, **on_device)


def test_a_mask_on_another_device(device):
    other = torch.zeros(5, device="meta")
    with pytest.raises(RuntimeError, match="attention: attn_mask must be on the device of q"):
        attention(*make(device, torch.float32, 3, 5), attn_mask=other)


@pytest.mark.gpu
@every_dtype
def test_cuda_graph(dtype):
    """One capture serves other values of the mask."""
    inputs = make("cuda", dtype, 130, 200, heads=8, head_dim=128)
    mask, slopes = torch.zeros(130, 200, device="cuda"), make_slopes(8, "cuda")

    def run():
        return attention(*inputs, attn_mask=mask, alibi_slopes=slopes, return_lse=True)

    graph, results = captured(run)
    for _ in range(2):
        mask.normal_()
        slopes.mul_(0.5)
        graph.replay()
        assert_same(results, run())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_prompts(dtype, head_dim):
    inputs = make("cuda", dtype, 1000, 1300, heads=8, kv_heads=2, head_dim=head_dim)
    for kind in KINDS:
        check(inputs, attn_mask=make_mask(kind, (2, 1, 1000, 1300), dtype, "cuda"), causal=True)
    check(inputs, alibi_slopes=make_slopes(8, "cuda"), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SANITIZED_DTYPES, ids=str)
def test_every_path_once(dtype):
    """The sanitizers look at these: masks that end where their memory ends."""
    for head_dim, kind, k_tokens in ((64, "bool", 99), (128, "input", 100), (256, "float32", 101), (33, "input", 99)):
        inputs = [x.requires_grad_() for x in make("cuda", dtype, 70, k_tokens, head_dim=head_dim, batch=1)]
        mask = make_mask(kind, (4, 70, k_tokens), dtype, "cuda")
        attention(*inputs, attn_mask=mask, alibi_slopes=make_slopes(4, "cuda")).sum().backward()
