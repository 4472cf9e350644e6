"""Module calls during recording: which module is running, which modules are leaves, which module called which."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from autopar.tracing.errors import TraceError, UnrolledError
from autopar.tracing.leaves.effects import EffectError
from autopar.tracing.leaves.loss_owners import Enclosed
from autopar.tracing.leaves.opaque import NumbersOfData
from autopar.tracing.leaves.recorded import record_leaf
from autopar.tracing.leaves.routed import RoutedModule, is_routed
from autopar.tracing.leaves.which import LeafPolicy
from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder

LOOP = 500  # operations of one forward, without its children's: more are taken for an unrolled loop


@dataclass
class Scope:
    """Where a node was made: the qualified name of the innermost module that was running, and its type.

    >>> Scope("", None)
    Scope(module_path='', module_type=None)
    """

    module_path: str
    module_type: type[nn.Module] | None


class ScopeContextManager:
    """While inside, `scope` is that of `module` at `path`; afterwards it is as before, also after an error."""

    def __init__(self, scope: Scope, module: type[nn.Module] | nn.Module, path: str) -> None:
        self.scope = scope
        self.inside = Scope(path, module if isinstance(module, type) else type(module))

    def __enter__(self) -> Scope:
        self.outside = Scope(self.scope.module_path, self.scope.module_type)
        self.scope.module_path, self.scope.module_type = self.inside.module_path, self.inside.module_type
        return self.scope

    def __exit__(self, *error: object) -> None:
        self.scope.module_path, self.scope.module_type = self.outside.module_path, self.outside.module_type


class ModuleCalls:
    """Follows the calls of modules during one attempt at a trace.

    `culprit(error)`: the innermost module that was running when an error was raised. `outside`: modules that are not
    submodules of the root, each with the module that called it first.
    """

    def __init__(self, recorder: Recorder, root: nn.Module, policy: LeafPolicy) -> None:
        self.recorder = recorder
        self.root = root
        self.policy = policy
        # by identity: the hash of a metric (torchmetrics) depends on tensors that forward sets
        self.paths: MutableMapping[nn.Module, str] = WeakIdKeyDictionary({m: name for name, m in root.named_modules()})
        self.types: dict[str, type[nn.Module]] = {name: type(m) for m, name in self.paths.items()}
        self.outside: MutableMapping[nn.Module, nn.Module] = WeakIdKeyDictionary()
        self.is_final = False  # whether no caller of the failed module may become a leaf
        self._failed: tuple[BaseException, nn.Module] | None = None
        self._nested = 0  # tensors made by calls nested in the running one
        self._longest: tuple[int, nn.Module] = (0, root)  # the call that made most tensors, without nested calls

    def culprit(self, error: BaseException) -> nn.Module | None:
        """The innermost module that was running when `error` was raised.

        A module that each call creates anew cannot become a leaf of the next trace; for it, its caller is returned.
        """
        module = self._failed[1] if self._failed is not None and self._failed[0] is error else None
        recreated = {type(other).__qualname__ for other in self.policy.failed if other not in self.paths}
        while module is not None and module in self.outside and type(module).__qualname__ in recreated:
            module = self.outside[module]
        return module

    def release(self) -> None:
        """Forget the last error, which may have been caught: its frames refer to tensors, and to this in a cycle."""
        self._failed = None

    def blame(self, error: BaseException, path: str) -> None:
        """Note that `error` was raised while the module at this path ran; the root if there is none at this path."""
        named = dict(self.root.named_modules(remove_duplicate=False))
        self._failed = (error, named.get(path, self.root))

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """While inside, every call of a module is intercepted."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.recorder.is_recording():
                return original(module, *args, **kwargs)
            try:
                return self._call(original, module, args, kwargs)
            except BaseException as error:
                if self._failed is None or self._failed[0] is not error:
                    self._failed = (error, module)
                raise

        with attributes_set(nn.Module, __call__=call):
            yield

    def _call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record a module's call: run it, or write one node if it is a leaf or the experts of a mixture."""
        recorder = self.recorder
        path = self.paths.get(module)
        if path == "":
            return original(module, *args, **kwargs)
        if path is None:
            path = self._name(module)
        leaf = self.policy.is_leaf(module, path)
        outer = recorder.scope
        recorder.scope = (*outer, (path, type(module).__name__))
        try:
            with recorder.order.calling(module, leaf=leaf):
                if module in self.policy.failed and is_routed(module, args, kwargs):
                    target = RoutedModule(module)
                    parameters = (module.get_parameter(name) for name in target.names)
                    return recorder.record_call(
                        target,
                        lambda *tensors: recorder.runs.run(target, tensors, {}),  # repeated layers share results
                        (*args, *parameters),
                        {},
                    )
                if leaf:
                    self._check_leaf(module, args, kwargs)
                    return record_leaf(recorder, module, path, original, args, kwargs)
                return self._counted(original, module, args, kwargs)
        except EffectError as effect:
            raise self._not_alone(module, str(effect)) from effect
        except NumbersOfData as numbers:
            # The caller becomes the leaf instead.
            error = recorder.unknown(f"{type(module).__name__} returns numbers that depend on data")
            self._failed = (error, self.root.get_submodule(outer[-1][0]) if outer else self.root)
            raise error from numbers
        finally:
            recorder.scope = outer

    def _check_leaf(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Refuse a leaf that is passed a module, or an object with tensors, which a graph cannot represent: its caller
        becomes the leaf, and has these inside."""
        for value in pytree.tree_leaves((args, kwargs)):
            if _has_tensors(value):
                kind = type(value).__name__
                raise self._not_alone(module, f"is handed a {kind} with tensors that a graph does not know")

    def _not_alone(self, module: nn.Module, why: str) -> TraceError:
        """The error for a module that cannot be a leaf; its caller becomes one instead."""
        error = TraceError(
            f"{type(module).__name__}, which is one op, {why}: its caller is one op instead",
            where=self.recorder.where(),
        )
        self.blame(error, self.recorder.scope[-2][0] if len(self.recorder.scope) > 1 else "")
        self.is_final = type(module) in self.policy.unrolled  # a caller would rerun its whole loop
        return error

    def _counted(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the module; raise UnrolledError if its own operations (a loop over time) make the graph too long."""
        alive, before, self._nested = self.recorder.alive, self._nested, 0
        start = len(alive)
        result = original(module, *args, **kwargs)
        total = len(alive) - start
        self._longest = max(self._longest, (total - self._nested, module), key=lambda entry: entry[0])
        self._nested = before + total
        own, longest = self._longest
        if len(alive) > self.policy.max_nodes and own > LOOP:
            raise UnrolledError(
                f"the graph passes {self.policy.max_nodes} nodes, and one call of {type(longest).__name__} makes {own}",
                type(longest),
                where=self.recorder.where(),
            )
        return result

    def _name(self, module: nn.Module) -> str:
        """A name for a module outside the model's tree (the loss, or made in forward); as a leaf it is a constant."""
        path = f"_module_{len(self.paths)}_{type(module).__name__}"
        constants, scope = self.recorder.attributes.constants, self.recorder.scope
        around = scope[-1][0] if scope else ""
        self.outside[module] = constants[around] if around in constants else self.root.get_submodule(around)
        self.paths[module] = path
        self.types[path] = type(module)
        constants[path] = module
        return path


def _has_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an argument that is no tensor holds some: a module, an object, or a function's captured variables."""
    if isinstance(value, nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    if isinstance(value, Tensor):
        return False
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        inside = [value.__self__]
    elif isinstance(value, FunctionType):
        inside = [value_inside for _, value_inside in Enclosed(value).items()]
    else:
        inside = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
    leaves = pytree.tree_leaves(inside) if depth else []
    return any(isinstance(value_inside, Tensor) or _has_tensors(value_inside, depth - 1) for value_inside in leaves)
