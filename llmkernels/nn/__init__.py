"""The ops as drop-in modules."""

from llmkernels.nn.attention import Attention
from llmkernels.nn.gated_mlp import GatedMLP
from llmkernels.nn.glu import GEGLU, BiasGEGLU, BiasSwiGLU, SwiGLU
from llmkernels.nn.linear import RMSNormLinear
from llmkernels.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from llmkernels.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from llmkernels.nn.quantized import FP8Linear, Int8Linear
from llmkernels.nn.rope import RotaryEmbedding

__all__ = [
    "GEGLU",
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "BiasGEGLU",
    "BiasSwiGLU",
    "CrossEntropyLoss",
    "FP8Linear",
    "GatedMLP",
    "Int8Linear",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RMSNormLinear",
    "RotaryEmbedding",
    "SwiGLU",
]
