"""What is kept between calls of generate: caches, graphs, several models, threads."""

import gc
import threading
import weakref

import pytest
import torch

import llmkernels
from generating import NEW, Stream, generate_step, hf_generate, left_padded, small_model
from hf_models import tiny_inputs
from llmkernels.hf import unpatch
from llmkernels.hf.cache import buffers
from llmkernels.hf.step.decode import decoder
from llmkernels.hf.step.program import Recording


def spare(model):
    """The cache that is kept for the next call."""
    ((cache, _),) = decoder(model)._spare
    return cache


def test_two_models_at_once(device):
    models = [small_model(device=device, seed=seed) for seed in (0, 5)]
    ids = tiny_inputs(device)
    expected = [hf_generate(model, ids) for model in models]
    for model in models:
        llmkernels.patch(model)
    for _ in range(3):
        for model, text in zip(models, expected, strict=True):
            assert torch.equal(hf_generate(model, ids), text)
            assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), text)
    # Nested calls.
    inner = []

    class Nested(Stream):
        def put(self, ids_):
            super().put(ids_)
            inner.append(hf_generate(models[1], ids[:1]))
            inner.append(hf_generate(models[0], ids[:1]))

    assert torch.equal(hf_generate(models[0], ids[:1], streamer=Nested()), expected[0][:1])
    assert all(torch.equal(text, expected[1 - i % 2][:1]) for i, text in enumerate(inner))
    unpatch(models[0])
    assert torch.equal(hf_generate(models[1], ids), expected[1])


def test_threads():
    model, ids = small_model(), tiny_inputs()
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    found = [None] * 4

    def work(i):
        found[i] = model.generate(ids, max_new_tokens=NEW, do_sample=False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(text, expected) for text in found)


def test_growing_and_shrinking(device):
    """Different batches and lengths one after another: each gets a cache and a graph that fit."""
    model = small_model(device=device)
    calls = [(2, 11, 8), (2, 7, 3), (3, 5, 6), (2, 11, 300), (1, 3, 9), (2, 11, 8), (2, 11, 8)]
    expected = [hf_generate(model, tiny_inputs(device, b, t), max_new_tokens=n) for b, t, n in calls]
    llmkernels.patch(model)
    for (b, t, n), text in zip(calls, expected, strict=True):
        assert torch.equal(hf_generate(model, tiny_inputs(device, b, t), max_new_tokens=n), text)
        assert torch.equal(llmkernels.generate(model, tiny_inputs(device, b, t), max_new_tokens=n), text)


def test_a_cache_that_grows(device, late, monkeypatch):
    """A cache starts small even if max_length is large, and grows; one that was returned grows, too."""
    monkeypatch.setattr(buffers, "AHEAD_TOKENS", 4)
    monkeypatch.setattr(buffers, "STEP", 4)
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    expected = hf_generate(model, ids, attention_mask=mask, max_new_tokens=40)
    handle = llmkernels.patch(model)
    for _ in range(2):
        assert torch.equal(hf_generate(model, ids, attention_mask=mask, max_new_tokens=40), expected)
    assert spare(model).capacity >= 56
    decoder(model).release()
    for _ in range(2):
        assert torch.equal(llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=40), expected)
    first = hf_generate(model, ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True)
    longer = torch.cat([mask, mask.new_ones(3, 5)], 1)
    options = {"past_key_values": first.past_key_values, "attention_mask": longer, "max_new_tokens": 35}
    assert torch.equal(hf_generate(model, first.sequences, **options), expected)
    assert set(handle.report().decode[0].calls) == {generate_step()}


def test_the_cache_is_used_again(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    first = spare(model)
    hf_generate(model, tiny_inputs(device, tokens=20))
    assert spare(model) is first
    assert first.capacity == 64
    hf_generate(model, tiny_inputs(device, 1))
    assert spare(model) is not first


def test_nothing_keeps_a_model_alive(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    llmkernels.generate(model, ids, max_new_tokens=3)
    cache = weakref.ref(spare(model))
    dead = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert dead() is None  # without the garbage collector, as unpatched
    finally:
        gc.enable()
    gc.collect()
    assert cache() is None


def test_a_graph_is_bound_to_its_addresses():
    """Weights that moved, which need a new graph on CUDA."""
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    hf_generate(model, ids)
    (program,) = decoder(model).programs.idle()
    addresses, program.recordings["a shape"] = program.addresses, Recording()
    hf_generate(model, ids)
    assert program.addresses == addresses
    assert program.recordings
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data.clone()
    hf_generate(model, ids)
    assert "a shape" not in program.recordings
    assert program.addresses != addresses


@pytest.mark.gpu
def test_graphs_are_captured_and_used_again():
    model, ids = small_model(device="cuda", dtype=torch.bfloat16), tiny_inputs("cuda")
    llmkernels.patch(model)
    first = hf_generate(model, ids)
    *_, program = decoder(model).programs.idle()
    graph = program.graph
    assert graph is not None
    assert torch.equal(hf_generate(model, ids), first)
    assert program.graph is graph
    with torch.no_grad():
        model.lm_head.weight.neg_()  # in place: the graph reads the new values
    changed = hf_generate(model, ids)
    assert program.graph is graph
    assert not torch.equal(changed, first)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_the_side = hf_generate(model, ids)
    side.synchronize()
    assert torch.equal(on_the_side, changed)
    unpatch(model)
    assert torch.equal(changed[:, 11], hf_generate(model, ids)[:, 11])
