"""CUDA graphs of one thread beside the work of others: hf/graphs.py. On the CPU with a stub that records all calls."""

import contextlib
import gc
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from llmkernels.hf import graphs

DEVICE = torch.device("cuda:0")


class Books:
    """Replaces the library's functions and torch's. Records what was called, and whether during a capture."""

    def __init__(self):
        self.captures = 0  # in progress
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

    def llmk_graph_begin(self, slot):
        if status := self._do("begin"):
            return status
        self.captures += 1
        self.most = max(self.most, self.captures)
        return 0

    def llmk_graph_end(self, slot, handle):
        self.captures -= 1
        if handle is not None:
            handle._obj.value = next(self._names)
        return self._do("end" if handle is not None else "give up")

    def llmk_graph_launch(self, handle, stream):
        return self._do("launch")

    def llmk_graph_destroy(self, handle):
        assert self.captures == 0
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
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "ExternalStream", OtherStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: OtherStream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda which: contextlib.nullcontext())
    gc.collect()
    graphs.release_memory()  # destroys graphs that earlier tests have left
    graphs._free.clear()
    del books.done[:]
    yield books
    gc.collect()
    assert books.captures == 0
    assert not graphs._LOCK.locked()


def test_a_program_runs_then_captures_then_replays(books):
    program, runs = graphs.Program(), []
    found = [program.run(lambda: runs.append(0) or len(runs), DEVICE) for _ in range(4)]
    assert found == [1, 2, 2, 2]
    assert books.done.count("launch") == 3
    program.bind(("other", "addresses"))
    assert program.graph is None
    assert books.done[-1] == "destroy"
    assert program.run(lambda: "anew", DEVICE) == "anew"


@pytest.mark.parametrize("fails", ["slot", "begin", "end"])
def test_a_capture_that_fails_is_a_step_without_a_graph(books, fails):
    books.fails = fails
    program = graphs.Program()
    assert [program.run(lambda: 3, DEVICE) for _ in range(9)] == [3] * 9
    assert program.graph is None
    assert program.calls == {"a step without a CUDA graph: CUDA graph: no such luck": 1}
    assert books.done.count(fails) == 3  # then it is not tried again
    assert books.done.count("beginAllocateCurrentThreadToPool") == books.done.count("endAllocateToPool")
    graphs.release_memory()
    assert books.done.count("beginAllocateCurrentThreadToPool") == books.done.count("releasePool")
    assert gc.isenabled()


def test_a_step_that_cannot_be_captured(books):
    """Any exception ends the capture; then the function runs without a graph."""
    program = graphs.Program()

    def step():
        if books.captures:
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")
        return 5

    assert [program.run(step, DEVICE) for _ in range(3)] == [5] * 3
    reason = "a step without a CUDA graph: operation not permitted when stream is capturing"
    assert program.calls == {reason: 1}
    books.fails = ""
    program.bind(("new",))
    assert [program.run(lambda: 6, DEVICE) for _ in range(3)] == [6] * 3
    assert program.graph is not None


def test_an_interrupt_ends_the_capture(books):
    program = graphs.Program(warm=True)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(interrupted, DEVICE)
    assert books.done[-2:] == ["give up", "endAllocateToPool"]
    assert program.run(lambda: 1, DEVICE) == 1
    assert program.graph is not None


def test_one_capture_at_a_time(books):
    """One capture at a time, from many threads; none within no_capture()."""

    def step():
        assert books.captures == 1
        time.sleep(0.002)
        return books.captures

    def work(i):
        if i % 4 == 0:
            with graphs.no_capture():
                assert books.captures == 0
                time.sleep(0.002)
                assert books.captures == 0
            return 1
        return graphs.capture(step, DEVICE)[1]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(40))) == {1}
    assert books.most == 1


def test_graphs_die_when_nobody_captures(books):
    """A graph dies by its reference count or by the garbage collector, in any thread, also in one that captures."""
    graph, _ = graphs.capture(lambda: 0, DEVICE)
    other = [graphs.capture(lambda: 0, DEVICE)[0]]

    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, cycle.graph = cycle, graph
    del cycle, graph

    def step():
        assert not gc.isenabled()
        before = books.done.count("destroy")  # 1 if the cycle was collected before
        gc.collect()  # as if an allocation had triggered it
        thread = threading.Thread(target=other.clear)
        thread.start()
        thread.join()
        assert books.done.count("destroy") == before
        return 1

    kept, _ = graphs.capture(step, DEVICE)
    assert gc.isenabled()
    with graphs.no_capture():
        pass
    last, _ = graphs.capture(lambda: 0, DEVICE)
    assert books.done.count("destroy") == 2
    del kept
    assert books.done.count("destroy") == 3
    del last


def test_a_graph_has_a_slot_of_its_own(books):
    """While it is alive. A thread captures again in the slot that it used before, with the same memory."""
    alive = [graphs.capture(lambda: 0, DEVICE)[0] for _ in range(3)]
    assert books.done.count("slot") == 3
    with ThreadPoolExecutor(1) as pool:
        alive.append(pool.submit(graphs.capture, lambda: 0, DEVICE).result()[0])
        assert books.done.count("slot") == 4
        alive.clear()
        del books.done[:]
        slots = {slot.handle: slot.thread for slot in graphs._free[0]}
        for _ in range(5):
            alive.append(pool.submit(graphs.capture, lambda: 0, DEVICE).result()[0])
            graphs.capture(lambda: 0, DEVICE)
            alive.clear()
    assert "slot" not in books.done
    assert {slot.handle: slot.thread for slot in graphs._free[0]} == slots
    assert books.done.count("beginAllocateCurrentThreadToPool") == books.done.count("releasePool")
    del books.done[:]
    graphs.release_memory()
    graphs.release_memory()
    assert books.done == ["releasePool"] * 4


def test_the_names_of_the_library():
    """The functions that ctypes looks up are in csrc/kernels/graph.cu, with the same number of parameters."""
    source = graphs._library.PATH.parent.parent / "csrc/kernels/graph.cu"
    if not source.exists():
        pytest.skip("needs csrc")
    text = source.read_text()
    for name in [name for name in vars(Books) if name.startswith("llmk_")]:
        assert f" {name}(" in text.replace("*", " "), name


# On a GPU, with the real functions.


def busy_threads(stop, errors, count=4):
    """Threads that draw random numbers, allocate, copy to the host and replay graphs until `stop`."""

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.randn(64, 64, device="cuda")
                total = torch.zeros((), device="cuda")
                total.add_(1).zero_()
                graph, y = graphs.capture(lambda: total.add_(1), torch.device("cuda"))
                count = 0
                while not stop.is_set():
                    graph.replay()
                    count += 1
                    torch.multinomial(torch.rand(8, 100, device="cuda"), 1)
                    torch.empty(1 << 20, pin_memory=True).copy_(torch.rand(1 << 20, device="cuda"), non_blocking=True)
                    (x @ x).sum().item()
                    torch.empty(seed * 1 << 20, device="cuda")
                assert y.item() == count
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed + 1,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.gpu
def test_captures_beside_busy_threads():
    """200 graphs are captured and destroyed, without any effect on the other threads' work, and the other way round."""
    stop, errors = threading.Event(), []
    x = torch.arange(4096.0, device="cuda")
    (x * 2 + 1).sum()
    threads = busy_threads(stop, errors)
    try:
        for i in range(200):
            graph, y = graphs.capture(lambda i=i: (x * 2 + i).sum(), torch.device("cuda"))
            assert torch.cuda.is_current_stream_capturing() is False
            y.zero_()
            graph.replay()
            assert y.item() == float((torch.arange(4096.0) * 2 + i).sum())
            del graph, y
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.gpu
def test_a_graph_has_memory_of_its_own():
    """The memory of a graph is not used for later tensors or other graphs."""
    x = torch.ones(1 << 16, device="cuda")

    def step():
        y = x * 3
        return (y + 1).sum()

    step()
    captured = [graphs.capture(step, torch.device("cuda")) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in captured]
    torch.cuda.synchronize()
    for _ in range(50):
        others = [torch.full((1 << 16,), float(i), device="cuda") for i in range(20)]
        for (graph, _), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(y.item() == 4 * (1 << 16) for _, y in captured)
        assert all(bool((other == i).all()) for i, other in enumerate(others))


@pytest.mark.gpu
@pytest.mark.parametrize("spoil", ["item", "synchronize", "raise"])
def test_a_spoilt_capture_leaves_nothing_behind(spoil):
    x = torch.ones(100, device="cuda")
    program = graphs.Program()

    def step():
        y = x.sum()
        if torch.cuda.is_current_stream_capturing():
            if spoil == "raise":
                raise ValueError("not now")
            y.item() if spoil == "item" else torch.cuda.synchronize()
        return y

    for _ in range(6):
        assert program.run(step, x.device).item() == 100
    assert program.graph is None
    assert sum(program.calls.values()) == 1
    good = graphs.Program()
    for _ in range(4):
        assert good.run(x.sum, x.device).item() == 100
    assert good.graph is not None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_memory_of_dead_graphs_is_used_again():
    x = torch.ones(1 << 22, device="cuda")
    before = []
    for _round in range(50):
        program = graphs.Program()
        for _ in range(3):
            assert program.run(lambda: (x + 1).sum(), x.device).item() == 2 << 22
        del program
        before.append(torch.cuda.memory_reserved())
    assert before[-1] == before[2]
    graphs.release_memory()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before[2]


@pytest.mark.gpu
def test_a_synchronizing_thread_spoils_at_most_a_graph():
    """CUDA lets no thread wait for the device during a capture: that thread gets an error, and the step runs without a
    graph."""
    x = torch.ones(100, device="cuda")
    stop = threading.Event()

    def synchronize():
        while not stop.is_set():
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()

    thread = threading.Thread(target=synchronize)
    thread.start()
    try:
        for _ in range(100):
            program = graphs.Program()
            for _ in range(4):
                assert program.run(lambda: (x + 1).sum(), x.device).item() == 200
    finally:
        stop.set()
        thread.join()


@pytest.mark.gpu
def test_counters_of_graphs_outlast_other_captures():
    """More captures of attention than there are sets of counters: the first graph still has a set of its own."""
    import llmkernels

    q = torch.randn(1, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([60], device="cuda", dtype=torch.int32)
    run = lambda: llmkernels.decode_attention(q, cache, cache, lengths)  # noqa: E731
    expected = run()
    first, kept = graphs.capture(run, q.device)
    for _ in range(4500):
        graph, y = graphs.capture(run, q.device)
    graph.replay()
    first.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
    assert torch.equal(kept, expected)
