"""llmkernels.generate, the loop that samples on the device, and the command that uses it."""

import copy

import pytest
import torch

import llmkernels
from generating import NEW, Stream, check_counts, generate_step, hf_generate, lean_steps, left_padded, small_model
from hf_models import FAMILIES, count_ops, lora, tiny_inputs
from llmkernels import KVCache
from llmkernels.hf import generate
from llmkernels.hf.decode import decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_lean_greedy(family, device, late):
    model, ids, mask = small_model(family, device), tiny_inputs(device, 3), left_padded(device)
    expected = hf_generate(model, ids), hf_generate(model, ids, attention_mask=mask)
    handle = llmkernels.patch(model)
    check_counts(count_ops(llmkernels.generate, model, ids, max_new_tokens=NEW), lean_steps(NEW), device)
    assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), expected[0])
    assert torch.equal(llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW), expected[1])
    assert torch.equal(llmkernels.generate(model, ids[:1], max_new_tokens=1), expected[0][:1, :12])
    assert handle.report().decode[0].calls == {generate_step(): 4}


def test_lean_on_the_module_path(device):
    """An unpatched model, and one with adapters: the same tokens, and a reason in the report."""
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    expected = hf_generate(model, ids, attention_mask=mask)
    found = llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(found, expected)
    assert list(decoder(model).calls) == ["by the model's forward: the model is not patched for it"]
    adapted = lora(model)
    llmkernels.patch(adapted)
    inner = adapted.get_base_model()
    found = llmkernels.generate(inner, ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(found, hf_generate(inner, ids, attention_mask=mask))


def test_lean_eos_and_streamer(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    free = hf_generate(model, ids)
    ends = [free[0, 13].item(), free[1, 12].item(), free[2, 15].item()]
    first = [row[11].item() for row in free]
    llmkernels.patch(model)
    for eos in (ends, ends[0], first, [], free[0, -1].item()):
        stream, cache = Stream(), KVCache(model, 30)
        options = {"eos_token_id": eos, "pad_token_id": 1, "max_new_tokens": NEW}
        found = llmkernels.generate(model, ids, streamer=stream, past_key_values=cache, **options)
        expected = hf_generate(model, ids, eos_token_id=eos or None, pad_token_id=1)
        assert torch.equal(found, expected)
        stream.check(found, ids)
        assert cache.length == found.shape[1] - 1
        assert torch.equal(llmkernels.generate(model, ids, **options), expected)


def test_lean_sampling(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    llmkernels.patch(model)

    def sample(seed=3, **options):
        options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": NEW} | options
        return llmkernels.generate(model, ids, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(sample(), sample())
    assert not torch.equal(sample(), sample(4))
    greedy = llmkernels.generate(model, ids, max_new_tokens=NEW)
    assert torch.equal(sample(top_k=1), greedy)
    assert torch.equal(sample(top_p=1e-6), greedy)
    assert torch.equal(sample(min_p=1.0), greedy)
    mixed = sample(top_k=torch.tensor([1, 0, 1]), temperature=[1.5, 9.0, 1.5])
    assert torch.equal(mixed[[0, 2]], greedy[[0, 2]])
    assert not torch.equal(mixed[1], greedy[1])
    torch.manual_seed(5)
    by_default = [llmkernels.generate(model, ids, do_sample=True, max_new_tokens=NEW) for _ in range(2)]
    assert not torch.equal(*by_default)
    torch.manual_seed(5)
    assert torch.equal(llmkernels.generate(model, ids, do_sample=True, max_new_tokens=NEW), by_default[0])


def test_lean_repetition_penalty(device):
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    expected = hf_generate(model, ids, repetition_penalty=1.6, max_new_tokens=16)
    assert not torch.equal(expected, hf_generate(model, ids, max_new_tokens=16))
    llmkernels.patch(model)
    options = {"max_new_tokens": 16}
    assert torch.equal(llmkernels.generate(model, ids, repetition_penalty=1.6, **options), expected)
    one = llmkernels.generate(model, ids, repetition_penalty=[1.6, 1.0], **options)
    assert torch.equal(one[0], expected[0])
    assert torch.equal(one[1], llmkernels.generate(model, ids, **options)[1])


def test_lean_continues_on_its_cache(device):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    mask = left_padded(device)
    llmkernels.patch(model)
    whole = llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW)
    cache = KVCache(model, 40)
    part = llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=3, past_key_values=cache)
    longer = torch.cat([mask, mask.new_ones(3, 3)], 1)
    options = {"attention_mask": longer, "max_new_tokens": NEW - 3}
    twin = copy.deepcopy(cache)
    assert torch.equal(llmkernels.generate(model, part, past_key_values=cache, **options), whole)
    rest = llmkernels.generate(model, part[:, -1:], past_key_values=twin, **options)  # or those behind the cache
    assert torch.equal(torch.cat([part[:, :-1], rest], 1), whole)


def test_lean_errors():
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    for match, arguments in {
        r"input_ids must be \(batch, tokens\) of integers, got torch.float32 \(2, 11\)": {"input_ids": ids.float()},
        r"input_ids must be \(batch, tokens\) of integers, got torch.int64 \(11,\)": {"input_ids": ids[0]},
        r"input_ids must be \(batch, tokens\) of integers, got torch.int64 \(2, 0\)": {"input_ids": ids[:, :0]},
    }.items():
        with pytest.raises(RuntimeError, match=match):
            llmkernels.generate(model, **{"max_new_tokens": NEW} | arguments)
    for match, arguments in {
        "`max_new_tokens` must be greater than 0, but is 0": {"max_new_tokens": 0},
        "capacity must be at least 18 tokens": {"past_key_values": KVCache(model, 17)},
        r"temperature must be a number or one per sequence \(2,\), got \(3,\)": {"temperature": [1.0, 2.0, 3.0]},
        r"top_p must be in \[0, 1\], got 2": {"top_p": [1, 2]},
        "temperature must be at least 0, got -1": {"temperature": [1, -1]},
        "repetition_penalty must be positive, got 0": {"repetition_penalty": torch.tensor([1, 0])},
    }.items():
        options = {"input_ids": ids, "max_new_tokens": NEW, "do_sample": True} | arguments
        with pytest.raises(ValueError, match=match):
            llmkernels.generate(model, **options)
    for match, arguments in {
        "input_ids must be a tensor, got list": {"input_ids": ids.tolist()},
        "attention_mask must be a tensor, got list": {"attention_mask": [[1] * 11] * 2},
        "max_new_tokens must be an integer, got 2.5": {"max_new_tokens": 2.5},
        "max_new_tokens must be an integer, got True": {"max_new_tokens": True},
        r"top_k must be an integer, or one per sequence, got \[5, 2.5\]": {"top_k": [5, 2.5]},
        "generator must be a torch.Generator, got 3": {"generator": 3},
        r"streamer must have put\(\) and end\(\), got str": {"streamer": "x"},
    }.items():
        options = {"input_ids": ids, "max_new_tokens": NEW, "do_sample": True} | arguments
        with pytest.raises(TypeError, match=match):
            llmkernels.generate(model, **options)


assert generate is llmkernels.generate
