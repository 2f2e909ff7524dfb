#!/usr/bin/env python3
"""Hashes of the sources that decide what is computed and how fast, so that a result can say what it was measured on.

    python3 scripts/fingerprint.py                  prints the hash of the whole: csrc/, llmkernels/ and setup.py
    python3 scripts/fingerprint.py results/*.json   says which results were measured on other sources; 1 if any

A hash is over tokens: comments, formatting and docstrings do not count. A results file is measured by section
(`meta.sections`), and a section names the files that measure it, its `roots`. Its component is what these reach:

- in Python, the modules that they import, through the re-exports of a package but not for them;
- the ops that these modules call: their schema in ops.cpp and the file in csrc/torch that implements them; and the
  files of the C functions that they call;
- in C++, the headers that a file includes, and the files that define the functions it uses of those headers;
- in setup.py, `add_library` and what it names: the flags.

A result of a GPU does not depend on csrc/cpu. Results without sections are of the whole. The library carries the hash
of its own part. None of this needs git or a package; the files are all that have a source suffix, which are the tracked
ones (tests/test_fingerprint.py checks that).
"""

import ast
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("csrc", "llmkernels", "setup.py")
LIBRARY_SOURCES = ("csrc", "setup.py")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".py", ".typed"}
PACKAGES = ("llmkernels", "benchmarks")
SCHEMAS = "csrc/torch/ops.cpp"
BUILD, BUILD_ROOT = "setup.py", "add_library"
CPU = "csrc/cpu/"
EXPORTED = "llmk_"  # the names of C functions of the library


def source_files(parts=SOURCES, root: Path = ROOT) -> list[str]:
    """The paths, relative to `root` and sorted."""
    files = []
    for part in parts:
        path = root / part
        files += [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in SUFFIXES]
    return sorted(file.relative_to(root).as_posix() for file in files)


def fingerprint(parts=SOURCES, root: Path = ROOT) -> str:
    """The hash over whole folders and files."""
    tree = Tree(root)
    return digest(f"{name}\0{digest(tree.tokens(name))}" for name in source_files(parts, root))


def digest(tokens: Iterable[str]) -> str:
    return hashlib.sha256("\x1f".join(tokens).encode()).hexdigest()


# ---- tokens of C++ and CUDA

CPP = re.compile(
    r"""(?P<space> //[^\n]* | /\*.*?\*/ | [\ \t\f\v\0]+ )
    | (?P<string> (?:u8|[uUL])? (?: R"(?P<end>[^\ ()\\\t\v\f\n]{0,16})\(.*?\)(?P=end)" | "(?:\\.|[^"\\\n])*" ) )
    | (?P<number> \.?\d (?: [eEpP][+-] | '\w | [\w.\0] )* )
    | (?P<char> (?:u8|[uUL])? '(?:\\.|[^'\\\n])+' )
    | (?P<word> [A-Za-z_][\w\0]* )
    | (?P<newline> \n )
    | (?P<mark> <<= | >>= | <=> | ->\* | \.\.\. | :: | \+\+ | -- | && | \|\| | << | >> | -> | \#\#
                | [-+*/%&|^!=<>]= | . )""",
    re.VERBOSE | re.DOTALL,
)
HEADER = re.compile(r"[ \t]*(<[^>\n]*>)")
ENDS_IN_ESCAPE = re.compile(r'\\(x[0-9a-fA-F]+|[0-7]{1,2})"$')
DIRECTIVE, LINE_END, WITH_ARGUMENTS = "\n#", "\n", "\v"  # tokens for what only a preprocessor's line has


@cache
def cpp_tokens(text: str) -> tuple[str, ...]:
    """A directive begins with DIRECTIVE and ends with LINE_END, since there, and only there, the line's end counts.

    A continued line is one line. String literals side by side are one literal, since formatters split them.
    """
    text = text.replace("\r\n", "\n").replace("\\\n", "\0")
    tokens: list[str] = []
    position, directive, new_line = 0, False, True
    while position < len(text):
        found = CPP.match(text, position)
        kind, token, position = found.lastgroup, found.group(), found.end()
        if kind == "newline":
            if directive:
                tokens.append(LINE_END)
            directive, new_line = False, True
        elif kind == "mark" and token == "#" and new_line:
            tokens.append(DIRECTIVE)
            directive, new_line = True, False
        elif kind != "space":
            new_line = False
            raw = kind == "string" and "R" in token[: token.index('"')]
            token = token if raw else token.replace("\0", "")
            before = tokens[-1] if tokens else ""
            if kind == "string" and token[0] == '"' == before[:1] and not ENDS_IN_ESCAPE.search(before):
                tokens[-1] = before[:-1] + token[1:]
                continue
            tokens.append(token)
            if tokens[-2:] == [DIRECTIVE, "include"] and (header := HEADER.match(text, position)):
                tokens.append(header[1])
                position = header.end()
            elif tokens[-3:-1] == [DIRECTIVE, "define"] and text[position : position + 1] == "(":
                tokens.append(WITH_ARGUMENTS)  # F(x), which is not F (x)
    return (*tokens, LINE_END) if directive else tuple(tokens)


class Cpp:
    """What a C++ file says about its dependencies."""

    def __init__(self, tokens: tuple[str, ...]):
        self.includes = [
            tokens[i + 2][1:-1]
            for i, token in enumerate(tokens[:-2])
            if token == DIRECTIVE and tokens[i + 1] == "include"
        ]
        self.declared: Counter[str] = Counter()  # with the namespace in front
        self.defined: set[str] = set()
        self._read(tokens)
        words = Counter(token for token in tokens if token[0].isalpha() or token[0] == "_")
        words.subtract(unqualified(name) for name in self.declared.elements())
        self.used = {word for word, count in words.items() if count > 0}

    def _read(self, tokens: tuple[str, ...]):
        """Functions at namespace scope. An explicit instantiation is a definition."""
        namespaces: list[str] = []
        statement: list[str] = []
        names: list[str] = []
        parentheses = braces = 0
        directive = False
        for token in tokens:
            if directive or token == DIRECTIVE:
                directive = token != LINE_END
            elif braces:
                braces += (token == "{") - (token == "}")
            elif token == ")":
                parentheses -= 1
            elif token == "(":
                if parentheses == 0 and "=" not in statement and (name := called(statement)):
                    names.append("".join((*namespaces, name)))
                parentheses += 1
            elif parentheses == 0 and token in ("{", "}", ";"):
                if token == "{" and "namespace" in statement:
                    namespaces.append("".join(statement[statement.index("namespace") + 1 :] or ["(unnamed)"]) + "::")
                elif token == "{" and statement[:1] == ["extern"] and len(statement) == 2:
                    namespaces.append("")
                elif token == "{":
                    self.defined.update(names)
                    braces = 1
                elif token == "}":
                    del namespaces[-1:]
                elif token == ";" and statement[:1] == ["template"] and statement[1:2] != ["<"]:
                    self.defined.update(names)
                elif token == ";":
                    self.declared.update(names)
                statement, names = [], []
            elif parentheses == 0:
                statement.append(token)


def called(statement: list[str]) -> str | None:
    """The name in front of an opening parenthesis: f of `f(` and of `f<int>(`."""
    place, depth = len(statement) - 1, 0
    while place >= 0 and (depth or statement[place] == ">"):
        depth += (statement[place] == ">") - (statement[place] == "<")
        place -= 1
    return statement[place] if place >= 0 and re.match(r"[A-Za-z_]", statement[place]) else None


def unqualified(name: str) -> str:
    return name.rpartition("::")[2]


cpp_file = cache(Cpp)


# ---- tokens of Python


@cache
def parse(text: bytes) -> ast.Module | None:
    """None for what this version of Python cannot read, whose tokens are then its text."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


@cache
def python_file(text: bytes) -> tuple[str, ...]:
    syntax = parse(text)
    return tuple(python_tokens(syntax)) if syntax else (text.decode(),)


def python_tokens(node: ast.AST) -> Iterator[str]:
    """The syntax tree, written the same by every version of Python: fields that are empty may not exist in another."""
    yield type(node).__name__
    for field, value in ast.iter_fields(node):
        if isinstance(node, ast.Constant):
            if field == "value":
                yield repr(value)
        elif isinstance(value, list):
            if field == "body" and has_docstring(node):
                value = value[1:]
            if isinstance(node, ast.JoinedStr):  # some versions end a format with an empty string
                value = [item for item in value if getattr(item, "value", None) != ""]
            if value:
                yield f"{field}["
                for item in value:
                    yield from python_tokens(item) if isinstance(item, ast.AST) else (repr(item),)
                yield "]"
        elif isinstance(value, ast.AST):
            yield f"{field}="
            yield from python_tokens(value)
        elif value is not None:
            yield f"{field}={value!r}"
    yield ";"


def has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


# ---- what depends on what


class Tree:
    """The sources below one folder: tokens of each file, and the files that each file needs."""

    def __init__(self, root: Path):
        self.root = root
        # Caches of this tree, and not of the class, or a tree would live for ever.
        self.tokens, self.headers, self.needs = cache(self._tokens), cache(self._headers), cache(self._needs)

    def component(self, roots: Iterable[str], gpu: bool = True) -> str:
        """The hash over everything that the files `roots` need, themselves included."""
        return digest(f"{name}\0{digest(self.tokens(name))}" for name in self.reached(roots, gpu))

    def reached(self, roots: Iterable[str], gpu: bool = True) -> list[str]:
        """The parts of a component: files, `setup.py:add_library`, and an op's schema as `csrc/torch/ops.cpp:rope`."""
        found, waiting = set(), list(roots)
        while waiting:
            name = waiting.pop()
            if name not in found and not (gpu and name.startswith(CPU)):
                found.add(name)
                waiting += self.needs(name)
        return sorted(found)

    def _tokens(self, name: str) -> tuple[str, ...]:
        path, _, part = name.partition(":")
        if path == BUILD and part:
            return tuple(token for node in self._definitions(part) for token in python_tokens(node))
        if part:
            return tuple(self.schemas.get(part, ()))
        if not (self.root / path).exists():
            return ("missing",)
        if path.endswith(".py"):
            return python_file((self.root / path).read_bytes())
        text = (self.root / path).read_text()
        return cpp_tokens(text) if Path(path).suffix in (".cpp", ".cu", ".cuh", ".h") else (text,)

    def _needs(self, name: str) -> list[str]:
        path, _, part = name.partition(":")
        if part or not (self.root / path).exists():
            return []
        if path.endswith(".py"):
            compiled = [*self._implementations(self._ops(path)), *self._exporting(path)]
            return [*self._imports(path), *compiled, *([f"{BUILD}:{BUILD_ROOT}"] if compiled else [])]
        return self._cpp_needs(path)

    # C++

    def cpp(self, name: str) -> Cpp:
        return cpp_file(self.tokens(name))

    @cached_property
    def cpp_files(self) -> dict[str, None]:
        return dict.fromkeys(source_files(("csrc",), self.root))

    def _included(self, name: str) -> list[str]:
        """Those that are ours: beside the file, or below csrc/."""
        found = []
        for include in self.cpp(name).includes:
            for path in ((Path(name).parent / include).as_posix(), f"csrc/{include}"):
                if path in self.cpp_files:
                    found.append(path)
                    break
        return found

    def _headers(self, name: str) -> frozenset[str]:
        """Everything that a file includes, directly and indirectly."""
        found, waiting = set(), self._included(name)
        while waiting:
            header = waiting.pop()
            if header not in found:
                found.add(header)
                waiting += self._included(header)
        return frozenset(found)

    @cached_property
    def definers(self) -> dict[str, list[str]]:
        """The files that are compiled and define a function, by its name with the namespace."""
        found: dict[str, list[str]] = {}
        for name in self.cpp_files:
            if Path(name).suffix in (".cpp", ".cu"):
                for function in self.cpp(name).defined:
                    found.setdefault(function, []).append(name)
        return found

    def _cpp_needs(self, name: str) -> list[str]:
        needed = list(self._included(name))
        for header in {name, *self.headers(name)}:
            for function in self.cpp(header).declared:
                if unqualified(function) in self.cpp(name).used:
                    needed += [file for file in self.definers.get(function, ()) if header in self.headers(file)]
        # What a header declares inside a class is defined in the file of the same name.
        twins = (str(Path(name).with_suffix(suffix)) for suffix in (".cu", ".cpp"))
        return needed + [path for path in twins if path in self.cpp_files]

    # ops

    @cached_property
    def schemas(self) -> dict[str, list[str]]:
        """The statement that defines each op, from ops.cpp."""
        found, statement = {}, []
        for token in self.tokens(SCHEMAS) if SCHEMAS in self.cpp_files else ():
            statement.append(token)
            if token in (";", "{"):
                for literal in statement:
                    if name := re.match(r'"(\w+)[("]', literal):
                        found.setdefault(name[1], statement)
                        break
                statement = []
        return found

    @cached_property
    def bindings(self) -> dict[str, list[str]]:
        """The files that implement each op: those that name it in front of TORCH_BOX."""
        found: dict[str, list[str]] = {}
        for file in self.cpp_files:
            tokens = self.tokens(file)
            for place, token in enumerate(tokens):
                if token == "TORCH_BOX" and (name := re.fullmatch(r'"(\w+)"', tokens[place - 2])):
                    found.setdefault(name[1], []).append(file)
        return found

    def _implementations(self, ops: Iterable[str]) -> list[str]:
        return [part for op in ops for part in (f"{SCHEMAS}:{op}", *self.bindings.get(op, ()))]

    def _exporting(self, name: str) -> list[str]:
        """The files that define the C functions that a Python file calls through ctypes."""
        names = {
            node.attr for node in ast.walk(self.syntax(name) or ast.Module([], [])) if isinstance(node, ast.Attribute)
        }
        return [
            file
            for function in sorted(names)
            if function.startswith(EXPORTED)
            for file in self.definers.get(function, ())
        ]

    def _ops(self, name: str) -> list[str]:
        """The ops that a Python file calls: by torch.ops.llmkernels, in the package also names given to calls..

        A call that registers a fake is none: the fakes of ops may be together in one file.
        """
        syntax = self.syntax(name)
        nodes = list(ast.walk(syntax)) if syntax else []
        aliases = {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign) and getattr(node.value, "attr", None) == "llmkernels"
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found, in_package = set(), name.startswith("llmkernels/")
        for node in nodes:
            if isinstance(node, ast.Attribute):
                base = node.value
                if getattr(base, "id", None) in aliases or getattr(base, "attr", None) == "llmkernels":
                    found.add(node.attr)
            elif isinstance(node, ast.Call) and in_package and "fake" not in getattr(node.func, "id", ""):
                found |= {given.value for given in node.args if isinstance(given, ast.Constant)}
        return sorted(found & self.schemas.keys())

    # Python

    def syntax(self, name: str) -> ast.Module | None:
        return parse((self.root / name).read_bytes())

    def _file(self, module: str) -> str | None:
        """The file of a module, or of a package's __init__."""
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if (self.root / path).exists()), None)

    def _imports(self, name: str) -> list[str]:
        """The files of ours that a file imports, in its functions too."""
        syntax = self.syntax(name)
        found: list[str | None] = []
        modules: dict[str, str] = {}  # by the names that they are bound to
        for node in ast.walk(syntax) if syntax else ():
            if isinstance(node, ast.ImportFrom):
                found += [self._resolve(self._module(node, name), alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    modules[alias.asname or alias.name] = alias.name
                    found += [self._file(alias.name)] if "." in alias.name else []
        for node in ast.walk(syntax) if modules else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found.append(self._resolve(modules[node.value.id], node.attr))
        return [path for path in found if path and path.split("/")[0] in PACKAGES]

    @staticmethod
    def _module(node: ast.ImportFrom, name: str) -> str:
        """The module that `from ... import` names, also when it is relative."""
        above = Path(name).parts[: -node.level] if node.level else ()
        return ".".join([*above, *([node.module] if node.module else [])])

    def _resolve(self, module: str, attribute: str) -> str | None:
        """The file that defines `module.attribute`, through the re-exports of packages."""
        file = self._file(module) if module.split(".")[0] in PACKAGES else None
        if file is None or not file.endswith("__init__.py"):
            return file
        if submodule := self._file(f"{module}.{attribute}"):
            return submodule
        for node in ast.walk(self.syntax(file) or ast.Module([], [])):
            if isinstance(node, ast.ImportFrom):
                # A star brings what the package that it is of has from one of its files.
                names, source = {alias.asname or alias.name for alias in node.names}, self._module(node, file)
                found = self._resolve(source, attribute) if {attribute, "*"} & names else None
                if attribute in names or ("*" in names and found != self._file(source)):
                    return found
        return file

    def _definitions(self, name: str) -> list[ast.AST]:
        """In setup.py, the definition of `name` and of what it names, transitively; everything if there is none."""
        syntax = self.syntax(BUILD) if (self.root / BUILD).exists() else None
        defined: dict[str, ast.AST] = {}
        for node in syntax.body if syntax else ():
            for target in [node, *getattr(node, "targets", ())]:
                if label := getattr(target, "name", None) or getattr(target, "id", None):
                    defined[label] = node
        found, waiting = {}, [name]
        while waiting:
            label = waiting.pop()
            if label in defined and label not in found:
                found[label] = defined[label]
                waiting += [node.id for node in ast.walk(defined[label]) if isinstance(node, ast.Name)]
        return [found[label] for label in sorted(found)] or ([syntax] if syntax else [])


# ---- results


def stale_sections(results: Path, tree: Tree) -> dict[str, bool]:
    """Whether each section of a results file was measured on other sources; its name is "" where there are none."""
    meta = json.loads(results.read_text())["meta"]
    if "sections" not in meta:
        return {"": meta["sources"] != fingerprint(root=tree.root)}
    return {name: is_stale(section, tree) for name, section in meta["sections"].items()}


def is_stale(section: dict, tree: Tree) -> bool:
    if "roots" not in section:  # measured when results were of the whole
        return section["sources"] != fingerprint(root=tree.root)
    return section["sources"] != tree.component(section["roots"], gpu=bool(section["gpu"]))


def is_of(results: Path, root: Path = ROOT) -> bool:
    """Whether all of a results file was measured on these sources."""
    return not any(stale_sections(results, Tree(root)).values())


def main(names: list[str]) -> int:
    if not names:
        print(fingerprint())
    tree, stale = Tree(ROOT), False
    for name in names:
        sections = stale_sections(Path(name), tree)
        others = [section for section, is_other in sections.items() if is_other]
        same = [section for section, is_other in sections.items() if not is_other]
        said = [f"{what}: {', '.join(found)}" if any(found) else what
                for what, found in (("OTHER SOURCES", others), ("these sources", same)) if found]  # fmt: skip
        print(f"{name}: {'; '.join(said)}")
        stale |= bool(others)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
