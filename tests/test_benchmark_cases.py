"""The cases of benchmarks can be compared, and are timed in turn."""

import inspect
from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import call_overhead, sections, timing
from benchmarks.cases import OURS, PROVIDERS


def test_every_case_compares_like_with_like():
    for op in sections.ops("ops"):
        dtypes = {}
        for case in op.cases:
            assert {"eager", OURS} <= set(op.providers(case)) <= set(PROVIDERS) or case.keys.get("in_place")
            size = (*case.keys.values(), case.direction)
            assert dtypes.setdefault(size, case.dtype) == case.dtype, f"{case.title}: two dtypes in one group"
        assert len(dtypes) == len(op.cases), f"{op.name}: a case is listed twice"


def test_cases_have_the_keys_of_the_format():
    rows_cols, heads = {"rows", "cols"}, {"batch", "tokens", "heads", "kv_heads", "head_dim", "in_place"}
    keys = {
        "rms_norm": rows_cols,
        "add_rms_norm": rows_cols,
        "layer_norm": rows_cols,
        "rope": heads,
        "rms_norm_rope": heads,
        "swiglu": rows_cols | {"packed"},
        "geglu": rows_cols | {"packed"},
        "softmax": rows_cols,
        "attention": {"batch", "tokens", "kv_tokens", "heads", "kv_heads", "head_dim", "causal"},
        "cross_entropy": {"rows", "vocab"},
        "cross_entropy_gradient": {"rows", "vocab"},
        "linear_cross_entropy": {"rows", "vocab", "hidden"},
        "bias_gelu": rows_cols,
        "fp8_quantize": rows_cols,
        "rms_norm_fp8_quantize": rows_cols,
        "swiglu_fp8_quantize": rows_cols,
        "fp8_linear": {"m", "n", "k"},
        "int8_linear": {"m", "n", "k"},
        "gated_mlp": {"m", "n", "k"},
        "linear": {"m", "n", "k", "chained"},
        "rms_norm_linear": {"m", "n", "k"},
        "decode_attention": {"batch", "kv_tokens", "heads", "kv_heads", "head_dim", "cache"},
        "decode_attention_short": {"batch", "kv_tokens", "heads", "kv_heads", "head_dim", "cache"},
        "decode_attention_heads": {"batch", "kv_tokens", "heads", "kv_heads", "head_dim", "cache"},
        "sample": {"rows", "vocab"},
        "lora_linear": {"m", "n", "k", "r"},
        "adamw": {"parameters", "tensors"},
    }
    keys["decode_attention_sizes"] = keys["decode_attention"]
    more = {"decode_attention_sizes": {"tokens", "shortest"}}  # of some cases
    ops = sections.ops("ops", "decode_ops")
    assert all(set(case.keys) - more.get(op.name, set()) == keys[op.name] for op in ops for case in op.cases)


# Public functions without cases of their own, by the op whose kernels they run.
TIMED_AS = {
    "add_layer_norm": "layer_norm",
    "add_lora": "lora_linear",
    "attention_varlen": "attention",
    "bias_act": "bias_gelu",
    "bias_geglu": "bias_gelu",
    "bias_swiglu": "bias_gelu",
    "glu": "swiglu",
    "int8_quantize": "int8_linear",
    "log_softmax": "softmax",
    "relu2": "bias_gelu",
    "relu2_glu": "swiglu",
    "rope_kv_write": "rope",
}


def test_every_op_is_timed():
    """By cases of its own, or as another one."""
    import llmkernels

    timed = {op.name for op in sections.ops("ops", "decode_ops")}
    public = {name: getattr(llmkernels, name) for name in llmkernels.__all__}
    ops = {name for name, f in public.items() if inspect.isfunction(f) and f.__module__.startswith("llmkernels.ops.")}
    assert ops - timed == TIMED_AS.keys()
    assert timed >= {*TIMED_AS.values()}


@pytest.mark.parametrize("name", call_overhead.CASES)
def test_the_empty_op_has_our_signature(name):
    import llmkernels  # noqa: F401

    schema, options = call_overhead.SCHEMAS[name]
    empty = torch._C.parse_schema(name + schema)
    ours = getattr(torch.ops.llmkernels, {"swiglu": "glu"}.get(name, name)).default._schema
    for these, those in ((empty.arguments, ours.arguments), (empty.returns, ours.returns)):
        assert [str(one.type) for one in these] == [str(one.type) for one in those]
    tensors = sum(str(argument.type) == "Tensor" for argument in ours.arguments)
    optional_weight = any(argument.name == "weight" for argument in ours.arguments)
    assert tensors + optional_weight + len(options) == len(ours.arguments)


@pytest.mark.parametrize("case", [case for op in sections.ops("ops") for case in op.cases], ids=lambda case: case.title)
def test_a_replay_touches_more_than_the_cache(case):
    itemsize = case.dtype.itemsize
    if case.op in ("rope", "rms_norm_rope"):
        size = case.keys["tokens"] * (case.keys["heads"] + case.keys["kv_heads"]) * case.keys["head_dim"] * itemsize
    elif case.op == "attention":
        heads = case.keys["heads"] + 2 * case.keys["kv_heads"]
        size = case.keys["batch"] * case.keys["tokens"] * heads * case.keys["head_dim"] * itemsize
    elif case.op == "gated_mlp":
        size = 3 * case.keys["n"] * case.keys["k"] * itemsize
    elif case.op == "linear_cross_entropy":
        size = (case.keys["rows"] + case.keys["vocab"]) * case.keys["hidden"] * itemsize
    elif case.op == "lora_linear":
        size = (case.keys["m"] + case.keys["n"]) * case.keys["k"] * itemsize
    elif case.op == "adamw":
        size = 4 * case.keys["parameters"] * itemsize
    else:
        tensors = 2 if case.op in ("add_rms_norm", "swiglu", "geglu", "swiglu_fp8_quantize") else 1
        size = tensors * case.keys["rows"] * case.keys.get("cols", case.keys.get("vocab")) * itemsize
    flops = case.flops or 0
    plan = timing.plan(size, case.bytes, timing.FULL, flops)
    if case.keys.get("rows") == 1:  # in the cache on purpose: see MAX_SETS
        assert plan.sets == timing.MAX_SETS
    else:
        assert plan.sets * case.bytes >= timing.TOUCHED_BYTES
    ideal_us = plan.sets * plan.laps * max(case.bytes / timing.PEAK_BYTES_PER_US, flops / timing.PEAK_FLOPS_PER_US, 1)
    assert ideal_us >= timing.REPLAY_US


@pytest.mark.parametrize("names, rounds", [("ab", 4), ("abc", 6), ("abcd", 4), ("abcde", 10), ("abcdef", 6)])
def test_everybody_follows_everybody_else_equally_often(names, rounds):
    turns = list(timing.in_turn(names, rounds))
    order = [turns[start : start + len(names)] for start in range(0, len(turns), len(names))]
    assert all(sorted(one) == list(names) for one in order)
    followed = Counter(pair for one in order for pair in pairwise(one))
    assert followed.keys() == set(permutations(names, 2))
    assert len(set(followed.values())) == 1
    assert len({one[0] for one in order}) == len(names)  # nobody always goes first


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("rounds", [3, 8, 32])
def test_a_timer_takes_whole_turns(count, rounds):
    names = list(range(count))
    turns = list(timing.balanced(names, rounds))
    assert Counter(turns) == dict.fromkeys(names, len(turns) // count)
    followed = Counter(pair for start in range(0, len(turns), count) for pair in pairwise(turns[start : start + count]))
    assert len(set(followed.values())) <= 1 and len(followed) == count * (count - 1)
    assert len(turns) <= count * max(2 * count, 1.5 * rounds)
