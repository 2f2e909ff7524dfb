"""Prompts of generate, composed of ops as the decode step is: step/prompt.py."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import llmkernels
from families import family_model
from generating import NEW, hf_generate, small_model
from hf_models import assert_close, rounding, tiny_inputs
from llmkernels.hf import unpatch
from llmkernels.hf.callers import forward
from llmkernels.hf.report import STEP
from llmkernels.hf.report import by_forward as by_forward_of
from llmkernels.hf.step import prompt
from llmkernels.hf.step.block import Layout
from llmkernels.hf.step.decode import decoder
from prompting import LONG, check_generate_in_half_precision, compose_forwards, masked, prompts, run_padded
from test_forward import DESCRIBED


@pytest.fixture
def padded(monkeypatch):
    run_padded(monkeypatch)


@pytest.mark.parametrize("name", DESCRIBED)
def test_padded_to_a_length_that_has_a_graph(name, padded):
    """What stands behind a prompt changes nothing, in the same buffers for one prompt after the other."""
    model = family_model(name)
    calls = [masked("cpu", tokens, seed=tokens) for tokens in (3, 7, 10, 9, 1)]
    expected = [hf_generate(model, ids, **options) for ids, options in calls]
    llmkernels.patch(model)
    for (ids, options), text in zip(calls, expected, strict=True):
        assert torch.equal(hf_generate(model, ids, **options), text)
        assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW, **options), text)
    assert prompts(model) == {STEP: 10}
    assert len(decoder(model).programs.idle()) <= 2 * 3 + 2  # by the length; and the steps of two loops


@pytest.mark.parametrize("how", ["padded", "as it is"])
def test_the_cache_behind_a_prompt(how, request):
    if how == "padded":
        request.getfixturevalue("padded")
    model = small_model()
    ids, options = masked("cpu", 10)
    options |= {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    expected = hf_generate(model, ids, **options)
    llmkernels.patch(model)
    cache = llmkernels.KVCache(model, 40)
    for given in (None, DynamicCache(config=model.config), cache):
        found = hf_generate(model, ids, past_key_values=given, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            for row, tokens in enumerate((11, 6, 2)):  # those of padding are of no use
                assert_close(ours.keys[row, :, -tokens:], theirs.keys[row, :, -tokens:])
                assert_close(ours.values[row, :, -tokens:], theirs.values[row, :, -tokens:])
    assert prompts(model) == {STEP: 3}
    assert cache.cache_seqlens.tolist() == [11] * 3


def test_behind_tokens_in_the_cache(monkeypatch):
    """Many new tokens as a prompt, few as a step of several."""
    monkeypatch.setattr("llmkernels.hf.step.decode.MAX_ROWS", 8)
    model, ids = small_model(), tiny_inputs(tokens=24)
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    for first, few in ((10, False), (21, True)):
        cache = llmkernels.KVCache(model, 40)
        model.generate(ids[:, : first + 1], past_key_values=cache, max_new_tokens=1, do_sample=False)
        cache.crop(first - cache.length)
        before = decoder(model).programs.idle()
        assert torch.equal(hf_generate(model, ids, past_key_values=cache), expected)
        assert any(program.buffers["tokens"].numel() == 6 for program in decoder(model).programs.idle()) == few, before
    assert prompts(model) == {STEP: 4}


def test_what_is_left_to_the_modules(monkeypatch):
    monkeypatch.setattr(prompt, "_CPU_TOKENS", 12)
    model, ids = small_model(), tiny_inputs(tokens=13)
    windowed = family_model("mistral")
    expected = hf_generate(model, ids), hf_generate(windowed, tiny_inputs(tokens=12))
    monkeypatch.setattr("llmkernels.hf.cache.buffers.STEP", 1)
    llmkernels.patch(model)
    handle = llmkernels.patch(windowed)
    assert torch.equal(hf_generate(model, ids), expected[0])
    hf_generate(model, ids[:, :8], prefill_chunk_size=4)
    assert torch.equal(hf_generate(windowed, tiny_inputs(tokens=12)), expected[1])
    assert prompts(model) == {
        "by the model's forward: attention over more than 12 tokens is left to PyTorch": 1,
        "by the model's forward: prefill_chunk_size": 1,
    }
    assert prompts(windowed) == {LONG: 1}
    assert f"prompts: 1 {LONG}" in str(handle.report())


@pytest.fixture
def by_forward(monkeypatch):
    compose_forwards(monkeypatch)


@pytest.mark.parametrize("how", ["padded", "as it is"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_forwards_of_prompts(name, how, by_forward, request):
    """They are composed from the first one on, and the loop goes on."""
    if how == "padded":
        request.getfixturevalue("padded")
    model = family_model(name)
    calls = [(*masked("cpu", tokens, seed=tokens), tokens % 2) for tokens in (3, 6, 7, 5)]

    def run(model):
        found = []
        for ids, options, kept in calls:
            mask = options["attention_mask"]
            output = model(ids, attention_mask=mask, logits_to_keep=kept)
            found.append(output.logits * mask[:, -output.logits.shape[1] :, None])  # those of padding are of no use
            for _ in range(3):
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                ids = output.logits[:, -1:].argmax(-1)
                output = model(ids, attention_mask=mask, past_key_values=output.past_key_values)
                found.append(output.logits)
        return found

    with torch.no_grad():
        expected = run(model)
        llmkernels.patch(model)
        found = run(model)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)
    assert prompts(model)[STEP] == 4 or prompts(model) == {STEP: 3, LONG: 1}
    assert decoder(model).forwards == {STEP: 12}


@pytest.mark.parametrize("how", ["padded", "as it is"])
@torch.no_grad()
def test_the_first_forward_is_as_the_next(how, by_forward, request):
    """The small model shows which cache the modules make, so they run for no prompt."""
    if how == "padded":
        request.getfixturevalue("padded")
    model, ids = small_model(), tiny_inputs(tokens=8)
    llmkernels.patch(model)
    first, second = model(ids), model(ids)
    assert torch.equal(first.logits, second.logits)
    for one, other in zip(first.past_key_values.layers, second.past_key_values.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert prompts(model) == {STEP: 2}


def test_forwards_that_the_modules_run(by_forward):
    model, ids = small_model(), tiny_inputs(tokens=8)
    llmkernels.patch(model)
    assert torch.is_grad_enabled()
    model(ids)
    assert not prompts(model)
    with torch.no_grad():
        for _ in range(2):
            model(ids, return_dict=False)
            model(ids, output_attentions=True)
            model(inputs_embeds=model.model.embed_tokens(ids))
        refused = dict.fromkeys(map(by_forward_of, ("return_dict=False", "output_attentions", "inputs_embeds")), 2)
        assert prompts(model) == refused
        model(ids)
        assert type(model(ids).past_key_values).__mro__[1] is DynamicCache
        assert prompts(model) == refused | {STEP: 2}
        holes = torch.ones_like(ids)
        holes[0, 3] = 0
        expected = small_model()(ids, attention_mask=holes).logits
        assert_close(model(ids, attention_mask=holes).logits, expected)
        hook = model.lm_head.register_forward_hook(lambda *arguments: arguments[2] * 2)
        assert_close(model(ids).logits, 2 * small_model()(ids).logits)
        hook.remove()
    assert len(prompts(model)) == 6 and prompts(model)[STEP] == 2


@pytest.mark.parametrize("how", ["padded", "as it is"])
@torch.no_grad()
def test_a_rotation_that_has_grown(how, by_forward, request):
    """Behind a long text a rotation of the dynamic kind has other frequencies, until a short one comes: also where the
    tables of a short one end just where the frequencies begin to grow."""
    if how == "padded":
        request.getfixturevalue("padded")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, exact = (small_model(max_position_embeddings=16, rope_parameters=rope) for _ in range(2))
    long, short = tiny_inputs(tokens=30), tiny_inputs(tokens=11)
    llmkernels.patch(model)
    for _ in range(3):
        model(long)
        output = model(short)
        assert_close(output.logits, exact(short).logits)
        model(long)
        step = model(short[:, :1], past_key_values=output.past_key_values)
        assert_close(step.logits, exact(torch.cat([short, short[:, :1]], 1)).logits[:, -1:])
        model(long)
        exact(long)
        assert torch.equal(hf_generate(model, short, max_new_tokens=3), hf_generate(exact, short, max_new_tokens=3))
    assert prompts(model)[STEP] >= 4


@pytest.fixture
def blocks(by_forward, monkeypatch):
    """The caches that forwards have made in a block of memory, before they looked at the model."""
    made = []
    make = Layout.make

    def noted(layout, block, tokens):
        made.append(make(layout, block, tokens))
        return made[-1]

    monkeypatch.setattr(Layout, "make", noted)
    return made


@torch.no_grad()
def test_launched_before_the_model_is_looked_at(blocks, monkeypatch):
    model, ids = small_model(), tiny_inputs(tokens=8)
    llmkernels.patch(model)

    def check(early, **options):
        del blocks[:]
        found = model(ids, **options)
        with monkeypatch.context() as by_modules:
            by_modules.setattr(forward, "PROMPT_DEVICES", set())
            expected = model(ids, **options)
        assert_close(found.logits, expected.logits)
        assert len(blocks) == early
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert_close(ours.keys, theirs.keys)
            assert_close(ours.values, theirs.values)

    for early in (0, 1, 1):
        check(early)
    model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    check(1)
    layer = model.model.layers[1]
    layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight * 2)
    check(0)
    check(1)
    calls = []
    hook = layer.register_forward_hook(lambda *arguments: calls.append(1))
    check(0)
    assert calls
    hook.remove()
    check(0)  # by the modules once more
    check(0)
    check(1)
    mask = torch.ones_like(ids)
    check(1, attention_mask=mask)
    mask[0, 2] = 0
    check(0, attention_mask=mask)
    check(1, logits_to_keep=3)
    model.config.other = [1]
    check(0)
    check(1)
    model.config.other.append(2)
    check(0)
    with pytest.raises(IndexError):
        model(-ids - 1)


@pytest.mark.parametrize("how", ["padded", "as it is"])
@torch.no_grad()
def test_a_cache_in_a_block(how, blocks, request):
    """It is a DynamicCache for whoever has it, and steps go on with it."""
    if how == "padded":
        request.getfixturevalue("padded")
    model, text = small_model(), tiny_inputs(tokens=12)
    ids, expected = text[:, :8], model(text)
    llmkernels.patch(model)
    for _ in range(2):
        output = model(ids)
    cache = output.past_key_values
    assert blocks == [cache]
    assert all(cache.layers[0].k[:, :8].any((0, 2, 3)))
    assert type(cache).__mro__[1] is DynamicCache
    assert len({layer.k.untyped_storage().data_ptr() for layer in cache.layers}) == 1
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    assert all(type(other) is DynamicCache for other in copies)
    for other in (cache, *copies):
        for tokens in range(8, 12):
            output = model(text[:, tokens : tokens + 1], past_key_values=other)
        assert_close(output.logits[:, -1], expected.logits[:, -1])
    assert decoder(model).forwards == {STEP: 12}
    counted = cache.counters._version
    cache.layers[0].k.add_(0)
    assert cache.counters._version == counted
    cache.crop(-4)
    ours, theirs = cache.layers[0], expected.past_key_values.layers[0]
    assert_close(ours.keys, theirs.keys[:, :, :8])
    assert not ours.k[:, 12:].any()


def test_a_cache_of_inference_mode(blocks):
    """Its buffers can be written outside of it."""
    model, ids = small_model(), tiny_inputs(tokens=8)
    llmkernels.patch(model)
    with torch.inference_mode():
        for _ in range(2):
            cache = model(ids).past_key_values
    assert blocks == [cache]
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 9


@torch.no_grad()
def test_large_caches_are_made_by_layers(blocks, monkeypatch):
    monkeypatch.setattr("llmkernels.hf.step.block.MOST_BYTES", 1000)
    model, ids = small_model(), tiny_inputs(tokens=8)
    llmkernels.patch(model)
    for _ in range(3):
        model(ids)
    assert prompts(model) == {STEP: 3}
    assert not blocks


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_graphs_of_forwards_in_blocks(name, blocks):
    """Prompts of few lengths in turn, then steps, with the caches of all of them alive."""
    model = family_model(name, "cuda", torch.bfloat16)
    exact = family_model(name, "cuda", torch.float32)
    llmkernels.patch(model)
    chats = []
    for tokens in (9, 9, 9, 17, 24, 9, 3, 17, 20):
        ids, options = masked("cuda", tokens, seed=tokens)
        mask = options["attention_mask"]
        output = model(ids, attention_mask=mask, logits_to_keep=1)
        chats.append((ids, mask, output.past_key_values))
        expected = exact(ids, attention_mask=mask).logits[:, -1:]
        assert_close(output.logits.float(), expected, 4 * rounding(torch.bfloat16))
    assert len(blocks) == prompts(model)[STEP] - 1  # all but the first one, whose layout they have
    assert len(blocks) == 8 or LONG in prompts(model)
    for ids, mask, cache in chats:
        text, longer = torch.cat([ids, ids[:, :1]], 1), torch.cat([mask, mask[:, -1:]], 1)
        found = model(text[:, -1:], attention_mask=longer, past_key_values=cache).logits
        expected = exact(text, attention_mask=longer).logits[:, -1:]
        assert_close(found.float(), expected, 4 * rounding(torch.bfloat16))
    unpatch(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESCRIBED)
def test_graphs_of_prompts(name):
    """The logits behind prompts and in steps, of graphs for few lengths, against those in float32."""
    model = family_model(name, "cuda", torch.bfloat16)
    exact = family_model(name, "cuda", torch.float32)
    llmkernels.patch(model)
    for tokens in (3, 17, 9, 24, 17, 3, 16, 20):
        check_generate_in_half_precision(model, exact, tokens)
    assert prompts(model)[STEP] >= 6  # a long one may not fit into a window
    assert 2 <= len(decoder(model).programs.graphs()) <= 4
    unpatch(model)


@pytest.mark.gpu
def test_float32_and_large_heads_on_a_gpu():
    model, ids = small_model(device="cuda"), tiny_inputs("cuda")
    llmkernels.patch(model)
    hf_generate(model, ids)
    assert prompts(model) == {"by the model's forward: attention over prompts is slow in torch.float32": 1}


def test_left_to_the_modules_once(monkeypatch):
    """A prompt that the loop has refused is not tried again by the forward, and counts once."""
    compose_forwards(monkeypatch)
    model, ids = small_model(), tiny_inputs(tokens=8)
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    monkeypatch.setattr(prompt, "_CPU_TOKENS", 4)
    assert torch.equal(hf_generate(model, ids), expected)
    assert torch.equal(hf_generate(model, ids, past_key_values=llmkernels.KVCache(model, 40)), expected)
    assert torch.equal(hf_generate(model, ids, prefill_chunk_size=4), expected)  # its forwards could compose the first
    left = {"attention over more than 4 tokens is left to PyTorch": 2, "prefill_chunk_size": 1}
    assert prompts(model) == {by_forward_of(reason): count for reason, count in left.items()}
    monkeypatch.undo()
    compose_forwards(monkeypatch)
    cache = llmkernels.KVCache(model, 40)
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert prompts(model)[STEP] == 1  # the cache's next prompt is one like any other


def test_left_to_the_modules_once_behind_a_cache(monkeypatch):
    """As above, of a second prompt, which is longer than a step takes."""
    model, ids = small_model(max_position_embeddings=128), tiny_inputs(tokens=60)

    def chat(model, cache):
        first = hf_generate(model, ids[:, :8], past_key_values=cache, max_new_tokens=2)
        return hf_generate(model, torch.cat([first, ids], 1), past_key_values=cache)

    expected = chat(model, DynamicCache(config=model.config))
    llmkernels.patch(model)
    monkeypatch.setattr(prompt, "_CPU_TOKENS", 16)
    assert torch.equal(chat(model, llmkernels.KVCache(model, 80)), expected)
    assert prompts(model) == {STEP: 1, by_forward_of("attention over more than 16 tokens is left to PyTorch"): 1}
    assert not decoder(model).forwards
