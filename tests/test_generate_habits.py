"""What people do with generate(): pipelines, threads, calls within calls, prefixes, conversations, assistants."""

import copy
import threading

import pytest
import torch
import transformers
from transformers import DynamicCache, LogitsProcessor

import llmkernels
from generating import NEW, generate_step, hf_generate, small_model
from hf_models import tiny_inputs
from llmkernels import KVCache
from llmkernels.hf import unpatch
from llmkernels.hf.report import PREFILL, by_forward
from llmkernels.hf.step.decode import decoder

STEP, BEAMS, ASSISTED = generate_step(), "by transformers: beam search", "by transformers: assisted decoding"


@pytest.fixture(scope="module")
def tokenizer():
    """One character a token."""
    characters = {chr(33 + i): i for i in range(94)}
    tokenizer = transformers.Qwen2Tokenizer(vocab=characters | {"Ġ": 94, "<|endoftext|>": 95, "<x>": 96}, merges=[])
    tokenizer.padding_side = "left"
    return tokenizer


def in_a_pipeline(model, tokenizer):
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device=model.device)
    return pipeline(["abc", "longer"], max_new_tokens=NEW, do_sample=False, batch_size=2)


def stop_strings(model, tokenizer):
    inputs = tokenizer(["abc", "longer", "Zq"], return_tensors="pt", padding=True).to(model.device)
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    options = {"stop_strings": [tokenizer.decode(free[0, -5:-3])], "tokenizer": tokenizer}
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


def streamed_to_another_thread(model, tokenizer):
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    inputs = tokenizer("some", return_tensors="pt").to(model.device)
    options = {"max_new_tokens": NEW, "do_sample": False, "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=dict(inputs) | options)
    thread.start()
    text = list(streamer)
    thread.join()
    return text


def a_conversation(model, tokenizer):
    cache, text = DynamicCache(config=model.config), tiny_inputs(model.device, tokens=5)
    for turn in range(3):
        text = torch.cat([text, tiny_inputs(model.device, tokens=2 + turn, seed=turn)], 1)
        text = hf_generate(model, text, past_key_values=cache)
    return text, cache.get_seq_length()


def prompts_behind_one_prefix(model, tokenizer):
    ids, cache = tiny_inputs(model.device, 1), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    more = [torch.cat([ids, tiny_inputs(model.device, 1, 3, seed=seed)], 1) for seed in range(3)]
    texts = [hf_generate(model, text, past_key_values=copy.deepcopy(cache)) for text in more]
    cache.batch_repeat_interleave(3)
    return texts, hf_generate(model, torch.cat(more), past_key_values=cache)


def an_answer_once_more(model, tokenizer):
    ids = tiny_inputs(model.device)
    output = hf_generate(model, ids, return_dict_in_generate=True)
    output.past_key_values.crop(-NEW)  # all but the last token of the prompt
    return hf_generate(model, ids, past_key_values=output.past_key_values, do_sample=True)


def calls_within_a_call(model, tokenizer):
    inner = []

    class Asks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            last = input_ids[:, -3:]
            inner.append(hf_generate(model, last, attention_mask=torch.ones_like(last), max_new_tokens=2))
            return scores + model(input_ids[:, -4:]).logits[:, -1]

    return hf_generate(model, tiny_inputs(model.device), logits_processor=[Asks()]), inner


def scores_of_what_was_drawn(model, tokenizer):
    options = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True}
    output = hf_generate(model, tiny_inputs(model.device), **options)
    return output.sequences, model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)


def against_a_negative_prompt(model, tokenizer):
    negative = tiny_inputs(model.device, seed=7)
    return hf_generate(model, tiny_inputs(model.device), guidance_scale=1.7, negative_prompt_ids=negative)


def with_a_watermark(model, tokenizer):
    config = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], ngram_len=3)
    return hf_generate(model, tiny_inputs(model.device), watermarking_config=config, do_sample=True)


def no_time(model, tokenizer):
    return hf_generate(model, tiny_inputs(model.device), max_time=0.0)


def one_configuration_for_all_calls(model, tokenizer):
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=3)
    before = config.to_dict()
    torch.manual_seed(5)
    texts = [model.generate(tiny_inputs(model.device), generation_config=config) for _ in range(2)]
    assert config.to_dict() == before
    return texts


def beams(model, tokenizer):
    options = {"return_dict_in_generate": True, "output_scores": True, "num_beams": 3, "num_return_sequences": 2}
    output = hf_generate(model, tiny_inputs(model.device), **options)
    return output.sequences, output.sequences_scores, output.beam_indices, output.past_key_values.get_seq_length()


def beams_on_a_cache_of_ours(model, tokenizer):
    return hf_generate(model, tiny_inputs(model.device), num_beams=3, past_key_values=KVCache(model, 40))


def its_own_assistant(model, tokenizer):
    return hf_generate(model, tiny_inputs(model.device, 1), assistant_model=model)


def guesses_from_the_prompt(model, tokenizer):
    ids = tiny_inputs(model.device, 1).repeat(1, 3)
    return hf_generate(model, ids, prompt_lookup_num_tokens=3)


@torch.no_grad()
def contrastive(model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
    """Contrastive search, as a loop of the user's: among the likeliest tokens the one least like those before it."""
    count, alpha, batch = 4, 0.6, len(input_ids)
    text, mask, cache = input_ids, inputs["attention_mask"], DynamicCache(config=model.config)
    mask = torch.ones_like(text) if mask is None else mask  # transformers 5.24 drops one that hides nothing
    output = model(text, attention_mask=mask, past_key_values=cache, output_hidden_states=True)
    seen, logits = output.hidden_states[-1], output.logits[:, -1]
    going = torch.ones(batch, dtype=torch.bool)
    while going.any():
        likely, tokens = logits_processor(text, logits.float()).softmax(-1).topk(count)
        mask = torch.cat([mask, mask.new_ones(batch, 1)], 1)
        cache.batch_repeat_interleave(count)
        output = model(
            tokens.view(-1, 1),
            attention_mask=mask.repeat_interleave(count, 0),
            past_key_values=cache,
            output_hidden_states=True,
        )
        states = output.hidden_states[-1].view(batch, count, -1)
        alike = torch.cosine_similarity(states[:, :, None], seen[:, None], dim=-1).amax(-1)
        best = ((1 - alpha) * likely - alpha * alike).argmax(-1)
        rows = torch.arange(batch, device=best.device), best
        cache.batch_select_indices(rows[0] * count + best)
        seen, logits = torch.cat([seen, states[rows][:, None]], 1), output.logits.view(batch, count, -1)[rows]
        text = torch.cat([text, tokens[rows][:, None]], 1)
        going = ~stopping_criteria(text, None)
    return text, seen, cache.get_seq_length()


def contrastive_search(model, tokenizer):
    return hf_generate(model, tiny_inputs(model.device), custom_generate=contrastive)


HABITS = {
    in_a_pipeline: {STEP: 1},
    stop_strings: {STEP: 2},
    streamed_to_another_thread: {STEP: 1},
    a_conversation: {STEP: 3},
    prompts_behind_one_prefix: {STEP: 4},
    an_answer_once_more: {STEP: 2},
    calls_within_a_call: {STEP: NEW + 1},
    scores_of_what_was_drawn: {STEP: 1},
    against_a_negative_prompt: {STEP: 1},
    with_a_watermark: {STEP: 1},
    no_time: {STEP: 1},
    one_configuration_for_all_calls: {STEP: 2},
    beams: {BEAMS: 1},
    beams_on_a_cache_of_ours: {BEAMS: 1},
    its_own_assistant: {ASSISTED: 1},
    guesses_from_the_prompt: {ASSISTED: 1},
    contrastive_search: {"by custom_generate": 1},
}


def check_same(found, expected):
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            check_same(*pair)
    elif isinstance(found, torch.Tensor) and found.is_floating_point():
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_habit(habit, tokenizer, device, late):
    model = small_model(device=device)
    expected = habit(model, tokenizer)
    llmkernels.patch(model)
    found = habit(model, tokenizer)
    calls = decoder(model).calls
    calls[STEP] += calls.pop(PREFILL, 0)  # which of them ends without time depends on when the host looks
    ways = {way: count for way, count in calls.items() if count and "assistant of" not in way}
    unpatch(model)
    check_same(found, expected)
    assert ways == HABITS[habit]


def test_contrastive_search_runs_by_the_modules_that_have_hidden_states(device):
    """Each token's candidates need hidden states, which the step has not; their prompt may be composed of ops."""
    model = small_model(device=device)
    handle = llmkernels.patch(model)
    contrastive_search(model, None)
    (entry,) = handle.report().decode
    assert entry.forwards == {by_forward("output_hidden_states"): NEW}
    assert sum(entry.prompts.values()) == 1
