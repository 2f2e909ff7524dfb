"""Optimizers and what belongs to them, for whole lists of tensors at once."""

from llmkernels.optim.adam import Adam, AdamW
from llmkernels.optim.clip_grad import clip_grad_norm_

__all__ = ["Adam", "AdamW", "clip_grad_norm_"]
