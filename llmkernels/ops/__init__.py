"""The ops, one file per family: public function, shape inference, gradient.

Every op raises, by the names of op and argument: TypeError for an argument of another kind, None for a tensor included;
ValueError for a number or a word that it does not take; RuntimeError for tensors that do not fit (shape, dtype, device,
strides, memory shared with what it writes to); torch.OutOfMemoryError. Nothing is written then, unless it is a length
or position out of range, which the CPU may find in the middle of a decode step. Its fake (meta tensors, torch.compile,
torch.export) raises the same, but cannot see whether two tensors share memory.
"""

from llmkernels.ops import embed_tokens as _embed_tokens  # noqa: F401, its fake
from llmkernels.ops import optim as _optim  # noqa: F401, public in llmkernels.optim
from llmkernels.ops import softcap as _softcap  # noqa: F401, its fake
from llmkernels.ops.activation import (
    bias_act,
    bias_geglu,
    bias_gelu,
    bias_swiglu,
    geglu,
    glu,
    relu2,
    relu2_glu,
    swiglu,
)
from llmkernels.ops.attention import attention, decode_attention, rope_kv_write
from llmkernels.ops.attention_varlen import attention_varlen
from llmkernels.ops.cross_entropy import cross_entropy
from llmkernels.ops.fp8 import fp8_linear, fp8_quantize, rms_norm_fp8_quantize, swiglu_fp8_quantize
from llmkernels.ops.gated_mlp import gated_mlp
from llmkernels.ops.int8 import int8_linear, int8_quantize
from llmkernels.ops.layer_norm import add_layer_norm, layer_norm
from llmkernels.ops.linear import linear, rms_norm_linear
from llmkernels.ops.linear_cross_entropy import linear_cross_entropy
from llmkernels.ops.lora import add_lora, lora_linear
from llmkernels.ops.rms_norm import add_rms_norm, rms_norm
from llmkernels.ops.rms_norm_rope import rms_norm_rope
from llmkernels.ops.rope import rope
from llmkernels.ops.sampling import sample
from llmkernels.ops.softmax import log_softmax, softmax

__all__ = [
    "add_layer_norm",
    "add_lora",
    "add_rms_norm",
    "attention",
    "attention_varlen",
    "bias_act",
    "bias_geglu",
    "bias_gelu",
    "bias_swiglu",
    "cross_entropy",
    "decode_attention",
    "fp8_linear",
    "fp8_quantize",
    "gated_mlp",
    "geglu",
    "glu",
    "int8_linear",
    "int8_quantize",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "lora_linear",
    "relu2",
    "relu2_glu",
    "rms_norm",
    "rms_norm_fp8_quantize",
    "rms_norm_linear",
    "rms_norm_rope",
    "rope",
    "rope_kv_write",
    "sample",
    "softmax",
    "swiglu",
    "swiglu_fp8_quantize",
]
