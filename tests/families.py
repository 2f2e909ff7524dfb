"""Tiny models of every family of decoders that transformers has, one entry each.

An entry holds what its family does and others don't: where its norms stand, how it rotates, windows that are shorter
than a prompt of tests, multipliers and softcaps far from 1, experts. Sizes are small, with heads of 64, which the
fast attention kernels take, and hidden sizes that are not heads x head_dim wherever the family allows it.
"""

import copy
from dataclasses import dataclass, field

import torch
import transformers

from hf_models import VOCAB

WINDOW = 6  # of layers with a sliding window
IMAGE = VOCAB  # a token that stands for a part of an image, behind the words
LONG = 16  # where the tables of LongRoPE change, in the middle of a generation

_SHARED = {
    "hidden_size": 256,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_FREE_HEADS = {"hidden_size": 192, "head_dim": 64}  # for those whose head_dim is an option of its own
_ALTERNATING = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_SLIDING_FIRST = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.35,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_TABLES = {  # one for each type of layer
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_GEMMA3 = (
    _FREE_HEADS
    | _SLIDING_FIRST
    | {
        "sliding_window": WINDOW,
        "rope_parameters": _TABLES,
        "query_pre_attn_scalar": 48,
        "tie_word_embeddings": True,
    }
)
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}


def _partial(factor):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}}


def _long_rope(pairs, factor):
    """The pairs of a head turn slower, by factors of their own, up to LONG positions and beyond."""
    return {
        "original_max_position_embeddings": LONG,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": factor,
            "short_factor": [1 + i / pairs for i in range(pairs)],
            "long_factor": [1 + 4 * i / pairs for i in range(pairs)],
        },
    }


@dataclass
class Family:
    model: str  # its class in transformers
    options: dict = field(default_factory=dict)  # of its text, beside the shared ones
    outer: dict = field(default_factory=dict)  # of the whole configuration, where the model takes more than text
    lacks: tuple = ()  # the shared options that it does not know

    def config(self, **changes):
        config_class = getattr(transformers, self.model).config_class
        options = copy.deepcopy(_SHARED | self.options | changes)  # a configuration fills in dicts of its own
        options = {name: value for name, value in options.items() if name not in self.lacks}
        if not self.outer:
            return config_class(**options)
        options["vocab_size"] += 4
        tied = options.pop("tie_word_embeddings")
        return config_class(text_config=options, tie_word_embeddings=tied, **self.outer)


_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": _SHARED["hidden_size"],
    "fullatt_block_indexes": [0],
}

_OLD = ("num_key_value_heads", "intermediate_size")  # which the older families do not have, under these names
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", _FREE_HEADS | {"rope_parameters": _LLAMA3}),
    "qwen2": Family("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3ForCausalLM", _FREE_HEADS | {"rope_parameters": _YARN}),
    "mistral": Family("MistralForCausalLM", _FREE_HEADS | {"sliding_window": WINDOW}),
    "ministral": Family("MinistralForCausalLM", _FREE_HEADS | _ALTERNATING | {"sliding_window": WINDOW}),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        _FREE_HEADS
        | {
            "rope_parameters": _YARN
            | {"factor": 2.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 3.0}
        },
    ),
    "gemma": Family("GemmaForCausalLM", _FREE_HEADS | {"tie_word_embeddings": True}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _FREE_HEADS
        | _ALTERNATING
        | {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            "attn_implementation": "eager",  # the others ignore the softcap of attention
        },
    ),
    "gemma3": Family("Gemma3ForCausalLM", _GEMMA3),
    "phi3": Family("Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "phi3_long": Family("Phi3ForCausalLM", _long_rope(32, 1.0)),
    "phi4_mini": Family("Phi3ForCausalLM", _long_rope(24, 0.75) | {"tie_word_embeddings": True}),
    "granite": Family("GraniteForCausalLM", _MULTIPLIERS | {"attention_bias": True, "mlp_bias": True}),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _SLIDING_FIRST
        | {
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _TABLES["sliding_attention"]},
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}
    ),
    "glm": Family("GlmForCausalLM", _FREE_HEADS | _partial(0.5) | {"attention_bias": True}),
    "glm4": Family("Glm4ForCausalLM", _FREE_HEADS | _partial(0.5) | {"attention_bias": True}),
    "cohere": Family("CohereForCausalLM", {"logit_scale": 0.4, "tie_word_embeddings": True}),
    "cohere_qk_norm": Family("CohereForCausalLM", {"logit_scale": 0.4, "use_qk_norm": True}),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _SLIDING_FIRST | {"sliding_window": WINDOW, "logit_scale": 0.4, "tie_word_embeddings": True},
    ),
    "starcoder2": Family("Starcoder2ForCausalLM", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "exaone4": Family("Exaone4ForCausalLM", _FREE_HEADS | _SLIDING_FIRST | {"sliding_window": WINDOW}),
    "seed_oss": Family("SeedOssForCausalLM", _FREE_HEADS | {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ernie4_5": Family("Ernie4_5ForCausalLM", _FREE_HEADS | {"use_bias": True, "tie_word_embeddings": True}),
    "hyperclovax": Family("HyperCLOVAXForCausalLM", _FREE_HEADS | _MULTIPLIERS),
    "helium": Family("HeliumForCausalLM", {"head_dim": 64}),
    "arcee": Family("ArceeForCausalLM", _FREE_HEADS | {"mlp_bias": True, "rope_parameters": _YARN}),
    "nemotron": Family("NemotronForCausalLM", _FREE_HEADS | _partial(0.5) | {"attention_bias": True, "mlp_bias": True}),
    "phi": Family("PhiForCausalLM", _partial(0.5)),
    "gpt_neox": Family("GPTNeoXForCausalLM", _partial(0.25)),
    "gpt2": Family("GPT2LMHeadModel", _NO_DROPOUT | {"n_inner": 136}, lacks=_OLD),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", _NO_DROPOUT | {"n_inner": 136}, lacks=_OLD),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "intermediate_size": 136},
        lacks=_OLD[:1],
    ),
    "gptj": Family("GPTJForCausalLM", _NO_DROPOUT | {"n_inner": 136, "rotary_dim": 32}, lacks=_OLD),
    "codegen": Family("CodeGenForCausalLM", _NO_DROPOUT | {"n_inner": 136, "rotary_dim": 32}, lacks=_OLD),
    "opt": Family(
        "OPTForCausalLM", {"dropout": 0.0, "ffn_dim": 136, "word_embed_proj_dim": _SHARED["hidden_size"]}, lacks=_OLD
    ),
    "biogpt": Family(
        "BioGptForCausalLM",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        lacks=_OLD[:1],
    ),
    "bloom": Family("BloomForCausalLM", lacks=(*_OLD, "max_position_embeddings")),
    "mpt": Family("MptForCausalLM", lacks=_OLD),
    "falcon": Family("FalconForCausalLM", {"bias": True}, lacks=_OLD),
    "stablelm": Family("StableLmForCausalLM", _partial(0.25) | {"use_qkv_bias": True}),
    "stablelm_parallel": Family(
        "StableLmForCausalLM", _partial(0.25) | {"use_parallel_residual": True, "qk_layernorm": True}
    ),
    "mixtral": Family("MixtralForCausalLM", _FREE_HEADS | _EXPERTS | {"sliding_window": WINDOW}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _FREE_HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "mlp_only_layers": [1]},
    ),
    "gpt_oss": Family("GptOssForCausalLM", _FREE_HEADS | _ALTERNATING | _EXPERTS | {"sliding_window": WINDOW}),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}},
        outer={
            "vision_config": _QWEN_VISION,
            "image_token_id": IMAGE,
            "vision_start_token_id": IMAGE + 1,
            "vision_end_token_id": IMAGE + 2,
            "video_token_id": IMAGE + 3,
        },
    ),
    "gemma3_image": Family(
        "Gemma3ForConditionalGeneration",
        _GEMMA3,
        outer={"vision_config": _SIGLIP, "image_token_index": IMAGE, "mm_tokens_per_image": 4},
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        _FREE_HEADS,
        outer={
            "vision_config": _SIGLIP | {"model_type": "clip_vision_model"},
            "vision_feature_layer": -1,
            "image_token_index": IMAGE,
        },
    ),
}


@dataclass
class Expected:
    """What runs of a family, as a table of docs/models.md has it. `no_step` is why it has no decode step; `or_else` why
    not with another transformers, whose class for it computes the same in another way; `loop` what a
    user's own loop has to give that its forwards are steps."""

    title: str
    ops: dict  # of one forward, with an image if it takes one, and how often each
    no_step: str = ""
    or_else: str = ""
    loop: str = ""

    def explains(self, reason: str) -> bool:
        return any(each in reason for each in (self.no_step, self.or_else) if each)


_OWN_ATTENTION = "attends without the function that its config names"
_OWN_ROTATION = "a rotation that has no kernel"

EXPECTED = {
    "llama": Expected("Llama", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "qwen2": Expected("Qwen2, Qwen2.5", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "qwen3": Expected("Qwen3", {"rms_norm": 7, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "mistral": Expected("Mistral", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "ministral": Expected("Ministral", {"rms_norm": 4, "rope": 3, "add_rms_norm": 3, "swiglu": 3}),
    "ministral3": Expected("Ministral 3", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "gemma": Expected("Gemma", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "geglu": 2}),
    "gemma2": Expected("Gemma 2", {"rms_norm": 10, "rope": 3, "add_rms_norm": 3, "geglu": 3}),
    "gemma3": Expected("Gemma 3", {"rms_norm": 16, "rope": 3, "add_rms_norm": 3, "geglu": 3}),
    "phi3": Expected("Phi-3", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "phi3_long": Expected("Phi-3, LongRoPE", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "phi4_mini": Expected("Phi-4-mini", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "granite": Expected("Granite", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "olmo2": Expected("OLMo 2", {"rms_norm": 9, "rope": 2, "swiglu": 2}),
    "olmo3": Expected("OLMo 3", {"rms_norm": 13, "rope": 3, "swiglu": 3}),
    "smollm3": Expected("SmolLM3", {"rms_norm": 4, "rope": 2, "add_rms_norm": 3, "swiglu": 3}),
    "glm": Expected("GLM", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "glm4": Expected("GLM-4", {"rms_norm": 7, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "cohere": Expected("Cohere", {"layer_norm": 3, "rope": 2, "swiglu": 2}),
    "cohere_qk_norm": Expected(
        "Cohere, QK-norm", {"layer_norm": 3, "rope": 2, "swiglu": 2}, "norms of q and k without a kernel"
    ),
    "cohere2": Expected("Cohere 2", {"layer_norm": 4, "rope": 2, "swiglu": 3}),
    "starcoder2": Expected("StarCoder 2", {"layer_norm": 3, "rope": 2, "add_layer_norm": 2, "bias_gelu": 2}),
    "exaone4": Expected("EXAONE 4", {"rms_norm": 13, "rope": 2, "swiglu": 3}),
    "seed_oss": Expected("Seed-OSS", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "ernie4_5": Expected("Ernie 4.5", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "hyperclovax": Expected("HyperCLOVA X", {"rms_norm": 7, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "helium": Expected("Helium", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2}),
    "arcee": Expected("Arcee", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "relu2": 2}),
    "nemotron": Expected("Nemotron", {"layer_norm": 3, "rope": 2, "add_layer_norm": 2, "relu2": 2}),
    "phi": Expected("Phi", {"layer_norm": 3, "rope": 2, "bias_gelu": 2}),
    "gpt_neox": Expected("GPT-NeoX, Pythia", {"layer_norm": 5, "rope": 2, "bias_gelu": 2}),
    "gpt2": Expected("GPT-2", {"layer_norm": 5, "bias_gelu": 2}),
    "gpt_bigcode": Expected("GPT-BigCode, StarCoder", {"layer_norm": 5, "bias_gelu": 2}),
    "gpt_neo": Expected("GPT-Neo", {"layer_norm": 3, "add_layer_norm": 2, "bias_gelu": 2}, _OWN_ATTENTION),
    "gptj": Expected("GPT-J", {"layer_norm": 3, "bias_gelu": 2}, _OWN_ATTENTION, _OWN_ROTATION),
    "codegen": Expected("CodeGen", {"layer_norm": 3, "bias_gelu": 2}, "an unknown layout", _OWN_ROTATION),
    "opt": Expected("OPT", {"layer_norm": 5}),
    "biogpt": Expected("BioGPT", {"layer_norm": 3, "add_layer_norm": 2}),
    "bloom": Expected("BLOOM", {"layer_norm": 6}, _OWN_ATTENTION),
    "mpt": Expected("MPT", {"layer_norm": 5}, _OWN_ATTENTION),
    "falcon": Expected("Falcon", {"layer_norm": 3, "rope": 2, "bias_gelu": 2}, _OWN_ATTENTION),
    "stablelm": Expected("StableLM", {"layer_norm": 3, "rope": 2, "add_layer_norm": 2, "swiglu": 2}),
    "stablelm_parallel": Expected(
        "StableLM, parallel blocks", {"layer_norm": 3, "rope": 2, "swiglu": 2}, "an attention of an unknown layout"
    ),
    "mixtral": Expected("Mixtral", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2}, "experts"),
    "qwen3_moe": Expected("Qwen3-MoE", {"rms_norm": 7, "rope": 2, "add_rms_norm": 2, "swiglu": 1}, "experts"),
    "gpt_oss": Expected("gpt-oss", {"rms_norm": 4, "rope": 3, "add_rms_norm": 3}, "experts"),
    "qwen2_5_vl": Expected(
        "Qwen2.5-VL",
        {"rms_norm": 6, "rope": 2, "add_rms_norm": 2, "swiglu": 3},
        loop="position_ids",
    ),
    "gemma3_image": Expected(
        "Gemma 3, images", {"rms_norm": 17, "rope": 3, "add_rms_norm": 3, "geglu": 3, "bias_gelu": 2}
    ),
    "llava": Expected("LLaVA", {"rms_norm": 3, "rope": 2, "add_rms_norm": 2, "swiglu": 2, "bias_gelu": 1}),
}


LEARNED_POSITIONS = ("opt", "gpt2", "gpt_bigcode", "biogpt")  # those with a step that add embeddings of positions


def family_config(name, **changes):
    return FAMILIES[name].config(**changes)


def family_model(name, device="cpu", dtype=torch.float32, seed=0, **changes):
    """A model in eval mode whose every parameter matters: no weight of a norm is what it starts from, no bias is 0.
    `changes` are options of its configuration, of the text's where it takes more than text. The frequencies of a
    rotation stay in float32, as in a checkpoint that is loaded in `dtype`."""
    torch.manual_seed(seed)
    model = getattr(transformers, FAMILIES[name].model)(family_config(name, **changes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5)
            elif parameter.ndim == 1 or key.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                spread = 0.4 if "embed_tokens" in key else 1.4  # a tied head would repeat the last token
                parameter.normal_(0, spread * parameter.shape[-1] ** -0.5)
            parameter.data = parameter.to(dtype)
    model.generation_config.eos_token_id = None  # some families have one that is outside of this vocabulary
    return model.to(device).eval()


def image_inputs(name, device="cpu"):
    """A prompt with an image in it, for a model that takes one."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(2, VOCAB, (13,), generator=generator).tolist()
    tokens = 16 if name == "llava" else 4
    image, shape, extra = [IMAGE] * tokens, (1, 3, 32, 32), {}
    if name == "qwen2_5_vl":
        image, shape = [IMAGE + 1, *image, IMAGE + 2], (16, 3 * 2 * 14 * 14)
        extra["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    ids = torch.tensor([words[:4] + image + words[4:]])
    if name != "llava":
        extra["mm_token_type_ids" if name == "qwen2_5_vl" else "token_type_ids"] = (ids == IMAGE).long()
    pixels = torch.randn(shape, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels} | extra
    return {key: value.to(device) for key, value in inputs.items()}
