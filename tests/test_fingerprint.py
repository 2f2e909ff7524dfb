"""scripts/fingerprint.py: which sources a result depends on, and which changes of them count."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "fingerprint.py"
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the source tree")

tools = runpy.run_path(str(SCRIPT)) if SCRIPT.exists() else {}
OPS = {
    name: [f"benchmarks/ops/{file}.py"]
    for name, file in {
        "rms_norm": "rms_norm", "rope": "rope", "glu": "swiglu", "linear": "linear", "attention": "decode_attention",
        "sample": "sample",
    }.items()
}  # fmt: skip
DECODE = {"decode": ["llmkernels/hf/patch.py"]}  # what the sections of whole models reach


# ---- what counts as a change


def cpp(text: str) -> tuple[str, ...]:
    return tools["cpp_tokens"](text)


def python(text: str) -> str:
    import ast

    return tools["digest"](tools["python_tokens"](ast.parse(text)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a = 1;  // why", "int a=1;"),
        ("int /* a\n comment */ a;", "int a;"),
        ("// a comment \\\n that goes on\nint a;", "int a;"),
        ("f(a,\n  b);", "f(a, b);"),
        ('say("one " "two");', 'say("one two");'),
        ("#define A(x) \\\n  (x)\nint b;", "#define A(x) (x)\n\nint b;"),
        ("#define A  (x)", "#define A (x)"),
        ("  #  include <cuda.h>  // for tma\n", "#include <cuda.h>\n"),
        ('R"(a // b)" // c', 'R"(a // b)"'),
        ("a\r\nb", "a\nb"),
        ("1'000'000 + '\\''", "1'000'000+'\\''"),
    ],
)
def test_formatting_of_cpp_does_not_count(one, other):
    assert cpp(one) == cpp(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a + +b", "a ++b"),
        ("int a;", "inta;"),
        ('"a  b"', '"a b"'),
        ('"// a"', '"// b"'),
        ("'\"' + a // \"", "'\"' + b // \""),
        ("#define A(x) x", "#define A (x) x"),
        ("#if A\nb\n#endif", "#if A b\n#endif"),
        ("#include <a/b>", "#include <a /b>"),
        ('R"(a\\\nb)"', 'R"(ab)"'),
        ('R"x(a)" )x"', 'R"x(a)" ]x"'),
        ('"\\x1" "2"', '"\\x12"'),
        ("1'000", "1'001"),
        ("a <<= b", "a < <= b"),
    ],
)
def test_other_tokens_of_cpp_count(one, other):
    assert cpp(one) != cpp(other)


def test_formatting_of_python_does_not_count():
    one = '"""Doc."""\n# why\ndef f(a, b=1):\n    """Doc."""\n    return g(\n        a,\n        b,\n    )  # that\n'
    other = "def f(a,b = 1): return (g(a, b))"
    assert python(one) == python(other)
    assert python("class A:\n    'doc'\n    x = 'y'") == python('class A:\n    x = "y"')
    assert python("x = f'a' 'b'") == python("x = f'ab'")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("f(a, b)", "f((a, b))"),
        ("if a:\n    b\nc", "if a:\n    b\n    c"),
        ("'text'.f()", "'other'.f()"),
        ("def f(): return None", "def f(): return"),
        ("a and (b or c)", "a and b or c"),
        ("{**a, 'b': 1}", "{'b': 1, **a}"),
        ("x = 'text'", "x = 'other'"),
        ("x = f'{a}'", "x = f'{a!r}'"),
    ],
)
def test_other_tokens_of_python_count(one, other):
    assert python(one) != python(other)


# ---- what reaches what: on a copy of the sources, with one change


@pytest.fixture
def copy(tmp_path) -> Path:
    for folder in ("csrc", "llmkernels", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path


def components(root: Path, sections: dict) -> dict[str, str]:
    tree = tools["Tree"](root)
    return {name: tree.component(roots) for name, roots in sections.items()}


@cache
def unchanged() -> dict[str, str]:
    return components(ROOT, OPS | DECODE)


def change(path: Path, text: str):
    """One more token, or what is none."""
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("csrc/kernels/rope/rope.cu", {"rope", "decode"}),
        ("csrc/kernels/launch.h", {*OPS, "decode"}),
        ("csrc/kernels/launch.cu", {*OPS, "decode"}),
        ("csrc/torch/binding.h", {*OPS, "decode"}),
        # Whoever works on the norms says so; attention has those of heads.
        ("csrc/device/reduce.cuh", {"rms_norm", "linear", "sample", "attention", "decode"}),
        ("csrc/kernels/activation/glu.cu", {"glu", "linear", "decode"}),  # the binding of linears has one with SwiGLU
        ("csrc/kernels/norm/backward.cuh", {"rms_norm", "linear", "decode"}),  # a linear behind a norm
        ("csrc/kernels/linear/linear.cu", {"linear", "decode"}),
        ("csrc/kernels/attention/decode_attention_bf16.cu", {"attention", "decode"}),
        ("csrc/kernels/graph.cu", {"decode"}),
        ("csrc/cpu/rope.cpp", set()),
        ("csrc/module.cpp", set()),
        ("llmkernels/ops/rope.py", {"rope", "decode"}),
        ("llmkernels/ops/_common.py", {*OPS, "decode"}),
        ("llmkernels/hf/patch.py", {"decode"}),
        ("llmkernels/__init__.py", set()),
        ("llmkernels/ops/__init__.py", set()),
        ("llmkernels/_info.py", set()),
        ("benchmarks/ops/rope.py", {"rope"}),
        ("benchmarks/plots.py", set()),
    ],
)
def test_a_change_reaches_what_depends_on_it(copy, file, stale):
    sections, before = OPS | DECODE, unchanged()
    change(copy / file, "\n# why\n" if file.endswith(".py") else "\n// why\n")
    assert components(copy, sections) == before
    change(copy / file, "more = 1\n" if file.endswith(".py") else "int more();\n")
    after = components(copy, sections)
    assert {name for name in sections if after[name] != before[name]} == stale


def test_flags_reach_everything_and_the_rest_of_setup_nothing(copy):
    setup = copy / "setup.py"
    text = setup.read_text()
    setup.write_text(text + "\n\ndef more():\n    return 1\n")
    assert components(copy, OPS).items() <= unchanged().items()
    assert "-O3" in text
    setup.write_text(text.replace("-O3", "-O1"))
    assert not components(copy, OPS).items() & unchanged().items()


def test_a_schema_reaches_its_op_alone(copy):
    schemas = copy / "csrc" / "torch" / "ops.cpp"
    text, start = schemas.read_text(), '"rope_kv_write('
    assert start in text
    schemas.write_text(text.replace(start, start + "Tensor more, "))
    after = components(copy, OPS)
    assert {name for name in OPS if after[name] != unchanged()[name]} == {"attention"}


def test_every_op_has_an_implementation_and_all_kernels_are_reached():
    tree = tools["Tree"](ROOT)
    assert tree.schemas and tree.schemas.keys() == tree.bindings.keys()
    assert all(len(files) == 1 for files in tree.bindings.values())
    reached = set(tree.reached([path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").rglob("*.py")]))
    parts = ("csrc/kernels", "csrc/device", "csrc/params", "csrc/torch")
    missing = {name for name in tools["source_files"](parts) if name not in reached}
    assert missing == {"csrc/torch/ops.cpp"}  # its schemas are parts of their own


def test_a_source_of_the_cpu_counts_for_a_result_of_the_cpu(copy):
    def result():
        return tools["Tree"](copy).component(OPS["rope"], gpu=False)

    before = result()
    change(copy / "csrc" / "cpu" / "rope.cpp", "int more();\n")
    assert result() != before


def test_a_definition_in_another_file_is_found(tmp_path):
    """By the header that both include; a function of the same name elsewhere is another one."""
    files = {
        "csrc/a.h": "namespace n {\nint f(int a = {});\n}\nstruct S { int g(); };",
        "csrc/user.cpp": '#include "a.h"\nint use() { return f(1); }',
        "csrc/defines.cu": '#include "a.h"\nnamespace n {\nint f(int a) { return a; }\n}',
        "csrc/instance.cu": '#include "a.h"\ntemplate int f<int>(int);\nnamespace n { template int f<int>(int); }',
        "csrc/unnamed.cu": '#include "a.h"\nnamespace { int f(int a) { return a; } }',
        "csrc/inner.cu": '#include "a.h"\nnamespace n::m { int f(int a) { return a; } }',
        "csrc/a.cu": "int S::g() { return 0; }",
        "csrc/other.cu": "int f(int a) { return a; }",
        "csrc/mentions.cu": '#include "a.h"\nint h() { return f(2); }',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = ["csrc/a.cu", "csrc/a.h", "csrc/defines.cu", "csrc/instance.cu", "csrc/user.cpp"]
    assert tools["Tree"](tmp_path).reached(["csrc/user.cpp"]) == expected


# ---- the whole


def test_the_whole_is_of_tokens_and_names(tmp_path):
    hashes = set()

    def distinct() -> bool:
        known = len(hashes)
        hashes.add(tools["fingerprint"](root=tmp_path))
        return len(hashes) > known

    (tmp_path / "csrc").mkdir()
    (tmp_path / "llmkernels").mkdir()
    (tmp_path / "setup.py").write_text("1")
    assert distinct()
    (tmp_path / "csrc" / "a.cu").write_text("1")
    assert distinct()
    (tmp_path / "csrc" / "a.cu").rename(tmp_path / "csrc" / "b.cu")
    assert distinct()
    (tmp_path / "csrc" / "b.cu").write_text("1 // one")
    (tmp_path / "setup.py").write_text("# one\n1\n")
    (tmp_path / "llmkernels" / "__pycache__").mkdir()
    (tmp_path / "llmkernels" / "__pycache__" / "a.pyc").write_text("1")
    (tmp_path / "llmkernels" / "libllmkernels.so").write_text("1")
    (tmp_path / "README.md").write_text("1")
    assert not distinct()
    (tmp_path / "csrc" / "b.cu").write_text("2")
    assert distinct()


def test_it_is_quick_and_needs_no_package():
    begun = time.process_time()
    run = subprocess.run([sys.executable, "-S", "-I", str(SCRIPT)], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[0-9a-f]{64}", run.stdout.splitlines()[-1]) and not run.stderr
    assert run.stdout.split() == [tools["fingerprint"]()]
    assert time.process_time() - begun < 5


def git(*arguments) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


@pytest.fixture
def clone() -> Path:
    """A wheel is tested in a folder inside its clone."""
    found = git("rev-parse", "--show-toplevel")
    if not found or not (Path(found) / "setup.py").exists():
        pytest.skip("needs a git clone")
    return Path(found)


def test_it_takes_the_tracked_files(clone):
    patterns = [f":(top){part}" for part in tools["SOURCES"]]
    listed = git("ls-files", "--full-name", "--cached", "--others", "--exclude-standard", "--", *patterns).splitlines()
    found = tools["source_files"](root=clone)
    assert found == sorted(name for name in listed if (clone / name).exists())


# ---- results


def test_it_says_which_sections_are_stale(copy, capsys):
    tree = tools["Tree"](copy)
    sections = {name: {"roots": roots, "sources": tree.component(roots), "gpu": "a GPU"} for name, roots in OPS.items()}
    results = copy / "ops.json"
    results.write_text(json.dumps({"meta": {"sources": "of another tree", "sections": sections}, "rows": []}))
    assert tools["is_of"](results, copy)
    change(copy / "csrc" / "kernels" / "rope" / "rope.cu", "int more();\n")
    stale = tools["stale_sections"](results, tools["Tree"](copy))
    assert {name for name, is_stale in stale.items() if is_stale} == {"rope"}
    assert not tools["is_of"](results, copy)


def test_its_exit_status_and_words(tmp_path):
    def run(meta):
        (tmp_path / "r.json").write_text(json.dumps({"meta": meta}))
        done = subprocess.run([sys.executable, str(SCRIPT), "r.json"], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout.strip()

    whole = tools["fingerprint"]()
    assert run({"sources": whole}) == (0, "r.json: these sources")
    assert run({"sources": "0"}) == (1, "r.json: OTHER SOURCES")
    roots = OPS["rope"]
    good = {"roots": roots, "sources": tools["Tree"](ROOT).component(roots), "gpu": "a GPU"}
    assert run({"sources": "0", "sections": {"rope": good}}) == (0, "r.json: these sources: rope")
    without_roots = {"rope": {"sources": "0"}}
    assert run({"sources": whole, "sections": without_roots}) == (1, "r.json: OTHER SOURCES: rope")
    two = {"rope": good, "sample": {**good, "sources": "0"}}
    assert run({"sources": whole, "sections": two}) == (1, "r.json: OTHER SOURCES: sample; these sources: rope")
