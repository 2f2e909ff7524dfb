"""model.generate() of a patched model, by the decode step: the same tokens, scores and streams."""

import copy

import pytest
import torch
import transformers
from transformers import StoppingCriteria, StoppingCriteriaList

import llmkernels
from generating import (
    NEW,
    Stream,
    check_counts,
    check_falls_back,
    check_steps,
    generate_step,
    hf_generate,
    left_padded,
    runs_steps,
    small_model,
    steps,
)
from hf_models import FAMILIES, VOCAB, assert_close, count_ops, tiny_inputs
from llmkernels import KVCache
from llmkernels.hf import unpatch
from llmkernels.hf.step.decode import decoder


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family, batch, device):
    model, ids = small_model(family, device), tiny_inputs(device, batch)
    assert check_steps(model, ids).shape == (batch, 11 + NEW)
    llmkernels.patch(model)
    check_counts(count_ops(hf_generate, model, ids), steps(NEW), device)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding(family, device):
    model, ids, mask = small_model(family, device), tiny_inputs(device, 3), left_padded(device)
    found = check_steps(model, ids, attention_mask=mask)
    alone = hf_generate(model, ids[:1, 4:])
    assert torch.equal(found[:1, 4:], alone)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
        {"do_sample": True, "num_return_sequences": 3},
        {"min_new_tokens": 4, "eos_token_id": list(range(0, VOCAB, 2)), "pad_token_id": 0},
        {"prefill_chunk_size": 4},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 17},
        {"max_new_tokens": 5.0},  # transformers only compares with it
        {"max_new_tokens": None, "max_length": 15.5, "do_sample": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_options(options, device, late):
    found = check_steps(small_model(device=device), tiny_inputs(device, 2), **options)
    assert found.shape[1] > 11


def test_eos(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    free = hf_generate(model, ids)
    ends = [free[0, 13].item(), free[1, 12].item(), free[2, 15].item()]
    found = check_steps(model, ids, eos_token_id=ends, pad_token_id=0)
    assert found.shape[1] <= 16
    assert (found[:, -1] == 0).any()
    # Ends with the first token, with the last one, never.
    assert check_steps(model, ids[:1], eos_token_id=free[0, 11].item()).shape[1] == 12
    check_steps(model, ids[:1], eos_token_id=free[0, -1].item())


def test_streamer(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    end = hf_generate(model, ids)[0, 15].item()
    for options in ({}, {"eos_token_id": end}, {"eos_token_id": end, "return_dict_in_generate": True}):
        llmkernels.patch(model)
        stream, beside = Stream(), Stream()
        found = hf_generate(model, ids, streamer=stream, **options)
        unpatch(model)
        expected = hf_generate(model, ids, streamer=beside, **options)
        found, expected = (x if isinstance(x, torch.Tensor) else x.sequences for x in (found, expected))
        assert torch.equal(found, expected)
        stream.check(found, ids)
        beside.check(found, ids)


class SumAbove(StoppingCriteria):
    """A custom criterion with state: stops each sequence when its new tokens sum up to a limit."""

    def __init__(self, limit):
        self.limit, self.lengths = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.is_contiguous()
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, 11:].sum(1) > self.limit


class Favour(transformers.LogitsProcessor):
    """A custom criterion that reads all tokens so far."""

    def __call__(self, input_ids, scores):
        next_in_vocabulary = (input_ids.view(len(scores), -1)[:, -1:] + 1) % VOCAB
        return scores.scatter_add(1, next_in_vocabulary, 2 * torch.ones_like(scores))


def test_custom_criteria_and_processors(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    seen = []
    for patched in (True, False):
        handle = llmkernels.patch(model) if patched else None
        criterion = SumAbove(150)
        options = {"stopping_criteria": StoppingCriteriaList([criterion]), "logits_processor": [Favour()]}
        sequences = hf_generate(model, ids, max_new_tokens=20, eos_token_id=96, pad_token_id=0, **options)
        seen.append((sequences, criterion.lengths))
        if patched:
            assert handle.report().decode[0].calls == {generate_step(): 1}
            handle.unpatch()
    (found, asked), (expected, asked_there) = seen
    assert torch.equal(found, expected)
    assert found.shape[1] < 31
    assert asked == asked_there


def test_scores_and_logits(device, late):
    model, ids = small_model(device=device), tiny_inputs(device)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.5}
    options |= {"do_sample": True, "top_k": 30}
    ends = hf_generate(model, ids, **options).sequences[:, 15].tolist()
    for more in ({}, {"eos_token_id": ends, "pad_token_id": 0}):
        llmkernels.patch(model)
        found = hf_generate(model, ids, **options | more)
        again = hf_generate(model, ids, **options | more)
        unpatch(model)
        expected = hf_generate(model, ids, **options | more)
        assert type(found) is type(expected)
        assert torch.equal(found.sequences, expected.sequences)
        assert len(found.scores) == len(found.logits) == len(expected.scores) == found.sequences.shape[1] - 11
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
        for ours, theirs in zip(found.scores, expected.scores, strict=True):
            assert torch.equal(ours.isinf(), theirs.isinf())
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert_close(ours.keys, theirs.keys)
            assert_close(ours.values, theirs.values)
        assert again.past_key_values is not found.past_key_values  # a cache that was returned is not used again


def test_continuing_from_a_returned_cache(device, late):
    """With all tokens, with the new tokens only, padded, and on a copy."""
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    more = tiny_inputs(device, 3, 4, seed=8)
    results = []
    for patched in (True, False):
        handle = llmkernels.patch(model) if patched else None
        first = hf_generate(model, ids, attention_mask=mask, return_dict_in_generate=True)
        cache, text = first.past_key_values, torch.cat([first.sequences, more], 1)
        twin = copy.deepcopy(cache)
        longer = torch.cat([mask, torch.ones(3, text.shape[1] - 11, device=device, dtype=torch.long)], 1)
        whole = hf_generate(model, text, attention_mask=longer, past_key_values=cache)
        part = hf_generate(model, text[:, twin.get_seq_length() :], attention_mask=longer, past_key_values=twin)
        results.append((text, whole, part))
        if patched:
            assert handle.report().decode[0].calls == {generate_step(): 3}
            handle.unpatch()
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_cache_of_the_caller(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    cache = KVCache(model, 11 + NEW)
    check_counts(count_ops(hf_generate, model, ids, past_key_values=cache), steps(NEW), device)
    assert cache.length == 10 + NEW
    cache.reset()
    assert torch.equal(hf_generate(model, ids, past_key_values=cache), expected)
    small = KVCache(model, 14)
    with pytest.raises(ValueError, match=r"capacity must be at least 15 tokens \(14 live, 1 new\), got 14"):
        hf_generate(model, ids, past_key_values=small)
    assert small.length == 14


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 3}, "by transformers: beam search"),
        ({"num_beams": 2, "do_sample": True}, "by transformers: beam search"),
        ({"prompt_lookup_num_tokens": 2}, "by transformers: assisted decoding"),
        ({"use_cache": False}, "by transformers: use_cache=False"),
        ({"cache_implementation": "static", "disable_compile": True}, "by transformers: cache_implementation=static"),
        ({"output_hidden_states": True, "return_dict_in_generate": False}, "output_attentions or output_hidden_states"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_calls_left_to_transformers(options, reason, device):
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    by_forwards = not options.keys().isdisjoint({"num_beams", "prompt_lookup_num_tokens"})
    check_falls_back(small_model(device=device), tiny_inputs(device, batch), reason, by_forwards, **options)


def test_more_calls_left_to_transformers(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    right = torch.ones_like(ids)
    right[0, 8:] = 0
    check_falls_back(model, ids, "masks more than padding on the left", attention_mask=right)
    check_falls_back(model, ids, "run ahead of the tokens", position_ids=torch.arange(40, 51, device=device)[None])
    check_falls_back(model, tiny_inputs(device, 65, 3), "a batch of more than 64")
    llmkernels.patch(model)
    static = transformers.StaticCache(model.config, max_cache_len=30)
    assert not runs_steps(hf_generate, model, ids, past_key_values=static, disable_compile=True)
    assert "the cache given is a StaticCache" in str(decoder(model).calls)
    embeds = model.get_input_embeddings()(ids).detach()
    found = model.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False)
    assert "by transformers: inputs_embeds" in decoder(model).calls
    assert torch.equal(found, hf_generate(model, ids)[:, 11:])
    hf_generate(model, ids, past_key_values=KVCache(small_model(num_hidden_layers=3), 30))
    with pytest.raises(RuntimeError, match=r"key_states must have shape \(3, 1, 11, 64\), got \(2, 1, 11, 64\)"):
        hf_generate(model, ids, past_key_values=KVCache(model, 30, batch_size=3))
    assert "by transformers: the cache was made for other keys and values" in decoder(model).calls
    assert "by transformers: the cache has 3 layers" in decoder(model).calls


def test_prefill_in_chunks_behind_a_cache(device):
    """transformers up to 5.22 computes what is in the cache once more, and goes on behind both."""
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    texts = []
    for patched in (True, False):
        if patched:
            llmkernels.patch(model)
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :9], past_key_values=cache)
        texts.append(hf_generate(model, ids, past_key_values=cache, prefill_chunk_size=2))
        if patched:
            assert list(decoder(model).calls) == ["by transformers: prefill_chunk_size with tokens in the cache"]
            unpatch(model)
    assert torch.equal(*texts)


@pytest.mark.parametrize("generate", [hf_generate, llmkernels.generate])
def test_the_text_takes_no_more_memory_than_it_needs(generate, device):
    """torch.save writes the whole storage, however long the text might have become."""
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    end = hf_generate(model, ids)[0, 13].item()
    llmkernels.patch(model)
    for options in ({"max_new_tokens": 1}, {"max_new_tokens": 50, "eos_token_id": end}):
        text = generate(model, ids, **options)
        assert text.shape[1] <= 14
        assert text.untyped_storage().nbytes() == 8 * text.shape[1]


def test_hidden_states_once_asked_for_do_not_stay_in_the_way(device):
    """transformers leaves its hooks in the model."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    output = hf_generate(model, ids, output_hidden_states=True, return_dict_in_generate=True)
    assert len(output.hidden_states) == NEW
    check_counts(count_ops(hf_generate, model, ids), steps(NEW), device)


def test_assistant_and_target_are_patched(device):
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    assistant = small_model(device=device, num_hidden_layers=1, seed=4)
    expected = hf_generate(model, ids)
    with llmkernels.patch(assistant), llmkernels.patch(model):
        assert torch.equal(hf_generate(model, ids, assistant_model=assistant), expected)
        assert "by transformers: assisted decoding" in decoder(model).calls
        assert "by transformers: assistant of assisted decoding" in decoder(assistant).calls
