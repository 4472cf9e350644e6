"""Initial values for a planned model built on the meta device: its constructor's, never all of them on one rank."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InputError
from autopar.python.held import Held
from autopar.runtime.planned import Planned
from autopar.runtime.ranks.agreement import agree
from autopar.runtime.ranks.meeting import meet
from autopar.runtime.stored.carried import planned_of
from autopar.runtime.stored.parameters import listed, plain_parameters, replace_parameter, tied_names, without_values
from autopar.runtime.stored.pieces import cut, ranges_of, stored_as
from autopar.runtime.weights.recording import Tape, View, recording
from autopar.runtime.weights.replaying import Replay, Slice, slice_for

Build = Callable[[], nn.Module]
_OWN = ("reset_parameters", "_reset_parameters")  # methods that initialise a module: the first that it has is called


def materialise(
    model: nn.Module, build: Build | None = None, *, device: torch.device | str | None = None, draw: bool = True
) -> nn.Module:
    """Give tensors on the meta device their initial values, each rank its shards; called on every rank.

    The values are, bit for bit, those that one process gets from `build()` with the generator state of rank 0. The
    constructor runs once without data on every rank; then its ops run again in order, and each tensor is whole only
    from the op that fills it to the last one that needs it. Parameters and buffers with values keep them.

    `build`: the function that built the model. None: a model of transformers is built again from its config; any other
    runs its `init_weights()` if it has one, else every module's `reset_parameters()`, inner modules first, as after
    `model.to_empty(device=...)`.
    `device`: where random numbers are drawn (CPUs and GPUs give different ones); None: the device of the mesh.
    `draw`: if False, parameters get zeros, and only buffers their initial values; for `load_checkpoint`, which
    overwrites the parameters.

    Afterwards a rank's generator has the state in which the constructor leaves it, if it began with that of rank 0.

    Raises InputError, on every rank, if a tensor gets no value, or if the constructor branches on random numbers;
    PlanMismatchError if constructors differ between ranks.
    """
    planned = planned_of(model)
    meet("materialise")
    home = planned.rank.device
    drawn_on = torch.device(device) if device is not None else home
    missing, holders = set(without_values(model)), Held(model)
    error: Exception | None = None
    digest = ""
    try:
        groups = _groups(model, missing)
        if not draw:
            groups = _without_parameters(model, planned, groups)
        tape, views = _recorded(model, planned, build, groups) if groups else (Tape(), {})
        steps = slice_for(tape, {view.storage for view in views.values()})
        _check_filled(model, steps, views, build is not None or _is_transformers(planned))
        digest = tape.digest()
    except Exception as problem:  # every rank must learn of it before any of them goes on
        error = problem
    agree(home, {"what the model's constructor does": digest}, error)
    by_storage: dict[int, list[str]] = {}
    for name, view in views.items():
        by_storage.setdefault(view.storage, []).append(name)

    def place(number: int, replay: Replay) -> None:
        for name in by_storage[number]:
            _give(model, planned, groups[name], replay.tensor(views[name]))

    try:
        with ExitStack() as stack:
            stack.callback(holders.update)
            if steps.draws:
                stack.enter_context(_generator_of_rank_zero(drawn_on, home))
            Replay(tape, by_storage, drawn_on).run(steps, place)
    except Exception as problem:
        error = problem
    agree(home, {}, error)
    return model


def _groups(model: nn.Module, missing: set[str]) -> dict[str, list[str]]:
    """All names of each tensor without values, by the first name."""
    buffers: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        buffers.setdefault(id(buffer), []).append(name)
    return {names[0]: names for names in (*tied_names(model), *buffers.values()) if names[0] in missing}


def _without_parameters(model: nn.Module, planned: Planned, groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Give parameters zeros, and return the groups of buffers."""
    parameters = {name: names for name, names in groups.items() if isinstance(tensor_at(model, name), nn.Parameter)}
    for name, names in parameters.items():
        tensor = tensor_at(model, name)
        shape = [length for _, length in ranges_of(tensor)]
        set_value(model, planned, names, torch.zeros(shape, dtype=tensor.dtype, device=planned.rank.device))
    return {name: names for name, names in groups.items() if name not in parameters}


def _recorded(
    model: nn.Module, planned: Planned, build: Build | None, groups: Mapping[str, list[str]]
) -> tuple[Tape, dict[str, View]]:
    """The tape of the model's initialisation, and the view of each group's tensor on it."""
    own = build if build is not None else _from_config(model, planned)
    with recording() as recorded, ExitStack() as stack:
        if own is not None:
            built = own()
            _check_alike(model, built, groups)
        else:
            built = model
            stack.enter_context(plain_parameters(model, "cpu"))
            stack.enter_context(_plain_buffers(model, groups))
            _initialise(model)
        views = {name: recorded.view(tensor_at(built, name)) for name in groups}
    return recorded.tape, views


def _from_config(model: nn.Module, planned: Planned) -> Build | None:
    """A function that builds a model of transformers from its config, in its original dtype; None for other models."""
    config: Any = getattr(model, "config", None)
    if not _is_transformers(planned):
        return None

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        dtype: Any = getattr(config, "dtype", None)
        torch.set_default_dtype(dtype if dtype in planned.built_dtypes.values() else before)
        try:
            return planned.user_class(copy.deepcopy(config))
        finally:
            torch.set_default_dtype(before)

    return build


def _is_transformers(planned: Planned) -> bool:
    """Whether the user's class is one of transformers, which is made from a config (adapters around one are not)."""
    return hasattr(planned.user_class, "config_class") and hasattr(planned.user_class, "_init_weights")


def _initialise(model: nn.Module) -> None:
    """Run the model's own initialisation."""
    if hasattr(type(model), "init_weights"):
        model.init_weights()  # type: ignore[operator]
        return
    for module in _inner_first(model):
        for name in _OWN:
            if callable(reset := getattr(module, name, None)):
                reset()
                break


def _inner_first(model: nn.Module, visited: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Every module once, after those inside it: the order in which constructors end."""
    visited = set() if visited is None else visited
    if model not in visited:
        visited.add(model)
        for child in model.children():
            yield from _inner_first(child, visited)
        yield model


@contextmanager
def _plain_buffers(model: nn.Module, groups: Mapping[str, list[str]]) -> Iterator[None]:
    """For the duration, buffers without values are data-free tensors of the constructor's device."""
    buffers = dict(model.named_buffers())
    before = {names[0]: buffers[names[0]] for names in groups.values() if names[0] in buffers}
    try:
        for name, buffer in before.items():
            _set_buffer(model, groups[name], torch.empty(buffer.shape, dtype=buffer.dtype))
        yield
    finally:
        for name, buffer in before.items():
            _set_buffer(model, groups[name], buffer)


def _check_alike(model: nn.Module, built: nn.Module, groups: Mapping[str, list[str]]) -> None:
    """Raise InputError unless the build function makes the model's tensors, tied in the same way."""
    of: dict[int, str] = {}
    for name, names in groups.items():
        mine = tensor_at(model, name)
        try:
            built_tensors = [tensor_at(built, other) for other in names]
        except AttributeError:
            raise InputError(
                f"the build function makes no '{name}', which the model has: give the one that built the model"
            ) from None
        if tuple(built_tensors[0].shape) != tuple(mine.shape):
            raise InputError(
                f"the build function makes '{name}' of shape {tuple(built_tensors[0].shape)}, the model's is "
                f"{tuple(mine.shape)}: give the one that built the model"
            )
        if any(other is not built_tensors[0] for other in built_tensors):
            raise InputError(f"the model ties {listed(names)}, which the build function leaves apart: tie them in it")
        if (other := of.setdefault(id(built_tensors[0]), name)) != name:
            raise InputError(
                f"the build function ties {listed([other, name])}, which are two parameters of the model: tie them "
                "before planning (accelerate's init_empty_weights parts them; model.tie_weights() of transformers "
                "ties them again)"
            )


def _check_filled(model: nn.Module, steps: Slice, views: Mapping[str, View], constructed: bool) -> None:
    """Raise InputError for tensors that nothing fills."""
    empty = [name for name, view in views.items() if view.storage in steps.unfilled]
    if not empty:
        return
    if constructed:
        raise InputError(
            f"the constructor leaves {listed(empty)} without a value: fill them there, or load them with "
            "autopar.load_weights"
        )
    kinds = sorted({type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in empty})
    raise InputError(
        f"nothing gives {listed(empty)} a value ({', '.join(kinds)} has no reset_parameters() that does): "
        "pass the function that builds the model, autopar.materialise(model, build)"
    )


def tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), attribute)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _give(model: nn.Module, planned: Planned, names: list[str], whole: torch.Tensor) -> None:
    """Store a value: of a parameter, this rank's part."""
    old = tensor_at(model, names[0])
    piece = cut(whole, ranges_of(old)).to(planned.rank.device, old.dtype)
    if piece.untyped_storage().nbytes() > piece.nbytes:  # a view would keep the whole alive
        piece = piece.clone(memory_format=torch.contiguous_format)
    set_value(model, planned, names, piece)


def set_value(model: nn.Module, planned: Planned, names: list[str], piece: torch.Tensor) -> None:
    """Replace a parameter or buffer, under all of its names, by a new one with this rank's part `piece`."""
    old = tensor_at(model, names[0])
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(stored_as(old, piece), requires_grad=old.requires_grad)
        planned.replaced.append(weakref.ref(old))
        replace_parameter(model, names, new)
    else:
        _set_buffer(model, names, piece)


def _set_buffer(model: nn.Module, names: list[str], value: torch.Tensor) -> None:
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, value)


@contextmanager
def _generator_of_rank_zero(device: torch.device, home: torch.device) -> Iterator[None]:
    """While inside, `device`'s generator has rank 0's state; afterwards a rank with another state gets its own back."""

    def state() -> torch.Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def set_state(value: torch.Tensor) -> None:
        torch.cuda.set_rng_state(value, device) if device.type == "cuda" else torch.set_rng_state(value)

    mine = state()
    shared = mine.to(home, copy=True)
    dist.broadcast(shared, src=0)
    shared = shared.cpu()
    set_state(shared)
    try:
        yield
    finally:
        if not torch.equal(mine, shared):
            set_state(mine)
