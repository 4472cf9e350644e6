"""The cost of one node of the graph: FLOPs, bytes saved for backward, bytes moved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Work:
    """What the target device's kernels do for one node; its seconds are computed from this.

    FLOPs differ from the model's if a kernel skips some (causal attention) or repeats some (its backward).
    `read_bytes`: what forward reads of each tensor input (an embedding reads some rows of its table, a view nothing).
    `kernels_forward`, `kernels_backward`: how many kernels run one after another.
    The products are `batch` times (m, k) x (k, n). `columns` is n, the length of the output's dim `column_dim`; 0 if
    unknown. `attention`: the products are those of fused attention.
    """

    dtype: str  # of the arithmetic, "bfloat16"
    flops_forward: int
    flops_backward: int
    input_bytes: tuple[int, ...]
    read_bytes: tuple[int, ...]
    output_bytes: int
    output_elements: int
    kernels_forward: int
    kernels_backward: int
    batch: int = 1
    columns: int = 0
    column_dim: int = -1
    attention: bool = False
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class NodeCost:
    """Cost of one node at its global shapes, on one device, as `node.meta[COST]`.

    `flops_*`: model FLOPs, as `autopar.ops.flops` counts them on the meta device. `saved_inputs`, `saved_outputs`:
    which tensors are saved for backward, as indices into `autopar.graph.tensor_inputs(node)` and
    `output_tensors(node)`. `saved_internal_bytes`: what is saved beside them (statistics, masks); `saved_copies`: those
    of it that are copies of inputs with other strides or dtype (for a product, say), as input and bytes. `moved_*`:
    every read and write of every kernel that the op runs; views are free. `alias_of`: for each output the input whose
    storage it shares. `gradient_alias_of`: for each input the output whose gradient is the input's gradient too (of
    views, of additions); None if the gradient is a tensor of its own. `gradient_is_view`: whether the input's gradient
    is a view, into which autograd does not accumulate in place. `workspace_*`: peak bytes of temporaries, beside
    inputs, outputs, saved tensors and the gradients of inputs and outputs. `estimated`: the op does not run on
    data-free tensors, and the figures are guessed from its shapes.
    """

    flops_forward: int = 0
    flops_backward: int = 0
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_internal_bytes: int = 0
    saved_copies: tuple[tuple[int, int], ...] = ()
    moved_bytes_forward: int = 0
    moved_bytes_backward: int = 0
    alias_of: tuple[int | None, ...] = ()
    gradient_alias_of: tuple[int | None, ...] = ()
    gradient_is_view: tuple[bool, ...] = ()
    workspace_forward_bytes: int = 0
    workspace_backward_bytes: int = 0
    estimated: bool = False
    work: Work | None = None  # None: nothing runs on the device

    @cached_property
    def saved(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Which inputs and outputs are saved for backward, each once and in order, and the bytes saved beside them."""
        return tuple(sorted(set(self.saved_inputs))), tuple(sorted(set(self.saved_outputs))), self.saved_internal_bytes
