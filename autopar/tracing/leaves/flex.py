"""`flex_attention`: one node, whose inputs include the tensors that its score and mask functions capture.

These functions and the block mask are Python objects that hold tensors of the trace. The tensors become arguments of
the node; when the graph runs, the objects are rebuilt around the tensors that the node is given.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.python.replaced import original, replaced
from autopar.tracing.errors import TraceError
from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
_MODULE = "torch.nn.attention.flex_attention"


class FlexAttention:
    """The target of a node: `call(q, k, v, *lifted)`; `emptied` are the functions and the mask without their
    tensors."""

    __name__ = __qualname__ = "flex_attention"

    def __init__(self, run: Callable[..., Any], emptied: Any, options: dict[str, Any]) -> None:
        self.run, self.emptied, self.options = run, emptied, options

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *lifted: Tensor) -> Any:
        if query.device.type == "meta":
            return self._without_data(query, key, value, lifted)
        score_mod, block_mask = _filled(self.emptied, iter(lifted))
        run = _compiled() if query.device.type == "cuda" else self.run  # uncompiled, it would materialise all scores
        return run(query, key, value, score_mod=score_mod, block_mask=block_mask, **self.options)

    def _without_data(self, query: Tensor, key: Tensor, value: Tensor, lifted: tuple[Tensor, ...]) -> Tensor:
        """Shapes, FLOPs and saved tensors of attention without a mask; trained lifted tensors get a gradient."""
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=self.options.get("scale"), enable_gqa=self.options.get("enable_gqa", False)
        )
        for tensor in lifted:
            if tensor.requires_grad:
                out = out + 0 * tensor.sum()
        return out


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(sys.modules[_MODULE].flex_attention)


@contextlib.contextmanager
def flex_attention_recorded(recorder: Recorder) -> Iterator[None]:
    """While inside, `flex_attention`, compiled or not, is recorded as one node; no effect if it was never imported."""
    module = sys.modules.get(_MODULE)
    if module is None:
        yield
        return
    function = module.flex_attention
    run = original(function)

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        *positional: Any,
        **keywords: Any,
    ) -> Any:
        if not recorder.is_recording():
            return run(query, key, value, score_mod, block_mask, *positional, **keywords)
        options = {
            **dict(zip(("scale", "enable_gqa", "return_lse", "kernel_options"), positional, strict=False)),
            **keywords,
        }
        if options.get("return_lse") or options.get("return_aux") is not None:
            raise TraceError("flex_attention is traced without its log-sum-exp", where=recorder.where())
        lifted: list[Tensor] = []
        emptied = _emptied((score_mod, block_mask), lifted, recorder)
        target = FlexAttention(function, emptied, options)
        return recorder.record_call(target, target, (query, key, value, *lifted), {})

    with replaced(function, call):
        yield


class _Place:
    """The place of a removed tensor."""


class _Function:
    """A Python function, and the contents of its closure's cells and defaults, without tensors."""

    def __init__(self, function: types.FunctionType, cells: list[Any], defaults: Any) -> None:
        self.function, self.cells, self.defaults = function, cells, defaults


class _Partial:
    """A `functools.partial`: its function, arguments and keywords."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts


class _Mask:
    """A block mask, and its attributes."""

    def __init__(self, mask: Any, attributes: dict[str, Any]) -> None:
        self.mask, self.attributes = mask, attributes


def _emptied(value: Any, lifted: list[Tensor], recorder: Recorder) -> Any:
    """`value` without its tensors, which are appended to `lifted` in the order in which `_filled` takes them."""
    inner = functools.partial(_emptied, lifted=lifted, recorder=recorder)
    if isinstance(value, Tensor):
        lifted.append(value)
        return _Place()
    if isinstance(value, types.FunctionType):
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        return _Function(value, cells, inner(value.__defaults__))
    if isinstance(value, functools.partial):
        return _Partial(inner((value.func, value.args, value.keywords)))
    if type(value) in (tuple, list):
        return type(value)(inner(v) for v in value)
    if type(value) is dict:
        return {k: inner(v) for k, v in value.items()}
    if type(value).__name__ == "BlockMask":
        return _Mask(value, {k: inner(v) for k, v in vars(value).items()})
    if isinstance(value, torch.nn.Module):
        raise TraceError(
            f"a function given to flex_attention closes over a module ({type(value).__name__}), whose tensors would be "
            "hidden: let it close over the tensors that it reads",
            where=recorder.where(),
        )
    return value


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The inverse of `_emptied`, with these tensors."""
    if isinstance(value, _Place):
        return next(tensors)
    if isinstance(value, _Function):
        cells = tuple(types.CellType(_filled(cell, tensors)) for cell in value.cells)
        original_function, defaults = value.function, _filled(value.defaults, tensors)
        filled = types.FunctionType(
            original_function.__code__,
            original_function.__globals__,
            original_function.__name__,
            defaults,
            cells or None,
        )
        filled.__kwdefaults__ = original_function.__kwdefaults__
        return filled
    if isinstance(value, _Partial):
        function, args, keywords = _filled(value.parts, tensors)
        return functools.partial(function, *args, **keywords)
    if type(value) in (tuple, list):
        return type(value)([_filled(v, tensors) for v in value])
    if type(value) is dict:
        return {k: _filled(v, tensors) for k, v in value.items()}
    if isinstance(value, _Mask):
        filled = copy.copy(value.mask)
        vars(filled).update({k: _filled(v, tensors) for k, v in value.attributes.items()})
        return filled
    return value
