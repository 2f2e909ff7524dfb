"""Models that add embeddings of positions to those of tokens: where a token is by its mask, its cache or its caller."""

import pytest
import torch

import llmkernels
from families import LEARNED_POSITIONS, family_model
from generating import generate_step
from hf_models import assert_close, logits_of, rounding, tiny_inputs
from llmkernels.hf.classes.cache_name import cache_name

# Given no positions, OPT counts the tokens that the mask shows, the others all.
every_model = pytest.mark.parametrize("name", LEARNED_POSITIONS)
PAD = 3


def padded(device, tokens=9, padding=PAD):
    ids = tiny_inputs(device, 2, tokens)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@every_model
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_behind_padding(name, beams, device):
    model, inputs = family_model(name, device), padded(device)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    expected = model.generate(**inputs, **options)
    handle = llmkernels.patch(model)
    assert torch.equal(model.generate(**inputs, **options), expected)
    [decode] = handle.report().decode
    if beams == 1:
        assert dict(decode.calls) == {generate_step(): 1}
    else:
        assert decode.calls == {"by transformers: beam search": 1} and sum(decode.forwards.values()) >= 5


@every_model
@pytest.mark.parametrize("positions", [False, True], ids=["no_positions", "positions"])
def test_a_loop_behind_padding(name, positions, device):
    """The prompt and each forward, with a mask and maybe positions: as the modules have them."""
    model, inputs = family_model(name, device), padded(device)
    mask = inputs.pop("attention_mask")

    @torch.no_grad()
    def loop():
        found, ids, given, cache = [], inputs["input_ids"], mask, None
        for _ in range(4):
            where = {"position_ids": (given.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]} if positions else {}
            output = model(ids, attention_mask=given, use_cache=True, **{cache_name(): cache}, **where)
            cache = output[cache_name()]
            found.append(output.logits[:, -1])
            ids = found[-1].argmax(-1)[:, None]
            given = torch.cat([given, torch.ones_like(ids)], 1)
        return torch.stack(found)

    expected = loop()
    handle = llmkernels.patch(model)
    found = loop()
    assert_close(found, expected)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert sum(handle.report().decode[0].forwards.values()) >= 3
    assert not any("by transformers" in kind or "modules" in kind for kind in handle.report().decode[0].forwards)


@every_model
def test_a_change_between_the_forwards_of_a_loop(name, device):
    """A recorded forward is dropped, and the same positions are counted once more."""
    model, inputs = family_model(name, device), padded(device)
    mask, ids = inputs["attention_mask"], inputs["input_ids"]

    @torch.no_grad()
    def loop():
        norm = next(module for module in model.modules() if isinstance(module, torch.nn.LayerNorm))
        norm.eps = 1e-5
        output, found, given = model(ids, attention_mask=mask, use_cache=True), [], mask
        for step in range(6):
            norm.eps = 0.3 if step in (3, 5) else 1e-5
            given = torch.cat([given, mask[:, :1].new_ones(2, 1)], 1)
            output = model(ids[:, :1], attention_mask=given, use_cache=True, **{cache_name(): output[cache_name()]})
            found.append(output.logits[:, -1])
        return torch.stack(found)

    expected = loop()
    handle = llmkernels.patch(model)
    assert_close(loop(), expected)
    assert dict(handle.report().decode[0].forwards) == {"by the decode step": 6}


@every_model
def test_padding_matters(name):
    """The loop without positions tells the two ways of counting from each other."""
    model, inputs = family_model(name), padded("cpu")
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    by_default, by_mask = logits_of(model, **to_ids(inputs)), logits_of(model, **to_ids(inputs), position_ids=positions)
    assert torch.allclose(by_default[0, PAD:], by_mask[0, PAD:], atol=1e-5) == (name == "opt")


def to_ids(inputs):
    return {"ids" if name == "input_ids" else name: value for name, value in inputs.items()}


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_prompts(name, dtype, device):
    """Of many tokens at once, by our kernels on a GPU: no further from float32 than twice what the modules are."""
    model, inputs = family_model(name, device, dtype), padded(device, 33, 5)
    real = inputs["attention_mask"].bool()
    oracle = logits_of(family_model(name, "cpu", torch.float64), **to_ids({k: v.cpu() for k, v in inputs.items()}))
    expected = logits_of(model, **to_ids(inputs))
    llmkernels.patch(model)
    found = logits_of(model, **to_ids(inputs))
    error, allowed = ((x[real].cpu() - oracle[real.cpu()]).abs().max() for x in (found, expected))
    assert error <= 2 * allowed + rounding(dtype) * oracle.abs().max()


@every_model
def test_forwards_of_several_tokens(name, device):
    """Behind a cache, as drafts are checked."""
    model, ids = family_model(name, device), tiny_inputs(device, 2, 12)

    @torch.no_grad()
    def run():
        first = model(ids[:, :7], use_cache=True)
        return torch.cat(
            [first.logits, model(ids[:, 7:], use_cache=True, **{cache_name(): first[cache_name()]}).logits], 1
        )

    expected = run()
    handle = llmkernels.patch(model)
    assert_close(run(), expected)
    assert sum(handle.report().decode[0].forwards.values()) >= 1


@every_model
def test_the_last_position(name, device):
    """Steps run up to the last embedding. A call that may go further runs by the modules, which say what is wrong."""
    model, ids = family_model(name, device), tiny_inputs(device, 1, 120)
    options = {"do_sample": False, "use_cache": True}
    expected = model.generate(ids, max_new_tokens=8, **options)
    handle = llmkernels.patch(model)
    assert torch.equal(model.generate(ids, max_new_tokens=8, **options), expected)
    assert dict(handle.report().decode[0].calls) == {generate_step(): 1}
    if device == "cpu":  # on a GPU the index is an assertion of the device, which ends the process
        with pytest.raises(IndexError):
            model.generate(ids, max_new_tokens=40, **options)
        assert any("embeddings of 128 positions" in kind for kind in handle.report().decode[0].calls)


@every_model
def test_a_table_of_another_length(name, device):
    model, ids = family_model(name, device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    table = model.transformer.wpe if name.startswith("gpt") else model.get_decoder().embed_positions
    table.weight = torch.nn.Parameter(table.weight[:60].detach().clone())
    found = model.generate(ids, max_new_tokens=4, do_sample=False)
    handle.unpatch()
    assert torch.equal(found, model.generate(ids, max_new_tokens=4, do_sample=False))
