"""Traces a model of the zoo for planning: without leaves if possible, and with as few changes as possible."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from zoo_inputs import examples, known_text
from zoo_models import build
from zoo_worker import REAL_PARAMETERS, parts_of

from autopar.leaf_calls import LeafCall
from autopar.planning.leaf_splits import find_splits
from autopar.tracing import Traced, trace
from autopar.tracing.leaves.tensors import show_leaf_tensors

# The possible changes: float32 (some models create float32 tensors themselves); no cache (a leaf that fills a cache
# cannot be split); known tokens (in some models, control flow depends on the end of the sequence); eval mode (some drop
# random layers in training, some video models do not run in training); a model with data (some read their buffers).
FLOAT32, NO_CACHE, TEXT, EVAL = "float32", "use_cache=False", "input_ids known", "eval()"
WITH_DATA = "built on the CPU: it reads its buffers"


@dataclass(frozen=True)
class Found:
    model: nn.Module
    traced: Traced
    changed: str

    @property
    def precision(self) -> str:
        return "fp32" if FLOAT32 in self.changed else "bf16"

    @property
    def is_left(self) -> bool:
        """Whether the trace has a leaf that cannot be split, so that every rank runs all of it."""
        nodes = self.traced.graph.nodes
        return any(isinstance(node.target, LeafCall) and node.target.rule is None for node in nodes)


def whole_trace(family: str, name: str, model: nn.Module, limit: float, options: dict[str, Any]) -> Found:
    """The trace without leaves that needs the fewest changes.

    If there is none, leaves are allowed: the first trace whose leaves can be split; or, if there is none either or half
    of `limit` CPU seconds are over, the first trace.
    """
    config: Any = getattr(model, "config", None)

    def guesses() -> list[dict[str, Any]]:
        """Examples, made again for each attempt, because the session of a video model keeps state."""
        made = examples(family, model, options["batch"], options["length"])
        return [made] if isinstance(made, dict) else list(made)

    ways = [set(way) for way in _ways(config, guesses())]
    number = len(guesses())
    found: list[Found] = []
    errors: list[Exception] = []
    start = time.process_time()
    for unsupported, one in _stages(family, name, model):
        for way, n in itertools.product(ways, range(number)):
            if found and time.process_time() - start > limit / 2:
                return found[0]
            changed = way | {WITH_DATA} if one is not model else way
            try:
                traced = _traced(changed, one, guesses()[n], unsupported)
            except Exception as error:  # unsuitable examples raise anything; the first error is reported
                errors.append(error)
                continue
            found.append(Found(one, traced, ", ".join(sorted(changed))))
            if not found[-1].is_left:
                return found[-1]
    if not found:
        raise errors[0] if errors else ValueError("no example is made for this model")
    return found[0]


def _ways(config: Any, guesses: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """All sets of changes, smallest sets first."""
    possible = [FLOAT32]
    if any(getattr(part, "use_cache", False) for part in parts_of(config)):
        possible.append(NO_CACHE)
    if any(known_text(config, inputs) for inputs in guesses):
        possible.append(TEXT)
    possible.append(EVAL)
    for number in range(len(possible) + 1):
        yield from itertools.combinations(possible, number)


def _stages(family: str, name: str, model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """(value of `trace`'s option `unsupported`, model) for each attempt; a model with data is built only if needed."""
    models = [model]
    yield "error", model
    if sum(p.numel() for p in model.parameters()) < REAL_PARAMETERS:
        models.append(build(family, name, on_cpu=True)[0])
        yield "error", models[-1]
    yield from (("leaf", one) for one in models)


def _traced(way: set[str], model: nn.Module, inputs: dict[str, Any], unsupported: Any) -> Traced:
    """Trace the model with the changes in `way`."""
    config: Any = getattr(model, "config", None)
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
