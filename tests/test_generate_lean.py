"""llmkernels.generate, the loop that samples on the device, and the command that uses it."""

import copy
import re
import sys

import pytest
import torch
import transformers

import llmkernels
from generating import NEW, Stream, check_counts, generate_step, hf_generate, lean_steps, left_padded, small_model
from hf_models import FAMILIES, count_ops, lora, tiny_inputs
from llmkernels import KVCache
from llmkernels.hf import generate
from llmkernels.hf.step.decode import decoder

module = sys.modules["llmkernels.hf.callers.generate"]


@pytest.mark.parametrize("family", FAMILIES)
def test_lean_greedy(family, device, late):
    model, ids, mask = small_model(family, device), tiny_inputs(device, 3), left_padded(device)
    expected = hf_generate(model, ids), hf_generate(model, ids, attention_mask=mask)
    handle = llmkernels.patch(model)
    check_counts(count_ops(llmkernels.generate, model, ids, max_new_tokens=NEW), lean_steps(NEW), device)
    assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), expected[0])
    assert torch.equal(llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW), expected[1])
    assert torch.equal(llmkernels.generate(model, ids[:1], max_new_tokens=1), expected[0][:1, :12])
    assert handle.report().decode[0].calls == {generate_step(): 3, "by the prefill alone": 1}


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


@pytest.mark.parametrize("patched", [True, False])
def test_lean_defaults_are_those_of_model_generate(patched, device, monkeypatch):
    """First those of model.generation_config, then those of transformers."""
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    if patched:
        llmkernels.patch(model)
    seen = []
    real = module.sample
    monkeypatch.setattr(module, "sample", lambda logits, **options: seen.append(options) or real(logits, **options))

    def options_of(**options):
        seen.clear()
        text = llmkernels.generate(model, ids, **options)
        numbers = {name: seen[0][name] for name in seen[0] if name not in ("seen", "rng_state")}
        numbers = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in numbers.items()}
        return text.shape[1] - 11, numbers

    new, numbers = options_of()
    assert (new, numbers) == (model.generate(ids).shape[1] - 11, {"temperature": 0.0})
    assert options_of(do_sample=True)[1] == {"top_k": [50] * 3}
    assert options_of(do_sample=True, top_k=0)[1] == {}
    assert options_of(do_sample=True, top_k=10**12)[1] == {"top_k": [97] * 3}
    model.generation_config.update(do_sample=True, temperature=0.5, top_k=7, max_new_tokens=5, repetition_penalty=1.5)
    assert options_of() == (5, {"temperature": [0.5] * 3, "top_k": [7] * 3, "repetition_penalty": [1.5] * 3})
    assert options_of(temperature=1.0, max_new_tokens=2)[1] == {"top_k": [7] * 3, "repetition_penalty": [1.5] * 3}
    assert options_of(temperature=None, top_k=[1, 2, 3], repetition_penalty=1.0)[1] == {"top_k": [1, 2, 3]}
    assert options_of(do_sample=False, repetition_penalty=None) == (5, {"temperature": 0.0})
    config = transformers.GenerationConfig(do_sample=True, max_new_tokens=3, top_p=0.5, top_k=0)
    new, numbers = options_of(generation_config=config)
    assert (new, numbers["top_p"], "top_k" in numbers) == (3, [0.5] * 3, False)
    first = hf_generate(model, ids, do_sample=False, repetition_penalty=1.0)[:, 11].tolist()
    model.generation_config.update(eos_token_id=first, do_sample=False, repetition_penalty=None)
    assert options_of()[0] == 1
    assert options_of(eos_token_id=[])[0] == options_of(eos_token_id=None)[0] == 5


@pytest.mark.parametrize("patched", [True, False])
def test_lean_infers_the_mask_from_pad_tokens(patched, device):
    """Where there is a pad token that does not end a text, as transformers has it."""
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    padded = ids.masked_fill(mask == 0, 0)
    with_mask, without = hf_generate(model, padded, attention_mask=mask), hf_generate(model, padded)
    assert torch.equal(with_mask, without)
    as_text = hf_generate(model, padded, eos_token_id=0)
    assert not torch.equal(as_text[0], without[0])
    if patched:
        llmkernels.patch(model)
    assert torch.equal(llmkernels.generate(model, padded, max_new_tokens=NEW), without)
    assert torch.equal(llmkernels.generate(model, padded, max_new_tokens=NEW, eos_token_id=0), as_text)


@pytest.mark.parametrize("penalty", [1.6, [1.6, 1.6, 1.6]], ids=["one", "several"])
@pytest.mark.parametrize("make", [transformers.DynamicCache, lambda: None], ids=["DynamicCache", "KVCache"])
def test_lean_penalty_of_a_continued_text(make, penalty, device, late):
    """It sees all ids, those in the cache too, but no padding where transformers' does not."""
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    ids = ids.masked_fill(mask == 0, 5)
    options = {"attention_mask": mask, "max_new_tokens": NEW}
    whole = hf_generate(model, ids, repetition_penalty=1.6, **options)
    assert not torch.equal(whole, hf_generate(model, ids, **options))
    llmkernels.patch(model)
    options["past_key_values"] = make() or KVCache(model, 40)
    part = llmkernels.generate(model, ids, repetition_penalty=penalty, **options | {"max_new_tokens": 3})
    assert torch.equal(part, whole[:, :14])
    options |= {"attention_mask": torch.cat([mask, mask.new_ones(3, 3)], 1), "max_new_tokens": NEW - 3}
    assert torch.equal(llmkernels.generate(model, part, repetition_penalty=penalty, **options), whole)
    assert list(decoder(model).calls) == [generate_step()]


def test_lean_options_in_full_whatever_the_default_dtype():
    """0.999 is 1 in bfloat16, and off."""
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for top_p in (0.999, [0.999, 0.9]):
            llmkernels.generate(model, ids, do_sample=True, top_p=top_p, temperature=0.7, max_new_tokens=2)
            (program,) = decoder(model).programs.idle()
            buffers = program.buffers
            expected = torch.tensor(top_p, dtype=torch.float32).expand(2)
            assert torch.equal(buffers["top_p"], expected)
            assert torch.equal(buffers["temperature"], torch.full((2,), 0.7, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def test_lean_refuses_what_does_not_generate():
    model, ids = small_model(), tiny_inputs()
    t5 = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=97)
    for wrong, message in (
        (model.model, "must be a causal language model of transformers, which has generate(), got Qwen2Model"),
        (torch.nn.Linear(2, 2), "which has generate(), got Linear"),
        (None, "which has generate(), got NoneType"),
        (transformers.T5ForConditionalGeneration(t5), "must have a decoder only, got T5ForConditionalGeneration"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            llmkernels.generate(wrong, ids)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"output_scores": True},
        {"return_dict_in_generate": True},
        {"max_time": 3.0},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 2},
        {"prompt_lookup_num_tokens": 2},
        {"stop_strings": ["a"]},
        {"synced_gpus": True},
        {"inputs": torch.ones(1, 3)},
        {"logits_processor": [transformers.generation.MinLengthLogitsProcessor(3, 5)]},
        {"stopping_criteria": [transformers.generation.MaxTimeCriteria(3.0)]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_lean_names_what_only_model_generate_has(options):
    model, (name,) = small_model(), options
    with pytest.raises(ValueError, match=rf"generate: {name} must .*; model\.generate takes it"):
        llmkernels.generate(model, tiny_inputs(batch=1), max_new_tokens=2, **options)


def test_lean_errors():
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    for match, arguments in {
        r"input_ids must be \(batch, tokens\) of integers, got torch.float32 \(2, 11\)": {"input_ids": ids.float()},
        r"input_ids must be \(batch, tokens\) of integers, got torch.int64 \(11,\)": {"input_ids": ids[0]},
        r"input_ids must be \(batch, tokens\) of integers, got torch.int64 \(2, 0\)": {"input_ids": ids[:, :0]},
        "input_ids must be on the model's device, cpu, got meta": {"input_ids": ids.to("meta")},
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
