"""Tensors that are where others are, and own no memory.

What is kept between two calls of a model must not keep its weights alive: a user who moves a model, or replaces a
weight, expects its memory to be free. Whoever uses an alias makes sure first that the memory is still there.
"""

import ctypes

import torch
from torch import Tensor


class _Memory:
    """A range of a GPU's memory, as torch.as_tensor takes it."""

    def __init__(self, tensor: Tensor):
        data = tensor.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def alias(tensor: Tensor) -> Tensor:
    """A tensor of the same shape at the same address, of a contiguous one on a CPU or a GPU."""
    if tensor.nbytes == 0:
        return torch.empty_like(tensor)
    with torch.inference_mode(False):
        if tensor.is_cuda:
            data = torch.as_tensor(_Memory(tensor), device=tensor.device)
        else:
            memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
            with torch.device("cpu"):  # which frombuffer does not take
                data = torch.frombuffer(memory, dtype=torch.uint8)
        return data.view(tensor.dtype).view(tensor.shape)
