"""rope_decode_attention: equal to rope_kv_write, then decode_attention, for one token of each sequence."""

import pytest
import torch

import llmkernels
from oracles import DTYPES, angles, assert_same

KV_HEADS, CAPACITY, PAGE = 2, 48, 16
_op = torch.ops.llmkernels.rope_decode_attention

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_norm = pytest.mark.parametrize(
    "normed, row_wise", [("", False), ("q", False), ("k", False), ("qk", False), ("q", True), ("k", True), ("qk", True)]
)
every_layout = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


def make(device, dtype, *, lengths=(40, 1, 17), heads=14, dim=64, normed="", half=False, paged=False,
         row_wise=False, rotary_dim=None):  # fmt: skip
    """Arguments by name, lengths including the new token. `normed`: which are normalized, of "q" and "k", each head or
    all heads together."""
    batch = len(lengths)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    columns = dim if rotary_dim is None else rotary_dim
    cos, sin = angles(CAPACITY, columns // 2 if half else columns, dtype=dtype, device=device)
    table, cache = None, (batch, CAPACITY, KV_HEADS, dim)
    if paged:
        pages = CAPACITY // PAGE
        table = torch.randperm(batch * pages).view(batch, pages).int().to(device)
        cache = (batch * pages, PAGE, KV_HEADS, dim)
    sizes = {"q": heads * dim, "k": KV_HEADS * dim} if row_wise else {"q": dim, "k": dim}
    norms = {f"{x}_norm_weight": (torch.randn(sizes[x]) / 2 + 1).to(device, dtype) for x in normed}
    return {
        "qkv": torch.randn(batch, (heads + 2 * KV_HEADS) * dim).to(device, dtype),
        "cos": cos,
        "sin": sin,
        "positions": seqlens - 1,
        "cache_seqlens": seqlens,
        "cache_leftpad": None,
        "k_cache": torch.randn(*cache).to(device, dtype),
        "v_cache": torch.randn(*cache).to(device, dtype),
        "block_table": table,
        "heads": heads,
        **norms,
        "eps": 1e-5,
        "weight_offset": 0.5,
        "cast_before_weight": False,
        "row_wise": row_wise,
        "rotary_dim": rotary_dim,
    }


def run(values):
    """(y, k_cache, v_cache); the arguments stay unchanged."""
    written = {name: values[name].clone() for name in ("qkv", "k_cache", "v_cache")}
    return _op(**values | written), written["k_cache"], written["v_cache"]


def two_ops(values):
    caches = [values[name].clone() for name in ("k_cache", "v_cache")]
    heads, dim = values["heads"], caches[0].shape[3]
    q, k, v = values["qkv"].clone().view(len(values["qkv"]), 1, -1, dim).split((heads, KV_HEADS, KV_HEADS), 2)
    norms = {name: x for name, x in values.items() if "norm" in name or name in ("eps", "weight_offset")}
    norms |= {name: values[name] for name in ("cast_before_weight", "row_wise", "rotary_dim")}
    seqlens, table = values["cache_seqlens"], {"block_table": values["block_table"]}
    tables, positions = (values["cos"], values["sin"]), values["positions"][:, None]
    llmkernels.rope_kv_write(q, k, v, *tables, positions, *caches, seqlens, **table, **norms)
    options = {name: values[name] for name in ("cache_leftpad", "softmax_scale", "softcap") if name in values}
    window = {"window_size": (values["window_left"], 0)} if "window_left" in values else {}
    y = llmkernels.decode_attention(q, *caches, seqlens, **table, **options, **window)
    return y.flatten(1), *caches


def check(values):
    """The caches agree bit for bit."""
    (y, *caches), (expected, *wanted) = run(values), two_ops(values)
    assert_same(caches, wanted)
    torch.testing.assert_close(y, expected)


@every_dtype
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 40])
@every_norm
def test_is_the_two_ops(device, normed, row_wise, dim, dtype):
    check(make(device, dtype, dim=dim, normed=normed, row_wise=row_wise) | {"softcap": 3.0})


@every_dtype
@every_layout
@pytest.mark.parametrize("heads", [2, 14, 32])
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
def test_heads_tables_and_pages(device, half, heads, paged, dtype):
    shape = {"heads": heads, "half": half, "paged": paged}
    check(make(device, dtype, **shape, normed="qk"))
    check(make(device, dtype, **shape, lengths=range(1, 41)) | {"prefetch_cache": True})
    check(make(device, dtype, **shape, lengths=range(1, 41), normed="qk", row_wise=True) | {"prefetch_cache": True})


@every_dtype
@every_norm
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("dim, rotary_dim", [(128, 96), (64, 32), (96, 16), (256, 64), (64, 0), (64, 24), (40, 16)])
def test_a_part_of_each_head(device, dim, rotary_dim, half, normed, row_wise, dtype):
    check(make(device, dtype, dim=dim, rotary_dim=rotary_dim, half=half, normed=normed, row_wise=row_wise))


@every_dtype
@every_layout
def test_starts_windows_and_scale(device, paged, dtype):
    values = make(device, dtype, lengths=[40, 30, 20], paged=paged)
    check(values | {"cache_leftpad": torch.tensor([0, 12, 19], dtype=torch.int32, device=device)})
    check(values | {"window_left": 7})
    check(values | {"softmax_scale": 0.2})


def test_odd_places_of_the_weights_of_heads(device):
    """No aligned vectors, for which the attention has no fused form; and a copy."""
    values = make(device, torch.bfloat16, normed="qk")
    expected = run(values)
    room = torch.zeros(2 * 64 + 1, dtype=torch.bfloat16, device=device)
    for place in (room[1:65], room[::2][:64]):
        place.copy_(values["q_norm_weight"])
        found = run(values | {"q_norm_weight": place})
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


def test_what_lies_beyond_the_live_length_does_not_matter(device):
    values = make(device, torch.bfloat16, lengths=[9, 30])
    poisoned = {name: values[name].clone() for name in ("k_cache", "v_cache")}
    for cache in poisoned.values():
        cache[0, 8:], cache[1, 29:] = torch.nan, torch.nan  # that of the new token too
    assert_same(run(values | poisoned)[0], run(values)[0])


def test_a_full_cache_is_not_written_past(device):
    values = make(device, torch.bfloat16, lengths=[CAPACITY, 5])
    room = {name: torch.full((3, CAPACITY, KV_HEADS, 64), 7.0, dtype=torch.bfloat16, device=device)
            for name in ("k_cache", "v_cache")}  # fmt: skip
    full = values | {name: cache[:2] for name, cache in room.items()}
    full |= {"cache_seqlens": values["cache_seqlens"] + 1}  # the first sequence is one past the end
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"cache_seqlens must lie in \[0, 48\]"):
            _op(**full)
    else:
        _op(**full)
    assert all((cache[[0, 2]] == 7).all() for cache in room.values())


def test_weights_of_other_rows(device):
    values = make(device, torch.bfloat16, normed="qk")
    with pytest.raises(RuntimeError, match=r"q_norm_weight must have shape \[896\] \(heads \* head_dim\), got \[64\]"):
        _op(**values | {"row_wise": True})
    values = make(device, torch.bfloat16, normed="qk", row_wise=True)
    with pytest.raises(RuntimeError, match=r"q_norm_weight must have shape \[64\] \(head_dim\), got \[896\]"):
        _op(**values | {"row_wise": False})
    values["k_norm_weight"] = values["q_norm_weight"]
    with pytest.raises(RuntimeError, match=r"k_norm_weight must have shape \[128\] \(kv_heads \* head_dim\), got"):
        _op(**values)


@every_layout
def test_opcheck(device, paged):
    values = make(device, torch.bfloat16, paged=paged, normed="qk" if paged else "")
    names = [argument.name for argument in _op.default._schema.arguments]
    positional = tuple(values[name] for name in names[:10])
    torch.library.opcheck(_op.default, positional, {name: values[name] for name in names[10:] if name in values})


@pytest.mark.gpu
@pytest.mark.sanitizer
@every_layout
@pytest.mark.parametrize(
    "normed, row_wise, dim", [("", False, 64), ("qk", False, 64), ("qk", False, 96), ("qk", True, 64), ("qk", True, 96)]
)
def test_every_path_once(normed, row_wise, dim, paged):
    check(make("cuda", torch.bfloat16, paged=paged, normed=normed, row_wise=row_wise, dim=dim))


@pytest.mark.gpu
@pytest.mark.parametrize("row_wise", [False, True], ids=["heads", "rows"])
def test_deterministic(row_wise):
    values = make("cuda", torch.bfloat16, lengths=[47, 46, 45, 3], normed="qk", row_wise=row_wise)
    expected = run(values)
    for _ in range(250):
        assert_same(run(values), expected)
