"""A process that dies at any moment of saving leaves either the last complete checkpoint or the new one.

Death is simulated at every single call that changes the disk; `scripts/bench/fault_run.py` kills real ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autopar import InputError, latest_checkpoint, load_checkpoint, save_checkpoint


class Died(BaseException):
    """Simulates SIGKILL: no code catches it."""


CHANGES = ((os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "unlink"), (os, "rmdir"))


@contextmanager
def dying_at(number: int) -> Iterator[list[str]]:
    """While active, the call of this number that changes the disk is not made, nor any later one."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > number:
                raise Died
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CHANGES:
            patch.setattr(module, name, counted(name, getattr(module, name)))
        yield calls


def model_of(step: int) -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, step)
    return model


def check_latest(folder: Path, steps: tuple[int, ...], value: dict[int, int] | None = None) -> int:
    """Check that the latest checkpoint is of one of `steps` and can be loaded; returns its step."""
    found = latest_checkpoint(folder)
    assert found is not None
    assert found.step in steps
    model = model_of(-1)
    assert load_checkpoint(model, None, found) == found.step
    allowed = {(value or {}).get(found.step, found.step), found.step}
    assert model.weight.unique().tolist()[0] in allowed
    return found.step


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_death_at_every_change_of_the_disk(again: bool, tmp_path: Path) -> None:
    """Saving with `keep=1`, also where a checkpoint of the step exists already."""
    reached, number = set(), 0
    second = 1 if again else 2
    while True:
        folder = tmp_path / str(number)
        save_checkpoint(model_of(1), None, folder, step=1)
        try:
            with dying_at(number) as calls:
                save_checkpoint(model_of(7), None, folder, step=second, keep=1)
            break
        except (Died, Exception):  # torch wraps it in its own error
            assert len(calls) > number
            reached.add(check_latest(folder, (1, second), {second: 7}))
        save_checkpoint(model_of(3), None, folder, step=3, keep=1)  # the next run also removes leftovers
        assert check_latest(folder, (3,)) == 3
        assert [entry.name for entry in folder.iterdir()] == ["step-00000003"]
        number += 1
    assert number == len(calls) > 10
    assert reached == {1, second}


def test_copied_in_part(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(model_of(step), None, tmp_path, step=step)
    second = tmp_path / "step-00000002"
    for name in [file.name for file in second.iterdir()]:
        shutil.copytree(second, tmp_path / "kept")
        (second / name).write_bytes((second / name).read_bytes()[:-1])
        check_latest(tmp_path, (1,))
        with pytest.raises(InputError, match="no complete checkpoint"):
            load_checkpoint(model_of(0), None, second)
        shutil.rmtree(second)
        (tmp_path / "kept").rename(second)
    check_latest(tmp_path, (2,))


def test_the_last_saved_counts_and_not_the_highest_step(tmp_path: Path) -> None:
    """After training went back to an earlier step, the checkpoint saved last counts, not that of the highest step."""
    for step in (10, 20, 30, 15):
        save_checkpoint(model_of(step), None, tmp_path, step=step, keep=3)
    assert check_latest(tmp_path, (15,)) == 15
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000015", "step-00000020", "step-00000030"]
    save_checkpoint(model_of(16), None, tmp_path, step=16, keep=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000015", "step-00000016", "step-00000030"]


def test_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(InputError, match="at least one"):
        save_checkpoint(model_of(1), None, tmp_path, step=1, keep=0)


def test_what_fails_in_the_background_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.checkpoints import saving

    def full(*_: Any) -> None:
        raise OSError("disk full")

    save_checkpoint(model_of(1), None, tmp_path, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_synced", full)
        failed = save_checkpoint(model_of(2), None, tmp_path, step=2, asynchronous=True)
        assert isinstance(failed.exception(), OSError)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(model_of(3), None, tmp_path, step=3)
    check_latest(tmp_path, (1,))
    save_checkpoint(model_of(3), None, tmp_path, step=3)
    check_latest(tmp_path, (3,))
