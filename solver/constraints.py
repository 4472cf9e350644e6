"""What the user asks of a plan: presets and pins, as restrictions on strategies.

Presets say what an expert would write by hand, for each mesh axis one role:

==========  ==============================  =========================================================
name        axes                            roles
==========  ==============================  =========================================================
"ddp"       all                             batch split, parameters whole
"fsdp"      all                             batch split, parameters sharded and gathered again (ZeRO-3)
"tp"        last; the others as "ddp"       weights used as shards, batch not split
"fsdp+tp"   last tp; the others as "fsdp"   both
"hsdp"      first as "ddp", others "fsdp"   sharded within, replicated across
==========  ==============================  =========================================================

Pins are `kind:pattern = layout`, patterns as in `fnmatch`; in a layout `*` leaves an axis free and R is R or R+::

    param:transformer.h.*.mlp.c_fc.weight = S1,R     storage of parameters, by qualified name
    input:input_ids = S0,R                           inputs of the graph, by name
    activation:transformer.h.*.mlp = S0,*            what a module gives, by module path
    output:* = R                                     what the model returns (* or its place: 0, 1, ...)
    recompute:transformer.h.1? = never               blocks that keep everything, by module path

(`leaf:pattern`, which asks for leaves of the trace, never comes here: `autopar.leaf_requests`.)

A preset takes an op's other strategies away only where one of those it asks for exists; a pin has no such mercy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import fx

from autopar.cost.memory import StepMemory
from autopar.errors import InfeasibleError, InputError, LayoutError
from autopar.graph import SCOPE, output_tensors, tensor_of
from autopar.layout import Layout, Placement
from autopar.strategies.strategy import Strategy

Strategies = Mapping[fx.Node, Sequence[Strategy]]
Test = Callable[[Strategy], bool]

PRESETS = ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp")
_KINDS = ("param", "input", "activation", "output", "recompute")


@dataclass(frozen=True)
class Restricted:
    """Strategies after all constraints; parameters that must (not) be gathered again; nodes that are never replayed.

    `marks`: the pins that speak of a node; blocks whose nodes have other pins are not equal.
    """

    strategies: Strategies
    regather: Mapping[fx.Node, bool] = field(default_factory=dict)
    kept: frozenset[fx.Node] = frozenset()
    marks: Mapping[fx.Node, tuple[str, ...]] = field(default_factory=dict)


def restrict(strategies: Strategies, memory: StepMemory, constraints: Sequence[str]) -> Restricted:
    """Apply presets and pins.

    Raises InputError for one that is malformed or matches nothing, InfeasibleError for one that leaves an op no
    strategy.
    """
    found = Restricted(strategies)
    for text in sorted(constraints, key=lambda t: t.strip() not in PRESETS):
        text = text.strip()
        found = _preset(found, memory, text) if text in PRESETS else _pin(found, memory, text)
    return found


# -- presets ----------------------------------------------------------------------------------------------------------


def _preset(restricted: Restricted, memory: StepMemory, name: str) -> Restricted:
    axes = range(len(memory.mesh_shape))
    tensor_axis = axes[-1] if "tp" in name else None
    batch_axes = [a for a in axes if a != tensor_axis]
    sharded = {"ddp": [], "tp": [], "fsdp": batch_axes, "fsdp+tp": batch_axes, "hsdp": batch_axes[1:]}[name]
    if name in ("fsdp+tp", "hsdp") and len(axes) < 2:
        raise InputError(f"constraint '{name}' needs a mesh of two axes or more, this one has {len(axes)}")
    strategies, regather = dict(restricted.strategies), dict(restricted.regather)
    for node, options in restricted.strategies.items():
        if memory.is_parameter(node):
            strategies[node] = _stored(options, sharded, batch_axes)
            regather[node] = bool(sharded)
            continue
        inputs = [i for i, ref in enumerate(memory.inputs[node]) if memory.is_parameter(ref.node)]
        if not inputs or node.op == "output":
            continue
        for axis in batch_axes:
            options = _preferred(options, _splits_batch(axis, inputs, memory, node), _whole(axis, inputs))
        if tensor_axis is not None:
            wide = [i for i in inputs if tensor_of(memory.inputs[node][i]).dim() > 1]
            options = _preferred(
                options, _splits_weights(tensor_axis, wide, inputs), _sums_nothing(tensor_axis, inputs)
            )
        strategies[node] = options
    return Restricted(strategies, regather, restricted.kept, restricted.marks)


def _preferred(options: Sequence[Strategy], *tests: Test) -> Sequence[Strategy]:
    """The strategies that pass the first test that any passes."""
    for test in tests:
        passing = tuple(s for s in options if test(s))
        if passing:
            return passing
    return options


def _splits_batch(axis: int, inputs: Sequence[int], memory: StepMemory, node: fx.Node) -> Test:
    """Data parallel: activations split on their first dim, the parameter read whole."""
    others = [i for i, ref in enumerate(memory.inputs[node]) if i not in inputs and tensor_of(ref).dim()]

    def test(s: Strategy) -> bool:
        whole = all(s.inputs[i][axis].is_replicated for i in inputs)
        return whole and bool(others) and any(s.inputs[i][axis].dim == 0 for i in others)

    return test


def _whole(axis: int, inputs: Sequence[int]) -> Test:
    """The parameters are read whole."""
    return lambda s: all(s.inputs[i][axis].is_replicated for i in inputs)


def _sums_nothing(axis: int, inputs: Sequence[int]) -> Test:
    """No parameter's gradient is a sum over the axis: a bias is whole, or sharded as what it is added to."""
    return lambda s: not any(s.inputs[i][axis].partial_grad for i in inputs)


def _splits_weights(axis: int, wide: Sequence[int], inputs: Sequence[int]) -> Test:
    """Tensor parallel: matrices are read as shards, and no parameter's gradient is a sum over the axis."""
    sums_nothing = _sums_nothing(axis, inputs)
    return lambda s: bool(wide) and sums_nothing(s) and all(s.inputs[i][axis].is_sharded for i in wide)


def _stored(
    options: Sequence[Strategy],
    sharded: Sequence[int],
    batch_axes: Sequence[int],
) -> Sequence[Strategy]:
    """Storage: sharded over every axis of `sharded` if that can be, whole over the other batch axes.

    On a tensor-parallel axis it is free: the cheapest is as the parameter is used.
    """
    whole = [a for a in batch_axes if a not in sharded]
    options = tuple(s for s in options if not any(s.outputs[0][a].is_sharded for a in whole))
    for count in range(len(sharded), 0, -1):
        passing = tuple(s for s in options if sum(s.outputs[0][a].is_sharded for a in sharded) >= count)
        if passing:
            options = passing
            break
    return options


# -- pins -------------------------------------------------------------------------------------------------------------


def _pin(restricted: Restricted, memory: StepMemory, text: str) -> Restricted:
    head, equals, wanted = (part.strip() for part in text.partition("="))
    kind, colon, pattern = (part.strip() for part in head.partition(":"))
    if not equals or not colon or kind not in _KINDS:
        raise InputError(
            f"constraint '{text}' is no preset ({', '.join(PRESETS)}) and no pin: write 'kind:pattern = layout' "
            f"with a kind of {', '.join(_KINDS)}"
        )
    nodes = _matching(memory, kind, pattern)
    if not nodes:
        raise InputError(f"constraint '{text}' matches nothing: no {_NAMES[kind]} is called '{pattern}'")
    marks = dict(restricted.marks)
    for node in nodes:
        marks[node] = (*marks.get(node, ()), text)
    if kind == "recompute":
        if wanted != "never":
            raise InputError(f"constraint '{text}': recompute can only be 'never'")
        return Restricted(restricted.strategies, restricted.regather, restricted.kept | nodes.keys(), marks)
    form = _form(text, wanted, len(memory.mesh_shape))
    strategies = dict(restricted.strategies)
    for node, places in nodes.items():
        before = strategies.get(node, ())
        strategies[node] = tuple(s for s in before if all(_fits(l, form) for l in _layouts(s, kind, places)))
        if before and not strategies[node]:
            others = [t for t in marks[node] if t != text]
            beside = f" beside {', '.join(repr(t) for t in others)}" if others else ""
            raise InfeasibleError(f"constraint '{text}' cannot hold{beside}: '{node.name}' has no way to lie so")
    return Restricted(strategies, restricted.regather, restricted.kept, marks)


_NAMES = {
    "param": "parameter",
    "input": "input",
    "activation": "module",
    "output": "output",
    "recompute": "module",
}


def _matching(memory: StepMemory, kind: str, pattern: str) -> dict[fx.Node, tuple[int, ...]]:
    """The nodes that a pin speaks of, and of which of their outputs (of the output node: inputs)."""
    found: dict[fx.Node, tuple[int, ...]] = {}
    last: dict[str, fx.Node] = {}
    for node in memory.graph.nodes:
        if kind == "param" and memory.is_parameter(node) and fnmatchcase(str(node.target), pattern):
            found[node] = (0,)
        elif kind == "input" and node.op == "placeholder" and fnmatchcase(str(node.target), pattern):
            found[node] = tuple(range(len(output_tensors(node))))
        elif kind == "output" and node.op == "output":
            found[node] = tuple(i for i in range(len(memory.inputs[node])) if fnmatchcase(str(i), pattern))
        elif kind in ("activation", "recompute") and node.op.startswith("call") and output_tensors(node):
            for path, _ in node.meta.get(SCOPE, ()):
                if fnmatchcase(path, pattern):
                    last[path] = node
                    if kind == "recompute":
                        found[node] = ()
    if kind == "activation":
        found = dict.fromkeys(last.values(), (0,))
    return {node: places for node, places in found.items() if places or kind == "recompute"}


def _layouts(strategy: Strategy, kind: str, places: Sequence[int]) -> list[Layout]:
    layouts = strategy.inputs if kind == "output" else strategy.outputs
    return [layouts[i] for i in places]


def _form(text: str, wanted: str, axes: int) -> tuple[Placement | None, ...]:
    """A layout with free axes (None); one placement alone stands for all axes."""
    parts = [part.strip() for part in wanted.split(",")]
    parts = parts * axes if len(parts) == 1 else parts
    if len(parts) != axes:
        raise InputError(f"constraint '{text}' has {len(parts)} placements, the mesh has {axes} axes")
    try:
        return tuple(None if part == "*" else Placement.parse(part) for part in parts)
    except LayoutError as error:
        raise InputError(f"constraint '{text}': {error}") from error


def _fits(layout: Layout, form: Sequence[Placement | None]) -> bool:
    return all(
        wanted is None or p == wanted or (wanted.is_replicated and not wanted.partial_grad and p.is_replicated)
        for p, wanted in zip(layout.placements, form, strict=True)
    )
