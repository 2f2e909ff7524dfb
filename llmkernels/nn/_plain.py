"""Whether a linear layer inside of a module may be left uncalled."""

from torch import Tensor, nn
from torch.nn.modules import module as of_all


def is_plain(module: nn.Module) -> bool:
    """Whether the module computes what torch's linear layer does of its weight and bias, and nothing else, and nobody
    has to see that it is called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return (
        type(module).forward is nn.Linear.forward
        and not any(hooks)
        and "forward" not in vars(module)
        and _is_ordinary(module.weight)
        and (module.bias is None or _is_ordinary(module.bias))
        and not _has_hooks_on_all()
    )


def _is_ordinary(tensor: Tensor) -> bool:
    """Not of a class with a linear layer of its own, such as a quantized or a distributed weight. A fake tensor, with
    which a graph is made, stands for whatever it is a fake of."""
    cls = type(tensor)
    return cls in (Tensor, nn.Parameter) or cls.__module__.startswith("torch._subclasses.")


def _has_hooks_on_all() -> bool:
    """Hooks that torch.nn.modules.module registers for every module."""
    kinds = "forward", "forward_pre", "backward", "backward_pre"
    return any(getattr(of_all, f"_global_{kind}_hooks", None) for kind in kinds)
