"""patch, unpatch and the handle between them."""

import types
import weakref
from collections.abc import Callable

from torch import nn

from llmkernels._tune import files
from llmkernels._versions import untested_transformers

from .callers.model_class import model_class
from .classes.layout import kind_of
from .model.trust import around, calls_only_its_class
from .modules.layers import patched_class
from .modules.replaced import WITHOUT, Generating, Patched, Replaced, forget_runs, runs_of, start_count
from .obstacles import (
    decode_obstacle,
    device_type,
    fallback,
    fused_norms,
    has_own_forward,
    is_around,
    kinds_in,
    obstacle,
    op_of,
)
from .report import NOT_ASKED, Counts, Decode, Fp8Prompts, Report, Row
from .step import decode as decoding
from .step import describe, graphs, packing
from .step.routes import kernels_in

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
    fp8: bool = False,
    training: bool = False,
) -> "PatchHandle":
    """Run the layers of a Hugging Face model on llmkernels' ops, in place and reversibly.

    Args:
        model: a model with decoder layers of transformers, of any family, with any head or none, alone or inside
            another module such as a PEFT model. Of its classes only those are replaced that are found to compute what
            an op does: see layout.py.
        rms_norm: patch the RMSNorm modules.
        layer_norm: patch the LayerNorm modules of layers whose attention rotates q and k, and of decoders.
        rope: patch the rotary embedding of q and k in the attention modules.
        gated_mlp: patch the gated MLPs with an activation of :func:`llmkernels.glu`.
        mlp: patch the MLPs without a gate, with the same activations.
        add_rms_norm: fuse each residual add into the norm that directly follows it, in each decoder layer; also where
            that is a LayerNorm. Without ``rms_norm`` (``layer_norm``) that norm runs on a kernel where it is fused, and
            not where it is called.
        decode: run the model by the decode step where that is possible, whatever the other options: greedy search and
            sampling of ``model.generate`` and ``llmkernels.generate``, for up to 64 sequences; each forward of up to 64
            tokens behind a cache; and on a GPU each forward of a prompt behind no cache or an empty one. The first such
            call packs q|k|v and gate|up of each layer into one storage, with the parameters as views into it; a CUDA
            graph that was captured before then no longer has the weights. The tokens of a DynamicCache move to larger
            buffers in place when the first ones behind it come; it stays a DynamicCache. The cache of the last call of
            generate, if it takes no more than 1 GiB, and its graphs are kept for the next one; ``handle.release()`` or
            ``llmkernels.release(model)`` frees them.
        fp8: compute the products of the layers in FP8 for prompts of at least 256 tokens, of all sequences together,
            that ``decode`` runs: of calls of generate, and of forwards on a GPU. Weights are quantized to float8_e4m3fn
            with a scale per row, what they multiply with a scale per token (:func:`llmkernels.fp8_quantize`); the
            head, norms and attention stay in 16 bits, and so do steps, and all that runs by modules, as with gradients.
            The logits are others: an error of a few percent in each product. The first prompt makes the FP8 weights,
            which take half as much memory as the layers' weights take, on top of these. They are made again when the
            model's weights have changed: by ops in place, optimizers, load_state_dict, or another tensor; after a
            change that PyTorch does not count, through ``weight.data`` or by a CUDA graph, call ``handle.release()``,
            which frees them, as do a forward with gradients and unpatch. For weights in bfloat16 or float16, on the CPU
            or a GPU of compute capability 8.9 or later; else prompts run in the weights' dtype, and the report says
            why.
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
    Choices of kernels that were measured on the model's GPU (:func:`llmkernels.autotune`) are read from their file, by
    the first patch in a process.
    Layers look at their hooks on every call and run unfused where a hook has to see the unfused value. Where the
    forward of a class is replaced later, the modules of that class run that one. The decode step looks at every module
    and parameter in every call; if one has changed, the call runs by the modules: see trust.py.
    Threads: patch and unpatch may be called while other threads generate with the model. A call of generate that is
    under way finishes as it began, with the weights that it began with.
    Survives: train/eval, `.to()`, load_state_dict, copy.deepcopy and torch.save (the copy is patched too and
    undone by `llmkernels.unpatch(copy)`), gradient checkpointing, torch.compile(fullgraph=True), adapters
    and hooks added before or after.
    Raises: TypeError when model is no module; RuntimeError when it is patched already; ValueError when there is
    nothing to patch, or with ``fp8`` nothing that has prompts: without ``decode``, or of a model that does not
    generate.

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
    kinds = kinds_in(model)
    if not {*kinds.values()} - {"lora", "experts"}:
        raise ValueError(
            f"patch: model must generate text, or contain layers of a decoder of transformers, got {type(model)}"
        )
    if fp8 and not (decode and "loss" in kinds.values()):
        raise ValueError(
            f"patch: fp8 must be False with decode=False and for models that do not generate text, got {type(model)} "
            f"with decode={decode}"
        )
    if count := sum(isinstance(module, Replaced) for module in model.modules()):
        raise RuntimeError(
            f"patch: model must not be patched already, got one with {count} patched modules; call unpatch() on its "
            "handle, or llmkernels.unpatch(model) if it is a copy or was loaded"
        )
    plan = {}
    for module in model.modules():
        kind = kinds.get(module)
        generates = decode and decode_obstacle(module) is None
        loss = kind == "loss" and training and obstacle(module, kind) is None
        if generates or loss:
            plan[module] = model_class(type(module), generates, loss, fp8 and generates)
        if kind in (None, "loss") or not asked[kind] or obstacle(module, kind):
            continue
        plan[module] = patched_class(type(module))
        if kind == "add_rms_norm":  # it reads the weights and eps of these norms
            for norm in fused_norms(module):
                plan[norm] = patched_class(type(norm), only_fused=not asked[kinds[norm]])
    for index in {parameter.get_device() for parameter in model.parameters() if parameter.is_cuda}:
        files.load(index)
    handle = PatchHandle(model, {kind for kind, wanted in (asked | {"decode": decode, "fp8": fp8}).items() if wanted})
    # Of a model whose layers are not transformers', steps alone run on kernels.
    wanted = (Patched, Generating) if {*kinds.values()} <= {"loss"} else Patched
    if not any(issubclass(cls, wanted) for cls in plan.values()):
        raise ValueError(f"patch: nothing to patch\n{handle.report()}")
    with packing.LOCK:
        for module, cls in plan.items():
            if issubclass(cls, Generating):
                decoding.forget(module)  # what a call noted that was still under way when unpatch ended
            _change_class(module, cls)
            start_count(module)
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
            if isinstance(module, Patched) and has_own_forward(module) and not is_around(module):
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
        # Patched modules of no known patch are copies, of which a copied handle is.
        patched = (module for module in self._model.modules() if isinstance(module, Replaced))
        return any(_PATCHES.get(module, self.token) is self.token for module in patched)

    def release(self) -> None:
        """Free the cache, CUDA graphs and weights in FP8 that are kept for the next call: `llmkernels.release`."""
        decoding.release(self._model)

    def report(self) -> Report:
        """What runs on which kernel now, why the rest does not, and what was counted as run so far.

        Reads the model as it is at this moment, so hooks, new activations and moves since `patch` show. Says "not
        patched" of all where the patch was undone, also if the model was patched again since.
        """
        kinds = kinds_in(self._model)
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
                row.left_alone[name] = None if isinstance(module, Patched) else obstacle(module, kind)
                row.left_alone[name] = row.left_alone[name] or "not patched"
            elif reason := fallback(module, kind):
                row.left_alone[name] = reason
            else:
                op = run_by_layer.get(module) or op_of(module, kind)
                if kind == "add_rms_norm":
                    run_by_layer |= {norm: f"add_{type(norm).options.kind}" for norm in fused_norms(module)}
                row.patched.append(name)
                row.kernels["llmkernels::" + op] += 1
                row.backends[device_type(module)] += 1
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
                reason = describe.why_not(module)
            else:
                reason = (None if isinstance(module, Generating) else decode_obstacle(module)) or "not patched"
            state = decoding.decoder(module)
            kept = state.programs.graphs()
            counts = Counts(state.calls), state.steps, Counts(state.forwards), Counts(state.prompts)
            memory = len(kept), graphs.nbytes(kept)
            products = Counts(kernels_in(module) if reason is None else ())
            in_fp8 = self._fp8(module, reason, state) if "fp8" in self._kinds else None
            entries.append(Decode(type(module).__name__, reason, *counts, *memory, products, in_fp8))
        return entries

    @staticmethod
    def _fp8(module: nn.Module, reason: str | None, state: decoding.Decoder) -> Fp8Prompts:
        if reason is not None or (reason := describe.why_not_in_fp8(module)) is not None:
            return Fp8Prompts(reason)
        return Fp8Prompts(None, 0 if state.fp8 is None else state.fp8.nbytes)

    def __enter__(self) -> "PatchHandle":
        return self

    def __exit__(self, *exception) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return f"PatchHandle({type(self._model).__name__})"


_ALWAYS = ("rms_norm", "rope", "gated_mlp", "add_rms_norm")
_ROWS = ("rms_norm", "layer_norm", "rope", "gated_mlp", "mlp", "add_rms_norm", "experts", "loss", "lora")


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
