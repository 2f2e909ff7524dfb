"""Many threads of one process: every op from a cold start, and generate as servers call it."""

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import every_op
import llmkernels
from generating import generate_step, hf_generate, small_model
from hf_models import tiny_inputs
from llmkernels import unpatch
from llmkernels.hf.callers import ahead, reading
from llmkernels.hf.step.decode import decoder
from registry import OPS

THREADS = 8
CALLS = [(1, 5, 9), (2, 11, 12), (3, 7, 6), (5, 3, 20), (8, 9, 10), (17, 4, 7)]  # sequences, prompt, new tokens


def test_every_op_is_there():
    """every_op.py calls every registered op, and its results depend only on the seed."""
    size = every_op.SIZES[2]
    found = every_op.results(size, "cpu")
    assert {name.split()[0] for name in found} == {*OPS}
    assert not every_op.differing(every_op.results(size, "cpu"), found)
    assert set(every_op.differing(every_op.results(size, "cpu", seed=1), found)) == set(found)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("how", ["threads", pytest.param("devices", marks=pytest.mark.two_gpus)])
def test_from_a_cold_process(how):
    for _ in range(3 if how == "threads" else 1):
        command = [sys.executable, Path(every_op.__file__), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.endswith(f"{how}: 0 wrong\n"), done.stdout + done.stderr[-3000:]


def serve(models, device, seconds, meanwhile=None, patched_first=False):
    """Threads that generate for `seconds` what the models generate unpatched, or patched. Returns the handles."""
    handles = [llmkernels.patch(model) for model in models if patched_first]
    inputs = [tiny_inputs(device, batch, tokens) for batch, tokens, _ in CALLS]
    expected = [
        [hf_generate(model, ids, max_new_tokens=new).cpu() for ids, (_, _, new) in zip(inputs, CALLS, strict=True)]
        for model in models
    ]
    handles = handles or [llmkernels.patch(model) for model in models]
    end, counts, errors = time.monotonic() + seconds, [0] * THREADS, []

    def guarded(function, *arguments):
        try:
            while time.monotonic() < end and not errors:
                function(*arguments)
        except BaseException as error:
            errors.append(error)

    def generate(index, turns):
        turn = next(turns)
        which = (index + turn) % len(CALLS)
        model = models[index % len(models)]
        if meanwhile is None and turn % 3 == 2:
            found = llmkernels.generate(model, inputs[which], max_new_tokens=CALLS[which][2])
        else:
            found = model.generate(inputs[which], max_new_tokens=CALLS[which][2], do_sample=False)
        text = expected[index % len(models)][which]
        assert torch.equal(found.cpu(), text), f"thread {index}, call {turn}: {found.tolist()}, not {text.tolist()}"
        counts[index] += 1

    threads = [threading.Thread(target=guarded, args=(generate, i, itertools.count())) for i in range(THREADS)]
    if meanwhile:
        threads.append(threading.Thread(target=guarded, args=(meanwhile,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(counts)
    return handles


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, THREADS], ids=["one-model", "own-models"])
def test_generating(device, count):
    models = [small_model(device=device, seed=seed) for seed in range(count)]
    for handle in serve(models, device, 60 if device == "cuda" else 3):
        (decode,) = handle.report().decode
        assert decode.reason is None
        assert generate_step() in decode.calls


@pytest.mark.slow
def test_generating_with_prompts_ahead(device, monkeypatch):
    """Which run in one stream."""
    monkeypatch.setattr(reading, "is_late", lambda device: True)
    monkeypatch.setattr(ahead, "_LEAST_WEIGHTS", 0)
    model = small_model(device=device).to(torch.float16 if device == "cuda" else torch.float32)
    serve([model], device, 20 if device == "cuda" else 3, lambda: time.sleep(0.01), patched_first=True)
    assert decoder(model).dropped_ahead is None


@pytest.fixture
def often_switched():
    """Python switches between threads as often as it can, so that a rare order of events is found in seconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow
def test_generating_while_another_thread_patches(device, often_switched):
    """Each call is right, whichever way it goes."""
    model = small_model(device=device)
    pauses = itertools.cycle((0.0, 0.001, 0.02, 0.1))

    def patch_and_unpatch():
        unpatch(model)
        time.sleep(next(pauses))
        llmkernels.patch(model)
        time.sleep(next(pauses))

    serve([model], device, 60 if device == "cuda" else 20, patch_and_unpatch)
