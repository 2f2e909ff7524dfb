"""Which kernel runs a linear or an attention on which GPU, and why: csrc/kernels/linear/route.h,
csrc/kernels/attention/route.h, and `llmkernels.explain`."""

import ctypes
import doctest
import itertools
import json
import math
import re
import subprocess
from collections import Counter

import pytest
import torch

import llmkernels
from hf_models import LAYERS, tiny_model
from linear_cases import add, kernels, make
from llmkernels import _explain, _library, explain
from llmkernels.hf.report import Decode
from llmkernels.hf.step import routes
from llmkernels.hf.step.describe import describe
from stub_cuda import CSRC, compile_stub

_op = torch.ops.llmkernels

H200 = {"compute_capability": 90, "wgmma": 1, "sm_count": 132, "shared_bytes": 232448, "clusters2": 66}
A100 = {"compute_capability": 80, "wgmma": 0, "sm_count": 108, "shared_bytes": 166912, "clusters2": 0}
B200 = {"compute_capability": 100, "wgmma": 0, "sm_count": 148, "shared_bytes": 232448, "clusters2": 74}
RTX_5090 = {"compute_capability": 120, "wgmma": 0, "sm_count": 170, "shared_bytes": 101376, "clusters2": 85}
RTX_2080 = {"compute_capability": 75, "wgmma": 0, "sm_count": 46, "shared_bytes": 65536, "clusters2": 0}
SMALL = {**A100, "shared_bytes": 98304}
VARIANTS = ["library", "gemv", "mma", "wgmma", "sm80", "gemm"]  # in the order of the enum

# m, n, k; what differs from a plain linear of bfloat16; the GPU; the kernel, and why it.
ROUTES = [
    # ---- nothing that a kernel takes
    ((0, 8, 8), {}, H200, "library", "there is nothing to multiply"),
    ((1, 8, 8), {"dtype": 0}, H200, "library", "float32: the kernels take float16 and bfloat16"),
    ((1, 8, 8), {"dtype": 3}, H200, "library", "float64: the kernels take float16 and bfloat16"),
    ((1, 8, 8), {"in_rows": 0}, H200, "library", "a tensor is not rows of contiguous columns"),
    ((1, 8, 12), {}, H200, "library", "k is no multiple of 8"),
    ((300, 8, 12), {}, H200, "library", "k is no multiple of 8"),
    ((1, 8, 8), {"weight_aligned": 0}, H200, "library", "rows of the weight are not aligned to 16 bytes"),
    # ---- one token
    ((1, 4608, 3584), {}, H200, "gemv", "one token"),
    ((1, 4608, 20480), {"normalize": 1}, H200, "gemv", "one token"),
    ((1, 4608, 20488), {}, H200, "mma", "one token, and k too large for gemv"),
    ((1, 151936, 896), {}, H200, "mma", "one token, and too many rows for gemv"),
    ((1, 152064, 3584), {}, B200, "gemv", "one token"),
    ((1, 4608, 3584), {}, A100, "sm80", "up to 16 tokens, on a GPU without TMA"),
    # ---- up to 16
    ((2, 4608, 3584), {}, H200, "mma", "up to 16 tokens"),
    ((16, 37888, 3584), {"glu": 1}, B200, "mma", "up to 16 tokens"),
    ((16, 4608, 3584), {}, RTX_5090, "sm80", "up to 16 tokens, on a GPU without TMA"),
    ((16, 4608, 3584), {"maps": 0}, H200, "sm80", "up to 16 tokens, on a GPU without TMA"),
    ((16, 4608, 3584), {"sm80": 1}, H200, "sm80", "up to 16 tokens, on a GPU without TMA"),
    ((16, 4608, 3584), {}, RTX_2080, "library", "the compute capability is below 8.0"),
    ((16, 4608, 3584), {}, SMALL, "library", "a block has less than 99 KB of shared memory"),
    ((16, 4608, 3584), {"x_aligned": 0}, H200, "library", "rows of x are not aligned to 16 bytes"),
    ((16, 4608, 3584), {"y_aligned": 0}, H200, "mma", "up to 16 tokens"),
    (
        (16, 4608, 3584),
        {"normalize": 1, "norm_weight_aligned": 0},
        H200,
        "library",
        "the norm's weight is not contiguous and aligned to 16 bytes",
    ),
    ((16, 4608, 3584), {"x_stride": 0}, H200, "library", "rows overlap in memory"),
    ((16, 4608, 3584), {"weight_stride": 8}, H200, "library", "rows overlap in memory"),
    ((16, 2**30, 8), {}, H200, "library", "the weight is too large"),
    # ---- 17 to 64
    ((17, 4608, 3584), {}, A100, "library", "more than 16 tokens take wgmma, of compute capability 9.0"),
    ((17, 4608, 3584), {}, B200, "library", "more than 16 tokens take wgmma, of compute capability 9.0"),
    ((17, 4608, 3584), {"wgmma": 0}, H200, "library", "more than 16 tokens take wgmma, of compute capability 9.0"),
    (
        (64, 37888, 3584),
        {"glu": 1},
        H200,
        "wgmma",
        "17 to 64 tokens with a gated activation, which cuBLAS leaves to a kernel of its own",
    ),
    ((64, 4608, 3584), {"in_step": 1}, H200, "wgmma", "17 to 64 tokens of a decode step, which does without cuBLAS"),
    ((32, 37888, 3584), {}, H200, "wgmma", "17 to 32 tokens of a tall weight"),
    ((33, 37888, 3584), {}, H200, "library", "cuBLAS is faster from 33 to 64 tokens of a tall weight"),
    ((24, 896, 896), {}, H200, "library", "cuBLAS is faster from 17 to 64 tokens of a weight of very few rows"),
    ((64, 3584, 18944), {}, H200, "wgmma", "17 to 64 tokens, and k above 8192"),
    (
        (64, 896, 896),
        {"residual": 1},
        H200,
        "wgmma",
        "17 to 64 tokens that are added to a residual, for which cuBLAS needs more launches",
    ),
    (
        (64, 4608, 3584),
        {"normalize": 1, "parts": 112},
        H200,
        "wgmma",
        "17 to 64 tokens, normalized by the linear before",
    ),
    ((48, 3584, 3584), {}, H200, "wgmma", "17 to 48 tokens of a weight of few rows"),
    ((49, 3584, 3584), {}, H200, "library", "cuBLAS is faster from 49 to 64 tokens of a weight of few rows"),
    (
        (32, 4608, 3584),
        {},
        H200,
        "library",
        "cuBLAS is faster from 17 to 64 tokens of a weight that is neither tall nor of few rows",
    ),
    # ---- more
    ((65, 4608, 3584), {}, B200, "library", "more than 64 tokens take wgmma, of compute capability 9.0"),
    ((2048, 3584, 3584), {"maps": 0}, H200, "library", "more than 64 tokens take wgmma, of compute capability 9.0"),
    ((128, 37888, 3584), {"glu": 1, "bias": 1}, H200, "library", "a gated activation with a bias"),
    ((2**31 - 200, 8, 8), {}, H200, "library", "too large for 32 bits"),
    ((2048, 3584, 3584), {"x_stride": 0}, H200, "library", "rows of x overlap in memory, or are too far apart"),
    ((2048, 3584, 3584), {"x_stride": 0, "normalize": 1}, H200, "gemm", None),  # the norm makes others
    (
        (2048, 3584, 3584),
        {"weight_stride": 8},
        H200,
        "library",
        "rows of the weight overlap in memory, or are too far apart",
    ),
    ((2048, 3584, 3584), {"x_aligned": 0}, H200, "library", "rows of x are not aligned to 16 bytes"),
    ((2048, 3584, 3584), {"x_aligned": 0, "normalize": 1, "norm_weight_aligned": 0}, H200, "gemm", None),
    ((2048, 3588, 3584), {}, H200, "library", "the columns of the result are no multiple of 8"),
    ((2048, 3584, 3584), {"y_aligned": 0}, H200, "library", "rows of the result are not aligned to 16 bytes"),
    ((1280, 3584, 3584), {}, H200, "library", "cuBLAS is faster from 65 to 1280 tokens"),
    ((2048, 3584, 3584), {}, H200, "gemm", "more than 1280 tokens, and only tiles of 224 columns fill the GPU"),
    (
        (2048, 4608, 3584),
        {},
        H200,
        "library",
        "cuBLAS is faster where tiles of 224 columns do not fill the GPU better than others",
    ),
    (
        (128, 37888, 3584),
        {"glu": 1},
        H200,
        "gemm",
        "more than 64 tokens with a gated activation, whose tiles fill most of the GPU",
    ),
    (
        (65, 37888, 3584),
        {"glu": 1},
        H200,
        "library",
        "cuBLAS is faster where tiles of a gated activation leave much of the GPU idle",
    ),
    ((65, 4608, 3584), {"gemm": 1}, H200, "gemm", "a test's switch"),
    ((2048, 3584, 3584), {"gemm": -1}, H200, "library", "a test's switch"),
    ((2048, 3588, 3584), {"gemm": 1}, H200, "library", "the columns of the result are no multiple of 8"),
]


DECODE_VARIANTS = ["none", "plain", "cp_async", "tma"]
ATTENTION_VARIANTS = ["none", "plain", "mma", "wgmma"]
TMA, COPY = "compute capability 9.0 and later", "a GPU before compute capability 9.0"
FLOAT32 = "float32: tensor cores take float16 and bfloat16"
FLOAT64 = "float64: on the CPU only"
UNALIGNED = "a head is not aligned to 16 bytes"

# batch, tokens, heads, kv_heads, head_dim, capacity; what differs from a contiguous cache of bfloat16; ...
MANY = (8, 1, 28, 4, 128, 4096)
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
    ((8, 100, 28, 4, 256, 4096), {}, H200, "tma", TMA),
    ((8, 1, 28, 4, 64, 4096), {"paged": 1, "page_size": 16, "pages": 9999}, H200, "tma", TMA),
    ((65535, 1, 28, 4, 64, 4096), {}, H200, "tma", TMA),
    ((1, 1, 4, 4, 64, 2**30 - 1), {}, H200, "tma", TMA),
    (MANY, {"k_token": 2**26}, A100, "cp_async", COPY),
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
NO_MAP, NO_QUERIES = "a stride that no tensor map takes", "there are no queries"
NOTHING = "there is nothing to compute"
ATTENTION_ROUTES = [
    (PROMPT, {}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),
    (PROMPT, {"dtype": 1}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),
    ((2, 512, 512, 8, 4, 8), {}, H200, ("wgmma", "wgmma"), HOPPER, HOPPER_BACKWARD),
    ((2, 512, 512, 8, 4, 256), {}, H200, ("wgmma", "mma"), HOPPER, "heads above 128 have no backward by wgmma"),
    (PROMPT, {}, A100, ("mma", "mma"), NO_WGMMA, NO_WGMMA),
    (PROMPT, {}, B200, ("mma", "mma"), NO_WGMMA, NO_WGMMA),
    (PROMPT, {"wgmma": 0}, H200, ("mma", "mma"), NO_WGMMA, NO_WGMMA),
    (PROMPT, {"maps": 0}, H200, ("mma", "mma"), "the driver has no tensor maps", "the driver has no tensor maps"),
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
    """Asks the routes, compiled by themselves: a word and numbers for an answer."""
    path = compile_stub("routes", tmp_path_factory.mktemp("routes"))
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(kind, values, options):
            assert not options.keys() - values.keys()
            numbers = (values | options).values()
            process.stdin.write(" ".join(map(str, [kind, *numbers])) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
        assert process.wait() == 0


@pytest.fixture(scope="module")
def route(program):
    """choose_route()."""

    def ask(shape, options, gpu):
        m, n, k = shape
        values = {"m": m, "n": n, "k": k, "x_stride": k, "weight_stride": k}
        values |= {"y_stride": n // 2 if options.get("glu") else n, "dtype": 2}
        values |= dict.fromkeys(("glu", "bias", "residual", "in_step", "normalize"), 0)
        values |= {"norm_weight": 1, "norm_offset": 0.0, "parts": 0, "in_rows": 1}
        values |= {"x_aligned": 1, "weight_aligned": 1, "y_aligned": 1, "norm_weight_aligned": 1}
        values |= {**gpu, "maps": 1, "sm80": 0, "gemm": 0}
        found = program("linear", values, options)
        return found | {"variant": VARIANTS[found["variant"]]}

    return ask


@pytest.mark.parametrize("shape, options, gpu, variant, reason", ROUTES)
def test_route(route, shape, options, gpu, variant, reason):
    found = route(shape, options, gpu)
    assert (found["variant"], found["reason"]) == (variant, reason or found["reason"])


def source_of(family):
    path = CSRC / "kernels" / family / "route.h"
    if not path.exists():
        pytest.skip("needs csrc")
    return path.read_text()


def test_every_reason_has_a_route():
    text = source_of("linear")
    reasons = set(re.findall(r'(?:take|refuse)\("([^"]+)"\)', text))
    for line in re.findall(r"route\.reason = [^;]+;", text):
        reasons |= set(re.findall(r'"([^"]+)"', line))
    assert reasons == {row[-1] for row in ROUTES} - {None}


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
        values |= {"dtype": 2, "aligned": 1, "grad_y_aligned": 1, **gpu, "maps": 1, "portable": 0}
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


def test_when_the_norm_is_folded(route):
    """Up to 16 tokens and 16384 columns, with a weight, whose offset is 0 or, in bfloat16, 1."""
    normalize = {"normalize": 1}
    for m, k, options, folded in [
        (1, 3584, {}, True),
        (16, 16384, {}, True),
        (16, 16392, {}, False),
        (16, 3584, {"norm_weight": 0}, False),
        (16, 3584, {"norm_offset": 1.0}, True),
        (16, 3584, {"norm_offset": 1.0, "dtype": 1}, False),
        (16, 3584, {"norm_offset": 0.5}, False),
        (17, 3584, {}, False),
        (17, 3584, {"parts": 112}, True),
    ]:
        found = route((m, 3584, k), {**normalize, **options}, H200)
        assert found["variant"] != "library"
        assert found["norm_first"] == (not folded), (m, k, options)
        assert found["workspace"] == (0 if folded else 2 * m * k), (m, k, options)
    more = route((2048, 3584, 3584), normalize, H200)
    assert more["variant"] == "gemm" and more["norm_first"] and more["workspace"] == 0  # the binding normalizes


def test_hand_off_of_the_norm(route):
    """From a linear by wgmma that adds to the residual, where that saves the next linear a launch."""
    adds = {"residual": 1}
    found = route((32, 3584, 18944), adds, H200)
    assert found["handoff"] == found["tiles"] * 2  # tiles of two blocks
    assert route((16, 3584, 18944), adds, H200)["handoff"] == 0  # folds the norm itself
    assert route((65, 3584, 18944), adds, H200)["handoff"] == 0
    assert route((32, 3584, 18944), {**adds, "x_aligned": 0}, H200)["handoff"] == 0


def test_switch_for_the_width_of_tiles(route):
    for width in (256, 224, 192, 144, 128):
        value = width if width > 192 else 1000 + width
        assert route((300, 4608, 3584), {"gemm": value}, H200)["columns"] == width


# ---- the module


def linear_route(*shape, gpu=H200, **options):
    module = pytest.importorskip("llmkernels._C")
    return module.linear_route(*shape, **{**facts_of(gpu), **options})


def facts_of(gpu):
    facts = {name: gpu[name] for name in ("compute_capability", "sm_count", "shared_bytes")}
    return {**facts, "clusters": {2: gpu["clusters2"]}}


@pytest.mark.parametrize(
    "shape, options, variant, rows, cluster",
    [
        ((1, 4608, 3584), {}, "gemv", 35, 1),
        ((4, 4608, 3584), {}, "mma", 36, 1),
        ((4, 4608, 3584), {"gpu": A100}, "sm80", None, 1),
        ((32, 3584, 18944), {}, "wgmma", None, 2),
        ((2048, 3584, 3584), {}, "gemm", 224, 2),
        ((128, 37888, 3584), {"glu": True}, "gemm", 72, 2),
    ],
)
def test_plan_covers_the_result(shape, options, variant, rows, cluster):
    found = linear_route(*shape, **options)
    plan, out = found["plan"], shape[1] // 2 if options.get("glu") else shape[1]
    assert found["variant"] == variant
    assert rows in (None, plan["tile_rows"]) and plan["cluster"] == cluster
    of_tokens = -(-shape[0] // 128) if variant == "gemm" else 1
    assert plan["tile_rows"] * plan["output_tiles"] >= out * of_tokens
    assert 0 < plan["bytes_in_flight"] < plan["shared_bytes"] <= 227 * 1024
    assert plan["stages"] > 0 and 0 < plan["blocks"] <= 2 * 148


def test_library_has_no_plan():
    found = linear_route(4, 4608, 3584, dtype="float32")
    assert found["variant"] == "library" and found["plan"] == {}


@pytest.mark.parametrize("number", [-1, -(2**31), 2**31, 2**62, 2**63 - 1])
def test_route_of_any_number(number):
    for shape in ((number, 8, 8), (8, number, 8), (8, 8, number)):
        with pytest.raises(ValueError, match=r"linear_route: [mnk] must be from 0 to 2\^31 - 1, got "):
            linear_route(*shape)


@pytest.mark.parametrize("gpu", [H200, A100, RTX_5090, {**H200, "sm_count": 1, "clusters2": 0}], ids=str)
def test_route_of_any_shape(gpu):
    sizes = (0, 1, 2, 8, 17, 64, 65, 4096, 2**20, 2**31 - 1)
    for m, n, k in itertools.product(sizes, repeat=3):
        if m * n < 2**40:
            found = linear_route(m, n, k, gpu=gpu, norm=True)
            assert found["reason"] and bool(found["plan"]) == (found["variant"] != "library")


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
        assert found["reason"] and bool(found["plan"]) == (found["variant"] in ("tma", "cp_async"))
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


def test_route_raises():
    with pytest.raises(ValueError, match="linear_route: dtype must be float16, bfloat16, float32 or float64, got int8"):
        linear_route(1, 8, 8, dtype="int8")
    with pytest.raises(ValueError, match="linear_route: n must be even with glu, got 9"):
        linear_route(1, 9, 8, glu=True)
    with pytest.raises(ValueError, match="linear_route: sm_count must be from 1 to 65536, got 0"):
        linear_route(1, 8, 8, sm_count=0)
    with pytest.raises(ValueError, match="linear_route: clusters must be of 2, 4, 8 or 16 blocks, got 3"):
        linear_route(1, 8, 8, clusters={3: 1})
    with pytest.raises(ValueError, match=r"linear_route: m \* n must be less than 2\^40"):
        linear_route(2**30, 2**30, 8)


# ---- explain


@pytest.fixture(autouse=True)
def needs_module():
    pytest.importorskip("llmkernels._C")


def test_text():
    assert str(explain("linear", (4, 3584), (4608, 3584), device="A100")) == (
        "linear  x (4, 3584)  weight (4608, 3584)  bfloat16  on A100\n"
        "kernel  mma.sync, weights by cp.async\n"
        "why     up to 16 tokens, on a GPU without TMA\n"
        "plan    44 rows per tile, 105 tiles, 105 blocks, 12 stages, 72 KB in flight, 80 KB of shared memory"
    )
    assert str(explain("rms_norm_linear", (2, 12, 3584), (37888, 3584), dtype=torch.float16, device="H100")) == (
        "rms_norm_linear  x (2, 12, 3584)  weight (37888, 3584)  float16  on H100\n"
        "kernel  wgmma, weights by TMA\n"
        "why     17 to 32 tokens of a tall weight\n"
        "norm    a launch of rms_norm before\n"
        "plan    64 rows per tile, 592 tiles, 132 blocks, 8 stages, 192 KB in flight, 208 KB of shared memory"
    )
    assert str(explain("linear_add_", (4, 3584), (4608, 3584), dtype=torch.float32, device="H100")) == (
        "linear_add_  x (4, 3584)  weight (4608, 3584)  float32  on H100\n"
        "kernel  cuBLAS\n"
        "why     float32: the kernels take float16 and bfloat16"
    )


def test_examples_of_the_docstring():
    done = doctest.testmod(_explain)
    assert done.attempted == 1 and done.failed == 0


def test_examples_of_the_documentation():
    text = (CSRC.parent / "docs" / "ops.md").read_text()
    calls = re.findall(r"print\((llmkernels\.explain\(.*\))\)\n", text)
    assert len(calls) == 4
    for call in calls:
        assert f"\n{eval(call)}\n" in text


@pytest.mark.parametrize("op", ["linear", "rms_norm_linear", "glu_linear", "rms_norm_glu_linear", "linear_add_"])
def test_of_every_op(op):
    found = explain(op, (32, 3584), (18944, 3584), device="H200")
    assert (found.op, found.dtype, found.device, found.then) == (op, "bfloat16", "H200", None)
    expected = {"linear": "17 to 32 tokens of a tall weight", "glu_linear": "17 to 64 tokens with a gated activation"}
    assert found.variant == "wgmma"
    assert found.reason.startswith(expected["glu_linear" if "glu" in op else "linear"])
    assert (found.norm is None) == ("norm" not in op)


def test_residual_counts():
    assert explain("linear", (64, 896), (896, 896), device="H200").variant == "library"
    assert explain("linear_add_", (64, 896), (896, 896), device="H200").variant == "wgmma"


def test_gated_mlp_has_two_products():
    shapes = ((1, 3584), (37888, 3584), (3584, 18944))
    first = explain("gated_mlp", *shapes, device="H200")
    assert (first.variant, first.plan["tile_rows"]) == ("gemv", 144)  # of the gate, and as many of the up projection
    assert (first.then.variant, first.then.plan["tile_rows"]) == ("gemv", 28)
    assert str(first).count("\nkernel  ") == 2 and "act(gate) up (1, 18944)  down_weight (3584, 18944)" in str(first)
    with_bias = explain("gated_mlp", *shapes, device="H200", bias=True)  # whose activation is a launch of its own
    assert with_bias.plan["tile_rows"] == 288


@pytest.mark.parametrize("device", list(_explain.GPUS))
def test_every_known_gpu(device):
    kind = {90: "mma", 100: "mma"}.get(_explain.GPUS[device].compute_capability, "sm80")
    assert explain("linear", (4, 4096), (4096, 4096), device=device).variant == kind
    in_step = explain("linear", (64, 4096), (4096, 4096), device=device, in_step=True)
    assert in_step.variant == ("wgmma" if device in ("H100", "H200") else "library")


def test_what_is_not_aligned():
    found = explain("linear", (4, 4096), (4096, 4096), device="H200", aligned=False)
    assert (found.variant, found.reason) == ("library", "rows of the weight are not aligned to 16 bytes")
    for op in ("decode_attention", "attention"):
        found = explain(op, (4, 1, 32, 128), (4, 512, 8, 128), device="H200", aligned=False)
        assert (found.variant, found.reason) == ("plain", UNALIGNED)


def test_text_of_attention():
    assert str(explain("decode_attention", (16, 1, 28, 128), (16, 4096, 4, 128), device="H200")) == (
        "decode_attention  q (16, 1, 28, 128)  k_cache (16, 4096, 4, 128)  bfloat16  on H200\n"
        "kernel  mma.sync, keys and values by TMA\n"
        "why     compute capability 9.0 and later\n"
        "plan    8 queries by 64 keys per tile, 64 work tiles, 264 blocks in clusters of 2, 2 per SM, 4 stages, "
        "64 KB in flight, 88 KB of shared memory"
    )
    shapes = ((1030, 1, 8, 80), (1030, 64, 8, 80))
    assert str(explain("decode_attention", *shapes, dtype=torch.float16, device="A100")) == (
        "decode_attention  q (1030, 1, 8, 80)  k_cache (1030, 64, 8, 80)  float16  on A100\n"
        "kernel  the plain one, without tensor cores\n"
        "why     head_dim is not 64, 96, 128 or 256"
    )
    assert str(explain("attention", (1, 512, 28, 192), (1, 2048, 4, 192), device="H200")) == (
        "attention  q (1, 512, 28, 192)  k (1, 2048, 4, 192)  bfloat16  on H200\n"
        "kernel  wgmma, keys and values by TMA\n"
        "why     compute capability 9.0\n"
        "plan    128 queries by 64 keys per tile, 112 blocks, 145 KB of shared memory\n"
        "\n"
        "attention_backward  q (1, 512, 28, 192)  k (1, 2048, 4, 192)  bfloat16  on H200\n"
        "kernel  mma.sync, keys and values by cp.async\n"
        "why     heads above 128 have no backward by wgmma\n"
        "plan    16 queries by 64 keys per tile, 128 blocks, 96 KB of shared memory"
    )


def test_paged_cache():
    """The capacity of a sequence counts, whatever the number of pages."""
    contiguous = explain("decode_attention", (8, 1, 28, 128), (8, 4096, 4, 128), device="H200")
    paged = explain("decode_attention", (8, 1, 28, 128), (9999, 64, 4, 128), (8, 64), device="H200")
    assert (paged.variant, paged.plan) == (contiguous.variant, contiguous.plan)
    odd = explain("decode_attention", (8, 1, 28, 128), (9999, 24, 4, 128), (8, 64), device="H200")
    assert (odd.variant, odd.reason) == ("plain", "pages are no multiple of 16 keys")


def test_decode_step_leaves_room_for_the_next_linear():
    """Of its blocks, in shared memory."""
    shapes = ((64, 1, 28, 128), (64, 4096, 4, 128))
    alone, in_step = (explain("decode_attention", *shapes, device="H200", in_step=step) for step in (False, True))
    assert in_step.plan["shared_bytes"] <= 64 * 1024 < alone.plan["shared_bytes"]


def test_several_launches():
    found = explain("decode_attention", (1030, 1, 8, 128), (1030, 64, 8, 128), device="H200")
    assert found.plan["launches"] == 2 and "8192 work tiles of each of 2 launches" in str(found)


@pytest.mark.parametrize("device", list(_explain.GPUS))
def test_attention_on_every_known_gpu(device):
    capability = _explain.GPUS[device].compute_capability
    found = explain("decode_attention", (4, 1, 32, 128), (4, 1024, 8, 128), device=device)
    assert found.variant == ("tma" if capability >= 90 else "cp_async")
    found = explain("attention", (4, 512, 32, 128), (4, 512, 8, 128), device=device)
    assert found.variant == found.then.variant == ("wgmma" if capability == 90 else "mma")
    assert (found.then.op, found.then.then) == ("attention_backward", None)
    assert ("splits" in found.then.plan) == (capability == 90)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu():
    assert explain("linear", (4, 64), (64, 64)).device == "H200 (this machine has no GPU)"
    with pytest.raises(ValueError, match=r"linear: device must be a GPU of this machine or one of .*, got 'cuda'"):
        explain("linear", (4, 64), (64, 64), device="cuda")


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("matmul", (4, 8), (8, 8)), {}, "explain: op must be one of linear, .*, got 'matmul'"),
        (("linear", (4, 8)), {}, "linear: shapes must be those of x, weight, got 1 of them"),
        (("gated_mlp", (4, 8), (8, 8)), {}, "gated_mlp: shapes must be those of x, gate_up_weight, down_weight, got 2"),
        (("linear", 4, (8, 8)), {}, "linear: the shape of x must be a tuple of sizes that are not negative, got 4"),
        (("linear", (4, 8), (8, -8)), {}, r"linear: the shape of weight must be a tuple of sizes .*, got \(8, -8\)"),
        (("linear", (), (8, 8)), {}, r"linear: x must have at least one dimension, got shape \[\]"),
        (("linear", (4, 8), (8, 9)), {}, r"linear: weight must have shape \[N, 8\] \(x.size\(-1\)\), got \[8, 9\]"),
        (("linear", (4, 8), (8,)), {}, r"linear: weight must have shape \[N, 8\] \(x.size\(-1\)\), got \[8\]"),
        (("glu_linear", (4, 8), (9, 8)), {}, r"glu_linear: weight must have an even number of rows, .* \[9, 8\]"),
        (
            ("gated_mlp", (4, 8), (16, 8), (8, 9)),
            {},
            r"gated_mlp: down_weight must have shape \[N, 8\] \(gate_up_weight.size\(0\) / 2\), got \[8, 9\]",
        ),
        (
            ("decode_attention", (1, 1, 8, 64)),
            {},
            "decode_attention: shapes must be those of q, k_cache, and block_table of a paged cache, got 1 of them",
        ),
        (("attention", *[(1, 1, 8, 64)] * 3), {}, "attention: shapes must be those of q, k, got 3 of them"),
        (
            ("attention", (1, 8, 64), (1, 1, 8, 64)),
            {},
            r"attention: q must have shape \(B, T, H, D\), got \[1, 8, 64\]",
        ),
        (
            ("attention", (2, 1, 8, 64), (1, 9, 8, 64)),
            {},
            r"attention: k must have shape \(2, Tk, Hkv, 64\), got \[1, 9, 8, 64\]",
        ),
        (
            ("decode_attention", (2, 1, 8, 64), (2, 9, 8, 32)),
            {},
            r"decode_attention: k_cache must have shape \(2, capacity, Hkv, 64\), got \[2, 9, 8, 32\]",
        ),
        (
            ("decode_attention", (2, 1, 8, 64), (9, 16, 8, 32), (2, 3)),
            {},
            r"decode_attention: k_cache must have shape \(pages, page_size, Hkv, 64\), got \[9, 16, 8, 32\]",
        ),
        (
            ("decode_attention", (2, 1, 8, 64), (9, 16, 8, 64), (1, 3)),
            {},
            r"decode_attention: block_table must have shape \(2, pages of a sequence\), got \[1, 3\]",
        ),
        (
            ("attention", (2, 1, 7, 64), (2, 9, 2, 64)),
            {},
            r"attention: q must have a multiple of the 2 heads of k, got shape \[2, 1, 7, 64\]",
        ),
        (("attention", *[(2, 1, 7, 64)] * 2), {"bias": True}, "attention: bias must be False, as the op has none"),
        (("attention", *[(2, 1, 7, 64)] * 2), {"in_step": True}, "attention: in_step must be False, as a decode step"),
        (("linear", (4, 8), (8, 8)), {"dtype": torch.int8}, "linear: dtype must be one of .*, got torch.int8"),
        (("glu_linear", (4, 8), (8, 8)), {"bias": True}, "glu_linear: bias must be False, as the op has none"),
        (("linear", (4, 8), (8, 8)), {"device": "V100"}, "linear: device must be a GPU .* RTX 5090, B200, got 'V100'"),
        (("linear", (4, 8), (8, 8)), {"device": "cpu"}, "linear: device must be a GPU of this machine .*, got 'cpu'"),
        (("linear", (4, 8), (8, 8)), {"device": "cuda:99"}, "linear: device must be a GPU of .*, got 'cuda:99'"),
    ],
)
def test_raises(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        explain(*arguments, **{"device": "H200", **options})


def test_shapes_in_a_list():
    shapes = (2, 40, 6, 64), (2, 40, 2, 64)
    assert explain("attention", list(shapes), device="H200") == explain("attention", *shapes, device="H200")
    with pytest.raises(ValueError, match="linear: shapes must be those of x, weight, got 1 of them"):
        explain("linear", [(4, 8)], device="H200")


# Per layer q|k|v, output, gate|up and down, then the head. gemv takes up to 132 x 8 rows of a warp's 256 elements.
@pytest.mark.parametrize(
    "dtype, device, expected",
    [
        (torch.bfloat16, "H200", {"gemv": 4 * LAYERS + 1}),
        (torch.float16, "A100", {"sm80": 4 * LAYERS + 1}),
        (torch.float32, "H200", {"library": 4 * LAYERS + 1}),
    ],
    ids=str,
)
def test_products_of_a_step(dtype, device, expected):
    model = tiny_model(dtype=dtype)
    handle = llmkernels.patch(model)
    assert routes.kernels_of(describe(model), device) == expected
    assert handle.report().decode[0].products == {}  # on the CPU


def test_report_shows_the_products_of_a_step():
    decode = Decode("Model", None, products=Counter({"gemv": 4, "library": 1}))
    assert str(decode) == "Model decodes by the decode step (products of a token: 4 by gemv, 1 by library)"


def test_public():
    assert llmkernels.explain is explain and "explain" in llmkernels.__all__


# ---- what really runs


def portable():
    return ctypes.CDLL(str(_library.PATH)).llmk_flash_attention_portable


def attention_kernels(call):
    """The variants of decode_attention, of attention and of its backward that a call runs, by the names of kernels."""
    names = " ".join(name for name in kernels(call) if "llmk" in name)
    capability = torch.cuda.get_device_capability()[0]
    parts = {
        "decode_attention_any_kernel": "plain",
        "decode_attention_kernel": "tma" if capability >= 9 else "cp_async",
        "flash_attention_any_kernel": "plain",
        "flash_attention_kernel": "mma",
        "flash_attention_sm90_kernel": "wgmma",
        "backward_keys_any_kernel": "plain",
        "flash_attention_backward_keys_kernel": "mma",
        "flash_attention_backward_keys_sm90_kernel": "wgmma",
    }
    return {variant for part, variant in parts.items() if part in names}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_explains_what_attention_runs(head_dim, dtype):
    q, k, v = (torch.randn(2, 40, heads, head_dim, device="cuda", dtype=dtype) for heads in (6, 2, 2))
    seqlens = torch.full((2,), 40, dtype=torch.int32, device="cuda")
    found = explain("decode_attention", (2, 1, 6, head_dim), k.shape, dtype=dtype)
    assert attention_kernels(lambda: llmkernels.decode_attention(q[:, :1], k, v, seqlens)) == {found.variant}
    found = explain("attention", q.shape, k.shape, dtype=dtype)
    assert attention_kernels(lambda: llmkernels.attention(q, k, v)) == {found.variant}
    y, lse = llmkernels.attention(q, k, v, return_lse=True)
    backward = (y, None, q, k, v, y, lse, None, None, None, -1, -1, 0.0)
    assert attention_kernels(lambda: _op.attention_backward(*backward)) == {found.then.variant}
    portable()(1)
    try:
        expected = {"plain" if found.variant == "plain" else "mma"}
        assert attention_kernels(lambda: llmkernels.attention(q, k, v)) == expected
    finally:
        portable()(0)


@pytest.mark.gpu
def test_explains_heads_that_are_not_aligned():
    memory = torch.randn(3, 2 * 40 * 2 * 64 + 8, device="cuda", dtype=torch.bfloat16)[:, 1:]
    q, k, v = (part[: 2 * 40 * 2 * 64].view(2, 40, 2, 64) for part in memory)
    found = explain("attention", q.shape, k.shape, aligned=False)
    assert attention_kernels(lambda: llmkernels.attention(q, k, v)) == {found.variant} == {"plain"}


PRODUCTS = {  # parts of the names of kernels
    "gemv": "gemv_kernel",
    "mma": "MmaSync",
    "wgmma": "Wgmma",
    "sm80": "linear_sm80",
    "gemm": "many_tokens",
}


def variants_of(call):
    names = [name for name in kernels(call) if "llmk" in name]
    return {variant for variant, part in PRODUCTS.items() if any(part in name for name in names)} or {"library"}


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 16, 17, 32, 33, 64, 65, 300, 2048])
@pytest.mark.parametrize(
    "n, k, dtype",
    [
        (896, 896, torch.bfloat16),
        (4608, 3584, torch.float16),
        (3584, 3584, torch.bfloat16),
        (18944, 1096, torch.bfloat16),
        (264, 132, torch.bfloat16),
        (264, 128, torch.float32),
    ],
)
def test_explains_what_runs(m, n, k, dtype):
    x, norm_weight, weight, _ = make(m, n, k, dtype, "cuda", bias=False)
    residual = torch.zeros(m, n, dtype=dtype, device="cuda")
    calls = {
        "linear": lambda: llmkernels.linear(x, weight),
        "rms_norm_linear": lambda: llmkernels.rms_norm_linear(x, norm_weight, weight),
        "glu_linear": lambda: _op.glu_linear(x, weight, "silu"),
        "linear_add_": lambda: add(residual, x, weight, None),
    }
    for op, call in calls.items():
        found = explain(op, x.shape, weight.shape, dtype=dtype)
        assert found.device == torch.cuda.get_device_name()
        assert variants_of(call) == {found.variant}, (op, str(found))


@pytest.mark.gpu
def test_explains_a_switch():
    """The switch is one of tests: explain tells what runs without it."""
    x, _, weight, _ = make(16, 4608, 3584, torch.bfloat16, "cuda", bias=False)
    force = ctypes.CDLL(str(_library.PATH)).llmk_force_linear_sm80
    try:
        force(1)
        assert variants_of(lambda: llmkernels.linear(x, weight)) == {"sm80"}
    finally:
        force(0)
    found = explain("linear", x.shape, weight.shape)
    assert variants_of(lambda: llmkernels.linear(x, weight)) == {found.variant}
