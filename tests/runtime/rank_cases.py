"""Cases that run on real ranks (see launch.py); each returns figures that the tests check."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import moving_cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from applying import SEGMENT, applied, equals_one_process, error_of, mesh_of, no_replan, reference, train
from hand_made import Net, batch, plan, trace
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import InfeasibleError
from autopar.layout import Layout
from autopar.runtime.application import apply
from autopar.runtime.ranks.agreement import agree, from_rank_zero

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

KINDS: dict[str, dict[str, Any]] = {"": {}, "+recompute": {"recompute": SEGMENT}, "+regather": {"regather": True}}


def model_stays_the_users() -> dict[str, Any]:
    alone = reference()
    model, *_ = applied((2,), ("fsdp",))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch(0)).backward()
    optimizer.step()
    return {
        "isinstance": isinstance(model, Net) and type(model).__name__ == "Net",
        "signature": str(inspect.signature(model.forward)) == str(inspect.signature(alone.forward)),
        "repr": repr(model) == repr(alone),
        "keys": list(model.state_dict()) == list(alone.state_dict()),
        "twin_untouched": error_of(twin, alone) == 0.0,
        "twin_runs": abs(twin(**batch(0)).item() - alone(**batch(0)).item()),
        "buffer": model.get_buffer("scale").tolist(),
    }


def fused_optimizer() -> float:
    alone = reference()
    train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2))
    model, *_ = applied((2,), ("fsdp",))
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    return error_of(model, alone)


def other_calls() -> dict[str, Any]:
    """A smaller batch, and eval without gradients: each is traced and planned once, around the stored parameters."""
    alone, calls = reference(), []

    def replan(called: nn.Module, args: Any, kwargs: Any, storage: Mapping[str, Layout], *_: Any) -> Any:
        calls.append((type(model) is Net, all(type(p) is nn.Parameter for p in model.parameters())))
        traced = trace(model, kwargs)
        again = plan(traced, (2,), ("fsdp",))
        assert {p.name: p.storage for p in again.parameters} == storage
        return traced, again

    torch.manual_seed(0)
    model = Net().double()
    traced = trace(model, batch(0))
    apply(model, traced, plan(traced, (2,), ("fsdp",)), mesh_of((2,)), replan=replan)
    small = {k: v[:4] for k, v in batch(1).items()}
    errors = []
    for _ in range(2):
        errors.append(model(**batch(0)).item() - alone(**batch(0)).item())
        errors.append(model(**small).item() - alone(**small).item())
        model.eval()
        with torch.no_grad():
            errors.append(model(**batch(0)).item() - alone(**batch(0)).item())
        model.train()
    return {"error": max(map(abs, errors)), "calls": calls}


def local_inputs() -> float:
    """Each rank passes its own part of the batch."""
    alone, rank = reference(), dist.get_rank()
    model, *_ = applied((2,), ("dp",), inputs="local")
    errors = []
    for step in range(2):
        part = {k: v.chunk(2)[rank] for k, v in batch(step).items()}
        loss = model(part.pop("x"), **part)
        loss.backward()
        errors.append(abs(loss.item() - alone(**batch(step)).item()))
    return max(errors)


def sharded_output() -> dict[str, Any]:
    """A model that returns its prediction, a DTensor, through which gradients flow."""
    alone = reference()
    torch.manual_seed(0)
    model = Net().double()
    traced = trace(model, batch(0), last="sub")
    apply(model, traced, plan(traced, (2,), ("dp",), output="S0"), mesh_of((2,)), replan=no_replan)
    y = model(**batch(0))
    loss = (y * y).sum()
    loss.backward()
    loss_alone = alone(**batch(0))
    loss_alone.backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return {
        "type": type(y).__name__,
        "shape": list(y.shape),
        "loss_error": abs(loss.full_tensor().item() - loss_alone.item()),
        "gradient_error": max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs),
    }


def mixed_precision() -> dict[str, Any]:
    """bfloat16 compute with float32 parameters; gradients are reduced over the ranks in float32."""
    torch.manual_seed(0)
    model = Net()
    model.scale = model.scale.bfloat16()
    inputs = {k: v.float() for k, v in batch(0).items()}
    traced = trace(model, inputs, dtype=torch.bfloat16)
    precision = {"parameter": "float32", "compute": "bfloat16", "reduction": "float32"}
    apply(model, traced, plan(traced, (2,), ("fsdp",), precision=precision), mesh_of((2,)), replan=no_replan)
    seen: set[str] = set()
    with Dtypes(seen):
        loss = model(**inputs)
        loss.backward()
    alone = reference()
    alone(**batch(0)).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return {
        "loss": str(loss.dtype),
        "gradients": sorted({str(p.grad.dtype) for p in model.parameters()}),  # type: ignore[union-attr]
        "collectives": sorted(seen),
        "error": max((p.grad.full_tensor() - q.grad).abs().max().item() / q.grad.abs().max().item() for p, q in pairs),
    }


class Dtypes(TorchDispatchMode):
    """Records the dtypes in which collectives run."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and isinstance(args[0], torch.Tensor) and "wait" not in func.name():
            self.seen.add(f"{func.name().split('::')[1].split('.')[0]} {args[0].dtype}")
        return func(*args, **(kwargs or {}))


class Alive(TorchDispatchMode):
    """Counts the bytes of those storages created inside that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        """The smallest of 50 readings, as a gloo thread may hold a collective's tensors for a moment after its end."""

        def reading() -> int:
            time.sleep(0.01)
            return sum(n for reference, n in self.storages.values() if not reference.expired())

        return min(reading() for _ in range(50))


def bytes_kept(styles: tuple[str, ...], **options: Any) -> int:
    """Bytes alive between forward and backward, beyond parameters and inputs."""
    model, *_ = applied((2,), styles, **options)
    inputs = batch(0)
    model(**inputs).backward()
    with Alive() as alive:
        loss = model(**inputs)
        kept = alive.bytes()
    loss.backward()
    return kept


def memory() -> dict[str, int]:
    segment = {"recompute": (("linear", "tanh_1"),)}
    return {
        "dp": bytes_kept(("dp",)),
        "dp+recompute": bytes_kept(("dp",), **segment),
        "fsdp": bytes_kept(("fsdp",)),
        "fsdp+recompute": bytes_kept(("fsdp",), **segment),
        "fsdp+regather": bytes_kept(("fsdp",), regather=True),
    }


def ranks_disagree() -> dict[str, Any]:
    """The error of each mistake on this rank; a rank that makes no mistake must get an error too."""
    rank = dist.get_rank()

    def met(mistake: Callable[[], Any]) -> str:
        try:
            mistake()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def another_plan() -> None:
        applied((2,), ("dp",), regather=rank == 1)

    def another_mesh() -> None:
        model = Net().double()
        traced = trace(model, batch(0))
        apply(model, traced, plan(traced, (4,), ("dp",)), mesh_of((2,)), replan=no_replan)

    def another_graph() -> None:
        model = Net().double()
        traced = trace(model, batch(0))
        made = plan(traced, (2,), ("dp",))
        small = trace(model, {k: v[:4] for k, v in batch(0).items()})
        apply(model, small, made, mesh_of((2,)), replan=no_replan)

    def one_rank_fails() -> None:
        agree(torch.device("cpu"), {}, ValueError("the disk is full") if rank == 1 else None)

    def another_batch() -> None:
        model, *_ = applied((2,), ("dp",))
        model(**batch(rank))

    def early_optimizer() -> None:
        model = Net().double()
        optimizer = torch.optim.AdamW(model.parameters())
        traced = trace(model, batch(0))
        apply(model, traced, plan(traced, (2,), ("dp",)), mesh_of((2,)), replan=no_replan)
        model(**batch(0))
        optimizer.step()

    def solver_fails() -> None:
        def make() -> str:
            raise InfeasibleError("no plan fits", smallest_budget_bytes=7)

        try:
            from_rank_zero(make, torch.device("cpu"))
        except InfeasibleError as error:
            raise InfeasibleError(f"{error}, smallest is {error.smallest_budget_bytes}") from error

    mistakes = [another_plan, another_mesh, another_graph, one_rank_fails, another_batch, early_optimizer, solver_fails]
    found = {mistake.__name__: met(mistake) for mistake in mistakes}
    long = "text" * 1000
    assert from_rank_zero(lambda: long, torch.device("cpu")) == long
    for p in (model := applied((2,), ("dp",))[0]).parameters():
        assert p is not None  # the loop variable must not keep the model alive
    model(**batch(0))
    return found


def save_checkpoint() -> None:
    model, *_ = applied((4,), ("fsdp",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=os.environ["CHECKPOINT"])


def load_checkpoint() -> dict[str, float]:
    """Loads on another number of ranks, under another plan, and continues like one uninterrupted process."""
    alone = reference()
    optimizer_alone = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    train(alone, optimizer_alone)
    model, *_ = applied((2,), ("tp",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=os.environ["CHECKPOINT"])
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = error_of(model, alone)
    train(alone, optimizer_alone)
    train(model, optimizer)
    return {"loaded": loaded, "after_training_on": error_of(model, alone)}


def on_line(ranks: int) -> dict[str, Callable[[], Any]]:
    return {
        style + name: functools.partial(equals_one_process, (ranks,), (style,), **options)
        for style in ("dp", "tp", "fsdp")
        for name, options in KINDS.items()
    }


def on_square() -> dict[str, Callable[[], Any]]:
    return {
        f"{'x'.join(styles)}{name}": functools.partial(equals_one_process, (2, 2), styles, **options)
        for styles in (("dp", "tp"), ("tp", "fsdp"), ("dp", "fsdp"), ("fsdp", "fsdp"))
        for name, options in KINDS.items()
    }


ALONE = (
    model_stays_the_users,
    fused_optimizer,
    *moving_cases.CASES,
    other_calls,
    local_inputs,
    sharded_output,
    mixed_precision,
    memory,
    ranks_disagree,
)
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {**on_line(2), **{case.__name__: case for case in ALONE}, "load_checkpoint": load_checkpoint},
    4: {
        **on_line(4),
        **on_square(),
        "gathers_over_two_axes": moving_cases.gathers_over_two_axes,
        "save_checkpoint": save_checkpoint,
    },
}
