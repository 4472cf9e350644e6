"""Environment variables with invalid values: errors name them and say what to do."""

from __future__ import annotations

import pytest

from autopar.arguments.environment import is_on, number_in
from autopar.errors import InputError


def test_a_number_is_read_and_its_default_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert number_in("LOCAL_RANK", 7, least=0) == 0
    monkeypatch.delenv("LOCAL_RANK")
    assert number_in("LOCAL_RANK", 7, least=0) == 7


@pytest.mark.parametrize("text", ["four", "", "0", "-1", "1.5", "²"])
def test_what_is_no_number_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(InputError, match=rf"WORLD_SIZE is '{text}': it must be a whole number, 1 or more; .*right$"):
        number_in("WORLD_SIZE")


def test_what_must_be_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InputError, match=r"WORLD_SIZE is not set: .*start with torchrun"):
        number_in("WORLD_SIZE")


def test_a_switch_takes_0_and_1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_DISCOVERY", raising=False)
    assert is_on("AUTOPAR_DISCOVERY")
    for text in ("0", "1"):
        monkeypatch.setenv("AUTOPAR_DISCOVERY", text)
        assert is_on("AUTOPAR_DISCOVERY") == (text == "1")
    monkeypatch.setenv("AUTOPAR_DISCOVERY", "false")
    with pytest.raises(InputError, match="AUTOPAR_DISCOVERY is 'false': set it to 0 for off"):
        is_on("AUTOPAR_DISCOVERY")
