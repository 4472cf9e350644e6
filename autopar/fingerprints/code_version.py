"""The version of the code that runs, which must be the same on all ranks."""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
from pathlib import Path

import torch
from torch import nn


def code_version(model: nn.Module) -> str:
    """A digest of autopar's own files, those that define the model's modules, and the versions of torch and Python.

    >>> code_version(nn.Linear(2, 2)) == code_version(nn.Linear(3, 3))
    True
    """
    digest = hashlib.sha256(f"{torch.__version__} {platform.python_version()} {_own_digest()}".encode())
    files = {_file_of(base) for module in model.modules() for base in type(module).__mro__ if base is not object}
    for content in sorted(_digest(Path(file)) for file in files if file is not None):
        digest.update(content)
    return digest.hexdigest()


def _file_of(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except TypeError:  # built in, or made where no file is (a notebook)
        return None


@functools.cache
def _own_digest() -> str:
    """The digest of autopar's files, by their contents: the folder may be elsewhere on each host."""
    package = Path(__file__).parents[1]
    files = (*package.rglob("*.py"), *(package / "strategies").rglob("*.py"), *(package / "solver").rglob("*.py"))
    contents = sorted({str(file.relative_to(package)): _digest(file) for file in files}.items())
    return hashlib.sha256(repr(contents).encode()).hexdigest()


@functools.cache
def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b""
