"""Plans the models named on standard input, one a line, and answers each with a line of JSON; see plan_zoo.py."""

from __future__ import annotations

import collections
import itertools
import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from zoo_inputs import examples, known_text
from zoo_models import build
from zoo_peak import peak_bytes, restart_peak
from zoo_worker import OutOfTime, cpu_limit, drops_layers, failure, parts_of, serve

from autopar import Cluster, InfeasibleError, UntraceableError
from autopar.graph import COST
from autopar.leaf_calls import LeafCall
from autopar.leaf_splits import find_splits
from autopar.planning import Prepared, Request, Stopwatch, prepare, request_of
from autopar.plans import Plan
from autopar.strategies.arguments import qualified_name
from autopar.strategies.coverage import coverage
from autopar.tracing import Traced, trace
from autopar.tracing.leaf_tensors import show_leaf_tensors

# What may be changed for a trace: the dtype (some models make float32 tensors themselves), a cache (a leaf that fills
# one cannot be split), text whose tokens are known (what ends a sequence decides in some), layers left out at random.
FLOAT32, NO_CACHE, TEXT, EVAL = "float32", "use_cache=False", "input_ids known", "eval(), since it drops layers"


def examine(family: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build one architecture, trace it and plan it on each mesh: its line of the table."""
    record: dict[str, Any] = {"family": family, "name": name}
    restart_peak()
    limit = float(options["cpu_seconds"])
    meshes = [tuple(mesh) for mesh in options["meshes"]]
    stage = "not built"
    try:
        with cpu_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = build(family, name)
            made = examples(family, model, options["batch"], options["length"])
            guesses = [made] if isinstance(made, dict) else list(made)
            stage = "not traced"
            watch = Stopwatch()
            with watch.stage("trace"):
                traced, record["changed"] = best_traced(model, guesses, limit)
            precision = "fp32" if FLOAT32 in record["changed"] else "bf16"
            request = request_of(
                Cluster.preset("h100", meshes[0]), "100TiB", precision, 1, "adamw", (), None, "global", limit / 2
            )
            stage = "failed"
            prepared, record["accepted"] = with_accepted_leaves(model, traced, request, watch)
            record |= ruled(traced.graph, meshes[0])
    except (Exception, OutOfTime) as error:
        return record | {"status": stage, **failure(error, limit)}
    record |= {"status": "planned", "nodes": len(traced.graph.nodes), "plans": {}}
    for mesh in meshes:
        record["plans"]["x".join(map(str, mesh))] = planned(prepared, mesh, limit, options["gap"])
    if any("why" in plan for plan in record["plans"].values()):
        record["status"] = "failed"
        record["why"] = next(plan["why"] for plan in record["plans"].values() if "why" in plan)
    return record | {"seconds": dict(watch.seconds), "peak_bytes": peak_bytes()}


def with_accepted_leaves(
    model: nn.Module, traced: Traced, request: Request, watch: Stopwatch
) -> tuple[Prepared, tuple[str, ...]]:
    """What `prepare` gives, with the leaves accepted that its errors offer to accept; and these constraints."""
    accepted: tuple[str, ...] = ()
    while True:
        try:
            return prepare(model, traced, replace(request, constraints=accepted), watch), accepted
        except UntraceableError as error:
            offered = re.search(r"constraints='(leaf:[^']+)'", str(error))
            if offered is None or offered[1] in accepted:
                raise
            accepted += (offered[1],)


def best_traced(model: nn.Module, guesses: Iterable[dict[str, Any]], limit: float) -> tuple[Traced, str]:
    """The trace of the whole model, with what had to be changed for it: as little as possible.

    Only where nothing is traced whole are leaves allowed, and the first trace is taken whose leaves can be split, or
    the first of all once half of `limit` CPU seconds are over.
    """
    config: Any = getattr(model, "config", None)
    all_guesses = list(guesses)
    possible = [FLOAT32]
    if any(getattr(part, "use_cache", False) for part in parts_of(config)):
        possible.append(NO_CACHE)
    if any(known_text(config, inputs) for inputs in all_guesses):
        possible.append(TEXT)
    if drops_layers(config):
        possible.append(EVAL)
    ways = [set(way) for n in range(len(possible) + 1) for way in itertools.combinations(possible, n)]
    found: list[tuple[Traced, str]] = []
    errors: list[Exception] = []
    start = time.process_time()
    for unsupported, way, inputs in itertools.product(("error", "leaf"), ways, all_guesses):
        if found and time.process_time() - start > limit / 2:
            break
        try:
            traced = traced_in(way, model, config, inputs, unsupported)
        except Exception as error:  # whatever a model does with examples that do not suit it; the first is told
            errors.append(error)
            continue
        found.append((traced, ", ".join(sorted(way))))
        if not is_left(traced):
            return found[-1]
    if not found:
        raise errors[0] if errors else ValueError("no example is made for this model")
    return found[0]


def traced_in(way: set[str], model: nn.Module, config: Any, inputs: dict[str, Any], unsupported: Any) -> Traced:
    """The trace with these changes."""
    text = known_text(config, inputs) if TEXT in way else {}
    caching = [part for part in parts_of(config) if getattr(part, "use_cache", False)] if NO_CACHE in way else []
    dtype = torch.float32 if FLOAT32 in way else torch.bfloat16
    model.train(EVAL not in way)
    try:
        for part in caching:
            part.use_cache = False
        traced = trace(model, inputs | text, parameter_dtype=dtype, unsupported=unsupported)
    finally:
        for part in caching:
            part.use_cache = True
    show_leaf_tensors(traced, dtype)
    find_splits(traced.graph)
    return traced


def is_left(traced: Traced) -> bool:
    """Whether a part of the model runs whole on every rank since it could not be traced."""
    return any(isinstance(node.target, LeafCall) and node.target.rule is None for node in traced.graph.nodes)


def ruled(graph: fx.Graph, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Shares of the FLOPs of one step: under a rule, discovered, neither; and what they can be split on."""
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
    """The unconstrained plan on one mesh: the share of FLOPs that it leaves replicated, and its CPU seconds."""
    start = time.process_time()
    try:
        with cpu_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if mesh != prepared.request.cluster.shape:
                prepared = prepared.on(Cluster.preset("h100", mesh))
            plan = prepared.solve(memory_budget_bytes=prepared.request.memory_budget_bytes, gap=gap)
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
    """The share of the FLOPs that every device does."""
    nodes = list(graph.nodes)
    total = max(sum(map(flops, nodes)), 1)
    whole = [nodes[p.position] for p in plan.nodes if not any(f not in ("", "P", "R+") for f in p.factors)]
    return round(sum(map(flops, whole)) / total, 5)


def flops(node: fx.Node) -> int:
    return node.meta[COST].flops_forward + node.meta[COST].flops_backward


if __name__ == "__main__":
    serve(examine)
