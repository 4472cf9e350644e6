"""Checks of the figures of devices, mesh axes and nodes; an error names the figure, its value and what is allowed.

Clusters are made in loops, so messages are formatted only for errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from autopar.errors import InputError

DEVICE_KINDS = ("cuda", "cpu")
_A_RATE = "a number, 1 or more"


def check_rates(where: str, holder: object, names: Sequence[str], *, optional: bool = False) -> None:
    """Rates (fields `..._per_s`) must be at least 1, shares of rates more than 0. An infinite rate means no time.

    `optional`: None is allowed too; another rate then applies.
    """
    for name in names:
        value = getattr(holder, name)
        is_rate = name.endswith("_per_s")
        if not (_is_number(value) and value > 0 and (value >= 1 or not is_rate)) and not (optional and value is None):
            _refuse(where, name, value, _A_RATE if is_rate else "a number of more than 0", optional)


def check_seconds(where: str, holder: object, names: Sequence[str], *, optional: bool = False) -> None:
    """Seconds must be finite and not negative. `optional`: None is allowed too, for something that does not exist."""
    for name in names:
        value = getattr(holder, name)
        if not (_is_number(value) and 0 <= value < math.inf) and not (optional and value is None):
            _refuse(where, name, value, "a number of seconds, 0 or more", optional)


def check_counts(where: str, holder: object, names: Sequence[str]) -> None:
    """Counts must be ints of at least 1."""
    for name in names:
        value = getattr(holder, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _refuse(where, name, value, "a whole number, 1 or more")


def check_device(where: str, kind: Any, overlap: Any, flops_per_s: Any) -> None:
    """The fields of a Device alone. A dtype without a rate of its own has that of float32, which is required."""
    if kind not in DEVICE_KINDS:
        _refuse(where, "kind", kind, f"one of {', '.join(DEVICE_KINDS)}")
    if not (_is_number(overlap) and 0 <= overlap <= 1):
        _refuse(where, "overlap", overlap, "a number from 0 to 1")
    if not isinstance(flops_per_s, Mapping) or "float32" not in flops_per_s:
        _refuse(where, "flops_per_s", flops_per_s, "rates by dtype, with one of float32, which dtypes without one take")
    for dtype, rate in flops_per_s.items():
        if not (_is_number(rate) and rate >= 1):
            _refuse(where, f"flops_per_s of {dtype}", rate, _A_RATE)


def check_spreads(where: str, spreads: Any) -> None:
    """Spreads must map the names of measurements to numbers of at least 0."""
    if not isinstance(spreads, Mapping):
        _refuse(where, "spreads", spreads, "numbers by the name of what was measured")
    for name, spread in spreads.items():
        if not (_is_number(spread) and spread >= 0):
            _refuse(where, f"spread of {name}", spread, "a number of 0 or more")


def check_text(where: str, name: str, value: Any) -> None:
    """The value must be a str; it may be empty."""
    if not isinstance(value, str):
        _refuse(where, name, value, "text")


def check_flag(where: str, name: str, value: Any) -> None:
    """The value must be a bool."""
    if not isinstance(value, bool):
        _refuse(where, name, value, "True or False")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refuse(where: str, name: str, value: Any, condition: str, optional: bool = False) -> NoReturn:
    raise InputError(f"{where}: {name} is {value!r:.60}, and must be {condition}{', or None' if optional else ''}")
