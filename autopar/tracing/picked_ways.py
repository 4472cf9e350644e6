"""All that is known of picked rows, in the order in which it is asked."""

from __future__ import annotations

from autopar.tracing import (
    picked_across,
    picked_beside,
    picked_grouped,
    picked_labels,
    picked_placed,
    picked_rows,
    picked_spread,
    picked_sums,
    picked_views,
    picked_writes,
)

WAYS = (
    picked_across.call,  # first: all others are of rows along the first dim
    picked_beside.call,
    picked_writes.call,
    picked_placed.call,
    picked_labels.call,
    picked_sums.call,
    picked_spread.call,
    picked_views.call,
    picked_grouped.call,
    picked_rows.call,
)
