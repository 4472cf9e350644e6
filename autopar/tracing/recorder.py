"""The recorder: data-free tensors flow through the user's Python, and every torch function called on them is a node.

It is a `TorchFunctionMode`, so it sees each call as Python wrote it. The call then runs on tensors of the meta device,
which have shapes, dtypes, strides, aliases and autograd but no data, and its result returns to the user's code. Tensors
are identified by `id`; all of them are kept alive while tracing, so that no id is reused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.overrides
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.graph import OF_DATA, VAL, storage_of
from autopar.ops.on_copies import without
from autopar.tracing import places
from autopar.tracing.arguments import Arguments
from autopar.tracing.calls.dynamic import DynamicSizes
from autopar.tracing.contents import arrays
from autopar.tracing.contents.asking import guard_shapes
from autopar.tracing.contents.deciding import known_or_leaf
from autopar.tracing.contents.known import MADE_KNOWN, read_by
from autopar.tracing.contents.numbers_as_tensors import of_tensors
from autopar.tracing.contents.without_kernel import Again, run_without_kernel
from autopar.tracing.errors import UnknownDataError
from autopar.tracing.handlers import HANDLERS, WRITTEN_AS
from autopar.tracing.model_state.attributes import Attributes
from autopar.tracing.order import ExecutionOrder
from autopar.tracing.picked.picked_rows import has_picked_rows
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.rewriting import bias
from autopar.tracing.rewriting.cleaning import WRITES
from autopar.tracing.running import Runs
from autopar.tracing.sizes import SizeNodes
from autopar.tracing.targets import FACTORIES, OF_MEMORY, QUESTIONS, writes_its_first, written_as, written_by_schema
from autopar.tracing.torch_functions import autocasting
from autopar.tracing.torch_functions.generators import without_generator
from autopar.tracing.values import META, data_free_like, makes_tensor, with_own_identity
from autopar.tracing.writing import GraphWriter

Tensor = torch.Tensor


class Recorder(TorchFunctionMode, GraphWriter):
    """Records one run of a model. `device` is the device that data-free tensors claim to be on."""

    def __init__(
        self,
        graph: fx.Graph,
        attributes: Attributes,
        *,
        device: torch.device,
        bias_addition_split: bool,
        trace_sizes: bool = True,
        order: ExecutionOrder,
    ) -> None:
        TorchFunctionMode.__init__(self)
        GraphWriter.__init__(self, graph, attributes, device)
        self.order = order
        self.split = bias_addition_split
        self.trace_sizes = trace_sizes
        self.runs = Runs()
        self.sharing: set[torch.nn.Module] = set()  # leaves whose outputs share memory
        self.guessed: dict[torch.nn.Module, str] = {}  # leaves whose outputs are assumed to look like an input, and why
        self.autocast = autocasting.Autocast()
        self.sizes = SizeNodes(graph, self.annotate_number)
        self.dynamic = DynamicSizes(graph, self.annotate_number, self.is_recording, self.where)
        self.trace_masks = TraceMasks(self)
        self.grad = torch.is_grad_enabled()
        self.paused = False
        self.in_leaf = False
        self.below: Callable[..., Any] | None = None  # runs torch functions while what they dispatch to is recorded
        self.read_before_gradient: dict[int, frozenset[fx.Node]] = {}  # by tensor: who read it before it required one
        self.reads_memory = False  # whether the user's code asked for strides and the like
        self.unanswered: list[tuple[UnknownDataError, str]] = []  # with the path of the module that asked

    # ---- intercepting calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.trace_masks and (has_picked_rows(args) or has_picked_rows(kwargs)):
            return self.trace_masks.record_call(func, args, kwargs)
        if self.paused or func in QUESTIONS:
            self.reads_memory |= func in OF_MEMORY and not self.paused and not isinstance(args[0], torch.nn.Parameter)
            if self.in_leaf and func not in QUESTIONS and func not in HANDLERS:
                return self.runs.run(func, args, kwargs)
            return self.unrecorded(func(*args, **kwargs)) if self.paused else func(*args, **kwargs)
        if self.below is not None:
            return self.below(func, args, kwargs)
        if arrays.any_in(args) or arrays.any_in(kwargs):
            if arrays.makes(func, args, kwargs):
                return arrays.recorded_copy(self, func, args, kwargs)
            args, kwargs = arrays.as_torch(self, args), arrays.as_torch(self, kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        if self.initialises(func, args, kwargs):
            return func(*args, **kwargs)
        if self.split:
            parts = bias.SPLITS.get(func)
            if parts is not None:
                args, kwargs = self._autocast(func, args, kwargs)
                done = parts(self, *args, **kwargs)
                if done is not None:
                    return done
        return self.record(func, *args, **kwargs)

    def initialises(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether a call fills a tensor that no node made, as in the constructor of a module that forward creates.

        Filling such a parameter is no error; using it later is.
        """
        if torch.is_grad_enabled():
            return False
        first = args[0] if args else kwargs.get("tensor")
        return isinstance(first, Tensor) and id(first) not in self.nodes and self.attributes.is_unseen(first)

    # ---- recording

    def record(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func` on data-free tensors and write a node for it, unless it neither makes nor changes a tensor."""
        if "generator" in kwargs:
            kwargs = without_generator(func, kwargs, self.where())
        if torch._C._is_any_autocast_enabled():
            args, kwargs = self._autocast(func, args, kwargs)
        inputs = Arguments(self, args, kwargs)
        if inputs.unknown and (output := of_tensors(self, func, args, kwargs, inputs)) is not NotImplemented:
            return output
        result = self._repeated(func, args, kwargs, inputs)
        if result is not None:
            return self._write_down(func, args, kwargs, inputs, result)
        versions = [t._version for t in inputs.tensors]
        try:
            result, real = self._run(func, args, kwargs, inputs)
        except Again as again:
            return self.record(func, *again.args, **again.kwargs)
        if self.trace_masks and has_picked_rows(result):
            return result  # picked rows: the graph holds all rows
        is_sized = real is not None and not self.known.guarded.isdisjoint(map(id, inputs.tensors))  # by a known input
        written_below = written_by_schema(func, args)  # below autograd, as in bodies of vmap, no versions are counted
        written = [i for i, t in enumerate(inputs.tensors) if t._version != versions[i] or id(t) in written_below]
        if len(written) > 1 and writes_its_first(func):  # aliases of the first change version too
            first = storage_of(inputs.tensors[written[0]])
            written[1:] = [i for i in written[1:] if storage_of(inputs.tensors[i]) != first]
        if real is None and not inputs.unknown:
            real = self.known.run(func, args, kwargs, inputs.tensors, result, written)
        if real is None and not inputs.unknown:
            real = self.known.filled(func, args, kwargs, result)
        if real is None and not kwargs.keys() - {"device", "dtype"}:
            real = self.known.drawn(func, args, result)
        if not written and not makes_tensor(result, inputs.tensors):
            return result
        output = self._write_down(func, args, kwargs, inputs, result, real, written)
        return guard_shapes(self, output) if is_sized else output

    def _write_down(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inputs: Arguments,
        result: Any,
        real: Any = None,
        written: Sequence[int] = (),
    ) -> Any:
        """Write the node of a call, and register its result; `written`: which of `inputs.tensors` it wrote into."""
        call = written_as(WRITTEN_AS.get(func) or func, args, kwargs)
        graph_args = inputs.graph_args[::-1] if call.swapped else inputs.graph_args
        node = self.write(call.op, call.target, graph_args, inputs.graph_kwargs, call.name)
        if written:
            node.meta[WRITES] = {inputs.nodes[i]: inputs.value(i) for i in written}
        several = written and not isinstance(result, Tensor)  # written tensors keep the nodes that they have
        self.register(node, without(result, [inputs.tensors[i] for i in written]) if several else result, real)
        if not isinstance(result, Tensor):  # a returned argument keeps its node (broadcast_tensors)
            self.nodes.update((id(tensor), of) for tensor, of in zip(inputs.tensors, inputs.nodes, strict=True))
        if inputs.elsewhere:
            self.nodes.update(inputs.elsewhere)  # a write returns the written tensor, which keeps its node
        self.finite.note(func, args, result, node)
        if inputs.parameters:
            self.order.operation(inputs.parameters)
        return result

    def _autocast(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The arguments as autocast casts them for `func`; each cast is a node, and a tensor is cast once."""
        kind = self.device.type
        if not torch.is_autocast_enabled(kind):
            return args, kwargs
        dtype = self.autocast.input_dtype(kind, func, args, kwargs)
        if dtype is None:
            return args, kwargs

        def cast(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
                return tensor
            key = (id(tensor), tensor._version, dtype)
            if key not in self._casts:
                with autocasting.disabled(kind):
                    self._casts[key] = self.record(Tensor.to, tensor, dtype)
            return self._casts[key]

        return pytree.tree_map_only(Tensor, cast, (args, kwargs))

    def record_call(
        self, target: Any, run: Callable[..., Any], args: Any, kwargs: Any, op: str = "call_function"
    ) -> Any:
        """Record `run(*args, **kwargs)` as one opaque node; calls inside are not recorded."""
        with self.pausing():
            inputs = Arguments(self, args, kwargs)
            if inputs.replaced:
                args, kwargs = inputs.data_free(args), inputs.data_free(kwargs)
            result = run(*args, **kwargs)
            result = pytree.tree_map_only(Tensor, lambda t: with_own_identity(t, inputs.tensors), result)
            node = self.graph.create_node(op, target, inputs.graph_args, inputs.graph_kwargs)
            self.register(node, result)
        if inputs.parameters:
            self.order.operation(inputs.parameters)
        return result

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """While inside, nothing is recorded."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextlib.contextmanager
    def below_functions(self, run: Callable[..., Any]) -> Iterator[None]:
        """While inside, `run` runs torch functions: another mode records what reaches the dispatcher."""
        before, self.below = self.below, run
        try:
            yield
        finally:
            self.below = before

    def is_recording(self) -> bool:
        """Whether the user's code is running, and not something inside a call that is being recorded."""
        if self.paused or torch._C._is_torch_function_all_disabled():
            return False
        return any(mode is self for mode in torch.overrides._get_current_function_mode_stack())

    def on(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch functions are recorded, whether they already are or not."""
        return contextlib.nullcontext() if self.is_recording() else self

    def _repeated(self, func: Callable[..., Any], args: Any, kwargs: Any, inputs: Arguments) -> Tensor | None:
        """The result of a call that ran before and only makes one tensor of unknown values; None for other calls."""
        inputs_read = read_by(func, inputs.tensors)
        if inputs.replaced or not inputs.tensors or func in MADE_KNOWN or self.known.can_tell(inputs_read):
            return None
        return self.runs.repeated_result(func, args, kwargs)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any, inputs: Arguments) -> tuple[Any, Any]:
        """The result on data-free tensors; and the real result, where the shape follows only from real values."""
        free_args, free_named = args, kwargs
        if inputs.replaced or "device" in kwargs:
            free_args, free_named = inputs.data_free(args), inputs.data_free(kwargs)
        makes = func in FACTORIES or (func is torch.normal and not inputs.tensors)  # from numbers only, one a size
        if makes and free_named.get("device") is None:
            free_named = {**free_named, "device": META}
        try:
            with self.dynamic.kernels():
                free = self.runs.run(func, free_args, free_named) if inputs.tensors else func(*free_args, **free_named)
            if not inputs.tensors and isinstance(free, Tensor) and not free.is_meta:  # of numbers: `torch.div(7, 2)`
                return data_free_like(free), free
            return free, None
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                raise
            return run_without_kernel(self, func, args, kwargs, inputs, error)

    # ---- numbers that depend on data

    def number_node(self, function: Callable[..., Any], operands: Any, kind: type) -> fx.Node:
        """A node that computes with unknown numbers."""
        node = self.graph.call_function(function, Arguments(self, operands).graph_args)
        self.annotate(node, place=True)
        node.meta[VAL] = None
        node.meta[OF_DATA] = True
        return node

    def unknown(self, message: str, mend: str = "", *, deciding: Iterable[Tensor] = ()) -> UnknownDataError:
        """The error for a question that has no answer. `deciding`: the tensors whose contents would give it.

        `mend`: the advice; by default, to make the deciding inputs known, or the module a leaf.
        """
        mend = mend or known_or_leaf(self.nodes.get(id(tensor)) for tensor in deciding)
        error = UnknownDataError(f"{message}: {mend}", where=self.where(), frames=places.callers())
        if not self.in_leaf and not self.paused:
            self.unanswered.append((error, self.scope[-1][0] if self.scope else ""))
        return error
