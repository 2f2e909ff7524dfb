"""What the optimizers do with tensors that the ops do not take as they are."""

import torch
from torch import Tensor


def local(x: Tensor) -> Tensor:
    """The part of a DTensor in this process; any other tensor itself."""
    return x.to_local() if is_distributed(x) else x


def real(x: Tensor) -> Tensor:
    """As `local`, with complex numbers as pairs of real ones."""
    x = local(x)
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def is_distributed(x: Tensor) -> bool:
    return type(x) not in (Tensor, torch.nn.Parameter) and hasattr(
        x, "to_local"
    )  # looking up what is not there is slow


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(x: Tensor, model: Tensor) -> Tensor:
    """x in the memory order of `model`, which is dense: itself or a copy."""
    strides, others = x.stride(), model.stride()
    if strides == others or model.numel() == 0:
        return x
    if all(a == b or n == 1 for a, b, n in zip(strides, others, model.shape, strict=True)):
        return x
    return torch.empty_like(model, dtype=x.dtype, memory_format=torch.preserve_format).copy_(x)


def grad_norm(grads: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all elements, float32, on the device of the first tensor; DTensors with their other parts."""
    if any(map(is_distributed, grads)):
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        return (norm.full_tensor() if is_distributed(norm) else norm).float()
    grads = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
    norms = [torch.ops.llmkernels.grad_norm(part, norm_type) for part in by_device(grads, grads).values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def by_device(tensors: list[Tensor], entries: list) -> dict[torch.device, list]:
    """The entries of the tensors on each device."""
    found: dict[torch.device, list] = {}
    for tensor, entry in zip(tensors, entries, strict=True):
        found.setdefault(tensor.device, []).append(entry)
    return found
