"""Bytes that live on one device at a moment of a step: formulas that the prediction and the solver's rows share.

**Copies.** A saved tensor is kept in the layout that the op which saves it wants. Two saved tensors are one copy if
they alias the same storage in the graph and are cut alike; a converted tensor is a copy of its own. A view is charged
as the whole storage behind it.

**Parameters** count in the optimizer's dtype, in the layout in which they are stored. Where an op reads a parameter in
another dtype or layout, it reads a copy, which lives until the op's backward has made the gradient, unless the copy is
dropped and gathered again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar.cost.buckets.size import BUCKET_BYTES
from autopar.cost.memory.cuts import SUMMANDS, Cuts, in_storage
from autopar.cost.memory.scalars import scalar_bytes
from autopar.cost.memory.states import state_bytes
from autopar.cost.memory.weights import named_once, unread_bytes
from autopar.cost.structure.memo import Memo
from autopar.graph import COST, TensorRef, given_dtype, is_cast_input, output_tensors, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.precision import Precision

if TYPE_CHECKING:
    from autopar.cost.buckets.grouping import Grouping
    from autopar.cost.memory.lifetimes import Lifetimes
    from autopar.cost.memory.savings import Kept, Savings
    from autopar.cost.structure.blocks import Repeat
    from autopar.cost.structure.folds import Fold

Copy = tuple[TensorRef, Cuts]  # the tensor that owns the storage, and how the storage is cut

# Bytes that torch's allocator hands out beyond the tensors, by kind of device. On CUDA: the workspaces of cuBLAS (32
# MiB on Hopper, one each for the threads of forward and backward) and the rounding of every tensor to 512 bytes. Not
# counted: that it hands out whole blocks (up to 190 MiB in a step), and temporaries of sums over many rows (132 MiB on
# Hopper); see docs/results/one_gpu.md.
_ALLOCATOR_BYTES = {"cuda": 66 << 20}


@dataclass(frozen=True)
class StepMemory:
    """Bytes per device of the parts of one step, from the graph and the layouts asked for.

    Graph nodes need `meta[COST]`; a node without it keeps nothing. `parameters`: the model's parameters by qualified
    name, as they will be stored (their dtype is overridden by `precision.parameter`); `buffers`: the model's, by name.
    `repeats`: the graph's blocks (`cost.structure.blocks`); they only save time, as equal blocks are looked at once.
    `bucket_bytes`: the size of a bucket of parameters; `most_bucket_bytes`: its limit where one parameter is larger
    (`cost.buckets.size`). `pinned`: layouts in which parameters are already stored; `trained`: parameters that other
    graphs of the model train.
    """

    graph: fx.Graph
    parameters: Mapping[str, torch.Tensor]
    mesh_shape: tuple[int, ...]
    precision: Precision
    optimizer: str
    micro_batches: int
    device_kind: str
    train: bool = True
    repeats: tuple[Repeat, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    most_bucket_bytes: int = BUCKET_BYTES
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    pinned: Mapping[str, Layout] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Bytes by part that live throughout, whatever is chosen: what the device's allocator takes beside tensors;
        weights that the graph does not read, stored whole unless pinned; and the optimizer's state of parameters that
        only other graphs train, which have no gradients while this graph runs."""
        stored = self.precision.parameter
        unread = unread_bytes(self.graph, self.parameters, self.buffers, stored, self.pinned, self.mesh_shape)
        parts = {"allocator": _ALLOCATOR_BYTES.get(self.device_kind, 0), "unread weights": unread, **scalar_bytes(self)}
        own = {str(node.target) for node in self.graph.nodes if self.is_trainable(node)}
        whole = Layout.replicated(len(self.mesh_shape))
        for names, parameter in named_once(self.parameters):
            if not self.trained.isdisjoint(names) and own.isdisjoint(names):
                dtype = self._stored_dtype(parameter)
                states = self._state_bytes(tuple(parameter.shape), dtype, self.pinned.get(names[0], whole))
                for part, size in states.items():
                    parts[part] = parts.get(part, 0) + size
        return parts

    @property
    def fixed_bytes(self) -> int:
        return sum(self.fixed.values())

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """The points of a step where the peak can be."""
        from autopar.cost.memory.lifetimes import Lifetimes  # here, as that module imports this one

        return Lifetimes(self)

    @cached_property
    def without_backward(self) -> StepMemory:
        """The same for a pass without backward over the graph."""
        return replace(self, train=False)

    @cached_property
    def folds(self) -> tuple[Fold, ...]:
        """The repeats whose middle blocks are equal in everything that this class answers."""
        from autopar.cost.structure.folds import find_folds

        return find_folds(self)

    def grouping(self, repeats: Sequence[Repeat]) -> Grouping:
        """How parameters share buckets in a graph with these blocks."""
        from autopar.cost.buckets.grouping import Grouping  # here, as that module imports this one
        from autopar.cost.structure.blocks import unparted

        blocks = unparted(repeats)
        if blocks not in self._groupings:
            self._groupings[blocks] = Grouping(self, blocks)
        return self._groupings[blocks]

    @cached_property
    def _groupings(self) -> dict[tuple[Repeat, ...], Grouping]:
        return {}

    @cached_property
    def inputs(self) -> dict[fx.Node, list[TensorRef]]:
        """The tensors that each node reads, one entry per occurrence; found when first asked for."""
        return Memo(tensor_inputs)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def is_parameter(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and node.target in self.parameters

    def is_trainable(self, node: fx.Node) -> bool:
        return self.train and self.is_parameter(node) and self.parameters[str(node.target)].requires_grad

    def is_frozen(self, node: fx.Node) -> bool:
        return self.train and self.is_parameter(node) and not self.is_trainable(node)

    def stored_dtype(self, node: fx.Node) -> torch.dtype:
        """The dtype in which the optimizer updates the parameter."""
        return self._stored_dtype(self.parameters[str(node.target)])

    def _stored_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        stored = parameter.dtype
        return (self.precision.parameter or stored) if stored.is_floating_point else stored

    def parameter_bytes(self, node: fx.Node, storage: Layout) -> dict[str, int]:
        """Bytes by part that a parameter takes throughout: itself, its master copy and the optimizer's state."""
        key = tensor_of(TensorRef(node, 0)).shape, self.stored_dtype(node), self.is_trainable(node), storage
        parts = self._parameter_bytes.get(key)
        if parts is None:
            parts = self._parameter_bytes[key] = self._bytes_of_parameter(*key)
        return parts

    @cached_property
    def _parameter_bytes(self) -> dict[tuple[object, ...], dict[str, int]]:
        return {}

    def _bytes_of_parameter(
        self, whole: tuple[int, ...], dtype: torch.dtype, trainable: bool, storage: Layout
    ) -> dict[str, int]:
        parts = {"parameters": math.prod(storage.local_shape(tuple(whole), self.mesh_shape)) * dtype.itemsize}
        return parts | self._state_bytes(tuple(whole), dtype, storage) if trainable else parts

    def _state_bytes(self, whole: tuple[int, ...], dtype: torch.dtype, storage: Layout) -> dict[str, int]:
        return state_bytes(self.optimizer, self.precision, whole, dtype, storage, self.mesh_shape)

    def gradient_bytes(self, node: fx.Node, storage: Layout) -> int:
        """Bytes of the gradient that the optimizer reads."""
        return self.parameter_bytes(node, storage)["parameters"] if self.is_trainable(node) else 0

    def optimizer_traffic_bytes(self, node: fx.Node, storage: Layout) -> int:
        """Bytes that the optimizer's step moves: it reads and writes every tensor, and reads the gradient."""
        if not self.is_trainable(node):
            return 0
        return 2 * sum(self.parameter_bytes(node, storage).values()) + self.gradient_bytes(node, storage)

    @property
    def optimizer_at_once(self) -> bool:
        """Whether torch's optimizers update all parameters at once (foreach, as on CUDA) or one after another."""
        return self.device_kind == "cuda"

    def read_bytes(self, node: fx.Node, storage: Layout, wanted: Layout) -> int:
        """Bytes of the copy of a parameter that an op reads: 0 where it reads the stored tensor itself."""
        tensor = tensor_of(TensorRef(node, 0))
        if tensor.dtype == self.stored_dtype(node) and self.cuts(storage) == self.cuts(wanted):
            return 0
        return self.local_bytes(TensorRef(node, 0), wanted)

    # -- saved tensors ------------------------------------------------------------------------------------------------

    @cached_property
    def roots(self) -> dict[TensorRef, TensorRef]:
        """The tensor whose storage each tensor shares; views of parameters count as their own."""
        return Memo(self._root)

    def _root(self, ref: TensorRef) -> TensorRef:
        while True:
            aliases = getattr(ref.node.meta.get(COST), "alias_of", ())
            place = aliases[ref.index] if ref.index < len(aliases) else None
            source = self.inputs[ref.node][place] if place is not None else None
            if source is None or self.is_parameter(source.node):
                return ref
            ref = source

    def saved(self, node: fx.Node) -> Kept:
        """Which inputs and outputs a node keeps for backward, and how many bytes beside them (whole, unsharded); only
        parameters if backward never reaches the node."""
        return self.savings.kept[node]

    def saves(self, node: fx.Node) -> bool:
        """Whether autograd keeps anything for this node (a replay runs as far as the last such node)."""
        return any(self.savings.saved(node))

    @cached_property
    def savings(self) -> Savings:
        """What autograd saves, and until when."""
        from autopar.cost.memory.savings import Savings  # here, as that module imports this one

        return Savings(self)

    def cuts(self, layout: Layout) -> Cuts:
        """By mesh axis, the dim and digit along which it cuts a value, or SUMMANDS where the ranks hold partial sums;
        axes of one device are left out."""
        placed = [(a, p) for a, p in enumerate(layout.placements) if self.mesh_shape[a] > 1 and not p.is_replicated]
        return tuple((a, (p.dim, p.outer) if p.is_sharded else SUMMANDS) for a, p in placed)

    def copy(self, ref: TensorRef, layout: Layout) -> Copy:
        """The storage that holds `ref` in `layout`: equal for views that cut the storage alike, in whichever dims."""
        copy = self._copies.get((ref, layout))
        if copy is None:
            tensor, root = tensor_of(ref), self.roots[ref]
            is_view = tensor_of(root).nbytes <= self.local_bytes(ref, layout)
            stored = in_storage(tensor, self.cuts(layout), self.mesh_shape, is_view=is_view)
            copy = self._copies[ref, layout] = root, stored
        return copy

    @cached_property
    def _copies(self) -> dict[tuple[TensorRef, Layout], Copy]:
        return {}

    def copy_bytes(self, copy: Copy) -> int:
        """Bytes of a copy; 0 for whole inputs and buffers, which are there anyway unless they are cast."""
        root, cuts = copy
        if not cuts and root.node.op in ("placeholder", "get_attr") and not is_cast_input(root.node):
            return 0
        tensor = tensor_of(root)
        elements, divisor = tensor.numel(), 1
        for axis, (piece, uncut) in (cut for cut in cuts if cut[1] != SUMMANDS):
            elements, divisor = elements * (piece if uncut else 1), divisor * (uncut or self.mesh_shape[axis])
        return -(-elements // divisor) * tensor.dtype.itemsize

    @cached_property
    def saved_roots(self) -> frozenset[TensorRef]:
        """The storages of which some node keeps a copy; those of a fold's unseen blocks are left out, as the fold's
        model stands for them."""
        roots: set[TensorRef] = set()
        unseen = {position for fold in self.folds for position in fold.unseen}
        for node in (node for i, node in enumerate(self.graph.nodes) if i not in unseen):
            inputs, outputs, _ = self.saved(node)
            refs = self.inputs[node]
            roots.update(self.roots[refs[i]] for i in inputs)
            roots.update(self.roots[TensorRef(node, i)] for i in outputs)
        return frozenset(roots)

    # -- bytes of tensors ---------------------------------------------------------------------------------------------

    def local_bytes(self, ref: TensorRef, layout: Layout) -> int:
        """Bytes of one device's part of a tensor."""
        local = self._local_bytes.get((ref, layout))
        if local is None:
            tensor = tensor_of(ref)
            local = math.prod(layout.local_shape(tuple(tensor.shape), self.mesh_shape)) * tensor.dtype.itemsize
            self._local_bytes[ref, layout] = local
        return local

    @cached_property
    def _local_bytes(self) -> dict[tuple[TensorRef, Layout], int]:
        return {}

    def is_kept(self, root: TensorRef) -> bool:
        """Whether a storage is kept for backward; in a fold's unseen blocks, as in the fold's model."""
        fold = next((fold for fold in self.folds if fold.is_middle(root.node)), None)
        return (TensorRef(fold.model_of(root.node), root.index) if fold else root) in self.saved_roots

    def input_bytes(self, node: fx.Node, layout: Layout) -> int:
        """Bytes of a placeholder or buffer as it is given; if it is read in another dtype, the cast is a copy beside it
        (`copy_bytes`)."""
        if len(output_tensors(node)) != 1:
            return 0
        ref = TensorRef(node, 0)
        return self.local_bytes(ref, layout) // tensor_of(ref).dtype.itemsize * given_dtype(node).itemsize
