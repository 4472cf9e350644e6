"""Restores the loop's grad mode and `torch.autocast` state after a call that raises an error.

For `with torch.no_grad():` in the user's forward, the graph has bare calls that set the mode, since compilers need them
so; there is no `finally` to set it back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

_KINDS = ("cpu", "cuda")
_NONE = nullcontext()


def ambient_kept() -> AbstractContextManager[object]:
    """A context for the duration of a call; compilers restore the state themselves."""
    return _NONE if torch.compiler.is_compiling() else _Kept()


class _Kept:
    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
        self._caches, self._depth = torch.is_autocast_cache_enabled(), _depth()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        torch.set_grad_enabled(self._grad)
        for device, enabled, dtype in self._casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._caches)
        while _depth() > self._depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _depth() -> int:
    """The nesting depth of autocast; torch only tells it when it is changed."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
