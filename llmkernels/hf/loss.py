"""The loss of a model for causal language modelling, without its logits: what patch(training=True) adds."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from llmkernels.ops import linear_cross_entropy

from .cache_name import cache_name
from .families import Loss
from .layers import WITHOUT, count, has_kernel, runs_only_forward
from .layout import Symbol, UnknownLayout, check_origin

OP = "linear_cross_entropy"
IGNORED = -100  # the label of a token without a loss, in transformers
_LOSS = ("transformers.loss.loss_utils", "ForCausalLMLoss")


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
        if not asked or not _is_plain(logits_to_keep, kwargs) or why_not(self) is not None:
            if asked:
                count(self, WITHOUT)
            return original(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        count(self, OP)
        kwargs.pop("return_dict", None)
        outputs = self.model(**inputs, **kwargs)
        softcap = None if options.softcap is None else getattr(self.config, options.softcap)
        loss = _loss(self.lm_head, softcap, outputs.last_hidden_state, labels, **kwargs)
        return _output(self.lm_head, softcap, outputs, loss)

    return forward


def _inputs() -> tuple[str, ...]:
    """The arguments of the base model's forward, in the order in which those of the whole model begin."""
    return "input_ids", "attention_mask", "position_ids", cache_name(), "inputs_embeds", "use_cache"


def why_not(model: nn.Module) -> str | None:
    """Why a model computes its loss from logits for now, or None."""
    head = model.lm_head
    if type(head) is not nn.Linear or not runs_only_forward(head):
        return "lm_head has to be called: it is no plain linear layer, or has hooks"
    if type(head.weight) is not nn.Parameter:
        return f"the weight of lm_head is a {type(head.weight).__name__}, not a plain parameter"
    if not has_kernel(head.weight):
        return f"no kernel for {head.weight.dtype} on {head.weight.device.type}"
    function = model.loss_function
    if (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) != _LOSS:
        return "it has another loss function"
    return None


def _is_plain(logits_to_keep: Any, kwargs: dict[str, Any]) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep == 0 and kwargs.get("return_dict") is not False


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


def _output(head: nn.Linear, softcap: float | None, outputs: Any, loss: Tensor):
    known = {name: outputs[name] for name in (cache_name(), "hidden_states", "attentions") if name in outputs}
    known["loss"] = loss
    if torch.compiler.is_compiling():
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(**known)
    return _output_class()(compute=_later(head, softcap, outputs.last_hidden_state), **known)


def _later(head: nn.Linear, softcap: float | None, hidden: Tensor) -> Callable[[], Tensor]:
    """A function for the logits in the grad mode and autocast of now."""
    device, gradients = hidden.device.type, torch.is_grad_enabled()
    autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}

    def compute() -> Tensor:
        with torch.set_grad_enabled(gradients), torch.autocast(device, **autocast):
            logits = head(hidden)
            return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    return compute


@functools.cache
def _output_class() -> type:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class CausalLMOutputWithLazyLogits(CausalLMOutputWithPast):
        """Has logits from the moment on when somebody asks for them by name or by number."""

        def __init__(self, *args: Any, compute: Callable[[], Tensor] | None = None, **kwargs: Any):
            object.__setattr__(self, "_compute", compute)
            super().__init__(*args, **kwargs)

        @property
        def logits(self) -> Tensor | None:
            if self._compute is not None:
                self.logits = self._compute()
                for name in [name for name in self.keys() if name not in ("loss", "logits")]:  # logits come second
                    self.move_to_end(name)
            return self.get("logits")

        @logits.setter
        def logits(self, value: Tensor | None) -> None:
            if value is not None:
                object.__setattr__(self, "_compute", None)
                OrderedDict.__setitem__(self, "logits", value)

        def __getitem__(self, key):
            if key == "logits" or not isinstance(key, str):
                _ = self.logits
            return super().__getitem__(key)

        def __reduce__(self):
            return CausalLMOutputWithPast, tuple(getattr(self, field.name) for field in fields(self))

    return CausalLMOutputWithLazyLogits


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
