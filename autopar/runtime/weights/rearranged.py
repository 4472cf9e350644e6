"""Tensors that models of transformers hold in another form than files: experts in one tensor, layers renamed.

Each class of transformers declares its conversions. Its `from_pretrained` runs them, and so does `load_weights`. A
tensor that is only renamed is still read in parts. One that is made from several tensors, such as the experts of a
mixture, is assembled whole on every rank, one tensor at a time, and then cut.

The functions are transformers' own but not part of its public interface, which has none for this; this is the only file
that calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.weights.weight_files import WeightFiles


@dataclass(frozen=True)
class Conversion:
    """Tensors of the model that are computed from others in the files.

    `target`: the first of their names in the model. `sources`: names in the files, and the pattern that each matched.
    """

    target: str
    converter: Any
    sources: tuple[tuple[str, str], ...]

    @property
    def yields(self) -> list[str]:
        """Names in the model of all tensors that it makes."""
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in others)]

    def whole(
        self, model: nn.Module, files: WeightFiles, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The whole tensors by name; raises InputError if the model does not have tensors of these names and shapes."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            stored = files.tensors[name]
            part = files.read(name, tuple((0, length) for length in stored.shape))
            converter.add_tensor(self.target, name, pattern, lambda part=part: part)
        converted = converter.convert(self.target, model=model, config=model.config)
        tensors_made = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        for name, value in tensors_made.items():
            if name not in tensors or tuple(value.shape) != tuple(tensors[name].shape):
                expected = f"it of {tuple(tensors[name].shape)}" if name in tensors else "nothing of that name"
                raise InputError(
                    f"'{self.sources[0][0]}' and what belongs to it make '{name}' of shape {tuple(value.shape)}, the "
                    f"model has {expected}: build the model with the config of these weights"
                )
        return tensors_made


def renamed_and_converted(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], stored: Iterable[str]
) -> tuple[dict[str, str], list[Conversion]]:
    """Names in the files by names in the model, and conversions.

    Names that the model has already are left alone. Both are empty for a model that is not of transformers.
    """
    if not hasattr(type(model), "base_model_prefix"):
        return {}, []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5, models hold tensors as files do
        return {}, []
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_source = {source: converter for converter in converters for source in converter.source_patterns}
    known_tensors, prefix = dict(tensors), model.base_model_prefix
    renamed: dict[str, str] = {}
    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(stored, key=_natural):
        if name in tensors:
            continue
        target, pattern = rename_source_key(name, renamings, converters, prefix, known_tensors)
        if target not in tensors:
            continue
        if pattern is None:
            renamed[target] = name
        else:
            collected.setdefault(target, (by_source[pattern], []))[1].append((name, pattern))
    return renamed, [
        Conversion(name, own_converter, tuple(sources)) for name, (own_converter, sources) in collected.items()
    ]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which expert 10 comes after expert 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
