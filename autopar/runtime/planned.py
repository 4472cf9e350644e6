"""What a planned model carries: its graphs, one for each kind of call, and how it runs a call."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, InputError
from autopar.graph import fingerprint
from autopar.layout import Layout
from autopar.plans import Plan
from autopar.runtime.agreement import agree, content_digest
from autopar.runtime.lowering import Lowered, Rank, lower
from autopar.runtime.parameters import check_no_old_holders, placements, plain_parameters
from autopar.runtime.randomness import RandomState

MAX_GRAPHS = 16
"""How many graphs of one model are kept; the one that was not used for longest goes first."""


class Traced(Protocol):
    """What the runtime asks of a trace.

    `root` is the module that `get_attr` names belong to, `constants` are the trace's own tensors by name,
    `own_key` is the key of the traced call, `loss_names` are the inputs of a loss that was traced in.
    """

    @property
    def graph(self) -> fx.Graph: ...
    @property
    def root(self) -> nn.Module: ...
    @property
    def constants(self) -> Mapping[str, Any]: ...
    @property
    def own_key(self) -> Hashable: ...
    @property
    def loss_names(self) -> tuple[str, ...]: ...

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """All that the trace read from Python in such a call; another key is another graph."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The values of the graph's placeholders, in order; InputError where the call is not the traced one."""

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """What the model returns, from the flat outputs of the graph."""


Replan = Callable[[tuple[Any, ...], Mapping[str, Any], Mapping[str, Layout]], tuple[Traced, Plan]]
"""Trace and plan another kind of call, given its arguments and how parameters are stored."""


@dataclass
class Program:
    """One graph of a model, ready to run."""

    traced: Traced
    plan: Plan
    lowered: Lowered
    key: Hashable
    checked: bool = False


class Planned:
    """The programs of one model, most recently used first.

    Deep copies of the model share it: a program holds no parameters, it reads those of the model that it runs for.
    """

    def __init__(
        self,
        user_class: type[nn.Module],
        device_mesh: DeviceMesh,
        rank: Rank,
        storage: Mapping[str, Layout],
        replan: Replan,
    ) -> None:
        self.user_class = user_class
        self.device_mesh, self.rank, self.storage, self.replan = device_mesh, rank, storage, replan
        self.random: RandomState | None = None
        self.programs: list[Program] = []
        self.replaced: list[weakref.ref[nn.Parameter]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Planned:
        return self

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the model, on this rank's part."""
        program = self._program(model, args, kwargs)
        lowered = program.lowered
        inputs = program.traced.bind(args, kwargs)
        if not program.checked and not torch.compiler.is_compiling():
            self._check_first_call(program, inputs)
        state = [self._local(model, program, name) for name in lowered.state]
        key = (self.random.next_key(),) if lowered.takes_key and self.random is not None else ()
        with ExitStack() as stack:
            if lowered.regather is not None and torch.is_grad_enabled():
                stack.enter_context(lowered.regather.watching())
            outputs = lowered.module(*inputs, *state, *key)
        return program.traced.rebuild([self._whole(*pair) for pair in zip(outputs, lowered.outputs, strict=True)])

    def add(self, traced: Traced, plan: Plan) -> Program:
        """Make a graph with its plan ready to run."""
        program = Program(traced, plan, lower(traced.graph, traced.root, plan, self.rank), own_key(traced))
        self.programs.insert(0, program)
        if len(self.programs) > MAX_GRAPHS:
            self.programs.pop()
            warnings.warn(
                f"the model was called in more than {MAX_GRAPHS} ways (shapes, arguments, modes), and each new one is "
                "traced and planned: pad the inputs to fewer shapes",
                stacklevel=2,
            )
        return program

    # -- which graph ---------------------------------------------------------------------------------

    def _program(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        for index, program in enumerate(self.programs):
            if program.traced.key(args, kwargs) == program.key:
                if index:
                    self.programs.insert(0, self.programs.pop(index))
                return program
        return self._plan_again(model, args, kwargs)

    def _plan_again(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Another kind of call than any before: every rank traces and plans it, with parameters stored as they are."""
        agree(self.rank.device, {"the shapes and arguments of this call": _description(model, args, kwargs)})
        planned_class = type(model)
        model.__class__ = self.user_class
        try:
            with plain_parameters(model):
                traced, plan = self.replan(args, kwargs, self.storage)
                return self.add(traced, plan)
        except AutoparError as error:
            raise self._refused(args, kwargs, error) from error
        finally:
            model.__class__ = planned_class

    def _refused(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: AutoparError) -> AutoparError:
        """Why a call cannot run: how it differs from the traced one, and why it cannot be planned itself."""
        try:
            self.programs[0].traced.bind(args, kwargs)
        except InputError as difference:
            return InputError(
                f"{difference.message}; nor can such a call be planned: {error.message}", where=error.where
            )
        return error

    def _check_first_call(self, program: Program, inputs: Sequence[Any]) -> None:
        """What would make ranks disagree later is found before the first collective."""
        error: AutoparError | None = None
        try:
            check_no_old_holders(self.replaced)
        except AutoparError as found:
            error = found
        same: dict[str, str] = {"the graph": fingerprint(program.traced.graph)}
        if program.plan.inputs == "global":
            tensors = {str(i): value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
            same['the batch (with inputs="global" every rank passes the same one)'] = content_digest(tensors)
        agree(self.rank.device, same, error)
        self.replaced = []
        program.checked = True

    # -- values --------------------------------------------------------------------------------------

    def _local(self, model: nn.Module, program: Program, name: str) -> torch.Tensor:
        """This rank's tensor of a parameter, a buffer, or a constant of the trace."""
        if name in program.traced.constants:
            constant = program.traced.constants[name]
            assert isinstance(constant, torch.Tensor)
            return constant.to(self.rank.device)
        path, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), attribute)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert isinstance(local, torch.Tensor)
        return local

    def _whole(self, value: Any, output: tuple[Layout, tuple[int, ...]] | None) -> Any:
        """An output for the user: a plain tensor where it is whole, a DTensor where it is sharded."""
        if output is None or output[0].is_replicated:
            return value
        layout, shape = output
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value, self.device_mesh, placements(layout), run_check=False, shape=torch.Size(shape), stride=stride
        )


def own_key(traced: Any) -> Hashable:
    if hasattr(traced, "own_key"):
        return traced.own_key
    inputs = traced.inputs
    return traced.key((), inputs.values({leaf.name: leaf.example for leaf in inputs.leaves}))


def loss_names(traced: Any) -> tuple[str, ...]:
    return traced.loss_names if hasattr(traced, "loss_names") else traced.inputs.loss_names


def _description(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What a call looks like, equal on ranks that call alike: structure, shapes, plain values, modes."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    words: list[object] = [torch.is_grad_enabled(), model.training, str(spec)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            words.append((tuple(leaf.shape), str(leaf.dtype)))
        else:
            words.append(leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__)
    return repr(words)
