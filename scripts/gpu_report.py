"""The end of gpu_check.sh: from what the runs left in a folder to results/gpu_tests.json.

python3 scripts/gpu_report.py FOLDER OUTPUT
python3 scripts/gpu_report.py --failures OUTPUT      the tests that failed, as pytest takes them
"""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OLDER = "sanitizer_sources"  # those that these tools ran on, where the tests ran on newer ones


def read_tests(*paths: Path) -> tuple[dict, list[str]]:
    """What runs of pytest counted, and the names of what failed."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            counts["failed"] += 1
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if "skipped" in outcomes else "passed"] += 1
    return counts, failures


def read_sanitizer(folder: Path, tool: str, processes: list[str]) -> tuple[dict, list[str]]:
    """Errors (racecheck: hazards of every kind) over all that a tool looked at. Each of its processes, such as
    racecheck.2, has left a log, and a file of its tests."""
    logs, tests = ([folder / f"{name}.{suffix}" for name in processes] for suffix in ("log", "xml"))
    texts = [log.read_text() if log.exists() else "" for log in logs]
    summaries = [re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text) for text in texts]
    if not all(summaries) or not all(path.exists() for path in tests):
        return {"errors": None, "tests": 0}, [f"{tool}: did not run to its end"]
    counts, failures = read_tests(*tests)
    errors = sum(int(number) for numbers in summaries for number in numbers)
    if tool == "initcheck":  # it looks at everybody's kernels, and does not see what cuBLAS writes by TMA
        errors = sum(len(re.findall(r"Uninitialized [^\n]*\n=+ +at [^\n]*llmk", text)) for text in texts)
    failures = [f"{tool}: {name}" for name in failures] + ([f"{tool}: {errors} errors"] if errors else [])
    return {"errors": errors, "tests": counts["passed"] + counts["failed"]}, failures


def keep_sanitizers(before: dict) -> dict:
    """Those of a report on the same kernels, and of which sources they are: Python ones may have changed since."""
    failures = [name for name in before["failures"] if name.startswith(TOOLS)]
    sources = before.get(OLDER, before["meta"]["sources"])
    return {"sanitizer": before["sanitizer"], "failures": failures, OLDER: sources}


def main(folder: Path, output: Path) -> int:
    import torch

    from benchmarks import machine
    from benchmarks.sources import fingerprint

    meta = machine.describe(torch.device("cuda"))
    meta["library"] = fingerprint(("csrc", "setup.py"))
    report = {"meta": meta, "tests": {}, "sanitizer": {}, "failures": []}
    if output.exists():
        before = json.loads(output.read_text())
        if all(before["meta"].get(key) == meta[key] for key in ("sources", "gpu", "torch")):
            kept = *report, "two_gpus", "again", OLDER
            report |= {key: before[key] for key in kept if key != "meta" and key in before}
        elif all(before["meta"].get(key) == meta[key] for key in ("library", "gpu", "torch")):
            report |= keep_sanitizers(before)

    def replace_failures(failures: list[str], belongs):
        report["failures"] = [name for name in report["failures"] if not belongs(name)] + failures

    # What was started must have left something, or it died.
    started = (folder / "started").read_text().split()
    for part in ("tests", "two_gpus"):
        runs = [folder / f"{name}.xml" for name in started if name.startswith(part)]
        if runs:
            report[part], failures = read_tests(*(run for run in runs if run.exists()))
            failures += [f"{run.stem}: did not run to its end" for run in runs if not run.exists()]
            if part == "two_gpus":
                failures = [f"two_gpus: {name}" for name in failures]
            replace_failures(failures, lambda name, part=part: name.startswith(part))
    if "again" in started:
        _, failures = read_tests(folder / "again.xml")
        report["again"] = [name for name in report["failures"] if name.startswith("tests")]
        report["tests"]["passed"] += len(report["again"]) - len(failures)
        report["tests"]["failed"] = len(failures)
        replace_failures(failures, lambda name: name.startswith("tests"))
    for tool in TOOLS:
        if processes := [name for name in started if name.startswith(tool)]:
            report.pop(OLDER, None)
            report["sanitizer"][tool], failures = read_sanitizer(folder, tool, processes)
            replace_failures(failures, lambda name, tool=tool: name.startswith(tool))
    meta["command"] = (folder / "command").read_text().strip()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    parts = [f"{name} {part}" for name, part in report.items() if name not in ("meta", "failures", "again")]
    print(f"{output}: {', '.join(parts)}", *report["failures"][:20], sep="\n")
    return 1 if report["failures"] else 0


def failed_tests(output: Path) -> list[str]:
    """With all their parameters: those of a test that was wrong, which are in its name, may be others now."""
    names = [name.partition("::") for name in json.loads(output.read_text())["failures"] if name.startswith("tests.")]
    return sorted({f"{module.replace('.', '/')}.py::{test.partition('[')[0]}" for module, _, test in names})


if __name__ == "__main__":
    if sys.argv[1] == "--failures":
        print(*failed_tests(Path(sys.argv[2])), sep="\n")
        sys.exit()
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
