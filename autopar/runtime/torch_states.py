"""The counters of planned models are saved and restored with the state of torch's generator, as if models drew from it.

Code that takes the state (`torch.get_rng_state`, `fork_rng`) and sets it again draws the same numbers again.
`torch.utils.checkpoint` around a planned model needs this: otherwise its replay in backward would drop other elements
than forward did.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from autopar.runtime.randomness import RandomState


@functools.cache
def _followed() -> weakref.WeakKeyDictionary[RandomState, int]:
    """Counters, with the thread that made each: where ranks are threads, each saves and restores its own."""
    return weakref.WeakKeyDictionary()


def follow(state: RandomState) -> None:
    """From now on, save and restore this counter with torch's state."""
    _followed()[state] = threading.get_ident()
    _follow_torch()


@functools.cache
def _follow_torch() -> None:
    """Wrap torch's functions, once a process. Nothing is attached to the state itself, which loops save to files."""
    take, put = torch.get_rng_state, torch.set_rng_state
    noted = WeakTensorKeyDictionary()

    @functools.wraps(take)
    def get_rng_state() -> torch.Tensor:
        state = take()
        thread = threading.get_ident()
        noted[state] = [
            (weakref.ref(random_state), random_state.counter.clone())
            for random_state, at in _followed().items()
            if at == thread
        ]
        return state

    @functools.wraps(put)
    def set_rng_state(new_state: torch.Tensor) -> None:
        put(new_state)
        for reference, counter in noted.get(new_state, ()):
            if (random_state := reference()) is not None:
                random_state.counter.copy_(counter)

    for module in (torch, torch.random):
        module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state  # type: ignore[attr-defined]
