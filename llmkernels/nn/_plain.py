"""Whether a linear layer inside of a module may be left uncalled."""

from torch import nn


def is_plain(module: nn.Module) -> bool:
    """Whether the module computes what torch's linear layer does of its weight and bias, and nothing else."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return type(module).forward is nn.Linear.forward and not any(hooks) and "forward" not in vars(module)
