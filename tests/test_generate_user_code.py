"""Processors, criteria and streamers of the caller get the same calls and tensors as from transformers."""

import inspect

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

import llmkernels
from generating import NEW, Stream, hf_generate, small_model
from hf_models import VOCAB, tiny_inputs
from llmkernels import KVCache
from llmkernels.hf import unpatch
from llmkernels.hf.report import PREFILL, STEP
from llmkernels.hf.step.decode import decoder


def both(model, call, way=STEP):
    """What a call returns patched and unpatched; patched, it runs the decode step."""
    llmkernels.patch(model)
    found = call()
    assert list(decoder(model).calls) == [way]
    unpatch(model)
    return found, call()


class Recorder(LogitsProcessor):
    """Stateful: records every call, and draws random numbers of its own."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        return scores + 0.1 * torch.rand_like(scores)


class Deadline(StoppingCriteria):
    def __init__(self, length):
        self.length, self.calls = length, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


def test_a_trie_that_ends_at_eos(device, late):
    """transformers' processor raises if no token is allowed: it must not be called after the end."""
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    allowed, asked = {11: [4, 7], 12: [9], 13: [3]}, []

    def next_tokens(batch, sent):
        asked.append(len(sent))
        return allowed.get(len(sent), [])

    options = {"prefix_allowed_tokens_fn": next_tokens, "eos_token_id": 3, "pad_token_id": 0}
    found, expected = both(model, lambda: hf_generate(model, ids, **options))
    assert torch.equal(found, expected)
    assert found.shape[1] == 14
    assert asked == [11, 12, 13] * 2


@pytest.mark.parametrize("criteria", [False, True])
@pytest.mark.parametrize("sampling", [False, True])
def test_a_stateful_processor_sees_the_steps_that_were(sampling, criteria, device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    ends = list(range(2, VOCAB, 3))

    def call():
        recorder, criterion = Recorder(), Deadline(16)
        options = {"logits_processor": [recorder], "stopping_criteria": [criterion] * criteria, "do_sample": sampling}
        text = hf_generate(model, ids, eos_token_id=ends, pad_token_id=0, **options)
        return text.tolist(), recorder.calls, criterion.calls, torch.rand(1, device=device).item()

    found, expected = both(model, call)
    assert found == expected
    assert len(found[1]) == len(found[0][0]) - 11 < NEW
    assert found[2] == len(found[1]) * criteria


def test_edits_in_place_count(device, late):
    """A processor that rewrites the text, and a criterion that rewrites the token that was just chosen."""
    model, ids = small_model(device=device), tiny_inputs(device, 2)

    class Rewrite(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 14:
                input_ids[:, 12] = 5
            return scores

    class Replace(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 13:
                input_ids[:, -1] = 8
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    for options in ({"logits_processor": [Rewrite()]}, {"stopping_criteria": [Replace()]}):
        plain = hf_generate(model, ids)
        found, expected = both(model, lambda options=options: hf_generate(model, ids.clone(), **options))
        assert torch.equal(found, expected)
        assert not torch.equal(found, plain)


def test_what_a_processor_keeps_stays_as_it_was(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    kept = []

    class Keep(LogitsProcessor):
        def __call__(self, input_ids, scores):
            kept.append((input_ids, input_ids.clone()))
            return scores

    llmkernels.patch(model)
    hf_generate(model, ids, logits_processor=[Keep()])
    assert len(kept) == NEW
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in kept)


@pytest.mark.parametrize("who", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize("window", [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}])
def test_the_caller_may_look_at_its_cache(who, window, device, late):
    """At each step it holds every token but the last, as it does unpatched."""
    model, ids = small_model(device=device, **window), tiny_inputs(device, 2)

    def call():
        cache, seen = DynamicCache(config=model.config), []

        class Looks(Recorder if who == "processor" else Deadline if who == "criterion" else Stream):
            def __call__(self, *args, **kwargs):
                seen.append((cache.get_seq_length(), [round(x.keys.sum().item(), 1) for x in cache.layers]))
                return super().__call__(*args, **kwargs)

            def put(self, tokens):
                seen.append(cache.get_seq_length())
                super().put(tokens)

        user = Looks() if who != "criterion" else Looks(30)
        name = {"processor": "logits_processor", "criterion": "stopping_criteria", "streamer": "streamer"}[who]
        return hf_generate(model, ids, past_key_values=cache, **{name: user if who == "streamer" else [user]}), seen

    (found, seen), (expected, expected_seen) = both(model, call)
    assert torch.equal(found, expected)
    assert seen == expected_seen
    assert len(seen) == NEW + (who == "streamer")  # which gets the prompt, too


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("tokens", [1, NEW])
def test_int32_ids(tokens, foreign, device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 2).int()
    options = {"max_new_tokens": tokens, "logits_processor": [Recorder()] if foreign else []}
    found, expected = both(model, lambda: hf_generate(model, ids, **options), STEP if tokens > 1 else PREFILL)
    assert found.dtype == expected.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize("when", [12, 14, 17])
def test_a_streamer_that_raises_leaves_the_cache_as_it_should_be(when, device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    expected = hf_generate(model, ids)

    class Stop(Stream):
        def put(self, tokens):
            super().put(tokens)
            if len(self.got) == when - 10:
                raise KeyboardInterrupt

    llmkernels.patch(model)
    for run in (hf_generate, llmkernels.generate):
        cache = KVCache(model, 30)
        options = {"max_new_tokens": NEW, "past_key_values": cache}
        with pytest.raises(KeyboardInterrupt):
            run(model, ids, streamer=Stop(), **options)
        assert cache.length == when - 1
        left = expected.shape[1] - when
        assert torch.equal(hf_generate(model, expected[:, :when], **options | {"max_new_tokens": left}), expected)


def test_gradients_through_generate_without_its_decorator(device):
    """Scores with gradients, which only transformers' loop gives."""
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    grads = []
    for patched in (True, False):
        if patched:
            llmkernels.patch(model)
        scores = inspect.unwrap(type(model).generate)(model, ids, **options).scores
        model.zero_grad()
        scores[-1][0, 7].backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        if patched:
            assert list(decoder(model).calls) == ["by transformers: gradients are enabled"]
            unpatch(model)
    assert torch.allclose(*grads, atol=1e-5 * grads[1].abs().max())
    assert grads[0].any()


# --- code of the caller that changes the model


def steer(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 0.1)


def new_head(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def new_number(model):
    model.model.norm.variance_epsilon = 5.0
    model.model.layers[0].self_attn.scaling = 2.0


def another_dtype(model):
    model.double()  # PyTorch widens the keys and values that were


class Third:
    """Changes a model when it is asked for the third time: a processor, a criterion or a streamer."""

    def __init__(self, change, model):
        self.change, self.model, self.asked = change, model, 0

    def ask(self):
        self.asked += 1
        if self.asked == 3:
            self.change(self.model)

    def process(self, input_ids, scores):
        self.ask()
        return scores

    def criterion(self, input_ids, scores, **kwargs):
        self.ask()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def put(self, ids):
        self.ask()

    def end(self):
        pass


@pytest.mark.parametrize("change", [steer, new_head, new_number, another_dtype])
@pytest.mark.parametrize("who", ["logits_processor", "stopping_criteria", "streamer"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_model_that_is_changed_amid_the_text(who, change, window, device, late):
    """From then on its forwards run, which look at it anew."""
    options = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1} if window else {}
    ids = tiny_inputs(device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    results = []
    for patched in (False, True):
        model = small_model(device=device, **options)
        if patched:
            handle = llmkernels.patch(model)
        third = Third(change, model)
        user = {"logits_processor": [third.process], "stopping_criteria": [third.criterion], "streamer": third}[who]
        text = ids if who != "streamer" else ids[:1]
        results.append(hf_generate(model, text, attention_mask=mask[: len(text)], **{who: user}))
    assert torch.equal(*results)
    assert list(handle.report().decode[0].calls) == [STEP]
    if change is steer:
        assert "by the model's forward: hooks on model.layers.0.mlp have to see its calls" in str(handle.report())
