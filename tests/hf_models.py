"""Tiny Qwen2 and Llama models, and helpers of the test_hf_* files."""

import types
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from llmkernels.hf.model.trust import OBSERVERS

FAMILIES = ["qwen2", "llama"]
LAYERS = 2
VOCAB = 97
# One forward of LAYERS layers, everything patched.
OPS = {"rms_norm": LAYERS + 1, "add_rms_norm": LAYERS, "rope": LAYERS, "swiglu": LAYERS}
# One prompt of a call of generate.
PROMPT = {
    "embed_tokens_": 1,
    "rms_norm_linear": LAYERS + 1,
    "rope_kv_write": LAYERS,
    "attention": LAYERS,
    "linear_add_scale_": 2 * LAYERS - 1,
    "linear_add_": 1,
    "rms_norm_glu_linear": LAYERS,
}
# One decode step.
STEP = {
    "embed_tokens_": 1,
    "rms_norm_linear": LAYERS + 1,
    "rope_decode_attention": LAYERS,
    "linear_add_scale_": 2 * LAYERS,
    "rms_norm_glu_linear": LAYERS,
}

_CLASSES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def tiny_config(family="qwen2", **changes):
    """7 query heads per key head, as in Qwen2.5-7B; silu, so that SwiGLU runs."""
    options = {
        "hidden_size": 112,
        "intermediate_size": 88,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return _CLASSES[family][0](**options | changes)


def tiny_model(family="qwen2", device="cpu", dtype=torch.float32, head=None, seed=0, **changes):
    """A model in eval mode whose every parameter matters: no norm weight is 1, no bias is 0."""
    config = changes.pop("config", None) or tiny_config(family, **changes)
    torch.manual_seed(seed)
    model = (head or _CLASSES[family][1])(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.4 * parameter.shape[-1] ** -0.5)
    return model.to(device=device, dtype=dtype).eval()


def tiny_inputs(device="cpu", batch=2, tokens=11, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (batch, tokens), generator=generator).to(device)


class CountOps(TorchDispatchMode):
    """Counts the calls of llmkernels' ops, in `counts`, by name_of(); `ops` has their own names."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.ops = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "llmkernels":
            self.ops.add(function._opname)
            self.counts[name_of(function, args, kwargs or {})] += 1
        return function(*args, **kwargs or {})


# The functions for an activation, by its op.
FUNCTIONS = {
    "glu": {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "relu2": "relu2_glu"},
    "bias_act": {"gelu": "bias_gelu", "gelu_pytorch_tanh": "bias_gelu", "relu2": "relu2"},
}


def name_of(op, args, named):
    """The name of an op; of an activation's that of the function, as swiglu, swiglu_packed, swiglu_backward."""
    family = op._opname.removesuffix("_backward").removesuffix("_packed")
    if family not in FUNCTIONS:
        return op._opname
    names = [argument.name for argument in op._schema.arguments]
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= dict(zip(names, args, strict=False)) | named
    return op._opname.replace(family, FUNCTIONS[family].get(given["activation"], family), 1)


class ComputedLogits(TorchDispatchMode):
    """Counts the ops that give logits, in `count`."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        tensors = [t for t in tree_leaves(result) if type(t) is torch.Tensor and t.numel() > 0]
        self.count += any(t.shape[-1:] == (VOCAB,) for t in tensors)
        return result


OBSERVERS.add(CountOps)  # the decode step runs under it, as it would without


def count_ops(function, *args, **kwargs):
    """The ops that one call runs, counted."""
    with torch.no_grad(), CountOps() as counter:
        function(*args, **kwargs)
    return dict(counter.counts)


@torch.no_grad()
def logits_of(model, ids, **kwargs):
    return model(ids, **kwargs).logits.float()


def rounding(dtype):
    """How far two computations of the logits may differ in this dtype. Measured: 9 eps in float32, else less than 1."""
    return 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5  # transformers' norm is float32 in float64 too


def assert_close(found, expected, tolerance=1e-5):
    """Equal up to `tolerance` (default: rounding in float32) of the largest value; NaN is never equal."""
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"relative error {error:.1e}"


def as_transformers(function):
    """`function`, as if it were from a transformers release."""
    scope = {**function.__globals__, "__name__": "transformers.models.qwen2.modeling_qwen2"}
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)


def lora(model):
    """The model with LoRA adapters that change its outputs, on attention and MLP, and a trained lm_head."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3,
        target_modules=["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).eval()
