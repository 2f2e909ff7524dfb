"""rms_norm_add_linear, and the forward of one token that it is for: a norm behind a block costs no launch."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd import DeviceType

import oracles
import test_compose
from linear_cases import OPTIONS, compare, eager_glu, every_narrow_dtype, kernels, make
from llmkernels.hf.step import compose
from oracles import DEVICES, DTYPES, assert_accurate, laid_out, scaled_rows

_op = torch.ops.llmkernels
ALPHA = 0.22
GEMMA, LLAMA = OPTIONS["gemma"], OPTIONS["llama"]
# Of rows of up to 14336 elements gemv computes the sum; one more and it is a launch. Slices of 512, 1024 and 2048.
COLS = [8, 72, 504, 512, 520, 896, 2048, 3584, 4096, 5120, 5128, 8192, 10240, 10248, 11008, 14336, 14344]
SHAPES = [("cpu", m, 33, k) for m in (1, 3) for k in (8, 72)]
if "cuda" in DEVICES:
    SHAPES += [("cuda", 1, n, k) for n in (33, 130, 1111) for k in COLS]
    SHAPES += [("cuda", m, 130, 896) for m in (2, 16, 17, 64, 65, 200)]


def added(residual, x, add_weight, alpha, options):
    y = oracles.rms_norm(x, add_weight, **options)
    return residual + (y if alpha == 1 else y * alpha)


def eager(residual, x, add_weight, norm_weight, weight, bias=None, *, activation="", alpha, add, norm):
    total = added(residual, x, add_weight, alpha, add)
    if norm is not None:
        total = oracles.rms_norm(total, norm_weight, **norm)
    return eager_glu(total, weight, activation) if activation else torch.nn.functional.linear(total, weight, bias)


def numbers(options):
    values = {"eps": 1e-6, "weight_offset": 0.0, "cast_before_weight": True} | options
    return values["eps"], values["weight_offset"], values["cast_before_weight"]


def ours(residual, x, add_weight, norm_weight, weight, bias=None, *, activation="", alpha, add, norm, sums=None):
    total = torch.full_like(x, 7.0)
    last = () if norm is None else (True, norm_weight, *numbers(norm))
    terms = total, residual, x, add_weight, *numbers(add), alpha
    y = _op.rms_norm_add_linear(*terms, weight, bias, activation, *last)
    if sums is not None:
        sums.append(total)
    return y


def draw(m, n, k, dtype, device, activation=""):
    """residual, x, add_weight, norm_weight, weight, bias."""
    x, norm_weight, weight, bias = make(m, 2 * n if activation else n, k, dtype, device)
    residual = scaled_rows(m, k, dtype=dtype, device=device)
    add_weight = torch.randn(k, device=device).to(dtype)
    return residual, x, add_weight, norm_weight, weight, None if activation else bias


def check(inputs, **options):
    """The linear and the sum are as accurate as eager's."""
    sums = []
    compare(partial(ours, sums=sums), eager, inputs, **options)
    of_sum = [options[name] for name in ("alpha", "add")]
    exact = added(*(t if t is None else t.double() for t in inputs[:3]), *of_sum)
    assert_accurate(sums[0], added(*inputs[:3], *of_sum), exact, exact.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["", "silu"], ids=["linear", "glu"])
@pytest.mark.parametrize("norm", [None, LLAMA, GEMMA], ids=["plain", "llama", "gemma"])
@pytest.mark.parametrize("device, m, n, k", SHAPES)
def test_shapes(device, m, n, k, norm, activation, dtype):
    inputs = draw(m, n, k, dtype, device, activation)
    check(inputs, activation=activation, alpha=1.0, add=GEMMA if norm is GEMMA else LLAMA, norm=norm)


@every_narrow_dtype
@pytest.mark.parametrize("add", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
@pytest.mark.parametrize("alpha", [1.0, ALPHA, -1.7])
def test_options_of_the_sum(device, alpha, weighted, add, dtype):
    residual, x, add_weight, *others = draw(1, 40, 384, dtype, device)
    check((residual, x, add_weight if weighted else None, *others), alpha=alpha, add=add, norm=LLAMA)


@every_narrow_dtype
@pytest.mark.parametrize("layout", ["offset", "every_other", "row_strided_aligned"])
@pytest.mark.parametrize("which", range(4), ids=["residual", "x", "add_weight", "norm_weight"])
def test_layouts(device, which, layout, dtype):
    inputs = list(draw(1, 40, 384, dtype, device))
    rows = inputs[which] if which < 2 else inputs[which][None]
    view = laid_out(rows, layout)
    inputs[which] = view if which < 2 else view[0]
    if view.shape != rows.shape:
        pytest.skip("the layout has another shape")
    check(inputs, alpha=ALPHA, add=LLAMA, norm=LLAMA)


def test_a_sum_anywhere(device):
    """Written to rows at a distance, and to storage that is not aligned."""
    residual, x, add_weight, _, weight, _ = draw(3, 40, 64, torch.bfloat16, device)
    for count in (1, 3):
        a, b = residual[:count], x[:count]
        terms = add_weight, *numbers({}), 1.0, weight
        expected = torch.empty_like(b)
        y = _op.rms_norm_add_linear(expected, a, b, *terms)
        for total in (torch.zeros(count, 80, dtype=x.dtype, device=device)[:, 3:67],
                      torch.zeros(count, 80, dtype=x.dtype, device=device)[:, 8:72]):  # fmt: skip
            torch.testing.assert_close(_op.rms_norm_add_linear(total, a, b, *terms), y)
            torch.testing.assert_close(total, expected)
            assert (total._base.sum() - total.sum()).abs() < 1e-3


def test_errors(device):
    residual, x, add_weight, _, weight, bias = draw(2, 40, 64, torch.bfloat16, device)

    def refused(message, total=None, residual=residual, add=add_weight, alpha=1.0, **named):
        total = torch.empty_like(x) if total is None else total
        with pytest.raises(RuntimeError, match="rms_norm_add_linear: " + message):
            _op.rms_norm_add_linear(total, residual, x, add, 1e-6, 0.0, True, alpha, weight, **named)

    refused("sum must have the shape of x", total=x.new_empty(3, 64))
    refused("residual must have the shape of x", residual=residual[:1])
    refused("residual must have the dtype of x", residual=residual.float())
    refused(r"add_weight must have shape \[64\]", add=add_weight[:8])
    refused("alpha must be finite", alpha=float("nan"))
    refused("bias must not be given with an activation", activation="silu", bias=bias)
    refused("sum", total=residual)
    refused("sum", total=x.new_empty(64, 2).t())


@pytest.mark.gpu
@every_narrow_dtype
def test_one_launch(dtype):
    inputs = draw(1, 256, 2048, dtype, "cuda")
    names = kernels(lambda: ours(*inputs, alpha=1.0, add=LLAMA, norm=LLAMA))
    assert sum("llmk" in name for name in names) == 1


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("k", [512, 3584, 8192])
def test_a_chain_of_overlapping_launches(k):
    """Each kernel starts while the previous one still runs, and must not read early what that one writes."""
    residual, x, add_weight, norm_weight, weight, _ = draw(1, k, k, torch.bfloat16, "cuda")
    terms = add_weight, *numbers({}), 0.5

    def chain(synchronize):
        hidden, y = residual.clone(), x.clone()
        if not synchronize:
            torch.cuda._sleep(5_000_000)  # about 2.5 ms, in which all launches are made
        for _ in range(8):
            total = torch.empty_like(hidden)
            y = _op.rms_norm_add_linear(
                total, hidden, y, *terms, weight, None, "", True, norm_weight, 1e-6, 0.0, True, True)  # fmt: skip
            hidden = total
            if synchronize:
                torch.cuda.synchronize()
        return hidden, y

    expected = chain(True)
    for _ in range(10):
        oracles.assert_same(chain(False), expected)


# --- the forward

POST = {"gemma2": test_compose.GEMMA2, "olmo2": test_compose.FORMS["olmo2"]}
every_post = pytest.mark.parametrize("changes", POST.values(), ids=POST.keys())


@every_post
@pytest.mark.parametrize("rows", [1, 2])
def test_ops_of_a_layer(device, changes, rows):
    few, many = (
        Counter(test_compose.count_ops(test_compose.make(rows, torch.bfloat16, device, layers=n, **changes)))
        for n in (2, 3)
    )
    found = many - few
    if rows == 1:
        assert found == Counter(rms_norm_add_linear=2, linear=2, rope_decode_attention=1)
    else:
        assert found["rms_norm_add_"] == 2 and "rms_norm_add_linear" not in found


@pytest.mark.gpu
@every_post
def test_a_layer_is_five_launches(changes):
    def launches(layers):
        case = test_compose.make(1, torch.bfloat16, "cuda", layers=layers, **changes)
        case()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            case()
            torch.cuda.synchronize()
        return sum(event.device_type == DeviceType.CUDA for event in profile.events())

    assert launches(3) - launches(1) == 2 * 5


@every_post
@pytest.mark.parametrize("rows", [1, 2])
def test_layers_alone(device, changes, rows):
    """What run_layers returns is computed, and what the head makes of it are the logits of a forward."""
    case = test_compose.make(rows, torch.bfloat16, device, **changes)
    other, logits, seen = case.copy(), case.copy()(), []
    hidden = compose.run_layers(other.parts, other.hidden, other.tokens, other.caches, seen)
    torch.testing.assert_close(compose.head(case.parts, hidden), logits, rtol=0.02, atol=0.02)
    assert all(x.isfinite().all() for x in seen) and len(seen) == len(case.parts.layers) + 1
    alone = case.copy()
    again = compose.run_layers(alone.parts, alone.hidden, alone.tokens, alone.caches)
    torch.testing.assert_close(again, hidden, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mixed", [0, 1], ids=["parallel_last", "parallel_first"])
def test_layers_of_two_kinds(device, mixed):
    """A layer whose branches read the same thing needs what the layer before it leaves to the next product."""
    case = test_compose.make(1, torch.bfloat16, device, layers=3, **POST["gemma2"])
    layers = [
        dataclasses.replace(layer, parallel=index % 2 == 1 - mixed) for index, layer in enumerate(case.parts.layers)
    ]
    test_compose.check(dataclasses.replace(case, parts=dataclasses.replace(case.parts, layers=tuple(layers))))
