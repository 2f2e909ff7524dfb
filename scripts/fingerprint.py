#!/usr/bin/env python3
"""A hash of the sources, so that a library and a result can say what they are of.

    python3 scripts/fingerprint.py    prints that of csrc/, llmkernels/ and setup.py

Empty lines and whole lines of comment do not count. None of this needs git or a package; the files are all that have a
source suffix, which are the tracked ones (tests/test_fingerprint.py checks that). benchmarks/sources.py says which of
them a section of the results depends on.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("csrc", "llmkernels", "setup.py")
LIBRARY_SOURCES = ("csrc", "setup.py")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".json", ".py", ".typed"}


def source_files(parts: Iterable[str] = SOURCES, root: Path = ROOT) -> list[str]:
    """The paths of files and of those in folders, relative to `root` and sorted."""
    files = set()
    for part in parts:
        path = root / part
        files |= {path} if path.is_file() else {file for file in path.rglob("*") if file.suffix in SUFFIXES}
    return sorted(file.relative_to(root).as_posix() for file in files)


def fingerprint(parts: Iterable[str] = SOURCES, root: Path = ROOT) -> str:
    named = (f"{name}\0{code((root / name).read_text(encoding='utf-8'))}\0" for name in source_files(parts, root))
    return hashlib.sha256("".join(named).encode()).hexdigest()


def code(text: str) -> str:
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith(("//", "# ")))


if __name__ == "__main__":
    print(fingerprint())
