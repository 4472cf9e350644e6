"""All that is known of picked rows, in the order in which it is asked."""

from __future__ import annotations

from autopar.tracing.picked import across, beside, grouped, labels, placed, rows, spread, sums, views, writes

WAYS = (
    across.call,  # first: all others are of rows along the first dim
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
