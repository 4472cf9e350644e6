"""Checkpoints: saved under one plan and mesh, loaded under any other, and complete at any moment (see `folders`)."""

from autopar.runtime.checkpoints.folders import Checkpoint
from autopar.runtime.checkpoints.loading import latest_checkpoint, load_checkpoint
from autopar.runtime.checkpoints.saving import save_checkpoint

__all__ = ["Checkpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]
