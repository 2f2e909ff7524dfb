"""patch, unpatch and the handle between them."""

import types
import weakref
from collections.abc import Callable

import torch
from torch import nn

from llmkernels._versions import untested_transformers

from .callers.model_class import model_class
from .classes.families import known_base
from .classes.layout import kind_of
from .errors import UnknownLayout
from .model.trust import around, calls_only_its_class, is_of_accelerate, runs_made_forward
from .modules import lora
from .modules import loss as losses
from .modules.activations import gated_unit, op_name, plain_unit
from .modules.layers import fused_class, patched_class
from .modules.replaced import (
    WITHOUT,
    Generating,
    Patched,
    Replaced,
    forget_runs,
    has_kernel,
    runs_of,
    runs_only_forward,
)
from .report import NOT_ASKED, Decode, Report, Row
from .step import decode as decoding
from .step import packing, trunk

# By patched module: which call of patch it was. Not of a copy, and not in a pickle.
_PATCHES: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
# By function that was set here as the forward of a module: the one that was there before, and what that comes to.
_BEFORE: weakref.WeakKeyDictionary[Callable, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()


def patch(
    model: nn.Module,
    *,
    rms_norm: bool = True,
    layer_norm: bool = True,
    rope: bool = True,
    gated_mlp: bool = True,
    mlp: bool = True,
    add_rms_norm: bool = True,
    decode: bool = True,
    training: bool = False,
) -> "PatchHandle":
    """Run the layers of a Hugging Face model on llmkernels' ops, in place and reversibly.

    Args:
        model: a model with decoder layers of transformers, of any family, with any head or none, alone or inside
            another module such as a PEFT model. Of its classes only those are replaced that are found to compute what
            an op does: see layout.py.
        rms_norm: patch the RMSNorm modules.
        layer_norm: patch the LayerNorm modules of decoders.
        rope: patch the rotary embedding of q and k in the attention modules.
        gated_mlp: patch the gated MLPs, with silu, gelu, gelu_pytorch_tanh or relu2.
        mlp: patch the MLPs without a gate, with gelu, gelu_pytorch_tanh or relu2.
        add_rms_norm: fuse each residual add into the norm that directly follows it, in each decoder layer; also where
            that is a LayerNorm. Without ``rms_norm`` (``layer_norm``) that norm runs on a kernel where it is fused, and
            not where it is called.
        decode: run the model by the decode step where that is possible, whatever the other options: greedy search and
            sampling of ``model.generate`` and ``llmkernels.generate``, for up to 64 sequences, and each forward of up
            to 64 tokens behind a cache. The first such call packs q|k|v and gate|up of each layer into one storage,
            with the parameters as views into it; a CUDA graph that somebody captured before then no longer has the
            weights. The tokens of a DynamicCache move to larger buffers in place when the first ones behind it come; it
            stays a DynamicCache. The cache of the last call of generate, if it takes no more than 1 GiB, and its graphs
            are kept for the next one; ``handle.release()`` or ``llmkernels.release(model)`` frees them.
        training: compute the loss of a model for causal language modelling in training mode without its logits, by
            ``linear_cross_entropy``, which takes a part of the memory. The output's logits are computed when somebody
            reads them, which is an error once the weights have changed; a compiled model gives none. The layers have
            gradients in any case. Adapters of PEFT's LoRA around linear layers run on ``lora_linear``, where they are
            there already: patch the model after ``get_peft_model``; before ``accelerator.prepare`` or after it.

    Returns:
        a PatchHandle. Its `report()` says what runs on which kernel, and why anything was left alone.

    Only this instance changes: modules get a subclass of their class, parameters and state dict stay as they are.
    A module that cannot be replaced faithfully is left alone: one with a forward of its own on the instance, with
    an activation without a kernel, on a device without one, or whose class computes something else than expected. What
    accelerate puts around a model's forward for mixed precision stays around the replacement, and around the original
    after `unpatch`.
    Layers look at their hooks on every call and run unfused where a hook has to see the unfused value. Where the
    forward of a class is replaced later, the modules of that class run that one. The decode step looks at every module
    and parameter in every call, and leaves the call to the modules where one is not what it was: see trust.py.
    Threads: patch and unpatch may be called while other threads generate with the model. A call of generate that is
    under way finishes as it began, with the weights that it began with.
    Survives: train/eval, `.to()`, load_state_dict, copy.deepcopy and torch.save (the copy is patched too and
    undone by `llmkernels.unpatch(copy)`), gradient checkpointing, torch.compile(fullgraph=True), adapters
    and hooks added before or after.
    Raises: TypeError when model is no module; RuntimeError when it is patched already; ValueError when there is
    nothing to patch.

    >>> handle = patch(model)
    >>> print(handle.report())
    >>> handle.unpatch()
    >>> with patch(model):
    ...     model.generate(**inputs)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch.nn.Module, got {type(model).__name__}")
    asked = {"rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope, "gated_mlp": gated_mlp, "mlp": mlp}
    asked |= {"add_rms_norm": add_rms_norm, "loss": training, "lora": training, "experts": False}
    kinds = _kinds(model)
    if not {*kinds.values()} - {"lora", "experts"}:
        raise ValueError(f"patch: model must contain layers of a decoder of transformers, got {type(model)}")
    if count := sum(isinstance(module, Patched) for module in model.modules()):
        raise RuntimeError(
            f"patch: model must not be patched already, got one with {count} patched modules; call unpatch() on its "
            "handle, or llmkernels.unpatch(model) if it is a copy or was loaded"
        )
    plan = {}
    for module in model.modules():
        kind = kinds.get(module)
        generates = decode and _decode_obstacle(module) is None
        loss = kind == "loss" and training and _obstacle(module, kind) is None
        if generates or loss:
            plan[module] = model_class(type(module), generates, loss)
        if kind in (None, "loss") or not asked[kind] or _obstacle(module, kind):
            continue
        plan[module] = patched_class(type(module))
        if kind == "add_rms_norm":  # it reads the weights and eps of these norms
            for norm in _fused_norms(module):
                plan[norm] = patched_class(type(norm), only_fused=not asked[kinds[norm]])
    handle = PatchHandle(model, {kind for kind, wanted in (asked | {"decode": decode}).items() if wanted})
    if not any(issubclass(cls, Patched) for cls in plan.values()):
        raise ValueError(f"patch: nothing to patch\n{handle.report()}")
    with packing.LOCK:
        for module, cls in plan.items():
            if issubclass(cls, Generating):
                decoding.forget(module)  # what a call noted that was still under way when unpatch ended
            _change_class(module, cls)
            _PATCHES[module] = handle.token
    return handle


def unpatch(model: nn.Module) -> None:
    """Undo `patch` in every module of `model`, which may be a copy of a patched model. No-op where there is none.

    Weights that were packed for the decode step have memory of their own again. Calls of generate in other threads
    finish with what they began with; what they hold of the packed weights is free when they end.

    Raises: RuntimeError when something was put on top of a patched module that has to go first: another class (as
    fully_shard and parametrize do) or a forward of the instance (as accelerate's hooks do). Nothing is changed then.
    """
    with packing.LOCK:
        replaced = {name: module for name, module in model.named_modules() if isinstance(module, Replaced)}
        for name, module in replaced.items():
            if "original" not in vars(type(module)):
                raise RuntimeError(
                    f"unpatch: the class of {name} must be the patched one, got {type(module)} made later"
                )
            if isinstance(module, Patched) and _has_own_forward(module) and not _is_around(module):
                raise RuntimeError(f"unpatch: {name} must not have a forward of its own, got one set after patch()")
        for module in replaced.values():
            _PATCHES.pop(module, None)
            _change_class(module, type(module).original)
            forget_runs(module)
        packing.unpack(model)
    for module in replaced.values():
        decoding.forget(module)


class PatchHandle:
    """A patched model: `report()`, `unpatch()`, or a `with` block that ends in `unpatch()`."""

    def __init__(self, model: nn.Module, kinds: set[str]):
        self.token = object()  # stands for the call of patch
        self._model = model
        self._kinds = kinds

    def unpatch(self) -> None:
        """Restore the model; its results are again bit for bit those before `patch`.

        Does nothing where that was done already, by this or by `llmkernels.unpatch`, also if the model was patched
        again since: each handle undoes the patch that returned it, and no later one.
        Raises as `llmkernels.unpatch` does.
        """
        if self._is_current():
            unpatch(self._model)

    def _is_current(self) -> bool:
        return any(_PATCHES.get(module) is self.token for module in self._model.modules())

    def release(self) -> None:
        """Free the cache and the CUDA graphs that are kept for the next call of generate: `llmkernels.release`."""
        decoding.release(self._model)

    def report(self) -> Report:
        """What runs on which kernel now, why the rest does not, and what was counted as run so far.

        Reads the model as it is at this moment, so hooks, new activations and moves since `patch` show. Says "not
        patched" of all where the patch was undone, also if the model was patched again since.
        """
        kinds = _kinds(self._model)
        found = {*kinds.values()}
        wanted = [
            kind
            for kind in _ROWS
            if kind in _ALWAYS or (kind in found and (kind in self._kinds or kind not in ("loss", "lora")))
        ]
        rows = {kind: Row(kind) for kind in wanted}
        is_current = self._is_current()
        run_by_layer = {}  # the op, by norm
        for name, module in self._model.named_modules():
            kind = kinds.get(module)
            if (row := rows.get(kind)) is None:
                continue
            if kind == "experts":
                row.left_alone[name] = "experts run as transformers computes them"
            elif kind not in self._kinds and module not in run_by_layer:
                row.left_alone[name] = NOT_ASKED
            elif not isinstance(module, Patched) or not is_current:
                row.left_alone[name] = None if isinstance(module, Patched) else _obstacle(module, kind)
                row.left_alone[name] = row.left_alone[name] or "not patched"
            elif reason := _fallback(module, kind):
                row.left_alone[name] = reason
            else:
                op = run_by_layer.get(module) or _op(module, kind)
                if kind == "add_rms_norm":
                    run_by_layer |= {norm: f"add_{type(norm).options.kind}" for norm in _fused_norms(module)}
                row.patched.append(name)
                row.kernels["llmkernels::" + op] += 1
                row.backends[_device_type(module)] += 1
            if is_current:
                for run, times in runs_of(module).items():
                    op, _, reason = run.partition(": ")
                    row.runs[op if op == WITHOUT else f"llmkernels::{op}"] += times
                    if reason:
                        row.fallbacks[reason] += times
        title = f"llmkernels in {type(self._model).__name__}"
        return Report(title, rows, self._decode(is_current), untested_transformers())

    def _decode(self, is_current: bool) -> list[Decode]:
        entries = []
        for module in self._model.modules():
            if kind_of(type(module)) != "loss":
                continue
            if "decode" not in self._kinds:
                reason = NOT_ASKED
            elif isinstance(module, Generating) and is_current:
                reason = trunk.why_not(module)
            else:
                reason = (None if isinstance(module, Generating) else _decode_obstacle(module)) or "not patched"
            state = decoding.decoder(module)
            counts = state.calls.copy(), state.steps, state.forwards.copy()
            entries.append(Decode(type(module).__name__, reason, *counts))
        return entries

    def __enter__(self) -> "PatchHandle":
        return self

    def __exit__(self, *exception) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return f"PatchHandle({type(self._model).__name__})"


_ALWAYS = ("rms_norm", "rope", "gated_mlp", "add_rms_norm")
_ROWS = ("rms_norm", "layer_norm", "rope", "gated_mlp", "mlp", "add_rms_norm", "experts", "loss", "lora")


def _kinds(model: nn.Module) -> dict[nn.Module, str]:
    """The kind of each module that has one. A LayerNorm of torch's has one where it is part of a decoder."""
    kinds = {module: kind for module in model.modules() if (kind := kind_of(type(module))) is not None}
    parts: set[nn.Module] = set()
    for parent in model.modules():
        children = [*parent.children()]
        lists = [child for child in children if isinstance(child, nn.ModuleList)]
        has_layers = any(kinds.get(layer) == "add_rms_norm" for layers in lists for layer in layers)
        if has_layers or kinds.get(parent) in ("add_rms_norm", "rope"):
            parts.update(children)
    return {
        module: kind
        for module, kind in kinds.items()
        if kind != "layer_norm" or module in parts or known_base(type(module)) is not nn.LayerNorm
    }


def _options(module: nn.Module):
    """What a module that is or can be patched computes."""
    return (type(module) if isinstance(module, Patched) else patched_class(type(module))).options


def _fused_norms(layer: nn.Module) -> list[nn.Module]:
    return [getattr(layer, name) for name in _options(layer).norms]


def _decode_obstacle(module: nn.Module) -> str | None:
    """Why a module can not generate by our loop, or None."""
    if kind_of(type(module)) != "loss":
        return "no model of transformers' that generates text with a decoder alone"
    try:
        model_class(type(module), generates=True, loss=False)
    except UnknownLayout as reason:
        return str(reason)
    return None


def _device_type(module: nn.Module) -> str:
    return next((parameter.device.type for parameter in module.parameters()), "cpu")


def _op(module: nn.Module, kind: str) -> str:
    """The name of the op that a module of this kind runs."""
    if kind in ("gated_mlp", "mlp"):
        return op_name(_unit(module, kind))
    if kind == "add_rms_norm":
        return f"add_{_options(_fused_norms(module)[0]).kind}"
    return {"loss": losses.OP, "lora": lora.OP}.get(kind, kind)


def _activation(module: nn.Module) -> Callable:
    return getattr(module, _options(module).act)


def _unit(module: nn.Module, kind: str) -> Callable | None:
    return (gated_unit if kind == "gated_mlp" else plain_unit)(_activation(module))


def _obstacle(module: nn.Module, kind: str) -> str | None:
    """Why a module of a known kind cannot be patched, or None."""
    if _has_own_forward(module) and not (kind == "loss" and _is_around(module)):
        by_hooks = is_of_accelerate(module)
        by = "by hooks of accelerate: patch the model before those" if by_hooks else "on the instance"
        return f"it has a forward of its own, set {by}"
    try:
        cls = getattr(type(module), "original", type(module))
        model_class(cls, False, True) if kind == "loss" else patched_class(cls)
    except UnknownLayout as reason:
        return str(reason)
    if kind in ("rms_norm", "layer_norm") and any(parameter.dim() != 1 for parameter in module.parameters()):
        return "its weight has more than one dimension"
    if kind in ("gated_mlp", "mlp") and _unit(module, kind) is None:
        return _no_kernel_for(_activation(module))
    if kind == "add_rms_norm":
        for name in _options(module).norms:
            if (norm := getattr(module, name, None)) is None:
                return f"it has no {name}"
            if (kind_of_norm := kind_of(type(norm))) not in ("rms_norm", "layer_norm"):
                return f"no kernel for its {name}, {type(norm).__name__}"
            if reason := _obstacle(norm, kind_of_norm):
                return f"{name}: {reason}"
    if kind == "lora":  # products of PyTorch's, on every device
        return None
    device = _device_type(module)
    op = f"llmkernels::{_op(module, kind)}"
    if device != "meta" and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op, device.upper()):
        return f"this build of llmkernels has no {op} for {device}"
    return None


def _fallback(module: nn.Module, kind: str) -> str | None:
    """Why a patched module does without its kernel for now, or None."""
    weight = next(module.parameters(), None)
    if weight is not None and not has_kernel(weight):
        return f"no kernel for {weight.dtype} on {weight.device.type}"
    cls = type(module)
    if "forward" in vars(module) and not runs_made_forward(module):
        return "it has a forward of its own, set on the instance"
    if cls.forward is not cls.made or not cls.is_current():
        return "the forward of its class was replaced"
    if kind == "loss":
        return losses.why_not(module, at_rest=True)
    if kind == "lora":
        return lora.why_not(module)
    if kind in ("gated_mlp", "mlp"):
        if _unit(module, kind) is None:
            return _no_kernel_for(_activation(module))
        if not runs_only_forward(_activation(module)):
            return "hooks on its activation have to see it"
    if kind == "add_rms_norm":
        linear = next((parameter for parameter in module.parameters() if parameter.dim() > 1), None)
        for name, norm in zip(_options(module).norms, _fused_norms(module), strict=True):
            if fused_class(norm) is None:
                return f"{name} has hooks or was replaced"
            if linear is not None and any(parameter.dtype != linear.dtype for parameter in norm.parameters()):
                return f"{name} has another dtype"
    return None


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) and not calls_only_its_class(module)


def _is_around(module: nn.Module) -> bool:
    """Whether the forward set on a module is what accelerate has put around its class's for mixed precision."""
    return around(module, type(module).forward) is not None


def _change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module. What accelerate has put around its forward is around that of the new class then."""
    if "forward" in vars(module):
        if calls_only_its_class(module):
            del module.forward  # left behind, and no more than its class's
        elif (made := around(module, cls.forward)) is not None:
            forward = module.forward.__func__
            before, reached = _BEFORE.get(forward, (None, None))
            if reached is cls.forward:
                made = types.MethodType(before, module)
            else:
                _BEFORE[made.__func__] = forward, type(module).forward
            module.forward = made
    module.__class__ = cls


def _no_kernel_for(activation) -> str:
    return f"no kernel for its activation, {getattr(activation, '__name__', type(activation).__name__)}"
