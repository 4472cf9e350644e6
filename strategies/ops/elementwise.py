"""Elementwise ops with broadcasting: one rule for long lists of names."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, argument, input_shape, is_zero, letters, tensors

EACH = "[...]* -> ..."


def addition(node: fx.Node) -> str:
    """A sum of two tensors passes partial values; a sum with a number passes only partial gradients."""
    return f"{EACH} | {'linear' if len(tensors(node)) == 2 else 'affine'}"


def product(node: fx.Node) -> str:
    """Linear in each operand while the other is fixed."""
    return f"{EACH} | {'linear:0 linear:1' if len(tensors(node)) == 2 else 'linear'}"


def quotient(node: fx.Node) -> str:
    """Linear in the dividend, unless the result is rounded."""
    if argument(node, "rounding_mode", 3) is not None or not isinstance(node.args[0], fx.Node):
        return EACH
    return f"{EACH} | linear:0"


def prelu(node: fx.Node) -> str:
    """`prelu(input, weight)`: one slope for all elements, or one for each channel, the second dim."""
    names, slopes = letters(len(input_shape(node))), input_shape(node, 1)
    slope = ["1" if n == 1 else names[1] for n in slopes]
    return f"{' '.join(names)}, {' '.join(slope)} -> {' '.join(names)}"


def where(node: fx.Node) -> str:
    """Jointly linear in the two choices, or in one of them if the other is zero."""
    if len(tensors(node)) == 3:
        return f"{EACH} | linear:1+2"
    return f"{EACH} | linear:1" if 0 in node.args[1:] else EACH


def masked_fill(node: fx.Node) -> str:
    """Linear if the masked elements become zero."""
    return f"{EACH} | linear:0" if is_zero(argument(node, "value", 2)) else EACH


def dropout(node: fx.Node) -> str:
    """In training the mask is drawn by global index, so that it is the same for every sharding."""
    training = argument(node, "training", 2, True)
    random = training and argument(node, "p", 1, 0.5) > 0
    return "... -> ... | linear @dropout always" if random else "... -> ... | linear"


def type_as(node: fx.Node) -> str:
    """A cast: of the second tensor, if there is one, only the dtype is used."""
    other = " ".join("_" * tensors(node)[1].dim()) if len(tensors(node)) == 2 else None
    return "... -> ... | linear" if other is None else f"..., {other} -> ... | linear:0"


def glu(node: fx.Node) -> str:
    """One half of a dim gates the other, so the index within a half is what can be split."""
    names = letters(len(input_shape(node)))
    dim = argument(node, "dim", 1, -1) % len(names)
    before = " ".join(f"(half=2! {n})" if i == dim else n for i, n in enumerate(names))
    return f"{before} -> {' '.join(names)}"


def one_hot(node: fx.Node) -> str | None:
    """Adds a last dim, whose length must be given: otherwise it would depend on data."""
    return "... -> ... _" if argument(node, "num_classes", 1, -1) > 0 else None


def masked_scatter(node: fx.Node) -> str:
    """`masked_scatter(input, mask, source)`: mask and source stay whole, since where an element of the source goes
    depends on the whole mask."""
    _, mask, source = tensors(node)
    return f"..., {'_ ' * mask.dim()}, {'_ ' * source.dim()} -> ... | linear:0+2 @masked_scatter"


_UNARY = """relu gelu silu mish sigmoid tanh hardtanh hardswish hardsigmoid relu6 elu selu celu leaky_relu softplus
 softsign logsigmoid log_sigmoid threshold exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square abs
 absolute angle sign sgn sin cos tan
 asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv floor ceil round trunc frac logit isnan isinf isfinite
 isneginf isposinf logical_not bitwise_not invert not_ nan_to_num clamp clip clamp_min clamp_max lgamma digamma
 zeros_like ones_like full_like empty_like fill signbit softshrink hardshrink tanhshrink"""
_BINARY = """pow rpow float_power maximum minimum fmax fmin atan2 remainder rmod mod fmod floordiv floor_divide
 rfloordiv eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor and or xor rand ror
 rxor lshift rshift hypot xlogy logaddexp isclose"""
_LINEAR = """neg negative positive pos contiguous clone float double half bfloat16 detach alias conj real imag
 requires_grad identity cpu cuda deg2rad rad2deg"""

RULES: dict[str, str | Writer] = {
    _UNARY: EACH,
    _BINARY: EACH,
    _LINEAR: "... -> ... | linear",
    "add sub subtract radd rsub": addition,
    "mul multiply rmul": product,
    "div divide true_divide truediv": quotient,
    "prelu": prelu,
    "to type type_as int long bool": type_as,
    "where": where,
    "lerp addcdiv": f"{EACH} | linear:0+1",  # of lerp start and end, of addcdiv the summand and the dividend
    "addcmul": f"{EACH} | linear:0+1 linear:0+2",
    "masked_fill": masked_fill,
    "dropout dropout1d dropout2d dropout3d": dropout,
    "glu": glu,
    "one_hot": one_hot,
    "complex": f"{EACH} | linear",
    "polar": EACH,
    "view_as_complex": "... _ -> ... | linear",
    "view_as_real": "... -> ... _ | linear",
    "masked_scatter": masked_scatter,
}

OPERATORS: dict[str, str | Writer] = {
    "add sub rsub": addition,
    "mul": product,
    "div": quotient,
    "to_copy": type_as,
    "where": where,
    "masked_fill": masked_fill,
}
