"""What figures of a device, a mesh axis and a node must be; an error names the figure, its value and what it may be.

Clusters are made in loops: where all is well, no text is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from autopar.errors import InputError

DEVICE_KINDS = ("cuda", "cpu")
_A_RATE = "a number, 1 or more"


def check_rates(where: str, holder: object, names: Sequence[str], *, optional: bool = False) -> None:
    """Rates, of one or more a second, and parts of rates, of more than 0. What has an infinite rate takes no time.

    `optional`: may be None as well, where another rate holds.
    """
    for name in names:
        value = getattr(holder, name)
        is_rate = name.endswith("_per_s")
        if not (_is_number(value) and value > 0 and (value >= 1 or not is_rate)) and not (optional and value is None):
            _refuse(where, name, value, _A_RATE if is_rate else "a number of more than 0", optional)


def check_seconds(where: str, holder: object, names: Sequence[str], *, optional: bool = False) -> None:
    """Finite numbers of 0 or more. `optional`: may be None as well, for what is not there."""
    for name in names:
        value = getattr(holder, name)
        if not (_is_number(value) and 0 <= value < math.inf) and not (optional and value is None):
            _refuse(where, name, value, "a number of seconds, 0 or more", optional)


def check_counts(where: str, holder: object, names: Sequence[str]) -> None:
    """Whole numbers of 1 or more."""
    for name in names:
        value = getattr(holder, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _refuse(where, name, value, "a whole number, 1 or more")


def check_device(where: str, kind: Any, overlap: Any, flops_per_s: Any) -> None:
    """What devices alone have. The rate of float32 holds for every dtype that has none of its own."""
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
    """Parts by the name of what was measured."""
    if not isinstance(spreads, Mapping):
        _refuse(where, "spreads", spreads, "numbers by the name of what was measured")
    for name, spread in spreads.items():
        if not (_is_number(spread) and spread >= 0):
            _refuse(where, f"spread of {name}", spread, "a number of 0 or more")


def check_text(where: str, name: str, value: Any) -> None:
    """Text, which may be empty."""
    if not isinstance(value, str):
        _refuse(where, name, value, "text")


def check_flag(where: str, name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        _refuse(where, name, value, "True or False")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refuse(where: str, name: str, value: Any, wanted: str, optional: bool = False) -> NoReturn:
    raise InputError(f"{where}: {name} is {value!r:.60}, and must be {wanted}{', or None' if optional else ''}")
