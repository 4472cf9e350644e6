"""Local code: what runs on a rank's tensors where the op itself would give another result.

A strategy names it (`Strategy.local`), and the runtime calls it:

================  ==========================================================================================
shape             views, repeats, grids and factories are given the output's local shape
split             sizes of the parts along a dim that is sharded inside each part
slice             bounds on a sharded dim, divided by its number of pieces
strided           `as_strided` of a contiguous tensor
groups            grouped convolutions: groups divided by the number of pieces of the channels
masked_scatter    the whole mask tells which elements of the source a part takes
mean              a mean over a sharded dim: the summand of this rank (output P)
embedding_vocab   rows of the weight sharded: masked lookup (output P)
cross_entropy     rows sharded: local sum over the global count (output P); classes sharded: normalised over
                  all ranks (output R), or picked by each rank from its own (`nll_loss`, output P)
log_softmax       classes sharded: normalised over all ranks
extremum          `amax`, `amin`, `max` and `min` over sharded dims: elements of all ranks share the gradient
batch_norm        statistics over all axes that shard the batch or space; running statistics equal on all ranks
instance_norm     running statistics, equal on all ranks: means over all axes that shard the batch
dropout           mask from a counter over global indices
sdpa_dropout      attention with such a mask
drawn             other random numbers, from such a counter or seeded by the step's key
recurrent_dropout recurrent layers with such masks between them
experts           experts of a mixture that lie on several ranks (output P)
experts_exchanged tokens sent to the ranks of their experts, and back
routed            experts in a loop of their own on some of the tokens: ranks read the same weights in backward
routed_drawn      the same with random numbers in it
sdpa_causal       causal attention on a part of the queries: halves are swapped, to balance the ranks' work
sdpa_causal_mask  the same with a mask, where no fused kernel supports it
================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.runtime.local import (
    causal,
    classes,
    draws,
    experts,
    extrema,
    losses,
    masks,
    norms,
    recurrent,
    routed,
    shapes,
    vocabulary,
)
from autopar.runtime.local.context import LocalContext, LocalOp

LOCAL_OPS: Mapping[str, LocalOp] = {
    "shape": shapes.shape,
    "split": shapes.split,
    "slice": shapes.sliced,
    "strided": shapes.strided,
    "groups": shapes.groups,
    "masked_scatter": shapes.masked_scatter,
    "mean": losses.mean,
    "embedding_vocab": vocabulary.embedding,
    "cross_entropy": losses.cross_entropy,
    "log_softmax": classes.log_softmax,
    "extremum": extrema.extremum,
    "batch_norm": norms.batch_norm,
    "instance_norm": norms.instance_norm,
    "dropout": masks.dropout,
    "sdpa_dropout": masks.attention_dropout,
    "drawn": draws.drawn,
    "recurrent_dropout": recurrent.recurrent_dropout,
    "experts": experts.experts,
    "experts_exchanged": experts.exchanged,
    "routed": routed.routed,
    "routed_drawn": routed.routed,
    "sdpa_causal": causal.swapped_attention,
    "sdpa_causal_mask": masks.causal_attention,
}
NEEDS_KEY = frozenset({"dropout", "sdpa_dropout", "drawn", "recurrent_dropout", "routed_drawn"})
"""Local code that is given the random key of the step."""


def run_local(
    name: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ctx: LocalContext,
    key: torch.Tensor | None = None,
) -> Any:
    """Run local code `name` for the op `target` (of a method: `torch.Tensor.<name>`) on this rank's tensors."""
    return LOCAL_OPS[name](target, args, kwargs, ctx, key)


__all__ = ["LOCAL_OPS", "NEEDS_KEY", "LocalContext", "LocalOp", "run_local"]
