"""The step of models that take images: their prompts run by the modules, and the tokens behind them by the step."""

import pytest
import torch
import transformers

import llmkernels
from families import EXPECTED, FAMILIES, family_model, image_inputs
from hf_models import assert_close, tiny_inputs
from llmkernels.hf import unpatch

IMAGES = [name for name, family in FAMILIES.items() if family.outer]
NEW = 8
STEP = "by the decode step"
every_model = pytest.mark.parametrize("name", IMAGES)


def generate(model, inputs, **options):
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options)


def forwards(handle):
    return dict(handle.report().decode[0].forwards)


def steps(handle):
    return handle.report().decode[0].steps


@every_model
def test_tokens_behind_an_image(name, device):
    model, inputs = family_model(name, device), image_inputs(name, device)
    options = {"return_dict_in_generate": True, "output_logits": True}
    expected = generate(model, inputs, **options)
    handle = llmkernels.patch(model)
    for _ in range(2):
        found = generate(model, inputs, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    [decode] = handle.report().decode
    assert decode.calls == {STEP: 2}, handle.report()
    assert decode.steps == 2 * (NEW - 1)
    assert [way for way in decode.prompts if "pixel_values" in way or "mm_encoder_outputs" in way]


@every_model
def test_beams_behind_an_image(name, device):
    model, inputs = family_model(name, device), image_inputs(name, device)
    expected = generate(model, inputs, num_beams=3)
    handle = llmkernels.patch(model)
    assert torch.equal(generate(model, inputs, num_beams=3), expected)
    assert forwards(handle)[STEP] == NEW - 1, handle.report()


@every_model
def test_an_image_counts(name, device):
    """Another one behind the same tokens, in the second call of a patched model."""
    model, inputs = family_model(name, device), image_inputs(name, device)
    other = inputs | {"pixel_values": 3 * inputs["pixel_values"].flip(0) + 1}
    expected = [generate(model, one) for one in (inputs, other, inputs)]
    assert not torch.equal(expected[0], expected[1])
    llmkernels.patch(model)
    assert all(
        torch.equal(generate(model, one), tokens) for one, tokens in zip((inputs, other, inputs), expected, strict=True)
    )


@every_model
def test_outputs_are_the_models_own(name, device):
    model, inputs = family_model(name, device), image_inputs(name, device)

    @torch.no_grad()
    def outputs():
        prompt = model(**inputs, use_cache=True)
        positions = torch.full((1, 1), inputs["input_ids"].shape[1], device=device)
        positions = positions.expand(3, 1, 1) - 2 if name == "qwen2_5_vl" else positions
        return prompt, model(inputs["input_ids"][:, :1], past_key_values=prompt.past_key_values, position_ids=positions)

    expected = outputs()
    handle = llmkernels.patch(model)
    for found, other in zip(outputs(), expected, strict=True):
        assert type(found) is type(other) and found.keys() == other.keys()
        assert_close(found.logits, other.logits)
    assert forwards(handle)[STEP] == 1


def test_positions_that_the_modules_make_of_images(device):
    """A loop that gives none: only the model knows how far they are behind the tokens."""
    model, inputs = family_model("qwen2_5_vl", device), image_inputs("qwen2_5_vl", device)

    @torch.no_grad()
    def tokens():
        output, found = model(**inputs, use_cache=True), []
        for _ in range(4):
            ids = output.logits[:, -1:].argmax(-1)
            output = model(ids, past_key_values=output.past_key_values)
            found.append(output.logits)
        return torch.cat(found, 1)

    expected = tokens()
    handle = llmkernels.patch(model)
    assert_close(tokens(), expected)
    assert forwards(handle) == {"by the model's forward: no position_ids, which the modules make of images": 4}


def test_grids_of_an_image_run_by_the_modules(device):
    """Positions whose rows differ, behind a cache: more tokens with an image among them."""
    model, ids = family_model("qwen2_5_vl", device), tiny_inputs(device, 1)
    rows = torch.tensor([[11, 12, 13], [11, 12, 12], [11, 11, 13]], device=device)[:, None]

    @torch.no_grad()
    def logits():
        cache = model(ids, use_cache=True).past_key_values
        return model(ids[:, :3], past_key_values=cache, position_ids=rows).logits

    expected = logits()
    handle = llmkernels.patch(model)
    assert_close(logits(), expected)
    assert forwards(handle) == {"by the model's forward: position_ids of the grid of an image": 1}


@every_model
def test_changes_of_the_text_are_heard(name, device):
    model, inputs = family_model(name, device), image_inputs(name, device)
    handle = llmkernels.patch(model)
    generate(model, inputs)
    decoder, seen = model.model.language_model, []
    hook = decoder.layers[0].mlp.register_forward_hook(lambda *call: seen.append(call))
    generate(model, inputs)
    assert len(seen) == NEW
    hook.remove()
    with torch.no_grad():
        decoder.layers[0].mlp.down_proj.weight.mul_(-2)
    found = generate(model, inputs)
    assert steps(handle) > NEW - 1
    unpatch(model)
    assert torch.equal(found, generate(model, inputs))


@every_model
def test_parts_of_images_may_be_anything(name, device):
    """A hook on them sees its calls: those of prompts."""
    model, inputs = family_model(name, device), image_inputs(name, device)
    tower, seen = next(child for key, child in model.model.named_children() if "vis" in key), []
    tower.register_forward_hook(lambda *call: seen.append(call))
    expected = generate(model, inputs)
    handle = llmkernels.patch(model)
    assert torch.equal(generate(model, inputs), expected)
    assert len(seen) == 2
    assert steps(handle) == NEW - 1


def test_the_table_has_them():
    assert all(not EXPECTED[name].no_step for name in IMAGES)


# --- other families, given text alone

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_SMALL |= {"num_hidden_layers": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL |= {"max_position_embeddings": 128, "tie_word_embeddings": False}
_OTHERS = {"num_hidden_layers": 1, "depth": 1, "encoder_layers": 1, "hidden_size": 32, "intermediate_size": 48}
_OTHERS |= {
    "num_attention_heads": 2,
    "num_heads": 2,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 2,
}


def shrink(config, is_text=False):
    """A config of a few small layers, in place."""
    for name, part in list(vars(config).items()):
        if hasattr(part, "get_text_config"):
            shrink(part, "text" in name)
    if is_text:
        changes = _SMALL
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
    else:
        changes = {} if hasattr(config, "text_config") else _OTHERS
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(config, name, value)


@pytest.mark.parametrize(
    "name",
    [
        "AyaVision",
        "GotOcr2",
        "GraniteSpeech",
        "Idefics3",
        "InternVL",
        "LlavaOnevision",
        "Mistral3",
        "Qwen2Audio",
        "Qwen3VL",
        "SmolVLM",
        "Voxtral",
    ],
)
def test_text_alone(name, device):
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    config = cls.config_class()
    shrink(config)
    torch.manual_seed(0)
    model = cls(config).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    inputs = {"input_ids": tiny_inputs(device, 2)}
    expected = generate(model, inputs)
    handle = llmkernels.patch(model)
    assert torch.equal(generate(model, inputs), expected)
    assert handle.report().decode[0].calls == {STEP: 1}, handle.report()


# --- training


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_loss_without_logits(name, device):
    model, inputs = family_model(name, device).train(), image_inputs(name, device)
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] % 3 == 0, -100)

    def run():
        model.zero_grad(set_to_none=True)
        output = model(**inputs, labels=labels)
        output.loss.backward()
        return output, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    expected, gradients = run()
    handle = llmkernels.patch(model, training=True)
    found, ours = run()
    assert dict(handle.report()["loss"].runs) == {"llmkernels::linear_cross_entropy": 1}
    assert type(found) is type(expected) and found.keys() == expected.keys()
    assert_close(found.loss, expected.loss)
    assert_close(found.logits, expected.logits)
    for key in found.keys() - {"loss", "logits"}:
        if isinstance(expected[key], torch.Tensor):
            assert_close(found[key], expected[key])
    assert ours.keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for key, gradient in gradients.items():
        assert (ours[key] - gradient).abs().max() < 1e-4 * largest, key


def test_another_loss_is_left_alone(device):
    """Gemma 3 masks labels by its own function."""
    handle = llmkernels.patch(family_model("gemma3_image", device), training=True)
    assert "unknown layout of its forward" in str(handle.report())
