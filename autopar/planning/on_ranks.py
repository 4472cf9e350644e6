"""Plans of a model that several ranks run: every rank traces, rank 0 alone solves, and all ranks get its plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.calls.entries import Entry
from autopar.fingerprints.fingerprint import fingerprints
from autopar.layout import Layout
from autopar.planning.later_calls import plan_that_does, trace_later
from autopar.planning.stages import Request, prepare
from autopar.plans import Plan
from autopar.stopwatch import Stopwatch
from autopar.tracing import Traced


@dataclass(frozen=True)
class PlannerOnRanks:
    """Plans the calls of one model; every rank calls its methods. `first`: the trace of the call that is planned
    first; `device`: where ranks exchange what they compare."""

    first: Traced
    request: Request
    device: torch.device

    def plan(self, model: nn.Module, traced: Traced, watch: Stopwatch, **pinned: Any) -> Plan:
        """The plan of a trace. `pinned`: arguments of `Prepared.solve` that an earlier plan of the model determines."""
        from autopar.runtime.ranks.agreement import from_rank_zero

        def solved() -> str:
            return prepare(model, traced, self.request, watch).solve(**pinned).to_json()

        return Plan.from_json(from_rank_zero(solved, self.device))

    def replan(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        storage: Mapping[str, Layout],
        trained: Collection[str],
        earlier: Sequence[tuple[Any, Plan]],
        entry: Entry,
        rows: Mapping[str, int],
    ) -> tuple[Traced, Plan]:
        """Trace a later call of another kind. Reuse the plan of an earlier trace that does the same; else plan with
        the storage of parameters pinned."""
        from autopar.runtime.ranks.agreement import agree

        watch = Stopwatch()
        error: Exception | None = None
        digests: dict[str, str] = {}
        try:
            traced = trace_later(model, args, kwargs, self.first, self.request, watch, entry, rows)
            digests = fingerprints(model, traced.graph, self.request.cluster.shape)
        except Exception as problem:  # every rank must learn of it before any of them waits for a collective
            error = problem
        agree(self.device, digests, error)
        known = plan_that_does(traced, earlier)
        return traced, known or self.plan(model, traced, watch, pinned=storage, trained=trained)
