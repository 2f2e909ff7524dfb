"""Which way a call goes: by the decode step only where nobody has anything to say about what it leaves out."""

import functools
import threading
import types

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2 import modeling_qwen2

import llmkernels
from generating import NEW, check_falls_back, check_steps, generate_step, hf_generate, runs_steps, small_model
from hf_models import LAYERS, OPS, assert_close, count_ops, logits_of, lora, tiny_inputs, tiny_model
from llmkernels.hf import unpatch
from llmkernels.hf.step import describe, packing
from llmkernels.hf.step.decode import decoder


def stays_on_the_step(model, ids):
    """The patched model generates by the step what it generates unpatched."""
    assert describe.why_not(model) is None
    calls, steps = decoder(model).calls[generate_step()], decoder(model).steps
    found = hf_generate(model, ids)
    assert decoder(model).calls[generate_step()] == calls + 1
    assert decoder(model).steps >= steps + NEW - 1
    unpatch(model)
    assert torch.equal(found, hf_generate(model, ids))


def leaves_the_step(model, ids, reason):
    """The patched model generates by its modules what it generates unpatched. Leaves it patched."""
    assert reason in str(describe.why_not(model))
    assert not runs_steps(hf_generate, model, ids)
    found = hf_generate(model, ids)
    unpatch(model)
    assert torch.equal(found, hf_generate(model, ids))
    llmkernels.patch(model)


# --- weights that are no plain tensors


class Doubling(torch.Tensor):
    """A weight that linear() takes twice."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) * 2 if function is F.linear else result


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj", "lm_head"])
def test_a_weight_of_a_tensor_subclass(name, device):
    model = small_model(device=device)
    linear = model.get_submodule(name)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Doubling), requires_grad=False)
    check_falls_back(model, tiny_inputs(device), f"a weight of {name} is a Doubling")


@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.self_attn.o_proj", "lm_head"])
def test_a_weight_of_another_dtype_or_layout(name, device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    weight = model.get_submodule(name).weight
    if weight.ndim == 2:
        weight.data = weight.data.t().contiguous().t()
        leaves_the_step(model, ids, "no ordinary memory")
    weight.data = weight.data.double().contiguous()
    assert describe.why_not(model) == "weights differ in dtype or device"


# --- weights replaced after the first call


def replace(model, how):
    linear = model.model.layers[0].self_attn.k_proj
    if how == "data":
        linear.weight.data = linear.weight.data.clone()
    elif how == "assign":
        state = {"weight": linear.weight.detach().clone() * 2, "bias": linear.bias.detach().clone()}
        linear.load_state_dict(state, assign=True)
    elif how == "prune":
        prune.random_unstructured(linear, "weight", amount=0.5)
        prune.remove(linear, "weight")
    elif how == "parametrize":
        parametrize.register_parametrization(linear, "weight", nn.Identity())
        parametrize.remove_parametrizations(linear, "weight")
    elif how == "merge":
        return lora(model).merge_and_unload()
    return model


@pytest.mark.parametrize("how", ["data", "assign", "prune", "parametrize", "merge"])
def test_a_weight_replaced_is_packed_again(how, device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    layer = model.model.layers[1]
    kept = layer.self_attn.q_proj.weight.data_ptr()
    model = replace(model, how)
    hf_generate(model, ids)
    if how not in ("merge",):
        assert layer.self_attn.q_proj.weight.data_ptr() == kept  # only what changed
    stays_on_the_step(model, ids)
    llmkernels.patch(model)
    stays_on_the_step(model, ids)


@pytest.mark.parametrize("how", ["data", "assign", "prune", "parametrize"])
def test_unpatch_leaves_tensors_of_their_own(how, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    hf_generate(model, ids)
    replace(model, how)
    handle.unpatch()
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        assert storage.nbytes() == parameter.nbytes and storage.resizable()
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    assert len(safetensors.load_file(tmp_path / "model.safetensors")) == len(list(model.parameters()))


def test_a_packed_weight_is_saved_alone(tmp_path):
    model, ids = small_model(), tiny_inputs()
    plain = model.model.layers[0].self_attn.q_proj
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    llmkernels.patch(model)
    hf_generate(model, ids)
    assert packing.packed([plain.weight]) is not None
    torch.save(plain.state_dict(), tmp_path / "packed.pt")
    assert (tmp_path / "packed.pt").stat().st_size < (tmp_path / "plain.pt").stat().st_size + 512


def test_packing_waits_for_readers(monkeypatch):
    """The old memory of a weight is there until the operations that may have it have ended."""
    monkeypatch.setattr(packing, "_LONGEST_WAIT", 30)
    weight, x = nn.Parameter(torch.ones(2048, 2048), requires_grad=False), torch.ones(2048, 2048)
    order = []
    reader = threading.Thread(target=lambda: (F.linear(x, weight), order.append("read")))
    reader.start()
    while weight._use_count() == 1 and reader.is_alive():
        pass
    packing.pack([[weight]])
    order.append("packed")
    reader.join()
    assert order == ["read", "packed"]


def test_packing_waits_for_writers(monkeypatch):
    """A method of the weight itself, as of load_state_dict and of optimizers, does not hold it."""
    monkeypatch.setitem(packing._SHORTEST_WAIT, "cpu", 5)
    weight, order = nn.Parameter(torch.zeros(4096, 4096), requires_grad=False), []
    old = weight.data  # what is written to is there in any case
    begun = threading.Event()

    def write():
        begun.set()
        weight.lgamma_()
        order.append("written")

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    while not bool(old.flatten()[0]):
        pass
    packing.pack([[weight]])
    order.append("packed")
    writer.join()
    assert order == ["written", "packed"]


def test_packing_does_not_wait_for_a_graph():
    layer = nn.Linear(4, 4)
    expected, kept = layer.weight.detach().clone(), layer(torch.ones(4))
    packing.pack([[layer.weight]])
    assert packing.packed([layer.weight]) is not None
    kept.sum().backward()
    assert torch.equal(layer.weight, expected) and torch.equal(layer.weight.grad, torch.ones(4, 4))


# --- leftovers that do nothing


def test_gradient_checkpointing(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    model.gradient_checkpointing_enable()
    model.train()(ids, labels=ids).loss.backward()
    model.eval()
    assert describe.why_not(model) is None
    model.gradient_checkpointing_disable()
    stays_on_the_step(model, ids)


def autocast_forward(model, dtype):
    """What accelerate does to a model for mixed precision."""
    operations = pytest.importorskip("accelerate.utils.operations")
    model._original_forward = model.forward
    context = torch.autocast(device_type=model.device.type, dtype=dtype)
    forward = types.MethodType(context(model.forward.__func__), model)
    model.forward = types.MethodType(operations.convert_outputs_to_fp32(forward.__func__), model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_autocast_to_the_dtype_of_the_weights(when, device):
    model, _ids = small_model(device=device, dtype=torch.bfloat16), tiny_inputs(device)
    if when == "before":
        autocast_forward(model, torch.bfloat16)
    llmkernels.patch(model)
    if when == "after":
        autocast_forward(model, torch.bfloat16)
    assert describe.why_not(model) is None
    model.float()
    assert "Qwen2ForCausalLM has a forward of its own" in describe.why_not(model)


def test_unwrapped_by_accelerate(device):
    accelerate = pytest.importorskip("accelerate")
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    autocast_forward(model, torch.bfloat16)
    leaves_the_step(model, ids, "has a forward of its own")
    accelerate.utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert "forward" in vars(model)
    stays_on_the_step(model, ids)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model, ids = small_model(dtype=torch.bfloat16), tiny_inputs()
    llmkernels.patch(model)
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, bf16=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    model.eval()
    assert describe.why_not(model) is None
    assert runs_steps(hf_generate, model, ids)


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_hooks_of_accelerate_that_do_nothing(when, device):
    """Hooks before and after the patch, and what removing them leaves behind: a forward on the instance."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = small_model(device=device), tiny_inputs(device)
    linear, norm = model.model.layers[0].mlp.down_proj, model.model.norm
    if when == "after":
        llmkernels.patch(model)
    for module in (linear, norm):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=device, io_same_device=True))
    if when == "after":
        assert describe.why_not(model) is None
        hooks.add_hook_to_module(linear, hooks.AlignDevicesHook(execution_device=device, offload=True))
        assert "down_proj has a forward of its own" in describe.why_not(model)
    if when == "between":
        report = llmkernels.patch(model).report()
        assert "own" in report["rms_norm"].left_alone["model.norm"]
        unpatch(model)
    hooks.remove_hook_from_submodules(model)
    assert "forward" in vars(norm)
    if when != "after":
        llmkernels.patch(model)
    assert count_ops(model, ids) == OPS
    stays_on_the_step(model, ids)


# --- what is not noticed on the modules


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen2MLP", "gated_mlp"),
        ("Qwen2RMSNorm", "rms_norm"),
        ("Qwen2DecoderLayer", "add_rms_norm"),
        ("Qwen2Attention", "rope"),
    ],
)
def test_the_forward_of_a_class_replaced_after_patch(name, kind, monkeypatch):
    cls = getattr(modeling_qwen2, name)
    original = cls.forward

    def forward(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        return (result[0] * 1.5, *result[1:]) if isinstance(result, tuple) else result * 1.5

    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    plain = logits_of(model, ids)
    hf_generate(model, ids)
    monkeypatch.setattr(cls, "forward", forward)
    found = logits_of(model, ids)
    assert not torch.allclose(found, plain, atol=1e-2)
    assert set(handle.report()[kind].left_alone.values()) == {"the forward of its class was replaced"}
    reason = describe.why_not(model)
    assert "has another forward: that of its class was replaced" in reason
    text = hf_generate(model, ids)
    unpatch(model)
    assert_close(found, logits_of(model, ids))
    assert torch.equal(text, hf_generate(model, ids))


@pytest.mark.parametrize(
    ("name", "part"),
    [("Qwen2ForCausalLM", "logits"), ("Qwen2Model", "last_hidden_state"), ("Qwen2RotaryEmbedding", None)],
)
def test_the_forward_of_a_class_that_nobody_patches_replaced(name, part, monkeypatch):
    cls = getattr(modeling_qwen2, name)
    original = cls.forward

    def forward(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if part is None:
            return result[0].roll(1, -2), result[1].roll(1, -2)
        result[part] = -result[part]
        return result

    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    plain = hf_generate(model, ids)
    monkeypatch.setattr(cls, "forward", forward)
    assert describe.why_not(model)
    text = hf_generate(model, ids)
    assert part is None or not torch.equal(text, plain)
    unpatch(model)
    assert torch.equal(text, hf_generate(model, ids))


def replaced_linear(monkeypatch, original=F.linear):
    monkeypatch.setattr(F, "linear", lambda *args: original(*args) * 1.1)


def replaced_linear_forward(monkeypatch, original=nn.Linear.forward):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: original(self, x) * 1.1)


def replaced_call(monkeypatch, original=nn.Module.__call__):
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args, **kwargs: original(self, *args, **kwargs))


def replaced_mask(monkeypatch, original=modeling_qwen2.create_causal_mask):
    monkeypatch.setattr(modeling_qwen2, "create_causal_mask", lambda *args, **kwargs: original(*args, **kwargs))


@pytest.mark.parametrize("how", [replaced_linear, replaced_linear_forward, replaced_call, replaced_mask])
def test_functions_of_torch_and_transformers_replaced(how, monkeypatch):
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    hf_generate(model, ids)
    how(monkeypatch)
    leaves_the_step(model, ids, "")


class Scaling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        return result * 1.1 if function is F.linear else result


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [Scaling, Watching])
def test_active_modes(mode):
    model, ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    with mode():
        leaves_the_step(model, ids, f"{mode.__name__}, an active mode")
    stays_on_the_step(model, ids)


def test_default_device_is_no_mode_that_sees_anything():
    model, _ids = small_model(), tiny_inputs()
    llmkernels.patch(model)
    with torch.device("cpu"):
        assert describe.why_not(model) is None


def test_dropout_in_one_attention(device):
    model, ids = small_model(device=device, attention_dropout=0.5), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    model.model.layers[1].self_attn.train()
    leaves_the_step(model, ids, "model.layers.1.self_attn is in training mode")


def test_linears_in_training_mode_compute_the_same(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    model.lm_head.train()
    stays_on_the_step(model, ids)


# --- what the report claims


def test_report_of_a_forward_on_the_instance():
    model, _ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    for name in ("model.norm", "model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.1"):
        module = model.get_submodule(name)
        module.forward = functools.partial(type(module).forward, module)
    report = handle.report()
    for kind, name in (
        ("rms_norm", "model.norm"),
        ("gated_mlp", "model.layers.0.mlp"),
        ("rope", "model.layers.1.self_attn"),
        ("add_rms_norm", "model.layers.1"),
    ):
        assert report[kind].left_alone == {name: "it has a forward of its own, set on the instance"}


def test_report_counts_what_ran():
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    assert not any(row.runs for row in handle.report().rows.values())
    logits_of(model, ids)
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: None)
    logits_of(model, ids)
    report = handle.report()
    assert report["rms_norm"].runs == {
        "llmkernels::rms_norm": 2 * (LAYERS + 1),
        "llmkernels::add_rms_norm": 2 * LAYERS,
    }
    assert report["add_rms_norm"].runs == {"llmkernels::add_rms_norm": 2 * LAYERS}
    assert report["rope"].runs == {"llmkernels::rope": 2 * LAYERS}
    assert report["gated_mlp"].runs == {"llmkernels::swiglu": 2 * LAYERS - 1, "without a kernel": 1}
    assert "llmkernels::rope 4 times" in str(report)
    handle.unpatch()
    llmkernels.patch(model)
    assert not any(row.runs for row in handle.report().rows.values())


def test_report_of_norms_of_another_dtype():
    model, ids = tiny_model(dtype=torch.bfloat16), tiny_inputs()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    handle = llmkernels.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits_of(model, ids)
    report = handle.report()
    assert set(report["add_rms_norm"].left_alone.values()) == {"post_attention_layernorm has another dtype"}
    assert report["rms_norm"].kernels == {"llmkernels::rms_norm": 2 * LAYERS + 1}
    assert report["add_rms_norm"].runs == {"without a kernel": LAYERS}


def test_report_of_calls_without_a_step(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    hf_generate(model, ids, max_new_tokens=1)
    llmkernels.generate(model, ids, max_new_tokens=1)
    (entry,) = handle.report().decode
    assert entry.calls == {"by the prefill alone": 2} and entry.steps == 0
    hf_generate(model, ids)
    llmkernels.generate(model, ids, max_new_tokens=NEW)
    (entry,) = handle.report().decode
    assert entry.calls == {"by the prefill alone": 2, generate_step(): 2} and entry.steps >= 2 * (NEW - 1)


def test_report_of_a_prefill_that_fails():
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model)

    def fail(*_):
        raise RuntimeError("out of luck")

    with model.model.rotary_emb.register_forward_hook(fail), pytest.raises(RuntimeError, match="out of luck"):
        hf_generate(model, ids)
    model.model.rotary_emb._forward_hooks.clear()
    assert generate_step() not in handle.report().decode[0].calls


def test_report_of_other_loops(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    loop = type(model).original._sample
    hf_generate(model, ids, custom_generate=lambda model, *args, **kwargs: loop(model, *args, **kwargs))
    assert handle.report().decode[0].calls == {"by custom_generate": 1}
    model.init_continuous_batching()  # as generate_batch does
    assert handle.report().decode[0].calls["by transformers: continuous batching"] == 1


def test_the_norm_behind_attention_without_rms_norm():
    """It is fused, and where it can not be it is transformers' own."""
    model, ids = tiny_model(), tiny_inputs()
    before = logits_of(model, ids)
    handle = llmkernels.patch(model, rms_norm=False)
    report = handle.report()
    assert report["rms_norm"].patched == [f"model.layers.{i}.post_attention_layernorm" for i in range(LAYERS)]
    assert report["rms_norm"].kernels == {"llmkernels::add_rms_norm": LAYERS}
    assert set(report["rms_norm"].left_alone.values()) == {"not asked for"}
    assert count_ops(model, ids) == {op: n for op, n in OPS.items() if op != "rms_norm"}
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: None)
    assert count_ops(model, ids) == {"add_rms_norm": LAYERS - 1, "rope": LAYERS, "swiglu": LAYERS}
    assert_close(logits_of(model, ids), before)
    handle.unpatch()
    assert torch.equal(logits_of(model, ids), before)


def test_an_activation_that_is_a_function():
    model, ids = tiny_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    before = logits_of(model, ids)
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = F.silu
    assert set(handle.report()["gated_mlp"].left_alone.values()) == {"no kernel for its activation, silu"}
    assert_close(logits_of(model, ids), before)
    handle.unpatch()
    assert "no kernel for its activation, silu" in str(llmkernels.patch(model).report())


# --- handles and threads


def test_an_old_handle_leaves_a_newer_patch_alone():
    model, ids = tiny_model(), tiny_inputs()
    old = llmkernels.patch(model)
    unpatch(model)
    new = llmkernels.patch(model)
    old.unpatch()
    assert count_ops(model, ids) == OPS
    assert len(new.report()["rope"].patched) == LAYERS
    assert set(old.report()["rope"].left_alone.values()) == {"not patched"}
    new.unpatch()
    assert count_ops(model, ids) == {}


def test_patch_and_unpatch_while_others_generate():
    """Each call has the tokens of the model, and the last unpatch leaves plain weights."""
    model, ids = small_model(), tiny_inputs()
    expected = hf_generate(model, ids, max_new_tokens=20)
    stop, found, errors = threading.Event(), [], []

    def work(lean):
        try:
            while not stop.is_set():
                call = functools.partial(llmkernels.generate, model) if lean else model.generate
                found.append(call(ids, max_new_tokens=20, do_sample=False))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i == 0,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        handle = llmkernels.patch(model)
        stop.wait(0.2)
        handle.unpatch()
        stop.wait(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(found) > 3 and all(torch.equal(text, expected) for text in found)
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert type(model) is transformers.Qwen2ForCausalLM
    check_steps(model, ids)
