"""The costs of a problem: of ops by choice, of tensors by the layouts at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.collectives import collective_seconds
from autopar.cost.memory.optimizer_step import update_seconds
from autopar.cost.traffic import needs_grad, reduction_dtype
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.resharding.all_paths import KnownRoutes
from autopar.resharding.staging import memory_order
from autopar.solver.linear.terms import Array
from autopar.solver.problem import Op, Problem, Tensor, Use
from autopar.solver.seconds.prices import PriceTable

Port = tuple[Layout, bool]  # a tensor's layout at its source, and whether it is a parameter that is gathered again


@dataclass
class Tables:
    """Caches for one graph on one cluster: price tables of its tensors, and routes between layouts."""

    prices: dict[tuple[object, ...], PriceTable] = field(default_factory=dict)
    routes: KnownRoutes = field(default_factory=dict)


@dataclass
class Costs:
    """The costs of one problem; `tables` may be shared with other problems of the same graph."""

    problem: Problem
    tables: Tables = field(default_factory=Tables)

    def __post_init__(self) -> None:
        self._tables: dict[TensorRef, PriceTable] = {}
        self._ports: dict[tuple[int, int, bool], dict[Port, list[int]]] = {}  # by id of choices, which ops may share
        self._wanted: dict[tuple[int, int, bool], dict[Layout, list[int]]] = {}
        expected = set()
        for tensor in self.problem.tensors:
            table, ports = self.table(self.problem.ref(tensor)), self.ports(tensor)
            for use in tensor.uses:
                wanted = self.wanted(tensor, use)
                if (id(table), id(ports), id(wanted)) not in expected:
                    expected.add((id(table), id(ports), id(wanted)))
                    table.expect([layout for layout, _ in ports], list(wanted))

    def count(self, op: Op) -> int:
        """How many blocks an op stands for."""
        return self.problem.stages[op.stage].count

    def conversions(self, tensor: Tensor) -> int:
        """How many times a tensor is converted in one micro-batch."""
        stage = self.problem.stages[tensor.stage].count if tensor.kind in ("inner", "outer", "next") else 1
        return stage - 1 if tensor.kind == "next" else stage

    def by_source(self) -> list[list[Tensor]]:
        """The tensors grouped by source: one output of an op is several tensors if several stages read it."""
        groups: dict[tuple[int, int], list[Tensor]] = {}
        for tensor in self.problem.tensors:
            groups.setdefault((tensor.source, tensor.output), []).append(tensor)
        return list(groups.values())

    def shared(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the tensors of one source whose uses outside segments share conversions; empty if none do."""
        outside = [t for t in tensors if t.kind in ("plain", "outer", "first")]
        several = len(outside) > 1 or any(t.kind == "outer" and self.conversions(t) > 1 for t in outside)
        return outside if several else []

    def of_op(self, op: Op) -> tuple[Array, Array]:
        """By choice: seconds per step of all blocks, with the update of a parameter; and of one block's replay."""
        memory, cluster = self.problem.memory, self.problem.cluster
        micro_batches, count = memory.micro_batches, self.count(op)
        seconds, forwards = np.zeros(len(op.choices)), np.zeros(len(op.choices))
        for i, choice in enumerate(op.choices):
            inner_forward, inner_backward = 0.0, 0.0
            for inner in choice.strategy.inner:
                axis = cluster.axes[inner.axis]
                if inner.forward_bytes:
                    inner_forward += collective_seconds(inner.kind, inner.forward_bytes, axis)
                if inner.backward_bytes and memory.train:
                    inner_backward += collective_seconds(inner.kind, inner.backward_bytes, axis)
            forwards[i] = micro_batches * (choice.forward_seconds + inner_forward)
            seconds[i] = count * (forwards[i] + micro_batches * (choice.backward_seconds + inner_backward))
            if memory.is_parameter(op.node):
                seconds[i] += count * update_seconds(memory, op.node, choice.strategy.outputs[0], cluster.device)
        return seconds, forwards

    def ports(self, tensor: Tensor) -> dict[Port, list[int]]:
        """By port, the numbers of the source's choices that give the tensor this port; the same object for all ops that
        share their choices."""
        choices, grad = self.problem.ops[tensor.source].choices, self.table(self.problem.ref(tensor)).needs_grad
        key = id(choices), tensor.output, grad
        if key not in self._ports:
            ports = self._ports.setdefault(key, {})
            for i, choice in enumerate(choices):
                layout = choice.strategy.outputs[tensor.output]
                ports.setdefault((layout if grad else layout.value(), choice.regather), []).append(i)
        return self._ports[key]

    def wanted(self, tensor: Tensor, use: Use) -> dict[Layout, list[int]]:
        """By wanted layout, the numbers of the reader's choices that want it; shared as in `ports`."""
        choices, grad = self.problem.ops[use.op].choices, self.table(self.problem.ref(tensor)).needs_grad
        key = id(choices), use.index, grad
        if key not in self._wanted:
            by_layout = self._wanted.setdefault(key, {})
            for i, choice in enumerate(choices):
                layout = choice.strategy.inputs[use.index]
                by_layout.setdefault(layout if grad else layout.value(), []).append(i)
        return self._wanted[key]

    def table(self, ref: TensorRef) -> PriceTable:
        """The prices of a tensor's conversions; tensors of equal shape, dtype, bucket and so on share a table."""
        if ref not in self._tables:
            memory = self.problem.memory
            tensor = tensor_of(ref)
            sizes = tensor.dtype.itemsize, reduction_dtype(memory, ref).itemsize
            key = (tuple(tensor.shape), sizes, needs_grad(memory, ref))
            grouping = self.problem.grouping if memory.is_parameter(ref.node) else None
            order = memory_order(tensor) if grouping is None else ()
            own = (*key, grouping.bucket_of(ref.node) if grouping else None, order)
            table = PriceTable(ref, self.problem.cluster, *sizes, key[2], grouping, order, self.tables.routes)
            self._tables[ref] = self.tables.prices.setdefault(own, table)
        return self._tables[ref]
