"""benchmarks/launches.py: what a launch costs in its place."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")

from benchmarks.launches import Event, summarize, table_of


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks.launches", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])


def step(shift=0.0):
    """Two layers of two products around an attention, then the head, a product as well. Each starts 1 us before the
    end of the launch before it."""
    events, end = [], shift
    for name, cost in [("product", 4.0), ("attention", 2.0), ("product", 8.0)] * 2 + [("product", 100.0)]:
        events.append(Event(end - 1.0, end + cost, name))
        end += cost
    return events


def test_each_launch_costs_what_it_adds():
    found = summarize([step(), step(500.0)], layers=2)
    assert [(launch.name, launch.count, launch.end_to_end, launch.runs) for launch in found] == [
        ("product", 2, 4.5, 5.0),  # the first has nothing before it
        ("attention", 2, 2.0, 3.0),
        ("product", 2, 8.0, 9.0),
        ("product", 1, 100.0, 101.0),
    ]


def test_what_ends_while_another_runs_costs_nothing():
    events = [Event(0, 10, "long"), Event(2, 5, "beside"), Event(9, 14, "next")]
    found = {launch.name: launch.end_to_end for launch in summarize([events], layers=1)}
    assert found == {"beside": 5.0, "long": 5.0, "next": 4.0}
    assert sum(found.values()) == 14


def test_another_number_than_layers_have_is_one_launch():
    events = [Event(i, i + 1, "copy") for i in range(5)]
    (found,) = summarize([events], layers=3)
    assert (found.count, found.end_to_end) == (5, 1.0)


def test_the_table():
    table = table_of("a step", summarize([step()], layers=2))
    assert table.row_count == 4 and table.columns[0].header == "launch"


@pytest.mark.gpu
def test_a_step_of_a_model():
    found = run("qwen2.5-0.5b", "--variants", "LLMK_NOTHING=1")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("qwen2.5-0.5b, a step behind 512 tokens") == 2 and "LLMK_NOTHING=1: " in found.stdout
    assert found.stdout.count("decode_attention_kernel") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_it_needs_a_gpu():
    found = run("qwen2.5-0.5b")
    assert found.returncode == 1 and "no GPU that torch can use" in found.stderr
