"""The rule language: one line of text says which dims of an op's tensors are the same index, called a factor.

::

    linear             "... i, o i -> ... o"
    softmax            "... k! -> ... k!"                    k! is never sharded
    fused qkv          "b s (c h e) -> b s c! h e"           a merged dim; its factors from outermost to innermost
    keepdim            "b k -> b 1 | linear"                 1: a dim of length one, never sharded
    chunk              "b (c=3! k) -> b k, b k, b k"         a size that does not follow from the shapes
    layer_norm         "... d!, [d!]?, [d!]? -> ... d!"      optional operands
    cat                "[b _]* -> b _"                       a list of operands; _ is a dim that no other tensor shares
    embedding          "..., v d -> ... d | v @embedding_vocab ragged idle"
    mul                "..., ... -> ... | linear:0, linear:1"
    experts            "t d!, t k!, t k!, e f d! -> t d! | e @experts, t+e @experts_exchanged"

After the bar, separated by commas, come *notes*. A note begins with a factor (or `...`: every factor of the ellipsis;
or `t+e`: two factors that one axis shards at once and that no tensor has together; or nothing: the op as a whole),
followed by words:

==============  ====================================================================================
sum mean max    how the ranks' values of an output without the factor are joined (default sum); also `min`. `max` and
                `min` only without a gradient, which equal elements of several ranks would have to share
@name           local code that runs when the factor is sharded (no factor: when anything is)
always          (op) its local code runs even if nothing is sharded: the op draws random numbers
whole           the local code, or the op itself, yields the final output: replicated, not partial
plain           the factor can only be cut into contiguous pieces
ragged          the factor may be cut into unequal pieces, in adjoining ops too: see `strategies.ragged`
idle            sharding the factor saves no work
double          one of the devices does up to twice its share of the work, over however many axes
linear          (op) linear in all floating inputs together: partial values pass through it
linear:1        (op) linear in input 1 while the others are fixed; `linear:1+2`: in inputs 1 and 2 together
affine          (op) as `linear`, but for partial gradients only
==============  ====================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import RuleError
from autopar.layout import Join

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*|_")
_TOKEN = re.compile(r"\s*(\.\.\.!?|\(|\)|1(?![0-9])|(?:[A-Za-z][A-Za-z0-9]*|_)(?:=[0-9]+)?!?)")
Words = Literal["always", "whole", "plain", "ragged", "idle", "double", "linear", "affine"]


@dataclass(frozen=True)
class Term:
    """One occurrence of a factor in a dim: its name, whether it is marked `!` (never split), and its size if stated."""

    name: str
    fixed: bool = False
    size: int | None = None

    def __str__(self) -> str:
        size = "" if self.size is None else f"={self.size}"
        mark = "!" if self.fixed and self.name != "_" else ""
        return f"{self.name}{size}{mark}"


@dataclass(frozen=True)
class Dim:
    """One dim: its factors from outermost to innermost; none for a dim of length one."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        if len(self.terms) == 1:
            return str(self.terms[0])
        return f"({' '.join(map(str, self.terms))})" if self.terms else "1"


@dataclass(frozen=True)
class Dots:
    """The dims that an ellipsis stands for."""

    fixed: bool = False

    def __str__(self) -> str:
        return "...!" if self.fixed else "..."


@dataclass(frozen=True)
class Operand:
    """The dims of one tensor, of an optional one, or of every tensor of a list."""

    dims: tuple[Dim | Dots, ...]
    kind: Literal["", "?", "*"] = ""

    def __str__(self) -> str:
        inside = " ".join(map(str, self.dims))
        return f"[{inside}]{self.kind}" if self.kind else inside

    @property
    def dots(self) -> int | None:
        """The position of the ellipsis."""
        return next((i for i, dim in enumerate(self.dims) if isinstance(dim, Dots)), None)


@dataclass(frozen=True)
class Note:
    """What is special about a factor, or ("") about the op: see the table in the module's docstring."""

    factor: str
    join: Join = "sum"
    local: str = ""
    words: frozenset[Words] = frozenset()
    operands: tuple[tuple[int, ...], ...] = ()  # of `linear:1+2`

    @property
    def pair(self) -> tuple[str, ...]:
        """The two factors of a note like `t+e`; () for any other note."""
        return tuple(self.factor.split("+")) if "+" in self.factor else ()

    def __str__(self) -> str:
        parts = [self.factor] if self.factor else []
        parts += [self.join] if self.join != "sum" else []
        parts += [f"@{self.local}"] if self.local else []
        parts += sorted(self.words) + [f"linear:{'+'.join(map(str, group))}" for group in self.operands]
        return " ".join(parts)


@dataclass(frozen=True)
class ShardingRule:
    """A rule; `str(rule)` is text that parses to an equal rule.

    >>> rule = ShardingRule.parse("... i, o i -> ... o")
    >>> str(rule), ShardingRule.parse(str(rule)) == rule
    ('... i, o i -> ... o', True)
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    notes: tuple[Note, ...] = ()

    def __str__(self) -> str:
        sides = [", ".join(map(str, side)) for side in (self.inputs, self.outputs)]
        notes = f" | {', '.join(map(str, self.notes))}" if self.notes else ""
        return f"{sides[0]} ->{' ' if sides[1] else ''}{sides[1]}{notes}".lstrip()

    @staticmethod
    def parse(text: str) -> ShardingRule:
        """The rule that `text` states; RuleError says what is wrong with it."""
        body, bar, notes = text.partition("|")
        sides = body.split("->")
        if len(sides) != 2:
            raise RuleError(f"rule '{text}': write 'inputs -> outputs', with one arrow")
        inputs, outputs = (_operands(side, text) for side in sides)
        rule = ShardingRule(inputs, outputs, _notes(notes, text) if bar else ())
        _check(rule, text)
        return rule

    def note(self, factor: str) -> Note:
        """The note on a factor; `""` for the op."""
        return next((n for n in self.notes if n.factor == factor), Note(factor))


def _operands(side: str, rule: str) -> tuple[Operand, ...]:
    return tuple(_operand(part, rule) for part in side.split(",")) if side.strip() else (Operand(()),)


def _operand(text: str, rule: str) -> Operand:
    """Parse one operand; `rule` is the whole text, for messages."""
    text, kind = text.strip(), ""
    if text.startswith("["):
        if text[-2:] not in ("]?", "]*"):
            raise RuleError(f"rule '{rule}': '{text}' must end in ]? (optional) or ]* (list)")
        text, kind = text[1:-2], text[-1]
    dims: list[Dim | Dots] = []
    group: list[Term] | None = None
    position = 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise RuleError(f"rule '{rule}': cannot read '{text[position:].strip()}'")
        token, position = match.group(1), match.end()
        if token == "(":
            if group is not None:
                raise RuleError(f"rule '{rule}': parentheses do not nest")
            group = []
        elif token == ")":
            if group is None:
                raise RuleError(f"rule '{rule}': ')' without '('")
            dims.append(Dim(tuple(group)))
            group = None
        elif token.startswith("..."):
            if group is not None:
                raise RuleError(f"rule '{rule}': an ellipsis cannot be part of a merged dim")
            dims.append(Dots(token.endswith("!")))
        elif token == "1":
            if group is not None:
                raise RuleError(f"rule '{rule}': 1 cannot be part of a merged dim")
            dims.append(Dim(()))
        elif group is not None:
            group.append(_term(token))
        else:
            dims.append(Dim((_term(token),)))
    if group is not None:
        raise RuleError(f"rule '{rule}': '(' is not closed")
    if sum(isinstance(dim, Dots) for dim in dims) > 1:
        raise RuleError(f"rule '{rule}': an operand has at most one ellipsis")
    return Operand(tuple(dims), kind)  # type: ignore[arg-type]


def _term(token: str) -> Term:
    name, _, size = token.rstrip("!").partition("=")
    return Term(name, token.endswith("!") or name == "_", int(size) if size else None)


def _notes(text: str, rule: str) -> tuple[Note, ...]:
    """Parse the notes after the bar."""
    notes = []
    for part in text.split(","):
        words = part.split()
        if not words:
            raise RuleError(f"rule '{rule}': an empty note after '|'")
        factor = "" if _is_word(words[0]) else words.pop(0)
        join, local, flags, operands = "sum", "", set(), []
        for word in words:
            if word in get_args(Join):
                join = word
            elif word in get_args(Words):
                flags.add(word)
            elif word.startswith("@") and len(word) > 1:
                local = word[1:]
            elif re.fullmatch(r"linear:[0-9]+(\+[0-9]+)*", word):
                operands.append(tuple(map(int, word[7:].split("+"))))
            else:
                words_allowed = ", ".join(get_args(Join) + get_args(Words))
                raise RuleError(f"rule '{rule}': '{word}' is no @name, no linear:0 and none of {words_allowed}")
        notes.append(Note(factor, join, local, frozenset(flags), tuple(operands)))  # type: ignore[arg-type]
    return tuple(notes)


def _is_word(word: str) -> bool:
    return word in get_args(Join) + get_args(Words) or word.startswith(("@", "linear:"))


def _check(rule: ShardingRule, text: str) -> None:
    """Raise RuleError for a rule that parses but has no meaning."""
    marks: dict[str, set[bool]] = {}
    dots: set[bool] = set()
    for operand in rule.inputs + rule.outputs:
        names = []
        for dim in operand.dims:
            if isinstance(dim, Dots):
                dots.add(dim.fixed)
                continue
            for term in dim.terms:
                if term.name != "_":
                    names.append(term.name)
                    marks.setdefault(term.name, set()).add(term.fixed)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise RuleError(f"rule '{text}': factor '{twice[0]}' stands twice in '{operand}'")
        for note in rule.notes:
            if note.pair and set(note.pair) <= set(names):
                raise RuleError(f"rule '{text}': '{operand}' has both factors of the note on '{note.factor}'")
    for name, fixed in marks.items():
        if len(fixed) > 1:
            raise RuleError(f"rule '{text}': mark '{name}' with ! at every place or at none")
    if len(dots) > 1:
        raise RuleError(f"rule '{text}': mark the ellipsis with ! at every place or at none")
    if sum(o.kind == "*" for o in rule.inputs) > 1 or sum(o.kind == "*" for o in rule.outputs) > 1:
        raise RuleError(f"rule '{text}': at most one list on each side")
    for note in rule.notes:
        named = note.pair or ((note.factor,) if note.factor not in ("", "...") else ())
        is_known = all(name in marks for name in named) and (note.factor != "..." or bool(dots))
        if not is_known:
            raise RuleError(f"rule '{text}': the note on '{note.factor}' names no factor of the rule")
    noted = [note.factor for note in rule.notes]
    if len(set(noted)) < len(noted):
        raise RuleError(f"rule '{text}': two notes on the same factor")
