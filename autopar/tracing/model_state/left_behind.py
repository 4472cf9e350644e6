"""What a forward leaves in the model. Buffers that it rebinds are written instead. Attributes of modules that it sets
to tensors become outputs of the graph, which calls set. If it has read such an attribute before, this is a state, which
is an input of calls as well. Numbers that carry over from call to call, and tensors left elsewhere, cannot be kept."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.calls.states import ABSENT, State
from autopar.gradient_starts import start_of_gradients
from autopar.graph import PLACE
from autopar.tracing import places
from autopar.tracing.contents.unknown import has_unknown
from autopar.tracing.errors import TraceError, nor_one_op
from autopar.tracing.leaves.loss_owners import values_in
from autopar.tracing.leaves.which import LeafPolicy
from autopar.tracing.model_state.changed_state import ChangedAttributes, Kept
from autopar.tracing.model_state.left_values import (
    PLAIN,
    Look,
    holds_data,
    is_replaced,
    parts_of,
    tensors_in,
    writes_into,
)
from autopar.tracing.model_state.near_caches import tensors_kept
from autopar.tracing.model_state.own_containers import OF_TORCH
from autopar.tracing.picked.picked_rows import has_picked_rows

if TYPE_CHECKING:
    from autopar.tracing.model_state.plain_reads import PlainReads
    from autopar.tracing.recorder import Recorder

_MADE = (*PLAIN, str, torch.Tensor, list, tuple, dict)
_GIVEN = ("placeholder", "get_attr")
_IN_PLACE = " (changed in place, where setting another one as in `self.past = [*self.past, x]` would do)"


@dataclass(frozen=True)
class _Before:
    path: str
    module: nn.Module
    own: dict[str, Any]
    buffers: dict[str, torch.Tensor | None]

    @cached_property
    def is_installed(self) -> bool:
        return _is_installed(type(self.module))

    def path_of(self, name: str) -> str:
        """The path of an attribute of the module."""
        return f"{self.path}.{name}" if self.path else name


class LeftBehind:
    """A snapshot of the attributes of a model's modules before a traced call, for comparison with those after it.

    `states`: those that are inputs of the call. `of_loss`: the objects that the loss reads from, by path.
    """

    def __init__(
        self, model: nn.Module, states: Collection[State] = (), of_loss: Mapping[str, Any] | None = None
    ) -> None:
        self._model = model
        self._values = {state: state.read(model) for state in states}
        self._given = {state: (parts_of(value), writes_into(value)) for state, value in self._values.items()}
        owners = dict(of_loss or {})
        self._of_loss = {path: owner for path, owner in owners.items() if isinstance(owner, nn.Module)}
        self._beside = [(path, owner, values_in(owner)) for path, owner in owners.items() if path not in self._of_loss]
        modules = (*model.named_modules(), *self._of_loss.items())
        self._before = [_Before(p, m, dict(vars(m)), dict(m._buffers)) for p, m in modules]
        buffers = (tensor for owner in self._before for tensor in owner.buffers.values() if tensor is not None)
        self._versions = {id(tensor): tensor._version for tensor in buffers}

    def write_buffers(self, policy: LeafPolicy, recorder: Recorder, returned: Any) -> None:
        """Write the tensors that forward bound to buffers into these buffers, as the last ops of the call.

        `self.mean = 0.9 * self.mean + ...` leaves its result in the model; a graph can do so only by a write. But the
        old tensor's readers, another buffer or the caller (`returned`) that is given it, and backward still need the
        old values: all these use a copy, made at the start. A leaf module writes its buffers itself (`LeafCall`). A
        buffer that is bound inside a function leaf is lost with its trial run; the error then tells why `policy` has
        that leaf.
        """
        bound = [
            (entry, name, old, new)
            for entry in self._before
            for name, old in entry.buffers.items()
            if entry.path not in self._of_loss
            and (new := entry.module._buffers.get(name)) is not None
            and old is not None
            and new is not old
            and (new.shape, new.dtype) == (old.shape, old.dtype)
            and State(entry.path, name) not in self._given
        ]
        needed = {
            id(t) for t in (*(new for *_, new in bound), *pytree.tree_leaves(returned)) if isinstance(t, torch.Tensor)
        }
        places = [self._set_apart(old, recorder, needed) for *_, old, _ in bound]
        for (entry, name, old, new), place in zip(bound, places, strict=True):
            try:
                with torch.no_grad():
                    place.copy_(new)
            except TraceError as error:
                if not self._is_in_leaf(entry.module, policy):  # a leaf writes its buffers itself, at each call
                    raise TraceError(_untold(error, entry, name, policy), where=error.where) from error
            entry.module._buffers[name] = old

    def _set_apart(self, old: torch.Tensor, recorder: Recorder, needed: set[int]) -> torch.Tensor:
        """The tensor to write a buffer's new values into.

        If the old tensor was read or is `needed` elsewhere, this is a new tensor, and the old one becomes a copy of it,
        made first. Otherwise, and where forward also writes into the old tensor, it is that one.
        """
        known_node = recorder.nodes.get(id(old))
        is_read = id(old) in needed or (known_node is not None and bool(known_node.users))
        if not is_read or old._version != self._versions.get(id(old)):
            return old
        node = known_node or recorder.node_of(old)
        readers, place = list(node.users), torch.empty_like(old)
        recorder.register(node, place)
        with torch.no_grad():
            copy_node = recorder.nodes[id(recorder.record(torch.Tensor.clone, place))]
        node.append(copy_node)
        for reader in readers:
            reader.replace_input_with(node, copy_node)
        recorder.register(copy_node, old)
        return place

    def _is_in_leaf(self, module: nn.Module, policy: LeafPolicy) -> bool:
        leaves = (entry.module for entry in self._before if policy.is_leaf(entry.module, entry.path))
        return any(module is inner for leaf in leaves for inner in leaf.modules())

    def attributes(self, recorder: Recorder, reads: PlainReads, leaves: Iterable[nn.Module] = ()) -> ChangedAttributes:
        """Sort the attributes that forward has changed: set by calls of the graph, states, or lost.

        Set: values with tensors computed from this call's inputs or parameters, as a loss that the loop reads, or an
        attention map. If forward has read the old value before, the next call continues from it: a state. So is a
        tensor that replaces one of the same shape and dtype. A tensor made from constants that replaces none, or one of
        another shape or dtype, may be a mask or table that is kept, or a count (`ChangedAttributes.maybe_states`).
        Changed numbers are lost, unless a second call leaves them as they are (the length of a table).

        Attributes of `leaves`, whose own code runs at each call, are lost if the traced code sets them. For modules of
        installed packages, attributes become states only if they hold data of the call: the others follow from the
        call's shapes (a window that fits the image). Values made only from constants and buffers that are not read
        before, as a mask or a table, are not set either: they are the same in each call.
        """
        changes = ChangedAttributes(self._of_states(), [], {}, {}, [])
        as_they_are = {id(module) for leaf in leaves for module in leaf.modules()}
        for entry, name, old, new in self._compared():
            if id(entry.module) not in as_they_are:
                self._sort(changes, entry, name, old, new, recorder, reads)
            elif is_replaced(old, new) and holds_data(new, recorder):  # by traced code, which that of a leaf is not
                changes.lost.append(entry.path_of(name))
        for path, owner, values in self._beside:
            after = values_in(owner)
            changes.lost.extend(
                f"{path}.{n}" for n in after if after[n] is not values.get(n) and holds_data(after[n], recorder)
            )
        changes.set.sort(key=lambda attribute: attribute[:2])
        return changes

    def _compared(self) -> Iterator[tuple[_Before, str, Any, Any]]:
        """The attributes of modules, with their values before and after the call (None: without it).

        Left out are torch's own, states that are inputs of the call, and what a hook computes from parameters
        (`weight`, from `weight_orig` or `weight_g`).
        """
        for entry in self._before:
            before, after = {**entry.own, **entry.buffers}, {**vars(entry.module), **entry.module._buffers}
            for name in {**before, **after}:
                if name in OF_TORCH or State(entry.path, name, self._of_loss.get(entry.path)) in self._given:
                    continue
                if not any(parameter.startswith(f"{name}_") for parameter in entry.module._parameters):
                    yield entry, name, before.get(name), after.get(name)

    def _sort(
        self,
        changes: ChangedAttributes,
        entry: _Before,
        name: str,
        old: Any,
        new: Any,
        recorder: Recorder,
        reads: PlainReads,
    ) -> None:
        """Add one attribute to where it belongs in `changes`, as `attributes` says; nowhere if it has not changed."""
        state = State(entry.path, name, self._of_loss.get(entry.path))
        of_data, was_tensor = holds_data(new, recorder), bool(tensors_in(old))
        is_set = is_replaced(old, new) and (name in vars(entry.module) or self._is_bound(entry, name, old, new))
        is_read = is_set and reads.began_with(entry.path, name, old)
        if (is_read and has_unknown(new)) or has_picked_rows(new):  # a number carried over, or picked rows
            changes.lost.append(entry.path_of(name))
            return
        if is_set and not of_data and isinstance(new, _MADE):
            look = partial(Look.of, recorder=recorder)
            changes.from_constants[state] = pytree.tree_map_only(torch.Tensor, look, new)
        goes_on = is_read and (of_data or (was_tensor and not _is_unlike(old, new)))
        if goes_on or recorder.attributes.is_written(old):
            changes.states.extend([state] if of_data or not entry.is_installed else [])
        elif entry.is_installed:
            return
        elif is_set and of_data and name in vars(entry.module):
            changes.set.append(Kept(entry.path, name, new))
        elif is_read and tensors_in(new):
            changes.maybe_states[state] = True
        elif _is_other(new, old) and state in changes.from_constants:
            changes.maybe_states[state] = False
        elif _is_other(new, old) or (of_data and not isinstance(old, torch.Tensor)):
            changes.lost.append(entry.path_of(name) + (_IN_PLACE if new is old else ""))

    def _is_bound(self, entry: _Before, name: str, old: Any, new: Any) -> bool:
        """Whether `write_buffers` leaves out a rebound buffer: it was None, had another shape, or is the loss's."""
        if name not in entry.buffers or not isinstance(new, torch.Tensor):
            return False
        return old is None or entry.path in self._of_loss or (new.shape, new.dtype) != (old.shape, old.dtype)

    def unread(self, reads: PlainReads) -> set[str]:
        """The states, by their arguments, that forward has not read, or only after it set them."""
        arguments = set()
        for state, value in self._values.items():
            at = state.path, state.name
            is_absent = isinstance(value, str) and value == ABSENT
            if not (reads.has_read(*at) if is_absent else reads.began_with(*at, value)):
                arguments.add(state.argument)
        return arguments

    def _of_states(self) -> list[Kept]:
        """The input states that forward has set or written into."""
        changed = []
        for state, before in self._given.items():
            value = state.read(self._model)
            if (parts_of(value), writes_into(value)) != before:
                changed.append(Kept(state.path, state.name, value))
        return changed

    def stored_elsewhere(self, recorder: Recorder, model: nn.Module, containers: Iterable[Any]) -> tuple[str, ...]:
        """The places where forward made tensors of this call's data that it left outside the modules' own attributes.

        These are in objects, classes, globals, and in lists and dicts among the arguments (`containers`). Calls of a
        graph leave none there."""
        own = [vars(entry.module) for entry in self._before]
        reported = {id(t) for values in own for name in values.keys() - OF_TORCH for t in tensors_in(values[name])}
        written_in_place = (entry.module._buffers.values() for entry in self._before)
        reported |= {id(buffer) for buffers in written_in_place for buffer in buffers}
        files = {str(node.meta.get(PLACE, "")).rpartition(":")[0] for node in recorder.graph.nodes}
        places_found = dict[str, None]()
        for tensor in tensors_kept(files, model, containers):
            node = recorder.nodes.get(id(tensor))
            if node is None or node.op in _GIVEN or node.target is start_of_gradients:
                continue
            if id(tensor) in reported or not holds_data(tensor, recorder):
                continue
            place = str(node.meta.get(PLACE, ""))
            if place and not places.is_installed(place.rpartition(":")[0]):
                places_found[place] = None
        return tuple(places_found)


def _is_unlike(old: Any, new: Any) -> bool:
    """Whether both are tensors but differ in shape or dtype, like a table that is made longer."""
    are_tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    return are_tensors and (old.shape, old.dtype) != (new.shape, new.dtype)


def _is_other(new: Any, old: Any) -> bool:
    """Whether a number or a tensor was there, and a different one is now."""
    if isinstance(old, torch.Tensor):
        return new is not old
    return type(old) in PLAIN and (type(new) is not type(old) or new != old)


def _untold(error: TraceError, entry: _Before, name: str, policy: LeafPolicy) -> str:
    """The error's message; or why there is a function leaf, if any, which most likely bound the buffer."""
    reason = next(reversed(policy.functions.values()), None)
    return (
        error.message if reason is None else nor_one_op(reason, f"it binds '{entry.path_of(name)}' to another tensor")
    )


def _is_installed(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and places.is_installed(file)
