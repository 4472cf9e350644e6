"""Which rows of the data a rank passes: of a batch that all ranks have, and of a dataset that all ranks can read.

With `inputs="global"` every rank passes the whole batch. With `inputs="local"` the rows are dealt out by the plan's
layouts of the inputs, and ranks that hold the same shard pass the same rows.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from autopar.errors import InputError
from autopar.layout import Layout, take_shard
from autopar.runtime.calling.calls import LayoutOnMesh
from autopar.runtime.planned import Planned
from autopar.runtime.stored.carried import planned_of


def local_batch(model: nn.Module, batch: Any) -> Any:
    """This rank's part of a batch that every rank has, to pass to the planned model.

    `batch`: inputs by name, as in `meta_args`; a tuple or list of positional inputs; or the first input alone. It may
    have fewer rows than the example, as a last batch has. By name it may also hold tensors that the model does not
    take, such as targets of a loss outside it, and inputs that the example did not have, such as a mask: if their first
    dim is as long as that of the inputs, this rank gets the same rows of them.

    Raises InputError if the ranks cannot share the rows evenly, and for more inputs than the model takes.
    """
    planned = planned_of(model)
    layouts = planned.programs.first.inputs
    if all(layout.is_replicated for layout, _ in layouts.values()):
        return batch
    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    if isinstance(batch, Mapping):
        input_names = {name for name in batch if not {name, f"{name}_0"}.isdisjoint({*parameters, *layouts})}
        length = _length({name: value for name, value in batch.items() if name in input_names}, layouts)
        return {
            name: _part(name, value, planned, layouts, length, is_input=name in input_names)
            for name, value in batch.items()
        }
    if isinstance(batch, (tuple, list)):
        if len(batch) > len(names) and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            raise InputError(
                f"{len(batch)} positional inputs were given, and the model takes {len(names)}: {names}; what it does "
                "not take (targets) is cut by name, local_batch(model, {'name': tensor})"
            )
        length = _length(dict(zip(names, batch, strict=False)), layouts)
        parts = [_part(name, value, planned, layouts, length) for name, value in zip(names, batch, strict=False)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return _part(names[0], batch, planned, layouts, _length({names[0]: batch}, layouts))


def sampler(
    model: nn.Module, dataset: Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
) -> PartSampler:
    """A sampler of the dataset's rows that this rank passes to the planned model, batch after batch.

        rows = autopar.sampler(model, dataset, shuffle=True)
        loader = DataLoader(dataset, sampler=rows, batch_size=rows.batch_size)

    All ranks together take the batches that one process would, each with as many rows as the example. Call
    `rows.set_epoch(epoch)` before each epoch to shuffle again; all ranks pass the same `seed`. `drop_last`: leave out
    the rows that do not fill a batch. If not, the last batch is smaller.

    Raises InputError for a last batch that the ranks cannot share evenly, and for a dataset without a length.
    """
    planned = planned_of(model)
    if not isinstance(dataset, Sized):
        raise InputError(
            f"{type(dataset).__name__} has no length, so that its rows cannot be dealt out: take whole batches from it "
            "on every rank, and pass autopar.local_batch(model, batch)"
        )
    layout, rows = _of_rows(planned)
    shape = planned.rank.mesh.shape
    parts, last = layout.shards(shape), len(dataset) % rows
    if last % parts and not drop_last:
        raise InputError(
            f"the last batch has {last} of {rows} rows, which {parts} ranks cannot share evenly: pass drop_last=True, "
            'or plan with inputs="global"'
        )
    mine = take_shard(torch.arange(parts, device="cpu"), layout, shape, planned.rank.mesh.coordinate)
    return PartSampler(len(dataset), rows, int(mine[0]), parts, shuffle, seed, drop_last)


class PartSampler(Sampler[int]):
    """Of each batch of `rows` rows, part number `part` of `parts`; made by `sampler`.

    >>> list(PartSampler(10, rows=4, part=1, parts=2, shuffle=False, seed=0, drop_last=False))
    [2, 3, 6, 7, 9]
    """

    def __init__(
        self, length: int, rows: int, part: int, parts: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.length = length - length % rows if drop_last else length
        self.rows, self.part, self.parts = rows, part, parts
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._all = length

    @property
    def batch_size(self) -> int:
        """Rows that this rank passes in one batch."""
        return self.rows // self.parts

    def set_epoch(self, epoch: int) -> None:
        """Another order for another epoch, the same on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // self.parts

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._all))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._all, generator=generator, device="cpu").tolist()
        for start in range(0, self.length, self.rows):
            count = min(self.rows, self.length - start) // self.parts
            yield from order[start + self.part * count : start + (self.part + 1) * count]


def _of_rows(planned: Planned) -> tuple[Layout, int]:
    """The layout of inputs with rows, and the number of rows in the example."""
    layouts = [(layout, shape) for layout, shape in planned.programs.first.inputs.values() if shape and shape[0] > 1]
    layouts.sort(key=lambda entry: entry[0].is_replicated)
    if not layouts:
        raise InputError(
            "the example had one row, so that nothing says how many a batch has: give an example with more"
        )
    layout, shape = layouts[0]
    return layout, shape[0]


def _named(name: str, value: Any) -> list[tuple[str, Any]]:
    """The leaves of an argument; tensors have their names in a graph."""
    leaves = pytree.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return [(name, value)]
    places = itertools.count()
    return [(f"{name}_{next(places)}" if isinstance(leaf, torch.Tensor) else name, leaf) for leaf in leaves]


def _length(batch: Mapping[str, Any], layouts: Mapping[str, LayoutOnMesh]) -> int | None:
    """Number of rows of a batch: that of an input with rows in the example, or of the first tensor if none is known."""
    leaves = [leaf for name, value in batch.items() for leaf in _named(name, value)]
    lengths = {name: len(leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if layouts.keys().isdisjoint(lengths):
        return next(iter(lengths.values()), None)
    return next((n for name, n in lengths.items() if name in layouts and not layouts[name][0].is_replicated), None)


def _part(
    name: str,
    value: Any,
    planned: Planned,
    layouts: Mapping[str, LayoutOnMesh],
    length: int | None,
    *,
    is_input: bool = True,
) -> Any:
    """This rank's part of an argument. An input that the example did not have has rows if its first dim is `length`,
    the number of rows of the batch."""
    parts = []
    for own_name, leaf in _named(name, value):
        known_layout = layouts.get(own_name) if is_input else _of_rows(planned)
        if isinstance(leaf, torch.Tensor):
            if known_layout is None and leaf.ndim and len(leaf) == length:
                known_layout = _of_rows(planned)
            parts.append(leaf if known_layout is None else _cut(name, leaf, known_layout[0], planned))
        else:
            parts.append(leaf)
    return pytree.tree_unflatten(parts, pytree.tree_structure(value))


def _cut(name: str, tensor: torch.Tensor, layout: Layout, planned: Planned) -> torch.Tensor:
    mesh = planned.rank.mesh
    if layout.is_replicated or not tensor.ndim:
        return tensor
    if not layout.is_legal(tensor.shape, mesh.shape):
        ranks = math.prod(n for p, n in zip(layout.placements, mesh.shape, strict=True) if p.is_sharded)
        raise InputError(
            f"'{name}' has {tensor.shape[0]} rows, which {ranks} ranks cannot share evenly: leave a smaller last batch "
            'out, or plan with inputs="global"'
        )
    part: torch.Tensor = take_shard(tensor, layout, mesh.shape, mesh.coordinate)
    return part
