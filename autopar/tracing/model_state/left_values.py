"""Questions about values that forward has left: whether they changed, and whether they depend on this call's data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.graph import VAL
from autopar.ops.random_ops import drawn_name, draws
from autopar.tracing.contents.known import AS_ANOTHER, FILLING, Known
from autopar.tracing.contents.unknown import UnknownNumber

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

PLAIN = (bool, int, float)  # types of counts and running sums
_FILLING = frozenset(one.__name__ for one in FILLING)
_AS_ANOTHER = frozenset(one.__name__ for one in AS_ANOTHER)


@dataclass(frozen=True)
class Look:
    """What is kept of a tensor that a trace made: shape, strides, dtype, and contents if known; never the tensor
    itself."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    content: torch.Tensor | None

    @staticmethod
    def of(tensor: torch.Tensor, recorder: Recorder) -> Look:
        return Look(tensor.shape, tensor.stride(), tensor.dtype, recorder.known.values.get(id(tensor)))

    def example(self) -> torch.Tensor | Known:
        """An example of a tensor with this look."""
        if self.content is not None:
            return Known(self.content)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def parts_of(value: Any) -> Any:
    """A key that tells values apart: structure, numbers and strings by value, everything else by id."""
    leaves, spec = pytree.tree_flatten(value)
    return spec, [leaf if isinstance(leaf, (*PLAIN, str, type(None))) else id(leaf) for leaf in leaves]


def is_replaced(old: Any, new: Any) -> bool:
    """Whether a value is another one; a new list of the same tensors (`nn.LSTM` lists its weights anew) is not."""
    return new is not old and not (tensors_in(new) and parts_of(new) == parts_of(old))


def writes_into(value: Any) -> list[int]:
    """The version of each tensor in a value, which counts the writes into it."""
    return [tensor._version for tensor in tensors_in(value)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, including those that stand for unknown numbers."""
    if not isinstance(value, (torch.Tensor, list, tuple, dict, UnknownNumber)):  # fast path for most attributes
        return []
    leaves = (leaf.tensor if isinstance(leaf, UnknownNumber) else leaf for leaf in pytree.tree_leaves(value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def holds_data(value: Any, recorder: Recorder) -> bool:
    """Whether a value has tensors that are computed from contents of inputs or parameters, or drawn at random."""
    waiting = [node for tensor in tensors_in(value) if (node := recorder.nodes.get(id(tensor))) is not None]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" or isinstance(node.meta.get(VAL), nn.Parameter) or _draws(node):
            return True
        sources = [source for source in _sources(node) if source not in met and _has_tensors(source)]
        met.update(sources)
        waiting += sources
    return False


def _sources(node: fx.Node) -> list[fx.Node]:
    """The inputs whose contents a node's result depends on: none for `x.new_zeros(2)`, and only y for `y.to(x)`."""
    name, first = drawn_name(node.target), node.args[0] if node.args else node.kwargs.get("input")
    if name in _FILLING:
        return [source for source in node.all_input_nodes if source is not first]
    if name in _AS_ANOTHER and isinstance(first, fx.Node):
        return [first]
    return node.all_input_nodes


def _draws(node: fx.Node) -> bool:
    return draws(node) or "dropout" in drawn_name(node.target)


def _has_tensors(node: fx.Node) -> bool:
    """False for sizes: they depend on an input's shape, not on its contents."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node.meta.get(VAL)))
