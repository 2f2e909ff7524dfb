"""Who imports whom in the package: no circles, nothing late but what is optional, folders that build on each other.

Run as a program, this file lists the imports of each module.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import llmkernels

PACKAGE = "llmkernels"
ROOT = Path(llmkernels.__file__).parent.parent  # the source tree, or where the wheel is installed
# What the package runs without. `_C` is one of its own that a build for another Python lacks.
OPTIONAL = {"accelerate", "gguf", "matplotlib", "peft", "transformers", f"{PACKAGE}._C"}
# `python -m llmkernels` says what is missing: its modules start without these, too.
OPTIONAL_OF_COMMANDS = {"rich", "torch"}
# Modules of the package that one of them imports late, as all that is in them needs these.
LATE = {(f"{PACKAGE}._demo", f"{PACKAGE}._side_by_side")}
# Of hf/: each may import from itself, those below it, and LEAVES. Modules that are in no folder are above all.
FOLDERS = ["callers", "step", "cache", "model", "modules", "classes"]
LEAVES = {f"{PACKAGE}.hf.{name}" for name in ("_private", "attention", "attention_paged", "errors", "report")}
LONGEST = 400


@dataclass(frozen=True)
class Import:
    name: str  # a module of the package, or the name that another package is imported by
    line: int
    is_late: bool  # inside of a function


@cache
def modules() -> dict[str, Path]:
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """All but those that only type checkers see."""
    return tuple(dict.fromkeys(_imports(ast.parse(modules()[module].read_text()), module, False)))


def _imports(node: ast.AST, module: str, is_late: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        children = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = _names_from(node, module)
    else:
        names = []
    yield from (Import(name, node.lineno, is_late) for name in names)
    is_late |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in children:
        yield from _imports(child, module, is_late)


def _names_from(node: ast.ImportFrom, module: str) -> list[str]:
    """`from a import b` imports a.b where that is a module, else a."""
    parts = module.split(".")
    if modules()[module].name != "__init__.py":
        parts = parts[:-1]
    above = parts[: len(parts) - node.level + 1] if node.level else []
    source = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{source}.{alias.name}" if _is_ours(f"{source}.{alias.name}") else source for alias in node.names]


def _is_ours(name: str) -> bool:
    return name in modules() or name in OPTIONAL


def ours(module: str) -> list[str]:
    """The modules of the package that a module imports."""
    return sorted({found.name for found in imports_of(module) if found.name in modules()})


@cache
def needs(module: str, optional: frozenset[str]) -> bool:
    """Whether importing a module imports something optional. Of the package itself and its modules."""
    if module not in modules():
        return module in optional or module.split(".")[0] in optional
    return any(needs(found.name, optional) for found in imports_of(module) if not found.is_late)


def _top(found: Import) -> set[str]:
    """The package of another name, which is optional as a whole; empty for one of ours."""
    package = found.name.split(".")[0]
    return {package} - {PACKAGE}


def test_no_circles():
    done = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, "a circle: " + " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in ours(module):
                visit(name, [*path, module])
            done.add(module)

    for module in modules():
        visit(module, [])


@pytest.mark.parametrize("module", modules())
def test_only_what_is_optional_is_imported_late(module):
    is_command = module.count(".") == 1 and modules()[module].name != "__init__.py"
    optional = frozenset(OPTIONAL | (OPTIONAL_OF_COMMANDS if is_command else set()))
    allowed = optional | {late for importer, late in LATE if importer == module}
    late = [found for found in imports_of(module) if found.is_late and allowed.isdisjoint({found.name, *_top(found)})]
    assert not late, f"{module}: {', '.join(f'{found.name} in line {found.line}' for found in late)}"


def test_what_needs_transformers_is_an_attribute_that_imports_it():
    """The rest of the package is imported without it, and nothing else is imported by a name in a string."""
    transformers = frozenset({"transformers"})
    assert not needs(PACKAGE, transformers)
    assert all(needs(f"{PACKAGE}.{name}", transformers) for name in llmkernels._OF_TRANSFORMERS.values())
    by_name = {name for name, path in modules().items() if "import_module(" in path.read_text()}
    assert by_name == {PACKAGE, f"{PACKAGE}._info"}  # the latter imports _C


def test_folders_build_on_each_other():
    def place(module: str) -> int:
        folder = module.removeprefix(f"{PACKAGE}.hf.").split(".")[0]
        return FOLDERS.index(folder) if folder in FOLDERS else -1

    found = {path.parent.name for path in (ROOT / PACKAGE / "hf").glob("*/__init__.py")}
    assert found == {*FOLDERS}
    for module in modules():
        if module.startswith(f"{PACKAGE}.hf."):
            up = [name for name in ours(module) if name.startswith(f"{PACKAGE}.hf") and place(name) < place(module)]
            assert {*up} <= LEAVES, f"{module} imports {up}"
    assert not any(name.startswith(f"{PACKAGE}.hf") for leaf in LEAVES for name in {*ours(leaf)} - LEAVES)


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()}
    assert not {path: lines for path, lines in lengths.items() if "/hf/" in path and lines > LONGEST}


def test_the_reader_of_imports():
    """What the checks above rest on."""
    hf = f"{PACKAGE}.hf"
    assert {f"{hf}.modules.layers", f"{hf}.classes.layout"} <= {*ours(f"{hf}.patch")} | {*ours(f"{hf}.obstacles")}
    assert f"{hf}.modules.lora" in ours(f"{hf}.modules.layers")  # from . import lora
    late = {found.name for found in imports_of(f"{PACKAGE}._demo") if found.is_late}
    assert late == {"transformers", f"{PACKAGE}._side_by_side"}
    assert f"{PACKAGE}._trial" in ours(f"{PACKAGE}._info") and hf not in ours(PACKAGE)  # which type checkers see
    assert needs(f"{hf}.cache.kv_cache", frozenset(OPTIONAL)) and not needs(f"{hf}.cache.buffers", frozenset(OPTIONAL))


if __name__ == "__main__":
    for name in modules():
        print(name, *ours(name), sep="\n    ")
