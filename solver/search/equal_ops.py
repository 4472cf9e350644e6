"""Which ops of a problem's blocks share the choice of another op: the corresponding op of an equal or similar layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from autopar.cost.structure.blocks import Repeat, labels_of
from autopar.cost.structure.layers import Layer, layers_of, pairs
from autopar.solver.problem import Choice, Op


@dataclass
class EqualOps:
    """Finds ops that share choices, stage by stage in the order of a graph's `nodes`; `ops`: the ops made so far."""

    nodes: Sequence[fx.Node]
    ops: Sequence[Op]
    op_of: Mapping[fx.Node, int]
    _known: dict[Repeat, list[Layer]] = field(default_factory=dict)  # distinct layers of folded blocks

    @cached_property
    def _labels(self) -> Sequence[Hashable]:
        return labels_of(self.nodes)

    def deciding(
        self, repeat: Repeat, block: int, count: int, choices: Mapping[fx.Node, tuple[Choice, ...]]
    ) -> dict[fx.Node, fx.Node]:
        """For nodes of a stage's first block, the node that decides for them, whose op always comes before theirs.

        The deciding node is in the same block, or in a block of an earlier repeat if nearly all nodes of the layer have
        a counterpart there. If the repeat's first block decides for itself, its first layer shares with none, as it
        reads other inputs.
        """
        start = repeat.instance(block).start
        layers = [[start + i for i in layer] for layer in layers_of(self.nodes[start : start + repeat.period])]
        elsewhere = [
            layer for of, layers_of_repeat in self._known.items() if of != repeat for layer in layers_of_repeat
        ]
        unlike: list[Layer] = []
        deciders: dict[fx.Node, fx.Node] = {}
        for layer in layers[count == 1 and block == 0 :]:
            equal = next((earlier for earlier in unlike if self._equal(earlier, layer)), None)
            if equal is not None:
                best = list(zip(equal, layer, strict=True))
            else:
                inside = [self._pairs(earlier, layer) for earlier in unlike]
                outside = [self._pairs(earlier, layer, nearly_all=True) for earlier in elsewhere]
                best = max([*outside, *inside], key=len, default=[])
                unlike.append(layer)
            for earlier, node in ((self.nodes[i], self.nodes[j]) for i, j in best):
                decides = deciders.get(earlier, earlier)
                decided = self.ops[self.op_of[decides]].choices if decides in self.op_of else choices.get(decides)
                if decided is not None and choices.get(node) == decided:
                    deciders[node] = decides
        if count > 1:
            self._known[repeat] = unlike
        return deciders

    def _equal(self, earlier: Layer, later: Layer) -> bool:
        return [self._labels[i] for i in earlier] == [self._labels[i] for i in later]

    def _pairs(self, earlier: Layer, later: Layer, *, nearly_all: bool = False) -> list[tuple[int, int]]:
        """Pairs of positions of corresponding nodes of two layers."""
        labels, later_labels = ([self._labels[i] for i in layer] for layer in (earlier, later))
        return [(earlier[i], later[j]) for i, j in pairs(labels, later_labels, nearly_all=nearly_all)]
