"""Weights packed for the decode step, as views into one storage: everything else still works on them."""

import copy

import pytest
import torch
import transformers
from torch import nn

import llmkernels
from generating import NEW, check_counts, hf_generate, small_model, steps
from hf_models import VOCAB, assert_close, count_ops, logits_of, tiny_inputs
from llmkernels.hf import unpatch
from llmkernels.hf.step import packing
from llmkernels.hf.step.decode import decoder


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def is_packed(model):
    groups = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        products = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        found = [[getattr(linear, name) for linear in linears] for linears in products for name in ("weight", "bias")]
        groups += [group for group in found if None not in group]
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
    assert not is_packed(model)
    logits = logits_of(model, ids)  # on a GPU this packs, too
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
    assert is_packed(model)
    handle.unpatch()
    assert not is_packed(model)
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
    assert not is_packed(loaded)
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


@pytest.mark.gpu
def test_packed_weights_are_there_for_other_streams(monkeypatch):
    """Another thread may read a parameter as soon as it has its new memory."""
    group = [nn.Parameter(torch.randn(1 << 20, device="cuda")) for _ in range(2)]
    expected, seen = [parameter.detach().clone() for parameter in group], []
    torch.cuda.synchronize()

    def read(*_):
        with torch.cuda.stream(torch.cuda.default_stream()):
            seen.extend(parameter.detach().clone() for parameter in group)

    monkeypatch.setattr(packing, "_wait_for_readers", read)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        packing.pack([group])
    assert all(map(torch.equal, seen, expected)) and len(seen) == 2


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
    packing.unpack(nn.ParameterList(parameters))
    assert packing.packed(parameters) is None
    assert all(torch.equal(p, value) for p, value in zip(parameters, values, strict=True))
    with torch.device("meta"):
        meta = [nn.Parameter(torch.empty(2, 2))]
    assert packing.obstacle(meta) == "a weight has no ordinary memory"
    assert "differ in dtype" in packing.obstacle([parameters[0], nn.Parameter(torch.ones(2, 4).half())])
    assert "differ in shape" in packing.obstacle([parameters[0], nn.Parameter(torch.ones(2, 5))])
    assert packing.obstacle([parameters[0], parameters[0]]) == "one weight is used twice"


@pytest.mark.parametrize("how", ["accelerate", "accelerate_state", "safetensors"])
def test_savers_that_look_at_storages(how, tmp_path):
    """These savers take views into one storage for tied weights, and would drop all but one."""
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    model, _, _ = packed_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if how == "safetensors":
        safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    elif how == "accelerate":
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    else:
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.save_state(tmp_path)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert is_packed(model)


def test_a_state_dict_is_the_weights(device):
    """A state dict has views, not copies: writes to it are writes to the model."""
    model, _, _ = packed_model(device)
    for name, value in model.state_dict().items():
        parameter = model.get_parameter(name)
        assert value.data_ptr() == parameter.data_ptr() and value.stride() == parameter.stride()
        value.fill_(0.25)
    assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())
    assert all(
        type(value) is nn.Parameter and value is model.get_parameter(name)
        for name, value in model.state_dict(keep_vars=True).items()
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_shared_memory(when):
    """Other processes go on seeing the weights, of a model that is shared before or after they are packed."""
    model, ids = small_model(), tiny_inputs()
    handle = llmkernels.patch(model)
    if when == "after":
        hf_generate(model, ids)
    model.share_memory()
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    found = hf_generate(model, ids)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert "memory that processes share" in str(handle.report())
    handle.unpatch()
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert torch.equal(hf_generate(model, ids), found)


def test_a_model_made_in_inference_mode(device):
    with torch.inference_mode():
        model = small_model(device=device)
    ids = tiny_inputs(device)
    expected = hf_generate(model, ids)
    handle = llmkernels.patch(model)
    assert torch.equal(hf_generate(model, ids), expected)
    assert "inference mode" in str(handle.report())
    handle.unpatch()
    assert torch.equal(hf_generate(model, ids), expected)
