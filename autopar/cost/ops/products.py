"""Seconds of matrix products on one device, by their local shapes: tiles, and waves of tiles over processors.

A library cuts the (m, n) outputs of a batch of products (m, k) x (k, n) into tiles; each processor computes one tile at
a time, so that ceil(tiles / processors) waves run one after the other, the last one mostly not full, and tiles at the
edges are computed whole (tile and wave quantisation: NVIDIA, Matrix Multiplication Background User's Guide). A tile of
(a, b) takes 2 a b (k + depth) / rate: the loop over k has to start and to end. Smaller tiles read more for what they
compute and reach less of the rate. Where tiles are few the library splits k over processors (at least `least_k` each)
and sums. It takes the best of these; so does `busy_flops`.

Half-precision products of a GPU want rows that begin at multiples of 16 bytes (NVIDIA, Deep Learning Performance
Guide, "Tensor Core Requirements"); where an operand's or the result's do not, as with a vocabulary of 50257, they take
three to six times as long (`Family.unaligned`).

>>> whole = busy_flops("cuda", 108, 1, 8192, 8192, 8192) / (2 * 8192**3)
>>> round(whole, 2), busy_flops("cuda", 108, 1, 8193, 8192, 8192) > 2 * 8192**3 * whole
(1.01, True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import fx

from autopar.cost.ops.node_cost import Work
from autopar.graph import target_name
from autopar.layout import Layout


@dataclass(frozen=True)
class Family:
    """How one family of devices multiplies: tiles (rows, columns, part of the rate), depth of a loop's ends in k.

    `unaligned`: (elements, part of the rate) of half-precision products whose rows have multiples of that many elements
    at most; without any, alignment does not matter.
    """

    tiles: tuple[tuple[int, int, float], ...]
    depth: int
    least_k: int
    unaligned: tuple[tuple[int, float], ...] = ()


FAMILIES = {
    # CUTLASS' and hipBLASLt's tiles of half-precision products.
    "cuda": Family(
        ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.65)),
        64,
        1024,
        # Medians of forward and backward on an H100, by scripts/bench/odd_products.py (docs/results/one_gpu.md).
        ((1, 0.18), (2, 0.36), (4, 0.36)),
    ),
    # Register blocks inside a core's caches (BLIS: 16 x 6 to 32 x 12 of float32).
    "cpu": Family(((16, 16, 1.0),), 4, 1 << 30),
}
_SPLITS = (1, 2, 4, 8, 16)
_HALF = ("bfloat16", "float16")


@lru_cache(maxsize=1 << 16)
def busy_flops(kind: str, processors: int, batch: float, m: float, n: float, k: float) -> float:
    """FLOPs that the device could do in the time of `batch` products (m, k) x (k, n), were it full: >= 2 batch m n k.

    Never less for a larger m, n, k or batch; and a d-th of a product never takes less than a d-th of its time.
    """
    family = FAMILIES[kind]
    best = math.inf
    for rows, columns, part in family.tiles:
        tiles = math.ceil(batch) * math.ceil(m / rows) * math.ceil(n / columns)
        each = 2 * rows * columns / part
        for split in _SPLITS:
            depth = max(k / split, family.least_k) if split > 1 else k
            waves = math.ceil(tiles * split / processors)
            ends = family.depth if split == 1 else 4 * family.depth  # the sums of partial results
            best = min(best, waves * processors * each * (depth + ends))
            if depth <= family.least_k:
                break
    return max(best, 2 * batch * m * n * k)


def aligned_part(kind: str, dtype: str, *rows: float) -> float:
    """The part of its rate that a product reaches whose operands' and results' rows have these many elements.

    >>> aligned_part("cuda", "bfloat16", 50257, 768), aligned_part("cuda", "bfloat16", 50304, 768)
    (0.18, 1.0)
    """
    if dtype in _HALF:
        for elements, part in FAMILIES[kind].unaligned:
            if any(length % (2 * elements) for length in rows if length == int(length)):
                return part
    return 1.0


def as_product(
    work: Work, node: fx.Node, output: torch.Tensor, inputs: Sequence[torch.Tensor], *, attention: bool
) -> Work:
    """`work` with the form of the node's product; its second input is taken for the one of (k, n) a product."""
    if output.dim() < 2 or not output.numel():
        return replace(work, attention=attention)
    dim = 1 if "conv" in target_name(node) else output.dim() - 1
    columns, depth = output.shape[dim], work.flops_forward / (2 * work.output_elements)
    batch = inputs[1].numel() / (columns * depth) if len(inputs) > 1 and not attention else 1.0
    whole = batch >= 1 and batch == int(batch)
    return replace(work, attention=attention, batch=int(batch) if whole else 1, columns=columns, column_dim=dim)


def product_seconds(
    work: Work,
    rate: float,
    kind: str,
    processors: int,
    *,
    part: float,
    output_part: float,
    columns_cut: float,
    second_part: float,
) -> tuple[float, float]:
    """Seconds forward and backward of a node's products on one device, which computes `part` of them.

    `rate`: FLOP/s of a full device. The device holds `output_part` of the output, whose columns are cut in
    `columns_cut` pieces, and `second_part` of the second input. Backward is a product for each input that needs a
    gradient: (m, n) x (n, k) and (k, m) x (m, n); that of attention, and of what has no known form, goes like forward.
    """
    elements = work.output_elements * output_part
    forward = work.flops_forward * part
    if not forward or not elements:
        return forward / rate, work.flops_backward * part / rate
    k = forward / (2 * elements)
    times = work.flops_backward / work.flops_forward
    if not work.columns:
        return forward / rate, times * forward / rate
    n, whole_k = work.columns / columns_cut, work.flops_forward / (2 * work.output_elements)
    batch = min(max(1.0, work.batch * second_part * columns_cut * whole_k / k), float(work.batch))
    m = elements / n / batch
    in_rows = work.column_dim == len(work.output_shapes[0]) - 1 if work.output_shapes else True  # not of a convolution
    if in_rows and not work.attention:  # the whole lengths: where a cut is uneven, the last device's are as odd
        rate *= aligned_part(kind, work.dtype, n, k, work.columns, whole_k)
    busy = busy_flops(kind, processors, batch, m, n, k)
    if work.attention or not 0 < times <= 2:
        return busy / rate, times * busy / rate
    ways = busy_flops(kind, processors, batch, m, k, n), busy_flops(kind, processors, batch, k, n, m)
    return busy / rate, (sum(ways) if times > 1 else max(ways)) * (times / 2 if times > 1 else times) / rate


def columns_cut(layouts: Sequence[Layout], work: Work, mesh_shape: tuple[int, ...] | None) -> float:
    """Into how many pieces as long as the longest the columns of the first output are cut."""
    if mesh_shape is None or not layouts or work.column_dim < 0:
        return 1.0
    return _cut(layouts[0], work.column_dim, work.columns, mesh_shape)


@lru_cache(maxsize=1 << 16)
def _cut(layout: Layout, dim: int, columns: int, mesh_shape: tuple[int, ...]) -> float:
    longest = columns
    for placement, ranks in zip(layout.placements, mesh_shape, strict=True):
        if placement.is_sharded and placement.dim == dim:
            longest = -(-longest // ranks)
    return columns / longest
