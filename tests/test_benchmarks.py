"""The benchmarks: a short run on the CPU writes what the results format asks for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import (
    adapters,
    call_overhead,
    families,
    harnesses,
    host,
    models,
    plots,
    report,
    results,
    sections,
    step_parts,
    steps,
    steps_compared,
    tables,
)
from benchmarks.__main__ import merge
from benchmarks.cases import OURS, PROVIDERS
from benchmarks.run import Run
from benchmarks.sources import depended_on

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
    out = run(tmp_path, "ops", "--section", "rms_norm", "call_overhead", "--providers", "eager", OURS)
    meta, rows = results.load(tmp_path / "ops.json")
    assert set(meta["sections"]) == {"rms_norm", "call_overhead"} == {row["section"] for row in rows}
    for one in (meta, *meta["sections"].values()):
        assert set(one) >= META and one["sources"] and str(tmp_path) not in one["command"]
    assert "left out" not in out
    for row in rows:
        assert set(row) >= ROW and ("bytes" in row or "flops" in row) and row["pass"] in ("fwd", "bwd")
        assert 0 < row["time_us_p10"] <= row["time_us"] <= row["time_us_p90"]
    for keys, found in report.cases(rows):
        assert set(found) == {"eager", OURS} | ({"empty"} if keys["op"] == "call_overhead" else set())
    assert {row["function"] for row in rows if row["op"] == "call_overhead"} == set(call_overhead.CASES)


def test_a_short_decode_run(tmp_path):
    """Kernels and whole steps, patched and not, each of which has run; and one of the other models."""
    names = ("decode_attention", "sample", "steps", "llama-3.2-1b")
    out = run(tmp_path, "decode", "--section", *names, "--providers", OURS, "generate", "eager")
    kernels, steps = (json.loads((tmp_path / name).read_text())["rows"] for name in ("decode_ops.json", "decode.json"))
    assert "left out" not in out.replace("cudnn left out", "")  # which is for GPUs
    assert {row["op"] for row in kernels} == {"decode_attention", "sample"}
    others = [row for row in steps if row["section"] == "llama-3.2-1b"]
    assert {(row["op"], row["provider"]) for row in others if row["provider"] != "generate"} == {
        (op, provider) for op in ("decode", "first_token") for provider in (OURS, "eager")
    }
    steps = [row for row in steps if row not in others]
    assert {row["op"] for row in steps} == {"decode"}
    assert {row["provider"] for row in steps} == {OURS, "generate", "eager"}
    assert {(row["batch"], row["context"]) for row in steps} == {(1, 128), (8, 128)}
    assert all(row["logits_error_float32"] < 1e-5 for row in steps if row["provider"] != "generate")
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        "decode",
        "decode_throughput",
        "decode_attention",
        "sample",
    }


def test_a_short_run_of_the_host(tmp_path):
    """What a forward takes besides its step, which is not run; and when calls launch something."""
    pytest.importorskip("transformers")
    run(tmp_path, "decode", "--section", "host", "--providers", OURS, "eager")
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    times = {(row["provider"], row["part"], row["layers"]): row["time_us"] for row in rows}
    ours = ("loop", "guard", "memory", *(["prompt"] if torch.cuda.is_available() else []), "generate")
    expected = [*((OURS, part) for part in ours), ("eager", "prompt"), ("eager", "generate")]
    assert times.keys() == {(*way, layers) for way in expected for layers in host.LAYERS}
    for layers in host.LAYERS:
        assert times[OURS, "guard", layers] < times[OURS, "loop", layers]
        assert times["eager", "prompt", layers] < times["eager", "generate", layers]


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
    assert drawn_from(tmp_path / "prefill.png") == plots.content_hash(tmp_path / "model.json")


def test_a_short_run_of_fine_tuning(tmp_path):
    """The same losses for all, of all weights and of adapters."""
    pytest.importorskip("peft")
    out = run(tmp_path, "train")
    assert "left out" not in out
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert all(set(row) >= ROW and row["op"] == "train_step" for row in rows)
    found = {(row["model"], row["provider"]): row["losses"] for row in rows}
    assert set(found) == {(model, name) for model in ("qwen2-small", "qwen2-small-lora") for name in ("eager", OURS)}
    for model in ("qwen2-small", "qwen2-small-lora"):
        ours, eager = found[model, OURS], found[model, "eager"]
        assert ours == pytest.approx(eager, rel=1e-3)
    assert found["qwen2-small", OURS][-1] < found["qwen2-small", OURS][0]
    assert drawn_from(tmp_path / "train_loss.png") == plots.content_hash(tmp_path / "train.json")


# ---- models

PARAMETERS = {  # what their publishers say, in billions
    "qwen2.5-0.5b": 0.494,
    "llama-3.2-1b": 1.236,
    "smollm3-3b": 3.075,
    "phi-4-mini": 3.836,
    "qwen2.5-7b": 7.616,
    "mistral-7b": 7.248,
    "olmo-2-7b": 7.299,
    "llama-3.1-8b": 8.030,
    "qwen3-8b": 8.191,
    "granite-3.3-8b": 8.171,
    "gemma-2-9b": 9.242,
    "qwen2.5-14b": 14.770,
}
every_model = pytest.mark.parametrize("name", models.MODELS)


@every_model
def test_a_model_has_the_published_size(name):
    """A step reads every weight once: of an embedding only where it is the head, too."""
    model = models.with_random_weights(models.MODELS[name], torch.device("meta"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters / 1e9 == pytest.approx(PARAMETERS[name], abs=6e-4)
    tied = model.config.tie_word_embeddings
    read = parameters - (0 if tied else model.config.vocab_size * model.config.hidden_size)
    assert steps.weight_bytes(model) == read * model.dtype.itemsize


@pytest.mark.parametrize("name", [*families.CALLERS, "gemma-2-9b"])
def test_a_short_run_of_a_model(name):
    """By the decode step; and each way to generate gives a row with what the results format asks for."""
    rows = families.measure(name, Run(torch.device("cpu"), quick=True))
    wanted = {("decode", provider) for provider in (OURS, "generate", "forward", "eager", "eager_generate")}
    others = ("beams", "lookup", "sampling", "chat", "assisted") if name in families.CALLERS else ()
    wanted |= {(op, provider) for op in ("first_token", *others) for provider in (OURS, "eager")}
    assert {(row["op"], row["provider"]) for row in rows} == wanted and len(rows) == len(wanted)
    for row in rows:
        assert set(row) >= ROW | {"batch"} and row["model"] == f"{name}-small" and row["batch"] == 1
        assert row["tokens"] if row["op"] == "first_token" else row["context"] and row["bytes"] > 0
        assert row["op"] != "lookup" or row["tokens_per_step"] >= 1


@every_model
def test_a_small_model_runs_by_the_step(name):
    import llmkernels

    model, _ = models.load_published(name, torch.device("cpu"))
    ids = torch.arange(1, 9)[None]
    expected = model.generate(ids, max_new_tokens=4, **families.GREEDY)
    norms = [weight for key, weight in model.named_parameters() if key.endswith("norm.weight")]
    assert norms and all(len(weight.unique()) > 1 for weight in norms)
    handle = llmkernels.patch(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, **families.GREEDY), expected)
    assert [decode.reason for decode in handle.report().decode] == [None]


def test_ways_to_generate_are_timed_in_turn(monkeypatch):
    """Patched and not in one run, on the caches that a caller would have; one that does not run is left out."""
    from transformers import DynamicCache

    order, left_out = [], []
    short = Run(torch.device("cpu"), quick=True, warn=lambda what, problem: left_out.append(what))
    bench = steps_compared.Bench(short)
    monkeypatch.setattr(Run, "small", False)
    monkeypatch.setattr(bench, "many", 6)
    bench.few, bench.seconds = 2, 0

    def watched(name, way):
        def measure(batch, context):
            order.append(name)
            measured = way(batch, context)
            assert len(measured[0]) >= steps.REPEATS
            return measured

        return measure

    def fails(batch, context):
        raise RuntimeError("does not run")

    ways = bench.our_ways | {"eager": bench.loop, "eager_generate": bench.generate}
    rows = bench.rows({name: watched(name, way) for name, way in ways.items()} | {"torch": fails}, [(1, 32)])
    rounds = [order[start : start + 4] for start in range(0, len(order), 4)]
    assert len(rounds) == steps.TURNS and all(set(one) == set(ways) for one in rounds)
    assert left_out == ["torch, batch 1, context 32"]
    assert [row["provider"] for row in rows] == list(ways)
    for row in rows:
        # A difference of two short runs, which is negative now and then where other processes take the cores.
        assert set(row) >= ROW and row["time_us_p10"] <= row["time_us"] <= row["time_us_p90"]
    assert type(bench.growing_cache(2, 8)) is DynamicCache and bench.growing_cache(2, 8).get_seq_length() == 8
    models.load.cache_clear()


def test_other_models_than_ours_are_measured_at_many_sizes_alone():
    assert families.measure("qwen3-8b", Run(torch.device("cpu"), quick=True, model_id="of/somebody")) == []


def test_the_tables_of_models():
    """A line for each that was measured, a cell for each way; and no other model in the tables of many sizes."""
    row = {"section": "qwen3-8b", "op": "decode", "model": "qwen3-8b", "batch": 1, "context": 512, "timing": "wall",
           "dtype": "bfloat16", "bytes": 16e9}  # fmt: skip
    first = {key: value for key, value in row.items() if key not in ("context", "bytes")}
    first |= {"op": "first_token", "tokens": 512}
    rows = [
        {**row, "provider": OURS, "time_us": 4000},
        {**row, "provider": "forward", "time_us": 4500},
        {**row, "provider": "eager", "time_us": 22_000},
        {**row, "provider": "eager_generate", "time_us": 21_000, "time_us_p10": 20_000, "time_us_p90": 24_000},
        {**first, "provider": "eager", "time_us": 30_000},
        {**row, "op": "beams", "provider": OURS, "time_us": 4900},
        {**row, "section": "qwen2.5-0.5b", "model": "qwen2.5-0.5b", "provider": "eager", "time_us": 20_000},
        {**row, "section": "steps", "model": "qwen2.5-7b", "provider": OURS, "time_us": 3400},
    ]
    found = object.__new__(tables.Results)
    meta = A_META | {"transformers": "old", "sections": dict.fromkeys(("steps", *models.MODELS), A_META)}
    found.metas, found.rows = {"decode": meta}, {"decode": rows}
    assert tables.models(found).splitlines()[2:-2] == [
        "| Qwen2.5-0.5B |  |  |  |  | 20.0 |  |  |",
        "| Qwen3-8B | 4.00 | 4.00 |  | 4.50 | 21.0 (20.0 to 24.0) |  | 30.0 |",
    ]
    assert tables.callers(found).splitlines()[2:-2] == ["| Qwen3-8B | 4.90 |  |  |  |"]
    assert [line.count("3.40") for line in tables.TABLES["decode_all"](found).splitlines()[2:-2]] == [1]
    assert plots.at_context_512(rows) == rows[-1:]
    found.rows = {"decode": []}
    assert tables.models(found) == tables.callers(found) == "Not measured yet: `python -m benchmarks decode`.\n"
    assert set(models.MODELS) <= set(plots.MODELS)


def test_the_table_of_the_readme_compares_with_the_fastest_unpatched_way():
    """And a time whose p90 is far above its p10 is shown with both; one without them is as before."""
    row = {"section": "steps", "op": "decode", "model": "qwen2.5-7b", "batch": 1, "context": 512, "timing": "wall",
           "dtype": "bfloat16", "bytes": 16e9}  # fmt: skip
    found = object.__new__(tables.Results)
    found.metas = {"decode": A_META | {"transformers": "old", "sections": {"steps": A_META}}}
    found.rows = {"decode": [
        {**row, "provider": "generate", "time_us": 3000, "time_us_p10": 2900, "time_us_p90": 3300},
        {**row, "provider": "eager", "time_us": 20_000, "time_us_p10": 18_000, "time_us_p90": 21_000},
        {**row, "provider": "eager_generate", "time_us": 24_000},
        {**row, "provider": "static_compile", "time_us": 7500, "time_us_p10": 7500, "time_us_p90": 7600},
        {**row, "provider": "generate", "batch": 8, "time_us": 4000},
    ]}  # fmt: skip
    assert tables.decode(found).splitlines()[2:-2] == [
        "| model.generate, patched | **3.00** |  | **4.00** |  |",
        "| a loop over the forward, unpatched | 20.0 (18.0 to 21.0) |  |  |  |",
        "| model.generate, unpatched | 24.0 |  |  |  |",
        "| static cache, torch.compile | 7.50 |  |  |  |",
        "| the fastest unpatched / model.generate, patched | 2.5 x |  |  |  |",
    ]


# ---- sections


A_ROW = {"op": "call_overhead", "function": "rope", "provider": OURS, "timing": "wall", "dtype": "float32"}

A_META = {
    "gpu": "a GPU", "cpu": "a CPU", "torch": "old", "date": "2026-01-01", "sources": "0", "copy_gb_s": 1,
    "read_gb_s": 1, "sm_clock_mhz": 0,
}  # fmt: skip


def a_file(folder, measured, **meta):
    """A results file with a row for each section: {name: its number}."""
    meta = A_META | meta
    rows = [{"section": name, **A_ROW, "time_us": number} for name, number in measured.items()]
    results.merge(folder / "ops.json", {**meta, "sections": dict.fromkeys(measured, meta)}, rows)


def numbers(folder):
    return {row["section"]: row["time_us"] for row in results.load(folder / "ops.json")[1]}


@pytest.mark.usefixtures("no_state_of_accelerate")
def test_harnesses():
    run = Run(torch.device("cpu"), quick=True)
    rows = harnesses.measure_callers(run) + harnesses.measure_harnesses(run)
    found = {(row["op"], row["provider"]) for row in rows}
    assert {op for op, _ in found} <= set(report.HARNESSES)
    assert {(op, name) for op in ("pipeline", "chats", "continuous_batching") for name in ("eager", OURS)} <= found
    assert all(row.keys() >= ROW and report.shape(row) for row in rows)


def test_adapters():
    rows = adapters.measure(Run(torch.device("cpu"), quick=True))
    assert {(row["op"], row["provider"]) for row in rows} == {
        (op, name) for op in ("adapters", "first_token") for name in ("eager", OURS)
    }
    assert all(row.keys() >= ROW and report.shape(row) for row in rows)


def test_sections_merge_into_their_file(tmp_path):
    a_file(tmp_path, {"rope": 1, "swiglu": 2})
    a_file(tmp_path, {"swiglu": 3, "geglu": 4}, date="2026-02-02", torch="new")
    assert list(numbers(tmp_path).items()) == [("rope", 1), ("swiglu", 3), ("geglu", 4)]
    meta = results.load(tmp_path / "ops.json")[0]
    assert meta["date"] == "2026-02-02" and meta["torch"] == "new"
    assert [one["date"][:7] for one in meta["sections"].values()] == ["2026-01", "2026-02", "2026-02"]
    a_file(tmp_path, {"rope": 5}, date="2025-03-03")  # from a run before
    assert results.load(tmp_path / "ops.json")[0]["date"] == "2026-02-02" and numbers(tmp_path)["rope"] == 5
    with pytest.raises(ValueError, match="was measured on a GPU, and these results on another GPU"):
        a_file(tmp_path, {"rope": 6}, gpu="another GPU")
    assert numbers(tmp_path)["rope"] == 5


def test_a_section_takes_the_place_of_those_that_it_replaces(tmp_path):
    """What was timed unpatched in a run of its own is in `steps` now."""
    a_file(tmp_path, {"rope": 1, "swiglu": 2})
    meta = A_META | {"sections": {"geglu": A_META | {"replaces": ["rope"]}}}
    results.merge(tmp_path / "ops.json", meta, [{"section": "geglu", **A_ROW, "time_us": 3}])
    assert numbers(tmp_path) == {"swiglu": 2, "geglu": 3}
    meta = A_META | {"sections": {"sample": A_META | {"replaces": ["swiglu"]}}}
    with pytest.raises(ValueError, match="has llmkernels in swiglu"):
        results.merge(tmp_path / "ops.json", meta, [{"section": "sample", **A_ROW, "provider": "eager", "time_us": 3}])
    assert list(results.sections(tmp_path / "ops.json")) == ["swiglu", "geglu"]


def test_results_without_a_peer_are_left_out(tmp_path):
    """A peer that was not installed does not vanish from the tables."""
    a_file(tmp_path / "here", {"rope": 1, "swiglu": 2})
    path = tmp_path / "here" / "ops.json"
    meta, rows = results.load(path)
    results.save(path, meta, [*rows, {**rows[0], "provider": "liger", "time_us": 9}])
    before = path.read_text()
    a_file(tmp_path / "there", {"rope": 3})
    command = [sys.executable, "-m", "benchmarks", "merge", str(tmp_path / "there"), "--output", str(tmp_path / "here")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "has liger in rope, and these results have not" in " ".join(done.stdout.split())
    assert path.read_text() == before
    subprocess.run([*command, "--without", "liger"], cwd=ROOT, check=True, timeout=300)
    assert numbers(tmp_path / "here") == {"rope": 3, "swiglu": 2}


def test_merge_takes_over_a_folder(tmp_path):
    a_file(tmp_path / "here", {"rope": 1, "swiglu": 2})
    a_file(tmp_path / "there", {"swiglu": 3})
    (tmp_path / "there" / "gpu_tests.json").write_text('{"meta": {}, "tests": {}}')
    command = [sys.executable, "-m", "benchmarks", "merge", str(tmp_path / "there"), "--output", str(tmp_path / "here")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert numbers(tmp_path / "here") == {"rope": 1, "swiglu": 3}
    assert not (tmp_path / "here" / "gpu_tests.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"meta": {}}'])
def test_a_damaged_file_is_left_out(text, tmp_path, capsys):
    a_file(tmp_path / "here", {"rope": 1})
    a_file(tmp_path / "there", {"rope": 2})
    (tmp_path / "there" / "ops.json").write_text(text)
    assert merge(tmp_path / "there", tmp_path / "here", ()) == 1
    assert "ops.json has no results" in capsys.readouterr().out.replace("\n", " ")
    assert numbers(tmp_path / "here") == {"rope": 1}


@pytest.fixture
def fakes(monkeypatch):
    """Three sections that say in which order they were measured."""
    order = []

    def fake(name, seconds):
        def measure(run):
            order.append(name)
            if name == "b":
                raise RuntimeError("does not run")
            return [{**A_ROW, "time_us": 1.0}]

        return sections.Section("ops", name, ("benchmarks/timing.py",), measure, seconds)

    monkeypatch.setattr(sections.machine, "describe", lambda device: A_META)
    return [fake("a", 10), fake("b", 20), fake("c", 300), fake("d", 10)], order


def test_sections_are_measured_in_order_and_within_the_budget(fakes, tmp_path, monkeypatch):
    table, order = fakes
    monkeypatch.setattr(Run, "small", False)
    failed = sections.measure(table, Run(torch.device("cpu")), tmp_path, budget_s=100)
    assert order == ["a", "b", "d"] and [section.name for section in failed] == ["b"]
    assert set(results.sections(tmp_path / "ops.json")) == {"a", "d"}
    # What a section took the last time says what it will take.
    order.clear()
    known = tmp_path / "known"
    a_file(known, {"c": 1}, seconds=50)
    a_file(known, {"d": 1}, seconds=200)
    sections.measure(table, Run(torch.device("cpu")), tmp_path, budget_s=100, known=known)
    assert order == ["a", "b", "c"]


def test_what_is_stale(fakes, tmp_path):
    table = fakes[0][::3]
    assert [why for _, why in sections.stale(tmp_path, table)] == ["not measured"] * 2
    sections.measure(table, Run(torch.device("cpu")), tmp_path)
    assert sections.stale(tmp_path, table) == []
    meta, rows = results.load(tmp_path / "ops.json")
    meta["sections"]["a"] |= {"sources": "of others", "date": "2026-02-03T04:05:06"}
    results.save(tmp_path / "ops.json", meta, rows)
    assert [(section.name, why) for section, why in sections.stale(tmp_path, table)] == [
        ("a", "measured on other sources, 2026-02-03")
    ]


def test_stale_runs_what_is_stale(tmp_path):
    """The command that the results are renewed by, as far as its budget goes."""
    out = run(tmp_path, "stale", "--run", "--budget-s", "0.001")
    assert out.count("left for another run") == out.count(": measured on other sources") + out.count(": not measured")
    assert not list(tmp_path.iterdir())


def test_sections_depend_on_what_they_measure():
    reached = {section.title: set(depended_on(section.roots)) for section in sections.TABLE}
    assert len(reached) == len(sections.TABLE)
    printing = {"benchmarks/report.py", "benchmarks/plots.py", "benchmarks/machine.py", "benchmarks/sections.py"}
    assert not any(printing & files for files in reached.values())
    if not (ROOT / "csrc").exists():
        return  # the tests of a wheel
    assert all((ROOT / root).exists() for section in sections.TABLE for root in section.roots)
    for title in ("ops/rope", "ops/call_overhead", "model/prefill"):
        assert "csrc/kernels/rope/rope.cu" in reached[title]
    assert "csrc/kernels/linear/linear.cu" in reached["decode/steps"]
    for title in ("ops/rms_norm", "ops/swiglu", "decode_ops/sample"):
        assert not any("attention" in file or "hf/" in file for file in reached[title])
    for title in ("decode/compiled", "model/compiled"):
        assert not any(file.startswith(("csrc", "llmkernels")) for file in reached[title])


@pytest.fixture
def committed():
    """The folder of the results, each file of which has to be there."""
    folder = ROOT / "results"
    if not folder.exists():
        pytest.skip("needs the results")
    files = [(file, command) for command, wanted in sections.COMMANDS.items() for file in wanted]
    missing = [
        f"{file}.json: python -m benchmarks {name}" for file, name in files if not (folder / f"{file}.json").exists()
    ]
    assert not missing, f"never measured, on a GPU: {', '.join(missing)}"
    return folder


def test_committed_results_are_of_the_table(committed):
    for file in dict.fromkeys(section.file for section in sections.TABLE):
        meta, rows = results.load(committed / f"{file}.json")
        assert {row["section"] for row in rows} == set(meta["sections"])
        table = sections.find([file])
        known = {name for section in table for name in (section.name, *section.replaces)}
        assert set(meta["sections"]) <= known
        assert all(set(one) >= META for one in (meta, *meta["sections"].values()))


def drawn_from(picture):
    from PIL import Image

    return Image.open(picture).info["Source"]


def test_committed_pictures_are_of_the_committed_results(committed):
    wanted = {f"{draw.__name__}.png": file for file, pictures in plots.PICTURES.items() for draw in pictures}
    assert {path.name for path in committed.glob("*.png")} == set(wanted), "python -m benchmarks show"
    for picture, file in wanted.items():
        hashed = plots.content_hash(committed / f"{file}.json")
        assert drawn_from(committed / picture) == hashed, "python -m benchmarks show"


def test_the_tables_of_the_documents_are_of_the_committed_results():
    if not (ROOT / "results").exists():
        pytest.skip("needs the results")
    committed = tables.Results(ROOT / "results")
    found = set()
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert tables.filled(text, committed) == text, f"{name}: python -m benchmarks show"
        found |= {block[2] for block in tables.BLOCK.finditer(text)}
        assert text.count("<!-- table") == text.count("<!-- end -->") == len(tables.BLOCK.findall(text))
        for picture in re.findall(r"\]\((?:\.\./)?(?:results/)?(\w+\.png)\)", text):
            assert (ROOT / "results" / picture).exists()
    assert found == set(tables.TABLES)


def test_losses_are_counted(tmp_path):
    """By more than the noise, worst first; what only serves for comparison is no peer."""

    class Some:
        rows: ClassVar = {"ops": [
            {**A_ROW, "function": function, "provider": name, "time_us": time_us, **more}
            for function, times in {
                "draw": {OURS: (1.005, {}), "eager": (1, {})},
                "lost": {OURS: (1.5, {}), "eager": (1, {}), "torch": (2, {})},
                "badly": {OURS: (3, {}), "eager": (1, {})},
                "won": {OURS: (1, {}), "eager": (2, {}), "cublas": (0.5, {"approximate": True}), "empty": (0.1, {})},
                "alone": {OURS: (1, {})},
                "part": {OURS: (1, {"part": "head"})},  # of a step, which is nobody's peer
            }.items() for name, (time_us, more) in times.items()
        ]}  # fmt: skip

    assert [keys["function"] for keys, _, _ in tables.lost(Some)] == ["badly", "lost"]
    assert "2 of 4" in tables.score(Some)
    assert tables.losses(Some).splitlines()[2].split(" | ")[0].endswith("badly")


def test_the_table_of_training(tmp_path):
    """Each way to train a model in a line, the fastest in bold; of a GPU with its memory, of the real model more."""
    row = {"section": "full", "op": "train_step", "model": "qwen2.5-0.5b", "batch": 4, "tokens": 2048, "timing": "wall",
           "dtype": "bfloat16", "tokens_per_s": 100_000, "losses": [12.0, 11.5]}  # fmt: skip
    real = {"model": "SmolLM2-135M-Instruct", "perplexity_before": 11.69, "perplexity_after": 9.5}
    rows = [
        {**row, "provider": "eager", "time_us": 101_000, "peak_bytes": 29_300_000_000},
        {**row, "provider": OURS, "time_us": 68_000, "peak_bytes": 14_100_000_000},
        {**row, **real, "provider": OURS, "time_us": 50_000},
    ]
    found = object.__new__(tables.Results)
    meta = A_META | {"transformers": "old", "sections": {"full": A_META}}
    found.metas, found.rows = {"train": meta}, {"train": rows}
    assert tables.train(found).splitlines()[2:5] == [
        "| Qwen2.5-0.5B, 4 x 2048 tokens | llmkernels | **68.0** | 100,000 | 14.1 | 11.500 |  |",
        "| Qwen2.5-0.5B, 4 x 2048 tokens | eager | 101 | 100,000 | 29.3 | 11.500 |  |",
        "| SmolLM2-135M-Instruct, 4 x 2048 tokens | llmkernels | **50.0** | 100,000 |  | 11.500 | 11.69 to 9.50 |",
    ]
    pictures = re.findall(r"\((\w+)\.png\)", tables.train_pictures(found))
    assert pictures == [draw.__name__ for draw in plots.PICTURES["train"]]
    found.rows = {"train": []}
    assert tables.train(found) == tables.train_pictures(found) == "Not measured yet: `python -m benchmarks train`.\n"


def test_a_colour_is_one_implementation():
    colours = {name: colour for name, (_, colour) in plots.NAMES_AND_COLOURS.items()}
    shared = {name for name in colours if list(colours.values()).count(colours[name]) > 1}
    assert shared == {"eager", "eager_generate", "compile", "static_compile"}  # transformers as it is; torch.compile
    assert set(PROVIDERS) <= set(colours)


def test_the_parts_of_a_step_run():
    """As it is measured on a GPU alone, where nobody would see at once that a name has changed."""
    import llmkernels

    bench = step_parts.Bench(Run(torch.device("cpu"), quick=True))
    with torch.no_grad(), llmkernels.patch(bench.model):
        cache = bench.cache(2, 8)
        calls = bench.launches(cache)
        layers = bench.model.config.num_hidden_layers
        assert [len(found) for found in calls.values()] == [layers] * 5 + [1, 1]
        for found in calls.values():
            found[0]()
    models.load.cache_clear()
