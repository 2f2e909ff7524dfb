"""Launch plans, for devices that this machine does not have and for numbers out of range."""

import itertools
import json
import subprocess

import pytest

from stub_cuda import compile_stub

every_number = pytest.mark.parametrize("number", [0, -1, -(2**31), 2**31, 2**62, 2**63 - 1])


def norm_plan(*args, **kwargs):
    return pytest.importorskip("llmkernels._C").norm_plan(*args, **kwargs)


@every_number
@pytest.mark.parametrize("vector", [False, True])
def test_norm_plan_of_any_number(number, vector):
    """Either a plan or a ValueError that names the argument. 0 bytes killed the process: a division by zero."""
    with pytest.raises(ValueError, match=r"norm_plan: element_bytes must be 2 or 4, got "):
        norm_plan(8, number, vector=vector)
    if number <= 0:
        with pytest.raises(ValueError, match=f"norm_plan: cols must be positive, got {number}"):
            norm_plan(number, 2, vector=vector)
    else:
        plan = norm_plan(number, 2, vector=vector)
        assert plan == {"width": 8 if vector else 1, "vectors": 0, "threads_per_row": 1024, "rows_per_block": 1}


def test_norm_plan_covers_a_row():
    flags = [(False, True)] * 3
    for cols, element_bytes, residual, few, centered in itertools.product(range(8, 20000, 104), (2, 4), *flags):
        plan = norm_plan(cols, element_bytes, residual=residual, few_rows=few, centered=centered)
        threads = plan["threads_per_row"]
        assert 1 <= threads * plan["rows_per_block"] <= 1024
        assert threads % 32 == 0 or threads in (1, 2, 4, 8, 16)
        assert plan["vectors"] == 0 or plan["width"] * plan["vectors"] * threads >= cols


DEVICES = {
    "H200": (132, 66, 32, 14, 6),
    "none of more than two": (132, 66, 0, 0, 0),
    "a part of one": (16, 8, 2, 1, 0),
    "groups of six": (132, 66, 22, 0, 0),
    "unknown": (132, 0, 0, 0, 0),
}


def asker(name, folder):
    program = compile_stub(name, folder)

    def ask(questions):
        text = "\n".join(" ".join(map(str, question)) for question in questions)
        done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return ask


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return asker("plans", tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def gemm_plans(tmp_path_factory):
    return asker("gemm_plans", tmp_path_factory.mktemp("gemm_plans"))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
@pytest.mark.parametrize("fused", [0, 1], ids=["alone", "behind_a_linear"])
def test_attention_waits_for_no_cluster(plans, device, fused):
    """All clusters of several blocks run at the same time; else the last ones would start when the first are done."""
    shapes = itertools.product(
        (1, 2, 4, 7, 16, 33), (1, 2, 4, 8), (1, 7), (1, 3), (1, 512, 600, 768, 2048, 9000), (64, 128)
    )
    questions = [(*device, *shape, fused) for shape in shapes]
    for question, plan in zip(questions, plans(questions), strict=True):
        two_fit = 2 * (plan["bytes"] + 1024) <= 228 * 1024
        assert plan["cluster"] == 1 or plan["clusters"] <= plan["at_once"] * (2 if two_fit else 1), (question, plan)
        assert 1 <= plan["cluster"] * plan["clusters"] <= 288


def test_attention_has_two_blocks_per_sm(plans):
    """Of long contexts; of few keys, a cluster for each kv head."""
    questions = [
        (*DEVICES["H200"], batch, 4, 7, 1, capacity, head_dim, fused)
        for batch, capacity, head_dim, fused in itertools.product((1, 4, 16, 32), (256, 32768), (64, 128), (0, 1))
    ]
    for question, plan in zip(questions, plans(questions), strict=True):
        batch, capacity = question[5], question[9]
        if capacity == 32768:
            assert plan["cluster"] * plan["clusters"] == 264, (question, plan)
        else:
            assert plan["clusters"] == 4 * batch, (question, plan)


def test_attention_takes_more_memory_where_that_helps(plans):
    """Outside of a decode step: of an H200, work tiles x KV tiles, and how many KiB a block has at most."""
    cases = [  # sequences of 32 kv heads, keys, blocks, KiB
        (5, 300, 160, 64),  # a block for each work tile, and two for some SMs
        (4, 300, 128, 92),  # one for each, alone on its SM
        (4, 100, 128, 64),  # that has two KV tiles
        (4, 800, 264, 64),  # dealt out, to clusters of two
        (8, 100, 264, 64),
        (8, 512, 264, 92),
        (16, 512, 264, 92),
    ]
    questions = [(*DEVICES["H200"], batch, 32, 1, 1, keys, 128, 0) for batch, keys, *_ in cases]
    for case, plan in zip(cases, plans(questions), strict=True):
        blocks, most = case[2:]
        assert plan["cluster"] * plan["clusters"] == blocks, (case, plan)
        assert (plan["bytes"] > 64 * 1024) == (most > 64) and plan["bytes"] <= most * 1024, (case, plan)


def test_attention_counts_kv_tiles_in_32_bits(plans):
    """A launch has so few sequences that twice their KV tiles are less than 2^31."""
    shapes = itertools.product((1, 65535), (1, 64, 65535), (1, 128), (1, 16), (64, 2**20, 2**30 - 1), (64,), (0, 1))
    questions = [(*DEVICES["H200"], *shape) for shape in shapes]
    for question, plan in zip(questions, plans(questions), strict=True):
        batch, kv_heads, capacity = question[5], question[6], question[9]
        kv_tiles = min(batch, plan["sequences"]) * kv_heads * plan["query_tiles"] * -(-capacity // 128)  # of keys of 64
        assert kv_tiles <= 2**29, (question, plan)
        assert plan["sequences"] >= 1 or kv_heads * plan["query_tiles"] * capacity > 2**29 * 32, (question, plan)


GEMM_ROWS = (65, 128, 129, 192, 256, 300, 384, 1000, 2048, 8192)
GEMM_TILES = (0, 256, 224, 1192, 1144, 1128, 2192, 2144, 2128, 2080)  # kGemmTiles in csrc/kernels/gemm/plan.h
H200_CLUSTERS = (132, 66, 30, 15)  # of 1, 2, 4 and 8 blocks


@pytest.mark.parametrize("clusters", [H200_CLUSTERS, (132, 0, 0, 0), (16, 8, 4, 2), (108, 54, 27, 13)], ids=str)
def test_gemm_covers_the_result(gemm_plans, clusters):
    """Every tile once, and no row or column of tiles too many but for the second block of a pair."""
    shapes = itertools.product(GEMM_ROWS, (8, 16, 200, 896, 3584, 37888), (64, 3584, 18944), (0, 1), GEMM_TILES)
    questions = [(*clusters, *shape) for shape in shapes if not (shape[3] and shape[4] >= 2000)]
    for question, plan in zip(questions, gemm_plans(questions), strict=True):
        m, n, k, glu, _ = question[4:]
        wide, step = (n // 2, plan["columns"] // 2) if glu else (n, plan["columns"])
        across = plan["pair"] if not plan["shares_weight"] else 1
        down = plan["pair"] if plan["shares_weight"] else 1
        height = 2 * plan["half_rows"]
        assert plan["tiles"] == plan["row_tiles"] * plan["column_tiles"], (question, plan)
        assert height <= 128 and height % 16 == 0, (question, plan)
        assert plan["row_tiles"] * down * height >= m, (question, plan)
        assert 0 <= plan["row_tiles"] * down * 128 - m < down * 128, (question, plan)
        assert 0 <= plan["column_tiles"] * across * step - wide < across * step, (question, plan)
        assert plan["pair"] == 1 or clusters[1] > 0
        assert plan["splits"] == 1 or (plan["schedule"] == 2 and not glu), (question, plan)
        assert plan["splits"] in (1, 2, 4) and plan["splits"] <= -(-k // 64), (question, plan)  # each has some of K


@pytest.mark.parametrize("clusters", [H200_CLUSTERS, (16, 8, 4, 2)], ids=str)
def test_split_tiles_run_at_the_same_time(gemm_plans, clusters):
    """Where K is split; else the clusters of the last tiles would start when the first are done."""
    shapes = itertools.product((65, 128, 256, 1000), (896, 3584, 5120, 16384), (896, 18944), (0,), GEMM_TILES[6:])
    questions = [(*clusters, *shape) for shape in shapes]
    at_once = dict(zip((1, 2, 4, 8), clusters, strict=True))
    splits = set()
    for question, plan in zip(questions, gemm_plans(questions), strict=True):
        splits.add(plan["splits"])
        if plan["splits"] > 1:
            cluster = plan["pair"] * plan["splits"]
            assert plan["row_tiles"] * plan["column_tiles"] <= at_once[cluster], (question, plan)
    assert splits >= {1, 2, 4} or clusters[0] == 16


def test_gemm_tiles_fill_an_h200(gemm_plans):
    """The widths that were fastest when all were measured (csrc/kernels/gemm/plan.h), and the route."""
    shapes = [(2048, 37888, 3584, 1), (128, 37888, 3584, 1), (65, 37888, 3584, 1), (192, 28672, 4096, 1),
              (128, 16384, 2048, 1), (128, 9728, 896, 1),
              (2048, 3584, 18944, 0), (2048, 3584, 3584, 0), (2048, 37888, 3584, 0), (2048, 4608, 3584, 0),
              (128, 18944, 3584, 0), (128, 152064, 3584, 0),
              (128, 3584, 18944, 0), (65, 4096, 14336, 0), (128, 5120, 13824, 0), (128, 3072, 9216, 0),
              (128, 1536, 8960, 0), (128, 3584, 3584, 0), (129, 3584, 18944, 0)]  # fmt: skip
    answers = gemm_plans([(*H200_CLUSTERS, *shape, 0) for shape in shapes])
    found = {
        shape: (plan["columns"], plan["pair"] * plan["splits"]) if plan["faster"] else None
        for shape, plan in zip(shapes, answers, strict=True)
    }
    assert found == {
        (2048, 37888, 3584, 1): (192, 2),
        (128, 37888, 3584, 1): (144, 2),
        (65, 37888, 3584, 1): (144, 2),
        (192, 28672, 4096, 1): None,
        (128, 16384, 2048, 1): (128, 2),
        (128, 9728, 896, 1): None,
        (2048, 3584, 18944, 0): (224, 2),
        (2048, 3584, 3584, 0): (224, 2),
        (2048, 37888, 3584, 0): None,
        (2048, 4608, 3584, 0): None,
        (128, 18944, 3584, 0): (144, 2),
        (128, 152064, 3584, 0): None,
        (128, 3584, 18944, 0): (128, 8),
        (65, 4096, 14336, 0): (144, 8),
        (128, 5120, 13824, 0): (80, 2),
        (128, 3072, 9216, 0): (128, 8),
        (128, 1536, 8960, 0): None,
        (128, 3584, 3584, 0): None,
        (129, 3584, 18944, 0): None,
    }


def test_linear_without_tma_fits_every_gpu(tmp_path):
    shapes = itertools.product(
        (66, 82, 108, 132), range(1, 17), (2, 6, 24, 896, 3584, 37888, 152064), (8, 896, 18944), (0, 1), (0, 1), (2, 1)
    )
    questions = list(shapes)
    for question, plan in zip(questions, asker("linear_plans", tmp_path)(questions), strict=True):
        _, _, n, k, glu, _, weight_bytes = question
        out = n // 2 if glu else n
        assert plan["shared"] <= 48 * 1024, (question, plan)
        assert plan["tiles"] * plan["rows"] >= out > (plan["tiles"] - 1) * plan["rows"], (question, plan)
        assert plan["rows"] % (4 * plan["parts"]) == 0, (question, plan)
        rows_of_warp = plan["rows"] // plan["parts"]
        assert plan["mma_tiles"] == (2 if glu else -(-rows_of_warp // 16)) <= 3, (question, plan)
        assert not glu or rows_of_warp <= 16, (question, plan)
        assert plan["parts"] * plan["groups"] == plan["warps"], (question, plan)
        step = 64 // weight_bytes * plan["groups"]
        assert plan["steps"] % plan["depth"] == 0, (question, plan)
        assert plan["steps"] * step >= k > (plan["steps"] - plan["depth"]) * step, (question, plan)
