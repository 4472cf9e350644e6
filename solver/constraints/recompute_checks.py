"""Checks of pins of recompute: an error if the ops cannot be recomputed, a warning if recompute frees nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.naming import stretch_name
from autopar.cost.traffic import in_segment
from autopar.errors import InputError
from autopar.graph import TensorRef
from autopar.solver.constraints.idle_constraints import ConstraintWarning
from autopar.solver.constraints.parts import wish_of
from autopar.solver.constraints.pins import ONLY_BLOCKS, Pin, named, read_pin
from autopar.solver.constraints.restricted import Restricted
from autopar.user_warnings import warn


def check_recompute(constraints: Sequence[str], memory: StepMemory, restricted: Restricted) -> None:
    """Raise InputError if recompute is asked of ops that are in no repeated block (`memory.repeats`); give a
    ConstraintWarning for a pin that frees nothing."""
    nodes = list(memory.graph.nodes)
    spans = [repeat.instance(i) for repeat in memory.repeats for i in range(repeat.count)]
    inside = {nodes[position] for span in spans for position in span if memory.saves(nodes[position])}
    if restricted.forces_replays and not spans:
        raise InputError(f"constraints ask for recompute, but {ONLY_BLOCKS}, and this model has none")
    pins = [pin for pin in map(read_pin, map(str.strip, constraints)) if pin is not None and pin.kind == "recompute"]
    for pin in (pin for pin in pins if pin.wanted != "never"):
        if inside.isdisjoint(named(memory, pin)):
            first, last = (stretch_name(nodes[span.start : span.stop]) for span in (spans[0], spans[-1]))
            raise InputError(
                f"constraint '{pin.text}' names nothing that can be recomputed: {ONLY_BLOCKS}, here those from "
                f"'{first}' to '{last}'"
            )
    _warn_of_idle([pin for pin in pins if pin.wanted == "full"], memory, restricted)


def _warn_of_idle(pins: Sequence[Pin], memory: StepMemory, restricted: Restricted) -> None:
    """Warn of pins that free nothing; `pins`: those that ask for full recompute."""
    stretches = _stretches_of(memory, restricted) if pins else []
    for pin in pins:
        if part := _frees_nothing(pin, memory, stretches):
            warn(
                f"constraint '{pin.text}' saves no memory: all that '{stretch_name(part)}' saves for backward is "
                "computed before it; name the modules that compute it too",
                ConstraintWarning,
            )


def _stretches_of(memory: StepMemory, restricted: Restricted) -> list[Sequence[fx.Node]]:
    """The stretches that constraints ask to recompute: whole blocks and parts of blocks."""
    nodes = list(memory.graph.nodes)
    stretches: list[Sequence[fx.Node]] = []
    for block in ([nodes[i] for i in repeat.instance(k)] for repeat in memory.repeats for k in range(repeat.count)):
        wish = wish_of(memory, restricted.recompute, block)
        stretches += [block] if wish.whole else [block[first : last + 1] for first, last in wish.forced]
    return stretches


def _frees_nothing(pin: Pin, memory: StepMemory, stretches: Sequence[Sequence[fx.Node]]) -> Sequence[fx.Node]:
    """One of the stretches in which a pin's ops are recomputed, if none of the stretches frees anything; else ()."""
    nodes = named(memory, pin)
    mine = [stretch for stretch in stretches if not nodes.keys().isdisjoint(stretch)]
    return mine[0] if mine and not any(_frees(memory, stretch) for stretch in mine) else ()


def _frees(memory: StepMemory, stretch: Sequence[fx.Node]) -> bool:
    """Whether recomputing a stretch frees memory: whether its ops save tensors that the stretch itself makes."""
    inside = set(filter(in_segment, stretch))
    for node in inside:
        inputs, outputs, internal_bytes = memory.saved(node)
        refs = [memory.inputs[node][i] for i in inputs] + [TensorRef(node, i) for i in outputs]
        if internal_bytes or any(memory.roots[ref].node in inside for ref in refs):
            return True
    return False
