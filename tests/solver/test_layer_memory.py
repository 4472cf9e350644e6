"""Activation bytes of one transformer layer against the formulas of 2205.05198, section 4, in 16 bit.

s sequence, b batch, h width, a heads, t ranks that share the layer's products::

    nothing recomputed                     s b h (34 + 5 a s / h)
    tensor parallel                        s b h (10 + 24 / t + 5 a s / (h t))
    tensor and sequence parallel           s b h (34 / t + 5 a s / (h t))
    the attention core recomputed          without the term of a s
    the whole layer recomputed             2 s b h

Megatron-LM saves the inputs of sequence-parallel products as shards and gathers them again in backward. The plans here
reach the same bytes with products that read their inputs sharded over the width, converted from shards of the sequence
by an all-to-all. Where the solver gathers instead (layers wide for their sequence, or fused attention), it saves the
gathered tensors, up to s b h (4 + 30 / t), so sequence parallelism with the core recomputed is not reproduced.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from toys import cluster, on_meta, toy

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.planned_bytes import PlannedBytes
from autopar.plans import Segment
from autopar.precision import Precision
from autopar.solver.constraints.constraints import restrict

BATCH, SEQUENCE, WIDTH, HEADS = 4, 1024, 256, 8
SBH = SEQUENCE * BATCH * WIDTH
SCORES = 5 * HEADS * SEQUENCE / WIDTH
BETWEEN = ("norm1", "drop1", "norm2", "drop2")  # the modules whose activations lie between the products


class Layer(nn.Module):
    """The paper's layer with its three dropouts; `fused`: attention that recomputes its scores in backward."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop1, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).view(BATCH, SEQUENCE, HEADS, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        if self.fused:
            context = functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = functional.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(WIDTH // HEADS), -1)
            context = torch.matmul(functional.dropout(scores, 0.1), v)
        x = x + self.drop1(self.out(context.transpose(1, 2).reshape(BATCH, SEQUENCE, WIDTH)))
        return x + self.drop2(self.down(functional.gelu(self.up(self.norm2(x)))))


class Layers(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def kept_bytes(ranks: int, *, sequence: bool = False, fused: bool = False, recompute: bool = False) -> int:
    """Bytes that the second of three layers saves for backward, under tensor parallelism over `ranks` and, with
    `sequence`, sequence parallelism between the products."""
    x = torch.empty(BATCH, SEQUENCE, WIDTH, device="meta")
    problem = toy(
        on_meta(Layers, fused), x, on=cluster(ranks, compute=sequence, kind="cuda"), precision=Precision.of("bf16")
    )
    memory, [repeat] = problem.memory, problem.repeats
    place = "S1" if sequence else "R"
    pins = [f"activation:layers.*.{name} = {place}" for name in BETWEEN]
    pins += [f"activation:{name} = {place}" for name in ("first", "layers.?")]
    if sequence:  # the preset "tp" allows no reductions over the axis, which gradients of norms need here
        pins += [f"param:layers.*.{name}.weight = S0" for name in ("q", "k", "v", "up")]
        pins += [f"param:layers.*.{name}.weight = S1" for name in ("out", "down")]
    if ranks > 1:
        asked = pins if sequence else ["tp", *pins]
        problem.restricted = restrict(problem.restricted.strategies, memory, asked, problem.cluster.axis_names)
    solution = problem.solve(recompute=False)
    segments = [Segment(repeat.instance(i).start, repeat.instance(i).stop - 1, "") for i in range(3) if recompute]
    grouping = Grouping(memory, problem.repeats)
    plan = PlannedBytes(memory, solution.chosen, solution.parameters, segments, problem.repeats, grouping)
    second = [i for i, row in enumerate(plan.rows) if row.repeat == 0][1]
    if recompute:
        return sum(map(memory.copy_bytes, plan.segment_inputs(second)))
    earlier = {copy for i in range(second) for node in plan.members[i] for copy in plan.copies(node)}
    own = {copy for node in plan.members[second] for copy in plan.copies(node)} - earlier
    return sum(map(memory.copy_bytes, own)) + sum(plan.beside(node) for node in plan.members[second])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensor_parallel(ranks: int) -> None:
    assert kept_bytes(ranks) == pytest.approx(SBH * (10 + 24 / ranks + SCORES / ranks), rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_core_recomputed(ranks: int) -> None:
    assert kept_bytes(ranks, fused=True) == pytest.approx(SBH * (10 + 24 / ranks), rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_layer_recomputed(ranks: int) -> None:
    assert kept_bytes(ranks, recompute=True) == pytest.approx(2 * SBH, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel(ranks: int) -> None:
    assert kept_bytes(ranks, sequence=True) == pytest.approx(SBH * (34 / ranks + SCORES / ranks), rel=0.02)
