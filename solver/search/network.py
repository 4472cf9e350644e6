"""Lower bounds on the cost of all plans that make a given choice, found by message passing instead of a program.

Without a budget and recompute, the cost of a plan is a sum of functions: one of each op's choice, and one of the
choices at the ends of each tensor (`solver.seconds.stars`). Messages m move cost between these functions, such that the
sum is unchanged; each function is then minimised on its own, and the sum of the minima is a lower bound::

    sum_ops min_i (c_op(i) + sum_ends m(i))  +  sum_stars min (c_star - sum_ends m)

This bound is a dual of the program's relaxation. It is raised op by op, in the graph's order and back: each op collects
the minima of its tensors, and hands the differences between its choices on to the tensors whose other ops come later
(sequential reweighted message passing: Kolmogorov 2006, 2015). A round takes time proportional to the number of pairs
of layouts, for which only prices are stored, and few rounds are mostly enough. The bound may stay below the relaxation,
since coordinate ascent can stop short of the optimum of such a dual.

A plan that makes a choice costs at least the bound plus the excess of the op's sum for that choice over its minimum.

Part of the conversions of parameters hides behind compute, which depends on more than one tensor. So each second of
these conversions counts with a weight (`Weights`), and each second of compute counts a bit less than one if compute
limits what can be hidden. Any dual values of the rows of `solver.seconds.overlap` give valid weights; the first ones
assume that compute never limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost.traffic import gradient_enters
from autopar.layout import Layout
from autopar.solver.linear.terms import Array
from autopar.solver.problem import Problem, Tensor, Use
from autopar.solver.seconds.costs import Costs, Tables
from autopar.solver.seconds.overlap import Key
from autopar.solver.seconds.stars import MOST, Arm, Star

_MAX_ROUNDS = 40  # at most so many rounds forward and back over the ops: each raises the bounds that exclude choices
_MIN_RISE = 3e-4  # relative; a round that raises the bound by less is the last
_MAX_SWEEPS = 4  # at most so many sweeps to decode a plan from the messages, which is only where the search starts

Readers = Sequence[tuple[Tensor, Use]]


@dataclass(frozen=True)
class Weights:
    """The weights of seconds: `moved` for collectives of parameters (1 - `part` for keys that it lacks), and
    1 - `hidden` for compute."""

    part: float
    moved: Mapping[Key, float] = field(default_factory=dict)
    hidden: Mapping[Key, float] = field(default_factory=dict)

    def of(self, key: Key) -> float:
        return self.moved.get(key, 1.0 - self.part)


class Network:
    """The functions that sum up to a problem's cost, and the messages between them.

    `bound`: a lower bound on all plans; `least`: by op and choice, a lower bound on plans that make it; in seconds.
    """

    def __init__(self, problem: Problem, tables: Tables | None = None) -> None:
        self.problem, self.costs = problem, Costs(problem, Tables() if tables is None else tables)
        self.least = [np.zeros(len(op.choices)) for op in problem.ops]
        self.bound = 0.0
        self._every: list[Star] = []
        self._alike: dict[tuple[object, ...], Star] = {}
        self.weigh(Weights(problem.cluster.device.overlap))

    def weigh(self, weights: Weights) -> None:
        """Change the weights; messages and the bounds found so far stay."""
        self.weights, before = weights, self._every
        self._own = [self._of_op(number) for number in range(len(self.problem.ops))]
        self._every = list(self._stars())
        for old, new in zip(before, self._every, strict=False):
            for old_arm, arm in zip(old.arms, new.arms, strict=True):
                arm.message = old_arm.message
        self._some = [star for star in self._every if star.costs_something]
        self._ends: list[list[tuple[Star, int]]] = [[] for _ in self.problem.ops]
        for star in self._some:
            for end, arm in enumerate(star.arms):
                self._ends[arm.op].append((star, end))
        self._hands = {step: [_hands(number, ends, step) for number, ends in enumerate(self._ends)] for step in (1, -1)}
        self._bound = self._evaluate()

    def climb(self) -> None:
        """Raise the bound in rounds, until a round raises it little."""
        for _ in range(_MAX_ROUNDS):
            before = self._bound
            for order in (range(len(self._own)), range(len(self._own) - 1, -1, -1)):
                self._pass(order)
            self._bound = self._evaluate()
            self.bound = max(self.bound, self._bound, *(float(bounds.min()) for bounds in self.least))
            if self._bound - before <= _MIN_RISE * abs(self._bound):
                break
        self._together()

    def decoded(self) -> list[Array]:
        """One plan, as a boolean array of choices for each op. In the first sweep, each op in order makes the choice of
        least cost, given the choices made before and the messages of the other ops. Later sweeps, to and fro, make each
        op's choice anew, given those of its neighbours, until none changes."""
        messages = [[arm.message for arm in star.arms] for star in self._some]
        decided, groups = [-1] * len(self._own), {op.like for op in self.problem.ops}
        forward = range(len(decided))
        for sweep in range(_MAX_SWEEPS):
            before = list(decided)
            for number in reversed(forward) if sweep % 2 else forward:
                decides = self.problem.decides(number)
                if sweep and (decides != number or number in groups):
                    continue
                decided[number] = decided[decides] if decides != number else self._best(number)
                for star, end in self._ends[number]:
                    star.arms[end].fix(decided[number])
            if decided == before:
                break
        for star, known in zip(self._some, messages, strict=True):
            for arm, message in zip(star.arms, known, strict=True):
                arm.message = message
        return [np.arange(len(own)) == choice for own, choice in zip(self._own, decided, strict=True)]

    def _best(self, number: int) -> int:
        """The choice of least cost of an op, with the minima of its tensors over their other ends."""
        total = self._own[number].copy()
        for star, end in self._ends[number]:
            total += star.arms[end].costs(star.least(end))
        return int(total.argmin())

    def _together(self) -> None:
        """Ops that share one choice: the bound of a choice is the largest of these ops' bounds for it."""
        groups: dict[int, list[int]] = {}
        for number, op in enumerate(self.problem.ops):
            if op.like is not None:
                groups.setdefault(op.like, [op.like]).append(number)
        for group in groups.values():
            least = np.max([self.least[number] for number in group], axis=0)
            for number in group:
                self.least[number] = least

    def _pass(self, order: range) -> None:
        for number in order:
            total, ends = self._own[number].copy(), self._ends[number]
            for star, end in ends:
                total += star.arms[end].give(star.least(end))
            excess = total - total.min()
            self.least[number] = np.maximum(self.least[number], self._bound + excess)
            ahead, share = self._hands[order.step][number]
            for arm in ahead:
                arm.take(share * excess)

    def _evaluate(self) -> float:
        bound = sum(star.bound() for star in self._some)
        for own, ends in zip(self._own, self._ends, strict=True):
            bound += (own + sum(star.arms[end].message[star.arms[end].of] for star, end in ends)).min()
        return float(bound)

    # -- costs -------------------------------------------------------------------------------------------------------

    def _of_op(self, number: int) -> Array:
        op, hidden = self.problem.ops[number], self.weights.hidden
        seconds, _ = self.costs.of_op(op)
        stretch, count = self.problem.grouping.stretch(op.node), self.costs.count(op)
        forward = np.array([choice.forward_seconds for choice in op.choices])
        backward = np.array([choice.backward_seconds for choice in op.choices])
        for kind, seconds_of_choices in (("forward", forward), ("backward", backward)):
            seconds = seconds - hidden.get((kind, stretch, -1), 0.0) * count * seconds_of_choices
        return seconds

    def _stars(self) -> Iterator[Star]:
        """The stars of all tensors; uses share conversions as in `solver.seconds.conversions`."""
        for tensors in self.costs.by_source():
            shared = self.costs.shared(tensors)
            if shared:
                yield from self._paid_once([(t, use) for t in shared for use in t.uses], 1)
            for tensor in tensors:
                if tensor.kind == "each":
                    for use in tensor.uses:
                        yield from self._paid_once([(tensor, use)], use.times)
                elif tensor not in shared:
                    yield from self._paid_once([(tensor, use) for use in tensor.uses], self.costs.conversions(tensor))

    def _paid_once(self, uses: Readers, count: int) -> Iterator[Star]:
        """The stars of uses that share conversions, which run `count` times. Forward and backward are separate stars
        if some uses return no gradient; more than `MOST` uses are several stars, each with its share of the price."""
        memory, ref = self.problem.memory, self.problem.ref(uses[0][0])
        loud = [reader for reader in uses if gradient_enters(memory, self.problem.ops[reader[1].op].node, ref)]
        kinds = [("gathers", "reductions")] if len(loud) == len(uses) else [("gathers",), ("reductions",)]
        for kinds_of_star in kinds:
            mine = uses if "gathers" in kinds_of_star else loud
            for first in range(0, len(mine), MOST):
                part = mine[first : first + MOST]
                yield self._star(part, kinds_of_star, count * len(part) / len(mine))

    def _star(self, uses: Readers, kinds: tuple[str, ...], count: float) -> Star:
        """A star; those of activations do not depend on weights and are computed once for ops of equal choices."""
        tensor, _ = uses[0]
        if self.problem.memory.is_parameter(self.problem.ops[tensor.source].node):
            return self._new_star(uses, kinds, count)
        ends = self.costs.ports(tensor), *(self.costs.wanted(tensor_of_use, use) for tensor_of_use, use in uses)
        key = id(self.costs.table(self.problem.ref(tensor))), *map(id, ends), *kinds, count
        if key not in self._alike:
            self._alike[key] = self._new_star(uses, kinds, count)
        like = self._alike[key]
        ops = tensor.source, *(use.op for _, use in uses)
        return Star(like.price, [replace(arm, op=op) for op, arm in zip(ops, like.arms, strict=True)])

    def _new_star(self, uses: Readers, kinds: Sequence[str], count: float) -> Star:
        tensor, ports = uses[0][0], self.costs.ports(uses[0][0])
        wants = [self.costs.wanted(of_use, use) for of_use, use in uses]
        columns: dict[Layout, int] = {}
        for layout in (layout for wanted in wants for layout in wanted):
            columns.setdefault(layout, len(columns))
        prices = self.costs.table(self.problem.ref(tensor)).prices([layout for layout, _ in ports], list(columns))
        grids = {"gathers": prices.forward, "reductions": prices.backward}
        price = count * sum(self._weighed(tensor, kind, grids[kind]) for kind in kinds)
        arms = [Arm.of_choices(tensor.source, list(ports.values()), range(len(ports)), len(ports))]
        regathered = np.array([regather for _, regather in ports])
        for (of_use, use), wanted in zip(uses, wants, strict=True):
            arm = Arm.of_choices(use.op, list(wanted.values()), [columns[w] for w in wanted], len(columns))
            saved = self.problem.memory.saved(self.problem.ops[use.op].node)[0]
            if "gathers" in kinds and regathered.any() and use.index in saved:
                again = self.costs.conversions(of_use) * self._weighed(of_use, "again", prices.forward)
                arm.own = np.where(regathered[:, None], again, 0.0)
            arms.append(arm)
        return Star(np.where(prices.possible, price, np.inf), arms)

    def _weighed(self, tensor: Tensor, kind: str, seconds: Array) -> Array:
        """The weighted seconds per step of one conversion; `seconds` are by axis, as in `Prices`."""
        memory, node = self.problem.memory, self.problem.ops[tensor.source].node
        if not memory.is_parameter(node):
            return memory.micro_batches * seconds.sum(axis=0)
        stretch = self.problem.grouping.stretch(node)
        once = sum(self.weights.of((kind, stretch, axis)) * grid for axis, grid in enumerate(seconds))
        return once if kind == "reductions" else memory.micro_batches * once


def _hands(number: int, ends: Sequence[tuple[Star, int]], step: int) -> tuple[list[Arm], float]:
    """The arms to which an op hands the differences between its choices (those of stars that have a later op in this
    direction), and the share that each is given."""
    ahead = [star.arms[end] for star, end in ends if any((arm.op - number) * step > 0 for arm in star.arms)]
    behind = sum(any((arm.op - number) * step < 0 for arm in star.arms) for star, _ in ends)
    return ahead, 1 / max(1, len(ahead), behind)
