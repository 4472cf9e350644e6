"""Writes strategies/discovery/discovered.json: sharding rules that discovery finds for torch ops without a table entry.

python scripts/discover_ops.py
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from autopar.strategies.discovery import cache, discover
from autopar.strategies.examples import example
from autopar.strategies.table import entry


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, requires_grad=True)


def calls() -> Iterator[tuple[Any, ...]]:
    """Calls of ops as models make them, on tensors of two to four dims."""
    a, b, c, d = 64, 48, 40, 36
    for shape in ((a, b), (a, b, c)):
        x = numbers(*shape)
        for op in (torch.cummax, torch.cummin, torch.diff, torch.median, torch.mode, torch.kthvalue):
            rest = {torch.diff: (1, -1), torch.kthvalue: (3, -1)}.get(op, (-1,))
            yield (op, x, *rest)
        yield torch.cosine_similarity, x, numbers(*shape), -1
        yield F.pairwise_distance, x, numbers(*shape)
        yield torch.diag_embed, x
        yield torch.bucketize, x.detach(), numbers(11).detach()
        yield torch.quantile, x, 0.5, -1
        yield torch.special.entr, x
        yield torch.sinc, x
        yield torch.heaviside, x.detach(), numbers(*shape).detach()
        yield torch.renorm, x, 2, 0, 1.0
        yield torch.erfinv, x
        yield torch.trapezoid, x
        yield F.local_response_norm, numbers(*shape, d)[..., None].squeeze(-1), 2
    yield torch.cdist, numbers(a, b, c), numbers(a, d, c)
    yield torch.cross, numbers(a, b, 3), numbers(a, b, 3), -1
    yield torch.diagonal, numbers(a, b, b), 0, 1, 2
    yield torch.baddbmm, numbers(a, b, d), numbers(a, b, c), numbers(a, c, d)
    yield torch.bilinear, numbers(a, b), numbers(a, c), numbers(d, b, c)
    yield torch.kron, numbers(a, b), numbers(c, d)
    yield torch.tensordot, numbers(a, b, c), numbers(c, d), 1
    yield torch.linalg.inv, torch.eye(b, dtype=torch.float64).repeat(a, 1, 1).requires_grad_()
    yield torch.linalg.matrix_exp, numbers(a, b, b)
    yield torch.linalg.det, numbers(a, b, b)
    for size in (32, 64):
        image = numbers(16, 24, size, size)
        yield F.pixel_shuffle, image, 2
        yield F.pixel_unshuffle, image, 2
        yield torch.channel_shuffle, image, 4
        yield F.unfold, image, 2, 1, 0, 2
        yield F.lp_pool2d, image, 2.0, 2
        yield F.affine_grid, numbers(16, 2, 3), [16, 3, size, size], False
    yield F.fold, numbers(16, 96, 64), [16, 16], 2, 1, 0, 2


def main() -> None:
    cache.SHIPPED.write_text("{}\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        os.environ["AUTOPAR_DISCOVERY_CACHE"] = str(path)
        for target, *args in calls():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                node, _ = example(target, *args)
                if entry(node) is None:
                    print(target.__name__, discover(node), flush=True)
        known = {key: line for key, line in json.loads(path.read_text()).items() if "rule" in line}
    cache.SHIPPED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
