"""Devices, markers and options of the test suite.

Every test that takes `device` runs on the CPU and, where there is one, on the GPU. Markers:
  gpu        needs a GPU
  two_gpus   needs two
  large(gib) needs a GPU with that much free memory
  sanitizer  the short selection that runs under compute-sanitizer: every kernel path once, tiny sizes
  slow       takes a minute on a GPU
"""

import contextlib
import functools
import gc
import os
import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from oracles import DEVICES

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401 - before pip, or it cannot be imported any more, as torch.compile does

CUDA = "cuda" in DEVICES
_order = None  # see --order


def pytest_addoption(parser):
    parser.addoption("--fuzz-seeds", metavar="FIRST:END", help="fuzz exactly these seeds, one test each")
    for what in ("", "-models"):
        files = f"tests that use {'models' if what else 'no model'} of transformers"
        parser.addoption(f"--thin{what}", type=int, default=1, metavar="N", help=f"of {files}, every N-th case")
    parser.addoption("--part", metavar="I/N", help="the I-th of N parts of the tests, for processes side by side")
    parser.addoption("--order", metavar="DIR", help="a file per process: its tests, in the order in which they began")


def pytest_configure(config):
    global _order
    if (folder := config.getoption("--order")) and (hasattr(config, "workerinput") or not config.getoption("-n", None)):
        _order = Path(folder).absolute() / f"order_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.txt"
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "two_gpus: needs two GPUs")
    config.addinivalue_line("markers", "large(gib): needs a GPU with this much free memory")
    config.addinivalue_line("markers", "sanitizer: short selection for compute-sanitizer")
    config.addinivalue_line("markers", "slow: takes a minute on a GPU")


@pytest.hookimpl(trylast=True)  # behind those that deselect
def pytest_collection_modifyitems(config, items):
    """The slow tests begin first, each in another process of pytest-xdist, which gives every one a part of the list."""
    _thin_out(items, config)
    _take_part(items, config)
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    for index, item in enumerate(slow):
        others.insert(index * len(items) // processes, item)
    items[:] = others


def _thin_out(items, config):
    """See --thin. Of models each test begins with another case, so that every family has some."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for name, same in cases.items():
        uses_models = _uses_models(same[0].path)
        every = config.getoption("--thin-models" if uses_models else "--thin")
        first = zlib.crc32(name.encode()) % min(every, len(same)) if uses_models else 0
        kept.update(same[first::every])
    _drop([item for item in items if item not in kept], items, config)


def _take_part(items, config):
    """See --part. Neighbours, which take equally long, fall into different parts."""
    if part := config.getoption("--part"):
        index, parts = map(int, part.split("/"))
        assert 1 <= index <= parts, f"--part {part}: no such part"
        _drop([item for place, item in enumerate(items) if place % parts != index - 1], items, config)


def _drop(dropped, items, config):
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        left_out = set(dropped)
        items[:] = [item for item in items if item not in left_out]


@functools.cache
def _uses_models(path):
    return re.search(r"\b(transformers|hf_models|generating|families)\b", path.read_text()) is not None


def pytest_runtest_logstart(nodeid):
    if _order:
        with _order.open("a") as file:  # closed before the test, which may crash
            print(nodeid, file=file)


def pytest_runtest_setup(item):
    large = item.get_closest_marker("large")
    if not CUDA and (large or item.get_closest_marker("gpu")):
        pytest.skip("no GPU")
    if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    if large:
        _release_memory()
        free_gib = torch.cuda.mem_get_info()[0] / 2**30
        if free_gib < large.args[0]:
            pytest.skip(f"needs {large.args[0]} GiB of GPU memory, {free_gib:.0f} are free")


def pytest_runtest_teardown(item):
    if item.get_closest_marker("large"):
        _release_memory()


def _release_memory():
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def late(request, monkeypatch):
    """Whether the loops of generation look at a step one step late, as they do on CUDA."""
    monkeypatch.setattr("llmkernels.hf.callers.reading.is_late", lambda device: request.param)


@pytest.fixture
def no_state_of_accelerate():
    """What trainers and harnesses make of it is for the whole process, and other tests want another."""
    yield
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
