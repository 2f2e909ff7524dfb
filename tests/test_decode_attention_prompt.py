"""decode_attention of many tokens of a sequence, by the kernels of prompts: what test_decode_attention.py looks at."""

import contextlib
import ctypes

import pytest
import torch

from attention_oracle import every_device, portable_kernels  # noqa: F401
from llmkernels import _library, attention, decode_attention, explain
from oracles import DTYPES, SANITIZED_DTYPES, assert_same, captured
from test_decode_attention import check, int32, make, paged

HALVES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True, params=[1, 0], ids=["prompt", "route"])
def kernels(request, device):
    """By the kernels of prompts whatever the number of tokens, and as the route says."""
    if request.param and device == "cpu":
        pytest.skip("the CPU has one implementation")
    library = ctypes.CDLL(str(_library.PATH))
    set_least = getattr(library, "llmk_decode_attention_prompt", lambda tokens: None)
    set_least(request.param)
    yield "prompt" if request.param else "route"
    set_least(0)


@every_dtype
@pytest.mark.parametrize("tokens", [2, 17, 64, 65, 130, 200])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 80, 40])
def test_tokens_and_heads(device, head_dim, tokens, dtype):
    lengths = [tokens, tokens + 1, 256, 300, 17]
    check(make(device, dtype, lengths, heads=6, kv_heads=2, head_dim=head_dim, tokens=tokens, capacity=300))


@every_dtype
@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (6, 0)},
        {"window_size": (140, -1)},
        {"softcap": 5.0},
        {"softmax_scale": 0.3},
        {"window_size": (19, 0), "softcap": 2.0},
    ],
    ids=str,
)
def test_windows_and_caps(device, options, dtype):
    lengths = [100, 150, 400, 37]
    check(make(device, dtype, lengths, heads=14, kv_heads=2, tokens=100, capacity=400, **options), **options)


@every_dtype
def test_fewer_keys_than_tokens(device, dtype):
    ours = check(make(device, dtype, [30, 0, 100], tokens=100, capacity=128))
    assert (ours[0, :70] == 0).all() and (ours[0, 70:] != 0).any() and (ours[1] == 0).all()


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [None, 16, 32, 64, 128, 20, 48])
def test_starts(device, page_size, head_dim, dtype):
    """The padding is not read, wherever in a tile it ends."""
    starts = int32([0, 17, 130, 250, 1], device)
    for options in ({"cache_leftpad": starts}, {"cache_leftpad": starts, "window_size": (50, 0)}):
        capacity = 480 if page_size is None else -(-480 // page_size) * page_size
        inputs = make(
            device, dtype, [90, 200, 300, 260, 480], tokens=70, head_dim=head_dim, capacity=capacity, **options
        )
        _q, k, v, _ = inputs
        for b, start in enumerate(starts.tolist()):
            k[b, :start] = v[b, :start] = float("nan")
        if page_size is None:
            check(inputs, **options)
        else:
            pools, table = paged(k, v, page_size, device)
            check(inputs, table, pools, **options)


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("page_size", [8, 16, 32, 48, 20, 64, 128, 256, 1])
def test_pages(device, kernels, page_size, head_dim, dtype):
    """Every size; by one kernel, those of a power of two give the same bits as a contiguous cache."""
    capacity = 768 if page_size in (48, 256) else 640
    lengths = [0, 1, 100, 479, 640, 129]
    heads = 4 if device == "cpu" else 14
    inputs = make(device, dtype, lengths, heads=heads, capacity=capacity, tokens=129, head_dim=head_dim)
    pools, table = paged(inputs[1], inputs[2], page_size, device)
    ours = check(inputs, table, pools)
    if device == "cpu" or (kernels == "prompt" and page_size in (16, 32, 64, 128, 256)):
        assert_same(ours, decode_attention(*inputs))


@every_dtype
def test_the_same_as_attention(device, dtype):
    """Of sequences that fill their cache."""
    q, k, v, lengths = make(device, dtype, [300, 300], heads=8, tokens=120, head_dim=128, capacity=300)
    y, exact = decode_attention(q, k, v, lengths), attention(q, k, v, causal=True)
    assert (y.double() - exact.double()).abs().max() <= 16 * torch.finfo(dtype).eps * exact.abs().max()


@every_dtype
def test_layouts(device, dtype):
    q, k, v, lengths = make(device, dtype, [90, 200, 70], capacity=256, tokens=80, head_dim=64)
    expected = decode_attention(q, k, v, lengths)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    assert_same(decode_attention(q, *heads_first, lengths), expected)
    both = torch.stack((k, v), 2)
    assert_same(decode_attention(q, both[:, :, 0], both[:, :, 1], lengths), expected)
    packed = torch.cat((q, q), 2)
    assert_same(decode_attention(packed[:, :, q.size(2) :], k, v, lengths), expected)
    assert_same(decode_attention(q, k, v, int32([90, 7, 200, 7, 70, 7], device)[::2]), expected)


@every_dtype
def test_a_sequence_does_not_depend_on_its_batch(device, kernels, dtype):
    if device != "cpu" and kernels == "route":
        pytest.skip("the route depends on the batch")
    q, k, v, lengths = make(device, dtype, [90, 200, 70], capacity=256, tokens=70, head_dim=128)
    y = decode_attention(q, k, v, lengths)
    for b in range(3):
        assert_same(decode_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], lengths[b : b + 1]), y[b : b + 1])


@pytest.mark.gpu
@every_dtype
def test_bad_lengths_and_pages_do_no_harm_on_a_gpu(device, dtype):
    if device == "cpu":
        pytest.skip("the CPU raises")
    q, k, v, _ = make("cuda", dtype, [256, 256, 256], tokens=100, capacity=256)
    y = decode_attention(q, k, v, int32([1000000, -5, 256], "cuda"))
    assert_same(y[:1], decode_attention(q[:1], k[:1], v[:1], int32([256], "cuda")))
    assert (y[1] == 0).all()
    table = int32([[-1, 7], [1 << 30, 2], [0, 1]], "cuda")
    y = decode_attention(q, k[:, :128], v[:, :128], int32([256] * 3, "cuda"), block_table=table)
    torch.cuda.synchronize()
    assert y.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_cuda_graph_with_growing_lengths(device, kernels, dtype):
    if device == "cpu" or kernels == "route":
        pytest.skip("of a GPU, by one kernel")
    q, k, v, _ = make("cuda", dtype, [2000, 2000], heads=8, head_dim=128, tokens=200, capacity=2000)
    pools, table = paged(k, v, 16, "cuda")
    lengths = int32([200, 200], "cuda")
    graph, (y, by_pages) = captured(
        lambda: (decode_attention(q, k, v, lengths), decode_attention(q, *pools, lengths, block_table=table))
    )
    for live in ([0, 201], [517, 2000], [1999, 2000]):
        lengths.copy_(int32(live, "cuda"))
        graph.replay()
        assert_same(y, decode_attention(q, k, v, lengths))
        assert_same(by_pages, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_chunks_of_a_long_prompt(device, dtype):
    """A chunk behind 4096 keys, in pages of 16, by the formula."""
    if device == "cpu":
        pytest.skip("of a GPU")
    inputs = make("cuda", dtype, [4600, 3000], heads=8, head_dim=128, tokens=512, capacity=4608)
    pools, table = paged(inputs[1], inputs[2], 16, "cuda")
    check(inputs, table, pools)


def test_the_route_says_so():
    q, caches = (2, 512, 28, 128), ([(2, 4096, 4, 128)], [(512, 16, 4, 128), (2, 256)], [(512, 20, 4, 128), (2, 256)])
    for cache in caches:
        assert explain("decode_attention", q, *cache, device="H200").variant == "prompt"
        assert explain("decode_attention", (2, 1, 28, 128), *cache, device="H200").variant != "prompt"


@pytest.mark.gpu
@pytest.mark.parametrize("path", [contextlib.nullcontext, portable_kernels], ids=["own", "portable"])
@pytest.mark.parametrize("dtype", SANITIZED_DTYPES, ids=str)
def test_every_path_once(device, kernels, dtype, path):
    if device != "cuda" or kernels == "route":
        pytest.skip("once, by the kernels of prompts")
    with path():
        for head_dim, page_size in ((64, 16), (128, 20), (256, 160)):
            q, k, v, lengths = make("cuda", dtype, [90, 160], tokens=70, head_dim=head_dim, capacity=160)
            pools, table = paged(k, v, page_size, "cuda")
            for cache, pages in (((k, v), None), (pools, table)):
                starts = int32([3, 70], "cuda")
                decode_attention(q, *cache, lengths, block_table=pages, cache_leftpad=starts)
