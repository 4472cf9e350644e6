"""The recorder: data-free tensors flow through the user's own Python, and every torch function they meet
becomes a node.

It is a `TorchFunctionMode`, so it sees each call as Python wrote it. The call then runs on tensors of the
meta device, which have shapes, dtypes, strides, aliases and autograd but no data, and what comes out goes on
through the user's code. A tensor is known by its identity; all of them are kept alive while tracing, so that
no identity is reused.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.overrides
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.graph import AUTOCAST, GRAD_MODE, PLACE, REGION, SCOPE, VAL
from autopar.tracing import bias, leaves, opaque, places
from autopar.tracing.attributes import Attributes
from autopar.tracing.cleaning import WRITES
from autopar.tracing.errors import TraceError, UnknownDataError
from autopar.tracing.guards import ANSWER
from autopar.tracing.known import KnownValues
from autopar.tracing.order import ExecutionOrder
from autopar.tracing.sizes import SizeNodes, TracedFloat, TracedInt, traced
from autopar.tracing.dynamic import DynamicSizes, Symbolic
from autopar.tracing.targets import DATA_QUESTIONS, FACTORIES, QUESTIONS, getter, written_as
from autopar.tracing.unknown import UnknownBool, UnknownNumber

Tensor = torch.Tensor


class Recorder(TorchFunctionMode):
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
        super().__init__()
        self.graph = graph
        self.attributes = attributes
        self.device = device
        self.order = order
        self.split = bias_addition_split
        self.trace_sizes = trace_sizes
        self.scope: tuple[tuple[str, str], ...] = ()
        self.region: tuple[int, ...] = ()
        self.known = KnownValues()
        self.sizes = SizeNodes(graph, self._annotate_number)
        self.dynamic = DynamicSizes(graph, self._annotate_number, self.is_recording, self.where)
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Tensor] = []
        self.grad = torch.is_grad_enabled()
        self.paused = False
        self._below = False
        self._detached: dict[fx.Node, fx.Node] = {}

    # ---- what the mode sees

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or func in QUESTIONS:
            return func(*args, **kwargs)
        if self._below:
            return func(*args, **({**kwargs, "device": _META} if func in FACTORIES else kwargs))
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        if self.split:
            parts = bias.SPLITS.get(func)
            if parts is not None:
                done = parts(self, *args, **kwargs)
                if done is not None:
                    return done
        return self.record(func, *args, **kwargs)

    # ---- recording

    def record(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func` on data-free tensors and write it down, unless it makes and changes no tensor."""
        seen = Arguments(self)
        node_args, node_kwargs = seen.take(args), seen.take(kwargs)
        versions = [t._version for t in seen.tensors]
        result, real = self._run(func, args, kwargs, seen)
        written = [i for i, t in enumerate(seen.tensors) if t._version != versions[i]]
        if real is None and not seen.unknown:
            real = self.known.run(func, args, kwargs, seen.tensors, result, written)
        if not written and not _makes_tensor(result, seen.tensors):
            return result
        call = written_as(_WRITTEN_AS.get(func, func), args, kwargs)
        if call.swapped:
            node_args = (node_args[1], node_args[0])
        node = self.graph.create_node(call.op, call.target, node_args, node_kwargs)
        if written:
            node.meta[WRITES] = {seen.nodes[i]: value_of(seen.tensors[i]) for i in written}
        self.register(node, result, real)
        self._used(seen)
        return result

    def record_call(self, target: Any, run: Callable[..., Any], args: Any, kwargs: Any, op: str = "call_function") -> Any:
        """One opaque node for `run(*args, **kwargs)`, which is not looked into."""
        with self.pausing():
            seen = Arguments(self)
            node_args, node_kwargs = seen.take(args), seen.take(kwargs)
            if seen.replaced:
                args, kwargs = seen.data_free(args), seen.data_free(kwargs)
            result = run(*args, **kwargs)
            result = pytree.tree_map_only(Tensor, lambda t: _fresh(t, seen.tensors), result)
            node = self.graph.create_node(op, target, node_args, node_kwargs)
            self.register(node, result)
        self._used(seen)
        return result

    def record_module(self, module: torch.nn.Module, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One node for the call of a leaf."""
        rule = leaves.rule_of(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if rule is not None:
                return rule(module, *args, **kwargs)
            try:
                return call(module, *args, **kwargs)
            except Exception:  # noqa: BLE001 - whatever a leaf does, it is not looked into
                return opaque.outputs_of(module, path, self.attributes, args, kwargs)

        return self.record_call(path, run, args, kwargs, op="call_module")

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Nothing is recorded inside."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextlib.contextmanager
    def below_functions(self) -> Iterator[None]:
        """Inside, torch functions are not recorded: someone records what reaches the dispatcher."""
        before, self._below = self._below, True
        try:
            yield
        finally:
            self._below = before

    def is_recording(self) -> bool:
        """Whether we are in the user's code, and not inside something that is being recorded."""
        if self.paused or torch._C._is_torch_function_all_disabled():
            return False
        return any(mode is self for mode in torch.overrides._get_current_function_mode_stack())

    def _used(self, seen: Arguments) -> None:
        """Tell the execution order which parameters an operation read."""
        if seen.parameters:
            self.order.operation([(str(n.target), self.attributes.original(t)) for n, t in seen.parameters])  # type: ignore[misc]

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any, seen: Arguments) -> tuple[Any, Any]:
        """The result on data-free tensors; the real one too where only real values give a shape."""
        free_args, free_kwargs = args, kwargs
        if seen.replaced or "device" in kwargs:
            free_args, free_kwargs = seen.data_free(args), seen.data_free(kwargs)
        if func in FACTORIES and free_kwargs.get("device") is None:
            free_kwargs = {**free_kwargs, "device": _META}
        try:
            return func(*free_args, **free_kwargs), None
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                raise
            real = None if seen.unknown else self.known.run(func, args, kwargs, seen.tensors, None, [])
            if real is None:
                name = getattr(func, "__name__", repr(func))
                reason = (str(error).strip().splitlines() or [""])[0][:200]
                raise self.unknown(f"{name} could not be computed on data-free tensors ({reason})") from error
            return pytree.tree_map_only(Tensor, _to_meta, real), real

    def register(self, node: fx.Node, result: Any, real: Any = None) -> None:
        """Annotate a node and remember which tensor came out of it; tuples get a `getitem` node an element."""
        self.annotate(node, place=True)
        if isinstance(result, Tensor):
            self._remember(node, result)
            node.meta[VAL] = value_of(result)
            if real is not None:
                self.known.put(result, real, node)
            return
        node.meta[VAL] = pytree.tree_map_only(Tensor, value_of, result)
        self._register_items(node, result, real)

    def _register_items(self, node: fx.Node, result: Any, real: Any) -> None:
        if isinstance(result, dict):
            items: Any = result.items()
        elif isinstance(result, (tuple, list)):
            items = enumerate(result)
        else:
            return
        for key, item in items:
            if isinstance(item, (Tensor, tuple, list, dict)) and _has_tensor(item):
                child = self.graph.call_function(operator.getitem, (node, key))
                child.meta.update(node.meta)
                child.meta.pop(WRITES, None)
                inner = None if real is None else real[key]
                if isinstance(item, Tensor):
                    self._remember(child, item)
                    child.meta[VAL] = node.meta[VAL][key]
                    if inner is not None:
                        self.known.put(item, inner, child)
                else:
                    child.meta[VAL] = node.meta[VAL][key]
                    self._register_items(child, item, inner)

    def _remember(self, node: fx.Node, tensor: Tensor) -> None:
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def annotate(self, node: fx.Node, place: bool = False) -> None:
        """The facts that hold for every node made now."""
        meta = node.meta
        meta[SCOPE] = self.scope
        meta[REGION] = self.region
        meta[PLACE] = places.current() if place else ""
        meta[GRAD_MODE] = torch.is_grad_enabled()
        meta[AUTOCAST] = ()
        if torch._C._is_any_autocast_enabled():
            kind = self.device.type
            if torch.is_autocast_enabled(kind):
                meta[AUTOCAST] = (kind, str(torch.get_autocast_dtype(kind)))

    def _annotate_number(self, node: fx.Node, value: Any, source: fx.Node | None) -> None:
        if source is None:
            self.annotate(node, place=True)
        else:
            node.meta.update({k: source.meta[k] for k in (SCOPE, REGION, PLACE, GRAD_MODE, AUTOCAST)})
        node.meta[VAL] = value

    # ---- tensors and their nodes

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor; parameters, buffers and constants get theirs at first use."""
        node = self.nodes.get(id(tensor))
        if node is None:
            entry = self.attributes.find(tensor)
            if entry is None:
                raise TraceError(
                    f"a tensor of shape {tuple(tensor.shape)} was made by something the tracer cannot see (a scripted "
                    "function, numpy, torch.Tensor(...), nn.Parameter(...)): make it with a torch function, or in __init__",
                    where=self.where(),
                )
            node = self.nodes.get(id(entry.data_free))
            if node is None:
                node = self.graph.create_node("get_attr", entry.name, (), {})
                self.annotate(node, place=True)
                node.meta[VAL] = entry.data_free if isinstance(entry.data_free, torch.nn.Parameter) else value_of(entry.data_free)
                self._remember(node, entry.data_free)
                if entry.known is not None:
                    self.known.put(entry.data_free, entry.known, node)
        return node

    def without_gradient(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        """Under no_grad an operand that needs a gradient is detached in the graph, which then needs no grad mode."""
        detached = self._detached.get(node)
        if detached is None:
            detached = self._detached[node] = self.graph.call_method("detach", (node,))
            self.annotate(detached, place=True)
            detached.meta[VAL] = value_of(tensor).detach()
        return detached

    # ---- questions about data

    def ask(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A question about a tensor's contents: answered where they are known."""
        seen = Arguments(self)
        node_args, node_kwargs = seen.take(args), seen.take(kwargs)
        if not self.known.knows(seen.tensors):
            if func is Tensor.item:
                return self._unknown_item(args[0], node_args)
            name = getattr(func, "__name__", repr(func)).strip("_")
            raise self.unknown(f"{name}() asks for the contents of a tensor that depends on the inputs")
        answer, is_guard = self.known.answer(func, args, kwargs, seen.tensors)
        if is_guard:
            call = written_as(func, args, kwargs)
            node = self.graph.create_node(call.op, call.target, node_args, node_kwargs)
            self.annotate(node, place=True)
            node.meta[VAL] = node.meta[ANSWER] = answer
        return answer

    def _unknown_item(self, tensor: Tensor, node_args: Any) -> UnknownNumber:
        kind = float if tensor.is_floating_point() else bool if tensor.dtype == torch.bool else int
        node = self.graph.call_method("item", node_args)
        self.annotate(node, place=True)
        node.meta[VAL] = None
        return (UnknownBool if kind is bool else UnknownNumber)(self, node, kind)

    def number_node(self, function: Callable[..., Any], operands: Any, kind: type) -> fx.Node:
        """A node that computes with unknown numbers."""
        node = self.graph.call_function(function, Arguments(self).take(operands))
        self.annotate(node, place=True)
        node.meta[VAL] = None
        return node

    def unknown(self, message: str) -> UnknownDataError:
        mend = "give that input a known example (autopar.tracing.known), or let the module be a leaf"
        return UnknownDataError(f"{message}: {mend}", where=self.where(), frames=places.callers())

    def where(self) -> str:
        """The place in the user's model, for errors."""
        path = self.scope[-1][0] if self.scope else ""
        return f"{path or 'the root module'}, {places.current()}"


class Arguments:
    """The arguments of one call, turned into graph arguments; `tensors` are their data-free tensors, in order."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.tensors: list[Tensor] = []
        self.nodes: list[fx.Node] = []  # those that stand for them
        self.parameters: list[tuple[fx.Node, Tensor]] = []  # those that are parameters
        self.replaced = False  # an argument must be replaced to run: a constant, a device, an unknown number
        self.unknown = False  # an argument is a number that is not known
        self._detach = recorder.grad and not torch.is_grad_enabled()

    def take(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            recorder = self.recorder
            node = recorder.nodes.get(id(value))
            if node is None:
                node = recorder.node_of(value)
                if value.device.type != "meta":
                    self.replaced = True
                    value = recorder.attributes.data_free(value)
            self.tensors.append(value)
            self.nodes.append(node)
            if node.op == "get_attr" and isinstance(value, torch.nn.Parameter):
                self.parameters.append((node, value))
            if self._detach and value.requires_grad:
                return recorder.without_gradient(value, node)
            return node
        if kind is tuple or kind is torch.Size:
            return tuple([self.take(v) for v in value])
        if kind is list:
            return [self.take(v) for v in value]
        if kind is dict:
            return {k: self.take(v) for k, v in value.items()}
        if kind is TracedInt or kind is TracedFloat:
            return self.recorder.sizes.node(value)
        if kind is UnknownNumber or kind is UnknownBool:
            self.replaced = self.unknown = True
            return value.node
        if kind in Symbolic:
            self.unknown = True
            return self.recorder.dynamic.node(value)
        if kind is slice:
            return slice(self.take(value.start), self.take(value.stop), self.take(value.step))
        if kind is type and value in _DTYPES:
            return _DTYPES[value]
        if kind is torch.device:
            self.replaced = True
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*[self.take(v) for v in value])
        if isinstance(value, (list, tuple)):
            return tuple([self.take(v) for v in value])
        if isinstance(value, dict):
            return {k: self.take(v) for k, v in value.items()}
        return value

    def data_free(self, value: Any) -> Any:
        """The same arguments to run with: constants without data, devices meta."""
        if isinstance(value, Tensor):
            return value if value.device.type == "meta" else self.recorder.attributes.data_free(value)
        if isinstance(value, torch.device):
            return _META
        if isinstance(value, UnknownNumber):
            return value.stand_in
        if isinstance(value, slice):
            return slice(self.data_free(value.start), self.data_free(value.stop), self.data_free(value.step))
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            items = [self.data_free(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {k: (_META if k == "device" and v is not None else self.data_free(v)) for k, v in value.items()}
        return value


_META = torch.device("meta")
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # as eager reads them
_PLAIN = {int, float, bool, str, type(None), complex, torch.dtype, torch.layout, torch.memory_format, type(Ellipsis)}


def value_of(tensor: Tensor) -> Tensor:
    """The value an annotation keeps: shares storage, requires a gradient alike, holds no autograd graph."""
    value = tensor.detach()
    return value.requires_grad_() if tensor.requires_grad else value


def _fresh(tensor: Tensor, inputs: list[Tensor]) -> Tensor:
    """An opaque call may hand an input back: its result needs an identity of its own."""
    return tensor.view_as(tensor) if any(tensor is t for t in inputs) else tensor


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_has_tensor, value))


def _makes_tensor(result: Any, inputs: list[Tensor]) -> bool:
    """Whether a result holds a tensor that did not go in: `x.to(x.dtype)` is `x`, and no node."""
    if isinstance(result, Tensor):
        return all(result is not t for t in inputs)
    return _has_tensor(result)


# ---- functions that are not simply recorded


def _shape(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    shape = tensor.shape
    node = recorder.nodes.get(id(tensor))
    if node is None or node.op == "get_attr" or not recorder.trace_sizes:
        return shape  # a parameter's size is as constant as the parameter
    if any(isinstance(n, torch.SymInt) for n in shape):
        return shape
    return torch.Size([traced(n, ("size", node, i)) for i, n in enumerate(shape)])


def _size(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    shape = _shape(recorder, None, args[:1], {})
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _numel(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    node = recorder.nodes.get(id(args[0]))
    count = args[0].numel()
    if isinstance(count, torch.SymInt):
        return count
    free = node is not None and node.op != "get_attr" and recorder.trace_sizes
    return traced(count, ("numel", node)) if free else count


def _device(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> torch.device:
    tensor = args[0]
    return recorder.device if tensor.device.type == "meta" else tensor.device


def _device_flag(kind: str) -> Any:
    return lambda recorder, func, args, kwargs: recorder.device.type == kind


def _get_device(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> int:
    index = recorder.device.index
    return -1 if recorder.device.type == "cpu" else index or 0


def _ask(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    return recorder.ask(func, args, kwargs)


def _as(method: Callable[..., Any], *rest: Any) -> Any:
    """A property that is written as a method."""
    return lambda recorder, func, args, kwargs: recorder.record(method, args[0], *rest)


def _transposed(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    rank = args[0].ndim
    if rank <= 2:
        return recorder.record(Tensor.t, args[0])
    return recorder.record(Tensor.permute, args[0], *reversed(range(rank)))


def _moved(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`to`, `cpu`, `cuda`: data-free tensors stay where they are."""
    if func.__name__ in ("cpu", "cuda"):
        return args[0]
    rest = list(args[1:])
    if rest and (isinstance(rest[0], str) or type(rest[0]) is int):
        rest[0] = torch.device(rest[0])
    if rest and all(isinstance(a, torch.device) for a in rest) and not kwargs.keys() - {"device", "non_blocking"}:
        return args[0]
    return recorder.record(func, args[0], *rest, **kwargs)


def _attention(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Fused kernels lay their output out like the query, the meta kernel does not; `contiguous` must find the same."""
    query = args[0] if args else kwargs["query"]
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    fused = query.ndim == 4 and (dropout == 0 or recorder.device.type != "cpu") and query.transpose(1, 2).is_contiguous()
    return recorder.record(_attention_like_the_query if fused else func, *args, **kwargs)


def _attention_like_the_query(*args: Any, **kwargs: Any) -> Tensor:
    result = torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    return result.transpose(1, 2).contiguous().transpose(1, 2) if result.device.type == "meta" else result


def _requires_grad(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    func(*args)
    node = recorder.nodes.get(id(args[0]))
    if node is not None:
        node.meta[VAL] = value_of(args[0])


_HANDLERS: dict[Any, Callable[[Recorder, Any, Any, Any], Any]] = {
    getter("shape"): _shape,
    Tensor.size: _size,
    Tensor.numel: _numel,
    Tensor.nelement: _numel,
    torch.numel: _numel,
    Tensor.__len__: lambda recorder, func, args, kwargs: func(*args),
    getter("device"): _device,
    getter("is_meta"): lambda recorder, func, args, kwargs: False,
    getter("is_cpu"): _device_flag("cpu"),
    getter("is_cuda"): _device_flag("cuda"),
    Tensor.get_device: _get_device,
    getter("T"): _transposed,
    getter("mT"): _as(Tensor.transpose, -2, -1),
    getter("H"): _as(Tensor.adjoint),
    getter("mH"): _as(Tensor.adjoint),
    getter("real"): _as(torch.real),
    getter("imag"): _as(torch.imag),
    getter("data"): _as(Tensor.detach),
    Tensor.to: _moved,
    Tensor.cpu: _moved,
    Tensor.cuda: _moved,
    Tensor.requires_grad.__set__: _requires_grad,  # type: ignore[attr-defined]
    torch.nn.functional.scaled_dot_product_attention: _attention,
    **dict.fromkeys(DATA_QUESTIONS, _ask),
}
_WRITTEN_AS = {_attention_like_the_query: torch.nn.functional.scaled_dot_product_attention}
