"""The surface that the rows' cases speak to, mapped to ours: only the defaults of `trace` differ.

The planner's `trace` expands layers, splits biases and removes writes in place; the cases expect layers as
leaves and the calls as the model makes them, and switch on what they test.
"""

from autopar.tracing import *  # noqa: F403
from autopar.tracing import MetaTracer as _MetaTracer
from autopar.tracing import passes  # noqa: F401

_CASES = dict(leaf_policy="layers", bias_addition_split=False, remove_inplace=False)


def trace(root, meta_args=None, *, param_shapes_constant=True, **options):
    """`param_shapes_constant`: a parameter's sizes are always plain."""
    return MetaTracer().trace(root, meta_args, **options)


class MetaTracer(_MetaTracer):
    def trace(self, root, meta_args=None, **options):
        return super().trace(root, meta_args, **{**_CASES, **options})
