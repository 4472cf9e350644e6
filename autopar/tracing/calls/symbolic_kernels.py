"""Data-free kernels for tensors some sizes of which are symbols.

Some of torch's kernels for meta tensors are C++ and take plain sizes only; for these torch has the same in Python (its
decompositions and references), which computes with symbols. Of ops that C++ puts together from others torch's Python
dispatcher takes the same: in torch 2.11 `matmul` and `linear` are such ops that take plain sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dispatch.python import enable_python_dispatcher  # private: what compilers trace symbols with
from torch.utils._python_dispatch import TorchDispatchMode

# How C++ says that it was given a symbol: where it reads a size, and where a factory is called with symbols alone.
_REFUSALS = ("expected to contain only concrete integers", "dispatch_on_subclass called with NO overloaded args")


@contextmanager
def symbolic_kernels() -> Iterator[None]:
    """While inside, data-free tensors may have symbols for sizes."""
    with enable_python_dispatcher(), _PythonWhereRefused():
        yield


class _PythonWhereRefused(TorchDispatchMode):
    """Where a kernel refuses symbols, what torch has in Python for it runs instead."""

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

    found = decomposition_table.get(func) or getattr(torch._refs, func.overloadpacket.__name__, None)
    return found if callable(found) else None
