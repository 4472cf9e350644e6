"""Ranks whose peak includes tensors that ops save besides inputs and results: contiguous copies, routes of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peak_cases import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

WORDS, LENGTH, WIDTH = 512, 32, 64


class Turned(nn.Module):
    """Normalises over the last dim but one, as PatchTST does, so that each product copies its input."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(input_ids).transpose(1, 2)).transpose(1, 2)
        return torch.stack([torch.tanh(head(x)).square().mean() for head in self.heads]).sum()


class Tied(nn.Module):
    """The head is tied to the embedding, which a norm follows: one bucket, read at both ends of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(input_ids))
        for layer in self.layers:
            x = x + layer(x)
        return (x @ self.words.weight.T).square().mean()


class Between(nn.Module):
    """The head is tied to an embedding between two stacks, so its bucket is the first in backward. The first stack's
    bucket is next in that order, but is only needed after the second stack's."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.words = nn.Linear(1, WIDTH), nn.Embedding(64, WIDTH)
        self.first, self.second = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, times * WIDTH), nn.ReLU(), nn.Linear(times * WIDTH, WIDTH))
                for _ in range(number)
            )
            for number, times in ((2, 4), (4, 6))
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.features(input_ids.unsqueeze(-1).float())
        for layer in self.first:
            x = x + layer(x)
        x = x + self.words(input_ids % 64)
        for layer in self.second:
            x = x + layer(x)
        return nn.functional.linear(x, self.words.weight).square().mean()


class Tables(nn.Module):
    """Stacks the rows of several tables, as recommendation models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in range(6))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(input_ids) for table in self.tables]).square().mean()


class Loop(nn.Module):
    """One block applied several times: each weight has one gradient, beside that of the op which is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(8, 128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids % 8)
        for _ in range(8):
            x = x + self.down(torch.tanh(self.up(x)))
        return x.square().mean()


class Again(nn.Module):
    """One block applied several times, with nothing before it: all applications read weights that the first gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(LENGTH, 1024), nn.Linear(1024, LENGTH)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids / WORDS
        for _ in range(6):
            x = x + self.down(torch.tanh(self.up(x)))
        return x.square().mean()


class Narrow(nn.Module):
    """Small blocks share a bucket and the batch cannot be split: the whole bucket arrives when the first block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(LENGTH, 128), nn.ReLU(), nn.Linear(128, LENGTH)) for _ in range(6)
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids / WORDS
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Early(nn.Module):
    """Each wide layer follows an op without weights that saves its result, so gradients are reduced before its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 384)
        self.layers = nn.ModuleList(nn.Linear(384, 384) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids % 8)
        for layer in self.layers:
            x = layer(torch.relu(x))
        return x.square().mean()


class Dropping(nn.Module):
    """Dropout, also in attention: masks of one byte for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for _ in range(4):
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
            x = x + nn.functional.dropout(attended.transpose(1, 2).flatten(2), 0.2)
            x = x + nn.functional.dropout(torch.tanh(x), 0.2)
        return self.head(x).square().mean()


class Relative(nn.Module):
    """Picks scores by distances, which differ by layer, as in DeBERTa: one position table, expanded over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, LENGTH) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, total = self.words(input_ids), torch.zeros(())
        places = torch.arange(LENGTH)
        for i, layer in enumerate(self.layers):
            distances = (places[:, None] - places[None, :]).abs().clamp(max=8 + i)
            scores = torch.gather(layer(x), -1, distances.expand(x.shape[0], -1, -1))
            total = total + scores.square().mean()
        return total


def mixtral(experts: str = "grouped_mm", number: int = 4) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=number, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def copying_mixtral() -> nn.Module:
    """Each route copies its expert's weights."""
    return mixtral("batched_mm")


def split_mixtral() -> nn.Module:
    """The number of experts is odd, so that each expert is split."""
    return mixtral(number=3)


def peaks(build: Callable[[], nn.Module], preset: str, rows: int) -> dict[str, Any]:
    ids = torch.randint(WORDS, (rows, LENGTH))
    batch = {"input_ids": ids, "labels": ids} if "mixtral" in build.__name__ else {"input_ids": ids}
    mesh = init_device_mesh("cpu", (2,))
    model = autopar.autoparallelize(build(), batch, mesh, constraints=preset, optimizer="sgd", time_limit=20)
    return measured(model, batch, torch.optim.SGD(model.parameters()))


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "copies for products": functools.partial(peaks, Turned, "tp", 32),
        "a tied head and a norm": functools.partial(peaks, Tied, "fsdp", 4),
        "a tied head between two stacks": functools.partial(peaks, Between, "fsdp", 10),
        "rows of tables": functools.partial(peaks, Tables, "tp", 16),
        "one block in a loop, recomputed": functools.partial(peaks, Loop, "ddp(recompute=full)", 2),
        "one block in a loop": functools.partial(peaks, Loop, "ddp", 2),
        "one block in a loop, gathered": functools.partial(peaks, Loop, "fsdp", 2),
        "one block in a loop, gathered for replays": functools.partial(peaks, Again, "fsdp(recompute=full)", 8),
        "stored in shards, computed whole": functools.partial(peaks, Narrow, "param:* = S0", 1),
        "places expanded to all rows": functools.partial(peaks, Relative, "ddp", 32),
        "what is kept before a layer": functools.partial(peaks, Early, "ddp", 4),
        "masks of what is dropped": functools.partial(peaks, Dropping, "ddp", 32),
        "experts": functools.partial(peaks, mixtral, "tp", 16),
        "experts that are split": functools.partial(peaks, split_mixtral, "tp", 16),
        "experts that copy their weights": functools.partial(peaks, copying_mixtral, "ddp", 2),
    }
}
