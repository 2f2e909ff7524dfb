"""The benchmarks: a short run on the CPU writes what the results format asks for, and the cases can be compared."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import call_overhead, report, timing
from benchmarks.cases import OURS, PROVIDERS
from benchmarks.ops import DECODE_OPS, OPS

ROOT = Path(__file__).parent.parent
META = {
    "gpu", "gpu_count", "driver", "cuda", "torch", "transformers", "triton", "python", "sm_clock_mhz", "copy_gb_s",
    "read_gb_s", "sources", "command", "date",
}  # fmt: skip
ROW = {"op", "provider", "dtype", "time_us", "time_us_p10", "time_us_p90", "timing"}


def run(folder, *arguments):
    """On one thread: what a time is does not matter here, and cores are shared with other tests."""
    command = [sys.executable, "-m", "benchmarks", *arguments, "--device", "cpu", "--quick", "--output", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_short_run_writes_the_format(tmp_path):
    out = run(tmp_path, "ops", "--only", "rms_norm", "call_overhead", "--providers", "eager", OURS)
    content = json.loads((tmp_path / "ops.json").read_text())
    meta, rows = content["meta"], content["rows"]
    assert set(meta) >= META and meta["sources"] and str(tmp_path) not in meta["command"]
    assert "left out" not in out
    for row in rows:
        assert set(row) >= ROW and ("bytes" in row or "flops" in row) and row["pass"] in ("fwd", "bwd")
        assert 0 < row["time_us_p10"] <= row["time_us"] <= row["time_us_p90"]
    for keys, found in report.cases(rows):
        assert set(found) == {"eager", OURS} | ({"empty"} if keys["op"] == "call_overhead" else set())
    assert {row["function"] for row in rows if row["op"] == "call_overhead"} == set(call_overhead.CASES)


def test_a_short_decode_run(tmp_path):
    """Kernels and whole steps, patched and not, each of which has run."""
    parts = ("decode_attention", "sample", "decode")
    out = run(tmp_path, "decode", "--only", *parts, "--providers", OURS, "generate", "eager")
    kernels, steps = (json.loads((tmp_path / name).read_text())["rows"] for name in ("decode_ops.json", "decode.json"))
    assert "left out" not in out.replace("cudnn left out", "")  # which is for GPUs
    assert {row["op"] for row in kernels} == {"decode_attention", "sample"}
    assert {row["op"] for row in steps} == {"decode"}
    assert {row["provider"] for row in steps} == {OURS, "generate", "eager"}
    assert {(row["batch"], row["context"]) for row in steps} == {(1, 128), (8, 128)}
    assert all(row["logits_error_float32"] < 1e-5 for row in steps if row["provider"] != "generate")
    assert (tmp_path / "decode.png").exists() and (tmp_path / "decode_ops.png").exists()


def test_a_short_run_of_a_model_in_a_folder(tmp_path):
    """Prefill and decode, patched and not; compiled where it was asked for."""
    pytest.importorskip("transformers")
    from hf_models import tiny_model

    tiny_model().save_pretrained(tmp_path / "a-model")
    out = run(tmp_path, "model", "--model", str(tmp_path / "a-model"), "--providers", "eager", OURS, "compile")
    assert "left out" not in out
    rows = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert all(set(row) >= ROW and row["model"] == "a-model" for row in rows)
    found = {(row["op"], row["provider"]): row for row in rows}
    both = {(op, provider) for op in ("prefill", "decode") for provider in ("eager", OURS)}
    assert set(found) == both | {("prefill", "compile")}
    assert [(row["tokens"], row["logits"]) for row in rows if row["provider"] == "compile"] == [(128, "last")]
    ours = found["prefill", OURS]
    assert ours["patched_rms_norm"] == 5 and ours["logits_error_eager"] < 1e-4
    assert (tmp_path / "model.png").exists()


def test_every_case_compares_like_with_like():
    for op in OPS.values():
        dtypes = {}
        for case in op.cases:
            assert {"eager", OURS} <= set(op.providers(case)) <= set(PROVIDERS) or case.keys.get("in_place")
            size = (*case.keys.values(), case.direction)
            assert dtypes.setdefault(size, case.dtype) == case.dtype, f"{case.title}: two dtypes in one group"
        assert len(dtypes) == len(op.cases), f"{op.name}: a case is listed twice"


def test_cases_have_the_keys_of_the_format():
    rows_cols = {"rows", "cols"}
    keys = {
        "rms_norm": rows_cols,
        "add_rms_norm": rows_cols,
        "rope": {"batch", "tokens", "heads", "kv_heads", "head_dim", "in_place"},
        "swiglu": rows_cols | {"packed"},
        "geglu": rows_cols | {"packed"},
        "linear": {"m", "n", "k", "chained"},
        "rms_norm_linear": {"m", "n", "k"},
        "decode_attention": {"batch", "kv_tokens", "heads", "kv_heads", "head_dim", "cache"},
        "sample": {"rows", "vocab"},
    }
    ops = OPS | DECODE_OPS
    assert all(set(case.keys) == keys[op.name] for op in ops.values() for case in op.cases)


@pytest.mark.parametrize("name", call_overhead.CASES)
def test_the_empty_op_has_our_signature(name):
    import llmkernels  # noqa: F401

    schema, options = call_overhead.SCHEMAS[name]
    empty = torch._C.parse_schema(name + schema)
    ours = getattr(torch.ops.llmkernels, name).default._schema
    for these, those in ((empty.arguments, ours.arguments), (empty.returns, ours.returns)):
        assert [str(one.type) for one in these] == [str(one.type) for one in those]
    tensors = sum(str(argument.type) == "Tensor" for argument in ours.arguments)
    optional_weight = any(argument.name == "weight" for argument in ours.arguments)
    assert tensors + optional_weight + len(options) == len(ours.arguments)


@pytest.mark.parametrize("case", [case for op in OPS.values() for case in op.cases], ids=lambda case: case.title)
def test_a_replay_touches_more_than_the_cache(case):
    itemsize = case.dtype.itemsize
    if case.op == "rope":
        size = case.keys["tokens"] * (case.keys["heads"] + case.keys["kv_heads"]) * case.keys["head_dim"] * itemsize
    else:
        tensors = 1 if case.op == "rms_norm" else 2
        size = tensors * case.keys["rows"] * case.keys["cols"] * itemsize
    plan = timing.plan(size, case.bytes, timing.FULL)
    if case.keys.get("rows") == 1:  # in the cache on purpose: see MAX_SETS
        assert plan.sets == timing.MAX_SETS
    else:
        assert plan.sets * case.bytes >= timing.TOUCHED_BYTES
    ideal_us = plan.sets * plan.laps * max(case.bytes / timing.PEAK_BYTES_PER_US, 1)
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
