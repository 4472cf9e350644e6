"""Finds which kind a call is of; fast, as this runs at every call of the model."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import traceback
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.calls.entries import FORWARD, Entry
from autopar.calls.looks import lie_of, repeated
from autopar.calls.states import placeholder_name
from autopar.errors import InputError
from autopar.layout import Layout
from autopar.runtime.traces import Traced

# folders of torch and autopar, whose frames are not the user's
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""
LayoutOnMesh = tuple[Layout, tuple[int, ...]]
"""The layout of an input, and the shape of the mesh."""
Order = tuple[int | torch.Tensor, ...]
"""For each placeholder, the index of its value among the leaves of a call, or the tensor itself if it is a default."""


def call_key(
    modules: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    entry: Entry = FORWARD,
    *,
    reads_memory: bool = False,
) -> Hashable | None:
    """Equal for two calls only if they run the same graph; None for a call with nested or unusual arguments.

    `reads_memory`: calls whose tensors lie differently in memory have different keys.

    >>> key = call_key([], (torch.ones(2),), {"flag": True})
    >>> key == call_key([], (torch.zeros(2),), {"flag": True}), key == call_key([], (torch.ones(3),), {"flag": True})
    (True, False)
    """
    kinds: list[Hashable] = []
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            kinds.append((value.shape, value.dtype, value.requires_grad, lie_of(value) if reads_memory else None))
            tensors.append(value)
        elif isinstance(value, float):  # 0.0 and -0.0 are two keys, though equal; NaN is one key
            kinds.append((type(value), value if value == value else "nan", math.copysign(1.0, value)))
        elif value is None or isinstance(value, (bool, int, str)):
            kinds.append((type(value), value))
        else:
            return None
    modes = (torch.is_grad_enabled(), *[module.training for module in modules])
    trainable = tuple([p.requires_grad for module in modules for p in module._parameters.values() if p is not None])
    return entry, modes, trainable, len(args), tuple(kwargs), tuple(kinds), repeated(tensors)


def gathered(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with its DTensors (another planned model returns them) gathered. `inputs`: as in the plan."""
    values = (*args, *kwargs.values())
    if not any(isinstance(v, (DTensor, list, tuple, dict)) for v in values):  # nearly always: quick
        return args, kwargs
    if not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return args, kwargs
    if inputs == "local":
        raise InputError(
            'a DTensor is passed to a model that was planned with inputs="local", which takes each rank\'s own rows: '
            'plan both models with inputs="global", or pass tensor.to_local() where it holds this rank\'s own rows'
        )
    wholes: list[tuple[DTensor, torch.Tensor]] = []  # a tensor passed twice stays one; compilers guard `id`

    def gather(tensor: DTensor) -> torch.Tensor:
        if not any(part is tensor for part, _ in wholes):
            wholes.append((tensor, tensor.full_tensor()))
        return next(whole for part, whole in wholes if part is tensor)

    whole: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(DTensor, gather, (args, kwargs))
    return whole


def order_of(traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
    """Where the placeholders' values are among the leaves of calls like this one.

    Found by binding a separate stand-in for each tensor leaf: this call may pass one tensor twice, and a later one two.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if not traced.reads_values:
        leaves = [torch.empty_like(v, device="meta") if isinstance(v, torch.Tensor) else v for v in leaves]
    values = traced.bind(*pytree.tree_unflatten(leaves, spec))
    if torch.compiler.is_compiling():  # torch 2.11 compiles no `id` of a tensor that is made inside
        return tuple([_place(leaves, value) for value in values])
    places: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault(id(leaf), place)
    return tuple(places.get(id(value), value) for value in values)


def _place(leaves: Sequence[Any], value: Any) -> Any:
    for place, leaf in enumerate(leaves):
        if leaf is value:
            return place
    return value


def global_stand_ins(
    called: Callable[..., Any],
    known_layouts: Mapping[str, LayoutOnMesh],
    rows: LayoutOnMesh | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    states: Collection[str] = (),
) -> Call:
    """The call with data-free tensors of global shapes in place of its tensors, which are this rank's parts.

    `known_layouts`: layout and mesh shape of known inputs, by their names in a graph. `rows`: those of inputs with
    rows. They are used for an unknown input whose first dim is as long as that of a known input with rows or, if no
    input is known, of the first one. `states` do not count for this length, as their rows may lie along any dim."""
    tensors = tensors_of_call(called, args, kwargs)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in states}
    lengths = {name: len(tensor) for name, tensor in tensors.items() if tensor.ndim}
    length = next(
        (n for name, n in lengths.items() if name in known_layouts and not known_layouts[name][0].is_replicated), None
    )
    if length is None and known_layouts.keys().isdisjoint(tensors):
        length = next(iter(lengths.values()), None)

    stand_ins: dict[int, torch.Tensor] = {}  # a tensor that is passed twice stays one

    def stand_in(name: str, part: torch.Tensor) -> torch.Tensor:
        if id(part) not in stand_ins:
            layout = (
                rows if name not in known_layouts and part.ndim and len(part) == length else known_layouts.get(name)
            )
            shape, stride = _global_look(part, layout)
            stand_ins[id(part)] = torch.empty_strided(shape, stride, dtype=part.dtype, device="meta")
            stand_ins[id(part)].requires_grad_(part.requires_grad)
        return stand_ins[id(part)]

    return _replaced(called, args, kwargs, stand_in)


def tensors_of_call(
    called: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors of a call, by their names in a graph."""
    tensors: dict[str, torch.Tensor] = {}
    _replaced(called, args, kwargs, lambda name, tensor: tensors.setdefault(name, tensor))
    return tensors


def _replaced(
    called: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    other: Callable[[str, torch.Tensor], torch.Tensor],
) -> Call:
    """The call with each tensor replaced by `other(its name in the graph, tensor)`."""
    bound = inspect.signature(called).bind_partial(*args)  # `kwargs` may have inputs of the loss
    names = iter(bound.arguments)
    own = tuple(replaced(next(names), value, other) for value in args)
    return own, {name: replaced(name, value, other) for name, value in kwargs.items()}


def replaced(argument: str, value: Any, other: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """An argument with each tensor replaced by `other(its name in the graph, tensor)`."""
    leaves, spec = pytree.tree_flatten(value)
    name, is_one, places = placeholder_name(argument), len(leaves) == 1 and leaves[0] is value, itertools.count()
    others = [
        other(name if is_one else f"{name}_{next(places)}", leaf) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(others, spec)


def _global_look(part: torch.Tensor, layout_on_mesh: LayoutOnMesh | None) -> tuple[Sequence[int], Sequence[int]]:
    """Shape and strides of the global tensor of which each rank has such a part; contiguous if the part is."""
    shape = list(part.shape)
    stride = list(lie_of(part) or torch.empty(part.shape, device="meta").stride())
    if layout_on_mesh is not None:
        layout, mesh_shape = layout_on_mesh
        for placement, ranks in zip(layout.placements, mesh_shape, strict=True):
            if placement.is_sharded and placement.dim < len(shape):
                shape[placement.dim] *= ranks
                stride = [step * ranks if step > stride[placement.dim] else step for step in stride]
    return shape, stride


def place_of(error: BaseException) -> str:
    """ "file:line" of the innermost frame outside torch and autopar that an error came through; "" if there is none."""
    return place_of_frames(traceback.extract_tb(error.__traceback__))


def place_of_frames(frames: Sequence[traceback.FrameSummary]) -> str:
    """ "file:line" of the last of `frames` that is neither torch's nor autopar's; "" if there is none."""
    users = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def description(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, reads_memory: bool = False
) -> str:
    """A description of a call, equal on ranks that make the same call; `reads_memory` as in `call_key`."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    repeats = repeated([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    words: list[object] = [torch.is_grad_enabled(), model.training, str(spec), repeats]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            words.append((tuple(leaf.shape), str(leaf.dtype), leaf.requires_grad, lie_of(leaf) if reads_memory else ""))
        else:
            words.append(leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__)
    return repr(words)
