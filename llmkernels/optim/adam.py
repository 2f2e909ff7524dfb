"""Adam and AdamW. Kernels: csrc/kernels/optim/adam.cu, csrc/cpu/optim.cpp."""

import itertools
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from llmkernels.optim._tensors import by_device, grad_norm, is_dense, local, real, same_order

_adam = torch.ops.llmkernels.adam_.default
_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_OF_GROUPS = {"state_dtype": None, "stochastic_rounding": False, "rounding_seed": 0}  # what groups of ours have besides
# As torch.optim has it, where this torch has it: unlike the public one, it does not import the compiler at once.
_not_compiled = getattr(torch, "_disable_dynamo", torch.compiler.disable)


class _OneLaunch:
    """The step of both, in front of the class of torch.optim that has the arguments and their checks."""

    max_grad_norm: float | None

    def _init(self, arguments: dict[str, Any]) -> None:
        """Takes all arguments of the constructor, by name. The class of torch.optim gets those that it has, too."""
        of_torch = {name: value for name, value in arguments.items() if name != "self"}
        own = {name: of_torch.pop(name) for name in _OF_GROUPS}
        max_grad_norm = of_torch.pop("max_grad_norm")
        super().__init__(**of_torch)
        self._check_options(arguments)
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"{type(self).__name__}: max_grad_norm must be at least 0, got {max_grad_norm}")
        if any(group["fused"] and group["foreach"] for group in self.param_groups):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        for group in (self.defaults, *self.param_groups):
            group.update(own | group)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self._counters: dict[torch.device, Tensor] = {}
        # GradScaler leaves the division and the test for infinities to the step.
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim has it. Its constructor calls this, too."""
        if isinstance(param_group, dict):
            self._check_options(param_group)
        super().add_param_group(param_group)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Of a group, or all of the constructor, those that torch.optim does not know or does not refuse."""
        name, state_dtype, seed = type(self).__name__, options.get("state_dtype"), options.get("rounding_seed", 0)
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"{name}: state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype}")
        if not isinstance(seed, Integral) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"{name}: rounding_seed must be an integer of 64 bits, got {seed!r}")
        if options.get("differentiable"):
            raise RuntimeError(f"{name} does not support differentiable=True")

    # What belongs to a step but not to its state survives copies; counters do not.

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_supports_amp_scaling = True
        self._counters = {}
        self.grad_norm = None
        self.__dict__.setdefault("max_grad_norm", None)
        for group in self.param_groups:  # those of torch.optim lack these
            for name, default in _OF_GROUPS.items():
                group.setdefault(name, self.defaults.get(name, default))
            for param in group["params"]:
                found = self.state.get(param)
                if found:
                    found["step"] = found["step"].to(local(param).device, torch.float32, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim has it, which loads it: without ``capturable`` and ``fused`` the steps are on the CPU."""
        result = super().state_dict()
        for group in result["param_groups"]:
            on_gpu = [i for i in group["params"] if i in result["state"] and result["state"][i]["step"].is_cuda]
            if on_gpu and not group["capturable"] and not group["fused"]:
                steps = torch.stack([result["state"][i]["step"] for i in on_gpu]).cpu()  # one wait for all
                for i, step in zip(on_gpu, steps, strict=True):
                    result["state"][i] = {**result["state"][i], "step": step.clone()}
        return result

    @_not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch.optim rounds states to the dtype of the parameter; here they keep float32, or get `state_dtype`."""
        # Behind the hooks that may change what is loaded, before those that may change what was.
        loaded = []
        last = self.register_load_state_dict_pre_hook(lambda _, changed: loaded.append(changed))
        first = self.register_load_state_dict_post_hook(lambda _: self._load_moments(*loaded), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()

    def _load_moments(self, state_dict: dict[str, Any]) -> None:
        saved_ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved_id, (group, param) in zip(saved_ids, self._params(), strict=True):
            saved, own = state_dict["state"].get(saved_id), self.state.get(param)
            for name in _STATE if saved and own else ():
                if name in saved:
                    own[name] = self._new_state(group, param).copy_(saved[name])

    def _params(self):
        return ((group, param) for group in self.param_groups for param in group["params"])

    def _new_state(self, group: dict[str, Any], param: Tensor) -> Tensor:
        """Zeros for a moment of the parameter, in its memory order if that has no gaps."""
        dtype = param.dtype
        if not param.is_complex() and dtype != torch.float64:
            dtype = group["state_dtype"] or torch.float32
        return torch.zeros_like(param, dtype=dtype)

    # The step.

    def step(self, closure: Callable[[], float | Tensor] | None = None) -> float | Tensor | None:
        """Take a step: one launch per parameter group (and device).

        Args:
            closure: evaluates the model again and returns the loss.
        """
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        (check or self._cuda_graph_capture_health_check)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            groups = [
                (group, [param for param in dict.fromkeys(group["params"]) if param.grad is not None])
                for group in self.param_groups
            ]
            for _, params in groups:  # nothing is written before all are known to be good
                for param in params:
                    self._check(param)
            for group, params in groups:
                for param in params:
                    if not self.state.get(param):
                        self._init_state(group, param)
            norm = None
            if self.max_grad_norm is not None:
                grads = [param.grad for _, params in groups for param in params]
                grads = [real(grad) if grad.is_complex() else grad for grad in grads]  # DTensors whole
                norm = self.grad_norm = grad_norm(grads) if grads else None
            first = 0  # the index in the optimizer of the group's first parameter
            for group, params in groups:
                for device, part in by_device(params, params).items():
                    self._step_on(device, group, first, part, norm)
                first += len(group["params"])
        return loss

    def _check(self, param: Tensor) -> None:
        if param.grad.is_sparse:
            raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
        if not (param.is_floating_point() or param.dtype in (torch.complex64, torch.complex128)):
            raise RuntimeError(f"{type(self).__name__}: parameters must be floating-point numbers, got {param.dtype}")

    def _init_state(self, group: dict[str, Any], param: Tensor) -> None:
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32, device=local(param).device)
        for name in _STATE if group["amsgrad"] else _STATE[:2]:
            state[name] = self._new_state(group, param)

    def _step_on(
        self, device: torch.device, group: dict[str, Any], first: int, params: list[Tensor], norm: Tensor | None
    ) -> None:
        part = local if all(param.is_floating_point() for param in params) else real
        targets = [part(param) for param in params]
        dense = [target if is_dense(target) else target.contiguous() for target in targets]
        states = [self.state[param] for param in params]

        def in_order(tensors: list[Tensor]) -> list[Tensor]:
            return [same_order(part(x), target) for x, target in zip(tensors, dense, strict=True)]

        grads = in_order([param.grad for param in params])
        lists = [[state[name] for state in states] for name in (_STATE if group["amsgrad"] else _STATE[:2])]
        ordered = [in_order(tensors) for tensors in lists]
        lr, (beta1, beta2) = group["lr"], map(float, group["betas"])
        lr_tensor = None
        if isinstance(lr, Tensor):
            if lr.device.type == "cpu":
                lr = lr.item()
            else:
                lr, lr_tensor = 0.0, lr.to(device, torch.float32, non_blocking=True)
        if lr < 0:  # LinearLR ends there, by rounding; the op takes such a number from a tensor
            lr, lr_tensor = 0.0, torch.full((), lr, dtype=torch.float32, device=device)

        def number(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device, torch.float32, non_blocking=True)

        rounding_seed, indices = None, []
        if group["stochastic_rounding"] and any(target.dtype.itemsize == 2 for target in targets):
            index_of = {param: index for index, param in enumerate(group["params"], first)}
            rounding_seed, indices = group["rounding_seed"], [index_of[param] for param in params]
        counter = None
        if device.type == "cuda" and not torch.compiler.is_compiling():
            counter = self._counters.get(device)
            if counter is None:
                counter = self._counters[device] = torch.zeros(1, dtype=torch.int32, device=device)
        _adam(
            dense,
            grads,
            *ordered,
            *([] if group["amsgrad"] else [[]]),
            [state["step"] for state in states],
            lr_tensor,
            number(getattr(self, "grad_scale", None)),
            number(getattr(self, "found_inf", None)),
            number(norm),
            counter,
            rounding_seed,
            indices,
            lr,
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            0.0 if self.max_grad_norm is None else self.max_grad_norm,
            group["decoupled_weight_decay"],
            group["maximize"],
        )
        for own, used in zip((*targets, *itertools.chain(*lists)), (*dense, *itertools.chain(*ordered)), strict=True):
            if used is not own and used.data_ptr() != part(own).data_ptr():
                part(own).copy_(used)
        if not torch.compiler.is_compiling():  # nobody else tells autograd of the write
            torch.autograd.graph.increment_version([param for param in params if not param.is_inference()])


class Adam(_OneLaunch, torch.optim.Adam):
    r"""``torch.optim.Adam``, with one launch for all parameters of a group.

    .. math::
        g &= \mathrm{grad} + \lambda p, \quad m = \beta_1 m + (1 - \beta_1) g, \quad
        v = \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \mathrm{lr} \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    With ``decoupled_weight_decay`` as ``AdamW``; with ``amsgrad`` the largest v so far is in the root.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable, decoupled_weight_decay: as
            ``torch.optim.Adam`` has them. A learning rate on a GPU is read there, by each step,
            betas in tensors by the host.
        foreach, fused: change where ``state_dict`` has the steps, as in ``torch.optim``; the step is always this one.
        differentiable: must be False.
        state_dtype: of the moments: ``torch.float32``, the default, or ``torch.bfloat16``. (float64 for float64.)
        stochastic_rounding: round parameters of 16 bits up or down at random, so that they are right on average and
            small updates are not lost.
        rounding_seed: of its random numbers, which are a function of this seed, the step of the parameter and its
            index in the optimizer, and of nothing else: ranks that take the same steps stay equal, bit for bit, and a
            run continued from a state dict, which has the seed, draws what it would have drawn.
        max_grad_norm: clip gradients to this norm within the step, as ``clip_grad_norm_`` does in a pass of its own.
            The norm is of all parameters of the optimizer; ``optimizer.grad_norm`` is that of the last step, times the
            scale of a ``GradScaler``. The gradients themselves do not change.

    The last four are options of this class. All but ``max_grad_norm`` may be set by group.

    Launches: one per group and device for up to 500 parameters. ``max_grad_norm`` adds two.
    Dtype: float32, float16 and bfloat16 in one list; float64 on the CPU. Complex parameters are pairs of real ones, and
        their moments complex of the same dtype.
    Layout: any. Parameters or states with gaps in their memory, and gradients in another order than their parameter,
        are copied.
    GradScaler: the step divides by the scale and does nothing where a gradient is infinite, without the host. The
        gradients stay scaled.
    CUDA graphs: with ``capturable=True``. Steps are counted on the device in any case.
    State dicts: those of ``torch.optim.Adam``, in both directions. PyTorch rounds moments to the parameter's dtype.
    Deterministic: yes.
    Matches: ``torch.optim.Adam``; in float32 but for the rounding of each operation. Parameters of 16 bits are rounded
        once per step, and their moments are float32, where PyTorch has 16 bits. A parameter that comes twice in a
        group, as tied weights of two modules do, is stepped once, where PyTorch steps it twice.
    Raises: as ``torch.optim.Adam``; RuntimeError for sparse gradients and differentiable=True;
        ValueError for a state_dtype, a rounding_seed or a max_grad_norm that is none.
    Source: Kingma & Ba 2015; Reddi et al. 2018 (amsgrad).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        self._init(locals())


class AdamW(_OneLaunch, torch.optim.AdamW):
    r"""``torch.optim.AdamW``, with one launch for all parameters of a group.

    .. math::
        m &= \beta_1 m + (1 - \beta_1) \mathrm{grad}, \quad v = \beta_2 v + (1 - \beta_2) \mathrm{grad}^2 \\
        p &\leftarrow p (1 - \mathrm{lr} \lambda)
            - \mathrm{lr} \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Arguments and everything else: see ``Adam``. Source: Loshchilov & Hutter 2019.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, -1.0])
    >>> AdamW([weight], lr=0.5, weight_decay=0.0).step()
    >>> weight.detach()
    tensor([0.5000, 1.5000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        self._init(locals())
