"""How much memory a call of generate allocates ahead, keeps, and frees."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, Qwen2Config

import llmkernels
from families import WINDOW, family_model
from generating import NEW, Stream, generate_step, hf_generate, small_model
from hf_models import tiny_inputs
from llmkernels.hf.cache import buffers as caches
from llmkernels.hf.step import decode
from llmkernels.hf.step.decode import decoder

GIB = 1 << 30


def row_bytes(batch):
    """Bytes of the keys and values of one token in Qwen2.5-7B in bfloat16, for all layers and sequences."""
    config = Qwen2Config(num_hidden_layers=28, num_key_value_heads=4, num_attention_heads=28, hidden_size=3584)
    return 2 * 2 * batch * config.num_hidden_layers * config.num_key_value_heads * 128


@pytest.mark.parametrize(
    ("batch", "prompt", "gib"),
    [(1, 11, 0.12), (8, 512, 0.75), (64, 11, 0.66), (64, 512, 2.41), (64, 8192, 35.0)],
)
def test_what_is_taken_ahead(batch, prompt, gib):
    """Room ahead is a quarter of the tokens, or half a GiB; room for 2048 tokens would be 7 GiB at a batch of 64."""
    taken = caches.room_for(prompt, row_bytes(batch), 32768) * row_bytes(batch)
    needed = prompt * row_bytes(batch)
    assert taken / GIB == pytest.approx(gib, abs=0.02)
    assert taken <= max(needed * 1.25, needed + 0.5 * GIB) + caches.STEP * row_bytes(batch)
    assert caches.room_for(prompt, row_bytes(batch), prompt + 20) <= prompt + 20 + caches.STEP - 1
    assert caches.room_for(prompt, row_bytes(batch), 5) >= prompt


def test_growing_stays_a_small_part():
    """The moves from 16 to 32768 tokens at a batch of 64; each is a copy and a new graph."""
    capacity, moves, copied = caches.room_for(16, row_bytes(64)), 0, 0
    while capacity < 32768:
        copied += capacity
        capacity = caches.room_for(capacity + 1, row_bytes(64))
        moves += 1
    assert moves < 30
    assert copied < 5 * 32768


def the_programs(model):
    return decoder(model).programs.idle()


@pytest.mark.parametrize("generate", [hf_generate, llmkernels.generate])
def test_a_large_cache_is_not_kept(generate, device, monkeypatch):
    model, ids = small_model(device=device), tiny_inputs(device)
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    for limit, kept in ((1 << 20, 1), (1000, 0), (1 << 20, 1)):
        monkeypatch.setattr(decode, "KEPT_BYTES", limit)
        assert torch.equal(generate(model, ids, max_new_tokens=NEW), expected)
        gc.collect()
        assert len(decoder(model)._spare) == kept
        assert len(the_programs(model)) == 1
    assert list(decoder(model).calls) == [generate_step()]


@pytest.mark.parametrize("limit", [0, GIB])
def test_a_returned_cache_holds_its_own(limit, device, monkeypatch):
    """Layer by layer the buffers are freed as their contents are copied to the returned cache, unless they are kept."""
    monkeypatch.setattr(decode, "KEPT_BYTES", limit)
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    cache = hf_generate(model, ids, return_dict_in_generate=True).past_key_values
    assert type(cache) is DynamicCache
    assert len(decoder(model)._spare) == (limit > 0)
    for layer in cache.layers:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


@pytest.mark.parametrize("prompt", [3, 20])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("generate", [hf_generate, llmkernels.generate])
def test_layers_with_a_window_keep_it_alone(generate, family, prompt, device, late, monkeypatch):
    """They drop what no token sees any more, and generate the same."""
    monkeypatch.setattr(caches, "STEP", 4)
    model, ids = family_model(family, device), tiny_inputs(device, 3, prompt)
    mask = torch.ones_like(ids)
    mask[0, : prompt // 2] = mask[2, : prompt - 1] = 0
    options = {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": None}
    expected = hf_generate(model, ids, **options)
    llmkernels.patch(model)
    for _ in range(2):  # and on the same cache once more
        assert torch.equal(generate(model, ids, **options), expected)
        (cache, _), *_ = decoder(model)._spare
        for layer in cache.layers:
            assert layer.k.shape[1] == (WINDOW + 4 if layer.is_sliding else cache.capacity)
            assert layer.offset > 0 or not layer.is_sliding
    assert decoder(model).calls == {generate_step(): 2}
    given = DynamicCache()  # its layers keep every token
    assert torch.equal(generate(model, ids, past_key_values=given, **options), expected)
    assert [layer.keys.shape[2] for layer in given.layers] == [prompt + 29] * len(given.layers)


@pytest.mark.parametrize("how", [llmkernels.release, "handle", "around"])
def test_release(how, device):
    model, ids = small_model(device=device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    first = hf_generate(model, ids)
    buffers = [weakref.ref(layer.k) for layer in decoder(model)._spare[0][0].layers]
    if how == "handle":
        handle.release()
    elif how == "around":
        llmkernels.release(torch.nn.ModuleList([model]))
    else:
        how(model)
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)
    assert not the_programs(model)
    assert torch.equal(hf_generate(model, ids), first)
    handle.release()
    handle.unpatch()
    handle.release()
    llmkernels.release(small_model())
    with pytest.raises(TypeError, match=r"release: model must be a torch.nn.Module, got str"):
        llmkernels.release("x")


def test_release_within_a_call(device):
    """The call keeps what it uses."""
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    expected = hf_generate(model, ids)

    class Release(Stream):
        def put(self, tokens):
            llmkernels.release(model)
            super().put(tokens)

    llmkernels.patch(model)
    for generate in (hf_generate, llmkernels.generate):
        assert torch.equal(generate(model, ids, max_new_tokens=NEW, streamer=Release()), expected)


@pytest.mark.gpu
def test_memory_is_free_again():
    """After a call at most the kept cache is allocated, after release() nothing."""
    model, ids = small_model(device="cuda", dtype=torch.bfloat16), tiny_inputs("cuda")
    llmkernels.patch(model)
    hf_generate(model, ids)
    llmkernels.release(model)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for generate in (hf_generate, llmkernels.generate):
        generate(model, tiny_inputs("cuda", 64, 40), max_new_tokens=NEW)
        kept = torch.cuda.memory_allocated() - before
        assert kept < 3 * decoder(model)._spare[0][0].nbytes + (32 << 20)
        llmkernels.release(model)
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 1 << 20
