"""How much slower a GPU's products are if rows are not aligned to 16 bytes: the figures of `cost.ops.products`.

    python scripts/bench/odd_products.py

TFLOP/s of the three products of a linear layer on 8192 rows of random numbers: forward, and backward for input and
weight. `rate`: of the three together; `part`: relative to the rate with aligned rows of the same size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from autopar.report.tables import table

ROWS, REPEATS = 8192, 10
# (columns, depth) of the products; OFF is added to the one that is no multiple of 16.
SIZES = ((50264, 768), (50264, 2048), (4104, 1600), (4096, 1608))
OFF = (0, -7, -6, -4)  # rows are then aligned to 8, 1, 2 and 4 elements


def seconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS


def taken(columns: int, depth: int, dtype: torch.dtype) -> list[float]:
    """Seconds of forward, of the input's gradient and of the weight's gradient."""
    x, w, g = (
        torch.randn(shape, device="cuda", dtype=dtype) for shape in ((ROWS, depth), (columns, depth), (ROWS, columns))
    )
    return [seconds(lambda: x @ w.t()), seconds(lambda: g @ w), seconds(lambda: g.t() @ x)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and PyTorch finds none here")
    rows, parts = [], dict[tuple[str, int], list[float]]()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns, depth in SIZES:
            aligned = 0.0
            for off in OFF:
                n, k = (columns, depth + off) if depth % 16 and columns % 16 == 0 else (columns + off, depth)
                times, flops = taken(n, k, dtype), 2.0 * ROWS * n * k
                rate = 3 * flops / sum(times)
                aligned = aligned or rate
                name = str(dtype).removeprefix("torch.")
                parts.setdefault((name, -off % 8), []).append(rate / aligned)
                cells = [f"{flops / one / 1e12:.0f}" for one in times] + [f"{rate / 1e12:.0f}"]
                rows.append([name, f"{n}", f"{k}", *cells, f"{rate / aligned:.2f}"])
    head = ["dtype", "columns", "depth", "forward", "to input", "to weight", "rate", "part"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(*table(rows, "<" + ">" * 7, head=head, indent=0), sep="\n")
    print("\nMedian parts:")
    for (name, off), found in parts.items():
        if off:
            print(f"  {name}, rows of multiples of {off & -off} elements: {statistics.median(found):.2f}")


if __name__ == "__main__":
    main()
