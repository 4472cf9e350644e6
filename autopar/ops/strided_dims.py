"""`as_strided` on a shard of a tensor: which dims can be sharded, and the strides to use on the shard.

A dim of length L whose neighbours are K elements apart divides memory into (outer, L, K). `as_strided` passes this dim
through if one dim of the result steps along it alone, and all others step within K or in multiples of K·L. Sliding
windows over a sequence, for example, pass through the batch, the heads and the features inside a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def dims_passed(
    shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> list[tuple[int, int]]:
    """Pairs of a dim of a contiguous tensor of this shape, and the dim of the result that alone steps along it.

    >>> dims_passed((4, 8), size=(4, 3, 4), stride=(8, 2, 1))  # windows of four in rows of eight
    [(0, 0)]
    >>> dims_passed((8, 4, 2), size=(4, 3, 4, 2), stride=(2, 16, 8, 1))  # of four in a sequence of eight, of each row
    [(1, 0), (2, 3)]
    """
    pairs = []
    for dim, length in enumerate(shape):
        step = math.prod(shape[dim + 1 :])  # between neighbours of this dim
        for place in range(len(size)):
            if (size[place], stride[place]) == (length, step):
                others = [(n, s) for i, (n, s) in enumerate(zip(size, stride, strict=True)) if i != place and n > 1]
                inner = [(n, s) for n, s in others if s < step]
                outer = [s for _, s in others if s >= step]
                last = offset % (step * length) + sum((n - 1) * s for n, s in inner)
                if length > 1 and last < step and all(s % (step * length) == 0 for s in outer):
                    pairs.append((dim, place))
                break
    return pairs


def on_part(shape: Sequence[int], part: Sequence[int], stride: Sequence[int], offset: int = 0) -> tuple[list[int], int]:
    """Strides and offset of the same call on a shard of shape `part`, which is shorter in dims that are passed through.

    >>> on_part((8, 4, 2), (8, 2, 2), stride=(2, 16, 8, 1), offset=16)
    ([2, 8, 4, 1], 8)
    """
    stride = list(stride)
    for dim in reversed(range(len(shape))):
        step = math.prod(part[dim + 1 :])
        whole, own = step * shape[dim], step * part[dim]
        stride = [s // whole * own + s % whole for s in stride]
        offset = offset // whole * own + offset % whole
    return stride, offset
