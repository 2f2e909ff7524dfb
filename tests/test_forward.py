"""The forward of a patched model behind a cache, by the decode step: loops of one's own, beams, verified tokens."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache

import llmkernels
from families import EXPECTED, FAMILIES, family_model
from generating import left_padded, loop, small_model
from hf_models import CountOps, assert_close, lora, tiny_inputs
from llmkernels.hf.callers import call
from llmkernels.hf.classes.cache_name import cache_name
from llmkernels.hf.errors import NoStep
from llmkernels.hf.report import by_forward
from llmkernels.hf.step import graphs
from llmkernels.hf.step.decode import decoder
from llmkernels.hf.step.program import Program
from prompting import compose_forwards

NEW = 9


STEP = "by the decode step"
# Those that docs/models.md says to have a decode step, but for those whose tables would change on the way.


DESCRIBED = [
    name
    for name, runs in EXPECTED.items()
    if not (runs.no_step or runs.loop) and "original_max_position_embeddings" not in FAMILIES[name].options
]


def check(model, function, forwards=None):
    """A patched model gives what it gives unpatched, and all its forwards behind a cache are steps."""
    expected = function(model)
    handle = llmkernels.patch(model)
    found = function(model)
    if isinstance(expected, tuple):
        assert_close(found[1], expected[1])
        found, expected = found[0], expected[0]
    assert torch.equal(found, expected)
    counted = handle.report().decode[0].forwards
    assert set(counted) == {STEP}, counted
    assert forwards is None or counted[STEP] == forwards
    return handle


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_loop(name, device):
    check(family_model(name, device), lambda model: loop(model, tiny_inputs(device)), NEW - 1)


@pytest.mark.parametrize("name", DESCRIBED)
def test_padded_on_the_left(name, device):
    """Without position_ids they are those of the unpadded tokens, as transformers has it."""
    mask, ids = left_padded(device), tiny_inputs(device, 3)
    check(family_model(name, device), lambda model: loop(model, ids, mask), NEW - 1)


@pytest.mark.parametrize("name", DESCRIBED)
def test_beams(name, device):
    check(
        family_model(name, device),
        lambda model: model.generate(tiny_inputs(device), max_new_tokens=NEW, num_beams=3, do_sample=False),
    )


@pytest.mark.parametrize("name", DESCRIBED)
def test_prompt_lookup(name, device):
    ids = tiny_inputs(device, 1, 7).repeat(1, 3)
    options = {"max_new_tokens": NEW, "do_sample": False, "prompt_lookup_num_tokens": 3}
    check(family_model(name, device), lambda model: model.generate(ids, **options))


def test_assisted(device):
    assistant = small_model(device=device, seed=1)
    options = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": assistant}
    check(small_model(device=device), lambda model: model.generate(tiny_inputs(device, 1), **options))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_several_tokens(count, device):
    model, ids = small_model(device=device), tiny_inputs(device, 2, 10 + 3 * count)
    with torch.no_grad():
        expected = model(ids).logits
        llmkernels.patch(model)
        cache = model(ids[:, :10]).past_key_values
        for start in range(10, ids.shape[1], count):
            chunk = ids[:, start : start + count]
            assert_close(model(chunk, past_key_values=cache).logits, expected[:, start : start + count])
            assert cache.get_seq_length() == start + count
    assert decoder(model).forwards == {STEP: 3}


def test_logits_to_keep(device):
    model, ids = small_model(device=device), tiny_inputs(device, 2, 14)
    llmkernels.patch(model)
    with torch.no_grad():
        for keep in (0, 1, 3, torch.tensor([0, 2], device=device)):
            cache = model(ids[:, :10]).past_key_values
            everything = model(ids[:, 10:], past_key_values=copy.deepcopy(cache)).logits
            found = model(ids[:, 10:], past_key_values=cache, logits_to_keep=keep).logits
            assert torch.equal(found, everything[:, slice(-keep, None) if isinstance(keep, int) else keep])


@torch.no_grad()
def test_logits_to_keep_is_none(device, monkeypatch):
    """None adds a dimension to the logits: by the modules, a prompt and what follows."""
    monkeypatch.setattr("llmkernels.hf.callers.forward.PROMPT_DEVICES", {"cpu", "cuda"})
    model, ids = small_model(device=device), tiny_inputs(device, 2, 14)

    def run():
        output = model(ids[:, :10], logits_to_keep=None)
        return [output.logits, model(ids[:, 10:], past_key_values=output.past_key_values, logits_to_keep=None).logits]

    expected = run()
    llmkernels.patch(model)
    for found, theirs in zip(run(), expected, strict=True):
        assert_close(found, theirs)


def test_positions_of_the_caller(device):
    """Positions that begin elsewhere, as those of padded sequences."""
    mask, ids = left_padded(device), tiny_inputs(device, 3)

    @torch.no_grad()
    def run(model):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(ids, attention_mask=mask, position_ids=positions)
        last, whole = output.logits[:, -1:].argmax(-1), torch.cat([mask, mask.new_ones(3, 2)], 1)
        return last, model(
            last.expand(3, 2),
            attention_mask=whole,
            position_ids=positions[:, -1:] + torch.tensor([1, 2], device=device),
            past_key_values=output.past_key_values,
        ).logits

    check(small_model(device=device), run, 1)


def test_the_cache_becomes_ours_in_place(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    cache = DynamicCache(config=model.config)
    expected, _ = loop(model, ids)
    llmkernels.patch(model)
    found, _ = loop(model, ids, cache=cache)
    assert torch.equal(found, expected)
    assert isinstance(cache, llmkernels.KVCache)
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == ids.shape[1] + NEW - 1
    assert cache.layers[0].keys.shape == (2, 1, ids.shape[1] + NEW - 1, 64)


def test_a_chat_goes_on_with_a_returned_cache(device):
    model, ids = small_model(device=device), tiny_inputs(device)

    def chat(model):
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        first = model.generate(ids, **options)
        prompt = torch.cat([first.sequences, ids[:, :3]], 1)
        return model.generate(prompt, past_key_values=first.past_key_values, **options).sequences

    expected = chat(model)
    llmkernels.patch(model)
    assert torch.equal(chat(model), expected)
    assert decoder(model).prompts[STEP] == (2 if device == "cpu" else 1)  # the first one is in float32


@pytest.mark.parametrize("what", ["output_hidden_states", "output_attentions"])
def test_what_only_the_modules_have(what, device):
    model, ids = small_model(device=device, attn_implementation="eager"), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        output = model(ids[:, :1], past_key_values=cache, **{what: True})
    assert getattr(output, what.removeprefix("output_")) is not None
    assert decoder(model).forwards == {f"by the model's forward: {what}": 1}


def embeds(model, ids):
    return {"inputs_embeds": model.get_input_embeddings()(ids)}


# The arguments of a forward without gradients and without a cache, and why the modules run it.
PROMPTS = {
    "inputs_embeds": embeds,
    "output_attentions": lambda model, ids: {"input_ids": ids, "output_attentions": True},
    "return_dict=False": lambda model, ids: {"input_ids": ids, "return_dict": False},
}
# The same behind a cache.
BEHIND = PROMPTS | {
    "more than 64 tokens behind a cache": lambda model, ids: {"input_ids": ids.repeat(1, 3)},
    "gradients are enabled": lambda model, ids: {"input_ids": ids},
}


@pytest.mark.parametrize(
    ("is_behind", "reason"), [*((False, reason) for reason in PROMPTS), *((True, reason) for reason in BEHIND)]
)
def test_the_report_says_why_the_modules_run(is_behind, reason, device, monkeypatch):
    """Each forward is counted once, as a prompt or as one behind a cache or with gradients."""
    compose_forwards(monkeypatch)
    model, ids = small_model(device=device, attn_implementation="eager"), tiny_inputs(device, 2, 12)

    def run(model):
        with torch.no_grad():
            given = BEHIND[reason](model, ids)
            if is_behind:
                given["past_key_values"] = model(tiny_inputs(device)).past_key_values
        with torch.set_grad_enabled(reason.startswith("gradients")):
            output = model(**given)
        return output[0] if isinstance(output, tuple) else output.logits

    expected = run(model)
    handle = llmkernels.patch(model)
    assert_close(run(model), expected)
    (entry,) = handle.report().decode
    counted, other = (entry.forwards, entry.prompts) if is_behind else (entry.prompts, entry.forwards)
    assert counted[by_forward(reason)] == 1
    assert by_forward(reason) not in other
    assert f"1 {by_forward(reason)}" in str(handle.report())


def test_the_report_says_that_prompts_run_by_the_modules_on_a_cpu():
    model = small_model()
    handle = llmkernels.patch(model)
    with torch.no_grad():
        model(tiny_inputs())
    (entry,) = handle.report().decode
    assert entry.prompts == {by_forward("a prompt on cpu"): 1} and not entry.forwards


def test_training_is_one_entry_of_the_report(device):
    model, ids = small_model(device=device).train(), tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
    (entry,) = handle.report().decode
    assert entry.forwards == {by_forward("gradients are enabled"): 3} and not entry.prompts


def test_an_error_of_the_modules_has_no_reason_of_ours_before_it():
    """As unpatched: nothing was being handled when it was raised."""
    model = small_model()
    llmkernels.patch(model)
    with torch.no_grad(), pytest.raises(ValueError) as caught:
        model()
    assert caught.value.__context__ is None
    assert decoder(model).prompts == {by_forward("input_ids are not (batch, tokens)"): 1}


def test_hooks_see_every_call(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda *arguments: seen.append(1))
    loop(model, ids)
    assert len(seen) == NEW
    assert STEP not in decoder(model).forwards


def test_gradients_and_training_go_by_the_modules(device):
    model, ids = small_model(device=device, attention_dropout=0.1), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
    assert model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits.requires_grad
    with torch.no_grad():
        model.train()(ids[:, :1], past_key_values=cache)
    reasons = "gradients are enabled", "model.layers.0.self_attn is in training mode"
    assert decoder(model).forwards == {f"by the model's forward: {reason}": 1 for reason in reasons}


def test_adapters_go_by_the_modules(device):
    model, ids = lora(small_model(device=device)), tiny_inputs(device)
    expected = loop(model, ids)
    llmkernels.patch(model)
    assert_close(loop(model, ids)[1], expected[1])


def test_a_mask_that_is_not_padding(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    mask = torch.ones_like(ids)
    mask[0, 5] = 0
    expected = loop(model, ids, mask)
    llmkernels.patch(model)
    assert_close(loop(model, ids, mask)[1], expected[1])
    assert STEP not in decoder(model).forwards


def test_results_stay(device):
    """The logits of a call are not overwritten by the next one."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        first = model(ids[:, :1], past_key_values=cache).logits
        kept = first.clone()
        for _ in range(4):
            model(ids[:, 1:2], past_key_values=cache)
    assert torch.equal(first, kept)


def test_a_cache_that_grows(device):
    model, ids = small_model(device=device, max_position_embeddings=512), tiny_inputs(device)
    expected, _ = loop(model, ids, new=70)
    llmkernels.patch(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmkernels.hf.cache.buffers.AHEAD_TOKENS", 1)
        found, _ = loop(model, ids, new=70)
    assert torch.equal(found, expected)


def test_two_threads_and_two_caches(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    expected, _ = loop(model, ids)
    llmkernels.patch(model)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for found, _ in pool.map(lambda _: loop(model, ids), range(8)):
            assert torch.equal(found, expected)


def test_ops_of_a_step(device):
    """The step, and nothing of the modules."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        with CountOps() as counter:
            model(ids[:, :1], past_key_values=cache)
    assert "rope" not in counter.counts
    assert counter.counts["rope_decode_attention"] == 2


# --- what a step may do on a GPU, seen on the CPU


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_step_can_be_recorded(name, monkeypatch):
    """It calls ops of the library and takes views, and nothing else: that is what a recorder allows."""
    runs = []

    def run(program, function, device, place):
        runs.append(function)
        with graphs._OnlyOurs():
            return function()

    monkeypatch.setattr(Program, "run", run)
    model, ids = family_model(name), tiny_inputs()
    llmkernels.patch(model)
    loop(model, ids, new=3)
    llmkernels.generate(model, ids, max_new_tokens=3)
    model.generate(ids.repeat(1, 3)[:1], max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3)
    assert len(runs) >= 5


def test_tokens_that_there_are_none_of(device):
    if device == "cuda":
        pytest.skip("on a GPU it ends the process, as unpatched")
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        for wrong in (-1, -model.config.vocab_size, model.config.vocab_size):
            with pytest.raises(IndexError):
                model(torch.full((2, 1), wrong), past_key_values=cache)
            assert cache.get_seq_length() == ids.shape[1]
        model(ids[:, :1], past_key_values=cache)
    assert decoder(model).forwards == {STEP: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_ids_that_an_embedding_refuses(dtype, device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
        for _ in range(3):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(RuntimeError, match="indices"):
            model(ids[:, :1].to(dtype), past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1] + 3


def test_a_hook_for_a_while(device):
    """While it is there the modules run, and soon after it has gone the step does."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    calls = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *arguments: calls.append(1))
    with torch.no_grad():
        cache = model(ids).past_key_values
        for count in range(20):
            if count == 6:
                hook.remove()
            model(ids[:, :1], past_key_values=cache)
    assert len(calls) == 7
    assert decoder(model).forwards[STEP] >= 10


def test_what_is_kept_is_bounded(device, monkeypatch):
    monkeypatch.setattr("llmkernels.hf.step.program.MAX_PROGRAMS", 3)
    model, ids = small_model(device=device), tiny_inputs(device, 1, 40)
    llmkernels.patch(model)
    with torch.no_grad():
        expected = model(ids).logits
        caches = [model(ids[:, :10]).past_key_values for _ in range(5)]
        for ahead, cache in enumerate(caches, 1):
            for first in range(10, 10 + 4 * ahead, ahead):
                found = model(ids[:, first : first + ahead], past_key_values=cache).logits
                assert_close(found, expected[:, first : first + ahead])
    state = decoder(model)
    assert len(state.programs.idle()) == 3
    assert state.forwards == {STEP: 20}


def test_chats_share_programs(device):
    """Whoever has a cache: there are as many programs, and graphs of them, as run at the same time."""
    model, ids = small_model(device=device), tiny_inputs(device, 1, 20)
    with torch.no_grad():
        expected = model(ids).logits
        handle = llmkernels.patch(model)
        caches = [model(ids[:, : 10 + chat % 3]).past_key_values for chat in range(12)]
        for token in range(5):
            for chat, cache in enumerate(caches):
                first = 10 + chat % 3 + token
                found = model(ids[:, first : first + 1], past_key_values=cache).logits
                assert_close(found, expected[:, first : first + 1])
    (program,) = decoder(model).programs.idle()
    assert len(program.recordings) == 1
    (entry,) = handle.report().decode
    assert entry.graphs == (1 if device == "cuda" else 0)
    assert (entry.graph_bytes > 0) == (device == "cuda")
    assert entry.forwards == {STEP: 60}


def test_other_caches_are_not_asked(device):
    """The length of a static cache is on the device: to ask for it would wait, and break a capture of the user's."""
    model, ids = small_model(device=device), tiny_inputs(device)
    cache = StaticCache(config=model.config, max_cache_len=32)
    expected, _ = loop(model, ids, cache=StaticCache(config=model.config, max_cache_len=32))
    llmkernels.patch(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StaticCache, "get_seq_length", lambda *arguments: pytest.fail("asked"))
            with pytest.raises(NoStep, match="the cache given is a StaticCache"):
                call.check_call(model, {"input_ids": ids, cache_name(): cache})
    assert decoder(model).forwards == {by_forward("the cache given is a StaticCache"): 1}
    found, _ = loop(model, ids, cache=StaticCache(config=model.config, max_cache_len=32))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("grad", "window"), [(False, None), (False, 7), (True, None)])
def test_compiled_behind_a_cache_that_became_ours(grad, window, device):
    """A prompt and a step as they are, then compiled steps: Dynamo traces the methods of the adopted cache."""
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1} if window else {}
    model, ids = small_model(device=device, **sliding), tiny_inputs(device, 2, 16)

    def run(step):
        with torch.no_grad():
            cache = model(ids[:, :9]).past_key_values
            model(ids[:, 9:10], past_key_values=cache)
        with torch.set_grad_enabled(grad):
            logits = [step(ids[:, [token]], past_key_values=cache).logits for token in range(10, 15)]
        with torch.no_grad():
            logits.append(model(ids[:, 15:], past_key_values=cache).logits)
        assert isinstance(cache, llmkernels.KVCache) == is_patched
        assert cache.get_seq_length() == 16
        return torch.cat(logits, 1).detach()

    is_patched = False
    expected = run(model)
    is_patched = bool(llmkernels.patch(model))
    torch._dynamo.reset()
    counter = CompileCounter()
    assert_close(run(torch.compile(model, backend=counter, fullgraph=not grad)), expected)
    assert counter.frame_count == 2 or grad  # one graph of any length, as unpatched
    assert decoder(model).forwards[STEP] == 2
