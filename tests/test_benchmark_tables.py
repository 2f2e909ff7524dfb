"""The tables of results/README.md, as they are printed: what is bold, and what misses its limit."""

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks import odd, tables
from benchmarks.bars import Bar

ROOT = Path(__file__).parent.parent
NO_TIMES = {"TB/s", "TFLOP/s"}
TIME = re.compile(r"(\*\*)?([\d.]+)(\*\*)?(?: \([\d.]+ to [\d.]+\))?")


@pytest.fixture
def committed():
    if not (ROOT / "results").exists():
        pytest.skip("needs the results")
    return tables.Results(ROOT / "results")


def cells(table):
    """{name of the column: cell} of each line."""
    lines = [line.strip("| ").split("|") for line in table.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line] for line in lines)
    padded = ([*line, *[""] * (len(head) - len(line))] for line in body)
    return [dict(zip(head, line, strict=True)) for line in padded]


def check_bold(line):
    """The smallest of the times that compute the op, and no other, is bold. Returns how many times there are."""
    times = [TIME.fullmatch(cell) for name, cell in list(line.items())[1:] if name not in NO_TIMES]
    times = [(float(found[2]), bool(found[1])) for found in times if found]
    bold = [time for time, is_bold in times if is_bold]
    assert bold and set(bold) == {min(times)[0]}, line
    return len(times)


BY_LINE = [name for name, table in tables.TABLES.items() if table.__qualname__.startswith("side_by_side")]


@pytest.mark.parametrize("name", BY_LINE)
def test_bold_is_the_fastest_of_a_line(name, committed):
    table = tables.TABLES[name](committed)
    if table.startswith("Not measured yet"):
        pytest.skip("has no rows")
    compared = [check_bold(line) for line in cells(table)]
    assert compared and max(compared) > 1


@pytest.mark.parametrize("name", ["rms_norm_linear", "fp8_linear", "products", "call_overhead"])
def test_what_computes_less_is_marked_and_never_bold(name, committed):
    marked = [cell for line in cells(tables.TABLES[name](committed)) for cell in line.values() if "†" in cell]
    assert marked and not any("**" in cell for cell in marked)


def test_bars_that_are_missed(monkeypatch):
    """Of each unit one that is met, which is not printed, and one that is missed."""
    row = {"op": "softmax", "rows": 2048, "dtype": "float32", "pass": "fwd", "timing": "graph", "bytes": 8e6}
    found = object.__new__(tables.Results)
    found.rows = {"ops": [
        {**row, "cols": cols, "provider": provider, "time_us": time_us}
        for cols, times in {1: {tables.OURS: 2.0, "liger": 2.2}, 2: {tables.OURS: 2.5, "liger": 2.0}}.items()
        for provider, time_us in times.items()
    ]}  # fmt: skip
    limits = {"µs": 2, "TB/s": 4, "liger": 1.1}
    bars = [
        Bar("ops", {"op": "softmax", "cols": cols}, unit, limits[unit], "a reason")
        for unit in limits
        for cols in (1, 2)
    ]
    monkeypatch.setattr(tables, "BARS", bars)
    assert tables.missed(found).splitlines()[2:] == [
        "| `softmax` 2048x2 fp32 | 2.5 µs | 2 µs | 25.0% | a reason |",
        "| `softmax` 2048x2 fp32 | 3.20 TB/s | 4 TB/s | 25.0% | a reason |",
        "| `softmax` 2048x2 fp32 | 0.80 x Liger-Kernel | 1.1 x | 37.5% | a reason |",
    ]
    monkeypatch.setattr(tables, "BARS", bars[::2])
    assert tables.missed(found) == "None is missed.\n"


def test_every_bar_was_measured(committed):
    for bar in tables.BARS:
        ((_, found),) = tables.cases(tables.pick(committed.rows[bar.file], timing="graph", **bar.keys))
        assert tables.OURS in found and (bar.unit in ("µs", "TB/s") or bar.unit in found)


def test_odd_widths_beside_their_neighbours(committed):
    """Every one that is measured, and how many of them are near enough."""
    table = tables.odd(committed)
    lines = cells(table)
    names = {line["case"] for line in lines}
    assert len(names) == len(lines) == sum(len(beside) for _, widths, _ in odd.OPS for beside in widths.values())
    ratios = [float(line["ratio"]) for line in lines]
    for line, ratio in zip(lines, ratios, strict=True):
        assert float(line["µs"]) / float(line["the aligned neighbour, µs"]) == pytest.approx(ratio, rel=0.02)
    assert f"1.2x is met in {sum(ratio <= 1.2 for ratio in ratios)} of {len(ratios)}." in table
