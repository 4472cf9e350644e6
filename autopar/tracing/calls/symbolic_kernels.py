"""Data-free kernels for tensors with symbolic sizes.

Some of torch's meta kernels are C++ and accept only plain sizes; for these torch has Python versions (decompositions
and references), which compute with symbols. For composite C++ ops torch's Python dispatcher does the same: in torch
2.11 `matmul` and `linear` are such ops that accept only plain sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dispatch.python import enable_python_dispatcher  # private: what compilers trace symbols with
from torch.utils._python_dispatch import TorchDispatchMode

# Messages of C++ code that was given a symbol: where it reads a size, and in a factory with only symbolic sizes.
_REFUSALS = ("expected to contain only concrete integers", "dispatch_on_subclass called with NO overloaded args")


@contextmanager
def symbolic_kernels() -> Iterator[None]:
    """While inside, data-free tensors may have symbolic sizes."""
    with enable_python_dispatcher(), _PythonWhereRefused():
        yield


class _PythonWhereRefused(TorchDispatchMode):
    """Runs torch's Python version of an op where its C++ kernel refuses symbols."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            other = _in_python(func) if any(text in str(error) for text in _REFUSALS) else None
            if other is None:
                raise
            with self:
                return other(*args, **kwargs)


def _in_python(func: Any) -> Callable[..., Any] | None:
    import torch._refs  # slow to import
    from torch._decomp import decomposition_table

    kernel = decomposition_table.get(func) or getattr(torch._refs, func.overloadpacket.__name__, None)
    return kernel if callable(kernel) else None
