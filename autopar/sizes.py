"""Amounts of memory as people write them: "70GiB", "80 GB", or a plain number of bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from autopar.errors import InputError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MORE = "it must be more than zero bytes, like '70GiB' or '80GB'"
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")


def parse_bytes(value: int | str) -> int:
    """Bytes from an int, or from text with a unit: B, kB, MB, GB, TB (powers of 1000), KiB … TiB (of 1024).

    Text without a unit is an error and not a guess: "70" could be bytes or gigabytes. Fractions of a byte
    are rounded down, so that a budget is never more than what was asked for.

    >>> parse_bytes("70GiB"), parse_bytes("80 GB"), parse_bytes("1.5MiB"), parse_bytes(4096)
    (75161927680, 80000000000, 1572864, 4096)
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InputError(f"{value!r} is no amount of memory: give bytes as an int, or text like '70GiB'")
    if isinstance(value, int):
        amount = value
    else:
        match = _AMOUNT.fullmatch(value.strip())
        if match is None and value.strip().startswith("-"):
            raise InputError(f"{value!r} is no amount of memory: {_MORE}")
        if match is None:
            raise InputError(f"{value!r} is no amount of memory: write a number and a unit, like '70GiB' or '80GB'")
        number, unit = match.groups()
        if not unit and not Fraction(number):
            raise InputError(f"{value!r} is no amount of memory: {_MORE}")
        if not unit:
            raise InputError(f"{value!r} has no unit: write '{number}GiB' or '{number}GB' (or '{number}B' for bytes)")
        if unit.upper() not in _UNITS:
            raise InputError(f"unit {unit!r} in {value!r} is unknown: use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
        amount = int(Fraction(number) * _UNITS[unit.upper()])  # a Fraction: exact, without the rounding of a float
    if amount <= 0:
        raise InputError(f"{value!r} is no amount of memory: {_MORE}")
    return amount


_SHOWN = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show_bytes(count: float, digits: int = 1) -> str:
    """Bytes for people, in powers of 1024.

    >>> show_bytes(75161927680), show_bytes(1536), show_bytes(12)
    ('70.0 GiB', '1.5 KiB', '12 B')
    """
    for unit, name in _SHOWN:
        if abs(count) >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} B"


def show_bytes_up(count: int) -> str:
    """Bytes rounded up to two decimals, so that `parse_bytes` of the text is at least `count`: for a budget that fits.

    >>> show_bytes_up(136357150), show_bytes_up(1536), show_bytes_up(2**20 - 1)
    ('130.05 MiB', '1.50 KiB', '1024.00 KiB')
    """
    for unit, name in _SHOWN:
        if count >= unit:
            return _hundredths(-(-count * 100 // unit), name)
    return f"{count} B"


def show_bytes_down(count: int) -> str:
    """Bytes rounded down to two decimals: for a lower bound, so that the text never claims more than was proven.

    >>> show_bytes_down(136357150), show_bytes_down(1535)
    ('130.04 MiB', '1.49 KiB')
    """
    for unit, name in _SHOWN:
        if count >= unit:
            return _hundredths(count * 100 // unit, name)
    return f"{count} B"


def _hundredths(number: int, unit: str) -> str:
    return f"{number // 100}.{number % 100:02} {unit}"
