"""The ways in which scripts/mutate.py breaks the sources, each one bug that such libraries have had, as an exact
replacement of text; and the tests that must notice.

They are of races, rounding, tails and offsets, and of what a launch depends on. Any comparison with the oracle sees
that an operand or an option is left out, and tests of behaviour see what Python decides, so hardly any is of that kind.
"""

from .cpu import CPU
from .cuda import CUDA
from .cuda_attention import CUDA_ATTENTION
from .cuda_linear import CUDA_LINEAR
from .mutation import Mutation
from .python import PYTHON

MUTATIONS = CPU + CUDA + CUDA_ATTENTION + CUDA_LINEAR + PYTHON

__all__ = ["MUTATIONS", "Mutation"]
