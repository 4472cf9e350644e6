"""autopar plans and runs distributed training of a PyTorch model."""

from autopar.errors import AutoparError

__version__ = "0.1.0"
__all__ = ["AutoparError", "__version__"]
