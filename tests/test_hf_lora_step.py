"""The decode step of a model with LoRA adapters of PEFT: the tokens that it has unpatched, whatever becomes of them."""

import copy

import pytest
import torch
from torch import nn

import llmkernels
from families import family_model
from generating import generate_step, small_model
from hf_models import FAMILIES, CountOps, assert_close, rounding, tiny_inputs
from llmkernels.hf.model import adapted as adapters

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NEW = 7


def adapted(device="cpu", family="qwen2", dtype=torch.float32, names=("default",), model=None, wide=True, **options):
    """A model with adapters that change its tokens."""
    config = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, "lora_alpha": 6} | options
    torch.manual_seed(3)
    model = small_model(family, device) if model is None else model
    model = model.to(dtype)
    for index, name in enumerate(names):
        one = peft.LoraConfig(**config | {"r": config["r"] + index})
        if index == 0:
            model = peft.get_peft_model(model, one, name, autocast_adapter_dtype=wide)
        else:
            model.add_adapter(name, one, autocast_adapter_dtype=wide)
    return model.eval()


def generate(model, ids, **options):
    return model.generate(input_ids=ids, **{"max_new_tokens": NEW, "do_sample": False} | options)


def calls(handle):
    return dict(handle.report().decode[0].calls)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def check(model, ids, training=False, **options):
    expected = generate(model, ids, **options)
    handle = llmkernels.patch(model, training=training)
    assert handle.report().decode[0].reason is None
    assert torch.equal(generate(model, ids, **options), expected)
    assert calls(handle) == {generate_step(): 1}
    handle.unpatch()
    return expected


@pytest.mark.parametrize("training", [False, True], ids=["patch", "patch_training"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family, training, device):
    model, ids = adapted(device, family), tiny_inputs(device)
    expected = check(model, ids, training)
    with model.disable_adapter():
        assert not torch.equal(generate(model, ids), expected)
        check(model, ids, training)


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "granite", "phi3", "cohere", "qwen3", "opt", "gpt2"])
def test_families(family, device):
    """Norms behind blocks, multipliers, packed weights, branches side by side, biases or none, transposed weights."""
    model = adapted(device, model=family_model(family, device), target_modules="all-linear")
    model.get_base_model().generation_config.eos_token_id = None
    check(model, tiny_inputs(device), pad_token_id=0)


@pytest.mark.parametrize("wide", [True, False], ids=["float32_adapters", "narrow_adapters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, wide, device):
    """The error of a step's logits is at most that of the unpatched model and half as much again."""
    model, ids = adapted(device, dtype=dtype, wide=wide), tiny_inputs(device)
    exact = copy.deepcopy(model).double() if device == "cpu" else copy.deepcopy(model).float()

    @torch.no_grad()
    def logits(model):
        output = model(ids, use_cache=True)
        return model(ids[:, :1], past_key_values=output.past_key_values).logits.double()

    expected, unpatched = logits(exact), logits(model)
    llmkernels.patch(model)
    errors = [(found - expected).norm() / expected.norm() for found in (logits(model), unpatched)]
    assert errors[0] <= 1.5 * errors[1] + rounding(dtype)


def test_adapters_of_some_layers(device):
    model = adapted(device, target_modules=["v_proj", "up_proj"], layers_to_transform=[1])
    assert len(layers_of(model)) == 2
    check(model, tiny_inputs(device))


def test_several_active_adapters(device):
    model, ids = adapted(device, names=("first", "second", "third")), tiny_inputs(device)
    model.base_model.set_adapter(["first", "third"])
    check(model, ids)


@pytest.mark.parametrize("part, name", [("lora_A", "in"), ("lora_B", "out")])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_factors_of_other_sizes(family, part, name):
    """They are not read beyond their ends: the modules raise what they raise."""
    model = adapted(model=family_model(family), target_modules="all-linear")
    layer = layers_of(model)[1]
    linear = getattr(layer, part)["default"]
    size = {"in": (4, linear.in_features - 8), "out": (linear.out_features - 8, 4)}[name]
    linear.weight = nn.Parameter(torch.randn(size))
    reason = llmkernels.patch(model).report().decode[0].reason
    assert "other shapes than its weight" in reason
    with pytest.raises(RuntimeError, match=r"size|shape"):
        generate(model, tiny_inputs())


def test_no_mode_of_the_caller_sees_how_a_layer_is_checked():
    layer = type(layers_of(adapted())[0])
    adapters._check_forward.cache_clear()
    with CountOps() as seen:
        adapters._check_forward(layer, layer.forward)
    assert adapters._check_forward.cache_info().misses == 1 and not seen.counts


def test_beams_and_padding(device):
    model, ids = adapted(device), tiny_inputs(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    check(model, ids, attention_mask=mask)
    expected = generate(model, ids, num_beams=3)
    handle = llmkernels.patch(model)
    assert torch.equal(generate(model, ids, num_beams=3), expected)
    assert "forwards: 6 by the decode step" in str(handle.report())


# --- what becomes of a patched model


def test_changes_of_a_patched_model(device):
    """After each the tokens are those that it has unpatched."""
    model, ids = adapted(device, names=("first", "second")), tiny_inputs(device)
    reference = copy.deepcopy(model)
    handle = llmkernels.patch(model)

    def train(model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.add_(
                        torch.linspace(-1, 1, parameter.numel(), device=device).view_as(parameter), alpha=0.3
                    )

    def replace(model):
        layer = layers_of(model)[3].lora_B["second"]
        layer.weight = nn.Parameter(2.5 * layer.weight.detach())

    changes = {
        "nothing": lambda model: None,
        "set_adapter": lambda model: model.set_adapter("second"),
        "trained": train,
        "scaled": lambda model: [layer.scale_layer(-1.5) for layer in layers_of(model)],
        "another weight": replace,
        "both": lambda model: model.base_model.set_adapter(["first", "second"]),
        "merged": lambda model: model.merge_adapter(),
        "unmerged": lambda model: model.unmerge_adapter(),
        "deleted": lambda model: model.delete_adapter("second"),
    }
    seen = []
    for number, (name, change) in enumerate(changes.items()):
        change(model), change(reference)
        expected = generate(reference, ids)
        assert torch.equal(generate(model, ids), expected), name
        assert calls(handle) == {generate_step(): number + 1}, name
        seen.append(expected)
    different = [
        name for name, one, other in zip([*changes][1:], seen, seen[1:], strict=False) if torch.equal(one, other)
    ]
    assert set(different) <= {"merged", "unmerged"}


def test_forwards_of_a_loop_hear_a_change(device):
    """Between two tokens of a user's own loop."""
    model, ids = adapted(device, names=("first", "second")), tiny_inputs(device)

    @torch.no_grad()
    def logits(model):
        model.set_adapter("first")
        output = model(ids, use_cache=True)
        found = []
        for name in ("first", "second", "second", "first"):
            model.set_adapter(name)
            output = model(ids[:, :1], past_key_values=output.past_key_values)
            found.append(output.logits)
        return torch.cat(found, 1)

    expected = logits(model)
    handle = llmkernels.patch(model)
    assert_close(logits(model), expected)
    assert "by the decode step" in str(handle.report())


def test_after_a_training_step(device):
    model, ids = adapted(device).train(), tiny_inputs(device)
    reference = copy.deepcopy(model)
    handle = llmkernels.patch(model, training=True)
    for one in (model, reference):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            generate(one, ids)
            one(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(generate(model, ids), generate(reference, ids))
    assert calls(handle) == {generate_step(): 4}


# --- what the step does not add


def check_falls_back(model, ids, reason, **options):
    expected = generate(model, ids, **options)
    handle = llmkernels.patch(model)
    assert torch.equal(generate(model, ids, **options), expected)
    assert any(reason in way for way in calls(handle)), handle.report()


def test_other_adapters(device):
    ids = tiny_inputs(device)
    check_falls_back(adapted(device, use_dora=True), ids, "another kind of adapter")
    check_falls_back(adapted(device, lora_bias=True), ids, "its adapter has a bias")


def test_adapters_by_sample(device):
    model, ids = adapted(device, names=("first", "second")), tiny_inputs(device)
    check_falls_back(model, ids, "hooks", adapter_names=["second", "first"])


@pytest.mark.parametrize("name", ["layer", "lora_A", "lora_B", "lora_dropout", "base_layer"])
def test_hooks_are_called(name, device):
    model, ids = adapted(device, target_modules=["o_proj"]), tiny_inputs(device)
    handle = llmkernels.patch(model)
    generate(model, ids)
    assert calls(handle) == {generate_step(): 1}
    seen, layer = [], layers_of(model)[0]
    of = {"layer": layer, "base_layer": layer.base_layer} | {
        kind: getattr(layer, kind)["default"] for kind in ("lora_A", "lora_B", "lora_dropout")
    }
    of[name].register_forward_hook(lambda *call: seen.append(call))
    generate(model, ids)
    assert len(seen) == NEW


def test_dropout_draws_its_random_numbers(device):
    model, ids = adapted(device, lora_dropout=0.5), tiny_inputs(device)
    check(model, ids)
    torch.manual_seed(0)
    expected = generate(model.train(), ids)
    handle = llmkernels.patch(model)
    torch.manual_seed(0)
    assert torch.equal(generate(model, ids), expected)
    assert any("random numbers" in way for way in calls(handle))


def test_a_replaced_forward_runs(device, monkeypatch):
    model, ids = adapted(device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    generate(model, ids)
    original, seen = peft.tuners.lora.layer.Linear.forward, []

    def forward(self, x, *args, **kwargs):
        seen.append(x)
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "forward", forward)
    generate(model, ids)
    assert len(seen) == NEW * len(layers_of(model))
    assert "not PEFT's own" in str(handle.report()) or "forward" in str(handle.report())


def test_adapters_after_the_patch(device):
    """As a trainer adds them, to a model that was patched before."""
    ids = tiny_inputs(device)
    model = small_model(device=device)
    handle = llmkernels.patch(model)
    generate(model, ids)
    model = adapted(device, model=model)
    found = generate(model, ids)
    assert calls(handle) == {generate_step(): 2}
    handle.unpatch()
    assert torch.equal(generate(model, ids), found)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied_head"])
def test_adapters_of_the_head(tied, device):
    model = small_model(device=device, tie_word_embeddings=tied)
    check(adapted(device, model=model, target_modules=["lm_head", "q_proj"]), tiny_inputs(device))


@pytest.mark.parametrize(
    "reason, options",
    [
        ("ModulesToSaveWrapper", {"modules_to_save": ["lm_head"]}),
        ("Embedding", {"target_modules": ["embed_tokens"]}),
        ("TrainableTokensWrapper", {"trainable_token_indices": [3, 4]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_parts_of_peft(reason, options, device):
    check_falls_back(adapted(device, **options), tiny_inputs(device), reason)


def test_inference_mode_copies_and_our_generate(device):
    model, ids = adapted(device), tiny_inputs(device)
    expected = generate(model, ids)
    handle = llmkernels.patch(model)
    with torch.inference_mode():
        assert torch.equal(generate(model, ids), expected)
    base = model.get_base_model()
    assert torch.equal(llmkernels.generate(base, ids, max_new_tokens=NEW, do_sample=False), expected)
    copied = copy.deepcopy(model)
    assert torch.equal(generate(copied, ids), expected)
    assert calls(handle) == {generate_step(): 2}
    with torch.no_grad():
        layers_of(copied)[0].lora_B["default"].weight.mul_(-3)  # the copy's own
    assert torch.equal(generate(model, ids), expected)
    assert not torch.equal(generate(copied, ids), expected)


def test_prompts_are_not_in_fp8(device):
    model, ids = adapted(device, dtype=torch.bfloat16), tiny_inputs(device)
    handle = llmkernels.patch(model, fp8=True)
    generate(model, ids)
    assert "the weights have adapters beside them" in str(handle.report())
