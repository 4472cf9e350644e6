"""What constraints leave: strategies of ops, storage and regathering of parameters, recompute of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import fx

from autopar.errors import InfeasibleError
from autopar.strategies.strategy import Strategy

Strategies = Mapping[fx.Node, Sequence[Strategy]]
Recompute = Literal["never", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("never", "selective", "full")
"""Nothing, a part, or all of a block is computed again in backward."""


@dataclass(frozen=True)
class Restricted:
    """Strategies after all constraints; whether a parameter must be gathered again in backward (True) or must not
    (False); and the recompute that is asked of the block of a node.

    `marks`: the pins that name a node and restrict its choices or its recompute; blocks whose nodes have different
    marks are not equal.
    """

    strategies: Strategies
    regather: Mapping[fx.Node, bool] = field(default_factory=dict)
    recompute: Mapping[fx.Node, Recompute] = field(default_factory=dict)
    marks: Mapping[fx.Node, tuple[str, ...]] = field(default_factory=dict)

    @property
    def forces_replays(self) -> bool:
        """Whether some blocks must be recomputed."""
        return any(way != "never" for way in self.recompute.values())

    def recomputing(self, nodes: Mapping[fx.Node, object], way: Recompute) -> Restricted:
        """A copy in which recompute is asked (`way`) of the blocks of these nodes, which replaces what was asked of
        them."""
        return replace(self, recompute={**self.recompute, **dict.fromkeys(nodes, way)})

    def marked(self, nodes: Iterable[fx.Node], text: str) -> Restricted:
        """A copy in which these nodes are also marked with the text of a pin."""
        return replace(self, marks={**self.marks, **{node: (*self.marks.get(node, ()), text) for node in nodes}})


class ExcludedError(InfeasibleError):
    """Constraints leave an op no strategy, or make one of its inputs impossible; `reason` says which."""

    def __init__(self, constraint: str, reason: str) -> None:
        super().__init__(f"constraint '{constraint}' cannot hold: {reason}")
        self.reason = reason
