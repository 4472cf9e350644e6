"""The search: finds by trial which dims of a tiny call's tensors are the same index.

A candidate says for each tensor which of its dims is a factor, or has it as the outer digit (`(a _)`) or the inner
digit (`(_ a)`) of a merged dim, and how outputs without the factor are joined. Candidates that shard most tensors are
tried first. One that holds occupies its places, so that later candidates that overlap with it are skipped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.graph import output_tensors
from autopar.strategies.arguments import letters
from autopar.strategies.bind import bind
from autopar.strategies.check import check
from autopar.strategies.discovery.apart import Try
from autopar.strategies.discovery.pieces import fits, is_telling
from autopar.strategies.discovery.tiny import Tiny
from autopar.strategies.rule import ShardingRule

_JOINS = ("", "whole idle", "mean", "max", "min")  # notes that are tried in this order; "" is a sum
_MOST_CANDIDATES = 2000  # for one call
_MOST_OF_ONE_SIZE = 600  # candidates for one factor size; beyond it, first merged dims are left out


class Held(NamedTuple):
    """Where a tensor has a factor: as a whole dim, or as a digit of a merged one."""

    dim: int
    part: Literal["whole", "outer", "inner"]


@dataclass(frozen=True)
class Candidate:
    """One factor: its place in each tensor (inputs, then outputs), and the note on how outputs without it are
    joined."""

    places: tuple[Held | None, ...]
    note: str = ""


def find_rule(first: Tiny, trial: Try) -> str | None:
    """The rule of the call, as text, made of all factors that `trial` confirms; None if there is no such factor."""
    inputs = len(first.tensors)
    ranks = [len(shape) for shape in first.shapes]
    factors: list[Candidate] = []
    for places in _candidates(first, inputs):
        if write([*factors, Candidate(places)], ranks, inputs) is None:
            continue  # its places are taken
        whole = all(place is not None for place in places[inputs:])
        for note in _JOINS[:1] if whole else _JOINS:
            text = write([Candidate(places, note)], ranks, inputs)
            if text is not None and trial(text):
                factors.append(Candidate(places, note))
                break
    while factors:
        text = write(factors, ranks, inputs)
        if text is not None and trial(text):
            return str(ShardingRule.parse(_with_linearity(text, first, trial)))
        factors.pop()  # all together fail: drop the last one, which shards least
    return None


def holds(text: str, tinies: Sequence[Tiny]) -> bool:
    """Whether the rule passes the executed check on all tiny calls, these calls are telling (`is_telling`), and at
    least the first of them can be split by it."""
    return is_telling(text, tinies) and all(_splits(text, call) > (0 if call is tinies[0] else -1) for call in tinies)


def _splits(text: str, call: Tiny) -> int:
    """How many strategies that split the call passed; -1 if one failed, be it by an error that the op raised."""
    inputs = len(call.tensors)
    try:
        bound = bind(ShardingRule.parse(text), call.shapes[:inputs], call.shapes[inputs:])
        if not fits(call, bound):
            return -1
        several = call.ways == 2 and len(bound.factors) > 1
        meshes = [(call.ways,), (call.ways, call.ways)] if several else [(call.ways,)]
        return sum(check(call.node, call.tensors, mesh, bound=bound, most=20) - 1 for mesh in meshes)
    except Exception:  # pieces of a wrong split may have shapes that the op refuses, with any kind of error
        return -1


def _candidates(call: Tiny, inputs: int) -> Iterator[tuple[Held | None, ...]]:
    """Candidates in the order in which they are tried: those that shard most outputs and then most tensors first, and
    among these, those with fewest merged dims."""
    candidates = set(itertools.islice(_all_places(call, inputs), _MOST_CANDIDATES))

    def rank(places: tuple[Held | None, ...]) -> tuple[int, int, int, str]:
        outside = sum(p is not None for p in places[inputs:])
        merged = sum(p is not None and p.part != "whole" for p in places)
        return (-outside, -sum(p is not None for p in places), merged, str(places))

    return iter(sorted(candidates, key=rank))


def _all_places(call: Tiny, inputs: int) -> Iterator[tuple[Held | None, ...]]:
    """For every size: all choices of one place or none in each tensor, such that some input has the factor, and some
    tensor has it as a whole dim."""
    for size in sorted({n for shape in call.shapes for n in shape if n > 1}, reverse=True):
        options: list[list[Held | None]] = []
        for shape in call.shapes:
            of_tensor: list[Held | None] = [None]
            for dim, length in enumerate(shape):
                if length == size:
                    of_tensor.append(Held(dim, "whole"))
                elif length and length % size == 0:
                    of_tensor += [Held(dim, "outer"), Held(dim, "inner")]
            options.append(of_tensor)
        if math.prod(map(len, options)) > _MOST_OF_ONE_SIZE:
            options = [[p for p in of_tensor if p is None or p.part == "whole"] for of_tensor in options]
        for places in itertools.islice(itertools.product(*options), _MOST_OF_ONE_SIZE):
            places_of_factor = [p for p in places if p is not None]
            if any(places[:inputs]) and any(p.part == "whole" for p in places_of_factor):
                yield places


def write(factors: Sequence[Candidate], ranks: Sequence[int], inputs: int) -> str | None:
    """The rule with these factors as text; None if two of them need the same place.

    >>> whole, outer = Held(0, "whole"), Held(0, "outer")
    >>> write([Candidate((outer, whole)), Candidate((Held(1, "whole"), None), "max")], [2, 1], 1)
    '(a _) b -> a | b max'
    """
    names = letters(len(factors))
    tensors: list[str] = []
    for t, rank in enumerate(ranks):
        dims: list[str] = []
        for dim in range(rank):
            claims = [(f.places[t], n) for f, n in zip(factors, names, strict=True)]
            name_of = {place.part: name for place, name in claims if place is not None and place.dim == dim}
            claimed = sum(place is not None and place.dim == dim for place, _ in claims)
            if len(name_of) < claimed or ("whole" in name_of and claimed > 1):
                return None
            if "whole" in name_of:
                dims.append(name_of["whole"])
            elif name_of:
                terms = " ".join(filter(None, [name_of.get("outer"), "_", name_of.get("inner")]))
                dims.append(f"({terms})")
            else:
                dims.append("_")
        tensors.append(" ".join(dims))
    notes = ", ".join(f"{name} {f.note}" for f, name in zip(factors, names, strict=True) if f.note)
    return f"{', '.join(tensors[:inputs])} -> {', '.join(tensors[inputs:])}{' | ' + notes if notes else ''}"


def _with_linearity(text: str, first: Tiny, trial: Try) -> str:
    """The rule with the strongest note on linearity that `trial` confirms, so that partial values can pass."""
    if not all(tensor.is_floating_point() for tensor in output_tensors(first.node)):
        return text
    floating = [i for i, tensor in enumerate(first.tensors) if tensor.is_floating_point()]
    linear_in = [f"linear:{i}" for i in floating]
    notes = [["linear"]] if len(floating) == len(first.tensors) else []
    notes += [linear_in] if len(floating) > 1 else []
    notes += [[word] for word in linear_in]
    for words in notes:
        extended = f"{text}{', ' if '|' in text else ' | '}{' '.join(words)}"
        if trial(extended):
            return extended
    return text
