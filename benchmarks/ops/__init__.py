"""The table of benchmarks: a new op adds a file here and a line below."""

from benchmarks.ops import (
    adamw,
    add_rms_norm,
    bias_gelu,
    cross_entropy,
    decode_attention,
    gated_mlp,
    geglu,
    layer_norm,
    linear,
    rms_norm,
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
        swiglu.OP,
        geglu.OP,
        bias_gelu.OP,
        gated_mlp.OP,
        softmax.OP,
        cross_entropy.OP,
        cross_entropy.GRADIENT,
        adamw.OP,
    )
}
# Those of a decode step, measured by `python -m benchmarks decode`.
DECODE_OPS = {op.name: op for op in (linear.LINEAR, linear.RMS_NORM_LINEAR, decode_attention.OP, sample.OP)}
