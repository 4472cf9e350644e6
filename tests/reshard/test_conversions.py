"""Every conversion between random legal layouts gives the value and gradient that the layouts specify."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_mesh import SimulatedMesh

from autopar.errors import LayoutError
from autopar.layout import R_PLUS, Layout, P, Placement, R, shard, take_shard
from autopar.resharding.reshard import Step, steps
from autopar.runtime.communication.convert import convert, recipe

MESHES = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]
SHAPES = [(24,), (12, 8), (7, 4), (3,), (1, 6), (5, 2, 12), (6, 6, 6)]
Shape = tuple[int, ...]
Pieces = dict[tuple[int, ...], torch.Tensor]


@cache
def legal(shape: Shape, mesh: Shape) -> tuple[Layout, ...]:
    """All legal layouts of the shape, including digits: shards of a dim below any `outer` factor that divides it."""
    shards = [shard(d, o) for d, length in enumerate(shape) for o in range(1, length + 1) if length % o == 0 and o <= 6]
    layouts = map(Layout, itertools.product([R, R_PLUS, P, *shards], repeat=len(mesh)))
    return tuple(x for x in layouts if x.is_legal(shape, mesh, ragged=True))


@st.composite
def conversions(draw: st.DrawFn) -> tuple[Shape, Shape, Layout, Layout]:
    mesh, shape = draw(st.sampled_from(MESHES)), draw(st.sampled_from(SHAPES))
    layouts = st.sampled_from(legal(shape, mesh))
    return mesh, shape, draw(layouts), draw(layouts)


def pieces(whole: torch.Tensor, layout: Layout, mesh: Shape) -> Pieces:
    """What every rank holds of `whole`; random summands over partial axes."""
    partial = [range(n) if p.is_partial else (0,) for p, n in zip(layout.placements, mesh, strict=True)]
    numbers = list(itertools.product(*partial))
    summands = {number: torch.randn_like(whole) for number in numbers[1:]}
    summands[numbers[0]] = whole - sum(summands.values())
    held = {}
    for coordinate in itertools.product(*map(range, mesh)):
        number = tuple(c if p.is_partial else 0 for c, p in zip(coordinate, layout.placements, strict=True))
        held[coordinate] = take_shard(summands[number], layout, mesh, coordinate).clone()
    return held


def assert_holds(held: Pieces, whole: torch.Tensor, layout: Layout, mesh: Shape) -> None:
    """Check that the pieces represent `whole` in `layout`: correct shards, equal replicas, correct sums."""
    axes = [axis for axis, p in enumerate(layout.placements) if p.is_partial]
    for coordinate in held:
        peers = [c for c in held if all(c[a] == coordinate[a] for a in range(len(mesh)) if a not in axes)]
        total = sum(held[c] for c in peers)
        torch.testing.assert_close(total, take_shard(whole, layout, mesh, coordinate), rtol=0, atol=1e-12)


def moves(found: tuple[Step, ...]) -> Iterator[tuple[str, int, int]]:
    yield from (m for step in found for m in (step.forward, step.backward) if m is not None)


@given(case=conversions())
@example(case=((2,), (24,), Layout.parse("S0"), Layout.parse("S0@3")))
@example(case=((2, 2), (7, 4), Layout.parse("S0,S0@2"), Layout.parse("R+,S0")))
@example(case=((2, 2), (12, 8), Layout.parse("S0,S1"), Layout.parse("S1,S0")))
@example(case=((2, 2), (12, 8), Layout.parse("P,R+"), Layout.parse("S0@3,P")))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_value_and_gradient(case: tuple[Shape, Shape, Layout, Layout]) -> None:
    mesh, shape, src, dst = case
    torch.manual_seed(0)
    value, gradient = torch.randn(2, *shape, dtype=torch.float64)
    given_values, given_gradients = pieces(value, src, mesh), pieces(gradient, dst.gradient(), mesh)
    ranks = SimulatedMesh(mesh)

    def work(view: Any) -> tuple[torch.Tensor, torch.Tensor]:
        held = given_values[view.coordinate].requires_grad_()
        got = convert(held, recipe(src, dst, shape, view, needs_grad=True))
        got.backward(given_gradients[view.coordinate])
        return got.detach(), held.grad

    results = ranks.run(work)
    assert_holds({c: v for c, (v, _) in results.items()}, value, dst.value(), mesh)
    assert_holds({c: g for c, (_, g) in results.items()}, gradient, src.gradient(), mesh)
    first = (0,) * len(mesh)
    announced = Counter(moves(steps(src, dst, shape, mesh, needs_grad=True)))
    assert ranks.count(first) == announced


@given(case=conversions())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_value_alone(case: tuple[Shape, Shape, Layout, Layout]) -> None:
    """Without a gradient only forward collectives are announced and run."""
    mesh, shape, src, dst = case
    value = torch.randn(shape, dtype=torch.float64)
    held = pieces(value, src, mesh)
    ranks = SimulatedMesh(mesh)
    results = ranks.run(lambda view: convert(held[view.coordinate], recipe(src, dst, shape, view, needs_grad=False)))
    assert_holds(results, value, dst.value(), mesh)
    assert ranks.count((0,) * len(mesh)) == Counter(moves(steps(src, dst, shape, mesh, needs_grad=False)))


@pytest.mark.parametrize("wanted", [R, R_PLUS])
def test_means(wanted: Placement) -> None:
    src, dst = Layout((Placement("partial", join="mean"),)), Layout((wanted,))
    ranks = SimulatedMesh((3,))
    parts = torch.tensor([[1.0, 5.0, 2.0], [4.0, 5.0, -1.0], [0.0, 3.0, 2.0]], dtype=torch.float64)
    whole = parts.clone().requires_grad_()
    expected = whole.mean(0)
    weight = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    (expected * weight).sum().backward()

    def work(view: Any) -> tuple[torch.Tensor, torch.Tensor]:
        held = parts[view.coordinate].clone().requires_grad_()
        got = convert(held, recipe(src, dst, (3,), view, needs_grad=True))
        got.backward(weight / 3 if wanted == R_PLUS else weight)
        return got.detach(), held.grad

    for (rank,), (value, gradient) in ranks.run(work).items():
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, whole.grad[rank])
    announced = Counter(moves(steps(src, dst, (3,), (3,), needs_grad=True)))
    assert ranks.count((0,)) == announced


@pytest.mark.parametrize("join", ["max", "min"])
def test_extrema_have_no_gradient(join: str) -> None:
    """A gradient would be divided equally among all elements that attain the extremum, and ranks may hold different
    numbers of them."""
    src, dst = Layout.parse(f"P:{join}"), Layout.parse("R")
    ranks = SimulatedMesh((3,))
    parts = torch.tensor([[1.0, 5.0, 2.0], [4.0, 5.0, -1.0], [0.0, 3.0, 2.0]])
    found = ranks.run(lambda view: convert(parts[view.coordinate], recipe(src, dst, (3,), view, needs_grad=False)))
    for value in found.values():
        torch.testing.assert_close(value, getattr(parts, "a" + join)(0))
    assert ranks.count((0,)) == Counter(moves(steps(src, dst, (3,), (3,), needs_grad=False)))
    with pytest.raises(LayoutError):
        steps(src, dst, (3,), (3,), needs_grad=True)


def test_dtypes() -> None:
    """Shards are communicated in the compute dtype; gradients are reduced, and delivered, in the reduction dtype."""
    src, dst, shape = Layout.parse("S0"), Layout.parse("R+"), (4,)
    ranks = SimulatedMesh((2,))

    def work(view: Any) -> tuple[torch.Tensor, torch.Tensor]:
        held = torch.ones(2, dtype=torch.float32, requires_grad=True)
        kept = recipe(src, dst, shape, view, needs_grad=True, dtype=torch.bfloat16, reduction_dtype=torch.float32)
        got = convert(held, kept)
        got.backward(torch.full((4,), 1.0 if view.coordinate == (0,) else 2.0**-9, dtype=torch.bfloat16))
        return got, held.grad

    for value, gradient in ranks.run(work).values():
        assert value.dtype == torch.bfloat16
        assert gradient.dtype == torch.float32
        assert gradient.tolist() == [1 + 2.0**-9] * 2


@pytest.mark.parametrize(("src", "dst"), [("S1", "S0"), ("S1", "R"), ("P", "S0"), ("R", "S1")])
def test_dims_keep_their_order_in_memory(src: str, dst: str) -> None:
    """A tensor with transposed memory keeps this after the conversion, so that transposing it back is a view."""
    mesh, shape = (2,), (4, 6, 8)
    ranks = SimulatedMesh(mesh)
    whole, layout, wanted = torch.randn(shape, dtype=torch.float64), Layout.parse(src), Layout.parse(dst)
    held = pieces(whole, layout, mesh)

    def work(view: Any) -> torch.Tensor:
        part = held[view.coordinate].transpose(0, 1).contiguous().transpose(0, 1)
        return convert(part, recipe(layout, wanted, shape, view, needs_grad=False))

    found = ranks.run(work)
    assert_holds(found, whole, wanted, mesh)
    assert all(part.transpose(0, 1).is_contiguous() for part in found.values())


def test_what_is_contiguous_in_parts_is_so_as_a_whole() -> None:
    """If the gathered dim has local length one, `contiguous()` of the shard returns it with its own strides."""
    whole, parts, wanted = torch.randn(3, 2, 4), Layout.parse("S1"), Layout.parse("R")

    def work(view: Any) -> torch.Tensor:
        part = whole.transpose(0, 1)[view.coordinate[0]].contiguous()[None].transpose(0, 1).contiguous()
        return convert(part, recipe(parts, wanted, (3, 2, 4), view, needs_grad=False))

    for found in SimulatedMesh((2,)).run(work).values():
        assert torch.equal(found, whole) and found.is_contiguous()


@pytest.mark.parametrize("lies", [lambda x: x[:, :, 1].transpose(1, 2), lambda x: x[:, :1, 1].expand(4, 6, 8)])
def test_what_one_rank_keeps_lies_as_the_zeros_of_the_others(lies: Any) -> None:
    """A slice's strides have gaps that the other ranks' zeros lack, but both must be reduced element by element."""
    ranks = SimulatedMesh((2,))
    tensor = lies(torch.randn(4, 6, 3, 8, dtype=torch.float64))
    shape, whole, summands = tuple(tensor.shape), Layout.parse("R"), Layout.parse("P")

    def work(view: Any) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
        kept = convert(tensor, recipe(whole, summands, shape, view, needs_grad=False))
        back = recipe(summands, whole, shape, view, needs_grad=False)
        return kept.stride(), convert(kept, back), convert(kept * 2, back)

    found = ranks.run(work)
    assert len({strides for strides, *_ in found.values()}) == 1
    for _, same, twice in found.values():
        torch.testing.assert_close(same, tensor)
        torch.testing.assert_close(twice, tensor * 2)
