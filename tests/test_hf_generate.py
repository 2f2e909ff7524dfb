"""Generation, caches, masks, positions and torch.compile: a patched model against the same model unpatched."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

import llmkernels
from hf_models import (
    FAMILIES,
    LAYERS,
    OPS,
    PROMPT,
    assert_close,
    count_ops,
    logits_of,
    rounding,
    tiny_inputs,
    tiny_model,
)
from llmkernels.hf import unpatch


def generate(model, ids, **options):
    torch.manual_seed(11)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True} | options
    return model.generate(ids, **options)


def check_generate(model, ids, **options):
    """The same tokens and logits, by our ops."""
    llmkernels.patch(model)
    ran = count_ops(generate, model, ids, **options).keys()
    assert ran >= OPS.keys() or ran >= PROMPT.keys()
    found = generate(model, ids, **options)
    unpatch(model)
    expected = generate(model, ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    if expected.logits is not None:
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    return expected.sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "prompt_lookup_num_tokens": 2},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    ],
    ids=["greedy", "sampling", "beam", "lookup", "no-cache", "static"],
)
def test_generate(family, options, device):
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    sequences = check_generate(tiny_model(family, device), tiny_inputs(device, batch), **options)
    assert sequences.shape == (batch, 19)


def test_assisted_decoding(device):
    assistant = tiny_model(device=device, num_hidden_layers=1, seed=4)
    with llmkernels.patch(assistant):
        check_generate(tiny_model(device=device), tiny_inputs(device, 1), assistant_model=assistant, do_sample=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generate_in_low_precision(dtype, device):
    """Rounding may change a token, so only the first logits are compared."""
    model, ids = tiny_model(device=device, dtype=dtype), tiny_inputs(device)
    before = logits_of(model, ids)
    llmkernels.patch(model)
    found = generate(model, ids, do_sample=False)
    assert found.sequences.shape == (2, 19)
    assert_close(found.logits[0].float(), before[:, -1], rounding(dtype))


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_continuing_from_a_returned_cache(cache, device):
    """Patched and unpatched can take turns on one cache."""
    model, ids = tiny_model(device=device), tiny_inputs(device)
    before = logits_of(model, ids)
    state = DynamicCache() if cache is DynamicCache else StaticCache(config=model.config, max_cache_len=20)
    found = []
    for start, end, patched in ((0, 5, True), (5, 6, False), (6, 10, True), (10, 11, True)):
        if patched:
            llmkernels.patch(model)
        found.append(logits_of(model, ids[:, start:end], past_key_values=state, use_cache=True))
        unpatch(model)
    assert_close(torch.cat(found, 1), before)


# --- masks and positions


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding(family, side, attention, device):
    model, ids = tiny_model(family, device, attn_implementation=attention), tiny_inputs(device)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 4) if side == "left" else slice(7, 11)] = 0
    llmkernels.patch(model)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    alone = logits_of(model, ids[:1, mask[0].bool()])
    assert_close(found[:1, mask[0].bool()], alone)
    unpatch(model)
    assert_close(found[mask.bool()], logits_of(model, ids, attention_mask=mask, position_ids=positions)[mask.bool()])


def test_generate_with_left_padding(device):
    ids = tiny_inputs(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    check_generate(tiny_model(device=device), ids, attention_mask=mask, do_sample=False)


def test_four_dimensional_mask(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    visible = torch.ones(11, 11, device=device).tril().bool() & (torch.rand(2, 1, 11, 11, device=device) < 0.7)
    visible |= torch.eye(11, device=device).bool()
    mask = torch.zeros(2, 1, 11, 11, device=device).masked_fill(~visible, torch.finfo(torch.float32).min)
    before = logits_of(model, ids, attention_mask=mask)
    llmkernels.patch(model)
    assert_close(logits_of(model, ids, attention_mask=mask), before)


def test_packed_sequences(device):
    """Positions that start again, with one row of cos and sin for each sequence."""
    model, ids = tiny_model(device=device), tiny_inputs(device)
    positions = torch.stack([torch.arange(11) % 4, torch.arange(11).flip(0)]).to(device)
    before = logits_of(model, ids, position_ids=positions)
    llmkernels.patch(model)
    assert_close(logits_of(model, ids, position_ids=positions), before)
    assert not torch.allclose(logits_of(model, ids), before, atol=1e-2)


def test_inputs_embeds(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    before = logits_of(model, ids)
    llmkernels.patch(model)
    embeds = model.get_input_embeddings()(ids).detach()
    kept = embeds.clone()
    assert_close(logits_of(model, None, inputs_embeds=embeds), before)
    assert torch.equal(embeds, kept)
    with torch.no_grad():
        from_embeds = model.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
        assert torch.equal(from_embeds, model.generate(ids, max_new_tokens=5, do_sample=False)[:, 11:])


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1)])
def test_small_shapes(shape, device):
    model, ids = tiny_model(device=device), tiny_inputs(device, *shape)
    before = logits_of(model, ids)
    llmkernels.patch(model)
    assert count_ops(model, ids) == OPS
    assert_close(logits_of(model, ids), before)


# --- torch.compile


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_once_and_is_seen_by_the_compiler(family, device):
    model, ids = tiny_model(family, device), tiny_inputs(device)
    before = logits_of(model, ids)
    llmkernels.patch(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in (1, 2, 3):
        ids = tiny_inputs(device, seed=seed)
        assert_close(logits_of(compiled, ids), logits_of(model, ids))
    assert counter.frame_count == 1
    assert_close(logits_of(compiled, tiny_inputs(device)), before)
    targets = [node.target for node in counter.graphs[0].graph.nodes if "llmkernels" in str(node.target)]
    assert len(targets) == sum(OPS.values())


def test_compiled_model_follows_patch_and_unpatch(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    before, frames = logits_of(compiled, ids), []
    for _ in range(2):
        with llmkernels.patch(model):
            assert_close(logits_of(compiled, ids), before)
            frames.append(counter.frame_count)
        assert torch.equal(logits_of(compiled, ids), before)
    # Once unpatched and once patched: the second round finds both graphs again.
    assert frames == [2, 2]
    assert counter.frame_count == 2


def test_compile_before_training_step(device):
    model, ids = tiny_model(device=device).train(), tiny_inputs(device)

    def gradients(run):
        model.zero_grad()
        run(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(model)
    llmkernels.patch(model)
    torch._dynamo.reset()
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_static_cache_compiles_once(family, device):
    """The decode step of generate: one graph, also for a second, shorter prompt."""
    model = tiny_model(family, device)
    llmkernels.patch(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    for tokens in (9, 5):
        ids = tiny_inputs(device, tokens=tokens + 3)
        cache = StaticCache(config=model.config, max_cache_len=32)
        found = [logits_of(model, ids[:, :tokens], past_key_values=cache)]
        for position in range(tokens, tokens + 3):
            positions = torch.full((2, 1), position, device=device)
            found.append(logits_of(step, ids[:, [position]], past_key_values=cache, position_ids=positions))
        frames = counter.frame_count
        if tokens == 9:
            first = frames
        assert_close(torch.cat(found, 1), logits_of(model, ids))
    assert first == frames == 1


def test_export(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
        assert_close(program.module()(input_ids=ids, use_cache=False).logits, logits_of(model, ids))
    targets = [node for node in program.graph.nodes if "llmkernels" in str(node.target)]
    assert len([node for node in targets if "rope" in str(node.target)]) == LAYERS
