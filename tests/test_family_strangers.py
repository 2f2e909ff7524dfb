"""Families that no line of llmkernels and no other test names: a step that is right, or a reason."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import llmkernels
from families import _SHARED, FAMILIES, family_config, family_model
from generating import generate_step, left_padded
from hf_models import assert_close, count_ops, logits_of, tiny_inputs
from llmkernels.hf.report import STEP

NEW = 8
PLACE = Path(__file__).parent


def made(model_class, **options):
    """A model of a class whose every parameter matters."""
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**_SHARED | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, (0.4 if "embed" in name else 1.4) * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model


def tokens_of(model, device, new=NEW):
    inputs = {"input_ids": tiny_inputs(device, 3), "attention_mask": left_padded(device)}
    return model.generate(**inputs, max_new_tokens=new, do_sample=False)


# --- a family that does not exist


def imported(name, path, monkeypatch):
    """The module of a file, under a name that it would have in transformers."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lantern(monkeypatch):
    return imported("transformers.models.lantern.modeling_lantern", PLACE / "lantern.py", monkeypatch)


def test_a_new_family(lantern, device):
    """Nothing outside of the tests knows of it."""
    model = made(lantern.LanternForCausalLM).to(device)
    ids = tiny_inputs(device)
    expected, expected_tokens = logits_of(model, ids), tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert handle.report().decode[0].reason is None
    assert_close(logits_of(model, ids), expected)
    assert count_ops(model, ids).keys() == {"rms_norm", "rope", "bias_gelu"}
    assert torch.equal(tokens_of(model, device), expected_tokens)
    assert handle.report().decode[0].calls == {generate_step(): 1}
    handle.unpatch()
    assert torch.equal(logits_of(model, ids), expected)


@pytest.mark.parametrize(
    "layer",
    [
        "x = x + self.second(attend(self.first(x))); x = x + self.third(self.feed_forward(x)) * 0.7",
        "x = x + self.feed_forward(self.first(x)); x = self.second(attend(x)) / 2 + x",
        "x += 0.3 * attend(self.third(x)) + self.feed_forward(self.second(x))",
    ],
    ids=["behind-the-mlp", "mlp-first", "side-by-side"],
)
def test_norms_in_unusual_places(lantern, layer, device, monkeypatch):
    source = f"""
def forward(self, x, **kwargs):
    def attend(x):
        return self.attention_of_tokens(x, **kwargs)[0]
    {layer}
    return x
"""
    exec(source, vars(lantern))
    monkeypatch.setattr(lantern.LanternDecoderLayer, "forward", vars(lantern)["forward"])
    model = made(lantern.LanternForCausalLM).to(device)
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, device), expected)
    assert handle.report().decode[0].calls == {generate_step(): 1}


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("self.is_late", "has a layer 2 that is not as one of the first 2"),
        ("self.layer_idx >= 2", "has layers that compute something by their index"),
    ],
)
def test_layers_that_differ_by_their_index(lantern, condition, reason, device, monkeypatch):
    """A small model has fewer layers: what only a later one does, it does not show."""
    source = f"""
def forward(self, hidden_states, position_embeddings, **kwargs):
    cos, sin = position_embeddings
    if {condition}:
        position_embeddings = torch.ones_like(cos), torch.zeros_like(sin)
    return original_forward(self, hidden_states, position_embeddings, **kwargs)

def init(self, config, layer_idx):
    original_init(self, config, layer_idx)
    self.is_late = layer_idx >= 2
"""
    attention = lantern.LanternAttention
    vars(lantern).update(original_forward=attention.forward, original_init=attention.__init__)
    exec(source, vars(lantern))
    monkeypatch.setattr(attention, "forward", vars(lantern)["forward"])
    if condition == "self.is_late":
        monkeypatch.setattr(attention, "__init__", vars(lantern)["init"])
    model = made(lantern.LanternForCausalLM, num_hidden_layers=4).to(device)
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert reason in handle.report().decode[0].reason
    assert torch.equal(tokens_of(model, device), expected)


@pytest.mark.parametrize(
    ("name", "forward", "reason"),
    [
        ("LanternMLP", lambda self, x: self.narrow(self.act(self.widen(x)) ** 2), "an activation without a kernel"),
        ("LanternRMSNorm", lambda self, x: x * (1 + self.weight), "computes no norm"),
        ("LanternDecoderLayer", lambda self, x, **kwargs: x * 2, "attends without the function"),
    ],
)
def test_a_new_family_that_does_it_otherwise(lantern, name, forward, reason, device, monkeypatch):
    """What it does has no kernel: it computes what it did, and the report says why."""
    as_its_own = type(forward)(forward.__code__, vars(lantern), "forward")
    monkeypatch.setattr(getattr(lantern, name), "forward", as_its_own)
    model = made(lantern.LanternForCausalLM).to(device)
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert reason in handle.report().decode[0].reason
    assert torch.equal(tokens_of(model, device), expected)


def test_no_family_is_known_by_name():
    """A class or a module of one family in the code would be a change that each family needs."""
    families = {name for model in FAMILIES.values() for name in (model.model, model.model.removesuffix("ForCausalLM"))}
    for path in (PLACE.parent / "llmkernels" / "hf").rglob("*.py"):
        code = compile(path.read_text(), str(path), "exec")
        assert not families & {*_names_and_strings(code)}, path


def _names_and_strings(code):
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from _names_and_strings(constant)
        elif isinstance(constant, str):
            yield constant
    yield from code.co_names


# --- those of transformers


WITH_STEP = ["BitNetForCausalLM", "CwmForCausalLM", "Emu3ForCausalLM", "Jais2ForCausalLM", "VaultGemmaForCausalLM"]


@pytest.mark.parametrize("name", WITH_STEP)
def test_families_of_transformers(name, device):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = made(getattr(transformers, name), bos_token_id=1, eos_token_id=2).to(device)
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, device), expected)
    assert handle.report().decode[0].calls == {generate_step(): 1}


@torch.no_grad()
def test_logits_in_float32(device, monkeypatch):
    """Mllama returns them so, whatever the dtype of its weights: from a prompt and from a step."""
    monkeypatch.setattr("llmkernels.hf.callers.forward.PROMPT_DEVICES", {"cpu", "cuda"})
    model = made(transformers.MllamaForCausalLM, bos_token_id=1, eos_token_id=2).to(device, torch.bfloat16)
    handle = llmkernels.patch(model)
    output = model(tiny_inputs(device))
    step = model(tiny_inputs(device, tokens=1), past_key_values=output.past_key_values)
    assert output.logits.dtype == step.logits.dtype == torch.float32
    decode = handle.report().decode[0]
    assert (decode.prompts, decode.forwards) == ({STEP: 1}, {STEP: 1})


def test_an_activation_with_parameters(device):
    """A module in front of a last product may be a norm; this one is none."""
    if not hasattr(transformers, "ApertusForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no Apertus")
    model = made(transformers.ApertusForCausalLM, bos_token_id=1, eos_token_id=2).to(device)
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert "has an activation without a kernel" in handle.report().decode[0].reason
    assert torch.equal(tokens_of(model, device), expected)


def test_queries_scaled_by_their_position(device):
    """Beyond the positions that it was trained for, where its forward takes over from the step."""
    if not hasattr(transformers, "Ministral3ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no Ministral 3")
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 3.0,
    }
    model = made(transformers.Ministral3ForCausalLM, rope_parameters=rope).to(device)
    expected = [tokens_of(model, device, new=new) for new in (3, 40)]
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, device, new=3), expected[0])
    assert handle.report().decode[0].calls == {generate_step(): 1}
    assert torch.equal(tokens_of(model, device, new=40), expected[1])
    assert "how queries are rotated or scaled depends on the length" in str(handle.report())


@pytest.mark.parametrize(
    "options",
    [
        {"use_parallel_residual": False},
        {"attention_bias": False},
        {"num_attention_heads": 1, "hidden_size": 64},  # whose thirds are q, k and v
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ],
    ids=["one after the other", "no biases", "one head", "all of a head rotated"],
)
def test_q_k_and_v_head_by_head(options, device):
    """GPT-NeoX, whose blocks are parallel by default."""
    model = made(transformers.GPTNeoXForCausalLM, **options).to(device)
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert torch.equal(tokens_of(model, device), expected)
    assert handle.report().decode[0].calls == {generate_step(): 1}


@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "HeliumForCausalLM"])
def test_a_head_dim_in_the_config_that_the_class_ignores(name, device, monkeypatch):
    """GPT-NeoX ignores it everywhere; Helium's last product does, and so its forward raises."""
    monkeypatch.setattr("llmkernels.hf.callers.forward.PROMPT_DEVICES", {"cpu", "cuda"})
    model, ids = (
        made(getattr(transformers, name), head_dim=32, bos_token_id=1, eos_token_id=2).to(device),
        tiny_inputs(device),
    )
    expected = None if name == "HeliumForCausalLM" else logits_of(model, ids)
    handle = llmkernels.patch(model)
    assert "has 4 heads of another size than 32" in handle.report().decode[0].reason
    if expected is not None:
        assert_close(logits_of(model, ids), expected)
    else:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(ids)


def test_embeddings_of_another_size(device):
    """Products between embeddings and layers, also where the embeddings are as wide as the small model of a proof."""
    for size in (24, 32):
        model = family_model("opt", device, hidden_size=64, word_embed_proj_dim=size)
        ids = tiny_inputs(device)
        expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        [decode] = llmkernels.patch(model).report().decode
        assert decode.reason is not None
        assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), expected)


def test_an_encoder_that_rotates(device):
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**sizes, num_attention_heads=2, **tokens)
    torch.manual_seed(0)
    model = transformers.ModernBertForMaskedLM(config).eval().to(device)
    ids = tiny_inputs(device)
    expected = logits_of(model, ids)
    llmkernels.patch(model)
    assert_close(logits_of(model, ids), expected)
    assert count_ops(model, ids) == {"layer_norm": 6, "rope": 3, "geglu": 3, "bias_gelu": 1}


def causal_classes():
    values = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for value in values for name in ((value,) if isinstance(value, str) else value)}
    found = {getattr(transformers, name, None) for name in names if name.endswith("ForCausalLM")}
    return sorted(found - {None}, key=lambda cls: cls.__name__)


def small_one(model_class):
    """A model and its tokens, or None where the shared options make none, or a large one."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(model_class.config_class(**_SHARED)).parameters())
        if size < 10_000_000:
            model = made(model_class)
            return model, tokens_of(model, "cpu")
    except Exception:
        pass
    return None


def test_every_causal_model():
    """Whatever it is, it can be patched and asked for a report, and generates what it did."""
    steps, reasons = 0, 0
    for model_class in causal_classes():
        if (small := small_one(model_class)) is None:
            continue
        model, expected = small
        try:
            handle = llmkernels.patch(model)
        except ValueError as error:
            assert "nothing to patch" in str(error)
            continue
        [decode] = handle.report().decode
        assert torch.equal(tokens_of(model, "cpu"), expected), decode
        if decode.reason is None:
            steps += 1
        else:
            reasons += 1
            assert len(decode.reason.split()) > 3, decode
    assert steps >= 25
    assert reasons >= 20


# --- names

# Attributes of the modules of a family, each under another name.
_ATTRIBUTES = (
    *("model", "lm_head", "embed_tokens", "layers", "norm", "rotary_emb", "self_attn", "mlp", "input_layernorm"),
    *("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "dense", "q_norm", "k_norm", "scaling", "head_dim"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "act_fn", "activation_fn", "c_fc", "c_proj", "act"),
    *("variance_epsilon", "eps", "residual_multiplier", "embedding_multiplier", "layer_idx", "logit_scale"),
)


def renamed(model_class, folder, monkeypatch):
    """The class of a model as that of its family, whose attributes have names that say nothing."""
    original = sys.modules[model_class.__module__]
    names = {attribute: f"part{index}" for index, attribute in enumerate(_ATTRIBUTES)}
    source = Path(original.__file__).read_text()
    source = re.sub(rf"\bself\.({'|'.join(names)})\b", lambda found: f"self.{names[found[1]]}", source)
    for attribute in ("model", "lm_head", "embed_tokens"):
        source = source.replace(f'"{attribute}', f'"{names[attribute]}')
        source = source.replace(f'.{attribute}.weight"', f'.{names[attribute]}.weight"')
    source = source.replace("from ... import", "from transformers import").replace("from ...", "from transformers.")
    source = source.replace("from .configuration", f"from {original.__package__}.configuration")
    path = folder / "modeling_nameless.py"
    path.write_text(source)
    return getattr(imported("transformers.models.nameless.modeling_nameless", path, monkeypatch), model_class.__name__)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "granite", "glm", "cohere", "olmo2", "phi"]
)
def test_names_do_not_matter(name, device, tmp_path, monkeypatch):
    """Every attribute of the modules of a family under another name: the same step."""
    torch.manual_seed(0)
    config = family_config(name)
    model = renamed(getattr(transformers, FAMILIES[name].model), tmp_path, monkeypatch)(config).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    model.generation_config.eos_token_id = None
    assert not any(isinstance(getattr(model, attribute, None), torch.nn.Module) for attribute in ("model", "lm_head"))
    expected = tokens_of(model, device)
    handle = llmkernels.patch(model)
    assert handle.report().decode[0].reason is None
    assert torch.equal(tokens_of(model, device), expected)
    assert handle.report().decode[0].calls == {generate_step(): 1}
