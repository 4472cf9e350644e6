"""Experts of a mixture on several ranks: each rank computes what is routed to its own experts."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.communication import collectives
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import exchange


def experts(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """This rank's summand: routes to experts that it does not hold get weight 0.

    Shapes are static: a rank has room for every route, but computes only those to its own experts.
    """
    hidden, index, weights, *parameters = args
    start, count = ctx.stretch(ctx.inputs[3], 0, ctx.input_shapes[3][0])
    mine = (index >= start) & (index < start + count)
    local = torch.where(mine, index - start, count)
    return target(hidden, local, torch.where(mine, weights, 0), *parameters, local_experts=count)


@torch.compiler.disable(reason="how many tokens go to which rank depends on data")  # type: ignore[untyped-decorator]
def exchanged(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """Tokens and experts are both sharded over some axes: a token goes to its expert's rank, the result comes back.

    Several axes are handled one after the other: first to the ranks that have the expert's outermost digit, from there
    to those with the next. How many tokens go where depends on data, so every rank first tells the others, and the
    host.
    """
    hidden, index, weights, *parameters = args
    shared_axes = set(ctx.axes_that_shard(ctx.inputs[0], 0)) & set(ctx.axes_that_shard(ctx.inputs[3], 0))
    rows, expert, share, routes = hidden, index.flatten(), weights.flatten(), index.shape[1]
    experts_here, ways = ctx.input_shapes[3][0], []
    for axis in sorted(shared_axes, key=lambda axis: ctx.inputs[3].placements[axis].outer):
        ranks, group = ctx.mesh.shape[axis], ctx.mesh.groups[axis]
        experts_here //= ranks
        home = expert // experts_here
        order = home.argsort(stable=True)
        source = order // routes
        leaving = home.new_zeros(ranks).scatter_add_(0, home, torch.ones_like(home))  # bincount syncs with host twice
        arriving = collectives.all_to_all(leaving, [1] * ranks, [1] * ranks, group)
        sent, received = torch.stack([leaving, arriving]).tolist()
        ways.append((source, rows.shape[0], sent, received, group))
        rows = exchange(rows[source], sent, received, group)
        expert = collectives.all_to_all((expert % experts_here)[order], sent, received, group)
        share, routes = exchange(share[order], sent, received, group), 1
    # one row more, of weight 0: the library's code does not take an empty batch, and every expert gets a gradient
    rows, share = (torch.nn.functional.pad(t, [0, 0] * (t.dim() - 1) + [0, 1]) for t in (rows, share))
    expert = torch.nn.functional.pad(expert, (0, 1))
    done = target(rows, expert.unsqueeze(1), share.unsqueeze(1), *parameters, local_experts=experts_here)[:-1]
    for source, count, sent, received, group in reversed(ways):
        back = exchange(done, received, sent, group)
        done = back.new_zeros(count, back.shape[1]).index_add(0, source, back)
    return done
