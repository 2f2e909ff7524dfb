"""State of the process or thread that a call of generate finds: patched it matters as little as unpatched."""

import contextlib

import pytest
import torch

import llmkernels
from generating import NEW, generate_step, hf_generate, left_padded, small_model
from hf_models import assert_close, count_ops, logits_of, tiny_inputs
from llmkernels import KVCache
from llmkernels.hf import unpatch
from llmkernels.hf.modules import layers
from llmkernels.hf.step import proof
from llmkernels.hf.step.decode import decoder


@contextlib.contextmanager
def during(get, put, *value):
    before = get()
    put(*value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype):
    return during(torch.get_default_dtype, torch.set_default_dtype, dtype)


@contextlib.contextmanager
def deterministic():
    with during(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True):
        torch.use_deterministic_algorithms(True, warn_only=True)  # or cuBLAS wants a variable in the environment
        yield


@contextlib.contextmanager
def side_stream():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


STATES = {
    "a default device without memory": lambda device: during(lambda: None, torch.set_default_device, "meta"),
    "the model's as the default device": lambda device: during(lambda: None, torch.set_default_device, device),
    "a block on another device": lambda device: torch.device("meta"),
    "float64 by default": lambda device: default_dtype(torch.float64),
    "bfloat16 by default": lambda device: default_dtype(torch.bfloat16),
    "float16 by default": lambda device: default_dtype(torch.float16),
    "deterministic algorithms": lambda device: deterministic(),
    "inference mode": lambda device: torch.inference_mode(),
    "gradients enabled": lambda device: torch.enable_grad(),
    "no gradients": lambda device: torch.no_grad(),
    "anomaly detection": lambda device: torch.autograd.detect_anomaly(check_nan=True),
    "saved tensors on the CPU": lambda device: torch.autograd.graph.save_on_cpu(),
    "autocast that is off": lambda device: torch.autocast(device, enabled=False),
    "autocast of another device": lambda device: torch.autocast({"cpu": "cuda", "cuda": "cpu"}[device], torch.bfloat16),
    "an RNG that is put back": lambda device: torch.random.fork_rng(),
    "attention by math": lambda device: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "a side stream": lambda device: side_stream() if device == "cuda" else contextlib.nullcontext(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", STATES)
def test_ambient_state(state, device, late):
    model, ids, mask = small_model(device=device), tiny_inputs(device, 3), left_padded(device)
    sampling = {"do_sample": True, "top_p": 0.93, "temperature": 1.7, "repetition_penalty": 1.3}
    sampling |= {"eos_token_id": list(range(2, 97, 9)), "pad_token_id": 0, "return_dict_in_generate": True}

    def calls():
        with STATES[state](device):
            greedy = hf_generate(model, ids, attention_mask=mask)
            out = hf_generate(model, ids, attention_mask=mask, **sampling)
            grad_mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        keys = out.past_key_values.layers[0].keys
        return [greedy, out.sequences], keys, [greedy.is_inference(), keys.is_inference(), *grad_mode]

    def lean():
        options = {"temperature": [1.7, 0.9, 1.1], "top_p": 0.93, "repetition_penalty": 1.3, "max_new_tokens": NEW}
        torch.manual_seed(7)
        return llmkernels.generate(model, ids, attention_mask=mask, do_sample=True, **options)

    llmkernels.patch(model)
    usual = lean()
    texts, keys, modes = calls()
    with STATES[state](device):
        assert torch.equal(llmkernels.generate(model, ids, attention_mask=mask, max_new_tokens=NEW), texts[0])
        assert torch.equal(lean(), usual)
    assert list(decoder(model).calls) == [generate_step()]
    unpatch(model)
    expected_texts, expected_keys, expected_modes = calls()
    assert all(map(torch.equal, texts, expected_texts))
    assert_close(keys, expected_keys)
    assert modes == expected_modes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", STATES)
def test_patched_in_any_state(state, device, monkeypatch):
    """The checks of patch(), which compute with tensors of their own, come to the same result, whatever is the state
    when a class is met for the first time."""
    monkeypatch.setattr(proof, "_proofs", [])
    monkeypatch.setattr(proof, "_failed", [])
    model, ids = small_model(device=device), tiny_inputs(device)
    expected = hf_generate(model, ids)
    layers._patched_class.cache_clear()
    with STATES[state](device):
        handle = llmkernels.patch(model)
        assert not any(row.left_alone for row in handle.report().rows.values())
        assert handle.report().decode[0].reason is None
        cache = KVCache(model, 32, batch_size=2)
    assert cache.layers[0].k.device.type == device
    assert torch.equal(hf_generate(model, ids, past_key_values=cache), expected)


def test_a_model_in_float64(device):
    """Moved there after patch(): CUDA has no kernels for it, so transformers' own forwards run there."""
    model, ids = small_model(device=device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    hf_generate(model, ids)
    model.double()
    found = hf_generate(model, ids), logits_of(model, ids)
    lean = llmkernels.generate(model, ids, max_new_tokens=NEW)
    model(ids).logits.sum().backward()
    grad = model.model.norm.weight.grad.clone()
    rows = handle.report().rows.values()
    assert {reason for row in rows for reason in row.left_alone.values()} == (
        {"no kernel for torch.float64 on cuda"} if device == "cuda" else set()
    )
    unpatch(model)
    model.zero_grad()
    expected = hf_generate(model, ids), logits_of(model, ids)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(lean, expected[0])
    assert_close(found[1], expected[1], 1e-6)  # transformers' norm is float32
    model(ids).logits.sum().backward()
    assert_close(grad, model.model.norm.weight.grad, 1e-6)


def test_without_a_kernel_the_forwards_are_transformers_own(monkeypatch):
    """What float64 does on CUDA."""
    model, ids = small_model(), tiny_inputs()
    expected = logits_of(model, ids)
    llmkernels.patch(model)
    monkeypatch.setattr(layers, "has_kernel", lambda x: False)
    assert count_ops(model, ids) == {}
    assert torch.equal(logits_of(model, ids), expected)
