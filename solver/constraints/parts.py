"""What pins ask of the recompute of one block, op by op.

==========  ========================================================================================================
full        the op is recomputed; if only parts of a block are named, each named stretch is in one or more segments
never       the op is in no segment, so that a block with such an op is not recomputed as a whole
selective   some of the named ops are recomputed, but not all, and no op of the block that no pin names
no pin      left to the planner
==========  ========================================================================================================

Only ops with saved tensors count; ops between two of them that save nothing go with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.levels import Levels, NoSegmentError, Span, levels_of
from autopar.cost.structure.naming import part_name, stretch_name
from autopar.cost.traffic import in_segment
from autopar.errors import InputError
from autopar.graph import output_tensors
from autopar.solver.constraints.idle_constraints import ConstraintWarning
from autopar.solver.constraints.restricted import Recompute
from autopar.user_warnings import warn


@dataclass(frozen=True)
class Wish:
    """What is asked of a block; ops are offsets in it.

    `forced`: stretches that must be recomputed; `free`: ops that other segments may hold (None: all); `must_recompute`:
    something must be recomputed; `whole`: the whole block must be recomputed (True) or must not be (False); `never`:
    nothing may be recomputed. No segment may hold all ops of `parted`, if there are any."""

    free: frozenset[int] | None = None
    forced: tuple[Span, ...] = ()
    must_recompute: bool = False
    whole: bool | None = None
    never: bool = False
    parted: frozenset[int] = frozenset()


def wish_of(memory: StepMemory, recompute: Mapping[fx.Node, Recompute], nodes: Sequence[fx.Node]) -> Wish:
    """What is asked of the block with these nodes."""
    way_of = {i: recompute.get(n) for i, n in enumerate(nodes) if in_segment(n) and output_tensors(n)}
    keeping = {i: way for i, way in way_of.items() if memory.saves(nodes[i])}
    kinds = set(keeping.values())
    if kinds <= {None}:
        return Wish()
    if kinds == {"never"}:
        return Wish(never=True, whole=False)
    if kinds == {"full"}:
        return Wish(must_recompute=True, whole=True)
    if kinds == {"selective"}:
        return Wish(must_recompute=True, whole=False)
    is_selective = "selective" in kinds
    barred = {"never", None} if is_selective else {"never"}
    return Wish(
        free=frozenset(i for i, way in way_of.items() if (way != "never" if i not in keeping else way not in barred)),
        forced=_stretches(way_of, keeping),
        must_recompute=is_selective or "full" in kinds,
        whole=False if is_selective or "never" in kinds else None,
        parted=frozenset(i for i, way in keeping.items() if way == "selective") if None in kinds else frozenset(),
    )


def _stretches(ways: Mapping[int, Recompute | None], keeping: Mapping[int, Recompute | None]) -> tuple[Span, ...]:
    """The stretches of which full recompute is asked, each from its first to its last op with that pin."""
    spans: list[Span] = []
    goes_on = False
    for i, way in ways.items():
        if way == "full":
            spans = [*spans[:-1], (spans[-1][0], i)] if goes_on else [*spans, (i, i)]
            goes_on = True
        elif way is not None or i in keeping:
            goes_on = False
    return tuple(span for span in spans if any(span[0] <= i <= span[1] for i in keeping))


def levels_for(
    memory: StepMemory,
    nodes: Sequence[fx.Node],
    wish: Wish,
    seconds: Callable[[fx.Node], float],
    most: int,
) -> Levels | None:
    """The levels of recompute of a block that meet the wish; None if it is never recomputed.

    Raises InputError for a part that cannot be recomputed by itself. Gives a ConstraintWarning if a part is asked for
    but only the whole block can be recomputed.
    """
    if wish.never:
        return None
    if not most and not wish.forced:
        return Levels((), len(nodes))
    block = stretch_name(nodes)
    listed = partial(
        levels_of, memory, nodes, seconds, most_levels=most, forced=wish.forced, free=wish.free, parted=wish.parted
    )
    partly = wish.whole is False and (bool(wish.forced) or wish.free is not None)
    try:
        levels = listed(whole=not partly)
        if wish.whole is False and len(levels) == 1 and not partly:  # no part is better than the whole
            levels = listed(whole=False)
    except NoSegmentError as error:
        part = part_name(nodes[error.span[0] : error.span[1] + 1], block)
        raise InputError(
            f"constraints ask to recompute '{part}' without the rest of '{block}', but {error}: ask for the "
            "whole block, or for another part"
        ) from error
    if wish.must_recompute and wish.whole is False and len(levels) == 1 and most:
        warn(
            f"constraints ask to recompute a part of '{block}', but no part of it both saves memory and can be "
            "recomputed by itself: nothing of it is recomputed; ask for full instead of selective",
            ConstraintWarning,
        )
    return levels
