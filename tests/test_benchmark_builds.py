"""benchmarks/builds.py: builds of the library in turn, and the own one back in its place."""

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import builds
from benchmarks.cases import OURS
from llmkernels import _library
from llmkernels._command import Problem

ROW = {"op": "rms_norm", "rows": 8192, "cols": 1001, "dtype": "bfloat16", "pass": "fwd", "provider": OURS}


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "libllmkernels.so"
    path.write_text("own")
    monkeypatch.setattr(_library, "PATH", path)
    return path


@pytest.fixture
def two(tmp_path) -> list[Path]:
    found = [tmp_path / "old.so", tmp_path / "new.so"]
    for build in found:
        build.write_text(build.stem)
    return found


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["builds", *map(str, arguments)])
    return builds.main()


def test_builds_take_turns(library, two, monkeypatch, capsys):
    seen = []

    def measure(build, command):
        builds.put(build)
        seen.append((library.read_text(), command))
        return [ROW | {"time_us": {"old": 20.0, "new": 15.0}[build.stem] + len(seen)}]

    monkeypatch.setattr(builds, "measure", measure)
    monkeypatch.setattr(builds.report, "console", Console(width=120))
    assert run(monkeypatch, "--rounds", 3, *two, "--", "ops", "--section", "odd") == 0
    assert seen == [(name, ["ops", "--section", "odd"]) for name in ("old", "new") * 3]
    assert library.read_text() == "own"
    cells = capsys.readouterr().out.replace("│", " ").split()
    # The medians of 21, 23, 25 and of 17, 19, 21.
    assert cells[cells.index("8192x1001") :][:4] == ["8192x1001", "23.00", "19.00", "0.826"]


def test_own_library_is_back_behind_an_error(library, two, monkeypatch):
    def measure(build, command):
        builds.put(build)
        raise Problem("no GPU")

    monkeypatch.setattr(builds, "measure", measure)
    with pytest.raises(Problem, match="no GPU"):
        run(monkeypatch, *two, "--", "ops")
    assert library.read_text() == "own"


def test_a_build_that_is_not_there(library, two, monkeypatch):
    with pytest.raises(Problem, match=r"no such file: .*other\.so"):
        run(monkeypatch, *two, two[0].with_name("other.so"), "--", "ops")


def test_nothing_to_measure(library, two, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, *two)
    assert "nothing to measure" in capsys.readouterr().err


def test_a_command_that_fails(library, two, monkeypatch):
    with pytest.raises(Problem, match="invalid choice"):
        run(monkeypatch, *two, "--", "opera")
    assert library.read_text() == "own"
