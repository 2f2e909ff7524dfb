"""The loss of a model for causal language modelling, without its logits: what patch(training=True) adds."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from llmkernels.ops import linear_cross_entropy
from llmkernels.ops._common import _is_transforming

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
    """The forward of a `<prefix>ForCausalLM` that in training, given labels, computes the loss and no logits."""
    names, cache = _inputs(), cache_name()

    @functools.wraps(original)
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,  # by position; by name it may be another one
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        past = kwargs.pop(cache, past_key_values)
        values = (input_ids, attention_mask, position_ids, past, inputs_embeds, use_cache)
        inputs = dict(zip(names, values, strict=True))
        asked = labels is not None and self.training
        reason = _why_not_now(self, options, logits_to_keep, kwargs) if asked else None
        if not asked or reason is not None:
            if asked:
                count(self, WITHOUT, reason)
            return original(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        count(self, OP)
        kwargs.pop("return_dict", None)
        outputs, head = getattr(self, options.base)(**inputs, **kwargs), getattr(self, options.head)
        softcap = None if options.softcap is None else getattr(self.config, options.softcap)
        loss = _loss(head, softcap, outputs.last_hidden_state, labels, **kwargs)
        known = {name: outputs[name] for name in (cache, "hidden_states", "attentions") if name in outputs}
        return _output(head, softcap, outputs.last_hidden_state, loss, **known)

    return forward


def _inputs() -> tuple[str, ...]:
    """The arguments of the base model's forward, in the order in which those of the whole model begin."""
    return "input_ids", "attention_mask", "position_ids", cache_name(), "inputs_embeds", "use_cache"


def why_not(model: nn.Module, options: Loss, at_rest: bool = False) -> str | None:
    """Why a model computes its loss from logits for now, or None.

    At rest, outside of a forward, a weight may be a DTensor that FSDP makes a plain one in every forward.
    """
    if MISSING:
        return MISSING
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


def _why_not_now(model: nn.Module, options: Loss, logits_to_keep: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a call computes its loss from logits, or None."""
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        return "logits_to_keep asks for a part of the logits"
    if kwargs.get("return_dict") is False:
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


def _output(head: nn.Linear, softcap: float | None, hidden: Tensor, loss: Tensor, **known: Any) -> Any:
    if not torch.compiler.is_compiling():
        known["logits"] = _logits(hidden, head.weight, head.bias, softcap)
    return CausalLMOutputWithPast(loss=loss, **known)


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
    names = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if names != ["self", *_inputs()[:5], "labels", "use_cache", "logits_to_keep"]:
        raise UnknownLayout(f"unknown layout of its forward, whose arguments are {names}")
    base, head, logits = _read(forward, {})
    softcap = None
    match logits:
        case Node("mul", (Node("tanh", (Node("div", (Node(plain), cap)),)), same)) if plain == head and cap is same:
            softcap = member_name(repr(cap), "self.config")
            base, head, logits = _read(forward, {repr(cap): None})
    if logits.name != head:
        raise UnknownLayout(f"its logits are {code_of(logits)}, and linear_cross_entropy has no option for that")
    return Loss(member_name(base), member_name(head), softcap)


class _LossRecorder(ForwardRecorder):
    """Records a forward that calls a base model first, and notes its calls as code."""

    def __init__(self, members: dict[str, Any]):
        super().__init__(members)
        self.calls: list[str] = []

    def called(self, code: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if code == "self.loss_function":
            args, kwargs = args[3:], dict(zip(("logits", "labels", "vocab_size"), args, strict=False)) | kwargs
        named = [f"{name}={self.codes_of(value)}" for name, value in sorted(kwargs.items())]
        self.calls.append(f"{code}({', '.join([*map(self.codes_of, args), *named])})")
        if len(self.calls) > 1:
            return super().called(code, args, kwargs)
        return BaseModelOutputWithPast(self.argument("hidden"), **{name: StandIn(self, name) for name in _outputs()})


def _outputs() -> tuple[str, ...]:
    """What the base model returns, and the whole model, too."""
    return cache_name(), "hidden_states", "attentions"


_KEPT = "(getitem(hidden, slice(None, None, None), slice(0, None, None), slice(None, None, None)))"


def _read(forward: Callable, members: dict[str, Any]) -> tuple[str, str, Node]:
    """The code of the base model and of the head, and the logits. Raises UnknownLayout where a forward does more."""
    recorder = _LossRecorder({"self.config.return_dict": True, "self.config.use_return_dict": True} | members)
    output = recorder.run(forward, **{name: StandIn(recorder, name) for name in (*_inputs(), "more", "labels")})
    if not isinstance(output, dict):
        raise UnknownLayout(f"unknown layout of its forward, which returns a {type(output).__name__}")
    returned = {name: recorder.codes_of(value) for name, value in output.items()}
    logits, loss = returned.get("logits"), returned.pop("loss", "")
    inputs = f"({', '.join(f'{name}={name}' for name in sorted((*_inputs(), 'more')))})"
    sizes = "self.vocab_size", "self.config.vocab_size"
    losses = [f"self.loss_function(labels=labels, logits={logits}, more=more, vocab_size={size})" for size in sizes]
    match recorder.calls:
        case [base, head, last] if (
            last in losses
            and loss.startswith("self.loss_function(")
            and returned == {name: name for name in _outputs()} | {"logits": logits}
        ):
            return base.removesuffix(inputs), head.removesuffix(_KEPT), recorder.node(output["logits"])
    raise UnknownLayout(f"unknown layout of its forward, which calls {', '.join(recorder.calls)}")
