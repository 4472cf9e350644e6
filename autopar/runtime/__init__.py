"""Running a plan: the only part of autopar that touches `torch.distributed`."""

from autopar.runtime.application import apply

__all__ = ["apply"]
