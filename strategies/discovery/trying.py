"""Discovery of a rule for one call: from the cache of earlier results, or by trials on tiny tensors."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import fx

from autopar.arguments.environment import is_on
from autopar.graph import output_tensors
from autopar.strategies.arguments import qualified_name
from autopar.strategies.discovery import cache
from autopar.strategies.discovery.apart import Died, search_apart
from autopar.strategies.discovery.search import find_rule, holds
from autopar.strategies.discovery.tiny import NotTiny, Tiny, describe, shrinking_of, tiny

_NUMBERS = 16  # elements that each output has at least, over all draws of its inputs at one shape

_known: dict[str, Found] = {}  # results of this process, whose rules are tested already


class Found(NamedTuple):
    """A rule, or why there is none."""

    rule: str | None
    why: str = ""


def discover(node: fx.Node) -> Found:
    """The rule of the node's call, found by running the op; a rule of an earlier process is tested again before use.

    The op runs on the CPU, on tensors of a few thousand elements, in float64 or float32. No rule is found for ops
    whose results are random, whose shapes depend on data, that write into their inputs, or that do not run on the CPU.
    """
    if not is_on("AUTOPAR_DISCOVERY"):
        return Found(None, "discovery is off (AUTOPAR_DISCOVERY=0)")
    if node.op == "call_module":
        return Found(None, "modules that are kept whole are not tried")
    key = f"{qualified_name(node)} {describe(node)}"
    if key not in _known:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            _known[key] = _discovered(node, key)
    return _known[key]


def _discovered(node: fx.Node, key: str) -> Found:
    cached = cache.look_up(key)
    if cached is not None and "rule" not in cached:
        return Found(None, cached.get("why", ""))
    try:
        tinies = trials(node)
    except NotTiny as error:
        outcome = Found(None, str(error))
    else:
        if cached is not None and holds(cached["rule"], tinies):
            return Found(cached["rule"])
        try:
            rule = search_apart(lambda text: holds(text, tinies), lambda trial: find_rule(tinies[0], trial))
            outcome = Found(rule, "" if rule else "no way to split it was found by running it on small tensors")
        except Died as error:
            outcome = Found(None, str(error))
    cache.keep(key, cache.Entry(why=outcome.why) if outcome.rule is None else cache.Entry(rule=outcome.rule))
    return outcome


def trials(node: fx.Node) -> list[Tiny]:
    """The op at two shapes, each with two random draws of its inputs, or more if its outputs have few elements; raises
    NotTiny if it cannot be tried.

    With few elements a wrong rule may hold by chance: the one element that an op picks out of two is their maximum in
    every other draw.
    """
    shrinking = shrinking_of(node)
    two = [tiny(node, shrinking, ways=2, turn=0, seed=seed) for seed in (1, 2)]
    fewest = min((t.numel() for t in output_tensors(two[0].node) if t.numel()), default=_NUMBERS)
    seeds = range(5, 3 + math.ceil(_NUMBERS / fewest))
    for seed in seeds:
        with suppress(Exception):  # the op may refuse some of the drawn numbers, such as a quantile beyond 1
            two.append(tiny(node, shrinking, ways=2, turn=0, seed=seed))
    try:
        three = [tiny(node, shrinking, ways=3, turn=3, seed=seed) for seed in (3, 4)]
    except Exception:  # the op accepts only certain sizes, so that one shape has to do
        three = []
    return [*two, *three]
