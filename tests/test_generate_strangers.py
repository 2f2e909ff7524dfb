"""Models and calls that compute something else than the decode step, or have changed: they must not run it."""

import types

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import llmkernels
from families import family_model
from generating import NEW, check_falls_back, hf_generate, left_padded, small_model
from hf_models import tiny_inputs
from llmkernels.hf import unpatch


def test_attention_of_somebody_else(device):
    """It calls apply_rotary_pos_emb as expected, and does more."""
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    class Normalizing(modeling_qwen2.Qwen2Attention):
        def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (
                project(hidden_states).view(shape).transpose(1, 2)
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
            q = nn.functional.normalize(q, dim=-1) * 4
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            y, weights = modeling_qwen2.eager_attention_forward(
                self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0
            )
            return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights

    model = small_model(device=device)
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Normalizing
    check_falls_back(model, tiny_inputs(device), "self_attn")


def test_attention_changed_after_patch(device, monkeypatch):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

    model, ids = small_model(device=device), tiny_inputs(device)
    handle = llmkernels.patch(model)
    original = Qwen2Attention.forward
    monkeypatch.setattr(Qwen2Attention, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    hf_generate(model, ids)
    assert "self_attn" in str(handle.report())


def test_rotary_embedding_of_somebody_else(device):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    class Backwards(Qwen2RotaryEmbedding):
        def forward(self, x, position_ids):
            return super().forward(x, 64 - position_ids)

    model = small_model(device=device)
    model.model.rotary_emb.__class__ = Backwards
    check_falls_back(model, tiny_inputs(device), "model.rotary_emb")


@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "__call__"])
def test_helpers_of_generate_overridden(name, device):
    from transformers import Qwen2ForCausalLM

    def helper(self, *args, **kwargs):
        calls.append(name)
        return getattr(Qwen2ForCausalLM, name)(self, *args, **kwargs)

    calls = []
    model, ids = small_model(device=device), tiny_inputs(device)
    model.__class__ = type("Qwen2ForCausalLM", (Qwen2ForCausalLM,), {name: helper})
    llmkernels.patch(model)
    hf_generate(model, ids)
    patched, calls[:] = len(calls), []
    unpatch(model)
    hf_generate(model, ids)
    assert patched == len(calls) > NEW - 2


def test_layers_in_another_order(device):
    """The cache is written by layer_idx, not in the order of the layers."""
    model = small_model(device=device)
    layers = model.model.layers
    layers[0].self_attn.layer_idx, layers[1].self_attn.layer_idx = 1, 0
    check_falls_back(model, tiny_inputs(device), "layer_idx of model.layers.0.self_attn is not what its class makes")


def test_fewer_layers_after_a_call(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    hf_generate(model, ids)
    llmkernels.generate(model, ids, max_new_tokens=NEW)
    model.model.layers = model.model.layers[:1]
    for config in {id(c): c for c in (model.config, model.model.config)}.values():
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
    found, lean = hf_generate(model, ids), llmkernels.generate(model, ids, max_new_tokens=NEW)
    unpatch(model)
    expected = hf_generate(model, ids)
    assert torch.equal(found, expected) and torch.equal(lean, expected)


def test_autocast_leaves_nothing_behind(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    llmkernels.patch(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        llmkernels.generate(model, ids, max_new_tokens=3)
    found, lean = hf_generate(model, ids), llmkernels.generate(model, ids, max_new_tokens=NEW)
    unpatch(model)
    expected = hf_generate(model, ids)
    assert torch.equal(found, expected) and torch.equal(lean, expected)


def test_a_weight_that_is_no_parameter(device):
    model = small_model(device=device)
    linear = model.model.layers[0].self_attn.q_proj
    weight = linear.weight.detach()
    del linear._parameters["weight"]
    linear.weight = weight
    check_falls_back(model, tiny_inputs(device), "no parameters")


def test_a_cache_that_is_full_when_the_text_ends(device, monkeypatch):
    """The loop reads the stop flag one step late. It must not ask for room for a step that is not needed."""
    from llmkernels.hf.callers import reading

    monkeypatch.setattr(reading, "is_late", lambda device: True)
    model, ids = small_model(device=device), tiny_inputs(device, 1)
    tokens = hf_generate(model, ids)[0, ids.shape[1] :].tolist()
    last = next(i for i in range(2, NEW) if tokens[i] not in tokens[:i])  # the end token
    options = {"eos_token_id": tokens[last], "pad_token_id": 0}
    expected = hf_generate(model, ids, **options)
    llmkernels.patch(model)
    for capacity in (expected.shape[1] - 1, expected.shape[1]):
        cache = llmkernels.KVCache(model, capacity=capacity)
        assert torch.equal(hf_generate(model, ids, past_key_values=cache, **options), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1


def half(norm, x):
    return x / 2


OTHER_NORMS = {
    "of the module": lambda norm: setattr(norm, "_norm", types.MethodType(half, norm)),
    "of its class": lambda norm: setattr(norm, "__class__", type("Other", (type(norm),), {"_norm": half})),
}


@pytest.mark.parametrize("how", OTHER_NORMS)
def test_a_method_that_a_forward_calls(how, device):
    """Gemma's norm calls _norm()."""
    model = family_model("gemma", device)
    OTHER_NORMS[how](model.model.norm)
    check_falls_back(model, tiny_inputs(device), "_norm")


def see_padding(*arguments, **options):
    return None


@torch.no_grad()
@pytest.mark.parametrize("how", ["none", "another one", "amid"])
def test_masks_of_somebody_else(how, device, monkeypatch):
    """An attention of transformers' with a mask of somebody else's, or with none, sees padding."""
    name = {"amid": "sdpa"}.get(how, f"tests of masks: {how}")
    AttentionInterface.register(name, AttentionInterface()["sdpa"])
    if how == "another one":
        AttentionMaskInterface.register(name, see_padding)
    model, mask, ids = small_model(device=device), left_padded(device), tiny_inputs(device, 3)
    model.set_attn_implementation(name)
    llmkernels.patch(model)
    if how == "amid":
        hf_generate(model, ids, attention_mask=mask)
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, name, see_padding)
    found = hf_generate(model, ids, attention_mask=mask)
    unpatch(model)
    assert torch.equal(found, hf_generate(model, ids, attention_mask=mask))
    model.set_attn_implementation("eager")
    assert not torch.equal(found, hf_generate(model, ids, attention_mask=mask))
