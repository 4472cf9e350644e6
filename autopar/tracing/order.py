"""Execution order: which modules ran, in which order parameters were first used, and by which module.

Only modules and names are kept. Parameters are looked up in the model on request, so an order keeps none alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import fx, nn

from autopar.tracing.patching import attributes_set


class Usage(NamedTuple):
    """Parameters that `module` used together: in one operation of its own, or all of a leaf's at its call."""

    module: nn.Module
    named_params: list[tuple[str, nn.Parameter]]


class ExecutionOrder:
    """`modules`: one entry for each call, in the order of entry. `params`: each parameter once, by first use."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: list[nn.Module] = [root]
        self._current = root
        # By module: calls of children, and parameters of operations.
        self._events: dict[nn.Module, list[nn.Module | tuple[str, ...]]] = {root: []}
        self._uses: dict[str | nn.Module, None] = {}  # names and leaves in the order of their first use

    @contextlib.contextmanager
    def calling(self, module: nn.Module, *, leaf: bool = False) -> Iterator[None]:
        """A call of `module` by the module that is running; a leaf uses all its parameters."""
        caller = self._current
        self.modules.append(module)
        own = self._events.setdefault(module, [])
        self._events.setdefault(caller, []).append(module)
        if leaf:
            own.append(module)
            self._uses.setdefault(module)
        self._current = module
        try:
            yield
        finally:
            self._current = caller

    def operation(self, parameters: Iterable[str]) -> None:
        """An operation of the running module read the parameters of these (root-qualified) names."""
        names = tuple(parameters)
        self._events.setdefault(self._current, []).append(names)
        self._uses.update(dict.fromkeys(names))

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that were used, in the order of their first use."""
        parameters: dict[nn.Parameter, None] = {}
        for use in self._uses:
            parameters.update(
                dict.fromkeys(use.parameters() if isinstance(use, nn.Module) else self._parameters((use,)))
            )
        return list(parameters)

    @property
    def visited(self) -> set[nn.Parameter]:
        return set(self.params)

    @property
    def usage(self) -> dict[nn.Module, list[Usage]]:
        """For every module that ran, the groups of parameters that it used, in order; empty if it used none."""
        usage: dict[nn.Module, list[Usage]] = {}
        for module, events in self._events.items():
            groups = [
                Usage(event, list(event.named_parameters()))
                if isinstance(event, nn.Module)
                else Usage(module, list(zip(event, self._parameters(event), strict=True)))
                for event in events
            ]
            usage[module] = [g for g in groups if g.named_params]
        return usage

    def _parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        return [self.root.get_parameter(n) for n in names]


@contextlib.contextmanager
def record_execution(tracer: fx.Tracer, root: nn.Module) -> Iterator[ExecutionOrder]:
    """Record the execution order while a plain `torch.fx.Tracer` traces; afterwards the tracer is as before."""
    order = ExecutionOrder(root)
    names = {n for n, _ in root.named_parameters()}
    call_module, create_proxy = tracer.call_module, tracer.create_proxy

    def called(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        with order.calling(module, leaf=tracer.is_leaf_module(module, tracer.path_of_module(module))):
            return call_module(module, forward, args, kwargs)

    def proxied(kind: str, target: Any, args: Any, kwargs: Any, *further: Any, **options: Any) -> Any:
        read: list[str] = []

        def collect(value: Any) -> Any:
            if isinstance(value, fx.Proxy) and value.node.op == "get_attr" and value.node.target in names:
                read.append(str(value.node.target))
            return value

        if kind in ("call_function", "call_method"):
            fx.node.map_aggregate((args, kwargs), collect)
        if read:
            order.operation(read)
        return create_proxy(kind, target, args, kwargs, *further, **options)

    with attributes_set(tracer, call_module=called, create_proxy=proxied):
        yield order
