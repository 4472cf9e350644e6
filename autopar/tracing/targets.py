"""How each torch function is treated (recorded, or a question about a tensor or its data), and its name in the graph.

The recorder sees functions as Python has them: `torch.nn.functional.linear`, `Tensor.view`, the getter behind `x.T`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._device

Tensor = torch.Tensor


class Call(NamedTuple):
    """How a call is written in the graph: fx op, target, node name; `swapped`: its two operands are exchanged."""

    op: str
    target: Any
    name: str | None = None
    swapped: bool = False


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "__floordiv__": operator.floordiv, "remainder": operator.mod, "pow": operator.pow,
    "__pow__": operator.pow, "matmul": operator.matmul,
    "neg": operator.neg, "abs": operator.abs, "__invert__": operator.invert,
    "__eq__": operator.eq, "eq": operator.eq, "__ne__": operator.ne, "ne": operator.ne,
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
    "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor, "bitwise_and": operator.and_,
    "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "__lshift__": operator.lshift, "__rshift__": operator.rshift,
    "__getitem__": operator.getitem, "__setitem__": operator.setitem,
}  # fmt: skip
_REFLECTED = {
    "__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv,
    "__rpow__": operator.pow, "__rmod__": operator.mod, "__rfloordiv__": operator.floordiv,
    "__rmatmul__": operator.matmul, "__rlshift__": operator.lshift, "__rrshift__": operator.rshift,
}  # fmt: skip
_ARITY = {"neg": 1, "abs": 1, "__invert__": 1, "__setitem__": 3}

_OPERATOR_OF = {
    getattr(Tensor, n): (Call("call_function", f, f.__name__.strip("_")), _ARITY.get(n, 2))
    for n, f in _OPERATORS.items()
}
_REFLECTED_OF = {
    getattr(Tensor, n): Call("call_function", f, f.__name__, swapped=True)
    for n, f in _REFLECTED.items()
    if hasattr(Tensor, n)
}
_written: dict[Any, Call] = {}


def written_as(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """How a call of `func` is written in the graph."""
    if not kwargs:
        operator_call = _OPERATOR_OF.get(func)
        if operator_call is not None and len(args) == operator_call[1]:
            return operator_call[0]
        reflected = _REFLECTED_OF.get(func)
        if reflected is not None and len(args) == 2:
            return reflected
    call = _written.get(func)
    if call is None:
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__objclass__", None)
        method = owner is torch._C.TensorBase or (name and getattr(Tensor, name, None) is func)
        shown = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", name).strip("_").lower() or None
        call = _written[func] = Call("call_method", name, shown) if method else Call("call_function", func, shown)
    return call


def writes_its_first(func: Callable[..., Any]) -> bool:
    """Whether a function, by its name, writes into its first argument only."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def written_by_schema(func: Callable[..., Any], args: tuple[Any, ...]) -> set[int]:
    """Ids of the tensors that an operator overload writes, by its schema; empty for other functions."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return set()
    declared = zip(args, func._schema.arguments, strict=False)
    return {
        id(value) for value, argument in declared if argument.alias_info is not None and argument.alias_info.is_write
    }


def getter(name: str) -> Any:
    """The function that the recorder sees when `x.name` is read."""
    return getattr(Tensor, name).__get__


def methods(*names: str) -> set[Any]:
    """The tensor methods and torch functions with these names that this version of torch has."""
    functions = {getattr(owner, n) for n in names for owner in (Tensor, torch) if hasattr(owner, n)}
    return {f for f in functions if callable(f)}


# Questions about a tensor's memory layout.
OF_MEMORY = methods("is_contiguous", "stride", "storage_offset", "dim_order")

# Questions about a tensor whose answer does not depend on data, asked of the data-free tensor itself.
QUESTIONS = methods(
    "dim", "ndimension", "is_floating_point", "is_complex", "is_signed",
    "element_size", "is_tensor", "is_inference", "__hash__", "__repr__", "is_shared", "is_pinned", "retain_grad",
    "is_conj", "is_neg", "get_default_dtype", "is_same_size", "__format__", "_is_view", "has_names", "is_distributed",
    "data_ptr", "untyped_storage", "is_set_to", "is_grad_enabled", "result_type", "can_cast",
    "promote_types", "numel_",
) | {
    getter(n)
    for n in ("dtype", "ndim", "requires_grad", "is_leaf", "layout", "grad_fn", "output_nr", "_version", "name",
              "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes",
              "_backward_hooks", "_base", "grad", "is_mps", "is_xla", "is_vulkan", "is_ipu", "is_maia",
              "is_xpu", "is_mtia", "names", "retains_grad")
    if hasattr(Tensor, n)
} | {torch._C._set_grad_enabled} | OF_MEMORY  # fmt: skip

# Questions about data.
DATA_QUESTIONS = methods(
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
    "is_nonzero", "equal", "allclose", "__contains__",
)  # fmt: skip

# Functions whose values do not follow from their arguments: random, or uninitialised memory.
RANDOM = methods(
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_",
    "poisson", "dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_alpha_dropout",
    "native_dropout", "rrelu", "rrelu_", "binomial", "empty", "empty_like", "new_empty", "empty_strided",
    "new_empty_strided", "empty_permuted", "resize_", "_standard_gamma", "_sample_dirichlet",
) | {
    getattr(torch.nn.functional, n)
    for n in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu",
              "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d")
}  # fmt: skip

# Functions that make a tensor from no tensor and take a device: torch's own list for `torch.device` contexts.
FACTORIES = set(torch.utils._device._device_constructors())
