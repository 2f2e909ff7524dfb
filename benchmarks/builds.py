"""Several builds of libllmkernels.so, timed in turn on one machine by a section of the benchmarks, without its peers.

    python -m benchmarks.builds OLD.so NEW.so -- ops --section odd

Each build runs once per round. Prints the median over the rounds for each case, and how it compares with that of the
first build: a GPU's own times differ by more between two machines than most changes are worth.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.progress import track
from rich.table import Table

from benchmarks import report, results
from benchmarks.cases import OURS
from benchmarks.sources import ROOT
from llmkernels import _library
from llmkernels._command import Problem, run_command


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.builds",
        description=__doc__.splitlines()[0],
        usage="%(prog)s [--rounds N] LIBRARY.so ... -- COMMAND OF python -m benchmarks",
    )
    parser.add_argument("builds", nargs="+", type=Path, metavar="LIBRARY.so")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="default: 2")
    own, command = around("--", sys.argv[1:])
    arguments = parser.parse_args(own)
    builds = arguments.builds
    if not command:
        parser.error("nothing to measure: -- ops --section odd, say")
    if missing := [str(build) for build in builds if not build.is_file()]:
        raise Problem(f"no such file: {', '.join(missing)}")
    runs = []
    with own_library_kept():
        for build in track(builds * arguments.rounds, "builds", console=report.console):
            runs.append((build, measure(build, command)))
    report.console.print(table(builds, times(runs)))
    return 0


def around(mark: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index(mark) if mark in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


@contextmanager
def own_library_kept():
    """Other libraries lie in its place meanwhile."""
    with TemporaryDirectory() as folder:
        kept = Path(shutil.copy2(_library.PATH, folder))
        try:
            yield
        finally:
            put(kept)


def put(library: Path) -> None:
    """A new file: the one that lies there may be in use."""
    new = _library.PATH.with_suffix(".new")
    shutil.copy2(library, new)
    os.replace(new, _library.PATH)


def measure(build: Path, command: Sequence[str]) -> list[dict]:
    put(build)
    with TemporaryDirectory() as folder:
        options = ["--providers", OURS, "--output", folder]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *command, *options], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise Problem(f"{build}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [row for path in sorted(Path(folder).glob("*.json")) for row in results.load(path)[1]]


def times(runs: Iterable[tuple[Path, Sequence[dict]]]) -> dict[str, dict[Path, float]]:
    """The median time of each case by each build, in us."""
    found = defaultdict(lambda: defaultdict(list))
    for build, rows in runs:
        for keys, of_provider in report.cases(rows):
            name = " ".join(str(keys[key]) for key in ("op", "pass", "dtype") if key in keys)
            found[f"{name} {report.shape(keys)}"][build].append(of_provider[OURS]["time_us"])
    return {case: {build: median(all_times) for build, all_times in of.items()} for case, of in found.items()}


def table(builds: Sequence[Path], found: dict[str, dict[Path, float]]) -> Table:
    result = Table(
        "case", *(f"{build.stem}, us" for build in builds), *(f"{build.stem} / first" for build in builds[1:])
    )
    for case, of_build in found.items():
        us = [of_build[build] for build in builds]
        result.add_row(case, *(f"{one:.2f}" for one in us), *(f"{one / us[0]:.3f}" for one in us[1:]))
    return result


if __name__ == "__main__":
    raise SystemExit(run_command("benchmarks.builds", main))
