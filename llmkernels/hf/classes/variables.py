"""What a function's bytecode says about its local variables: where they hold nothing that outlives the call.

variables.loaded(index)               the variable that the step before one loads
variables.is_container(name, index)   at a step, it is a dict or list that this very call has made
variables.is_result(name, index)      at a step, it is what an operator or a call has returned
"""

import dis
import inspect
import types
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_CALLS = {"CALL", "CALL_FUNCTION", "CALL_METHOD"}
_LEFT_OUT = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "TO_BOOL"}
# The last step of a display of a dict or a list, also of a long one or one with * or **.
_DISPLAYS = {"BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_LIST", "DICT_UPDATE", "LIST_EXTEND", "MAP_ADD", "LIST_APPEND"}
# The last step of other expressions with a value of their own. That of a call is taken for one, too, though a function
# may return what it has not made.
_RESULTS = ("CALL", "BINARY_", "INPLACE_", "UNARY_", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "BUILD_", "LOAD_CONST")


class Step(NamedTuple):
    offset: int
    name: str
    value: Any
    to: int | None  # the offset where it may jump
    in_place: bool  # it is an operator as +=


class Variables:
    """The steps of a function's code, or of one inside of it, and what they do with local variables."""

    def __init__(self, function: types.FunctionType, code: types.CodeType):
        self._scope = function.__globals__
        bytecode = dis.Bytecode(code)
        self.steps = [part for step in bytecode if step.opname not in _LEFT_OUT for part in _parts(step)]
        self._handlers = [*_handlers(bytecode, len(code.co_code))]
        offsets = [step.offset for step in self.steps]
        self._targets = [[bisect_left(offsets, offset) for offset in self._jumps(step)] for step in self.steps]
        self._jumped_to: dict[int, list[int]] = {}
        for index, targets in enumerate(self._targets):
            for target in targets:
                self._jumped_to.setdefault(target, []).append(index)
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        self._arguments = {*code.co_varnames[:count]}  # but for **kwargs, a dict that each call makes
        self._others: dict[tuple[str, Callable, bool], set[int]] = {}

    def loaded(self, index: int, back: int = 1) -> str | None:
        """The variable that is loaded a number of steps before one, if no jump leads in between."""
        step = self.steps[index - back] if index >= back else None
        is_load = step is not None and step.name in ("LOAD_FAST", "LOAD_FAST_CHECK")
        return step.value if is_load and not self._is_jumped_to(index - back + 1, index + 1) else None

    def is_container(self, name: str | None, index: int) -> bool:
        return self._holds(name, index, self._is_new_container, or_argument=False)

    def is_result(self, name: str | None, index: int, or_argument: bool = False) -> bool:
        return self._holds(name, index, self._is_set_to_result, or_argument)

    def _holds(self, name: str | None, index: int, is_new: Callable[[int], bool], or_argument: bool) -> bool:
        """Whether a variable was set by a step for which `is_new` holds, on each way that leads to a step."""
        if name is None:
            return False
        key = name, is_new, or_argument
        if key not in self._others:
            self._others[key] = self._reached_by_others(*key)
        return index not in self._others[key]

    def _reached_by_others(self, name: str, is_new: Callable[[int], bool], or_argument: bool) -> set[int]:
        """The steps that a variable may reach with another value.

        Every step may go on with the next one, even a jump: that is more than what may happen, and needs no list.
        """
        stores = {i for i, step in enumerate(self.steps) if step.name == "STORE_FAST" and step.value == name}
        left = [0] if name in self._arguments and not or_argument else []
        left += [store + 1 for store in stores if not is_new(store)]
        found: set[int] = set()
        while left:
            index = left.pop()
            if index not in found and index < len(self.steps):
                found.add(index)
                left += self._targets[index]
                left += [index + 1] if index not in stores else []
        return found

    def _jumps(self, step: Step) -> Iterator[int]:
        if step.to is not None:
            yield step.to
        yield from (target for start, end, target in self._handlers if start <= step.offset < end)

    def _is_jumped_to(self, start: int, end: int) -> bool:
        return any(index in self._jumped_to for index in range(start, end))

    def _is_new_container(self, store: int) -> bool:
        """Whether a variable is set to a display, dict() or list(), of a variable or of nothing, or a copy()."""
        before = self.steps[max(store - 3, 0) : store][::-1]
        if self._is_jumped_to(store, store + 1):
            return False
        if before[0].name in _DISPLAYS:
            return True
        if before[0].name not in _CALLS or self._is_jumped_to(store - 2, store):
            return False
        count = before[0].value
        if count == 0 and before[1].name in ("LOAD_ATTR", "LOAD_METHOD"):
            return before[1].value == "copy"
        if count > 1 or (count == 1 and before[1].name != "LOAD_FAST"):
            return False
        callee = before[1 + count]
        return callee.name == "LOAD_GLOBAL" and callee.value in ("dict", "list") and callee.value not in self._scope

    def _is_set_to_result(self, store: int) -> bool:
        """Whether a variable is set to a value of its own, or to a number of a shape."""
        first = store
        while self.steps[first - 1].name == "STORE_FAST" and not self._is_jumped_to(first, first + 1):
            first -= 1
        is_unpacked = self.steps[first - 1].name == "UNPACK_SEQUENCE"
        if first < store and not is_unpacked:
            return False  # of a, b = c, d, the compiler may have turned the order
        first -= is_unpacked
        return all(self._is_result(index - 1, is_unpacked) for index in (first, *self._jumped_to.get(first, ())))

    def _is_result(self, index: int, is_unpacked: bool) -> bool:
        name = self.steps[index].name
        if name == "BINARY_SUBSCR" or (is_unpacked and name == "LOAD_ATTR"):
            return self.steps[index if is_unpacked else index - 2].value == "shape"
        return name in _DISPLAYS or (name.startswith(_RESULTS) and name != "BINARY_SLICE")


def _parts(step: dis.Instruction) -> Iterator[Step]:
    """A step; of Python 3.13's LOAD_FAST_LOAD_FAST and its like, two."""
    if isinstance(step.argval, tuple) and step.opname.count("_FAST") == 2:
        for name, value in zip(("_" + step.opname).split("_FAST"), step.argval, strict=False):
            yield Step(step.offset, name.strip("_") + "_FAST", value, None, False)
    else:
        is_assignment = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
        in_place = is_assignment or step.opname.startswith("INPLACE_")
        yield Step(step.offset, step.opname, step.argval, step.argval if step.opcode in _JUMPS else None, in_place)


def _handlers(bytecode: dis.Bytecode, end: int) -> Iterator[tuple[int, int, int]]:
    """Where steps lie that may raise, from and to, and where an error leads."""
    if hasattr(bytecode, "exception_entries"):
        yield from ((entry.start, entry.end, entry.target) for entry in bytecode.exception_entries)
    else:  # Python 3.10
        yield from ((step.offset, end, step.argval) for step in bytecode if step.opname.startswith("SETUP_"))
