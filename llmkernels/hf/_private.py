"""What hf/ uses of torch that is not public. Where a torch lacks one of these names there is no decode step and no loss
without logits, and the report says so; the modules run on kernels all the same.

Memory pools, which torch has in builds for GPUs alone, are looked up by step/graphs.py.
"""

import torch
from torch import Tensor

from llmkernels import _library

MISSING: str | None = None  # what is not there, in words of the report

try:
    from torch._C import (
        DisableTorchFunctionSubclass,
        _dispatch_has_computed_kernel_for_dispatch_key,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch.nn.modules.module import _has_any_global_hook
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
    from torch.utils._pytree import tree_map_only

    _base, _make_wrapper_subclass = Tensor._base, Tensor._make_wrapper_subclass
    _new_with_weak_ptr = torch.UntypedStorage._new_with_weak_ptr
except (ImportError, AttributeError) as error:
    MISSING = f"this torch lacks a private name: {str(error).split(' (')[0]}"
    # What modules need, and base classes, have something in their place; nothing asks for the others.
    _devices = ("CPU", "CUDA") if _library.build_info().get("cuda") else ("CPU",)
    _dispatch_has_computed_kernel_for_dispatch_key = getattr(
        torch._C, "_dispatch_has_computed_kernel_for_dispatch_key", lambda op, key: key in _devices
    )
    _has_any_global_hook = getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)
    TorchDispatchMode = getattr(torch.utils._python_dispatch, "TorchDispatchMode", object)
    DisableTorchFunctionSubclass = DeviceContext = _base = tree_map_only = None
    _disable_current_modes = _get_current_dispatch_mode_stack = _get_current_function_mode_stack = None
    _len_torch_dispatch_stack = _len_torch_function_stack = _make_wrapper_subclass = _new_with_weak_ptr = None
