"""The trace of a model of the zoo for a plan: of the whole model, with as little changed for it as possible."""

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

# What may be changed for a trace: the dtype (some models make float32 tensors themselves), a cache (a leaf that fills
# one cannot be split), text whose tokens are known (what ends a sequence decides in some), layers left out at random
# (and some videos do not run in training), and a model made with data (some read their buffers).
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
        """Whether a part of the model runs whole on every rank since it could not be traced."""
        nodes = self.traced.graph.nodes
        return any(isinstance(node.target, LeafCall) and node.target.rule is None for node in nodes)


def whole_trace(family: str, name: str, model: nn.Module, limit: float, options: dict[str, Any]) -> Found:
    """The first trace without leaves, with the fewest changes.

    Where there is none, leaves are allowed, and it is the first one whose leaves can be split, or the first of all
    once half of `limit` CPU seconds are over.
    """
    config: Any = getattr(model, "config", None)

    def guesses() -> list[dict[str, Any]]:
        """Made anew for each attempt: a session of a video model keeps what it has seen."""
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
            except Exception as error:  # whatever a model does with examples that do not suit it; the first is told
                errors.append(error)
                continue
            found.append(Found(one, traced, ", ".join(sorted(changed))))
            if not found[-1].is_left:
                return found[-1]
    if not found:
        raise errors[0] if errors else ValueError("no example is made for this model")
    return found[0]


def _ways(config: Any, guesses: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Sets of changes, small ones first."""
    possible = [FLOAT32]
    if any(getattr(part, "use_cache", False) for part in parts_of(config)):
        possible.append(NO_CACHE)
    if any(known_text(config, inputs) for inputs in guesses):
        possible.append(TEXT)
    possible.append(EVAL)
    for number in range(len(possible) + 1):
        yield from itertools.combinations(possible, number)


def _stages(family: str, name: str, model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """What to do about what is not supported, and the model; one with data is built when it comes to that."""
    models = [model]
    yield "error", model
    if sum(p.numel() for p in model.parameters()) < REAL_PARAMETERS:
        models.append(build(family, name, on_cpu=True)[0])
        yield "error", models[-1]
    yield from (("leaf", one) for one in models)


def _traced(way: set[str], model: nn.Module, inputs: dict[str, Any], unsupported: Any) -> Traced:
    """The trace with these changes."""
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
