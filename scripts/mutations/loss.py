"""Mutations of softmax and of cross-entropy, of logits and of hidden states, on both devices."""

from .mutation import Mutation

SOFTMAX, LOSS, TERMS = (
    "csrc/kernels/softmax/softmax.cu",
    "csrc/kernels/loss/cross_entropy.cu",
    "csrc/kernels/loss/row_terms.cuh",
)
CPU_LOSS, CHUNKS = "csrc/cpu/cross_entropy.cpp", "csrc/torch/linear_cross_entropy.cpp"
PYTHON = "llmkernels/ops/linear_cross_entropy.py"

LOSS_MUTATIONS = []
