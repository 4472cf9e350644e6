"""Concatenated picked rows (`cat`), and products that sum over picked rows (`rows.T @ rows`, `einsum`)."""

from __future__ import annotations

from typing import Any

import torch

from autopar.tracing.picked.harmless import given
from autopar.tracing.picked.picked import Pick, Picked, all_in, is_plain, masked
from autopar.tracing.picked.picks import Picks
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_JOINING = ("cat", "concat", "concatenate")
_PRODUCTS = ("matmul", "mm", "mv", "dot", "rmatmul")


def joined(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenated rows of several masks, and whole tensors; NotImplemented for any other call."""
    if plain_name(func) not in _JOINING or not args or not isinstance(args[0], (tuple, list)):
        return NotImplemented
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    met = [one for one in parts if isinstance(one, Picked)]
    at, rank = (met[0].at, met[0].values.ndim) if met else (0, 0)
    if type(dim) is not int or not met or dim % rank != at or kwargs.keys() - {"dim"}:
        return NotImplemented
    values = [one.values if isinstance(one, Picked) else one for one in parts]
    if any(one.at != at for one in met) or any(one.ndim != rank for one in values):
        return NotImplemented
    key = ("cat", *(one.pick if isinstance(one, Picked) else int(one.shape[at]) for one in parts))
    with picks.recorder.on():
        if key not in picks.joined:
            pick = picks.joined[key] = picks.of(torch.cat([_mask(one, at) for one in parts]))
            pick.least = sum(one.pick.least if isinstance(one, Picked) else int(one.shape[at]) for one in parts)
        made = Picked(picks.joined[key], torch.cat(values, at), holds=min(one.holds for one in met))
    made.at = at
    return made


def stacked(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stacked rows of one mask, `torch.stack([source, target])`; NotImplemented for any other call."""
    if plain_name(func) != "stack" or not args or not isinstance(args[0], (tuple, list)):
        return NotImplemented
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first: Any = parts[0]
    if type(dim) is not int or not all(isinstance(one, Picked) for one in parts):
        return NotImplemented
    if any(one.pick is not first.pick or one.at != first.at or one.values.ndim != first.values.ndim for one in parts):
        return NotImplemented
    with picks.recorder.on():
        made = Picked(
            first.pick, torch.stack([one.values for one in parts], dim), holds=min(one.holds for one in parts)
        )
    made.at = first.at + (dim % made.values.ndim <= first.at)
    return made


def _mask(one: Any, at: int) -> Tensor:
    if isinstance(one, Picked):
        return one.pick.rows
    return torch.ones(one.shape[at], dtype=torch.bool, device=one.device)


def call(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product that sums over the rows, or keeps their dim; NotImplemented for others."""
    name = plain_name(func)
    if name == "einsum":
        return _einsum(picks, *args, **kwargs)
    if name not in _PRODUCTS or len(args) != 2 or kwargs:
        return NotImplemented
    first, second = args[::-1] if name == "rmatmul" else args
    if not (isinstance(first, Picked) and isinstance(second, Picked)) or not _is_open_to(picks, first, second):
        return NotImplemented
    ranks = first.values.ndim, second.values.ndim
    if max(ranks) > 2 or first.at != ranks[0] - 1 or second.at:
        return NotImplemented
    left, right = masked(first, 0), masked(second, 0)
    with picks.recorder.on():
        return left @ right


def _is_open_to(picks: Picks, *met: Picked) -> bool:
    """Whether a product of rows may run on all rows: all are of one mask, which is also that of earlier products."""
    pick: Pick = met[0].pick
    if any(one.pick is not pick for one in met) or picks.dense not in (None, pick):
        return False
    picks.dense = pick
    return True


def _einsum(picks: Picks, equation: Any, *operands: Any) -> Any:
    """An einsum of rows of one mask: the letter of the row dim is summed over, or kept in the output."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    met = all_in(operands)
    if len(letters) != len(operands) or any(len(l) != _rank(one) for l, one in zip(letters, operands, strict=True)):
        return NotImplemented
    rows = {l[one.at] for l, one in zip(letters, operands, strict=True) if isinstance(one, Picked)}
    row = rows.pop()
    held = [l.count(row) for l in letters]
    alike = held == [int(isinstance(one, Picked)) for one in operands]
    if rows or not alike or output.count(row) > 1 or not _is_open_to(picks, *met):
        return NotImplemented
    keeps = row in output
    shown = [one if is_plain(one) else given("matmul", one) if keeps else masked(one, 0) for one in operands]
    with picks.recorder.on():
        made = torch.einsum(equation, *shown)
    if not keeps:
        return made
    kept = Picked(met[0].pick, made, holds=1)
    kept.at = output.index(row)
    return kept


def _rank(one: Any) -> int:
    return one.values.ndim if isinstance(one, Picked) else one.ndim
