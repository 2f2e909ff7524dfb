"""Whether a model is still what its description was read from.

inspect_all     every module and parameter of a model is as in its reference: looks at everything, and says why not
Snapshot        the same as when it was taken: a look at what can have changed, which takes a third of that
check_helpers   generate() asks of the model what its class answers
check_attention  the model attends by a function of transformers
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import trust
from .layers import own_class
from .origin import UnknownLayout, check_origin
from .reference import Part, Reference, reference
from .trust import Distrust, Inspection, Kind, NoStep, calls_only_its_class, hooks_do_nothing


def inspect_all(model: nn.Module, root: Part) -> None:
    """Raise NoStep or Distrust unless each module and parameter of a model is as in its reference."""
    weight = next(model.parameters(), None)
    inspection = Inspection(getattr(weight, "dtype", None), getattr(weight, "device", None))
    config = model.config

    def visit(module: nn.Module, part: Part) -> None:
        members = inspection.module(module, part.kind)
        modules = members["_modules"]
        if members.get("config", config) is not config:
            raise Distrust(module, "{} has a config of its own")
        if modules.keys() != part.parts.keys():
            raise NoStep(f"{len(modules)} layers, of {len(part.parts)} in the config")
        for name, child in part.parts.items():
            visit(modules[name], child)

    visit(model, root)


_TENSORS = "_parameters", "_buffers"


@dataclass(frozen=True)
class _Module:
    """A module when the snapshot was taken. `parent` is the index of the one before it that has it, as `name`.

    `size` is the number of its members: one that hides a child or a parameter would be one more. `numbers` are the
    members with a value that a forward may read; `tensors` its parameters and buffers, by where they are and name.
    """

    parent: int
    name: str
    cls: type
    size: int
    training: bool
    children: int
    has_config: bool
    numbers: tuple[tuple[str, Any], ...]
    counts: tuple[int, int]
    tensors: tuple[tuple[str, str, tuple], ...]


class Snapshot:
    """What a model is. Keeps nothing of it alive. Raises NoStep where the model can not be read."""

    def __init__(self, model: nn.Module):
        expected = _reference_of(model)
        self._reference = weakref.ref(expected)
        _inspect(model, expected.root)
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        self._classes: dict[tuple[type, Kind], None] = {}
        self._modules: list[_Module] = []
        self._tensors: list[tuple[weakref.ref, int]] = []
        self._add(model, expected.root, 0, "")

    def _add(self, module: nn.Module, part: Part, parent: int, name: str) -> None:
        members, index = vars(module), len(self._modules)
        self._classes[type(module), part.kind] = None
        named = [name for name, _ in part.kind.numbers] + list(part.read)
        tensors = [(kind, name, x) for kind in _TENSORS for name, x in members[kind].items()]
        self._modules.append(
            _Module(
                parent=parent,
                name=name,
                cls=type(module),
                size=len(members),
                training=module.training,
                children=len(members["_modules"]),
                has_config="config" in members,
                numbers=tuple((name, members.get(name)) for name in named),
                counts=tuple(len(members[kind]) for kind in _TENSORS),
                tensors=tuple((kind, name, _identity(x)) for kind, name, x in tensors),
            )
        )
        self._tensors += [(weakref.ref(x), x.data_ptr()) for _, _, x in tensors if x is not None]
        for name, child in part.parts.items():
            self._add(members["_modules"][name], child, index, name)

    def memory(self) -> list[torch.UntypedStorage] | None:
        """What keeps the memory of all parameters and buffers alive, or None if one of them is not where it was."""
        found = []
        for ref, address in self._tensors:
            tensor = ref()
            if tensor is None or tensor.data_ptr() != address:
                return None
            found.append(tensor.untyped_storage())
        return found

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is the same. Asked while what `memory` gave is alive, so that no other tensor can have the
        place of one."""
        trust.check_surroundings()
        expected = _reference_of(model)
        if self._reference() is not expected:
            return False
        check_helpers(model)
        if not self._is_untouched(model):
            _inspect(model, expected.root)
            return False
        return not torch.is_autocast_enabled(model.device.type)

    def _is_untouched(self, model: nn.Module) -> bool:
        config, found, root = model.config, [], {"": model}
        try:
            for cls, kind in self._classes:
                trust.check_class(cls, kind)
            for known in self._modules:
                module = (found[known.parent]["_modules"] if found else root)[known.name]
                members = module.__dict__
                found.append(members)
                if (
                    type(module) is not known.cls
                    or len(members) != known.size
                    or members["training"] is not known.training
                    or len(members["_modules"]) != known.children
                    or (known.has_config and members["config"] is not config)
                    or ((members["_forward_hooks"] or members["_forward_pre_hooks"]) and not hooks_do_nothing(members))
                    or ("forward" in members and not calls_only_its_class(module, self._dtype, self._device))
                    or (len(members["_parameters"]), len(members["_buffers"])) != known.counts
                ):
                    return False
                for name, value in known.numbers:
                    if members.get(name) != value:
                        return False
                for kind, name, identity in known.tensors:
                    if _identity(members[kind][name]) != identity:
                        return False
        except (KeyError, AttributeError, UnknownLayout):
            return False
        return True


def _reference_of(model: nn.Module) -> Reference:
    try:
        return reference(model)
    except UnknownLayout as reason:
        raise NoStep(f"{type(model).__name__} {reason}") from None


def _inspect(model: nn.Module, root: Part) -> None:
    try:
        inspect_all(model, root)
    except Distrust as reason:
        raise reason.named_in(model) from None


def _identity(x: Tensor | None) -> tuple:
    """What tells a tensor from another while it is alive, and from itself with other data. A weight that is written in
    place is the same, since a step reads it as it is; a buffer is not, since tables may have been made of it."""
    if x is None:
        return ()
    version = None
    if not isinstance(x, nn.Parameter):
        version = x.tolist() if x.is_inference() else x._version  # which a tensor made in inference mode has not
    return id(x), x.data_ptr(), x.dtype, x.shape, x.stride(), version


# --- the rest of what generate() asks of a model

_HELPERS = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "__call__")


def check_helpers(model: nn.Module) -> None:
    """generate() asks nothing else of the model than of its family's class."""
    patched = type(model)  # which another thread may change meanwhile
    if "original" not in vars(patched):
        raise NoStep("the model is not patched for it")
    original = patched.original
    known = own_class(original)
    for name in _HELPERS:
        if name in vars(model) or getattr(original, name) is not getattr(known, name):
            raise NoStep(f"{name} was replaced")
        try:
            check_origin(getattr(known, name), ("transformers", "torch"))  # torch's: decorators such as no_grad
        except UnknownLayout as reason:
            raise NoStep(f"{name}: {reason}") from None
