"""The ops, one file per family: public function, shape inference, gradient."""

from llmkernels.ops.glu import geglu, swiglu
from llmkernels.ops.rms_norm import add_rms_norm, rms_norm
from llmkernels.ops.rope import rope
from llmkernels.ops.sampling import sample

__all__ = ["add_rms_norm", "geglu", "rms_norm", "rope", "sample", "swiglu"]
