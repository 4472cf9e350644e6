"""Communication of parameters and gradients on real ranks: by buckets, once a step, and in unusual backward passes."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from applying import SEGMENT, applied, equals_one_process, error_of, mesh_of, reference
from hand_made import Net, batch, plan, trace
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import gradients_are_finite
from autopar.errors import InputError
from autopar.layout import Layout
from autopar.plans import Bucket
from autopar.runtime.application import apply
from autopar.runtime.communication import collectives
from autopar.runtime.communication.flights import Flight
from autopar.runtime.communication.gathers import Gathers
from autopar.runtime.communication.reductions import Reductions

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
from counting import CollectiveCounter


def bucket(*names: str) -> Bucket:
    return Bucket(names, (Layout.parse("R+"),) * len(names))


BUCKETS = {
    "dp": [bucket("up.weight", "up.bias", "down.bias"), bucket("down.weight", "head.weight", "head.bias")],
    "fsdp": [bucket("up.weight", "down.weight"), bucket("head.weight", "head.bias"), bucket("down.bias")],
}


def in_buckets() -> dict[str, Any]:
    """Parameters of one bucket are communicated together: fewer collectives, with the same bytes and results."""
    found = {}
    for style, buckets in BUCKETS.items():
        for name, options in (("", {}), ("+regather", {"regather": True})):
            together = equals_one_process((2,), (style,), buckets=buckets, **options)
            alone = equals_one_process((2,), (style,), **options)
            found[style + name] = together | {"counted_alone": alone["counted"]}
    return found


def gathers_over_two_axes() -> dict[str, Any]:
    """The order in which forward begins gathers, waits for them and runs products; three buckets of two collectives."""
    layout, log = Layout.parse("R+,R+"), list[str]()
    buckets = [
        Bucket(names, (layout,) * len(names))
        for names in (("up.weight",), ("down.weight", "down.bias"), ("head.weight", "head.bias"))
    ]
    shape, styles = (2, 2), ("fsdp", "fsdp")
    bucketed = equals_one_process(shape, styles, buckets=buckets, regather=True)
    model, *_ = applied(shape, styles, buckets=buckets, regather=True)
    axes = {mesh_of(shape).get_group(axis).group_name: axis for axis in range(2)}
    begin, wait = collectives.begin_all_gather, collectives.wait

    def logged_begin(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
        log.append(f"begin{axes[group]}")
        return begin(tensor, size, group)

    def logged_wait(tensor: torch.Tensor, kind: str, group: str) -> torch.Tensor:
        if kind == "all_gather":
            log.append(f"wait{axes[group]}")
        return wait(tensor, kind, group)

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):  # addmm adds the bias in the product
                log.append("product")
            return func(*args, **(kwargs or {}))

    with mock.patch.multiple(collectives, begin_all_gather=logged_begin, wait=logged_wait), Products():
        model(**batch(0))
    return {"log": log, "bucketed": bucketed}


def reductions(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Number of collectives in a forward and backward, without that of the loss."""
    with CollectiveCounter(mesh_of((2,))) as counter:
        model(**inputs).backward()
    return counter.calls.total() - 1


def accumulation() -> dict[str, Any]:
    """Several backward passes before a step: gradients are reduced in the last, by `no_sync` or the plan's count."""
    moved, errors = {}, []
    for how, micro_batches in (("no_sync", 1), ("counted", 3)):
        alone = reference()
        model, *_ = applied((2,), ("dp",), buckets=BUCKETS["dp"], micro_batches=micro_batches)
        optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (alone, model)]
        for step in range(2):
            for micro in range(3):
                inputs = batch(3 * step + micro)
                alone(**inputs).backward()
                with model.no_sync() if how == "no_sync" and micro < 2 else contextlib.nullcontext():
                    moved[how, step, micro] = reductions(model, inputs)
            for trained, optimizer in zip((alone, model), optimizers, strict=True):
                nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        errors.append(error_of(model, alone))
    return {"error": max(errors), "moved": {" ".join(map(str, key)): count for key, count in moved.items()}}


def accumulation_over_shapes() -> float:
    """Micro-batches of another shape have another graph: gradients waiting from one are reduced with the other's."""
    alone, small = reference(), {k: v[:4] for k, v in batch(1).items()}

    def replan(called: nn.Module, args: Any, kwargs: Any, storage: Mapping[str, Layout], *_: Any) -> Any:
        traced = trace(model, kwargs)
        return traced, plan(traced, (2,), ("dp",))

    torch.manual_seed(0)
    model = Net().double()
    traced = trace(model, batch(0))
    apply(model, traced, plan(traced, (2,), ("dp",), buckets=BUCKETS["dp"]), mesh_of((2,)), replan=replan)
    for trained in (alone, model):
        with trained.no_sync() if trained is model else contextlib.nullcontext():
            trained(**batch(0)).backward()
        trained(**small).backward()
    return gradient_error(model, alone)


def gradient_error(model: nn.Module, alone: nn.Module) -> float:
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs)


def steps_too_early() -> dict[str, str]:
    """Errors of an optimizer step that would miss waiting gradients; dropped gradients do not count."""
    model, *_ = applied((2,), ("dp",), micro_batches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for name in ("early", "dropped"):
        model(**batch(0)).backward()
        if name == "dropped":
            model.zero_grad()
        try:
            optimizer.step()
        except InputError as error:
            found[name] = str(error)
    return found


def zeroed_between() -> dict[str, float]:
    """`zero_grad` while gradients of a backward still wait drops these, as in one process."""
    found = {}
    for how, micro_batches in (("no_sync", 1), ("counted", 2)):
        for who in ("optimizer", "optimizer, zeros", "model", "of some"):
            alone = reference()
            model, *_ = applied((2,), ("dp",), buckets=BUCKETS["dp"], micro_batches=micro_batches)
            for trained in (alone, model):
                own = [p for name, p in trained.named_parameters() if who != "of some" or name.startswith("up")]
                optimizer = torch.optim.SGD(own, lr=0.1)
                with trained.no_sync() if trained is model and how == "no_sync" else contextlib.nullcontext():
                    trained(**batch(0)).backward()
                if who == "model":
                    trained.zero_grad()
                else:
                    optimizer.zero_grad(set_to_none=who != "optimizer, zeros")
                if how == "counted" and who != "of some" and trained is model:
                    (0.0 * trained(**batch(2))).backward()  # the plan counts its two backward passes from the zeroing
                trained(**batch(1)).backward()
            found[f"{how}: {who}"] = gradient_error(model, alone)
    return found


def closures() -> dict[str, Any]:
    """A step whose closure runs the last backward has all gradients; others are refused."""
    alone, found = reference(), {}
    model, *_ = applied((2,), ("dp",), buckets=BUCKETS["dp"], micro_batches=2)
    for trained in (alone, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(**batch(0)).backward()
        optimizer.step(lambda trained=trained: trained(**batch(1)).backward())
        optimizer.zero_grad()
    found["error"] = error_of(model, alone)
    try:
        optimizer.step(closure=lambda: model(**batch(2)).backward())
    except InputError as error:
        found["told"] = str(error)
    return found


def unusual_backwards() -> dict[str, float]:
    """One graph's backward twice, two calls in one backward, some parameters' gradients, then all in the same graph."""
    found = {}
    for style, options in (("dp", {}), ("fsdp", {"regather": True}), ("fsdp", {"recompute": SEGMENT})):
        alone = reference()
        model, *_ = applied((2,), (style,), buckets=[] if "recompute" in options else BUCKETS[style], **options)
        for trained in (alone, model):
            loss = trained(**batch(0))
            loss.backward(retain_graph=True)
            loss.backward()
            (trained(**batch(1)) + 2.0 * trained(**batch(2))).backward()
        name = f"{style} {' '.join(options)}"
        found[name] = gradient_error(model, alone)
        [want] = torch.autograd.grad(alone(**batch(0)), [alone.down.weight])
        [got] = torch.autograd.grad(model(**batch(0)), [model.down.weight])
        found[f"{name} one"] = (got.full_tensor() - want).abs().max().item()
        for trained in (alone, model):  # the plan takes the weight of a loss from its gradient at one layer
            trained.zero_grad()
            loss = trained(**batch(3))
            torch.autograd.grad(loss, [trained.head.weight, trained.up.weight], retain_graph=True)
            loss.backward(inputs=[trained.down.bias], retain_graph=True)
            loss.backward()
        found[f"{name} some, then all"] = gradient_error(model, alone)
    return found


def dropped_calls() -> dict[str, int]:
    """Number of live communication objects after calls without backward and calls that keep their graph; and of live
    flights (arrived gradients) while the loop keeps the losses."""
    found = {}
    for style, options in (("dp", {}), ("fsdp", {"regather": True}), ("fsdp", {"recompute": SEGMENT})):
        model, *_ = applied((2,), (style,), buckets=[] if "recompute" in options else BUCKETS[style], **options)
        for step in range(2):
            model(**batch(step))
            model(**batch(step)).backward(retain_graph=True)
        gc.collect()
        found[f"{style} {' '.join(options)}"] = sum(type(one) in (Gathers, Reductions) for one in gc.get_objects())
        losses = [model(**batch(step)) for step in range(2)]
        torch.stack(losses).sum().backward()
        gc.collect()
        found[f"{style} {' '.join(options)}, kept"] = sum(type(one) is Flight for one in gc.get_objects())
        del losses
    return found


def compiled() -> dict[str, float]:
    """`torch.compile` of a planned model, allowing graph breaks."""
    alone, found = reference(), {}
    alone(**batch(0)).backward()
    for style in ("dp", "fsdp"):
        torch.compiler.reset()
        model, *_ = applied((2,), (style,), buckets=BUCKETS[style])
        torch.compile(model, backend="aot_eager")(**batch(0)).backward()
        found[style] = gradient_error(model, alone)
    return found


def step_left_out() -> dict[str, Any]:
    """With a NaN in one rank's shard of a gradient only, all ranks skip the step, as one process would."""
    alone, found = reference(), []
    model, *_ = applied((2,), ("fsdp",), buckets=BUCKETS["fsdp"])
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (alone, model)]
    for step in range(4):
        for trained, optimizer in zip((alone, model), optimizers, strict=True):
            trained(**batch(step)).backward()
            if trained is model and step == 2 and torch.distributed.get_rank() == 1:
                model.head.weight.grad.to_local()[0, 0] = float("nan")
            if gradients_are_finite(trained) and (trained is model or step != 2):
                optimizer.step()
                found.append(step)
            optimizer.zero_grad()
    return {"steps": found, "error": error_of(model, alone)}


CASES = (
    step_left_out,
    in_buckets,
    accumulation,
    accumulation_over_shapes,
    steps_too_early,
    zeroed_between,
    closures,
    unusual_backwards,
    dropped_calls,
    compiled,
)
