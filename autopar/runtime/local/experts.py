"""Experts of a mixture on several ranks: each does what is routed to its own."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.local.context import LocalContext


def experts(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """This rank's summand: routes to experts that it does not hold get no weight.

    Static shapes: a rank has room for every route, and does the work of those to its own experts.
    """
    hidden, index, weights, *parameters = args
    start, count = ctx.stretch(ctx.inputs[3], 0, ctx.input_shapes[3][0])
    mine = (index >= start) & (index < start + count)
    local = torch.where(mine, index - start, count)
    return target(hidden, local, torch.where(mine, weights, 0), *parameters, held=count)
