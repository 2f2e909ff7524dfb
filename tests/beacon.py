"""A model of a user's own: it derives from nothing of transformers but what lets it generate, and all names are others.

Tests import it as it is, so its classes are from outside of transformers.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from llmkernels.hf.classes.cache_name import cache_name

CACHE = cache_name()
EMBEDS = "inputs_embeds"


class BeaconConfig(PreTrainedConfig):
    model_type = "beacon"
    vocab_size: int = 128
    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 256
    theta: float = 1e4
    tie_word_embeddings: bool = False


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Scale(nn.Module):
    """Root mean square norm."""

    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.gain, 1e-6)


class Gaze(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.number, self.config, self.is_causal = number, config, True
        self.width = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.asks = nn.Linear(config.hidden_size, config.hidden_size)
        self.offers = nn.Linear(config.hidden_size, config.num_key_value_heads * self.width)
        self.holds = nn.Linear(config.hidden_size, config.num_key_value_heads * self.width)
        self.tells = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def forward(self, x, cos, sin, mask, memory):
        q, k, v = self.heads(self.asks(x)), self.heads(self.offers(x)), self.heads(self.holds(x))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if memory is not None:
            k, v = memory.update(k, v, self.number)
        return self.tells(self.attended(q, k, v, mask).flatten(-2))

    def attended(self, q, k, v, mask):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, q, k, v, mask, scaling=self.width**-0.5, dropout=0.0)[0]


class Thought(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.one = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.two = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.three = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.three(F.silu(self.one(x)) * self.two(x))


class Lens(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size // config.num_attention_heads
        self.register_buffer("speed", config.theta ** -(torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, x, positions):
        angles = positions[:, None, :, None].float() * self.speed.float()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Storey(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.gaze, self.thought = Gaze(config, number), Thought(config)
        self.a, self.b, self.c = (Scale(config.hidden_size) for _ in range(3))

    def forward(self, x, cos, sin, mask, memory):
        x = x + self.gaze(self.a(x), cos, sin, mask, memory)
        return x + self.c(self.thought(self.b(x)))


class BeaconForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = BeaconConfig
    _supports_sdpa = True
    _no_split_modules = ["Storey"]  # noqa: RUF012, as transformers has it

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.tower = nn.ModuleList(Storey(config, number) for number in range(config.num_hidden_layers))
        self.lens, self.light = Lens(config), Scale(config.hidden_size)
        self.speech = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.speech

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, logits_to_keep=0, **kwargs
    ):
        memory = kwargs.get(CACHE)
        if use_cache and memory is None:
            memory = DynamicCache(config=self.config)
        x = self.words(input_ids)
        if position_ids is None:
            seen = memory.get_seq_length() if memory is not None else 0
            position_ids = torch.arange(x.shape[1], device=x.device)[None] + seen
        given = {EMBEDS: x, CACHE: memory, "attention_mask": attention_mask, "position_ids": position_ids}
        mask = create_causal_mask(config=self.config, **given)
        cos, sin = self.lens(x, position_ids)
        for storey in self.tower:
            x = storey(x, cos, sin, mask, memory)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        return CausalLMOutputWithPast(logits=self.speech(self.light(x[:, keep])), **{CACHE: memory})
