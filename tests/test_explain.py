"""`llmkernels.explain`: its text, its errors, and whether it names the kernel that runs."""

import ctypes
import doctest
import re
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
from stub_cuda import CSRC

_op = torch.ops.llmkernels


@pytest.fixture(autouse=True)
def needs_module():
    pytest.importorskip("llmkernels._C")


def test_text():
    assert str(explain("linear", (4, 3584), (4608, 3584), device="A100")) == (
        "linear  x (4, 3584)  weight (4608, 3584)  bfloat16  on A100\n"
        "kernel  mma.sync, weights straight to registers\n"
        "why     up to 16 tokens, on a GPU without TMA\n"
        "plan    44 rows per tile, 105 tiles, 105 blocks, 3 stages, 66 KB in flight, 8 KB of shared memory"
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


def test_quantized_weight():
    assert str(explain("int8_linear", (4, 3584), (4608, 3584), device="H200")) == (
        "int8_linear  x (4, 3584)  weight (4608, 3584)  bfloat16  on H200\n"
        "kernel  mma.sync, weights straight to registers\n"
        "why     up to 16 tokens of a quantized weight\n"
        "plan    36 rows per tile, 128 tiles, 128 blocks, 3 stages, 54 KB in flight, 8 KB of shared memory"
    )
    assert explain("int8_linear", (1, 3584), (4608, 3584), device="H200").variant == "gemv"
    found = explain("int8_linear", (17, 3584), (4608, 3584), device="H200")
    assert found.variant == "library" and "dequantized" in found.reason


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
        assert (found.variant, found.reason) == ("plain", "a head is not aligned to 16 bytes")


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
        "plan    128 queries by 64 keys per tile, 112 blocks, 193 KB of shared memory\n"
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
        (("linear", (4, 8), (8, 8)), {"bias": "no"}, "linear: bias must be a bool, got 'no'"),
        (("linear", 5), {}, "linear: shapes must be those of x, weight, got 1 of them"),
        ((["linear"], (4, 8), (8, 8)), {}, r"explain: op must be one of .*, got \['linear'\]"),
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
    backward = (y, None, q, k, v, y, lse, None, None, None, None, -1, -1, 0.0)
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
