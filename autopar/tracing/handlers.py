"""Torch functions that need more than recording: questions about sizes, devices and data, and properties."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import UntraceableError
from autopar.graph import VAL
from autopar.ops.norms import NORMS
from autopar.tracing.contents.asking import ask
from autopar.tracing.contents.data_free import DATA_FREE, STANDS_FOR
from autopar.tracing.contents.masked import INDEXING, indexed
from autopar.tracing.contents.unknown import UnknownNumber
from autopar.tracing.sizes import TracedInt, traced
from autopar.tracing.targets import DATA_QUESTIONS, getter, methods
from autopar.tracing.torch_functions import gradients, histories
from autopar.tracing.torch_functions.batch_norms import with_wide_weights
from autopar.tracing.torch_functions.covariance import COVARIANCES, covariances
from autopar.tracing.torch_functions.legacy_new import new
from autopar.tracing.torch_functions.looked_into import LOOKED_INTO, look_into
from autopar.tracing.torch_functions.strided import as_strided
from autopar.tracing.torch_functions.type_names import type_of
from autopar.tracing.values import value_of

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor


def _shape(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    shape = tensor.shape
    node = recorder.nodes.get(id(tensor))
    if node is None or node.op == "get_attr" or not recorder.trace_sizes:
        return shape  # a parameter's size is as constant as the parameter
    numbers = []
    for dim, number in enumerate(shape):
        if type(number) is not int:  # a symbol
            return shape
        numbers.append(TracedInt(number, ("size", node, dim)))
    return torch.Size(numbers)


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


def _as(method: Callable[..., Any], *arguments: Any) -> Any:
    """A handler that records a property as a method call."""
    return lambda recorder, func, args, kwargs: recorder.record(method, args[0], *arguments)


def _transposed(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    rank = args[0].ndim
    if rank <= 2:
        return recorder.record(Tensor.t, args[0])
    return recorder.record(Tensor.permute, args[0], *reversed(range(rank)))


def _squeezed(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Name the dims of length 1 explicitly: a rank's part of a longer dim may have length 1 too."""
    tensor, *rest = args or (kwargs["input"],)
    rank, along = tensor.ndim, rest[0] if rest else kwargs.get("dim", range(tensor.ndim))
    dims = [int(d) for d in (along if isinstance(along, (tuple, list, range)) else (along,))]
    lengths = [tensor.shape[d] for d in dims if -rank <= d < rank]
    if len(lengths) < len(dims) or any(type(n) is not int for n in lengths) or (type(along) is int and lengths == [1]):
        return recorder.record(func, *args, **kwargs)  # an error, symbols, or dims that are named already
    return recorder.record(Tensor.squeeze, tensor, tuple(d for d, n in zip(dims, lengths, strict=True) if n == 1))


def _moved(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`to`, `cpu`, `cuda`: data-free tensors change their dtype at most, never their device."""
    if func.__name__ in ("cpu", "cuda"):
        return args[0]
    options = list(args[1:])
    if options and (isinstance(options[0], str) or type(options[0]) is int):
        options[0] = torch.device(options[0])
    if options and all(isinstance(a, torch.device) for a in options) and not kwargs.keys() - {"device", "non_blocking"}:
        return args[0]
    return recorder.record(func, args[0], *options, **kwargs)


def _attention(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Fused kernels lay out their output like the query, the meta kernel does not; `contiguous` must see the former.

    GPU kernels deviate where the sequence comes before the batch: there the meta kernel's layout is kept.
    """
    query = args[0] if args else kwargs["query"]
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    learned = isinstance(mask, Tensor) and mask.requires_grad
    fused = (
        query.ndim == 4
        and (recorder.device.type != "cpu" or not (dropout or learned))
        and _swaps(query) in (_SWAPS if recorder.device.type == "cpu" else _SWAPS[:1])
    )
    return recorder.record(_attention_like_the_query if fused else func, *args, **kwargs)


_SWAPS = (((1, 2),), ((1, 2), (0, 1)))  # swaps that make a query contiguous: batch first, or sequence first


def _swapped(tensor: Tensor, swaps: Sequence[tuple[int, int]]) -> Tensor:
    for swap in swaps:
        tensor = tensor.transpose(*swap)  # unlike `permute`, it accepts symbolic sizes
    return tensor


def _swaps(query: Tensor) -> tuple[tuple[int, int], ...] | None:
    return next((swaps for swaps in _SWAPS if _swapped(query, swaps).is_contiguous()), None)


def _attention_like_the_query(*args: Any, **kwargs: Any) -> Tensor:
    result = torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    swaps = _swaps(args[0] if args else kwargs["query"]) if result.device.type == "meta" else None
    return result if swaps is None else _swapped(_swapped(result, swaps).contiguous(), swaps[::-1])


def _grouped_product(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Run in bfloat16: the meta kernel takes no other dtype, although the CPU kernel takes any."""
    return recorder.record(_grouped_product_of_any_dtype, *args, **kwargs)


def _grouped_product_of_any_dtype(*args: Any, **kwargs: Any) -> Tensor:
    first = args[0]

    def halved(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    cast = {name: halved(value) for name, value in kwargs.items()}
    return torch._grouped_mm(*map(halved, args), **cast).to(first.dtype)


def _requires_grad(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    func(*args)
    node = recorder.nodes.get(id(args[0]))
    if node is not None:
        node.meta[VAL] = value_of(args[0])


_EMBEDDING_ARGUMENTS = {
    function: tuple(inspect.signature(function).parameters)
    for function in (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
}


def _embedding(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse `max_norm`, which writes into the weight (no plan does that to shards), and sparse gradients."""
    arguments = {**dict(zip(_EMBEDDING_ARGUMENTS[func], args, strict=False)), **kwargs}
    if arguments.get("sparse") and arguments["weight"].requires_grad and torch.is_grad_enabled():
        raise UntraceableError(
            f"{func.__name__} with sparse=True has sparse gradients, and parameters of a planned model are DTensors, "
            "whose gradients are dense: build it with sparse=False, and use Adam instead of SparseAdam",
            where=recorder.where(),
        )
    most = arguments.get("max_norm")
    if most is None:
        return recorder.record(func, *args, **kwargs)
    raise UntraceableError(
        f"{func.__name__} with max_norm={most} writes into its weight in forward: leave max_norm out, and after each "
        "optimizer.step(), under torch.no_grad(), scale the rows: "
        f"weight.mul_(({most} / weight.norm(dim=1, keepdim=True)).clamp(max=1))",
        where=recorder.where(),
    )


def _bincount(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """With `minlength`: ones (or weights) scatter-added into that many bins; larger values fail at run time."""
    arguments = {**dict(zip(("input", "weights", "minlength"), args, strict=False)), **kwargs}
    values, weights, bins = arguments["input"], arguments.get("weights"), arguments.get("minlength", 0)
    if recorder.known.can_tell([t for t in (values, weights) if t is not None]):
        return recorder.record(func, *args, **kwargs)
    if not bins:
        raise recorder.unknown(
            "the number of bins of bincount() depends on the largest value, which is data",
            mend="give their number, minlength=N; a value of N or more is then an error when the model runs",
        )
    if weights is None:
        added = recorder.record(torch.ones_like, values, dtype=torch.int64)
    else:  # as torch does: no gradient, and double precision unless float32
        added = recorder.record(Tensor.detach, weights)
        if weights.dtype not in (torch.float32, torch.float64):
            added = recorder.record(Tensor.to, added, torch.float64)
    index = values if values.dtype == torch.int64 else recorder.record(Tensor.to, values, torch.int64)
    return recorder.record(Tensor.scatter_add, recorder.record(Tensor.new_zeros, added, (bins,)), 0, index, added)


def _one_hot(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if isinstance(classes, UnknownNumber):
        raise recorder.unknown("the number of classes of one_hot() depends on data", mend="give a plain number")
    if args and not isinstance(classes, Tensor) and classes == -1 and not recorder.known.can_tell(args[:1]):
        raise recorder.unknown(
            "the number of classes of one_hot() depends on the largest value, which is data",
            mend="give their number, num_classes=N",
        )
    return recorder.record(func, *args, **kwargs)


def _packed(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    raise recorder.unknown(
        "the result of pack_padded_sequence() depends on the lengths, which are data",
        mend="run the recurrent layer on the padded batch, which gives the same up to each row's length (in one "
        "direction), and leave the padding out of the loss or take last outputs with gather; or let it be a leaf",
    )


HANDLERS: dict[Any, Callable[[Recorder, Any, Any, Any], Any]] = {
    getter("shape"): _shape,
    Tensor.size: _size,
    **dict.fromkeys((Tensor.numel, Tensor.nelement, torch.numel), _numel),
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
    **dict.fromkeys(methods("detach_"), histories.detached_in_place),
    Tensor.data.__set__: histories.data_assigned,  # type: ignore[attr-defined]
    **dict.fromkeys(methods("squeeze"), _squeezed),
    Tensor.new: new,
    Tensor.type: type_of,
    Tensor.to: _moved,
    Tensor.cpu: _moved,
    Tensor.cuda: _moved,
    Tensor.requires_grad.__set__: _requires_grad,  # type: ignore[attr-defined]
    torch.nn.functional.scaled_dot_product_attention: _attention,
    **DATA_FREE,
    **dict.fromkeys(LOOKED_INTO, look_into),
    **dict.fromkeys(_EMBEDDING_ARGUMENTS, _embedding),
    **dict.fromkeys(methods("bincount"), _bincount),
    **dict.fromkeys(COVARIANCES, covariances),
    **dict.fromkeys(NORMS, with_wide_weights),
    **dict.fromkeys(methods("as_strided", "as_strided_copy"), as_strided),
    torch.nn.functional.one_hot: _one_hot,
    torch._VF._pack_padded_sequence: _packed,
    **dict.fromkeys(INDEXING, indexed),
    Tensor.register_hook: gradients.hooked,
    **dict.fromkeys(DATA_QUESTIONS, ask),
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward, Tensor.backward), gradients.differentiates),
    **dict.fromkeys(methods("requires_grad_"), gradients.begins),
    torch._make_dual: gradients.dual,
}
if hasattr(torch, "_grouped_mm"):  # what torch.nn.functional.grouped_mm calls
    HANDLERS[torch._grouped_mm] = _grouped_product
_ATEN = torch.ops.aten
# How some functions appear in the graph. Substitutes that run on data-free tensors appear as the original function;
# aten operators, which are seen below vmap, as the tensor methods with the same arguments, since these have rules.
WRITTEN_AS: dict[Any, Any] = {
    _ATEN.view.default: Tensor.view,
    _ATEN._unsafe_view.default: Tensor.view,
    _ATEN.expand.default: Tensor.expand,
    _ATEN.unsqueeze.default: Tensor.unsqueeze,
    _ATEN.squeeze.dim: Tensor.squeeze,
    _ATEN.squeeze.dims: Tensor.squeeze,
    _ATEN.transpose.int: Tensor.transpose,
    _ATEN.permute.default: Tensor.permute,
    _ATEN.sum.dim_IntList: Tensor.sum,
    _ATEN.mean.dim: Tensor.mean,
    _attention_like_the_query: torch.nn.functional.scaled_dot_product_attention,
    **STANDS_FOR,
    _grouped_product_of_any_dtype: getattr(torch, "_grouped_mm", None),
}
