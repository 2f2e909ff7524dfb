"""KVCache as a cache of transformers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Cache, DynamicCache, GPTNeoXConfig, NemotronConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_models import FAMILIES, LAYERS, assert_close, logits_of, tiny_inputs, tiny_model
from llmkernels import KVCache
from llmkernels.hf.cache import buffers as caches
from llmkernels.hf.cache.buffers import room_for
from llmkernels.hf.cache.layers import KVCacheLayer, KVCacheWindowLayer


def filled(device="cpu", tokens=5, capacity=8, batch=2):
    """A cache and the keys in it, (B, Hkv, tokens, D), which differ everywhere; the values are the keys + 1000."""
    cache = KVCache(tiny_model().config, capacity)
    keys = torch.arange(batch * 2 * tokens * 4, device=device, dtype=torch.float32).view(batch, 2, tokens, 4)
    for layer in range(LAYERS):
        cache.update(keys, keys + 1000, layer)
    return cache, keys


def assert_holds(cache, keys):
    assert cache.get_seq_length() == cache.length == keys.shape[2]
    for layer in cache.layers:
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, keys + 1000)


def test_is_a_transformers_cache():
    cache, keys = filled()
    assert isinstance(cache, Cache)
    assert cache.is_initialized
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_sliding == [False] * LAYERS
    assert cache.batch_size == 2
    assert cache.get_max_length() == cache.layers[0].get_max_length() == 8
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert not KVCache(tiny_model().config, 8).is_initialized
    assert KVCache(tiny_model().config, 8).batch_size == -1
    assert repr(cache) == f"KVCache(length=5, capacity=8, layers={LAYERS})"
    assert_holds(cache, keys)


def test_update_appends_and_returns_views(device):
    cache, keys = filled(device)
    before = cache.layers[1].k.data_ptr()
    more = -keys[:, :, :2]
    k, v = cache.update(more, more + 1000, 1)
    assert torch.equal(k, torch.cat([keys, more], 2))
    assert torch.equal(v, torch.cat([keys, more], 2) + 1000)
    assert k.data_ptr() == cache.layers[1].k.data_ptr() == before
    assert cache.layers[1].k.shape == (2, 8, 2, 4)


def test_allocated_at_once(device):
    model = tiny_model(device=device, dtype=torch.bfloat16)
    for config in (model, model.config):
        cache = KVCache(config, 8, batch_size=3, dtype=torch.bfloat16, device=device)
        assert cache.layers[0].k.shape == (3, 8, 1, 16)
        assert cache.layers[0].v.dtype == torch.bfloat16
        assert cache.cache_seqlens.tolist() == [0, 0, 0]
    assert KVCache(model, 8, batch_size=3).layers[0].k.device == next(model.parameters()).device


@pytest.mark.parametrize("config", [GPTNeoXConfig, NemotronConfig])
def test_allocated_at_once_without_kv_heads_in_the_config(config):
    """A config without that number, or None, has as many as query heads."""
    cache = KVCache(config(hidden_size=112, num_attention_heads=7, num_hidden_layers=LAYERS), 8, batch_size=3)
    assert cache.layers[1].k.shape == (3, 8, 7, 16)


def test_past_the_end_is_an_error_and_nothing_is_written(device):
    cache, keys = filled(device)
    kept = [layer.k.clone() for layer in cache.layers]
    new = torch.full((2, 2, 4, 4), -1.0, device=device)
    for layer in range(LAYERS):
        with pytest.raises(ValueError, match=r"capacity must be at least 9 tokens \(5 live, 4 new\), got 8"):
            cache.update(new, new, layer)
    assert_holds(cache, keys)
    for layer, before in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.k, before)
    cache.update(new[:, :, :3], new[:, :, :3], 0)


def test_a_cache_that_grows(device):
    cache, keys = KVCache(tiny_model().config, 2, grows=True), torch.randn(2, 2, 700, 4, device=device)
    assert cache.get_max_length() == -1
    for start, end, capacity in ((0, 2, 2), (2, 3, 256), (3, 600, 1280), (600, 700, 1280)):
        for layer in range(LAYERS):
            cache.update(keys[:, :, start:end], keys[:, :, start:end] + 1000, layer)
        assert_holds(cache, keys[:, :, :end])
        assert cache.capacity == capacity
    assert not cache.make_room(580)
    assert cache.make_room(581)
    assert [layer.k.shape for layer in cache.layers] == [(2, 3072, 2, 4)] * LAYERS
    assert_holds(cache, keys)


@pytest.mark.parametrize("fails", range(1, 2 * LAYERS + 1))
def test_no_memory_to_grow(fails, monkeypatch):
    """Nothing has changed then, and no layer is left behind when it goes on."""
    cache, keys = filled()
    for layer in cache.layers:
        layer.grows = True
    calls = []

    def moved(*arguments):
        calls.append(1)
        if len(calls) == fails:
            raise torch.OutOfMemoryError
        return original(*arguments)

    original = KVCacheLayer._moved
    monkeypatch.setattr(KVCacheLayer, "_moved", moved)
    with pytest.raises(torch.OutOfMemoryError):
        cache.make_room(4)
    assert_holds(cache, keys)
    assert all(layer.k.shape[1] == layer.v.shape[1] == layer.capacity for layer in cache.layers)
    assert cache.make_room(4)
    assert_holds(cache, keys)
    assert all(layer.k.shape[1] == layer.v.shape[1] == layer.capacity >= 9 for layer in cache.layers)


def test_the_room_of_a_cache_grows_with_its_tokens():
    """A short chat takes little memory, and a long one seldom moves to larger buffers."""
    row_bytes = 131072  # Llama 3.1 8B
    assert room_for(10, row_bytes) * row_bytes <= 32 << 20
    moves, capacity = 0, 1
    while capacity < 32768:
        moves, grown = moves + 1, room_for(capacity + 1, row_bytes)
        assert 1.2 * capacity < grown <= max(2.5 * capacity, 256)
        capacity = grown
    assert moves <= 14
    assert room_for(40, 64 * row_bytes) <= 128  # where a token is large, there is room for few
    assert room_for(10, row_bytes, 5000) == 2112 and room_for(10, row_bytes, 100) == 128  # of a known limit


def test_errors():
    cache, keys = filled()
    new = keys[:, :, :1]
    wrong = {
        r"must have shape \(2, 2, 1, 4\), got \(1, 2, 1, 4\)": new[:1],
        r"must have shape \(2, 2, 1, 4\), got \(2, 1, 1, 4\)": new[:, :1],  # would be broadcast
        r"must have shape \(2, 2, 1, 4\), got \(2, 2, 1, 3\)": new[..., :3],
        r"must be \(batch, heads, tokens, head_dim\), got \(2, 1, 4\)": new[0],
        r"must be torch.float32 on cpu, got torch.float16 on cpu": new.half(),
        r"must be torch.float32 on cpu, got torch.float32 on meta": new.to("meta"),
    }
    for message, states in wrong.items():
        with pytest.raises(RuntimeError, match="KVCache: key_states " + message):
            cache.update(states, new, 0)
        with pytest.raises(RuntimeError, match="KVCache: value_states " + message):
            cache.update(new, states, 0)
    with pytest.raises(RuntimeError, match=r"value_states must have shape \(2, 2, 1, 4\), got \(2, 2, 2, 4\)"):
        cache.update(new, keys[:, :, :2], 0)
    with pytest.raises(TypeError, match="KVCache: value_states must be a tensor, got NoneType"):
        cache.update(new, None, 0)
    with pytest.raises(RuntimeError, match="no_grad"):
        cache.update(new.clone().requires_grad_(), new, 0)
    assert_holds(cache, keys)


def test_errors_of_a_cache_without_tensors():
    config = tiny_model().config
    cache = KVCache(config, 4)
    with pytest.raises(ValueError, match="there must be tokens in it"):
        _ = cache.cache_seqlens
    states = torch.ones(2, 2, 1, 4)
    for value in (states[:1], states[:, :1], states.expand(2, 2, 3, 4), states.double()):
        with pytest.raises(RuntimeError, match="KVCache: value_states must "):
            cache.update(states, value, 0)
    assert cache.layers[0].k is None and repr(cache) == f"KVCache(length=0, capacity=4, layers={LAYERS})"
    cache.update(states, states[..., :3], 0)  # values may be shorter than keys, as in DeepSeek
    with pytest.raises(ValueError, match="capacity must be positive, got 0"):
        KVCache(config, 0)
    for wrong in (1.5, "4", None, True):
        with pytest.raises(TypeError, match="KVCache: capacity must be an integer, got"):
            KVCache(config, wrong)
        if wrong is not None:
            with pytest.raises(TypeError, match="KVCache: batch_size must be an integer, got"):
                KVCache(config, 4, batch_size=wrong)
    with pytest.raises(TypeError, match="KVCache: config must be a model of transformers or its config, got int"):
        KVCache(3, 4)
    deeper = tiny_model(num_hidden_layers=LAYERS + 1).requires_grad_(False)
    with pytest.raises(ValueError, match=f"KVCache: layer_idx must be below {LAYERS}, .* got {LAYERS}"):
        deeper(torch.ones(1, 3, dtype=torch.long), past_key_values=KVCache(config, 4))


def test_crop():
    cache, keys = filled()
    cache.crop(0)
    cache.crop(-2)
    assert_holds(cache, keys[:, :, :3])
    for wrong in (2, -4):
        with pytest.raises(ValueError, match=rf"tokens_to_remove must be from -3 to 0.*, got {wrong}"):
            cache.crop(wrong)
    for wrong in (-1.5, None, torch.tensor(-1.5)):  # a float was rounded, and cropped by that much
        with pytest.raises(TypeError, match=r"KVCache.crop: tokens_to_remove must be an integer, got"):
            cache.crop(wrong)
    cache.crop(torch.tensor(-1))
    assert_holds(cache, keys[:, :, :2])
    cache.crop(-2)
    assert cache.get_seq_length() == 0


def test_reset_keeps_the_buffers():
    cache, keys = filled()
    before = cache.layers[0].k.data_ptr()
    cache.reset()
    assert cache.get_seq_length() == 0
    for layer in range(LAYERS):
        cache.update(keys[:, :, :1], keys[:, :, :1] + 1000, layer)
    assert cache.layers[0].k.data_ptr() == before
    assert_holds(cache, keys[:, :, :1])


def test_reorder_for_beam_search(device):
    cache, keys = filled(device, batch=4)
    before = cache.layers[0].k.data_ptr()
    order = torch.tensor([3, 3, 0, 1], device=device)
    cache.reorder_cache(order)
    assert_holds(cache, keys[order])
    assert cache.layers[0].k.data_ptr() == before
    cache.reorder_cache(order[:2])
    assert_holds(cache, keys[order][order[:2]])


def test_batch_operations(device):
    cache, keys = filled(device)
    cache.batch_repeat_interleave(3)
    assert_holds(cache, keys.repeat_interleave(3, 0))
    cache.batch_select_indices(torch.tensor([5, 0], device=device))
    assert_holds(cache, keys[[1, 0]])
    assert cache.capacity == 8
    assert cache.cache_seqlens.tolist() == [5, 5]
    empty = KVCache(tiny_model().config, 8)
    empty.batch_repeat_interleave(3)
    empty.reorder_cache(torch.tensor([0]))
    assert not empty.is_initialized


def test_counters(device):
    cache, keys = filled(device)
    assert cache.cache_seqlens.tolist() == [5, 5]
    assert cache.cache_seqlens.dtype == torch.int32
    assert cache.cache_seqlens.device == keys.device
    cache.begin(torch.tensor([4, 2], device=device), torch.tensor([0, 2], device=device))
    assert cache.counters.tolist() == [[4, 2], [5, 5]]
    assert cache.cache_leftpad.tolist() == [0, 2]
    before = cache.counters.data_ptr()
    cache.counters.add_(1)  # as a step does on the device
    cache.advance()
    assert cache.length == 6
    assert cache.cache_seqlens.tolist() == [6, 6]
    cache.crop(-3)
    assert cache.cache_seqlens.tolist() == [3, 3]
    assert cache.counters.data_ptr() == before


def test_counters_are_written_where_they_differ(device):
    """What the host knows to be on the device already is left: each write would be a launch of every forward."""
    cache, _ = filled(device)
    assert cache.cache_seqlens.tolist() == [5, 5]

    def counters():
        return cache.counters.tolist(), cache.leftpads.tolist()

    def begin(*arguments):
        before = cache.counters._version, cache.leftpads._version
        cache.begin(*arguments)
        return before != (cache.counters._version, cache.leftpads._version)

    for _ in range(2):  # padded, and from these on not
        assert begin(torch.tensor([4, 2], device=device), torch.tensor([0, 2], device=device))
        assert counters() == ([[4, 2], [5, 5]], [[0, 2]])
    assert begin(4)
    assert counters() == ([[4, 4], [5, 5]], [[0, 0]])
    assert not begin(4)

    def count(tokens):
        with cache.counting(tokens):
            cache.counters.data.add_(tokens)  # as a graph does: PyTorch counts no version

    count(1)
    cache.advance()
    assert not begin(5)
    assert counters() == ([[5, 5], [6, 6]], [[0, 0]])
    assert begin(7)
    assert counters() == ([[7, 7], [6, 6]], [[0, 0]])
    count(2)  # and the host does not
    assert begin(7)
    assert counters() == ([[7, 7], [6, 6]], [[0, 0]])
    for counted in (0, 2):  # by a step that raises then
        with pytest.raises(RuntimeError, match="in the middle"), cache.counting(2):
            cache.counters.data.add_(counted)
            raise RuntimeError("in the middle")
        assert begin(7)
        assert counters() == ([[7, 7], [6, 6]], [[0, 0]])
    count(2)
    cache.advance(2)
    cache.take_back(2)
    assert begin(7)
    assert counters() == ([[7, 7], [6, 6]], [[0, 0]])
    for written in (cache.counters, cache.leftpads):  # by someone else
        written.add_(3)
        assert begin(7)
        assert counters() == ([[7, 7], [6, 6]], [[0, 0]])
    cache.counters.zero_()
    assert cache.cache_seqlens.tolist() == [6, 6]
    cache.crop(-2)
    assert begin(5)
    assert counters() == ([[5, 5], [4, 4]], [[0, 0]])


# --- layers with a sliding window, as generate lends them


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.sampled_from([2, 64]), st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_a_window_is_what_transformers_keeps(window, step, chunks):
    """The same comes out of update(), in a bounded number of rows."""
    ours, theirs = KVCacheWindowLayer(window, 16, grows=True), DynamicSlidingWindowLayer(window)
    keys = torch.randn(2, 1, sum(chunks), 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "STEP", step)
        for chunk in keys.split(chunks, 2):
            assert ours.get_mask_sizes(chunk.shape[2]) == theirs.get_mask_sizes(chunk.shape[2])
            found, expected = ours.update(chunk, chunk + 9), theirs.update(chunk, chunk + 9)
            if window == 1:  # where transformers keeps everything, and masks have no place for it
                expected = chunk, chunk + 9
            assert all(map(torch.equal, found, expected))
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.k.shape[1] <= window + step
    assert torch.equal(ours.keys, keys[:, :, max(0, keys.shape[2] - window + 1) :])


def test_windows_of_several_lengths(monkeypatch):
    """Layers of each drop tokens together, and what a step reads says how many."""
    monkeypatch.setattr(caches, "STEP", 4)
    windows = [5, None, 9, 5]
    cache, keys = KVCache.growable(windows, 64, 64, 64), torch.randn(2, 1, 60, 4)
    for layer in range(4):
        cache.update(keys[:, :, :20], keys[:, :, :20], layer)
    cache.begin(19, torch.tensor([0, 17]))
    rows = cache.rows()
    buffers = [layer.k for layer in cache.layers]
    for end in range(21, 61):
        cache.make_room(1)
        cache.counters.add_(1)
        for layer in cache.layers:
            layer.k[:, end - 1 - layer.offset] = keys[:, 0, end - 1, None]
        cache.advance()
        assert cache.counters[0].tolist() == [end - 1] * 2
        for layer, row, window in zip(cache.layers, rows, windows, strict=True):
            seen, held = window or end, end - layer.offset
            assert cache.counters[1 + row].tolist() == [held] * 2
            assert cache.leftpads[row].tolist() == [0, max(17 - layer.offset, 0)]
            assert torch.equal(layer.k[:, held - seen : held, 0], keys[:, 0, end - seen : end])
    assert [layer.k.shape[1] for layer in cache.layers] == [9, 64, 13, 9]
    assert all(layer.k is buffer for layer, buffer in zip(cache.layers, buffers, strict=True))
    with pytest.raises(RuntimeError, match="must not have dropped tokens"):
        cache.crop(-1)
    cache.reset()
    assert cache.length == 0 and {layer.offset for layer in cache.layers} == {0}


def test_memory_of_windows():
    """Gemma 3 12B at 32k tokens: 13 GB of keys and values with all tokens in every layer."""
    windows = [None if layer % 6 == 5 else 1024 for layer in range(48)]
    sizes = {}
    for kept in (windows, [None] * 48):
        cache = KVCache.growable(kept, 48 * 2 * 8 * 256 * 2, 32768, 32768)
        cache.early_initialization(1, 8, 256, torch.bfloat16, torch.device("meta"))
        sizes[kept[0]] = cache.nbytes / 1e9
    assert sizes[None] > 12.8
    assert sizes[1024] < 2.6


def test_copies_are_independent():
    cache, keys = filled()
    twin = copy.deepcopy(cache)
    cache.reset()
    for layer in range(LAYERS):
        cache.update(-keys, -keys, layer)
    assert_holds(twin, keys)


def test_buffers_made_in_inference_mode_can_be_used_outside_of_it():
    with torch.inference_mode():
        cache, keys = filled()
        cache.begin(torch.zeros(2))
    for layer in range(LAYERS):
        cache.update(keys[:, :, :1], keys[:, :, :1], layer)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.counters.add_(1)


# --- in a model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_with_every_stock_attention(family, attention, device):
    model, ids = tiny_model(family, device, attn_implementation=attention), tiny_inputs(device)
    before = logits_of(model, ids)
    cache = KVCache(model, 11)
    found = [logits_of(model, ids[:, a:b], past_key_values=cache) for a, b in ((0, 6), (6, 7), (7, 11))]
    assert_close(torch.cat(found, 1), before)
    dynamic = DynamicCache(config=model.config)
    logits_of(model, ids, past_key_values=dynamic)
    for ours, theirs in zip(cache.layers, dynamic.layers, strict=True):
        assert_close(ours.keys, theirs.keys)
        assert_close(ours.values, theirs.values)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_return_sequences": 2, "num_beams": 2},
        {"do_sample": False, "prompt_lookup_num_tokens": 2},
    ],
    ids=["greedy", "sampling", "beam", "beams", "lookup"],
)
def test_generate_accepts_it(options, device):
    model, ids = tiny_model(device=device), tiny_inputs(device, 1 if "prompt_lookup_num_tokens" in options else 2)
    results = []
    for cache in (DynamicCache(config=model.config), KVCache(model, 30)):
        torch.manual_seed(11)
        results.append(model.generate(ids, past_key_values=cache, max_new_tokens=8, **options))
    assert torch.equal(*results)


def test_sliding_window(device):
    options = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model, ids = tiny_model(device=device, **options), tiny_inputs(device)
    before = logits_of(model, ids)
    cache = KVCache(model, 11)
    found = [logits_of(model, ids[:, a:b], past_key_values=cache) for a, b in ((0, 6), (6, 7), (7, 11))]
    assert_close(torch.cat(found, 1), before)
