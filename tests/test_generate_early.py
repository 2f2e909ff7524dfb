"""Calls of generate whose prompt is launched before the host looks at the model and at what is on the device, as on a
GPU; and what they leave where something was not as it had been."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin

import llmkernels
from generating import NEW, Stream, hf_generate, left_padded, small_model
from hf_models import VOCAB, tiny_inputs
from llmkernels.hf.callers import ahead, reading
from llmkernels.hf.callers.positions import BAD_MASK
from llmkernels.hf.report import STEP
from llmkernels.hf.step import compose, prompt
from llmkernels.hf.step.decode import decoder
from llmkernels.hf.step.guard import Snapshot


@pytest.fixture(autouse=True)
def late(monkeypatch):
    monkeypatch.setattr(reading, "is_late", lambda device: True)
    monkeypatch.setattr(ahead, "_LEAST_WEIGHTS", 0)  # of small models, too


@pytest.fixture
def order(monkeypatch):
    """What came when: a look at the model, or a prompt."""
    found = []

    def note(owner, name, what, counts=lambda *args: True):
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            if counts(*args):
                found.append(what)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(Snapshot, "holds", "look")
    note(compose, "run_layers", "prompt", lambda parts, hidden, tokens, *args: tokens.is_prompt)
    return found


def lean(model, ids, **options):
    return llmkernels.generate(model, ids, max_new_tokens=NEW, **options)


both_loops = pytest.mark.parametrize("generate", [hf_generate, lean])


@both_loops
def test_the_prompt_comes_first(generate, order):
    model, ids = small_model(), tiny_inputs(batch=3)
    options = {"attention_mask": left_padded("cpu")}
    expected = [hf_generate(model, ids), hf_generate(model, ids, **options)]
    handle = llmkernels.patch(model)
    assert torch.equal(generate(model, ids), expected[0])
    assert order[-1] == "prompt"  # behind the looks, and the prompts of the proof
    order.clear()
    for given, text in (({}, expected[0]), (options, expected[1])):
        assert torch.equal(generate(model, ids, **given), text)
        assert order == ["prompt", "look"]
        order.clear()
    assert handle.report().decode[0].prompts == {STEP: 3}


@both_loops
def test_autocast_comes_first(generate, order):
    """It would decide the dtypes of what is launched."""
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(model, ids)
    generate(model, ids)
    order.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(generate(model, ids), expected)
    assert "prompt" not in order


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 0.5)


CHANGES = {
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.7),
    "in place": lambda model: model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5),  # which a step reads as it is
    "a scale": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.3),
    "a hook": hooked,
}


@both_loops
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_has_changed(change, generate, order):
    model, same = small_model(), small_model()
    ids = tiny_inputs(batch=2)
    handle = llmkernels.patch(model)
    before = generate(model, ids)
    for changed in (model, same):
        with torch.no_grad():
            change(changed)
    expected = hf_generate(same, ids)
    assert not torch.equal(before, expected)
    order.clear()
    for _ in range(2):
        assert torch.equal(generate(model, ids), expected)
    assert order[:2] == ["prompt", "look"]
    report = handle.report().decode[0]
    assert sum(report.prompts.values()) <= 3  # one that was dropped is none
    assert sum(report.calls.values()) == 3


@pytest.mark.parametrize("kind", ["dynamic", "ours"])
def test_the_caller_s_cache(kind, order):
    """Dropped prompts are not in it."""
    model, same, ids = small_model(), small_model(), tiny_inputs(batch=2)
    llmkernels.patch(model)
    hf_generate(model, ids)
    for changed in (model, same):
        with torch.no_grad():
            CHANGES["a scale"](changed)

    def cache():
        return DynamicCache() if kind == "dynamic" else llmkernels.KVCache(model, capacity=64)

    theirs = DynamicCache()
    expected = hf_generate(same, ids, past_key_values=theirs)
    order.clear()
    for _ in range(2):
        ours = cache()
        assert torch.equal(hf_generate(model, ids, past_key_values=ours), expected)
        assert order[:2] == ["prompt", "look"]
        assert ours.get_seq_length() == theirs.get_seq_length()
        torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys)
        order.clear()


@both_loops
def test_arguments_that_are_found_wrong_late(generate, order):
    model, ids = small_model(), tiny_inputs(batch=2)
    mask = torch.ones_like(ids)
    mask[1, 3] = 0
    expected = hf_generate(model, ids, attention_mask=mask)
    handle = llmkernels.patch(model)
    generate(model, ids)
    order.clear()
    assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert order[0] == "prompt"
    assert any(BAD_MASK in way for way in handle.report().decode[0].calls)
    assert handle.report().decode[0].prompts[STEP] == 1


@both_loops
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_of_no_token(token, generate):
    """As transformers on a CPU; the first call, and one that is launched first."""
    model, ids = small_model(), tiny_inputs(batch=2)
    wrong = ids.clone()
    wrong[1, 4] = token
    expected = hf_generate(model, ids)
    handle = llmkernels.patch(model)
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range"):
            generate(model, wrong)
        assert torch.equal(generate(model, ids), expected)
    assert handle.report().decode[0].prompts == {STEP: 2}


def test_chats_and_short_caches_are_looked_at_first(order):
    """What is behind a cache that holds tokens."""
    model, ids = small_model(), tiny_inputs(batch=2)
    cache = DynamicCache()
    llmkernels.patch(model)
    text = hf_generate(model, ids, past_key_values=cache)
    order.clear()
    hf_generate(model, torch.cat((text, ids), 1), past_key_values=cache)
    assert order[0] == "look"
    assert decoder(model).prompts == {STEP: 2}


def busy_stream(ms):
    """What gives one stream for all, which is kept busy for about so long each time."""
    beside = torch.cuda.Stream()

    def stream(device, handle, work):
        with torch.cuda.stream(beside):
            torch.cuda._sleep(2_000_000 * ms)
        return beside

    return stream


@pytest.mark.gpu
@both_loops
@pytest.mark.parametrize("options", [{}, {"eos_token_id": VOCAB - 1, "pad_token_id": 0}], ids=["no_eos", "eos"])
def test_copies_to_the_host_that_come_late(options, generate, monkeypatch):
    """Behind what the GPU does for the next step: they are of this one."""
    monkeypatch.setattr(reading, "stream_beside", busy_stream(ms=1))
    model, ids = small_model(device="cuda"), tiny_inputs("cuda", batch=2)
    expected = hf_generate(model, ids, **options)
    llmkernels.patch(model)
    for _ in range(3):
        stream = Stream()
        found = generate(model, ids, streamer=stream, **options)
        assert torch.equal(found, expected)
        stream.check(found, ids)


# --- while transformers prepares the call


@pytest.fixture
def prompts(order, monkeypatch):
    """What came when: a prompt, or transformers' preparation of a call."""
    prepare = GenerationMixin._prepare_generation_config

    def noted(self, *args, **kwargs):
        order.append("prepare")
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", noted)
    return order


def known_model(generate, ids, prompts):
    model = small_model()
    handle = llmkernels.patch(model)
    generate(model, ids)
    prompts.clear()
    return model, handle


AHEAD = {
    "ids": {},
    "mask of ones": {"attention_mask": torch.ones(3, 11, dtype=torch.long)},
    "padding": {"attention_mask": left_padded("cpu")},
    "eos": {"eos_token_id": VOCAB - 1, "pad_token_id": 0},
    "use_cache": {"use_cache": True, "num_beams": 1},
    "short": {"max_new_tokens": 1},
    "long": {"max_new_tokens": 100},  # the cache grows
    "no length": {"max_new_tokens": None},
    "a generation_config": {
        "generation_config": GenerationConfig(max_new_tokens=5, eos_token_id=VOCAB - 1, pad_token_id=0),
        "max_new_tokens": None,
        "disable_compile": True,
        "synced_gpus": False,
    },
}


@pytest.mark.parametrize("options", AHEAD.values(), ids=AHEAD)
def test_the_prompt_comes_before_the_preparation(options, prompts):
    ids = tiny_inputs(batch=3)
    model, handle = known_model(hf_generate, ids, prompts)
    for _ in range(2):
        found = hf_generate(model, ids, **options)
        assert prompts == ["prompt", "prepare", "look"]
        prompts.clear()
    assert handle.report().decode[0].prompts == {STEP: 3}
    handle.unpatch()
    assert torch.equal(found, hf_generate(model, ids, **options))


@pytest.mark.parametrize("weights, products", [(0, 10**20), (10**20, 0), (10**20, 10**20)])
def test_short_prompts_of_small_models_are_prepared_first(weights, products, prompts, monkeypatch):
    ids = tiny_inputs()
    model, _ = known_model(hf_generate, ids, prompts)
    monkeypatch.setattr(ahead, "_LEAST_WEIGHTS", weights)
    monkeypatch.setattr(ahead, "_LEAST_PRODUCTS", products)
    hf_generate(model, ids)
    assert prompts[0] == ("prepare" if weights and products else "prompt")


def test_many_tokens_are_prepared_first(prompts, monkeypatch):
    ids = tiny_inputs()
    model, _ = known_model(hf_generate, ids, prompts)
    monkeypatch.setattr(ahead, "_MOST_TOKENS", ids.numel() - 1)
    hf_generate(model, ids)
    assert prompts[0] == "prepare"


def test_our_generate_runs_ahead_as_well(prompts):
    ids = tiny_inputs(batch=3)
    model, _ = known_model(lean, ids, prompts)
    for options in ({}, {"do_sample": True, "temperature": [0.0, 0.0, 0.0]}):
        found = lean(model, ids, **options)
        assert prompts == ["prompt", "prepare", "look"]
        prompts.clear()
        assert torch.equal(found, lean(model, ids))
        prompts.clear()


OTHERS = {
    "beams": {"num_beams": 2},
    "several": {"num_return_sequences": 2, "do_sample": True},
    "no cache": {"use_cache": False},
    "results": {"return_dict_in_generate": True},
    "a cache": {"past_key_values": DynamicCache()},
    "in chunks": {"prefill_chunk_size": 4},
    "a lookup": {"prompt_lookup_num_tokens": 2},
    "beams by a config": {"generation_config": GenerationConfig(num_beams=2)},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_calls_are_prepared_first(options, prompts):
    ids = tiny_inputs(batch=1)
    model, _ = known_model(hf_generate, ids, prompts)
    hf_generate(model, ids, **options)
    assert prompts[0] == "prepare"


def test_beams_by_the_generation_config_are_prepared_first(prompts):
    ids = tiny_inputs()
    model, _ = known_model(hf_generate, ids, prompts)
    model.generation_config.num_beams = 2
    hf_generate(model, ids)
    assert prompts[0] == "prepare"


def test_padding_that_transformers_infers(prompts):
    """Of the ids, which the host does not know: the prompt is dropped once, and none runs ahead from then on."""
    ids = tiny_inputs(batch=3).clamp(min=1)
    ids[0, :4] = 0
    options = {"pad_token_id": 0, "eos_token_id": VOCAB - 1}
    model, handle = known_model(hf_generate, tiny_inputs(batch=3), prompts)
    found = hf_generate(model, ids, **options)
    assert prompts == ["prompt", "prepare", "look", "look", "prompt"]
    prompts.clear()
    assert torch.equal(hf_generate(model, ids, **options), found)
    assert prompts[:2] == ["prepare", "prompt"]
    assert sum(handle.report().decode[0].prompts.values()) == 3
    handle.unpatch()
    assert torch.equal(found, hf_generate(model, ids, **options))


def test_a_call_that_fails_leaves_nothing_behind(prompts):
    ids = tiny_inputs(batch=3)
    model, _ = known_model(hf_generate, ids, prompts)
    expected = hf_generate(model, ids)
    for wrong in ({"temperature": -1.0, "do_sample": True}, {"min_new_tokens": "a"}, {"max_new_tokens": "b"}):
        with pytest.raises((ValueError, TypeError)):
            hf_generate(model, ids, **wrong)
    prompts.clear()
    assert torch.equal(hf_generate(model, ids), expected)
    assert prompts == ["prompt", "prepare", "look"]
    assert len(decoder(model)._spare) == 1


@pytest.mark.parametrize("generate", [hf_generate, lean])
def test_the_cache_is_used_again(generate, device, monkeypatch):
    """By a prompt ahead, after another one, and the other way round."""
    model, ids = small_model(device=device).to(torch.bfloat16), tiny_inputs(device)
    llmkernels.patch(model)
    expected = generate(model, ids)
    (cache, _), *_ = decoder(model)._spare
    for least in (0, 10**20, 10**20, 0, 0):
        monkeypatch.setattr(ahead, "_LEAST_WEIGHTS", least)
        assert torch.equal(generate(model, ids), expected)
        assert decoder(model)._spare[0][0] is cache


def test_a_call_within_a_call(prompts):
    """A processor that generates with the same model, and with another one."""
    ids, others = tiny_inputs(batch=3), tiny_inputs(batch=2, seed=2)
    model, _ = known_model(hf_generate, ids, prompts)
    expected = hf_generate(model, ids), hf_generate(model, others)
    texts = []

    def processor(given, scores):
        if len(texts) < 2:
            texts.append(None)
            texts[-1] = hf_generate(model, others)
        return scores

    found = hf_generate(model, ids, logits_processor=[processor])
    assert torch.equal(found, expected[0])
    assert all(torch.equal(text, expected[1]) for text in texts)


def test_other_ids_than_those_that_were_given(prompts, monkeypatch):
    """From whatever a user's code does while the call is prepared: the prompt is dropped."""
    ids, others = tiny_inputs(batch=3), tiny_inputs(batch=3, seed=2)
    model, _ = known_model(hf_generate, ids, prompts)
    expected = hf_generate(model, others)
    original = type(model)._prepare_model_inputs

    def other_inputs(self, *args, **kwargs):
        _, *rest = original(self, *args, **kwargs)
        return others, *rest

    monkeypatch.setattr(type(model), "_prepare_model_inputs", other_inputs)
    prompts.clear()
    assert torch.equal(hf_generate(model, ids), expected)
    assert prompts[:4] == ["prompt", "prepare", "prompt", "look"]


@pytest.mark.gpu
@both_loops
@pytest.mark.parametrize("given", ["ids", "padding", "inferred padding"])
def test_a_prompt_ahead_that_takes_long(given, generate, monkeypatch):
    """Its stream is busy: whoever reads what it makes has to wait for it. And so it is where it was dropped."""
    model, ids = small_model(device="cuda").half(), tiny_inputs("cuda", batch=3)
    options = {"attention_mask": left_padded("cuda")} if given == "padding" else {}
    if given == "inferred padding":
        ids[0, :4] = 0
        options = {"pad_token_id": 0, "eos_token_id": VOCAB - 1}
    llmkernels.patch(model)
    expected = generate(model, ids, **options)  # a model that is not known yet
    monkeypatch.setattr(ahead, "stream_beside", busy_stream(ms=10))
    for _ in range(3):
        assert torch.equal(generate(model, ids, **options), expected)
        assert (decoder(model).dropped_ahead is None) == (given != "inferred padding")


@pytest.mark.gpu
def test_another_prompt_beside_one_ahead(monkeypatch):
    """Of as many tokens, from whatever a user's code does while the call is prepared: not by the graph that runs."""
    model = small_model(device="cuda").half()
    ids, others = tiny_inputs("cuda", batch=3), tiny_inputs("cuda", batch=3, seed=2)
    llmkernels.patch(model)
    original, logits = type(model)._prepare_model_inputs, []
    text = hf_generate(model, ids)
    with torch.no_grad():
        expected = model(others, logits_to_keep=1).logits

    def with_a_forward(self, *args, **kwargs):
        with torch.no_grad():
            logits.append(model(others, logits_to_keep=1).logits)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ahead, "stream_beside", busy_stream(ms=10))
    monkeypatch.setattr(type(model), "_prepare_model_inputs", with_a_forward)
    for _ in range(4):
        assert torch.equal(hf_generate(model, ids), text)
        torch.testing.assert_close(logits.pop(), expected, rtol=1e-2, atol=1e-2)  # of others they are far from it
    assert decoder(model).dropped_ahead is None


@both_loops
def test_the_program_is_used_again(generate, device, monkeypatch):
    """By a prompt ahead, after another one, and the other way round: its graph is recorded once."""
    kinds = []
    original = prompt.run_padded

    def padded(*args, **kwargs):
        kinds.append(None)
        return original(*args, **kwargs)

    model, ids = small_model(device=device).to(torch.bfloat16), tiny_inputs(device)
    llmkernels.patch(model)
    monkeypatch.setattr(prompt, "padded_length", lambda parts, cache, batch, count: count)
    expected = generate(model, ids)
    monkeypatch.setattr(prompt, "run_padded", padded)
    for least in (10**20, 0, 0, 10**20, 0):
        monkeypatch.setattr(ahead, "_LEAST_WEIGHTS", least)
        assert torch.equal(generate(model, ids), expected)
    programs = [key for key, _ in decoder(model).programs._idle]
    assert len(kinds) == 5 and len([key for key in programs if key[0][0] == "prompt"]) == 1
