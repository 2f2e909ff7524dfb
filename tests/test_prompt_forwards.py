"""Forwards of prompts without a cache, with an empty one of the caller, and with labels."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import llmkernels
from families import family_model
from generating import small_model
from hf_models import assert_close, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch
from llmkernels.hf.cache.adopted import fill, new_cache
from llmkernels.hf.callers.positions import LOSS_OF_PADDING
from llmkernels.hf.classes.cache_name import cache_name
from llmkernels.hf.errors import NoStep
from llmkernels.hf.report import STEP
from llmkernels.hf.report import by_forward as by_forward_of
from llmkernels.hf.step import prompt
from llmkernels.hf.step.describe import describe
from prompting import LONG, compose_forwards, masked, prompts, run_padded
from test_family_strangers import made
from test_foreign_models import fresh, replace
from test_forward import DESCRIBED


@pytest.fixture
def padded(monkeypatch):
    run_padded(monkeypatch)


@pytest.fixture
def by_forward(monkeypatch):
    compose_forwards(monkeypatch)


ANOTHER = "by the model's forward: the modules make a cache of another kind, or none"


@pytest.mark.parametrize(
    ("made_by", "options", "way"),
    [
        ("StaticCache(config=self.config, max_cache_len=32)", {"use_cache": True}, ANOTHER),
        ("None", {"use_cache": True}, ANOTHER),
        ("DynamicCache(config=self.config)", {}, ANOTHER),  # which it makes only if it is asked for
        ("DynamicCache(config=self.config)", {"use_cache": True}, STEP),
    ],
    ids=["static", "none", "not asked for", "asked for"],
)
@torch.no_grad()
def test_the_cache_that_the_modules_make(made_by, options, way, by_forward):
    beacon = fresh("beacon")
    beacon.StaticCache = StaticCache
    source = f"""
def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, logits_to_keep=0, **kwargs):
    memory = kwargs.pop(CACHE, None)
    if use_cache and memory is None:
        memory = {made_by}
    return original(self, input_ids, attention_mask, position_ids, False, logits_to_keep, **kwargs, **{{CACHE: memory}})
"""
    replace(beacon, "BeaconForCausalLM.forward", source)
    model, ids = made(beacon.BeaconForCausalLM), tiny_inputs(tokens=8)
    expected = model(ids, **options)
    llmkernels.patch(model)
    for _ in range(2):
        found = model(ids, **options)
        assert_close(found.logits, expected.logits)
        assert isinstance(found.get(beacon.CACHE), type(expected.get(beacon.CACHE)))
    assert prompts(model) == {way: 2}


@torch.no_grad()
def test_a_config_that_makes_no_cache(by_forward):
    """It says nothing of other models of its class."""
    ids = tiny_inputs(tokens=8)
    for use_cache in (False, True):
        model = small_model(rms_norm_eps=3e-5, use_cache=use_cache)  # that no other test has
        llmkernels.patch(model)
        assert (model(ids).past_key_values is None) == (not use_cache)
        assert model(ids, use_cache=True).past_key_values is not None
        assert model(ids, use_cache=False).past_key_values is None
        assert prompts(model) == {STEP: 3}


@pytest.mark.parametrize("how", ["padded", "as it is"])
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_prompts_without_a_cache(name, how, by_forward, request):
    """As in an evaluation: also longer than a sliding window, and beside forwards with a cache."""
    if how == "padded":
        request.getfixturevalue("padded")
    model = family_model(name)
    calls = [(*masked("cpu", tokens, seed=tokens), tokens % 2) for tokens in (3, 12, 7, 5, 7)]

    def run(model):
        for ids, options, kept in calls:
            mask = options["attention_mask"]
            for use_cache in (False, True):
                output = model(ids, attention_mask=mask, use_cache=use_cache, logits_to_keep=kept)
                assert (cache_name() in output) == use_cache
                yield output.logits * mask[:, -output.logits.shape[1] :, None]

    expected = list(run(model))
    llmkernels.patch(model)
    for ours, theirs in zip(run(model), expected, strict=True):
        assert_close(ours, theirs)
    counted = prompts(model)
    assert counted[STEP] >= 9 and counted.total() == 10


CACHES = {
    "with layers": lambda model: DynamicCache(config=model.config),
    "without layers": lambda model: DynamicCache(),
    "one of ours": lambda model: llmkernels.KVCache(model, 64),
}


@pytest.mark.parametrize("how", ["padded", "as it is"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_an_empty_cache_of_the_caller(name, kind, how, by_forward, request):
    """It is filled, and stays the same object with the same layers; then come steps, and copies of it."""
    if how == "padded":
        request.getfixturevalue("padded")
    model = family_model(name)
    calls = [masked("cpu", tokens, seed=tokens) for tokens in (3, 6, 5, 6)]

    def run(model):
        for ids, options in calls:
            cache, mask = CACHES[kind](model), options["attention_mask"]
            layers = list(cache.layers)
            output = model(ids, attention_mask=mask, **{cache_name(): cache})
            yield output.logits * mask[:, :, None]
            assert output[cache_name()] is cache
            assert all(one is other for one, other in zip(layers, cache.layers, strict=False))
            assert cache.get_seq_length() == ids.shape[1]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            for given in (copy.deepcopy(cache), cache):
                yield model(ids[:, :1], attention_mask=mask, **{cache_name(): given}).logits

    expected = list(run(model))
    llmkernels.patch(model)
    for ours, theirs in zip(run(model), expected, strict=True):
        assert_close(ours, theirs)
    counted = prompts(model)
    assert counted.total() == 4
    if kind == "one of ours" or not any(DynamicCache(config=model.config).is_sliding):
        assert counted == {STEP: 4}
    else:
        assert set(counted) <= ({OTHER} if kind == "without layers" else {STEP, LONG})


OTHER = by_forward_of("the cache given keeps other tokens than the model's own")


@torch.no_grad()
def test_empty_caches_that_the_modules_fill(by_forward):
    model, ids = small_model(), tiny_inputs(tokens=8)
    expected = model(ids).logits
    llmkernels.patch(model)

    class Own(DynamicCache):
        pass

    for cache in (StaticCache(config=model.config, max_cache_len=32), Own(config=model.config)):
        assert_close(model(ids, past_key_values=cache).logits, expected)
    assert not prompts(model)
    few = DynamicCache(config=model.config)
    few.layers.pop()
    with pytest.raises(IndexError):
        model(ids, past_key_values=few)
    replaced = DynamicCache(config=model.config)
    calls = []
    replaced.update = lambda *args, **kwargs: calls.append(0) or DynamicCache.update(replaced, *args, **kwargs)
    assert_close(model(ids, past_key_values=replaced).logits, expected)
    assert len(calls) == len(model.model.layers)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    cache.crop(-8)
    assert cache.get_seq_length() == 0
    assert_close(model(ids, past_key_values=cache).logits, expected)
    assert cache.get_seq_length() == 8
    assert prompts(model)[STEP] == 1
    with pytest.raises(ValueError, match="capacity must be at least 8"):
        model(ids, past_key_values=llmkernels.KVCache(model, 7))


def test_a_cache_without_layers_gets_no_window():
    """Whatever the description says: transformers would give it layers that keep all tokens."""
    model = family_model("mistral")
    llmkernels.patch(model)
    made = new_cache(model.config, describe(model), 1, 2)
    given = DynamicCache()
    with pytest.raises(NoStep, match="keeps other tokens"):
        fill(given, made)
    assert type(given) is DynamicCache and not given.layers


@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_the_loss_of_a_prompt(name, by_forward):
    """As in an evaluation by Trainer: of all tokens, or divided by a number of them. Behind padding it depends on
    logits of the padding, which are of no use."""
    model, (ids, padded) = family_model(name), masked("cpu", 4)
    labels, whole = ids.masked_fill(ids % 5 == 1, -100), {"attention_mask": torch.ones_like(ids)}
    calls = [{}, {"num_items_in_batch": 7}, {"use_cache": False, **whole}, {"attention_mask": padded["attention_mask"]}]

    def run(model):
        return [model(ids, labels=labels, **call) for call in calls]

    expected = run(model)
    llmkernels.patch(model)
    for ours, theirs in zip(run(model), expected, strict=True):
        assert_close(ours.loss, theirs.loss)
        assert_close(ours.logits, theirs.logits)
        assert ours.keys() == theirs.keys()
    assert prompts(model) == {STEP: 3, by_forward_of(LOSS_OF_PADDING): 1}


@torch.no_grad()
def test_a_loss_of_another_kind(by_forward):
    """Of the class: the modules compute it. Of the model: its own is called."""
    beacon, ids = fresh("beacon"), tiny_inputs(tokens=8)
    model = small_model()
    expected = 2 * model(ids, labels=ids).loss
    llmkernels.patch(model)
    plain = model.loss_function
    model.loss_function = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
    assert_close(model(ids, labels=ids).loss, expected)
    assert_close(model.train()(ids, labels=ids).loss, expected)
    assert prompts(model)[STEP] == 1 and prompts(model).total() == 2
    replace(
        beacon,
        "BeaconForCausalLM.forward",
        """
def forward(self, input_ids=None, labels=None, **kwargs):
    output = original(self, input_ids, **kwargs)
    loss = None if labels is None else self.loss_function(output.logits, labels, self.config.vocab_size) + 1
    return CausalLMOutputWithPast(loss=loss, logits=output.logits, **{CACHE: output.get(CACHE)})
""",
    )
    model = made(beacon.BeaconForCausalLM)
    expected = model(ids, labels=ids, use_cache=False).loss
    llmkernels.patch(model)
    assert_close(model(ids, labels=ids, use_cache=False).loss, expected)
    reason = "labels in training mode, or of which the modules compute another loss"
    assert list(prompts(model)) == [by_forward_of(reason)]


@pytest.mark.parametrize("how", ["padded", "as it is"])
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_hidden_states(name, how, by_forward, request):
    """Of all layers, as the modules return them, whatever else is asked for."""
    if how == "padded":
        request.getfixturevalue("padded")
    model, ids = family_model(name), tiny_inputs(tokens=5)
    calls = [{}, {"use_cache": False}, {"logits_to_keep": 1}, {"labels": ids}]

    def run(model):
        return [model(ids, output_hidden_states=True, **call) for call in calls]

    expected = run(model)
    llmkernels.patch(model)
    for _ in range(2):
        for ours, theirs in zip(run(model), expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert_close(ours.logits, theirs.logits)
            assert len(ours.hidden_states) == len(theirs.hidden_states)
            for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
                assert_close(one, other)
    assert prompts(model) == {STEP: 8}
    model(ids)
    assert model(ids).hidden_states is None


@pytest.mark.parametrize("kept", [torch.tensor([0, 2]), torch.tensor([0]), torch.tensor(-1), -2])
@torch.no_grad()
def test_other_logits_to_keep_than_the_last_ones(kept, by_forward):
    """The modules keep them, whether such a prompt has run before or not."""
    model, ids = family_model("llama"), tiny_inputs(tokens=5)

    def run():
        return [model(ids, use_cache=use_cache, logits_to_keep=kept).logits for use_cache in (True, False)]

    expected = run()
    llmkernels.patch(model)
    for _ in range(2):
        for ours, theirs in zip(run(), expected, strict=True):
            assert_close(ours, theirs)
        model(ids)
    assert prompts(model) == {STEP: 2, by_forward_of("logits_to_keep is no number of tokens"): 4}


@torch.no_grad()
def test_hidden_states_of_another_kind(by_forward):
    """Beacon's class returns none."""
    beacon, ids = fresh("beacon"), tiny_inputs(tokens=8)
    model = made(beacon.BeaconForCausalLM)
    llmkernels.patch(model)
    assert model(ids, use_cache=False, output_hidden_states=True).hidden_states is None
    assert list(prompts(model)) == [by_forward_of("output_hidden_states, of which the modules return others")]


@torch.no_grad()
def test_layers_share_the_buffers_of_a_prompt_without_a_cache(by_forward, monkeypatch):
    """One layer's, as the modules would take no more; but where the prompt has a graph, which may run again for a
    cache."""
    model, ids = small_model(), tiny_inputs(tokens=8)
    llmkernels.patch(model)
    made = []
    make = prompt.cache_of_a_call
    monkeypatch.setattr(prompt, "cache_of_a_call", lambda *sizes: made.append(make(*sizes)) or made[-1])
    expected = model(ids, use_cache=False).logits
    first, *others = made.pop().layers
    assert others and all(layer.k is first.k and layer.v is first.v for layer in others)
    monkeypatch.setattr(prompt, "padded_length", lambda *_: 16)
    assert_close(model(ids, use_cache=False).logits, expected)
    first, *others = made.pop().layers
    assert all(layer.k is not first.k for layer in others)
    assert_close(model(ids).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_prompts_without_a_cache_on_a_gpu(name):
    """Graphs that they share with those that make one, and losses."""
    model, exact = (family_model(name, "cuda", dtype) for dtype in (torch.bfloat16, torch.float32))
    llmkernels.patch(model)
    for tokens in (9, 9, 9, 24, 17):
        ids, options = masked("cuda", tokens, seed=tokens)
        mask = options["attention_mask"]
        for use_cache in (False, True):
            output = model(ids, attention_mask=mask, logits_to_keep=1, use_cache=use_cache)
            expected = exact(ids, attention_mask=mask).logits[:, -1:]
            assert_close(output.logits.float(), expected, 4 * rounding(torch.bfloat16))
            assert (cache_name() in output) == use_cache
        loss = model(ids, labels=ids, use_cache=False).loss
        assert_close(loss, exact(ids, labels=ids).loss, 0.03)
    assert prompts(model)[STEP] >= 10 and prompts(model).total() == 15  # those with a cache may not fit into a window
    unpatch(model)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma3"])
@torch.no_grad()
def test_an_empty_cache_on_a_gpu(name, kind):
    """Prompts by graphs, then a step by one, in turn with caches that the model makes."""
    model, exact = (family_model(name, "cuda", dtype) for dtype in (torch.bfloat16, torch.float32))
    llmkernels.patch(model)
    for tokens in (6, 6, 6, 24, 6):
        ids, options = masked("cuda", tokens, seed=tokens)
        mask = options["attention_mask"]
        text, longer = torch.cat([ids, ids[:, :1]], 1), torch.cat([mask, mask[:, -1:]], 1)
        expected = exact(text, attention_mask=longer).logits
        for cache in (CACHES[kind](model), None):
            output = model(ids, attention_mask=mask, logits_to_keep=1, **{cache_name(): cache})
            assert_close(output.logits[:, 0].float(), expected[:, -2], 4 * rounding(torch.bfloat16))
            step = model(text[:, -1:], attention_mask=longer, **{cache_name(): output[cache_name()]})
            assert_close(step.logits[:, 0].float(), expected[:, -1], 4 * rounding(torch.bfloat16))
    assert prompts(model)[STEP] >= 4 and prompts(model).total() == 10
    unpatch(model)


@pytest.mark.gpu
@torch.no_grad()
def test_memory_of_a_long_prompt_without_a_cache():
    heads = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    options = {"max_position_embeddings": 8192, "num_hidden_layers": 12}
    model = tiny_model("qwen2", "cuda", torch.bfloat16, **heads, **options)
    ids = tiny_inputs("cuda", tokens=6000)
    expected = model(ids, logits_to_keep=1).logits
    llmkernels.patch(model)
    taken = []
    for use_cache in (True, False):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            output = model(ids, logits_to_keep=1, use_cache=use_cache)
            peak = torch.cuda.max_memory_allocated() - before
            assert_close(output.logits.float(), expected.float(), 4 * rounding(torch.bfloat16))
            del output
        taken.append(peak)
    of_a_layer = 2 * ids.numel() * 4 * 64 * 2
    assert taken[0] - taken[1] > 10 * of_a_layer
    assert prompts(model) == {STEP: 4}
