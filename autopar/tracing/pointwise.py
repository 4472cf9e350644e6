"""Which torch functions treat each element by itself, by their names: operators, methods and functions alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_ALSO = {  # those that torch does not mark so
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
    """A function's name as that of torch's operator: `div` of `Tensor.__rtruediv__`, `norm` of `torch.linalg.norm`."""
    name = str(getattr(func, "__name__", "")).strip("_").removeprefix("linalg_")
    return _OF_OPERATORS.get(name, name)


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether an operator treats each element by itself, whatever numbers and tensors that broadcast it is given."""
    if name in _ALSO:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
