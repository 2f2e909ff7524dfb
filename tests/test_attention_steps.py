"""`attn_implementation="llmkernels"` in a patched model: the decode step runs, as with transformers' own attentions."""

import copy

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import llmkernels
from families import EXPECTED, FAMILIES, WINDOW, family_model
from generating import (
    NEW,
    Stream,
    check_steps,
    generate_step,
    hf_generate,
    left_padded,
    loop,
    runs_steps,
    small_model,
)
from hf_models import as_transformers, assert_close, logits_of, tiny_inputs
from llmkernels.hf import attention as interface
from llmkernels.hf import attention_paged, unpatch
from llmkernels.hf.callers import batches
from llmkernels.hf.report import STEP, by_forward
from llmkernels.hf.step.decode import MAX_ROWS, decoder
from prompting import compose_forwards
from test_batches import forwards, generated

# Of every kind: norms of q and k, windows with softcaps, windows and full layers, embeddings of positions, weights in
# one product, more than text.
NAMES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "phi3", "llava"]
TOKENS = 3 * WINDOW - 1
llmkernels.register_attention()


def our_model(name="llama", device="cpu", **changes):
    """A model of a family that attends by our function."""
    model = family_model(name, device, **changes)
    model.set_attn_implementation(interface.NAME)
    return model


def reasons(handle):
    return [decode.reason for decode in handle.report().decode]


def both(model, call):
    """What call() gives by the patched model, and unpatched; the handle's report in between."""
    handle = llmkernels.patch(model)
    found, report = call(), handle.report()
    unpatch(model)
    return found, call(), report


# --- every family


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, device):
    """By the step with left padding, where the family has one; else the report says why, as with any attention."""
    model, ids = our_model(name, device), tiny_inputs(device, 3)
    # LongRoPE's tables stay as they are.
    new = 4 if "original_max_position_embeddings" in FAMILIES[name].options else NEW
    options = {"attention_mask": left_padded(device), "max_new_tokens": new}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    found, expected, report = both(model, lambda: hf_generate(model, ids, **options))
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    (decode,) = report.decode
    if not EXPECTED[name].no_step:
        assert decode.reason is None and decode.calls == {generate_step(): 1}
    else:
        assert EXPECTED[name].explains(decode.reason)
        assert "attention_forward" not in str(report)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_loops(name, is_padded, device):
    """A caller's own loop: the prompt by the modules, each token by the step, beyond a window."""
    model, ids, mask = our_model(name, device), tiny_inputs(device, 3), left_padded(device) if is_padded else None
    llmkernels.patch(model)
    tokens, logits = loop(model, ids, mask)
    assert decoder(model).forwards[STEP] == NEW
    unpatch(model)
    expected, theirs = loop(model, ids, mask)
    assert torch.equal(tokens, expected)
    assert_close(logits, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_several_tokens_behind_a_cache(name, device):
    model, ids = our_model(name, device), tiny_inputs(device, 2, TOKENS)
    llmkernels.patch(model)
    cache, found = DynamicCache(config=model.config), []
    for part in ids.split([7, 1, 3, 1, 5], 1):
        found.append(logits_of(model, part, past_key_values=cache))
    assert decoder(model).forwards[STEP] == 4
    unpatch(model)
    assert_close(torch.cat(found, 1), logits_of(model, ids))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_prompts(name, is_padded, monkeypatch):
    """Forwards of prompts are composed as on a GPU."""
    compose_forwards(monkeypatch)
    model, ids, mask = our_model(name), tiny_inputs("cpu", 3), left_padded("cpu")
    given = {"attention_mask": mask} if is_padded else {}
    given["use_cache"] = False  # else the modules run prompts that are longer than a window
    llmkernels.patch(model)
    found = logits_of(model, ids, **given)
    assert decoder(model).prompts == {STEP: 1}
    unpatch(model)
    where = mask.bool() if is_padded else slice(None)
    assert_close(found[where], logits_of(model, ids, **given)[where])


OTHER_WAYS = {
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("how", OTHER_WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_other_ways_to_generate(name, how, device):
    model, ids = our_model(name, device), tiny_inputs(device, 1 if how == "lookup" else 2)
    llmkernels.patch(model)
    assert runs_steps(hf_generate, model, ids, **OTHER_WAYS[how])
    unpatch(model)
    found, expected, _ = both(model, lambda: hf_generate(model, ids, **OTHER_WAYS[how]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_lean_loop(name, device):
    model, ids, stream = our_model(name, device), tiny_inputs(device, 3), Stream()
    options = {"attention_mask": left_padded(device), "max_new_tokens": NEW}
    handle = llmkernels.patch(model)
    found = llmkernels.generate(model, ids, streamer=stream, **options)
    assert handle.report().decode[0].calls == {generate_step(): 1}
    stream.check(found, ids)
    unpatch(model)
    assert torch.equal(found, hf_generate(model, ids, **options))


def test_half_precision(device):
    """Rounding may change a token: the logits of the first one are compared."""
    model, ids = our_model("llama", device, dtype=torch.bfloat16), tiny_inputs(device)
    options = {"return_dict_in_generate": True, "output_logits": True}
    found, expected, report = both(model, lambda: hf_generate(model, ids, **options))
    assert report.decode[0].calls == {generate_step(): 1}
    assert_close(found.logits[0].float(), expected.logits[0].float(), 0.05)


# --- when the attention is chosen


def test_a_loaded_model(tmp_path, device):
    family_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=interface.NAME).to(device).eval()
    assert model.config._attn_implementation == interface.NAME
    check_steps(model, tiny_inputs(device))


def test_a_model_made_of_a_config(device):
    model = small_model(device=device, attn_implementation=interface.NAME)
    check_steps(model, tiny_inputs(device))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2"])
@torch.no_grad()
def test_switching_after_patch(name, device):
    """Each attention has its own step: transformers' sdpa leaves a softcap out, and ours does not."""
    model, twin, ids = family_model(name, device), family_model(name, device), tiny_inputs(device)
    handle, given = llmkernels.patch(model), {"return_dict_in_generate": True, "output_logits": True}
    order = ["eager", interface.NAME, "sdpa", interface.NAME, "eager", interface.NAME]
    for index, implementation in enumerate(order):
        for one in (model, twin):
            one.set_attn_implementation(implementation)
        found, expected = hf_generate(model, ids, **given), hf_generate(twin, ids, **given)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
        assert reasons(handle) == [None]
        assert handle.report().decode[0].calls == {generate_step(): index + 1}


@torch.no_grad()
def test_switching_amid_a_text(device):
    """On one cache, which is a KVCache's by then."""
    model, ids = family_model("gemma3", device), tiny_inputs(device, 2, TOKENS)
    expected = logits_of(model, ids)
    llmkernels.patch(model)
    cache, found = DynamicCache(config=model.config), []
    order = ["sdpa", interface.NAME, interface.NAME, "eager", interface.NAME]
    for implementation, part in zip(order, ids.split([6, 1, 2, 1, 7], 1), strict=True):
        model.set_attn_implementation(implementation)
        found.append(logits_of(model, part, past_key_values=cache))
    assert decoder(model).forwards[STEP] == 4
    assert_close(torch.cat(found, 1), expected)


def test_a_copy(device):
    model, ids = our_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    other = copy.deepcopy(model)
    assert runs_steps(hf_generate, other, ids)
    assert torch.equal(hf_generate(other, ids), hf_generate(model, ids))


def test_the_eager_attention_of_the_family_is_of_no_account(monkeypatch):
    """The small model attends by our function, too, and not by what would be the same elsewhere."""
    original = modeling_llama.eager_attention_forward

    def eager_attention_forward(module, query, key, value, attention_mask, scaling, **options):
        return original(module, query, key, value, attention_mask, scaling=3 * scaling, **options)

    other = as_transformers(eager_attention_forward)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    check_steps(our_model(), tiny_inputs())


# --- functions of somebody else


def strange_attention(*arguments, **options):
    y, weights = interface.attention_forward(*arguments, **options)
    return 1.5 * y, weights


def strange_mask(*arguments, **options):
    return None  # padding is seen


STRANGERS = {
    # attention and mask, and what the report says of them
    "attention": (strange_attention, interface.attention_mask, "attention is computed by strange_attention"),
    "mask": (interface.attention_forward, strange_mask, "masks are made by strange_mask"),
    "transformers' attention": (
        ALL_ATTENTION_FUNCTIONS["sdpa"],
        ALL_MASK_ATTENTION_FUNCTIONS["sdpa"],
        "attention is computed by sdpa_attention_forward",
    ),
    "transformers' mask": (
        interface.attention_forward,
        ALL_MASK_ATTENTION_FUNCTIONS["sdpa"],
        "masks are made by sdpa_mask",
    ),
}


def check_left_to_modules(model, reason):
    mask, ids = left_padded(model.device), tiny_inputs(model.device, 3)
    call = lambda: hf_generate(model, ids, attention_mask=mask)  # noqa: E731
    found, expected, report = both(model, call)
    assert torch.equal(found, expected)
    assert report.decode[0].calls == {f"by transformers: {reason}": 1}
    assert reason in str(report)


@pytest.mark.parametrize("how", STRANGERS)
def test_what_replaced_ours(how, device, monkeypatch):
    attention, mask, reason = STRANGERS[how]
    model = our_model(device=device)
    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, interface.NAME, attention)
    monkeypatch.setitem(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping, interface.NAME, mask)
    check_left_to_modules(model, reason)


@pytest.mark.parametrize("how", STRANGERS)
def test_what_replaces_ours_after_a_call(how, device, monkeypatch):
    """And what puts it back: the step runs again."""
    attention, mask, reason = STRANGERS[how]
    model, ids = our_model(device=device), tiny_inputs(device, 3)
    handle, given = llmkernels.patch(model), {"attention_mask": left_padded(device)}
    before = hf_generate(model, ids, **given)
    with monkeypatch.context() as patch:
        patch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, interface.NAME, attention)
        patch.setitem(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping, interface.NAME, mask)
        found = hf_generate(model, ids, **given)
        assert reason in reasons(handle)[0]
        unpatch(model)
        assert torch.equal(found, hf_generate(model, ids, **given))
    handle = llmkernels.patch(model)
    assert torch.equal(hf_generate(model, ids, **given), before)
    assert handle.report().decode[0].calls == {generate_step(): 1}


OTHER_NAMES = {
    "their attention": (strange_attention, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], "computed by strange_attention"),
    "our attention": (interface.attention_forward, interface.attention_mask, "computed by attention_forward"),
    "our mask": (ALL_ATTENTION_FUNCTIONS["sdpa"], interface.attention_mask, "masks are made by attention_mask"),
}


@pytest.mark.parametrize("how", OTHER_NAMES)
def test_other_names(how):
    """Only under its own name a function of ours gets the masks that it knows."""
    attention, mask, reason = OTHER_NAMES[how]
    name = f"tests of names: {how}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    model, ids = family_model("llama"), tiny_inputs("cpu", 2)
    model.set_attn_implementation(name)
    found, expected, report = both(model, lambda: hf_generate(model, ids))
    assert torch.equal(found, expected)
    assert reason in report.decode[0].reason


# --- what the step does not take


def amid(mask):
    mask = mask.clone()
    mask[1, 5] = mask[1, 7] = 0
    return mask


CALLS = {  # of a cache of 11 tokens, that steps have written to
    "padding amid the tokens": lambda model, ids, mask: {"attention_mask": amid(mask)},
    "a mask of 4 dimensions": lambda model, ids, mask: {"attention_mask": mask_of_4(mask, ids.shape[1])},
    "hidden states": lambda model, ids, mask: {"attention_mask": mask, "output_hidden_states": True},
    "more tokens": lambda model, ids, mask: {"attention_mask": mask},
}


def mask_of_4(mask, tokens):
    """As all attentions take it, added to the scores: which keys each of the last tokens sees."""
    keys = torch.arange(mask.shape[1], device=mask.device)
    sees = (keys <= keys[-tokens:, None]) & mask[:, None, None].bool()
    return torch.zeros(sees.shape, device=mask.device).masked_fill(~sees, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt2"])
@torch.no_grad()
def test_forwards_by_the_modules_behind_steps(name, how, device):
    """The cache is one of ours by then, with buffers and rings for transformers' tensors."""
    if how == "a mask of 4 dimensions" and name not in ("llama", "gpt2"):
        pytest.skip("windows keep other numbers of keys")
    model, twin = our_model(name, device), our_model(name, device)
    twin.set_attn_implementation("eager")
    count = MAX_ROWS // 3 + 1 if how == "more tokens" else 3
    ids, mask = tiny_inputs(device, 3, 11 + count), torch.ones(3, 11, dtype=torch.long, device=device)
    mask[0, :4] = mask[2, :6] = 0
    llmkernels.patch(model)
    found = []
    for one in (model, twin):
        cache, logits = DynamicCache(config=one.config), []
        for begin, end in ((0, 8), (8, 9), (9, 11)):
            given = positions(mask[:, :end], end - begin)
            logits.append(one(ids[:, begin:end], past_key_values=cache, **given).logits)
        whole = torch.cat([mask, torch.ones_like(ids[:, 11:])], 1)
        given = positions(whole, count) | CALLS[how](one, ids[:, 11:], whole)
        logits.append(one(ids[:, 11:], past_key_values=cache, **given).logits)
        found.append(torch.cat(logits, 1))
    ways = decoder(model).forwards
    assert ways[STEP] == 2 and sum(ways.values()) == 3, ways
    is_token = whole.bool()
    assert_close(found[0][is_token], found[1][is_token])


def positions(mask, count):
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]}


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_static_caches(name, is_padded, device):
    model, ids = our_model(name, device), tiny_inputs(device, 3)
    options = {"cache_implementation": "static", "disable_compile": True}
    options |= {"attention_mask": left_padded(device)} if is_padded else {}
    found, expected, report = both(model, lambda: hf_generate(model, ids, **options))
    assert torch.equal(found, expected)
    assert "cache_implementation=static" in str(report.decode[0].calls)
    model.set_attn_implementation("eager")
    assert torch.equal(found, hf_generate(model, ids, **options))


@torch.no_grad()
def test_a_static_cache_of_the_caller(device):
    model, ids = our_model(device=device), tiny_inputs(device)
    expected = logits_of(model, ids)
    llmkernels.patch(model)
    cache = StaticCache(config=model.config, max_cache_len=20)
    found = [logits_of(model, part, past_key_values=cache) for part in ids.split([6, 1, 4], 1)]
    assert STEP not in decoder(model).forwards
    assert_close(torch.cat(found, 1), expected)


def test_embeddings_of_the_caller(device):
    model, ids = our_model(device=device), tiny_inputs(device)
    expected = logits_of(model, ids)
    llmkernels.patch(model)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        found = model(inputs_embeds=embeds).logits
    assert_close(found, expected)


# --- continuous batching


its_own = pytest.mark.skipif(
    not attention_paged.is_supported(), reason="this transformers has no other attention there"
)


@its_own
@pytest.mark.parametrize("tokens", [64, 8], ids=["prompts at once", "chunks"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2"])
def test_continuous_batching(name, tokens, monkeypatch):
    """With softcaps, too, which our attention does not leave out there."""
    monkeypatch.setattr(batches, "DEVICES", {"cpu", "cuda"})
    model = our_model(name)
    with forwards(model, False) as expected:
        texts = generated(model, tokens)
    handle = llmkernels.patch(model)
    with forwards(model, True) as found:
        assert generated(model, tokens) == texts
    assert decoder(model).forwards == {STEP: len(found)}
    handle.unpatch()
    pairs = zip(found, expected, strict=False)  # a batch has the requests that another thread has queued by then
    for (_, ours), (_, theirs) in pairs if len(found) == len(expected) else ():
        assert_close(ours, theirs)
    assert model.config._attn_implementation == interface.NAME
    check_steps(model, tiny_inputs())


@its_own
def test_a_paged_attention_that_replaced_ours(monkeypatch):
    def strange(*arguments, **options):
        y, weights = attention_paged.paged_attention_forward(*arguments, **options)
        return 1.5 * y, weights

    monkeypatch.setattr(batches, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, interface.PAGED, strange)
    model = our_model()
    texts = generated(model)
    llmkernels.patch(model)
    assert generated(model) == texts
    (reason,) = decoder(model).forwards
    assert reason.startswith(by_forward("attention is computed by ")) and reason.endswith("strange")
