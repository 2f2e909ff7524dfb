"""The argument for the cache, which transformers has renamed: each name that a release takes works as unpatched."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import DynamicCache, MambaConfig, MambaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import llmkernels
from generating import NEW, hf_generate, small_model
from hf_models import assert_close, count_ops, tiny_inputs
from llmkernels.hf.classes.cache_name import cache_name
from llmkernels.hf.step.decode import decoder

NAMES = [*dict.fromkeys(["past_key_values", cache_name()])]


def outcome(function, *args, **kwargs):
    """What a call returns, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        found = function(*args, **kwargs)
    return found, [str(warning.message) for warning in caught]


def test_outputs_have_the_name_of_inputs():
    assert cache_name() in CausalLMOutputWithPast.__dataclass_fields__


@pytest.mark.parametrize("name", NAMES)
def test_forward_behind_a_cache(device, name):
    model, ids = small_model(device=device), tiny_inputs(device)
    with torch.no_grad():
        cache = model(ids[:, :8])[cache_name()]
    call = {"input_ids": ids[:, 8:], name: copy.deepcopy(cache)}
    expected, warned = outcome(model, **call)
    with llmkernels.patch(model) as handle:
        found, warned_patched = outcome(model, **call | {name: cache})
        assert handle.report().decode[0].forwards == {"by the decode step": 1}
    assert_close(found.logits, expected.logits)
    assert found.keys() == expected.keys()
    assert found[cache_name()] is cache
    assert warned_patched == warned
    assert bool(warned) == (name != cache_name())


@pytest.mark.skipif(len(NAMES) == 1, reason="there is one name")
def test_both_names(device):
    model, ids = small_model(device=device), tiny_inputs(device)
    with torch.no_grad():
        cache, other = (model(ids[:, :tokens]).cache for tokens in (8, 5))
    expected, warned = outcome(model, ids[:, 8:], cache=copy.deepcopy(cache), past_key_values=other)
    with llmkernels.patch(model) as handle:
        found, warned_patched = outcome(model, ids[:, 8:], cache=cache, past_key_values=other)
        assert handle.report().decode[0].forwards == {"by the decode step": 1}
    assert_close(found.logits, expected.logits)
    assert warned_patched == warned


@pytest.mark.parametrize("generate", [hf_generate, llmkernels.generate])
@pytest.mark.parametrize("name", NAMES)
def test_generate_with_a_cache(device, name, generate):
    model, ids = small_model(device=device), tiny_inputs(device)
    expected = hf_generate(model, ids)
    with llmkernels.patch(model):
        cache = DynamicCache(config=model.config)
        assert torch.equal(generate(model, ids, max_new_tokens=NEW, **{name: cache}), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
        generate(model, ids, max_new_tokens=NEW, **{name: DynamicCache(config=model.config)})
        assert decoder(model).steps >= 2 * (NEW - 1)


@pytest.mark.parametrize("name", [*NAMES, None])
def test_loss_with_a_cache(device, name):
    """Also where the cache is given by position."""
    model, ids = small_model(device=device).train(), tiny_inputs(device)
    losses = []
    for patched in (False, True):
        if patched:
            llmkernels.patch(model, training=True)
        cache = DynamicCache(config=model.config)
        args, kwargs = ((ids, None, None, cache), {}) if name is None else ((ids,), {name: cache})
        output = model(*args, labels=ids, **kwargs)
        assert output[cache_name()] is cache
        losses.append(output.loss)
    assert_close(losses[1], losses[0])
    assert "linear_cross_entropy" in count_ops(model, *args[:1], labels=ids)


def test_a_model_with_another_kind_of_cache():
    """Releases that take past_key_values call Mamba's otherwise."""
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=50, eos_token_id=None)
    model, ids = MambaForCausalLM(config).eval(), tiny_inputs() % 50
    expected = hf_generate(model, ids)
    assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=NEW), expected)


UNKNOWN = """
import sys
sys.orig_argv[1:] = ["-m", "llmkernels"]  # what info looks at, to tell faults of the library
import llmkernels.hf.classes.cache_name
from llmkernels import __main__, _versions
llmkernels.hf.classes.cache_name._NAMES = ("another_name",)
_versions.NEWEST_TRANSFORMERS = "5.16"

status = __main__.main(["info"])
import torch
import llmkernels
from hf_models import tiny_inputs, tiny_model
model, ids = tiny_model(), tiny_inputs()
expected = model.generate(ids, max_new_tokens=3)
handle = llmkernels.patch(model, training=True)
assert torch.equal(llmkernels.generate(model, ids, max_new_tokens=3), expected)
assert torch.equal(model.generate(ids, max_new_tokens=3), expected)
with torch.no_grad():
    output = model(ids)
    model(ids[:, :1], past_key_values=output.past_key_values)
model.train()(ids, labels=ids).loss.backward()
print(handle.report())
sys.exit(status)
"""


def test_a_transformers_with_a_name_that_is_not_known():
    """Nothing raises, and info and the report say what is left alone."""
    command = [sys.executable, "-c", UNKNOWN]
    result = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    lines = result.stdout.splitlines()
    assert result.returncode == 1, result.stderr
    [problem] = [line for line in lines if line.startswith("problem")]
    for line in (problem, lines[-1]):
        assert "is newer than 5.16, the newest that llmkernels was tested with" in line
        assert line.endswith(": add_rms_norm, loss, the decode step")
