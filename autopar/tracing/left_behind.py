"""What a forward leaves in the model: buffers that it binds anew are written, and tensors that it sets on modules are
outputs of the graph, which calls set there; what goes on from call to call in other attributes cannot be kept."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.graph import PLACE, VAL
from autopar.tracing import places
from autopar.tracing.errors import TraceError, nor_one_op
from autopar.tracing.leaves import LeafPolicy
from autopar.tracing.near_caches import tensors_kept

if TYPE_CHECKING:
    from autopar.tracing.plain_reads import PlainReads
    from autopar.tracing.recorder import Recorder

_PLAIN = (bool, int, float)  # what is counted or summed up from call to call
_GIVEN = ("placeholder", "get_attr")
_OF_TORCH = frozenset(vars(nn.Module()))  # `_parameters` and its like


@dataclass(frozen=True)
class _Before:
    path: str
    module: nn.Module
    own: dict[str, Any]
    buffers: dict[str, torch.Tensor | None]


class Kept(NamedTuple):
    """What forward has left in an attribute of the module at `path`."""

    path: str
    name: str
    value: Any


class LeftBehind:
    """The attributes of a model's modules before a traced call, to be compared with those after it."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [_Before(p, m, dict(vars(m)), dict(m._buffers)) for p, m in model.named_modules()]
        buffers = (tensor for one in self._before for tensor in one.buffers.values() if tensor is not None)
        self._versions = {id(tensor): tensor._version for tensor in buffers}

    def write_buffers(self, policy: LeafPolicy, recorder: Recorder, returned: Any) -> None:
        """Write what a buffer was bound to into the buffer, as the last ops of the call.

        `self.mean = 0.9 * self.mean + ...` leaves the result in the model; a graph does so only where it writes.
        Whoever has read the old tensor goes on with it, another buffer or the caller (`returned`) may be given it, and
        backward may need it: for all of these it is a copy, made at first. A leaf that is a module writes at each call
        (`LeafCall`); what a function has bound that is one is lost with its trial, and the error tells why `policy`
        has it.
        """
        bound = [
            (one, name, old, new)
            for one in self._before
            for name, old in one.buffers.items()
            if (new := one.module._buffers.get(name)) is not None
            and old is not None
            and new is not old
            and (new.shape, new.dtype) == (old.shape, old.dtype)
        ]
        given = {
            id(t) for t in (*(new for *_, new in bound), *pytree.tree_leaves(returned)) if isinstance(t, torch.Tensor)
        }
        places = [self._set_apart(old, recorder, given) for *_, old, _ in bound]
        for (one, name, old, new), place in zip(bound, places, strict=True):
            try:
                with torch.no_grad():
                    place.copy_(new)
            except TraceError as error:
                if not self._is_in_leaf(one.module, policy):  # a leaf writes it itself, at each call
                    raise TraceError(_untold(error, one, name, policy), where=error.where) from error
            one.module._buffers[name] = old

    def _set_apart(self, old: torch.Tensor, recorder: Recorder, given: set[int]) -> torch.Tensor:
        """The tensor to write into: another one, and the old one a copy of that, where it was read or is `given`.

        Itself where nobody has it, and where forward also writes into it.
        """
        known = recorder.nodes.get(id(old))
        is_read = id(old) in given or (known is not None and bool(known.users))
        if not is_read or old._version != self._versions.get(id(old)):
            return old
        node = known or recorder.node_of(old)
        readers, place = list(node.users), torch.empty_like(old)
        recorder.register(node, place)
        with torch.no_grad():
            made = recorder.nodes[id(recorder.record(torch.Tensor.clone, place))]
        node.append(made)
        for reader in readers:
            reader.replace_input_with(node, made)
        recorder.register(made, old)
        return place

    def _is_in_leaf(self, module: nn.Module, policy: LeafPolicy) -> bool:
        leaves = (one.module for one in self._before if policy.is_leaf(one.module, one.path))
        return any(module is inner for leaf in leaves for inner in leaf.modules())

    def attributes(
        self, recorder: Recorder, reads: PlainReads, leaves: Iterable[nn.Module] = ()
    ) -> tuple[list[Kept], tuple[str, ...]]:
        """What calls of the graph set on modules, and the names of what they cannot.

        Set is what holds tensors of this call's inputs or parameters, and is not read before it is set: a loss that the
        loop reads, a map of attention. Else a call would go on from the one before: a graph has what was there. So it
        does of numbers and tensors that were there before and are others now.

        Not those of `leaves`, whose own code runs at each call; nor those of installed packages, which note there what
        follows from the shapes of a call (a window that fits the image), not what goes on from call to call. Nor what
        is kept of constants and buffers alone, as a mask or a table: that is the same at each call.
        """
        kept, lost = list[Kept](), list[str]()
        as_they_are = {id(module) for leaf in leaves for module in leaf.modules()}
        for one in self._before:
            if id(one.module) in as_they_are or _is_installed(type(one.module)):
                continue
            before, now = {**one.own, **one.buffers}, {**vars(one.module), **one.module._buffers}
            for name in {**before, **now}:
                old, new = before.get(name), now.get(name)
                if any(parameter.startswith(f"{name}_") for parameter in one.module._parameters):
                    continue  # `weight` of `weight_orig` or `weight_g`, which a hook works out before each call
                of_data = name not in _OF_TORCH and _holds_data(new, recorder)
                is_set = new is not old and name in vars(one.module)
                if of_data and is_set and not reads.began_with(one.path, name, old):
                    kept.append(Kept(one.path, name, new))
                elif _is_other(new, old) or (of_data and not isinstance(old, torch.Tensor)):
                    lost.append(f"{one.path}.{name}" if one.path else name)
        return kept, tuple(lost)

    def beside(self, recorder: Recorder, model: nn.Module, given: Iterable[Any]) -> tuple[str, ...]:
        """Where those tensors of this call's data were made that forward has left beside the modules' own attributes:
        in objects, classes, globals, and the lists and dicts that it was `given`. Calls of a graph leave none there."""
        own = [vars(one.module) for one in self._before]
        told = {id(t) for values in own for name in values.keys() - _OF_TORCH for t in _tensors(values[name])}
        told |= {id(buffer) for one in self._before for buffer in one.module._buffers.values()}  # written in place
        files = {str(node.meta.get(PLACE, "")).rpartition(":")[0] for node in recorder.graph.nodes}
        found = dict[str, None]()
        for tensor in tensors_kept(files, model, given):
            node = recorder.nodes.get(id(tensor))
            if node is None or node.op in _GIVEN or id(tensor) in told or not _holds_data(tensor, recorder):
                continue
            place = str(node.meta.get(PLACE, ""))
            if place and not places.is_installed(place.rpartition(":")[0]):
                found[place] = None
        return tuple(found)


def _is_other(new: Any, old: Any) -> bool:
    """Whether a number or a tensor was there, and is another now."""
    if isinstance(old, torch.Tensor):
        return new is not old
    return type(old) in _PLAIN and (type(new) is not type(old) or new != old)


def _tensors(value: Any) -> list[torch.Tensor]:
    if not isinstance(value, (torch.Tensor, list, tuple, dict)):  # nearly all that modules have
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _holds_data(value: Any, recorder: Recorder) -> bool:
    """Whether there are tensors in a value that are computed from the inputs' or the parameters' numbers."""
    waiting = [node for tensor in _tensors(value) if (node := recorder.nodes.get(id(tensor))) is not None]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" or isinstance(node.meta.get(VAL), nn.Parameter):
            return True
        sources = [one for one in node.all_input_nodes if one not in met and _has_tensors(one)]
        met.update(sources)
        waiting += sources
    return False


def _has_tensors(node: fx.Node) -> bool:
    """Not a size: what only has the shape of an input has none of its numbers."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node.meta.get(VAL)))


def _untold(error: TraceError, one: _Before, name: str, policy: LeafPolicy) -> str:
    """The error's message, or why there is a function that is a leaf, which most likely bound the buffer."""
    reason = next(reversed(policy.functions.values()), None)
    full = f"{one.path}.{name}" if one.path else name
    return error.message if reason is None else nor_one_op(reason, f"it binds '{full}' to another tensor")


def _is_installed(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and places.is_installed(file)
