"""rope_kv_write: bitwise equal to rope and a copy, of a part of each head too; norms of heads and of rows; pages,
tokens outside the cache, errors, CUDA graphs."""

from functools import partial

import pytest
import torch

import oracles
from llmkernels import rms_norm_rope, rope_kv_write
from oracles import DTYPES, angles, assert_same

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(device, dtype, batch=3, tokens=1, heads=6, kv_heads=2, head_dim=64, capacity=20, half=False, rotary_dim=None):
    """q, k, v as slices of a packed projection; tables; caches full of NaN."""
    packed = torch.randn(batch, tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    columns = head_dim if rotary_dim is None else rotary_dim
    tables = angles(50, columns // 2 if half else columns, dtype=dtype, device=device)
    caches = [
        torch.full((batch, capacity, kv_heads, head_dim), float("nan"), dtype=dtype, device=device) for _ in range(2)
    ]
    return packed.split([heads, kv_heads, kv_heads], 2), tables, caches


def small_integers(parts):
    """Their squares have the same sum in any order, so that norms agree bit for bit."""
    return tuple(torch.randint_like(x.float(), -9, 10).to(x.dtype) for x in parts)


def norms_of(parts, row_wise=False, **options):
    """The arguments of norms, with weights of four bits, so that eager's offset + weight is exact."""

    def weight(x):
        size = x.shape[2:].numel() if row_wise else x.shape[3]
        return torch.randint(1, 16, (size,), device=x.device).div(16).to(x.dtype)

    return {"q_norm_weight": weight(parts[0]), "k_norm_weight": weight(parts[1]), "row_wise": row_wise} | options


def expected(parts, tables, positions, caches, seqlens, interleaved=False, *, rotate=oracles.rope, rotary_dim=None):
    q, k, v = parts
    rotary_dim = q.size(3) if rotary_dim is None else rotary_dim
    if rotary_dim > 0:
        q, k = rotate(q, k, *tables, positions, interleaved=interleaved, rotary_dim=rotary_dim)
    k_cache, v_cache = (c.clone() for c in caches)
    for b, length in enumerate(seqlens.tolist()):
        for t in range(q.size(1)):
            place = length - q.size(1) + t
            if 0 <= place < k_cache.size(1):
                k_cache[b, place], v_cache[b, place] = k[b, t], v[b, t]
    return q, k_cache, v_cache


@every_dtype
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("tokens, head_dim", [(1, 64), (3, 128), (1, 6), (2, 96)])
def test_is_rope_and_a_copy(device, tokens, head_dim, half, interleaved, dtype):
    parts, tables, caches = make(device, dtype, tokens=tokens, head_dim=head_dim, half=half)
    seqlens = int32([tokens, 5 + tokens, 20], device)
    for shape in ((tokens,), (1, tokens), (3, tokens)):
        positions = torch.randint(50, shape, device=device, dtype=torch.int32 if len(shape) == 1 else torch.int64)
        q, k, v = (x.clone() for x in parts)
        want = expected((q, k, v), tables, positions, caches, seqlens, interleaved)
        result = [c.clone() for c in caches]
        version = q._version
        rope_kv_write(q, k, v, *tables, positions, *result, seqlens, interleaved=interleaved)
        assert_same((q, *result), want)
        assert q._version > version
        packed_q = parts[0].clone()
        rope_kv_write(packed_q, *parts[1:], *tables, positions, *result, seqlens, interleaved=interleaved)
        assert_same(packed_q, want[0])
        assert_same((k, v), parts[1:])


def test_columns_of_another_part_of_a_head(device):
    parts, tables, caches = make(device, torch.bfloat16, rotary_dim=32)
    call = partial(rope_kv_write, *parts, *tables, int32([0], device), *caches, int32([1, 1, 1], device))
    with pytest.raises(RuntimeError, match=r"cos must be a table of rotary_dim or rotary_dim / 2 columns"):
        call(rotary_dim=48)
    with pytest.raises(RuntimeError, match=r"cos must be a table of head_dim or head_dim / 2 columns \(head_dim is 64"):
        rope_kv_write(*parts, *(t[:, :24] for t in tables), int32([0], device), *caches, int32([1, 1, 1], device))
    for rotary_dim in (-2, 33, 66):
        with pytest.raises(ValueError, match=rf"rotary_dim must be even and in \[0, 64\], head_dim, got {rotary_dim}"):
            call(rotary_dim=rotary_dim)


@every_dtype
def test_tokens_without_a_place_write_nothing(device, dtype):
    parts, tables, caches = make(device, dtype, tokens=4)
    seqlens, positions = int32([22, 2, 1004], device), torch.randint(50, (3, 4), device=device)
    parts = tuple(x.clone() for x in parts)
    want = expected(parts, tables, positions, caches, seqlens)
    rope_kv_write(*parts, *tables, positions, *caches, seqlens)
    assert_same((parts[0], *caches), want)


@every_dtype
@pytest.mark.parametrize("page_size", [4, 16])
def test_pages(device, page_size, dtype):
    parts, tables, _ = make(device, dtype, tokens=6)
    parts = tuple(x.clone() for x in parts)
    contiguous = [torch.zeros(3, 48, 2, 64, dtype=dtype, device=device) for _ in range(2)]
    seqlens, positions = int32([6, 19, 48], device), int32([3, 4, 5, 0, 49, 7], device)
    want = expected(parts, tables, positions, contiguous, seqlens)
    per_sequence = 48 // page_size
    table = torch.randperm(3 * per_sequence, device=device).view(3, per_sequence).int()
    pools = [torch.zeros(3 * per_sequence, page_size, 2, 64, dtype=dtype, device=device) for _ in range(2)]
    rope_kv_write(*parts, *tables, positions, *pools, seqlens, block_table=table)
    assert_same(parts[0], want[0])
    for pool, cache in zip(pools, want[1:], strict=True):
        assert_same(pool[table.long()].view(cache.shape), cache)


@every_dtype
def test_strided_caches(device, dtype):
    parts, tables, caches = make(device, dtype)
    parts = tuple(x.clone() for x in parts)
    seqlens = int32([1, 2, 3], device)
    positions = seqlens[:, None]
    want = expected(parts, tables, positions, caches, seqlens)
    views = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches]
    rope_kv_write(*parts, *tables, positions, *views, seqlens)
    assert_same((parts[0], *views), want)


# Norms of heads, and of all heads of a token together.

every_row = pytest.mark.parametrize("row_wise", [False, True], ids=["heads", "rows"])
every_rounding = pytest.mark.parametrize("cast_before_weight", [True, False], ids=["cast", "no cast"])
every_offset = pytest.mark.parametrize("weight_offset", [0.0, 1.0])
every_order = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def normed(module_or_oracle, q_norm_weight=None, k_norm_weight=None, **options):
    """A function like rope, with norms before it; a head without a weight is only rotated."""

    def rotate(q, k, *tables, **order):
        found = module_or_oracle(q, k, q_norm_weight, k_norm_weight, *tables, **order, **options)
        plain = oracles.rope(q, k, *tables, **order)
        weights = (q_norm_weight, k_norm_weight)
        return tuple(a if w is not None else b for a, b, w in zip(found, plain, weights, strict=True))

    return rotate


def run(parts, tables, positions, caches, seqlens, **options):
    """q and the caches after the op; the arguments stay unchanged."""
    q, *caches = (x.clone() for x in (parts[0], *caches))
    rope_kv_write(q, *parts[1:], *tables, positions, *caches, seqlens, **options)
    return q, *caches


@every_dtype
@every_order
@every_rounding
@every_offset
@every_row
@pytest.mark.parametrize("tokens, head_dim", [(1, 64), (3, 128), (2, 256), (2, 8)])
def test_norms_round_where_eager_does(
    device, tokens, head_dim, row_wise, weight_offset, cast_before_weight, interleaved, dtype
):
    """Bit for bit, on heads and rows of 2^n integers: their mean square is exact."""
    parts, tables, caches = make(device, dtype, tokens=tokens, heads=8, head_dim=head_dim)
    parts, seqlens = small_integers(parts), int32([tokens, 5 + tokens, 20], device)
    positions = torch.randint(50, (3, tokens), device=device)
    norms = norms_of(parts, row_wise, weight_offset=weight_offset, cast_before_weight=cast_before_weight)
    places = tables, positions, caches, seqlens
    found = run(parts, *places, interleaved=interleaved, **norms)
    want = expected(parts, *places, interleaved, rotate=normed(oracles.rms_norm_rope, **norms))
    if device == "cuda" or dtype != torch.float32:
        assert_same(found, want)
    else:  # the CPU's 1 / sqrt(x) is rounded once, eager's twice
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@every_order
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("head_dim", [2, 6, 40, 64, 72, 96, 128, 192, 256, 512, 520])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("row_wise, heads, kv_heads", [(False, 7, 1), (True, 6, 3), (True, 7, 1)], ids=str)
def test_is_rms_norm_rope_and_a_copy(device, row_wise, heads, kv_heads, tokens, head_dim, half, interleaved, dtype):
    """Bit for bit."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("on the CPU only")
    parts, tables, caches = make(
        device, dtype, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, half=half
    )
    parts, seqlens = small_integers(parts), int32([tokens, 5 + tokens, 20], device)
    norms = norms_of(parts, row_wise, eps=1e-5)
    places = tables, torch.randint(50, (3, tokens), device=device), caches, seqlens
    want = expected(parts, *places, interleaved, rotate=normed(rms_norm_rope, **norms))
    assert_same(run(parts, *places, interleaved=interleaved, **norms), want)


@every_dtype
@every_order
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("head_dim, rotary_dim", [(128, 96), (64, 32), (80, 20), (96, 24), (64, 2), (64, 0), (6, 4)])
@pytest.mark.parametrize("norm", ["", "heads", "rows"])
def test_a_part_of_each_head(device, norm, head_dim, rotary_dim, half, interleaved, dtype):
    """Bit for bit, with norms of the whole head."""
    if norm and rotary_dim == 0:
        pytest.skip("rms_norm_rope needs a rotation")
    parts, tables, caches = make(device, dtype, tokens=2, head_dim=head_dim, half=half, rotary_dim=rotary_dim)
    parts, seqlens = small_integers(parts), int32([2, 7, 20], device)
    norms = norms_of(parts, norm == "rows") if norm else {}
    rotate = normed(rms_norm_rope, **norms) if norm else oracles.rope
    places = tables, torch.randint(50, (3, 2), device=device), caches, seqlens
    want = expected(parts, *places, interleaved, rotate=rotate, rotary_dim=rotary_dim)
    assert_same(run(parts, *places, interleaved=interleaved, rotary_dim=rotary_dim, **norms), want)


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 80, 6])
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0, "cast_before_weight": False}], ids=["cast", "no cast"])
@pytest.mark.parametrize("row_wise, heads", [(False, 6), (True, 6), (True, 40)], ids=str)
def test_norms_against_float64(device, row_wise, heads, options, head_dim, dtype):
    """At most twice the error of eager."""
    parts, tables, caches = make(device, dtype, tokens=2, heads=heads, head_dim=head_dim)
    options = options | {"row_wise": row_wise}
    parts = tuple(oracles.scaled_rows(*x.shape, dtype=dtype, device=device) for x in parts)
    caches, seqlens = [c.zero_() for c in caches], int32([2, 9, 20], device)
    weights = {name: torch.randn_like(x, dtype=torch.float32).to(dtype)
               for name, x in norms_of(parts, row_wise).items() if name != "row_wise"}  # fmt: skip

    def eager(dtype):
        wide = [tuple(x.to(dtype) for x in tensors) for tensors in (parts, tables, caches)]
        rotate = normed(oracles.rms_norm_rope, **{name: x.to(dtype) for name, x in weights.items()}, **options)
        return expected(wide[0], wide[1], positions, wide[2], seqlens, rotate=rotate)

    positions = torch.randint(50, (3, 2), device=device)
    found = run(parts, tables, positions, caches, seqlens, **weights, **options)
    for ours, theirs, exact in zip(found, eager(dtype), eager(torch.float64), strict=True):
        error, allowed = ((x.double() - exact).norm() for x in (ours, theirs))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.norm()


@every_dtype
@every_order
@every_row
@pytest.mark.parametrize("missing", ["q_norm_weight", "k_norm_weight"])
def test_heads_without_a_weight_are_not_normed(device, missing, row_wise, interleaved, dtype):
    parts, tables, caches = make(device, dtype, tokens=2)
    parts, seqlens = small_integers(parts), int32([2, 9, 20], device)
    norms = norms_of(parts, row_wise, weight_offset=0.5) | {missing: None}
    places = tables, torch.randint(50, (3, 2), device=device), caches, seqlens
    want = expected(parts, *places, interleaved, rotate=normed(rms_norm_rope, **norms))
    assert_same(run(parts, *places, interleaved=interleaved, **norms), want)
    # Without weights the other arguments do nothing.
    options = {name: None if name.endswith("norm_weight") else value for name, value in norms.items()}
    assert_same(run(parts, *places, **options), expected(parts, *places))


@every_dtype
@every_order
def test_rows_do_not_depend_on_other_rows(device, interleaved, dtype):
    """Bit for bit, for numbers whose squares do not have the same sum in every order."""
    parts, tables, caches = make(device, dtype, tokens=5, heads=32, kv_heads=8, head_dim=128)
    seqlens, positions = int32([5, 9, 20], device), torch.randint(50, (3, 5), device=device)
    norms = norms_of(parts, True)
    q, *cached = run(parts, tables, positions, caches, seqlens, interleaved=interleaved, **norms)
    for b in range(3):
        for t in range(5):
            one = [x[b : b + 1, t : t + 1] for x in parts]
            places = positions[b, t : t + 1], [c[b : b + 1] for c in caches], seqlens[b : b + 1] - 4 + t
            found, *rows = run(one, tables, *places, interleaved=interleaved, **norms)
            slot = int(seqlens[b]) - 5 + t
            assert_same((found[0, 0], *(x[0, slot] for x in rows)), (q[b, t], *(x[b, slot] for x in cached)))


@every_dtype
@every_row
@pytest.mark.parametrize("misaligned", ["q", "weight", "cache"])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_norms_in_odd_places(device, head_dim, misaligned, row_wise, dtype):
    """Slices of a packed projection, weights with gaps; what is not aligned takes the kernel of single elements."""

    def moved(x):
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    packed, tables, caches = make(device, dtype, tokens=2, head_dim=head_dim)
    for part in packed:
        part.copy_(torch.randint_like(part.float(), -9, 10))
    seqlens, positions = int32([2, 9, 20], device), torch.randint(50, (3, 2), device=device)
    norms = norms_of(packed, row_wise)
    want = expected(packed, tables, positions, caches, seqlens, rotate=normed(rms_norm_rope, **norms))
    norms["k_norm_weight"] = norms["k_norm_weight"].repeat_interleave(2)[::2]
    if misaligned == "weight":
        norms["q_norm_weight"] = moved(norms["q_norm_weight"])
    q, k, v = packed
    if misaligned == "q":
        q = moved(q)
    if misaligned == "cache":
        caches = [moved(c) for c in caches]
    rope_kv_write(q, k, v, *tables, positions, *caches, seqlens, **norms)
    assert_same((q, *caches), want)


@every_dtype
@every_row
@pytest.mark.parametrize("page_size", [4, 16])
def test_norms_with_pages_and_tokens_without_a_place(device, page_size, row_wise, dtype):
    parts, tables, _ = make(device, dtype, tokens=6, heads=16, kv_heads=2, head_dim=128)
    parts, norms = small_integers(parts), norms_of(parts, row_wise, weight_offset=1.0, cast_before_weight=False)
    contiguous = [torch.zeros(3, 48, 2, 128, dtype=dtype, device=device) for _ in range(2)]
    seqlens, positions = int32([3, 19, 50], device), int32([3, 4, 5, 0, 49, 7], device)
    want = expected(parts, tables, positions, contiguous, seqlens, rotate=normed(rms_norm_rope, **norms))
    table = torch.randperm(3 * 48 // page_size, device=device).view(3, -1).int()
    pools = [torch.zeros(3 * 48 // page_size, page_size, 2, 128, dtype=dtype, device=device) for _ in range(2)]
    q, *pools = run(parts, tables, positions, pools, seqlens, block_table=table, **norms)
    assert_same(q, want[0])
    for pool, cache in zip(pools, want[1:], strict=True):
        assert_same(pool[table.long()].view(cache.shape), cache)


@pytest.mark.parametrize("model", ["Qwen3", "Gemma3", "Olmo2"])
def test_matches_transformers(device, model):
    module = pytest.importorskip(f"transformers.models.{model.lower()}.modeling_{model.lower()}")
    options = {"Gemma3": {"weight_offset": 1.0, "cast_before_weight": False},
               "Olmo2": {"row_wise": True, "cast_before_weight": False}}.get(model, {})  # fmt: skip
    parts, tables, caches = make(device, torch.bfloat16, tokens=3, heads=8, head_dim=128)
    parts, seqlens, positions = small_integers(parts), int32([3, 8, 20], device), int32([4, 5, 6], device)
    norms = norms_of(parts, **options)

    def theirs(q, k, cos, sin, position_ids, **_):
        for name in ("q_norm_weight", "k_norm_weight"):
            norm = getattr(module, f"{model}RMSNorm")(len(norms[name]), eps=1e-6).to(device, torch.bfloat16)
            norm.weight.data.copy_(norms[name])
            x = q if name[0] == "q" else k
            y = norm(x.flatten(2)).view(x.shape) if norms["row_wise"] else norm(x)
            q, k = (y, k) if name[0] == "q" else (q, y)
        cos, sin = (t[position_ids.long()][None] for t in (cos, sin))
        return module.apply_rotary_pos_emb(q.detach(), k.detach(), cos, sin, unsqueeze_dim=2)

    want = expected(parts, tables, positions, caches, seqlens, rotate=theirs)
    assert_same(run(parts, tables, positions, caches, seqlens, **norms), want)


def test_empty(device):
    parts, tables, caches = make(device, torch.float32, batch=0)
    for norms in ({}, norms_of(parts), norms_of(parts, row_wise=True)):
        rope_kv_write(*parts, *tables, int32([0], device), *caches, int32([], device), **norms)


def test_opcheck(device):
    parts, tables, caches = make(device, torch.float32)
    parts = tuple(x.contiguous() for x in parts)
    caches = [c.nan_to_num() for c in caches]
    at = int32([0, 1, 2], device)
    for norms in ({}, norms_of(parts, weight_offset=1.0), norms_of(parts, row_wise=True)):
        arguments = (*parts, *tables, at[:, None], *caches, at + 1)
        torch.library.opcheck(torch.ops.llmkernels.rope_kv_write.default, arguments, norms)


ERRORS = {
    "position_ids must be int32 or int64, got Float": {"positions": torch.zeros(3)},
    r"position_ids must have shape \[1\], \[1, 1\] or \[3, 1\], got \[2\]": {
        "positions": torch.zeros(2, dtype=torch.int32)
    },
    "cache_seqlens must be int32, got Long": {"cache_seqlens": torch.zeros(3, dtype=torch.int64)},
    r"cache_seqlens must have shape \[3\]": {"cache_seqlens": torch.zeros(1, dtype=torch.int32)},
    "cos must be a table of head_dim or head_dim / 2 columns": {"cos": torch.zeros(50, 20)},
    "sin must have the shape of cos": {"sin": torch.zeros(40, 64)},
    r"k must have shape \[3, 1, 2, 64\], got \[3, 1, 1, 64\]": {"k": torch.zeros(3, 1, 1, 64)},
    "v must have the dtype of q": {"v": torch.zeros(3, 1, 2, 64).half()},
    "k_cache must have the batch of q, 3": {"k_cache": torch.zeros(2, 20, 2, 64), "v_cache": torch.zeros(2, 20, 2, 64)},
    "v must not require a gradient": {"v": torch.zeros(3, 1, 2, 64, requires_grad=True)},
    r"q_norm_weight must have shape \[64\] \(head_dim\), got \[1, 64\]": {"q_norm_weight": torch.ones(1, 64)},
    r"k_norm_weight must have shape \[64\] \(head_dim\), got \[128\]": {"k_norm_weight": torch.ones(128)},
    "k_norm_weight must have the dtype of q": {"k_norm_weight": torch.ones(64).half()},
    "q_norm_weight must not require a gradient": {"q_norm_weight": torch.ones(64, requires_grad=True)},
    "q must be contiguous along head_dim": {"q": torch.zeros(3, 1, 64, 6).transpose(2, 3)},
}


@pytest.mark.parametrize("message, changed", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, changed):
    parts, tables, caches = make(device, torch.float32)
    at = int32([0, 1, 2], device)
    names = ["q", "k", "v", "cos", "sin", "positions", "k_cache", "v_cache", "cache_seqlens"]
    arguments = dict(zip(names, (*parts, *tables, at[:, None], *caches, at), strict=True))
    arguments |= {name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in changed.items()}
    named = {name: arguments.pop(name) for name in [*arguments] if name not in names}
    with pytest.raises(RuntimeError, match="rope_kv_write: " + message):
        rope_kv_write(*arguments.values(), **named)


@pytest.mark.parametrize(
    "name, size, message",
    [("q_norm_weight", 64, r"must have shape \[384\] \(heads \* head_dim\), got \[64\]"),
     ("q_norm_weight", 128, r"must have shape \[384\] \(heads \* head_dim\), got \[128\]"),
     ("k_norm_weight", 384, r"must have shape \[128\] \(kv_heads \* head_dim\), got \[384\]")],
    ids=str,
)  # fmt: skip
def test_weights_of_other_rows(device, name, size, message):
    parts, tables, caches = make(device, torch.float32)
    at = int32([0, 1, 2], device)
    norms = norms_of(parts, row_wise=True) | {name: torch.ones(size, device=device)}
    with pytest.raises(RuntimeError, match=f"rope_kv_write: {name} {message}"):
        rope_kv_write(*parts, *tables, at[:, None], *caches, at, **norms)


def test_errors_that_only_the_cpu_can_afford():
    parts, tables, caches = make("cpu", torch.float32)
    at = int32([0, 1, 2], "cpu")
    with pytest.raises(RuntimeError, match=r"position_ids must lie in \[0, 50\).* \[1, 0\] is 50"):
        rope_kv_write(*parts, *tables, int32([[0], [50], [2]], "cpu"), *caches, at)


@pytest.mark.gpu
@every_dtype
def test_bad_positions_and_pages_do_no_harm_on_a_gpu(dtype):
    parts, tables, caches = make("cuda", dtype)
    parts = tuple(x.clone() for x in parts)
    at = int32([0, 1, 2], "cuda")
    rope_kv_write(*parts, *tables, int32([[-1], [3], [50]], "cuda"), *caches, at + 1)
    assert parts[0][0].isnan().all() and parts[0][1].isfinite().all() and parts[0][2].isnan().all()
    table = int32([[-1], [3], [1 << 30]], "cuda")
    untouched = [c.clone() for c in caches]
    rope_kv_write(*parts, *tables, at[:, None], *caches, at + 1, block_table=table)
    assert_same(tuple(caches), tuple(untouched))


@pytest.mark.gpu
def test_cuda_graph():
    parts, tables, caches = make("cuda", torch.bfloat16)
    q, k, v = (x.clone() for x in parts)
    seqlens, positions = int32([1, 1, 1], "cuda"), int32([0], "cuda")
    rope_kv_write(q, k, v, *tables, positions, *caches, seqlens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope_kv_write(q, k, v, *tables, positions, *caches, seqlens)
    for step in range(4):
        q.copy_(torch.randn_like(q))
        seqlens.fill_(step + 1)
        positions.fill_(2 * step)
        want = expected((q.clone(), k, v), tables, positions, caches, seqlens)
        graph.replay()
        assert_same((q, *caches), want)


@pytest.mark.gpu
@pytest.mark.sanitizer
@every_dtype
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("normed_by", ["", "heads", "rows"])
def test_every_path_once(normed_by, head_dim, dtype):
    for interleaved in (False, True):
        parts, tables, caches = make("cuda", dtype, head_dim=head_dim)
        parts = small_integers(parts)
        at = int32([0, 1, 2], "cuda")
        norms = norms_of(parts, normed_by == "rows") if normed_by else {}
        rotate = normed(rms_norm_rope, **norms) if norms else oracles.rope
        want = expected(parts, tables, at[:, None], caches, at + 1, interleaved, rotate=rotate)
        rope_kv_write(*parts, *tables, at[:, None], *caches, at + 1, interleaved=interleaved, **norms)
        assert_same((parts[0], *caches), want)
