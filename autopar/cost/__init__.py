"""The cost model: FLOPs, bytes and seconds of a graph under layouts, computed without running it."""

from autopar.cost.collectives import collective_seconds
from autopar.cost.ops.annotation import annotate, saved_bytes, total_flops
from autopar.cost.ops.node_cost import NodeCost, Work
from autopar.cost.seconds import node_seconds

__all__ = ["NodeCost", "Work", "annotate", "collective_seconds", "node_seconds", "saved_bytes", "total_flops"]
