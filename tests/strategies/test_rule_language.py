"""The rule language: what parses, what is refused and why; printing and parsing are inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar.errors import RuleError
from autopar.graph import VAL
from autopar.strategies.bind import bind
from autopar.strategies.rule import Dim, Dots, Note, Operand, ShardingRule, Term
from autopar.strategies.table import TABLE

GOOD = [
    "... i, o i -> ... o",
    "b s (h e) -> b s h e",
    "b s (c=3! h e) -> b s c! h e",
    "... k! -> ... k!",
    "...! k -> ...! k",
    "... d!, [d!]?, [d!]? -> ... d!",
    "[b _]* -> b _",
    "b v, b ->",
    "a -> a 1 | linear",
    "..., v d -> ... d | v @embedding_vocab idle plain",
    "a b -> a | b max",
    "t d!, e d! -> t d! | e @experts plain, t+e @exchanged",
    "..., ..., ... -> ... | linear:0 linear:1+2",
    "x y -> x, x, y | affine",
]
BAD = {
    "a b": "one arrow",
    "a -> b -> c": "one arrow",
    "(a b -> a": "not closed",
    "a) -> a": "without",
    "((a b) c) -> a": "nest",
    "a a -> a": "stands twice",
    "a! -> a": "at every place or at none",
    "... a, ...! -> a": "at every place or at none",
    "... a ... -> a": "at most one ellipsis",
    "(... a) -> a": "cannot be part of a merged dim",
    "(1 a) -> a": "cannot be part of a merged dim",
    "a$ -> a": r"cannot read '\$'",
    "a -> a | b max": "names no factor",
    "a, b -> a | a+c @x": "names no factor",
    "a b -> a | a+b @x": "'a b' has both factors",
    "a -> a | a largest": "'largest'",
    "a -> a | ": "empty note",
    "a -> a | a max, a min": "two notes",
    "[a -> a": r"must end in \]\?",
    "[a]*, [b]* -> a": "at most one list",
}


@pytest.mark.parametrize("text", GOOD)
def test_printed_form_parses_to_itself(text: str) -> None:
    rule = ShardingRule.parse(text)
    assert str(rule) == text
    assert ShardingRule.parse(str(rule)) == rule


@pytest.mark.parametrize("text", BAD)
def test_malformed_rule_says_why(text: str) -> None:
    with pytest.raises(RuleError, match=BAD[text]):
        ShardingRule.parse(text)


names = st.sampled_from(["a", "b", "c", "d2", "v"])
terms = st.builds(lambda n, s: Term(n, n in "ab", s), names, st.none() | st.integers(2, 9))
dims = st.lists(terms, max_size=3, unique_by=lambda t: t.name).map(lambda t: Dim(tuple(t)))


@st.composite
def operands(draw: st.DrawFn) -> Operand:
    found = draw(st.lists(dims, max_size=3))
    used: set[str] = set()
    kept: list[Dim | Dots] = []
    for dim in found:
        if not used & {t.name for t in dim.terms}:
            kept.append(dim)
            used |= {t.name for t in dim.terms}
    if draw(st.booleans()):
        kept.insert(draw(st.integers(0, len(kept))), Dots())
    return Operand(tuple(kept), draw(st.sampled_from(["", "?"])))


@given(
    st.lists(operands(), min_size=1, max_size=3),
    st.lists(operands(), min_size=1, max_size=2),
    st.sampled_from(["sum", "max"]),
)
def test_any_rule_survives_printing(inputs: list[Operand], outputs: list[Operand], join: str) -> None:
    used = {t.name for o in inputs for d in o.dims if isinstance(d, Dim) for t in d.terms}
    notes = (Note("a", join, "code", frozenset({"idle"})),) if "a" in used else ()  # type: ignore[arg-type]
    rule = ShardingRule(tuple(inputs), tuple(outputs), notes)
    assert ShardingRule.parse(str(rule)) == rule


def test_shapes_that_do_not_fit_are_refused() -> None:
    for text, inputs, outputs, why in [
        ("a b -> a", [(2,)], [(2,)], "does not fit"),
        ("a, a -> a", [(2,), (3,)], [(2,)], "is 2 and 3 long"),
        ("(a b) -> a", [(6,)], [(4,)], "do not tell"),
        ("(a b) -> a b", [(6,)], [(2, 4)], "8 long by its factors, 6 by its shape"),
        ("a 1 -> a", [(2, 2)], [(2,)], "written 1 is 2 long"),
        ("a, a -> a", [(2,)], [(2,)], "1 tensor inputs"),
    ]:
        with pytest.raises(RuleError, match=why):
            bind(ShardingRule.parse(text), inputs, outputs)


def test_optional_and_list_operands_take_what_is_there() -> None:
    rule = ShardingRule.parse("a, [a]?, [b]* -> a")
    assert len(bind(rule, [(2,)], [(2,)]).spots) == 2
    assert len(bind(rule, [(2,), (2,), (5,), (5,)], [(2,)]).spots) == 5


def test_broadcast_dims_do_not_have_the_factor() -> None:
    bound = bind(ShardingRule.parse("[...]* -> ..."), [(4, 1, 6), (5, 6)], [(4, 5, 6)])
    assert [[s is not None for s in spots] for spots in bound.spots] == [
        [True, False, True], [False, True, True], [True, True, True],
    ]  # fmt: skip
    grouped = bind(ShardingRule.parse("(h g=2) q, (h g=2) k! -> (h g=2) q"), [(6, 4), (1, 5)], [(6, 4)])
    assert [[s is not None for s in spots] for spots in grouped.spots] == [
        [True, True, True, False], [False, False, False, True], [True, True, True, False],
    ]  # fmt: skip


def test_every_text_in_the_table_parses() -> None:
    texts = [entry.rule for entry in TABLE.values() if isinstance(entry.rule, str)]
    assert len(texts) > 100
    for text in texts:
        assert ShardingRule.parse(str(ShardingRule.parse(text))) == ShardingRule.parse(text)


def test_a_users_function_of_the_same_name_is_not_the_op() -> None:
    def linear(a: torch.Tensor) -> torch.Tensor:
        return a

    graph = fx.Graph()
    node = graph.call_function(linear, (graph.placeholder("a"),))
    node.meta[VAL] = torch.empty(2, device="meta")
    assert TABLE.get("linear") is not None
    from autopar.strategies.table import entry

    assert entry(node) is None
