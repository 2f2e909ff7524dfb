"""Generation by the decode step: model.generate() of a patched model, llmkernels.generate, packed weights, the CLI."""

import copy
import gc
import sys
import threading
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import decode_oracle
import llmkernels
from decode_oracle import MissingOps
from hf_models import (
    FAMILIES,
    OPS,
    VOCAB,
    assert_close,
    count_ops,
    logits_of,
    lora,
    rounding,
    tiny_config,
    tiny_inputs,
    tiny_model,
)
from llmkernels import KVCache, __main__
from llmkernels.hf import generate, packing, trunk, unpatch
from llmkernels.hf.decode import decoder

NEW = 8


@pytest.fixture(autouse=True, scope="module")
def _every_op():
    with MissingOps():
        yield


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def late(request, monkeypatch):
    """Whether the loops look at a step one step late, as they do on CUDA."""
    monkeypatch.setattr(sys.modules["llmkernels.hf.reading"], "is_late", lambda device: request.param)


def small_model(family="qwen2", device="cpu", **changes):
    return tiny_model(family, device, **{"head_dim": 64} | changes)  # the smallest with a fast kernel


def steps(tokens, **changes):
    """The ops of a generate call: a prefill, then decode steps."""
    return OPS | {"decode_step": tokens - 1} | changes


def lean_steps(tokens):
    return steps(tokens, sample=tokens)


def check_counts(found, expected, device):
    """These ops and no others. On CUDA a graph replays its ops unseen: they are counted once, and once captured."""
    if device == "cuda":
        for name in ("decode_step", "sample"):
            assert found.pop(name, 0) <= expected.pop(name, 0)
    assert found == expected


def hf_generate(model, ids, **options):
    torch.manual_seed(11)
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | options)


def check_steps(model, ids, **options):
    """The patched model generates by the step what it generates unpatched."""
    handle = llmkernels.patch(model)
    found = hf_generate(model, ids, **options)
    assert handle.report().decode[0].reason is None
    assert handle.report().decode[0].calls == {generate_step(): 1}
    unpatch(model)
    expected = hf_generate(model, ids, **options)
    assert torch.equal(found, expected)
    return found


def generate_step():
    return "by the decode step"


def check_falls_back(model, ids, reason, **options):
    """It generates the same without the step, and the report has the reason."""
    handle = llmkernels.patch(model)
    assert "decode_step" not in count_ops(hf_generate, model, ids, **options)
    found = hf_generate(model, ids, **options)
    assert [way for way in handle.report().decode[0].calls if reason in way], handle.report()
    assert reason in str(handle.report())
    unpatch(model)
    assert torch.equal(found, hf_generate(model, ids, **options))


def left_padded(device):
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0, :4] = mask[2, :9] = 0
    return mask.to(device)


class Stream:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, ids):
        self.got.append(ids.clone())

    def end(self):
        self.ended += 1

    def check(self, sequences, prompt):
        assert self.ended == 1
        assert torch.equal(self.got[0], prompt.cpu())
        assert torch.equal(torch.stack(self.got[1:], 1), sequences[:, prompt.shape[1] :].cpu())


# --- model.generate()


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family, batch, device):
    model, ids = small_model(family, device), tiny_inputs(device, batch)
    assert check_steps(model, ids).shape == (batch, 11 + NEW)
    llmkernels.patch(model)
    check_counts(count_ops(hf_generate, model, ids), steps(NEW), device)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding(family, device):
    model, ids, mask = small_model(family, device), tiny_inputs(device, 3), left_padded(device)
    found = check_steps(model, ids, attention_mask=mask)
    alone = hf_generate(model, ids[:1, 4:])
    assert torch.equal(found[:1, 4:], alone)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
        {"do_sample": True, "num_return_sequences": 3},
        {"min_new_tokens": 4, "eos_token_id": list(range(0, VOCAB, 2)), "pad_token_id": 0},
        {"prefill_chunk_size": 4},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 17},
    ],
    ids=lambda options: ",".join(options),
)
def test_options(options, device, late):
    found = check_steps(small_model(device=device), tiny_inputs(device, 2), **options)
    assert found.shape[1] > 11


def test_eos(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    free = hf_generate(model, ids)
    ends = [free[0, 13].item(), free[1, 12].item(), free[2, 15].item()]
    found = check_steps(model, ids, eos_token_id=ends, pad_token_id=0)
    assert found.shape[1] <= 16
    assert (found[:, -1] == 0).any()
    # Ends on the first token, on the last one, and never.
    assert check_steps(model, ids[:1], eos_token_id=free[0, 11].item()).shape[1] == 12
    check_steps(model, ids[:1], eos_token_id=free[0, -1].item())


def test_streamer(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    end = hf_generate(model, ids)[0, 15].item()
    for options in ({}, {"eos_token_id": end}, {"eos_token_id": end, "return_dict_in_generate": True}):
        llmkernels.patch(model)
        stream, beside = Stream(), Stream()
        found = hf_generate(model, ids, streamer=stream, **options)
        unpatch(model)
        expected = hf_generate(model, ids, streamer=beside, **options)
        found, expected = (x if isinstance(x, torch.Tensor) else x.sequences for x in (found, expected))
        assert torch.equal(found, expected)
        stream.check(found, ids)
        beside.check(found, ids)


class SumAbove(StoppingCriteria):
    """Custom, with a memory: stops each sequence where its new tokens sum up to a limit."""

    def __init__(self, limit):
        self.limit, self.lengths = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.is_contiguous()
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, 11:].sum(1) > self.limit


class Favour(transformers.LogitsProcessor):
    """Custom, with a look at all tokens so far."""

    def __call__(self, input_ids, scores):
        next_in_vocabulary = (input_ids.view(len(scores), -1)[:, -1:] + 1) % VOCAB
        return scores.scatter_add(1, next_in_vocabulary, 2 * torch.ones_like(scores))


def test_custom_criteria_and_processors(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    seen = []
    for patched in (True, False):
        handle = llmkernels.patch(model) if patched else None
        criterion = SumAbove(150)
        options = {"stopping_criteria": StoppingCriteriaList([criterion]), "logits_processor": [Favour()]}
        sequences = hf_generate(model, ids, max_new_tokens=20, eos_token_id=96, pad_token_id=0, **options)
        seen.append((sequences, criterion.lengths))
        if patched:
            assert handle.report().decode[0].calls == {generate_step(): 1}
            handle.unpatch()
    (found, asked), (expected, asked_there) = seen
    assert torch.equal(found, expected)
    assert found.shape[1] < 31
    assert asked == asked_there


def test_scores_and_logits(device, late):
    model, ids = small_model(device=device), tiny_inputs(device)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.5}
    options |= {"do_sample": True, "top_k": 30}
    ends = hf_generate(model, ids, **options).sequences[:, 15].tolist()
    for more in ({}, {"eos_token_id": ends, "pad_token_id": 0}):
        llmkernels.patch(model)
        found = hf_generate(model, ids, **options | more)
        again = hf_generate(model, ids, **options | more)
        unpatch(model)
        expected = hf_generate(model, ids, **options | more)
        assert type(found) is type(expected)
        assert torch.equal(found.sequences, expected.sequences)
        assert len(found.scores) == len(found.logits) == len(expected.scores) == found.sequences.shape[1] - 11
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
        for ours, theirs in zip(found.scores, expected.scores, strict=True):
            assert torch.equal(ours.isinf(), theirs.isinf())
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert_close(ours.keys, theirs.keys)
            assert_close(ours.values, theirs.values)
        assert again.past_key_values is not found.past_key_values  # a cache given away is not used again


def test_continuing_from_a_returned_cache(device, late):
    """With the whole text, with the new tokens only, padded, and on a copy."""
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    more = tiny_inputs(device, 3, 4, seed=8)
    results = []
    for patched in (True, False):
        handle = llmkernels.patch(model) if patched else None
        first = hf_generate(model, ids, attention_mask=mask, return_dict_in_generate=True)
        cache, text = first.past_key_values, torch.cat([first.sequences, more], 1)
        twin = copy.deepcopy(cache)
        longer = torch.cat([mask, torch.ones(3, text.shape[1] - 11, device=device, dtype=torch.long)], 1)
        if patched:  # a cache on loan has the room that its call needs, rounded up
            assert type(cache) is KVCache
            assert cache.capacity == 256
            assert cache.get_max_length() == -1
        whole = hf_generate(model, text, attention_mask=longer, past_key_values=cache)
        part = hf_generate(model, text[:, twin.get_seq_length() :], attention_mask=longer, past_key_values=twin)
        results.append((text, whole, part))
        if patched:
            assert handle.report().decode[0].calls == {generate_step(): 3}
            handle.unpatch()
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_cache_of_the_caller(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    cache = KVCache(model, 11 + NEW)
    check_counts(count_ops(hf_generate, model, ids, past_key_values=cache), steps(NEW), device)
    assert cache.length == 10 + NEW
    cache.reset()
    assert torch.equal(hf_generate(model, ids, past_key_values=cache), expected)
    small = KVCache(model, 14)
    with pytest.raises(ValueError, match=r"capacity must be at least 15 tokens \(14 live, 1 new\), got 14"):
        hf_generate(model, ids, past_key_values=small)
    assert small.length == 14


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 3}, "by transformers: beam search"),
        ({"num_beams": 2, "do_sample": True}, "by transformers: beam search"),
        ({"prompt_lookup_num_tokens": 2}, "by transformers: assisted decoding"),
        ({"use_cache": False}, "by transformers: use_cache=False"),
        ({"cache_implementation": "static", "disable_compile": True}, "by transformers: cache_implementation=static"),
        ({"output_hidden_states": True, "return_dict_in_generate": False}, "output_attentions or output_hidden_states"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_calls_left_to_transformers(options, reason, device):
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    check_falls_back(small_model(device=device), tiny_inputs(device, batch), reason, **options)


def test_more_calls_left_to_transformers(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    right = torch.ones_like(ids)
    right[0, 8:] = 0
    check_falls_back(model, ids, "masks more than padding on the left", attention_mask=right)
    check_falls_back(model, ids, "run ahead of the tokens", position_ids=torch.arange(40, 51, device=device)[None])
    check_falls_back(model, tiny_inputs(device, 65, 3), "a batch of more than 64")
    for cache in (DynamicCache(config=model.config), transformers.StaticCache(model.config, max_cache_len=30)):
        llmkernels.patch(model)
        options = {"past_key_values": cache, "disable_compile": True}
        assert "decode_step" not in count_ops(hf_generate, model, ids, **options)
        assert f"the cache given is a {type(cache).__name__}" in str(decoder(model).calls)
        unpatch(model)
    llmkernels.patch(model)
    embeds = model.get_input_embeddings()(ids).detach()
    found = model.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False)
    assert "by transformers: inputs_embeds" in decoder(model).calls
    assert torch.equal(found, hf_generate(model, ids)[:, 11:])
    hf_generate(model, ids, past_key_values=KVCache(small_model(num_hidden_layers=3), 30))
    with pytest.raises(ValueError, match=r"must have \(batch, heads, head_dim\) \(3, 1, 64\), got \(2, 1, 64\)"):
        hf_generate(model, ids, past_key_values=KVCache(model, 30, batch_size=3))
    assert "by transformers: the cache was made for other keys and values" in decoder(model).calls
    assert "by transformers: the cache has 3 layers" in decoder(model).calls


def test_hidden_states_once_asked_for_do_not_stay_in_the_way(device):
    """transformers leaves its hooks in the model."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    output = hf_generate(model, ids, output_hidden_states=True, return_dict_in_generate=True)
    assert len(output.hidden_states) == NEW
    check_counts(count_ops(hf_generate, model, ids), steps(NEW), device)


def test_assistant_and_target_are_patched(device):
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    assistant = small_model(device=device, num_hidden_layers=1, seed=4)
    expected = hf_generate(model, ids)
    with llmkernels.patch(assistant), llmkernels.patch(model):
        assert torch.equal(hf_generate(model, ids, assistant_model=assistant), expected)
        assert "by transformers: assisted decoding" in decoder(model).calls
        assert "by transformers: assistant of assisted decoding" in decoder(assistant).calls


def test_the_op_of_a_layer(device):
    """decode_layer against its formula: padding, a window, sequences of different length."""

    def arguments(on):
        random = torch.Generator().manual_seed(3)
        number = lambda *shape: torch.randn(*shape, generator=random).to(on)  # noqa: E731
        integers = lambda *values: torch.tensor(values, dtype=torch.int32, device=on)  # noqa: E731
        weights = number(112), number(448 + 128, 112) / 10, number(448 + 128), number(112, 448) / 20, None, number(112)
        tables, caches = (number(20, 64), number(20, 64)), (number(3, 20, 1, 64), number(3, 20, 1, 64))
        places = integers(4, 9, 18), integers(4, 9, 19), integers(5, 10, 20), integers(0, 3, 1)
        norm = 7, 1e-5, 0.0, True
        mlp = number(176, 112) / 10, number(112, 88) / 10
        return number(3, 112), *weights, *mlp, *tables, *places, *caches, None, *norm, 0.1, 6

    found, expected = arguments(device), arguments("cpu")
    torch.ops.llmkernels.decode_layer(*found)
    decode_oracle.decode_layer(*expected)
    for index in (0, 15, 16):  # hidden, k_cache, v_cache
        assert_close(found[index].cpu(), expected[index])
        assert not torch.equal(found[index].cpu(), arguments("cpu")[index])


# --- models


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 7},
        {"head_dim": 128},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"attn_implementation": "eager"},
        {"num_hidden_layers": 1, "intermediate_size": 96},
    ],
    ids=lambda changes: ",".join(changes) + str(changes.get("rope_parameters", {}).get("rope_type", "")),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_configurations(family, changes, device):
    # Past the 16 positions, where the rope variants begin to differ.
    model = small_model(family, device, **{"max_position_embeddings": 16} | changes)
    check_steps(model, tiny_inputs(device, 3), attention_mask=left_padded(device), max_new_tokens=12)


def test_sliding_window(device):
    model = small_model(device=device, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    check_steps(model, tiny_inputs(device, 3), attention_mask=left_padded(device))
    model = small_model(device=device, use_sliding_window=True, sliding_window=14, max_window_layers=0)
    check_steps(model, tiny_inputs(device), max_new_tokens=12)


def test_another_scale(device):
    model = small_model(device=device)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.4
    check_steps(model, tiny_inputs(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, device):
    """Rounding may change a token, so the logits behind the same tokens are compared."""
    model, ids = small_model(device=device, dtype=dtype), tiny_inputs(device)
    llmkernels.patch(model)
    options = {"return_dict_in_generate": True, "output_logits": True}
    check_counts(count_ops(hf_generate, model, ids, **options), steps(NEW), device)
    found = hf_generate(model, ids, **options)
    unpatch(model)
    expected = logits_of(model, found.sequences[:, :-1])[:, 10:]
    assert_close(torch.stack(found.logits, 1), expected, 2 * rounding(dtype))


def test_float64():
    model, ids = small_model(dtype=torch.float64), tiny_inputs()
    check_steps(model, ids)


def break_model(model, how):
    layer = model.model.layers[1]
    if how == "hook":
        layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.5)
    elif how == "pre-hook":
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    elif how == "forward":
        old = layer.self_attn.o_proj.forward
        layer.self_attn.o_proj.forward = lambda x: old(x) * 1.5
    elif how == "class":

        class Other(nn.Linear):
            def forward(self, x):
                return 1.5 * super().forward(x)

        layer.self_attn.q_proj.__class__ = Other
    elif how == "bias":
        layer.mlp.up_proj.bias = nn.Parameter(torch.ones_like(layer.mlp.up_proj.weight[:, 0]))
    elif how == "some biases":
        layer.self_attn.k_proj.bias = None
    elif how == "activation":
        layer.mlp.act_fn = transformers.activations.GELUActivation()
    elif how == "shared":
        weight = layer.mlp.gate_proj.weight
        weight.data = torch.cat([weight.data.flatten(), weight.data.new_zeros(5)])[:-5].view_as(weight)
    elif how == "twice":
        layer.mlp.gate_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    elif how == "training":
        model.train()
    elif how == "norm":
        layer.input_layernorm = nn.RMSNorm(112, device=model.device)
    elif how == "eps":
        layer.input_layernorm.variance_epsilon = 0.5
    elif how == "scale":
        layer.self_attn.scaling = 0.5
    elif how == "no biases":
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.bias = None
    elif how == "part":
        layer.self_attn.extra = nn.Identity()
    return model


BROKEN = {
    "hook": "hooks on model.layers.1.mlp.down_proj",
    "pre-hook": "hooks on model.layers.1 have",
    "forward": "model.layers.1.self_attn.o_proj has a forward of its own",
    "class": "model.layers.1.self_attn.q_proj is a test_generate.Other, not torch.nn.Linear",
    "bias": "model.layers.1.mlp.up_proj has a bias",
    "some biases": "only some of q, k, v in model.layers.1.self_attn have a bias",
    "activation": "no decode step with GELUActivation",
    "shared": "a weight shares its memory with other tensors",
    "twice": "layers share weights",
    "training": "the model is in training mode",
    "norm": "model.layers.1.input_layernorm is not patched",
    "eps": "the norms differ in eps",
    "scale": "the layers differ in heads, biases or the scale of their scores",
    "no biases": "the layers differ in heads, biases or the scale of their scores",
    "part": "model.layers.1.self_attn has other parts than expected",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_the_step_can_not_do_goes_by_the_module_path(how, device):
    model, ids = break_model(small_model(device=device), how), tiny_inputs(device)
    handle = llmkernels.patch(model)
    assert BROKEN[how] in handle.report().decode[0].reason
    handle.unpatch()
    check_falls_back(model, ids, BROKEN[how])
    llmkernels.patch(model)
    assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), hf_generate(model, ids))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope of type dynamic"),
        ({"hidden_act": "gelu"}, "no decode step with GELUActivation"),
        ({"hidden_act": "relu"}, "model.layers.0.mlp is not patched"),
    ],
    ids=["dynamic", "gelu", "relu"],
)
def test_configurations_without_a_step(changes, reason, device):
    check_falls_back(small_model(device=device, max_position_embeddings=16, **changes), tiny_inputs(device), reason)


def test_broken_after_the_first_steps(device):
    """The model is looked at in every call."""
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    for how in ("hook", "some biases"):
        break_model(model, how)
        assert "decode_step" not in count_ops(hf_generate, model, ids)


def test_attention_of_somebody_else(device, monkeypatch):
    model, ids = small_model(device=device, attn_implementation="eager"), tiny_inputs(device)
    module = transformers.models.qwen2.modeling_qwen2
    original = module.eager_attention_forward

    def half(*args, **kwargs):
        return original(*args, **kwargs)[0] / 2, None

    llmkernels.patch(model)
    plain = hf_generate(model, ids)
    monkeypatch.setattr(module, "eager_attention_forward", half)
    assert "attention is computed by" in str(trunk.why_not(model))
    assert not torch.equal(hf_generate(model, ids), plain)


def test_lora(device):
    ids = tiny_inputs(device)
    expected = hf_generate(lora(small_model(device=device)), ids)
    adapted = lora(small_model(device=device))
    handle = llmkernels.patch(adapted)
    assert "is a peft." in handle.report().decode[0].reason
    assert "decode_step" not in count_ops(hf_generate, adapted, ids)
    assert torch.equal(hf_generate(adapted, ids), expected)
    merged = adapted.merge_and_unload()
    check_counts(count_ops(hf_generate, merged, ids), steps(NEW), device)
    assert torch.equal(hf_generate(merged, ids), expected)
    # An adapter on a model whose weights are packed already.
    again = lora(merged)
    found = hf_generate(again, ids)
    unpatch(again)
    assert torch.equal(hf_generate(again, ids), found)


def test_mixed_dtypes(device):
    model = small_model(device=device)
    llmkernels.patch(model)
    model.lm_head.half()
    assert trunk.why_not(model) == "weights differ in dtype or device"
    model.half()
    assert trunk.why_not(model) is None


def test_autocast():
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in trunk.why_not(model)
        assert "decode_step" not in count_ops(hf_generate, model, ids)


def test_left_out_on_request():
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model, decode=False)
    assert handle.report().decode[0].reason == "not asked for"
    assert "decode_step" not in count_ops(hf_generate, model, ids)
    handle.unpatch()
    handle = llmkernels.patch(model, rope=False)
    assert handle.report().decode[0].reason == "model.layers.0.self_attn is not patched"
    assert "decode_step" not in count_ops(hf_generate, model, ids)


def test_report():
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    assert str(handle.report()).splitlines()[-1] == "Qwen2ForCausalLM decodes by the decode step"
    hf_generate(model, ids)
    hf_generate(model, ids)
    hf_generate(model, ids, num_beams=2)
    assert str(handle.report()).splitlines()[-1] == (
        "Qwen2ForCausalLM decodes by the decode step "
        "(calls of generate: 2 by the decode step; 1 by transformers: beam search)"
    )
    assert llmkernels.patch(tiny_model().model).report().decode == []


def test_two_models_at_once(device):
    models = [small_model(device=device, seed=seed) for seed in (0, 5)]
    ids = tiny_inputs(device)
    expected = [hf_generate(model, ids) for model in models]
    for model in models:
        llmkernels.patch(model)
    for _ in range(3):
        for model, text in zip(models, expected, strict=True):
            assert torch.equal(hf_generate(model, ids), text)
            assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), text)
    # One within the other.
    inner = []

    class Nested(Stream):
        def put(self, ids_):
            super().put(ids_)
            inner.append(hf_generate(models[1], ids[:1]))
            inner.append(hf_generate(models[0], ids[:1]))

    assert torch.equal(hf_generate(models[0], ids[:1], streamer=Nested()), expected[0][:1])
    assert all(torch.equal(text, expected[1 - i % 2][:1]) for i, text in enumerate(inner))
    unpatch(models[0])
    assert torch.equal(hf_generate(models[1], ids), expected[1])


def test_threads():
    model, ids = small_model(), tiny_inputs()
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    found = [None] * 4

    def work(i):
        found[i] = model.generate(ids, max_new_tokens=NEW, do_sample=False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(text, expected) for text in found)


def test_growing_and_shrinking(device):
    """Batches and lengths one after the other, each with the right cache and the right graph."""
    model = small_model(device=device)
    calls = [(2, 11, 8), (2, 7, 3), (3, 5, 6), (2, 11, 300), (1, 3, 9), (2, 11, 8), (2, 11, 8)]
    expected = [hf_generate(model, tiny_inputs(device, b, t), max_new_tokens=n) for b, t, n in calls]
    llmkernels.patch(model)
    for (b, t, n), text in zip(calls, expected, strict=True):
        assert torch.equal(hf_generate(model, tiny_inputs(device, b, t), max_new_tokens=n), text)
        assert torch.equal(llmkernels.generate(model, tiny_inputs(device, b, t), max_new_tokens=n), text)


def test_a_cache_that_grows(device, late, monkeypatch):
    """It starts small however large max_length is, and moves on; one that was returned does so too."""
    monkeypatch.setattr(sys.modules["llmkernels.hf.cache"], "_MORE", 4)
    monkeypatch.setattr(sys.modules["llmkernels.hf.cache"], "_STEP", 4)
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    expected = hf_generate(model, ids, attention_mask=mask, max_new_tokens=40)
    handle = llmkernels.patch(model)
    for _ in range(2):
        assert torch.equal(hf_generate(model, ids, attention_mask=mask, max_new_tokens=40), expected)
    assert decoder(model)._cache.capacity == 56
    decoder(model).release()
    for _ in range(2):
        assert torch.equal(llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=40), expected)
    first = hf_generate(model, ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True)
    assert first.past_key_values.capacity == 56
    decoder(model).release()
    first = hf_generate(model, ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True)
    assert first.past_key_values.capacity == 16
    longer = torch.cat([mask, mask.new_ones(3, 5)], 1)
    options = {"past_key_values": first.past_key_values, "attention_mask": longer, "max_new_tokens": 35}
    assert torch.equal(hf_generate(model, first.sequences, **options), expected)
    assert set(handle.report().decode[0].calls) == {generate_step()}


def test_the_cache_is_used_again(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    first = decoder(model)._cache
    hf_generate(model, tiny_inputs(device, tokens=20))
    assert decoder(model)._cache is first
    assert first.capacity == 256
    hf_generate(model, tiny_inputs(device, 1))
    assert decoder(model)._cache is not first


def test_nothing_keeps_a_model_alive(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    llmkernels.generate(model, ids, max_new_tokens=3)
    cache = weakref.ref(decoder(model)._cache)
    dead = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert dead() is None  # by its reference count alone, as unpatched: its memory is free at once
    finally:
        gc.enable()
    gc.collect()
    assert cache() is None


def test_a_graph_is_bound_to_its_addresses():
    """What on CUDA makes a new graph: weights that moved, another cache."""
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    hf_generate(model, ids)
    (programs,) = decoder(model)._programs.values()
    program = programs["step"]
    addresses, program.graph = program.addresses, "captured"
    hf_generate(model, ids)
    assert (program.addresses, program.graph) == (addresses, "captured")
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data.clone()
    hf_generate(model, ids)
    assert program.graph is None
    assert program.addresses != addresses


@pytest.mark.gpu
def test_graphs_are_captured_and_used_again():
    model, ids = small_model(device="cuda", dtype=torch.bfloat16), tiny_inputs("cuda")
    llmkernels.patch(model)
    first = hf_generate(model, ids)
    (programs,) = decoder(model)._programs.values()
    graph = programs["step"].graph
    assert graph is not None
    assert torch.equal(hf_generate(model, ids), first)
    assert programs["step"].graph is graph
    with torch.no_grad():
        model.lm_head.weight.neg_()  # in place: the graph reads the new values
    changed = hf_generate(model, ids)
    assert programs["step"].graph is graph
    assert not torch.equal(changed, first)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_the_side = hf_generate(model, ids)
    side.synchronize()
    assert torch.equal(on_the_side, changed)
    unpatch(model)
    assert torch.equal(changed[:, 11], hf_generate(model, ids)[:, 11])


# --- packed weights


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def is_packed(model):
    groups = trunk.trunk(model).groups
    found = {packing.packed(group) is not None for group in groups}
    assert len(found) == 1
    return found.pop()


def packed_model(device="cpu", **changes):
    model, ids = small_model(device=device, **changes), tiny_inputs(device)
    expected = hf_generate(model, ids)
    llmkernels.patch(model)
    assert not is_packed(model)
    hf_generate(model, ids)
    assert is_packed(model)
    return model, ids, expected


def test_packing_is_lazy_and_keeps_every_parameter(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    size = sum(storages(model).values())
    llmkernels.patch(model)
    logits = logits_of(model, ids)
    assert not is_packed(model)
    hf_generate(model, ids)
    assert is_packed(model)
    assert sum(storages(model).values()) == size == sum(p.nbytes for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == list(before)
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert p.is_contiguous()
        assert p.requires_grad
        assert torch.equal(p, before[name][1])
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits_of(model, ids), logits)


def test_unpatch_unpacks(device):
    model, ids = small_model(device=device, dtype=torch.bfloat16), tiny_inputs(device)
    before, classes = logits_of(model, ids), {name: type(m) for name, m in model.named_modules()}
    members = {name: set(vars(m)) for name, m in model.named_modules()}
    sizes = sorted(storages(model).values())
    handle = llmkernels.patch(model)
    hf_generate(model, ids)
    assert sorted(storages(model).values()) != sizes
    handle.unpatch()
    assert sorted(storages(model).values()) == sizes
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert {name: set(vars(m)) for name, m in model.named_modules()} == members
    assert torch.equal(logits_of(model, ids), before)
    assert count_ops(hf_generate, model, ids) == {}


def test_load_state_dict(device):
    other = small_model(device=device, seed=9)
    for assign in (False, True):
        model, ids, _ = packed_model(device)
        model.load_state_dict(other.state_dict(), assign=assign)
        if not assign:
            assert is_packed(model)
        assert torch.equal(hf_generate(model, ids), hf_generate(other, ids))
        assert is_packed(model)


def test_to_dtype(device):
    model, ids, _ = packed_model(device)
    model.to(torch.bfloat16)
    assert not is_packed(model)
    check_counts(count_ops(hf_generate, model, ids), steps(NEW), device)
    assert is_packed(model)


def test_deepcopy(device):
    model, ids, expected = packed_model(device)
    twin = copy.deepcopy(model)
    check_counts(count_ops(hf_generate, twin, ids), steps(NEW), device)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.neg_()
    assert torch.equal(hf_generate(model, ids), expected)
    assert decoder(twin) is not decoder(model)
    changed = hf_generate(twin, ids)
    unpatch(twin)
    assert torch.equal(hf_generate(twin, ids), changed)
    assert torch.equal(hf_generate(copy.copy(model), ids), expected)


def test_torch_save(tmp_path):
    model, ids, expected = packed_model()
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert is_packed(loaded)
    check_counts(count_ops(hf_generate, loaded, ids), steps(NEW), "cpu")
    assert torch.equal(hf_generate(loaded, ids), expected)
    unpatch(loaded)
    assert type(loaded) is transformers.Qwen2ForCausalLM
    assert not set(storages(loaded)) & set(storages(model))
    fresh = small_model(seed=9)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(hf_generate(fresh, ids), expected)


def test_save_pretrained(tmp_path, device):
    model, ids, expected = packed_model(device)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert type(loaded) is transformers.Qwen2ForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(hf_generate(loaded, ids), expected)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(model.state_dict(), tmp_path / "plain.safetensors")
    for name, value in safetensors.load_file(tmp_path / "plain.safetensors").items():
        assert torch.equal(value, model.state_dict()[name].cpu())


def test_training_goes_on(device):
    """Packed in inference mode, then trained: gradients and updates are those of the unpatched model."""
    ids = tiny_inputs(device)
    results = []
    for patched in (False, True):
        model = small_model(device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        texts = []
        if patched:
            llmkernels.patch(model)
        for _ in range(3):
            with torch.inference_mode():
                texts.append(hf_generate(model.eval(), ids))
                texts.append(llmkernels.generate(model, ids, max_new_tokens=NEW))
            if patched:
                assert is_packed(model)
            model.train()(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((texts, [p.detach().clone() for p in model.parameters()]))
    (texts, weights), (found_texts, found_weights) = results
    assert all(torch.equal(a, b) for a, b in zip(found_texts, texts, strict=True))
    assert not torch.equal(texts[0], texts[-1])
    for ours, theirs in zip(found_weights, weights, strict=True):
        assert_close(ours, theirs, 1e-4)


def test_resized_embeddings(device):
    model, ids, _ = packed_model(device)
    model.resize_token_embeddings(VOCAB + 13)
    found = hf_generate(model, ids)
    check_counts(count_ops(hf_generate, model, ids), steps(NEW), device)
    unpatch(model)
    assert torch.equal(hf_generate(model, ids), found)


def test_packing_one_group():
    parameters = [nn.Parameter(torch.randn(rows, 4)) for rows in (3, 1, 2)]
    values = [p.detach().clone() for p in parameters]
    assert packing.packed(parameters) is None
    assert packing.obstacle(parameters) is None
    packing.pack([parameters])
    packed = packing.packed(parameters)
    assert torch.equal(packed, torch.cat(values))
    assert packing.packed(parameters[1:]).data_ptr() == parameters[1].data_ptr()
    assert packing.packed(parameters[::-1]) is None
    assert packing.packed([parameters[0], parameters[2]]) is None
    before = packed.data_ptr()
    packing.pack([parameters])
    assert packing.packed(parameters).data_ptr() == before
    packing.unpack([parameters])
    assert packing.packed(parameters) is None
    assert all(torch.equal(p, value) for p, value in zip(parameters, values, strict=True))
    with torch.device("meta"):
        meta = [nn.Parameter(torch.empty(2, 2))]
    assert packing.obstacle(meta) == "a weight has no ordinary memory"
    assert "differ in dtype" in packing.obstacle([parameters[0], nn.Parameter(torch.ones(2, 4).half())])
    assert "differ in shape" in packing.obstacle([parameters[0], nn.Parameter(torch.ones(2, 5))])
    assert packing.obstacle([parameters[0], parameters[0]]) == "one weight is used twice"


# --- the lean loop


@pytest.mark.parametrize("family", FAMILIES)
def test_lean_greedy(family, device, late):
    model, ids, mask = small_model(family, device), tiny_inputs(device, 3), left_padded(device)
    expected = hf_generate(model, ids), hf_generate(model, ids, attention_mask=mask)
    handle = llmkernels.patch(model)
    check_counts(count_ops(llmkernels.generate, model, ids, max_new_tokens=NEW), lean_steps(NEW), device)
    assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), expected[0])
    assert torch.equal(llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW), expected[1])
    assert torch.equal(llmkernels.generate(model, ids[:1], max_new_tokens=1), expected[0][:1, :12])
    assert handle.report().decode[0].calls == {generate_step(): 4}


def test_lean_on_the_module_path(device):
    """An unpatched model, and one with adapters: the same tokens, and a word in the report."""
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    expected = hf_generate(model, ids, attention_mask=mask)
    found = llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(found, expected)
    assert list(decoder(model).calls) == ["by the model's forward: the model is not patched for it"]
    adapted = lora(model)
    llmkernels.patch(adapted)
    inner = adapted.get_base_model()
    found = llmkernels.generate(inner, ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(found, hf_generate(inner, ids, attention_mask=mask))


def test_lean_eos_and_streamer(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    free = hf_generate(model, ids)
    ends = [free[0, 13].item(), free[1, 12].item(), free[2, 15].item()]
    first = [row[11].item() for row in free]
    llmkernels.patch(model)
    for eos in (ends, ends[0], first, [], free[0, -1].item()):
        stream, cache = Stream(), KVCache(model, 30)
        options = {"eos_token_id": eos, "pad_token_id": 1, "max_new_tokens": NEW}
        found = llmkernels.generate(model, ids, streamer=stream, cache=cache, **options)
        expected = hf_generate(model, ids, eos_token_id=eos or None, pad_token_id=1)
        assert torch.equal(found, expected)
        stream.check(found, ids)
        assert cache.length == found.shape[1] - 1
        assert torch.equal(llmkernels.generate(model, ids, **options), expected)


def test_lean_sampling(device, late):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    llmkernels.patch(model)

    def sample(seed=3, **options):
        options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": NEW} | options
        return llmkernels.generate(model, ids, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(sample(), sample())
    assert not torch.equal(sample(), sample(4))
    greedy = llmkernels.generate(model, ids, max_new_tokens=NEW)
    assert torch.equal(sample(top_k=1), greedy)
    assert torch.equal(sample(top_p=1e-6), greedy)
    assert torch.equal(sample(min_p=1.0), greedy)
    mixed = sample(top_k=torch.tensor([1, 0, 1]), temperature=[1.5, 9.0, 1.5])
    assert torch.equal(mixed[[0, 2]], greedy[[0, 2]])
    assert not torch.equal(mixed[1], greedy[1])
    torch.manual_seed(5)
    by_default = [llmkernels.generate(model, ids, do_sample=True, max_new_tokens=NEW) for _ in range(2)]
    assert not torch.equal(*by_default)
    torch.manual_seed(5)
    assert torch.equal(llmkernels.generate(model, ids, do_sample=True, max_new_tokens=NEW), by_default[0])


def test_lean_repetition_penalty(device):
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    expected = hf_generate(model, ids, repetition_penalty=1.6, max_new_tokens=16)
    assert not torch.equal(expected, hf_generate(model, ids, max_new_tokens=16))
    llmkernels.patch(model)
    options = {"max_new_tokens": 16}
    assert torch.equal(llmkernels.generate(model, ids, repetition_penalty=1.6, **options), expected)
    one = llmkernels.generate(model, ids, repetition_penalty=[1.6, 1.0], **options)
    assert torch.equal(one[0], expected[0])
    assert torch.equal(one[1], llmkernels.generate(model, ids, **options)[1])


def test_lean_continues_on_its_cache(device):
    model, ids = small_model(device=device), tiny_inputs(device, 3)
    mask = left_padded(device)
    llmkernels.patch(model)
    whole = llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW)
    cache = KVCache(model, 40)
    part = llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=3, cache=cache)
    longer = torch.cat([mask, mask.new_ones(3, 3)], 1)
    rest = llmkernels.generate(model, part[:, -1:], attention_mask=longer, max_new_tokens=NEW - 3, cache=cache)
    assert torch.equal(torch.cat([part[:, :-1], rest], 1), whole)


def test_lean_errors():
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    for match, arguments in {
        r"input_ids must be \(batch, tokens\) of integers, got torch.float32 \(2, 11\)": {"input_ids": ids.float()},
        r"input_ids must be \(batch, tokens\) of integers, got torch.int64 \(11,\)": {"input_ids": ids[0]},
        "max_new_tokens must be positive, got 0": {"max_new_tokens": 0},
        "cache must be a llmkernels.KVCache, got DynamicCache": {"cache": DynamicCache()},
        "cache must have a capacity of at least 18 tokens, got 17": {"cache": KVCache(model, 17)},
        r"attention_mask must have shape \(2, 11\), got \(2, 10\)": {"attention_mask": torch.ones(2, 10)},
        "attention_mask must have its zeros on the left": {"attention_mask": torch.ones(2, 11).tril(9)},
        r"temperature must be a number or one per sequence \(2,\), got \(3,\)": {"temperature": [1.0, 2.0, 3.0]},
        "top_p must be in \\(0, 1\\], got 0": {"top_p": 0},
        "temperature must be at least 0, got -1": {"temperature": [1, -1]},
        "repetition_penalty must be positive, got 0": {"repetition_penalty": 0},
    }.items():
        options = {"input_ids": ids, "max_new_tokens": NEW, "do_sample": True} | arguments
        with pytest.raises(ValueError, match=match):
            llmkernels.generate(model, **options)


# --- the command line


CHARACTERS = [chr(33 + i) for i in range(94)] + [" "]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a tokenizer of one character per token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    vocabulary = {CHARACTERS[i]: i for i in range(94)} | {"Ġ": 94, "<|endoftext|>": 95, "<x>": 96}
    transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    small_model(config=tiny_config(head_dim=64)).save_pretrained(folder)
    return str(folder)


def test_command(checkpoint, capsys):
    prompt = [4, 8, 15]
    expected = hf_generate(small_model(), torch.tensor([prompt]))[0].tolist()
    arguments = ["generate", checkpoint, "--prompt", "".join(CHARACTERS[i] for i in prompt), "--device", "cpu"]
    assert __main__.main([*arguments, "--max-new-tokens", str(NEW), "--report"]) == 0
    out, err = capsys.readouterr()
    assert out.strip("\n") == "".join(CHARACTERS[i] for i in expected if i < 95)
    assert "decodes by the decode step (calls of generate: 1 by the decode step)" in err
    texts = []
    for seed in ("1", "1", "2"):
        options = ["--temperature", "2", "--top-p", "0.99", "--seed", seed, "--dtype", "bfloat16"]
        assert __main__.main([*arguments, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_command_errors(checkpoint, capsys, tmp_path):
    for arguments, message in (
        ([str(tmp_path), "--prompt", "a"], "MODEL must be a causal language model"),
        ([checkpoint, "--prompt", "a", "--device", "nope"], "--device must be cpu, cuda or cuda:N, got nope"),
        ([checkpoint, "--prompt", ""], "--prompt must have at least one token"),
        ([checkpoint, "--prompt", "a", "--chat"], "--chat must have a model with a chat template"),
    ):
        assert __main__.main(["generate", *arguments]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        __main__.main(["generate", checkpoint, "--prompt", "a", "--max-new-tokens", "0"])
    assert "must be positive, got 0" in capsys.readouterr().err


assert generate is llmkernels.generate
