"""Whether a model is still what its description was read from.

Tree             every module and parameter of a model is as in its reference: looks at everything, and says why not
Snapshot         the same as when it was taken: one pass over a flat record, in C++
check_helpers    generate() asks of the model what its class answers
check_attention  the model attends by a function of transformers
"""

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..classes.origin import Entry, asked_of_origin, check_origin, entry
from ..errors import Distrust, NoStep, UnknownLayout, named_in
from ..model import adapted, trust
from ..model.reference import ExpectedModule, attention_function, attention_scope, mask_function, reference
from ..model.text import is_config, text_config, text_entry
from ..model.trust import Inspection, calls_only_its_class, hooks_do_nothing
from ..modules import lora
from ..modules.replaced import library_class
from . import packing
from .record import Lists

_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_TENSORS = "_parameters", "_buffers"


class Tree(Lists):
    """The modules of a model, for a record. A module that is as large as it was has no member that hides a child or a
    parameter.

    Raises NoStep or Distrust unless each module and parameter is as in its reference.
    """

    def __init__(self, model: nn.Module, root: ExpectedModule):
        super().__init__(model)
        weight = next(model.parameters(), None)
        self._inspection = Inspection(getattr(weight, "dtype", None), getattr(weight, "device", None))
        self._configs = model.config, text_config(model.config)
        self.classes: dict[type, None] = {}
        self.hooked: list[str] = []  # modules with hooks, or with a forward set on them, that do nothing now
        self._add(model, root, 0, "", "")

    @property
    def in_training(self) -> nn.Module | None:
        """A module that is in training mode, if there is one whose forward asks for it."""
        return self._inspection.in_training

    def _add(self, module: nn.Module, part: ExpectedModule, parent: int, name: str, path: str) -> None:
        base = adapted.inspect(module, self._inspection)
        members = self._inspection.module(base, part.spec)
        for each, value in part.lists.items():
            if members.get(each) != value:
                raise Distrust(base, f"{each} of {{}} is not what its class makes of the config")
        found = tuple(members.values())  # another thread may patch the module meanwhile
        if any(is_config(value) and not any(value is config for config in self._configs) for value in found):
            raise Distrust(base, "{} has a config of its own")
        modules = members["_modules"]
        if modules.keys() != part.parts.keys() | part.others:
            raise NoStep(f"{len(modules)} layers, of {len(part.parts)} in the config")
        index = self.node(parent, name, module) if name else 0  # of the model, which is there already
        if base is not module:
            index, path = self._add_adapted(module, index, path), f"{path}.base_layer"
        children = self._add_itself(base, index, path)
        self.equal += [(index, each, members.get(each)) for each in (*dict(part.spec.numbers), *part.read)]
        self.equal += [(index, *item) for item in part.lists.items()]
        for each, part_of_it in part.parts.items():
            self._add(modules[each], part_of_it, children, each, f"{path}.{each}".lstrip("."))

    def _add_itself(self, module: nn.Module, index: int, path: str) -> int:
        """Returns the node of the module's children."""
        members = vars(module)
        self.classes[type(module)] = None
        self.same += [(index, name, x) for name, x in tuple(members.items()) if name == "training" or is_config(x)]
        self.equal += [(index, *entry) for entry in trust.of_training(members)]
        for kind in _TENSORS:
            place = self.node(index, kind, members[kind])
            self.tensors += [(place, name, tensor) for name, tensor in tuple(members[kind].items())]
        for kind in _HOOKS:
            self.node(index, kind, members[kind])
        if "forward" in members or any(members[kind] for kind in _HOOKS):
            self.hooked.append(path)
        return self.node(index, "_modules", members["_modules"])

    def _add_adapted(self, module: nn.Module, index: int, path: str) -> int:
        """Returns the node of the module's base."""
        members, children = vars(module), self._add_itself(module, index, path)
        modules = members["_modules"]
        self.equal += [(index, name, copy.copy(members[name])) for name in lora.READ]
        for name in adapted.adapters_of(module):
            for kind in lora.PARTS:
                inside = self.node(self.node(children, kind, modules[kind]), "_modules", modules[kind]._modules)
                one = modules[kind]._modules[name]
                node = self.node(inside, name, one)
                self._add_itself(one, node, f"{path}.{kind}.{name}")
                self.equal.append((node, "p", vars(one).get("p")))
        return self.node(children, "base_layer", modules["base_layer"])


class Snapshot:
    """What a model is. Keeps no module and no tensor alive. Raises NoStep where the model can not be read."""

    def __init__(self, model: nn.Module):
        with named_in(model):
            expected = reference(model)
            tree = Tree(model, expected.root)
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        self._attention, self._scope = expected.attention, attention_scope(model)
        self._mask = mask_function(model.config)
        tree.same += [(0, name, None) for name in _HELPERS]
        config, of_text = tree.node(0, "config", model.config), text_entry(model.config)
        own = ((name, value) for name, value in expected.config.items() if name != of_text and not is_config(value))
        tree.equal += [(config, name, value) for name, value in own]
        if of_text is not None:
            text = tree.node(config, of_text, text_config(model.config))
            tree.equal += [(text, name, value) for name, value in expected.config[of_text].items()]
        tree.names += [*map(entry, expected.names), *_asked_of_helpers(model)]
        tree.names += [name for cls in tree.classes for name in trust.asked_of(cls)]
        tensors = [tensor for _, _, tensor in tree.tensors if tensor is not None]
        self._hooked = tree.hooked
        # A weight that is written in place is the same, since a step reads it as it is; a buffer is not, since tables
        # may have been made of it.
        self._buffers = [(weakref.ref(x), _version(x)) for x in tensors if not isinstance(x, nn.Parameter)]
        self._record = tree.record(list({packing.memory_of(tensor): tensor for tensor in tensors}.values()))

    def memory(self) -> list[torch.UntypedStorage] | None:
        """What keeps the memory of all parameters and buffers alive, or None if some of it is not where it was."""
        return self._record.memory()

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is the same. Asked while what `memory` gave is alive, so that no other tensor can have the
        place of one."""
        trust.check_surroundings()
        return (
            self._record.holds(model)
            and attention_function(model.config, self._scope) is self._attention
            and mask_function(model.config) is self._mask
            and all((x := buffer()) is not None and _version(x) == version for buffer, version in self._buffers)
            and all(self._does_nothing(model.get_submodule(name)) for name in self._hooked)
            and not torch.is_autocast_enabled(self._device.type)
        )

    def _does_nothing(self, module: nn.Module) -> bool:
        """Whether what was put on a module still can be left out."""
        members = vars(module)
        return hooks_do_nothing(members) and (
            "forward" not in members or calls_only_its_class(module, self._dtype, self._device)
        )


def _version(x: Tensor) -> Any:
    """A value that changes when a buffer is written in place."""
    return x.tolist() if x.is_inference() else x._version  # which a tensor made in inference mode has not


# --- the rest of what generate() asks of a model

_HELPERS = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "__call__")


def check_helpers(model: nn.Module) -> None:
    """generate() asks nothing else of the model than of its family's class."""
    original = _original(model)
    for name in _HELPERS:
        if name in vars(model) or any(
            getattr(original, name) is not getattr(known, name) for known in _known(original, name)
        ):
            raise NoStep(f"{name} was replaced")
        try:
            check_origin(getattr(original, name), ("transformers", "torch"))  # torch's: decorators such as no_grad
        except UnknownLayout as reason:
            raise NoStep(f"{name}: {reason}") from None


def _asked_of_helpers(model: nn.Module) -> list[Entry]:
    """What `check_helpers` looks at but for the model's own members: it finds nothing else where these are the same."""
    original = _original(model)
    entries = []
    for name in _HELPERS:
        entries += [(cls, name, getattr(cls, name)) for cls in (original, *_known(original, name))]
        entries += asked_of_origin(getattr(original, name))
    return entries


def _known(cls: type, name: str) -> list[type]:
    """The class of transformers' that a class is or derives from, if that has a function of this name."""
    return [known for known in (library_class(cls),) if hasattr(known, name)]


def _original(model: nn.Module) -> type[nn.Module]:
    patched = type(model)  # which another thread may change meanwhile
    if "original" not in vars(patched):
        raise NoStep("the model is not patched for it")
    return patched.original
