"""Running a plan: the only part of autopar that touches `torch.distributed`."""

from autopar.runtime.application import apply, check_unplanned, check_world

__all__ = ["apply", "check_unplanned", "check_world"]
