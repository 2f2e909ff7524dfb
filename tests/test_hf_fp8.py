"""Prompts in FP8: patch(model, fp8=True), against the model's own forward with every linear layer of its decoder layers
quantized in plain PyTorch."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import BitNetForCausalLM, DynamicCache, LlamaForSequenceClassification
from transformers.pytorch_utils import Conv1D

import llmkernels
from families import family_model
from generating import hf_generate, small_model
from hf_models import assert_close, count_ops, lora, tiny_inputs, tiny_model
from llmkernels.hf import unpatch
from llmkernels.hf.report import STEP, STEP_IN_FP8
from llmkernels.hf.step import fp8, prompt
from llmkernels.hf.step.decode import decoder
from prompting import compose_forwards, prompts, run_padded
from test_family_strangers import made
from test_forward import DESCRIBED
from test_fp8_linear import devices_with_products

BATCH, TOKENS = 5, 5  # as many as a window of the families has room for
LARGEST = 448.0  # of float8_e4m3fn
# How far logits of these small models are from those without FP8, of the largest. Measured: 0.06 to 0.3.
LOOSE = 0.5
# In half precision, how far they may be from those of the same quantization, of how far FP8 moves them: rounding errors
# move FP8 numbers to the next ones.
OF_FP8 = 0.75


@pytest.fixture(autouse=True)
def by_forward(monkeypatch):
    """Small prompts too are composed, and in FP8."""
    compose_forwards(monkeypatch)
    monkeypatch.setattr(prompt, "_FP8_ROWS", 17)


@pytest.fixture
def in_float32(monkeypatch):
    """FP8 beside float32, so that one can tell a wrong number from a rounding error."""
    monkeypatch.setattr(fp8, "_DTYPES", {torch.float32})


def rounded(x):
    """x rounded to FP8 with a scale for each row, in float64."""
    scale = (x.float().abs().amax(-1, keepdim=True) / LARGEST).clamp(min=2.0**-126)
    q = (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q.double() * scale.double()


def of_layers(model):
    parts = {name: x for name, x in model.named_modules() if isinstance(x, (nn.Linear, Conv1D))}
    return {name: x for name, x in parts.items() if ".layers." in name or ".h." in name}


def quantized(model, but=()):
    """A copy of a model whose decoder layers multiply in FP8, but for some products."""
    model = copy.deepcopy(model)

    def product(linear, args, _):
        weight = linear.weight.mT if isinstance(linear, Conv1D) else linear.weight
        y = rounded(args[0]) @ rounded(weight).mT
        return (y if linear.bias is None else y + linear.bias.double()).to(args[0].dtype)

    for name, linear in of_layers(model).items():
        if name not in but:
            linear.register_forward_hook(product)
    return model


def ids_of(device="cpu", tokens=TOKENS, seed=1):
    return tiny_inputs(device, BATCH, tokens, seed=seed)


def half_precision_model(device="cpu", dtype=torch.bfloat16, **changes):
    return small_model("llama", device, dtype=dtype, **changes)


def distance(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_same_fp8(found, expected):
    """Equal up to rounding in float32; but in less than half of the sequences one number may be the next one in FP8."""
    errors = (found - expected).abs().amax((1, 2)) / expected.abs().max()
    assert errors.median() <= 1e-5, f"relative errors {errors.tolist()}"


@pytest.mark.parametrize("how", ["padded", "as it is"])
@pytest.mark.parametrize("name", DESCRIBED)
@torch.no_grad()
def test_logits(name, how, in_float32, monkeypatch):
    """All of them, as the same quantization gives them; in the second call launched before the model is checked."""
    if how == "padded":
        run_padded(monkeypatch)
    model, ids = family_model(name), ids_of()
    expected, exact = quantized(model)(ids).logits, model(ids).logits
    handle = llmkernels.patch(model, fp8=True)
    for _ in range(2):
        found = model(ids).logits
        assert_same_fp8(found, expected)
        assert_close(found, exact, LOOSE)
        assert distance(found, exact) > 0.02
    assert prompts(model) == {STEP_IN_FP8: 2}
    assert "prompts: 2 by the decode step in FP8" in str(handle.report())


@torch.no_grad()
def test_norms_before_the_last_product(in_float32):
    """Those inside of the blocks of BitNet: a norm stands between SwiGLU and quantization."""
    for activation in ("relu2", "silu"):
        model, ids = made(BitNetForCausalLM, hidden_act=activation), ids_of()
        expected = quantized(model)(ids).logits
        llmkernels.patch(model, fp8=True)
        assert_same_fp8(model(ids).logits, expected)
        assert prompts(model) == {STEP_IN_FP8: 1}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "starcoder2", "phi"])
@torch.no_grad()
def test_each_product_is_in_fp8(name, in_float32):
    """Would one be in float32, it would show."""
    model, ids = family_model(name), ids_of()
    products = of_layers(model)
    without = {name: quantized(model, [name])(ids).logits for name in products}
    llmkernels.patch(model, fp8=True)
    found = model(ids).logits
    assert all(distance(found, other) > 5e-3 for other in without.values())


@devices_with_products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "granite", "olmo2", "starcoder2", "cohere", "phi"])
@torch.no_grad()
def test_half_precision(name, dtype, device):
    """On a GPU by a graph from the third call on, which the other prompts of its length replay."""
    model = family_model(name, device, dtype)
    calls = [ids_of(device, seed=seed) for seed in (1, 1, 1, 2)]
    expected = [(quantized(model)(ids).logits, model(ids).logits) for ids in calls]
    handle = llmkernels.patch(model, fp8=True)
    for ids, (same, exact) in zip(calls, expected, strict=True):
        found = model(ids).logits
        assert found.dtype is dtype
        assert distance(found, same) < OF_FP8 * distance(exact, same)
        assert_close(found, exact, LOOSE)
    assert prompts(model) == {STEP_IN_FP8: 4}
    handle.unpatch()


def test_the_ops_of_a_prompt():
    """All products of layers, and of the fused ones those that there are; the head stays."""
    model, ids = half_precision_model(), ids_of()
    llmkernels.patch(model, fp8=True)
    count_ops(model, ids)
    assert count_ops(model, ids) == {
        "embed_tokens_": 1,
        "rms_norm_fp8_quantize": 1,
        "fp8_quantize": 5,
        "swiglu_fp8_quantize": 2,
        "fp8_linear": 8,
        "rope_kv_write": 2,
        "attention": 2,
        "add_rms_norm": 4,
        "rms_norm_linear": 1,
    }


@pytest.mark.parametrize("name", ["llama", "gemma2", "starcoder2"])
@torch.no_grad()
def test_hidden_states(name, in_float32):
    model, ids = family_model(name), ids_of()
    expected = quantized(model)(ids, output_hidden_states=True).hidden_states
    llmkernels.patch(model, fp8=True)
    found = model(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_fp8(ours, theirs)
    assert prompts(model) == {STEP_IN_FP8: 1}


@torch.no_grad()
def test_packed_prompts(in_float32, monkeypatch):
    """Of different lengths, one after the other."""
    monkeypatch.setattr(prompt, "PACKED_DEVICES", {"cpu"})
    model, ids = family_model("llama"), ids_of(tokens=12)
    mask = torch.ones_like(ids)
    for row in range(BATCH):
        mask[row, : 2 * row] = 0
    expected = quantized(model)(ids, attention_mask=mask).logits[:, -1:]
    llmkernels.patch(model, fp8=True)
    assert_same_fp8(model(ids, attention_mask=mask, logits_to_keep=1).logits, expected)
    assert prompts(model) == {STEP_IN_FP8: 1}


@devices_with_products
def test_generate(device):
    """The prompt in FP8, the steps not: given the same cache they are those of a model without FP8, bit for bit."""
    model = half_precision_model(device)
    other, ids = copy.deepcopy(model), ids_of(device, 9)
    handle = llmkernels.patch(model, fp8=True)
    llmkernels.patch(other)
    options = {"return_dict_in_generate": True, "output_logits": True}
    found = hf_generate(model, ids, **options)
    assert prompts(model) == {STEP_IN_FP8: 1}
    assert handle.report().decode[0].calls == {STEP: 1}
    lean = llmkernels.generate(model, ids, max_new_tokens=8)
    assert torch.equal(lean, found.sequences)
    cache, text = DynamicCache(config=model.config), found.sequences
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
    with torch.no_grad():
        for position in range(9, 16):
            step = other(text[:, position : position + 1], past_key_values=cache)
            assert torch.equal(step.logits[:, -1].float(), found.logits[position - 8])
    unpatch(model), unpatch(other)


@torch.no_grad()
def test_short_prompts_and_those_behind_a_cache():
    """Few tokens run in 16 bits, as steps do; many behind a cache in FP8."""
    model = half_precision_model()
    other = copy.deepcopy(model)
    llmkernels.patch(model, fp8=True)
    llmkernels.patch(other)
    few = tiny_inputs(batch=1, tokens=16)
    assert torch.equal(model(few).logits, other(few).logits)
    assert prompts(model) == {STEP: 1}
    cache = llmkernels.KVCache(model, 100)
    text = tiny_inputs(batch=2, tokens=60)
    for end, way in ((4, STEP), (20, STEP), (60, STEP_IN_FP8)):
        before = prompts(model)[way]
        model.generate(text[:, :end], past_key_values=cache, max_new_tokens=1, do_sample=False)
        assert prompts(model)[way] == before + 1


# --- weights that change


def write_in_place(model):
    for parameter in model.parameters():
        parameter.mul_(1.25)


def load(model):
    model.load_state_dict({name: 1.25 * x for name, x in model.state_dict().items()})


def assign(model):
    model.load_state_dict({name: 1.25 * x for name, x in model.state_dict().items()}, assign=True)


def set_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.25


def replace(model):
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(1.25 * layer.weight)


def train(model, fused=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def train_by_our_optimizer(model):
    optimizer = llmkernels.optim.AdamW(model.parameters(), lr=0.05)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def write_data_after_gradients(model):
    """As optimizers do that are none of PyTorch's."""
    with torch.enable_grad():
        model(ids_of()).logits.float().sum().backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad.sign(), alpha=-0.05)


def write_data_and_release(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.25)
    llmkernels.release(model)


CHANGES = [
    write_in_place,
    load,
    assign,
    set_data,
    replace,
    train,
    train_by_our_optimizer,
    write_data_after_gradients,
    write_data_and_release,
]


@pytest.mark.parametrize("how", ["padded", "as it is"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["llama", "granite"])  # whose biases are copied, too
@torch.no_grad()
def test_changed_weights(name, change, how, in_float32, monkeypatch):
    """Prompts never run by copies of weights that are others now."""
    if how == "padded":
        run_padded(monkeypatch)
    model, ids = family_model(name), ids_of()
    llmkernels.patch(model, fp8=True)
    for _ in range(2):
        before = model(ids).logits
    change(model)
    plain = copy.deepcopy(model)
    unpatch(plain)
    expected = quantized(plain)(ids).logits
    assert distance(before, expected) > 1e-2
    for _ in range(2):
        assert_same_fp8(model(ids).logits, expected)
    assert prompts(model) == {STEP_IN_FP8: 4}


@torch.no_grad()
def test_changed_while_the_model_was_another_one(in_float32):
    """It is what it was described as again, but for its weights, which PEFT writes through `.data`."""
    model, ids = small_model("llama"), ids_of()
    llmkernels.patch(model, fp8=True)
    model(ids)
    adapted = lora(model)
    adapted(ids)
    merged = adapted.merge_and_unload()
    plain = copy.deepcopy(merged)
    unpatch(plain)
    merged(ids)  # by the modules: a model that had no step is not read for each call
    assert_same_fp8(merged(ids).logits, quantized(plain)(ids).logits)
    ways = prompts(model)
    assert ways[STEP_IN_FP8] == 2 and ways.total() == 4


@torch.no_grad()
def test_copies_are_made_once(monkeypatch):
    """And again for what has changed alone: not for a step of an optimizer of others, nor for norms."""
    made = []
    original = fp8._quantized
    monkeypatch.setattr(fp8, "_quantized", lambda *product: made.append(product) or original(*product))
    model, ids = half_precision_model(), ids_of()
    llmkernels.patch(model, fp8=True)
    for _ in range(3):
        model(ids)
    hf_generate(model, ids)
    train(tiny_model("llama"))
    model(ids)
    model.model.norm.weight.mul_(2)
    model.lm_head.weight.mul_(2)
    model(ids)
    assert len(made) == 8
    model.model.layers[0].mlp.up_proj.weight.mul_(2)
    model(ids)
    assert len(made) == 16


# --- memory, copies, threads


def copies_of(model):
    return [weakref.ref(copy.weight) for copy in decoder(model).fp8._copies]


def release_model(model, handle):
    llmkernels.release(model)


def release_handle(model, handle):
    handle.release()


def undo(model, handle):
    handle.unpatch()


def have_gradients(model, handle):
    with torch.enable_grad():
        model(ids_of())


def become_float32(model, handle):
    model.float()
    model(ids_of())


@pytest.mark.parametrize("how", ["padded", "as it is"])
@pytest.mark.parametrize("free", [release_model, release_handle, undo, have_gradients, become_float32])
@torch.no_grad()
def test_memory(free, how, monkeypatch):
    if how == "padded":
        run_padded(monkeypatch)
    model, ids = half_precision_model(), ids_of()
    handle = llmkernels.patch(model, fp8=True)
    assert str(handle.report().decode[0].fp8) == "prompts in FP8"
    for tokens in (5, 6, 7):
        model(ids_of(tokens=tokens))
        hf_generate(model, ids)
    weights = sum(linear.weight.nbytes for linear in of_layers(model).values())
    assert 0.5 * weights < handle.report().decode[0].fp8.nbytes < 0.55 * weights
    assert "prompts in FP8, with weights of 0." in str(handle.report())
    copies = copies_of(model)
    assert len(copies) == 8
    free(model, handle)
    gc.collect()
    assert all(copy() is None for copy in copies)
    if free is not undo:
        assert not handle.report().decode[0].fp8.nbytes


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_duplicates(duplicate):
    """They are patched, too, with FP8 weights of their own."""
    model, ids = half_precision_model(), ids_of()
    llmkernels.patch(model, fp8=True)
    found = model(ids).logits
    other = duplicate(model)
    assert torch.equal(other(ids).logits, found)
    assert prompts(other) == {STEP_IN_FP8: 1}
    write_in_place(other)
    assert not torch.equal(other(ids).logits, found)
    assert torch.equal(model(ids).logits, found)
    unpatch(other)
    assert not hasattr(other, "prompts_in_fp8")


@torch.no_grad()
def test_unpatch():
    model, ids = half_precision_model(), ids_of()
    expected = model(ids).logits
    handle = llmkernels.patch(model, fp8=True)
    model(ids)
    handle.unpatch()
    assert torch.equal(model(ids).logits, expected)
    handle = llmkernels.patch(model)
    model(ids)
    assert prompts(model) == {STEP: 1}
    assert handle.report().decode[0].fp8 is None and "FP8" not in str(handle.report())


@devices_with_products
def test_threads(device):
    """Prompts at the same time, on streams of their own, with weights that are made by one of them."""
    model = half_precision_model(device)
    calls = [ids_of(device, 9, seed) for seed in range(6)]
    expected = []
    with torch.no_grad(), llmkernels.patch(model, fp8=True):
        expected = [model(ids).logits for ids in calls]
    handle, found = llmkernels.patch(model, fp8=True), {}

    def run(index):
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                logits = model(calls[index]).logits
            found[index] = logits.cpu()

    if device == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prompts(model) == {STEP_IN_FP8: 3 * len(calls)}
    for index, logits in enumerate(expected):
        assert_close(found[index].float(), logits.cpu().float(), LOOSE if device == "cuda" else 0)
    handle.unpatch()


# --- where it can not be


def check_not_in_fp8(model, reason, way=STEP):
    """The report says why, and the prompt runs as without it."""
    ids, other = ids_of(model.device), copy.deepcopy(model)
    handle = llmkernels.patch(model, fp8=True)
    llmkernels.patch(other)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)
    report = handle.report()
    assert report.decode[0].fp8.reason == reason
    assert f"prompts not in FP8: {reason}" in str(report)
    assert "fp8" in report.left_alone()
    assert prompts(model) == prompts(other) and STEP_IN_FP8 not in prompts(model)
    if way is not None:
        assert prompts(model) == {way: 1}
    unpatch(model), unpatch(other)


def test_float32():
    check_not_in_fp8(small_model(), "the weights are torch.float32")


def test_weights_whose_changes_are_not_counted():
    with torch.inference_mode():
        model = half_precision_model()
        reason = "a weight was made in inference mode"
        handle = llmkernels.patch(model, fp8=True)
        model(ids_of())
        assert reason in str(handle.report())
        assert STEP_IN_FP8 not in prompts(model)


@pytest.mark.gpu
def test_older_gpus(monkeypatch):
    monkeypatch.setattr(fp8, "_LEAST_CAPABILITY", (99, 0))
    found = ".".join(map(str, torch.cuda.get_device_capability()))
    reason = f"the GPU has compute capability {found}, and products of FP8 need 99.0"
    check_not_in_fp8(half_precision_model("cuda"), reason)


def test_models_without_a_step():
    model = family_model("mixtral", dtype=torch.bfloat16)
    check_not_in_fp8(model, "MixtralForCausalLM has experts, which are left to transformers", None)


def test_adapters():
    model = lora(half_precision_model())
    handle = llmkernels.patch(model, fp8=True)
    with torch.no_grad():
        model(ids_of())
    entry = handle.report().decode[0]
    assert entry.reason is not None and entry.fp8.reason == entry.reason
    assert STEP_IN_FP8 not in entry.prompts


@torch.no_grad()
def test_out_of_memory(monkeypatch):
    """The prompt runs by the modules, and nothing is tried again until release()."""
    model, ids, tries = half_precision_model(), ids_of(), []

    def fail(product, factor):
        tries.append(product)
        raise torch.OutOfMemoryError

    handle = llmkernels.patch(model, fp8=True)
    with monkeypatch.context() as patches:
        patches.setattr(fp8, "_quantized", fail)
        for _ in range(2):
            hf_generate(model, ids)
    reason = "there was no memory for the weights in FP8, until llmkernels.release(model)"
    assert prompts(model) == {f"by the model's forward: {reason}": 2} and len(tries) == 1
    assert f"prompts: 2 by the model's forward: {reason}" in str(handle.report())
    handle.release()
    model(ids)
    assert prompts(model)[STEP_IN_FP8] == 1


def test_what_can_not_be_asked_for():
    with pytest.raises(ValueError, match=r"fp8 must be False with decode=False .* with decode=False"):
        llmkernels.patch(small_model(), fp8=True, decode=False)
    for head in (None, LlamaForSequenceClassification):
        model = small_model("llama").model if head is None else tiny_model("llama", head=head)
        with pytest.raises(ValueError, match=r"fp8 must be False .* for models that do not generate text"):
            llmkernels.patch(model, fp8=True)
