"""A description without a model: paths stand for parameters and modules, and numbers say where they were found.

read.py makes a template of what a small model was seen to compute, and bind.py a description for each model.
"""

import dataclasses
from dataclasses import dataclass

from .description import Description, all_of
from .observe import Number


@dataclass(frozen=True)
class Path:
    """Stands for a parameter or a module."""

    name: str


@dataclass(frozen=True)
class Factor:
    """Stands for a product of numbers."""

    numbers: tuple[Number, ...] = ()

    @property
    def value(self) -> float:
        result = 1.0
        for number in self.numbers:
            result *= number.value**number.power
        return result


@dataclass(frozen=True)
class Window:
    """Stands for how many keys before its own a query sees, where the config has a window."""


@dataclass(frozen=True)
class Template:
    """`stack` is the path of the list of layers. `same_in_training`: the model computes the same in training mode, and
    draws no random number."""

    description: Description
    stack: str
    same_in_training: bool = False

    def own_numbers(self, layers: int) -> list[float]:
        """Those that no module and no config has, of the first layers and all else."""
        parts = dataclasses.replace(self.description, layers=self.description.layers[:layers])
        return [number.value for number in all_of(Number, parts) if not number.name]
