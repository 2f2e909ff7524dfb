"""The ops, one file per family: public function, shape inference, gradient."""

from llmkernels.ops.attention import decode_attention, rope_kv_write
from llmkernels.ops.glu import geglu, swiglu
from llmkernels.ops.linear import linear, rms_norm_linear
from llmkernels.ops.rms_norm import add_rms_norm, rms_norm
from llmkernels.ops.rope import rope
from llmkernels.ops.sampling import sample

__all__ = [
    "add_rms_norm",
    "decode_attention",
    "geglu",
    "linear",
    "rms_norm",
    "rms_norm_linear",
    "rope",
    "rope_kv_write",
    "sample",
    "swiglu",
]
