"""The integer program of a problem: choices, flows, conversions paid once, and the numbers of blocks that recompute.

For op v with choices s, tensor t with source layouts l ("ports") and wanted layouts w, block class c of m_c blocks::

    x[v,s] in {0,1}                    sum_s x[v,s] = 1                              one choice
    f[t,u,l,w] >= 0                    sum_w f[t,u,l,w] = sum_{s gives l} x[v,s]     flow of use u: equalities at both
                                       sum_l f[t,u,l,w] = sum_{s wants w} x[u,s]     ends
    p[t,l,w] >= f[t,u,l,w]             for every use u                               paid once by all uses
    r_cl in {0..m_c}                   the first r_cl blocks of c recompute at level l or higher; r_cl <= r_c(l-1)
    q_cl in {0,1}                      q_cl <= r_cl <= m_c q_cl                      whether any does
    z[v,s,l] in [0, m x[v,s]]          sum_s z[v,s,l] = r_cl                         z = r x, exactly
    g[t,l,w] in [0, m p[t,l,w]]        sum_{l,w} g = r (q for edges into the first   replays of a conversion (of the
                                       block, r - q between blocks)                  uses that a replay runs)

Levels of recompute (`cost.structure.levels`) are nested, so each op is recomputed from some level on. r without a level
is that of whole blocks; a replay of a conversion inside a block counts from the level at which both ends of the tensor
are in one segment.

A tensor made outside a class and read in it is converted once outside, for all blocks that do not recompute and all
other readers outside, and once more in every block that recomputes::

    p_outside[t,l,w] >= p[t,l,w] - (1 - k_c)   read by all blocks of c; k_c = 1 unless all of them recompute
    p_outside[t,l,w] >= p[t,l,w] - q_c         read by the first block alone, which recomputes if any does

Ops that share a choice (`solver.search.equal_ops`) share x, tensors between such ops share f, and variables and rows
made of these alone exist once.

The objective is `predicted.step_seconds` of `cost.step`, term by term. `solver.seconds.overlap` adds what hides behind
compute, and `solver.memory.rows` adds memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.buckets.latency import Phase
from autopar.errors import InfeasibleError
from autopar.layout import Layout
from autopar.solver.linear.program import Program
from autopar.solver.linear.records import Count, Indicator
from autopar.solver.linear.terms import Array, Linear
from autopar.solver.problem import Problem, Stage, Tensor, Use
from autopar.solver.seconds.bucket_latency import BucketLatency
from autopar.solver.seconds.conversions import pay_conversions
from autopar.solver.seconds.costs import Costs, Port, Tables
from autopar.solver.seconds.overlap import Overlap
from autopar.solver.seconds.replays import Flow, counted

OBJECTIVE = 1000.0
"""The objective of a plan in the program is scaled to about this value."""


@dataclass
class Model:
    """A problem stated as a program; `x`: by op, the variables of its choices."""

    problem: Problem
    program: Program = field(default_factory=Program)
    x: list[list[int]] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    recomputed: dict[int, list[int]] = field(default_factory=dict)  # r of each recomputable stage, by level
    any_recomputed: dict[int, list[int]] = field(default_factory=dict)  # q, likewise
    seconds: Linear = field(default_factory=Linear)  # the objective, in seconds
    movable: dict[tuple[str, int, int], Linear] = field(default_factory=dict)  # parts of it by kind, stretch, mesh axis
    overlap: Overlap | None = None
    tables: Tables = field(default_factory=Tables)  # a cache of prices
    bare: bool = False  # leaves out conversions of activations that are all possible: a lower bound on a plan's needs

    def __post_init__(self) -> None:
        self.costs = Costs(self.problem, self.tables)
        self._z: dict[tuple[int, int], dict[int, Array]] = {}  # z by level, for each deciding op and stage
        self._ends: dict[tuple[int, int], dict[Port, list[int]]] = {}
        self._wants: dict[tuple[int, int], dict[Layout, list[int]]] = {}
        self._kept: dict[tuple[int, int], int] = {}
        self._transports: dict[tuple[int, int, int, int], Array] = {}
        self.program.shared_columns.shares = self.problem.shares_choices
        for number, op in enumerate(self.problem.ops):
            if op.like is not None:
                self.x.append(self.x[op.like])
                continue
            names = [f"x.{op.node.name}.{s}" for s in range(len(op.choices))]
            fixed = len(names) == 1
            self.x.append([self.program.variable(n, lower=float(fixed), integer=not fixed) for n in names])
            if not fixed:
                self.program.equal(f"one.{op.node.name}", [(v, 1.0) for v in self.x[number]], 1.0)
        for number, stage in enumerate(self.problem.stages):
            if stage.recomputable:
                self._recompute_counts(number, stage)
        self.latency = BucketLatency(self)
        self._pay_ops()
        for tensors in self.costs.by_source():
            if not self.bare or any(self._restricts(tensor) for tensor in tensors):
                pay_conversions(self, tensors)
        self.latency.pay()
        if self.movable and self.problem.cluster.device.overlap:
            self.overlap = Overlap(self, self.reference() / OBJECTIVE)

    def reference(self) -> float:
        """Seconds of about the objective's size: the cheapest choice of each op, or if that is 0 the largest price."""
        prices = self.seconds.array(len(self.program.names))
        seconds = float(sum(prices[ones].min() for ones in self.x))
        return seconds or float(prices.max(initial=0.0)) or 1.0

    # -- expressions -------------------------------------------------------------------------------------------------

    def depth(self, stage: int) -> int:
        """The number of levels of recompute of a stage."""
        return self.problem.stages[stage].depth

    def z(self, number: int, level: int) -> Array:
        """For each choice of an op, the number of blocks that recompute at this level or a higher one with it: r x."""
        op = self.problem.ops[number]
        by_level = self._z.setdefault((self.problem.decides(number), op.stage), {})
        if level not in by_level:
            times = {self.recomputed[op.stage][level - 1]: 1.0}
            products = counted(self.program, [[v] for v in self.x[number]], times, self.costs.count(op))
            lower = max((other for other in by_level if other < level), default=None)
            higher = min((other for other in by_level if other > level), default=None)
            if lower is not None:  # implied, but the relaxation is tighter with it
                self.program.implies("levels", products, by_level[lower])
            if higher is not None:
                self.program.implies("levels", by_level[higher], products)
            by_level[level] = products
        return by_level[level]

    def kept(self, stage: int, level: int = 0) -> int:
        """The variable k: 1 if any block of a stage is below a level of recompute (0: the level of whole blocks)."""
        level = level or self.depth(stage)
        if (stage, level) not in self._kept:
            r, blocks = self.recomputed[stage][level - 1], float(self.problem.stages[stage].count)
            variable = self._kept[stage, level] = self.program.variable(f"k.{stage}.{level}", integer=blocks > 1)
            if blocks == 1:
                self.program.equal("k", [(variable, 1.0), (r, 1.0)], 1.0)
            else:
                row = self.program.at_least("k", [(variable, blocks), (r, 1.0)], blocks)
                self.program.records.rest_rows.append(Indicator(row, r, variable))
        return self._kept[stage, level]

    def plainness(self) -> Array:
        """For each variable, its departures from the plainest plan: mesh axes over which stored parameters are
        sharded, regathers, recomputed blocks, collectives."""
        departures = np.zeros(len(self.program.names))
        departures[[r for counts in self.recomputed.values() for r in counts]] = 1.0
        for number, op in enumerate(self.problem.ops):
            if op.node.op == "get_attr":
                for variable, choice in zip(self.x[number], op.choices, strict=True):
                    cut = sum(p.is_sharded for p in choice.strategy.outputs[0].placements)
                    departures[variable] = cut + choice.regather
        for flow in self.flows:
            collectives = flow.prices.forward_collectives + flow.prices.backward_collectives
            departures[flow.all] = collectives[flow.numbers >= 0]
        return departures

    def most_departures(self, plainness: Array) -> float:
        """An upper bound on the departures of any plan, which has one choice of each op and one flow to each use."""
        groups = [*self.x, *(flow.all for flow in self.flows)]
        most = sum(plainness[group].max() for group in groups)
        return float(most) + sum(self.program.upper[r] for counts in self.recomputed.values() for r in counts)

    # -- ops ---------------------------------------------------------------------------------------------------------

    def _recompute_counts(self, number: int, stage: Stage) -> None:
        """Add r and q of each level of a stage; for a single block they are the same variable."""
        blocks, program = float(stage.count), self.program
        self.recomputed[number], self.any_recomputed[number] = [], []
        for level in range(1, stage.depth + 1):
            least, most = _range(stage, level)
            r = program.variable(f"r.{number}.{level}", lower=least, upper=most, integer=True)
            q = r
            if stage.count > 1:
                q = program.variable(f"q.{number}.{level}", lower=min(1.0, least), upper=min(1.0, most), integer=True)
                program.records.counts.append(Count(r, q))
                program.at_most("q", [(q, 1.0), (r, -1.0)], 0.0)
                program.records.any_rows.append(Indicator(program.at_least("q", [(q, blocks), (r, -1.0)], 0.0), r, q))
            for before in self.recomputed[number][-1:]:
                program.at_most("levels", [(r, 1.0), (before, -1.0)], 0.0)
            self.recomputed[number].append(r)
            self.any_recomputed[number].append(q)
        if stage.depth > 1 and stage.count > 1:
            pairs = zip(self.recomputed[number], self.any_recomputed[number], strict=True)
            program.records.nested_counts.append([Count(r, q) for r, q in pairs])

    def _pay_ops(self) -> None:
        """Charge the ops, and their forward once more in blocks whose replay computes them."""
        for number, op in enumerate(self.problem.ops):
            seconds, forwards = self.costs.of_op(op)
            self.seconds.add(np.array(self.x[number]), seconds)
            if op.again.computed and forwards.any():
                self.seconds.add(self.z(number, op.again.computed), forwards)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def flow(self, tensor: Tensor, use: Use) -> Flow:
        """The flows of a tensor from its source to one use; tensors whose ends share their choices share variables."""
        problem = self.problem
        ports, wanted = self.ends(tensor), self.wants(tensor, use)
        prices = self.costs.table(problem.ref(tensor)).prices([layout for layout, _ in ports], list(wanted))
        if not prices.possible.any():
            source, reader = problem.ops[tensor.source].node.name, problem.ops[use.op].node.name
            raise InfeasibleError(f"no layout of what '{source}' makes can be converted to one that '{reader}' takes")
        key = problem.decides(tensor.source), tensor.output, problem.decides(use.op), use.index
        numbers = self._transports.get(key)
        if numbers is None or not np.array_equal(numbers >= 0, prices.possible):
            numbers = self.program.transport(list(ports.values()), list(wanted.values()), prices.possible)
            self._transports[key] = numbers
        return Flow(tensor, use, list(ports), list(wanted), numbers, prices)

    def ends(self, tensor: Tensor) -> dict[Port, list[int]]:
        """By port, the variables of the source's choices that give the tensor this port."""
        key = tensor.source, tensor.output
        if key not in self._ends:
            x = self.x[tensor.source]
            self._ends[key] = {port: [x[i] for i in choices] for port, choices in self.costs.ports(tensor).items()}
        return self._ends[key]

    def wants(self, tensor: Tensor, use: Use) -> dict[Layout, list[int]]:
        """By wanted layout, the variables of the reader's choices that want it."""
        key = use.op, use.index
        if key not in self._wants:
            x = self.x[use.op]
            self._wants[key] = {
                layout: [x[i] for i in choices] for layout, choices in self.costs.wanted(tensor, use).items()
            }
        return self._wants[key]

    def _restricts(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or some of its layouts cannot be converted to one that a use wants."""
        ref = self.problem.ref(tensor)
        ports = [layout for layout, _ in self.ends(tensor)]
        wanted = list(dict.fromkeys(layout for use in tensor.uses for layout in self.wants(tensor, use)))
        possible = self.costs.table(ref).prices(ports, wanted).possible.all()
        return self.problem.memory.is_parameter(ref.node) or not possible

    def pay_again(self, tensor: Tensor, variables: Array, seconds: Array) -> None:
        """Add seconds (by axis, as in `Prices`) for converting again in backward: a regather or a replay."""
        self.seconds.add(variables, seconds.sum(axis=0))
        self._movable("again", tensor, variables, seconds)

    def pay_missing(self, phase: Phase, tensor: Tensor, variable: int, seconds: Mapping[int, float]) -> None:
        """Add the latency of a bucket that its members do not pay: seconds by axis for each missing bucket (`variable`)
        of each block; `tensor`: any member's."""
        times = 1 if phase == "reductions" else self.problem.memory.micro_batches
        by_axis = np.zeros((len(self.problem.cluster.axes), 1))
        for axis, latency in seconds.items():
            by_axis[axis] = times * self.costs.conversions(tensor) * latency
        self.seconds.add(np.array([variable]), by_axis.sum(axis=0))
        self._movable(phase, tensor, np.array([variable]), by_axis)

    def _movable(self, kind: str, tensor: Tensor, variables: Array, seconds: Array) -> None:
        """Record seconds that can hide behind compute: those of collectives of parameters and their gradients."""
        node = self.problem.ops[tensor.source].node
        if self.problem.memory.is_parameter(node):
            for axis in np.flatnonzero(seconds.any(axis=1)).tolist():
                terms = self.movable.setdefault((kind, self.problem.grouping.stretch(node), axis), Linear())
                terms.add(variables, seconds[axis])

    def pay_conversion(self, tensor: Tensor, variables: Array, forward: Array, backward: Array, count: float) -> None:
        """Add `count` conversions of a tensor; gradients of parameters move once a step, all else per micro-batch."""
        micro_batches = self.problem.memory.micro_batches
        times = 1 if self.problem.memory.is_parameter(self.problem.ops[tensor.source].node) else micro_batches
        self.seconds.add(variables, count * (micro_batches * forward + times * backward).sum(axis=0))
        self._movable("gathers", tensor, variables, count * micro_batches * forward)
        self._movable("reductions", tensor, variables, count * times * backward)


def _range(stage: Stage, level: int) -> tuple[float, float]:
    """The bounds of the number of blocks that recompute at a level or a higher one, as constraints ask."""
    blocks = float(stage.count)
    return blocks if level <= stage.least else 0.0, blocks if stage.may_be_whole or level < stage.depth else 0.0
