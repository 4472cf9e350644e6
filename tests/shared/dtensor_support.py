"""What torch can do with DTensors from a later version on than the oldest that we support. Before, it says so."""

import torch

JOINS_SPLIT_DIMS = torch.__version__ >= "2.12"  # a view that joins a dim that is split with the one before it
DIFFERENTIATES_SCANS = torch.__version__ >= "2.13"  # `cumsum`, `logcumsumexp`: 2.11 knows no `flip`
TAKES_GRADIENTS = torch.__version__ >= "2.12"  # 2.11 copies what autograd puts into `.grad`, instead
