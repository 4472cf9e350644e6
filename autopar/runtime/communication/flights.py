"""Conversions of several tensors at once, in the background: local actions tensor by tensor, collectives coalesced.

Each tensor has a list of actions (`communication.convert`). The collectives in all lists are of the same kinds over the
same groups in the same order. For each of them, the inputs of all tensors are copied into one buffer, one collective
runs on the buffer, and the parts of its result are the tensors again. The list of input tensors is cleared as soon as
they are in the buffer, so that the result of the collective before is freed then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.runtime.communication import collectives
from autopar.runtime.communication.convert import Action, handed
from autopar.runtime.communication.cuts import Cut, Regrouping

Landing = Callable[[], list[torch.Tensor]]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_REDUCING = ("all_reduce", "reduce_scatter")


class Flight:
    """Tensors that pass through `actions` (a list for each); the next collective has always been launched.

    `dtype`: the tensors are sent in it; `reduction_dtype`: sums over ranks are computed in it. `handed_bytes`: size of
    the tensors at the start; `under_way_bytes`: size of what the collective under way was given (both on the first
    rank); `launched`: how many collectives have been launched.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        actions: Sequence[Sequence[Action]],
        dtype: torch.dtype | None = None,
        reduction_dtype: torch.dtype | None = None,
    ) -> None:
        self._tensors = list(tensors)
        sizes = (
            handed(actions_of_tensor, tensor) * tensor.element_size()
            for actions_of_tensor, tensor in zip(actions, tensors, strict=True)
        )
        self.handed_bytes = self.under_way_bytes = sum(sizes)
        self._left = [list(actions_of_tensor) for actions_of_tensor in actions]
        self._dtype, self._reduction_dtype = dtype, reduction_dtype
        self._landing: Landing | None = None
        self._in_place = False
        self.launched = 0
        self._launch()

    def advance(self) -> None:
        """Wait for the collective under way, and launch the next one."""
        if self._landing is not None:
            self._tensors = self._landing()
            self._landing = None
            self._launch()

    def finish(self) -> list[torch.Tensor]:
        """The tensors after all of their actions, waited for."""
        while self._landing is not None:
            self.advance()
        return self._tensors

    def abandon(self) -> None:
        """Wait for the collective under way and launch no further one, since nobody wants the tensors. Without the
        wait, torch would keep the collective's input and output in memory for good."""
        if self._landing is not None:
            self._landing()
            self._landing, self._left = None, []

    @property
    def goes_on(self) -> bool:
        """Whether another collective follows the one under way."""
        return self._landing is not None and any(map(_collectives, self._left))

    @property
    def holds_more(self) -> bool:
        """Whether the collective under way keeps more memory than its result, or another one follows it."""
        return self.goes_on or (self._landing is not None and not self._in_place)

    def _launch(self) -> None:
        for i, remaining in enumerate(self._left):
            if not remaining or remaining[0].kind not in COLLECTIVES:
                if self._dtype is not None:
                    self._tensors[i] = self._tensors[i].to(self._dtype)
                while remaining and remaining[0].kind not in COLLECTIVES:
                    self._tensors[i] = remaining.pop(0).apply(self._tensors[i])
        if any(self._left):
            actions = [remaining.pop(0) for remaining in self._left]
            kind, group = actions[0].kind, actions[0].group
            assert all(a.kind == kind and a.group == group for a in actions), "a bucket's collectives differ"
            reduces = self._reduction_dtype is not None and kind in _REDUCING
            dtype = self._reduction_dtype if reduces else self._dtype or self._tensors[0].dtype
            assert dtype is not None
            tensors, self._tensors = self._tensors, []
            self.launched += 1
            self.under_way_bytes = dtype.itemsize * sum(action.handed for action in actions)
            self._landing, self._in_place = _BEGIN[kind](actions, tensors, dtype), kind == "all_reduce"


def _collectives(actions: Sequence[Action]) -> bool:
    return any(action.kind in COLLECTIVES for action in actions)


def _all_reduce(actions: Sequence[Action], tensors: list[torch.Tensor], dtype: torch.dtype) -> Landing:
    sizes = [t.numel() for t in tensors]
    shapes = [t.shape for t in tensors]
    buffer = tensors[0].new_empty(sum(sizes), dtype=dtype)
    parts = [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]
    torch._foreach_copy_(parts, tensors)
    tensors.clear()
    collectives.begin_all_reduce_(buffer, actions[0].group)

    def land() -> list[torch.Tensor]:
        collectives.wait(buffer, "all_reduce", actions[0].group)
        return parts

    return land


def _all_gather(actions: Sequence[Action], tensors: list[torch.Tensor], dtype: torch.dtype) -> Landing:
    cuts = [_required(a.cut) for a in actions]
    pieces = [cut.pad(t) for cut, t in zip(cuts, tensors, strict=True)]
    shapes, sizes = [p.shape for p in pieces], [p.numel() for p in pieces]
    buffer = pieces[0].new_empty(sum(sizes), dtype=dtype)
    torch._foreach_copy_([b.view(s) for b, s in zip(buffer.split(sizes), shapes, strict=True)], pieces)
    ranks, group = actions[0].ranks, actions[0].group
    del pieces
    tensors.clear()
    arriving = collectives.begin_all_gather(buffer, ranks, group)

    def land() -> list[torch.Tensor]:
        parts = collectives.wait(arriving, "all_gather", group).split(sizes, 1)
        stacked = [part.view(ranks, *shape) for part, shape in zip(parts, shapes, strict=True)]
        return [cut.unstack(part).contiguous() for cut, part in zip(cuts, stacked, strict=True)]

    return land


def _reduce_scatter(actions: Sequence[Action], tensors: list[torch.Tensor], dtype: torch.dtype) -> Landing:
    cuts, ranks = [_required(a.cut) for a in actions], actions[0].ranks
    stacked = [cut.stack(t) for cut, t in zip(cuts, tensors, strict=True)]
    shapes, sizes = [s.shape for s in stacked], [s.numel() // ranks for s in stacked]
    buffer = stacked[0].new_empty((ranks, sum(sizes)), dtype=dtype)
    torch._foreach_copy_([b.view(s) for b, s in zip(buffer.split(sizes, 1), shapes, strict=True)], stacked)
    del stacked
    tensors.clear()
    arriving = collectives.begin_reduce_scatter(buffer, ranks, actions[0].group)

    def land() -> list[torch.Tensor]:
        parts = collectives.wait(arriving, "reduce_scatter", actions[0].group).split(sizes)
        pieces = [part.view(shape[1:]) for part, shape in zip(parts, shapes, strict=True)]
        received = zip(pieces, cuts, actions, strict=True)
        return [piece.narrow(cut.dim, 0, cut.count(action.rank)).contiguous() for piece, cut, action in received]

    return land


def _all_to_all(actions: Sequence[Action], tensors: list[torch.Tensor], dtype: torch.dtype) -> Landing:
    rank, ranks, group = actions[0].rank, actions[0].ranks, actions[0].group
    ways = [Regrouping(_required(a.cut), _required(a.new_cut)) for a in actions]
    sent = [way.blocks(t, rank) for way, t in zip(ways, tensors, strict=True)]
    shapes = [[w.block_shape(t.shape, r, rank) for r in range(ranks)] for w, t in zip(ways, tensors, strict=True)]
    sizes = [[torch.Size(shape).numel() for shape in of_tensor] for of_tensor in shapes]
    ordered = [blocks[r] for r in range(ranks) for blocks in sent]
    numbers = [block.numel() for block in ordered]
    buffer = tensors[0].new_empty(sum(numbers), dtype=dtype)
    parts = [part.view(block.shape) for part, block in zip(buffer.split(numbers), ordered, strict=True)]
    torch._foreach_copy_(parts, ordered)
    out = [sum(blocks[r].numel() for blocks in sent) for r in range(ranks)]
    del parts, ordered, sent
    tensors.clear()
    received = [sum(of_tensor[r] for of_tensor in sizes) for r in range(ranks)]
    arriving = collectives.begin_all_to_all(buffer, out, received, group)

    def land() -> list[torch.Tensor]:
        arrived = collectives.wait(arriving, "all_to_all", group)
        parts = iter(arrived.split([of_tensor[r] for r in range(ranks) for of_tensor in sizes]))
        blocks: list[list[torch.Tensor]] = [[] for _ in ways]
        for r in range(ranks):
            for own, of_tensor in zip(blocks, shapes, strict=True):
                own.append(next(parts).view(of_tensor[r]))
        return [way.join(own, rank) for way, own in zip(ways, blocks, strict=True)]

    return land


_BEGIN = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _required(cut: Cut | None) -> Cut:
    assert cut is not None
    return cut
