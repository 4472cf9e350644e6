"""What `steps` announces: chains of legal single-axis changes, no more expensive than in any other order."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import LayoutError
from autopar.layout import R_PLUS, Layout, P, Placement, R, shard
from autopar.resharding.reshard import Step, edge, is_legal, steps, traffic

SHAPES = [(24, 12), (8, 8, 8), (7, 16), (50257, 8)]
PLACEMENTS = [R, R_PLUS, P, *(shard(d, o) for d in range(3) for o in (1, 2, 3, 4))]


SQUARE, NESTED = (8, 8), [shard(0, outer) for outer in (1, 2, 4)]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Layout, Layout]:
    mesh = draw(st.sampled_from([(2,), (4,), (2, 2), (4, 2), (2, 3, 2)]))
    shape = draw(st.sampled_from(SHAPES))
    layouts = st.tuples(*[st.sampled_from(PLACEMENTS)] * len(mesh)).map(Layout)
    legal = layouts.filter(lambda x: x.is_legal(shape, mesh, ragged=True))
    return mesh, shape, draw(legal), draw(legal)


@given(pair=pairs(), needs_grad=st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_chain(pair: tuple[tuple[int, ...], tuple[int, ...], Layout, Layout], needs_grad: bool) -> None:
    mesh, shape, src, dst = pair
    found = steps(src, dst, shape, mesh, needs_grad=needs_grad)
    layout = src if needs_grad else src.value()
    for step in found:
        assert step.layout_before == layout
        assert step.layout_after == layout.replace(step.axis, step.dst)
        assert step.src == layout[step.axis] != step.dst
        assert step.layout_after.is_legal(shape, mesh, ragged=True)
        assert needs_grad or step.backward is None
        layout = step.layout_after
    assert layout == (dst if needs_grad else dst.value())


@given(pair=pairs())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_order_is_cheaper(pair: tuple[tuple[int, ...], tuple[int, ...], Layout, Layout]) -> None:
    mesh, shape, src, dst = pair
    changing = [axis for axis in range(len(mesh)) if src[axis] != dst[axis]]
    cost = traffic(steps(src, dst, shape, mesh, needs_grad=True), mesh)
    for order in itertools.permutations(changing):
        layout, chain = src, tuple[Step, ...]()
        for axis in order:
            after = layout.replace(axis, dst[axis])
            if not after.is_legal(shape, mesh, ragged=True):
                break
            chain += steps(layout, after, shape, mesh, needs_grad=True)
            layout = after
        else:
            assert cost <= traffic(chain, mesh) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2, 4), [R, P, *NESTED, shard(1)]), ((2, 2, 2), [R, P, *NESTED])],
)
def test_no_detour_is_cheaper(mesh: tuple[int, ...], placements: list[Placement]) -> None:
    """Where no direct order is possible: compared with networkx's shortest path over all layouts whose axes are placed
    as at either end, or replicated."""
    layouts = [
        some for some in map(Layout, itertools.product(placements, repeat=len(mesh))) if is_legal(some, SQUARE, mesh)
    ]
    detours = 0
    for src, dst in itertools.product(layouts, layouts):
        ends = list(zip(src.placements, dst.placements, strict=True))
        found = steps(src, dst, SQUARE, mesh, needs_grad=True)
        if len(found) == sum(given != wanted for given, wanted in ends):
            continue
        graph = nx.DiGraph()
        for here in map(Layout, itertools.product(*({*both, R, R_PLUS} for both in ends))):
            for axis, both in enumerate(ends if is_legal(here, SQUARE, mesh) else ()):
                for placement in {*both, R, R_PLUS}:
                    change = edge(here, axis, placement, SQUARE, mesh, True)
                    if change is not None:
                        graph.add_edge(here, change[0].layout_after, cost=change[1])
        total = sum(graph.edges[step.layout_before, step.layout_after]["cost"] for step in found)
        assert total == pytest.approx(nx.dijkstra_path_length(graph, src, dst, "cost"), rel=1e-12)
        detours += 1
    assert detours >= 10


@pytest.mark.parametrize(
    ("src", "dst", "forward", "backward"),
    [
        ("R", "S0", None, ("all_gather", 32)),
        ("R", "R+", None, ("all_reduce", 64)),
        ("R", "P", None, None),
        ("R+", "R", None, None),
        ("R+", "S1", None, None),
        ("R+", "P", None, None),
        ("S0", "R", ("all_gather", 32), None),
        ("S0", "R+", ("all_gather", 32), ("reduce_scatter", 64)),
        ("S0", "S1", ("all_to_all", 32), ("all_to_all", 32)),
        ("S0", "P", None, None),
        ("P", "R", ("all_reduce", 64), None),
        ("P", "R+", ("all_reduce", 64), ("all_reduce", 64)),
        ("P", "S0", ("reduce_scatter", 64), ("all_gather", 32)),
    ],
)
def test_table(src: str, dst: str, forward: tuple[str, int] | None, backward: tuple[str, int] | None) -> None:
    [step] = steps(Layout.parse(src), Layout.parse(dst), (8, 8), (2,), needs_grad=True)
    assert (step.forward and (step.forward.kind, step.forward.elements)) == forward
    assert (step.backward and (step.backward.kind, step.backward.elements)) == backward


def test_scatter_early_gather_late() -> None:
    found = steps(Layout.parse("S0,P"), Layout.parse("R,S1"), (8, 8), (2, 2), needs_grad=False)
    assert [step.axis for step in found] == [1, 0]


def test_slow_axes_move_the_small_pieces() -> None:
    gathered = steps(Layout.parse("S0,S1"), Layout.parse("R,R"), (8, 8), (2, 4), needs_grad=False)
    assert [step.axis for step in gathered] == [0, 1]
    scattered = steps(Layout.parse("P,P"), Layout.parse("S0,S1"), (8, 8), (2, 4), needs_grad=False)
    assert [step.axis for step in scattered] == [1, 0]


def test_ragged_shards_are_never_strided() -> None:
    """A vocabulary of 7 over four ranks: the inner axis is gathered first, with padding."""
    found = steps(Layout.parse("S0,S0@2"), Layout.parse("R+,S0"), (7, 1), (2, 2), needs_grad=True)
    assert [str(step.layout_after.value()) for step in found] == ["S0,R", "R,R", "R,S0"]
    assert [step.forward and step.forward.elements for step in found] == [2, 4, None]


def test_axes_of_one_rank_move_nothing() -> None:
    found = steps(Layout.parse("P,S0"), Layout.parse("R+,S1"), (4, 4), (1, 1), needs_grad=True)
    assert traffic(found, (1, 1)) == 0


@pytest.mark.parametrize(("src", "dst"), [("S0@2", "R"), ("R", "P:max"), ("P:max", "P:min"), ("S2", "R")])
def test_impossible(src: str, dst: str) -> None:
    with pytest.raises(LayoutError):
        steps(Layout.parse(src), Layout.parse(dst), (7, 4), (2,), needs_grad=True)
