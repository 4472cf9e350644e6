"""Nodes of tensors that several modules read come before the first of them; others stay where they are read."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.cost.structure.blocks import find_repeats
from autopar.graph import REGION, SCOPE
from autopar.tracing import trace

Tensor = torch.Tensor
BLOCKS, WIDTH = 4, 6


class Mixing(nn.Module):
    """A part of a block that reads its arguments, and its own buffer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("own", torch.rand(WIDTH))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        y: Tensor = self.product(x)
        return (y * angles.cos() + y * angles.sin() + self.own).exp() * self.own


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixing = nn.LayerNorm(WIDTH), Mixing()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        mixed: Tensor = self.mixing(self.norm(x), angles)
        return x + mixed


class Rotary(nn.Module):
    """Blocks that get a buffer of the model as an argument; `twice`: the model itself reads it before."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.twice = twice
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("angles", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        if self.twice:
            x = x + self.angles
        for block in self.blocks:
            x = block(x, self.angles)
        return x.square().sum()


def traced(model: nn.Module) -> list[fx.Node]:
    return list(trace(model, {"x": torch.rand(3, WIDTH)}).graph.nodes)


def place(nodes: list[fx.Node], name: str) -> int:
    return next(i for i, node in enumerate(nodes) if node.target == name)


def first_of(nodes: list[fx.Node], path: str) -> int:
    """The index of the first node that was made in a module."""
    return next(i for i, node in enumerate(nodes) if any(path == p for p, _ in node.meta.get(SCOPE, ())))


def test_blocks_that_are_given_a_buffer_are_equal_from_the_first_on() -> None:
    (repeat,) = find_repeats(trace(Rotary(), {"x": torch.rand(3, WIDTH)}).graph)
    assert repeat.count == BLOCKS


def test_it_stands_right_before_the_first_module_that_not_all_readers_are_in() -> None:
    nodes = traced(Rotary())
    assert place(nodes, "angles") == first_of(nodes, "blocks.0") - 1
    assert nodes[place(nodes, "angles")].meta[SCOPE] == ()


def test_what_one_module_reads_stays() -> None:
    nodes = traced(Rotary())
    for block in range(BLOCKS):
        own = place(nodes, f"blocks.{block}.mixing.own")
        assert nodes[own].next in nodes[own].users
        assert nodes[own].meta[SCOPE][-1][0] == f"blocks.{block}.mixing"


def test_what_the_model_reads_first_stays() -> None:
    nodes = traced(Rotary(twice=True))
    assert nodes[place(nodes, "angles")].next in nodes[place(nodes, "angles")].users


def test_the_graph_computes_what_the_model_does() -> None:
    for model in (Rotary(), Rotary(twice=True)):
        x = torch.rand(3, WIDTH)
        assert torch.equal(trace(model, {"x": x}).gm(x=x), model(x))


def test_several_of_them_keep_their_order() -> None:
    class Two(Rotary):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("more", torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(block(x, self.angles), self.more)
            return x.square().sum()

    nodes = traced(Two())
    assert (place(nodes, "angles"), place(nodes, "more")) == (1, 2)


def test_it_is_in_no_checkpoint_region_that_not_all_readers_are_in() -> None:
    class Checkpointed(Rotary):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, self.angles, use_reentrant=False)
            return x.square().sum()

    nodes = traced(Checkpointed())
    assert nodes[place(nodes, "angles")].meta[REGION] == ()
    assert nodes[place(nodes, "blocks.0.mixing.own")].meta[REGION] == (0,)


def test_a_parameter_of_all_blocks_is_one_too() -> None:
    class Scaled(Rotary):
        def __init__(self) -> None:
            super().__init__()
            self.angles = nn.Parameter(self._buffers.pop("angles"))

    (repeat,) = find_repeats(trace(Scaled(), {"x": torch.rand(3, WIDTH)}).graph)
    assert repeat.count == BLOCKS


def test_sizes_that_the_first_block_takes_stay_with_it() -> None:
    class Sized(Block):
        def forward(self, x: Tensor, angles: Tensor) -> Tensor:
            rows, columns = x.shape
            return super().forward(x.sin().reshape(columns, rows).t().reshape(rows, columns), angles[:columns])

    class Model(Rotary):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Sized() for _ in range(BLOCKS))
            self.head = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.head(x)
            for block in self.blocks:
                x = block(x, self.angles)
            return self.head(x).square().sum()

    model, x = Model(), torch.rand(3, WIDTH)
    traced = trace(model, {"x": x})
    (repeat,) = find_repeats(traced.graph)
    assert repeat.count == BLOCKS
    assert torch.equal(traced.gm(x=x), model(x))


def test_two_layers_are_blocks_and_not_the_equal_products_within_each() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            query, key, value = (projection(y) for projection in self.projections)
            y = torch.softmax(query.tanh() @ key.sin().t(), -1) @ value.exp()
            return x + self.out(y).sigmoid().cos()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Attending() for _ in range(2)))
    (repeat,) = find_repeats(trace(model, {"input": torch.rand(3, WIDTH)}).graph)
    assert repeat.count == 2 and repeat.period > 20
