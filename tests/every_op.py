"""The calls of registry.py, for the tests of memory, threads and devices. Run as a program, it is such a test in a new
process:

python tests/every_op.py threads     16 threads at once, each on a stream of its own, at mixed sizes
python tests/every_op.py devices     all ops on cuda:0, then all on cuda:1, then both in turn
"""

import collections
import sys
import threading
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from registry import Size, calls, overload, written

THREADS = 16
# (rows, columns, sequences, keys, vocabulary); rows and keys on both sides of boundaries between plans
SIZES = [
    Size(1, *numbers)
    for numbers in (
        (1, 3584, 1, 40, 152064),
        (2, 64, 2, 513, 152064),
        (7, 1032, 3, 100, 1003),
        (33, 256, 8, 700, 32000),
        (64, 4096, 5, 2100, 5),
        (200, 8192, 1, 3000, 129280),
    )
]


def named_calls(size, device, seed=0, dtype=torch.bfloat16) -> list[tuple[str, str, dict]]:
    """(name, op, arguments): the name of an op's second call ends in 2."""
    counts = collections.Counter()
    found = []
    for op, arguments in calls(size, device, dtype, seed):
        counts[op] += 1
        found.append((f"{op} {counts[op]}", op, arguments))
    return found


def run(op, arguments) -> list[torch.Tensor]:
    """The results, and the arguments that the op has changed, in copies."""
    targets = {name: arguments.get(name) for name in written(op)}
    arguments = arguments | tree_map_only(torch.Tensor, torch.clone, targets)
    result = overload(op)(**arguments)
    if op == "linear_add_scale_" and result[1].numel() > 0:  # sums of the tokens there are; the rest is not written
        scaled, squares = result
        result = (scaled, squares[:-1, : len(scaled)], squares[-1, 0])
    return [x for x in tree_leaves((result, *(arguments[name] for name in targets))) if x is not None]


def results(size, device, seed=0, dtype=torch.bfloat16):
    """By call, on the CPU."""
    found = named_calls(size, device, seed, dtype)
    return {name: [t.cpu() for t in run(op, arguments)] for name, op, arguments in found}


def differing(found, expected) -> list[str]:
    def wide(t):  # FP8 has few ops
        return (t.float() if t.is_floating_point() and t.element_size() == 1 else t).nan_to_num(7)

    def same(a, b):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(wide(a), wide(b))

    return [n for n in expected if not all(map(same, found[n], expected[n])) or len(found[n]) != len(expected[n])]


@contextmanager
def poisoned_memory():
    """Outputs and workspaces are full of NaN when they are allocated."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS asks for a setting of its environment
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def reading_what_was_there(size, device, seed=0, dtype=torch.bfloat16) -> list[str]:
    """Calls whose results depend on what was in memory before: they read it, or leave it in their outputs."""
    expected = results(size, device, seed, dtype)
    with poisoned_memory():
        return differing(results(size, device, seed, dtype), expected)


def from_threads() -> list[str]:
    """Each thread begins with another op and runs all of them; then all threads' work again, one after the other."""
    barrier, found, errors = threading.Barrier(THREADS), {}, []

    def work(index):
        try:
            size = SIZES[index % len(SIZES)]
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs = named_calls(size, "cuda", index)
                inputs = inputs[2 * index :] + inputs[: 2 * index]
                torch.cuda.current_stream().synchronize()
                barrier.wait()
                rounds = [{name: run(op, arguments) for name, op, arguments in inputs} for _ in range(3)]
                found[index] = [
                    {name: [t.cpu() for t in tensors] for name, tensors in of_all.items()} for of_all in rounds
                ]
        except BaseException as error:
            errors.append(f"thread {index}: {error!r}")
            barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, rounds in found.items():
        expected = results(SIZES[index % len(SIZES)], "cuda", seed=index)
        errors += [f"thread {index}: {name} differs" for of_all in rounds for name in differing(of_all, expected)]
    return errors


def on_devices() -> list[str]:
    errors = []
    for size in (*SIZES, *reversed(SIZES)):
        expected = results(size, "cuda:0")
        found = results(size, "cuda:1")
        assert torch.cuda.current_device() == 0
        errors += [f"cuda:1, {size}: {name} differs" for name in differing(found, expected)]
    return errors


if __name__ == "__main__":
    wrong = {"threads": from_threads, "devices": on_devices}[sys.argv[1]]()
    print(*wrong, f"{sys.argv[1]}: {len(wrong)} wrong", sep="\n", flush=True)
    sys.exit(bool(wrong))
