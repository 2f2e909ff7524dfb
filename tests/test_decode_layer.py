"""One token through a decoder layer, against the formula in float64 (tests/decode_oracle.py) and eager's own error."""

import pytest
import torch

import decode_oracle
import llmkernels

KV_HEADS, CAPACITY, PAGE = 2, 48, 16


def make(batch, dtype, device, *, heads=4, dim=64, hidden=256, ffn=384, bias=True, paged=False, lengths=None, seed=0,
         normed=()):  # fmt: skip
    """Arguments of the op, lengths including the new token. `normed`: which heads are normalized, of "q" and "k"."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0, shift=0.0):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(scale).add_(shift)

    rows = (heads + 2 * KV_HEADS) * dim
    lengths = torch.tensor(lengths or [(7 * b) % (CAPACITY - 1) + 1 for b in range(batch)])
    angles = torch.outer(torch.arange(CAPACITY).double(), 1e4 ** -(torch.arange(dim // 2) * 2 / dim).double())
    angles = torch.cat((angles, angles), -1)
    table, cache = None, (batch, CAPACITY, KV_HEADS, dim)
    if paged:
        pages = CAPACITY // PAGE
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int()
        cache = (batch * pages, PAGE, KV_HEADS, dim)
    floats = {
        "hidden": draw(batch, hidden),
        "input_norm": draw(hidden, scale=0.1, shift=1),
        "qkv_weight": draw(rows, hidden, scale=hidden**-0.5),
        "qkv_bias": draw(rows, scale=0.1) if bias else None,
        "o_weight": draw(hidden, heads * dim, scale=(heads * dim) ** -0.5),
        "o_bias": draw(hidden, scale=0.1) if bias else None,
        "post_norm": draw(hidden, scale=0.1, shift=1),
        "gate_up_weight": draw(2 * ffn, hidden, scale=hidden**-0.5),
        "down_weight": draw(hidden, ffn, scale=ffn**-0.5),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    norms = {f"{x}_norm": draw(dim, scale=0.5, shift=1).to(device, dtype) if x in normed else None for x in "qk"}
    values = {name: None if x is None else x.to(device, dtype) for name, x in floats.items()}
    values |= {"positions": lengths - 1, "cache_seqlens": lengths}
    values |= {
        "cache_leftpad": None,
        "k_cache": draw(*cache).to(device, dtype),
        "v_cache": draw(*cache).to(device, dtype),
    }
    values |= {"block_table": table, "heads": heads, "eps": 1e-6, "weight_offset": 0.0, "cast_before_weight": True}
    values |= {"softmax_scale": None, "window_left": -1, **norms}
    for name in ("positions", "cache_seqlens", "block_table"):
        values[name] = None if values[name] is None else values[name].int().to(device)
    return values


def run(function, values, dtype=None):
    """(hidden, k_cache, v_cache) after the op, in float64; the arguments stay unchanged."""
    arguments = {
        name: x.to(dtype or x.dtype, copy=True) if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in values.items()
    }
    function(*arguments.values())
    return [arguments[name].double() for name in ("hidden", "k_cache", "v_cache")]


def check(values):
    found = run(torch.ops.llmkernels.decode_layer, values)
    exact = run(decode_oracle.decode_layer, values, torch.float64)
    eager = run(decode_oracle.decode_layer, values)
    eps = torch.finfo(values["hidden"].dtype).eps
    rows, slots = torch.arange(len(values["hidden"])), values["cache_seqlens"].long().cpu() - 1
    if values["block_table"] is not None:
        rows, slots = values["block_table"].long().cpu()[rows, slots // PAGE], slots % PAGE
    for name, ours, wanted, theirs in zip(("hidden", "k_cache", "v_cache"), found, exact, eager, strict=True):
        if name != "hidden":
            # Only the new token has changed.
            others, before = ours.clone(), values[name].double()
            others[rows, slots] = before[rows, slots]
            assert torch.equal(others, before), name
            ours, wanted, theirs = (x[rows, slots] for x in (ours, wanted, theirs))
        error, allowed = ((x - wanted).norm() / wanted.norm() for x in (ours, theirs))
        assert error <= 2 * allowed + 2 * eps, f"{name}: relative error {error:.1e}, eager's {allowed:.1e}"


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 5, 17, 64])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_against_float64(device, batch, paged, dtype):
    check(make(batch, dtype, device, paged=paged))


@pytest.mark.parametrize(
    "changes", [{"heads": 14}, {"heads": 2}, {"dim": 128}, {"bias": False}, {"ffn": 1048}], ids=str
)
def test_shapes(device, changes):
    check(make(3, torch.bfloat16, device, **changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3, 17])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 40])
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0, "cast_before_weight": False}], ids=["cast", "no cast"])
def test_normed_heads(device, options, dim, batch, dtype):
    check(make(batch, dtype, device, dim=dim, normed="qk", paged=batch == 3) | options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "changes", [{"normed": "q"}, {"normed": "k"}, {"heads": 2}, {"heads": 14}, {"heads": 32}], ids=str
)
def test_normed_heads_of_groups(device, changes, dtype):
    check(make(3, dtype, device, **{"normed": "qk"} | changes))


def test_odd_places_of_the_weights_of_heads(device):
    """No aligned vectors, for which the attention has no fused form; and a copy."""
    values = make(2, torch.bfloat16, device, normed="qk")
    wanted = run(torch.ops.llmkernels.decode_layer, values)
    room = torch.zeros(2 * 64 + 1, dtype=torch.bfloat16, device=device)
    for place in (room[1:65], room[::2][:64]):
        place.copy_(values["q_norm"])
        arguments = {name: x.clone() if torch.is_tensor(x) else x for name, x in values.items()} | {"q_norm": place}
        torch.ops.llmkernels.decode_layer(*arguments.values())
        for name, expected in zip(("hidden", "k_cache", "v_cache"), wanted, strict=True):
            torch.testing.assert_close(arguments[name].double(), expected, rtol=0.03, atol=0.03)


def test_starts_and_window(device):
    values = make(3, torch.bfloat16, device, lengths=[40, 30, 20])
    check(values | {"cache_leftpad": torch.tensor([0, 12, 19], dtype=torch.int32, device=device)})
    check(values | {"window_left": 7})
    check(values | {"weight_offset": 1.0, "cast_before_weight": False, "softmax_scale": 0.2})


def test_float64():
    check(make(2, torch.float64, "cpu"))


def test_what_lies_beyond_the_live_length_does_not_matter(device):
    values = make(2, torch.bfloat16, device, lengths=[9, 30])
    poisoned = {name: values[name].clone() for name in ("k_cache", "v_cache")}
    for cache in poisoned.values():
        cache[0, 9:], cache[1, 30:] = torch.nan, torch.nan
    hidden = run(torch.ops.llmkernels.decode_layer, values)[0]
    assert torch.equal(run(torch.ops.llmkernels.decode_layer, values | poisoned)[0], hidden)


def test_a_full_cache_is_not_written_past(device):
    values = make(2, torch.bfloat16, device, lengths=[CAPACITY, 5])
    room = {name: torch.full((3, CAPACITY, KV_HEADS, 64), 7.0, dtype=torch.bfloat16, device=device)
            for name in ("k_cache", "v_cache")}  # fmt: skip
    full = values | {name: cache[:2] for name, cache in room.items()}
    full |= {"cache_seqlens": values["cache_seqlens"] + 1}  # the first sequence is one past the end
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"cache_seqlens must lie in \[0, 48\]"):
            torch.ops.llmkernels.decode_layer(*full.values())
    else:
        torch.ops.llmkernels.decode_layer(*full.values())
    assert (room["k_cache"][2] == 7).all() and (room["v_cache"][2] == 7).all()
    assert (room["k_cache"][0] == 7).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": lambda x: x[0]}, "decode_layer: hidden must have shape"),
        ({"qkv_weight": lambda x: x[:-1]}, "decode_layer: qkv_weight must have shape"),
        ({"o_weight": lambda x: x[:, :-8]}, "decode_layer: o_weight must have shape"),
        ({"gate_up_weight": lambda x: x[:-1]}, "decode_layer: gate_up_weight must have an even number of rows"),
        ({"cache_seqlens": lambda x: x.long()}, "decode_layer: cache_seqlens must be int32"),
        ({"v_cache": lambda x: x[..., :-1]}, "decode_layer: v_cache must have"),
        ({"down_weight": lambda x: x.double()}, "decode_layer: down_weight must have the dtype of hidden"),
        ({"q_norm": lambda x: x[:-1]}, r"decode_layer: q_norm must have shape \[64\] \(head_dim\), got \[63\]"),
        ({"k_norm": lambda x: x.float()}, "decode_layer: k_norm must have the dtype of hidden"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors(device, change, message):
    values = make(2, torch.bfloat16, device, normed="qk")
    ((name, function),) = change.items()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.llmkernels.decode_layer(*(values | {name: function(values[name])}).values())


def test_opcheck(device):
    for paged in (False, True):
        values = make(2, torch.bfloat16, device, paged=paged, normed="qk" if paged else "")
        torch.library.opcheck(torch.ops.llmkernels.decode_layer.default, tuple(values.values()))
        qkv = torch.randn(2, (4 + 2 * KV_HEADS) * 64, device=device).bfloat16()
        state = (
            "cos",
            "sin",
            "positions",
            "cache_seqlens",
            "cache_leftpad",
            "k_cache",
            "v_cache",
            "block_table",
            "heads",
        )
        arguments = (qkv, *(values[name] for name in state), 0.3, 6, 2.0, False, values["q_norm"], values["k_norm"])
        torch.library.opcheck(torch.ops.llmkernels.rope_decode_attention.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("normed", ["", "q", "k", "qk"])
def test_attention_is_that_of_the_two_ops(device, normed, dim, dtype):
    """rope_decode_attention equals rope_kv_write, then decode_attention; the caches bit for bit."""
    values = make(3, dtype, device, lengths=[40, 1, 17], heads=14, dim=dim, normed=normed)
    qkv = torch.randn(3, (14 + 2 * KV_HEADS) * dim, device=device).to(dtype)
    q, k, v = (x.clone() for x in qkv.view(3, 1, -1, dim).split((14, KV_HEADS, KV_HEADS), 2))
    norms = {f"{x}_norm_weight": values[f"{x}_norm"] for x in "qk"}
    norms |= {"eps": 1e-5, "weight_offset": 0.5, "cast_before_weight": False}
    caches = [values[name].clone() for name in ("k_cache", "v_cache")]
    angles, positions, seqlens = (values["cos"], values["sin"]), values["positions"], values["cache_seqlens"]
    llmkernels.rope_kv_write(q, k, v, *angles, positions[:, None], *caches, seqlens, **norms)
    expected = llmkernels.decode_attention(q, *caches, seqlens, softcap=3.0)
    places = (*angles, positions, seqlens, None, values["k_cache"], values["v_cache"], None)
    y = torch.ops.llmkernels.rope_decode_attention(qkv.clone(), *places, 14, softcap=3.0, **norms)
    assert torch.equal(values["k_cache"], caches[0]) and torch.equal(values["v_cache"], caches[1])
    torch.testing.assert_close(y.view(expected.shape), expected)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("normed, dim", [("", 64), ("qk", 64), ("qk", 96)])
def test_one_layer(normed, dim, paged):
    check(make(3, torch.bfloat16, "cuda", paged=paged, heads=14, normed=normed, dim=dim))


@pytest.mark.gpu
def test_graph_follows_growing_lengths():
    """Captured once and replayed with other tokens and lengths; equal to calls without a graph."""
    values = make(3, torch.bfloat16, "cuda", lengths=[5, 20, 33])
    other = {name: x.clone() if torch.is_tensor(x) else x for name, x in values.items()}
    torch.ops.llmkernels.decode_layer(*other.values())
    for name in ("hidden", "k_cache", "v_cache"):
        other[name].copy_(values[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.llmkernels.decode_layer(*other.values())
    for _ in range(10):
        graph.replay()
        torch.ops.llmkernels.decode_layer(*values.values())
        for name in ("hidden", "k_cache", "v_cache"):
            assert torch.equal(other[name], values[name])
        for arguments in (values, other):
            for name in ("positions", "cache_seqlens"):
                arguments[name] += 1


@pytest.mark.gpu
def test_deterministic():
    values = make(4, torch.bfloat16, "cuda", lengths=[47, 46, 45, 3], normed="qk")
    first = run(torch.ops.llmkernels.decode_layer, values)
    for _ in range(250):
        for ours, wanted in zip(run(torch.ops.llmkernels.decode_layer, values), first, strict=True):
            assert torch.equal(ours, wanted)
