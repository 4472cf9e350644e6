"""Uneven shards are allowed for the vocabulary, from the embedding to the loss, and for nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import autopar
from autopar.graph import output_tensors, target_name, tensor_inputs, tensor_of
from autopar.layout import Layout, fills, take_shard
from autopar.strategies import Strategy, strategies_for
from autopar.tracing import trace

VOCABULARY, WIDTH, ROWS, LENGTH = 257, 16, 8, 16


class Tied(nn.Module):
    """Embedding and head share one weight; `end` makes the loss from logits and labels."""

    def __init__(self, end: Any, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding, self.end = nn.Embedding(vocabulary, WIDTH), end

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = F.linear(torch.tanh(self.embedding(ids)), self.embedding.weight).double()
        return self.end(logits, ids)


def ways(end: Any, mesh_shape: tuple[int, ...], vocabulary: int = VOCABULARY) -> dict[fx.Node, tuple[Strategy, ...]]:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    with torch.device("meta"):
        graph = trace(Tied(end, vocabulary), {"ids": ids}).graph
    return strategies_for(graph, mesh_shape)


def uneven(strategies: dict[fx.Node, tuple[Strategy, ...]], mesh_shape: tuple[int, ...]) -> dict[str, set[int]]:
    """Ops that some strategy shards unevenly, with the lengths of those dims."""
    found: dict[str, set[int]] = {}
    for node, options in strategies.items():
        shapes = [tuple(tensor_of(ref).shape) for ref in tensor_inputs(node)]
        shapes += [tuple(t.shape) for t in output_tensors(node)] if node.op != "output" else []
        for option in options:
            for layout, shape in zip((*option.inputs, *option.outputs), shapes, strict=True):
                assert layout.is_legal(shape, mesh_shape, ragged=True)
                if not layout.is_legal(shape, mesh_shape):
                    cut = {shape[p.dim] for p in layout.placements if p.is_sharded}
                    lengths = {length for length in cut if length % math.prod(mesh_shape)}
                    found.setdefault(target_name(node).rpartition(".")[2], set()).update(lengths)
    return found


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), label_smoothing=0.1)


def of_logarithms(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), ids.flatten())


def mean(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.mean(-1).sum() + F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (2, 4)], ids=str)
def test_all_that_holds_the_vocabulary(mesh_shape: tuple[int, ...]) -> None:
    found = uneven(ways(cross_entropy, mesh_shape), mesh_shape)
    assert {"embedding", "linear", "double", "getitem", "reshape", "cross_entropy", "weight"} <= found.keys()
    assert set().union(*found.values()) == {VOCABULARY}


def test_a_loss_made_of_logarithms() -> None:
    assert {"embedding", "linear", "log_softmax", "flatten", "nll_loss"} <= uneven(
        ways(of_logarithms, (4,)), (4,)
    ).keys()


def test_it_ends_at_what_is_not_local() -> None:
    found = uneven(ways(mean, (4,)), (4,))
    assert {"linear", "cross_entropy"} <= found.keys()
    assert "mean" not in found
    assert "cumsum" not in uneven(ways(lambda logits, ids: logits.cumsum(-1).sum(), (4,)), (4,))


def test_nobody_is_left_empty() -> None:
    assert not uneven(ways(cross_entropy, (4,), vocabulary=5), (4,))
    assert uneven(ways(cross_entropy, (4,), vocabulary=7), (4,))


def test_the_longest_piece_counts() -> None:
    [linear] = [options for node, options in ways(cross_entropy, (2, 2)).items() if node.name == "linear"]
    work = {option.factors: option.work for option in linear}
    assert work["o", "o"] == pytest.approx(65 / 257)
    assert work["o", ""] == pytest.approx(129 / 257)
    assert work["", "i"] == 0.5


@settings(max_examples=200, derandomize=True, database=None)
@given(st.integers(1, 60), st.lists(st.integers(2, 5), min_size=1, max_size=3))
def test_pieces_are_those_of_chunk(length: int, cuts: list[int]) -> None:
    """Axes split one after the other as `torch.chunk` does; `fills` tells whether every rank gets elements."""
    placements, outer = [], 1
    for ranks in cuts:
        placements.append("S0" if outer == 1 else f"S0@{outer}")
        outer *= ranks
    layout, whole = Layout.parse(",".join(placements)), torch.arange(length)
    held = []
    for coordinate in torch.cartesian_prod(*map(torch.arange, cuts)).view(-1, len(cuts)).tolist():
        piece = whole
        for rank, ranks in zip(coordinate, cuts, strict=True):
            chunks = piece.chunk(ranks)
            piece = chunks[rank] if rank < len(chunks) else piece[:0]
        assert torch.equal(piece, take_shard(whole, layout, cuts, coordinate))
        held.append(len(piece))
    assert fills(length, cuts) == all(held)
    assert layout.local_shape((length,), cuts) == (max(held),)


def test_gpt2_does_without_padding() -> None:
    """GPT-2's vocabulary of 50257 needs as much communication and memory as one padded to a multiple of 128, as
    Megatron does it by hand.

    Only the head's products are slower, since their rows are not aligned (docs/results/one_gpu.md)."""
    ids = torch.zeros(8, 1024, dtype=torch.long, device="meta")

    def planned(vocabulary: int) -> autopar.Plan:
        with torch.device("meta"):
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocabulary, use_cache=False))
        cluster = autopar.Cluster.preset("a100-80", (4,))
        return autopar.plan(model, {"input_ids": ids, "labels": ids}, cluster, constraints="tp")

    own, padded = planned(50257), planned(50304)
    assert "embedding_vocab" in {node.local for node in own.nodes}
    assert own.predicted.comm_seconds <= 1.02 * padded.predicted.comm_seconds
    slower = own.predicted.compute_seconds - padded.predicted.compute_seconds
    assert own.predicted.step_seconds <= 1.02 * padded.predicted.step_seconds + slower
    assert own.predicted.peak_bytes <= 1.01 * padded.predicted.peak_bytes
