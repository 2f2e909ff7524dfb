"""patch(training=True): LoRA layers of PEFT on lora_linear and add_lora."""

import copy
import pickle

import pytest
import torch
from torch import nn

import llmkernels
from hf_models import FAMILIES, LAYERS, assert_close, logits_of, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch
from llmkernels.hf.errors import UnknownLayout
from llmkernels.hf.modules import lora as layers
from llmkernels.ops import lora as op

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COUNT = len(TARGETS) * LAYERS
RUNS = "llmkernels::lora_linear"


def adapted(
    device="cpu", dtype=torch.float32, family="qwen2", names=("default",), autocast_adapter_dtype=True, **options
):
    """A model with adapters that change its outputs, in training mode."""
    config = peft.LoraConfig(
        **{"r": 4, "target_modules": TARGETS, "init_lora_weights": False, "lora_alpha": 6} | options
    )
    torch.manual_seed(3)
    model = tiny_model(family, device, dtype)
    model = peft.get_peft_model(model, config, names[0], autocast_adapter_dtype=autocast_adapter_dtype)
    for name in names[1:]:
        model.add_adapter(name, config, autocast_adapter_dtype=autocast_adapter_dtype)
    return model.train()


def runs(handle):
    return dict(handle.report()["lora"].runs)


def gradients(model, ids):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model, ids, tolerance=1e-4, expected_runs=None):
    """Loss and gradients are those of the unpatched model, and our op has run. Leaves the model unpatched."""
    expected_loss, expected = gradients(model, ids)
    handle = llmkernels.patch(model, training=True)
    loss, found = gradients(model, ids)
    assert runs(handle) == (expected_runs or {RUNS: COUNT})
    handle.unpatch()
    assert_close(loss, expected_loss, tolerance)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype, name
        assert_close(found[name], gradient, tolerance)
    repeated_loss, repeated = gradients(model, ids)
    assert torch.equal(repeated_loss, expected_loss)
    assert all(torch.equal(repeated[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family, device):
    model, ids = adapted(device, family=family), tiny_inputs(device)
    assert all("lora" in name for name in gradients(model, ids)[1])
    check(model, ids)


@pytest.mark.parametrize("wide", [True, False], ids=["float32_adapters", "narrow_adapters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_low_precision(split, dtype, wide, device, monkeypatch):
    """The error against float32 is at most that of the unpatched model and half as much again."""
    if split:
        pair = torch.bfloat16, torch.float32
        monkeypatch.setattr(op, "_splits", lambda y, x, a: (x.dtype, a.dtype) == pair and y.dtype == x.dtype)
    model, ids = adapted(device, dtype, autocast_adapter_dtype=wide), tiny_inputs(device)
    assert {p.dtype for n, p in model.named_parameters() if "lora" in n} == {torch.float32 if wide else dtype}
    _, oracle = gradients(copy.deepcopy(model).float(), ids)
    _, unpatched = gradients(model, ids)
    handle = llmkernels.patch(model, training=True)
    _, patched = gradients(model, ids)
    assert runs(handle) == {RUNS: COUNT}
    errors = {True: 0.0, False: 0.0}
    for name, expected in oracle.items():
        assert patched[name].dtype == unpatched[name].dtype
        for is_ours, found in ((True, patched), (False, unpatched)):
            errors[is_ours] += ((found[name].float() - expected).norm() / expected.norm()).item()
    assert errors[True] <= 1.5 * errors[False] + len(oracle) * torch.finfo(dtype).eps


def test_the_base_model_is_patched(device):
    """Its layers are PEFT's, though it is a model of transformers."""
    model, ids = adapted(device), tiny_inputs(device)
    expected = gradients(model, ids)[0]
    handle = llmkernels.patch(model.get_base_model(), training=True)
    assert len(handle.report()["lora"].patched) == COUNT
    assert_close(gradients(model, ids)[0], expected, 1e-4)
    assert runs(handle) == {RUNS: COUNT}
    unpatch(model)


def test_several_active_adapters(device):
    model = adapted(device, names=("first", "second", "third"))
    model.base_model.set_adapter(["first", "third"])
    found = gradients(model, tiny_inputs(device))[1]
    assert any("third" in name for name in found) and not any("second" in name for name in found)
    check(model, tiny_inputs(device))


def test_adapters_of_some_layers(device):
    model = adapted(device, names=("first",), target_modules=["q_proj", "up_proj"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
    check(model, tiny_inputs(device), expected_runs={RUNS: 2 * LAYERS, "without a kernel": LAYERS})
    model.set_adapter("second")
    check(model, tiny_inputs(device), expected_runs={RUNS: LAYERS, "without a kernel": 2 * LAYERS})
    handle = llmkernels.patch(model, training=True)
    assert "none of its adapters is active" in str(handle.report())


def test_trained_base_and_biases(device):
    model = adapted(device)
    model.requires_grad_(True)
    check(model, tiny_inputs(device))


def test_rank_stabilised_and_rescaled(device):
    model = adapted(device, use_rslora=True)
    check(model, tiny_inputs(device))
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(0.3)
    check(model, tiny_inputs(device))


def test_dropout(device):
    """In float32 by PEFT's own random numbers; in evaluation none."""
    model, ids = adapted(device, lora_dropout=0.3), tiny_inputs(device)
    assert not torch.equal(gradients(model, ids)[0], gradients(copy.deepcopy(model).eval(), ids)[0])
    check(model, ids)
    expected = logits_of(model.eval(), ids)
    handle = llmkernels.patch(model, training=True)
    assert_close(logits_of(model, ids), expected)
    assert runs(handle) == {RUNS: COUNT}


@pytest.mark.gpu
def test_dropout_in_16_bits():
    """Other random numbers than PEFT's: the mean of many results, and of many gradients, is that without dropout."""
    model = adapted("cuda", torch.bfloat16, lora_dropout=0.3, target_modules=["down_proj"])
    llmkernels.patch(model, training=True)
    layer = next(m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer))
    x = torch.randn(1, 88, device="cuda", dtype=torch.bfloat16).expand(20_000, 88)
    means = []
    for training in (True, False):
        layer.train(training)
        layer.zero_grad()
        y = layer(x)
        y.float().mean(0).sum().backward()
        means.append((y.float().mean(0), layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad))
    for found, expected in zip(*means, strict=True):
        assert_close(found, expected, 0.03)
    assert not torch.equal(layer.train()(x)[0], layer(x)[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device):
    model = adapted(device, lora_dropout=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    check(model, tiny_inputs(device), expected_runs={RUNS: 2 * COUNT})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_autocast(base, dtype, device):
    model = adapted(device, base)
    with torch.autocast(device, dtype):
        check(model, tiny_inputs(device), 4 * rounding(dtype))


def test_without_gradients(device):
    model, ids = adapted(device).eval(), tiny_inputs(device)
    expected = logits_of(model, ids)
    handle = llmkernels.patch(model, training=True)
    assert_close(logits_of(model, ids), expected)
    with torch.inference_mode():
        assert_close(model(ids).logits, expected)
    assert runs(handle) == {RUNS: 2 * COUNT}


def test_generation(device):
    """By the decode step: test_hf_lora_step.py. Where that can not run, by the modules."""
    model, ids = adapted(device).eval(), tiny_inputs(device)
    layer = next(m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer))
    layer.register_forward_hook(lambda module, args, output: output)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    handle = llmkernels.patch(model, training=True)
    assert "hooks on" in handle.report().decode[0].reason
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert runs(handle) == {RUNS: 6 * COUNT}


# --- PEFT's own forward


def check_fallback(model, reason, ids, runs_without=COUNT):
    """Patched, PEFT's own forward runs, and the report says why."""
    expected = gradients(model, ids)
    handle = llmkernels.patch(model, training=True)
    found = gradients(model, ids)
    assert_close(found[0], expected[0], 1e-4)
    assert runs(handle) == {"without a kernel": runs_without}
    assert reason in str(handle.report())
    assert not handle.report()["lora"].patched
    return handle


@pytest.mark.parametrize(
    "reason, options",
    [
        ("another kind of adapter, DoraLinearVariant", {"use_dora": True}),
        ("its adapter has a bias", {"lora_bias": True, "target_modules": TARGETS[:3]}),
    ],
)
def test_other_adapters(reason, options, device):
    model = adapted(device, **options)
    count = LAYERS * len(options.get("target_modules", TARGETS))
    check_fallback(model, reason, tiny_inputs(device), count)


def test_disabled_and_merged_adapters(device):
    model, ids = adapted(device), tiny_inputs(device)
    expected = logits_of(model, ids)
    with model.disable_adapter():
        without = logits_of(model, ids)
    handle = llmkernels.patch(model, training=True)
    with model.disable_adapter():
        assert_close(logits_of(model, ids), without)
        assert "its adapters are disabled" in str(handle.report())
    model.merge_adapter()
    assert_close(logits_of(model, ids), expected, 1e-4)
    assert "its adapters are merged" in str(handle.report())
    with model.disable_adapter():
        assert_close(logits_of(model, ids), without, 1e-4)  # unmerges
    assert runs(handle) == {"without a kernel": 3 * COUNT}
    assert_close(logits_of(model, ids), expected, 1e-4)
    assert runs(handle)[RUNS] == COUNT


def test_adapters_by_sample(device):
    model, ids = adapted(device, names=("first", "second")).eval(), tiny_inputs(device)
    names = ["second", "first"]
    with torch.no_grad():
        expected = model(ids, adapter_names=names).logits
        handle = llmkernels.patch(model, training=True)
        assert_close(model(ids, adapter_names=names).logits, expected)
    assert runs(handle) == {"without a kernel": COUNT}


def of_layer(name):
    """The submodule of a LoRA layer."""

    def get(layer):
        return getattr(layer, name) if name == "base_layer" else getattr(layer, name)["default"]

    return get


@pytest.mark.parametrize("name", ["lora_A", "lora_B", "lora_dropout"])
def test_hooks_on_the_adapter(name, device):
    model, ids = adapted(device, target_modules=["o_proj"]), tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    seen = []
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            of_layer(name)(module).register_forward_hook(lambda *call: seen.append(call))
    gradients(model, ids)
    assert len(seen) == LAYERS
    assert runs(handle) == {"without a kernel": LAYERS}
    assert "hooks" in str(handle.report())


def test_a_base_that_has_to_be_called(device):
    """One with a hook, and one of another class: the adapter's part runs on our op."""
    model, ids = adapted(device, target_modules=["o_proj"]), tiny_inputs(device)

    class Halved(nn.Linear):
        def forward(self, x):
            return super().forward(x) / 2

    first, second = (m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer))
    first.base_layer.__class__ = Halved
    second.base_layer.register_forward_hook(lambda module, args, output: output * 3)
    check(model, ids, expected_runs={RUNS: LAYERS})


def test_a_replaced_forward_runs(device, monkeypatch):
    model, ids = adapted(device), tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    original = peft.tuners.lora.layer.Linear.forward
    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "forward", lambda self, x: original(self, x) * 0)
    gradients(model, ids)
    assert runs(handle) == {"without a kernel": COUNT}
    assert "the forward of its class was replaced" in str(handle.report())
    handle.unpatch()
    handle = llmkernels.patch(model, training=True)
    assert "not PEFT's own" in str(handle.report())


def test_another_formula_is_left_alone(monkeypatch):
    """As in another version of PEFT."""
    linear = peft.tuners.lora.layer.Linear

    def without_scaling(self, x, *args, **kwargs):
        result = self.base_layer(x)
        for name in self.active_adapters:
            if name in self.lora_A:
                result = result + self.lora_B[name](self.lora_A[name](x.to(self.lora_A[name].weight.dtype)))
        return result.to(x.dtype)

    changed = type("Linear", (linear,), {"forward": without_scaling})
    monkeypatch.setattr(layers, "check_origin", lambda *_: None)
    with pytest.raises(UnknownLayout, match="computes something else"):
        layers.check_forward(changed, layers.forward_by_op(linear.forward))
    unknown = type("Linear", (linear,), {"forward": lambda self, x: self.new_member})
    with pytest.raises(UnknownLayout, match="AttributeError"):
        layers.check_forward(unknown, layers.forward_by_op(linear.forward))


# --- the patch around it


def test_not_asked_for(device):
    model = adapted(device)
    kinds = {name: type(module) for name, module in model.named_modules() if "proj" in name}
    handle = llmkernels.patch(model)
    assert "lora" not in handle.report().rows
    assert {name: type(module) for name, module in model.named_modules() if "proj" in name} == kinds
    handle.unpatch()
    assert "lora" not in llmkernels.patch(tiny_model(device=device), training=True).report().rows


def test_state_dict_and_classes(device):
    model = adapted(device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    handle = llmkernels.patch(model, training=True)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert isinstance(next(m for n, m in model.named_modules() if n.endswith("q_proj")), peft.tuners.lora.Linear)
    handle.unpatch()
    assert [type(module) for module in model.modules()] == classes


def test_saved_and_loaded_adapters(device, tmp_path):
    model, ids = adapted(device).eval(), tiny_inputs(device)
    llmkernels.patch(model, training=True)
    expected = logits_of(model, ids)
    model.save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(tiny_model(device=device), tmp_path)
    assert_close(logits_of(fresh, ids), expected)
    model.load_adapter(tmp_path, "again")
    model.set_adapter("again")
    assert_close(logits_of(model, ids), expected)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies(copied, device):
    model, ids = adapted(device), tiny_inputs(device)
    expected = gradients(model, ids)[0]
    handle = llmkernels.patch(model, training=True)
    twin = copied(model)
    handle.unpatch()
    assert_close(gradients(twin, ids)[0], expected, 1e-4)
    assert type(next(m for n, m in twin.named_modules() if n.endswith("q_proj"))).original is peft.tuners.lora.Linear
    unpatch(twin)
    assert torch.equal(gradients(twin, ids)[0], expected)


def test_merge_and_unload(device):
    model, ids = adapted(device).eval(), tiny_inputs(device)
    expected = logits_of(model, ids)
    llmkernels.patch(model, training=True)
    merged = model.merge_and_unload()
    assert not any(isinstance(module, peft.tuners.lora.LoraLayer) for module in merged.modules())
    assert_close(logits_of(merged, ids), expected, 1e-4)


def test_adapters_added_later_are_peft_s(device):
    model, ids = tiny_model(device=device), tiny_inputs(device)
    handle = llmkernels.patch(model, training=True)
    later = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).train()
    gradients(later, ids)
    assert list(handle.report()["lora"].left_alone.values()) == ["not patched"] * LAYERS


def test_compiled(device):
    torch._dynamo.reset()
    model, ids = adapted(device, target_modules=["q_proj", "down_proj"]), tiny_inputs(device)
    expected = gradients(model, ids)
    handle = llmkernels.patch(model, training=True)
    found = gradients(torch.compile(model, backend="aot_eager"), ids)
    assert_close(found[0], expected[0], 1e-4)
    assert not runs(handle)


def test_training_lowers_the_loss_as_before(device):
    def curve(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for step in range(12):
            losses.append(gradients(model, tiny_inputs(device, seed=step % 2))[0])
            optimizer.step()
        return torch.stack(losses)

    model = adapted(device, init_lora_weights=True)
    twin = copy.deepcopy(model)
    llmkernels.patch(model, training=True)
    found, expected = curve(model), curve(twin)
    assert expected[-1] < 0.9 * expected[0]
    assert_close(found, expected, 1e-3)
