"""The proof of a description: what it tells apart, and what makes it anew."""

import threading

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

import llmkernels
from families import family_model
from generating import generate_step, hf_generate
from hf_models import as_transformers, assert_close, logits_of, tiny_inputs
from llmkernels.hf import unpatch
from llmkernels.hf.model import reference
from llmkernels.hf.step import proof
from llmkernels.hf.step.describe import describe, why_not
from llmkernels.hf.step.guard import Snapshot


def logits_of_steps(model, ids, new=8):
    with torch.no_grad():
        found = model.generate(
            ids, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    return torch.stack(found.logits)


def gemma2(**options):
    try:
        return family_model("gemma2", **options)
    except ValueError as error:  # transformers 5.23 has it with eager attention alone
        pytest.skip(str(error))


def check_same(model, ids):
    """The patched model generates what it generates unpatched; unpatches it."""
    found = logits_of_steps(model, ids)
    unpatch(model)
    assert_close(found, logits_of_steps(model, ids))


# --- caps and clips


@pytest.mark.parametrize("softcap", [50.0, 100.0])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_softcap_of_scores(softcap, attention, head_dim):
    """At the numbers of real models: one attention of transformers ignores it and the other does not."""
    changes = {"attn_logit_softcapping": softcap, "final_logit_softcapping": 30.0, "head_dim": head_dim}
    model = gemma2(attn_implementation=attention, query_pre_attn_scalar=head_dim, **changes)
    for layer in model.model.layers:  # scores that the cap changes
        layer.self_attn.q_proj.weight.data *= 4
    llmkernels.patch(model)
    assert [layer.attention.softcap for layer in describe(model).layers] == 3 * [softcap if attention == "eager" else 0]
    check_same(model, tiny_inputs())


def test_a_softcap_that_nothing_reads():
    model = family_model("gemma3", attn_logit_softcapping=20.0, attn_implementation="eager")
    llmkernels.patch(model)
    assert describe(model).layers[0].attention.softcap == 0
    check_same(model, tiny_inputs())


def test_another_attention_is_another_proof():
    model = family_model("gemma2", attn_logit_softcapping=50.0)
    llmkernels.patch(model)
    gemma2(attn_implementation="sdpa")
    for attention, softcap in (("eager", 50), ("sdpa", 0), ("eager", 50)):
        model.set_attn_implementation(attention)
        assert describe(model).layers[0].attention.softcap == softcap
        found = logits_of_steps(model, tiny_inputs())
        unpatch(model)
        assert_close(found, logits_of_steps(model, tiny_inputs()))
        llmkernels.patch(model)


def clipped(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    cache = kwargs.get("past_key_values", kwargs.get("cache"))  # as transformers 5.24 calls it
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)  # noqa: F821
    v = v.clamp(-20, 20)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)  # noqa: F821
    y, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling)
    return self.o_proj(y.flatten(-2)), weights


def test_a_clip_that_ordinary_values_do_not_reach(monkeypatch):
    forward = type(clipped)(clipped.__code__, vars(modeling_llama), "forward", clipped.__defaults__)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    model = family_model("llama", attn_implementation="eager")
    llmkernels.patch(model)
    assert "computes something else" in why_not(model)
    check_same(model, tiny_inputs())


# --- functions replaced


def turned_back(x):
    first, second = x.chunk(2, -1)
    return torch.cat((second, -first), -1)


def replace_rotate_half(monkeypatch):
    monkeypatch.setattr(modeling_llama, "rotate_half", as_transformers(turned_back))


def replace_by_a_stranger(monkeypatch):
    original = modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: original(x) * 0.9)


def replace_repeat_kv(monkeypatch):
    from transformers.integrations import sdpa_attention

    original = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *args: original(*args) * 1.1)
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", as_transformers(lambda *args: False))


def replacing(owner, name):
    original = getattr(owner, name)

    def replace(monkeypatch):
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs) * 0.9)

    replace.__name__ = name
    return replace


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", replace_rotate_half),
        ("llama", replace_by_a_stranger),
        ("llama", replace_repeat_kv),
        ("llama", replacing(torch, "rsqrt")),
        ("gemma", replacing(transformers.models.gemma.modeling_gemma.GemmaRMSNorm, "_norm")),
        ("starcoder2", replacing(F, "layer_norm")),
        ("phi", replacing(torch, "tanh")),
    ],
)
def test_a_function_two_calls_down(name, how, monkeypatch):
    model, ids = family_model(name), tiny_inputs()
    handle = llmkernels.patch(model)
    before = logits_of_steps(model, ids)
    assert handle.report().decode[0].calls == {generate_step(): 1}
    how(monkeypatch)
    found, found_logits = logits_of_steps(model, ids), logits_of(model, ids)
    assert handle.report().decode[0].calls[generate_step()] == 1
    unpatch(model)
    assert_close(found, logits_of_steps(model, ids))
    assert_close(found_logits, logits_of(model, ids))
    assert (found - before).abs().max() > 1e-3
    monkeypatch.undo()
    handle = llmkernels.patch(model)
    assert torch.equal(logits_of_steps(model, ids), before)
    assert handle.report().decode[0].reason is None


@pytest.mark.parametrize("name", ["gemma", "ernie4_5"])
def test_an_activation_made_of_another_function(name, monkeypatch):
    """Activations keep the function that was there when they were made."""
    options = {"hidden_act": "gelu"} if name == "ernie4_5" else {}
    proven = family_model(name, **options)
    llmkernels.patch(proven)
    assert why_not(proven) is None
    with monkeypatch.context() as context:
        replacing(F, "gelu")(context)
        model = family_model(name, **options)
    llmkernels.patch(model)
    assert why_not(model) is not None
    assert why_not(proven) is None


# --- what it leaves alone


def test_random_numbers_of_other_threads(monkeypatch):
    """They sample while a model is made and proved: each number once."""
    drawn, original = [], modeling_llama.LlamaModel.__init__

    def draw():
        drawn.append(torch.rand(1))

    def init(self, config):
        original(self, config)
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()

    model = family_model("llama", rms_norm_eps=3e-4)  # not proved yet
    llmkernels.patch(model)
    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", init)
    torch.manual_seed(0)
    assert why_not(model) is None
    assert len(drawn) == 2
    draw()
    torch.manual_seed(0)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(1) for _ in drawn]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_cache", False), ("output_hidden_states", True), ("eos_token_id", 7), ("_name_or_path", "elsewhere")],
)
def test_entries_of_no_account(name, value, monkeypatch):
    model = family_model("llama")
    llmkernels.patch(model)
    describe(model)
    known = reference.reference(model)
    monkeypatch.setattr(proof, "_prove", None)
    setattr(model.config, name, value)
    describe(model)
    assert reference.reference(model) is known
    model.config.rms_norm_eps *= 2
    assert reference.reference(model) is not known


def test_a_model_moved_under_inference_mode():
    """Its tensors have no version."""
    model = family_model("phi3")
    with torch.inference_mode():
        model.double()
        model.float()
        model.model.rotary_emb.inv_freq *= 1
    buffer = model.model.rotary_emb.inv_freq
    assert buffer.is_inference()
    llmkernels.patch(model)
    snapshot = Snapshot(model)
    assert snapshot.holds(model)
    with torch.inference_mode():
        buffer.mul_(0.5)
    assert not snapshot.holds(model)
    check_same(model, tiny_inputs())


# --- once for all


@pytest.fixture
def proofs(monkeypatch):
    """No proof is known; a list that grows with each."""
    found, original = [], proof._prove

    def counted(*args):
        found.append(args)
        return original(*args)

    monkeypatch.setattr(proof, "_proofs", [])
    monkeypatch.setattr(proof, "_failed", [])
    monkeypatch.setattr(proof, "_prove", counted)
    return found


def refusal(**changes):
    model = family_model("llama", **changes)
    llmkernels.patch(model)
    return why_not(model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi3", "ernie4_5", "cohere2", "nemotron", "phi"])
def test_one_proof_for_all_sizes(name, proofs):
    for changes in ({}, {}, {"intermediate_size": 48}, {"vocab_size": 128}):
        model = family_model(name, **changes)
        llmkernels.patch(model)
        why_not(model)
    assert len(proofs) == 1


def test_one_proof_for_any_number_of_layers(proofs):
    for layers in (2, 5, 3):
        assert refusal(num_hidden_layers=layers) is None
    assert len(proofs) == 1
    assert refusal(rope_parameters={"rope_type": "default", "rope_theta": 77.0}) is None
    assert len(proofs) == 2


@pytest.mark.parametrize("error", [MemoryError("no memory"), torch.OutOfMemoryError("no memory"), KeyError("mine")])
@pytest.mark.parametrize("where", ["_build", "_logits"])
def test_an_error_is_tried_again(where, error, proofs, monkeypatch):
    owner = reference if where == "_build" else proof
    original, failing = getattr(owner, where), [True]

    def function(*args):
        if failing and "meta" not in args:
            raise error
        return original(*args)

    monkeypatch.setattr(owner, where, function)
    model = family_model("llama")
    llmkernels.patch(model)
    for _ in range(proof._TRIES - 1):
        assert type(error).__name__ in why_not(model)
    failing.clear()
    assert why_not(model) is None
    assert len(proofs) == proof._TRIES


def test_an_error_that_stays(proofs, monkeypatch):
    monkeypatch.setattr(proof, "_logits", None)
    for _ in range(proof._TRIES + 2):
        assert "TypeError" in refusal()
    assert len(proofs) == proof._TRIES


def test_a_refusal_stays(proofs, monkeypatch):
    monkeypatch.setattr(proof, "_error", lambda *args: 1.0)
    for _ in range(2):
        assert "computes something else" in refusal()
    assert len(proofs) == 1


def test_a_function_replaced_while_it_is_proved(proofs, monkeypatch):
    original, model = proof._level_embeddings, family_model("llama")
    rotate_half = modeling_llama.rotate_half

    def replacing(*args):
        if len(proofs) == 1:
            monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
        original(*args)

    monkeypatch.setattr(proof, "_level_embeddings", replacing)
    llmkernels.patch(model)
    assert why_not(model) is not None
    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_half)
    assert why_not(model) is None


def test_autocast_is_not_in_the_proof(proofs):
    model = family_model("llama")
    llmkernels.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in why_not(model)
    assert why_not(model) is None


# --- a window that nothing reads


@pytest.mark.parametrize("name", ["llama", "granite", "olmo2", "glm4"])
def test_a_window_that_nothing_reads(name):
    """The attention ignores it, but transformers' caches drop what is behind it: there the modules run."""
    model, ids = family_model(name, sliding_window=16), tiny_inputs()
    handle = llmkernels.patch(model)
    assert describe(model).layers[0].attention.window_left == -1
    for new, way in ((5, generate_step()), (8, "by transformers: what a window leaves in the cache")):
        found = logits_of_steps(model, ids, new)
        assert [key for key in handle.report().decode[0].calls if way in key], handle.report()
        unpatch(model)
        assert_close(found, logits_of_steps(model, ids, new))
        handle = llmkernels.patch(model)


# --- no step


@pytest.mark.parametrize("name", ["Bamba", "GraniteMoeHybrid", "Qwen3Next"])
def test_layers_without_attention(name):
    """The report has a reason, and what can run on kernels does."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    cls = getattr(transformers, f"{name}ForCausalLM")
    options = {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "pad_token_id": 0,
    }
    of_family = {
        "Bamba": {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16, "attn_layer_indices": [1]},
        "GraniteMoeHybrid": {
            **{"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16},
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
        },
        "Qwen3Next": {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    }
    torch.manual_seed(0)
    model, ids = cls(cls.config_class(**options | of_family[name])).eval(), tiny_inputs()
    expected = hf_generate(model, ids)
    handle = llmkernels.patch(model)
    [decode] = handle.report().decode
    assert len(decode.reason.split()) > 3, decode
    assert torch.equal(hf_generate(model, ids), expected)


def large_scores():
    """A model whose softmax enlarges the rounding errors of its scores."""
    options = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "embedding_multiplier": 3.0}
    options |= {"attention_multiplier": 1.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**options)).eval()


def test_rounding_errors_that_the_model_enlarges(proofs, monkeypatch):
    """They are no reason against a step; the limit, here a low one, is for models that enlarge none."""
    monkeypatch.setattr(proof, "_FILLS", ((1.0, 2e-6), (16.0, 1e-3)))
    assert llmkernels.patch(large_scores()).report().decode[0].reason is None


def test_errors_beyond_rounding(proofs, monkeypatch):
    monkeypatch.setattr(proof, "_FILLS", ((1.0, 1e-7), (16.0, 1e-7)))
    monkeypatch.setattr(proof, "_rounding", lambda *args: 0.0)
    reason = llmkernels.patch(large_scores()).report().decode[0].reason
    assert "computes something else than its description" in reason


def test_weights_that_are_rounded_are_put_back():
    model = large_scores()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        found = proof._rounding(model, torch.arange(20), 0)
    assert 0 < found < 1e-3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
