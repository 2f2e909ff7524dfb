#!/usr/bin/env python3
"""One hash over the sources that decide what is computed and how fast: csrc/, llmkernels/ and setup.py.

    python3 scripts/fingerprint.py                  prints it
    python3 scripts/fingerprint.py results/*.json   says which results were measured on these sources; 1 if not all

Results name it, so that one can tell whether they still hold; the library carries the hash of its own part. It needs
no git: it takes every file with a source suffix, which are the tracked ones (tests/test_package.py checks that).
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("csrc", "llmkernels", "setup.py")
LIBRARY_SOURCES = ("csrc", "setup.py")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".py", ".typed"}


def source_files(parts=SOURCES, root: Path = ROOT) -> list[str]:
    """The paths, relative to `root` and sorted."""
    files = []
    for part in parts:
        path = root / part
        files += [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in SUFFIXES]
    return sorted(file.relative_to(root).as_posix() for file in files)


def fingerprint(parts=SOURCES, root: Path = ROOT) -> str:
    digest = hashlib.sha256()
    for name in source_files(parts, root):
        digest.update(f"{name}\0{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def is_of(results: Path, root: Path = ROOT) -> bool:
    """Whether a results file was measured on these sources."""
    return json.loads(results.read_text())["meta"]["sources"] == fingerprint(root=root)


if __name__ == "__main__":
    others = [name for name in sys.argv[1:] if not is_of(Path(name))]
    for name in sys.argv[1:]:
        print(f"{name}: {'OTHER SOURCES' if name in others else 'these sources'}")
    if not sys.argv[1:]:
        print(fingerprint())
    sys.exit(bool(others))
