"""Traces the models named on standard input, one per line, and answers each with a line of JSON; see trace_zoo.py.

One process serves many models, since importing torch and transformers takes seconds. A timer limits the CPU seconds
of each attempt, the kernel limits memory; hangs outside Python are left to the caller.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from zoo_inputs import examples, known_text
from zoo_models import NotBuilt, build, told
from zoo_peak import peak_bytes, restart_peak
from zoo_places import place

from autopar.leaf_calls import LeafCall
from autopar.tracing import ArgumentError, TraceError, trace
from autopar.tracing.contents.known import Known
from autopar.tracing.huggingface import prepared
from autopar.tracing.libraries import DataFreePaths

_NO_RUN = ("no inputs", "does not run")
_DROPPED = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
REAL_PARAMETERS = 500_000_000  # largest model that is built with data
_SHORT_LENGTHS = (16,)
_CAUGHT_SECONDS = 15.0  # until the timer fires again: not while a trace restores torch, which takes seconds
_EAGER_SECONDS = 10.0  # loops over time are slow on meta too


class OutOfTime(BaseException):
    """The time is over. Not an Exception, because model code may catch these."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime once the body has used `seconds` of CPU time; again later, if some code has caught it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, _CAUGHT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def examine(family: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build one architecture and trace it; its record."""
    record: dict[str, Any] = {"family": family, "name": name}
    restart_peak()
    limit = float(options["cpu_seconds"])
    start = time.process_time()
    try:
        with cpu_limit(limit):
            model, record["built_on"] = build(family, name)
    except (Exception, OutOfTime) as error:
        return record | {"status": "not built", **failure(error, limit)}
    record["build_seconds"] = round(time.process_time() - start, 3)
    record["parameters"] = sum(p.numel() for p in model.parameters())
    if not options["train"]:
        model.eval()
    if type(model).forward is nn.Module.forward:
        return record | {"status": "does not run", "why": "it has no forward of its own"}
    config: Any = getattr(model, "config", None)
    best: dict[str, Any] = {}
    try:
        for inputs in examples(family, model, options["batch"], options["length"]):
            trace = with_or_without_cache(model, config, inputs, limit)
            # A model that does not run with one guess, and fails to be traced with a further one, does not run.
            if not (best.get("status") == "does not run" and trace["status"] == "failed"):
                best = better(best, trace) if best else trace
            if best["status"] not in _NO_RUN:
                break
    except Exception as error:  # reading a config may raise anything
        if not best:
            return record | {"status": "no inputs", **failure(error, limit)}
    record |= best
    if record["status"] == "failed" or (record["status"] == "leaves" and "Unknown" in str(record["leaves"])):
        text = known_text(config, inputs)  # some depend on end or padding tokens
        if text:
            record = better(record, traced(model, inputs | text, limit) | {"changed": "input_ids known"})
    unsure = record["status"] == "failed" or "Unknown" in str(record.get("leaves")) or is_one_node(record)
    if unsure and record["parameters"] < REAL_PARAMETERS:
        record = for_real(record, family, name, inputs, limit)
    if record["status"] == "does not run" and options["train"]:
        again = traced(model.eval(), inputs, limit) | {"changed": "eval(): it does not run in training"}
        record = better(record, again) if again["status"] in ("whole", "leaves") else record
    if record["status"] in ("leaves", "failed") and drops_layers(config):
        record = better(record, traced(model.eval(), inputs, limit) | {"changed": "eval(), since it drops layers"})
    if "passes" in str(record.get("leaves")):
        record["unrolled"] = shorter(family, model, options)
    record["peak_bytes"] = peak_bytes()
    return record


def with_or_without_cache(model: nn.Module, config: Any, inputs: dict[str, Any], limit: float) -> dict[str, Any]:
    """The record of a trace on these inputs; where it fails and the config asks for a cache, of the better of two."""
    record = {"inputs": {key: shape(value) for key, value in inputs.items()}} | traced(model, inputs, limit)
    caching = [part for part in parts_of(config) if getattr(part, "use_cache", False)]
    if (record["status"] in (*_NO_RUN, "failed") or is_one_node(record)) and caching:
        for part in caching:
            part.use_cache = False  # training needs no cache
        record = better(record, traced(model, inputs, limit) | {"changed": "use_cache=False"})
        for part in caching:
            part.use_cache = True
    return record


def is_one_node(record: dict[str, Any]) -> bool:
    """Whether the whole model became a single leaf."""
    return any(kind == "forward()" for _, kind, _ in record.get("leaves", ()))


def shorter(family: str, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Figures of a trace of shorter sequences, for a model whose loops over time make the graph too long."""
    for length in _SHORT_LENGTHS:
        for inputs in examples(family, model, options["batch"], length):
            found = traced(model, inputs, float(options["cpu_seconds"]))
            if found["status"] == "whole":
                return {"tokens": length, "nodes": found["nodes"], "seconds": found["seconds"]}
    return {}


def for_real(record: dict[str, Any], family: str, name: str, inputs: dict[str, Any], limit: float) -> dict[str, Any]:
    """The record after a trace of the model built on the CPU, with data: some models read values of buffers.

    If a real call raises the same error as the trace, the status becomes "does not run".
    """
    try:
        with cpu_limit(limit):
            model = build(family, name, on_cpu=True)[0]
            found = traced(model, inputs, limit) | {"changed": "built on the CPU: it reads its buffers"}
            if found["status"] != "failed":
                return better(record, found)
            real = pytree.tree_map(filled, inputs)
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                model(**real)
    except (Exception, OutOfTime) as error:
        if told(error) == record.get("why"):
            return record | {"status": "does not run", "eager": f"on the CPU: {told(error)}"}
    return record


def filled(value: Any) -> Any:
    """A tensor with data in place of an example."""
    if isinstance(value, Known):
        return value.tensor
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return torch.ones(value.shape, dtype=value.dtype)
    return value


def drops_layers(config: Any) -> bool:
    """Whether training skips random layers: data-dependent control flow that no graph can hold."""
    return any(getattr(part, name, 0.0) for part in parts_of(config) for name in _DROPPED)


def parts_of(config: Any) -> list[Any]:
    """A config and its sub-configs."""
    return [config, *(value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "to_dict"))]


def better(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The record of the more successful trace."""
    order = (*_NO_RUN, "failed", "leaves", "whole")
    ranks = [(order.index(r["status"]), r.get("nodes", 0) if r["status"] == "leaves" else 0) for r in (first, second)]
    if ranks[1] <= ranks[0]:
        return first
    kept = {key: value for key, value in first.items() if key not in ("why", "place", "eager", "leaves", "nodes")}
    return kept | second


def traced(model: nn.Module, inputs: dict[str, Any], limit: float) -> dict[str, Any]:
    """Trace once: the status, with nodes, seconds and leaves, or with the reason of the failure."""
    record: dict[str, Any] = {}
    start = time.process_time()
    try:
        with cpu_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = trace(model, copy.deepcopy(inputs), unsupported="leaf")  # some models write into a session
    except (Exception, OutOfTime) as error:
        record |= {"seconds": round(time.process_time() - start, 3), "status": "failed", **failure(error, limit)}
        if not isinstance(error, OutOfTime):
            answers = [eager(model, inputs, min(limit, _EAGER_SECONDS), place) for place in ("cpu", "meta")]
            mine, cause = told(error), error.__cause__
            while type(cause) is TraceError and cause.__cause__ is not None:
                cause = cause.__cause__
            if type(error) is TraceError and cause is not None and not isinstance(cause, NotImplementedError):
                mine = told(cause)  # the model's own error, when run as one node
            record["eager"] = mine if mine in answers else answers[0]
            if record["eager"] == mine and "meta tensor" not in mine:
                record["status"] = "does not run"
            elif isinstance(error, ArgumentError):
                record["status"] = "no inputs"
        return record
    record["seconds"] = round(time.process_time() - start, 3)
    record["nodes"] = len(found.graph.nodes)
    why = {path_of(model, module): text for module, text in found.failures.items()}
    leaves = [str(node.target) for node in found.graph.nodes if node.op == "call_module"]
    record["leaves"] = [[leaf, type(found.attribute(leaf)).__name__, why.get(leaf, "")[:300]] for leaf in leaves]
    functions = [node.target for node in found.graph.nodes if isinstance(node.target, LeafCall)]
    record["leaves"] += [[leaf.path, f"{leaf.path}()", leaf.reason[:300]] for leaf in functions]
    record["status"] = "leaves" if record["leaves"] else "whole"
    return record


def eager(model: nn.Module, inputs: dict[str, Any], limit: float, known_on: str) -> str:
    """Run the model itself with these inputs on the meta device: "ok", or its error.

    If it raises the same error as the trace, the config or the inputs are at fault. `known_on`: the device of known
    inputs, "cpu" (with data) or "meta" (for models that mix them with others). A model that creates tensors on the CPU
    runs again with meta as default device, and one that needs data runs again on its library's data-free path.
    """
    bare = pytree.tree_map_only(Known, lambda value: value.tensor.to(known_on), inputs)
    answer = ""
    for data_free, makes in ((False, None), (False, "meta"), (True, None)):
        try:
            with (
                cpu_limit(limit), warnings.catch_warnings(), prepared(model), DataFreePaths(data_free).offered(),
                torch.device(makes) if makes else contextlib.nullcontext(),
            ):  # fmt: skip
                warnings.simplefilter("ignore")
                model(**copy.deepcopy(bare))
            return "ok"
        except (Exception, OutOfTime) as error:
            answer = told(error)
            if not any(words in answer for words in ("meta tensor", "on device", "same device")):
                break
    return answer


def failure(error: BaseException, limit: float) -> dict[str, str]:
    """The fields of an error: what it says, and the place in foreign code where it was raised."""
    if isinstance(error, OutOfTime):
        return {"why": f"more than {limit:g} CPU seconds", "place": place(error)}
    if isinstance(error, NotBuilt):
        return {"why": str(error), "place": place(error.__cause__ or error)}
    return {"why": told(error), "place": place(error)}


def path_of(model: nn.Module, module: nn.Module) -> str:
    return next((path for path, other in model.named_modules() if other is module), type(module).__name__)


def shape(value: Any) -> Any:
    """An example as a record shows it: the shape of a tensor, else the type."""
    tensor = getattr(value, "tensor", value)
    if isinstance(tensor, torch.Tensor):
        return list(tensor.shape)
    if isinstance(value, (list, tuple)):
        return [shape(entry) for entry in value]
    return type(value).__name__


def serve(examine: Callable[[str, str, dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each line of standard input with what `examine(family, name, options)` says."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (options["memory_bytes"], options["memory_bytes"]))
    for line in sys.stdin:
        family, name = json.loads(line)
        answers.write(json.dumps(examine(family, name, options)) + "\n")


if __name__ == "__main__":
    serve(examine)
