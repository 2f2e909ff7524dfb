"""Shared by the tests of low-rank adapters: the mixes of dtypes that they take."""

import pytest
import torch

# x and what it is added to; A and B
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: "-".join(str(d)[6:] for d in pair))
