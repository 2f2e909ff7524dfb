"""What the decode step reads of a model: `describe(model)`, or the reason why the step can not run.

The step computes what the forwards of a model compute, without calling its modules; so nothing may have to see those
calls, and nothing may compute otherwise.

    trust.py       every module and parameter is what the model's class makes of its config (reference.py)
    bind.py        the description of such a model
    proof.py       the template of it: a small model of the same class and config computes what it says
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmkernels._tune import files

from .._private import _dispatch_has_computed_kernel_for_dispatch_key
from ..classes.effects import packages_of
from ..classes.layout import kind_of
from ..classes.origin import check_names
from ..errors import Distrust, NoStep, UnknownLayout, named_in, reason_of
from ..model import trust
from ..model.bind import bind, positions_of
from ..model.description import Description, Product, with_products
from ..model.reference import reference
from ..modules.replaced import Generating
from . import packing
from .fp8 import obstacle
from .guard import Snapshot, Tree, check_helpers
from .proof import template_of

MAX_BATCH = 64
MAX_HEAD_DIM = 512  # of decode_attention on CUDA; on the CPU there is no limit
_OP = "rope_decode_attention"
_ops = torch.ops.llmkernels


@dataclass(frozen=True, eq=False)
class Described:
    """The description of a model: its tensors are aliases, which own no memory."""

    snapshot: Snapshot
    parts: Description


def describe(model: nn.Module) -> Description:
    """The description of a patched model. Raises NoStep where it computes anything but what the step computes,
    and a Refusal where that is so for as long as it is the same."""
    if not isinstance(model, Generating) or "original" not in vars(type(model)):
        raise NoStep("the model is not patched for it")
    with named_in(model):
        trust.check_surroundings()
        expected = reference(model)
        if any(kind_of(cls) == "experts" for cls in expected.classes):
            raise UnknownLayout("has experts, which are left to transformers")
        in_training = Tree(model, expected.root).in_training
        check_names(expected.names, packages_of(expected.classes))
        check_helpers(model)
        template = template_of(model, expected)
        if in_training is not None and not template.same_in_training:
            raise Distrust(in_training, "{} is in training mode")
        parts = bind(template, model, expected)
    _check_tensors(parts)
    return parts


def _check_tensors(parts: Description) -> None:
    device, dtype = parts.weight.device, parts.weight.dtype
    head_dim = max(layer.attention.head_dim for layer in parts.layers)
    if device.type not in ("cpu", "cuda"):
        raise NoStep(f"no kernels for {device.type}")
    name = f"llmkernels::{_OP}"
    if not hasattr(_ops, _OP) or not _dispatch_has_computed_kernel_for_dispatch_key(name, device.type.upper()):
        raise NoStep(f"this build of llmkernels has no {name} for {device.type}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64) or (
        device.type == "cuda" and (dtype.itemsize == 8 or head_dim > MAX_HEAD_DIM)
    ):
        raise NoStep(f"no kernel for {dtype} with head_dim {head_dim} on {device.type}")
    if torch.is_autocast_enabled(device.type):
        raise NoStep("autocast decides the dtypes")
    seen: Counter[int] = Counter(id(parameter) for group in parts.groups for parameter in group)
    if seen and max(seen.values()) > 1:
        raise NoStep("layers share weights")


def check_batch(parts: Description, input_ids: Tensor) -> None:
    """Raise NoStep unless the step takes these tokens."""
    if input_ids.shape[0] > MAX_BATCH:
        raise NoStep(f"a batch of more than {MAX_BATCH}")
    if type(input_ids) is not Tensor:
        raise NoStep(f"input_ids are a {type(input_ids).__name__}")
    if input_ids.device != parts.weight.device:
        raise NoStep(f"input_ids on {input_ids.device}")
    if input_ids.numel() == 0:
        raise NoStep("empty input_ids")


def check_length(parts: Description, tokens: int) -> None:
    """Raise NoStep unless the description holds for so many tokens."""
    if tokens > len(parts.positions):
        if parts.position_embedding is not None:
            raise NoStep(f"there are embeddings of {len(parts.positions)} positions alone")
        by_rope = len(parts.positions) == len(positions_of(parts.rotary))
        what = "how queries are rotated or scaled" if by_rope else "what a window leaves in the cache"
        raise NoStep(f"{what} depends on the length of the sequence")


# --- packing


def pack(model: nn.Module, parts: Description) -> Description:
    """The description with packed products. Raises NoStep where they can not be packed.

    A description in use stays valid, also when another thread unpatches the model. The measured choices for these
    products are read, where the model was not on this GPU when it was patched.
    """
    if parts.weight.is_cuda:
        files.load(parts.weight.get_device())
    with packing.LOCK:
        if not isinstance(model, Generating):
            raise NoStep("the model is not patched any more")
        if [*_left_to_pack(parts)]:
            check_packable(parts)
            try:
                packing.pack(parts.groups, parts.transposed)
            except torch.OutOfMemoryError:
                raise NoStep("there is no memory to pack the weights of a layer") from None
        return packed(parts)


def packed(parts: Description) -> Description:
    """The description with the tensors of its products, which are packed."""

    def tensor(parameters: tuple[nn.Parameter, ...]) -> Tensor | None:
        if not parameters:
            return None
        return parameters[0] if len(parameters) == 1 else packing.packed(parameters)

    def with_tensors(product: Product) -> Product:
        weight = packing.transposed(product.weights[0]) if product.transposed else tensor(product.weights)
        return dataclasses.replace(product, weight=weight, bias=tensor(product.biases))

    return with_products(parts, with_tensors)


def check_packable(parts: Description) -> None:
    for group in _left_to_pack(parts):
        if reason := packing.obstacle(group):
            raise NoStep(reason)


def _left_to_pack(parts: Description) -> Iterator[tuple[nn.Parameter, ...]]:
    yield from (group for group in parts.groups if packing.packed(group) is None)
    yield from ((weight,) for weight in parts.transposed if packing.transposed(weight) is None)


def why_not(model: nn.Module) -> str | None:
    """Why the decode step of a model can not run now, or None."""
    return reason_of(lambda: check_packable(describe(model)))


def why_not_in_fp8(model: nn.Module) -> str | None:
    """Why prompts of a model that has a step can not run in FP8 now, or None."""
    try:
        return obstacle(describe(model))
    except NoStep as reason:
        return str(reason)
