"""Packed weights: parameters that are used together, as consecutive rows of one storage.

q|k|v and gate|up of a layer become one tensor each, and the parameters views into it: the same objects with the same
values, so state dicts, optimizers and the model's own forward go on as before, and there is one copy of every weight.
Whether parameters are packed is read off their addresses, never remembered. `.to()`, `load_state_dict(assign=True)`
and `copy.deepcopy` take them apart again; the next decode step packs them again.
"""

import threading
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor, nn

from .graphs import no_capture

_LOCK = threading.Lock()
_TRIM_BYTES = 1 << 30  # give freed CUDA memory back about this often while packing


def groups_of(layer: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of a decoder layer that may be packed, whatever has become of the layer since."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = [(attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))]
    groups = []
    for module, keys in names:
        linears = [getattr(module, key, None) for key in keys]
        for name in ("weight", "bias"):
            group = [getattr(linear, name, None) for linear in linears]
            if all(type(parameter) is nn.Parameter and type(parameter.data) is Tensor for parameter in group):
                groups.append(group)
    return groups


def is_packed(parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters are consecutive rows of one tensor."""
    first = parameters[0]
    start = address = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != address or not parameter.is_contiguous() or parameter.dtype != first.dtype:
            return False
        address += parameter.numel() * parameter.element_size()
    if not start:  # no memory: on meta, sharded away
        return False
    storage = first.untyped_storage()  # memory within it can not be another's
    return storage.data_ptr() <= start and address <= storage.data_ptr() + storage.nbytes()


def packed(parameters: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose consecutive rows the parameters are, or None where they are not."""
    if not is_packed(parameters):
        return None
    first = parameters[0]
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def obstacle(parameters: Sequence[Tensor]) -> str | None:
    """Why parameters can not be packed, or None."""
    first = parameters[0]
    if type(first) is nn.Parameter and is_packed(parameters):
        return None
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            return f"a weight is a {type(parameter.data).__name__}, not a plain parameter"
        if parameter.is_inference():
            return "a weight was made in inference mode"
        if parameter.layout != torch.strided or parameter.device.type == "meta" or not parameter.is_contiguous():
            return "a weight has no ordinary memory"
        if parameter.dtype != first.dtype or parameter.device != first.device:
            return "weights that belong together differ in dtype or device"
        if parameter.shape[1:] != first.shape[1:]:
            return "weights that belong together differ in shape"
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        return "one weight is used twice"
    for parameter in parameters:
        if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size():
            return "a weight shares its memory with other tensors"  # as ZeRO's and FSDP's flat buffers do
    return None


def pack(groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Pack each group of parameters that is not packed yet, one after the other.

    Needs memory for one group on top of the weights. Nobody may hold an address of the parameters.
    """
    with _LOCK:
        groups = [group for group in groups if not is_packed(group)]
        if groups:
            _pack(groups)


@no_capture()
def _pack(groups: Sequence[Sequence[nn.Parameter]]) -> None:
    freed = 0
    on_cuda = groups[0][0].is_cuda
    if on_cuda:
        torch.cuda.synchronize(groups[0][0].device)  # other streams may be reading what is freed here
    for group in groups:
        first = group[0]
        with torch.no_grad(), torch.inference_mode(False):
            storage = torch.empty(
                sum(parameter.shape[0] for parameter in group),
                *first.shape[1:],
                dtype=first.dtype,
                device=first.device,
            )
            for parameter, rows in zip(group, storage.split([p.shape[0] for p in group]), strict=True):
                rows.copy_(parameter.data)
                parameter.data = rows
        freed += storage.numel() * storage.element_size()
        if on_cuda and freed >= _TRIM_BYTES:  # freed blocks have sizes that no packed tensor can use
            torch.cuda.empty_cache()
            freed = 0
    if on_cuda:
        torch.cuda.empty_cache()


def unpack(groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Give each parameter of the packed groups a storage of its own again."""
    for group in groups:
        tensor = packed(group)
        if tensor is None or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            continue  # not packed, or not by us
        del tensor
        with torch.no_grad(), torch.inference_mode(False):
            for parameter in group:
                parameter.data = parameter.data.clone()


def separate(state: MutableMapping[str, Tensor], groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """In a state dict, give each parameter of the packed groups a storage object of its own, over the same memory.

    Savers that know tensors by their storage take views into one for tied weights, and drop all but one.
    """
    addresses = {parameter.data_ptr() for group in groups if is_packed(group) for parameter in group}
    for key, tensor in state.items():
        if type(tensor) is Tensor and addresses and tensor.data_ptr() in addresses:
            begin = tensor.storage_offset() * tensor.element_size()
            storage = tensor.untyped_storage()[begin : begin + tensor.nbytes]
            own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            state[key] = own.set_(storage, 0, tensor.shape, tensor.stride())
