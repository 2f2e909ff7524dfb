"""Breaks the sources on purpose, one way at a time (scripts/mutations/), and sees whether a test notices.

    python scripts/mutate.py --list                       the mutations, and whether each still fits the sources
    python scripts/mutate.py --apply NAME DIR             a copy of the tree with one mutation in it, to look at
    python scripts/mutate.py --run [NAME ...]             build and test each mutant that this machine can run
    python scripts/mutate.py --build FILE [NAME ...]      where nvcc is: a library per CUDA mutant, into a .tar.xz
    python scripts/mutate.py --run-built FILE [NAME ...]  where the GPU is, and no compiler: test these libraries

Mutants live in copies, never in this tree. Tests must pass on the unchanged sources first. A mutant is caught when a
test fails, crashes or hangs. Options: --work DIR keeps the copy (and what is compiled in it) from one call to the next,
--output FILE takes the outcome as JSON.
"""

import argparse
import json
import lzma
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from fingerprint import LIBRARY_SOURCES, fingerprint
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
TREE = ["csrc", "docs", "llmkernels", "scripts", "tests", "setup.py", "pyproject.toml", "README.md", "MANIFEST.in"]
LIBRARY = Path("llmkernels") / "libllmkernels.so"
BASELINE = "unchanged"
LIMIT_S = 300
# The libraries differ little: to a window of several of them, all are barely more than one.
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]


def copy_tree(target: Path) -> Path:
    """Brings `target` to the state of this tree. What is the same there keeps its time, so that it is not compiled
    again, and what differs gets a new one, so that it is."""
    sources = [ROOT / name for name in TREE]
    files = [file for source in sources for file in (source.rglob("*") if source.is_dir() else [source])]
    names = {file.relative_to(ROOT) for file in files if file.is_file() and file.suffix not in (".so", ".pyc")}
    for name in names:
        path, content = target / name, (ROOT / name).read_bytes()
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for file in target.rglob("*"):
        name = file.relative_to(target)
        if file.is_file() and name.parts[0] in TREE and name not in names and file.suffix != ".so":
            file.unlink()
    return target


def fits(mutation: Mutation) -> bool:
    return (ROOT / mutation.file).read_text().count(mutation.old) == 1


def apply(tree: Path, mutation: Mutation) -> str:
    """Puts the mutation into `tree`; returns what the file was before."""
    path = tree / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        sys.exit(f"mutate.py: {mutation.name} must fit {mutation.file} once: bring it up to date")
    path.write_text(text.replace(mutation.old, mutation.new))
    return text


@contextmanager
def mutated(tree: Path, mutation: Mutation):
    """Inside, the mutation is in `tree`."""
    text = apply(tree, mutation)
    try:
        yield
    finally:
        (tree / mutation.file).write_text(text)


def build(tree: Path, cuda: bool) -> None:
    """Compiles what has changed in `tree`; one architecture is enough for a mutant."""
    environment = {"TORCH_CUDA_ARCH_LIST": "9.0a", **os.environ, "LLMKERNELS_CUDA": str(int(cuda))}
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"mutate.py: a mutant does not compile:\n{(done.stdout + done.stderr)[-3000:]}")


def test(tree: Path, mutation: Mutation) -> tuple[str, str]:
    """(outcome, by which test) of the tests named for the mutation, in a tree that is built."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(mutation.tests)]
    if mutation.tool:
        if not shutil.which("compute-sanitizer"):
            return "not run", "no compute-sanitizer"
        tool = ["--tool", mutation.tool, "--kernel-name", "kns=llmk", "--error-exitcode", "1"]
        command = ["compute-sanitizer", *tool, *command]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "caught", "hung"
    if done.returncode == 0:
        return ("survived", "") if " passed" in done.stdout else ("error", "no test ran")
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if "FAILED " in line]
    if failed or (mutation.tool and " SUMMARY: " in done.stdout):
        return "caught", failed[0] if failed else mutation.tool
    if done.returncode < 0 or done.returncode > 100:
        return "caught", f"crash, exit status {done.returncode}"
    return "error", (done.stdout + done.stderr).strip().splitlines()[-1]


def run(mutations: list[Mutation], tree: Path, cuda: bool) -> list[dict]:
    """Builds and tests every mutant in `tree`."""
    say("building the unchanged sources")
    build(tree, cuda)
    check_baseline(mutations, tree)
    rows = []
    for mutation in mutations:
        start = time.time()
        with mutated(tree, mutation):
            if mutation.compiled:
                build(tree, cuda)
            rows.append(row(mutation, *test(tree, mutation), start))
    return rows


def run_built(mutations: list[Mutation], archive: Path, tree: Path) -> list[dict]:
    """Tests the libraries that `--build` left in `archive`, those of `mutations` that are there."""
    with tempfile.TemporaryDirectory() as folder:
        with lzma.open(archive) as file, tarfile.open(fileobj=file) as tar:
            tar.extractall(folder, filter="data")
        mutations = [m for m in mutations if Path(folder, m.name).exists()]
        shutil.copy2(Path(folder, BASELINE), tree / LIBRARY)
        check_baseline(mutations, tree)
        rows = []
        for mutation in mutations:
            start = time.time()
            shutil.copy2(Path(folder, mutation.name), tree / LIBRARY)
            rows.append(row(mutation, *test(tree, mutation), start))
    return rows


def check_baseline(mutations: list[Mutation], tree: Path) -> None:
    for tests, mutation in {m.tests: m for m in mutations}.items():
        outcome, by = test(tree, mutation)
        if outcome not in ("survived", "not run"):
            sys.exit(f"mutate.py: the unchanged sources must pass {tests}, but: {outcome}, {by}")


def row(mutation: Mutation, outcome: str, by: str, start: float) -> dict:
    say(f"{mutation.name:34} {outcome:9} {by}")
    return {
        "mutation": mutation.name,
        "file": mutation.file,
        "what": mutation.what,
        "outcome": outcome,
        "by": by,
        "seconds": round(time.time() - start, 1),
    }


def build_all(mutations: list[Mutation], archive: Path, tree: Path) -> None:
    say("building the unchanged sources")
    build(tree, cuda=True)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(archive, "wb", filters=COMPRESSION) as file, tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(tree / LIBRARY, BASELINE)
        for mutation in mutations:
            start = time.time()
            with mutated(tree, mutation):
                build(tree, cuda=True)
            tar.add(tree / LIBRARY, mutation.name)
            say(f"{mutation.name:34} built in {time.time() - start:.0f} s")


def report(rows: list[dict], output: Path | None) -> int:
    counts = {
        outcome: sum(r["outcome"] == outcome for r in rows) for outcome in ("caught", "survived", "error", "not run")
    }
    say(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if output:
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        meta = {"gpu": gpu, "torch": torch.__version__, "sources": fingerprint(LIBRARY_SOURCES)}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"meta": meta, "counts": counts, "rows": rows}, indent=1) + "\n")
    return int(counts["survived"] + counts["error"] > 0)


def say(text: str) -> None:
    print(text, flush=True)


def show_list() -> int:
    for mutation in MUTATIONS:
        say(f"{mutation.name:34} {mutation.device:5} {'' if fits(mutation) else 'STALE '}{mutation.what}")
    return int(not all(map(fits, MUTATIONS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true")
    action.add_argument("--apply", nargs=2, metavar=("NAME", "DIR"))
    action.add_argument("--run", nargs="*", metavar="NAME")
    action.add_argument("--build", nargs="+", metavar=("FILE", "NAME"))
    action.add_argument("--run-built", nargs="+", metavar=("FILE", "NAME"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    if arguments.list:
        return show_list()
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    if arguments.apply:
        name, folder = arguments.apply
        apply(copy_tree(Path(folder)), by_name[name])
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        tree = copy_tree((arguments.work or Path(temporary)).resolve())
        if arguments.build or arguments.run_built:
            archive, *names = arguments.build or arguments.run_built
            mutants = [m for m in MUTATIONS if m.device == "cuda" and m.name in (names or by_name)]
            if arguments.run_built:
                return report(run_built(mutants, Path(archive), tree), arguments.output)
            build_all(mutants, Path(archive), tree)
            return 0
        import torch

        cuda = torch.cuda.is_available() and bool(shutil.which("nvcc"))
        names = arguments.run or [m.name for m in MUTATIONS if m.device == "cpu" or cuda]
        return report(run([by_name[name] for name in names], tree, cuda), arguments.output)


if __name__ == "__main__":
    sys.exit(main())
