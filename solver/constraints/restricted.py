"""What constraints leave of the ways to run ops, to store parameters and to recompute blocks."""

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
"""Of a block: nothing, a part, or all of it is computed again in backward."""


@dataclass(frozen=True)
class Restricted:
    """Strategies after all constraints; parameters that must (not) be gathered again; what is asked of the blocks in
    which nodes lie.

    `marks`: the pins that speak of a node and take something away; blocks whose nodes have other pins are not equal.
    """

    strategies: Strategies
    regather: Mapping[fx.Node, bool] = field(default_factory=dict)
    recompute: Mapping[fx.Node, Recompute] = field(default_factory=dict)
    marks: Mapping[fx.Node, tuple[str, ...]] = field(default_factory=dict)

    @property
    def forces_replays(self) -> bool:
        """Whether some blocks have to be recomputed."""
        return any(asked != "never" for asked in self.recompute.values())

    def recomputing(self, nodes: Mapping[fx.Node, object], asked: Recompute) -> Restricted:
        """The same, asked of the blocks of these nodes too; what was asked of a node before gives way."""
        return replace(self, recompute={**self.recompute, **dict.fromkeys(nodes, asked)})

    def marked(self, nodes: Iterable[fx.Node], text: str) -> Restricted:
        """The same, where a pin speaks of these nodes too."""
        return replace(self, marks={**self.marks, **{node: (*self.marks.get(node, ()), text) for node in nodes}})


class ExcludedError(InfeasibleError):
    """Constraints leave an op no way to run, or no way to get what it reads; `reason` tells which."""

    def __init__(self, constraint: str, reason: str) -> None:
        super().__init__(f"constraint '{constraint}' cannot hold: {reason}")
        self.reason = reason
