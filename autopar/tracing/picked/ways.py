"""The handlers of calls with picked rows, in the order in which they are tried."""

from __future__ import annotations

from autopar.tracing.picked import across, beside, grouped, labels, placed, rows, spread, sums, views, writes

WAYS = (
    across.call,  # first, since all others handle only rows along the first dim
    beside.call,
    writes.call,
    placed.call,
    labels.call,
    sums.call,
    spread.call,
    views.call,
    grouped.call,
    rows.call,
)
