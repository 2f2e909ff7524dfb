"""Adam, the norm of gradients and their clipping, on lists of tensors: fakes. The public classes and functions are in
llmkernels/optim. Kernels: csrc/kernels/optim, csrc/cpu/optim.cpp."""

import torch

from llmkernels.ops._common import register_fake

register_fake("adam_", lambda *arguments, **named: None, overloads=("",))
register_fake("clip_grads_", lambda *arguments, **named: None, overloads=("",))
register_fake("grad_norm", lambda grads, *others, **named: grads[0].new_empty((), dtype=torch.float32), overloads=("",))
