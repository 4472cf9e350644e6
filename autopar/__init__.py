"""autopar plans and runs distributed training of a PyTorch model."""

import importlib
from typing import TYPE_CHECKING, Any

from autopar.api import autoparallelize, compare, plan, search, simulate
from autopar.cluster import Cluster
from autopar.errors import (
    AutoparError,
    CheckpointError,
    CollectiveError,
    InfeasibleError,
    InputError,
    LayoutError,
    PlanMismatchError,
    RuleError,
    TimeLimitError,
    UntraceableError,
)
from autopar.plans import Plan
from autopar.precision import Precision
from autopar.tracing import known
from autopar.user_warnings import AutoparWarning

if TYPE_CHECKING:
    from autopar.planning.leaf_requests import LeafWarning
    from autopar.pretrained import from_pretrained
    from autopar.runtime.calling.batches import local_batch, sampler
    from autopar.runtime.calling.entered import register_forward_method
    from autopar.runtime.calling.own_rows import own_rows
    from autopar.runtime.checkpoints import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
    from autopar.runtime.dtensors.adafactor import Adafactor
    from autopar.runtime.gradients.finite import gradients_are_finite
    from autopar.runtime.monitoring import monitor
    from autopar.runtime.stored.carried import plan_of
    from autopar.runtime.weights.exporting import export_full_state
    from autopar.runtime.weights.loading import load_weights
    from autopar.runtime.weights.materialising import materialise
    from autopar.solver.constraints.idle_constraints import ConstraintWarning

__version__ = "0.1.0"
__all__ = [
    "Adafactor",
    "AutoparError",
    "AutoparWarning",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "CollectiveError",
    "ConstraintWarning",
    "InfeasibleError",
    "InputError",
    "LayoutError",
    "LeafWarning",
    "Plan",
    "PlanMismatchError",
    "Precision",
    "RuleError",
    "TimeLimitError",
    "UntraceableError",
    "autoparallelize",
    "compare",
    "export_full_state",
    "from_pretrained",
    "gradients_are_finite",
    "known",
    "latest_checkpoint",
    "load_checkpoint",
    "load_weights",
    "local_batch",
    "materialise",
    "monitor",
    "own_rows",
    "plan",
    "plan_of",
    "register_forward_method",
    "sampler",
    "save_checkpoint",
    "search",
    "simulate",
]

_WHERE = {  # name -> module of autopar that defines it; imported on first use
    "Adafactor": "runtime.dtensors.adafactor",
    "Checkpoint": "runtime.checkpoints",
    "ConstraintWarning": "solver.constraints.idle_constraints",
    "LeafWarning": "planning.leaf_requests",
    "latest_checkpoint": "runtime.checkpoints",
    "load_checkpoint": "runtime.checkpoints",
    "save_checkpoint": "runtime.checkpoints",
    "gradients_are_finite": "runtime.gradients.finite",
    "materialise": "runtime.weights.materialising",
    "monitor": "runtime.monitoring",
    "export_full_state": "runtime.weights.exporting",
    "from_pretrained": "pretrained",
    "load_weights": "runtime.weights.loading",
    "local_batch": "runtime.calling.batches",
    "own_rows": "runtime.calling.own_rows",
    "plan_of": "runtime.stored.carried",
    "register_forward_method": "runtime.calling.entered",
    "sampler": "runtime.calling.batches",
}


def __getattr__(name: str) -> Any:
    """Import names of the runtime on first use, so that planning does not import torch.distributed."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"autopar.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'autopar' has no attribute '{name}'")
