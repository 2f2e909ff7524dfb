"""Which sources a section of the results depends on, and their hash."""

import ast
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

from fingerprint import fingerprint, source_files  # noqa: E402

__all__ = ["ROOT", "depended_on", "fingerprint", "hash_of"]

CPU = "csrc/cpu/"  # on which no result of a GPU depends


def hash_of(roots: Iterable[str], root: Path = ROOT) -> str:
    return fingerprint(depended_on(roots, root), root)


def depended_on(roots: Iterable[str], root: Path = ROOT) -> list[str]:
    """The files and folders `roots`, and what they include and import, directly and indirectly.

    `__init__` of a package is not followed, or everything would depend on everything. What a header of C++ declares is
    defined by the file of its name, or anywhere in the folder of its kernel.
    """
    found, waiting = set(), source_files(roots, root)
    while waiting:
        name = waiting.pop()
        if name not in found and not name.startswith(CPU):
            found.add(name)
            text = (root / name).read_text(encoding="utf-8")
            wanted = imported(name, text) if name.endswith(".py") else included(name, text)
            waiting += [file for file in wanted if (root / file).is_file()]
            if name.endswith(".h"):
                waiting += defining(name, root)
    return sorted(found)


@cache
def imported(name: str, text: str) -> list[str]:
    """The files that may be meant: `from a.b import c` is of a/b.py or a/b/c.py."""
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            above = name.split("/")[: -node.level] if node.level else []
            module = "/".join([*above, *(node.module or "").split(".")]).rstrip("/")
            modules += [module, *(f"{module}/{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules += [alias.name.replace(".", "/") for alias in node.names]
    return [f"{module}.py" for module in modules]


@cache
def included(name: str, text: str) -> list[str]:
    """Beside the file, or below csrc/."""
    headers = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    return [f"{folder}/{header}" for header in headers for folder in (Path(name).parent.as_posix(), "csrc")]


def defining(header: str, root: Path) -> list[str]:
    folder, stem = Path(header).parent, Path(header).stem
    names = ("*.cu",) if folder.parent.name == "kernels" else (f"{stem}.cu", f"{stem}.cpp")
    return [path.relative_to(root).as_posix() for name in names for path in (root / folder).glob(name)]
