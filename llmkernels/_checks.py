"""Checks of arguments that the caches share."""

from numbers import Integral
from typing import Any


def check_count(name: str, value: Any, least: float = 1) -> None:
    """Raise unless the value is an integer of at least so much."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        words = {0: "not be negative", 1: "be positive"}.get(least, f"be at least {least}")
        raise ValueError(f"{name} must {words}, got {value}")
