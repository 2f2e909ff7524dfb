"""Random shapes, layouts, dtypes and options. Each seed is a case. One that fails prints the command that repeats it.

200 seeds on the CPU, 2,000 on a GPU; `--fuzz-seeds 200:5000` runs others.
"""

import random
from functools import partial

import pytest
import torch

import llmkernels
import oracles
from every_op import reading_what_was_there
from oracles import (
    DEVICES,
    DTYPES,
    LAYOUTS,
    angles,
    assert_same,
    check,
    check_cross_entropy,
    check_glu,
    check_layer_norm,
    check_norm,
    check_rms_norm_rope,
    check_softmax,
    laid_out,
    scaled_rows,
)
from registry import Size
from test_bias_act import FUNCTIONS, check_biased, make
from test_fp8 import FORMATS, GRANULARITIES, assert_equal, quantized
from test_linear_cross_entropy import check as check_linear_loss
from test_linear_cross_entropy import make as linear_loss_inputs

SEEDS = {"cpu": 200, "cuda": 2000}
SEEDS_PER_TEST = 50


def pytest_generate_tests(metafunc):
    chosen = metafunc.config.getoption("--fuzz-seeds")
    first, end = map(int, chosen.split(":")) if chosen else (0, None)
    parameters = [
        pytest.param(device, range(seed, min(seed + SEEDS_PER_TEST, last)), id=f"{device}-{seed}")
        for device in DEVICES
        for last in [end or SEEDS[device]]
        for seed in range(first, last, SEEDS_PER_TEST)
    ]
    metafunc.parametrize("device, seeds", parameters)


def test_random_cases(device, seeds):
    failures = []
    for seed in seeds:
        try:
            run(seed, device)
        except Exception as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            again = f"python -m pytest tests/test_fuzz.py -k {device} --fuzz-seeds {seed}:{seed + 1}"
            failures.append(f"{again}   # {describe(seed)}: {reason}")
    assert not failures, "\n" + "\n".join(failures)


def run(seed, device):
    torch.manual_seed(seed)
    generator = random.Random(seed)
    kind = generator.choice(list(KINDS))
    KINDS[kind](generator, device)


def describe(seed):
    return random.Random(seed).choice(list(KINDS))


def size(generator, largest):
    """Equally often: small sizes, powers of two and their neighbours, multiples of a vector, any size."""
    near = 2 ** generator.randint(0, largest.bit_length() - 1) + generator.randint(-1, 1)
    choices = (generator.randint(1, 9), near, 8 * generator.randint(1, largest // 8), generator.randint(1, largest))
    return min(max(generator.choice(choices), 1), largest)


def rows_and_cols(generator, device):
    """Limits the elements of a case, so that 2,000 cases take a minute."""
    cols = size(generator, 40000 if device == "cuda" else 5000)
    most = (2_000_000 if device == "cuda" else 60_000) // cols
    return size(generator, max(8, min(most, 3000))) % (most + 1), cols


def maybe_laid_out(generator, x):
    layout = generator.choice([None, None, *(name for name in LAYOUTS if name not in ("expanded", "size_one"))])
    return laid_out(x, layout) if layout else x


def fuzz_norm(generator, device, added=False):
    rows, cols = rows_and_cols(generator, device)
    dtype = generator.choice(DTYPES)
    inputs = [maybe_laid_out(generator, scaled_rows(rows, cols, dtype=dtype, device=device)) for _ in range(1 + added)]
    if generator.random() < 0.8:
        weight = torch.randn(1, cols, device=device).to(dtype)
        inputs.append(laid_out(weight, generator.choice(["offset", "every_other", "row_strided"]))[0])
    check_norm(
        llmkernels.add_rms_norm if added else llmkernels.rms_norm,
        oracles.add_rms_norm if added else oracles.rms_norm,
        inputs,
        grad_layout=generator.choice([None, "row_strided", "transposed", "offset"]),
        eps=10 ** generator.uniform(-8, -1),
        weight_offset=generator.choice([0.0, 1.0]),
        cast_before_weight=generator.random() < 0.5,
    )


def fuzz_layer_norm(generator, device):
    rows, cols = rows_and_cols(generator, device)
    dtype = generator.choice(DTYPES)
    added = generator.random() < 0.5
    x = [maybe_laid_out(generator, scaled_rows(rows, cols, dtype=dtype, device=device)) for _ in range(1 + added)]
    parameters = {name: torch.randn(1, cols, device=device).to(dtype) for name in ("weight", "bias")}
    layouts = ["offset", "every_other", "row_strided"]
    parameters = {
        name: laid_out(t, generator.choice(layouts))[0] for name, t in parameters.items() if generator.random() < 0.7
    }
    name = "add_layer_norm" if added else "layer_norm"
    grad_layout = generator.choice([None, "row_strided", "transposed", "offset"])
    ours, eager = (getattr(module, name) for module in (llmkernels, oracles))
    options = {"eps": 10 ** generator.uniform(-6, -1), "weight_offset": generator.choice([0.0, 1.0])}
    check_layer_norm(ours, eager, x, parameters, grad_layout, **options)


def fuzz_glu(generator, device):
    rows, cols = rows_and_cols(generator, device)
    dtype = generator.choice(DTYPES)
    name, options = generator.choice([("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "none"})])
    packed = generator.random() < 0.5
    shape = (rows, 2 * cols) if packed else (rows, cols)
    inputs = [maybe_laid_out(generator, torch.randn(shape, device=device).mul_(3).to(dtype)) for _ in range(2 - packed)]
    grad_layout = generator.choice([None, "row_strided", "transposed", "offset"])
    ours, eager = (partial(getattr(module, name), **options) for module in (llmkernels, oracles))
    check_glu(ours, eager, inputs, grad_layout)


def fuzz_softmax(generator, device):
    rows, cols = rows_and_cols(generator, device)
    dtype, name = generator.choice(DTYPES), generator.choice(["softmax", "softmax", "log_softmax"])
    x = maybe_laid_out(generator, scaled_rows(rows, cols, dtype=dtype, device=device))
    options, mask = {"scale": generator.choice([1.0, 0.125, -2.0])}, None
    if name == "softmax":
        options["causal"] = generator.random() < 0.3
        shape = generator.choice([(rows, cols), (1, cols), (rows, 1), (cols,)])
        mask = generator.choice([None, torch.rand(shape) > 0.3, torch.randn(shape).to(dtype)])
        mask = mask if mask is None else mask.to(device)
    grad_layout = generator.choice([None, "row_strided", "transposed", "offset"])
    check_softmax(getattr(llmkernels, name), getattr(oracles, name), x, mask, grad_layout, **options)


def fuzz_cross_entropy(generator, device):
    rows, vocab = rows_and_cols(generator, device)
    logits = maybe_laid_out(generator, torch.randn(rows, vocab, device=device).to(generator.choice(DTYPES)))
    target = torch.randint(-1, vocab, (rows,), device=device)
    weight = generator.choice([(), (torch.rand(vocab, device=device) + 0.5,)])
    options = {
        "ignore_index": -1,
        "reduction": generator.choice(["sum", "none"]),
        "label_smoothing": generator.choice([0.0, 0.1]),
        "lse_square_scale": generator.choice([0.0, 1e-3]),
        "softcap": generator.choice([0.0, 10.0]),
        "gradient_in_forward": generator.random() < 0.5,
    }
    check_cross_entropy(llmkernels.cross_entropy, (logits, target, *weight), **options)


def fuzz_linear_cross_entropy(generator, device):
    rows, vocab = rows_and_cols(generator, device)
    k, dtype = generator.choice([1, 8, 40, 131]), generator.choice(DTYPES)
    x, weight, bias, target = linear_loss_inputs(min(rows, 300), vocab, k, dtype, device)
    inputs = maybe_laid_out(generator, x), maybe_laid_out(generator, weight), generator.choice([None, bias]), target
    of_classes = generator.choice([(), (torch.rand(vocab, device=device) + 0.5,)])
    options = {
        "reduction": generator.choice(["sum", "none"]),
        "label_smoothing": generator.choice([0.0, 0.1]),
        "lse_square_scale": generator.choice([0.0, 1e-3]),
        "softcap": generator.choice([0.0, 10.0]),
    }
    budget = vocab * dtype.itemsize * generator.choice([5, 40, 10**6])  # PyTorch sums single rows in another order
    check_linear_loss((*inputs, *of_classes), {"gradient_in_forward": generator.random() < 0.5}, budget, **options)


def fuzz_bias_act(generator, device):
    rows, cols = rows_and_cols(generator, device)
    ours, eager, matrices = generator.choice(list(FUNCTIONS.values()))
    inputs = list(make(matrices, rows, cols, generator.choice(DTYPES), device))
    inputs[:matrices] = [maybe_laid_out(generator, x) for x in inputs[:matrices]]
    layouts = ["offset", "every_other", "row_strided"]
    inputs[matrices:] = [laid_out(b[None], generator.choice(layouts))[0] for b in inputs[matrices:]]
    grad_layout = generator.choice([None, "row_strided", "transposed", "offset"])
    check_biased(ours, eager, inputs if generator.random() < 0.8 else inputs[:matrices], matrices, grad_layout)


def fuzz_fp8(generator, device):
    rows, cols = rows_and_cols(generator, device)
    dtype = generator.choice(DTYPES)
    x, up = (maybe_laid_out(generator, scaled_rows(rows, cols, dtype=dtype, device=device)) for _ in range(2))
    options = [generator.choice(GRANULARITIES), generator.choice(FORMATS), generator.random() < 0.5]
    named = dict(zip(("granularity", "fp8_dtype", "power_of_two"), options, strict=True))
    assert_equal(llmkernels.fp8_quantize(x, **named), quantized(x.contiguous(), *options))
    y = llmkernels.swiglu(x, up)
    assert_equal(llmkernels.swiglu_fp8_quantize(x, up, **named), llmkernels.fp8_quantize(y, **named))
    weight = torch.randn(cols, device=device).to(dtype)
    y = llmkernels.rms_norm(x, weight)
    assert_equal(llmkernels.rms_norm_fp8_quantize(x, weight, **named), llmkernels.fp8_quantize(y, **named))


def fuzz_rope(generator, device):
    dtype = generator.choice(DTYPES)
    batch, tokens = generator.randint(1, 3), size(generator, 300 if device == "cuda" else 30)
    heads, kv_heads = (generator.choice([1, 2, 3, 4, 7, 8, 17, 28, 33]) for _ in range(2))
    head_dim = generator.choice([2, 16, 60, 62, 64, 80, 96, 128, 256, generator.randint(2, 300)])
    rotary_dim = generator.choice([head_dim // 2 * 2, 2 * generator.randint(1, head_dim // 2)])
    layout = generator.choice(["bhtd", "bthd"])
    options = {"layout": layout, "interleaved": generator.random() < 0.5, "rotary_dim": rotary_dim}

    packed = torch.randn(batch, tokens, heads + kv_heads + 1, head_dim, device=device).to(dtype)
    if generator.random() < 0.2:  # misaligned
        packed = torch.cat((packed.new_zeros(1), packed.flatten()))[1:].view(packed.shape)
    q, k, _ = packed.split((heads, kv_heads, 1), 2)
    if generator.random() < 0.3:
        q, k = q.contiguous(), k.contiguous()
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)

    width = rotary_dim // 2 if generator.random() < 0.5 else rotary_dim
    position_ids = None
    if generator.random() < 0.4:
        table = size(generator, 500)
        ids = torch.randint(table, generator.choice([(tokens,), (1, tokens), (batch, tokens)]), device=device)
        position_ids = ids.to(generator.choice([torch.int32, torch.int64]))
        cos, sin = angles(table, width, dtype=dtype, device=device)
    else:
        leading = generator.choice([(), (1,), (batch,)])
        cos, sin = angles(*leading, tokens, width, dtype=dtype, device=device)
    if generator.random() < 0.3:
        cos, sin = torch.cat((cos, sin), -1).split(width, -1)

    inputs = q, k, cos, sin, position_ids
    ours, eager = (partial(module.rope, **options) for module in (llmkernels, oracles))
    rotated = ours(*inputs)
    assert_same(rotated, eager(*inputs))
    check(ours, eager, inputs, count=2, scales=[t.double().abs().max().clamp_min(1) for t in (*rotated, *rotated)])
    assert_same(ours(*inputs, inplace=True), rotated, "in place")


def fuzz_rms_norm_rope(generator, device):
    dtype = generator.choice(DTYPES)
    batch, tokens = generator.randint(1, 3), size(generator, 200 if device == "cuda" else 20)
    heads, kv_heads = (generator.choice([1, 2, 3, 4, 7, 8, 17, 28]) for _ in range(2))
    head_dim = generator.choice([2, 16, 60, 64, 80, 128, 256, generator.randint(2, 300)])
    rotary_dim = generator.choice([head_dim // 2 * 2, 2 * generator.randint(1, head_dim // 2)])
    layout, row_wise = generator.choice(["bhtd", "bthd"]), generator.random() < 0.4
    options = {"layout": layout, "interleaved": generator.random() < 0.4, "rotary_dim": rotary_dim}
    options |= {"row_wise": row_wise, "cast_before_weight": generator.random() < 0.5, "eps": 1e-5}

    packed = scaled_rows(batch, tokens, heads + kv_heads + 1, head_dim, dtype=dtype, device=device)
    if generator.random() < 0.2:  # misaligned
        packed = torch.cat((packed.new_zeros(1), packed.flatten()))[1:].view(packed.shape)
    q, k, _ = packed.split((heads, kv_heads, 1), 2)
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    sizes = [head_dim * (h if row_wise else 1) for h in (heads, kv_heads)]
    weights = [torch.randn(length, device=device).to(dtype) for length in sizes]
    angle_dtype = generator.choice([dtype, torch.float32])
    width = rotary_dim // 2 if generator.random() < 0.5 else rotary_dim
    inputs = q, k, *weights, *angles(tokens, width, dtype=angle_dtype, device=device)
    check_rms_norm_rope(llmkernels.rms_norm_rope, oracles.rms_norm_rope, inputs, **options)
    expected = llmkernels.rms_norm_rope(*inputs, **options)
    assert_same(llmkernels.rms_norm_rope(*inputs, **options, inplace=True), expected, "in place")


def fuzz_every_op(generator, device):
    """All calls of registry.py, without a formula: they succeed, and depend on nothing but their arguments."""
    width = 8 if device == "cuda" else 1
    numbers = generator.randint(1, 3), size(generator, 40), width * size(generator, 2000 // width)
    drawn = Size(*numbers, generator.randint(1, 4), size(generator, 300), size(generator, 2000))
    wrong = reading_what_was_there(drawn, device, generator.randint(0, 99), generator.choice(DTYPES))
    assert not wrong, f"{drawn}: {wrong}"


KINDS = {
    "every_op": fuzz_every_op,
    "softmax": fuzz_softmax,
    "cross_entropy": fuzz_cross_entropy,
    "linear_cross_entropy": fuzz_linear_cross_entropy,
    "rms_norm": fuzz_norm,
    "add_rms_norm": lambda generator, device: fuzz_norm(generator, device, added=True),
    "layer_norm": fuzz_layer_norm,
    "glu": fuzz_glu,
    "bias_act": fuzz_bias_act,
    "rope": fuzz_rope,
    "rms_norm_rope": fuzz_rms_norm_rope,
    "fp8": fuzz_fp8,
}
