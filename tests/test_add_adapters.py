"""add_adapters_: low-rank adapters beside a product, against float64; adapters that overlap; layouts; errors."""

import pytest
import torch

from llmkernels.hf.step import graphs
from lora_cases import DTYPES, every_dtype
from oracles import assert_accurate

_op = torch.ops.llmkernels.add_adapters_

# rows, K, adapters as (begin, N, r), columns of y
CASES = {
    "qkv": (1, 128, [(0, 96, 16), (96, 32, 16), (128, 32, 16)], 160),
    "down": (2, 264, [(0, 48, 8)], 48),
    "odd": (3, 37, [(1, 11, 3), (20, 5, 1)], 29),
    "rows": (21, 520, [(0, 130, 64), (130, 130, 5)], 260),
    "prompt": (150, 520, [(0, 130, 64), (130, 130, 5)], 260),
    "prompt_by_vectors": (100, 1040, [(0, 64, 16), (64, 72, 8)], 136),
    "overlapping": (9, 40, [(0, 24, 4), (8, 24, 12), (0, 32, 8)], 32),
    "nine": (5, 64, [(8 * i, 8, 2 + i) for i in range(9)], 72),
    "none": (4, 16, [], 8),
    "empty": (4, 16, [(0, 8, 0), (0, 0, 4)], 8),
}


def make(case, dtypes, device):
    rows, k, adapters, columns = CASES[case]
    dtype, narrow = dtypes
    y, x = torch.randn(rows, columns, device=device).to(dtype), torch.randn(rows, k, device=device).to(dtype)
    a = [(torch.randn(r, k, device=device) * k**-0.5).to(narrow) for _, _, r in adapters]
    b = [(torch.randn(n, r, device=device) * max(r, 1) ** -0.5).to(narrow) for _, n, r in adapters]
    begins, scalings = [begin for begin, _, _ in adapters], [0.5 + index for index in range(len(adapters))]
    return y, x, a, b, begins, scalings


def formula(y, x, a, b, begins, scalings):
    """What PEFT computes, one adapter after the other."""
    y = y.clone()
    for one_a, one_b, begin, scaling in zip(a, b, begins, scalings, strict=True):
        part = y[:, begin : begin + len(one_b)]
        part.copy_(part + (x.to(one_a.dtype) @ one_a.T @ one_b.T) * scaling)
    return y


@pytest.mark.parametrize("case", CASES)
@every_dtype
def test_accuracy(dtypes, case, device):
    y, *inputs = make(case, dtypes, device)
    in_double = [
        [one.double() for one in x] if isinstance(x, list) and x and torch.is_tensor(x[0]) else x for x in inputs
    ]
    in_double[0] = inputs[0].double()
    expected, eager = formula(y.double(), *in_double), formula(y, *inputs)
    _op(y, *inputs)
    assert_accurate(y, eager, expected)


@pytest.mark.parametrize("narrow", [torch.float32, torch.float64])
def test_float64(narrow):
    y, *inputs = make("overlapping", (torch.float64, narrow), "cpu")
    expected = formula(y, inputs[0], *([x.double() for x in one] for one in inputs[1:3]), *inputs[3:])
    _op(y, *inputs)
    torch.testing.assert_close(y, expected)


@pytest.mark.sanitizer
@every_dtype
def test_columns_beside_an_adapter_stay(dtypes, device):
    y, *inputs = make("odd", dtypes, device)
    before = y.clone()
    _op(y, *inputs)
    beside = [0, *range(12, 20), *range(25, 29)]
    assert torch.equal(y[:, beside], before[:, beside])


def test_rows_of_x_that_are_apart(device):
    y, x, *rest = make("qkv", DTYPES[1], device)
    wide = torch.randn(1, 2 * x.shape[1] + 1, device=device, dtype=x.dtype)
    for view in (wide[:, 1 : x.shape[1] + 1], wide[:, 1::2]):
        found, expected = y.clone(), y.clone()
        _op(found, view, *rest)
        _op(expected, view.contiguous(), *rest)
        torch.testing.assert_close(found, expected)


@pytest.mark.sanitizer
def test_rows_are_the_same_in_any_company(device):
    """Those of a batch of 8 and more; fewer are summed in other parts."""
    y, x, *rest = make("rows", DTYPES[1], device)
    found, some = y.clone(), y[8:16].clone()
    _op(found, x, *rest)
    _op(some, x[8:16].contiguous(), *rest)
    assert torch.equal(found[8:16], some)


@pytest.mark.gpu
def test_a_graph_of_it(device):
    y, *inputs = make("qkv", DTYPES[1], device)
    expected = y.clone()
    _op(expected, *inputs)
    graph, _ = graphs.record(lambda: _op(y, *inputs), y.device)
    graph.replay()
    assert torch.equal(y, expected)


def test_errors(device):
    y, x, a, b, begins, scalings = make("qkv", DTYPES[0], device)
    calls = {
        r"lora_b must have one tensor per tensor of lora_a \(3\), got 2": (y, x, a, b[1:], begins, scalings),
        r"begins must have one number per tensor of lora_a \(3\), got 1": (y, x, a, b, begins[:1], scalings),
        r"scalings must have one number .*, got 0": (y, x, a, b, begins, []),
        r"lora_a\[1\] must have shape \[r, 128\]": (y, x, [a[0], a[1][:, 1:], a[2]], b, begins, scalings),
        r"lora_b\[0\] must have shape \[N, 16\]": (y, x, a, [b[0][:, 1:], *b[1:]], begins, scalings),
        r"lora_a\[0\] must be Float as x": (y, x, [a[0].half(), *a[1:]], b, begins, scalings),
        r"lora_b\[2\] must have the dtype of lora_a\[2\]": (y, x, a, [*b[:2], b[2].half()], begins, scalings),
        r"lora_a\[2\] must be contiguous": (y, x, [*a[:2], a[2].T.contiguous().T], b, begins, scalings),
        r"begins\[2\] must be from 0 to 128": (y, x, a, b, [0, 96, 129], scalings),
        r"begins\[0\] must be from 0 to 64": (y, x, a, b, [-1, 96, 128], scalings),
        r"scalings must be finite": (y, x, a, b, begins, [1.0, float("inf"), 1.0]),
        r"y must have shape \[1, 160\]": (y.view(160), x, a, b, begins, scalings),
        r"y must be contiguous": (torch.zeros(1, 320, device=device)[:, ::2], x, a, b, begins, scalings),
    }
    for message, arguments in calls.items():
        with pytest.raises(RuntimeError, match="add_adapters_: " + message):
            _op(*arguments)
