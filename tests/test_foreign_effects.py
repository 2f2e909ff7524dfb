"""What a forward from outside of transformers may do, and what keeps its model from a step: see effects.py."""

import operator
import random
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from llmkernels.hf.classes.effects import check_effects
from llmkernels.hf.errors import UnknownLayout
from test_family_strangers import made
from test_foreign_models import check_step, fresh


@pytest.fixture
def beacon():
    return fresh("beacon")


MEMBERS = """
def __init__(self, *args):
    of_init(self, *args)
    self.seen, self.note, self.numbers, self.cache = [0], [].append, iter([1]), DynamicCache()

def noted(self, x):
    self.last = x

class Aside(nn.Module):
    def aside(x):
        x.last = x
"""


@pytest.fixture
def members(beacon):
    """Layers have more members than they call, and their file another module."""
    vars(beacon)["of_init"] = beacon.Storey.__init__
    exec(MEMBERS, vars(beacon))
    beacon.Storey.__init__, beacon.Storey.noted = vars(beacon)["__init__"], vars(beacon)["noted"]
    beacon.Storey.OF_ALL = {}


def with_lines(beacon, lines, kept="0", by="0"):
    """A model whose layers run these lines first."""
    scope = vars(beacon)
    scope.update(operator=operator, warnings=warnings, logger=logging.get_logger("beacon"), Path=Path)
    scope.update(put=operator.setitem, zeroed=torch.nn.init.zeros_, shuffle=random.shuffle)
    scope["original"] = beacon.Storey.forward
    body = "\n    ".join([*lines.splitlines(), "return original(self, x, cos, sin, mask, memory)"])
    exec(f"def forward(self, x, cos, sin, mask, memory, use=False, kept={kept}, by={by}, **kwargs):\n    {body}", scope)
    beacon.Storey.forward = scope["forward"]
    return made(beacon.BeaconForCausalLM)


OWN = {
    "display": "found = {'a': x}; found['b'] = x; found['a'] = x",
    "unpacked": "found = {**kwargs, 'a': x}; found['b'] = x",
    "list": "found = [1, 2, x]; found[0] = x; found.append(x); found.pop()",
    "dict": "found = dict(); found['a'] = x; del found['a']",
    "dict-of": "found = dict(kwargs); found['a'] = x",
    "list-of": "found = list(kwargs); found.append(x)",
    "copy": "found = {'a': x}; other = found.copy(); other['b'] = x",
    "kwargs": "kwargs['a'] = x; kwargs.pop('a', None); kwargs.update(b=x)",
    "loop": "found = {}\nfor key in (1, 2):\n    found[key] = x",
    "condition": "if not isinstance(masks := mask, dict):\n    masks = {'a': x}\n    if use:\n        masks['b'] = x",
    "number": "length = x.shape[1]; length += 1; length -= 1",
    "unpacked-shape": "rows, length, _ = x.shape; length += 1",
    "result": "y = x * 2; y += 1; y *= 2",
    "field-of-a-result": "y = x * 2; y.logits = x",
    "warning": "if x is None:\n    warnings.warn('none')\n    logger.warning_once('none')",
    "import": "import warnings\nfrom math import sqrt",
}


@pytest.mark.parametrize("lines", OWN.values(), ids=OWN)
def test_what_a_forward_may_do(beacon, lines, device):
    check_step(with_lines(beacon, lines).to(device), device)


ITEM, IN_PLACE, KEEPS = "sets an item", "computes in place", "may keep something in"
OF_OTHERS = {
    # items
    "argument": (ITEM, "mask['a'] = x"),
    "by-another-name": (ITEM, "masks = mask; masks['a'] = x"),
    "one-of-two": (ITEM, "masks = {} if mask is None else mask; masks['a'] = x"),
    "the-other-of-two": (ITEM, "masks = mask if mask is not None else {}; masks['a'] = x"),
    "or": (ITEM, "masks = mask or {}; masks['a'] = x"),
    "behind-a-condition": (ITEM, "if not isinstance(masks := mask, dict):\n    masks = {'a': x}\nmasks['b'] = x"),
    "set-again": (ITEM, "masks = {}\nfor one in (1, 2):\n    masks[one] = x\n    masks = mask"),
    "by-a-handler": (ITEM, "try:\n    masks = mask\n    masks = {}\nexcept KeyError:\n    pass\nmasks['a'] = x"),
    "member": (ITEM, "self.seen[0] = x"),
    "member-by-another-name": (ITEM, "seen = self.seen; seen[0] = x"),
    "a-list-in-ones-own": (ITEM, "seen = [self.seen]; seen[0][0] = x"),
    "deleted": (ITEM, "del self.seen[0]"),
    "item-of-an-output": (ITEM, "mask['logits'] = x"),
    "item-of-an-output-of-a-member": (ITEM, "seen = self.seen; seen['logits'] = x"),
    # fields of outputs
    "field": ("sets logits", "self.logits = x"),
    "field-of-an-argument": ("sets logits", "mask.logits = x"),
    "field-of-a-member": ("sets loss", "part = self.a; part.loss = x"),
    "field-of-one-of-two": ("sets logits", "y = x * 2\nif use:\n    y = self.a\ny.logits = x"),
    "another-field-of-a-result": ("sets last", "y = x * 2; y.last = x"),
    "slice": (ITEM, "self.seen[:1] = [x]"),
    "a-call-with-dict": (ITEM, "masks = max(mask, dict); masks['a'] = x"),
    "a-call-with-an-attribute-of-dict": (ITEM, "masks = iter(dict.mask); masks['a'] = x"),
    "one-of-a-pair": (ITEM, "masks, other = mask, {}; masks['a'] = x"),
    "a-call-with-a-method": (ITEM, "masks = iter(mask.copy); masks['a'] = x"),
    "dict-or-another": (ITEM, "masks = (mask if use else dict)(x); masks['a'] = x"),
    "dict-or-another-of-nothing": (ITEM, "masks = (mask if use else dict)(); masks['a'] = x"),
    "a-key-of-ones-own": (ITEM, "found = {}; mask[found.values] = x"),
    "inner": (ITEM, "found = {}\ndef note():\n    found['a'] = x\nnote()"),
    # methods
    "append": ("calls append", "self.seen.append(x)"),
    "append-by-another-name": ("calls append", "seen = self.seen; seen.append(x)"),
    "pop": ("calls pop", "self.seen.pop()"),
    "pop-of-an-argument": ("calls pop", "mask.pop()"),
    "sort": ("calls sort", "self.seen.sort()"),
    "reverse": ("calls reverse", "seen = self.seen; seen.reverse()"),
    "update-of-the-config": ("calls update", "self.config.rope.update(a=x)"),
    "update-of-a-member": ("calls update", "found = self.cache; found.update(x, x, 0)"),
    "one-of-two-methods": ("calls append", "found = []; (self.seen or found).append(x)"),
    "by-getattr": ("calls append", "getattr(self.seen, 'append')(x)"),
    "by-methodcaller": ("calls append", "operator.methodcaller('append', x)(self.seen)"),
    "own-by-getattr": ("noted sets last", "getattr(self, 'noted')(x)"),
    "setitem": ("calls __setitem__", "self.seen.__setitem__(0, x)"),
    "of-super": ("calls __setattr__", "super(type(self), self).__setattr__('last', x)"),
    "of-another-class": ("aside sets last", "Aside.aside(x)"),
    # functions
    "operator.setitem": ("calls setitem", "operator.setitem(self.seen, 0, x)"),
    "operator.delitem": ("calls delitem", "operator.delitem(self.seen, 0)"),
    "operator.iadd": ("calls iadd", "operator.iadd(self.seen, [x])"),
    "operator.ior": ("calls ior", "operator.ior(mask, {})"),
    "operator.__iadd__": ("calls __iadd__", "operator.__iadd__(self.seen, [x])"),
    "operator-by-another-name": ("uses put", "put(self.seen, 0, x)"),
    "operator-by-import": ("calls setitem", "from operator import setitem as put; put(self.seen, 0, x)"),
    "operator-in-a-default": ("has by, a builtin_function_or_method, around it", "by(self.seen, 0, x)"),
    "default": ("has kept, a list, around it", "kept"),
    "init": ("calls zeroed", "zeroed(self.a.gain)"),
    "init-of-torch": ("calls zeros_", "torch.nn.init.zeros_(self.a.gain)"),
    "out": ("computes into an out", "torch.mul(x, x, out=self.a.gain)"),
    "random": ("which is from random", "shuffle(self.seen)"),
    "seed": ("calls manual_seed", "torch.manual_seed(0)"),
    "file": ("uses Path", "Path('x').unlink()"),
    "object": ("calls object", "object.__setattr__(self, 'last', x)"),
    "globals": ("calls globals", "globals()['last'] = x"),
    "vars": ("calls vars", "vars(self)['last'] = x"),
    "exec": ("calls exec", "exec('x = 1')"),
    "delattr": ("calls delattr", "delattr(self, 'last')"),
    # members
    "bound": (KEEPS, "self.note(x)"),
    "iterator": (KEEPS, "next(self.numbers)"),
    "cache": (KEEPS, "found = getattr(self, 'cache'); found.update(x, x, 0)"),
    "of-the-class": (KEEPS, "self.OF_ALL"),
    # operators
    "member-in-place": (IN_PLACE, "seen = self.seen; seen += [x]"),
    "member-in-place-by-getattr": (IN_PLACE, "seen = getattr(self, 'seen'); seen += [x]"),
    "weight-in-place": (IN_PLACE, "gain = self.a.gain; gain *= 1"),
    "item-in-place": (IN_PLACE, "first = self.seen[0]; first += 1"),
    "one-of-a-pair-in-place": (IN_PLACE, "seen, y = self.seen, torch.relu(x); seen += [x]"),
    "one-of-three-in-place": (IN_PLACE, "a, seen, b = 1, self.seen, torch.relu(x); seen += [x]"),
    "slice-in-place": (IN_PLACE, "first = self.seen[:1]; first += [x]"),
    "argument-in-place": (IN_PLACE, "mask |= {'a': x}"),
    "one-of-two-in-place": (IN_PLACE, "seen = self.seen if mask is None else [x]; seen += [x]"),
    "of-a-loop-in-place": (IN_PLACE, "for one in self.seen:\n    one += 1"),
}


@pytest.mark.parametrize(("reason", "lines"), OF_OTHERS.values(), ids=OF_OTHERS)
def test_what_keeps_a_model_from_a_step(beacon, members, reason, lines):
    model = with_lines(beacon, lines, kept="[0]" if lines == "kept" else "0", by="put" if lines[:2] == "by" else "0")
    with pytest.raises(UnknownLayout, match=re.escape(reason)):
        check_effects(model)


def test_a_dict_that_is_not_of_python(beacon):
    exec("def dict(masks):\n    return masks", vars(beacon))
    with pytest.raises(UnknownLayout, match=ITEM):
        check_effects(with_lines(beacon, "masks = dict(mask); masks['a'] = x"))


def test_members_that_are_not_called(beacon, members):
    """So it is the lines above, and nothing around them, that may do more."""
    check_effects(with_lines(beacon, "pass"))
