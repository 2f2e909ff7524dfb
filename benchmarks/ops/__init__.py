"""The table of benchmarks: a new op adds a file here and a line below."""

from benchmarks.ops import adamw, add_rms_norm, decode_attention, geglu, linear, rms_norm, rope, sample, swiglu

OPS = {op.name: op for op in (rms_norm.OP, add_rms_norm.OP, rope.OP, swiglu.OP, geglu.OP, adamw.OP)}
# Those of a decode step, measured by `python -m benchmarks decode`.
DECODE_OPS = {op.name: op for op in (linear.LINEAR, linear.RMS_NORM_LINEAR, decode_attention.OP, sample.OP)}
