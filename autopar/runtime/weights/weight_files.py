"""Safetensors files as one table of tensors: the file and shape of each, and reading a part of one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import InputError
from autopar.runtime.stored.parameters import listed
from autopar.runtime.stored.pieces import Ranges

_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """One tensor in a file, as described by the file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "F32", "BF16"


class WeightFiles:
    """Open files of weights; `tensors` is what they hold. Data are read when asked for, from memory maps."""

    def __init__(self, opened: Mapping[Path, Any]) -> None:
        self._opened = opened
        self.tensors: dict[str, Stored] = {}
        for file, content in opened.items():
            for name in sorted(content.keys()):
                if name in self.tensors:
                    raise InputError(f"'{name}' is both in {self.tensors[name].file.name} and in {file.name}: keep one")
                piece = content.get_slice(name)
                self.tensors[name] = Stored(file, tuple(piece.get_shape()), str(piece.get_dtype()))

    def size_bytes(self, name: str) -> int:
        """The size of a whole tensor in its file."""
        shape = self.tensors[name].shape
        return math.prod(shape) * self.read(name, tuple((0, min(1, length)) for length in shape)).itemsize

    def read(self, name: str, ranges: Ranges) -> torch.Tensor:
        """The part `ranges` of a tensor, in the dtype of the file; nothing else is read."""
        stored = self.tensors[name]
        content = self._opened[stored.file]
        if all(part == (0, length) for part, length in zip(ranges, stored.shape, strict=True)):
            whole: torch.Tensor = content.get_tensor(name)
            return whole
        piece = content.get_slice(name)
        if any(length == 0 for _, length in ranges):  # a rank past the end of a ragged tensor
            first = piece[tuple(slice(0, 1) for _ in ranges)]
            return torch.empty([length for _, length in ranges], dtype=first.dtype, device=first.device)
        part: torch.Tensor = piece[tuple(slice(start, start + length) for start, length in ranges)]
        return part


@contextmanager
def weight_files(path: str | Path) -> Iterator[WeightFiles]:
    """Open what `path` names: a folder, one file, or the index of several.

    A folder holds `*.safetensors.index.json` and the files that it names, or just the files.

    Raises InputError for what is missing, damaged, or not as the index says.
    """
    from safetensors import SafetensorError, safe_open

    files, file_of = _files(Path(path))
    with ExitStack() as stack:
        opened = {}
        for file in files:
            try:
                opened[file] = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{file} cannot be read as safetensors: {error}") from error
        opened_files = WeightFiles(opened)
        for name, file_name in file_of.items():
            if name not in opened_files.tensors or opened_files.tensors[name].file.name != file_name:
                raise InputError(f"the index says that '{name}' is in {file_name}, where it is not")
        yield opened_files


def _files(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files, and what an index says about them: the file of each tensor."""
    if path.is_dir():
        indices, files = sorted(path.glob(f"*{_INDEX}")), sorted(path.glob("*.safetensors"))
        if len(indices) > 1:
            raise InputError(f"{path} has several indices, {listed([i.name for i in indices])}: name the one to read")
        if not indices and not files:
            raise InputError(f"{path} holds no file of weights (*.safetensors)")
        return _indexed(indices[0]) if indices else (files, {})
    if not path.is_file():
        raise InputError(f"there is no file or folder {path}")
    return _indexed(path) if path.name.endswith(_INDEX) else ([path], {})


def _indexed(index: Path) -> tuple[list[Path], Mapping[str, str]]:
    try:
        file_of = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is no index of weights: {type(error).__name__}: {error}") from error
    files = [index.parent / name for name in sorted(set(file_of.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise InputError(f"{index.name} names {listed(missing)}, which {index.parent} does not hold")
    return files, file_of
