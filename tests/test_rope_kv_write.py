"""rope_kv_write: bitwise equal to rope and a copy; pages, tokens outside the cache, errors, CUDA graphs."""

import pytest
import torch

import oracles
from llmkernels import rope_kv_write
from oracles import DTYPES, angles, assert_same

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(device, dtype, batch=3, tokens=1, heads=6, kv_heads=2, head_dim=64, capacity=20, half=False):
    """q, k, v as slices of a packed projection; tables; caches full of NaN."""
    packed = torch.randn(batch, tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    tables = angles(50, head_dim // 2 if half else head_dim, dtype=dtype, device=device)
    caches = [
        torch.full((batch, capacity, kv_heads, head_dim), float("nan"), dtype=dtype, device=device) for _ in range(2)
    ]
    return packed.split([heads, kv_heads, kv_heads], 2), tables, caches


def expected(parts, tables, positions, caches, seqlens, interleaved=False):
    q, k, v = parts
    q, k = oracles.rope(q, k, *tables, positions, interleaved=interleaved, rotary_dim=q.size(3))
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


def test_empty(device):
    parts, tables, caches = make(device, torch.float32, batch=0)
    rope_kv_write(*parts, *tables, int32([0], device), *caches, int32([], device))


def test_opcheck(device):
    parts, tables, caches = make(device, torch.float32)
    parts = tuple(x.contiguous() for x in parts)
    caches = [c.nan_to_num() for c in caches]
    at = int32([0, 1, 2], device)
    torch.library.opcheck(torch.ops.llmkernels.rope_kv_write.default, (*parts, *tables, at[:, None], *caches, at + 1))


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
    "q must be contiguous along head_dim": {"q": torch.zeros(3, 1, 64, 6).transpose(2, 3)},
}


@pytest.mark.parametrize("message, changed", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors(device, message, changed):
    parts, tables, caches = make(device, torch.float32)
    at = int32([0, 1, 2], device)
    names = ["q", "k", "v", "cos", "sin", "positions", "k_cache", "v_cache", "cache_seqlens"]
    arguments = dict(zip(names, (*parts, *tables, at[:, None], *caches, at), strict=True))
    arguments |= {name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in changed.items()}
    with pytest.raises(RuntimeError, match="rope_kv_write: " + message):
        rope_kv_write(*arguments.values())


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
def test_every_path_once(dtype):
    for interleaved in (False, True):
        parts, tables, caches = make("cuda", dtype)
        parts = tuple(x.clone() for x in parts)
        at = int32([0, 1, 2], "cuda")
        want = expected(parts, tables, at[:, None], caches, at + 1, interleaved)
        rope_kv_write(*parts, *tables, at[:, None], *caches, at + 1, interleaved=interleaved)
        assert_same((parts[0], *caches), want)
