"""A cheap test before the executed check: the op's forward on pieces of its inputs.

It rejects most wrong candidates at a tenth of the cost of the executed check, which runs forward and backward, unsplit
and in pieces, for every candidate. Several candidates differ only in how the results of the same pieces are joined, so
these results are cached and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from autopar.errors import RuleError
from autopar.graph import output_tensors
from autopar.layout import Layout, R, take_shard
from autopar.strategies.bind import Bound, bind
from autopar.strategies.check import Coordinate, LocalRun, coordinates, differences, every_strategy, tolerance
from autopar.strategies.discovery.tiny import Tiny
from autopar.strategies.examples import callable_of
from autopar.strategies.rule import ShardingRule


def fits(call: Tiny, bound: Bound) -> bool:
    """Whether the op's results on pieces join as the rule's first split says. Gradients are not tested."""
    mesh = (call.ways,)
    strategies = every_strategy(call.node, call.tensors, mesh, bound)
    split = next((s for s in strategies if s.factors[0] not in ("", "P", "R+")), None)
    if split is None:
        return True
    layouts = tuple(layout if layout[0].is_sharded else _WHOLE for layout in split.inputs)
    wholes = _results(call, (_WHOLE,) * len(layouts))
    parts = _results(call, layouts)
    if wholes is None or parts is None:
        return False
    near = tolerance([*call.tensors, *wholes[0,]])
    return not any(
        problem
        for i, (whole, layout) in enumerate(zip(wholes[0,], split.outputs, strict=True))
        for problem in differences(
            f"output {i}", whole, layout, {c: p[i] for c, p in parts.items()}, mesh_shape=mesh, tolerance=near
        )
    )


def is_telling(text: str, tinies: Sequence[Tiny]) -> bool:
    """Whether the calls' outputs can tell a right rule from a wrong one: how partial outputs are joined, and whether
    partial values pass.

    They cannot if an output is the same number everywhere in all calls (`all` or a product of many random elements) but
    another one for inputs of all ones or all zeros. Nor if an output with a gradient is the same number in all calls:
    then the op does not distinguish random inputs (`cosine_embedding_loss` is 0 for labels other than 1 and -1).
    """
    first = tinies[0]
    inputs = len(first.tensors)
    try:
        bound = bind(ShardingRule.parse(text), first.shapes[:inputs], first.shapes[inputs:])
    except RuleError:
        return False
    passes = bound.operation.words & {"linear", "affine"} or bound.operation.operands
    for i, (spots, output) in enumerate(zip(bound.spots[inputs:], output_tensors(first.node), strict=True)):
        matters = passes or None in spots or output.requires_grad
        others = () if output.requires_grad else _plain(first)
        if matters and _is_one_number(i, tinies) and not (others and _is_one_number(i, (*tinies, *others))):
            return False
    return True


def _is_one_number(output: int, calls: Sequence[Tiny]) -> bool:
    """Whether all elements of an output are equal in all calls, within the tolerance of the executed check; True too if
    it has no elements."""
    results = [_results(call, (_WHOLE,) * len(call.tensors)) for call in calls]
    values = [result[0,][output].flatten() for result in results if result is not None]
    every = torch.cat([v.to(torch.complex128 if v.is_complex() else torch.float64) for v in values or [torch.zeros(1)]])
    if not len(every):  # an empty output tells nothing
        return True
    return bool(((every - every[0]).abs() <= tolerance(values) * (1 + every[0].abs())).all())


@lru_cache(maxsize=8)
def _plain(call: Tiny) -> tuple[Tiny, ...]:
    """The call with all inputs ones, and with all inputs zeros."""
    return tuple(replace(call, tensors=[torch.full_like(t, n) for t in call.tensors]) for n in (1, 0))


_WHOLE = Layout((R,))


@lru_cache(maxsize=64)
def _results(call: Tiny, layouts: tuple[Layout, ...]) -> dict[Coordinate, list[torch.Tensor]] | None:
    """The op's output tensors on every rank; None if it raises on such pieces."""
    ranks = {}
    mesh = (call.ways,)
    with torch.no_grad():
        for c in coordinates(mesh):
            leaves = [take_shard(t.detach(), to, mesh, c).clone() for t, to in zip(call.tensors, layouts, strict=True)]
            args, kwargs = LocalRun(call.node, leaves, ()).arguments()
            try:
                result = callable_of(call.node)(*args, **kwargs)
            except Exception:  # an op may refuse its arguments with any kind of error
                return None
            ranks[c] = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return ranks
