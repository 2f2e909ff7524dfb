"""The models that are measured: a real configuration with random weights, or what the user names."""

import copy
import functools
from pathlib import Path

import torch
from torch import nn

Configuration = tuple[str, dict]  # its class in transformers, and what differs from DEFAULTS

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _rope(theta: float, **facts) -> dict:
    return {"rope_theta": theta, "rope_type": "default", **facts}


def _llama3(factor: float) -> dict:
    facts = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return _rope(5e5, rope_type="llama3", factor=factor, **facts)


# The sizes of the published models. Where the heads are not hidden_size wide, head_dim says how wide they are.
MODELS: dict[str, Configuration] = {
    "qwen2.5-0.5b": (
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "rope_parameters": _rope(1e6),
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": _llama3(32.0),
            "tie_word_embeddings": True,
        },
    ),
    "smollm3-3b": (
        "SmolLM3Config",  # every fourth layer rotates nothing
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "max_position_embeddings": 65536,
            "rope_parameters": _rope(5e6),
            "tie_word_embeddings": True,
        },
    ),
    "phi-4-mini": (
        "Phi3Config",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 200064,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "sliding_window": 262144,
            "rope_parameters": _rope(
                1e4,
                rope_type="longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0] * 48,
                long_factor=[48.0 ** (pair / 47) for pair in range(48)],  # not the published ones, and not reached
            ),
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "rope_parameters": _rope(1e6),
        },
    ),
    "mistral-7b": (
        "MistralConfig",  # v0.3
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32768,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": _rope(1e6),
        },
    ),
    "olmo-2-7b": (
        "Olmo2Config",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "rope_parameters": _rope(5e5),
        },
    ),
    "llama-3.1-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": _llama3(8.0),
        },
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e6),
        },
    ),
    "granite-3.3-8b": (
        "GraniteConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49159,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 16.0,
            "rope_parameters": _rope(1e7),
            "tie_word_embeddings": True,
        },
    ),
    "gemma-2-9b": (
        "Gemma2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "rope_parameters": _rope(1e4),
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-14b": (
        "Qwen2Config",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _rope(1e6),
        },
    ),
}
QWEN, QWEN_05B = "qwen2.5-7b", "qwen2.5-0.5b"

SMALL = "qwen2-small"
SMALL_CONFIG: Configuration = (
    "Qwen2Config",
    {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "rope_parameters": _rope(1e6),
    },
)
SMALLER_SIZES = {  # of any of MODELS, with heads of 128, for which the factors of a rotation are made
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
}


@functools.cache  # for the sections of one run
def load(device: torch.device, model_id: str | None) -> tuple[nn.Module, str]:
    """A model in bfloat16 (float32 on the CPU) with sdpa attention, and the name it has in the results."""
    from transformers import AutoModelForCausalLM

    dtype = default_dtype(device)
    if model_id:
        model = AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype, attn_implementation="sdpa").to(device)
        return model.eval(), Path(model_id).name if Path(model_id).exists() else model_id
    name, config = (QWEN, MODELS[QWEN]) if device.type == "cuda" else (SMALL, SMALL_CONFIG)
    return with_random_weights(config, device).eval(), name


def load_published(name: str, device: torch.device) -> tuple[nn.Module, str]:
    """One of MODELS, as `load` gives it; on the CPU a small one of its kind. Makes room for it first."""
    load.cache_clear()
    kind, facts = MODELS[name]
    if device.type == "cpu":
        name, facts = f"{name}-small", facts | SMALLER_SIZES
    return with_random_weights((kind, facts), device).eval(), name


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def with_random_weights(config: Configuration, device: torch.device) -> nn.Module:
    """A model of a configuration; the same weights every time.

    Its attention is what transformers takes by itself: sdpa, which newer versions refuse to Gemma 2, since it has no
    softcap.
    """
    import transformers

    kind, facts = config
    facts = copy.deepcopy(DEFAULTS | facts)  # a configuration fills in dicts of its own
    torch.manual_seed(0)
    with device:  # made where it runs: 15 GB of random numbers in a second
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, kind)(**facts), dtype=default_dtype(device)
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):  # all alike would hide a norm that forgets its weight
            parameter.data += torch.empty_like(parameter).normal_(0, 0.1)
    return model.to(device)


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def fits_in_float32(model: nn.Module) -> bool:
    """Whether there is room for float32_copy() beside the model."""
    device = next(model.parameters()).device
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return device.type == "cpu" or torch.cuda.mem_get_info(device)[0] > 4 * weights


def float32_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).float()
