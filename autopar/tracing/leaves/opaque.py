"""The outputs of a leaf that cannot run on data-free tensors.

These ways are tried in order. (1) If the module is small, a copy of it runs with random inputs (integer inputs are the
user's examples). (2) It runs data-free; outputs of submodules that cannot are found by these ways, too. (3) It runs
data-free, with guesses for the data that it asks for. (4) Submodules' outputs, or its own, are assumed to look like
their first tensor input, with a warning. Only shapes, dtypes and structure are used. A function leaf has all ways but
(1) and the assumption about its own outputs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.graph import EXAMPLE
from autopar.ops.flops import TotalFlops
from autopar.python.one_process import ExchangeError
from autopar.tracing.errors import DrawError
from autopar.tracing.leaves.effects import EffectError, Effects, content, same_content
from autopar.tracing.leaves.guesses import Guesses
from autopar.tracing.leaves.written_around import shares
from autopar.tracing.model_state.attributes import Attributes
from autopar.tracing.patching import attributes_set
from autopar.tracing.values import has_tensor, result_like
from autopar.user_warnings import warn

Tensor = torch.Tensor
REFUSED = ExchangeError, EffectError, DrawError  # errors about what a call must not do even as one op
SMALL = 1 << 22  # elements of inputs, parameters and buffers, up to which a module runs on random data
_STATE = "_parameters", "_buffers", "_modules"  # rebound buffers are written; the rest is no tensor of the graph


class NumbersOfData(Exception):
    """The module returns numbers that differ between runs; no graph can hold these."""


def outputs_of(
    module: nn.Module,
    path: str,
    attributes: Attributes,
    args: Any,
    kwargs: Any,
    *,
    nodes: Mapping[int, fx.Node],
    inside: bool = False,
    guessing: bool = True,
    guessed: dict[nn.Module, str] | None = None,
    sharing: set[nn.Module] | None = None,
) -> tuple[Any, int]:
    """Data-free outputs of a module for data-free inputs, and the FLOPs of the run that gave them.

    If it returns numbers, all ways but the last are tried, and NumbersOfData is raised if the numbers differ, unless
    the module is `inside` another opaque one, where no graph holds them. `guessing`: whether the last way may be used.
    `guessed` collects modules that are assumed to look like their input, `sharing` those whose outputs share memory
    (`shares`). `nodes`: nodes by id of their tensors; inputs of the model have the user's examples.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    elements = sum(t.numel() for t in (*tensors, *module.parameters(), *module.buffers()))
    real: list[Callable[[], Any]] = []
    if elements <= SMALL:
        examples = {id(t): example for t in tensors if (example := _example(t, nodes)) is not None}
        free = any(not _is_drawn(t) and id(t) not in examples for t in tensors)
        ways = itertools.product((torch.randn, torch.rand), (0, 1) if free else (0,))
        noted = set() if sharing is None else sharing
        run = partial(_run_for_real, module, attributes, args, kwargs, examples, inside=inside, sharing=noted)
        real = [partial(run, *way) for way in ways]
    try:
        return _agreed(partial(module.forward, *args, **kwargs), path, attributes, nodes, real, inside, guessing)
    except (NumbersOfData, *REFUSED):
        raise
    except Exception as error:  # an opaque module may raise anything
        if not tensors or not guessing:
            raise
        last = error
    fault = f"{type(last).__name__}: {last}"
    if guessed is not None:
        guessed[module] = f"{path} fails without its data ({fault})"
    warn(f"{path} cannot run without its data ({fault}); its output is assumed to have the shape of its first input")
    like = tensors[0]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *module.parameters()))
    return torch.empty_like(like, requires_grad=trains and (like.is_floating_point() or like.is_complex())), 0


def outputs_of_function(
    run: Callable[[], Any], path: str, attributes: Attributes, nodes: Mapping[int, fx.Node]
) -> tuple[Any, int]:
    """Data-free outputs and FLOPs of a call; raises NumbersOfData as `outputs_of`, or the last try's error.

    `attributes`: those of the model whose submodules the call may run.
    """
    return _agreed(run, path, attributes, nodes, [], inside=False, guessing=True)


def _agreed(
    run: Callable[[], Any],
    path: str,
    attributes: Attributes,
    nodes: Mapping[int, fx.Node],
    real: Sequence[Callable[[], Any]],
    inside: bool,
    guessing: bool,
) -> tuple[Any, int]:
    """Outputs and FLOPs of the first attempt that succeeds, `real` ones first; numbers in them must agree in all.

    Numbers that follow from an assumed output are not accepted: the sum of the losses that a criterion returns in a
    dict, for example, was 0 when a tensor stood for that dict.
    """
    results: list[tuple[Any, int]] = []
    data_free: list[Callable[[], Any]] = [partial(_by_parts, run, path, attributes, nodes)]
    data_free += [partial(_guess, run, True), partial(_guess, run, False)]
    for attempt in (*real, *data_free):
        try:
            with TotalFlops() as counter:
                outputs = attempt()
        except REFUSED:
            raise
        except Exception as error:  # opaque code may raise anything
            last = error
            continue
        results.append((outputs, counter.get_total_flops()))
        if inside or not _numbers(outputs):
            break
        if _numbers(outputs) != _numbers(results[0][0]):
            raise NumbersOfData
    if results:
        return results[0]
    if not guessing:
        raise last
    with TotalFlops() as counter:
        outputs = _by_parts(run, path, attributes, nodes, guessing=True)
    if not inside and _numbers(outputs):
        raise last
    return outputs, counter.get_total_flops()


def _numbers(outputs: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, (int, float))]


def _is_drawn(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _example(tensor: Tensor, nodes: Mapping[int, fx.Node]) -> Tensor | None:
    """The user's example of an integer tensor, if that is an input of the model and has data."""
    node = nodes.get(id(tensor))
    example: Tensor | None = None if node is None or _is_drawn(tensor) else node.meta.get(EXAMPLE)
    return None if example is None or example.is_meta else example


def _run_for_real(
    module: nn.Module,
    attributes: Attributes,
    args: Any,
    kwargs: Any,
    examples: Mapping[int, Tensor],
    drawn: Callable[..., Tensor],
    integer: int,
    *,
    inside: bool,
    sharing: set[nn.Module],
) -> Any:
    """Run a copy of the module on data.

    Float inputs come from `drawn`: both signs, or none negative, as boxes and probabilities must be. Integer inputs are
    the examples, or filled with `integer` without one: what a module does with lengths and indices depends on their
    values.
    """

    def filled(tensor: Tensor) -> Tensor:
        if _is_drawn(tensor):
            values = drawn(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)
            return values.clone()  # no leaf, since the call may write into it
        example = examples.get(id(tensor))
        return torch.full(tensor.shape, integer, dtype=tensor.dtype) if example is None else example.cpu().clone()

    with torch.random.fork_rng(devices=[]):
        twin = copy.deepcopy(module)
        for mine, theirs in zip(module.modules(), twin.modules(), strict=True):
            for own, others in ((mine._parameters, theirs._parameters), (mine._buffers, theirs._buffers)):
                for name, tensor in own.items():
                    if tensor is not None:
                        real = attributes.real_copy(tensor)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        others[name] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real  # type: ignore[assignment]
        args, kwargs = pytree.tree_map_only(Tensor, filled, (args, kwargs))
        effects, before = Effects(args, kwargs, twin.parameters()), [_noted(theirs) for theirs in twin.modules()]
        result = twin(*args, **kwargs)
        effects.check(inside=inside)
        if shares(result, args, kwargs, list(twin.parameters()), list(twin.buffers())):
            sharing.add(module)
        for mine, theirs, noted in zip(module.modules(), twin.modules(), before, strict=False):
            _set_alike(mine, vars(theirs), noted)
    return pytree.tree_map_only(Tensor, result_like, result)


def _noted(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes and their contents, for comparison with those after a run."""
    return {name: (value, content(value)) for name, value in vars(module).items()}


def _set_alike(module: nn.Module, attributes: Mapping[str, Any], before: Mapping[str, tuple[Any, Any]]) -> None:
    """Set data-free versions of attributes that a run set on a copy; reading one, such as an auxiliary loss, is then an
    error that says that it is not in the graph."""
    for name, value in attributes.items():
        old, content_before = before.get(name, (None, ()))
        if (
            name not in _STATE
            and has_tensor(value)
            and not (value is old and same_content(content(value), content_before))
        ):
            vars(module)[name] = pytree.tree_map_only(Tensor, result_like, value)


def _by_parts(
    run: Callable[[], Any], path: str, attributes: Attributes, nodes: Mapping[int, fx.Node], guessing: bool = False
) -> Any:
    """The call itself, run data-free; outputs of submodules that cannot run so are found for each (`outputs_of`)."""
    original = nn.Module.__call__

    def call(inner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(inner, *args, **kwargs)
        except REFUSED:
            raise
        except Exception:  # the submodule is opaque, too
            with attributes_set(nn.Module, __call__=original):  # a copy that fails on data must not be tried on data
                name = f"{path}.{type(inner).__name__}"
                return outputs_of(inner, name, attributes, args, kwargs, nodes=nodes, inside=True, guessing=guessing)[0]

    with attributes_set(nn.Module, __call__=call):
        result = run()
    return pytree.tree_map_only(Tensor, result_like, result)


def _guess(run: Callable[[], Any], answer: bool) -> Any:
    with Guesses(answer):
        result = run()
    return pytree.tree_map_only(Tensor, result_like, result)
