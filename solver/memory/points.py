"""Rows that bound W, the most that lives in a stage's block, by the points of its ops (`cost.memory.lifetimes`).

For the points v in the order of the ops, D(v) is what grows and shrinks from op to op: bytes that ops up to v keep, and
gradients of parameters whose last reader is v or a later op, which wait for their bucket. W is at least D(v) plus what
lives at v alone. Each phase (`cost.memory.backward_transfers`) has a W of its own: the points before backward reaches
an op that reads a gathered parameter, the landing of the parameter at that op, the points since, and the reduction,
when all gradients of the stage are there, with those of activations that its backward leaves to the stage before. A
bucket may be reduced after the backward of any weight's reader, if no weight that ops before read moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from autopar.cost.memory.backward_transfers import Phase
from autopar.cost.memory.point import Point
from autopar.cost.memory.transfer_bytes import transfer_bytes
from autopar.graph import TensorRef
from autopar.solver.memory.alive import Alive
from autopar.solver.memory.limits import limit_of
from autopar.solver.memory.stage_bytes import UNIT, StageBytes, add, total
from autopar.solver.model import Model
from autopar.solver.problem import Stage
from autopar.solver.seconds.replays import Expression, Flow, OwnLevel

Largest = Callable[[str, Sequence[tuple[Expression, float, float]]], int | None]
Fullest = list[dict[Phase, int | None]]
OfBlocks = tuple[Fullest, Fullest, list[int | None]]
Pieces = dict[tuple[Phase, int | None], list[tuple[Expression, float, float]]]  # by the op that begins each
Counting = Callable[[int, int, float], Expression]  # a level, a variable, and the sign with which it is added


class Points:
    """W of a model's stages. `waiting`: by the op that gives their first part, gradients of parameters that wait for
    their bucket; `cast`: what that op has besides of gradients that are cast at once; `shared`: gradients that wait in
    all blocks of a stage but the last, which has given their first part."""

    def __init__(
        self,
        model: Model,
        stages: Sequence[StageBytes],
        waiting: Mapping[int, Expression],
        cast: Mapping[int, Expression],
        shared: Mapping[int, Expression],
    ) -> None:
        self.model, self.problem, self.stages = model, model.problem, stages
        self.waiting, self.cast, self.shared = waiting, cast, shared
        self.memory, self.lifetimes = model.problem.memory, model.problem.memory.lifetimes
        self.nodes = list(self.memory.graph.nodes)
        self.alive = Alive(model)

    def fullest(
        self, number: int, returned: Expression, bound: Largest, *, lands: bool, last: bool = False
    ) -> OfBlocks:
        """W of each phase by level of recompute, in MiB; the same of all blocks but the first, with what is `brought`
        to them; and N of each level. `returned`: saved tensors of a block that the caller holds too; `lands`: whether
        the landing of a bucket can be the peak; `last`: whether this is for the last block.

        A block that is not recomputed and one that is recomputed as a whole have the same W. A stage of a single block
        has one W, of the level that the block is at.
        """
        stage, stage_bytes = self.problem.stages[number], self.stages[number]
        start = Expression()
        for member in stage.ops:
            start = total(start, self.waiting.get(member, {}))
        pieces, pieces_behind, current, begin = self._pieces(number, start, lands=lands, last=last)
        start = total(start, returned)
        region = self.problem.grouping.region(self.problem.ops[stage.ops[0]].node)
        first = self.problem.grouping.readers.first(region)
        for passing in self._left_to_do(stage, first):
            self._note(pieces.setdefault((Phase.REDUCING, begin), []), total(total(current, start), passing), {})
        most_by_piece = self._most(number, pieces, bound)
        when_reduced: list[Expression] = []
        for at, off in self._reduced_at(stage, region):
            there = total(total(start, self._kept_before(stage, stage_bytes, at)), off)
            when_reduced += [total(there, passing) for passing in self._left_to_do(stage, at)]
        reducing = bound(f"fullest.{number}", [(terms, 0.0, float("inf")) for terms in when_reduced if terms])
        levels = [self._fullest_at(stage_bytes, most_by_piece, bound, counting) for counting in self._levels(number)]
        fullest = [by_phase | {Phase.REDUCING: reducing} for by_phase in levels]
        next_one = [by_phase.get(Phase.REDUCING) for by_phase in levels]
        if stage.count == 1 and stage.depth > 1:
            return fullest, fullest, next_one
        most_by_piece = self._most(number, pieces_behind, bound)
        behind_others = [
            by_phase | self._fullest_at(stage_bytes, most_by_piece, bound, counting, by_phase)
            if most_by_piece and level < stage_bytes.block.brought_until
            else by_phase
            for level, (counting, by_phase) in enumerate(zip(self._levels(number), fullest, strict=True))
        ]
        return fullest, behind_others, next_one

    def _pieces(
        self, number: int, start: Expression, *, lands: bool, last: bool
    ) -> tuple[Pieces, Pieces, Expression, int]:
        """By phase and piece, D(v) plus what lives at v, for the points of a stage's ops: of any block, and of a block
        after others; then D after the last op, and the op with which the last piece begins. `start`: D before all."""
        stage, stage_bytes, grouping = self.problem.stages[number], self.stages[number], self.problem.grouping
        shared = {} if last else self.shared
        pieces, pieces_behind = Pieces(), Pieces()
        brought, unkept = dict(stage_bytes.block.brought.get(-1, {})), dict(stage_bytes.block.unkept.get(-1, {}))
        current, begin, begins = start, -1, self.begins(stage)
        for member in stage.ops:
            node, begin = self.problem.ops[member].node, begins[member]
            behind_reads = grouping.readers.last(grouping.region(node)) - self.lifetimes.position[node]
            change = dict(stage_bytes.block.by_op.get(member, {}))
            for variable, size in stage_bytes.block.parameters_by_op.get(member, {}).items():
                add(change, variable, size)
            if change:
                current = self.chain(current, change)
            brought = total(brought, stage_bytes.block.brought.get(member, {}))
            unkept = total(unkept, stage_bytes.block.unkept.get(member, {}))
            passed_on = total({v: -c for v, c in self.waiting.get(member, {}).items()}, shared.get(member, {}))
            for point, kind, behind in self._cases(member, stage.count):
                if point.view and not self.alive.converts(member, point, kind):
                    continue
                alive = self.alive.at(member, point, kind)
                if point.backward and member in self.cast:
                    alive = total(alive, self.cast[member])
                alive_in = [(Phase.SINCE if behind_reads >= 0 else Phase.BEFORE, alive)]
                if lands and behind_reads == 0 and point.backward:
                    alive_in.append((Phase.LANDING, total(self.alive.passing(point), passed_on)))
                for phase, alive in ((phase, total(alive, unkept)) for phase, alive in alive_in):
                    self._note(pieces.setdefault((phase, begin), []), current, alive)
                    if brought and behind:
                        self._note(pieces_behind.setdefault((phase, begin), []), total(current, brought), alive)
            if passed_on:
                current = self.chain(current, passed_on)
        for member in stage.ops:  # these are part of `start` already
            current = total(current, {v: -c for v, c in shared.get(member, {}).items()})
        return pieces, pieces_behind, current, begin

    def _reduced_at(self, stage: Stage, region: int) -> Iterator[tuple[int, Expression]]:
        """The positions of the ops of a stage's first block after whose backward its bucket may be reduced: of the
        first that reads a weight, and of later ones, with terms that are at most -M if the gradient of any weight moves
        that an op before reads."""
        grouping, memory = self.problem.grouping, self.memory
        readers, off = grouping.readers.of_weights(region), Expression()
        yield grouping.readers.first(region), {}
        limit = limit_of(self.model, stage) * UNIT if len(readers) > 1 else 0.0
        by_reader = {node: list[Flow]() for node in readers}
        for flow in self.model.flows if len(readers) > 1 else ():
            if memory.is_trainable(self.problem.ref(flow.tensor).node):
                by_reader.get(self.problem.ops[flow.use.op].node, []).append(flow)
        for node, behind in itertools.pairwise(readers):
            for flow in by_reader[node]:
                ref = self.problem.ref(flow.tensor)
                for (port, wanted), variable in flow.pairs.items():
                    if transfer_bytes(memory, grouping, ref, port[0], wanted, regather=port[1]).reduction:
                        off = off | {variable: -limit}
            yield self.lifetimes.position[behind], off

    def _kept_before(self, stage: Stage, stage_bytes: StageBytes, position: int) -> Expression:
        """What a block's ops keep that stand before a position of the stage's first block: it lives while the bucket is
        reduced after the backward of the op there."""
        kept = Expression()
        for member in stage.ops:
            if self.lifetimes.position[self.problem.ops[member].node] >= position:
                return kept
            for by_op in (stage_bytes.block.by_op, stage_bytes.block.parameters_by_op):
                kept = total(kept, by_op.get(member, {}))
        return Expression()

    def by_level(self, number: int, pieces: Pieces, bound: Largest) -> list[dict[Phase, int | None]]:
        """W of each phase by level, from the points of each piece of a block that is not recomputed."""
        most_by_piece = self._most(number, pieces, bound)
        return [
            self._fullest_at(self.stages[number], most_by_piece, bound, counting) for counting in self._levels(number)
        ]

    def _most(self, number: int, pieces: Pieces, bound: Largest) -> dict[tuple[Phase, int | None], int | None]:
        return {key: bound(f"fullest.{number}", points) for key, points in pieces.items()}

    def _levels(self, number: int) -> list[Counting]:
        """How bytes count at each level for which a stage has a W."""
        if (stage := self.problem.stages[number]).count == 1 and stage.depth > 1:
            return [OwnLevel(self.model, number)]
        return [partial(_of_level, level) for level in range(max(1, stage.depth))]

    def begins(self, stage: Stage) -> dict[int, int]:
        """By op, the offset in the block of the op with which its piece begins."""
        by_op: dict[int, int] = {}
        piece, begin = self._piece(stage, -1), -1
        for member in stage.ops:
            offset = self.problem.ops[member].again.offset
            if offset >= 0 and self._piece(stage, offset) != piece:
                piece, begin = self._piece(stage, offset), offset
            by_op[member] = begin
        return by_op

    def _left_to_do(self, stage: Stage, position: int) -> list[Expression]:
        """Gradients of activations that live when the backward of a stage's first, second and last block has only the
        ops left that stand before a position of the first block."""
        period = stage.repeat.period if stage.repeat is not None else 0
        blocks = sorted({0, min(1, stage.count - 1), stage.count - 1})
        points = [self.lifetimes.left_to_do(position + block * period) for block in blocks]
        passing = [self.alive.passing(point) if point is not None else {} for point in points]
        return [terms for i, terms in enumerate(passing) if terms not in passing[:i]]

    def _piece(self, stage: Stage, offset: int) -> tuple[object, ...]:
        """A key of the piece that an op is in: equal if no inner segment of any level begins or ends between ops."""
        levels = stage.levels
        spans = [span for level in range(1, stage.depth) for span in levels.spans(level)] if levels else []
        return tuple((first <= offset, last < offset) for first, last in spans)

    def _fullest_at(
        self,
        stage_bytes: StageBytes,
        most_by_piece: Mapping[tuple[Phase, int | None], int | None],
        bound: Largest,
        counting: Counting,
        least: Mapping[Phase, int | None] = MappingProxyType({}),
    ) -> dict[Phase, int | None]:
        """W at a level, from the most of each piece of a block that is not recomputed: less what segments before the
        piece have freed, plus what these and its own keep besides. `counting`: how both count; `least`: bounds on W."""
        by_phase: dict[Phase, int | None] = {}
        for phase in dict.fromkeys(phase for phase, _ in most_by_piece):
            floor = least.get(phase)
            rows: list[tuple[Expression, float, float]] = []
            if floor is not None:
                rows.append(({floor: UNIT}, 0.0, float("inf")))
            for (of_phase, begin), variable in most_by_piece.items():
                if variable is None or of_phase is not phase:
                    continue
                terms: Expression = {variable: UNIT}
                block = stage_bytes.block
                for spans, sign, behind in ((block.freed, -1.0, 1), (block.besides, 1.0, 0)):
                    for (level, span), terms_of_span in spans.items():
                        if begin is not None and span[behind] < begin + 1 - behind:
                            for variable_, size in terms_of_span.items():
                                for part, count in counting(level, variable_, sign).items():
                                    add(terms, part, sign * count * size)
                rows.append((terms, 0.0, float("inf")))
            alone = len(rows) == 1 and len(rows[0][0]) == 1
            by_phase[phase] = next(iter(rows[0][0])) if alone else bound("fullest.level", rows)
        return by_phase

    def chain(self, before: Expression, change: Expression) -> Expression:
        """The sum of two expressions; as a variable, if it has more than a few terms."""
        if len(before) + len(change) <= 4:
            live_bytes = dict(before)
            for variable, size in change.items():
                add(live_bytes, variable, size)
            return live_bytes
        live = self.model.program.variable("live", upper=None, whole=False)
        terms = [(v, -c / UNIT) for expression in (before, change) for v, c in expression.items()]
        self.model.program.equal("live", [(live, 1.0), *terms], 0.0)
        return {live: UNIT}

    def _note(self, rows: list[tuple[Expression, float, float]], current: Expression, alive: Expression) -> None:
        terms = dict(current)
        for variable, size in alive.items():
            add(terms, variable, size)
        if terms and not any(terms == noted for noted, _, _ in rows):
            rows.append((terms, 0.0, float("inf")))

    def _op(self, ref: TensorRef) -> tuple[int, int]:
        """The op that stands for a tensor's node, with the output's number."""
        return self.problem.op_of[ref.node], ref.index

    def _cases(self, member: int, count: int) -> Iterable[tuple[Point, str, bool]]:
        """The points of an op in a stage's first, second and last block, equal ones once, each with whether the block
        reads what is before the stage ("first") or another block ("next"), and whether a later block has the point."""
        op, cases = self.problem.ops[member], dict[tuple[object, ...], tuple[Point, str, bool]]()
        repeat = self.problem.stages[op.stage].repeat
        period = repeat.period if repeat is not None else 0
        crosses = any(flows[0].tensor.kind == "next" for flows in self.alive.into.get(member, ()))
        for instance in sorted({0, min(1, count - 1), count - 1}):
            for point in self.lifetimes.points(self.nodes[self.lifetimes.position[op.node] + instance * period]):
                passing = tuple(map(self._op, point.passing))
                reads = (*point.awaited, *(read for reads in point.apart for read in (None, *reads)))
                read_ops = tuple(tuple(map(self._op, read)) if read is not None else () for read in reads)
                key = (point.backward, passing, read_ops, point.made, crosses and instance > 0)
                first, kind, _ = cases.get(key, (point, "next" if instance else "first", False))
                cases[key] = first, kind, instance > 0
        return cases.values()


def _of_level(level: int, own_level: int, variable: int, _: float) -> Expression:
    return {variable: 1.0} if own_level == level else {}
