"""The loss of a model for causal language modelling, without its logits: what patch(training=True) adds."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from llmkernels._library import NEWEST_TORCH
from llmkernels.ops import linear_cross_entropy
from llmkernels.ops._common import HAS_PRIVATE, _is_transforming

from .._private import MISSING
from ..classes.cache_name import cache_name
from ..classes.options import Loss
from ..classes.origin import check_origin
from ..classes.recorder import ForwardRecorder, Node, StandIn, code_of, member_name
from ..errors import UnknownLayout
from .lazy import LazyTensor
from .replaced import WITHOUT, count, has_kernel, runs_only_forward

OP = "linear_cross_entropy"
IGNORED = -100  # the label of a token without a loss, in transformers
_LOSS = ("transformers.loss.loss_utils", "ForCausalLMLoss")  # module and name, which a compiler knows, too


def forward_without_logits(original: Callable, options: Loss) -> Callable:
    """The forward of a model for causal language modelling that in training, given labels, computes the loss and no
    logits."""
    arguments = {*options.arguments, "return_dict"}

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = dict(zip(options.arguments, args, strict=False)) | kwargs
        labels = given.get("labels")
        asked = labels is not None and self.training
        asked = asked and len(given) == len(args) + len(kwargs)  # which are not too many, and none comes twice
        reason = _why_not_now(self, options, given) if asked else None
        if not asked or reason is not None:
            if asked:
                count(self, WITHOUT, reason)
            return original(self, *args, **kwargs)
        count(self, OP)
        rest = {name: value for name, value in kwargs.items() if name not in arguments}
        inputs = {name: given.get(name) for name in options.named}
        if options.asks_for_dict:
            inputs["return_dict"] = True
        if options.passes_rest:
            inputs |= rest
        outputs = getattr(self, options.base)(*(given.get(name) for name in options.positional), **inputs)
        head = getattr(self, options.head)
        softcap = None if options.softcap is None else getattr(self.config, options.softcap)
        loss = _loss(head, softcap, outputs.last_hidden_state, labels, **rest)
        known = {name: outputs[name] for name in _outputs() if name in outputs}
        known |= {name: getattr(outputs, name) for name in options.more}
        if not torch.compiler.is_compiling():
            known["logits"] = _logits(outputs.last_hidden_state, head.weight, head.bias, softcap)
        return options.output(loss=loss, **known)

    return forward


def why_not(model: nn.Module, options: Loss, at_rest: bool = False) -> str | None:
    """Why a model computes its loss from logits for now, or None.

    At rest, outside of a forward, a weight may be a DTensor that FSDP makes a plain one in every forward.
    """
    if MISSING:
        return MISSING
    if not HAS_PRIVATE:  # then its logits may have to be computed, too
        return f"torch is newer than {NEWEST_TORCH}, or lacks a private name: torch.func may be at work"
    head = getattr(model, options.head)
    if type(head) is not nn.Linear or not runs_only_forward(head):
        return f"{options.head} has to be called: it is no plain linear layer, or has hooks"
    kind = type(head.weight)
    if kind not in (nn.Parameter, Tensor) and not (at_rest and kind.__name__ == "DTensor"):  # FSDP1's is a Tensor
        return f"the weight of {options.head} is a {kind.__name__}, not a plain parameter"
    if not has_kernel(head.weight):
        return f"no kernel for {head.weight.dtype} on {head.weight.device.type}"
    function = model.loss_function
    if (getattr(function, "__module__", None), getattr(function, "__name__", None)) != _LOSS:
        return "it has another loss function"
    return None


def _why_not_now(model: nn.Module, options: Loss, given: dict[str, Any]) -> str | None:
    """Why a call with these arguments computes its loss from logits, or None."""
    kept, wants_dict = given.get("logits_to_keep", 0), given.get("return_dict")
    if not isinstance(kept, int) or kept != 0:
        return "logits_to_keep asks for a part of the logits"
    if wants_dict is None and options.asks_for_dict:
        wants_dict = model.config.return_dict
    if wants_dict is False:
        return "return_dict=False asks for a tuple"
    return why_not(model, options)


def _loss(
    head: nn.Linear,
    softcap: float | None,
    hidden: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What ForCausalLMLoss computes of the logits: token t predicts token t + 1, a mean over what is not ignored."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(hidden.device)  # of any shape, as there
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(
        hidden.flatten(0, -2),
        head.weight,
        target,
        linear_bias=head.bias,
        ignore_index=ignore_index,
        reduction=reduction,
        softcap=softcap or 0.0,
    )
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """The logits under the present autocast, computed when they are read."""
    device = hidden.device.type
    autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with torch.autocast(device, **autocast):
            logits = nn.functional.linear(hidden, weight, bias)
            return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    if _is_transforming():  # transforms of torch.func, which take no tensor without memory
        return compute(hidden, weight, bias)
    return _Logits.apply(compute, hidden, weight, bias)


class _Logits(Function):
    """compute(hidden, weight, bias), lazily. Its backward computes them once more."""

    @staticmethod
    def forward(ctx, compute: Callable, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(hidden, weight, bias)
        sources = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        states = [*map(_state, sources)]

        def unchanged() -> Tensor:
            if states != [*map(_state, sources)]:
                raise RuntimeError(
                    "output.logits: the hidden states and the weight of lm_head must be those of the forward, but were "
                    "changed or freed since: read the logits before the optimizer steps"
                )
            return compute(*sources)

        dtype = compute(hidden.new_empty(0, 1), weight.new_empty(0, 1), None).dtype
        return LazyTensor(unchanged, (*hidden.shape[:-1], weight.shape[0]), dtype, hidden.device)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            # Views, of which none comes from another: a tied weight is what the hidden states come from, too.
            sources = [None if source is None else source.view_as(source) for source in ctx.saved_tensors]
            logits = ctx.compute(*sources)
        wanted = [source for source, needed in zip(sources, ctx.needs_input_grad[1:], strict=True) if needed]
        found = iter(torch.autograd.grad(logits, wanted, grad, create_graph=torch.is_grad_enabled()))
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])


def _state(tensor: Tensor | None) -> tuple[int, int] | None:
    """What differs once a tensor was written to, or its memory freed, as FSDP does after the backward."""
    if tensor is None or tensor.is_inference():
        return None
    return tensor._version, tensor.untyped_storage().nbytes()


def loss_of(forward: Callable) -> Loss:
    """How a forward that calls a base model, a head and loss_function, in this order, and no more, computes its logits.

    Raises UnknownLayout for any other forward.
    """
    check_origin(forward, ("transformers", "torch"))
    parameters = [p for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD][1:]
    names = tuple(p.name for p in parameters)
    defaults = {p.name: p.default for p in parameters}
    if defaults.pop("logits_to_keep", None) != 0 or "labels" not in names or {*defaults.values()} != {None}:
        raise UnknownLayout(f"unknown layout of its forward, whose arguments are {[*names]}")
    found = _read(forward, names, {})
    softcap = None
    match found.logits:
        case Node("mul", (Node("tanh", (Node("div", (Node(plain), cap)),)), same)) if (
            plain == found.head and cap is same
        ):
            softcap = member_name(repr(cap), "self.config")
            found = _read(forward, names, {repr(cap): None})
    if found.logits.name != found.head:
        reason = f"its logits are {code_of(found.logits)}, and linear_cross_entropy has no option for that"
        raise UnknownLayout(reason)
    return Loss(
        member_name(found.base), member_name(found.head), softcap, names, *found.inputs, found.output, found.more
    )


class _Found(NamedTuple):
    """The code of the base model and of the head, the logits, what the base model is given and what is returned."""

    base: str
    head: str
    logits: Node
    inputs: tuple[tuple[str, ...], tuple[str, ...], bool, bool]
    output: type
    more: tuple[str, ...]


class _LossRecorder(ForwardRecorder):
    """Records a forward that calls a base model first, and notes its calls as code."""

    def __init__(self, members: dict[str, Any]):
        super().__init__(members)
        self.calls: list[str] = []
        self.base: tuple[str, tuple, dict[str, Any]] | None = None

    def called(self, code: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.base is None:
            self.base = code, args, kwargs
            outputs = {name: StandIn(self, name) for name in _outputs()}
            found = BaseModelOutputWithPastAndCrossAttentions(self.argument("hidden"), **outputs)
            for name in _MORE:
                object.__setattr__(found, name, StandIn(self, name))
            return found
        if code == "self.loss_function":
            args, kwargs = args[3:], dict(zip(("logits", "labels", "vocab_size"), args, strict=False)) | kwargs
        self.calls.append(self.code_of_call(code, args, kwargs))
        return super().called(code, args, kwargs)

    def code_of_call(self, code: str, args: tuple, kwargs: dict[str, Any]) -> str:
        named = [f"{name}={self.codes_of(value)}" for name, value in sorted(kwargs.items())]
        return f"{code}({', '.join([*map(self.codes_of, args), *named])})"


def _outputs() -> tuple[str, ...]:
    """What the base model returns, and the whole model, too; the last one only where it has such."""
    return cache_name(), "hidden_states", "attentions", "cross_attentions"


# What the base model of one that takes more than text returns as well.
_MORE = "image_hidden_states", "video_hidden_states", "audio_hidden_states", "rope_deltas"
_MORE += "image_outputs", "video_outputs", "audio_outputs"  # from transformers 5.24 on
_KEPT = "(getitem(hidden, slice(None, None, None), slice(0, None, None), slice(None, None, None)))"
_NO_INPUTS = {"labels", "logits_to_keep", "return_dict"}  # of the base model


def _read(forward: Callable, names: tuple[str, ...], members: dict[str, Any]) -> _Found:
    """What a forward with arguments of these names computes. Raises UnknownLayout where it does more."""
    recorder = _LossRecorder({"self.config.return_dict": True, "self.config.use_return_dict": True} | members)
    inputs = [name for name in names if name not in _NO_INPUTS]
    output = recorder.run(forward, **{name: StandIn(recorder, name) for name in (*inputs, "more", "labels")})
    if not isinstance(output, dict):
        raise UnknownLayout(f"unknown layout of its forward, which returns a {type(output).__name__}")
    returned = {name: recorder.codes_of(value) for name, value in output.items()}
    logits, loss = returned.pop("logits", None), returned.pop("loss", "")
    sizes = "self.vocab_size", "self.config.vocab_size", "self.config.text_config.vocab_size"
    losses = [f"self.loss_function(labels=labels, logits={logits}, more=more, vocab_size={size})" for size in sizes]
    match recorder.calls:
        case [head, last] if (
            last in losses
            and loss.startswith("self.loss_function(")
            and all(name == value for name, value in returned.items())
            and returned.keys() >= {*_outputs()[:3]}
        ):
            given = _given(recorder, inputs)
            head = head.removesuffix(_KEPT)
            more = tuple(name for name in _MORE if name in returned)
            return _Found(recorder.base[0], head, recorder.node(output["logits"]), given, type(output), more)
    base = [] if recorder.base is None else [recorder.code_of_call(*recorder.base)]
    raise UnknownLayout(f"unknown layout of its forward, which calls {', '.join([*base, *recorder.calls])}")


def _given(recorder: _LossRecorder, inputs: list[str]) -> tuple[tuple[str, ...], tuple[str, ...], bool, bool]:
    """Which arguments of a forward its base model is given by position and by name, whether it is given the rest, and
    whether return_dict=True."""
    code, args, kwargs = recorder.base
    positional, named = tuple(map(repr, args)), {name: repr(value) for name, value in kwargs.items()}
    passes_rest = named.pop("more", None) == "more"
    asks_for_dict = named.pop("return_dict", None) == "True"
    if not {*positional, *named} <= {*inputs} or any(name != value for name, value in named.items()):
        raise UnknownLayout(f"unknown layout of its forward, which uses {recorder.code_of_call(code, args, kwargs)}")
    return positional, tuple(named), passes_rest, asks_for_dict
