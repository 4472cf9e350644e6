"""What a plan must satisfy: memory budget, training options, constraints, and the optimality gap."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.plans import GAP
from autopar.precision import Precision


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The requirements of one plan.

    `memory_budget_bytes`: peak allocated bytes per device; None: what the device has (`Device.usable_bytes`).
    `precision`: dtypes of a step; by default the model's own. `micro_batches`: backward passes of one optimizer step.
    `optimizer`: a name of `cost.memory.states.OPTIMIZERS`, whose state takes memory and time. `constraints`: schemes
    and pins as text (`solver.constraints.schemes`, `solver.constraints.pins`). `inputs`: "global" (every rank is given
    the whole batch) or "local" (its rows). `time_limit`: CPU seconds of one solve. `gap`: the relative gap to the
    proven bound at which the solver may stop. `solver`: "highs" or "cbc". `fold`: equal repeated blocks share their
    decisions.
    """

    memory_budget_bytes: int | None = None
    precision: Precision = field(default_factory=Precision)
    micro_batches: int = 1
    optimizer: str = "adamw"
    constraints: tuple[str, ...] = ()
    inputs: str = "global"
    time_limit: float = 60.0
    gap: float = GAP
    solver: str = "highs"
    fold: bool = True

    def budget_bytes_on(self, cluster: Cluster) -> int:
        """The budget of peak bytes on a device of the cluster."""
        return cluster.device.usable_bytes if self.memory_budget_bytes is None else self.memory_budget_bytes
