"""Graph passes that work on any `torch.fx.Graph`, whether traced by us or exported."""

from autopar.tracing.passes.autocast import fix_autocast
from autopar.tracing.passes.batch_dims import remove_batch_dim_nodes
from autopar.tracing.passes.checkpoints import emit_checkpoints
from autopar.tracing.passes.erasing import graph_erase_node
from autopar.tracing.passes.inplace import remove_inplace, replace_inplace_targets
from autopar.tracing.passes.slices import remove_unnecessary_slices

__all__ = [
    "emit_checkpoints",
    "fix_autocast",
    "graph_erase_node",
    "remove_batch_dim_nodes",
    "remove_inplace",
    "remove_unnecessary_slices",
    "replace_inplace_targets",
]
