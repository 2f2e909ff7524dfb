"""The ops as drop-in modules."""

from llmkernels.nn.glu import GEGLU, GatedMLP, SwiGLU
from llmkernels.nn.linear import RMSNormLinear
from llmkernels.nn.norm import AddRMSNorm, RMSNorm
from llmkernels.nn.rope import RotaryEmbedding

__all__ = ["GEGLU", "AddRMSNorm", "GatedMLP", "RMSNorm", "RMSNormLinear", "RotaryEmbedding", "SwiGLU"]
