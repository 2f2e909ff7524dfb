"""The models that are measured: a real configuration with random weights, or what the user names."""

import copy
import functools
from pathlib import Path

import torch
from torch import nn

QWEN = "qwen2.5-7b"
QWEN_CONFIG = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
QWEN_05B = "qwen2.5-0.5b"
QWEN_05B_CONFIG = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": True,
}
SMALL = "qwen2-small"
SMALL_CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}


@functools.cache  # for the sections of one run
def load(device: torch.device, model_id: str | None) -> tuple[nn.Module, str]:
    """A model in bfloat16 (float32 on the CPU) with sdpa attention, and the name it has in the results."""
    from transformers import AutoModelForCausalLM

    dtype = default_dtype(device)
    if model_id:
        model = AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype, attn_implementation="sdpa").to(device)
        return model.eval(), Path(model_id).name if Path(model_id).exists() else model_id
    name, config = (QWEN, QWEN_CONFIG) if device.type == "cuda" else (SMALL, SMALL_CONFIG)
    return with_random_weights(config, device).eval(), name


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def with_random_weights(config: dict, device: torch.device) -> nn.Module:
    """A model of a configuration; the same weights every time."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    facts = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False} | config
    torch.manual_seed(0)
    with device:  # made where it runs: 15 GB of random numbers in a second
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**facts), dtype=default_dtype(device), attn_implementation="sdpa"
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):  # all ones would hide a norm that forgets its weight
            parameter.data.normal_(1, 0.1)
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
