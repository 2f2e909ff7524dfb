"""Random calls of generate: patched they return, raise, stream, ask and leave behind what they do unpatched."""

import random

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

import llmkernels
from generating import Stream, small_model
from hf_models import FAMILIES, VOCAB
from llmkernels.hf import unpatch
from llmkernels.hf.classes.cache_name import cache_name

SEEDS = range(120)


class Processor(LogitsProcessor):
    """Of one of several habits, remembers what it was asked."""

    def __init__(self, habit):
        self.habit, self.asked = habit, []

    def __call__(self, input_ids, scores):
        self.asked.append(input_ids.tolist())
        if self.habit == "draws":
            scores = scores + 0.1 * torch.rand_like(scores)
        elif self.habit == "writes":
            scores[:, 5:9] -= 3
        elif self.habit == "rewrites" and input_ids.shape[1] > 4:
            input_ids[:, -2] = 7
        elif self.habit == "raises" and len(self.asked) == 3:
            raise RuntimeError("enough")
        return scores.double() if self.habit == "widens" else scores


class Criterion(StoppingCriteria):
    """Stops by a rule, remembers what it was asked."""

    def __init__(self, rule):
        self.rule, self.asked = rule, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids.tolist(), None if scores is None else len(scores)))
        if self.rule == "count":
            return len(self.asked) >= 4  # a bool, as some have it
        if self.rule == "raises" and len(self.asked) == 3:
            raise RuntimeError("halt")
        return input_ids[:, -1] % 3 == 0 if self.rule == "rows" else input_ids[:, -1] < 0


def make_call(seed, device):
    """A model and a function that generates with it, and returns all that is to be seen of the call."""
    rng = random.Random(seed)
    chance = lambda p: rng.random() < p  # noqa: E731
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if chance(0.15) else {}
    model = small_model("qwen2" if window else rng.choice(FAMILIES), device, **window)
    batch, tokens = rng.randint(1, 4), rng.choice([1, 2, 5, 11])
    ids = torch.randint(0, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(device)
    options = {"max_new_tokens": rng.choice([1, 2, 3, 7, 12]), "do_sample": chance(0.5)}
    if chance(0.3):
        mask = torch.ones(batch, tokens, dtype=rng.choice([torch.long, torch.int32, torch.bool]))
        for row in mask:
            row[: rng.randint(0, tokens - 1)] = 0
        options["attention_mask"] = mask.to(device)
    if chance(0.1):
        ids = ids.int()
    if chance(0.1):
        options["max_new_tokens"], options["max_length"] = None, tokens + rng.randint(-1, 6)
    for p, name, values in (
        (0.3, "temperature", (0.5, 2.0, 0.0)),
        (0.3, "top_k", (0, 1, 5, 200)),
        (0.3, "top_p", (0.0, 0.3, 0.9)),
        (0.2, "min_p", (0.05, 0.5)),
        (0.1, "typical_p", (0.7,)),
        (0.1, "epsilon_cutoff", (0.01,)),
        (0.2, "repetition_penalty", (0.7, 1.4)),
        (0.1, "no_repeat_ngram_size", (2,)),
        (0.1, "bad_words_ids", ([[5], [6, 7]],)),
        (0.1, "sequence_bias", ([[[5], 3.0], [[6, 7], -2.0]],)),
        (0.1, "suppress_tokens", ([3, 4],)),
        (0.1, "renormalize_logits", (True,)),
        (0.1, "guidance_scale", (1.5,)),
        (0.1, "watermarking_config", ({"bias": 2.0},)),
        (0.1, "max_time", (1000.0, 0.0)),
        (0.1, "min_new_tokens", (2, 5)),
        (0.4, "eos_token_id", ([3], list(range(2, VOCAB, 3)), 5)),
        (0.3, "pad_token_id", (0, 1, 3)),
        (0.15, "num_return_sequences", (2, 3)),
        (0.1, "prefill_chunk_size", (1, 3)),
        (0.1, "prompt_lookup_num_tokens", (2,)),
        (0.05, "num_beams", (2,)),
        (0.05, "use_cache", (False,)),
        (0.05, "logits_to_keep", (0, 2)),
        (0.4, "return_dict_in_generate", (True,)),
        (0.2, "output_scores", (True,)),
        (0.2, "output_logits", (True,)),
        (0.05, "output_hidden_states", (True,)),
    ):
        if chance(p):
            options[name] = rng.choice(values)
    if options.get("num_beams"):
        options["do_sample"] = False  # beams that are sampled may differ by rounding
    habit = rng.choice(["draws", "writes", "rewrites", "raises", "widens", "looks"]) if chance(0.3) else None
    rule = rng.choice(["count", "raises", "rows", "never"]) if chance(0.3) else None
    streams = chance(0.3)
    filled = rng.choice([0, max(tokens - 2, 0)]) if chance(0.3) else None

    def call():
        given, seen, text = dict(options), {}, ids.clone()
        if habit:
            given["logits_processor"] = [Processor(habit)]
        if rule:
            given["stopping_criteria"] = [Criterion(rule)]
        if streams:
            given["streamer"] = Stream()
        if filled is not None:
            cache = given["past_key_values"] = DynamicCache(config=model.config)
            mask = options.get("attention_mask")
            if filled:
                with torch.no_grad():
                    model(
                        text[:, :filled],
                        attention_mask=mask if mask is None else mask[:, :filled],
                        past_key_values=cache,
                    )
        torch.manual_seed(seed)
        try:
            output = model.generate(text, **given)
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            seen["error"] = type(error), str(error)
        else:
            seen |= {"text": output} if isinstance(output, torch.Tensor) else dict(output)
        if filled is not None:
            seen[cache_name()] = given["past_key_values"]
        if cache_name() in seen:
            layers = seen[cache_name()].layers
            seen[cache_name()] = [(getattr(x, "keys", None), getattr(x, "values", None)) for x in layers]
        asked = [user.asked for name in ("logits_processor", "stopping_criteria") for user in given.get(name, ())]
        stream = (given["streamer"].got, given["streamer"].ended) if streams else None
        return seen | {"prompt": text, "asked": asked, "stream": stream, "next": torch.rand(1, device=device)}

    return model, call


def same(found, expected):
    """Floats up to rounding, everything else to the bit."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(found, torch.Tensor):
        return found == expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3) if found.is_floating_point() else found.equal(expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", SEEDS[::20])
def test_random_calls(first, device, late):
    for seed in range(first, first + 20):
        model, call = make_call(seed, device)
        expected = call()
        llmkernels.patch(model)
        found = call()
        unpatch(model)
        assert same(found, expected), (
            f"seed {seed}: {[key for key in expected if not same(found.get(key), expected[key])]}"
        )
