"""The loss of a model for causal language modelling, without its logits: what patch(training=True) adds."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from llmkernels.ops import linear_cross_entropy
from llmkernels.ops._common import _is_transforming

from ..classes.cache_name import cache_name
from ..classes.families import Loss
from ..classes.layout import Symbol, check_origin
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
        reason = _why_not_now(self, logits_to_keep, kwargs) if asked else None
        if not asked or reason is not None:
            if asked:
                count(self, WITHOUT, reason)
            return original(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        count(self, OP)
        kwargs.pop("return_dict", None)
        outputs = self.model(**inputs, **kwargs)
        softcap = None if options.softcap is None else getattr(self.config, options.softcap)
        loss = _loss(self.lm_head, softcap, outputs.last_hidden_state, labels, **kwargs)
        known = {name: outputs[name] for name in (cache, "hidden_states", "attentions") if name in outputs}
        return _output(self.lm_head, softcap, outputs.last_hidden_state, loss, **known)

    return forward


def _inputs() -> tuple[str, ...]:
    """The arguments of the base model's forward, in the order in which those of the whole model begin."""
    return "input_ids", "attention_mask", "position_ids", cache_name(), "inputs_embeds", "use_cache"


def why_not(model: nn.Module, at_rest: bool = False) -> str | None:
    """Why a model computes its loss from logits for now, or None.

    At rest, outside of a forward, a weight may be a DTensor that FSDP makes a plain one in every forward.
    """
    head = model.lm_head
    if type(head) is not nn.Linear or not runs_only_forward(head):
        return "lm_head has to be called: it is no plain linear layer, or has hooks"
    kind = type(head.weight)
    if kind not in (nn.Parameter, Tensor) and not (at_rest and kind.__name__ == "DTensor"):  # FSDP1's is a Tensor
        return f"the weight of lm_head is a {kind.__name__}, not a plain parameter"
    if not has_kernel(head.weight):
        return f"no kernel for {head.weight.dtype} on {head.weight.device.type}"
    function = model.loss_function
    if (getattr(function, "__module__", None), getattr(function, "__name__", None)) != _LOSS:
        return "it has another loss function"
    return None


def _why_not_now(model: nn.Module, logits_to_keep: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a call computes its loss from logits, or None."""
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        return "logits_to_keep asks for a part of the logits"
    if kwargs.get("return_dict") is False:
        return "return_dict=False asks for a tuple"
    return why_not(model)


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
    target = shift_labels.to(hidden.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(
        hidden,
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
    from transformers.modeling_outputs import CausalLMOutputWithPast

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
        sources = ctx.saved_tensors
        with torch.enable_grad():
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
    """How a forward that calls model, lm_head and loss_function, in this order, and no more, computes its logits.

    Raises UnknownLayout for any other forward.
    """
    check_origin(forward, ("transformers", "torch"))
    names = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if names != ["self", *_inputs()[:5], "labels", "use_cache", "logits_to_keep"]:
        raise UnknownLayout(f"unknown layout of its forward, whose arguments are {names}")
    plain, capped = (_trace(forward, softcap) for softcap in (None, Symbol("softcap")))
    if plain != "lm_head":
        raise UnknownLayout(f"its logits are {plain}, and linear_cross_entropy has no option for that")
    if capped not in (plain, "(tanh((lm_head / softcap)) * softcap)"):
        raise UnknownLayout(f"unknown layout of its forward, whose logits are {capped}")
    return Loss(softcap=None if capped == plain else _SOFTCAP)


_SOFTCAP = "final_logit_softcapping"


def _trace(forward: Callable, softcap: str | None) -> str:
    """The logits of a forward, as an expression. Raises UnknownLayout where it makes other calls than those known."""
    calls: list[tuple[str, Any]] = []

    def noted(name: str, result: Any, *arguments: str) -> Callable:
        def call(*args, **kwargs):
            calls.append((name, dict(zip(arguments, args, strict=False)) | kwargs))
            return result

        return call

    found = {cache_name(): "cache", "hidden_states": None, "attentions": None}
    config = {"vocab_size": "vocab_size", "return_dict": True, "use_return_dict": True, _SOFTCAP: softcap}
    traced = SimpleNamespace(
        model=noted("model", SimpleNamespace(last_hidden_state=_Slices(), **found)),
        lm_head=noted("lm_head", Symbol("lm_head"), "input"),
        loss_function=noted("loss_function", "loss", "logits", "labels", "vocab_size"),
        vocab_size="vocab_size",
        logit_scale=Symbol("logit_scale"),
        config=SimpleNamespace(**config, logits_scaling=Symbol("logits_scaling")),
    )
    inputs = {name: name for name in _inputs()}
    everything = (slice(None), slice(0, None), slice(None))
    try:
        output = forward(traced, **inputs, labels="labels", more="more")
        logits = output["logits"]
        loss = {"logits": logits, "labels": "labels", "vocab_size": "vocab_size", "more": "more"}
        expected = [
            ("model", inputs | {"more": "more"}),
            ("lm_head", {"input": everything}),
            ("loss_function", loss),
        ]
        fits = calls == expected and dict(output) == {"loss": "loss", "logits": logits, cache_name(): "cache"}
    except Exception as error:
        raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error
    if not fits:
        raise UnknownLayout(f"unknown layout of its forward, which calls {calls}")
    return str(logits)


class _Slices:
    """Indexed, it gives the index."""

    def __getitem__(self, index: Any) -> Any:
        return index
