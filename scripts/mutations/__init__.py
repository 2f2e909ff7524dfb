"""The ways in which scripts/mutate.py breaks the sources: each one bug that such libraries have had, as an exact
replacement of text, and the tests that must notice."""

from .cpu import CPU
from .cuda import CUDA
from .cuda_decode import CUDA_DECODE
from .fp8 import FP8
from .host import HOST
from .loss import LOSSES
from .mutation import Mutation
from .optim import OPTIM

MUTATIONS = CUDA + CUDA_DECODE + CPU + HOST + OPTIM + LOSSES + FP8

__all__ = ["MUTATIONS", "Mutation"]
