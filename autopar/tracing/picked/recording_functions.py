"""The functions that record calls with picked rows, in the order in which they are tried."""

from __future__ import annotations

from autopar.tracing.picked import across, grouped, labels, placed, rows, spread, sums, views, whole_operands, writes

RECORDING_FUNCTIONS = (
    across.record_along_other_dim,  # first, since all others handle only rows along the first dim
    whole_operands.pair_with_whole_tensors,
    writes.record_write,
    placed.record_at_indices,
    labels.record_ctc_loss,
    sums.record_reduction,
    spread.record_variance_or_softmax,
    views.record_view,
    grouped.record_view_by_sample,
    rows.record_row_by_row,
)
