"""`new_zeros` and similar functions: the new tensor can be split like the one it is made for, and is not made whole."""

from __future__ import annotations

import pytest
import torch
from rule_tensors import x

import autopar
from autopar.strategies.examples import example
from autopar.strategies.table import rule_text


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((6, 12), "a b -> a b | a @shape, b @shape"),
        ((12, 5, 6), "a b -> b _ a | a @shape, b @shape"),
        ((4, 6), "a b -> _ a | a @shape, b whole idle"),
        ((6, 6), "a b -> a _ | a @shape, b whole idle"),
        ((3,), "a b -> _ | a whole idle, b whole idle"),
        ((), "a b -> | a whole idle, b whole idle"),
    ],
    ids=str,
)
def test_dims_of_one_length_are_one_index(shape: tuple[int, ...], rule: str) -> None:
    node, _ = example("new_zeros", x(6, 12), shape)
    assert " ".join((rule_text(node) or "").split()) == rule


class Filled(torch.nn.Module):
    """As DeepSeek-V3 assembles its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.up(x)
        keys = half.new_empty(*x.shape[:-1], 2 * half.shape[-1])
        keys[..., : half.shape[-1]] = half
        keys[..., half.shape[-1] :] = half * 2
        return keys.square().mean()


def test_no_rank_makes_the_whole_of_what_is_filled_in_parts() -> None:
    with torch.device("meta"):
        model, rows = Filled(), torch.empty(4096, 32, 64)
    plan = autopar.plan(
        model, {"x": rows}, autopar.Cluster.preset("h100", (8,)), memory_budget="1GiB", constraints="ddp"
    )
    [made] = [node for node in plan.nodes if node.name.startswith("new_empty")]
    assert str(made.outputs[0]) == "S0"
