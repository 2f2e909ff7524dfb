"""The table of benchmarks: a new op adds a file here and a line below."""

from benchmarks.ops import add_rms_norm, geglu, rms_norm, rope, swiglu

OPS = {op.name: op for op in (rms_norm.OP, add_rms_norm.OP, rope.OP, swiglu.OP, geglu.OP)}
