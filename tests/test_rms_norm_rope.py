"""rms_norm_rope: against float64 and against the modules of transformers, roundings bit for bit where sums are exact,
its variants, memory, gradients, in place, dtypes, errors."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

import llmkernels
import oracles
import rope_cases as cases
from oracles import DTYPES, angles, assert_same, check, check_rms_norm_rope, scaled_rows

# q and k are (B, H, T, D) in these tests unless they say otherwise.
ours, eager = (partial(module.rms_norm_rope, layout="bhtd") for module in (llmkernels, oracles))

every_norm = pytest.mark.parametrize("row_wise", [False, True], ids=["heads", "rows"])
every_rounding = pytest.mark.parametrize("cast_before_weight", [True, False], ids=["cast", "no cast"])


def make(batch=2, tokens=5, heads=4, kv_heads=2, dim=16, layout="bhtd", row_wise=False, dtype=torch.float32,
         device="cpu"):  # fmt: skip
    """q and k, contiguous, of many scales, and their weights."""
    shapes = cases.shapes_of(batch, tokens, heads, kv_heads, dim, layout)
    weights = [torch.randn(h * dim if row_wise else dim, device=device).to(dtype) for h in (heads, kv_heads)]
    return *(scaled_rows(*shape, dtype=dtype, device=device) for shape in shapes), *weights


def exact_sums(*inputs) -> tuple:
    """q and k of small integers: their squares have the same sum in any order, so that n is eager's, bit for bit."""
    q, k, *others = inputs
    return *(torch.randint_like(x.float(), -9, 10).to(x.dtype) for x in (q, k)), *others


def assert_op(inputs, **options):
    """As accurate as eager, gradients included; bitwise equal to eager where the sums are exact."""
    check_rms_norm_rope(llmkernels.rms_norm_rope, oracles.rms_norm_rope, inputs, **{"layout": "bhtd"} | options)


@cases.every_dtype
@cases.every_order
@cases.every_layout
@every_norm
@cases.few_and_many_tokens
@cases.usual_sizes
def test_forward_and_backward(device, heads, kv_heads, dim, tokens, row_wise, layout, interleaved, dtype):
    inputs = make(2, tokens, heads, kv_heads, dim, layout, row_wise, dtype, device)
    cos, sin = angles(tokens, dim, dtype=dtype, device=device)
    assert_op((*inputs, cos, sin), layout=layout, interleaved=interleaved, row_wise=row_wise)


@cases.every_dtype
@every_rounding
@every_norm
@cases.every_order
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("float_angles", [False, True], ids=["angles", "float angles"])
def test_rounds_where_eager_does(device, float_angles, offset, interleaved, row_wise, cast_before_weight, dtype):
    """Bit for bit, on rows of 2^n integers: their mean square is exact. Weights of four bits, so that eager's
    offset + weight is, too."""
    q, k, *weights = exact_sums(*make(dim=64, row_wise=row_wise, dtype=dtype, device=device))
    weights = [(torch.randint_like(weight.float(), 1, 16) / 16).to(dtype) for weight in weights]
    cos, sin = angles(5, 64, dtype=torch.float32 if float_angles else dtype, device=device)
    options = {"row_wise": row_wise, "cast_before_weight": cast_before_weight, "weight_offset": offset}
    options["interleaved"] = interleaved
    args = q, k, *weights, cos, sin
    found, expected = ours(*args, **options), eager(*args, **options)
    if device == "cuda" or dtype != torch.float32:
        assert_same(found, expected)
    else:  # the CPU's 1 / sqrt(x) is rounded once, eager's twice
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


@cases.every_dtype
@cases.every_order
def test_equals_the_two_ops_on_the_cpu(interleaved, dtype):
    """A head's sum of squares has the same order in both."""
    q, k, q_weight, k_weight = make(dim=72, dtype=dtype)
    cos, sin = angles(5, 40, dtype=dtype)
    normed = llmkernels.rms_norm(q, q_weight), llmkernels.rms_norm(k, k_weight)
    expected = llmkernels.rope(*normed, cos, sin, layout="bhtd", interleaved=interleaved)
    assert_same(ours(q, k, q_weight, k_weight, cos, sin, interleaved=interleaved), expected)


# The modules of transformers.

MODELS = {
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {"weight_offset": 1.0, "cast_before_weight": False}),
    "olmo2": ("Olmo2", {"row_wise": True, "cast_before_weight": False}),
}


@cases.every_dtype
@pytest.mark.parametrize("model", MODELS)
def test_matches_transformers(device, model, dtype):
    name, options = MODELS[model]
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    norm, apply = getattr(module, f"{name}RMSNorm"), module.apply_rotary_pos_emb
    q, k, *weights = exact_sums(*make(dim=64, row_wise=model == "olmo2", dtype=dtype, device=device))
    norms = [norm(len(weight), eps=1e-6).to(device, dtype) for weight in weights]
    with torch.no_grad():
        for one, weight in zip(norms, weights, strict=True):
            one.weight.copy_(weight)
    # OLMo 2's angles stay in float32.
    cos, sin = angles(1, 5, 64, dtype=torch.float32 if model == "olmo2" else dtype, device=device)

    def theirs(q, k, *others):
        if model == "olmo2":
            rows = [x.transpose(1, 2).flatten(2) for x in (q, k)]
            q, k = (n(x).unflatten(2, (-1, 64)).transpose(1, 2) for n, x in zip(norms, rows, strict=True))
        else:
            q, k = (n(x) for n, x in zip(norms, (q, k), strict=True))
        return apply(q, k, *others)

    found, expected = ours(q, k, *weights, cos, sin, **options), theirs(q, k, cos, sin)
    if dtype == torch.float32:
        torch.testing.assert_close(found, tuple(x.detach() for x in expected), rtol=1e-6, atol=4e-6)
    else:
        assert_same(found, tuple(x.detach() for x in expected))

    leaves = [t.clone().requires_grad_() for t in (q, k, *weights)]
    grads = [torch.randn_like(t) for t in found]
    grads_of_ours = torch.autograd.grad(ours(*leaves, cos, sin, **options), leaves, grads)
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    grads_of_theirs = torch.autograd.grad(theirs(*leaves, cos, sin), (*leaves, *(n.weight for n in norms)), grads)
    for a, b in zip(grads_of_ours, grads_of_theirs, strict=True):
        wide = 8 * torch.finfo(dtype).eps * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=wide)


# Variants.


@cases.every_dtype
@cases.every_order
@every_norm
@pytest.mark.parametrize("rotary_dim, dim", [(16, 64), (4, 7), (32, 80), (2, 64), (96, 128), (510, 512), (16, 48)])
@cases.every_width
def test_partial_rotation_and_half_width(device, half_width, rotary_dim, dim, row_wise, interleaved, dtype):
    """Dimensions from rotary_dim on are only normalized."""
    inputs = make(dim=dim, row_wise=row_wise, dtype=dtype, device=device)
    cos, sin = angles(5, rotary_dim // 2 if half_width else rotary_dim, dtype=dtype, device=device)
    assert_op((*inputs, cos, sin), interleaved=interleaved, rotary_dim=rotary_dim, row_wise=row_wise)


@cases.every_dtype
@every_norm
@every_rounding
def test_without_weights(device, row_wise, cast_before_weight, dtype):
    """No weight at all, or one: the gradients of the other inputs are what they are with a weight of ones."""
    q, k, _, k_weight = make(row_wise=row_wise, dtype=dtype, device=device)
    cos, sin = angles(5, 16, dtype=dtype, device=device)
    options = {"row_wise": row_wise, "cast_before_weight": cast_before_weight, "weight_offset": 1.0}
    assert_op((q, k, None, None, cos, sin), **options)
    leaf = k_weight.requires_grad_()
    found, expected = (f(q, k, None, leaf, cos, sin, **options) for f in (ours, eager))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)

    def of_weight(function, weight):
        q_and_k, rotation = ([t.to(weight.dtype) for t in pair] for pair in ((q, k), (cos, sin)))
        return function(*q_and_k, None, weight, *rotation, **options)[1]

    check(partial(of_weight, ours), partial(of_weight, eager), (leaf.detach(),))


@cases.odd_sizes
@cases.every_order
@every_norm
def test_any_number_of_heads(device, heads, kv_heads, dim, row_wise, interleaved):
    """Head counts and sizes that leave threads of a block idle."""
    inputs = make(heads=heads, kv_heads=kv_heads, dim=dim, row_wise=row_wise, dtype=torch.float16, device=device)
    cos, sin = angles(5, dim, dtype=torch.float16, device=device)
    assert_op((*inputs, cos, sin), interleaved=interleaved, row_wise=row_wise)


@cases.every_dtype
@pytest.mark.parametrize("heads", [40, 64, 65, 150])
def test_long_rows(device, heads, dtype):
    """On a GPU one slot per thread, then threads that loop over slots."""
    inputs = make(1, 3, heads, 8, 128, "bthd", True, dtype, device)
    cos, sin = angles(3, 128, dtype=dtype, device=device)
    assert_op((*inputs, cos, sin), layout="bthd", row_wise=True)


@pytest.mark.gpu
@cases.every_dtype
@every_norm
def test_more_rows_than_groups(row_wise, dtype):
    """Every group of the persistent grid takes several rows, some one less than others."""
    inputs = make(3, 2311, 7, 3, 128, "bthd", row_wise, dtype, "cuda")
    cos, sin = angles(2311, 128, dtype=dtype, device="cuda")
    assert_op((*inputs, cos, sin), layout="bthd", row_wise=row_wise)


@pytest.mark.parametrize(
    "options, heads, dim",
    [
        ({}, (7, 3), 128),
        ({"interleaved": True}, (7, 3), 128),
        ({"rotary_dim": 64}, (5, 2), 128),
        ({"rotary_dim": 64, "interleaved": True, "inplace": True}, (5, 2), 128),
        ({"layout": "bhtd", "inplace": True}, (16, 5), 64),
        ({"cast_before_weight": False, "weight_offset": 1.0}, (6, 5), 256),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["positions", "positions outside", "angles", "float angles"])
def test_many_tokens_as_few(device, given, options, heads, dim):
    """Bit for bit: on a GPU another kernel takes many tokens, which loads those of later rounds ahead."""
    tokens, some = (2311, 400) if device == "cuda" else (33, 10)
    options = {"layout": "bthd"} | options
    along = 2 if options["layout"] == "bhtd" else 1
    q, k, *weights = make(3, tokens, *heads, dim, options["layout"], dtype=torch.bfloat16, device=device)
    rotary_dim = options.get("rotary_dim", dim)
    dtype = torch.float32 if given == "float angles" else torch.bfloat16
    if by_positions := given.startswith("positions"):
        table = angles(2 * tokens, rotary_dim, dtype=dtype, device=device)
        positions = torch.randint(2 * tokens, (3, tokens), device=device)
        if given == "positions outside" and device == "cuda":
            positions[1, 7] = positions[2, -1] = 2 * tokens
    else:
        table = angles(3, tokens, rotary_dim, dtype=dtype, device=device)

    def call(begin, end):
        part = [x.narrow(along, begin, end - begin).clone() for x in (q, k)]
        if by_positions:
            return llmkernels.rms_norm_rope(*part, *weights, *table, positions[:, begin:end], **options)
        return llmkernels.rms_norm_rope(*part, *weights, *(x[:, begin:end] for x in table), **options)

    parts = [call(begin, min(begin + some, tokens)) for begin in range(0, tokens, some)]
    for x, expected in zip(call(0, tokens), zip(*parts, strict=True), strict=True):
        assert_same(x, torch.cat(expected, along))


@cases.every_layout
@cases.every_order
@every_norm
@cases.every_index_dtype
@cases.every_sharing
def test_position_ids(device, shape, dtype, row_wise, interleaved, layout):
    inputs = make(layout=layout, row_wise=row_wise, device=device)
    positions = torch.randint(50, shape, device=device, dtype=dtype)
    args = *inputs, *angles(50, 16, device=device), positions
    assert_op(args, layout=layout, interleaved=interleaved, row_wise=row_wise)


@cases.every_position_outside
def test_positions_outside_the_table(device, bad):
    q, k, *weights = make(device=device)
    cos, sin = angles(50, 8, device=device)
    positions = torch.arange(10, device=device).view(2, 5)
    call = partial(ours, q, k, *weights, cos, sin, positions, rotary_dim=8)
    expected = call()
    positions[1, 3] = bad
    if device == "cpu":
        with pytest.raises(
            RuntimeError, match=r"rms_norm_rope: position_ids must lie in \[0, 50\).* \[1, 3\] does not"
        ):
            call()
    else:  # a check would have to wait for the stream: what is rotated of the token becomes NaN, and only that
        for out, good in zip(call(), expected, strict=True):
            assert out[1, :, 3, :8].isnan().all()
            out[1, :, 3, :8] = good[1, :, 3, :8]
            assert_same(out, good)


@cases.every_layout
@cases.every_sharing
def test_cos_and_sin_per_batch_or_shared(device, shape, layout):
    cos, sin = angles(*shape, 16, device=device)
    assert_op((*make(layout=layout, device=device), cos, sin), layout=layout)


@cases.every_dtype
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
def test_eps(device, eps, dtype):
    q, k, *weights = make(dtype=dtype, device=device)
    args = q * 0.1, k * 0.1, *weights, *angles(5, 16, dtype=dtype, device=device)
    assert_op(args, eps=eps)


# Memory.


@cases.every_dtype
@every_norm
@cases.every_view
def test_layouts(device, view, row_wise, dtype):
    q, k, *weights = make(row_wise=row_wise, dtype=dtype, device=device)
    cos, sin = angles(5, 16, dtype=dtype, device=device)
    assert_op((view(q), view(k), *weights, cos, sin), row_wise=row_wise)


@cases.every_view_of_the_batch
def test_q_and_k_of_different_layouts(device, view):
    q, k, *others = *make(device=device), *angles(5, 16, device=device)
    assert_op((q, view(k), *others))
    assert_op((view(q), k, *others))


def test_weights_and_angles_of_other_strides(device):
    q, k, *weights = make(dtype=torch.bfloat16, device=device)
    cos, sin = angles(5, 16, dtype=torch.bfloat16, device=device)
    expected = ours(q, k, *weights, cos, sin)
    spread = [torch.stack((t, t), -1).flatten(-2)[..., ::2] for t in (*weights, cos, sin)]
    assert_same(ours(q, k, *spread), expected)
    torch.testing.assert_close(ours(q, k, *map(cases.misaligned, (*weights, cos, sin))), expected)


@cases.every_dtype
@cases.every_order
@cases.every_layout
@every_norm
@pytest.mark.parametrize("view", ["contiguous", "packed", "misaligned"])
def test_in_place(device, view, row_wise, layout, interleaved, dtype):
    """The same values, written to q and k and to nothing else: v, and what lies between heads, stay."""
    heads, kv_heads, dim = 4, 2, 24
    whole = torch.randn(2, 5, heads + 2 * kv_heads, dim + 8, device=device).to(dtype)
    if view == "misaligned":
        whole = cases.misaligned(whole)
    before = whole.clone()
    q, k, _ = whole[..., :dim].split((heads, kv_heads, kv_heads), 2)
    if view == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    weights = [torch.randn(h * dim if row_wise else dim, device=device).to(dtype) for h in (heads, kv_heads)]
    others = *weights, *angles(5, 16, dtype=dtype, device=device)
    cases.assert_in_place(ours, q, k, others, {"layout": layout, "interleaved": interleaved, "row_wise": row_wise})
    assert torch.equal(whole[:, :, heads + kv_heads :], before[:, :, heads + kv_heads :])
    assert torch.equal(whole[..., dim:], before[..., dim:])


def test_in_place_counts_as_a_write(device):
    cases.assert_counts_as_a_write(ours, *make(device=device), *angles(5, 16, device=device))


def test_inputs_are_left_alone(device):
    cases.assert_left_alone(ours, (*make(device=device), *angles(5, 16, device=device)))


@cases.every_layout
def test_output_keeps_the_memory_order(device, layout):
    q, k, *weights = make(layout=layout, device=device)
    q, k, other = q.transpose(1, 2), k.transpose(1, 2), "bthd" if layout == "bhtd" else "bhtd"
    outs = llmkernels.rms_norm_rope(q, k, *weights, *angles(5, 16, device=device), layout=other)
    assert [out.stride() for out in outs] == [q.stride(), k.stride()]


# Gradients. The halves of cos and sin differ (see `angles`), so the backward must be the transpose, not the inverse.


@cases.every_width
@cases.every_order
@cases.every_layout
@every_norm
@pytest.mark.parametrize("positions", [None, (2, 3)], ids=["no ids", "ids"])
def test_gradcheck(positions, row_wise, layout, interleaved, half_width):
    inputs = [t.requires_grad_() for t in make(2, 3, 2, 1, 7, layout, row_wise, torch.float64)]
    cos, sin = angles(9 if positions else 3, 2 if half_width else 4, dtype=torch.float64)
    ids = torch.randint(9, positions) if positions else None
    options = {"layout": layout, "interleaved": interleaved, "rotary_dim": 4, "row_wise": row_wise, "eps": 0.1}
    assert gradcheck(lambda *leaves: ours(*leaves, cos, sin, ids, **options), inputs)


@pytest.mark.parametrize("needed", range(4), ids=["q", "k", "q_weight", "k_weight"])
@every_norm
def test_one_gradient_wanted(device, row_wise, needed):
    inputs, (cos, sin) = make(row_wise=row_wise, device=device), angles(5, 16, device=device)
    leaf = inputs[needed].requires_grad_()
    found, expected = (
        torch.autograd.grad(sum(t.square().sum() for t in f(*inputs, cos, sin, row_wise=row_wise)), leaf)[0]
        for f in (lambda *t, **o: ours(*t, **o, cast_before_weight=False), partial(eager, cast_before_weight=False))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@cases.every_dtype
@cases.every_scalar
def test_gradients_that_autograd_makes(device, scalar, dtype):
    cases.assert_gradients(scalar, ours, eager, make(dtype=dtype, device=device), eps=20)


@every_norm
@every_rounding
def test_gradient_of_what_the_weight_multiplied(device, cast_before_weight, row_wise):
    """n rounded or not: one token of one head, rotated by nothing, has n itself as the gradient of its weight."""
    q = torch.tensor([3.0, 1.0, 2.0, 7.0], dtype=torch.bfloat16, device=device).view(1, 1, 1, 4)
    weight = torch.full((4,), 0.3, dtype=torch.bfloat16, device=device, requires_grad=True)
    cos, sin = torch.ones(1, 4, device=device).bfloat16(), torch.zeros(1, 4, device=device).bfloat16()
    grad_y = torch.full((1, 1, 1, 4), 1.015625, dtype=torch.bfloat16, device=device)  # whose products must be rounded
    out, _ = ours(q, q.clone(), weight, None, cos, sin, cast_before_weight=cast_before_weight, row_wise=row_wise)
    (found,) = torch.autograd.grad(out, weight, grad_y)
    n = q.float() * torch.rsqrt(q.float().square().mean() + 1e-6)
    n = n.bfloat16().float() if cast_before_weight else n
    assert torch.equal(found, (grad_y.float() * n).bfloat16().flatten())


# Values, dtypes, errors.


@cases.every_dtype
@every_norm
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 0.0])
def test_special_values(device, value, row_wise, dtype):
    q, k, *weights = make(tokens=3, dim=64, row_wise=row_wise, dtype=dtype, device=device)
    q[:, 1, 1] = value
    k[:, :, 2, 5] = value
    args = q, k, *weights, *angles(3, 64, dtype=dtype, device=device)
    found, expected = ours(*args, row_wise=row_wise), eager(*args, row_wise=row_wise)
    wide = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=wide, atol=wide, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@every_norm
def test_mixed_dtypes_compose_as_eager(device, row_wise, dtype):
    q, k, *weights = make(row_wise=row_wise, dtype=dtype, device=device)
    cos, sin = angles(5, 16, device=device)
    wide = [weight.float() for weight in weights]
    for args in (
        (q, k, *wide, cos.to(dtype), sin.to(dtype)),
        (q, k, *wide, cos, sin),
        (q.float(), k.float(), *wide, cos.to(dtype), sin.to(dtype)),
    ):
        found, expected = ours(*args, row_wise=row_wise), eager(*args, row_wise=row_wise)
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    if device == "cpu":
        found = ours(q, k, *weights, cos.double(), sin.double(), row_wise=row_wise)
        assert found[0].dtype == dtype
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    found, expected = (f(q, k, *weights, cos.to(other), sin.to(other), row_wise=row_wise) for f in (ours, eager))
    assert found[0].dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_nan_among_float32_angles():
    """Whatever its bits."""
    q, k, *weights = make(dtype=torch.bfloat16)
    cos, sin = angles(5, 16)
    cos.view(torch.int32)[2, 3] = 0x7FFFFFFF
    out, _ = ours(q, k, *weights, cos, sin)
    assert out[:, :, 2, 3].isnan().all() and out.isnan().sum() == 2 * 4


ERRORS = {
    r"q must have shape \(batch, heads, tokens, head_dim\), got \[4, 5, 16\]": lambda q, k, w, c: ours(
        q[0], k[0], w, w, c, c
    ),
    r"k must have the batch, tokens and head_dim of q, .* got \[1, 2, 5, 16\]": lambda q, k, w, c: ours(
        q, k[:1], w, w, c, c
    ),
    r"q_weight must have shape \[16\] \(head_dim\), got \[8\]": lambda q, k, w, c: ours(q, k, w[:8], w, c, c),
    r"k_weight must have shape \[32\] \(heads \* head_dim\), got \[16\]": lambda q, k, w, c: ours(
        q, k, w.repeat(4), w, c, c, row_wise=True
    ),
    r"cos must have rotary_dim or rotary_dim / 2 columns \(rotary_dim is 6\)": lambda q, k, w, c: ours(
        q, k, w, w, c, c, rotary_dim=6
    ),
    r"k must have the dtype of q, Float, got Half": lambda q, k, w, c: ours(q, k.half(), w, w, c, c),
    r"q_weight must have the dtype of q, Float, got Half": lambda q, k, w, c: ours(
        q, k, w.half(), w, c, c, inplace=True
    ),
    r"q must be contiguous along head_dim to be rotated in place": lambda q, k, w, c: ours(
        q.transpose(2, 3).contiguous().transpose(2, 3), k, w, w, c, c, inplace=True
    ),
    r"cos and sin must not require a gradient": lambda q, k, w, c: ours(q, k, w, w, c.clone().requires_grad_(), c),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    q, k, weight, _ = make(device=device)
    cos, _ = angles(5, 16, device=device)
    with pytest.raises(RuntimeError, match="rms_norm_rope_?: " + message):
        ERRORS[message](q, k, weight, cos)


def test_in_place_has_no_gradient(device):
    q, k, *weights = make(device=device)
    leaf = weights[0].requires_grad_()
    with pytest.raises(ValueError, match="rms_norm_rope: inplace must be False where an input requires a gradient"):
        ours(q, k, leaf, weights[1], *angles(5, 16, device=device), inplace=True)


def test_weights_of_different_dtypes():
    """Each of q and k has the dtype that its own weight gives it, whichever is the wider one."""
    q = torch.randn(1, 2, 1, 4).bfloat16()
    cos = sin = torch.randn(2, 4).bfloat16()
    for weights in ((None, torch.ones(4)), (torch.ones(4), torch.ones(4).bfloat16())):
        results = llmkernels.rms_norm_rope(q, q, *weights, cos, sin)
        for result, weight in zip(results, weights, strict=True):
            assert_same(result, llmkernels.rms_norm_rope(q, q, weight, weight, cos, sin)[0])
