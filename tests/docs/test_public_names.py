"""All names that `autopar` exports exist and are in the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar import errors

REFERENCE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("name", autopar.__all__)
def test_a_public_name_is_in_the_reference(name: str) -> None:
    assert getattr(autopar, name) is not None
    assert hasattr(errors, name) or f":: {name}\n" in REFERENCE


def test_warnings_have_public_names() -> None:
    assert issubclass(autopar.AutoparWarning, UserWarning)
    assert issubclass(autopar.ConstraintWarning, autopar.AutoparWarning)
    assert issubclass(autopar.LeafWarning, autopar.AutoparWarning)
