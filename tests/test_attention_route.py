"""Which kernels run attention on which GPU, and why: csrc/kernels/attention/route.h."""

import itertools
import math
import re

import pytest

from llmkernels import explain
from route_cases import A100, B200, H200, RTX_5090, asking, facts_of, source_of

DECODE_VARIANTS = ["none", "plain", "cp_async", "tma", "prompt"]
ATTENTION_VARIANTS = ["none", "plain", "mma", "wgmma"]
TMA, COPY = "compute capability 9.0 and later", "a GPU before compute capability 9.0"
FLOAT32 = "float32: tensor cores take float16 and bfloat16"
FLOAT64 = "float64: on the CPU only"
UNALIGNED = "a head is not aligned to 16 bytes"

# batch, tokens, heads, kv_heads, head_dim, capacity; what differs from a contiguous cache of bfloat16; ...
MANY = (8, 1, 28, 4, 128, 4096)
PROMPTS = "many tokens of a sequence"
NO_STRIDE = "the cache has a size or a stride that no tensor map takes"
DECODE_ROUTES = [
    ((0, 1, 28, 4, 128, 4096), {}, H200, "none", "there is nothing to compute"),
    ((8, 1, 28, 4, 0, 4096), {}, H200, "none", "there is nothing to compute"),
    ((8, 1, 0, 0, 128, 4096), {}, H200, "none", "there is nothing to compute"),
    ((8, 1, 28, 4, 513, 4096), {}, H200, "none", "head_dim is above 512"),
    (MANY, {"dtype": 3}, H200, "none", FLOAT64),
    # ---- tensor cores
    (MANY, {}, H200, "tma", TMA),
    (MANY, {"wgmma": 0}, H200, "tma", TMA),
    (MANY, {"dtype": 1, "fused": 1}, RTX_5090, "tma", TMA),
    (MANY, {}, A100, "cp_async", COPY),
    (MANY, {"maps": 0}, A100, "cp_async", COPY),
    ((8, 1, 28, 4, 96, 4096), {}, H200, "tma", TMA),
    ((8, 4, 28, 4, 256, 4096), {}, H200, "tma", TMA),
    ((1, 64, 28, 4, 128, 4096), {}, H200, "tma", TMA),
    ((8, 16, 32, 32, 128, 4096), {}, H200, "tma", TMA),
    ((1, 128, 14, 2, 64, 4096), {}, H200, "tma", TMA),
    ((8, 1, 28, 4, 64, 4096), {"paged": 1, "page_size": 16, "pages": 9999}, H200, "tma", TMA),
    ((65535, 1, 28, 4, 64, 4096), {}, H200, "tma", TMA),
    ((1, 1, 4, 4, 64, 2**30 - 1), {}, H200, "tma", TMA),
    (MANY, {"k_token": 2**26}, A100, "cp_async", COPY),
    # ---- as a prompt
    ((8, 64, 28, 4, 128, 4096), {}, H200, "prompt", PROMPTS),
    ((1, 128, 28, 4, 128, 4096), {}, H200, "prompt", PROMPTS),
    ((8, 32, 32, 32, 128, 4096), {}, H200, "prompt", PROMPTS),
    ((1, 512, 14, 2, 64, 4096), {}, H200, "prompt", PROMPTS),
    ((8, 512, 28, 4, 128, 4096), {}, A100, "prompt", PROMPTS),
    ((8, 64, 28, 4, 128, 0), {}, H200, "prompt", PROMPTS),
    ((8, 64, 28, 4, 128, 4096), {"fused": 1}, H200, "tma", TMA),
    ((8, 4, 28, 4, 80, 4096), {}, H200, "prompt", PROMPTS),  # where the plain kernel would be the other choice
    ((8, 4, 28, 4, 128, 4096), {"paged": 1, "page_size": 20}, H200, "prompt", PROMPTS),
    ((8, 4, 28, 4, 128, 4096), {"maps": 0}, H200, "prompt", PROMPTS),
    ((8, 3, 28, 4, 80, 4096), {}, H200, "plain", "head_dim is not 64, 96, 128 or 256"),
    ((8, 64, 28, 4, 100, 4096), {}, H200, "plain", "head_dim is not 64, 96, 128 or 256"),
    ((8, 64, 28, 4, 512, 4096), {}, H200, "plain", "head_dim is not 64, 96, 128 or 256"),
    ((8, 64, 28, 4, 128, 4096), {"dtype": 0}, H200, "plain", FLOAT32),
    ((8, 64, 28, 4, 128, 4096), {"aligned": 0}, H200, "plain", UNALIGNED),
    (
        (8, 64, 28, 4, 128, 4096),
        {"paged": 1, "page_size": 16, "pages": 2**31},
        H200,
        "plain",
        "a tensor map takes less than 2^31 pages",
    ),
    # ---- none
    (MANY, {"dtype": 0}, H200, "plain", FLOAT32),
    ((8, 1, 28, 4, 80, 4096), {}, H200, "plain", "head_dim is not 64, 96, 128 or 256"),
    ((8, 1, 28, 4, 512, 4096), {}, H200, "plain", "head_dim is not 64, 96, 128 or 256"),
    ((1, 1, 4, 4, 64, 2**30), {}, H200, "plain", "a sequence may have 2^30 keys or more"),
    ((65536, 1, 28, 4, 64, 4096), {}, H200, "plain", "more than 65535 sequences or kv heads"),
    ((1, 1, 65536, 65536, 64, 4096), {}, H200, "plain", "more than 65535 sequences or kv heads"),
    (MANY, {"aligned": 0}, H200, "plain", UNALIGNED),
    (MANY, {"paged": 1, "page_size": 24}, H200, "plain", "pages are no multiple of 16 keys"),
    (
        (1, 1, 512, 512, 64, 2**29),
        {},
        H200,
        "plain",
        "a sequence may have too many KV tiles to count in 32 bits",
    ),
    (MANY, {"shared_bytes": 65536}, A100, "plain", "a block has too little shared memory"),
    (MANY, {"shared_bytes": 49152}, H200, "plain", "a block has too little shared memory"),
    ((8, 1, 28, 4, 256, 4096), {}, RTX_5090, "plain", "a block has too little shared memory"),
    (MANY, {"maps": 0}, H200, "plain", "the driver has no tensor maps"),
    (MANY, {"paged": 1, "page_size": 16, "pages": 2**31}, H200, "plain", "a tensor map takes less than 2^31 pages"),
    (MANY, {"k_token": 0}, H200, "plain", NO_STRIDE),
    (MANY, {"v_page": 2**39}, H200, "plain", NO_STRIDE),
    (MANY, {"v_head": -128}, H200, "plain", NO_STRIDE),
    ((8, 1, 28, 4, 128, 0), {}, H200, "plain", NO_STRIDE),
    ((1, 1, 7, 1, 128, 1), {"k_page": 0, "k_token": 0, "k_head": -1}, H200, "tma", TMA),  # strides that are not used
    (MANY, {"v_token": 2**26 + 8}, A100, "plain", "keys are more than 2^26 elements apart"),
    (MANY, {"v_token": 2**26 + 8}, H200, "tma", TMA),
]

# batch, q_tokens, k_tokens, heads, kv_heads, head_dim; what differs from contiguous bfloat16; the GPU; the kernels of
# forward and backward, and why these.
PROMPT = (2, 512, 512, 8, 4, 128)
HOPPER, HOPPER_BACKWARD = "compute capability 9.0", "compute capability 9.0, and heads of up to 128"
NO_WGMMA = "wgmma takes compute capability 9.0, and a build for sm_90a"
LARGE = "heads above 128 have no backward by wgmma"
PAGES = "pages whose size is neither 8 keys times a power of two nor a multiple of a tile"
NO_MAP, NO_QUERIES = "a stride that no tensor map takes", "there are no queries"
NOTHING = "there is nothing to compute"
ATTENTION_ROUTES = [
    (PROMPT, {}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),
    (PROMPT, {"dtype": 1}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),
    ((2, 512, 512, 8, 4, 8), {}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),
    ((2, 512, 512, 8, 4, 256), {}, H200, ("wgmma", "mma"), HOPPER, LARGE),
    (PROMPT, {}, A100, ("mma", "mma"), NO_WGMMA, NO_WGMMA),
    (PROMPT, {}, B200, ("mma", "mma"), NO_WGMMA, NO_WGMMA),
    (PROMPT, {"wgmma": 0}, H200, ("mma", "mma"), NO_WGMMA, NO_WGMMA),
    (PROMPT, {"maps": 0}, H200, ("mma", "mma"), "the driver has no tensor maps", "the driver has no tensor maps"),
    (PROMPT, {"biased": 1}, H200, ("wgmma", "mma"), HOPPER, "masks and slopes have no backward by wgmma"),
    *((PROMPT, {"page_size": n, "pages": 99}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD) for n in (8, 64, 384)),
    *((PROMPT, {"page_size": n, "pages": 99}, H200, ("mma", "mma"), PAGES, PAGES) for n in (4, 20, 48, 192)),
    ((2, 512, 512, 8, 4, 256), {"page_size": 192, "pages": 9}, H200, ("wgmma", "mma"), HOPPER, LARGE),
    (PROMPT, {"portable": 1}, H200, ("mma", "mma"), "a test's switch", "a test's switch"),
    ((2, 512, 0, 8, 4, 128), {}, H200, ("mma", "mma"), "there are no keys", "there are no keys"),
    (PROMPT, {"q_token": 0}, H200, ("mma", "mma"), NO_MAP, NO_MAP),
    (PROMPT, {"v_head": -128}, H200, ("mma", "mma"), NO_MAP, NO_MAP),
    (PROMPT, {"k_batch": 2**39}, H200, ("mma", "mma"), NO_MAP, NO_MAP),
    (PROMPT, {"k_head": 0, "v_batch": 0}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),  # expanded
    ((2, 1, 512, 8, 4, 128), {"q_token": -8}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),  # not used
    (PROMPT, {"grad_y_token": 0}, H200, ("wgmma", "mma"), HOPPER, "a stride of grad_y that no tensor map takes"),
    # ---- without tensor cores
    (PROMPT, {"dtype": 0}, H200, ("plain", "plain"), FLOAT32, FLOAT32),
    (
        (2, 512, 512, 8, 4, 100),
        {},
        H200,
        ("plain", "plain"),
        "head_dim is no multiple of 8",
        "head_dim is no multiple of 8",
    ),
    (PROMPT, {"aligned": 0}, H200, ("plain", "plain"), UNALIGNED, UNALIGNED),
    (PROMPT, {"k_token": 516}, H200, ("plain", "plain"), UNALIGNED, UNALIGNED),
    (
        PROMPT,
        {"grad_y_aligned": 0},
        H200,
        ("wgmma", "plain"),
        HOPPER,
        "a head of grad_y is not aligned to 16 bytes",
    ),
    (PROMPT, {"grad_y_head": 129}, A100, ("mma", "plain"), NO_WGMMA, "a head of grad_y is not aligned to 16 bytes"),
    # ---- no kernel
    (PROMPT, {"dtype": 3}, H200, ("none", "none"), FLOAT64, FLOAT64),
    ((2, 512, 512, 8, 4, 264), {}, H200, ("none", "none"), "head_dim is above 256", "head_dim is above 256"),
    (
        (2, 512, 2**30 + 1, 8, 4, 8),
        {},
        H200,
        ("none", "none"),
        "more than 2^30 tokens",
        "more than 2^30 tokens",
    ),
    # ---- nothing to do, but gradients of zeros
    ((2, 0, 512, 8, 4, 128), {}, H200, ("none", "mma"), NOTHING, NO_QUERIES),
    ((0, 512, 512, 8, 4, 128), {}, H200, ("none", "mma"), NOTHING, NO_QUERIES),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    with asking(tmp_path_factory.mktemp("routes")) as ask:
        yield ask


def test_every_reason_of_attention_has_a_route():
    text = source_of("attention")
    reasons = set(re.findall(r'(?:take|refuse)\("([^"]+)"\)', text))
    reasons |= set(re.findall(r'reason = "([^"]+)"', text))
    assert reasons == {row[-1] for row in DECODE_ROUTES} | {reason for row in ATTENTION_ROUTES for reason in row[-2:]}


@pytest.fixture(scope="module")
def decode_route(program):
    """choose_decode_route()."""

    def ask(shape, options, gpu):
        batch, _, _, kv_heads, head_dim, capacity = shape
        values = dict(zip(("batch", "tokens", "heads", "kv_heads", "head_dim", "capacity"), shape, strict=True))
        values |= {"page_size": capacity, "pages": batch}
        row = kv_heads * head_dim
        for name in "kv":
            values |= {f"{name}_page": capacity * row, f"{name}_token": row, f"{name}_head": head_dim}
        values |= {"paged": 0, "fused": 0, "dtype": 2, "aligned": 1, **gpu, "maps": 1}
        found = program("decode", values, options)
        return found | {"variant": DECODE_VARIANTS[found["variant"]]}

    return ask


@pytest.mark.parametrize("shape, options, gpu, variant, reason", DECODE_ROUTES)
def test_decode_route(decode_route, shape, options, gpu, variant, reason):
    found = decode_route(shape, options, gpu)
    assert (found["variant"], found["reason"]) == (variant, reason)
    assert (found["workspace"] > 0) == (variant in ("tma", "cp_async"))


@pytest.fixture(scope="module")
def attention_route(program):
    """choose_attention_route()."""

    def ask(shape, options, gpu):
        names = ("batch", "q_tokens", "k_tokens", "heads", "kv_heads", "head_dim")
        values = dict(zip(names, shape, strict=True))
        _, q_tokens, k_tokens, heads, kv_heads, head_dim = shape
        q, k = (q_tokens, heads * head_dim), (k_tokens, kv_heads * head_dim)
        for name, (tokens, row) in {"q": q, "k": k, "v": k, "grad_y": q}.items():
            values |= {f"{name}_batch": tokens * row, f"{name}_token": row, f"{name}_head": head_dim}
        values |= {
            "dtype": 2,
            "aligned": 1,
            "grad_y_aligned": 1,
            "biased": 0,
            "page_size": 0,
            "pages": 0,
            **gpu,
            "maps": 1,
            "portable": 0,
        }
        found = program("attention", values, options)
        return found | {name: ATTENTION_VARIANTS[found[name]] for name in ("variant", "backward")}

    return ask


@pytest.mark.parametrize("shape, options, gpu, variants, reason, backward_reason", ATTENTION_ROUTES)
def test_attention_route(attention_route, shape, options, gpu, variants, reason, backward_reason):
    found = attention_route(shape, options, gpu)
    assert (found["variant"], found["backward"]) == variants
    assert (found["reason"], found["backward_reason"]) == (reason, backward_reason)
    assert (found["splits"] > 0) == (variants[1] == "wgmma")


def test_launches_of_decode_attention(decode_route):
    """More sequences than a launch takes go in several, of which the last has a plan of its own."""
    found = decode_route((1030, 1, 8, 8, 128, 64), {}, H200)
    assert found["sequences"] == 1024 and found["last_clusters"] == 6 * 8 < found["clusters"]
    once = decode_route((1024, 1, 8, 8, 128, 64), {}, H200)
    assert once["sequences"] == 1024 and once["last_clusters"] == once["clusters"]
    assert found["workspace"] == once["workspace"] == 4 * 130 * 16 * once["clusters"]


def test_blocks_per_sm(decode_route):
    """Two where registers and shared memory allow it; an A100 has too little of the latter for heads of 128."""
    for shape, gpu, blocks in [
        ((64, 1, 28, 4, 128, 4096), H200, 2),
        ((64, 2, 28, 4, 128, 4096), H200, 1),  # 14 queries of a kv head
        ((64, 1, 28, 4, 128, 4096), A100, 1),
        ((64, 1, 14, 2, 64, 4096), A100, 2),
        ((64, 1, 28, 4, 256, 4096), H200, 1),
    ]:
        found = decode_route(shape, {}, gpu)
        assert found["blocks_per_sm"] == blocks, (shape, gpu)
        assert found["clusters"] <= blocks * gpu["sm_count"], (shape, gpu)  # all run at the same time


@pytest.mark.parametrize(
    "head_dim, device, queries",
    [(128, "H200", 16), (256, "H200", 16), (128, "A100", 16), (128, "RTX 4090", 8), (96, "L40S", 8), (64, "L40S", 16)],
)
def test_queries_of_a_block(head_dim, device, queries):
    """16 where shared memory holds the sums of so many, else 8."""
    found = explain("decode_attention", (8, 4, 28, head_dim), (8, 4096, 4, head_dim), device=device)
    assert found.variant != "plain" and found.plan["queries"] == queries


def test_columns_of_heads(attention_route):
    """Heads take the narrowest kernel that holds them."""
    for head_dim, columns, backward, portable in [
        (8, 64, 64, 64),
        (64, 64, 64, 64),
        (72, 128, 128, 128),
        (128, 128, 128, 128),
        (136, 192, 256, 256),
        (192, 192, 256, 256),
        (200, 256, 256, 256),
    ]:
        found = attention_route((1, 512, 512, 8, 4, head_dim), {}, H200)
        assert (found["columns"], found["backward_columns"]) == (columns, backward)
        found = attention_route((1, 512, 512, 8, 4, head_dim), {}, A100)
        assert (found["columns"], found["backward_columns"]) == (portable, portable)


def test_splits_of_the_backward(attention_route):
    """The heads of a kv head are dealt to several blocks until each SM has four, whatever the batch."""
    for tokens, heads, kv_heads, splits in [(4096, 28, 4, 7), (512, 32, 8, 4), (65536, 28, 4, 1), (2048, 12, 2, 6)]:
        for batch in (1, 8):
            found = attention_route((batch, tokens, tokens, heads, kv_heads, 128), {}, H200)
            assert found["splits"] == splits, (tokens, heads)


@pytest.mark.parametrize("gpu", [H200, A100, RTX_5090, {**H200, "sm_count": 1, "clusters2": 0}], ids=str)
def test_routes_of_attention_of_any_shape(gpu):
    facts, sizes = facts_of(gpu), (0, 1, 17, 4096, 2**20, 2**31 - 1)
    module = pytest.importorskip("llmkernels._C")
    for batch, tokens, keys, heads, group, head_dim in itertools.product(
        (0, 1, 33, 65536), sizes, sizes, (0, 1, 8), (1, 7), (0, 64, 100, 128, 256, 513)
    ):
        if math.prod(max(size, 1) for size in (batch, max(tokens * group, keys), heads, head_dim)) >= 2**50:
            continue
        shape = (batch, tokens, heads * group, heads, head_dim, keys)
        found = module.decode_attention_route(*shape, **facts)
        assert found["reason"] and bool(found["plan"]) == (found["variant"] in ("tma", "cp_async", "prompt"))
        found = module.attention_route(batch, tokens, keys, heads * group, heads, head_dim, **facts)
        for one in (found, found["backward"]):
            assert one["reason"] and bool(one["plan"]) == (one["variant"] in ("wgmma", "mma"))


@pytest.mark.parametrize("number", [-1, -(2**31), 2**31, 2**62, 2**63 - 1])
def test_routes_of_attention_of_any_number(number):
    module, facts = pytest.importorskip("llmkernels._C"), facts_of(H200)
    for name in ("decode_attention_route", "attention_route"):
        for i in range(6):
            sizes = [8] * 6
            sizes[i] = number
            with pytest.raises(ValueError, match=rf"{name}: \w+ must be from 0 to 2\^31 - 1, got {number}"):
                getattr(module, name)(*sizes, **facts)


def test_routes_of_attention_raise():
    module, facts = pytest.importorskip("llmkernels._C"), facts_of(H200)
    for sizes, options, message in [
        ((8, 8, 7, 2, 64, 8), {}, "heads must be a multiple of kv_heads, got 7"),
        ((8, 8, 7, 0, 64, 8), {}, "heads must be a multiple of kv_heads, got 7"),
        ((8, 8, 2**21, 1, 64, 8), {}, r"heads must be at most 2\^20, got 2097152"),
        ((2**20, 2**20, 8, 8, 2**10, 8), {}, r"elements of q must be less than 2\^50, got "),
        ((2**20, 1, 8, 8, 2**10, 2**20), {}, r"elements of the cache must be less than 2\^50, got "),
        ((8, 8, 8, 8, 64, 8), {"dtype": "int8"}, "dtype must be float16, bfloat16, float32 or float64, got int8"),
        ((8, 8, 8, 8, 64, 8), {"sm_count": 0}, "sm_count must be from 1 to 65536, got 0"),
    ]:
        with pytest.raises(ValueError, match=f"decode_attention_route: {message}"):
            module.decode_attention_route(*sizes, **(facts | options))
    with pytest.raises(ValueError, match=r"attention_route: elements of k must be less than 2\^50, got "):
        module.attention_route(2**20, 1, 2**20, 8, 8, 2**10, **facts)
    with pytest.raises(ValueError, match="attention_route: clusters must be of 2, 4, 8 or 16 blocks, got 3"):
        module.attention_route(1, 8, 8, 8, 8, 64, **(facts | {"clusters": {3: 1}}))
