"""Fourier transforms along some dims, or in windows along the last one; the transformed dims stay whole."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import (
    Writer,
    argument,
    by_name,
    dims_of,
    input_shape,
    letters,
    op_name,
    output_shapes,
)


def transform(node: fx.Node) -> str:
    """`fft(input, n, dim)`, `fft2(input, s, dim)`, `fftn(input, s, dim)`, their inverses and real forms."""
    rank, name = len(input_shape(node)), op_name(node).rpartition("_")[2]
    default = (-2, -1) if name.endswith("fft2") else -1 if name.endswith("fft") else None
    dims = dims_of(argument(node, "dim", 2, default), rank)
    side = " ".join("_" if i in dims else n for i, n in enumerate(letters(rank)))
    return f"{side} -> {side} | linear"


def windowed(node: fx.Node) -> str | None:
    """`stft(input, n_fft, hop_length, win_length, window, ...)` and `istft`: only the batch dim can be split."""
    shape, (output_shape, *_) = input_shape(node), output_shapes(node)
    rows = len(shape) > (2 if op_name(node) == "istft" else 1)
    input_text, output_text = (" ".join(["b"] * rows + ["_"] * (len(side) - rows)) for side in (shape, output_shape))
    signature = "input n_fft hop_length win_length window"
    return by_name(signature, f"{output_text} | linear:0", input=input_text, window="_")(node)


_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
RULES: dict[str, str | Writer] = {
    " ".join(f"fft_{kind}{dims}" for kind in _KINDS for dims in ("", "2", "n")): transform,
    "fft_fftshift fft_ifftshift": "...! -> ...!",
    "stft istft": windowed,
}
