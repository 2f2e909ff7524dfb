"""Scale and softcap of logits, for inference: the fake.

Kernels: csrc/kernels/activation/softcap.cu, csrc/cpu/softcap.cpp.
"""

from llmkernels.ops._common import contiguous_like, register_fake

register_fake("scale_softcap", lambda logits, *options, **named: contiguous_like(logits), overloads=("",))
