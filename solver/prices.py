"""What converting a tensor from one layout into another costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.cost.buckets import Grouping
from autopar.cost.collectives import collective_seconds
from autopar.cost.traffic import conversion_moves
from autopar.errors import LayoutError
from autopar.graph import TensorRef
from autopar.layout import Layout
from autopar.reshard import Move


@dataclass(frozen=True)
class Price:
    """Seconds of one conversion, forward and backward, and how many collectives it is."""

    forward: float
    backward: float
    collectives: int


@dataclass
class PriceTable:
    """What conversions of one tensor cost, looked up once for each pair of layouts.

    `grouping`: given for a parameter, which shares collectives with others.
    """

    ref: TensorRef
    cluster: Cluster
    itemsize: int
    gradient_itemsize: int
    needs_grad: bool
    grouping: Grouping | None = None
    known: dict[tuple[Layout, Layout], Price | None] = field(default_factory=dict)

    def __call__(self, source: Layout, wanted: Layout) -> Price | None:
        """None where the conversion is impossible."""
        key = (source, wanted)
        if key not in self.known:
            self.known[key] = self._price(source, wanted)
        return self.known[key]

    def _price(self, source: Layout, wanted: Layout) -> Price | None:
        try:
            forward, backward = conversion_moves(
                self.ref, source, wanted, self.cluster.shape, needs_grad=self.needs_grad
            )
        except LayoutError:
            return None
        calls = 1.0 if self.grouping is None else self.grouping.calls(self.ref, wanted)
        live = sum(self.cluster.axes[m.axis].size > 1 for m in forward + backward)

        def seconds(moves: list[Move], itemsize: int) -> float:
            axes = self.cluster.axes
            return sum(collective_seconds(m.kind, m.elements * itemsize, axes[m.axis], calls) for m in moves)

        return Price(seconds(forward, self.itemsize), seconds(backward, self.gradient_itemsize), live)
