"""The executed check: an op that is split by a strategy must compute the same as the unsplit op, forward and backward.

The op runs on small real tensors, once unsplit and once on every simulated rank. The inputs and the outputs' gradients
are distributed as their layouts say (partial ones as random summands). The outputs and the inputs' gradients of all
ranks must then be what the layouts promise: equal to the shard, or summing to it over the axes of a partial one.
So a rule that names the wrong dims, forgets a partial sum or wrongly claims linearity cannot pass.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.graph import output_tensors
from autopar.layout import Join, Layout, take_shard
from autopar.strategies.bind import Bound
from autopar.strategies.examples import callable_of
from autopar.strategies.modes import Position, TensorFact, axis_modes, combine, everything_passes
from autopar.strategies.positions import can_cut
from autopar.strategies.ragged import local_factors, stated_factors
from autopar.strategies.strategy import Strategy
from autopar.strategies.table import bound_rule

Coordinate = tuple[int, ...]
Mesh = tuple[int, ...]


class Ranks(Protocol):
    """Runs a strategy's local code on all ranks, each with its local arguments."""

    def run(
        self, node: fx.Node, strategy: Strategy, mesh_shape: Mesh, work: Mapping[Coordinate, LocalRun]
    ) -> dict[Coordinate, LocalRun]:
        """Run and `finish` every rank's part: one rank after another, or all at once if the code has collectives."""


class LocalRun:
    """One rank's part of a run. It is given local leaves and the outputs' gradients; `finish` sets `outputs` and the
    leaves' gradients."""

    def __init__(self, node: fx.Node, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        self.node, self.leaves, self.gradients = node, list(leaves), list(gradients)
        self.outputs: list[torch.Tensor] = []

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments with this rank's tensors in place of nodes."""
        leaves = iter(self.leaves)
        filled = fx.node.map_arg((self.node.args, self.node.kwargs), lambda _: next(leaves))
        return filled[0], filled[1]

    def finish(self, result: Any) -> None:
        """Store the outputs in the op's `result`, and run backward from them."""
        self.outputs = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        pairs = []
        for output, gradient in zip(self.outputs, self.gradients, strict=True):
            if output.requires_grad:
                pairs.append((output, gradient.to(output.dtype)))
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


class OneByOne:
    """Runs strategies whose local code is the op itself, one rank after another."""

    def run(
        self, node: fx.Node, strategy: Strategy, mesh_shape: Mesh, work: Mapping[Coordinate, LocalRun]
    ) -> dict[Coordinate, LocalRun]:
        if strategy.local:
            raise RuleError(f"{node.target}: local code '{strategy.local}' needs the runtime to be checked")
        for part in work.values():
            args, kwargs = part.arguments()
            part.finish(callable_of(node)(*args, **kwargs))
        return dict(work)


def all_positions(bound: Bound, mesh_shape: Sequence[int], ragged: Container[int] = ()) -> list[Position]:
    """Every position that some mesh axis can split; `ragged`: the factors whose length need not divide."""
    every = (Position(f, outer) for f, factor in enumerate(bound.factors) for outer in range(1, factor.size))
    return [position for position in every if can_cut(bound, position, mesh_shape, ragged)]


def every_strategy(
    node: fx.Node, tensors: Sequence[torch.Tensor], mesh_shape: Mesh, bound: Bound | None = None
) -> tuple[Strategy, ...]:
    """All strategies that the node's rule (or another one, `bound`) allows, useful or not.

    For a rule of the table, every factor on which the op is local (`ragged.local_factors`) may be cut unevenly too.
    """
    own, bound = bound is None, bound or bound_rule(node)
    if bound is None:
        raise RuleError(f"{node.target} has no rule")
    facts = [TensorFact.of(t) for t in [*tensors, *output_tensors(node)]]
    ragged = stated_factors(bound) | (local_factors(bound) if own else frozenset())
    positions = all_positions(bound, mesh_shape, ragged)
    return combine(
        bound, facts, axis_modes(bound, facts, positions, everything_passes(bound, facts)), mesh_shape, ragged
    )


def check(
    node: fx.Node,
    tensors: Sequence[torch.Tensor],
    mesh_shape: Mesh,
    *,
    ranks: Ranks | None = None,
    bound: Bound | None = None,
    most: int = 100,
    seed: int = 0,
) -> int:
    """Compare up to `most` strategies of the node (a random sample, if there are more) with the unsplit op; returns how
    many were run.

    `bound` is the rule to test, by default the table's.

    Raises RuleError for the first strategy whose results are not what its layouts say.
    """
    strategies = every_strategy(node, tensors, mesh_shape, bound)
    chosen = random.Random(seed).sample(strategies, most) if len(strategies) > most else strategies
    ranks = ranks or OneByOne()
    whole = run_whole(node, tensors, len(mesh_shape), ranks=ranks, plain=strategies[0])
    for strategy in chosen:
        check_strategy(node, tensors, strategy, mesh_shape, ranks=ranks, whole=whole, bound=bound)
    return len(chosen)


def run_whole(
    node: fx.Node, tensors: Sequence[torch.Tensor], axes: int, *, ranks: Ranks, plain: Strategy | None = None
) -> LocalRun:
    """Run the op unsplit, with random gradients of its outputs. An op with local code even where nothing is split (it
    draws random numbers) runs through this code on one rank."""
    generator = torch.Generator().manual_seed(1)
    shapes = [t.shape for t in output_tensors(node)]
    gradients = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    single_rank = (1,) * axes
    whole = LocalRun(node, [_leaf(t) for t in tensors], gradients)
    if plain is not None and plain.local:
        return ranks.run(node, plain, single_rank, {(0,) * axes: whole})[(0,) * axes]
    args, kwargs = whole.arguments()
    whole.finish(callable_of(node)(*args, **kwargs))
    return whole


def check_strategy(
    node: fx.Node,
    tensors: Sequence[torch.Tensor],
    strategy: Strategy,
    mesh_shape: Mesh,
    *,
    ranks: Ranks,
    whole: LocalRun | None = None,
    bound: Bound | None = None,
) -> None:
    """Compare one strategy with the unsplit op (`whole`, run here if it is not given)."""
    whole = whole or run_whole(node, tensors, len(mesh_shape), ranks=ranks)
    generator = torch.Generator().manual_seed(2)
    parts = [_spread(t, layout, mesh_shape, generator) for t, layout in zip(tensors, strategy.inputs, strict=True)]
    back = [
        _spread(
            g.to(o.dtype) if o.is_floating_point() or o.is_complex() else g, layout.gradient(), mesh_shape, generator
        )
        for g, o, layout in zip(whole.gradients, whole.outputs, strategy.outputs, strict=True)
    ]
    work = {}
    for c in coordinates(mesh_shape):
        leaves = [_leaf(part[c], t.requires_grad) for part, t in zip(parts, tensors, strict=True)]
        work[c] = LocalRun(node, leaves, [g[c] for g in back])
    done = ranks.run(node, strategy, mesh_shape, work)
    for problem in _problems(done, whole, strategy, mesh_shape):
        bound = bound or bound_rule(node)
        raise RuleError(f"{node.target}, rule '{bound.rule if bound else ''}', split as {_text(strategy)}: {problem}")


def _problems(
    done: Mapping[Coordinate, LocalRun], whole: LocalRun, strategy: Strategy, mesh_shape: Mesh
) -> Iterator[str]:
    """Messages on all outputs, gradients and written inputs that are not what the strategy's layouts say."""
    each = partial(differences, mesh_shape=mesh_shape, tolerance=tolerance([*whole.leaves, *whole.outputs]))
    for i, (output, layout) in enumerate(zip(whole.outputs, strategy.outputs, strict=True)):
        yield from each(f"output {i}", output, layout, {c: r.outputs[i] for c, r in done.items()})
    for i, (leaf, layout) in enumerate(zip(whole.leaves, strategy.inputs, strict=True)):
        local = {c: r.leaves[i] for c, r in done.items()}
        if leaf.requires_grad:
            gradients = {c: t.grad if t.grad is not None else torch.zeros_like(t) for c, t in local.items()}
            expected = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            yield from each(f"gradient of input {i}", expected, layout.gradient(), gradients)
        else:  # an op may write into an input without a gradient, as batch norm does
            yield from each(f"input {i} afterwards", leaf, layout, local)


def tolerance(tensors: Iterable[torch.Tensor]) -> float:
    """1e-9, or 1e-4 if one of the op's tensors is in single precision."""
    single = any(t.dtype in (torch.float32, torch.complex64) for t in tensors)
    return 1e-4 if single else 1e-9


def differences(
    subject: str,
    whole: torch.Tensor,
    layout: Layout,
    parts: Mapping[Coordinate, torch.Tensor],
    *,
    mesh_shape: Mesh,
    tolerance: float,
) -> Iterator[str]:
    """A message for each rank on which the joined parts differ from the whole tensor's shard under `layout`."""
    for c in parts:
        expected = take_shard(whole.detach(), layout, mesh_shape, c)
        joined = _joined(layout, parts, c)
        if joined.shape != expected.shape:
            yield f"{subject} has shape {tuple(joined.shape)} on rank {c}, {tuple(expected.shape)} expected as {layout}"
        elif not torch.allclose(_wide(joined), _wide(expected), rtol=tolerance, atol=tolerance, equal_nan=True):
            error = (_wide(joined) - _wide(expected)).abs().max().item()
            yield f"{subject} is off by {error:.2g} on rank {c} as {layout}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _joined(layout: Layout, parts: Mapping[Coordinate, torch.Tensor], at: Coordinate) -> torch.Tensor:
    """The value at one rank after joining over the axes on which it is partial."""
    axes = [a for a, p in enumerate(layout.placements) if p.is_partial]
    value = parts[at].detach()
    if not axes:
        return value
    group = [v.detach() for c, v in parts.items() if all(c[a] == at[a] for a in range(len(at)) if a not in axes)]
    return _JOINS[layout[axes[0]].join](torch.stack(group), 0)


_JOINS: dict[Join, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def _spread(
    tensor: torch.Tensor, layout: Layout, mesh_shape: Mesh, generator: torch.Generator
) -> dict[Coordinate, torch.Tensor]:
    """Each rank's part of a whole tensor under `layout`; over partial axes, random summands."""
    axes = [a for a, p in enumerate(layout.placements) if p.is_partial]
    groups = list(itertools.product(*(range(mesh_shape[a]) for a in axes)))
    whole = tensor.detach()
    if axes:
        drawn = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in groups[1:]]
        summands = dict(zip(groups, [whole - sum(drawn), *drawn], strict=True))
    else:
        summands = {(): whole}
    return {
        c: take_shard(summands[tuple(c[a] for a in axes)], layout, mesh_shape, c).clone()
        for c in coordinates(mesh_shape)
    }


def _leaf(tensor: torch.Tensor, grad: bool | None = None) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad if grad is None else grad)


def coordinates(mesh_shape: Sequence[int]) -> list[Coordinate]:
    """The coordinates of all ranks of a mesh."""
    return list(itertools.product(*map(range, mesh_shape)))


def _text(strategy: Strategy) -> str:
    sides = [", ".join(f"[{layout}]" for layout in side) for side in (strategy.inputs, strategy.outputs)]
    return f"{' | '.join(strategy.factors)}: {sides[0]} -> {sides[1]}"
