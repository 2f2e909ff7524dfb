"""What patch(training=True) reads off the forward of a causal language model, and which forwards it refuses."""

import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2

import llmkernels
from families import family_model
from hf_models import assert_close, tiny_inputs, tiny_model
from llmkernels.hf.classes.cache_name import cache_name
from llmkernels.hf.errors import UnknownLayout
from llmkernels.hf.modules.loss import loss_of

FORWARD = """
def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
            labels=None, use_cache=None, logits_to_keep=0, **kwargs):
    outputs = self.first(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs
    )
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    hidden = outputs.last_hidden_state[:, kept, :]
    logits = self.second(hidden)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(
        loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
"""


def forward_with(*changes):
    source = FORWARD
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    source = source.replace("past_key_values", cache_name())
    scope = dict(vars(modeling_qwen2))
    exec(source, scope)
    return scope["forward"]


def capped(by, name="cap"):
    code = f"logits = self.second(hidden)\n    if self.config.{name} is not None:\n        logits = {by}"
    return "logits = self.second(hidden)", code.replace("CAP", f"self.config.{name}")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (("first", "first"), ("first", "second", None)),
        (("first", "body"), ("body", "second", None)),
        (("outputs.last_hidden_state", "outputs[0]"), ("first", "second", None)),
        (("self.config.vocab_size", "self.vocab_size"), ("first", "second", None)),
        (("logits=logits, labels=labels, vocab", "logits, labels, vocab"), ("first", "second", None)),
        (capped("torch.tanh(logits / CAP) * CAP"), ("first", "second", "cap")),
        (capped("CAP * (logits / CAP).tanh()", "limit"), ("first", "second", "limit")),
    ],
)
def test_forwards(change, names):
    found = loss_of(forward_with(change))
    assert (found.base, found.head, found.softcap) == names


INPUTS = ("input_ids", "attention_mask", "position_ids", cache_name(), "inputs_embeds", "use_cache")


@pytest.mark.parametrize(
    ("changes", "positional", "named", "passes_rest", "asks_for_dict"),
    [
        ([("first", "first")], (), INPUTS, True, False),
        ([("        input_ids=input_ids, ", "        input_ids, ")], INPUTS[:1], INPUTS[1:], True, False),
        ([("use_cache=use_cache, **kwargs", "use_cache=use_cache")], (), INPUTS, False, False),
        ([("use_cache=use_cache, **kwargs", "use_cache=use_cache, return_dict=True")], (), INPUTS, False, True),
        ([(", use_cache=use_cache, **kwargs", ", **kwargs")], (), INPUTS[:5], True, False),
        (
            [("use_cache=None", "kind=None, use_cache=None"), ("**kwargs\n", "kind=kind\n")],
            (),
            (*INPUTS, "kind"),
            False,
            False,
        ),
    ],
)
def test_what_the_base_is_given(changes, positional, named, passes_rest, asks_for_dict):
    found = loss_of(forward_with(*changes))
    assert (found.positional, sorted(found.named)) == (positional, sorted(named))
    assert (found.passes_rest, found.asks_for_dict) == (passes_rest, asks_for_dict)


ALWAYS_CAPPED = "hidden)\n    logits = (logits / self.config.cap).tanh() * self.config.cap\n"
REASON = "unknown layout of its forward"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("use_cache=None, ", ""), f"{REASON} .NameError"),
        (("use_cache=None, ", "use_cache=True, "), f"{REASON}, whose arguments are"),
        (("logits_to_keep=0, ", "logits_to_keep=1, "), f"{REASON}, whose arguments are"),
        (("labels=None", "targets=None"), f"{REASON}, whose arguments are"),
        (("labels=labels", "labels=labels + 1"), f"{REASON} .TypeError"),
        (("labels=labels", "labels=input_ids"), f"{REASON}, which calls .*labels=input_ids"),
        (("vocab_size=self.config.vocab_size", "vocab_size=self.config.size"), f"{REASON}, which calls .*config.size"),
        (("self.config.vocab_size, **kwargs", "self.config.vocab_size"), f"{REASON}, which calls"),
        (("use_cache=use_cache, **kwargs", "use_cache=labels, **kwargs"), f"{REASON}, which uses self.first"),
        (("use_cache=use_cache, ", "use_cache=True, "), f"{REASON}, which uses .*use_cache=True"),
        (("input_ids=input_ids", "input_ids=position_ids"), f"{REASON}, which uses .*input_ids=position_ids"),
        (("[:, kept, :]", "[:, -1:, :]"), "its logits are self.second.*slice.-1, None"),
        (("[:, kept, :]", ""), "its logits are self.second.hidden"),
        (("self.second(hidden)", "self.second(self.third(hidden))"), f"{REASON}, which calls .*third.*second"),
        (("self.loss_function", "self.other_loss"), f"{REASON}, which calls .*other_loss"),
        (("outputs.past_key_values", "None"), f"{REASON}, which calls"),
        (("attentions=outputs.attentions", "attentions=outputs.hidden_states"), f"{REASON}, which calls"),
        (("attentions=outputs.attentions", "attentions=()"), f"{REASON}, which calls"),
        (("return Causal", "return logits\n    return Causal"), f"{REASON}, which returns a Tensor"),
        (("loss=loss", "loss=2 * loss"), f"{REASON}, which calls"),
        (("loss = None", "self.seen = logits"), f"{REASON} .UnknownLayout: its forward sets seen"),
        (("loss = None", "loss = self.flag or None"), f"{REASON} .UnknownLayout: its forward depends on self.flag"),
        (("hidden)\n", "hidden) * self.scale\n"), "its logits are mul.self.second.getitem.*, self.scale., and"),
        (("hidden)\n", "hidden).float()\n"), "its logits are float.self.second"),
        (capped("torch.tanh(logits / CAP) * self.config.other"), "its logits are mul.tanh.*config.cap.*config.other"),
        (capped("torch.tanh(2 * logits / CAP) * CAP"), "its logits are mul.tanh.div.mul"),
        (capped("torch.sigmoid(logits / CAP) * CAP"), "its logits are mul.sigmoid"),
        (("hidden)\n", "hidden)\n    logits = (logits / self.cap).tanh() * self.cap\n"), f"{REASON}, which uses"),
        (("hidden)\n", ALWAYS_CAPPED), f"{REASON} .TypeError"),
    ],
)
def test_forwards_that_are_refused(change, reason):
    with pytest.raises(UnknownLayout, match=reason):
        loss_of(forward_with(change))


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "bloom", "mpt", "falcon"])
def test_older_families(name):
    """Their forwards have other arguments, their base models get some by position, and outputs are of other classes."""
    model, ids = family_model(name).train(), tiny_inputs(tokens=9)
    asks_for_dict = loss_of(type(model).forward).asks_for_dict
    outputs, gradients = [], []
    for patched in (False, True):
        if patched:
            handle = llmkernels.patch(model, training=True)
        outputs.append(model(ids, None, labels=ids, num_items_in_batch=5))
        outputs[-1].loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    expected, found = outputs
    assert type(found) is type(expected) and found.keys() == expected.keys()
    assert_close(found.loss, expected.loss, 1e-5)
    assert_close(found.logits, expected.logits, 1e-4)
    least = 1e-6 * max(gradient.norm() for gradient in gradients[0])
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + least
    assert dict(handle.report()["loss"].runs) == {"llmkernels::linear_cross_entropy": 1}
    with torch.no_grad():
        assert isinstance(model(input_ids=ids, labels=ids, return_dict=False), tuple)
    if asks_for_dict:  # others raise then, unpatched, too
        model.config.return_dict = False
        with torch.no_grad():
            assert isinstance(model(input_ids=ids, labels=ids), tuple)
    with pytest.raises(TypeError, match="input_ids"):
        model(ids, input_ids=ids, labels=ids)


def test_a_forward_of_someone_else():
    with pytest.raises(UnknownLayout, match="its forward is not transformers' own but from test_hf_loss_layout"):
        loss_of(lambda self, input_ids=None: None)


def test_other_names_of_the_base_and_the_head(monkeypatch):
    """The loss is computed without the logits, and is that of the model."""
    monkeypatch.setattr(modeling_qwen2.Qwen2ForCausalLM, "forward", forward_with())
    model, ids = tiny_model().train(), tiny_inputs()
    model.first, model.second = model.model, model.lm_head
    del model.model, model.lm_head
    expected = model(ids, labels=ids).loss
    handle = llmkernels.patch(model, training=True)
    with torch.no_grad():
        assert_close(model(ids, labels=ids).loss, expected)
    assert dict(handle.report()["loss"].runs) == {"llmkernels::linear_cross_entropy": 1}
