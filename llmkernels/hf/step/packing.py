"""Packed weights: parameters that are used together, as consecutive rows of one tensor.

q|k|v and gate|up of a layer become one tensor each, and the parameters its rows: the same objects with the same values,
so state dicts, optimizers and the model's own forward go on as before, and there is one copy of every weight.

    base    [ q rows          | k rows | v rows ]     one allocation
    q, k, v [ storage         ][storage][storage]     a storage object each, over its part of the memory

With a storage of its own each parameter passes for an ordinary tensor: whoever saves one writes that one, and nobody
takes q, k and v for tied weights. Together they keep the base alive, and nothing else does. Whether parameters are
packed is read off their addresses in every call. A weight that gets another tensor (`.to()`,
`load_state_dict(assign=True)`, a merged adapter) takes its group apart; the next decode step packs that group again.

A parameter that is the transposed matrix of a product, as GPT-2's are, is laid out in memory by its columns, which are
the rows of the product.

Other threads may use the parameters meanwhile, in a forward of the model's modules: the memory that a parameter had is
freed when the operations that may have begun on it have ended.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._private import _new_with_weak_ptr
from .graphs import no_recording

LOCK = threading.RLock()  # held while weights are packed or unpacked, or must not be
_LONGEST_WAIT = 0.05  # s, behind the shortest one, for who holds a parameter without reading it
# s, beside other threads, for who reads or writes a parameter without holding it; on a GPU that is only a launch
_SHORTEST_WAIT = {"cpu": 0.05, "cuda": 0.001}
_TRIM_BYTES = 1 << 30  # give freed memory back about this often while packing

_bases: dict[int, StorageWeakRef] = {}  # by the address of a packed parameter: the storage of its base, if it is alive


def packed(parameters: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose consecutive rows the parameters are, or None where they are not."""
    first = parameters[0]
    start = address = first.data_ptr()
    ref = _bases.get(start)
    if ref is None:
        return None
    rows = 0
    for parameter in parameters:
        if parameter.data_ptr() != address or not parameter.is_contiguous() or parameter.dtype != first.dtype:
            return None
        address += parameter.nbytes
        rows += parameter.shape[0]
    storage = _new_with_weak_ptr(ref.cdata)
    if storage is None or not storage.data_ptr() <= start <= address <= storage.data_ptr() + storage.nbytes():
        return None  # memory within a living storage can not be another's
    offset = (start - storage.data_ptr()) // first.element_size()
    return _on(storage, offset, (rows, *first.shape[1:]), first)


def transposed(parameter: Tensor) -> Tensor | None:
    """The transposed matrix, contiguous, in the memory of a parameter; None where that has other rows."""
    other = parameter.detach().t()
    return other if other.is_contiguous() else None


def memory_of(tensor: Tensor) -> int:
    """The same number for tensors of which each keeps the memory of the others alive."""
    storage = tensor.untyped_storage()
    if (ref := _bases.get(tensor.data_ptr())) is not None:
        base = _new_with_weak_ptr(ref.cdata)
        if base is not None and base.data_ptr() <= tensor.data_ptr() < base.data_ptr() + base.nbytes():
            return base._cdata  # memory within a living storage can not be another's
    return storage._cdata


def _on(storage: torch.UntypedStorage, offset: int, shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, shape, like.stride())


def obstacle(parameters: Sequence[Tensor]) -> str | None:
    """Why parameters can not be packed, or None."""
    first = parameters[0]
    for parameter in parameters:
        if parameter.is_inference():
            return "a weight was made in inference mode"
        if parameter.layout != torch.strided or parameter.device.type == "meta" or not parameter.is_contiguous():
            return "a weight has no ordinary memory"
        if parameter.device.type == "cpu" and parameter.is_shared():
            return "a weight is in memory that processes share"
        if parameter.dtype != first.dtype or parameter.device != first.device:
            return "weights that belong together differ in dtype or device"
        if parameter.shape[1:] != first.shape[1:]:
            return "weights that belong together differ in shape"
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        return "one weight is used twice"
    for parameter in parameters:
        if parameter.untyped_storage().nbytes() != parameter.nbytes:
            return "a weight shares its memory with other tensors"  # as ZeRO's and FSDP's flat buffers do
    return None


def pack(groups: Iterable[Sequence[nn.Parameter]], to_transpose: Iterable[nn.Parameter] = ()) -> None:
    """Pack each group of parameters that is not packed yet, one after the other, and transpose others in memory.

    Needs memory for one group on top of the weights; on the CPU beside other threads for _TRIM_BYTES of groups. Nobody
    may hold an address of the parameters.
    """
    with LOCK:
        for address in [address for address, ref in _bases.items() if ref.expired()]:
            del _bases[address]
        _replace_all([group for group in groups if packed(group) is None], _packed_rows)
        _replace_all([(weight,) for weight in to_transpose if transposed(weight) is None], _columns)


def unpack(model: nn.Module) -> None:
    """Give each packed parameter of a model separate memory by rows again, one base after the other."""
    with LOCK:
        groups: dict[int, list[Tensor]] = {}
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
                ref = _bases.get(parameter.data_ptr()) if parameter.layout == torch.strided else None
                if ref is not None and not ref.expired():
                    groups.setdefault(ref.cdata, []).append(parameter)
        _replace_all([*groups.values()], _separate_rows)


def _packed_rows(group: Sequence[nn.Parameter]) -> list[Tensor]:
    first, counts = group[0], [parameter.shape[0] for parameter in group]
    base = torch.empty(sum(counts), *first.shape[1:], dtype=first.dtype, device=first.device)
    storage, ends = base.untyped_storage(), 0
    rows = []
    for parameter in group:
        begins, ends = ends, ends + parameter.nbytes
        rows.append(_on(storage[begins:ends], 0, parameter.shape, parameter))
        _bases[rows[-1].data_ptr()] = StorageWeakRef(storage)
    return rows


def _columns(group: Sequence[nn.Parameter]) -> list[Tensor]:
    columns = [torch.empty_like(parameter.data.t(), memory_format=torch.contiguous_format) for parameter in group]
    _bases.update((one.data_ptr(), StorageWeakRef(one.untyped_storage())) for one in columns)
    return [one.t() for one in columns]


def _separate_rows(group: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.empty_like(parameter.data, memory_format=torch.contiguous_format) for parameter in group]


def _replace_all(groups: Sequence[Sequence[nn.Parameter]], make_rows: Callable) -> None:
    """Give the parameters of each group what `make_rows(group)` makes for them."""
    groups = [group for group in groups if group]
    if groups:
        with no_recording(), torch.no_grad(), torch.inference_mode(False):
            _replace(groups, make_rows)


def _replace(groups: Sequence[Sequence[nn.Parameter]], make_rows: Callable) -> None:
    freed, on_cuda = 0, groups[0][0].is_cuda
    shortest_wait = _SHORTEST_WAIT["cuda" if on_cuda else "cpu"] if threading.active_count() > 1 else 0.0
    for some in _parts(groups, 0 if on_cuda or not shortest_wait else _TRIM_BYTES):
        old: list[Tensor] = []
        try:
            for group in some:
                old += [parameter.data for parameter in group]
                for parameter, new in zip(group, make_rows(group), strict=True):
                    new.copy_(parameter.data)
                    if on_cuda:  # another thread may read it in another stream
                        torch.cuda.current_stream(new.device).synchronize()
                    # A thread that reads it at this moment has the old storage or the new one, both from offset 0.
                    parameter.data = new
        finally:
            _wait_for_readers([parameter for group in some for parameter in group], shortest_wait)
        freed += sum(tensor.nbytes for tensor in old)
        if on_cuda:
            torch.cuda.synchronize(some[0][0].device)  # streams may still read what is freed here
        del old
        if on_cuda and freed >= _TRIM_BYTES:  # freed blocks have sizes that no packed tensor can use
            torch.cuda.empty_cache()
            freed = 0
    if on_cuda:
        torch.cuda.empty_cache()


def _parts(groups: Sequence[Sequence[nn.Parameter]], nbytes: int) -> Iterator[list[Sequence[nn.Parameter]]]:
    """The groups, so many at a time that they have `nbytes`, and at least one."""
    some: list[Sequence[nn.Parameter]] = []
    for group in groups:
        some.append(group)
        if sum(parameter.nbytes for group in some for parameter in group) >= nbytes:
            yield some
            some = []
    if some:
        yield some


def _wait_for_readers(parameters: Sequence[nn.Parameter], shortest_wait: float) -> None:
    """Return when no operation that other threads have begun uses the memory that the parameters had before.

    An operation holds its arguments until it ends, beside the Python object that holds each always. So do for longer
    autograd's graphs, views and DDP's buckets. Nobody waits for those: what an operation reads after _LONGEST_WAIT it
    reads by a view, which keeps the memory alive. An operation that is a method of the parameter itself, as the copy_()
    of load_state_dict, does not hold it: it has `shortest_wait` seconds to end.

    (The frames of other threads would tell which calls they are in, but Python 3.11 lets go of frames that it hands out
    while their variables are cleared, and who reads them crashes.)
    """
    time.sleep(shortest_wait)
    end = time.monotonic() + _LONGEST_WAIT
    while any(parameter._use_count() > 1 for parameter in parameters) and time.monotonic() < end:
        time.sleep(1e-4)
