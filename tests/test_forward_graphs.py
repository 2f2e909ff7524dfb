"""Forwards that replay the graph of an earlier one, on the CPU with what stands for a graph: the host looks only
meanwhile whether model and cache are still those that it was recorded with."""

import contextlib
import copy
import ctypes
import dataclasses
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

import llmkernels
from families import WINDOW, family_model
from generating import left_padded, loop, small_model
from hf_models import assert_close, tiny_inputs
from llmkernels.hf.step import attend, compose
from llmkernels.hf.step.decode import decoder
from llmkernels.hf.step.program import Program


def at(address, like):
    """A tensor like another one, at this address."""
    memory = (ctypes.c_uint8 * like.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).view(like.shape)


class Graph:
    """What replays a step on the CPU, as a CUDA graph does on a GPU: the launches of the recording, by address."""

    def __init__(self, step):
        self.tokens, self.counting = step.tokens, (step._ahead, step._positions)
        self.arguments = step.parts, step._hidden, step._where, step._caches, step._place.counters
        self.moved = self.arguments
        self.replays = self.points = 0
        with torch.inference_mode(False), torch.no_grad():  # a replay may come in any mode
            self.output = self.function().clone()

    def function(self):
        *arguments, counters = self.moved
        parts, hidden, where, _ = arguments
        compose.embed(parts, self.tokens, hidden, where.positions, counters, *self.counting)
        return compose.forward(*arguments)

    def replay(self):
        self.replays += 1
        self.output.copy_(self.function())

    def point(self, recorded, now):
        self.points += 1
        moves = dict(zip(recorded, now, strict=True))
        parts, hidden, where, caches, counters = self.arguments
        positions = at(moves.get(where.positions.data_ptr(), where.positions.data_ptr()), where.positions)
        counters = at(moves[counters.data_ptr()], counters)
        caches = [attend.LayerCache(*(at(moves[x.data_ptr()], x) for x in cache[:4])) for cache in caches]
        self.moved = parts, hidden, dataclasses.replace(where, positions=positions), caches, counters


@pytest.fixture
def recording(monkeypatch):
    def run(program, function, device, place):
        recording = program.recording(place)
        if recording.graph is not None:
            if place.addresses != recording.pointed:
                recording._point(place)
            recording.graph.replay()
            return recording.output
        if not recording.warm:
            recording.warm = True
            return function()
        recording.graph = Graph(function.__self__)
        recording.output = recording.graph.output
        recording.recorded = recording.pointed = place.addresses
        return recording.output

    monkeypatch.setattr(Program, "run", run)


def replays(model):
    return sum(graph.replays for graph in decoder(model).programs.graphs())


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "phi3"])
def test_a_graph_is_replayed(name, recording):
    model, ids = family_model(name), tiny_inputs(tokens=20)
    with torch.no_grad():
        expected = model(ids).logits
        llmkernels.patch(model)
        cache = model(ids[:, :10]).past_key_values
        for token in range(10, 20):
            found = model(ids[:, token : token + 1], past_key_values=cache).logits
            assert_close(found, expected[:, token : token + 1])
    assert replays(model) == 8


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_graph_is_replayed_when_a_window_moves(name, padded, recording, monkeypatch):
    """To the first rows of the same buffers, which it has the addresses of."""
    monkeypatch.setattr("llmkernels.hf.cache.buffers.STEP", 4)
    model, ids = family_model(name), tiny_inputs(batch=3)
    mask = left_padded("cpu") if padded else None
    expected = loop(model, ids, mask, new=40)
    llmkernels.patch(model)
    cache = DynamicCache(config=model.config)
    found = loop(model, ids, mask, new=40, cache=cache)
    assert torch.equal(found[0], expected[0])
    assert_close(found[1], expected[1])
    assert replays(model) == 37
    assert [layer.k.shape[1] for layer in cache.layers if layer.is_sliding] == [WINDOW + 4] * 2


CHANGES = {
    "weight": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight * 2)),
    "data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight * 2),
    "scale": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.3),
    "eps": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "embedding": lambda model: setattr(
        model.model.embed_tokens, "weight", torch.nn.Parameter(model.model.embed_tokens.weight * 2)
    ),
    "order": lambda model: setattr(
        model.model.layers[0].self_attn.o_proj.weight, "data", model.model.layers[0].self_attn.o_proj.weight.data.t()
    ),
    "in place": lambda model: model.lm_head.weight.mul_(2),
    "hook": lambda model: model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_model_is_noticed(how, recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    other = copy.deepcopy(model)
    with torch.no_grad():
        llmkernels.patch(model)
        caches = [each(ids[:, :10]).past_key_values for each in (model, other)]
        for token in range(10, 20):
            if token == 15:
                CHANGES[how](model)
                CHANGES[how](other)
            found, expected = (
                each(ids[:, token : token + 1], past_key_values=cache).logits
                for each, cache in zip((model, other), caches, strict=True)
            )
            assert_close(found, expected)


def test_frequencies_that_change_after_inference_mode(recording):
    """The tables of cos and sin, which a graph reads, are overwritten in another mode than they were made in."""
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    other = copy.deepcopy(model)
    llmkernels.patch(model)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            caches = [each(ids[:, :10]).past_key_values for each in (model, other)]
            for token in range(10, 14):
                found, expected = (
                    each(ids[:, token : token + 1], past_key_values=cache).logits
                    for each, cache in zip((model, other), caches, strict=True)
                )
                assert_close(found, expected)
        for each in (model, other):
            each.model.rotary_emb.inv_freq.mul_(0.5)


def test_a_cache_that_is_reordered_or_selected(recording):
    model, ids = family_model("qwen2"), tiny_inputs(batch=3, tokens=20)
    other = copy.deepcopy(model)
    llmkernels.patch(model)
    with torch.no_grad():
        caches = [each(ids[:, :10]).past_key_values for each in (model, other)]
        rows = torch.arange(3)
        for token in range(10, 20):
            if token == 14:
                rows = rows[torch.tensor([2, 0, 0])]
                [cache.reorder_cache(torch.tensor([2, 0, 0])) for cache in caches]
            if token == 17:
                rows = rows[:2]
                [cache.batch_select_indices(torch.tensor([0, 1])) for cache in caches]
            chunk = ids[rows, token : token + 1]
            found, expected = (
                each(chunk, past_key_values=cache).logits for each, cache in zip((model, other), caches, strict=True)
            )
            assert_close(found, expected)


def test_nothing_is_kept_alive(recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids[:, :10]).past_key_values
        for token in range(10, 14):
            model(ids[:, token : token + 1], past_key_values=cache)
    dead_cache, dead_weight = weakref.ref(cache), weakref.ref(model.model.norm.weight)
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
    gc.collect()
    assert dead_weight() is None
    del cache
    gc.collect()
    assert dead_cache() is None
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None


def test_a_graph_ends_where_its_tables_end(recording):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, ids = small_model(max_position_embeddings=16, rope_parameters=rope), tiny_inputs()
    expected = loop(model, ids, new=12)
    llmkernels.patch(model)
    for _ in range(2):
        found = loop(model, ids, new=12)
        assert torch.equal(found[0], expected[0])
        assert_close(found[1], expected[1])


def test_what_is_dropped_leaves_nothing(recording):
    """A graph was replayed, and only then the host saw that the model had changed."""
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    with torch.no_grad():
        llmkernels.patch(model)
        cache = model(ids[:, :10]).past_key_values
        for token in range(10, 15):
            model(ids[:, token : token + 1], past_key_values=cache)
        before = replays(model)
        calls = []
        hook = model.lm_head.register_forward_hook(lambda *arguments: calls.append(1))
        output = model(ids[:, 15:16], past_key_values=cache)
        assert before and calls == [1]
        assert cache.get_seq_length() == 16
        hook.remove()
        found = model(ids[:, 16:17], past_key_values=cache).logits
        unpatched = llmkernels.hf.unpatch(model)
        expected = model(ids[:, :17]).logits
    assert_close(output.logits, expected[:, 15:16])
    assert_close(found, expected[:, 16:17])
    del unpatched


def steps_and(model, ids, change, count=20):
    """Logits of steps on one cache, which is changed before one of them."""
    found = []
    with torch.no_grad():
        cache = model(ids[:, :10]).past_key_values
        for token in range(10, count):
            if token == 15:
                change(cache)
            found.append(model(ids[:, token : token + 1], past_key_values=cache).logits)
    return cache, torch.cat(found, 1)


def give_back_a_layer(cache):
    cache.layers[1].keys = cache.layers[1].keys.clone()


def another_buffer(cache):
    layer = cache.layers[1]
    if hasattr(layer, "k"):
        layer.k = layer.k.clone()


CACHE_CHANGES = {
    "nothing": lambda cache: None,
    "a layer": give_back_a_layer,
    "a buffer": another_buffer,
    "counters": lambda cache: hasattr(cache, "counters") and cache.counters.add_(3),
    "cropped": lambda cache: cache.crop(-2),
    "a list": lambda cache: setattr(cache, "layers", [*cache.layers]),
}


@pytest.mark.parametrize("how", CACHE_CHANGES)
def test_a_changed_cache_is_noticed(how, recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    _, expected = steps_and(model, ids, CACHE_CHANGES[how])
    llmkernels.patch(model)
    _, found = steps_and(model, ids, CACHE_CHANGES[how])
    assert_close(found, expected)
    assert replays(model) >= 3


def test_an_update_of_ones_own_is_called(recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    seen = []

    def watch(cache):
        update = cache.layers[1].update
        cache.layers[1].update = lambda *arguments, **options: seen.append(1) or update(*arguments, **options)

    _, expected = steps_and(model, ids, watch)
    llmkernels.patch(model)
    _, found = steps_and(model, ids, watch)
    assert_close(found, expected)
    assert len(seen) == 10


def test_layers_of_different_lengths(recording):
    """What the step would not see."""
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    llmkernels.patch(model)
    cache, _ = steps_and(model, ids, lambda cache: None, 15)
    cache.layers[0].crop(-1)
    before = replays(model)
    with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):  # as with transformers' cache
        model(ids[:, 15:16], past_key_values=cache)
    assert replays(model) == before


def test_a_step_that_raises_changes_nothing(recording, monkeypatch):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    _, expected = steps_and(model, ids, lambda cache: None)
    llmkernels.patch(model)

    def fail(cache):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(Graph, "replay", lambda graph: 1 // 0)
            model(ids[:, :1], past_key_values=cache)

    _, found = steps_and(model, ids, fail)
    assert_close(found, expected)
    assert replays(model) >= 8


@pytest.mark.parametrize("mask", ["hole", "negative ids"])
def test_arguments_that_are_found_wrong_late(mask, recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    with torch.no_grad():
        llmkernels.patch(model)
        cache = model(ids[:, :10]).past_key_values
        for token in range(10, 14):
            model(ids[:, token : token + 1], past_key_values=cache)
        assert replays(model)
        if mask == "negative ids":
            with pytest.raises(IndexError, match="index out of range"):
                model(-ids[:, 14:15] - 1, past_key_values=cache)
            assert cache.get_seq_length() == 14
        else:
            holes = torch.ones(2, 15, dtype=torch.long)
            holes[0, 3] = 0
            found = model(ids[:, 14:15], past_key_values=cache, attention_mask=holes).logits
            llmkernels.hf.unpatch(model)
            other = model(ids[:, :14]).past_key_values
            assert_close(found, model(ids[:, 14:15], past_key_values=other, attention_mask=holes).logits)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi3"])
def test_caches_share_a_graph(name, recording):
    """It is pointed at whichever cache is asked for, at several lengths, tokens at a time and paddings."""
    model = family_model(name)
    ids = tiny_inputs(batch=2, tokens=40)
    other = copy.deepcopy(model)
    llmkernels.patch(model)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        pairs = []
        for chat in range(4):
            given = {"attention_mask": mask[:, : 10 + chat]} if chat % 2 else {}
            pairs.append([each(ids[:, : 10 + chat], **given).past_key_values for each in (model, other)])
        for turn in range(12):
            ahead = 1 if turn % 3 else 2
            for chat, caches in enumerate(pairs):
                first = caches[1].get_seq_length()
                given = {"attention_mask": mask[:, : first + ahead]} if chat % 2 else {}
                chunk = ids[:, first : first + ahead]
                found, expected = (
                    each(chunk, past_key_values=cache, **given).logits
                    for each, cache in zip((model, other), caches, strict=True)
                )
                assert_close(found, expected)
    recorded = decoder(model).programs.graphs()
    assert len(recorded) == 2  # for one token at a time, and for two
    assert all(graph.points >= 8 for graph in recorded)


def test_generate_replays_the_graphs_of_earlier_calls(recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    llmkernels.patch(model)
    for call in range(4):
        cache = llmkernels.KVCache(model, 64) if call % 2 else None
        model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache)
    assert len(decoder(model).programs.graphs()) <= 2  # by the capacity
    assert replays(model) >= 4 * 7 - 6


def test_one_more_at_the_same_time_has_a_program_of_its_own(recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    inner = []

    class Streamer:
        def put(self, value):
            inner.append(model.generate(ids, max_new_tokens=4, do_sample=False) if len(inner) < 3 else None)

        def end(self):
            pass

    llmkernels.patch(model)
    found = model.generate(ids[:1], max_new_tokens=8, do_sample=False, streamer=Streamer())
    assert torch.equal(found, expected[:1])
    assert all(torch.equal(ids_, expected[:, :24]) for ids_ in inner[:3])
