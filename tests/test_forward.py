"""The forward of a patched model behind a cache, by the decode step: loops of one's own, beams, verified tokens."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, StaticCache

import llmkernels
from families import EXPECTED, FAMILIES, WINDOW, family_model
from generating import left_padded, small_model
from hf_models import CountOps, assert_close, lora, tiny_inputs
from llmkernels.hf.callers import forward
from llmkernels.hf.classes.cache_name import cache_name
from llmkernels.hf.errors import NoStep
from llmkernels.hf.step import compose, graphs
from llmkernels.hf.step.decode import decoder

NEW = 9
STEP = "by the decode step"
# Those that docs/models.md says to have a decode step, but for those whose tables would change on the way.
DESCRIBED = [
    name
    for name, runs in EXPECTED.items()
    if not runs.no_step and "original_max_position_embeddings" not in FAMILIES[name].options
]


@torch.no_grad()
def loop(model, ids, mask=None, new=NEW, cache=None, **options):
    """Greedy search by hand: the tokens, and the logits of each."""
    tokens, logits = [], []
    for _ in range(new):
        output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens.append(ids)
        logits.append(output.logits[:, -1])
        mask = mask if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.cat(tokens, 1), torch.stack(logits, 1)


def check(model, function, forwards=None):
    """A patched model gives what it gives unpatched, and all its forwards behind a cache are steps."""
    expected = function(model)
    handle = llmkernels.patch(model)
    found = function(model)
    if isinstance(expected, tuple):
        assert_close(found[1], expected[1])
        found, expected = found[0], expected[0]
    assert torch.equal(found, expected)
    counted = handle.report().decode[0].forwards
    assert set(counted) == {STEP}, counted
    assert forwards is None or counted[STEP] == forwards
    return handle


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_loop(name, device):
    check(family_model(name, device), lambda model: loop(model, tiny_inputs(device)), NEW - 1)


@pytest.mark.parametrize("name", DESCRIBED)
def test_padded_on_the_left(name, device):
    """Without position_ids they are those of the unpadded tokens, as transformers has it."""
    mask, ids = left_padded(device), tiny_inputs(device, 3)
    check(family_model(name, device), lambda model: loop(model, ids, mask), NEW - 1)


@pytest.mark.parametrize("name", DESCRIBED)
def test_beams(name, device):
    check(
        family_model(name, device),
        lambda model: model.generate(tiny_inputs(device), max_new_tokens=NEW, num_beams=3, do_sample=False),
    )


@pytest.mark.parametrize("name", DESCRIBED)
def test_prompt_lookup(name, device):
    ids = tiny_inputs(device, 1, 7).repeat(1, 3)
    options = {"max_new_tokens": NEW, "do_sample": False, "prompt_lookup_num_tokens": 3}
    check(family_model(name, device), lambda model: model.generate(ids, **options))


def test_assisted(device):
    assistant = small_model(device=device, seed=1)
    options = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": assistant}
    check(small_model(device=device), lambda model: model.generate(tiny_inputs(device, 1), **options))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_several_tokens(count, device):
    model, ids = small_model(device=device), tiny_inputs(device, 2, 10 + 3 * count)
    with torch.no_grad():
        expected = model(ids).logits
        llmkernels.patch(model)
        cache = model(ids[:, :10]).past_key_values
        for start in range(10, ids.shape[1], count):
            chunk = ids[:, start : start + count]
            assert_close(model(chunk, past_key_values=cache).logits, expected[:, start : start + count])
            assert cache.get_seq_length() == start + count
    assert decoder(model).forwards == {STEP: 3}


def test_logits_to_keep(device):
    model, ids = small_model(device=device), tiny_inputs(device, 2, 14)
    llmkernels.patch(model)
    with torch.no_grad():
        for keep in (0, 1, 3, torch.tensor([0, 2], device=device)):
            cache = model(ids[:, :10]).past_key_values
            everything = model(ids[:, 10:], past_key_values=copy.deepcopy(cache)).logits
            found = model(ids[:, 10:], past_key_values=cache, logits_to_keep=keep).logits
            assert torch.equal(found, everything[:, slice(-keep, None) if isinstance(keep, int) else keep])


def test_positions_of_the_caller(device):
    """Positions that begin elsewhere, as those of padded sequences."""
    mask, ids = left_padded(device), tiny_inputs(device, 3)

    @torch.no_grad()
    def run(model):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(ids, attention_mask=mask, position_ids=positions)
        last, whole = output.logits[:, -1:].argmax(-1), torch.cat([mask, mask.new_ones(3, 2)], 1)
        return last, model(
            last.expand(3, 2),
            attention_mask=whole,
            position_ids=positions[:, -1:] + torch.tensor([1, 2], device=device),
            past_key_values=output.past_key_values,
        ).logits

    check(small_model(device=device), run, 1)


def test_the_cache_becomes_ours_in_place(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    cache = DynamicCache(config=model.config)
    expected, _ = loop(model, ids)
    llmkernels.patch(model)
    found, _ = loop(model, ids, cache=cache)
    assert torch.equal(found, expected)
    assert isinstance(cache, llmkernels.KVCache)
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == ids.shape[1] + NEW - 1
    assert cache.layers[0].keys.shape == (2, 1, ids.shape[1] + NEW - 1, 64)


def test_a_chat_goes_on_with_a_returned_cache(device):
    model, ids = small_model(device=device), tiny_inputs(device)

    def chat(model):
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        first = model.generate(ids, **options)
        prompt = torch.cat([first.sequences, ids[:, :3]], 1)
        return model.generate(prompt, past_key_values=first.past_key_values, **options).sequences

    check(model, chat)


@pytest.mark.parametrize("what", ["output_hidden_states", "output_attentions"])
def test_what_only_the_modules_have(what, device):
    model, ids = small_model(device=device, attn_implementation="eager"), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        output = model(ids[:, :1], past_key_values=cache, **{what: True})
    assert getattr(output, what.removeprefix("output_")) is not None
    assert decoder(model).forwards == {f"by the model's forward: {what}": 1}


def test_hooks_see_every_call(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda *arguments: seen.append(1))
    loop(model, ids)
    assert len(seen) == NEW
    assert STEP not in decoder(model).forwards


def test_gradients_and_training_go_by_the_modules(device):
    model, ids = small_model(device=device, attention_dropout=0.1), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
    assert model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits.requires_grad
    with torch.no_grad():
        model.train()(ids[:, :1], past_key_values=cache)
    reasons = "gradients are enabled", "model.layers.0.self_attn is in training mode"
    assert decoder(model).forwards == {f"by the model's forward: {reason}": 1 for reason in reasons}


def test_adapters_go_by_the_modules(device):
    model, ids = lora(small_model(device=device)), tiny_inputs(device)
    expected = loop(model, ids)
    llmkernels.patch(model)
    assert_close(loop(model, ids)[1], expected[1])


def test_a_mask_that_is_not_padding(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    mask = torch.ones_like(ids)
    mask[0, 5] = 0
    expected = loop(model, ids, mask)
    llmkernels.patch(model)
    assert_close(loop(model, ids, mask)[1], expected[1])
    assert STEP not in decoder(model).forwards


def test_results_stay(device):
    """The logits of a call are not overwritten by the next one."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        first = model(ids[:, :1], past_key_values=cache).logits
        kept = first.clone()
        for _ in range(4):
            model(ids[:, 1:2], past_key_values=cache)
    assert torch.equal(first, kept)


def test_a_cache_that_grows(device):
    model, ids = small_model(device=device, max_position_embeddings=512), tiny_inputs(device)
    expected, _ = loop(model, ids, new=70)
    llmkernels.patch(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmkernels.hf.cache.buffers.AHEAD_TOKENS", 1)
        found, _ = loop(model, ids, new=70)
    assert torch.equal(found, expected)


# --- graphs of earlier calls


class Graph:
    """What replays a step on the CPU, as a CUDA graph does on a GPU: the launches of the recording, by address."""

    def __init__(self, step):
        arguments = step.parts, step._hidden, step._where, step._caches
        self.function = lambda: compose.forward(*arguments)
        self.output, self.replays = self.function(), 0

    def replay(self):
        self.replays += 1
        self.output.copy_(self.function())


@pytest.fixture
def recording(monkeypatch):
    def run(program, function, device):
        if program.graph is not None:
            program.graph.replay()
            return program.output
        if not program.warm:
            program.warm = True
            return function()
        program.graph = Graph(function.__self__)
        program.output = program.graph.output
        return program.output

    monkeypatch.setattr(graphs.Program, "run", run)


def replays(model, cache):
    programs = [step.program for step in decoder(model)._steps[cache].values()]
    return sum(program.graph.replays for program in programs if program.graph)


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
    assert replays(model, cache) == 8


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
    assert replays(model, cache) == 37
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


def test_two_threads_and_two_caches(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    expected, _ = loop(model, ids)
    llmkernels.patch(model)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for found, _ in pool.map(lambda _: loop(model, ids), range(8)):
            assert torch.equal(found, expected)


def test_ops_of_a_step(device):
    """The step, and nothing of the modules."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        with CountOps() as counter:
            model(ids[:, :1], past_key_values=cache)
    assert "rope" not in counter.counts
    assert counter.counts["rope_decode_attention"] == 2


# --- what a step may do on a GPU, seen on the CPU


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_step_can_be_recorded(name, monkeypatch):
    """It calls ops of the library and takes views, and nothing else: that is what a recorder allows."""
    runs = []

    def run(program, function, device):
        runs.append(function)
        with graphs._OnlyOurs():
            return function()

    monkeypatch.setattr(graphs.Program, "run", run)
    model, ids = family_model(name), tiny_inputs()
    llmkernels.patch(model)
    loop(model, ids, new=3)
    llmkernels.generate(model, ids, max_new_tokens=3)
    model.generate(ids.repeat(1, 3)[:1], max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3)
    assert len(runs) >= 5


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
        before = replays(model, cache)
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
    cache, found = steps_and(model, ids, CACHE_CHANGES[how])
    assert_close(found, expected)
    assert replays(model, cache) >= 3


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
    before = replays(model, cache)
    with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):  # as with transformers' cache
        model(ids[:, 15:16], past_key_values=cache)
    assert replays(model, cache) == before


def test_a_step_that_raises_changes_nothing(recording, monkeypatch):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    _, expected = steps_and(model, ids, lambda cache: None)
    llmkernels.patch(model)

    def fail(cache):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(Graph, "replay", lambda graph: 1 // 0)
            model(ids[:, :1], past_key_values=cache)

    cache, found = steps_and(model, ids, fail)
    assert_close(found, expected)
    assert replays(model, cache) >= 8


@pytest.mark.parametrize("mask", ["hole", "negative ids"])
def test_arguments_that_are_found_wrong_late(mask, recording):
    model, ids = family_model("qwen2"), tiny_inputs(tokens=20)
    with torch.no_grad():
        llmkernels.patch(model)
        cache = model(ids[:, :10]).past_key_values
        for token in range(10, 14):
            model(ids[:, token : token + 1], past_key_values=cache)
        assert replays(model, cache)
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


def test_tokens_that_there_are_none_of(device):
    if device == "cuda":
        pytest.skip("on a GPU it ends the process, as unpatched")
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        for wrong in (-1, -model.config.vocab_size, model.config.vocab_size):
            with pytest.raises(IndexError):
                model(torch.full((2, 1), wrong), past_key_values=cache)
            assert cache.get_seq_length() == ids.shape[1]
        model(ids[:, :1], past_key_values=cache)
    assert decoder(model).forwards == {STEP: 1}


def test_a_hook_for_a_while(device):
    """While it is there the modules run, and soon after it has gone the step does."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    calls = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *arguments: calls.append(1))
    with torch.no_grad():
        cache = model(ids).past_key_values
        for count in range(20):
            if count == 6:
                hook.remove()
            model(ids[:, :1], past_key_values=cache)
    assert len(calls) == 7
    assert decoder(model).forwards[STEP] >= 10


def test_what_is_kept_is_bounded(device, monkeypatch):
    monkeypatch.setattr("llmkernels.hf.step.decode.MAX_STEPS", 3)
    model, ids = small_model(device=device), tiny_inputs(device, 1, 20)
    llmkernels.patch(model)
    with torch.no_grad():
        expected = model(ids).logits
        caches = [model(ids[:, :10]).past_key_values for _ in range(5)]
        for token in range(10, 14):
            for cache in caches:
                found = model(ids[:, token : token + 1], past_key_values=cache).logits
                assert_close(found, expected[:, token : token + 1])
    state = decoder(model)
    assert len(state._recent) == 3
    assert sum(map(len, state._steps.values())) == 3
    assert state.forwards == {STEP: 20}


def test_other_caches_are_not_asked(device):
    """The length of a static cache is on the device: to ask for it would wait, and break a capture of the user's."""
    model, ids = small_model(device=device), tiny_inputs(device)
    cache = StaticCache(config=model.config, max_cache_len=32)
    expected, _ = loop(model, ids, cache=StaticCache(config=model.config, max_cache_len=32))
    llmkernels.patch(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StaticCache, "get_seq_length", lambda *arguments: pytest.fail("asked"))
            with pytest.raises(NoStep, match="the cache given is a StaticCache"):
                forward._check_call(model, {"input_ids": ids, cache_name(): cache})
    found, _ = loop(model, ids, cache=StaticCache(config=model.config, max_cache_len=32))
    assert torch.equal(found, expected)
