"""The grad mode and `torch.autocast` of the loop around a call, which an error inside the call leaves as they were.

Where the user's forward has `with torch.no_grad():`, a graph has bare calls, as compilers take them: no `finally` sets
the mode back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

_KINDS = ("cpu", "cuda")
_NONE = nullcontext()


def ambient_kept() -> AbstractContextManager[object]:
    """For the duration of a call; compilers see to it themselves."""
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
    """How many regions of autocast are around; torch tells it to those who change it."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
