"""Generators that forward passes to random ops are ignored: planned models draw from a seed and a counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.user_warnings import warn


def without_generator(func: Callable[..., Any], kwargs: dict[str, Any], where: str) -> dict[str, Any]:
    """`kwargs` without `generator`; warns if there was one."""
    if kwargs["generator"] is not None:
        name = getattr(func, "__name__", str(func))
        warn(
            f"{name} is given a torch.Generator, which a planned model does not use: its "
            f"numbers come from torch.initial_seed() at autoparallelize, new ones in each call [at {where}]"
        )
    return {name: value for name, value in kwargs.items() if name != "generator"}
