"""Pins: layouts that the user demands, forbids or prefers, and recompute of blocks, by name pattern.

==========================================  ===================================================================
`param:*.mlp.*.weight = S1,R`               storage of parameters, by qualified name (a tied one: by any of its names)
`input:input_ids = S0,R`                    inputs of the graph, by name
`activation:layers.*.mlp = S0,*`            the outputs of a module, by its path
`output:* = R`                              what the model returns (* or its place: 0, 1, ...)
`activation:layers.* != *,S1`               forbidden: no such layout
`param:* ~ S0`                              preferred: used wherever it exists, if a plan with it fits
`recompute:layers.1? = never`               blocks by module path: never, selective (a part) or full
==========================================  ===================================================================

Patterns are those of `fnmatch`. A layout has a placement for each mesh axis, or one for all; `*` leaves an axis free, R
is R or R+, S0 on several axes either order of splitting dim 0, and on an axis of one device all placements are alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import fx

from autopar.arguments.near_names import did_you_mean
from autopar.cost.memory.formulas import StepMemory
from autopar.errors import InputError, LayoutError
from autopar.graph import SCOPE, TensorRef, is_getitem, output_tensors, resolve, target_name, tensor_of
from autopar.layout import Layout, Placement
from autopar.solver.constraints.parameter_names import names_by_node, unread
from autopar.solver.constraints.restricted import RECOMPUTE, ExcludedError, Restricted
from autopar.strategies.strategy import Strategy

KINDS = {"param": "parameter", "input": "input", "activation": "module", "output": "output", "recompute": "module"}
_FORM = re.compile(r"\s*(\w+)\s*:\s*(.+?)\s*(!=|~|=)\s*(.+?)\s*")
_GIVEN = {
    "param": "no parameter that it names",
    "input": "no input that it names",
    "activation": "nothing that these modules give",
    "output": "no output that it names",
}
ONLY_BLOCKS = (
    "only blocks are recomputed of which two or more in a row are alike, and parts of them that keep something"
)
_FEW = 2  # most layouts that a message lists
_ANY_OUTER = 0  # `outer` of a placement that leaves open in which order several axes split a dim

Form = Sequence["Placement | None"]


@dataclass(frozen=True)
class Pin:
    """One constraint on layouts or recompute, as it was written: `sign` is "=", "!=" or "~"."""

    text: str
    kind: str
    pattern: str
    sign: str
    wanted: str


def read_pin(text: str) -> Pin | None:
    """The pin that a constraint states; None if it does not have the form of a pin.

    >>> read_pin("param:head.weight != S0").sign
    '!='
    """
    match = _FORM.fullmatch(text)
    return Pin(text, *match.groups()) if match and match[1] in KINDS else None


def is_preference(text: str) -> bool:
    """Whether a constraint is a preference, which is dropped if no plan fits with it."""
    pin = read_pin(text)
    return pin is not None and pin.sign == "~"


@dataclass(frozen=True)
class Spoken:
    """What a pin speaks of: `places`, the output numbers by node (of the output node: inputs); `form`: of layouts."""

    pin: Pin
    places: Mapping[fx.Node, tuple[int, ...]]
    form: Form
    mesh_shape: tuple[int, ...]

    @property
    def is_free(self) -> bool:
        """Whether every layout has the form."""
        return all(placement is None for placement in self.form)

    def layouts(self, node: fx.Node, strategy: Strategy) -> list[Layout]:
        layouts = strategy.inputs if self.pin.kind == "output" else strategy.outputs
        return [layouts[i] for i in self.places[node]]

    def holds(self, node: fx.Node, strategy: Strategy) -> bool:
        fits = [_fits(layout, self.form, self.mesh_shape) for layout in self.layouts(node, strategy)]
        return not any(fits) if self.pin.sign == "!=" else all(fits)


def hold(restricted: Restricted, memory: StepMemory, pin: Pin, axis_names: Sequence[str]) -> Restricted:
    """Restrict the strategies to those in which a pin holds.

    Raises InputError for a pin that is malformed or matches nothing, ExcludedError for one that leaves an op none.
    """
    if pin.kind == "recompute":
        if pin.wanted not in RECOMPUTE or pin.sign != "=":
            raise InputError(f"constraint '{pin.text}': recompute is pinned with =, to {', '.join(RECOMPUTE)}")
        nodes = named(memory, pin)
        return restricted.marked(nodes, pin.text).recomputing(nodes, pin.wanted)
    strategies, spoken, changes = dict(restricted.strategies), spoken_of(memory, pin, axis_names), False
    for node in spoken.places:
        before = strategies.get(node, ())
        remaining = tuple(s for s in before if spoken.holds(node, s))
        if before and not remaining and pin.sign != "~":
            subject = _place(memory, spoken, node, before) or describe(memory, node)
            raise ExcludedError(pin.text, f"{subject} cannot have this layout{_possible_layouts(spoken, node, before)}")
        strategies[node] = remaining or before
        changes |= len(strategies[node]) < len(before)
    # A pin that takes no strategy away leaves equal blocks equal, so it marks no nodes.
    return replace(restricted, strategies=strategies).marked(named(memory, pin), pin.text) if changes else restricted


def spoken_of(memory: StepMemory, pin: Pin, axis_names: Sequence[str]) -> Spoken:
    """What a pin of layouts speaks of; raises InputError if the pin is malformed or matches nothing."""
    form = _form(pin, axis_names)
    places = _fitting(memory, pin, named(memory, pin), form)
    return Spoken(pin, places, _where_split(form, pin.sign, memory.mesh_shape), memory.mesh_shape)


def named(memory: StepMemory, pin: Pin) -> Mapping[fx.Node, tuple[int, ...]]:
    """The nodes that a pin names, with places as in `Spoken`; raises InputError if there are none."""
    nodes = _matching(memory, pin.kind, pin.pattern)
    if not nodes and pin.kind == "recompute" and not any(node.meta.get(SCOPE) for node in memory.graph.nodes):
        raise InputError(
            f"constraint '{pin.text}' asks for recompute, but {ONLY_BLOCKS}, and this model has no modules"
        )
    if not nodes:
        names = _names(memory, pin.kind)
        condition = " that runs anything here" if KINDS[pin.kind] == "module" else ""
        near = f"; its places are {', '.join(names)}" if pin.kind == "output" else did_you_mean(pin.pattern, names)
        if pin.kind == "param" and (name := unread(memory, pin.pattern)):
            raise InputError(
                f"constraint '{pin.text}' matches nothing: this call does not read '{name}', which stays whole on "
                "every rank"
            )
        raise InputError(
            f"constraint '{pin.text}' matches nothing: no {KINDS[pin.kind]}{condition} is called '{pin.pattern}'{near}"
        )
    return nodes


def _names(memory: StepMemory, kind: str) -> list[str]:
    """All names that patterns of a kind can match."""
    nodes = memory.graph.nodes
    if kind == "param":
        return [name for names in names_by_node(memory).values() for name in names]
    if kind == "input":
        return [str(node.target) for node in nodes if node.op == "placeholder"]
    if kind == "output":
        return [str(i) for node in nodes if node.op == "output" for i in range(len(memory.inputs[node]))]
    return [path for node in nodes if node.op.startswith("call") for path, _ in node.meta.get(SCOPE, ())]


def names_any(memory: StepMemory, text: str) -> bool:
    """Whether a constraint is no pin, or a pin that matches something in the graph."""
    pin = read_pin(text.strip())
    return pin is None or bool(_matching(memory, pin.kind, pin.pattern))


def is_overruled(restricted: Restricted, memory: StepMemory, pin: Pin) -> bool:
    """Whether later pins ask for other recompute of all nodes that this pin names."""
    return pin.kind == "recompute" and all(
        restricted.recompute[node] != pin.wanted for node in _matching(memory, pin.kind, pin.pattern)
    )


def _matching(memory: StepMemory, kind: str, pattern: str) -> dict[fx.Node, tuple[int, ...]]:
    """The nodes that a pattern matches, with the numbers of the outputs meant (of the output node: inputs)."""
    places_of: dict[fx.Node, tuple[int, ...]] = {}
    inside: dict[str, list[fx.Node]] = {}
    names = names_by_node(memory) if kind == "param" else {}
    for node in memory.graph.nodes:
        if any(fnmatchcase(name, pattern) for name in names.get(node, ())):
            places_of[node] = (0,)
        elif kind == "input" and node.op == "placeholder" and fnmatchcase(str(node.target), pattern):
            places_of[node] = tuple(range(len(output_tensors(node))))
        elif kind == "output" and node.op == "output":
            places_of[node] = tuple(i for i in range(len(memory.inputs[node])) if fnmatchcase(str(i), pattern))
        elif kind in ("activation", "recompute") and node.op.startswith("call"):
            for path, _ in node.meta.get(SCOPE, ()):
                if fnmatchcase(path, pattern):
                    inside.setdefault(path, []).append(node)
    if kind == "recompute":
        return {node: () for nodes in inside.values() for node in nodes if output_tensors(node)}
    for nodes in inside.values():
        for ref in _module_outputs(nodes):
            places_of[ref.node] = tuple(sorted({*places_of.get(ref.node, ()), ref.index}))
    return {node: places for node, places in places_of.items() if places}


def _module_outputs(nodes: Sequence[fx.Node]) -> list[TensorRef]:
    """The outputs of a module: the tensors that its nodes make and other nodes read."""
    own = set(nodes)
    leaving = (node for node in nodes if any(user not in own for user in node.users))
    return list(dict.fromkeys(ref for node in leaving for ref in resolve(node) if ref.node in own))


def _fitting(
    memory: StepMemory, pin: Pin, nodes: Mapping[fx.Node, tuple[int, ...]], form: Form
) -> Mapping[fx.Node, tuple[int, ...]]:
    """Keep only the outputs of modules or of the model that have all dims which the layout splits: for example, a loss
    that is returned beside other outputs has none."""
    rank = 1 + max((placement.dim for placement in form if placement is not None and placement.is_sharded), default=-1)
    with_rank: dict[fx.Node, tuple[int, ...]] = {}
    for node, places in nodes.items():
        refs = memory.inputs[node] if pin.kind == "output" else [TensorRef(node, i) for i in range(1 + max(places))]
        if fitting := tuple(i for i in places if tensor_of(refs[i]).dim() >= rank):
            with_rank[node] = fitting
    if not with_rank:
        raise InputError(f"constraint '{pin.text}': {_GIVEN[pin.kind]} has {rank} dims")
    return with_rank if pin.kind in ("activation", "output") else nodes


def _place(memory: StepMemory, spoken: Spoken, node: fx.Node, strategies: Sequence[Strategy]) -> str:
    """For the output node: which of the model's outputs that a pin names cannot have the layout; else empty."""
    for i in spoken.places[node] if spoken.pin.kind == "output" else ():
        of_output = replace(spoken, places={node: (i,)})
        if not any(of_output.holds(node, strategy) for strategy in strategies):
            return f"output {i} of shape {tuple(tensor_of(memory.inputs[node][i]).shape)}"
    return ""


def _possible_layouts(spoken: Spoken, node: fx.Node, strategies: Sequence[Strategy]) -> str:
    """The layouts that a node can have, if they are few; else empty."""
    layouts = dict.fromkeys(str(layout) for strategy in strategies for layout in spoken.layouts(node, strategy))
    return f", only {' or '.join(layouts)}{asked_of_inputs(node)}" if len(layouts) <= _FEW else ""


def asked_of_inputs(node: fx.Node) -> str:
    """For an input of the graph, the argument that decides its layout; empty for other nodes."""
    return ': inputs="local" has each rank pass its rows, inputs="global" the whole' if node.op == "placeholder" else ""


def _form(pin: Pin, axis_names: Sequence[str]) -> Form:
    """The placements that a pin asks for, by mesh axis, None for a free axis; a single one stands for all axes."""
    parts = [part.strip() for part in pin.wanted.split(",")]
    parts = parts * len(axis_names) if len(parts) == 1 else parts
    if len(parts) != len(axis_names):
        raise InputError(
            f"constraint '{pin.text}' has {len(parts)} placements, and the axes of the mesh are "
            f"{', '.join(axis_names)}: write one for each, or a single one for all"
        )
    try:
        form = [None if part == "*" else Placement.parse(part) for part in parts]
    except LayoutError as error:
        raise InputError(f"constraint '{pin.text}': {error}") from error
    plain = [p.dim for part, p in zip(parts, form, strict=True) if p and p.is_sharded and "@" not in part]
    return [
        replace(p, outer=_ANY_OUTER) if p and "@" not in part and plain.count(p.dim) > 1 else p
        for part, p in zip(parts, form, strict=True)
    ]


def _where_split(form: Form, sign: str, mesh_shape: Sequence[int]) -> Form:
    """The form that is free on axes of one device; one that forbids, and only there, forbids nothing as it is."""
    freed = [placement if size > 1 else None for placement, size in zip(form, mesh_shape, strict=True)]
    return form if sign == "!=" and not any(freed) else freed


def _fits(layout: Layout, form: Form, mesh_shape: Sequence[int]) -> bool:
    pairs = list(zip(layout.placements, form, strict=True))
    nested = {placement.dim for _, placement in pairs if placement is not None and placement.outer == _ANY_OUTER}
    return all(_is_plain(layout, dim, mesh_shape) for dim in nested) and all(
        placement is None
        or p == placement
        or (placement.is_replicated and not placement.partial_grad and p.is_replicated)
        or (placement.outer == _ANY_OUTER and p.is_sharded and p.dim == placement.dim)
        for p, placement in pairs
    )


def _is_plain(layout: Layout, dim: int, mesh_shape: Sequence[int]) -> bool:
    """Whether the mesh axes that split a dim are nested without gaps, from the outermost split on."""
    outer = 1
    for digit, size in sorted((p.outer, n) for p, n in zip(layout.placements, mesh_shape, strict=True) if p.dim == dim):
        if digit != outer:
            return False
        outer *= size
    return True


def describe(memory: StepMemory, node: fx.Node) -> str:
    """The name by which the user knows a node."""
    if memory.is_parameter(node) or node.op in ("placeholder", "output"):  # not the graph's name, like `input_1`
        return f"'{node.target}'"
    source = node.args[0] if is_getitem(node) else node
    scope = node.meta.get(SCOPE, ())
    return f"{target_name(source)} of '{scope[-1][0] if scope else 'the model'}'"  # type: ignore[arg-type]
