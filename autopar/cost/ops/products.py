"""Seconds of matrix products on one device, by their local shapes: tiles, and waves of tiles over processors.

A library cuts the (m, n) outputs of a batch of products (m, k) x (k, n) into tiles. Each processor computes one tile at
a time, so that ceil(tiles / processors) waves run one after another. The last wave is mostly not full, and tiles at the
edges are computed whole (tile and wave quantisation: NVIDIA, Matrix Multiplication Background User's Guide). A tile of
(a, b) takes 2 a b (k + depth) / rate, where depth stands for the prologue and epilogue of the loop over k. Smaller
tiles read more for what they compute and reach less of the rate. If there are few tiles, the library splits k over
processors (at least `least_k` each) and sums the results. It takes the best of these variants, and so does
`busy_flops`.

Half-precision products of a GPU need rows that begin at multiples of 16 bytes (NVIDIA, Deep Learning Performance
Guide, "Tensor Core Requirements"). If an operand or the result has other rows, as with a vocabulary of 50257, they take
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
    """How one family of devices multiplies. `tiles`: (rows, columns, part of the rate that they reach); `depth`: the
    loop's prologue and epilogue, in steps of k; `least_k`: the least k of one part when k is split.

    `unaligned`: (elements, part of the rate) for half-precision products whose rows' lengths are multiples of no more
    than this power of two; empty if alignment does not matter.
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
_SPLITS = (1, 2, 4, 8, 16)  # the numbers of parts of k that are tried
_HALF = ("bfloat16", "float16")


@lru_cache(maxsize=1 << 16)
def busy_flops(kind: str, processors: int, batch: float, m: float, n: float, k: float) -> float:
    """The FLOPs that a fully used device could do in the time of `batch` products (m, k) x (k, n): >= 2 batch m n k.

    Monotone in m, n, k and batch; and a d-th of a product never takes less than a d-th of its time.
    """
    family = FAMILIES[kind]
    best = math.inf
    for rows, columns, part in family.tiles:
        tiles = math.ceil(batch) * math.ceil(m / rows) * math.ceil(n / columns)
        each = 2 * rows * columns / part
        for split in _SPLITS:
            depth = max(k / split, family.least_k) if split > 1 else k
            waves = math.ceil(tiles * split / processors)
            ends = family.depth if split == 1 else 4 * family.depth  # also sums the partial results
            best = min(best, waves * processors * each * (depth + ends))
            if depth <= family.least_k:
                break
    return max(best, 2 * batch * m * n * k)


def aligned_part(kind: str, dtype: str, *rows: float) -> float:
    """The part of its rate that a product reaches if its operands' and its result's rows have these lengths.

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
    """`work` with batch and columns of the node's product; the second input is taken to have k n elements per
    product."""
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
    """Forward and backward seconds of a node's products on one device, which computes `part` of them.

    `rate`: FLOP/s of a fully used device. The device holds `output_part` of the output, whose columns are cut into
    `columns_cut` pieces, and `second_part` of the second input. Backward has one product for each input that requires a
    gradient: (m, n) x (n, k) and (k, m) x (m, n). Backward of attention, and of products of unknown form, is priced by
    its FLOPs at forward's efficiency.
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
    in_rows = work.column_dim == len(work.output_shapes[0]) - 1 if work.output_shapes else True  # False: a convolution
    if in_rows and not work.attention:  # whole lengths too: if the cut is uneven, some device has an odd length
        rate *= aligned_part(kind, work.dtype, n, k, work.columns, whole_k)
    busy = busy_flops(kind, processors, batch, m, n, k)
    if work.attention or not 0 < times <= 2:
        return busy / rate, times * busy / rate
    ways = busy_flops(kind, processors, batch, m, k, n), busy_flops(kind, processors, batch, k, n, m)
    return busy / rate, (sum(ways) if times > 1 else max(ways)) * (times / 2 if times > 1 else times) / rate


def columns_cut(layouts: Sequence[Layout], work: Work, mesh_shape: tuple[int, ...] | None) -> float:
    """The columns of the first output, over those of the longest piece into which they are cut."""
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
