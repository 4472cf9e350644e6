"""Plans the models named on standard input, one a line, and answers each with a line of JSON; see plan_zoo.py."""

from __future__ import annotations

import collections
import contextlib
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
from zoo_worker import OutOfTime, cpu_limit, drops_layers, failure, serve

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

FLOAT32, EVAL = "float32", "eval(), since it drops layers"


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
                traced, record["changed"] = best_traced(model, guesses)
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


def best_traced(model: nn.Module, guesses: Iterable[dict[str, Any]]) -> tuple[Traced, str]:
    """The trace of the whole model, with what had to be changed for it, as the tracing benchmark goes about it.

    The first examples that the model takes decide; else those without a cache, else in float32, for some make tensors
    of that dtype themselves. Where none does, or leaves are left, it is tried with text that is known and, where whole
    layers are left out at random, in evaluation mode.
    """
    config: Any = getattr(model, "config", None)
    all_guesses = list(guesses)
    found: Traced | None = None
    first: Exception = ValueError("no example is made for this model")
    ways = ["", FLOAT32]
    if getattr(config, "use_cache", False):
        ways.insert(1, "use_cache=False")
    if drops_layers(config):
        ways.append(_both(FLOAT32, EVAL))
    for changed, inputs in itertools.product(ways, all_guesses):
        if changed:
            with contextlib.suppress(AttributeError):  # configs of other libraries
                config.use_cache = False
        dtype = torch.float32 if FLOAT32 in changed else torch.bfloat16
        model.train(EVAL not in changed)
        try:
            found = traced_on(model, inputs, dtype)
            break
        except Exception as error:
            if not changed and inputs is all_guesses[0]:
                first = error
    if found is None:
        for inputs in all_guesses:
            if text := known_text(config, inputs):
                with contextlib.suppress(Exception):  # the first error is told
                    return traced_on(model.train(), inputs | text, torch.bfloat16), "input_ids known"
        raise first
    if is_left(found) and getattr(config, "use_cache", False):
        config.use_cache = False  # a leaf that fills a cache cannot be split
        with contextlib.suppress(Exception):
            other = traced_on(model, inputs, dtype)
            if not is_left(other):
                return other, _both(changed, "use_cache=False")
    if text := known_text(config, inputs) if is_left(found) else {}:
        with contextlib.suppress(Exception):  # what was traced before stays
            other = traced_on(model, inputs | text, dtype)
            if not is_left(other):
                return other, _both(changed, "input_ids known")
    if is_left(found) and drops_layers(config):
        return traced_on(model.eval(), inputs, dtype), _both(changed, EVAL)
    return found, changed


def _both(*changes: str) -> str:
    return ", ".join(filter(None, changes))


def traced_on(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> Traced:
    traced = trace(model, inputs, parameter_dtype=dtype, unsupported="leaf")
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
