"""CUDA graphs of one thread beside the work of others: hf/step/graphs.py. On the CPU with a stub that notes calls."""

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import llmkernels
import test_compose
from llmkernels.hf.step import graphs
from llmkernels.hf.step.program import Program
from stub_cuda import compile_stub

DEVICE = torch.device("cuda:0")


class Books:
    """Replaces the library's functions and torch's. Notes what was called, and how many record at the same time."""

    def __init__(self):
        self.recordings = 0  # in progress
        self.most = 0
        self.done = []
        self.fails = ""  # the name of a function that fails
        self._names = iter(range(1, 1 << 30))

    def _do(self, name):
        self.done.append(name)
        return 999 * (name == self.fails)

    def llmk_graph_slot(self, slot, stream):
        slot._obj.value, stream._obj.value = next(self._names), next(self._names)
        return self._do("slot")

    def llmk_graph_begin(self, slot, in_pieces):
        if status := self._do("begin"):
            return status
        self.recordings += 1
        self.most = max(self.most, self.recordings)
        return 0

    def llmk_graph_end(self, handle):
        self.recordings -= 1
        if handle is not None:
            handle._obj.value = next(self._names)
        return self._do("end" if handle is not None else "give up")

    def llmk_graph_launch(self, handle, stream):
        return self._do("launch")

    def llmk_graph_destroy(self, handle):
        return self._do("destroy")

    def llmk_graph_error(self, status):
        return b"no such luck"


class OtherStream:
    def __init__(self, pointer=7, device=0):
        self.cuda_stream = pointer


@pytest.fixture
def books(monkeypatch):
    books = Books()
    monkeypatch.setattr(graphs, "_functions", lambda: books)
    monkeypatch.setattr(graphs, "_free", defaultdict(list))
    for name in ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool"):
        do = lambda device, pool, name=name: books._do(name) and None  # noqa: E731
        monkeypatch.setattr(torch._C, f"_cuda_{name}", do, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "ExternalStream", OtherStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: OtherStream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda which: contextlib.nullcontext())
    gc.collect()  # destroys graphs that earlier tests have left
    graphs._free.clear()
    del books.done[:]
    yield books
    gc.collect()
    assert books.recordings == 0
    assert not graphs._LOCK.locked()


def test_a_program_runs_then_records_then_replays(books):
    program, runs = Program(), []
    found = [program.run(lambda: runs.append(0) or len(runs), DEVICE) for _ in range(4)]
    assert found == [1, 2, 2, 2]
    assert books.done.count("launch") == 3
    program.bind(("another", "description"))
    assert program.graph is None
    assert books.done[-1] == "destroy"
    assert program.run(lambda: "anew", DEVICE) == "anew"


@pytest.mark.parametrize("fails", ["slot", "begin", "end"])
def test_a_recording_that_fails_is_a_step_without_a_graph(books, fails):
    books.fails = fails
    program = Program()
    assert [program.run(lambda: 3, DEVICE) for _ in range(9)] == [3] * 9
    assert program.graph is None
    assert program.calls == {"a step without a CUDA graph: CUDA graph: no such luck": 8}
    assert books.done.count(fails) == 3  # then it is not tried again
    assert books.done.count("beginAllocateCurrentThreadToPool") == books.done.count("endAllocateToPool")
    graphs.release_memory()
    assert books.done.count("beginAllocateCurrentThreadToPool") == books.done.count("releasePool")


def test_a_recording_that_fails_returns_its_slot(books, monkeypatch):
    """There are 1024 of them. Also where torch makes no stream of the slot's."""

    def fail(*args, **named):
        raise RuntimeError("no such stream")

    def step():
        raise ValueError("not now")

    for _ in range(10):
        with pytest.raises(graphs.NoGraph, match="not now"):
            graphs.record(step, DEVICE)
    monkeypatch.setattr(torch.cuda, "ExternalStream", fail)
    for _ in range(10):
        with pytest.raises(graphs.NoGraph, match="no such stream"):
            graphs.record(lambda: 0, DEVICE)
    graphs._free.clear()
    for _ in range(10):
        with pytest.raises(graphs.NoGraph, match="no such stream"):
            graphs.record(lambda: 0, DEVICE)
    assert books.done.count("slot") == 2


def test_a_step_that_cannot_be_recorded(books):
    """Any exception ends the recording; then the function runs without a graph."""
    program = Program()

    def step():
        if books.recordings:
            raise RuntimeError("not now\nand so on")
        return 5

    assert [program.run(step, DEVICE) for _ in range(3)] == [5] * 3
    assert program.calls == {"a step without a CUDA graph: not now": 2}
    program.bind(("another", "description"))
    assert [program.run(lambda: 6, DEVICE) for _ in range(3)] == [6] * 3
    assert program.graph is not None


def test_other_ops_than_the_librarys_are_refused(books):
    """They would run while the graph is made, and never again."""
    program, x = Program(), torch.ones(3)
    assert [program.run(lambda: (x + 1).tolist(), DEVICE) for _ in range(3)] == [[2] * 3] * 3
    ((reason, count),) = program.calls.items()
    assert count == 2
    assert reason.startswith("a step without a CUDA graph: aten.add.Tensor is not an op of llmkernels")
    ours = Program()
    weight = torch.ones(3)
    for _ in range(3):
        y = ours.run(lambda: llmkernels.rms_norm(x, weight, 1e-6), DEVICE)
        assert torch.equal(y, llmkernels.rms_norm(x, weight, 1e-6))
    assert ours.graph is not None


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_allocators_without_pools(books, backend, monkeypatch):
    """Their memory would be given to others while the graph still uses it."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    program = Program()
    assert [program.run(lambda: 3, DEVICE) for _ in range(3)] == [3] * 3
    assert program.graph is None
    reason = f"a step without a CUDA graph: the allocator is {backend}, which has no memory pools"
    assert program.calls == {reason: 2}


def test_an_interrupt_ends_the_recording(books):
    program = Program()
    program.run(lambda: 0, DEVICE)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(interrupted, DEVICE)
    assert books.done[-2:] == ["give up", "endAllocateToPool"]
    assert program.run(lambda: 1, DEVICE) == 1
    assert program.graph is not None


def test_one_recording_at_a_time(books):
    """One at a time, from many threads; none within no_recording()."""

    def step():
        assert books.recordings == 1
        time.sleep(0.002)
        return books.recordings

    def work(i):
        if i % 4 == 0:
            with graphs.no_recording():
                assert books.recordings == 0
                time.sleep(0.002)
                assert books.recordings == 0
            return 1
        return graphs.record(step, DEVICE)[1]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(40))) == {1}
    assert books.most == 1


def test_graphs_die_at_any_time(books):
    """By the reference count or by the garbage collector, in any thread, also in one that records."""
    graph, _ = graphs.record(lambda: 0, DEVICE)
    other = [graphs.record(lambda: 0, DEVICE)[0]]

    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, cycle.graph = cycle, graph
    del cycle, graph

    def step():
        gc.collect()  # as if an allocation had triggered it
        thread = threading.Thread(target=other.clear)
        thread.start()
        thread.join()
        assert books.done.count("destroy") == 2
        return 1

    kept, _ = graphs.record(step, DEVICE)
    with graphs.no_recording():
        del kept
    assert books.done.count("destroy") == 3
    assert len(graphs._free[0]) == 3


def test_a_graph_has_a_slot_of_its_own(books):
    """While it is alive. A thread records again in the slot that it used before, with the same memory."""
    alive = [graphs.record(lambda: 0, DEVICE)[0] for _ in range(3)]
    assert books.done.count("slot") == 3
    with ThreadPoolExecutor(1) as pool:
        alive.append(pool.submit(graphs.record, lambda: 0, DEVICE).result()[0])
        assert books.done.count("slot") == 4
        alive.clear()
        del books.done[:]
        slots = {slot.handle: slot.thread for slot in graphs._free[0]}
        for _ in range(5):
            alive.append(pool.submit(graphs.record, lambda: 0, DEVICE).result()[0])
            graphs.record(lambda: 0, DEVICE)
            alive.clear()
    assert "slot" not in books.done
    assert {slot.handle: slot.thread for slot in graphs._free[0]} == slots
    assert books.done.count("beginAllocateCurrentThreadToPool") == books.done.count("releasePool")
    del books.done[:]
    graphs.release_memory()
    graphs.release_memory()
    assert books.done == ["releasePool"] * 4


def test_a_pool_is_given_back_once(books, monkeypatch):
    """Also if torch raises: the next call does not ask for it again."""
    graphs.record(lambda: 0, DEVICE)
    given = []

    def release(device, pool):
        given.append(pool)
        raise RuntimeError("no such pool")

    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    with pytest.raises(RuntimeError, match="no such pool"):
        graphs.release_memory()
    graphs.release_memory()
    assert given == [(0, 1)]


def test_the_names_of_the_library():
    """The functions that ctypes looks up are in csrc/kernels/graph.cu, with the same number of parameters."""
    source = graphs._library.PATH.parent.parent / "csrc/kernels/graph.cu"
    if not source.exists():
        pytest.skip("needs csrc")
    text = source.read_text()
    for name in [name for name in vars(Books) if name.startswith("llmk_")]:
        assert f" {name}(" in text.replace("*", " "), name


@pytest.mark.parametrize("scenario", ["slots", "recordings", "streams", "points", "pieces"])
def test_the_library_on_a_stub_of_cuda(scenario, tmp_path):
    """csrc/kernels/graph.cu. slots: those that cannot be made are not counted; after 1024 of them no graph could be
    made. recordings: one that fails does not spoil the next. streams: a launch waits for that of another stream, also
    one with the same handle. points: kernels get the addresses of another cache. pieces: a long graph is launched in
    two."""
    done = subprocess.run([compile_stub("graphs", tmp_path), scenario], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{scenario}: 0 wrong\n", done.stdout + done.stderr


# On a GPU, with the real functions.


def norm(x):
    return llmkernels.rms_norm(x, torch.ones_like(x[0]), 1e-6)


def rows(count, dtype=torch.bfloat16):
    return torch.randn(count, 512, device="cuda", dtype=dtype)


def draw(logits, rng_state):
    """Tokens; counts in the random state how often it ran."""
    return llmkernels.sample(logits, rng_state=rng_state)


def busy_threads(stop, errors, count=4):
    """Threads that wait for the device, free memory, draw random numbers, allocate, copy to the host and replay graphs
    until `stop`."""

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.randn(64, 64, device="cuda")
                state = torch.zeros(2, dtype=torch.long, device="cuda")
                graph, _ = graphs.record(lambda: draw(x, state), torch.device("cuda"))
                count = 0
                while not stop.is_set():
                    graph.replay()
                    count += 1
                    torch.multinomial(torch.rand(8, 100, device="cuda"), 1)
                    torch.empty(1 << 20, pin_memory=True).copy_(torch.rand(1 << 20, device="cuda"), non_blocking=True)
                    (x @ x).sum().item()
                    torch.empty(seed * 1 << 20, device="cuda")
                    torch.cuda.synchronize()
                    if count % 8 == 0:
                        torch.cuda.empty_cache()
                assert state[1].item() == count
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed + 1,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.gpu
def test_recordings_beside_busy_threads():
    """200 graphs are recorded and destroyed, without any effect on the other threads' work, and the other way round."""
    stop, errors = threading.Event(), []
    x = rows(64)
    weights = [torch.full_like(x[0], i) for i in range(200)]
    expected = [llmkernels.rms_norm(x, weight, 1e-6) for weight in weights]
    threads = busy_threads(stop, errors)
    try:
        for weight, wanted in zip(weights, expected, strict=True):
            graph, y = graphs.record(lambda weight=weight: llmkernels.rms_norm(x, weight, 1e-6), torch.device("cuda"))
            y.zero_()
            graph.replay()
            assert torch.equal(y, wanted)
            del graph, y
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.gpu
def test_nothing_is_done_while_recording():
    """The launches of a recording are not made; those of other threads are."""
    logits, state = rows(4).float(), torch.zeros(2, dtype=torch.long, device="cuda")

    def step():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(draw, logits, state).result()
        return draw(logits, state), draw(logits, state)

    graph, _ = graphs.record(step, torch.device("cuda"))
    assert state[1].item() == 1
    graph.replay()
    assert state[1].item() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 17, 64, 65])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_recorded_decode_step(batch, dtype):
    """Replayed for several tokens, equal to steps without a graph, and where cuBLAS has a part in it too."""
    case = test_compose.make(batch, dtype, "cuda", capacity=80, lengths=[7] * batch, vocab=40000)
    wanted, found = case.copy(), case.copy()
    case.copy()()  # loads cuBLAS
    graph, logits = graphs.record(found, torch.device("cuda"))
    assert_same_state(found, case)
    for _ in range(5):
        graph.replay()
        assert torch.equal(logits, wanted())
        assert_same_state(found, wanted)
        case.advance()  # and the others: they share their tokens


def assert_same_state(a, b):
    assert torch.equal(a.hidden, b.hidden)
    for ours, wanted in zip(a.caches, b.caches, strict=True):
        for x, y in zip(ours, wanted, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y


@pytest.mark.gpu
def test_the_memory_of_graphs():
    """Its own segments; and the pool's number, no small one that Python keeps, is still ours after the count."""
    graphs.release_memory()
    while torch.cuda.graph_pool_handle()[1] < 1000:
        pass
    x, weight = rows(1 << 12), rows(1)[0]
    graph, _ = graphs.record(lambda: llmkernels.rms_norm(x, weight, 1e-6), torch.device("cuda"))
    number = graph._slot.pool[1]
    references = sys.getrefcount(number)
    assert x.nbytes <= graphs.nbytes([graph]) == graphs.nbytes([graph, graph]) <= 16 * x.nbytes
    assert sys.getrefcount(number) == references
    assert graphs.nbytes([]) == 0


@pytest.mark.gpu
def test_a_graph_has_memory_of_its_own():
    """The memory of a graph is not used for later tensors or other graphs."""
    x = rows(1 << 10)
    weight = torch.ones_like(x[0])

    def step():
        y = x
        for _ in range(4):
            y = llmkernels.rms_norm(y, weight, 1e-6)
        return y

    wanted = step()
    recorded = [graphs.record(step, torch.device("cuda")) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in recorded]
    torch.cuda.synchronize()
    for _ in range(50):
        others = [torch.full_like(x, float(i)) for i in range(20)]
        for (graph, _), stream in zip(recorded, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, wanted) for _, y in recorded)
        assert all(bool((other == i).all()) for i, other in enumerate(others))


@pytest.mark.gpu
@pytest.mark.parametrize("spoil", ["other op", "synchronize", "raise"])
def test_a_spoilt_recording_leaves_nothing_behind(spoil):
    """Synchronizing does not spoil one."""
    x = rows(100)
    program, weight, wanted = Program(), torch.ones_like(x[0]), norm(x)

    def step():
        y = llmkernels.rms_norm(x, weight, 1e-6)
        if graphs._LOCK.locked():  # while it is recorded
            if spoil == "raise":
                raise ValueError("not now")
            y.clone() if spoil == "other op" else torch.cuda.synchronize()
        return y

    for _ in range(6):
        assert torch.equal(program.run(step, x.device), wanted)
    assert (program.graph is None) == (spoil != "synchronize")
    assert sum(program.calls.values()) == (5 if spoil != "synchronize" else 0)  # of 6 runs, all but the first
    good = Program()
    for _ in range(4):
        assert torch.equal(good.run(lambda: llmkernels.rms_norm(x, weight, 1e-6), x.device), wanted)
    assert good.graph is not None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_cublas_that_cannot_be_captured():
    """It does not run either: nothing is written, and the recording fails."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))  # torch's
    residual, x = rows(100, torch.float32), rows(100, torch.float32)
    weight = torch.randn(512, 512, device="cuda")
    before = residual.clone()

    def add():
        torch.ops.llmkernels.linear_add_(residual, x, weight)

    def step():
        stream, graph = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_void_p()
        assert runtime.cudaStreamBeginCapture(stream, 2) == 0  # it can not begin twice
        try:
            add()
        finally:
            runtime.cudaStreamEndCapture(stream, ctypes.byref(graph))

    for _ in range(3):
        with pytest.raises(graphs.NoGraph):
            graphs.record(step, torch.device("cuda"))
    torch.cuda.synchronize()
    assert torch.equal(residual, before)
    graph, _ = graphs.record(add, torch.device("cuda"))
    graph.replay()
    torch.ops.llmkernels.linear_add_(before, x, weight)
    assert torch.equal(residual, before)


@pytest.mark.gpu
def test_memory_of_dead_graphs_is_used_again():
    x = rows(1 << 13)
    weight, wanted = torch.ones_like(x[0]), norm(x)
    before = []
    for _round in range(50):
        program = Program()
        for _ in range(3):
            assert torch.equal(program.run(lambda: llmkernels.rms_norm(x, weight, 1e-6), x.device), wanted)
        del program
        before.append(torch.cuda.memory_reserved())
    assert before[-1] == before[2]
    graphs.release_memory()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before[2]


@pytest.mark.gpu
def test_a_synchronizing_thread_spoils_nothing():
    """A thread that does nothing but wait for the device gets no error, and every step its graph. With stream captures
    both would fail, and the process die now and then."""
    x = rows(100)
    weight, wanted = torch.ones_like(x[0]), norm(x)
    stop, errors = threading.Event(), []

    def synchronize():
        while not stop.is_set():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=synchronize)
    thread.start()
    try:
        for _ in range(300):
            program = Program()
            for _ in range(3):
                assert torch.equal(program.run(lambda: llmkernels.rms_norm(x, weight, 1e-6), x.device), wanted)
            assert program.graph is not None
    finally:
        stop.set()
        thread.join()
    assert not errors


@pytest.mark.gpu
def test_two_graphs_at_once():
    """Of attention that is split, on two streams: each counts its parts for itself."""
    inputs, recorded, expected = [], [], []
    for batch, length in ((1, 3000), (3, 1777)):
        q = torch.randn(batch, 1, 4, 128, device="cuda", dtype=torch.bfloat16)
        cache = torch.randn(batch, 3072, 2, 128, device="cuda", dtype=torch.bfloat16)
        inputs.append((q, cache, cache, torch.full((batch,), length, device="cuda", dtype=torch.int32)))
    for tensors in inputs:
        run = lambda tensors=tensors: [llmkernels.decode_attention(*tensors) for _ in range(20)]  # noqa: E731
        expected.append(run()[0])
        recorded.append((*graphs.record(run, torch.device("cuda")), torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, results, stream in recorded:
            with torch.cuda.stream(stream):
                for y in results:
                    y.zero_()
                graph.replay()
        torch.cuda.synchronize()
        for (_, results, _), wanted in zip(recorded, expected, strict=True):
            assert all(torch.equal(y, wanted) for y in results)


@pytest.mark.gpu
def test_counters_of_graphs_outlast_others():
    """More graphs of attention than there are sets of counters: the first still has a set of its own."""
    q = torch.randn(1, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([60], device="cuda", dtype=torch.int32)
    run = lambda: llmkernels.decode_attention(q, cache, cache, lengths)  # noqa: E731
    expected = run()
    first, kept = graphs.record(run, q.device)
    for _ in range(4500):
        graph, y = graphs.record(run, q.device)
    graph.replay()
    first.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
    assert torch.equal(kept, expected)
