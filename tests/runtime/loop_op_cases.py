"""Ops of optimizers and loops on sharded tensors, that torch refuses, or whose results or writes it loses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dtensor_support import JOINS_SPLIT_DIMS
from habit_cases import planned
from large_cases import refusal
from loop_cases import ROWS, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from autopar.runtime.communication.collectives import all_reduce

Op = Callable[[torch.Tensor], torch.Tensor]


def _first(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor.view(-1)[0] = value
    return tensor


def _in_list(op: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    op([tensor], *args)
    return tensor


def _seen_through_view(number: torch.Tensor) -> torch.Tensor:
    view = number.view(-1)
    number.clamp_(max=0.5)
    return view


def _doubled_in_view(tensor: torch.Tensor) -> torch.Tensor:
    index = torch.zeros_like(tensor[:1, 0], dtype=torch.int64) + 1
    tensor.view(-1).index_copy_(0, index, tensor.view(-1).index_select(0, index) * 2.0)
    return tensor


def _drawn(draw: Op) -> Op:
    """`draw` with its generator in the same state each time."""

    def seeded(tensor: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(4)
        return draw(tensor)

    return seeded


def _weighted_loss(logits: torch.Tensor) -> torch.Tensor:
    """A loss, with its gradient, whose labels are ignored in one rank's rows more often than in the other's."""
    with torch.enable_grad():
        logits = logits.requires_grad_()
        labels, weight = logits.detach().argmax(1), torch.ones_like(logits[0]).detach() + (logits[0].detach() > 0)
        loss = F.cross_entropy(logits, labels, weight, ignore_index=3)
        (gradient,) = torch.autograd.grad(loss, logits)
    return gradient * loss.detach()


def _convolved(tensor: torch.Tensor) -> torch.Tensor:
    """A convolution, with its gradient, over what may be a sharded dim, by a weight that may be sharded."""
    with torch.enable_grad():
        tensor = tensor.requires_grad_()
        found = F.conv1d(tensor.t()[None], tensor[:3].reshape(1, 4, 3), padding=1)
        (gradient,) = torch.autograd.grad(found.square().sum(), tensor)
    return gradient + found.detach().sum()


def _set_where(tensor: torch.Tensor) -> torch.Tensor:
    tensor[tensor > 0.5] = 0.0
    return tensor


BLOCKS: dict[str, Op] = {"blocks of a vector": lambda w: (w.t() * 1.0).reshape(-1).view(5, 4).abs().amax(1)}
ONE_ROW: dict[str, Op] = {  # of which the last rank holds nothing
    "where a maximum is": lambda w: w.argmax(),
    "where minima are": lambda w: w.argmin(0),
    "orthogonal rows": _drawn(lambda w: nn.init.orthogonal_(w.clone())),
    "both extremes": lambda w: torch.stack([*torch.aminmax(w)]),
}
WITH_NAN: dict[str, Op] = {
    "the largest": lambda w: w.abs().max(),
    "the smallest of columns": lambda w: w.amin(0),
    "a norm of maxima": lambda w: w.norm(float("inf")),
    "norms of lists": lambda w: torch._foreach_norm([w], float("inf"))[0],
}
EVEN: dict[str, Op] = {
    "a view's elements written (SARA)": _doubled_in_view,
    "a loss of labels that some rows ignore": _weighted_loss,
    "a convolution": _convolved,
}
FACTOR = torch.tensor(-2.0, dtype=torch.float64)
OPS: dict[str, Op] = {
    "norms clamped (AGC)": lambda w: w.norm(dim=0).clamp_(min=3.0).mul_(-1.0),
    "norms in a view (AdamP)": lambda w: w.norm(dim=0).view(1, -1).add_(1.0),
    "a mean's root (StableAdamW)": lambda w: w.square().mean().sqrt_(),
    "a sum's view written": lambda w: w.sum(0).view(-1).clamp_(max=0.5),
    "a sum written below its view": lambda w: _seen_through_view(w.sum(0)),
    "a maximum's view written": lambda w: w.amax(0).view(-1).neg_(),
    "a product filled": lambda w: torch.empty_like(w.square().prod(0)).fill_(2.0),
    "a count written": lambda w: _first((w > 0).sum(), 3.0),
    "numbers in lists": lambda w: _in_list(torch._foreach_sqrt_, w.square().sum()),
    "norms in lists": lambda w: _in_list(torch._foreach_div_, w.norm(), -2.0),
    "a plain sum (Prodigy, D-Adaptation)": lambda w: torch.zeros((), dtype=w.dtype).add_(w.square().sum()),
    "a plain average (SWATS)": lambda w: torch.ones((), dtype=w.dtype).lerp_(w.norm(), 0.5),
    "a number, then a tensor": lambda w: w.norm() * 2.0 + w.norm() * FACTOR,
    "counts added": lambda w: 0 + (w == 0).sum() + (w > 0).sum(),
    "copies of lists (Adan)": lambda w: _in_list(torch._foreach_copy_, w.clone(), [w * 2]),
    "maxima of lists (ADOPT)": lambda w: torch._foreach_maximum([w], 0.5)[0],
    "minima in place": lambda w: _in_list(torch._foreach_minimum_, w.clone(), [0.5]),
    "quotients (MADGRAD)": lambda w: torch._foreach_addcdiv([w], [w], [w.exp()], 2.0)[0],
    "products": lambda w: torch._foreach_addcmul([w], [w], [w], [3.0])[0],
    "out": lambda w: torch.nan_to_num(g := w.log(), nan=0.0, out=g),
    "out of norms (AdaGC)": lambda w: torch.minimum(n := w.norm(dim=0), n * 0.5, out=n),
    "no rule: distances": lambda w: torch.cdist(w, w),
    "no rule: rows of bounded norm": lambda w: w.clone().renorm_(2, 0, 1.0),
    "a vector of uneven rows (LBFGS)": lambda w: w.flatten() * 2.0,
    "blocks of uneven rows (8-bit)": lambda w: w.view(10, 2).abs().amax(1),
    "rows one by one": lambda w: torch.stack([row.sum() for row in w.unbind(0)]),
    "elements that a mask picks (SARA)": lambda w: w[w > 0.0],
    "a mask set": lambda w: _set_where(w.clone()),
    "a mask set, of columns": lambda w: _set_where(w.t().clone()),
    "where column maxima are": lambda w: w.argmax(-2),
    "drawn log-normal": _drawn(lambda w: w.clone().log_normal_()),
    "drawn around values": _drawn(lambda w: torch.normal(w, w.abs())),
    "an identity": lambda w: nn.init.eye_(w.clone()),
    "a convolution's identity": lambda w: nn.init.dirac_(w.clone().unsqueeze(2)),
    "zeros drawn": _drawn(lambda w: nn.init.sparse_(w.clone(), 0.3)),
    "any, as a number": lambda w: (w > 0).any().double() * -1,
    "any of rows, as numbers": lambda w: (w > 0).any(0).double() + 1,
    "all of several": lambda w: torch.stack([w.isfinite().all(), torch.ones_like(w.sum()) > 0]).all(),
}


def _sharded(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    return distribute_tensor(tensor, mesh, [Shard(0)])


def ops_on_parts() -> dict[str, str]:
    """The ops whose results on a sharded tensor differ from those on the whole, or that fail, each with how."""
    planned("fsdp")  # ops are mended from the first planned model on
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    draw = torch.Generator().manual_seed(2)
    values, one, even = (torch.randn(rows, 4, dtype=torch.float64, generator=draw) for rows in (5, 1, 6))
    with_nan = values.clone().index_fill_(0, torch.tensor(0), float("nan"))
    kinds = (OPS | (BLOCKS if JOINS_SPLIT_DIMS else {}), values), (ONE_ROW, one), (WITH_NAN, with_nan), (EVEN, even)
    for name, op, values in [(name, op, its) for ops, its in kinds for name, op in ops.items()]:
        right = op(values.clone())
        try:
            got = whole(op(_sharded(values, mesh)))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        if (got.shape, got.dtype) != (right.shape, right.dtype) or not torch.allclose(
            got, right, rtol=1e-12, atol=1e-12, equal_nan=True
        ):
            found[name] = f"{got} is not {right}"
    return found


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row": lambda w: w[0].zero_(),
    "rows": lambda w: w[1:3].mul_(2.0),
    "a set row": lambda w: w.__setitem__(0, 0.0),
    "an element": lambda w: _first(w, 1.0),
    "a filled row": lambda w: w[0].fill_(1.0),
    "a drawn row": lambda w: w[0].normal_(),
    "the diagonal": lambda w: w.diagonal().add_(1.0),
    "a vector": lambda w: w.view(3, 8).zero_(),
    "a list": lambda w: torch._foreach_zero_([w[0]]),
    "a list of maxima": lambda w: torch._foreach_maximum_([w[0]], 0.5),
    "a view of a norm": lambda w: w.norm(dim=0).view(-1).neg_(),
}


def lost_writes() -> dict[str, str]:
    """How writes into parts are refused; "no error" and nothing changed would be a write that is lost."""
    planned("fsdp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: refusal(lambda write=write: write(_sharded(torch.ones(6, 4), mesh))) for name, write in WRITES.items()
    }


def columns_written() -> bool:
    """A write into columns of what lies in rows is not lost, and not refused."""
    planned("fsdp")
    tensor = _sharded(torch.ones(6, 4), init_device_mesh("cpu", (dist.get_world_size(),)))
    tensor[:, 0] = 0.0
    tensor[:, 1].mul_(3.0)
    return whole(tensor).sum(0).tolist() == [0.0, 18.0, 6.0, 6.0]


class Products(torch.optim.Optimizer):
    """Keeps the sum of products of each matrix's gradient with itself, as Shampoo does, and replicated numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.reshape(p.shape[0], -1)
                state = self.state[p]
                state["products"] = state.get("products", 0.0) + rows.T @ rows
                p.sub_(p.grad * (0.1 / (1.0 + state["products"].norm())))


def parts_of_sums_saved() -> float:
    """The difference between training on and training on from a checkpoint of state that is the sum of parts."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        first = planned("fsdp")
        kept = Products(first.parameters(), {})
        first(ROWS).backward()
        kept.step()
        autopar.save_checkpoint(first, kept, Path(folder[0], "saved"), step=1)
        second = planned("tp")
        loaded = Products(second.parameters(), {})
        autopar.load_checkpoint(second, loaded, autopar.latest_checkpoint(Path(folder[0], "saved")))
        dist.barrier()
    worst = 0.0
    for model, optimizer in ((first, kept), (second, loaded)):
        model.zero_grad()
        model(ROWS).backward()
        optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        worst = max(worst, (whole(one) - whole(other)).abs().max().item())
    return worst


def extremes_of_ranks() -> list[str]:
    """Maxima and minima over ranks that differ from torch's on stacked tensors, of which one has NaN."""
    group, found = dist.group.WORLD.group_name, []
    draw = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        parts = torch.randn(dist.get_world_size(), 9, generator=draw).to(dtype)
        parts[:, 0], parts[0, 1:4], parts[1, 3:6], parts[0, 6:] = -0.0, torch.nan, -torch.nan, -torch.inf
        for op, stacked in (("max", parts.amax(0)), ("min", parts.amin(0))):
            got = all_reduce(parts[dist.get_rank()].clone(), op, group)
            if got.dtype != dtype or not torch.equal(got.nan_to_num(7.0), stacked.nan_to_num(7.0)):
                found.append(f"{op} {dtype}: {got} is not {stacked}")
    return found


CASES = (extremes_of_ranks, ops_on_parts, lost_writes, columns_written, parts_of_sums_saved)
