"""The cache that generate() returns or is given: a DynamicCache of transformers, as unpatched, with the decode step."""

import contextlib
import copy
import io

import pytest
import torch
from transformers import DynamicCache

import llmkernels
from generating import NEW, generate_step, hf_generate, left_padded, small_model
from hf_models import FAMILIES, LAYERS, assert_close, count_ops, logits_of, tiny_inputs
from llmkernels.hf import unpatch
from llmkernels.hf.step.decode import Decoder, decoder

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def returned_cache(model, ids, **options):
    return hf_generate(model, ids, return_dict_in_generate=True, **options).past_key_values


def patched_and_not(model, call):
    """What call() returns patched and unpatched. Patched, every token comes from the decode step."""
    llmkernels.patch(model)
    found = call()
    assert list(decoder(model).calls) == [generate_step()]
    unpatch(model)
    return found, call()


def assert_same_cache(found, expected):
    assert type(found) is type(expected) is DynamicCache
    assert len(found) == len(expected)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert type(ours) is type(theirs)
        facts = [
            # Layers note their dtype up to transformers 5.23.
            (vars(x).keys(), x.get_seq_length(), getattr(x, "dtype", None), x.keys.dtype, x.device, x.keys.stride())
            for x in (ours, theirs)
        ]
        assert facts[0] == facts[1]
        assert ours.keys.untyped_storage().nbytes() == theirs.keys.untyped_storage().nbytes()
        assert_close(ours.keys, theirs.keys)
        assert_close(ours.values, theirs.values)


def pickled(cache):
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


OPERATIONS = {
    "nothing": lambda cache: cache,
    "copy": copy.deepcopy,
    "pickle": pickled,
    "crop": lambda cache: cache.crop(-3),
    "select a list": lambda cache: cache.batch_select_indices([1, 0]),
    "select a tensor": lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "iterate": lambda cache: DynamicCache([(k, v) for k, v, _ in cache]),
    "set": lambda cache: [setattr(layer, "keys", layer.keys * 2) for layer in cache.layers] and None,
    "offload": lambda cache: [layer.offload() for layer in cache.layers] and None,
    "prefetch": lambda cache: [layer.prefetch() for layer in cache.layers] and None,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_transformers_returns(family, operation, late):
    model, ids = small_model(family), tiny_inputs()

    def call():
        cache = returned_cache(model, ids)
        return OPERATIONS[operation](cache) or cache

    assert_same_cache(*patched_and_not(model, call))


@pytest.mark.parametrize("step", [2, 64])
@pytest.mark.parametrize("tokens", [2, 3, 11])
def test_sliding_windows(tokens, step, device, late, monkeypatch):
    """Also where the cache on loan has little room, and drops what the window has dropped."""
    monkeypatch.setattr("llmkernels.hf.cache.buffers.STEP", step)
    model, ids = small_model(device=device, **WINDOW), tiny_inputs(device, tokens=tokens)
    for given in (None, DynamicCache, lambda: DynamicCache(config=model.config)):
        options = lambda: {} if given is None else {"past_key_values": given()}  # noqa: B023, E731
        found, expected = patched_and_not(model, lambda: returned_cache(model, ids, **options()))  # noqa: B023
        assert_same_cache(found, expected)
        # Generation continues with that cache.
        more = torch.cat([ids, tiny_inputs(device, tokens=NEW + 2)], 1)
        model_text = [hf_generate(model, more, past_key_values=cache) for cache in (found, expected)]
        assert torch.equal(*model_text)


def test_with_gradients_enabled_later(device):
    model, ids = small_model(device=device), tiny_inputs(device)

    def call():
        cache = returned_cache(model, ids)
        model.zero_grad()
        model(tiny_inputs(device, tokens=3, seed=5), past_key_values=cache).logits.sum().backward()
        assert cache.layers[0].keys.requires_grad
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    found, expected = patched_and_not(model, call)
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("make", ["empty", "of the config", "returned", "by the forward", "by gradients", "adopted"])
def test_a_cache_of_the_caller(make, device, late):
    """It is filled as by transformers, and the call runs the decode step."""
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3, 20), left_padded(device)
    whole = torch.cat([mask, mask.new_ones(3, 9)], 1)
    start = {"empty": 0, "of the config": 0}.get(make, 11)

    def call():
        if make == "adopted":
            cache = DynamicCache([(k, v) for k, v, _ in returned_cache(model, ids[:, :4], max_new_tokens=8)])
        elif make == "returned":
            cache = returned_cache(model, ids[:, :4], max_new_tokens=8)
        else:
            cache = DynamicCache() if make in ("empty", "adopted") else DynamicCache(config=model.config)
        if make == "by the forward":
            logits_of(model, ids[:, :11], attention_mask=mask, past_key_values=cache)
        if make == "by gradients":
            model(ids[:, :11], attention_mask=mask, past_key_values=cache)
        before = cache.layers[0].keys if start else None
        kept = before.clone() if start else None
        texts = []
        for tokens in (20, 20 + NEW - 1 + 3):  # and again, with the tokens of the first call in it
            text = ids if not texts else torch.cat([texts[0], tiny_inputs(device, 3, 2, seed=9)], 1)
            longer = torch.cat([whole, whole.new_ones(3, text.shape[1] - 20)], 1)
            texts.append(hf_generate(model, text, attention_mask=longer, past_key_values=cache))
            assert cache.get_seq_length() == texts[-1].shape[1] - 1 >= tokens
        assert before is None or torch.equal(before, kept)
        return texts, cache

    (texts, found), (expected_texts, expected) = patched_and_not(model, call)
    assert all(map(torch.equal, texts, expected_texts))
    assert_same_cache(found, expected)


def test_the_step_runs_on_it(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    cache = returned_cache(model, ids, max_new_tokens=3)
    text = torch.cat([ids, tiny_inputs(device, tokens=6)], 1)
    counts = count_ops(hf_generate, model, text, past_key_values=cache)
    assert "rope" not in counts  # which the modules run
    assert counts["decode_attention"] == LAYERS  # of the six new tokens
    assert counts.get("rope_decode_attention", 0) == LAYERS * (NEW - 1) or device == "cuda"


def test_an_exception_leaves_what_transformers_leaves(device, late):
    model, ids = small_model(device=device), tiny_inputs(device)

    def call():
        cache = DynamicCache(config=model.config)

        def fail(input_ids, scores):
            if input_ids.shape[1] == 15:
                raise RuntimeError("enough")
            return scores

        with pytest.raises(RuntimeError, match="enough"):
            hf_generate(model, ids, past_key_values=cache, logits_processor=[fail])
        return cache

    assert_same_cache(*patched_and_not(model, call))


@pytest.mark.parametrize("window", [{}, WINDOW])
def test_a_call_that_fails_at_once_adds_nothing(window, monkeypatch):
    model, ids = small_model(**window), tiny_inputs()
    llmkernels.patch(model)
    cache = DynamicCache(config=model.config)
    logits_of(model, ids[:, :9], past_key_values=cache)
    before = copy.deepcopy(cache)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("at the prefill")

    monkeypatch.setattr(Decoder, "run_prompt", fail)
    with pytest.raises(torch.OutOfMemoryError, match="at the prefill"):
        hf_generate(model, ids, past_key_values=cache)
    assert_same_cache(cache, before)


class Other(DynamicCache):
    pass


def offloading(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    return cache


def other_dtype(model):
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(2, 1, 3, 64).half(), torch.zeros(2, 1, 3, 64).half(), layer)
    return cache


def uneven(model):
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 3, 64), torch.zeros(2, 1, 3, 64), 0)
    cache.update(torch.zeros(2, 1, 2, 64), torch.zeros(2, 1, 2, 64), 1)
    return cache


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda model: Other(), "the cache given is a Other"),
        (offloading, "does more than to hold keys and values"),
        (lambda model: DynamicCache(config=small_model(num_hidden_layers=3).config), "the cache has 3 layers"),
        (lambda model: DynamicCache(config=small_model(**WINDOW).config), "another sliding window"),
        (other_dtype, "made for other keys and values"),
        (uneven, "differ in length"),
    ],
    ids=["subclass", "offloading", "layers", "window", "dtype", "uneven"],
)
def test_caches_left_to_transformers(make, reason):
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    with contextlib.suppress(RuntimeError, IndexError, AssertionError, AttributeError):  # as unpatched
        hf_generate(model, ids, past_key_values=make(model))
    assert reason in str(decoder(model).calls)


def test_a_cache_given_away_is_not_used_again(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    first = returned_cache(model, ids)
    kept = copy.deepcopy(first)
    hf_generate(model, tiny_inputs(device, seed=7))
    llmkernels.generate(model, tiny_inputs(device, seed=7), max_new_tokens=NEW)
    assert_same_cache(first, kept)


def test_in_inference_mode(device):
    model, ids = small_model(device=device), tiny_inputs(device)

    def call():
        with torch.inference_mode():
            cache = returned_cache(model, ids)
            return hf_generate(model, torch.cat([ids, ids], 1), past_key_values=cache), cache

    (text, cache), (expected_text, expected) = patched_and_not(model, call)
    assert torch.equal(text, expected_text)
    assert_same_cache(cache, expected)


def test_lean_takes_one_too(device, late):
    model, ids = small_model(device=device), tiny_inputs(device)
    whole = hf_generate(model, ids)
    llmkernels.patch(model)
    cache = DynamicCache(config=model.config)
    part = llmkernels.generate(model, ids, max_new_tokens=3, past_key_values=cache)
    assert cache.get_seq_length() == 13
    assert torch.equal(llmkernels.generate(model, part, max_new_tokens=NEW - 3, past_key_values=cache), whole)
    assert list(decoder(model).calls) == [generate_step()]
    assert cache.get_seq_length() == 11 + NEW - 1
