"""Ranks that convert activations along other dims than the first: staging memory, and measured peaks of steps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from peak_cases import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import LayoutError
from autopar.layout import Layout
from autopar.resharding.reshard import steps
from autopar.resharding.staging import memory_order, staged_elements
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.communication.convert import convert, recipe
from autopar.runtime.live_storages import LiveStorages

WORDS, LENGTH = 64, 64
MESHES: dict[int, tuple[int, ...]] = {2: (2,), 4: (2, 2)}
PLACEMENTS = ("R", "R+", "S0", "S1", "S2", "P", "S1@2")
LAYOUTS: dict[int, list[str]] = {
    2: list(PLACEMENTS),
    4: ["R+,R", "S0,S1", "S1,S0", "S1,S1@2", "S1@2,S1", "S1,R", "R,S1", "S2,S1", "P,S1", "P,P", "R+,R+"],
}
SHAPES = {"even": (4, 8, 16), "uneven": (5, 7, 9), "one row": (1, 8, 16)}


def staged(ranks: int, shape: Sequence[int], order: Sequence[int]) -> list[tuple[Any, ...]]:
    """For each pair of layouts: the peak bytes of converting a tensor of ones and of converting its gradient; the same
    without both ends; and the prediction for the first rank, without and with the ends."""
    mesh, shape = MESHES[ranks], tuple(shape)
    local_mesh = LocalMesh.of(init_device_mesh("cpu", mesh))
    found = []
    for source, wanted in itertools.permutations(map(Layout.parse, LAYOUTS[ranks]), 2):
        try:
            path = steps(source, wanted, shape, mesh, needs_grad=True)
        except LayoutError:  # a layout that is impossible here, or no conversion exists
            continue
        how = recipe(source, wanted, shape, local_mesh, needs_grad=True)
        x = _lies(source.local_shape(shape, mesh, local_mesh.coordinate), order).requires_grad_()
        with LiveStorages([x]) as forward:
            y = convert(x, how)
        gradient = _lies(tuple(y.shape), order)
        with LiveStorages([gradient]) as backward:
            [back] = torch.autograd.grad(y, x, gradient)
        peaks = [forward.peak_bytes, backward.peak_bytes]
        beside = [peaks[0] - _together(x, y), peaks[1] - _together(gradient, back)]
        elements = staged_elements(path, shape, mesh, memory_order(x))
        ends = sum(math.prod(one.local_shape(shape, mesh)) for one in (source, wanted))
        foreseen = [[x.itemsize * (more + many) for many in elements] for more in (0, ends)]
        found.append((f"{source} to {wanted}", peaks, beside, *foreseen))
    return found


def _lies(shape: tuple[int, ...], order: Sequence[int]) -> torch.Tensor:
    """A tensor of ones whose dims have this order in memory."""
    return torch.ones([shape[dim] for dim in order]).permute([list(order).index(dim) for dim in range(len(shape))])


def _together(*tensors: torch.Tensor) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


class ConvNet(nn.Module):
    """Images are much larger than weights; channels are dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Chain(nn.Module):
    """Layers whose activations have the layouts that the constraints pin."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Tanh() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Plus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * 6, -1) + 1.0


class Views(nn.Module):
    """The largest tensor is read in another layout by a view, and nothing saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.plus, self.merged = Plus(), nn.Flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged(self.plus(x * self.weight)).sum(-1).square().mean()


def images(*asked: str) -> dict[str, Any]:
    batch = {"x": torch.randn(4, 3, 16, 16), "labels": torch.arange(4)}
    return trained(ConvNet(), batch, asked)


def chain(*layouts: str) -> dict[str, Any]:
    """A chain of layers with these activation layouts."""
    asked = [f"activation:layers.{i} = {layout}" for i, layout in enumerate(layouts)]
    return trained(Chain(len(layouts)), {"x": torch.randn(4, 16, 64)}, asked)


def views(*asked: str) -> dict[str, Any]:
    return trained(Views(), {"x": torch.randn(4, 16, 64)}, asked)


def llama(*asked: str) -> dict[str, Any]:
    """A batch of one row, so that only the sequence can be split."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    ids = torch.randint(WORDS, (4, LENGTH))
    return trained(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, asked)


def trained(model: nn.Module, batch: dict[str, torch.Tensor], asked: Sequence[str]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = autopar.autoparallelize(model, batch, mesh, constraints=list(asked), optimizer="sgd", time_limit=20)
    found = measured(model, batch, torch.optim.SGD(model.parameters()))
    found["layouts"] = [(n.name, str(n.inputs), str(n.outputs)) for n in autopar.plan_of(model).nodes]
    return found


PEAKS: dict[str, Callable[[], Any]] = {
    "conv, tp": functools.partial(images, "tp"),
    "conv, free": images,
    "llama, tp": functools.partial(llama, "tp"),
    "llama, tp, split sequence": functools.partial(llama, "tp(sequence=split)"),
    "S1, S2": functools.partial(chain, "S1", "S1", "S1", "S1", "S2"),
    "S2, S1": functools.partial(chain, "S2", "S2", "S2", "S2", "S1"),
    "S2, S0": functools.partial(chain, "S2", "S2", "S2", "S2", "S0"),
    "view, R": functools.partial(views, "activation:plus = S1", "activation:merged = R"),
    "S1, R": functools.partial(chain, "S1", "R"),
    "S2, R, S2": functools.partial(chain, "S2", "R", "S2"),
    "S0, R": functools.partial(chain, "S0", "R"),
    "R, S1": functools.partial(chain, "R", "S1"),
}
STAGED = {
    f"{name}, {order}": (shape, order) for name, shape in SHAPES.items() for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2))
}
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    ranks: {name: functools.partial(staged, ranks, *case) for name, case in STAGED.items()} for ranks in MESHES
}
CASES[2] |= PEAKS
