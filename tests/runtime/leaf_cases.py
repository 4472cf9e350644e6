"""Models with modules whose path depends on data, trained on real ranks under a plan and in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.planning.leaf_requests import LeafWarning


class Gate(nn.Module):
    """Branches on the whole batch; updates one running mean in place, and reassigns another buffer."""

    seen: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(width))
        self.register_buffer("spread", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.seen.lerp_(y.mean(0), 0.1)
            self.spread = 0.9 * self.spread + 0.1 * y.square().mean(0)
        return y * 2 if (y * x).sum() > 0 else y - self.seen


class Experts(nn.Module):
    """Each row goes to the expert with the highest score, so the number of rows of an expert depends on data."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return out


class Loop(nn.Module):
    """A recurrence within each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width // 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = x.new_zeros(x.shape[0], x.shape[1] * 3 // 4), []
        for piece in x.chunk(4, -1):
            new = self.linear(torch.cat([piece, state], -1)).tanh()
            state = torch.cat([new, state[:, : -piece.shape[1]]], -1)
            states.append(new)
        return torch.cat(states, -1)


class Replayed(Loop):
    """Its own code checkpoints its computation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "gate": lambda: Gate(16), "experts": lambda: Experts(16, 2), "loop": lambda: Loop(16),
    "replayed": lambda: Replayed(16),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.leaf = nn.Linear(16, 512), nn.Linear(512, 16), leaf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.leaf(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(LEAVES[kind]()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.blocks(x) ** 2).mean()


class Penalised(nn.Module):
    """A method of the root selects rows by data, with its own parameter and running mean."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(nn.Identity()) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(x)
        return (hidden**2).mean() + self.penalty(hidden)

    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        (rows,) = torch.where(hidden.sum(-1) > 0)
        with torch.no_grad():
            self.seen.lerp_(hidden.mean(0), 0.1)
        if len(rows) == 0:
            return hidden.sum() * 0
        return ((hidden[rows] - self.seen) * self.scale).abs().sum() / len(hidden)


class Matcher(nn.Module):
    """Matches outputs to targets by NumPy, and requires nonnegative values, as it takes the targets for sizes."""

    @torch.no_grad()
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if (targets < 0).any():
            raise ValueError("sizes are not negative")
        return torch.as_tensor((outputs[:, None] - targets).abs().sum(-1).cpu().numpy().argmin(0))


class Criterion(nn.Module):
    """Returns a dict of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher = Matcher()

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        apart = outputs[self.matcher(outputs, targets)] - targets
        return {"far": apart.square().mean(), "near": apart.abs().mean()}


def matched_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Creates its criterion in each call, so that no module of the model can be the leaf."""
    losses, weights = Criterion()(outputs, targets), {"far": 1.0, "near": 2.0}
    return sum((losses[name] * weights[name] for name in losses if name in weights), start=0.0)  # type: ignore[return-value]


class Matched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(nn.Identity()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matched_loss(self.blocks(x), x[:5].abs()) + (self.blocks(x) ** 2).mean()


class Pieces(nn.Module):
    """Returns as many pieces as there are lengths above 0."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        return list(x.split([length for length in lengths.tolist() if length]))


class OfPieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pieces, self.out = Pieces(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return sum((piece.square().sum() for piece in self.pieces(self.out(x), lengths)), start=x.new_zeros(()))


class Dropping(nn.Module):
    """Draws random numbers inside a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leaf(x).sum(-1)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(kind: str, *constraints: str, saving: bool = False) -> dict[str, Any]:
    """Three training steps: the largest difference of losses, parameters and buffers from one process."""
    roots = {"function": Penalised, "criterion": Matched}
    model, mesh = (
        (roots[kind]() if kind in roots else Net(kind)).double(),
        init_device_mesh("cpu", (dist.get_world_size(),)),
    )
    alone = copy.deepcopy(model)
    batches = torch.randn(3, 256, 16, dtype=torch.float64)
    budget = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if saving:
            free = autopar.plan(model, {"x": batches[0]}, mesh, constraints=constraints)
            budget = free.predicted.peak_bytes * 9 // 10
        autopar.autoparallelize(model, {"x": batches[0]}, mesh, constraints=constraints, memory_budget=budget)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
    worst = 0.0
    for batch in batches:
        losses = []
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]))
    pairs = [*zip(model.parameters(), alone.parameters(), strict=True)]
    pairs += zip(model.buffers(), alone.buffers(), strict=True)
    parameters = max((_whole(a) - b).abs().max().item() for a, b in pairs)
    plan = next(iter(model.__dict__["_autopar"].programs)).plan if "_autopar" in model.__dict__ else None
    return {
        "loss": worst,
        "parameters": parameters,
        "warnings": sum(w.category is LeafWarning for w in told),
        "recomputed": None if plan is None else len(plan.recompute),
        "factors": []
        if plan is None
        else sorted({f for n in plan.nodes if "leaf_Loop" in n.target for f in n.factors}),
    }


class Packed(nn.Module):
    """A recurrent layer on packed rows; without a total length the result is as long as the longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(16, 12, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(rows)[0], batch_first=True)[0]


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = Packed(), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return (self.out(self.packed(x, lengths)) ** 2).mean()


def packed_rows() -> dict[str, Any]:
    """The largest difference of losses and gradients from one process, and the error for rows of another length."""
    model, mesh = OfPacked().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    alone = copy.deepcopy(model)
    x, lengths = torch.randn(8, 5, 16, dtype=torch.float64), torch.tensor([4, 2, 3, 1, 4, 2, 2, 1])
    autopar.autoparallelize(model, {"x": x, "lengths": lengths}, mesh, constraints=("fsdp", "leaf:packed"))
    for m in (model, alone):
        m(x, lengths).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    worst = max((_whole(a.grad) - b.grad).abs().max().item() for a, b in pairs)
    message = ""
    try:
        model(x, lengths - 1 + (lengths == 1).long())
    except autopar.InputError as error:
        message = str(error)
    return {"worst": worst, "message": message}


def other_pieces() -> list[str]:
    """The errors of calls in which a leaf returns as many tensors as it was traced with, and fewer."""
    model, mesh = OfPieces(), init_device_mesh("cpu", (dist.get_world_size(),))
    x, said = torch.randn(8, 16), []
    autopar.autoparallelize(model, {"x": x, "lengths": torch.tensor([4, 2, 2])}, mesh, constraints="leaf:pieces")
    for lengths in ([4, 2, 2], [4, 4, 0], [2, 2, 4]):
        try:
            model(x, torch.tensor(lengths))
        except autopar.InputError as error:
            said.append(str(error))
    return said


def equal_masks() -> float:
    """The largest difference between ranks of a leaf's result with dropout."""
    model, mesh = Dropping().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.ones(64, 16, dtype=torch.float64)
    constraints = ("leaf:leaf", "output:* = R")
    autopar.autoparallelize(model, {"x": x}, mesh, constraints=constraints)
    torch.manual_seed(dist.get_rank())
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    theirs = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, first.detach())
    return max((first - other).abs().max().item() for other in theirs)


def _case(kind: str, *constraints: str, saving: bool = False) -> Callable[[], Any]:
    return lambda: trained(kind, *constraints, saving=saving)


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "gate": _case("gate"),
        "gate-fsdp": _case("gate", "fsdp"),
        "gate-tp": _case("gate", "tp"),
        "replayed-fsdp": _case("replayed", "leaf:blocks.*.leaf", "fsdp"),
        "gate-saving": _case("gate", "ddp", saving=True),
        "experts": _case("experts"),
        "experts-fsdp": _case("experts", "leaf:blocks.*.leaf", "fsdp"),
        "loop": _case("loop", "leaf:blocks.*.leaf"),
        "loop-fsdp": _case("loop", "leaf:blocks.*.leaf", "fsdp"),
        "loop-saving": _case("loop", "leaf:blocks.*.leaf", "ddp", saving=True),
        "function": _case("function"),
        "function-fsdp": _case("function", "fsdp"),
        "function-saving": _case("function", "ddp", saving=True),
        "criterion": _case("criterion"),
        "criterion-fsdp": _case("criterion", "fsdp"),
        "packed_rows": packed_rows,
        "other_pieces": other_pieces,
        "equal_masks": equal_masks,
    }
}
