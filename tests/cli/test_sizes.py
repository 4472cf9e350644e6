"""Amounts of memory: decimal and binary units, and errors that show how to write one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.sizes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("1B", 1), ("2kB", 2000), ("80GB", 80 * 10**9), ("70GiB", 70 * 2**30), (" 1.5 mib ", 3 * 2**19), ("2TiB", 2**41)],
)
def test_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@given(st.integers(min_value=1, max_value=2**50))
def test_ints_are_bytes(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(f"{count}B") == count


@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_shown_can_be_read(count: int) -> None:
    assert parse_bytes(show_bytes(count)) == pytest.approx(count, rel=0.051)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("70", "no unit"),
        ("70GiG", "unit 'GiG'"),
        ("lots", "write a number"),
        ("-3GiB", "more than zero"),
        ("0GiB", "more than zero"),
        (-1, "more than zero"),
        (True, "as an int, or text"),
        (1.5, "as an int, or text"),
    ],
)
def test_bad_amounts(value: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_bytes(value)  # type: ignore[arg-type]
