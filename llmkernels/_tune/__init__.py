"""Measured choices of kernels for linears: which of them is fastest is tried on the GPU that is there.

table.py        a measured choice, and those of each GPU in this process, which csrc/kernels/linear/route.h asks first
files.py        those choices as files: of the package, and in the user's cache
candidates.py   what there is to choose from for a linear
measure.py      the time of each, and which one wins
autotune.py     `llmkernels.autotune`: the linears of a model's decode step
"""
