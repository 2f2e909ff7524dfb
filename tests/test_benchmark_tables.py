"""The tables of results/README.md, as they are printed: what is bold, and what misses its limit."""

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks import tables

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
    compared = [check_bold(line) for line in cells(tables.TABLES[name](committed))]
    assert compared and max(compared) > 1


@pytest.mark.parametrize("name", ["rms_norm_linear", "fp8_linear", "products", "call_overhead"])
def test_what_computes_less_is_marked_and_never_bold(name, committed):
    marked = [cell for line in cells(tables.TABLES[name](committed)) for cell in line.values() if "†" in cell]
    assert marked and not any("**" in cell for cell in marked)
