"""Binds a rule to the shapes of a call: which factors there are, how long each is, and where each tensor has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.strategies.rule import Dim, Dots, Note, Operand, ShardingRule, Term

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factor:
    """One index of an op. `splittable`: neither marked `!` nor of length one; `alone`: it shares no dim with another
    factor that is longer than one."""

    name: str
    size: int
    splittable: bool
    note: Note
    alone: bool

    def splits_at(self, outer: int) -> bool:
        """Whether a digit with this `outer` may be split: in a `plain` factor only the first, in others any."""
        return self.splittable and self.size % outer == 0 and (outer == 1 or "plain" not in self.note.words)


@dataclass(frozen=True)
class Spot:
    """Where a factor lies in a tensor: in dim `dim`, with the factors before it multiplying to `outer`."""

    dim: int
    outer: int


@dataclass(frozen=True)
class Bound:
    """A rule bound to shapes. `spots[t][f]` is where factor f lies in tensor t (inputs, then outputs), or None."""

    rule: ShardingRule
    factors: tuple[Factor, ...]
    spots: tuple[tuple[Spot | None, ...], ...]
    inputs: int

    @property
    def operation(self) -> Note:
        """The note on the op as a whole."""
        return self.rule.note("")


def bind(rule: ShardingRule, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Bound:
    """Match the operands with the tensors' shapes; RuleError if they do not fit.

    A dim of length one whose factor is longer is broadcast: this tensor does not have the factor.

    >>> bound = bind(ShardingRule.parse("b s (c=3! h e) -> b s c! h e"), [(2, 5, 24)], [(2, 5, 3, 4, 2)])
    >>> [(f.name, f.size, spot.dim, spot.outer) for f, spot in zip(bound.factors, bound.spots[0])][2:]
    [('c', 3, 2, 1), ('h', 4, 2, 3), ('e', 2, 2, 12)]
    """
    matched = _match(rule.inputs, inputs, rule, "inputs") + _match(rule.outputs, outputs, rule, "outputs")
    shapes = [*inputs, *outputs]
    dots = [len(s) - len(o.dims) + 1 for o, s in zip(matched, shapes, strict=True) if o.dots is not None]
    tensors = [_expand(o, s, max(dots, default=0), rule) for o, s in zip(matched, shapes, strict=True)]
    sizes = _sizes(tensors, shapes, rule)
    names = list(dict.fromkeys(t.name for dims in tensors for dim in dims for t in dim if t.name != "_"))
    fixed = {t.name for dims in tensors for dim in dims for t in dim if t.fixed}
    notes = [rule.note("..." if n.startswith("...") else n) for n in names]
    shares = {
        term.name
        for dims, shape in zip(tensors, shapes, strict=True)
        for terms, length in zip(dims, shape, strict=True)
        for term in terms
        if len(terms) > 1 and sizes[term.name] != length and not _broadcasts(terms, length, sizes)
    }
    factors = tuple(
        Factor(n, sizes[n], n not in fixed and sizes[n] > 1, note, n not in shares)
        for n, note in zip(names, notes, strict=True)
    )
    spots = tuple(_spots(dims, shape, names, sizes) for dims, shape in zip(tensors, shapes, strict=True))
    return Bound(rule, factors, spots, len(inputs))


def _match(operands: Sequence[Operand], shapes: Sequence[Shape], rule: ShardingRule, side: str) -> list[Operand]:
    """One operand for each tensor: optional operands are matched from the left as long as there are tensors."""
    spare = len(shapes) - sum(not o.kind for o in operands)
    matched: list[Operand] = []
    for operand in operands:
        if operand.kind == "?":
            take = min(1, spare)
        elif operand.kind == "*":
            after = operands[operands.index(operand) + 1 :]
            take = spare - min(sum(o.kind == "?" for o in after), max(spare - 1, 0))
        else:
            take = 1
        spare -= take if operand.kind else 0
        matched += [operand] * take
    if len(matched) != len(shapes):
        raise RuleError(f"rule '{rule}': the op has {len(shapes)} tensor {side}")
    return matched


def _expand(operand: Operand, shape: Shape, longest: int, rule: ShardingRule) -> list[tuple[Term, ...]]:
    """The operand's dims with the ellipsis expanded into factors ...0, ...1 and so on, aligned on the right."""
    count = len(shape) - len(operand.dims) + (operand.dots is not None)
    if count < 0 or (operand.dots is None and count > 0):
        raise RuleError(f"rule '{rule}': '{operand}' does not fit a tensor of shape {shape}")
    dims: list[tuple[Term, ...]] = []
    for dim in operand.dims:
        if isinstance(dim, Dots):
            dims += [(Term(f"...{longest - count + k}", dim.fixed),) for k in range(count)]
        else:
            dims.append(dim.terms)
    return dims


def _sizes(tensors: Sequence[list[tuple[Term, ...]]], shapes: Sequence[Shape], rule: ShardingRule) -> dict[str, int]:
    """The length of each factor: stated in the rule, or that of a dim which it fills, or what the other factors of a
    merged dim leave."""
    sizes: dict[str, int] = {}

    def learn(name: str, size: int) -> None:
        known_size = sizes.get(name, 1)
        if name != "_" and size != 1 and known_size not in (1, size):
            raise RuleError(f"rule '{rule}': factor '{name}' is {known_size} and {size} long in shapes {list(shapes)}")
        sizes[name] = max(size, known_size)

    merged = []
    for dims, shape in zip(tensors, shapes, strict=True):
        for terms, length in zip(dims, shape, strict=True):
            for term in terms:
                if term.size is not None:
                    learn(term.name, term.size)
            if len(terms) == 1:
                learn(terms[0].name, length)
            elif terms:
                merged.append((terms, length))
            elif length != 1:
                raise RuleError(f"rule '{rule}': a dim written 1 is {length} long in shapes {list(shapes)}")
    while merged:
        waiting = []
        for terms, length in merged:
            unknown = [t.name for t in terms if t.name == "_" or t.name not in sizes]
            known_length = math.prod(sizes[t.name] for t in terms if t.name not in unknown)
            if not unknown and known_length != length and not _broadcasts(terms, length, sizes):
                raise RuleError(
                    f"rule '{rule}': '{Dim(terms)}' is {known_length} long by its factors, {length} by its shape"
                )
            if len(unknown) == 1 and length % known_length == 0:
                learn(unknown[0], length // known_length)
            elif unknown:
                waiting.append((terms, length))
        if len(waiting) == len(merged):
            dim = Dim(waiting[0][0])
            raise RuleError(f"rule '{rule}': the shapes {list(shapes)} do not tell the factors of '{dim}'")
        merged = waiting
    return sizes


def _broadcasts(terms: tuple[Term, ...], length: int, sizes: dict[str, int]) -> bool:
    """Whether a dim of length one stands for longer factors, as the heads' dim of a mask that all heads share does."""
    return length == 1 and any(sizes[t.name] > 1 for t in terms if t.name != "_")


def _spots(
    dims: Sequence[tuple[Term, ...]], shape: Shape, names: Sequence[str], sizes: dict[str, int]
) -> tuple[Spot | None, ...]:
    """Where one tensor has each of the factors `names`."""
    spots: dict[str, Spot] = {}
    for d, (terms, length) in enumerate(zip(dims, shape, strict=True)):
        if _broadcasts(terms, length, sizes):
            continue
        outer = 1
        others = math.prod(sizes[t.name] for t in terms if t.name != "_")
        private = max(1, length // others)  # the length of `_`; at least 1, for dims of length 0
        for term in terms:
            if len(terms) > 1 or sizes[term.name] == length:
                spots[term.name] = Spot(d, outer)
            outer *= sizes[term.name] if term.name != "_" else private
    return tuple(spots.get(name) for name in names)
