"""A DynamicCache behind which a patched model decodes is to everyone else what it is behind an unpatched one."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import llmkernels
from families import WINDOW, family_model
from hf_models import assert_close, tiny_inputs
from llmkernels.hf.cache import adopted
from llmkernels.hf.cache import buffers as caches
from llmkernels.hf.cache.fits import is_ours
from llmkernels.hf.step.decode import decoder

STEP = "by the decode step"
FAMILIES = ["qwen2", "mistral", "gemma3"]  # no windows, windows alone, some
PROMPT = 2 * WINDOW


class Twins:
    """A patched model and an unpatched one, each with a cache: everything is done to both and has to give the same."""

    def __init__(self, family, prompt=PROMPT, batch=2, device="cpu", tokens=1, **options):
        model = family_model(family, device, **options)
        self.models = copy.deepcopy(model), model
        llmkernels.patch(self.models[0])
        self.caches = [DynamicCache(config=model.config) for model in self.models]
        self.forward(prompt, batch)
        if tokens:
            self.forward(tokens)
            assert is_ours(self.caches[0])

    @property
    def steps(self):
        return decoder(self.models[0]).forwards[STEP]

    def do(self, function, caches=None):
        """What function(cache, model) returns for both, or the exception it raises."""
        found, expected = (
            outcome(function, cache, model) for cache, model in zip(caches or self.caches, self.models, strict=True)
        )
        assert type(found) is type(expected), (found, expected)
        if isinstance(expected, Exception):
            assert str(found) == str(expected)
        self.check()
        return found, expected

    def forward(self, tokens=1, batch=None, grad=False, **options):
        held = self.caches[1].layers[0].keys
        self.batch = batch or (self.batch if held is None else len(held))  # a reset may drop the tensors
        ids = tiny_inputs(self.models[0].device, self.batch, tokens, seed=self.caches[1].get_seq_length())

        def call(cache, model):
            with torch.set_grad_enabled(grad):
                return model(ids, past_key_values=cache, use_cache=True, **options)

        found, expected = self.do(call)
        if not isinstance(expected, Exception):
            assert_close(found.logits, expected.logits)
        return found, expected

    def check(self):
        """The caches hold the same. A copy is looked at: who looks at the cache itself may keep what it sees."""
        found, expected = copy.deepcopy(self.caches[0]) if no_graph(self.caches[1]) else self.caches[0], self.caches[1]
        assert_same_cache(found, expected)
        for ours, theirs in zip(self.caches[0].layers, expected.layers, strict=True):
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
            assert ours.is_initialized == theirs.is_initialized and ours.is_sliding == theirs.is_sliding


def no_graph(cache):
    return not any(isinstance(layer.keys, torch.Tensor) and layer.keys.requires_grad for layer in cache.layers)


def assert_same_cache(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert isinstance(ours, type(theirs))
        for name in ("keys", "values"):
            x, y = getattr(ours, name), getattr(theirs, name)
            if y is None:
                assert x is None
                continue
            assert x.shape == y.shape and x.dtype == y.dtype
            if y.numel() and y.any():
                assert_close(x, y)
            else:
                assert torch.equal(x, y)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return error


def unpickled(cache):
    return pickle.loads(pickle.dumps(cache))


def saved(cache):
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# --- crop


@pytest.mark.parametrize("crop", [-1, -2, -5, -PROMPT - 1, -PROMPT - 9, 0, 1, 5, PROMPT + 1, 100, torch.tensor(-2)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [2, PROMPT])
def test_crop(family, crop, prompt):
    """As the installed transformers does, with its errors: what a window has dropped does not come back as zeros."""
    twins = Twins(family, prompt)
    twins.do(lambda cache, model: cache.crop(crop))
    for _ in range(3):
        twins.forward()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [2, WINDOW, PROMPT])
@pytest.mark.parametrize("when", ["before", "after"])
def test_crop_of_recorded_windows(family, prompt, when):
    """Assisted decoding records what windows drop, to be able to go back."""
    twins = Twins(family, prompt, tokens=0)
    record = lambda cache, model: cache.activate_past_recording()  # noqa: E731
    if when == "before":
        twins.do(record)
    twins.forward()
    if when == "after":
        twins.do(record)
    twins.do(lambda cache, model: cache.crop(0))  # behind every forward, as transformers asks for
    for tokens, crop in ((3, -2), (4, -4), (2, 0), (1, -1), (5, -2)):
        twins.forward(tokens)
        assert is_ours(twins.caches[0])
        twins.do(lambda cache, model, crop=crop: cache.crop(crop))
    assert twins.steps == 6
    twins.do(lambda cache, model: cache.crop(-5))  # more than is recorded
    twins.forward()


def test_crop_of_one_layer():
    twins = Twins("qwen2")
    twins.do(lambda cache, model: cache.layers[0].crop(-2))
    twins.forward()


# --- the other methods


METHODS = {
    "reset": lambda cache, model: cache.reset(),
    "select": lambda cache, model: cache.batch_select_indices(torch.tensor([1])),
    "select a list": lambda cache, model: cache.batch_select_indices([1, 0]),
    "repeat": lambda cache, model: cache.batch_repeat_interleave(3),
    "reorder": lambda cache, model: cache.reorder_cache(torch.tensor([1, 1])),
    "reorder fewer": lambda cache, model: cache.reorder_cache(torch.tensor([1])),
    "offload": lambda cache, model: [layer.offload() for layer in cache.layers],
    "prefetch": lambda cache, model: [layer.prefetch() for layer in cache.layers],
    "in place": lambda cache, model: [layer.values.mul_(0.5) for layer in cache.layers],
    "update one": lambda cache, model: cache.update(
        cache.layers[1].keys[:, :, :1], cache.layers[1].values[:, :, :1], 1
    ),
    "evict": lambda cache, model: [
        [setattr(layer, name, getattr(layer, name)[:, :, -3:]) for name in ("keys", "values")] for layer in cache.layers
    ],
    "scale": lambda cache, model: [setattr(layer, "keys", layer.keys * 2) for layer in cache.layers],
    "iterate": lambda cache, model: [x if x is None else x.sum() for row in cache for x in row],
    "another layer": lambda cache, model: cache.layers.__setitem__(0, copy.deepcopy(cache.layers[0])),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [2, PROMPT])
def test_methods(family, method, prompt):
    twins = Twins(family, prompt)
    twins.do(METHODS[method])
    for tokens in (1, 1, 3, 70, 1):
        twins.forward(tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, unpickled, saved])
def test_copies(family, how):
    """They are transformers' own, with the memory of what is held, and independent."""
    twins = Twins(family)
    copies = [how(cache) for cache in twins.caches]
    if how is not copy.copy:  # which shares the layers
        assert type(copies[0]) is DynamicCache
        assert {type(layer) for layer in copies[0].layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
        for ours, theirs in zip(copies[0].layers, copies[1].layers, strict=True):
            assert vars(ours).keys() == vars(theirs).keys()
            assert ours.keys.untyped_storage().nbytes() == ours.keys.nbytes
    twins.forward()
    for _ in range(2):
        kept, twins.caches = twins.caches, copies
        twins.forward(2)
        twins.caches = kept
        twins.forward()


@pytest.mark.parametrize("family", FAMILIES)
def test_iteration_makes_another_cache(family):
    twins = Twins(family)
    twins.caches = [DynamicCache(list(cache)) for cache in twins.caches]
    twins.forward()
    assert twins.steps == (1 if family == "gemma3" else 2)  # there the lengths of the layers differ then


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_reorder_in_place(family):
    """So that steps go on with their graphs."""
    twins = Twins(family, batch=3)
    addresses = [layer.k.data_ptr() for layer in twins.caches[0].layers]
    for order in ([2, 0, 0], [1, 1, 2]):
        twins.do(lambda cache, model, order=order: cache.reorder_cache(torch.tensor(order)))
        twins.forward()
    assert [layer.k.data_ptr() for layer in twins.caches[0].layers] == addresses


# --- tensors that someone keeps


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("back", [-3, "assign", "reorder"])
def test_keys_that_were_taken_stay(family, back):
    """A search keeps the keys and values of a branch and comes back to it."""
    twins = Twins(family, 2, tokens=2)
    take = lambda: [[(layer.keys, layer.values) for layer in cache.layers] for cache in twins.caches]  # noqa: E731
    root = take()
    twins.forward(3)
    branch = take()
    kept = copy.deepcopy(branch)

    def put(taken):
        for cache, layers in zip(twins.caches, taken, strict=True):
            for layer, (layer.keys, layer.values) in zip(cache.layers, layers, strict=True):
                if layer.is_sliding:
                    layer.cumulative_length = layer.keys.shape[2]

    if back == "assign":
        put(root)
    elif back == "reorder":
        twins.do(lambda cache, model: cache.reorder_cache(torch.tensor([1, 0])))
    else:
        twins.do(lambda cache, model: cache.crop(back))
    steps = twins.steps
    for _ in range(4):
        twins.forward()
    assert twins.steps == steps + 4
    for found, expected in zip(branch[0], kept[0], strict=True):
        assert all(map(torch.equal, found, expected))
    put(branch)
    twins.forward()


# --- what the buffers can not take


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family):
    twins = Twins(family)
    found, expected = twins.forward(2, grad=True)
    assert all(layer.keys.requires_grad for layer in twins.caches[0].layers)
    for output in (found, expected):
        output.logits.square().sum().backward()
    for (name, ours), theirs in zip(twins.models[0].named_parameters(), twins.models[1].parameters(), strict=True):
        assert theirs.grad is not None, name
        assert_close(ours.grad, theirs.grad, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_part(family):
    """What a recorded forward has read is not written before its backward."""
    twins = Twins(family)
    for model in twins.models:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj.requires_grad_(True)
    outputs = twins.forward(2, grad=True)
    twins.forward()
    for output in outputs:
        output.logits.square().sum().backward()
    ours, theirs = (model.model.layers[0].self_attn.q_proj.weight.grad for model in twins.models)
    assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family):
    twins = Twins(family)
    ids = tiny_inputs(tokens=1)

    @torch.no_grad()
    def call(cache, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(ids, past_key_values=cache).logits

    found, expected = outcome(call, twins.caches[0], twins.models[0]), outcome(call, twins.caches[1], twins.models[1])
    assert found.dtype == expected.dtype
    assert_close(found.float(), expected.float(), 0.05)
    for ours, theirs in zip(twins.caches[0].layers, twins.caches[1].layers, strict=True):
        assert ours.keys.dtype == theirs.keys.dtype and ours.keys.shape == theirs.keys.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_another_dtype(family):
    twins = Twins(family)
    for model in twins.models:
        model.double()
    for _ in range(2):
        twins.forward()
    twins.do(lambda cache, model: [setattr(layer, name, getattr(layer, name).double())
                                   for layer in cache.layers for name in ("keys", "values")])  # fmt: skip
    twins.forward()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_attentions(family, tokens):
    """As wide as unpatched: a window does not show what it has dropped."""
    twins = Twins(family, attn_implementation="eager")
    found, expected = twins.forward(tokens, output_attentions=True)
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert_close(ours, theirs)
    twins.forward()


# --- layers and caches of others


def doubled(update):
    return lambda keys, values, *args, **kwargs: update(keys * 2, values, *args, **kwargs)


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("of", ["layer", "cache", "class"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_ones_own(family, of, when, monkeypatch):
    """It sees every token, also where it was replaced when steps were running."""
    twins = Twins(family, tokens=when)
    for cache in twins.caches:
        if of == "layer":
            cache.layers[1].update = doubled(cache.layers[1].update)
        elif of == "cache":
            cache.update = doubled(cache.update)
    if of == "class":
        for kind in (DynamicLayer, DynamicSlidingWindowLayer):
            original = kind.update
            monkeypatch.setattr(kind, "update", lambda self, k, v, *a, original=original: original(self, k * 2, v, *a))
    steps = twins.steps
    for _ in range(3):
        # A copy of a replaced update is bound to the layer that it was made for.
        check, twins.check = twins.check, lambda: None
        twins.forward()
        twins.check = check
    assert twins.steps == steps


def test_a_layer_of_ones_own():
    class Own(DynamicLayer):
        def update(self, keys, values, *args, **kwargs):
            return super().update(keys * 2, values, *args, **kwargs)

    twins = Twins("qwen2", tokens=0)
    for cache in twins.caches:
        cache.layers[1].__class__ = Own
    steps = twins.steps
    for _ in range(3):
        twins.forward()
    assert twins.steps == steps


def test_another_window():
    """A cache that dropped tokens is not for a model that needs them."""
    cache = Twins("mistral").caches[0]
    model = family_model("mistral", sliding_window=None)
    ids = tiny_inputs()
    expected = outcome(lambda: model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits)
    llmkernels.patch(model)
    with torch.no_grad():
        assert_close(model(ids[:, :1], past_key_values=cache).logits, expected)


# --- anything in any order

ACTIONS = {
    "step": lambda twins: twins.forward(),
    "steps": lambda twins: twins.forward(3),
    "modules": lambda twins: twins.forward(5, output_hidden_states=True),
    "prompt": lambda twins: twins.forward(40),
    "crop 1": lambda twins: twins.do(lambda cache, model: cache.crop(-1)),
    "crop 4": lambda twins: twins.do(lambda cache, model: cache.crop(-4)),
    "crop to 5": lambda twins: twins.do(lambda cache, model: cache.crop(5)),
    "look": lambda twins: twins.do(lambda cache, model: [layer.keys for layer in cache.layers]),
    "copy": lambda twins: setattr(twins, "caches", [copy.deepcopy(cache) for cache in twins.caches]),
} | {name: lambda twins, name=name: twins.do(METHODS[name]) for name in METHODS if name not in ("update one", "select")}


@pytest.mark.parametrize("step", [2, 64])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(prompt=st.integers(1, 14), actions=st.lists(st.sampled_from(sorted(ACTIONS)), max_size=8))
def test_any_order(family, step, prompt, actions):
    """With little room, too, where windows move with almost every action."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "STEP", step)
        twins = Twins(family, prompt)
        for action in actions:
            if twins.batch > 12:
                break
            ACTIONS[action](twins)
            twins.forward()


# --- windows that move to the first rows


@pytest.fixture
def little_room(monkeypatch):
    """A window moves every few tokens, and not every 64."""
    monkeypatch.setattr(caches, "STEP", 2)


def window_layers(twins):
    return [layer for layer in twins.caches[0].layers if layer.is_sliding]


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("prompt", [2, PROMPT])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_is_all_that_is_kept(family, prompt, tokens, little_room):
    twins = Twins(family, prompt)
    buffers = [layer.k for layer in window_layers(twins)]
    steps = twins.steps
    for _ in range(12):
        twins.forward(tokens)
    assert twins.steps == steps + 12
    if tokens <= 2:
        assert all(layer.k is buffer for layer, buffer in zip(window_layers(twins), buffers, strict=True))
    for layer in window_layers(twins):
        assert layer.k.shape[1] <= 2 * WINDOW
        assert layer.offset >= layer.length - layer.k.shape[1]
    twins.forward(70)  # by the modules
    twins.forward()
    assert all(layer.k.shape[1] <= 2 * WINDOW for layer in window_layers(twins))


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_shown_windows_stay(family, little_room):
    """What someone has taken is not overwritten when the window moves."""
    twins = Twins(family)
    for _ in range(6):
        taken = [(layer.keys, layer.values) for layer in window_layers(twins)]
        kept = copy.deepcopy(taken)
        for _ in range(4):
            twins.forward()
        for found, expected in zip(taken, kept, strict=True):
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_recorded_windows_move(family, little_room):
    twins = Twins(family)
    twins.do(lambda cache, model: cache.activate_past_recording())
    twins.do(lambda cache, model: cache.crop(0))
    for tokens, crop in ((4, -2), (1, 0), (5, -5)) * 5:
        twins.forward(tokens)
        twins.do(lambda cache, model, crop=crop: cache.crop(crop))
    assert twins.steps == 16
    assert all(layer.offset and layer.k.shape[1] <= 3 * WINDOW for layer in window_layers(twins))


@pytest.mark.parametrize("what", ["record", "crop"])
def test_one_of_several_windows_is_treated_apart(what, little_room):
    """Layers of one window drop tokens together. Where one records and others do not, the modules go on."""
    twins = Twins("mistral")
    if what == "crop":
        twins.do(lambda cache, model: cache.activate_past_recording())
        twins.forward(3)
        twins.do(lambda cache, model: cache.layers[0].crop(0))
    else:
        twins.do(lambda cache, model: cache.layers[0].activate_past_recording())
    for _ in range(12):
        twins.forward()


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_beams_and_windows_that_move(family, little_room):
    twins = Twins(family, batch=3)
    for order in ([2, 0, 0], [1, 1, 2], [0, 2, 1]) * 4:
        twins.do(lambda cache, model, order=order: cache.reorder_cache(torch.tensor(order)))
        twins.forward()
    assert twins.steps == 13


# --- generate, and what can go wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_goes_on_with_it(family, late):
    """Steps that were queued and are not wanted are undone, behind a window too."""
    twins = Twins(family)
    ids = tiny_inputs(tokens=PROMPT + 1 + 2)
    options = {"max_new_tokens": 5, "do_sample": False}
    whole = twins.models[1].generate(ids, past_key_values=copy.deepcopy(twins.caches[1]), **options)
    options["eos_token_id"] = whole[:, -3].tolist()  # the end comes before the last token that is asked for
    found, expected = twins.do(lambda cache, model: model.generate(ids, past_key_values=cache, **options))
    assert torch.equal(found, expected) and found.shape[1] < whole.shape[1]
    assert decoder(twins.models[0]).calls == {STEP: 1}
    twins.forward()


@pytest.mark.parametrize("fails", [1, 2, 4])
def test_no_memory_for_the_buffers(fails, monkeypatch):
    """Forwards go on without steps, on the cache as it was."""
    twins = Twins("gemma3", tokens=0)
    calls = []

    def out_of_memory(*arguments):
        calls.append(1)
        if len(calls) == fails:
            raise torch.OutOfMemoryError
        return filled(*arguments)

    filled = adopted.filled
    monkeypatch.setattr(adopted, "filled", out_of_memory)
    layers = list(twins.caches[0].layers)
    twins.forward()
    assert {type(layer) for layer in layers} == {DynamicLayer, DynamicSlidingWindowLayer}
    assert twins.steps == 0


def test_the_layers_are_the_same_objects():
    twins = Twins("gemma3", tokens=0)
    layers = list(twins.caches[0].layers)
    twins.forward()
    assert all(x is y for x, y in zip(layers, twins.caches[0].layers, strict=True))
    assert layers[0].keys.shape[2] == twins.caches[1].layers[0].keys.shape[2]


def test_a_short_chat_takes_little_memory():
    twins = Twins("qwen2", 10)
    assert twins.caches[0].capacity == 256
    for _ in range(8):
        twins.forward(70)
    assert twins.caches[0].capacity <= 2 * 571 + 64


def test_in_inference_mode():
    twins = Twins("gemma3")
    with torch.inference_mode():
        twins.forward(2)
        twins.forward(70)
        twins.do(lambda cache, model: cache.reorder_cache(torch.tensor([1, 0])))
    twins.forward()
    with torch.inference_mode():
        twins.do(METHODS["scale"])
        twins.forward()
