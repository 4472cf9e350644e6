"""Plans the models named on standard input, one per line, and answers each with a line of JSON; see plan_zoo.py."""

from __future__ import annotations

import collections
import re
import time
import warnings
from dataclasses import replace
from typing import Any

from torch import fx, nn
from whole_traces import whole_trace
from zoo_models import build
from zoo_peak import peak_bytes, restart_peak
from zoo_worker import OutOfTime, cpu_limit, failure, serve

from autopar import Cluster, InfeasibleError, UntraceableError
from autopar.graph import COST
from autopar.leaf_calls import LeafCall
from autopar.planning.stages import Prepared, Request, prepare, request_of
from autopar.plans import Plan
from autopar.stopwatch import Stopwatch
from autopar.strategies.arguments import qualified_name
from autopar.strategies.coverage import coverage
from autopar.tracing import Traced


def examine(family: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build one architecture, trace it and plan it on each mesh; its record."""
    record: dict[str, Any] = {"family": family, "name": name}
    restart_peak()
    limit = float(options["cpu_seconds"])
    meshes = [tuple(mesh) for mesh in options["meshes"]]
    stage = "not built"
    try:
        with cpu_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = build(family, name)
            stage = "not traced"
            watch = Stopwatch()
            with watch.stage("trace"):
                found = whole_trace(family, name, model, limit, options)
            record["changed"] = found.changed
            cluster = Cluster.preset("h100", meshes[0])
            request = request_of(cluster, "100TiB", found.precision, 1, "adamw", (), None, "global", limit / 2)
            stage = "failed"
            prepared, record["accepted"] = with_accepted_leaves(found.model, found.traced, request, watch)
            record |= ruled(found.traced.graph, meshes[0])
    except (Exception, OutOfTime) as error:
        return record | {"status": stage, **failure(error, limit)}
    record |= {"status": "planned", "nodes": len(found.traced.graph.nodes), "plans": {}}
    for mesh in meshes:
        record["plans"]["x".join(map(str, mesh))] = planned(prepared, mesh, limit, options["gap"])
    if any("why" in plan for plan in record["plans"].values()):
        record["status"] = "failed"
        record["why"] = next(plan["why"] for plan in record["plans"].values() if "why" in plan)
    return record | {"seconds": dict(watch.seconds), "peak_bytes": peak_bytes()}


def with_accepted_leaves(
    model: nn.Module, traced: Traced, request: Request, watch: Stopwatch
) -> tuple[Prepared, tuple[str, ...]]:
    """`prepare`, retried with the `leaf:` constraints that its errors suggest; also returns these constraints."""
    accepted: tuple[str, ...] = ()
    while True:
        try:
            return prepare(model, traced, replace(request, constraints=accepted), watch), accepted
        except UntraceableError as error:
            offered = re.search(r"constraints='(leaf:[^']+)'", str(error))
            if offered is None or offered[1] in accepted:
                raise
            accepted += (offered[1],)


def ruled(graph: fx.Graph, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Shares of a step's FLOPs in ops with a rule, with a discovered one and without; and indices to split them on."""
    found = coverage(graph, mesh)
    total = max(sum(map(flops, found)), 1)

    def share(test: Any) -> float:
        return round(sum(flops(node) for node, how in found.items() if test(how)) / total, 5)

    def ops(source: str) -> dict[str, int]:
        nodes = [node for node, how in found.items() if how.source == source]
        return dict(collections.Counter("leaf" if isinstance(n.target, LeafCall) else qualified_name(n) for n in nodes))

    return {
        "ops": len(found),
        "flops": total,
        "under_rule": share(lambda how: how.source == "rule"),
        "discovered": share(lambda how: how.source == "discovered"),
        "none": share(lambda how: how.source == "none"),
        "on_batch": share(lambda how: "batch" in how.kinds),
        "on_inner": share(lambda how: "inner" in how.kinds),
        "discovered_ops": ops("discovered"),
        "ops_without": ops("none"),
    }


def planned(prepared: Prepared, mesh: tuple[int, ...], limit: float, gap: float) -> dict[str, Any]:
    """Solve without constraints on one mesh: the share of FLOPs that stay replicated, the gap, and CPU seconds."""
    start = time.process_time()
    try:
        with cpu_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if mesh != prepared.request.cluster.shape:
                prepared = prepared.on(Cluster.preset("h100", mesh))
            plan = prepared.solve(gap=gap)
    except (Exception, OutOfTime) as error:
        kind = "no plan fits" if isinstance(error, InfeasibleError) else failure(error, limit)["why"]
        return {"why": kind, "cpu_seconds": round(time.process_time() - start, 2)}
    return {
        "cpu_seconds": round(time.process_time() - start, 2),
        "replicated": replicated(prepared.traced.graph, plan),
        "gap": round(plan.certificate.gap, 5),
        "step_seconds": plan.predicted.step_seconds,
    }


def replicated(graph: fx.Graph, plan: Plan) -> float:
    """The share of FLOPs in ops that every device computes as a whole."""
    nodes = list(graph.nodes)
    total = max(sum(map(flops, nodes)), 1)
    whole = [nodes[p.position] for p in plan.nodes if not any(f not in ("", "P", "R+") for f in p.factors)]
    return round(sum(map(flops, whole)) / total, 5)


def flops(node: fx.Node) -> int:
    return node.meta[COST].flops_forward + node.meta[COST].flops_backward


if __name__ == "__main__":
    serve(examine)
