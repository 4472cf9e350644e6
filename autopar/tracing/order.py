"""Execution order: which modules ran, in which order parameters were first used, and by whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import fx, nn


class Usage(NamedTuple):
    """Parameters that `module` used together: in one operation of its own, or as a called child, all of its own."""

    module: nn.Module
    named_params: list[tuple[str, nn.Parameter]]


class ExecutionOrder:
    """`modules`: one entry a call, in the order of entry. `params`: each once, at first use.

    `usage` maps a module that ran to the groups of parameters it used, in order.
    """

    def __init__(self, root: nn.Module, original: Callable[[Any], Any] = lambda parameter: parameter) -> None:
        self.root = root
        self.original = original  # the model's own parameter, where a recorder has swapped it
        self.modules: list[nn.Module] = [root]
        self.params: list[nn.Parameter] = []
        self.visited: set[nn.Parameter] = set()
        self.usage: dict[nn.Module, list[Usage]] = {root: []}
        self.current = root
        self._names: dict[nn.Parameter, str] | None = None

    @contextlib.contextmanager
    def calling(self, module: nn.Module, *, leaf: bool = False) -> Iterator[None]:
        """A call of `module` by the module that is running; a leaf uses all its parameters."""
        caller = self.current
        parameters = [(n, self.original(p)) for n, p in module.named_parameters()]
        self.modules.append(module)
        own = self.usage.setdefault(module, [])
        if parameters:
            self.usage.setdefault(caller, []).append(Usage(module, parameters))
        if leaf and parameters:
            own.append(Usage(module, parameters))
            self._first_use(p for _, p in parameters)
        self.current = module
        try:
            yield
        finally:
            self.current = caller

    def operation(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """An operation of the running module read these parameters (root-qualified names)."""
        group = list(parameters)
        if group:
            self.usage.setdefault(self.current, []).append(Usage(self.current, group))
            self._first_use(p for _, p in group)

    def _first_use(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter not in self.visited:
                self.visited.add(parameter)
                self.params.append(parameter)


@contextlib.contextmanager
def record_execution(tracer: fx.Tracer, root: nn.Module) -> Iterator[ExecutionOrder]:
    """Record the execution order of what a stock `torch.fx.Tracer` traces inside; it is as it was afterwards."""
    order = ExecutionOrder(root)
    parameters = dict(root.named_parameters())
    call_module, create_proxy = tracer.call_module, tracer.create_proxy

    def called(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        leaf = tracer.is_leaf_module(module, tracer.path_of_module(module))
        with order.calling(module, leaf=leaf):
            return call_module(module, forward, args, kwargs)

    def proxied(kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind in ("call_function", "call_method"):
            read: list[tuple[str, nn.Parameter]] = []
            fx.node.map_aggregate((args, kwargs), lambda v: _collect(v, parameters, read))
            order.operation(read)
        return create_proxy(kind, target, args, kwargs, *rest, **options)

    before = {k: v for k, v in vars(tracer).items() if k in ("call_module", "create_proxy")}
    tracer.call_module, tracer.create_proxy = called, proxied  # type: ignore[method-assign]
    try:
        yield order
    finally:
        for name in ("call_module", "create_proxy"):
            delattr(tracer, name)
            if name in before:
                setattr(tracer, name, before[name])


def _collect(value: Any, parameters: dict[str, nn.Parameter], found: list[tuple[str, nn.Parameter]]) -> Any:
    if isinstance(value, fx.Proxy) and value.node.op == "get_attr" and value.node.target in parameters:
        found.append((str(value.node.target), parameters[str(value.node.target)]))
    return value
