"""Files of measured choices: the user's cache and the package's. None of their faults raises."""

import json
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import llmkernels
from hf_models import tiny_model
from llmkernels._tune import autotune, files, table
from llmkernels._tune.table import RULE, Choice, Linear, Measured

KB = 1024
IDENTITY = {
    "gpu": "NVIDIA H200",
    "compute_capability": 90,
    "sm_count": 132,
    "driver": "13.0",
    "library": "0123456789abcdef",
}
ENTRIES = (
    Measured(Linear(3584, 3584, residual=True, in_step=True), 1, 1, RULE, 9.125, 9.125),
    Measured(Linear(4608, 3584, norm=True, in_step=True), 3, 4, Choice("mma", 1, 3, 200 * KB, 96, 56), 9.0, 10.0),
    Measured(Linear(4608, 3584, norm=True, in_step=True), 65, 128, Choice("gemm", columns=192), 9, 10),
)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of the cache, which is not there yet."""
    monkeypatch.setenv("LLMKERNELS_CACHE", str(tmp_path / "cache"))
    return files.cache_path(IDENTITY)


def saved(path, identity=IDENTITY, entries=ENTRIES):
    assert files.save(path, identity, entries) is None
    return path


def ignored(path, identity=IDENTITY):
    """Why a file is: the only warning."""
    with pytest.warns(UserWarning) as caught:
        assert files.read(path, identity) == ()
    (warning,) = caught
    assert str(warning.message).startswith(f"llmkernels: {path} is ignored: ")
    return str(warning.message).partition(" is ignored: ")[2]


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMKERNELS_CACHE", str(tmp_path))
    assert files.cache_path(IDENTITY) == tmp_path / "linear-nvidia-h200.json"
    monkeypatch.delenv("LLMKERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_path(IDENTITY) == tmp_path / "xdg" / "llmkernels" / "linear-nvidia-h200.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_path(IDENTITY) == tmp_path / ".cache" / "llmkernels" / "linear-nvidia-h200.json"
    assert files.packaged_path(IDENTITY).name == "sm90-132.json"


def test_round_trip(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert files.read(path, IDENTITY) == ()  # there is none, which is no fault
        assert files.read(saved(path), IDENTITY) == ENTRIES
    content = json.loads(path.read_text())
    assert {name: content[name] for name in IDENTITY} == IDENTITY and content["format"] == files.FORMAT
    assert [*path.parent.iterdir()] == [path]


def test_choices_of_other_models_stay(path):
    saved(path, entries=ENTRIES[:2])
    newer = Measured(ENTRIES[1].linear, 3, 4, RULE, 9.5, 9.5)
    saved(path, entries=[newer, ENTRIES[2]])
    assert files.read(path, IDENTITY) == (ENTRIES[0], newer, ENTRIES[2])


@pytest.mark.parametrize(
    "change",
    [{"gpu": "NVIDIA H100"}, {"compute_capability": 80}, {"sm_count": 114}, {"driver": "12.4"}, {"library": "fedc"}],
    ids=lambda change: next(iter(change)),
)
def test_from_elsewhere(path, change):
    ((name, value),) = change.items()
    saved(path, IDENTITY | change)
    reason = ignored(path)
    assert reason.startswith(f"it was measured with {name} {value}, and here it is {IDENTITY[name]}; measure again")
    saved(path, entries=ENTRIES[:1])  # takes its place
    assert files.read(path, IDENTITY) == ENTRIES[:1]


def test_of_another_format(path):
    saved(path).write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert ignored(path) == "its format is 2, and this version reads 1"


def test_truncated_anywhere(path):
    whole = saved(path).read_text().rstrip()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_text(whole[:length])
        assert ignored(path).startswith("it is damaged (")


@pytest.mark.parametrize("text", ["null", "[]", "{}", "3", '"format"', '{"linears": []}'])
def test_something_else(path, text):
    saved(path).write_text(text)
    assert ignored(path) == "it is no file of measured choices"


@pytest.mark.parametrize("bytes_", [b"\xff\xfe\x00", b"[" * 100_000])
def test_no_text(path, bytes_):
    saved(path).write_bytes(bytes_)
    ignored(path)


@pytest.mark.parametrize(
    "change",
    [
        {"first_m": "3"},
        {"first_m": None},
        {"last_m": 4.5},
        {"time_us": "fast"},
        {"time_us": True},
        {"linear": 4},
        {"linear": {"n": 4608}},
        {"linear": {"n": 2**70, "k": 8}},
        {"linear": {"n": 8, "k": 8, "glu": 1}},
        {"choice": {"variant": "wmma"}},
        {"choice": {"variant": "mma", "warps": 4}},
        {"choice": {"variant": ["mma"]}},
        {"name": "qkv"},
    ],
    ids=str,
)
def test_damaged_entries(path, change):
    content = json.loads(saved(path).read_text())
    content["linears"][1] |= change
    path.write_text(json.dumps(content))
    assert ignored(path).startswith("it is damaged (entry 1: ")


def test_linears_must_be_a_list(path):
    content = json.loads(saved(path).read_text())
    path.write_text(json.dumps(content | {"linears": {}}))
    assert ignored(path) == "it is damaged (linears is no list)"


def test_a_folder_in_its_place(path):
    path.mkdir(parents=True)
    assert ignored(path).startswith("it cannot be read (")
    assert files.save(path, IDENTITY, ENTRIES).startswith(f"{path} cannot be written (")


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMKERNELS_CACHE", str(tmp_path / "file"))
    path = files.cache_path(IDENTITY)
    assert files.save(path, IDENTITY, ENTRIES) == f"{path} cannot be written (File exists)"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(path):
    path.parent.mkdir()
    path.parent.chmod(0o500)
    assert "cannot be written (Permission denied)" in files.save(path, IDENTITY, ENTRIES)


def test_without_a_home_folder(monkeypatch):
    """What autotune has measured is returned, and the file that cannot be is a warning."""
    monkeypatch.setenv("LLMKERNELS_CACHE", "~nobody-of-this-name/cache")
    for name, result in (("_gpu_of", 0), ("problems_of", []), ("measure_all", list(ENTRIES)), ("release", None)):
        monkeypatch.setattr(autotune, name, lambda *arguments, result=result: result)
    monkeypatch.setattr(files, "load", lambda index: None)
    monkeypatch.setattr(files, "identity_of", lambda index: IDENTITY)
    monkeypatch.setattr(table, "set_table", lambda index, entries: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    with pytest.warns(UserWarning, match="is not written to a file: Could not determine home directory"):
        tuning = autotune.autotune(None)
    assert tuning.linears == ENTRIES and tuning.path is None


def test_a_disk_that_is_full(path, monkeypatch):
    """The old file stays, and nothing is left beside it."""
    saved(path)
    text = path.read_text()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert files.save(path, IDENTITY, ENTRIES[:1]) == f"{path} cannot be written (No space left on device)"
    assert path.read_text() == text and [file.suffix for file in path.parent.iterdir()] == [".json"]


def test_writers_at_the_same_time(path):
    """None loses what another one adds, in threads and in processes; who reads meanwhile has a whole file."""
    entries = [Measured(Linear(8 * number, 64), 1, 1, RULE, 1.0, 1.0) for number in range(1, 25)]
    threads = [threading.Thread(target=saved, args=(path, IDENTITY, [one])) for one in entries[:12]]
    program = (
        "import sys\nfrom llmkernels._tune import files\nfrom llmkernels._tune.table import *\n"
        "for number in sys.argv[2:]:\n"
        "    one = Measured(Linear(int(number), 64), 1, 1, RULE, 1.0, 1.0)\n"
        f"    assert files.save(files.Path(sys.argv[1]), {IDENTITY}, [one]) is None\n"
    )
    numbers = [str(one.linear.n) for one in entries[12:]]
    processes = [subprocess.Popen([sys.executable, "-c", program, path, *part]) for part in (numbers[:6], numbers[6:])]
    for thread in threads:
        thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(process.poll() is None for process in processes):
            files.read(path, IDENTITY)
    for thread in threads:
        thread.join()
    assert [process.returncode for process in processes] == [0, 0]
    assert files.read(path, IDENTITY) == tuple(entries)


# ---- what a process uses


@pytest.fixture
def machine(path, tmp_path, monkeypatch):
    """One with a GPU, as files.load sees it: a list of the tables that were set."""
    tables = []
    monkeypatch.setattr(files, "identity_of", lambda index: IDENTITY)
    monkeypatch.setattr(files, "_loaded", set())
    monkeypatch.setattr(files._library, "build_info", lambda: {"cuda": "13.0"})
    monkeypatch.setattr(files, "PACKAGED", tmp_path / "tuned")
    monkeypatch.setattr(files, "set_table", lambda index, entries: tables.append((index, entries)))
    return tables


def test_load(machine, path):
    """What was measured here comes before what the package has."""
    package = [Measured(one.linear, one.first_m, one.last_m, RULE, 1.0, 1.0) for one in ENTRIES[:2]]
    assert (
        files.save_packaged(files.packaged_path(IDENTITY), IDENTITY | {"driver": "1.0", "library": "x"}, package)
        is None
    )
    saved(path, entries=ENTRIES[1:])
    files.load(0)
    files.load(0)
    assert machine == [(0, (package[0], *ENTRIES[1:]))]


def test_load_without_a_home_folder(machine, monkeypatch):
    """What the package has is used all the same."""
    assert files.save_packaged(files.packaged_path(IDENTITY), IDENTITY, ENTRIES) is None
    monkeypatch.setenv("LLMKERNELS_CACHE", "~nobody-of-this-name/cache")
    with pytest.warns(UserWarning, match="no choices of this machine are read: Could not determine home directory"):
        files.load(0)
    assert machine == [(0, tuple(ENTRIES))]


def test_without_files_there_is_nothing_to_load(machine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files.load(0)
    assert machine == []


@pytest.mark.parametrize(
    "problem", [ValueError("a choice cannot run"), RuntimeError("no driver"), KeyError("x")], ids=str
)
def test_load_never_raises(machine, path, monkeypatch, problem):
    saved(path)

    def fail(index, entries):
        raise problem

    monkeypatch.setattr(files, "set_table", fail)
    with pytest.warns(UserWarning, match="llmkernels: no measured choices are used on GPU 0: "):
        files.load(0)
    files.load(0)  # warns once


def test_load_where_a_warning_is_an_error(machine, path):
    """It is the caller's wish."""
    saved(path).write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is ignored"):
            files.load(0)


def test_a_build_without_kernels_loads_nothing(machine, path, monkeypatch):
    monkeypatch.setattr(files._library, "build_info", dict)
    saved(path)
    files.load(0)
    assert machine == []


def test_on_the_cpu_nothing_is_loaded(machine):
    with llmkernels.patch(tiny_model()):
        assert machine == []


def test_files_of_the_package():
    """Each is whole and has choices that its architecture can run."""
    module = pytest.importorskip("llmkernels._C")
    for path in files.PACKAGED.glob("*.json"):
        content = json.loads(path.read_text())
        identity = {name: content[name] for name in ("compute_capability", "sm_count")}
        assert path == files.packaged_path(identity)
        entries = files.parse(path.read_text(), identity)
        assert entries == table.merge((), entries)
        clusters = {2: content["sm_count"] // 2, 4: content["sm_count"] // 4 - 1, 8: content["sm_count"] // 8 - 2}
        facts = {**identity, "shared_bytes": 227 * KB, "clusters": clusters}
        assert module.refused_tuned_linear([one.numbers for one in entries], **facts) is None


@pytest.mark.gpu
def test_load_on_a_gpu(path, monkeypatch):
    """A table of this GPU is read by patch()."""
    index = torch.cuda.current_device()
    monkeypatch.setattr(files, "_loaded", set())
    before = table.table_of(index)
    identity = files.identity_of(index)
    saved(files.cache_path(identity), identity, ENTRIES[:1])
    try:
        with llmkernels.patch(tiny_model(device="cuda", dtype=torch.bfloat16)):
            assert ENTRIES[0] in table.table_of(index)
    finally:
        table.set_table(index, before)
