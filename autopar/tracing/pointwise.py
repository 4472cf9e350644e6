"""Which torch functions are pointwise, by name; operators, methods and functions share a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_ALSO = {  # pointwise, although torch does not tag them so
    "to", "type", "float", "double", "half", "bfloat16", "long", "int", "bool", "contiguous", "clone", "detach", "cpu",
    "cuda", "type_as", "relu6", "softsign", "tanhshrink", "logsigmoid", "dropout", "where", "nan_to_num", "isclose",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "fill",
}  # fmt: skip
_OF_OPERATORS = {
    "truediv": "div", "rtruediv": "div", "rdiv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "rmod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
    "radd": "add", "rsub": "sub", "rmul": "mul", "rpow": "pow", "pos": "positive",
}  # fmt: skip


def plain_name(func: Callable[..., Any]) -> str:
    """The name of the corresponding aten operator: `div` for `Tensor.__rtruediv__`, `norm` for `torch.linalg.norm`."""
    name = str(getattr(func, "__name__", "")).strip("_").removeprefix("linalg_")
    return _OF_OPERATORS.get(name, name)


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether an operator is pointwise, for any numbers and broadcastable tensors as further operands."""
    if name in _ALSO:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
