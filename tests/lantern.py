"""A family of decoders that nobody knows: what it does, each of the known ones does elsewhere, but none all of it.

Tests import it under the name that it would have in transformers.
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from llmkernels.hf.classes.cache_name import cache_name

CACHE = cache_name()


class LanternConfig(LlamaConfig):
    model_type = "lantern"


class LanternRMSNorm(nn.Module):
    """The weight is what is added to 1."""

    def __init__(self, size, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = epsilon

    def forward(self, x):
        wide = x.float()
        wide = wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return (wide * (1 + self.weight.float())).to(x.dtype)


class LanternMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN["gelu_new"]

    def forward(self, x):
        return self.narrow(self.act(self.widen(x)))


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    """Neighbours are pairs."""
    pairs = cos.shape[-1] // 2
    cos, sin = (table[..., :pairs].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for table in (cos, sin))

    def turned(x):
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return x * cos + torch.stack((-second, first), -1).flatten(-2) * sin

    return turned(q), turned(k)


class LanternAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = 0.3
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        narrow = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, narrow)
        self.v_proj = nn.Linear(config.hidden_size, narrow)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.q_norm = LanternRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = LanternRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        cache = kwargs.pop(CACHE, None)
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        q, k = rotary(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        y, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.dense(y.flatten(-2)), weights


class LanternDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention_of_tokens = LanternAttention(config, layer_idx)
        self.feed_forward = LanternMLP(config)
        self.first, self.second, self.third = (
            LanternRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.residual_multiplier = 0.6

    def forward(self, x, **kwargs):
        attended, _ = self.attention_of_tokens(self.first(x), **kwargs)
        x = self.second(attended) * self.residual_multiplier + x
        return x + self.feed_forward(self.third(x)) * 0.8


class LanternModel(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(LanternDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LanternRMSNorm(config.hidden_size, config.rms_norm_eps)


class LanternForCausalLM(LlamaForCausalLM):
    config_class = LanternConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LanternModel(config)
