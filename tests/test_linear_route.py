"""Which kernel runs a linear on which GPU, and why: csrc/kernels/linear/route.h."""

import itertools
import re

import pytest

from route_cases import A100, B200, H200, RTX_2080, RTX_5090, asking, facts_of, source_of

VARIANTS = ["library", "gemv", "mma", "wgmma", "sm80", "gemm"]  # in the order of the enum


def tuned(first_m, last_m, n, k, variant, *plan, **flags):
    """The numbers of a measured choice, csrc/kernels/linear/tuned.h, as an option of a route."""
    names = ("glu", "normalize", "residual", "in_step")
    numbers = [first_m, last_m, n, k, *(flags.get(name, 0) for name in names), variant, *plan]
    return {"tuned": [*numbers, *[0] * (15 - len(numbers))]}


LIBRARY, GEMV, MMA, WGMMA, SM80, GEMM = range(6)
KB = 1024

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
    ((65, 18944, 3584), {}, H200, "gemm", "65 to 128 tokens of a tall weight"),
    ((128, 5120, 13824), {}, H200, "gemm", "65 to 128 tokens, and k above 8192, which is split"),
    (
        (128, 3584, 3584),
        {},
        H200,
        "library",
        "cuBLAS is faster from 65 to 128 tokens, but of tall weights and some whose K is split",
    ),
    (
        (65, 3584, 3584),
        {"residual": 1, "in_step": 1},
        H200,
        "gemm",
        "65 to 128 tokens of a decode step, with K split, so that a norm needs no launch",
    ),
    (
        (100, 4608, 3584),
        {"normalize": 1, "in_step": 1, "parts": 28},
        H200,
        "gemm",
        "65 to 128 tokens of a decode step, with K split, so that a norm needs no launch",
    ),
    ((1280, 3584, 3584), {}, H200, "library", "cuBLAS is faster from 129 to 1280 tokens"),
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
        (129, 28672, 4096),
        {"glu": 1},
        H200,
        "library",
        "cuBLAS is faster where tiles of a gated activation leave much of the GPU idle",
    ),
    # ---- quantized
    ((1, 4608, 3584), {"int8": 1}, H200, "gemv", "one token"),
    ((1, 4608, 3584), {"int8": 1}, A100, "sm80", "up to 16 tokens, on a GPU without TMA"),
    ((1, 4608, 20496), {"int8": 1}, H200, "sm80", "up to 16 tokens of a quantized weight"),
    ((1, 151936, 896), {"int8": 1}, H200, "sm80", "up to 16 tokens of a quantized weight"),
    ((2, 4608, 3584), {"int8": 1}, H200, "sm80", "up to 16 tokens of a quantized weight"),
    ((16, 37888, 3584), {"int8": 1, "glu": 1, "normalize": 1}, B200, "sm80", "up to 16 tokens of a quantized weight"),
    ((4, 4608, 3584), {"int8": 1, "dtype": 0}, H200, "library", "float32: the kernels take float16 and bfloat16"),
    ((4, 4608, 3584), {"int8": 1, "x_aligned": 0}, H200, "library", "rows of x are not aligned to 16 bytes"),
    ((4, 4608, 3592), {"int8": 1}, H200, "library", "rows of the quantized weight are no multiple of 16 bytes"),
    (
        (17, 4608, 3584),
        {"int8": 1, "in_step": 1},
        H200,
        "library",
        "more than 16 tokens of a quantized weight, which is dequantized first",
    ),
    ((4, 4608, 3584), {"int8": 1} | tuned(3, 4, 4608, 3584, MMA, 1, 3, 200 * KB, 96, 56), H200, "sm80", None),
    # ---- measured
    (
        (4, 4608, 3584),
        tuned(3, 4, 4608, 3584, MMA, 1, 3, 200 * KB, 96, 56),
        H200,
        "mma",
        "measured to be the fastest on this GPU",
    ),
    ((1, 151936, 896), tuned(1, 1, 151936, 896, GEMV), H200, "gemv", "measured to be the fastest on this GPU"),
    (
        (64, 896, 896),
        tuned(33, 64, 896, 896, WGMMA, 2, 2, 200 * KB, 288, 56),
        H200,
        "wgmma",
        "measured to be the fastest on this GPU",
    ),
    (
        (4, 4608, 3584),
        tuned(3, 4, 4608, 3584, LIBRARY),
        H200,
        "library",
        "cuBLAS was measured to be faster on this GPU",
    ),
    (
        (128, 4608, 3584),
        tuned(65, 128, 4608, 3584, GEMM, 0, 0, 0, 0, 0, 1192),
        H200,
        "gemm",
        "measured to be the fastest on this GPU",
    ),
    ((65, 4608, 3584), {"gemm": 1}, H200, "gemm", "a test's switch"),
    ((2048, 3584, 3584), {"gemm": -1}, H200, "library", "a test's switch"),
    ((2048, 3588, 3584), {"gemm": 1}, H200, "library", "the columns of the result are no multiple of 8"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    with asking(tmp_path_factory.mktemp("routes")) as ask:
        yield ask


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
        entries = [options["tuned"]] if "tuned" in options else []
        numbers = [len(entries), *itertools.chain(*entries)]
        of_more_blocks = {"clusters4": 32, "clusters8": 14} if gpu is H200 else {"clusters4": 0, "clusters8": 0}
        values |= {**gpu, **of_more_blocks, "maps": 1, "sm80": 0, "gemm": 0}
        values |= {"next_rows": 4608, "next_glu": 0, "int8": 0, "tuned": 0}
        found = program("linear", values, {**options, "tuned": " ".join(map(str, numbers))})
        return found | {"variant": VARIANTS[found["variant"]]}

    return ask


@pytest.mark.parametrize("shape, options, gpu, variant, reason", ROUTES)
def test_route(route, shape, options, gpu, variant, reason):
    found = route(shape, options, gpu)
    assert (found["variant"], found["reason"]) == (variant, reason or found["reason"])


def test_every_reason_has_a_route():
    text = source_of("linear")
    reasons = set(re.findall(r'(?:take|refuse)\("([^"]+)"\)', text))
    for line in re.findall(r"route\.reason = [^;]+;", text):
        reasons |= set(re.findall(r'"([^"]+)"', line))
    assert reasons == {row[-1] for row in ROUTES} - {None}


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
    assert route((32, 3584, 18944), {**adds, "x_aligned": 0}, H200)["handoff"] == 0


STEP = {"in_step": 1}
ADDS, NORMALIZES = {**STEP, "residual": 1}, {**STEP, "normalize": 1}


@pytest.mark.parametrize("m", [65, 100, 128])
def test_hand_off_of_the_norm_of_many_tokens(route, m):
    """From a linear of a step that splits K. The next one has 4608 rows, and splits K if it gets the hand-off."""
    for n, k, columns, splits in [(3584, 3584, 128, 4), (3584, 18944, 128, 4), (5120, 5120, 80, 2)]:
        found = route((m, n, k), ADDS, H200)
        assert (found["variant"], found["columns"], found["splits"]) == ("gemm", columns, splits)
        tiles = found["blocks"] // splits
        assert found["handoff"] == tiles and tiles * columns >= n
    outside = {"residual": 1}
    assert route((m, 3584, 3584), outside, H200)["variant"] == "library"
    assert route((m, 3584, 18944), outside, H200)["handoff"] == 0  # splits K, but the next one is cuBLAS
    assert route((m, 896, 896), ADDS, H200)["variant"] == "library"  # too few blocks
    assert route((m, 3584, 3584), {**ADDS, "gemm": 1128}, H200)["handoff"] == 0  # does not split K
    assert route((m, 3584, 3584), {**ADDS, "gemm": -1}, H200)["handoff"] == 0
    assert route((m, 3592, 3584), {**ADDS, "y_aligned": 0}, H200)["handoff"] == 0


@pytest.mark.parametrize("rows, gated, taken", [(4608, 0, 1), (20480, 1, 1), (4608, 1, 0), (20480, 0, 0)])
def test_hand_off_to_a_gated_linear(route, rows, gated, taken):
    """It takes one where its tiles fill the GPU; a plain linear of as many rows, which does not split K, takes none."""
    found = route((128, 3584, 3584), {**ADDS, "next_rows": rows, "next_glu": gated}, H200)
    assert (found["handoff"] > 0) == taken


def test_no_hand_off_of_more_tokens(route):
    assert route((129, 3584, 3584), ADDS, H200)["variant"] == "library"
    assert route((129, 3584, 3584), {**ADDS, "gemm": 2128}, H200)["handoff"] == 0


@pytest.mark.parametrize("m", [65, 100, 128])
def test_who_takes_the_norm_of_many_tokens(route, m):
    gets = {**NORMALIZES, "parts": 28}
    assert route((m, 4608, 3584), NORMALIZES, H200)["variant"] == "library"
    found = route((m, 4608, 3584), gets, H200)
    assert (found["variant"], found["columns"], found["splits"], found["norm_first"]) == ("gemm", 80, 2, False)
    assert route((m, 4608, 3584), {**gets, "in_step": 0}, H200)["variant"] == "library"
    assert route((m, 4608, 3584), {**gets, "x_aligned": 0}, H200)["variant"] == "library"
    for n, variant in [(37888, "gemm"), (9728, "library")]:  # gated: where it is taken without a hand-off
        for options in (NORMALIZES, gets):
            found = route((m, n, 3584), {**options, "glu": 1}, H200)
            assert found["variant"] == variant
            assert found["norm_first"] == (variant == "library" or "parts" not in options)
    tall = route((m, 18944, 3584), gets, H200)  # neither gated nor with K split
    assert tall["variant"] == "gemm" and tall["norm_first"] and tall["handoff"] == 0


def test_who_takes_the_norm_of_more_tokens(route):
    gets = {**NORMALIZES, "parts": 28}
    assert route((129, 4608, 3584), gets, H200)["variant"] == "library"
    found = route((2048, 37888, 3584), {**gets, "glu": 1}, H200)
    assert found["variant"] == "gemm" and found["norm_first"]


@pytest.mark.parametrize(
    "shape, columns, blocks, taken",
    [
        ((128, 4608, 3584), 80, 116, True),
        ((128, 3584, 3584), 128, 112, True),
        ((128, 3584, 18944), 128, 112, True),
        ((128, 1152, 896), 80, 64, False),
        ((128, 896, 896), 80, 48, False),
        ((128, 896, 4864), 80, 48, False),
    ],
)
def test_tiles_that_hand_the_norm_off(route, shape, columns, blocks, taken):
    """Those of Qwen2.5-7B and 0.5B: blocks on 70 % of 132 multiprocessors, or cuBLAS."""
    found = route(shape, ADDS, H200)
    assert found["variant"] == ("gemm" if taken else "library")
    found = route(shape, {**ADDS, "gemm": 1}, H200)
    assert (found["columns"], found["blocks"]) == (columns, blocks)


def test_switch_for_the_width_of_tiles(route):
    for width in (256, 224, 192, 144, 128):
        value = width if width > 192 else 1000 + width
        assert route((300, 4608, 3584), {"gemm": value}, H200)["columns"] == width


def linear_route(*shape, gpu=H200, **options):
    module = pytest.importorskip("llmkernels._C")
    return module.linear_route(*shape, **{**facts_of(gpu), **options})


@pytest.mark.parametrize(
    "shape, options, variant, rows, cluster",
    [
        ((1, 4608, 3584), {}, "gemv", 35, 1),
        ((4, 4608, 3584), {}, "mma", 36, 1),
        ((4, 4608, 3584), {"gpu": A100}, "sm80", None, 1),
        ((1, 4608, 3584), {"weight_type": "int8"}, "gemv", 35, 1),
        ((4, 4608, 3584), {"weight_type": "int8"}, "sm80", 36, 1),
        ((16, 37888, 3584), {"weight_type": "int8", "glu": True}, "sm80", None, 1),
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
    place = 128 * 1024 if variant == "sm80" else plan["shared_bytes"]  # half of the registers of an SM
    assert 0 < plan["bytes_in_flight"] < place and plan["shared_bytes"] <= 227 * 1024
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


def test_route_raises():
    with pytest.raises(ValueError, match="linear_route: dtype must be float16, bfloat16, float32 or float64, got int8"):
        linear_route(1, 8, 8, dtype="int8")
    with pytest.raises(ValueError, match="linear_route: weight_type must be int8 or empty, got int4"):
        linear_route(1, 8, 8, weight_type="int4")
    with pytest.raises(ValueError, match="linear_route: n must be even with glu, got 9"):
        linear_route(1, 9, 8, glu=True)
    with pytest.raises(ValueError, match="linear_route: sm_count must be from 1 to 65536, got 0"):
        linear_route(1, 8, 8, sm_count=0)
    with pytest.raises(ValueError, match="linear_route: clusters must be of 2, 4, 8 or 16 blocks, got 3"):
        linear_route(1, 8, 8, clusters={3: 1})
    with pytest.raises(ValueError, match=r"linear_route: m \* n must be less than 2\^40"):
        linear_route(2**30, 2**30, 8)
