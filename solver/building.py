"""From a graph with strategies to the planning problem: stages, choices, levels of recompute, tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.blocks import Repeat
from autopar.cost.structure.levels import MOST, Levels
from autopar.cost.traffic import computed_end, in_segment, needs_grad, replay_end
from autopar.graph import TensorRef, output_tensors, readers_of
from autopar.solver.constraints.parts import Wish, levels_for, wish_of
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.problem import Again, Choice, Kind, Op, Problem, Stage, Tensor, Use, deciding
from autopar.solver.search.equal_ops import EqualOps
from autopar.solver.seconds.op_choices import OpChoices

MANY_CHOICES = 1500
"""Choices in sum of the deciding ops of a block. With more, several levels of recompute below the whole block make
planning too slow, and a single one is nearly as good (DeepSeek-V3 on 64 x 8: a step is 10 % faster than without inner
levels, as with three). A block of Llama-3-8B has 1,193 on two axes and 5,060 on three, blocks of DeepSeek-V3 have 1,587
and 2,097."""


def build_problem(
    memory: StepMemory,
    restricted: Restricted,
    cluster: Cluster,
    repeats: Sequence[Repeat],
    *,
    fold: bool = True,
    recompute: bool = True,
    inner_levels: int = MOST,
    levels: Mapping[tuple[Repeat, int], Levels | None] | None = None,
) -> Problem:
    """The planning problem of a graph whose nodes have these strategies.

    `fold`: let equal blocks share their decisions where possible. `inner_levels`: the most levels of recompute below
    whole blocks. `levels`: known levels of blocks, by repeat and block number.

    Raises KeyError for a tensor whose node has no strategy.
    """
    recompute = recompute and memory.train
    known = dict(levels or {})
    return _Builder(memory, restricted, cluster, tuple(repeats), fold, recompute, inner_levels, known).build()


class _Builder:
    """A problem in the making: `build` walks the graph's stretches in order, and each becomes a stage with its ops.

    `alone`: by repeat, how many of its first blocks are stages of their own; the others are folded into one stage.
    """

    def __init__(
        self,
        memory: StepMemory,
        restricted: Restricted,
        cluster: Cluster,
        repeats: tuple[Repeat, ...],
        fold: bool,
        recompute: bool,
        inner_levels: int,
        levels: Mapping[tuple[Repeat, int], Levels | None],
    ) -> None:
        self.memory, self.cluster, self.repeats = memory, cluster, repeats
        self.inner_levels, self.levels = inner_levels, levels
        self.strategies, self.restricted = restricted.strategies, restricted
        self.recompute = recompute
        self.op_choices = OpChoices(memory, restricted, cluster)
        self.nodes = list(memory.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.alone = [self._alone(repeat) if fold else repeat.count for repeat in repeats]
        self.ops: list[Op] = []
        self.op_of: dict[fx.Node, int] = {}
        self.stages: list[Stage] = []
        self.equal_ops = EqualOps(self.nodes, self.ops, self.op_of) if fold else None

    def build(self) -> Problem:
        at = 0
        for repeat, alone in zip(self.repeats, self.alone, strict=True):
            self._stage(range(at, repeat.start), 1)
            for i in range(alone):
                self._stage(repeat.instance(i), 1, repeat, i)
            if alone < repeat.count:
                self._stage(repeat.instance(alone), repeat.count - alone, repeat, alone)
            at = repeat.end
        self._stage(range(at, len(self.nodes)), 1)
        for repeat, alone in zip(self.repeats, self.alone, strict=True):
            for i in range(alone + 1, repeat.count):
                for node_index, of_first in zip(repeat.instance(i), repeat.instance(alone), strict=True):
                    if self.nodes[of_first] in self.op_of:
                        self.op_of[self.nodes[node_index]] = self.op_of[self.nodes[of_first]]
        tensors = self._tensors()
        return Problem(
            self.memory, self.cluster, tuple(self.ops), tensors, tuple(self.stages), self.repeats, self.op_of
        )

    def _stage(self, span: range, count: int, repeat: Repeat | None = None, first: int = 0) -> None:
        """Add the stage of `count` blocks of a repeat from block number `first` on, whose nodes are at `span`; or of
        nodes between repeats."""
        nodes = self.nodes[span.start : span.stop]
        if not nodes:
            return
        choices = {
            node: self.op_choices.of(node)
            for node in nodes
            if node in self.strategies and (output_tensors(node) or node.op == "output")
        }
        like: dict[fx.Node, fx.Node] = {}
        if repeat is not None and self.equal_ops is not None:
            like = self.equal_ops.deciding(repeat, first, count, choices)
        levels = None
        if repeat is not None:
            known = (repeat, first) in self.levels
            levels = self.levels[repeat, first] if known else self._levels(nodes, choices, like)
        members = []
        for offset, node in enumerate(nodes):
            if node in choices:
                self.op_of[node] = len(self.ops)
                members.append(len(self.ops))
                again = self._again(nodes, offset, levels) if levels else Again()
                decides = deciding(self.ops, self.op_of[like[node]]) if node in like else None
                op_choices = choices[node] if decides is None else self.ops[decides].choices
                self.ops.append(Op(node, len(self.stages), op_choices, again, decides))
        wish = self._wish(nodes) if levels is not None else None
        least = _least_level(wish, levels) if wish is not None and levels is not None else 0
        may_be_whole = wish is None or wish.whole is not False
        self.stages.append(Stage(count, tuple(members), repeat, first, levels, least, may_be_whole))

    def _wish(self, nodes: Sequence[fx.Node]) -> Wish:
        return wish_of(self.memory, self.restricted.recompute, nodes)

    def _levels(
        self,
        nodes: Sequence[fx.Node],
        choices: Mapping[fx.Node, tuple[Choice, ...]],
        like: Mapping[fx.Node, fx.Node],
    ) -> Levels | None:
        """The levels of recompute of a block; None if it must not be recomputed, and only the whole block if no part of
        it may be recomputed on its own."""
        if not self.recompute or not replay_end(self.memory, nodes):
            return None
        own = {like.get(node, node): of_node for node, of_node in choices.items()}
        are_many = sum(map(len, own.values())) > MANY_CHOICES
        several = any(node in choices for node in like.values())  # layers: together their activations are large
        most = min(self.inner_levels, 1 + several) if are_many else self.inner_levels
        seconds = {node: max(choice.forward_seconds for choice in of_node) for node, of_node in choices.items()}
        return levels_for(self.memory, nodes, self._wish(nodes), lambda node: seconds.get(node, 0.0), most)

    def _again(self, nodes: Sequence[fx.Node], offset: int, levels: Levels) -> Again:
        if not in_segment(nodes[offset]):
            return Again()
        dropped = replayed = computed = 0
        for level in range(len(levels), 0, -1):  # the lowest of each counts; segments are nested
            span = levels.holding(offset, level)
            if span is None:
                break
            inside, at = nodes[span[0] : span[1] + 1], offset - span[0]
            dropped = level
            replayed = level if at < replay_end(self.memory, inside) else replayed
            computed = level if at < computed_end(self.memory, inside) else computed
        return Again(dropped, replayed, computed, offset)

    # -- folding ------------------------------------------------------------------------------------------------------

    def _alone(self, repeat: Repeat) -> int:
        """How many of a repeat's first blocks decide for themselves (0, 1 or all); the later ones are folded.

        Folded blocks need equal strategies. Their results may be read only by the next block and after the last one,
        and the inputs of the first of them must have the same form as those of the others.
        """
        if repeat.count == 1:
            return 1
        alone = 0 if self._equal(repeat, 0) and self._reads_alike(repeat) else 1
        own = not all(self._equal(repeat, i) for i in range(1, repeat.count - 1))
        return repeat.count if own or self._reaches_further(repeat, alone) else alone

    def _equal(self, repeat: Repeat, block: int) -> bool:
        """Whether a block has the same strategies as the next one."""
        for number, next_number in zip(repeat.instance(block), repeat.instance(block + 1), strict=True):
            here, there = self.strategies.get(self.nodes[number]), self.strategies.get(self.nodes[next_number])
            if here is not there and (here is None or there is None or tuple(here) != tuple(there)):
                return False
        return True

    def _reads_alike(self, repeat: Repeat) -> bool:
        """Whether the inputs of the first block have the form of the second's: they agree in whether they need a
        gradient (which takes time) and in whether they are given to the step (then saving them takes no memory)."""
        pairs = zip(repeat.instance(0), repeat.instance(1), strict=True)
        inputs = (
            (self.memory.inputs[self.nodes[number]], self.memory.inputs[self.nodes[next_number]])
            for number, next_number in pairs
        )
        return all(
            self._form(a) == self._form(b) for refs, next_refs in inputs for a, b in zip(refs, next_refs, strict=True)
        )

    def _form(self, ref: TensorRef) -> tuple[bool, bool]:
        is_input = self.memory.roots[ref].node.op in ("placeholder", "get_attr")
        return needs_grad(self.memory, ref), is_input

    def _reaches_further(self, repeat: Repeat, alone: int) -> bool:
        """Whether a tensor of one of these blocks, other than the last, is read beyond the next block."""
        folded = any(fold.repeat == repeat for fold in self.memory.folds)  # then only the first block can be
        return any(
            reader.op != "output" and self.position[reader] >= repeat.instance(i + 1).stop
            for i in range(alone, min(1, repeat.count - 1) if folded else repeat.count - 1)
            for position in repeat.instance(i)
            for reader in readers_of(self.nodes[position])
        )

    def _tensors(self) -> tuple[Tensor, ...]:
        """The tensors with their uses, grouped such that the uses of a tensor share conversions."""
        uses_of: dict[tuple[int, int, Kind, int], list[Use]] = {}
        for number, op in enumerate(self.ops):
            stage = self.stages[op.stage]
            refs = self.memory.inputs[op.node]
            later = self._second(op.node, stage)
            for index, ref in enumerate(refs):
                for source, kind in self._edges(ref, later[index] if later else None, op, stage):
                    key = (self.op_of[source.node], source.index, kind, op.stage if kind != "plain" else -1)
                    uses = uses_of.setdefault(key, [])
                    if Use(number, index) not in uses:
                        uses.append(Use(number, index))
        return tuple(
            Tensor(source, output, kind, self._merged(uses) if kind == "each" else tuple(uses), stage)
            for (source, output, kind, stage), uses in uses_of.items()
        )

    def _merged(self, uses: Sequence[Use]) -> tuple[Use, ...]:
        """Merge the inputs of an op that read one tensor of each block and want it in the same layouts: they have the
        same optimum.

        Each block's tensor is converted on its own for such an input, so that the inputs share no conversion.
        """
        merged: dict[tuple[object, ...], Use] = {}
        for use in uses:
            layouts = tuple(choice.strategy.inputs[use.index] for choice in self.ops[use.op].choices)
            is_saved = use.index in self.memory.saved(self.ops[use.op].node)[0]
            use_before = merged.setdefault((use.op, layouts, is_saved), replace(use, times=0))
            merged[use.op, layouts, is_saved] = replace(use_before, times=use_before.times + 1)
        return tuple(merged.values())

    def _second(self, node: fx.Node, stage: Stage) -> list[TensorRef] | None:
        """The inputs of the corresponding node of the second block; None if there is none."""
        if stage.repeat is None or stage.count == 1:
            return None
        return self.memory.inputs[self.nodes[self.position[node] + stage.repeat.period]]

    def _edges(self, ref: TensorRef, later: TensorRef | None, op: Op, stage: Stage) -> list[tuple[TensorRef, Kind]]:
        """The tensors that an input of an op stands for, by kind. `ref`: what the op reads in the stage's first block;
        `later`: what the corresponding op of the second block reads, if there is one."""
        source = self.ops[self.op_of[ref.node]]
        if stage.repeat is None:
            blocks = self.stages[source.stage]
            if blocks.repeat is None or blocks.count == 1:
                return [(ref, "plain")]
            last_block = blocks.repeat.instance(blocks.repeat.count - 1)
            return [(ref, "plain" if self.position[ref.node] >= last_block.start else "each")]
        if source.stage == op.stage and (later is None or later.node is not ref.node):
            alone = stage.count == 1 and not stage.recomputable
            return [(ref, "plain" if alone else "inner")]  # plain: paid once with readers outside the block, if any
        if later is None or later == ref:
            return [(ref, "outer")]
        return [(ref, "first"), (later, "next")]


def _least_level(wish: Wish, levels: Levels) -> int:
    """The lowest level that a block may be at."""
    if wish.whole:
        return len(levels)
    parts = len(levels) - (wish.whole is False)  # it may have none, and is then not recomputed
    return min(1, parts) if wish.must_recompute else 0
