"""The interface that the cases of the rows use, mapped to ours: only the defaults of `trace` differ.

The planner's `trace` expands layers, splits biases and removes in-place writes. The cases expect layers as leaves and
the model's own calls, and enable the features that they test.
"""

from autopar.tracing import *  # noqa: F403
from autopar.tracing import MetaTracer as _MetaTracer
from autopar.tracing import passes  # noqa: F401

_CASES = dict(leaf_policy="layers", bias_addition_split=False, remove_inplace=False)


def trace(root, meta_args=None, *, param_shapes_constant=True, **options):
    """`param_shapes_constant` has no effect: a parameter's sizes are always plain numbers."""
    return MetaTracer().trace(root, meta_args, **options)


class MetaTracer(_MetaTracer):
    def trace(self, root, meta_args=None, **options):
        return super().trace(root, meta_args, **{**_CASES, **options})
