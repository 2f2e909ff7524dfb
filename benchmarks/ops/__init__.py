"""The table of benchmarks: a new op adds a file here and a line below."""

from benchmarks.ops import (
    adamw,
    add_rms_norm,
    bias_gelu,
    cross_entropy,
    decode_attention,
    fp8,
    gated_mlp,
    geglu,
    layer_norm,
    linear,
    linear_cross_entropy,
    lora_linear,
    rms_norm,
    rms_norm_rope,
    rope,
    sample,
    softmax,
    swiglu,
)

OPS = {
    op.name: op
    for op in (
        rms_norm.OP,
        add_rms_norm.OP,
        layer_norm.OP,
        rope.OP,
        rms_norm_rope.OP,
        swiglu.OP,
        geglu.OP,
        bias_gelu.OP,
        fp8.QUANTIZE,
        fp8.RMS_NORM,
        fp8.SWIGLU,
        gated_mlp.OP,
        softmax.OP,
        cross_entropy.OP,
        cross_entropy.GRADIENT,
        linear_cross_entropy.OP,
        lora_linear.OP,
        adamw.OP,
    )
}
# Those of a decode step, and products, measured by `python -m benchmarks decode`.
DECODE_OPS = {op.name: op for op in (linear.LINEAR, linear.RMS_NORM_LINEAR, fp8.LINEAR, decode_attention.OP, sample.OP)}
