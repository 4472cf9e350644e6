"""Buckets: groups of parameters that are gathered together and whose gradients are reduced together.

A bucket is one node of the local graph and one node of the autograd graph, so its backward runs once the gradients of
all its members are available. Both directions run in the background: a gather is launched while ops of the bucket
before it compute (`communication.gathers`), and a reduction is waited for only where the parameter's own gradient is
handed out, after all other nodes of the backward pass (`communication.reductions`). Compiled graphs use plain
conversions instead, which the compiler orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import PlanMismatchError
from autopar.runtime.communication.convert import Recipe, Stage, conjugate, convert
from autopar.runtime.communication.flights import COLLECTIVES, Flight
from autopar.runtime.gradients.passes import fills_gradients
from autopar.runtime.gradients.second_derivatives import are_differentiated

if TYPE_CHECKING:
    from autopar.runtime.communication.transit import Transit


@dataclass(eq=False)
class Bucket:
    """`places` are the positions of the members' shards in the state.

    `in_segment`: the bucket is inside a recomputed segment, whose replay gathers it again. `regathers`: outside
    segments, the gathered copies are freed after their use in forward and gathered again in backward (ZeRO-3). A copy
    that only differs in dtype, or is a slice of what the rank stores, is made again without a collective; if its
    gradient needs no collective either, it has a bucket of its own."""

    places: tuple[int, ...]
    names: tuple[str, ...]
    stages: tuple[Stage, ...]
    regathers: bool
    in_segment: bool
    __name__: str = "bucket"

    @property
    def gathers(self) -> int:
        """How many collectives, one after another, bring the members into their wanted layouts."""
        return sum(action.kind in COLLECTIVES for action in self.stages[0].forward)

    @property
    def reduces(self) -> bool:
        """Whether the backward needs a collective."""
        return reduces(self.stages[0])

    @property
    def title(self) -> str:
        """The first member and how many more there are, for profiler ranges."""
        return self.names[0] + (f" and {len(self.names) - 1} more" if len(self.names) > 1 else "")

    def check(self) -> None:
        """Raise PlanMismatchError for members that cannot share their collectives."""
        first, *others = [_signature(stage) for stage in self.stages]
        if any(other != first for other in others):
            raise PlanMismatchError(f"the plan has parameters in one bucket that move in other ways: {self.names}")

    def __call__(self, transit: Transit | None, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The members in their wanted layouts and dtypes."""
        if transit is None:
            return self._converted(shards)
        if not self.gathers and not self.reduces:
            alone = self._converted(shards)
            transit.gathers.keep_places(self, alone, shards)
            return alone
        members: tuple[torch.Tensor, ...] = _Exchange.apply(self, transit, *shards)
        return members

    def _converted(self, shards: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(convert(s, Recipe((stage,))) for s, stage in zip(shards, self.stages, strict=True))


def copies(recipe: Recipe) -> bool:
    """Whether a conversion only makes a local copy (a slice or a cast), without a collective."""
    return len(recipe.stages) == 1 and not moves(recipe) and bool(recipe.stages[0].forward or recipe.stages[0].dtype)


def moves(recipe: Recipe) -> bool:
    """Whether a conversion belongs in a bucket: it is one stage with collectives, forward or backward."""
    return len(recipe.stages) == 1 and any(_signature(recipe.stages[0])[:2])


def reduces(stage: Stage) -> bool:
    """Whether the backward of a stage needs a collective."""
    return any(action.kind in COLLECTIVES for action in stage.backward)


def _signature(stage: Stage) -> tuple[object, ...]:
    """What must be equal for all members of a bucket: the collectives forward and backward, and the dtypes."""
    forward, backward = (
        tuple((action.kind, action.group) for action in actions if action.kind in COLLECTIVES)
        for actions in (stage.forward, stage.backward)
    )
    return forward, backward, stage.dtype, stage.reduction_dtype


class _Exchange(torch.autograd.Function):
    """Gathers in forward; in backward, passes the gradients to the transit, which reduces them for the parameters."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, transit: Transit, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.bucket, ctx.transit = bucket, transit
        ctx.set_materialize_grads(False)
        if bucket.gathers:
            values = transit.gathers.gather(bucket)
        else:
            values = Flight(shards, [stage.forward for stage in bucket.stages], bucket.stages[0].dtype).finish()
            transit.gathers.keep_places(bucket, values, shards)
        return tuple(v.view_as(v) if v is shard else v for v, shard in zip(values, shards, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if are_differentiated():
            pairs = zip(gradients, ctx.bucket.stages, strict=True)
            return (None, None, *(value if value is None else conjugate(value, stage) for value, stage in pairs))
        # `autograd.grad` for one member delivers gradients of all members here. Those that no node takes would remain
        # in the sums until the next backward through this call, and be added to its gradients.
        is_needed = [after is not None and torch._C._will_engine_execute_node(after) for after, _ in ctx.next_functions]
        pairs = zip(gradients, is_needed, strict=True)
        needed = [gradient if needs else None for gradient, needs in pairs]
        for place, stage, needs in zip(ctx.bucket.places, ctx.bucket.stages, is_needed, strict=True):
            if not needs:
                ctx.transit.reductions.drop(place, stage)
        ctx.transit.reductions.reduce(ctx.bucket, needed, fills=fills_gradients(ctx))
        return (None, None, *(None for _ in gradients))
