"""Why something is left as it is: a class, a module of a model, or a call. Caught inside of the package."""

from torch import nn


class UnknownLayout(Exception):
    """Why a class is not replaced."""


class NoStep(Exception):
    """Why the decode step can not run."""


class Refusal(NoStep):
    """Why a model can not be described. It holds until the model changes."""


class Distrust(NoStep):
    """Why a module can not be read without calling it. `{}` in the reason stands for the module's name."""

    def __init__(self, module: nn.Module, reason: str):
        super().__init__(reason)
        self.module = module

    def named_in(self, model: nn.Module) -> NoStep:
        name = next((name for name, module in model.named_modules() if module is self.module), "")
        return NoStep(str(self).replace("{}", name or type(model).__name__))
