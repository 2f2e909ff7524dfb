"""rope: bitwise equality with eager, its variants, gradients as the true transpose, in place, positions, errors."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

import llmkernels
import oracles
import rope_cases as cases
from oracles import DTYPES, angles, assert_same, check

# q and k are (B, H, T, D) in these tests unless they say otherwise.
rope, eager_rope = (partial(f, layout="bhtd") for f in (llmkernels.rope, oracles.rope))


def make(batch=2, tokens=5, heads=4, kv_heads=2, dim=16, layout="bhtd", dtype=torch.float32, device="cpu"):
    """q and k, contiguous."""
    shapes = cases.shapes_of(batch, tokens, heads, kv_heads, dim, layout)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def assert_rope(q, k, cos, sin, *args, **options):
    """Bitwise equal to eager; the gradient is as accurate as eager's."""
    ours, eager = partial(rope, **options), partial(eager_rope, **options)
    assert_same(ours(q, k, cos, sin, *args), eager(q, k, cos, sin, *args))
    check(ours, eager, (q, k, cos, sin, *args), count=2)


@cases.every_dtype
@cases.every_order
@cases.every_layout
@cases.few_and_many_tokens
@cases.usual_sizes
def test_equals_eager_bit_for_bit(device, heads, kv_heads, dim, tokens, layout, interleaved, dtype):
    q, k = make(2, tokens, heads, kv_heads, dim, layout, dtype, device)
    assert_rope(q, k, *angles(tokens, dim, dtype=dtype, device=device), layout=layout, interleaved=interleaved)


@cases.every_dtype
@cases.every_order
@pytest.mark.parametrize("rotary_dim, dim", [(16, 64), (4, 7), (32, 80), (2, 64), (96, 128), (510, 512)])
@cases.every_width
def test_partial_rotation_and_half_width(device, half_width, rotary_dim, dim, interleaved, dtype):
    """Dimensions from rotary_dim on are copied; one angle per pair means the same as that angle twice."""
    q, k = make(dim=dim, dtype=dtype, device=device)
    cos, sin = angles(5, rotary_dim // 2 if half_width else rotary_dim, dtype=dtype, device=device)
    options = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    assert_rope(q, k, cos, sin, **options)
    assert torch.equal(rope(q, k, cos, sin, **options)[0][..., rotary_dim:], q[..., rotary_dim:])


@cases.odd_sizes
@cases.every_order
def test_any_number_of_heads(device, heads, kv_heads, dim, interleaved):
    """Head counts and sizes that leave threads of a block idle."""
    q, k = make(heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.float16, device=device)
    assert_rope(q, k, *angles(5, dim, dtype=torch.float16, device=device), interleaved=interleaved)


@cases.every_layout
@cases.every_sharing
def test_cos_and_sin_per_batch_or_shared(device, shape, layout):
    q, k = make(layout=layout, device=device)
    cos, sin = angles(*shape, 16, device=device)
    assert_rope(q, k, cos, sin, layout=layout)


def test_cos_and_sin_of_other_strides(device):
    q, k = make(device=device)
    cos, sin = angles(2, 5, 16, device=device)
    expected = rope(q, k, cos, sin)
    packed = torch.cat((cos, sin), -1)
    assert_same(rope(q, k, *packed.chunk(2, -1)), expected)
    columns_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (cos, sin)]
    assert_same(rope(q, k, *columns_first), expected)
    assert_same(rope(q, k, cos.transpose(0, 1).contiguous().transpose(0, 1), sin), expected)
    assert_same(rope(q, k, cos[:1].expand(2, 5, 16), sin[:1].expand(2, 5, 16)), rope(q, k, cos[0], sin[0]))
    assert_same(rope(q, k, cases.misaligned(cos), cases.misaligned(sin)), expected)


@cases.every_layout
@cases.every_order
@cases.every_index_dtype
@cases.every_sharing
def test_position_ids(device, shape, dtype, interleaved, layout):
    q, k = make(layout=layout, device=device)
    cos, sin = angles(50, 16, device=device)
    positions = torch.randint(50, shape, device=device, dtype=dtype)
    assert_rope(q, k, cos, sin, positions, layout=layout, interleaved=interleaved)


def test_position_ids_of_other_strides(device):
    q, k = make(device=device)
    cos, sin = angles(50, 24, device=device)[0][:, 4:20], angles(50, 40, device=device)[1][:, 3:19]
    positions = torch.randint(50, (5, 4), device=device).t()[::2]
    assert_rope(q, k, cos, sin, positions)
    assert_rope(q, k, cos, sin, positions[:1].expand(2, 5))


@cases.every_position_outside
@cases.every_index_dtype
def test_positions_outside_the_table(device, bad, dtype):
    q, k = make(device=device)
    cos, sin = angles(50, 16, device=device)
    positions = torch.arange(10, device=device, dtype=dtype).view(2, 5)
    expected = rope(q, k, cos, sin, positions)
    positions[1, 3] = bad
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"rope: position_ids must lie in \[0, 50\).* \[1, 3\] does not"):
            rope(q, k, cos, sin, positions)
    else:  # a check would have to wait for the stream: the token's heads become NaN, and only they
        for out, good in zip(rope(q, k, cos, sin, positions), expected, strict=True):
            assert out[1, :, 3].isnan().all()
            out[1, :, 3] = good[1, :, 3]
            assert_same(out, good)


def test_heads_come_behind_tokens_by_default(device):
    q, k = make(layout="bthd", device=device)
    cos, sin = angles(5, 16, device=device)
    assert_same(llmkernels.rope(q, k, cos, sin), oracles.rope(q, k, cos, sin, layout="bthd"))


# Memory.


@cases.every_dtype
@cases.every_view
@cases.every_order
def test_layouts(device, view, interleaved, dtype):
    q, k = (view(t) for t in make(dtype=dtype, device=device))
    cos, sin = angles(5, 16, dtype=dtype, device=device)
    assert_rope(q, k, cos, sin, interleaved=interleaved)


@cases.every_view_of_the_batch
def test_q_and_k_of_different_layouts(device, view):
    q, k = make(device=device)
    cos, sin = angles(5, 16, device=device)
    assert_rope(q, view(k), cos, sin)
    assert_rope(view(q), k, cos, sin)


@cases.every_layout
def test_output_keeps_the_memory_order(device, layout):
    """As with eager arithmetic, so that the transpose back before attention needs no copy."""
    q, k = (t.transpose(1, 2) for t in make(layout=layout, device=device))
    other = "bthd" if layout == "bhtd" else "bhtd"
    cos, sin = angles(5, 16, device=device)
    for ours, source in zip(rope(q, k, cos, sin, layout=other), (q, k), strict=True):
        assert ours.stride() == source.stride()


@cases.every_dtype
@cases.every_order
@cases.every_layout
@pytest.mark.parametrize("view", ["contiguous", "packed", "misaligned", "transposed"])
def test_in_place(device, view, layout, interleaved, dtype):
    """The same values, written to q and k and to nothing else."""
    heads, kv_heads, dim = 4, 2, 24
    whole = torch.randn(2, 5, heads + kv_heads + 2, dim + 8, device=device).to(dtype)
    if view == "misaligned":
        whole = cases.misaligned(whole)
    before = whole.clone()
    q, k = whole[:, :, 1 : heads + 1, :dim], whole[:, :, heads + 1 : -1, :dim]
    if view in ("contiguous", "transposed"):
        q, k = q.contiguous(), k.contiguous()
    if view == "transposed":
        q, k = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k))
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    others = angles(5, 16, dtype=dtype, device=device)
    cases.assert_in_place(rope, q, k, others, {"layout": layout, "interleaved": interleaved})
    for rows in (slice(0, 1), slice(-1, None)):
        assert torch.equal(whole[:, :, rows], before[:, :, rows])
    assert torch.equal(whole[..., dim:], before[..., dim:])


def test_in_place_counts_as_a_write(device):
    cases.assert_counts_as_a_write(rope, *make(device=device), *angles(5, 16, device=device))


def test_inputs_are_left_alone(device):
    cases.assert_left_alone(rope, (*make(device=device), *angles(5, 16, device=device)))


# Gradients. The halves of cos and sin differ (see `angles`), so the backward must be the transpose, not the inverse.


@cases.every_width
@cases.every_order
@cases.every_layout
@pytest.mark.parametrize("positions", [None, (3,), (2, 3)], ids=["no ids", "shared ids", "batched ids"])
def test_gradcheck(positions, layout, interleaved, half_width):
    q, k = (t.requires_grad_() for t in make(2, 3, 2, 1, 7, layout, torch.float64))
    cos, sin = angles(9 if positions else 3, 2 if half_width else 4, dtype=torch.float64)
    ids = torch.randint(9, positions) if positions else None
    options = {"layout": layout, "interleaved": interleaved, "rotary_dim": 4}
    assert gradcheck(lambda q, k: rope(q, k, cos, sin, ids, **options), (q, k))


@pytest.mark.parametrize("used", [0, 1], ids=["q", "k"])
def test_one_output_unused(device, used):
    q, k = (t.requires_grad_() for t in make(device=device))
    cos, sin = angles(5, 16, device=device)
    leaf = (q, k)[used]
    ours, eager = (torch.autograd.grad(f(q, k, cos, sin)[used].square().sum(), leaf)[0] for f in (rope, eager_rope))
    torch.testing.assert_close(ours, eager)


@cases.every_dtype
@cases.every_scalar
def test_gradients_that_autograd_makes(device, scalar, dtype):
    cases.assert_gradients(scalar, rope, eager_rope, make(dtype=dtype, device=device), eps=10)


def test_backward_through_a_packed_projection(device):
    """q and k are slices of one tensor that takes the gradient, as behind a fused qkv projection."""
    packed = torch.randn(2, 5, 8 * 16, device=device, requires_grad=True)
    exact = packed.detach().double().requires_grad_()
    cos, sin = angles(5, 16, device=device)
    results = []
    for function, leaf in ((rope, packed), (eager_rope, exact)):
        q, k, v = leaf.view(2, 5, 8, 16).transpose(1, 2).split((4, 2, 2), 1)
        q, k = function(q, k, cos.to(leaf.dtype), sin.to(leaf.dtype))
        results.append(torch.autograd.grad((q.sum(1) * k.sum(1) * v.sum(1)).sum(), leaf)[0])
    torch.testing.assert_close(results[0], results[1].float(), rtol=1e-4, atol=1e-4)


# Values, dtypes, errors.


@cases.every_dtype
@cases.every_order
def test_special_values(device, interleaved, dtype):
    q, k = make(tokens=6, dim=64, dtype=dtype, device=device)
    for token, value in enumerate([float("inf"), float("-inf"), float("nan"), 1e4, 0.0]):
        q[:, :, token, token] = k[:, :, token, -1 - token] = value
    q[:, :, 5] = 0
    cos, sin = angles(6, 64, dtype=dtype, device=device)
    cos[0], sin[0] = 1, 0  # position 0 is not rotated: inf * 0 is NaN, as in eager
    args = q, k, cos, sin
    assert_same(rope(*args, interleaved=interleaved), eager_rope(*args, interleaved=interleaved))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_mixed_dtypes_compose_as_eager(device, dtype):
    q, k = make(dtype=dtype, device=device)
    cos, sin = angles(5, 16, device=device)
    assert_same(rope(q, k, cos, sin), eager_rope(q, k, cos, sin))
    check(rope, eager_rope, (q, k, cos, sin), count=2)
    ours, eager = (f(q.float(), k.float(), cos.to(dtype), sin.to(dtype)) for f in (rope, eager_rope))
    assert_same(ours, eager)


ERRORS = {
    r"q must have shape \(batch, heads, tokens, head_dim\), got \[4, 5, 16\]": lambda q, k, c: rope(q[0], k[0], c, c),
    r"q must have shape \(batch, tokens, heads, head_dim\), got \[1, 2, 4, 5, 16\]": lambda q, k, c: rope(
        q[None], k[None], c, c, layout="bthd"
    ),
    r"k must have shape .* got \[2, 5, 16\]": lambda q, k, c: rope(q, k[0], c, c),
    r"k must have the batch, tokens and head_dim of q, \[2, 4, 5, 16\], got \[1, 2, 5, 16\]": lambda q, k, c: rope(
        q, k[:1], c, c
    ),
    r"k must have the batch, .* got \[2, 2, 4, 16\]": lambda q, k, c: rope(q, k[:, :, :4], c, c),
    r"k must have the batch, .* got \[2, 2, 5, 14\]": lambda q, k, c: rope(q, k[..., :14], c, c),
    "k must have the dtype of q, Float, got Half": lambda q, k, c: rope(q, k.half(), c, c),
    "q must be float32, float16, bfloat16.* got Int": lambda q, k, c: rope(q.int(), k.int(), c.int(), c.int()),
    r"cos must have rotary_dim or rotary_dim / 2 columns .* got shape \[5, 12\]": lambda q, k, c: rope(
        q, k, c[:, :12], c[:, :12], rotary_dim=16
    ),
    r"cos must have shape \[5, 16\], .* got \[4, 16\]": lambda q, k, c: rope(q, k, c[:4], c[:4]),
    r"cos must have shape .* got \[3, 5, 16\]": lambda q, k, c: rope(q, k, c.expand(3, 5, 16), c.expand(3, 5, 16)),
    r"sin must have the shape of cos, \[5, 16\], got \[5, 8\]": lambda q, k, c: rope(q, k, c, c[:, :8]),
    "sin must have the dtype of cos, Float, got Half": lambda q, k, c: rope(q, k, c, c.half(), inplace=True),
    "rotary_dim must be even, positive and at most head_dim, 16, got 7": lambda q, k, c: rope(q, k, c, c, rotary_dim=7),
    "rotary_dim must .* got 32": lambda q, k, c: rope(q, k, c, c, rotary_dim=32),
    "rotary_dim must .* got -2": lambda q, k, c: rope(q, k, c, c, rotary_dim=-2),
    "cos must have an even number of columns": lambda q, k, c: rope(q, k, c[:, :0], c[:, :0]),
    r"cos must be a table of shape \(positions, 16\).* got \[1, 5, 16\]": lambda q, k, c: rope(
        q, k, c[None], c[None], ids(c, 5)
    ),
    r"position_ids must have shape \[5\], .* got \[4\]": lambda q, k, c: rope(q, k, c, c, ids(c, 4)),
    r"position_ids must have shape .* got \[3, 5\]": lambda q, k, c: rope(q, k, c, c, ids(c, 5).expand(3, 5)),
    "position_ids must be int32 or int64, got Float": lambda q, k, c: rope(q, k, c, c, ids(c, 5).float()),
    r"layout must be 'bthd' or 'bhtd', got 'bhdt'": lambda q, k, c: rope(q, k, c, c, layout="bhdt"),
    "cos and sin must not require a gradient": lambda q, k, c: rope(q, k, c.requires_grad_(), c),
    "inplace must be False where q or k requires a gradient": lambda q, k, c: rope(
        q, k.requires_grad_(), c, c, inplace=True
    ),
    r"q must not overlap itself.* got shape \[2, 4, 5, 16\] with strides \[0, ": lambda q, k, c: rope(
        q[:1].expand(2, 4, 5, 16), k, c, c, inplace=True
    ),
    r"k must not overlap itself.* with strides \[160, 80, 8, 1\]": lambda q, k, c: rope(
        q, k.as_strided((2, 2, 5, 16), (160, 80, 8, 1)), c, c, inplace=True
    ),
    "q must be contiguous along head_dim .* got strides": lambda q, k, c: rope(
        q.transpose(2, 3).contiguous().transpose(2, 3), k, c, c, inplace=True
    ),
    "cos must have the dtype of q, Half, got Float": lambda q, k, c: rope(q.half(), k.half(), c, c, inplace=True),
}


def ids(like, count):
    return torch.arange(count, device=like.device)


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    tensors = torch.ones(2, 4, 5, 16), torch.ones(2, 2, 5, 16), torch.ones(5, 16)
    with pytest.raises((RuntimeError, ValueError), match=f"rope_?: {message}"):
        call(*(t.to(device) for t in tensors))


@pytest.mark.gpu
def test_errors_about_devices():
    q, k, cos = torch.ones(2, 4, 5, 16), torch.ones(2, 2, 5, 16), torch.ones(5, 16)
    for name, arguments in {
        "k must be on the device of q": (q.cuda(), k, cos.cuda(), cos.cuda()),
        "cos must be on the device of q": (q.cuda(), k.cuda(), cos, cos.cuda()),
        "sin must be on the device of q": (q.cuda(), k.cuda(), cos.cuda(), cos),
        "position_ids must be on the device of q": (q.cuda(), k.cuda(), cos.cuda(), cos.cuda(), ids(cos, 5)),
        "q is float64, which is supported on the CPU only": [t.cuda().double() for t in (q, k, cos, cos)],
    }.items():
        with pytest.raises(RuntimeError, match=f"rope: {name}"):
            rope(*arguments)


def test_in_place_q_and_k_of_one_tensor(device):
    """Slices of one tensor are allowed if they do not overlap."""
    cos, sin = (torch.randn(5, 16, device=device) for _ in range(2))
    packed = torch.randn(2, 5, 6, 16, device=device)
    per_head = torch.randn(2, 5, 3, 3, 16, device=device)  # q, k, v of each head
    for q, k in (
        (packed[:, :, :4], packed[:, :, 4:]),
        (packed[:, :, 2:], packed[:, :, :2]),
        (packed[:, :, ::2], packed[:, :, 1::2]),
        (per_head[:, :, :, 0], per_head[:, :, :, 1]),
    ):
        expected = rope(q.clone(), k.clone(), cos, sin, layout="bthd")
        rope(q, k, cos, sin, layout="bthd", inplace=True)
        assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    for q, k in (
        (packed, packed),
        (packed[:, :, :4], packed[:, :, 3:]),
        (packed[:, :, 3:], packed[:, :, :4]),
        (packed[:, :, ::2], packed[:, :, 2::2]),
        (
            packed.view(-1)[:-8].as_strided((2, 5, 1, 16), (480, 96, 16, 1)),
            packed.view(-1)[8:].as_strided((2, 5, 1, 16), (480, 96, 16, 1)),
        ),
    ):
        with pytest.raises(RuntimeError, match="k must not share memory with q"):
            rope(q, k, cos, sin, layout="bthd", inplace=True)
    by_heads = torch.randn(2, 6, 5, 16, device=device)
    rope(by_heads[:, :4], by_heads[:, 4:], cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="k must not share memory with q"):
        rope(by_heads[:, :4], by_heads[:, 3:], cos, sin, inplace=True)
