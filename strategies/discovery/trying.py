"""How an op without a rule may be split: tried on tiny tensors, or remembered from when that was done."""

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

_NUMBERS = 16  # of an output, at least, in the draws at one shape

_known: dict[str, Found] = {}  # in this process: its rules have been run


class Found(NamedTuple):
    """A rule, or why there is none."""

    rule: str | None
    why: str = ""


def discover(node: fx.Node) -> Found:
    """The rule of the node's call, found by running it; also those of earlier processes are run before they are used.

    The op runs on the CPU, on tensors of a few thousand elements, in float64 or float32. No rule is found for ops
    whose results are random or whose shapes depend on data, that write into their inputs, or that do not run there.
    """
    if not is_on("AUTOPAR_DISCOVERY"):
        return Found(None, "discovery is off (AUTOPAR_DISCOVERY=0)")
    if node.op == "call_module":
        return Found(None, "modules that are kept whole are not tried")
    key = f"{qualified_name(node)} {describe(node)}"
    if key not in _known:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            _known[key] = _found(node, key)
    return _known[key]


def _found(node: fx.Node, key: str) -> Found:
    kept = cache.look_up(key)
    if kept is not None and "rule" not in kept:
        return Found(None, kept.get("why", ""))
    try:
        tinies = trials(node)
    except NotTiny as error:
        found = Found(None, str(error))
    else:
        if kept is not None and holds(kept["rule"], tinies):
            return Found(kept["rule"])
        try:
            rule = search_apart(lambda text: holds(text, tinies), lambda trial: find_rule(tinies[0], trial))
            found = Found(rule, "" if rule else "no way to split it was found by running it on small tensors")
        except Died as error:
            found = Found(None, str(error))
    cache.keep(key, cache.Entry(why=found.why) if found.rule is None else cache.Entry(rule=found.rule))
    return found


def trials(node: fx.Node) -> list[Tiny]:
    """The op at two shapes, each with two draws of its inputs, and more where few numbers come of each; NotTiny where
    it cannot be tried.

    One number is right by chance now and then: a sample of two points is the larger of them every other time.
    """
    shrinking = shrinking_of(node)
    two = [tiny(node, shrinking, ways=2, turn=0, seed=seed) for seed in (1, 2)]
    fewest = min((t.numel() for t in output_tensors(two[0].node) if t.numel()), default=_NUMBERS)
    more = range(5, 3 + math.ceil(_NUMBERS / fewest))
    for seed in more:
        with suppress(Exception):  # it may refuse some numbers that are drawn, as a quantile beyond 1
            two.append(tiny(node, shrinking, ways=2, turn=0, seed=seed))
    try:
        three = [tiny(node, shrinking, ways=3, turn=3, seed=seed) for seed in (3, 4)]
    except Exception:  # it takes only certain sizes: what is found holds for those
        three = []
    return [*two, *three]
