"""Which ops of each region read parameters, and which parameters they save for backward, from the graph alone.

A region is a block of a repeat, or the nodes between two repeats (`cost.structure.blocks.regions`). Without a backward,
what an op reads stands for what it saves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import fx

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.blocks import Region
from autopar.graph import tensor_of


class Readers:
    """The readers of a graph's parameters; `own`: by region, the parameters that no other region reads; `saved`: by
    region, the parameters that its ops save."""

    def __init__(self, memory: StepMemory, regions: Sequence[Region]) -> None:
        nodes = list(memory.graph.nodes)
        self.position = {node: i for i, node in enumerate(nodes)}
        self._begin = [region.first for region in regions]
        self._home: dict[fx.Node, int] = {}
        self.own: list[list[fx.Node]] = [[] for _ in regions]
        for parameter in filter(memory.is_parameter, nodes):
            reading = sorted({self.region(user) for user in parameter.users}) or [self.region(parameter)]
            self._home[parameter] = reading[0]
            if len(reading) == 1:
                self.own[reading[0]].append(parameter)
        self.saved: list[set[fx.Node]] = [set() for _ in regions]
        self._last = [-1] * len(regions)
        self._first: dict[int, tuple[bool, int]] = {}  # by region: whether no weight is read, and the position
        self._of_weights: dict[int, list[fx.Node]] = {}
        for reader in {user for parameter in self._home for user in parameter.users if user.op != "output"}:
            self._add(memory, reader)
        self._saved_shared = [set(filter(self.shared, saved)) for saved in self.saved]

    def _add(self, memory: StepMemory, reader: fx.Node) -> None:
        refs, region, at = memory.inputs[reader], self.region(reader), self.position[reader]
        vectors_alone = all(tensor_of(ref).dim() < 2 for ref in refs if memory.is_trainable(ref.node))
        if not vectors_alone:
            self._of_weights.setdefault(region, []).append(reader)
        self._first[region] = min((vectors_alone, at), self._first.get(region, (vectors_alone, at)))
        places = memory.saved(reader)[0] if memory.train else range(len(refs))
        saved = {refs[place].node for place in places if memory.is_parameter(refs[place].node)}
        if saved:
            self._last[region] = max(self._last[region], at)
            self.saved[region] |= saved

    # -- of a parameter -----------------------------------------------------------------------------------------------

    def region(self, node: fx.Node) -> int:
        """The number of the region that a node lies in."""
        return bisect_right(self._begin, self.position[node]) - 1

    def home(self, parameter: fx.Node) -> int:
        """The first region that reads a parameter; if none does, the one that it lies in."""
        return self._home[parameter]

    def shared(self, parameter: fx.Node) -> bool:
        """Whether several regions read a parameter."""
        return len({self.region(user) for user in parameter.users if user.op != "output"}) > 1

    # -- of a region --------------------------------------------------------------------------------------------------

    def any(self, region: int) -> bool:
        """Whether any of a region's ops saves a parameter."""
        return self._last[region] >= 0

    def several(self, region: int) -> bool:
        """Whether a region's ops save more than one parameter."""
        return len(self.saved[region]) > 1

    def first(self, region: int) -> int:
        """The position of a region's first op that reads a weight: after its backward, all gradients of the region's
        buckets exist. Vectors and frozen parameters count only if the region reads nothing else, because in many plans
        their gradients do not move. Where the region begins, if it reads no parameter."""
        _, position = self._first.get(region, (True, self._begin[region]))
        return position

    def last(self, region: int) -> int:
        """The position of a region's last op that saves a parameter; -1 if there is none."""
        return self._last[region]

    def of_weights(self, region: int) -> list[fx.Node]:
        """A region's ops that read a trained weight, in the order of the graph."""
        return sorted(self._of_weights.get(region, ()), key=self.position.__getitem__)

    def saves_shared(self, region: int) -> bool:
        """Whether a region saves a parameter that other regions read too."""
        return bool(self._saved_shared[region])

    def share(self, region: int, other: int) -> bool:
        """Whether two regions both save the same parameter."""
        return not self._saved_shared[region].isdisjoint(self._saved_shared[other])
